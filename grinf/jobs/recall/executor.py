"""Runs units: an engine answers each and commits it. Every executor, near or far, uses the same runner."""

import time
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager

import pyarrow as pa

from grinf.errors import RowError
from grinf.jobs.recall.engines import Engines, is_out_of_memory
from grinf.jobs.recall.inputs import UnitReader
from grinf.jobs.recall.output import Parts
from grinf.jobs.recall.plan import Plan
from grinf.jobs.recall.space import explaining_full_disk
from grinf.jobs.recall.units import Unit
from grinf.jobs.recall.watch import Watch
from grinf.jobs.recall.worker import Answered, OnProgress, UnitWorker, describe_search


@contextmanager
def open_runner(
    plan: Plan, parts: Parts, total: int, on_progress: OnProgress
) -> Generator[Callable[..., None]]:
    """Load an engine and yield a function that reads, answers and commits one unit.

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

        def attempt(unit: Unit, queries: pa.Table, refusal: RowError | None) -> Answered | None:
            """Answer a unit; None: memory ran out, and what it held can be freed when this has returned."""
            try:
                return worker.answer(unit, queries, refusal)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                return None

        def run(unit: Unit, refusal: RowError | None = None) -> None:
            queries = reader.read(unit)
            while (answered := attempt(unit, queries, refusal)) is None:
                engines.lighten()
            table, rejects, counts = answered
            facts = describe_search(plan, engines.load()) | engines.describe()
            with explaining_full_disk(parts.output, plan.units):
                parts.commit(unit, table, rejects, {**facts, "counts": counts | {"budget": engines.budget}})
            engines.unit_is_done()

        yield run


def run_local(plan: Plan, parts: Parts, watch: Watch, on_progress: OnProgress) -> float:
    """Answer and commit units in this process; return the seconds without the start."""
    todo = watch.todo
    with open_runner(plan, parts, sum(unit.num_rows for unit in todo), on_progress) as run:
        started = time.perf_counter()
        for unit in todo:
            with watch.signals.deferring():
                run(unit)
                watch.committed(unit)
        return time.perf_counter() - started
