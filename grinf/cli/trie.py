"""`grinf trie`: look into a trie file, verify it, find SIDs and items, export it."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from grinf.cli.render import CommandResult, Console, Table
from grinf.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from grinf.trie.manifest import TokenSource

command = typer.Typer(no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]})

File = Annotated[Path, typer.Argument(help="Trie file.", metavar="FILE", show_default=False)]


@command.command()
def info(file: File) -> CommandResult:
    """Show what a trie holds: levels, collisions, tokens, where it came from."""
    from grinf.trie import Trie

    trie = Trie.open(file)
    manifest = trie.manifest
    shared, most = trie.collisions()
    levels = [
        [str(level), f"{size:,}", f"{nodes:,}", f"{nodes / parents:,.1f}", f"{trie.capacity(level, 1):,}"]
        for level, (size, nodes, parents) in enumerate(
            zip(trie.codebook_sizes, trie.num_nodes, (1, *trie.num_nodes[:-1]), strict=True)
        )
    ]
    facts = [
        ["items", f"{manifest.num_items:,} ({manifest.id_type} ids)"],
        ["SIDs", f"{trie.num_leaves:,}"],
        ["items that share a SID", f"{shared:,} ({shared / manifest.num_items:.1%})"],
        ["most items on one SID", f"{most:,}"],
        ["items on several SIDs", f"{manifest.items_on_several_sids:,}"],
        ["rows read", f"{manifest.rows_read:,}"],
        *([f"rows left out: {reason}", f"{count:,}"] for reason, count in manifest.rows_dropped.items()),
        ["token of short SIDs", manifest.end_token or "none: all SIDs have every level"],
        ["tokens", _spell_tokens(manifest.tokens)],
        ["GPU bytes", f"{trie.gpu_bytes:,} ({trie.gpu_bytes / manifest.num_items:.2f} per item)"],
        ["content digest", trie.content_digest],
        ["made from", ", ".join(source.path for source in manifest.sources)],
    ]
    tables = [
        Table("", ["level", "codes", "nodes", "mean children", "most children"], levels),
        Table("", ["catalogue", ""], facts),
    ]
    data = asdict(manifest) | {"gpu_bytes": trie.gpu_bytes, "shared_items": shared, "max_items_per_sid": most}
    return CommandResult("trie-info", data, tables)


@command.command()
def verify(file: File) -> CommandResult:
    """Compare every tensor of a trie with its digest."""
    from grinf.jobs.trie_tools import verify_trie

    checks = verify_trie(file)
    damaged = [check.name for check in checks if not check.is_sound]
    rows = [
        [
            check.name,
            check.dtype,
            f"{check.length:,}",
            f"{check.num_bytes:,}",
            "ok" if check.is_sound else "BAD",
        ]
        for check in checks
    ]
    return CommandResult(
        "trie-verify",
        {"tensors": [asdict(check) for check in checks], "damaged": damaged},
        [Table("", ["tensor", "dtype", "length", "bytes", ""], rows)],
        [f"damaged: {', '.join(damaged)}; build the trie again" if damaged else f"{file} is sound"],
        ExitCode.REJECTED if damaged else ExitCode.OK,
    )


@command.command()
def lookup(
    file: File,
    sid: Annotated[list[str] | None, typer.Option(help="SID, as 3-9-1; repeatable.", metavar="SID")] = None,
    item: Annotated[list[str] | None, typer.Option(help="Item id; repeatable.", metavar="ID")] = None,
) -> CommandResult:
    """Find the items of a SID, or the SIDs of an item."""
    from grinf.jobs.trie_tools import lookup_items, lookup_sids
    from grinf.trie import Trie

    if not sid and not item:
        raise UsageError("nothing to look up", fix="give --sid 3-9-1 or --item ID, once or more")
    trie = Trie.open(file)
    found = lookup_sids(trie, sid or []) + lookup_items(trie, item or [])
    rows = [
        ["-".join(map(str, one.sid)) or "not here", ", ".join(map(str, one.item_ids)) or "not here"]
        for one in found
    ]
    data = {"found": [asdict(one) for one in found]}
    return CommandResult("trie-lookup", data, [Table("", ["SID", "items"], rows)])


@command.command()
def export(
    ctx: typer.Context,
    file: File,
    output: Annotated[Path, typer.Option("--output", "-o", help="Parquet file to write.", metavar="FILE")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output.")] = False,
) -> CommandResult:
    """Write the catalogue as parquet: one row per SID in SID order, with its items in rank order."""
    from grinf.jobs.trie_tools import export_trie

    with ctx.ensure_object(Console).progress() as on_progress:
        rows = export_trie(file, output, overwrite=overwrite, on_progress=on_progress)
    done = f"wrote {rows:,} SIDs to {output}"
    return CommandResult("trie-export", {"output": output, "rows": rows}, messages=[done])


def _spell_tokens(source: "TokenSource | None") -> str:
    if source is None:
        return "not bound: the trie was built without --tokenizer and --token-base"
    return ", ".join(f"{name} {value}" for name, value in asdict(source).items() if value is not None)
