"""`grinf recall`: items for every query of a parquet file."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from grinf.cli.options import settings_command
from grinf.cli.render import CommandResult, Console, Table
from grinf.config.settings import RecallSettings
from grinf.errors import ExitCode

if TYPE_CHECKING:
    from grinf.jobs.recall import RecallReport

METRICS = ("recall", "hit", "mrr", "ndcg")
STATUS = {"done": "written", "unchanged": "is up to date, nothing was done", "planned": "would be written"}


@settings_command(RecallSettings)
def command(settings: RecallSettings, console: Console) -> CommandResult:
    """Recall items for every query of parquet files: parquet in, parquet out."""
    from grinf.jobs.recall import run_recall

    with console.progress(timed="prompt tokens") as on_progress:
        report = run_recall(settings, on_progress, console.warn)
    for warning in report.warnings:
        console.warn(warning)
    for line in _errors(report):
        console.info(line)
    data = asdict(report)
    return CommandResult(
        "recall",
        {"job": data.pop("status"), **data.pop("summary"), **data},
        [_overview(report), *_metrics(report.summary.get("metrics") or {})],
        list(_messages(report)),
        _exit_code(settings, report),
    )


def _exit_code(settings: RecallSettings, report: "RecallReport") -> ExitCode:
    is_new = report.status == "done"
    is_too_much = settings.allow_rejects.is_exceeded(report.rejected, report.rows)
    return ExitCode.REJECTED if is_new and is_too_much else ExitCode.OK


def _errors(report: "RecallReport") -> Iterator[str]:
    """Show the first rejected queries, and how many there are of each kind."""
    if report.rejected:
        counts = ", ".join(f"{code} {count:,}" for code, count in report.errors.items())
        yield f"{report.rejected:,} queries have an error instead of an answer: {counts}"
        yield from (f"  {example}" for example in report.summary["examples"])


def _overview(report: "RecallReport") -> Table:
    summary = report.summary
    rows = [["queries", f"{report.rows:,}"], ["units", f"{report.units:,}"]]
    if summary:
        rows += [[f"error: {code}", f"{count:,}"] for code, count in report.errors.items()]
        rows += [["SIDs", f"{summary['sids']:,}"], ["items", f"{summary['items']:,}"]]
        rows += [["SIDs returned / asked for", f"{summary['fill_rate']:.1%}"]]
        if summary["sid_mass"] is not None:
            rows += [["probability of SIDs", f"{summary['sid_mass']:.1%}"]]
    if report.seconds:
        rows += [["queries/s", f"{report.answered / report.seconds:,.1f}"]]
    return Table("", ["", report.columns.input], rows)


def _metrics(metrics: Mapping[str, Any]) -> Iterator[Table]:
    """Draw a table for items and one for SIDs, a line for each K."""
    for group, title in (("items", "on items"), ("sids", "on SIDs")):
        found: Mapping[str, Any] = metrics.get(group, {})
        levels = sorted({name.partition("[")[2] for name in found} - {""})
        rows = [
            [f"@{k}"]
            + [_share(found[f"{name}@{k}"]) for name in METRICS]
            + [_span(found[f"recall_interval@{k}"])]
            + [_share(found[f"level_hit@{k}[{level}"]) for level in levels]
            for k in (name.partition("@")[2] for name in found if name.startswith("recall@"))
        ]
        if rows:
            yield Table(
                title, ["", *METRICS, "recall, 95 %", *(f"level {level[:-1]}" for level in levels)], rows
            )


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _span(interval: Sequence[float] | None) -> str:
    return "-" if interval is None else f"{interval[0]:.4f} to {interval[1]:.4f}"


def _messages(report: "RecallReport") -> Iterator[str]:
    yield f"{report.output} {STATUS[report.status]}"
    if metrics := report.summary.get("metrics"):
        yield (
            f"{metrics['n_eval']:,} queries judged, {metrics['n_no_truth']:,} without truth, "
            f"{metrics['n_error']:,} with truth and an error; "
            f"{_share(metrics['target_in_catalogue'])} of the targets are in the catalogue"
        )
    if report.rejects:
        yield f"{report.rejected:,} rejected queries are in {report.rejects}"
    if report.units_kept:
        yield f"{report.units_kept:,} of {report.units:,} units were there already"
