"""Runs units: an engine answers each and commits it. Every executor, near or far, uses the same runner."""

import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager

import pyarrow as pa

from grinf.errors import RowError
from grinf.jobs.recall.engines import Engines, is_out_of_memory
from grinf.jobs.recall.inputs import UnitReader
from grinf.jobs.recall.output import Parts
from grinf.jobs.recall.plan import Plan
from grinf.jobs.recall.signals import Signalled
from grinf.jobs.recall.space import explaining_full_disk
from grinf.jobs.recall.units import Unit
from grinf.jobs.recall.watch import Watch
from grinf.jobs.recall.worker import Answered, OnProgress, UnitWorker, describe_search

Commit = Callable[[], None]
"""Puts an answered unit on the disk; may run in a thread, one at a time."""


@contextmanager
def open_runner(
    plan: Plan, parts: Parts, total: int, on_progress: OnProgress
) -> Generator[Callable[..., Commit]]:
    """Load an engine and yield a function that reads and answers one unit, and returns its commit.

    Beside the unit it takes a reason to give it up: then its rows are errors that say so.

    Args:
        plan: The job.
        parts: Where the units are committed.
        total: Queries to answer, for the progress.
        on_progress: See `run_recall`.
    """
    with closing(Engines(plan, parts)) as engines:
        engines.load()
        worker = UnitWorker(plan, engines.run, total, on_progress)
        reader = UnitReader(plan.queries, plan.columns.read)

        def attempt(unit: Unit, queries: pa.Table, refusal: RowError | None) -> Callable[[], Answered] | None:
            """Answer a unit; None: memory ran out, and what it held can be freed when this has returned."""
            try:
                return worker.answer(unit, queries, refusal)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                return None

        def run(unit: Unit, refusal: RowError | None = None) -> Commit:
            queries = reader.read(unit)
            while (finish := attempt(unit, queries, refusal)) is None:
                engines.lighten()
            facts, budget = describe_search(plan, engines.load()) | engines.describe(), engines.budget
            engines.unit_is_done()

            def commit() -> None:
                table, rejects, counts = finish()
                with explaining_full_disk(parts.output, plan.units):
                    parts.commit(unit, table, rejects, {**facts, "counts": counts | {"budget": budget}})

            return commit

        yield run


def run_local(plan: Plan, parts: Parts, watch: Watch, on_progress: OnProgress) -> float:
    """Answer units in this process, and commit each while the next is answered; return the seconds for it."""
    todo, running = watch.todo, list[tuple[Unit, Future[None]]]()

    def finish() -> None:
        """Wait for the commit that is running."""
        while running:
            unit, is_done = running[0]
            is_done.result()
            running.clear()
            watch.committed(unit)

    with open_runner(plan, parts, sum(unit.num_rows for unit in todo), on_progress) as run:
        started = time.perf_counter()
        with ThreadPoolExecutor(1) as writer:
            try:
                for unit in (*todo, None):
                    with watch.signals.deferring():
                        commit = run(unit) if unit else None
                        finish()
                        if unit and commit:
                            running.append((unit, writer.submit(commit)))
            except Signalled:
                finish()
                raise
        return time.perf_counter() - started
