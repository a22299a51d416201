"""`grinf build-trie`: a catalogue of parquet files becomes a trie file."""

from dataclasses import asdict
from typing import TYPE_CHECKING

from grinf.cli.options import settings_command
from grinf.cli.render import CommandResult, Console, Table
from grinf.config.settings import BuildTrieSettings

if TYPE_CHECKING:
    from grinf.jobs.build_trie import BuildTrieReport
    from grinf.trie import Trie


@settings_command(BuildTrieSettings)
def command(settings: BuildTrieSettings, console: Console) -> CommandResult:
    """Build a trie of SIDs and items from parquet."""
    from grinf.jobs.build_trie import run_build_trie

    with console.progress() as on_progress:
        report = run_build_trie(settings, on_progress)
    for example in report.bad_rows.examples:
        console.warn(f"left out: {example}")
    trie = report.trie
    data = {
        "result": report.status,
        "output": report.output,
        "columns": asdict(report.columns),
        "sources": [asdict(source) for source in report.sources],
        "seconds": report.seconds,
    }
    if trie is not None:
        data |= {"gpu_bytes": trie.gpu_bytes, "trie": asdict(trie.manifest)}
    return CommandResult("build-trie", data, [_table(trie)] if trie else [], [_message(report)])


def _table(trie: "Trie") -> Table:
    manifest = trie.manifest
    rows = [
        ["items", f"{manifest.num_items:,}"],
        ["SIDs", f"{trie.num_leaves:,}"],
        *([f"rows left out: {reason}", f"{count:,}"] for reason, count in manifest.rows_dropped.items()),
        ["nodes per level", " ".join(f"{nodes:,}" for nodes in trie.num_nodes)],
        ["codebook sizes", " ".join(f"{size:,}" for size in trie.codebook_sizes)],
        ["GPU bytes per item", f"{trie.gpu_bytes / manifest.num_items:.2f}"],
    ]
    return Table("", ["catalogue", ""], rows)


def _message(report: "BuildTrieReport") -> str:
    match report.status:
        case "built":
            return f"wrote {report.output} in {report.seconds:.1f} s"
        case "unchanged":
            kept = report.trie is not None and (report.trie.views or report.trie.deleted is not None)
            beside = "; its views and deletions are kept, --overwrite builds it without them" if kept else ""
            return (
                f"{report.output} is up to date: the same inputs and settings made it; nothing to do{beside}"
            )
        case "planned":
            rows = sum(source.rows for source in report.sources)
            read = f"{rows:,} rows of {len(report.sources)} files, columns {', '.join(report.columns.all)}"
            return f"would write {report.output} from {read}"
