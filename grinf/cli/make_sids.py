"""`grinf make-sids`: embeddings of items become Semantic IDs."""

from dataclasses import asdict
from typing import TYPE_CHECKING

from grinf.cli.options import settings_command
from grinf.cli.render import CommandResult, Console, Table
from grinf.config.settings import MakeSidsSettings

if TYPE_CHECKING:
    from grinf.jobs.residual_kmeans import SidQuality


@settings_command(MakeSidsSettings)
def command(settings: MakeSidsSettings, console: Console) -> CommandResult:
    r"""Make SIDs from item embeddings by residual k-means.

    \b
      grinf make-sids embeddings.parquet
      grinf make-sids embeddings/ --levels 3 --codebook-size 256 --unique
    """
    from grinf.jobs.make_sids import run_make_sids

    with console.progress() as on_progress:
        report = run_make_sids(settings, on_progress)
    message = {
        "made": f"wrote {report.output} in {report.seconds:.1f} s; next: grinf build-trie {report.output}",
        "unchanged": f"{report.output} is up to date: the same inputs and settings made it; nothing to do",
        "planned": f"would write {report.output} (columns {report.item_column}, {report.embedding_column})",
    }[report.status]
    tables = _tables(report.quality) if report.quality else []
    return CommandResult("make-sids", asdict(report), tables, [message])


def _tables(quality: "SidQuality") -> list[Table]:
    summary = [
        ["items", f"{quality.items:,}"],
        ["distinct SIDs", f"{quality.sids:,} ({quality.sids / quality.items:.1%} of items)"],
        ["items that share a SID", f"{quality.items_sharing:,}"],
        ["most items of one SID", f"{quality.max_items:,}"],
    ]
    levels = [
        [str(level), f"{use.codes:,}", f"{use.effective_codes:,.0f}", f"{use.max_items:,}", f"{use.nodes:,}"]
        for level, use in enumerate(quality.levels)
    ]
    columns = ["level", "codes used", "effective codes", "items of the busiest", "prefixes"]
    return [Table("", ["SIDs", ""], summary), Table("", columns, levels)]
