"""Rows that were read from JSON, as columns of Arrow; what most values are, says what a column's type is."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa

from grinf.jobs.item_columns import ItemColumns, Piece
from grinf.jobs.sid_columns import Fault

SHOWN_TEXT = 120
TYPES: dict[str, pa.DataType] = {
    "": pa.null(),
    "number": pa.int64(),
    "text": pa.large_string(),
    "codes": pa.list_(pa.int64()),
    "tokens": pa.list_(pa.large_string()),
}
ITEM_KINDS = ("number", "text")
SID_KINDS = ("codes", "tokens", "text", "number")
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Row:
    """An item and its SID as they stand, and where; `fault` if they cannot even be taken apart."""

    where: str
    item: Any
    sid: Any
    weight: Any = None
    fault: Fault = Fault.NONE


@dataclass(frozen=True, slots=True)
class Kinds:
    """What most items and most SIDs of a file are: keys of TYPES; empty: there is no value."""

    item: str
    sid: str

    @classmethod
    def of(cls, counts: Counter[tuple[str, str]], item: str, sids: Sequence[str]) -> "Kinds":
        """Decide by how often each name has a value of each kind in a whole file: its order decides nothing.

        Args:
            counts: Of (name, kind).
            item: Name of the items.
            sids: Name of the SIDs, or of each level of them.
        """
        if len(sids) == 1:
            return cls(_usual(counts, [item], ITEM_KINDS), _usual(counts, sids, SID_KINDS))
        whole = {"number": "codes", "text": "tokens", "": ""}
        return cls(_usual(counts, [item], ITEM_KINDS), whole[_usual(counts, sids, tuple(whole))])


def _usual(counts: Counter[tuple[str, str]], names: Sequence[str], kinds: Sequence[str]) -> str:
    found = {kind: sum(counts[name, kind] for name in names) for kind in kinds}
    return max(found, key=found.__getitem__) if any(found.values()) else ""


def to_pieces(rows: Iterable[Row], columns: ItemColumns, kinds: Kinds, size: int) -> Iterator[Piece]:
    """Put rows into batches of at most `size`; values that do not fit a column are null, with a fault."""
    rows = iter(rows)
    while some := list(islice(rows, size)):
        yield _to_piece(some, columns, kinds)


def _to_piece(rows: Sequence[Row], columns: ItemColumns, kinds: Kinds) -> Piece:
    sids = [_misfit(row.sid, kinds.sid) for row in rows]
    items = [Fault.BAD_ITEM if _misfit(row.item, kinds.item) else Fault.NONE for row in rows]
    arrays = {
        columns.item: _fitting([row.item for row in rows], items, kinds.item),
        columns.sids[0]: _fitting([row.sid for row in rows], sids, kinds.sid),
    }
    if columns.weight is not None:
        arrays[columns.weight] = pa.array([_as_float(row.weight) for row in rows], pa.float64())
    faults = [row.fault or sid or item for row, sid, item in zip(rows, sids, items, strict=True)]
    return Piece(pa.record_batch(arrays), lambda row: _tell(rows[row]), np.array(faults, np.uint8))


def _fitting(values: Sequence[Any], faults: Sequence[Fault], kind: str) -> pa.Array:
    fit = [None if fault else value for value, fault in zip(values, faults, strict=True)]
    return pa.array(fit, TYPES[kind])


def _misfit(value: Any, kind: str) -> Fault:
    """Why a SID does not fit a column of a kind; null fits any."""
    given = kind_of(value)
    if value is None or given == kind:
        return Fault.NONE
    return {"empty": Fault.NO_CODES, "large": Fault.BAD_CODE}.get(given, Fault.UNREADABLE)


def kind_of(value: Any) -> str:
    """How a value is given: a key of TYPES; or `empty`: a list of nothing, `large`: beyond int64, `junk`."""
    if type(value) is int:
        return "number" if _is_int64(value) else "large"
    if _is_unicode(value):
        return "text"
    if type(value) is not list:
        return "junk"
    given = [element for element in value if element is not None]
    if all(type(element) is int for element in given):
        return "empty" if not given else "codes" if all(map(_is_int64, given)) else "large"
    return "tokens" if all(map(_is_unicode, given)) else "junk"


def _is_int64(value: int) -> bool:
    return -(2**63) <= value < 2**63


def _is_unicode(value: Any) -> bool:
    """Whether a value is a text that UTF-8 has bytes for: JSON can spell half a character."""
    return isinstance(value, str) and not _SURROGATE.search(value)


def _as_float(weight: Any) -> float | None:
    is_number = type(weight) is float or (type(weight) is int and abs(weight) < 2**1000)
    return float(weight) if is_number else None


def _tell(row: Row) -> str:
    values = {"item": row.item, "sid": row.sid, "weight": row.weight}
    shown = [f"{name}={ascii(value)[:SHOWN_TEXT]}" for name, value in values.items() if value is not None]
    return f"{row.where} ({', '.join(shown)})" if shown else row.where
