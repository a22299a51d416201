"""`grinf recall` without a terminal: plan, answer unit by unit, commit each, give the output its name."""

import time
from collections.abc import Sequence
from dataclasses import replace

from grinf.config.settings import RecallSettings
from grinf.jobs.recall.inputs import UnitReader
from grinf.jobs.recall.output import Parts
from grinf.jobs.recall.plan import Plan, make_plan
from grinf.jobs.recall.report import RecallReport, summarise
from grinf.jobs.recall.units import Unit
from grinf.jobs.recall.worker import OnProgress, UnitWorker, describe_search
from grinf.runtime.engine import Engine


def run_recall(settings: RecallSettings, on_progress: OnProgress) -> RecallReport:
    """Answer every query as the settings say.

    Args:
        settings: Of the command.
        on_progress: Called with `queries` and `prompt tokens`, how many of them are done, and how many there
            are. The number of tokens is an estimate until all are read; the time to come goes with them.

    Raises:
        UsageError: Settings that cannot be used, or an output that exists and is something else.
        DataError: Inputs that cannot be read.
        EnvironmentFault: A model, catalogue or device that cannot be used.
        RowError: A query without an answer, with `--on-error fail`.
    """
    plan = make_plan(settings)
    num_rows = sum(unit.num_rows for unit in plan.units)
    report = RecallReport("planned", plan.output.path, plan.columns, num_rows, len(plan.units), plan.warnings)
    finished = plan.output.finished(overwrite=settings.overwrite)
    if finished is not None:
        return replace(report, status="unchanged", summary=finished)
    if settings.dry_run:
        return report
    with plan.output.open(resume=settings.resume, overwrite=settings.overwrite) as parts:
        todo = [unit for unit in plan.units if parts.read(unit) is None]
        seconds = _answer(plan, parts, todo, on_progress) if todo else 0.0
        facts = [parts.read(unit) or {} for unit in plan.units]
        summary = summarise([one["counts"] for one in facts], plan.requested)
        parts.finish(plan.units, summary)
    return replace(
        report,
        status="done",
        summary=summary,
        search={key: value for key, value in facts[0].items() if key not in ("counts", "digest")},
        units_kept=len(plan.units) - len(todo),
        answered=sum(unit.num_rows for unit in todo),
        seconds=seconds,
    )


def _answer(plan: Plan, parts: Parts, todo: Sequence[Unit], on_progress: OnProgress) -> float:
    """Answer and commit units; return the seconds that it took, without the start of the engine."""
    with Engine.load(plan.options, plan.trie) as engine:
        worker = UnitWorker(plan, engine, sum(unit.num_rows for unit in todo), on_progress)
        reader = UnitReader(plan.queries, plan.columns.read)
        search = describe_search(plan, engine)
        started = time.perf_counter()
        for unit in todo:
            table, counts = worker.answer(unit, reader.read(unit))
            parts.commit(unit, table, {**search, "counts": counts})
        return time.perf_counter() - started
