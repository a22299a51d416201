"""Looking into a trie file: is it sound, what is where, and the catalogue back as parquet."""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from grinf.errors import StorageError, UsageError
from grinf.jobs.sid_columns import Fault, SidReader
from grinf.trie import store
from grinf.trie.csr import Trie

OnProgress = Callable[[str, int, int | None], None]
EXPORT_LEAVES = 1 << 18


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
    """Compare every tensor of a file with its digest.

    Raises:
        TrieFileError: The file is not a whole trie, so that there is nothing to compare.
    """
    manifest, arrays = store.read(path, verify=False)
    damaged = store.damaged_tensors(manifest, arrays)
    return [
        TensorCheck(name, array.dtype.name, len(array), array.nbytes, not {name, "header"} & set(damaged))
        for name, array in arrays.items()
    ]


def lookup_sids(trie: Trie, texts: Sequence[str]) -> list[Found]:
    """Find the items of SIDs, which are written in any form that `grinf build-trie` reads.

    Raises:
        UsageError: A text that is no SID.
    """
    found: list[Found] = []
    for text in texts:
        read = SidReader().read([pa.array([text])], ["--sid"])
        codes = read.codes[0][read.codes[0] >= 0]
        if read.fault[0] != Fault.NONE or len(codes) > trie.levels:
            raise UsageError(f"--sid {text!r} is no SID of {trie.levels} codes", fix="write it as 3-9-1")
        leaf = trie.leaf_of(np.pad(codes, (0, trie.levels - len(codes)), constant_values=-1)[None])
        ids, _ = trie.items(leaf[leaf >= 0])
        found.append(Found(codes.tolist(), ids.to_pylist()))
    return found


def lookup_items(trie: Trie, texts: Sequence[str]) -> list[Found]:
    """Find the SIDs of items.

    Raises:
        UsageError: A text that is no item id of this catalogue's type.
    """
    found: list[Found] = []
    for text in texts:
        try:
            item_id = int(text) if trie.manifest.id_type == "int64" else text
            rows, _ = trie.rows_of_items([item_id])
        except (ValueError, OverflowError) as error:
            raise UsageError(f"--item {text!r} is no item id", "the catalogue's ids are integers") from error
        sids = [[code for code in sid if code >= 0] for sid in trie.sids(trie.leaf_of_rows(rows)).tolist()]
        found += [Found(sid, [item_id]) for sid in sids or [[]]]
    return found


def export_trie(path: Path, output: Path, *, overwrite: bool, on_progress: OnProgress) -> int:
    """Write the catalogue as parquet, one row per SID in order: lists `sid`, `item_id`, and `weight` if any.

    Returns:
        Rows written.

    Raises:
        UsageError: The output exists.
        TrieFileError: The trie cannot be read.
        StorageError: The output cannot be written.
    """
    if output.exists() and not overwrite:
        raise UsageError(f"{output} exists", fix="choose another -o, or replace it by --overwrite")
    trie = Trie.open(path)
    unnamed = output.with_name(f"{output.name}.tmp-{os.getpid()}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        starts = range(0, trie.num_leaves, EXPORT_LEAVES)
        with pq.ParquetWriter(unnamed, _sid_rows(trie, 0, 0).schema) as writer:
            for start in starts:
                writer.write_batch(_sid_rows(trie, start, min(start + EXPORT_LEAVES, trie.num_leaves)))
                on_progress("export", start, trie.num_leaves)
        store.publish(unnamed, output)
    except OSError as error:
        fix = "free some space, or choose another -o"
        raise StorageError(f"cannot write {output}", str(error), fix) from error
    finally:
        with suppress(FileNotFoundError):
            unnamed.unlink()
    return trie.num_leaves


def _sid_rows(trie: Trie, start: int, end: int) -> pa.RecordBatch:
    leaves = np.arange(start, end)
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
