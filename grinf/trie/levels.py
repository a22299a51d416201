"""From sorted SIDs to the tensors of a trie, piece by piece."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa

from grinf.trie.manifest import EndCodes
from grinf.trie.store import Part, PartWriter, code_dtype, pointer_dtype


class SidPacking:
    """Packs a SID into as few 64-bit words as hold it, so that comparing words compares SIDs level by level.

    Args:
        codebook_sizes: Codes per level.
        end_codes: Code that pads a short SID, per level.
    """

    def __init__(self, codebook_sizes: Sequence[int], end_codes: EndCodes) -> None:
        self.end_codes = end_codes
        self.limits = [k + (end is not None) for k, end in zip(codebook_sizes, end_codes, strict=True)]
        room: list[int] = []
        places: list[tuple[int, int, int]] = []
        for bits in ((limit - 1).bit_length() for limit in self.limits):
            if not room or room[-1] < bits:
                room.append(64)
            room[-1] -= bits
            places.append((len(room) - 1, room[-1], 2**bits - 1))
        self.columns = [f"word{word}" for word in range(len(room))]
        self._places = [
            (self.columns[word], np.uint64(left - room[word]), np.uint64(mask)) for word, left, mask in places
        ]

    def pack(self, codes: np.ndarray) -> dict[str, pa.Array]:
        """Pack int32 [n, levels] codes, -1 past the end of a short SID, into columns of uint64 [n]."""
        packed = {column: np.zeros(len(codes), np.uint64) for column in self.columns}
        for code, end, (column, shift, _) in zip(codes.T, self.end_codes, self._places, strict=True):
            padded = code if end is None else np.where(code < 0, end, code)
            packed[column] |= padded.astype(np.uint64) << shift
        return {column: pa.array(words) for column, words in packed.items()}

    def unpack(self, rows: pa.RecordBatch) -> list[np.ndarray]:
        """Code of every level, uint64 [n] each, END where a SID is short."""
        return [(rows[column].to_numpy() >> shift) & mask for column, shift, mask in self._places]

    def repeats(self, rows: pa.RecordBatch) -> np.ndarray:
        """Whether each row but the first has the SID of the row before, bool [n - 1]."""
        words = [rows[column].to_numpy() for column in self.columns]
        return np.logical_and.reduce([word[1:] == word[:-1] for word in words])


class LevelWriter:
    """Writes codes and child pointers of SIDs that come in order.

    Args:
        folder: Where the parts go.
        limits: Codes per level, END counted.
        num_items: Rows that will come, at most; bounds the pointers.
    """

    def __init__(self, folder: Path, limits: Sequence[int], num_items: int) -> None:
        pointer, levels = pointer_dtype(num_items), range(len(limits))
        self.num_nodes = [0 for _ in levels]
        self.used = [np.zeros(limit, bool) for limit in limits]
        self._codes = [PartWriter(folder, f"L{level}.tok", code_dtype(limits[level])) for level in levels]
        self._child_ptr = [PartWriter(folder, f"L{level}.ptr", pointer) for level in levels[1:]]
        self._last: list[np.uint64] | None = None

    def add(self, codes: Sequence[np.ndarray]) -> np.ndarray:
        """Take the codes of every level of some rows; return the rows that start a leaf, int64."""
        is_new = np.zeros(len(codes[0]), bool)
        starts = np.zeros(0, np.int64)
        for level, code in enumerate(codes):
            is_new[1:] |= code[1:] != code[:-1]
            is_new[0] |= self._last is None or code[0] != self._last[level]
            parents, starts = starts, np.flatnonzero(is_new)
            self._codes[level].append(code[starts])
            self.used[level][code[starts].astype(np.int64)] = True
            if level > 0:
                self._child_ptr[level - 1].append(np.searchsorted(starts, parents) + self.num_nodes[level])
            self.num_nodes[level] += len(starts)
        self._last = [code[-1] for code in codes]
        return starts

    def close(self) -> list[Part]:
        """End every level."""
        for level, writer in enumerate(self._child_ptr, start=1):
            writer.append(np.array([self.num_nodes[level]]))
        return [writer.close() for writer in (*self._codes, *self._child_ptr)]


class ItemWriter:
    """Writes item ids, weights, and where each leaf's items start.

    Args:
        folder: Where the parts go.
        schema: Columns of the rows that will come.
        num_items: How many will come.
    """

    def __init__(self, folder: Path, schema: pa.Schema, num_items: int) -> None:
        is_number = pa.types.is_integer(schema.field("id").type)
        self.id_type: Literal["int64", "string"] = "int64" if is_number else "string"
        names = ["item.id"] if self.id_type == "int64" else ["item.off", "item.utf8"]
        names += ["item.ptr"] + ["item.w"] * ("weight" in schema.names)
        dtypes = {"item.utf8": "u1", "item.w": "<f8", "item.ptr": pointer_dtype(num_items)}
        self._writers = {name: PartWriter(folder, name, np.dtype(dtypes.get(name, "<i8"))) for name in names}
        self._items = self._leaves = self._text_bytes = 0

    def add(self, rows: pa.RecordBatch, leaf_starts: np.ndarray) -> None:
        """Take rows in order, and which of them start a leaf."""
        self._writers["item.ptr"].append(leaf_starts + self._items)
        self._items += rows.num_rows
        self._leaves += len(leaf_starts)
        if "item.w" in self._writers:
            self._writers["item.w"].append(rows["weight"].to_numpy())
        if self.id_type == "int64":
            self._writers["item.id"].append(rows["id"].to_numpy())
            return
        _, offsets, text = rows["id"].buffers()
        at = np.frombuffer(offsets, np.int64)[rows["id"].offset :][: rows.num_rows + 1]
        self._writers["item.off"].append(at[:-1] - at[0] + self._text_bytes)
        self._writers["item.utf8"].append(np.frombuffer(text or b"", np.uint8)[at[0] : at[-1]])
        self._text_bytes += int(at[-1] - at[0])

    def close(self) -> list[Part]:
        """End the item index; where every leaf has one item there is nothing to point at."""
        self._writers["item.ptr"].append(np.array([self._items]))
        if self.id_type == "string":
            self._writers["item.off"].append(np.array([self._text_bytes]))
        parts = [writer.close() for writer in self._writers.values()]
        return [part for part in parts if part.name != "item.ptr" or self._leaves < self._items]
