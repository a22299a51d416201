"""`grinf build-trie` without a terminal: parquet in, a verified trie file out."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from glob import has_magic
from pathlib import Path
from typing import Any, Literal

import numpy as np

from grinf.config.settings import BuildTrieSettings
from grinf.errors import DataError, StorageError, TrieFileError, UsageError
from grinf.jobs.item_rows import BadRows, ItemColumns, ItemReader, choose_columns
from grinf.jobs.parquet_files import find_files, open_parquet, source_of
from grinf.jobs.sid_columns import Fault
from grinf.trie import store
from grinf.trie.build import DEFAULT_MEMORY_LIMIT, Layout, Provenance, RowStore, build_trie, working_folder
from grinf.trie.csr import Trie
from grinf.trie.manifest import Source
from grinf.trie.tokens import TokenMapping, check_template, load_tokenizer, tokenizer_digest

OnProgress = Callable[[str, int, int | None], None]

NOT_CONTENT = {"items", "output", "tokenizer", "memory_limit", "overwrite", "dry_run"}
"""Settings that do not bear on what the trie holds (a tokenizer does by its content, not by its place)."""


@dataclass(frozen=True, slots=True)
class BuildTrieReport:
    """What was done.

    Attributes:
        status: `built`; `unchanged`: the output has been made from the same inputs and settings; `planned`.
        output: The trie file.
        columns: Where ids, SIDs and weights are read.
        sources: The input files.
        trie: The result; None if planned.
        bad_rows: Rows that were left out.
        seconds: Wall time.
    """

    status: Literal["built", "unchanged", "planned"]
    output: Path
    columns: ItemColumns
    sources: tuple[Source, ...]
    trie: Trie | None
    bad_rows: BadRows
    seconds: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What a build reads and writes; `fingerprint` holds all but the files that the content depends on."""

    settings: BuildTrieSettings
    files: Sequence[Path]
    columns: ItemColumns
    sources: tuple[Source, ...]
    output: Path
    fingerprint: dict[str, Any]


def run_build_trie(settings: BuildTrieSettings, on_progress: OnProgress) -> BuildTrieReport:
    """Build a trie as the settings say.

    Raises:
        UsageError: Inputs, columns, formats or tokens that do not fit, or an output that is something else.
        DataError: Rows that cannot be used, or no rows at all.
        TrieFileError: The tokenizer cannot be read.
        StorageError: The output cannot be written.
    """
    started = time.perf_counter()
    plan = _plan(settings)
    reader = ItemReader(plan.columns, settings)
    trie, status = _existing(plan), "unchanged"
    if trie is None and settings.dry_run:
        status = "planned"
    elif trie is None:
        try:
            trie, status = _build(plan, reader, on_progress), "built"
        except OSError as error:
            fix = "free some space, or choose another -o"
            raise StorageError(f"cannot write {plan.output}", str(error), fix) from error
    seconds = time.perf_counter() - started
    return BuildTrieReport(status, plan.output, plan.columns, plan.sources, trie, reader.bad_rows, seconds)


def default_output(items: Path) -> Path:
    """`tries/<stem>.grtrie` for a file, a folder, or the folder of a pattern."""
    named = (part.stem for part in (items, *items.parents) if part.name and not has_magic(part.name))
    return Path("tries") / f"{next(named, 'items')}.grtrie"


def _plan(settings: BuildTrieSettings) -> Plan:
    files = find_files(settings.items)
    with open_parquet(files[0]) as first:
        columns = choose_columns(first.schema_arrow.names, settings)
    fingerprint = {key: value for key, value in settings.spelled().items() if key not in NOT_CONTENT}
    if settings.token_template is not None and settings.tokenizer is not None:
        check_template(settings.token_template)
        load_tokenizer(settings.tokenizer)
        fingerprint["tokenizer_digest"] = tokenizer_digest(settings.tokenizer)
    sources = tuple(map(source_of, files))
    return Plan(
        settings, files, columns, sources, settings.output or default_output(settings.items[0]), fingerprint
    )


