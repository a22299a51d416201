"""Rows that were read from JSON, as columns of Arrow; what most values are, says what a column's type is."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa

from grinf.jobs.arrow_types import is_list
from grinf.jobs.item_columns import ItemColumns, Piece
from grinf.jobs.sid_columns import Fault

SHOWN_TEXT = 120
SID_TYPES: dict[str, pa.DataType] = {
    "codes": pa.list_(pa.int64()),
    "tokens": pa.list_(pa.large_string()),
    "text": pa.large_string(),
    "number": pa.int64(),
}
ITEM_TYPES: dict[str, pa.DataType] = {"number": pa.int64(), "text": pa.large_string()}


@dataclass(frozen=True, slots=True)
class Row:
    """An item and its SID as they stand, and where; `fault` if they cannot even be taken apart."""

    where: str
    item: Any
    sid: Any
    weight: Any = None
    fault: Fault = Fault.NONE


@dataclass(frozen=True, slots=True)
class Survey:
    """How often a name has a value of each kind, in a whole file, so that its order decides nothing."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])

    def note(self, name: str, value: Any) -> None:
        """Take a value."""
        self.counts[name, _kind(value)] += 1

    @property
    def names(self) -> list[str]:
        """Every name."""
        return list(dict.fromkeys(name for name, _ in self.counts))

    def types(self, item: str, sids: Sequence[str]) -> "Types":
        """What most values of an item, and of a SID, are.

        Args:
            item: Name of the items.
            sids: Name of the SIDs, or of each level of them.
        """
        sid = self._usual(sids, tuple(SID_TYPES))
        if len(sids) > 1:
            sid = {"number": "codes", "text": "tokens"}.get(self._usual(sids, ("number", "text")))
        return Types(ITEM_TYPES.get(self._usual([item], tuple(ITEM_TYPES))), SID_TYPES.get(sid or ""))

    def _usual(self, names: Sequence[str], kinds: Sequence[str]) -> str:
        counts = {kind: sum(self.counts[name, kind] for name in names) for kind in kinds}
        return max(counts, key=lambda kind: counts[kind]) if any(counts.values()) else ""


@dataclass(frozen=True, slots=True)
class Types:
    """Types of the columns of a file; None: there is no value for one."""

    item: pa.DataType | None
    sid: pa.DataType | None

    def to_pieces(self, rows: Iterator[Row], columns: ItemColumns, size: int) -> Iterator[Piece]:
        """Put rows into batches of at most `size`."""
        while some := list(islice(rows, size)):
            yield self._to_piece(some, columns)

    def _to_piece(self, rows: Sequence[Row], columns: ItemColumns) -> Piece:
        items, sids, weights = [], [], []
        fault = np.array([row.fault for row in rows], np.uint8)
        for number, row in enumerate(rows):
            item, wrong = self._fit_item(row.item)
            sid, unfit = self._fit_sid(row.sid)
            items.append(item)
            sids.append(sid)
            weights.append(_as_float(row.weight))
            fault[number] = fault[number] or unfit or wrong
        arrays = {columns.item: pa.array(items, self.item or pa.null())}
        arrays |= {columns.sids[0]: pa.array(sids, self.sid or pa.null())}
        if columns.weight is not None:
            arrays[columns.weight] = pa.array(weights, pa.float64())
        return Piece(pa.record_batch(arrays), lambda row: _tell(rows[row]), fault)

    def _fit_item(self, value: Any) -> tuple[Any, Fault]:
        if value is None:
            return None, Fault.NONE
        kind = ITEM_TYPES.get(_kind(value))
        return (value, Fault.NONE) if kind is not None and kind == self.item else (None, Fault.BAD_ITEM)

    def _fit_sid(self, value: Any) -> tuple[Any, Fault]:
        if value is None:
            return None, Fault.NONE
        kind = _kind(value)
        is_empty = kind == "" and self.sid is not None and is_list(self.sid)
        if is_empty or (kind in SID_TYPES and SID_TYPES[kind] == self.sid):
            return value, Fault.NONE
        return None, {"": Fault.NO_CODES, "large": Fault.BAD_CODE}.get(kind, Fault.UNREADABLE)


def _kind(value: Any) -> str:
    """How a value is given: a key of SID_TYPES; "" is a list of nothing, `large` has no int64, or `junk`."""
    if type(value) is int:
        return "number" if _is_int64(value) else "large"
    if _is_unicode(value):
        return "text"
    if type(value) is not list:
        return "junk"
    given = [element for element in value if element is not None]
    if all(type(element) is int for element in given):
        return "" if not given else "codes" if all(map(_is_int64, given)) else "large"
    return "tokens" if all(map(_is_unicode, given)) else "junk"


def _is_int64(value: Any) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63


def _is_unicode(value: Any) -> bool:
    """Whether a value is a text that UTF-8 has bytes for: JSON can spell half a character."""
    if not isinstance(value, str):
        return False
    return value.isascii() or not any(0xD800 <= ord(mark) < 0xE000 for mark in value)


def _as_float(weight: Any) -> float | None:
    is_number = type(weight) is float or (type(weight) is int and abs(weight) < 2**1000)
    return float(weight) if is_number else None


def _tell(row: Row) -> str:
    values = {"item": row.item, "sid": row.sid, "weight": row.weight}
    shown = [f"{name}={ascii(value)[:SHOWN_TEXT]}" for name, value in values.items() if value is not None]
    return f"{row.where} ({', '.join(shown)})" if shown else row.where
