# pyright: reportAttributeAccessIssue=false
# pyarrow.compute makes its functions when it is imported.
"""The item index: rows in order of item id, and what happens to items that occur more than once."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from grinf.errors import DataError
from grinf.trie.levels import SidPacking
from grinf.trie.sort import Spool, stable_argsort
from grinf.trie.store import Part, PartWriter, pointer_dtype

OnItemConflict = Literal["error", "first", "all"]
SHOWN = 5


@dataclass(slots=True)
class ItemIndex:
    """Rows of the SID order, ranked by item id.

    Attributes:
        ranked: Their numbers in id order, with the rows that leave.
        dropped: Rows that leave the trie, ascending int64.
        duplicates: How many of these repeat an item on the same SID.
        conflicts: Items on several SIDs.
    """

    ranked: Spool
    dropped: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    duplicates: int = 0
    conflicts: int = 0

    def reasons(self) -> dict[str, int]:
        """Rows that leave, by reason."""
        others = len(self.dropped) - self.duplicates
        told = {"item and SID are there already": self.duplicates, "item has a better SID": others}
        return {reason: count for reason, count in told.items() if count}

    def write_order(self, folder: Path, num_items: int) -> Part:
        """Write the item rows in id order, numbered as they are once the dropped ones are gone."""
        writer = PartWriter(folder, "item.order", pointer_dtype(num_items))
        for batch in self.ranked.drain():
            row = batch["row"].to_numpy()
            before = np.searchsorted(self.dropped, row)
            is_kept = np.append(self.dropped, -1)[before] != row
            writer.append((row - before)[is_kept])
        return writer.close()


def item_order(rows: pa.RecordBatch) -> np.ndarray:
    """Order by item id, equal ids in place order; int64 [n]."""
    if pa.types.is_integer(rows["id"].type):
        # Without the sign's meaning, negative ids keep their order.
        return stable_argsort(rows["id"].to_numpy().view(np.uint64) ^ np.uint64(1 << 63))
    return pc.sort_indices(rows["id"]).to_numpy().astype(np.int64)


def index_items(
    pieces: Iterator[pa.RecordBatch],
    packing: SidPacking,
    folder: Path,
    max_bytes: int,
    on_conflict: OnItemConflict,
) -> ItemIndex:
    """Rank rows by item, and decide which ones leave.

    Args:
        pieces: Rows by item id, then by place in the SID order, which is their `row`; no id is split.
        packing: Layout of the SIDs.
        folder: Working folder.
        max_bytes: What the ranks may take in memory.
        on_conflict: An item on several SIDs: refuse it, keep its SID of largest weight (of equal ones the
            smallest), or keep all.

    Raises:
        DataError: An item on several SIDs, where that is refused.
    """
    index = ItemIndex(Spool(folder / "ranked", max_bytes))
    dropped, examples = [index.dropped], list[str]()
    for piece in pieces:
        index.ranked.append(piece.select(["row"]))
        ids = piece["id"]
        is_same_item = pc.equal(ids.slice(1), ids.slice(0, len(ids) - 1)).to_numpy(zero_copy_only=False)
        if is_same_item.any():
            is_duplicate = np.append(False, is_same_item & packing.repeats(piece))
            unique = piece.filter(pa.array(~is_duplicate))
            group = np.append(0, np.cumsum(~is_same_item))[~is_duplicate]
            index.duplicates += int(is_duplicate.sum())
            index.conflicts += len(np.unique(group[1:][group[1:] == group[:-1]]))
            examples += _describe_conflicts(unique, group, packing)[: SHOWN - len(examples)]
            dropped.append(piece["row"].to_numpy()[is_duplicate])
            if on_conflict == "first":
                dropped.append(unique["row"].to_numpy()[_all_but_best(unique, group)])
    if index.conflicts and on_conflict == "error":
        more = f"; and {index.conflicts - len(examples):,} more" if index.conflicts > len(examples) else ""
        raise DataError(
            f"{index.conflicts:,} items have more than one SID",
            "; ".join(examples) + more,
            "correct them, or say --on-item-conflict first (largest weight, then smallest SID) or all",
        )
    index.dropped = np.sort(np.concatenate(dropped))
    return index


def _all_but_best(rows: pa.RecordBatch, group: np.ndarray) -> np.ndarray:
    """Rows of each item but the one of largest weight; among equal weights the first stays."""
    weight = rows["weight"].to_numpy() if "weight" in rows.schema.names else np.zeros(len(group))
    best_first = np.lexsort((-weight, group))
    return best_first[np.append(False, group[best_first][1:] == group[best_first][:-1])]


def _describe_conflicts(rows: pa.RecordBatch, group: np.ndarray, packing: SidPacking) -> list[str]:
    """Name the first items of several SIDs, with two SIDs each."""
    seconds = np.flatnonzero(group[1:] == group[:-1]) + 1
    told: dict[object, str] = {}
    for second in seconds[: SHOWN * 2]:
        one, other = (_spell(rows.slice(row, 1), packing) for row in (second - 1, second))
        item = rows["id"][second].as_py()
        told.setdefault(item, f"item {item!r}: {one} and {other}")
    return list(told.values())


def _spell(row: pa.RecordBatch, packing: SidPacking) -> str:
    codes = [int(code[0]) for code in packing.unpack(row)]
    return "-".join(str(code) for code, end in zip(codes, packing.end_codes, strict=True) if code != end)
