"""Sorting more rows than fit in memory: sorted runs on disk, merged block by block.

Plain numpy and Arrow instead of a database: a catalogue needs two sorts by one column, which is a page of
code, one path for every size (so that every test runs it), and memory that is ours to bound.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

BLOCK_ROWS = 1 << 18
"""Rows that are read from a file at a time."""


def stable_argsort(values: np.ndarray) -> np.ndarray:
    """Order of uint64 [n] values, equal ones in place order; int64 [n].

    Sorts (value, position) packed into one word, several times faster than an argsort, which chases pointers.
    Values too wide to leave room for a position are sorted by their low half first, then by their high half.
    """
    if len(values) < 2:
        return np.arange(len(values))
    row_bits = (len(values) - 1).bit_length()
    packed = values - values.min()
    span_bits = int(packed.max()).bit_length()
    if span_bits + row_bits > 64:
        half = span_bits // 2
        order = stable_argsort(packed & np.uint64((1 << half) - 1))
        return order[stable_argsort(packed[order] >> np.uint64(half))]
    packed <<= np.uint64(row_bits)
    packed |= np.arange(len(values), dtype=np.uint64)
    packed.sort()
    packed &= np.uint64((1 << row_bits) - 1)
    return packed.view(np.int64)


class Spool:
    """Record batches of one schema in the order given: in memory while they are few, else in a file."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path, self._room = path, max_bytes
        self._held: list[pa.RecordBatch] = []
        self._writer: pa.RecordBatchStreamWriter | None = None

    def append(self, rows: pa.RecordBatch) -> None:
        """Add rows at the end."""
        self._held.append(rows)
        self._room -= rows.nbytes
        if self._room < 0:
            self._writer = self._writer or pa.ipc.new_stream(str(self._path), rows.schema)
            for batch in self._held:
                for start in range(0, batch.num_rows, BLOCK_ROWS):
                    self._writer.write_batch(batch.slice(start, BLOCK_ROWS))
            self._held.clear()

    def drain(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows once, in blocks, and let go of each."""
        if self._writer is not None:
            self._writer.close()
            with pa.OSFile(str(self._path)) as source, pa.ipc.open_stream(source) as stream:
                yield from stream
            self._path.unlink()
        self._held.reverse()
        while self._held:
            yield self._held.pop()


class ExternalSort:
    """Rows sorted by a total order that one column leads.

    Args:
        folder: Where runs go; the last one stays in memory.
        key: Name of the leading column.
        order: Takes rows, gives their order, int64 [n], stable.
        max_bytes: Bytes of a run; sorting it takes about four times as much.
    """

    def __init__(
        self, folder: Path, key: str, order: Callable[[pa.RecordBatch], np.ndarray], max_bytes: int
    ) -> None:
        self._folder, self._key, self._order, self._max_bytes = folder, key, order, max_bytes
        self._unsorted: list[pa.RecordBatch] = []
        self._runs: list[Iterator[pa.RecordBatch]] = []
        folder.mkdir()

    def add(self, rows: pa.RecordBatch) -> None:
        """Take rows in any order."""
        self._unsorted += [rows] * (rows.num_rows > 0)
        if sum(batch.nbytes for batch in self._unsorted) >= self._max_bytes:
            run = Spool(self._folder / f"run-{len(self._runs)}", max_bytes=0)
            run.append(self._sort(self._unsorted))
            self._runs.append(run.drain())

    def drain(self) -> Iterator[pa.RecordBatch]:
        """Yield all rows once in order, in pieces that never split rows of equal key."""
        if self._unsorted:
            last = self._sort(self._unsorted)
            starts = range(0, last.num_rows, BLOCK_ROWS)
            self._runs.append(last.slice(start, BLOCK_ROWS) for start in starts)
        merge = self._sort if len(self._runs) > 1 else pa.concat_batches
        heads = [_Head(run, self._key) for run in self._runs]
        while unfinished := [head for head in heads if not head.is_last]:
            bound = min(head.reach for head in unfinished)  # Below it, every run's rows are at hand.
            piece = merge([head.take_below(bound) for head in heads])
            if piece.num_rows:
                yield piece
            for head in unfinished:
                if head.reach == bound:
                    head.refill()
        if heads:
            yield merge([head.rows for head in heads])

    def _sort(self, batches: list[pa.RecordBatch]) -> pa.RecordBatch:
        """Sort batches together, and let go of them."""
        rows = pa.concat_batches(batches)
        batches.clear()
        return rows.take(pa.array(self._order(rows)))


class _Head:
    """The front of one sorted run."""

    def __init__(self, blocks: Iterator[pa.RecordBatch], key: str) -> None:
        self._blocks, self._key = blocks, key
        self.rows = next(blocks)
        self.is_last = False

    @property
    def reach(self) -> Any:
        """Largest key at hand; rows of the same key may follow in the next block."""
        return self.rows[self._key][-1].as_py()

    def take_below(self, bound: Any) -> pa.RecordBatch:
        """Take off the rows whose key is below a bound; texts order by UTF-8 bytes, as code points do."""
        keys = self.rows[self._key]
        cut = bisect_left(range(len(keys)), bound, key=lambda row: keys[row].as_py())
        below, self.rows = self.rows.slice(0, cut), self.rows.slice(cut)
        return below

    def refill(self) -> None:
        block = next(self._blocks, None)
        self.is_last = block is None
        self.rows = self.rows if block is None else pa.concat_batches([self.rows, block])
