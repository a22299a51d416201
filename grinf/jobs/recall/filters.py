"""What each query of a job may see: a view for all of them, items deleted from the trie, and its own lists.

All filters are filters of items. They are combined on items, and a SID is searched while one of its items is
left; the same items are left when a SID that was found is expanded, and when the truth is looked up. So every
answer and every metric is that of a catalogue without the other items.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import xxhash

from grinf.errors import UsageError
from grinf.jobs.arrow_types import is_list, is_text
from grinf.jobs.recall.sid_lookup import Named, SidLookup
from grinf.state.request import RecallResult, Request
from grinf.trie import view_file
from grinf.trie.live import LiveItems, QueryFilter

if TYPE_CHECKING:
    from grinf.trie import Trie

CACHE_BYTES = 256 << 20
"""Filters that are kept for queries with the same lists."""


class Filters:
    """Filters of a job.

    Args:
        trie: The catalogue.
        view: Name of a view; None: every item that is not deleted.
        allow, deny: Columns of item ids, and their types; None: there is none.

    Raises:
        UsageError: An unknown view, or a column that holds no ids of this catalogue.
    """

    def __init__(
        self, trie: "Trie", view: str | None, allow: pa.Field | None = None, deny: pa.Field | None = None
    ) -> None:
        self.trie, self.view = trie, view
        self.columns = tuple(None if field is None else field.name for field in (allow, deny))
        self.live = LiveItems(trie, view)
        self.id_type = pa.large_string() if trie.manifest.id_type == "string" else pa.int64()
        for field in filter(None, (allow, deny)):
            _check_type(field, trie)
        self._cache: OrderedDict[bytes, tuple[QueryFilter, int]] = OrderedDict()
        self._cached_bytes = 0

    @property
    def has_lists(self) -> bool:
        """Whether queries have lists of their own."""
        return any(self.columns)

    @property
    def view_digest(self) -> str:
        """Digest of the items of the view; empty: there is no view."""
        return "" if self.view is None else view_file.digest(self.trie.views[self.view])

    def open(self, queries: pa.Table, lookup: SidLookup | None, truth: Named | None) -> "UnitFilters":
        """Take the lists of a unit's queries; and the targets, as `lookup` found them, if there are any."""
        lists = [None if name is None else ItemLists(queries[name], self.id_type) for name in self.columns]
        if lookup is None or truth is None:
            return UnitFilters(self, lists, None)
        return UnitFilters(self, lists, Truth(self.trie, truth, lookup.names_items))

    def narrow(self, allowed: pa.Array | None, denied: pa.Array | None) -> tuple[QueryFilter, int]:
        """What a query may see, and how many ids of its lists the catalogue has not."""
        key = b"".join(_digest(ids) for ids in (allowed, denied))
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        found = [None if ids is None else self._look_up(ids) for ids in (allowed, denied)]
        rows = [None if one is None else one[0] for one in found]
        made = self.live.narrow(*rows), sum(one[1] for one in found if one is not None)
        self._cache[key] = made
        self._cached_bytes += made[0].num_bytes
        while self._cached_bytes > CACHE_BYTES and len(self._cache) > 1:
            _, (oldest, _) = self._cache.popitem(last=False)
            self._cached_bytes -= oldest.num_bytes
        return made

    def _look_up(self, ids: pa.Array) -> tuple[np.ndarray, int]:
        """Item rows of ids, and how many are unknown."""
        # In order, neighbours are found near to each other, many times as fast.
        ordered = np.sort(ids.to_numpy()) if pa.types.is_integer(ids.type) else ids
        rows, offsets = self.trie.rows_of_items(ordered)
        return rows, int((np.diff(offsets) == 0).sum())