def _existing(plan: Plan) -> Trie | None:
    """The output, if it is already what would be built; None if there is nothing in the way.

    Raises:
        UsageError: The output exists and is something else.
    """
    if not plan.output.exists() or (plan.settings.overwrite and plan.output.is_file()):
        return None
    try:
        trie = Trie.open(plan.output)
        made = trie.manifest
        if _contents(made.sources) == _contents(plan.sources) and made.settings == plan.fingerprint:
            return trie
        why = "it was made from other inputs or settings"
    except TrieFileError as error:
        why = error.why or error.what
    raise UsageError(f"{plan.output} exists", why, "choose another -o, or replace it by --overwrite")


def _contents(sources: Sequence[Source]) -> list[tuple[int, str]]:
    return sorted((source.num_bytes, source.digest) for source in sources)


def _build(plan: Plan, reader: ItemReader, on_progress: OnProgress) -> Trie:
    settings, total = plan.settings, sum(source.rows for source in plan.sources)
    memory_limit = settings.memory_limit or DEFAULT_MEMORY_LIMIT
    with working_folder(plan.output) as folder:
        rows = RowStore(folder, memory_limit)
        for path in plan.files:
            for batch in reader.read(path):
                rows.add(batch)
                on_progress("read", reader.rows_read, total)
        layout = _choose_layout(rows, reader, settings)
        dropped = dict(sorted(reader.bad_rows.counts.items()))
        built = build_trie(
            rows,
            layout,
            folder,
            memory_limit=memory_limit,
            on_conflict=settings.on_item_conflict,
            make_tokens=_token_maker(settings, layout),
            provenance=Provenance(plan.sources, plan.fingerprint, reader.rows_read, dropped),
            on_progress=on_progress,
        )
        store.publish(built, plan.output)
    return Trie.open(plan.output, verify=False)


def _choose_layout(rows: RowStore, reader: ItemReader, settings: BuildTrieSettings) -> Layout:
    """Settle depth and codebook sizes once all rows are known.

    Raises:
        DataError: Rows that cannot be used, SIDs of several depths without END, or no rows at all.
    """
    bad, by_depth = reader.bad_rows, Counter(rows.rows_of_depth)
    if bad.total and settings.on_bad_row == "error":
        raise bad.error(reader.rows_read)
    if not by_depth:
        why = f"{bad.total:,} rows were left out, none is left" if bad.total else "the files have no rows"
        raise DataError("the catalogue is empty", why)
    depths = set(by_depth)
    if settings.end_token is None:
        usual = max(by_depth, key=lambda levels: (by_depth[levels], levels))
        if len(depths) > 1 and settings.on_bad_row == "error":
            raise _mixed_depths(by_depth, reader)
        bad.counts += Counter({Fault.WRONG_DEPTH.reason: by_depth.total() - by_depth[usual]})
        depths = {usual}
    sizes = reader.codebook_sizes or tuple(
        max(int(rows.largest[depth][level]) for depth in depths if depth > level) + 1
        for level in range(max(depths))
    )
    return Layout(sizes, settings.end_token)


def _mixed_depths(by_depth: Counter[int], reader: ItemReader) -> DataError:
    histogram = ", ".join(f"{levels} codes: {count:,} rows" for levels, count in sorted(by_depth.items()))
    return DataError(
        f"SIDs have different numbers of codes ({histogram})",
        f"the first of each: {'; '.join(reader.first_of_depth[levels] for levels in sorted(by_depth))}",
        "name the token that ends a short SID by --end-token, or keep the usual depth by --on-bad-row drop",
    )


def _token_maker(
    settings: BuildTrieSettings, layout: Layout
) -> Callable[[Sequence[np.ndarray]], TokenMapping] | None:
    """Say how codes get token ids."""
    sizes, end, bases = layout.codebook_sizes, settings.end_token, settings.token_base
    if settings.tokenizer is not None and settings.token_template is not None:
        folder, template = settings.tokenizer, settings.token_template
        return lambda used: TokenMapping.from_tokenizer(folder, template, sizes, end, used)
    if bases is None:
        return None
    if end is not None and not end.isdecimal():
        why = "--token-base works without a tokenizer, which could look it up"
        raise UsageError(f"--end-token {end!r} has no known token id", why, "give its token id as a number")
    mapping = TokenMapping.from_bases(bases, sizes, None if end is None else int(end))
    return lambda used: mapping
