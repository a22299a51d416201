# pyright: reportAttributeAccessIssue=false
# pyarrow.compute makes its functions when it is imported.
"""The catalogue in memory: nodes level by level in SID order, so that a child has the number of its edge.

The children of node i of level l are `child_ptr[l][i] .. child_ptr[l][i + 1] - 1` of level l + 1, siblings
ascending by code. A leaf's number is its row in the item index. Nothing else is needed to walk:

    level 0      codes[0]   3        7           child_ptr[0]  0 2 3
    level 1      codes[1]   1  9     4           child_ptr[1]  0 1 3 4
    level 2      codes[2]   5  0  2  8           leaves 0 1 2 3: SIDs 3-1-5, 3-9-0, 3-9-2, 7-4-8

Where SIDs may be short, levels below 0 have one more code, END, and a short SID ends in ENDs down to a leaf.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from grinf.errors import CapacityError, DataError, UsageError
from grinf.trie import store, view_file, views
from grinf.trie.manifest import EndCodes, Manifest, end_codes
from grinf.trie.tokens import TokenMapping

CHUNK = 1 << 22
"""Pointers that are looked at together."""


@dataclass(frozen=True, eq=False)
class Trie:
    """A catalogue of SIDs and their items, read-only and shared by all requests.

    Attributes:
        manifest: Shape, counts and provenance.
        codes: Per level, uint16 or uint32 [n_l].
        child_ptr: Per level but the last, uint32 or uint64 [n_l + 1].
        item_ptr: [leaves + 1], rows of the items of each leaf; None: leaf i has the one item i.
        item_ids: int64 or large_string, one per item row: by leaf, then by falling weight, then by id.
        item_order: Item rows sorted by id.
        item_weights: float64 per item row, where the catalogue has weights.
        tokens: (level, code) -> token id; None: not bound to a tokenizer yet.
        views: Named filters: for each, bits of the item rows that may be returned, as of `view_file`.
        deleted: Bits of the item rows that are gone; None: none is.
    """

    manifest: Manifest
    codes: tuple[np.ndarray, ...]
    child_ptr: tuple[np.ndarray, ...]
    item_ptr: np.ndarray | None
    item_ids: pa.Array
    item_order: np.ndarray
    item_weights: np.ndarray | None = None
    tokens: TokenMapping | None = None
    views: Mapping[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])
    deleted: np.ndarray | None = None

    @classmethod
    def open(cls, path: Path | str, *, verify: bool = True) -> "Trie":
        """Map a trie file into memory, with the views and the deleted items that are stored beside it.

        Args:
            path: File made by `grinf build-trie`.
            verify: Read all of it once and compare digests.

        Raises:
            TrieFileError: Missing, damaged, not a trie, or of another format version.
        """
        stored = view_file.read(Path(path))  # First: a build replaces the trie before it removes these.
        manifest, arrays = store.read(Path(path), verify=verify)
        if stored is None or stored.trie_digest != manifest.content_digest:
            stored = view_file.StoredViews(manifest.content_digest)
        depth = range(len(manifest.codebook_sizes))
        tokens = None
        if manifest.tokens is not None:
            tokens = TokenMapping(tuple(arrays[f"code2tok.L{level}"] for level in depth), manifest.tokens)
        return cls(
            manifest=manifest,
            codes=tuple(arrays[f"L{level}.tok"] for level in depth),
            child_ptr=tuple(arrays[f"L{level}.ptr"] for level in depth[1:]),
            item_ptr=arrays.get("item.ptr"),
            item_ids=_map_ids(arrays, manifest.num_items),
            item_order=arrays["item.order"],
            item_weights=arrays.get("item.w"),
            tokens=tokens,
            views=stored.views,
            deleted=stored.deleted,
        )

    @property
    def levels(self) -> int:
        """Codes of the longest SID."""
        return len(self.codes)

    @property
    def codebook_sizes(self) -> tuple[int, ...]:
        """Codes of each level, END not counted."""
        return self.manifest.codebook_sizes

    @property
    def end_codes(self) -> EndCodes:
        """Code that ends a short SID, per level; None where there is none."""
        return end_codes(self.codebook_sizes, self.manifest.end_token)

    @property
    def num_nodes(self) -> tuple[int, ...]:
        """Nodes of each level."""
        return self.manifest.num_nodes

    @property
    def num_leaves(self) -> int:
        """Distinct SIDs."""
        return self.num_nodes[-1]

    @property
    def content_digest(self) -> str:
        """Digest of the catalogue, as it was built."""
        return self.manifest.content_digest

    @property
    def version(self) -> str:
        """What a search without a view can find: the content digest, and one of the items deleted since."""
        gone = "" if self.deleted is None else f"-{view_file.digest(self.deleted)}"
        return self.content_digest + gone

    @property
    def token_ids(self) -> tuple[np.ndarray, ...] | None:
        """Per level int32 [K_l, + 1 with END], -1 where a code has no token; None: not bound yet."""
        return None if self.tokens is None else self.tokens.token_ids

    def with_tokens(self, mapping: TokenMapping) -> "Trie":
        """Bind codes to token ids.

        Raises:
            TrieFileError: The mapping is of other codebooks.
        """
        mapping.check_codebooks(self.codebook_sizes, self.end_codes)
        return replace(self, tokens=mapping)

    # As a device holds it: one numbering of all nodes, the root first, then level 0, level 1, ...

    @cached_property
    def level_offset(self) -> tuple[int, ...]:
        """Global number of each level's first node; the last entry counts all nodes."""
        return tuple(np.cumsum([1, *self.num_nodes]).tolist())

    @property
    def leaf_offset(self) -> int:
        """Global number of leaf 0."""
        return self.level_offset[-2]

    @property
    def gpu_bytes(self) -> int:
        """Size of codes and child pointers."""
        return sum(array.nbytes for array in (*self.codes, *self.child_ptr))

    def first_child(self) -> np.ndarray:
        """Global number of each inner node's first child, then the number of nodes; uint32 [inner nodes + 1].

        Raises:
            CapacityError: More nodes than the int32 numbers of a device can name.
        """
        *starts, total = self.level_offset
        if total >= 2**31:
            what = f"the trie has {total:,} nodes"
            raise CapacityError(what, "a device numbers at most 2,147,483,647", "split the catalogue")
        pointers = [
            ptr[:-1] + np.uint32(start) for ptr, start in zip(self.child_ptr, starts[1:], strict=True)
        ]
        return np.concatenate([[1], *pointers, [total]]).astype(np.uint32)

    def node_codes(self) -> np.ndarray:
        """Code of every node, uint16 or uint32 [nodes]; the root's means nothing."""
        return np.concatenate([np.zeros(1, self.codes[0].dtype), *self.codes])

    def capacity(self, level: int, width: int) -> int:
        """Candidates at `level` that `width` beams of the level before can have, at most."""
        if level == 0:
            return self.num_nodes[0]
        return round(np.interp(width, *self._bounds[level - 1]))

    @cached_property
    def _bounds(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Per level but the last: corners of the line of most children in all against a number of nodes."""
        bounds: list[tuple[np.ndarray, np.ndarray]] = []
        for ptr in self.child_ptr:
            nodes = group_sizes(ptr)
            degree = np.flatnonzero(nodes)[::-1]
            corners = np.cumsum([nodes[degree], nodes[degree] * degree], axis=1)
            bounds.append((np.append(0, corners[0]), np.append(0, corners[1])))
        return bounds

    # SIDs, leaves and items

    def sids(self, leaves: np.ndarray) -> np.ndarray:
        """Codes of leaves, int32 [n, levels], -1 past the end of a short SID."""
        node = np.asarray(leaves, np.int64)
        sids = np.empty((len(node), self.levels), np.int32)
        for level in reversed(range(self.levels)):
            code = self.codes[level][node].astype(np.int32)
            end = self.end_codes[level]
            sids[:, level] = code if end is None else np.where(code == end, -1, code)
            if level > 0:
                node = group_of(self.child_ptr[level - 1], node)
        return sids

    def leaf_of(self, sids: np.ndarray) -> np.ndarray:
        """Leaf of each SID, int64 [n], -1 where the catalogue has no such SID.

        Args:
            sids: Integers [n, levels]; -1 pads a short SID.

        Raises:
            UsageError: Another number of columns than the trie has levels.
        """
        given = np.asarray(sids, np.int64)
        if given.ndim != 2 or given.shape[1] != self.levels:
            raise UsageError(f"SIDs of shape {given.shape} do not fit a trie of {self.levels} levels")
        node, is_known = np.zeros(len(given), np.int64), np.ones(len(given), bool)
        for level, codes in enumerate(self.codes):
            code, end = given[:, level], self.end_codes[level]
            is_known &= code < self.codebook_sizes[level]
            sought = code if end is None else np.where(code == -1, end, code)
            low, high = np.zeros_like(node), np.full_like(node, len(codes))
            if level > 0:
                low, high = (self.child_ptr[level - 1][node + side].astype(np.int64) for side in (0, 1))
            node = _lower_bound(low, high, lambda at, codes=codes, sought=sought: codes[at] < sought)
            is_known &= node < high
            node = np.where(is_known, node, 0)
            is_known &= codes[node] == sought
        return np.where(is_known, node, -1)

    def items(self, leaves: np.ndarray) -> tuple[pa.Array, np.ndarray]:
        """Live items of leaves, in rank order within each: flat ids, and int64 [n + 1] offsets into them."""
        rows, offsets = self.item_rows(leaves)
        return self.item_ids.take(pa.array(rows)), offsets

    def item_rows(self, leaves: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows of the live items of leaves, flat int64, and int64 [n + 1] offsets into them."""
        leaf = np.asarray(leaves, np.int64)
        rows, offsets = leaf, np.arange(len(leaf) + 1)
        if self.item_ptr is not None:
            rows, offsets = _ranges(*(self.item_ptr[leaf + side].astype(np.int64) for side in (0, 1)))
        is_live = ~self.is_deleted(rows)
        return rows[is_live], np.append(0, np.cumsum(is_live))[offsets]

    def is_deleted(self, rows: np.ndarray) -> np.ndarray:
        """Whether the items of some rows are gone, bool [n]."""
        if self.deleted is None:
            return np.zeros(len(rows), bool)
        return (self.deleted[rows >> 3] >> (rows & 7).astype(np.uint8) & 1).astype(bool)

    def leaf_of_rows(self, rows: np.ndarray) -> np.ndarray:
        """Leaf of each row of the item index, int64 [n]."""
        return rows if self.item_ptr is None else group_of(self.item_ptr, rows)

    def leaf_of_items(self, item_ids: Any) -> np.ndarray:
        """Leaf of each item, int64 [n], -1 where unknown; of an item on several SIDs, its first leaf.

        Args:
            item_ids: Integers or strings, as the catalogue's; an array of numpy or Arrow, or a list.

        Raises:
            DataError: Ids of the other type.
        """
        rows, offsets = self.rows_of_items(item_ids)
        is_known = np.diff(offsets) > 0
        leaves = np.full(len(is_known), -1, np.int64)
        leaves[is_known] = self.leaf_of_rows(rows[offsets[:-1][is_known]])
        return leaves

    def rows_of_items(self, item_ids: Any) -> tuple[np.ndarray, np.ndarray]:
        """Item rows of each id, flat int64, and int64 [n + 1] offsets into them; an unknown id has none.

        Raises:
            DataError: Ids of the other type.
        """
        ids = self._as_ids(item_ids)
        if self.manifest.id_type == "int64" and not ids.null_count:
            first, end = (np.searchsorted(self._sorted_ids, ids, side) for side in ("left", "right"))
        else:
            first, end = self._rank(ids, pc.less), self._rank(ids, pc.less_equal)
        ranks, offsets = _ranges(first, end)
        return self.item_order[ranks].astype(np.int64), offsets

    def _rank(self, ids: pa.Array, is_before: Callable[[pa.Array, pa.Array], pa.Array]) -> np.ndarray:
        """How many ids of the catalogue are before each of some ids, by comparing them; int64 [n]."""

        def is_rank_before(rank: np.ndarray) -> np.ndarray:
            there = self.item_ids.take(pa.array(self.item_order[rank]))
            return pc.fill_null(is_before(there, ids), False).to_numpy(zero_copy_only=False)

        low, high = np.zeros(len(ids), np.int64), np.full(len(ids), self.manifest.num_items)
        return _lower_bound(low, high, is_rank_before)

    @cached_property
    def _sorted_ids(self) -> np.ndarray:
        """Integer ids in ascending order, for many look-ups; 8 bytes an item."""
        return self.item_ids.to_numpy()[self.item_order]

    def _as_ids(self, item_ids: Any) -> pa.Array:
        try:
            ids = item_ids if isinstance(item_ids, pa.Array | pa.ChunkedArray) else pa.array(item_ids)
            ids = ids.combine_chunks() if isinstance(ids, pa.ChunkedArray) else ids
            if pa.types.is_integer(ids.type) != pa.types.is_integer(self.item_ids.type) and len(ids):
                raise pa.ArrowInvalid(f"ids of type {ids.type} were given")
            return ids.cast(self.item_ids.type)
        except pa.ArrowException as error:
            what = f"item ids cannot be looked up: the trie has {self.manifest.id_type} ids"
            raise DataError(what, str(error), "use the ids of the catalogue") from error

    def collisions(self) -> tuple[int, int]:
        """Items whose SID holds another item as well, and the most items on one SID."""
        if self.item_ptr is None:
            return 0, 1
        sizes = group_sizes(self.item_ptr)
        return self.manifest.num_items - int(sizes[1]), len(sizes) - 1

    # Filters

    def with_view(self, name: str, live_items: np.ndarray) -> "Trie":
        """Add a named filter, bool [item rows]."""
        bits = np.packbits(np.asarray(live_items, bool), bitorder="little")
        return replace(self, views={**self.views, name: bits})

    def with_views(self, names: Sequence[str]) -> "Trie":
        """Keep some of the views: those that a search needs.

        Raises:
            UsageError: The trie has no such view.
        """
        return replace(self, views={name: self._view(name) for name in names})

    def live_items(self, names: Sequence[str]) -> np.ndarray:
        """Items that are not deleted and that all of some views let through; bool [item rows].

        Raises:
            UsageError: The trie has no such view.
        """
        bits = [self._view(name) for name in names] + ([] if self.deleted is None else [~self.deleted])
        if not bits:
            return np.ones(self.manifest.num_items, bool)
        together = np.bitwise_and.reduce(bits)
        return np.unpackbits(together, count=self.manifest.num_items, bitorder="little").view(bool)

    def _view(self, name: str) -> np.ndarray:
        if name not in self.views:
            known = ", ".join(sorted(self.views)) or "none"
            raise UsageError(f"the trie has no view {name!r}", f"it has: {known}", "name one of them")
        return self.views[name]

    def live_mask(self, *names: str) -> np.ndarray:
        """Nodes on a path to an item of `live_items`; bits as of `mask_from_leaves`."""
        return self.mask_from_leaves(views.live_leaves(self.live_items(names), self.item_ptr))

    def mask_from_leaves(self, live_leaves: np.ndarray) -> np.ndarray:
        """Nodes above live leaves (bool [SIDs]): bit n % 32 of word n // 32, uint32 [ceil(nodes / 32)]."""
        return views.pack_bits(views.live_nodes(live_leaves, self.child_ptr))


def group_sizes(ptr: np.ndarray) -> np.ndarray:
    """Number of groups by size, int64 [largest size + 1]; group i is [ptr[i], ptr[i + 1])."""
    starts = range(0, len(ptr) - 1, CHUNK)
    sizes = [np.bincount(np.diff(ptr[start : start + CHUNK + 1]).astype(np.int64)) for start in starts]
    longest = max(map(len, sizes))
    return np.sum([np.pad(counts, (0, longest - len(counts))) for counts in sizes], axis=0)


def _lower_bound(
    low: np.ndarray, high: np.ndarray, is_before: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """Search many sorted ranges [low, high) at once for the first position not before what is sought."""
    while (is_open := low < high).any():
        middle = np.where(is_open, (low + high) // 2, 0)
        is_right = is_open & is_before(middle)
        low, high = np.where(is_right, middle + 1, low), np.where(is_open & ~is_right, middle, high)
    return low


def group_of(ptr: np.ndarray, member: np.ndarray) -> np.ndarray:
    """Which [ptr[i], ptr[i + 1]) holds each member; in ptr's own dtype, for another would copy all of it."""
    return np.searchsorted(ptr, member.astype(ptr.dtype), side="right") - 1


def _ranges(first: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate the integers of every [first, end); and int64 [n + 1] offsets into them."""
    offsets = np.append(0, np.cumsum(end - first))
    return np.arange(offsets[-1]) + np.repeat(first - offsets[:-1], end - first), offsets


def _map_ids(arrays: Mapping[str, np.ndarray], count: int) -> pa.Array:
    if "item.id" in arrays:
        return pa.Array.from_buffers(pa.int64(), count, [None, pa.py_buffer(arrays["item.id"])])
    text, offsets = pa.py_buffer(arrays["item.utf8"]), pa.py_buffer(arrays["item.off"])
    return pa.LargeStringArray.from_buffers(count, offsets, text)
