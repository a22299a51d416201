"""Runs units: an engine answers each and commits it. Every executor, near or far, uses the same runner."""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from grinf.jobs.recall.inputs import UnitReader
from grinf.jobs.recall.output import Parts
from grinf.jobs.recall.plan import Plan
from grinf.jobs.recall.units import Unit
from grinf.jobs.recall.worker import OnProgress, UnitWorker, describe_search
from grinf.runtime.engine import Engine


@contextmanager
def open_runner(
    plan: Plan, parts: Parts, total: int, on_progress: OnProgress
) -> Generator[Callable[[Unit], None]]:
    """Load an engine and yield a function that reads, answers and commits one unit.

    Args:
        plan: The job.
        parts: Where the units are committed.
        total: Queries to answer, for the progress.
        on_progress: See `run_recall`.
    """
    with Engine.load(plan.options, plan.trie) as engine:
        worker = UnitWorker(plan, engine, total, on_progress)
        reader = UnitReader(plan.queries, plan.columns.read)
        search = describe_search(plan, engine)

        def run(unit: Unit) -> None:
            table, counts = worker.answer(unit, reader.read(unit))
            parts.commit(unit, table, {**search, "counts": counts})

        yield run


def run_local(plan: Plan, parts: Parts, todo: Sequence[Unit], on_progress: OnProgress) -> float:
    """Answer and commit units in this process; return the seconds without the start."""
    with open_runner(plan, parts, sum(unit.num_rows for unit in todo), on_progress) as run:
        started = time.perf_counter()
        for unit in todo:
            run(unit)
        return time.perf_counter() - started
