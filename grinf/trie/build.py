# pyright: reportAttributeAccessIssue=false
# pyarrow.compute makes its functions when it is imported.
"""Building a trie: rows in any order, sorted by SID, items checked and indexed, levels, one verified file.

Memory is bounded by a limit, not by the catalogue: rows wait in files and are sorted in runs. Everything is
ordered totally by content, so that equal catalogues give equal bytes, whatever order and files they came in.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from grinf import __version__
from grinf.errors import DataError
from grinf.trie import store
from grinf.trie.csr import Trie
from grinf.trie.items import ItemIndex, OnItemConflict, index_items, item_order
from grinf.trie.levels import ItemWriter, LevelWriter, SidPacking
from grinf.trie.manifest import FORMAT_VERSION, Manifest, Source, end_codes
from grinf.trie.sort import ExternalSort, Spool, stable_argsort
from grinf.trie.tokens import TokenMapping

OnProgress = Callable[[str, int, int | None], None]
MakeTokens = Callable[[Sequence[np.ndarray]], TokenMapping]
"""Takes, per level, bool [K_l] of the codes that occur."""

DEFAULT_MEMORY_LIMIT = 4 << 30
MAX_CODES = 1 << 24
RUN_SHARE = 6
"""Memory limit over the bytes of a run: a sort takes about four times its run, beside a spool or two."""


@dataclass(frozen=True, slots=True)
class ItemRows:
    """Some rows of a catalogue.

    Attributes:
        codes: int32 [n, levels], -1 past the end of a short SID; every row has at least one code.
        ids: int64 or large_string array, [n].
        weights: float64 [n]; None: the catalogue has none.
    """

    codes: np.ndarray
    ids: pa.Array
    weights: np.ndarray | None = None

    def depth(self) -> np.ndarray:
        """Codes of each row's SID, int64 [n]."""
        if self.codes[:, -1].min(initial=0) >= 0:
            return np.full(len(self.codes), self.codes.shape[1])
        return (self.codes >= 0).sum(1)


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape of the SIDs: codes per level, and the token that ends short ones, if there are any.

    Raises:
        DataError: More codes than a model can have tokens for; tables are as large as their number.
    """

    codebook_sizes: tuple[int, ...]
    end_token: str | None = None

    def __post_init__(self) -> None:
        if (total := sum(self.codebook_sizes)) > MAX_CODES:
            size, level = max((size, level) for level, size in enumerate(self.codebook_sizes))
            what = f"level {level} has codes up to {size - 1:,}, {total:,} codes in all"
            fix = "give --codebook-sizes K,K,K: rows with larger codes are then named"
            raise DataError(what, f"no model has token ids for more than {MAX_CODES:,}", fix)


@dataclass(frozen=True, slots=True)
class Provenance:
    """What the file says about its making."""

    sources: tuple[Source, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    rows_read: int = 0
    rows_dropped: dict[str, int] = field(default_factory=dict[str, int])


class SidShapes:
    """What the SIDs of some rows are like: depth and codebook sizes may be known only after the last one.

    Attributes:
        rows_of_depth: Rows by number of codes.
        largest: Largest code of each level, by number of codes.
    """

    def __init__(self) -> None:
        self.rows_of_depth: dict[int, int] = {}
        self.largest: dict[int, np.ndarray] = {}

    def add(self, rows: ItemRows) -> None:
        """Take rows, at least one."""
        depth = rows.depth()
        for levels in np.flatnonzero(np.bincount(depth)).tolist():
            of_depth = rows.codes[depth == levels, :levels]
            self.rows_of_depth[levels] = self.rows_of_depth.get(levels, 0) + len(of_depth)
            self.largest[levels] = np.maximum(self.largest.get(levels, 0), of_depth.max(0))


class RowStore(SidShapes):
    """Rows as they are read, in files until all are there."""

    def __init__(self, folder: Path, memory_limit: int = DEFAULT_MEMORY_LIMIT) -> None:
        super().__init__()
        self._spool = Spool(folder / "rows", memory_limit // RUN_SHARE)

    def add(self, rows: ItemRows) -> None:
        """Keep rows, at least one."""
        super().add(rows)
        depth, is_code = rows.depth(), rows.codes >= 0
        offsets = pa.array(np.append(0, np.cumsum(depth)), pa.int32())
        columns = {"sid": pa.ListArray.from_arrays(offsets, rows.codes[is_code]), "id": rows.ids}
        if rows.weights is not None:
            columns["weight"] = pa.array(rows.weights)
        self._spool.append(pa.record_batch(columns))

    def drain(self, levels: int, *, short: bool) -> Iterator[tuple[np.ndarray, pa.RecordBatch]]:
        """Yield rows once: codes int32 [n, levels], and the columns beside them; deeper SIDs are left out.

        Args:
            levels: Codes of a full SID.
            short: Whether shorter SIDs are kept, padded with -1, or left out too.
        """
        for block in self._spool.drain():
            depth = pc.list_value_length(block["sid"]).to_numpy()
            is_kept = (depth <= levels) if short else (depth == levels)
            batch = block if is_kept.all() else block.filter(pa.array(is_kept))
            flat = pc.list_flatten(batch["sid"]).to_numpy()
            codes = np.full((batch.num_rows, levels), -1, np.int32)
            if len(flat) == codes.size:
                codes = flat.reshape(codes.shape)
            else:
                codes[np.arange(levels) < depth[is_kept][:, None]] = flat
            yield codes, batch.drop_columns(["sid"])


@contextmanager
def working_folder(path: Path) -> Generator[Path]:
    """Make a folder beside an output for all temporary files; it is removed whatever happens."""
    folder = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    shutil.rmtree(folder, ignore_errors=True)  # Of a process of the same number that was killed.
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def build_trie(
    rows: RowStore,
    layout: Layout,
    folder: Path,
    *,
    memory_limit: int = DEFAULT_MEMORY_LIMIT,
    on_conflict: OnItemConflict = "error",
    make_tokens: MakeTokens | None = None,
    provenance: Provenance = Provenance(),
    on_progress: OnProgress = lambda stage, done, total: None,
) -> Path:
    """Build a trie file in a working folder and read it back; `publish` gives it its name.

    Args:
        rows: The catalogue; used up. Rows of another depth than the layout's are left out.
        layout: Shape of the SIDs.
        folder: Working folder, on the file system of the final file.
        memory_limit: Bytes to use, about.
        on_conflict: What an item on several SIDs does, see `items.index_items`.
        make_tokens: Gives token ids to the codes; None: the trie is bound to a tokenizer later.
        provenance: What to note about sources and settings.
        on_progress: Called with stage, rows done and rows in all.

    Raises:
        DataError: No rows, or an item on several SIDs where that is refused.
        UsageError: The tokenizer does not know the codes.
    """
    ends = end_codes(layout.codebook_sizes, layout.end_token)
    packing = SidPacking(layout.codebook_sizes, ends)
    run_bytes = memory_limit // RUN_SHARE
    by_sid = ExternalSort(
        folder / "by-sid", packing.columns[0], partial(sid_order, packing=packing), run_bytes
    )
    by_item = ExternalSort(folder / "by-item", "id", item_order, run_bytes)
    in_order = Spool(folder / "in-order", run_bytes)
    total = done = 0
    for codes, others in rows.drain(len(layout.codebook_sizes), short=layout.end_token is not None):
        columns = packing.pack(codes) | {name: others[name] for name in others.schema.names}
        by_sid.add(pa.record_batch(columns))
        total += len(codes)
    if total == 0:
        raise DataError("the catalogue is empty", "no row has an item and a SID")
    for piece in by_sid.drain():
        in_order.append(piece)
        by_item.add(piece.append_column("row", pa.array(np.arange(done, done + piece.num_rows))))
        done += piece.num_rows
        on_progress("sort", done, total)
    index = index_items(by_item.drain(), packing, folder, run_bytes, on_conflict)
    num_items = total - len(index.dropped)
    parts = [index.write_order(folder, num_items)]
    levels, items = _write_levels(in_order, packing, index, num_items, folder, on_progress)
    parts += [*levels.close(), *items.close()]
    mapping = None
    if make_tokens is not None:
        mapping = make_tokens([used[:k] for used, k in zip(levels.used, layout.codebook_sizes, strict=True)])
        mapping.check_codebooks(layout.codebook_sizes, ends)
        parts += [store.write_part(folder, f"code2tok.L{n}", ids) for n, ids in enumerate(mapping.token_ids)]
    manifest = Manifest(
        codebook_sizes=layout.codebook_sizes,
        end_token=layout.end_token,
        num_nodes=tuple(levels.num_nodes),
        num_items=num_items,
        items_on_several_sids=index.conflicts,
        id_type=items.id_type,
        rows_read=provenance.rows_read,
        rows_dropped=provenance.rows_dropped | index.reasons(),
        tokens=None if mapping is None else mapping.source,
        sources=provenance.sources,
        settings=provenance.settings,
        digests={part.name: part.digest for part in parts},
        content_digest=store.content_digest((p.name, p.dtype, p.length, p.digest) for p in parts),
        format_version=FORMAT_VERSION,
        grinf_version=__version__,
    )
    built = folder / "built"
    store.write_container(built, parts, manifest)
    store.read(built, verify=True)
    return built


def trie_of(
    codes: np.ndarray,
    item_ids: Sequence[int] | Sequence[str] | np.ndarray,
    *,
    weights: np.ndarray | None = None,
    codebook_sizes: Sequence[int] | None = None,
    end_token: str | None = None,
) -> Trie:
    """Build a trie of a few rows; its file is gone as soon as it is mapped.

    Args:
        codes: Integers [n, levels]; -1 pads a short SID.
        item_ids: One id per row, integers or strings.
        weights: float64 [n], order of the items of one SID.
        codebook_sizes: Codes per level; None: largest code + 1.
        end_token: Text of the token that ends short SIDs; None: there are none.
    """
    codes, ids = np.asarray(codes, np.int32), pa.array(item_ids)
    ids = ids.cast(pa.int64() if pa.types.is_integer(ids.type) else pa.large_string())
    sizes = tuple(codebook_sizes or (codes.max(0) + 1).tolist())
    with tempfile.TemporaryDirectory(prefix="grinf-") as folder:
        rows = RowStore(Path(folder))
        rows.add(ItemRows(codes, ids, weights))
        built = build_trie(rows, Layout(sizes, end_token), Path(folder), on_conflict="all")
        return Trie.open(built, verify=False)


def sid_order(rows: pa.RecordBatch, packing: SidPacking) -> np.ndarray:
    """Order by SID, then weight descending, then item id ascending; int64 [n]."""
    words = [rows[column].to_numpy() for column in packing.columns]
    order = stable_argsort(words[-1])
    for word in reversed(words[:-1]):
        order = order[stable_argsort(word[order])]
    is_same = np.logical_and.reduce([word[order][1:] == word[order][:-1] for word in words])
    if is_same.any():  # Only SIDs with several items need the slower comparison by weight and id.
        is_tied = np.append(False, is_same) | np.append(is_same, False)
        group = pa.array(np.append(0, np.cumsum(~is_same))[is_tied])
        tied = rows.take(pa.array(order[is_tied])).drop_columns(packing.columns).append_column("group", group)
        keys = (("group", "ascending"), ("weight", "descending"), ("id", "ascending"))
        ranks = pc.sort_indices(tied, sort_keys=[key for key in keys if key[0] in tied.schema.names])
        order[is_tied] = order[is_tied][ranks.to_numpy()]
    return order


def _write_levels(
    in_order: Spool,
    packing: SidPacking,
    index: ItemIndex,
    num_items: int,
    folder: Path,
    on_progress: OnProgress,
) -> tuple[LevelWriter, ItemWriter]:
    """Write the rows that stay."""
    levels = LevelWriter(folder, packing.limits, num_items)
    items: ItemWriter | None = None
    end = 0
    for block in in_order.drain():
        start, end = end, end + block.num_rows
        is_kept = np.ones(block.num_rows, bool)
        is_kept[index.dropped[slice(*np.searchsorted(index.dropped, (start, end)))] - start] = False
        rows = block if is_kept.all() else block.filter(pa.array(is_kept))
        items = items or ItemWriter(folder, rows.schema, num_items)
        if rows.num_rows:
            items.add(rows, levels.add(packing.unpack(rows)))
        on_progress("write", end, num_items + len(index.dropped))
    assert items is not None, "an empty catalogue has been refused"
    return levels, items
