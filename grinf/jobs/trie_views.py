"""Named views of a trie, and items deleted from it: ids from parquet become bits in a file of their own."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from grinf.errors import DataError, UsageError
from grinf.jobs import outputs
from grinf.jobs.arrow_types import plain
from grinf.jobs.item_columns import BATCH_ROWS, ITEM_NAMES
from grinf.jobs.parquet_files import columns_of, find_files, open_parquet, refuse_bad_text
from grinf.trie import view_file
from grinf.trie.csr import Trie
from grinf.trie.view_file import StoredViews

SHOWN = 5
NAME_MARKS = "_-."

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
    examples: list[Any]
    items: int
    num_items: int
    version: str


@dataclass(frozen=True, slots=True)
class _ItemRows:
    """Item rows of the ids of some files."""

    rows: np.ndarray
    given: int
    unknown: int
    examples: list[Any]

    def bits(self, num_items: int) -> np.ndarray:
        live = np.zeros(num_items, bool)
        live[self.rows] = True
        return np.packbits(live, bitorder="little")


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
    if not name or not all(mark.isalnum() or mark in NAME_MARKS for mark in name):
        raise UsageError(f"--name {name!r} is no name of a view", fix="use letters, digits, _, - and .")
    trie = Trie.open(path)
    found = _read_items(trie, items, item_column)
    if not found.given:
        raise DataError(f"there are no item ids in {', '.join(map(str, items))}", "the view would be empty")
    bits = found.bits(trie.manifest.num_items)

    def change(stored: StoredViews) -> StoredViews:
        old = stored.views.get(name)
        if old is not None and not overwrite and not np.array_equal(old, bits):
            why, fix = "it lets other items through", "choose another --name, or replace it by --overwrite"
            raise UsageError(f"the view {name!r} of {path} exists", why, fix)
        return replace(stored, views={**stored.views, name: bits})

    status, stored = _change(path, trie, change, "stored", dry_run=dry_run)
    items_in = int(np.unpackbits(stored.views[name]).sum())
    return _report(trie, found, status, items_in, stored)


def remove_view(path: Path, name: str, *, dry_run: bool = False) -> ViewReport:
    """Forget a view; with `dry_run` only look whether that can be done.

    Raises:
        UsageError: There is no such view.
        TrieFileError: The trie or its views cannot be read.
        StorageError: The views cannot be written.
    """
    trie = Trie.open(path)
    trie.with_views([name])

    def change(stored: StoredViews) -> StoredViews:
        return replace(stored, views={other: bits for other, bits in stored.views.items() if other != name})

    none = _ItemRows(np.zeros(0, np.int64), 0, 0, [])
    status, stored = _change(path, trie, change, "removed", dry_run=dry_run)
    return _report(trie, none, status, 0, stored)


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
    bits = found.bits(trie.manifest.num_items)

    def change(stored: StoredViews) -> StoredViews:
        deleted = bits if stored.deleted is None else stored.deleted | bits
        return replace(stored, deleted=deleted if deleted.any() else None)

    status, stored = _change(path, trie, change, "deleted", dry_run=dry_run)
    gone = 0 if stored.deleted is None else int(np.unpackbits(stored.deleted).sum())
    return _report(trie, found, status, gone, stored)


def _change(
    path: Path, trie: Trie, change: Callable[[StoredViews], StoredViews], done: Status, *, dry_run: bool
) -> tuple[Status, StoredViews]:
    """Change what is stored beside a trie, one process at a time; return what was done and what there is."""
    with outputs.writing(outputs.place(view_file.path_of(path), "FILE")), view_file.locked(path):
        old = view_file.read(path)
        if old is None or old.trie_digest != trie.content_digest:
            old = StoredViews(trie.content_digest)
        new = change(old)
        if old.is_equal(new):
            return "unchanged", new
        if dry_run:
            return "planned", new
        view_file.write(path, new)
        return done, new


def _report(trie: Trie, found: _ItemRows, status: Status, items: int, stored: StoredViews) -> ViewReport:
    return ViewReport(
        status=status,
        given=found.given,
        unknown=found.unknown,
        examples=found.examples,
        items=items,
        num_items=trie.manifest.num_items,
        version=replace(trie, deleted=stored.deleted).version,
    )


def _read_items(trie: Trie, paths: Sequence[Path], item_column: str | None) -> _ItemRows:
    """Look up the ids of files.

    Raises:
        UsageError: No file, or no column of ids.
        DataError: A file that cannot be read, ids of another type, or none that the catalogue has.
    """
    rows: list[np.ndarray] = [np.zeros(0, np.int64)]
    given = unknown = 0
    examples: list[Any] = []
    for path in find_files(paths):
        for ids in _read_ids(path, item_column):
            found, offsets = trie.rows_of_items(ids)
            is_unknown = np.diff(offsets) == 0
            rows.append(found)
            given, unknown = given + len(ids), unknown + int(is_unknown.sum())
            examples += ids.take(pa.array(np.flatnonzero(is_unknown)[: SHOWN - len(examples)])).to_pylist()
    if given and unknown == given:
        what = f"none of the {given:,} item ids is in the catalogue: {', '.join(map(repr, examples))}"
        raise DataError(what, "the column or the trie is another one", "name the column by --item-column")
    return _ItemRows(np.concatenate(rows), given, unknown, examples)


def _read_ids(path: Path, item_column: str | None) -> Iterator[pa.Array]:
    """Yield the ids of a file that are not null."""
    with open_parquet(path) as file:
        names = columns_of(path, file)
        usual = [item_column] if item_column else [*ITEM_NAMES, *(names if len(names) == 1 else ())]
        column = next((name for name in usual if name in names), None)
        if column is None:
            what = (
                f"{path} has no column {item_column!r}"
                if item_column
                else f"{path} has no column of item ids"
            )
            raise UsageError(what, f"the columns are: {', '.join(names)}", "name one by --item-column")
        first = 0
        try:
            for batch in file.iter_batches(BATCH_ROWS, columns=[column]):
                refuse_bad_text(path, batch[column], first)
                first += batch.num_rows
                yield plain(batch[column]).drop_null()
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(f"{path} cannot be read", str(error).splitlines()[0]) from error
