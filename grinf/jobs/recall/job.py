"""`grinf recall` without a terminal: plan, answer unit by unit, commit each, give the output its name."""

from dataclasses import replace

from grinf.config.settings import RecallSettings
from grinf.jobs.recall.executor import run_local
from grinf.jobs.recall.plan import make_plan
from grinf.jobs.recall.report import RecallReport, summarise
from grinf.jobs.recall.worker import OnProgress


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
        seconds = run_local(plan, parts, todo, on_progress) if todo else 0.0
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
