"""Looking into a trie file: is it sound, what is where, and the catalogue back as parquet."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from grinf.errors import UsageError
from grinf.jobs import outputs
from grinf.jobs.json_items import is_integer
from grinf.jobs.parquet_files import mark_of
from grinf.jobs.sid_columns import Fault, SidReader
from grinf.trie import store, view_file
from grinf.trie.build import OnProgress
from grinf.trie.csr import Trie
from grinf.trie.publish import replacing

EXPORT_LEAVES = 1 << 18
EXPORTED = b"grinf.trie_export"
"""Key of an export's metadata, with the version of the trie."""


@dataclass(frozen=True, slots=True)
class TensorCheck:
    """One tensor of a file, and whether it is what the manifest says."""

    name: str
    dtype: str
    length: int
    num_bytes: int
    is_sound: bool


@dataclass(frozen=True, slots=True)
class Found:
    """A SID and items of it; one of the two is empty where the catalogue has no such thing."""

    sid: list[int]
    item_ids: list[Any]


def verify_trie(path: Path) -> list[TensorCheck]:
    """Compare every tensor of a file, and of the views beside it, with its digest.

    Raises:
        TrieFileError: A file is not whole, so that there is nothing to compare.
    """
    stored, damaged_views = view_file.inspect(path)
    manifest, arrays = store.read(path, verify=False)
    damaged = set(store.damaged_tensors(manifest, arrays))
    damaged |= set(arrays) if "header" in damaged else set(damaged_views)
    return [
        TensorCheck(name, array.dtype.name, len(array), array.nbytes, name not in damaged)
        for name, array in (*arrays.items(), *(stored.tensors.items() if stored else ()))
    ]


def lookup_sids(trie: Trie, texts: Sequence[str]) -> list[Found]:
    """Find the items of SIDs, which are written in any form that `grinf build-trie` reads.

    Raises:
        UsageError: A text that is no SID.
    """
    found: list[Found] = []
    for text in texts:
        read = SidReader().read([pa.array([text.encode(errors="replace").decode()])], ["--sid"])
        codes = read.codes[0][read.codes[0] >= 0]
        if read.fault[0] != Fault.NONE or len(codes) > trie.levels:
            raise UsageError(f"--sid {text!r} is no SID of {trie.levels} codes", fix="write it as 3-9-1")
        leaf = trie.leaf_of(np.pad(codes, (0, trie.levels - len(codes)), constant_values=-1)[None])
        ids, _ = trie.items(leaf[leaf >= 0])
        found.append(Found(codes.tolist(), ids.to_pylist()))
    return found


def lookup_items(trie: Trie, texts: Sequence[str]) -> list[Found]:
    """Find the SIDs of items; a deleted item has none.

    Raises:
        UsageError: A text that is no item id of this catalogue's type.
    """
    found: list[Found] = []
    id_type = trie.manifest.id_type
    for text in texts:
        if not (is_integer(text) if id_type == "int64" else text.encode(errors="replace").decode() == text):
            raise UsageError(f"--item {text!r} is no item id", f"the item ids of the catalogue are {id_type}")
        item_id = int(text) if id_type == "int64" else text
        rows, _ = trie.rows_of_items([item_id])
        leaves = trie.leaf_of_rows(rows[~trie.is_deleted(rows)])
        sids = [[code for code in sid if code >= 0] for sid in trie.sids(leaves).tolist()]
        found += [Found(sid, [item_id]) for sid in sids or [[]]]
    return found


def export_trie(
    path: Path, output: Path, *, overwrite: bool, on_progress: OnProgress, dry_run: bool = False
) -> int | None:
    """Write the catalogue as parquet, one row per SID in order: lists `sid`, `item_id`, and `weight` if any.

    Deleted items are left out, and SIDs that had no others.

    Returns:
        Rows written; 0 with `dry_run`, which only looks whether they can be. None: the output is up to date.

    Raises:
        UsageError: The output exists, and this version of the trie did not make it, or it is the trie.
        TrieFileError: The trie cannot be read.
        StorageError: The output cannot be written.
    """
    trie, written, output = Trie.open(path), 0, outputs.place(output)
    outputs.refuse_inputs([output], [path, view_file.path_of(path)])
    found = outputs.existing(output, lambda path: mark_of(path, EXPORTED), "grinf trie export")
    if found == trie.version.encode() and not overwrite:
        return None
    if found is not None and not overwrite:
        raise outputs.exists(output, "it is of another catalogue, or of another version of this one")
    if dry_run:
        return 0
    schema = _sid_rows(trie, 0, 0).schema.with_metadata({EXPORTED: trie.version})
    with outputs.writing(output), replacing(output) as unnamed, pq.ParquetWriter(unnamed, schema) as writer:
        for start in range(0, trie.num_leaves, EXPORT_LEAVES):
            rows = _sid_rows(trie, start, min(start + EXPORT_LEAVES, trie.num_leaves))
            writer.write_batch(rows)
            written += rows.num_rows
            on_progress("export", start, trie.num_leaves)
    return written


def _sid_rows(trie: Trie, start: int, end: int) -> pa.RecordBatch:
    leaves = np.arange(start, end)
    if trie.deleted is not None:
        leaves = leaves[np.diff(trie.item_rows(leaves)[1]) > 0]
    sids = trie.sids(leaves)
    rows, offsets = trie.item_rows(leaves)
    columns = {
        "sid": _lists(np.append(0, np.cumsum((sids >= 0).sum(1))), pa.array(sids[sids >= 0])),
        "item_id": _lists(offsets, trie.item_ids.take(pa.array(rows))),
    }
    if trie.item_weights is not None:
        columns["weight"] = _lists(offsets, pa.array(trie.item_weights[rows]))
    return pa.record_batch(columns)


def _lists(offsets: np.ndarray, values: pa.Array) -> pa.Array:
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), values)
