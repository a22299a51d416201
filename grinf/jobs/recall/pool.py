"""Several devices: a process for each answers units with an engine of its own; this one hands them out.

A worker reads, answers and commits a unit by the code of the local executor, and an answer depends on its
unit alone: so the output is that of one device, whichever worker answered what.
"""

import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import wait

from grinf.config.settings import RecallSettings
from grinf.errors import DataError, EnvironmentFault, RowError
from grinf.jobs.processes import Child, ChildDied, Inbox, Send, close_all, settings_on, share_cores
from grinf.jobs.recall.executor import open_runner
from grinf.jobs.recall.output import Parts
from grinf.jobs.recall.plan import Plan, make_plan
from grinf.jobs.recall.units import Unit
from grinf.jobs.recall.watch import Watch
from grinf.jobs.recall.worker import OnProgress

DEATHS_OF_A_UNIT = 2
"""Workers that may die of a unit before its rows become errors."""

FRUITLESS = 2
"""Deaths of a device's workers, with nothing committed in between, after which it gets no new one."""

LOOK_S = 0.2
"""Seconds between two looks at whether a signal was received."""

TELL_S = 0.1
"""Seconds between two messages of a worker about its progress."""

Progress = Mapping[str, tuple[int, int | None]]
"""What is done and what there is, by stage."""


def run_pool(plan: Plan, parts: Parts, watch: Watch, on_progress: OnProgress) -> float:
    """Answer and commit units on every device of the settings.

    Args:
        plan: The job.
        parts: Where the workers commit.
        watch: Knows the units to answer, and decides whether to go on.
        on_progress: See `run_recall`.

    Returns:
        Seconds from the mean time at which a worker was ready.

    Raises:
        EnvironmentFault: No worker is left.
        GrinfError: What a worker refuses, or `watch`.
    """
    pool = _Pool(plan, parts, watch, on_progress)
    try:
        with watch.signals.deferring():
            return pool.run()
    finally:
        close_all([worker.child for worker in pool.workers])


@dataclass(slots=True, eq=False)
class _Worker:
    """The process of a device, or the one that took its place.

    Attributes:
        unit: What it answers; None: nothing.
        deaths: Of the processes of this device, since one of them committed a unit.
        ready_s: When its first process was ready; None: it is not.
        progress: What it told last. committed: what it told with its last commit.
    """

    device: str
    child: Child
    unit: Unit | None = None
    is_ready: bool = False
    deaths: int = 0
    ready_s: float | None = None
    progress: Progress = field(default_factory=dict[str, tuple[int, int | None]])
    committed: Progress = field(default_factory=dict[str, tuple[int, int | None]])


class _Pool:
    def __init__(self, plan: Plan, parts: Parts, watch: Watch, on_progress: OnProgress) -> None:
        self._settings, self._digest = plan.settings, parts.output.digest
        self._watch, self._on_progress = watch, on_progress
        self._todo, self._total = deque(watch.todo), sum(unit.num_rows for unit in watch.todo)
        self._devices = plan.settings.devices[: len(watch.todo)]
        self._deaths: Counter[int] = Counter()
        self._past: list[Progress] = []
        self.workers: list[_Worker] = []

    def run(self) -> float:
        """Start the workers, and serve them until all is committed; after a signal, until they are idle."""
        for device in self._devices:
            self.workers.append(_Worker(device, self._start(device)))
        while self._todo or any(worker.unit for worker in self.workers):
            for pipe in wait([worker.child.pipe for worker in self.workers], LOOK_S):
                worker = next(worker for worker in self.workers if worker.child.pipe is pipe)
                try:
                    self._hear(worker)
                except ChildDied as death:
                    self._replace(worker, death)
            if self._watch.signals.first is not None:
                self._todo.clear()
            self._hand_out()
            self._tell()
        ready = [worker.ready_s for worker in self.workers if worker.ready_s is not None]
        return time.perf_counter() - sum(ready) / max(1, len(ready))

    def _start(self, device: str) -> Child:
        settings = settings_on(self._settings, device)
        return Child(f"device {device}", _work, settings, self._digest, self._total, len(self._devices))

    def _hear(self, worker: _Worker) -> None:
        """Take a message: what a worker has done so far, and whether a unit, or its start, is finished."""
        worker.progress, is_free = worker.child.receive()
        if is_free and worker.unit:
            self._watch.committed(worker.unit)
            worker.unit, worker.deaths, worker.committed = None, 0, worker.progress
        elif is_free:
            worker.is_ready = True
            worker.ready_s = worker.ready_s or time.perf_counter()

    def _hand_out(self) -> None:
        for worker in self.workers:
            if worker.is_ready and worker.unit is None and self._todo:
                worker.unit = self._todo.popleft()
                try:
                    worker.child.send((worker.unit, refusal(worker.unit, self._deaths[worker.unit.index])))
                except ChildDied:
                    continue  # Its pipe has ended: the next round hears of it.

    def _replace(self, worker: _Worker, death: ChildDied) -> None:
        """Put back the unit of a dead worker, and start a new one unless that has proved fruitless.

        Raises:
            EnvironmentFault: It was the last one.
        """
        worker.child.close()
        self._watch.say(f"{death.what}; {death.why}")
        self._past.append(worker.committed)
        worker.progress = worker.committed = {}
        worker.deaths += 1
        if worker.unit is not None:
            self._deaths[worker.unit.index] += 1
            self._todo.appendleft(worker.unit)
        worker.unit = None
        is_stopping = self._watch.signals.first is not None
        if worker.is_ready and worker.deaths < FRUITLESS and not is_stopping:
            worker.is_ready, worker.child = False, self._start(worker.device)
            return
        self.workers.remove(worker)
        if not self.workers and not is_stopping:
            fix = "the same command goes on with the units that are left"
            raise EnvironmentFault("every worker died", str(death), fix)

    def _tell(self) -> None:
        """Add up the progress; each worker judges the whole by the queries that it saw, and so it counts."""
        told = [progress for progress in (*self._past, *(w.progress for w in self.workers)) if progress]
        for stage in dict.fromkeys(stage for progress in told for stage in progress):
            numbers = [(*progress[stage], progress["queries"][0]) for progress in told if stage in progress]
            done = sum(one for one, _, _ in numbers)
            weight = sum(queries for _, _, queries in numbers)
            if weight:
                total = sum((whole or 0) * queries for _, whole, queries in numbers) // weight
                self._on_progress(stage, done, max(done, total))


def refusal(unit: Unit, deaths: int) -> RowError | None:
    """Why the rows of a unit become errors after so many workers died of it; None: they do not."""
    if deaths < DEATHS_OF_A_UNIT:
        return None
    why = f"{deaths} processes died while they answered its unit of {unit.num_rows:,} rows"
    return RowError("worker_crash", "the query was given up", why)


def _work(
    inbox: Inbox, send: Send, settings: RecallSettings, digest: str, total: int, processes: int
) -> None:
    """Be a worker: start an engine, then answer what comes; see `Child`."""
    share_cores(processes)
    plan = make_plan(settings)
    if plan.output.digest != digest:
        raise DataError("an input, the model or the catalogue changed while the job started")
    progress: dict[str, tuple[int, int | None]] = {}
    told = 0.0

    def on_progress(stage: str, done: int, whole: int | None) -> None:
        nonlocal told
        progress[stage] = done, whole
        if time.monotonic() - told > TELL_S and "queries" in progress:
            told = time.monotonic()
            send((progress, False))

    with open_runner(plan, Parts(plan.output), total, on_progress) as run:
        send((progress, True))
        while True:
            run(*inbox.get())()
            send((progress, True))
