"""`grinf build-trie` without a terminal: files of items in, a verified trie file out."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from glob import has_magic
from pathlib import Path
from typing import Any, Literal

import numpy as np

from grinf.config.settings import BuildTrieSettings
from grinf.errors import DataError, TrieFileError, UsageError
from grinf.jobs import outputs
from grinf.jobs.item_columns import ItemColumns, ItemFile
from grinf.jobs.item_files import open_items
from grinf.jobs.item_rows import BadRows, ItemReader
from grinf.jobs.parquet_files import find_files, source_of
from grinf.jobs.sid_columns import Fault
from grinf.trie import store, view_file
from grinf.trie.build import (
    DEFAULT_MEMORY_LIMIT,
    Layout,
    OnProgress,
    Provenance,
    RowStore,
    SidShapes,
    build_trie,
    working_folder,
)
from grinf.trie.csr import Trie
from grinf.trie.manifest import Source
from grinf.trie.publish import publish
from grinf.trie.tokens import TokenMapping, check_template, load_tokenizer, tokenizer_digest

NOT_CONTENT = {"items", "output", "tokenizer", "memory_limit", "overwrite", "dry_run"}
"""Settings that do not bear on what the trie holds (a tokenizer does by its content, not by its place)."""


@dataclass(frozen=True, slots=True)
class BuildTrieReport:
    """What was done.

    Attributes:
        status: `built`; `unchanged`: the output has been made from the same inputs and settings; `planned`.
        output: The trie file.
        columns: Where ids, SIDs and weights are read, in the first file.
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
    files: Sequence[ItemFile]
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
    reader = ItemReader(settings)
    trie, status = _existing(plan), "unchanged"
    if trie is None and settings.dry_run:
        _check(plan, reader, on_progress)
        status = "planned"
    elif trie is None:
        with outputs.writing(plan.output):
            trie, status = _build(plan, reader, on_progress), "built"
    seconds = time.perf_counter() - started
    columns = plan.files[0].columns
    return BuildTrieReport(status, plan.output, columns, plan.sources, trie, reader.bad_rows, seconds)


def default_output(items: Path) -> Path:
    """`tries/<stem>.grtrie` for a file, a folder, or the folder of a pattern."""
    named = (part.stem for part in (items, *items.parents) if part.name and not has_magic(part.name))
    return Path("tries") / f"{next(named, 'items')}.grtrie"


def _plan(settings: BuildTrieSettings) -> Plan:
    files = open_items(find_files(settings.items), settings)
    fingerprint = {key: value for key, value in settings.spelled().items() if key not in NOT_CONTENT}
    if settings.token_template is not None and settings.tokenizer is not None:
        check_template(settings.token_template)
        load_tokenizer(settings.tokenizer)
        fingerprint["tokenizer_digest"] = tokenizer_digest(settings.tokenizer)
    sources = tuple(source_of(file.path, file.num_rows) for file in files)
    output = outputs.place(settings.output or default_output(settings.items[0]))
    return Plan(settings, files, sources, output, fingerprint)


def _existing(plan: Plan) -> Trie | None:
    """The output, if it is already what would be built; None if there is nothing in the way.

    Raises:
        UsageError: The output exists and is something else, or is an input.
    """
    beside = view_file.path_of(plan.output)
    outputs.refuse_inputs([plan.output, beside], [file.path for file in plan.files], plan.settings.items)
    found = outputs.existing(plan.output, lambda path: store.is_ours(path) or None, "grinf build-trie")
    if view_file.is_in_the_way(plan.output):
        raise UsageError(f"{beside} is in the way", "`grinf trie` did not write it", "move it away")
    if found is None or plan.settings.overwrite:
        return None
    try:
        trie = Trie.open(plan.output)
    except TrieFileError as error:
        raise outputs.exists(plan.output, error.why or error.what) from error
    made = trie.manifest
    if _contents(made.sources) == _contents(plan.sources) and made.settings == plan.fingerprint:
        return trie
    raise outputs.exists(plan.output)


def _contents(sources: Sequence[Source]) -> list[tuple[int, str]]:
    return sorted((source.num_bytes, source.digest) for source in sources)


def _check(plan: Plan, reader: ItemReader, on_progress: OnProgress) -> None:
    """Read all rows for nothing but their faults."""
    shapes = SidShapes()
    _read(plan, reader, shapes, on_progress)
    _token_maker(plan.settings, _choose_layout(shapes, reader, plan.settings))


def _read(plan: Plan, reader: ItemReader, into: SidShapes, on_progress: OnProgress) -> None:
    total = sum(source.rows for source in plan.sources)
    for file in plan.files:
        for batch in reader.read(file):
            into.add(batch)
            on_progress("read", reader.rows_read, total)
    reader.refuse_settings()


def _build(plan: Plan, reader: ItemReader, on_progress: OnProgress) -> Trie:
    settings = plan.settings
    memory_limit = settings.memory_limit or DEFAULT_MEMORY_LIMIT
    with working_folder(plan.output) as folder:
        rows = RowStore(folder, memory_limit)
        _read(plan, reader, rows, on_progress)
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
        with view_file.locked(plan.output):
            publish(built, plan.output)
            view_file.path_of(plan.output).unlink(missing_ok=True)  # They were of the trie before.
    return Trie.open(plan.output, verify=False)


def _choose_layout(rows: SidShapes, reader: ItemReader, settings: BuildTrieSettings) -> Layout:
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
    sizes = reader.rules.codebook_sizes or tuple(
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