class UnitFilters:
    """Filters of a unit's queries. They exist while their query runs: thousands at once would not fit.

    Attributes:
        kept: For each query that was answered, bool per item row of its SIDs: whether it may be returned.
        unknown: Ids in the lists that the catalogue has not.
    """

    def __init__(self, filters: Filters, lists: Sequence["ItemLists | None"], truth: "Truth | None") -> None:
        self._filters, self._lists, self._truth = filters, lists, truth
        self._running: dict[int, QueryFilter] = {}
        self.kept: dict[int, np.ndarray] = {}
        self.unknown = 0

    @property
    def truth(self) -> Named | None:
        """Targets, as a catalogue without the items that a query may not see knows them."""
        return None if self._truth is None else self._truth.narrowed

    def request(self, row: int, input_ids: Sequence[int]) -> Request:
        """Make the request of a query."""
        allowed, denied = (None if lists is None else lists.ids(row) for lists in self._lists)
        is_plain = allowed is None and denied is None
        query, unknown = (
            (self._filters.live.everyone, 0) if is_plain else self._filters.narrow(allowed, denied)
        )
        self._running[row] = query
        self.unknown += unknown
        if self._truth is not None:
            self._truth.narrow(row, query)
        if is_plain:
            return Request(row, input_ids, view=self._filters.view)
        return Request(row, input_ids, live=query.mask)

    def finish(self, result: RecallResult, top_k: int | None) -> None:
        """Note which items of its first `top_k` SIDs a query may see."""
        query = self._running.pop(result.request_id)
        if result.leaves is not None:
            rows, _ = self._filters.trie.item_rows(result.leaves[:top_k])
            self.kept[result.request_id] = query.keeps(rows)


class ItemLists:
    """Lists of item ids, one per query.

    Args:
        column: Lists, or single ids; null: no list.
        id_type: Of the catalogue.
    """

    def __init__(self, column: pa.ChunkedArray, id_type: pa.DataType) -> None:
        if is_list(column.type) or pa.types.is_null(column.type):
            lists = column.cast(pa.large_list(id_type)).combine_chunks()
        else:
            single = column.cast(id_type).combine_chunks()
            ends = np.append(0, np.cumsum(single.is_valid()))
            lists = pa.LargeListArray.from_arrays(
                pa.array(ends, pa.int64()), single.drop_null(), mask=single.is_null()
            )
        self._is_list = lists.is_valid().to_numpy(zero_copy_only=False)
        self._ends, self._ids = lists.offsets.to_numpy(), lists.values

    def ids(self, row: int) -> pa.Array | None:
        """The list of a query, without nulls; None: it has no list."""
        if not self._is_list[row]:
            return None
        ids = self._ids.slice(self._ends[row], self._ends[row + 1] - self._ends[row])
        return ids.drop_null() if ids.null_count else ids


class Truth:
    """Targets of a unit's queries, and which of them their query may see.

    Args:
        trie: The catalogue.
        named: The targets.
        names_items: Whether they are items; else SIDs, of which a query sees those with an item that it sees.
    """

    def __init__(self, trie: "Trie", named: Named, names_items: bool) -> None:
        self._named, self._names_items = named, names_items
        self._is_live = np.zeros(len(named.row), bool)
        if names_items:
            self._rows, self._ends = trie.rows_of_items(named.given)
        else:
            is_known = named.in_catalogue
            self._rows, ends = trie.item_rows(trie.leaf_of(named.sids[is_known]))
            counts = np.zeros(len(is_known), np.int64)
            counts[is_known] = np.diff(ends)
            self._ends = np.append(0, np.cumsum(counts))

    @property
    def narrowed(self) -> Named:
        """The targets; what a query may not see is not in its catalogue, and an item there has no SID."""
        is_hidden = ~self._is_live if self._names_items else np.zeros(len(self._is_live), bool)
        sids = np.where(is_hidden[:, None], np.int32(-1), self._named.sids)
        return replace(self._named, sids=sids, in_catalogue=self._is_live)

    def narrow(self, row: int, query: QueryFilter) -> None:
        """Note what a query may see of its targets."""
        first, end = np.searchsorted(self._named.row, (row, row + 1))
        ends = self._ends[first : end + 1] - self._ends[first]
        kept = query.keeps(self._rows[self._ends[first] : self._ends[end]])
        target = np.repeat(np.arange(end - first), np.diff(ends))
        self._is_live[first:end] = np.bincount(target[kept], minlength=end - first) > 0


def _check_type(field: pa.Field, trie: "Trie") -> None:
    element = field.type.value_type if is_list(field.type) else field.type
    is_number = pa.types.is_integer(element) and not pa.types.is_uint64(element)
    fits = is_text(element) if trie.manifest.id_type == "string" else is_number
    if not fits and not pa.types.is_null(element):
        why = f"the item ids of the catalogue are {trie.manifest.id_type}"
        raise UsageError(f"column {field.name!r} holds {field.type}", why, "give lists of item ids")


def _digest(ids: pa.Array | None) -> bytes:
    """Digest of a list, 16 bytes; of no list, one that no list has."""
    if ids is None:
        return bytes(16)
    return xxhash.xxh3_128(pa.record_batch([ids], ["id"]).serialize()).digest()
