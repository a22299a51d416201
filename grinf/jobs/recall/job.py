"""`grinf recall` without a terminal: plan, answer unit by unit, commit each, give the output its name."""

from collections.abc import Callable
from dataclasses import replace

from grinf.config.settings import RecallSettings
from grinf.jobs.recall.executor import run_local
from grinf.jobs.recall.output import Parts
from grinf.jobs.recall.plan import Plan, make_plan
from grinf.jobs.recall.pool import run_pool
from grinf.jobs.recall.report import RecallReport, judge, summarise
from grinf.jobs.recall.signals import Signalled, Signals, catching_signals
from grinf.jobs.recall.space import explaining_full_disk
from grinf.jobs.recall.watch import Watch
from grinf.jobs.recall.worker import OnProgress


def run_recall(
    settings: RecallSettings, on_progress: OnProgress, say: Callable[[str], None] = lambda text: None
) -> RecallReport:
    """Answer every query as the settings say.

    The first signal that asks the process to end lets the running unit end, the second does not; either way
    the job can go on.

    Args:
        settings: Of the command.
        on_progress: Called with `queries` and `prompt tokens`, how many of them are done, and how many there
            are. The number of tokens is an estimate until all are read; the time to come goes with them.
        say: Called with what the user should know at once.

    Raises:
        UsageError: Settings that cannot be used, or an output that exists and is something else.
        DataError: Inputs that cannot be read.
        EnvironmentFault: A model, catalogue or device that cannot be used.
        RowError: A query without an answer, with `--on-error fail`.
        RejectsError: More rejected queries than `--abort-rejects`.
        StorageError: The disk is full, or will be.
        StoppedError: A signal.
    """
    plan = make_plan(settings)
    report = RecallReport(
        "planned", plan.output.path, plan.columns, plan.num_rows, len(plan.units), plan.warnings
    )
    finished = plan.output.finished(plan.units, overwrite=settings.overwrite)
    if settings.dry_run and finished is None:
        return report
    if finished is None:
        with (
            catching_signals() as signals,
            plan.output.open(resume=settings.resume, overwrite=settings.overwrite) as parts,
        ):
            # Another process may have finished it before this one held it.
            finished = plan.output.finished(plan.units, overwrite=settings.overwrite)
            if finished is None:
                return _run(plan, parts, report, signals, on_progress, say)
    return _finished(plan, replace(report, status="unchanged", summary=finished))


def _run(
    plan: Plan,
    parts: Parts,
    report: RecallReport,
    signals: Signals,
    on_progress: OnProgress,
    say: Callable[[str], None],
) -> RecallReport:
    watch = Watch(plan, parts, signals, say)
    try:
        watch.check()
        seconds = _executor(plan.settings)(plan, parts, watch, watch.tell(on_progress)) if watch.todo else 0.0
        summary = summarise((parts.committed(unit)["counts"] for unit in plan.units), plan.requested)
        search = parts.committed(plan.units[0])
        with explaining_full_disk(plan.output, plan.units):
            parts.finish(plan.units, summary)
    except Signalled:
        raise watch.stopped() from None
    report = replace(
        report,
        status="done",
        summary=summary,
        search={key: value for key, value in search.items() if key not in ("counts", "digest", "unit")},
        units_kept=len(plan.units) - len(watch.todo),
        answered=sum(unit.num_rows for unit in watch.todo),
        seconds=seconds,
    )
    return _finished(plan, report)


def _executor(settings: RecallSettings) -> Callable[[Plan, Parts, Watch, OnProgress], float]:
    if settings.executor == "ray":
        from grinf.jobs.recall.ray_executor import run_ray

        return run_ray
    return run_pool if len(settings.devices) > 1 else run_local


def _finished(plan: Plan, report: RecallReport) -> RecallReport:
    """Add what follows from the summary."""
    rejects = plan.output.rejects if report.rejected and plan.output.rejects.exists() else None
    return replace(report, rejects=rejects, warnings=[*report.warnings, *judge(report.summary)])
