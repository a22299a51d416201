"""`grinf trie`: look into a trie, verify it, find SIDs and items, export it, keep views, delete items."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from grinf.cli.render import CommandResult, Console, Table
from grinf.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from grinf.jobs.trie_views import ViewReport
    from grinf.trie import Trie
    from grinf.trie.manifest import TokenSource

command = typer.Typer(no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]})

File = Annotated[Path, typer.Argument(help="Trie file.", metavar="FILE", show_default=False)]
ItemColumn = Annotated[
    str | None, typer.Option(help="Column of item ids [default: found by name].", metavar="NAME")
]
ITEMS = typer.Option(help="Parquet file, folder or pattern of item ids.", metavar="ITEMS")
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything and write nothing.")]


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
        *_stored_beside(trie),
        ["made from", ", ".join(source.path for source in manifest.sources)],
    ]
    tables = [
        Table("", ["level", "codes", "nodes", "mean children", "most children"], levels),
        Table("", ["catalogue", ""], facts),
    ]
    data = asdict(manifest) | {"gpu_bytes": trie.gpu_bytes, "shared_items": shared, "max_items_per_sid": most}
    data |= {"version": trie.version, "views": _views(trie), "deleted_items": _num_deleted(trie)}
    return CommandResult("trie-info", data, tables)


@command.command()
def verify(file: File) -> CommandResult:
    """Compare every tensor of a trie, and of the views beside it, with its digest."""
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
        [_verdict(file, damaged)],
        ExitCode.REJECTED if damaged else ExitCode.OK,
    )


def _verdict(file: Path, damaged: list[str]) -> str:
    if not damaged:
        return f"{file} is sound"
    is_beside = all(name.startswith("view.") or name == "deleted" for name in damaged)
    fix = f"remove {file}.views and store them again" if is_beside else "build the trie again"
    return f"damaged: {', '.join(damaged)}; {fix}"


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
        ["-".join(map(str, one.sid)) or "not here", ", ".join(map(str, one.item_ids or ["not here"]))]
        for one in found
    ]
    data = {"found": [asdict(one) for one in found]}
    return CommandResult("trie-lookup", data, [Table("", ["SID", "items"], rows)])


@command.command()
def export(
    ctx: typer.Context,
    file: File,
    output: Annotated[Path, typer.Option("--output", "-o", help="Parquet file to write.", metavar="FILE")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier export.")] = False,
    dry_run: DryRun = False,
) -> CommandResult:
    """Write the catalogue as parquet: one row per SID in SID order, with its items in rank order."""
    from grinf.jobs.trie_tools import export_trie

    with ctx.ensure_object(Console).progress() as on_progress:
        rows = export_trie(file, output, overwrite=overwrite, on_progress=on_progress, dry_run=dry_run)
    done = f"{output} is up to date: this version of the trie made it; nothing to do"
    if rows is not None:
        done = f"would write {output}" if dry_run else f"wrote {rows:,} SIDs to {output}"
    return CommandResult("trie-export", {"output": output, "rows": rows or 0}, messages=[done])


@command.command()
def view(
    ctx: typer.Context,
    file: File,
    name: Annotated[str, typer.Option(help="Name of the view.", metavar="NAME")],
    items: Annotated[list[Path] | None, ITEMS] = None,
    item_column: ItemColumn = None,
    remove: Annotated[bool, typer.Option("--remove", help="Forget the view.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a view of other items.")] = False,
    dry_run: DryRun = False,
) -> CommandResult:
    """Store a named view: the items that a search with `--view NAME` can find."""
    from grinf.jobs.trie_views import remove_view, store_view

    if bool(items) == remove:
        raise UsageError("a view is stored or removed", fix="give either --items ITEMS.parquet or --remove")
    if remove:
        report = remove_view(file, name, dry_run=dry_run)
        return _told(ctx, "trie-view", report, f"the view {name!r} of {file} is removed")
    report = store_view(file, name, items or [], item_column, overwrite=overwrite, dry_run=dry_run)
    said = f"view {name!r} of {file}: {report.items:,} of {report.num_items:,} items"
    return _told(ctx, "trie-view", report, said)


@command.command()
def delete(
    ctx: typer.Context,
    file: File,
    items: Annotated[list[Path], ITEMS],
    item_column: ItemColumn = None,
    dry_run: DryRun = False,
) -> CommandResult:
    """Delete items at once; `grinf build-trie --overwrite` brings back those of its inputs."""
    from grinf.jobs.trie_views import delete_items

    report = delete_items(file, items, item_column, dry_run=dry_run)
    said = f"{report.items:,} of {report.num_items:,} items of {file} are deleted"
    return _told(ctx, "trie-delete", report, said)


def _told(ctx: typer.Context, schema: str, report: "ViewReport", said: str) -> CommandResult:
    if report.unknown:
        shown = ", ".join(map(repr, report.examples))
        what = f"{report.unknown:,} of {report.given:,} item ids are not in the catalogue: {shown}"
        ctx.ensure_object(Console).warn(what + (", ..." if report.unknown > len(report.examples) else ""))
    beside = {"unchanged": "; it was so before, nothing was written", "planned": "; --dry-run wrote nothing"}
    return CommandResult(schema, asdict(report), messages=[said + beside.get(report.status, "")])


def _stored_beside(trie: "Trie") -> list[list[str]]:
    views = [[f"view {name}", f"{count:,} items"] for name, count in _views(trie).items()]
    deleted = [["deleted items", f"{_num_deleted(trie):,}"], ["version", trie.version]]
    return [*views, *(deleted if trie.deleted is not None else [])]


def _views(trie: "Trie") -> dict[str, int]:
    """Live items of each view."""
    return {name: int(trie.live_items([name]).sum()) for name in sorted(trie.views)}


def _num_deleted(trie: "Trie") -> int:
    return trie.manifest.num_items - int(trie.live_items([]).sum())


def _spell_tokens(source: "TokenSource | None") -> str:
    if source is None:
        return "not bound: the trie was built without --tokenizer and --token-base"
    return ", ".join(f"{name} {value}" for name, value in asdict(source).items() if value is not None)
