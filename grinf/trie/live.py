"""The items that one query may see, made from those that all may see, at the cost of its own lists only.

A mask is a bit per node, and a catalogue has millions; a query allows or denies hundreds or thousands of
items. So its mask is not made from all items anew. An allow list sets the nodes above its items; a deny list
takes from the mask of all queries the nodes that die with its items: those below which as many die as lived.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from grinf.trie import views
from grinf.trie.csr import Trie, group_of

DENSE_SHARE = 64
"""From one item in so many on, a pass over the whole catalogue is quicker than the way up from each item."""


@dataclass(frozen=True, slots=True, eq=False)
class QueryFilter:
    """What one query may see.

    Attributes:
        mask: Its nodes, as of `Trie.mask_from_leaves`; read-only.
        live: bool [item rows], what all queries may see; None: everything.
        allowed: Item rows that alone may be returned, ascending; None: all that are live.
        denied: Item rows that may not, ascending; None: none of them.
    """

    mask: np.ndarray
    live: np.ndarray | None
    allowed: np.ndarray | None = None
    denied: np.ndarray | None = None

    @property
    def num_bytes(self) -> int:
        """Memory of its own."""
        return sum(part.nbytes for part in (self.mask, self.allowed, self.denied) if part is not None)

    def keeps(self, rows: np.ndarray) -> np.ndarray:
        """Whether the query may see the items of some rows, bool [n]."""
        kept = np.ones(len(rows), bool) if self.live is None else self.live[rows]
        if self.allowed is not None:
            kept = kept & _contains(self.allowed, rows)
        if self.denied is not None:
            kept = kept & ~_contains(self.denied, rows)
        return kept


class LiveItems:
    """The items that every query of a search may see.

    Args:
        trie: The catalogue.
        view: Name of a view; None: every item that is not deleted.

    Raises:
        UsageError: The trie has no such view.
    """

    def __init__(self, trie: Trie, view: str | None) -> None:
        self._trie = trie
        is_whole = view is None and trie.deleted is None
        self._live = None if is_whole else trie.live_items([view] if view is not None else [])
        root = np.array([0, trie.num_nodes[0]], np.uint32)
        self._above = (root, *trie.child_ptr, *([] if trie.item_ptr is None else [trie.item_ptr]))

    @cached_property
    def everyone(self) -> QueryFilter:
        """What a query without lists may see."""
        return QueryFilter(self._trie.mask_from_leaves(self._live_leaves), self._live)

    @cached_property
    def _live_leaves(self) -> np.ndarray:
        if self._live is None:
            return np.ones(self._trie.num_leaves, bool)
        return views.live_leaves(self._live, self._trie.item_ptr)

    def items_of_leaves(self) -> np.ndarray:
        """Live items of every leaf with any, int64."""
        if self._trie.item_ptr is None:
            return np.ones(int(self._live_leaves.sum()), np.int64)
        return _below(self._live, self._trie.item_ptr)[self._live_leaves].astype(np.int64)

    def narrow(self, allowed: np.ndarray | None, denied: np.ndarray | None) -> QueryFilter:
        """What a query may see.

        Args:
            allowed: Item rows that alone it may see, in any order; None: all.
            denied: Item rows that it may not see, in any order; None: none.
        """
        allowed = None if allowed is None else _runs(np.sort(allowed))[0]
        denied = None if denied is None else _runs(np.sort(denied))[0]
        if allowed is None and denied is None:
            return self.everyone
        if allowed is None:
            assert denied is not None
            mask = self._dense(denied, is_live=False) if self._is_many(denied) else self._without(denied)
            return QueryFilter(mask, self._live, None, denied)
        if denied is not None:
            allowed = allowed[~_contains(denied, allowed)]
        allowed = allowed if self._live is None else allowed[self._live[allowed]]
        mask = self._dense(allowed, is_live=True) if self._is_many(allowed) else self._above_rows(allowed)
        return QueryFilter(mask, None, allowed)

    def _is_many(self, rows: np.ndarray) -> bool:
        return len(rows) * DENSE_SHARE > self._trie.manifest.num_items

    def _dense(self, rows: np.ndarray, *, is_live: bool) -> np.ndarray:
        """Mask of the nodes above item rows, or of `everyone` without them, by a pass over all items."""
        if is_live or self._live is None:
            live = np.full(self._trie.manifest.num_items, not is_live)
        else:
            live = self._live.copy()
        live[rows] = is_live
        return self._trie.mask_from_leaves(views.live_leaves(live, self._trie.item_ptr))

    def _above_rows(self, rows: np.ndarray) -> np.ndarray:
        """Mask of the nodes above item rows."""
        below, levels = rows, [rows] if self._trie.item_ptr is None else []
        for ptr in reversed(self._above):
            below, _ = _runs(group_of(ptr, below))
            levels.append(below)
        return self._mask(levels)

    def _without(self, denied: np.ndarray) -> np.ndarray:
        """Mask of `everyone` less the nodes that die with item rows."""
        dying = denied if self._live is None else denied[self._live[denied]]
        levels = [dying] if self._trie.item_ptr is None else []
        for ptr, lived in zip(reversed(self._above), reversed(self._lived), strict=True):
            parents, deaths = _runs(group_of(ptr, dying))
            dying = parents[deaths == (ptr[parents + 1] - ptr[parents] if lived is None else lived[parents])]
            levels.append(dying)
        return self.everyone.mask & ~self._mask(levels)

    @cached_property
    def _lived(self) -> list[np.ndarray | None]:
        """For each of `_above`, the live ones below each node; None: all that there are."""
        if self._live is None:
            return [None] * len(self._above)
        counts: list[np.ndarray] = []
        below = self._live
        for ptr in reversed(self._above):
            counts.append(_below(below, ptr))
            below = counts[-1] > 0
        return [*reversed(counts)]

    def _mask(self, levels: list[np.ndarray]) -> np.ndarray:
        """Words of the nodes of each level, ascending, the leaves first and the root last."""
        starts = (0, *self._trie.level_offset)
        nodes = [nodes + start for nodes, start in zip(reversed(levels), starts, strict=False)]
        return views.bits_at(np.concatenate(nodes), -(-starts[-1] // 32))


def _contains(ascending: np.ndarray, sought: np.ndarray) -> np.ndarray:
    at = np.searchsorted(ascending, sought)
    return np.append(ascending, -1)[at] == sought


def _runs(ascending: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct values, and how often each occurs."""
    first = np.flatnonzero(np.append(len(ascending) > 0, ascending[1:] != ascending[:-1]))
    return ascending[first], np.diff(np.append(first, len(ascending)))


def _below(live: np.ndarray | None, ptr: np.ndarray) -> np.ndarray:
    """Live ones of each group [ptr[i], ptr[i + 1]); without `live`, all of them."""
    if live is None:
        return np.diff(ptr)
    return np.add.reduceat(live.astype(np.uint32), ptr[:-1].astype(np.int64))
