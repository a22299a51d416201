"""Units on a Ray cluster: a row of a Ray dataset is a unit, and an actor answers and commits it.

The files that a job names must be where every node sees them. Ray distributes, and gives what a dead worker
had to another one; that no unit is lost, doubled or out of order follows from the commits, as on one machine.
A worker notes beside the units what it begins, so that a unit that workers die of gets error rows in the end.
"""

import logging
import os
import pickle
import shutil
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from grinf.config.settings import RecallSettings
from grinf.errors import DataError, EnvironmentFault
from grinf.jobs.processes import portable
from grinf.jobs.recall.executor import open_runner
from grinf.jobs.recall.output import Parts
from grinf.jobs.recall.plan import Plan, make_plan
from grinf.jobs.recall.pool import refusal
from grinf.jobs.recall.watch import Watch
from grinf.jobs.recall.worker import OnProgress


def run_ray(plan: Plan, parts: Parts, watch: Watch, on_progress: OnProgress) -> float:
    """Answer and commit units by the workers of a Ray cluster: the one that is there, or one of this machine.

    There is a worker for each device of the settings, or where they name one GPU or none, for each GPU of the
    cluster. After a signal the job ends with the next unit; what other workers have begun is lost.

    Args:
        plan: The job.
        parts: Where the workers commit.
        watch: Knows the units to answer, and decides whether to go on.
        on_progress: See `run_recall`.

    Returns:
        Seconds from the mean time at which a worker was ready.

    Raises:
        EnvironmentFault: Ray fails, or has no GPU for a worker.
        GrinfError: What a worker refuses, or `watch`.
    """
    from ray.exceptions import RayError

    total = sum(unit.num_rows for unit in watch.todo)
    ready: dict[str, float] = {}
    done = 0
    shutil.rmtree(_begun(parts), ignore_errors=True)
    try:
        with _cluster(), watch.signals.deferring():
            for row in _answers(plan, watch, total):
                if row["error"]:
                    raise pickle.loads(row["error"])
                ready[row["worker"]] = row["ready_s"]
                unit = plan.units[row["unit"]]
                done += unit.num_rows
                on_progress("queries", done, total)
                watch.committed(unit)
                if watch.signals.first is not None:
                    break
    except RayError as error:
        why = str(error).strip().splitlines()[0]
        raise EnvironmentFault("Ray failed", why, "see its logs; the same command goes on") from error
    finally:
        shutil.rmtree(_begun(parts), ignore_errors=True)
    return time.time() - sum(ready.values()) / max(1, len(ready))


@contextmanager
def _cluster() -> Generator[None]:
    """Use the cluster that this process or RAY_ADDRESS knows; otherwise one of this machine, for the time."""
    import ray
    from ray.data import DataContext

    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    context, is_ours = DataContext.get_current(), not ray.is_initialized()
    before, context.enable_progress_bars = context.enable_progress_bars, False
    with redirect_stdout(sys.stderr):  # Where Ray tells of dead workers; stdout is for the result.
        if is_ours:
            ray.init(log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
        try:
            yield
        finally:
            context.enable_progress_bars = before
            if is_ours:
                ray.shutdown()


def _answers(plan: Plan, watch: Watch, total: int) -> Iterator[dict[str, Any]]:
    """Have the units answered; give what the workers say of each, in the order of completion."""
    import ray

    device = str(plan.output.manifest["device"])
    settings = plan.settings.model_copy(update={"device": device})
    size = min(len(watch.todo), _num_workers(plan.settings, device))
    units = [{"unit": unit.index} for unit in watch.todo]
    answered = ray.data.from_items(units, override_num_blocks=len(units)).map_batches(
        UnitRunner,
        fn_constructor_args=(settings, plan.output.digest, total, str(Path.cwd())),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=size, max_tasks_in_flight_per_actor=1),
        num_cpus=1,
        num_gpus=int(device == "cuda"),
    )
    yield from answered.iter_rows()


def _num_workers(settings: RecallSettings, device: str) -> int:
    import ray

    if len(settings.devices) > 1 or device == "cpu":
        return len(settings.devices)
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if not gpus:
        raise EnvironmentFault("the Ray cluster has no GPU", fix="`ray status` shows it; or use --device cpu")
    return gpus


def _begun(parts: Parts) -> Path:
    """Folder of a file for each unit that was begun and not committed: a byte for each time."""
    return parts.output.partial / "_grinf" / "begun"


class UnitRunner:
    """A worker: what Ray Data calls with one unit at a time. It starts its engine with the first one.

    Args:
        settings: Of the job, with the device of a worker.
        digest: Of the job's manifest.
        total: Queries to answer.
        folder: Working folder of the job.
    """

    def __init__(self, settings: RecallSettings, digest: str, total: int, folder: str) -> None:
        self._settings, self._digest, self._total, self._folder = settings, digest, total, folder
        self._stack = ExitStack()
        self._ready_s = 0.0

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        """Answer and commit the unit whose index the batch holds."""
        index, error = int(batch["unit"][0]), b""
        try:
            self._run(index)
        except BaseException as failure:  # Whatever it is, the job tells it to the user.
            error = pickle.dumps(portable(failure))
        worker = f"{os.uname().nodename} {os.getpid()}"
        return {"unit": [index], "error": [error], "worker": [worker], "ready_s": [self._ready_s]}

    def _run(self, index: int) -> None:
        if not self._ready_s:
            self._open()
        unit = self._plan.units[index]
        begun = _begun(self._parts) / unit.name
        begun.parent.mkdir(exist_ok=True)
        with begun.open("ab") as file:
            deaths = file.tell()
            file.write(b".")
        self._runner(unit, refusal(unit, deaths))()
        begun.unlink()

    def _open(self) -> None:
        os.chdir(self._folder)
        self._plan = make_plan(self._settings)
        self._parts = Parts(self._plan.output)
        if self._plan.output.digest != self._digest:
            raise DataError("an input, the model or the catalogue changed while the job started")
        runner = open_runner(self._plan, self._parts, self._total, lambda *progress: None)
        self._runner = self._stack.enter_context(runner)
        self._ready_s = time.time()
