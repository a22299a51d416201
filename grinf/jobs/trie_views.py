"""Named views of a trie, and items deleted from it: ids from parquet become bits in a file of their own."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from grinf.errors import DataError, UsageError
from grinf.jobs import outputs
from grinf.jobs.arrow_types import plain
from grinf.jobs.item_columns import BATCH_ROWS, ITEM_NAMES, find_column
from grinf.jobs.parquet_files import columns_of, find_files, open_parquet, refuse_bad_text, stream
from grinf.trie import view_file
from grinf.trie.csr import Trie
from grinf.trie.view_file import StoredViews

SHOWN = 5

Status = Literal["stored", "removed", "deleted", "unchanged", "planned"]


@dataclass(frozen=True, slots=True)
class ViewReport:
    """What was done.

    Attributes:
        status: `stored`, `removed` or `deleted`; `unchanged`: it was so before; `planned`: a dry run.
        given: Ids that were read. unknown: those that the catalogue has not, and the first few of them.
        items: Items that the view lets through, or that are deleted, in all.
        num_items: Items of the catalogue.
        version: Of the trie, as results record it.
    """

    status: Status
    given: int
    unknown: int
    examples: Sequence[Any]
    items: int
    num_items: int
    version: str


@dataclass(frozen=True, slots=True)
class _Items:
    """Items of the ids of some files: uint8 bits of their rows; and the ids, as `ViewReport` counts them."""

    bits: np.ndarray
    given: int = 0
    unknown: int = 0
    examples: Sequence[Any] = ()


Change = Callable[[StoredViews], tuple[StoredViews, np.ndarray]]
"""Gives what is to be stored in the place of what is, and the bits of the items that are reported."""


def store_view(
    path: Path,
    name: str,
    items: Sequence[Path],
    item_column: str | None,
    *,
    overwrite: bool,
    dry_run: bool = False,
) -> ViewReport:
    """Store the view of some items under a name; with `dry_run` only look whether that can be done.

    Raises:
        UsageError: A name that cannot be used, or that another view has; inputs that do not fit.
        DataError: No id, or none that the catalogue has.
        TrieFileError: The trie or its views cannot be read.
        StorageError: The views cannot be written.
    """
    if not re.fullmatch(r"[\w.-]+", name):
        raise UsageError(f"--name {name!r} is no name of a view", fix="use letters, digits, _, - and .")
    trie = Trie.open(path)
    found = _read_items(trie, items, item_column)
    if not found.given:
        raise DataError(f"there are no item ids in {', '.join(map(str, items))}", "the view would be empty")

    def change(stored: StoredViews) -> tuple[StoredViews, np.ndarray]:
        old = stored.views.get(name)
        if old is not None and not overwrite and not np.array_equal(old, found.bits):
            why, fix = "it lets other items through", "choose another --name, or replace it by --overwrite"
            raise UsageError(f"the view {name!r} of {path} exists", why, fix)
        return replace(stored, views={**stored.views, name: found.bits}), found.bits

    return _change(path, trie, found, change, "stored", dry_run=dry_run)


def remove_view(path: Path, name: str, *, dry_run: bool = False) -> ViewReport:
    """Forget a view; with `dry_run` only look whether that can be done.

    Raises:
        UsageError: There is no such view.
        TrieFileError: The trie or its views cannot be read.
        StorageError: The views cannot be written.
    """
    trie = Trie.open(path)
    trie.with_views([name])
    none = _Items(np.zeros(0, np.uint8))

    def change(stored: StoredViews) -> tuple[StoredViews, np.ndarray]:
        views = {other: bits for other, bits in stored.views.items() if other != name}
        return replace(stored, views=views), none.bits

    return _change(path, trie, none, change, "removed", dry_run=dry_run)


def delete_items(
    path: Path, items: Sequence[Path], item_column: str | None, *, dry_run: bool = False
) -> ViewReport:
    """Delete items, or with `dry_run` only look which; to delete one again changes nothing.

    Raises:
        UsageError: Inputs that do not fit.
        DataError: Ids, but none that the catalogue has.
        TrieFileError: The trie or its views cannot be read.
        StorageError: The deletions cannot be written.
    """
    trie = Trie.open(path)
    found = _read_items(trie, items, item_column)

    def change(stored: StoredViews) -> tuple[StoredViews, np.ndarray]:
        deleted = found.bits if stored.deleted is None else stored.deleted | found.bits
        return replace(stored, deleted=deleted if deleted.any() else None), deleted

    return _change(path, trie, found, change, "deleted", dry_run=dry_run)


def _change(
    path: Path, trie: Trie, found: _Items, change: Change, done: Status, *, dry_run: bool
) -> ViewReport:
    """Change what is stored beside a trie, one process at a time, and say what was done."""
    with outputs.writing(outputs.place(view_file.path_of(path), "FILE")), view_file.locked(path):
        old = view_file.read(path)
        if old is None or old.trie_digest != trie.content_digest:
            old = StoredViews(trie.content_digest)
        new, reported = change(old)
        status: Status = "unchanged" if old.is_equal(new) else "planned" if dry_run else done
        if status == done:
            view_file.write(path, new)
    return ViewReport(
        status=status,
        given=found.given,
        unknown=found.unknown,
        examples=found.examples,
        items=int(np.unpackbits(reported).sum()),
        num_items=trie.manifest.num_items,
        version=replace(trie, deleted=new.deleted).version,
    )


def _read_items(trie: Trie, paths: Sequence[Path], item_column: str | None) -> _Items:
    """Look up the ids of files.

    Raises:
        UsageError: No file, or no column of ids.
        DataError: A file that cannot be read, ids of another type, or none that the catalogue has.
    """
    is_in = np.zeros(trie.manifest.num_items, bool)
    given = unknown = 0
    examples: list[Any] = []
    for path in find_files(paths):
        for ids in _read_ids(path, item_column):
            rows, offsets = trie.rows_of_items(ids)
            is_in[rows] = True
            is_unknown = np.diff(offsets) == 0
            given, unknown = given + len(ids), unknown + int(is_unknown.sum())
            examples += ids.take(pa.array(np.flatnonzero(is_unknown)[: SHOWN - len(examples)])).to_pylist()
    if given and unknown == given:
        what = f"none of the {given:,} item ids is in the catalogue: {', '.join(map(repr, examples))}"
        raise DataError(what, "the column or the trie is another one", "name the column by --item-column")
    return _Items(np.packbits(is_in, bitorder="little"), given, unknown, examples)


def _read_ids(path: Path, item_column: str | None) -> Iterator[pa.Array]:
    """Yield the ids of a file that are not null."""
    with open_parquet(path) as file:
        names = columns_of(path, file)
    usual = [*ITEM_NAMES, *(names if len(names) == 1 else ())]
    column = find_column(path, names, "--item-column", item_column, usual, "item ids")
    for first_row, batch in stream(path, [column], BATCH_ROWS):
        refuse_bad_text(path, batch[column], first_row)
        yield plain(batch[column]).drop_null()
