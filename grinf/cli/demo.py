"""`grinf demo`: real data, a small retriever trained from nothing, and grinf's own commands on both."""

from dataclasses import asdict
from typing import TYPE_CHECKING

from grinf.cli.options import settings_command
from grinf.cli.render import CommandResult, Console, Table
from grinf.config.settings import DemoSettings

if TYPE_CHECKING:
    from grinf.jobs.demo import DemoReport


@settings_command(DemoSettings)
def command(settings: DemoSettings, console: Console) -> CommandResult:
    r"""Build a small retriever from real data and try it.

    Medical-code search: a short text finds its ICD-10-CM code. Needs the extra `demo`; downloads nothing.

    \b
      grinf demo            one chapter, about a minute on two cores
      grinf demo --full     the whole catalogue, some minutes
    """
    from grinf.jobs.demo import run_demo
    from grinf.jobs.demo.catalogue import ATTRIBUTION

    console.info(ATTRIBUTION)
    with console.progress() as on_progress:
        report = run_demo(settings, on_progress)
    messages = [
        *_remarks(report),
        "",
        ATTRIBUTION,
        "",
        "Now run, with no further flag (grinf.toml has the rest):",
    ]
    messages += [f"  grinf build-trie {report.items}", f"  grinf recall --input {report.queries}"]
    messages += ["  grinf bench --sla 100ms"]
    return CommandResult(
        "demo", asdict(report), [_systems(report), _widths(report), _answers(report)], messages
    )


def _systems(report: "DemoReport") -> Table:
    title = f"{report.num_test:,} held-out queries, {report.num_items:,} items"
    rows = [[score.system, *map(_share, score.recall)] for score in report.systems]
    return Table(title, ["system", *(f"recall@{k}" for k in report.cutoffs)], rows)


def _widths(report: "DemoReport") -> Table:
    columns = ["beams", *(f"recall@{k}" for k in report.width_cutoffs), "legal without trie", "queries/s"]
    rows = [
        [score.beams, *map(_share, score.recall), f"{score.legal_share:.0%}", f"{score.queries_per_s:,.0f}"]
        for score in report.widths
    ]
    return Table(f"Beam widths, {report.num_compared:,} queries", columns, rows)


def _answers(report: "DemoReport") -> Table:
    rows = [
        [answer.query, "\n".join(answer.wanted), "\n".join(map(_mark, answer.titles, answer.found))]
        for answer in report.answers
    ]
    return Table("Some queries", ["query", "meant", "found first (* right)"], rows)


def _mark(title: str, is_right: bool) -> str:
    return f"{'*' if is_right else ' '} {title}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _remarks(report: "DemoReport") -> list[str]:
    """Say what was trained, and which systems are better."""
    remarks = [
        f"Trained on {report.num_train:,} queries and all titles in {report.steps:,} steps: "
        f"{report.num_parameters / 1e6:.1f} M parameters; {sum(report.seconds.values()):.0f} s in all."
    ]
    widest = max(report.recall)
    remarks.append(
        f"{report.systems[-1].system}: recall@{widest} {report.recall[widest]:.3f}, all test queries."
    )
    if not report.is_new:
        remarks.append("This was made before, with the same settings; --overwrite makes it again.")
    ours = report.systems[-1].recall
    for score in report.systems[:-1]:
        pairs = zip(report.cutoffs, score.recall, ours, strict=True)
        better = ", ".join(f"recall@{k}" for k, theirs, own in pairs if theirs > own)
        if better:
            remarks.append(f"Better than grinf here, at {better}: {score.system}.")
    return remarks
