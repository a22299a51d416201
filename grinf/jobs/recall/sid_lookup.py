"""Columns that name items or SIDs, one or several a row (histories, truth): which SIDs they mean."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from grinf.errors import RowError, UsageError
from grinf.jobs.arrow_types import is_list, is_text, plain_type
from grinf.jobs.recall.columns import values
from grinf.jobs.sid_columns import Fault, SidReader

if TYPE_CHECKING:
    from grinf.trie import Trie


@dataclass(frozen=True, slots=True)
class Named:
    """Items or SIDs of some rows, flat.

    Attributes:
        row: int64 [n], ascending.
        sids: int32 [n, levels], -1 past a short SID; all -1 for an unknown item or an impossible SID.
        given: What the column says, [n].
        in_catalogue: bool [n].
    """

    row: np.ndarray
    sids: np.ndarray
    given: pa.Array
    in_catalogue: np.ndarray


class SidLookup:
    """Reads a column of items or SIDs.

    Args:
        name: Of the column.
        type_: Numbers are item ids; a list of them is one SID if the column's name has "sid" in it. Lists of
            numbers are SIDs. Texts are item ids, or SIDs where the ids of the catalogue are numbers.
        trie: The catalogue; None: there are no items, and SIDs are lists of token ids.
        levels: Codes of a SID.

    Raises:
        UsageError: A type that cannot be used, or ids of another type than the catalogue's.
    """

    def __init__(self, name: str, type_: pa.DataType, trie: "Trie | None", levels: int) -> None:
        element = plain_type(type_.value_type if is_list(type_) else type_)
        is_number = pa.types.is_integer(element) and not pa.types.is_uint64(element)
        id_type = trie.manifest.id_type if trie is not None else ""
        self._is_one = is_list(type_) and is_number and (trie is None or "sid" in name.lower())
        self.names_items = (
            not is_list(element) and not self._is_one and not (is_text(element) and id_type == "int64")
        )
        fits = is_text(element) if id_type == "string" else is_number
        if self.names_items and not pa.types.is_null(element) and not (fits and id_type):
            why = (
                f"the item ids of the catalogue are {id_type}"
                if id_type
                else "without a trie there are no items"
            )
            raise UsageError(
                f"column {name!r} holds {type_}", why, "give item ids, or SIDs as lists of codes"
            )
        self._name, self._trie, self._levels = name, trie, levels
        self._element, self._reader = (type_ if self._is_one else element), SidReader(is_mixed=True)

    def read(self, column: pa.ChunkedArray) -> Named:
        """Look up what a column names; null rows, and nulls in a list, name nothing.

        Raises:
            UsageError: A type that cannot hold SIDs.
        """
        rows: list[int] = []
        elements: list[Any] = []
        for row, value in enumerate(values(column)):
            several = value if isinstance(value, list) and not self._is_one else [value]
            some = [one for one in several if one is not None and not isinstance(one, RowError)]
            rows += [row] * len(some)
            elements += some
        given = pa.array(elements, self._element)
        sids, is_known = self._of_items(given) if self.names_items else self._of_sids(given)
        return Named(np.array(rows, np.int64), sids, given, is_known)

    def _of_items(self, ids: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        sids = np.full((len(ids), self._levels), -1, np.int32)
        if self._trie is None or not len(ids):
            return sids, np.zeros(len(ids), bool)
        leaves = self._trie.leaf_of_items(ids)
        sids[leaves >= 0] = self._trie.sids(leaves[leaves >= 0])
        return sids, leaves >= 0

    def _of_sids(self, given: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        read, levels = self._reader.read([given], [self._name]), self._levels
        is_whole = (read.fault == Fault.NONE) & (read.codes[:, levels:] < 0).all(1)
        codes = np.pad(read.codes, ((0, 0), (0, levels)), constant_values=-1)[:, :levels]
        sids = np.where(is_whole[:, None], codes, -1)
        is_known = is_whole if self._trie is None else is_whole & (self._trie.leaf_of(sids) >= 0)
        return sids.astype(np.int32), is_known
