"""Files of items, whatever their format: each gives its rows piece by piece, as columns of Arrow."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Protocol

import numpy as np
import pyarrow as pa

from grinf.config.settings import BuildTrieSettings
from grinf.errors import DataError
from grinf.jobs.arrow_types import bad_text, shown
from grinf.jobs.item_columns import BATCH_ROWS, ItemColumns, Piece, choose_columns, missing
from grinf.jobs.json_items import JsonItems, JsonLines
from grinf.jobs.parquet_files import columns_of, open_parquet
from grinf.jobs.sid_columns import MAX_LEVELS, Fault

HEAD_BYTES = 1 << 16
FORMATS = "parquet, JSON (.json), JSON lines (.jsonl) or arrays (.npy)"


class ItemFile(Protocol):
    """A file of items."""

    @property
    def path(self) -> Path:
        """Where it is."""
        ...

    @property
    def columns(self) -> ItemColumns:
        """What its rows hold."""
        ...

    @property
    def num_rows(self) -> int:
        """Rows, with those that cannot be used."""
        ...

    def pieces(self) -> Iterator[Piece]:
        """Read all rows.

        Raises:
            DataError: The file is damaged.
        """
        ...


def open_items(path: Path, settings: BuildTrieSettings, usual: ItemColumns | None) -> ItemFile:
    """Open a file by its content, or by its suffix where that says nothing.

    Args:
        path: The file.
        settings: Columns and formats.
        usual: Columns of the parquet files before; None: this is the first one.

    Raises:
        UsageError: Columns that are missing, or content whose meaning is open.
        DataError: A file that cannot be read.
    """
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    suffix, start = path.suffix.lower(), head.lstrip()[:1]
    if suffix in (".parquet", ".pq") or head.startswith(b"PAR1"):
        return ParquetItems.open(path, settings, usual)
    if suffix == ".npy" or head.startswith(b"\x93NUMPY"):
        return NpyItems.open(path)
    if suffix in (".jsonl", ".ndjson") or _is_lines(head):
        return JsonLines.open(path, settings)
    if suffix == ".json" or start in (b"{", b"["):
        return JsonItems.open(path, settings)
    raise DataError(f"{path} is no catalogue that can be read", fix=f"give it as {FORMATS}")


def _is_lines(head: bytes) -> bool:
    """Whether a text begins with a JSON object on a line of its own, and another one follows."""
    first, _, rest = head.partition(b"\n")
    try:
        return isinstance(json.loads(first), dict) and rest.lstrip().startswith(b"{")
    except (ValueError, RecursionError):
        return False


@dataclass(frozen=True, slots=True)
class ParquetItems:
    """A parquet file: one row per item."""

    path: Path
    columns: ItemColumns
    num_rows: int

    @classmethod
    def open(cls, path: Path, settings: BuildTrieSettings, usual: ItemColumns | None) -> "ParquetItems":
        """Read the footer."""
        with open_parquet(path) as file:
            names, num_rows = columns_of(path, file), file.metadata.num_rows
        columns = usual or choose_columns(names, settings)
        for column in columns.all:
            if column not in names:
                raise missing(f"{path} has no column {column!r}", names, column)
        return cls(path, columns, num_rows)

    def pieces(self) -> Iterator[Piece]:
        """Stream the row groups."""
        first_row = 0
        with open_parquet(self.path) as file:
            try:
                for batch in file.iter_batches(BATCH_ROWS, columns=self.columns.all):
                    readable, fault = _without_bad_text(batch)
                    yield Piece(readable, self._teller(batch, first_row), fault)
                    first_row += batch.num_rows
            except (pa.ArrowInvalid, OSError) as error:
                what = f"{self.path} cannot be read past row {first_row}"
                raise DataError(what, str(error).splitlines()[0]) from error

    def _teller(self, batch: pa.RecordBatch, first_row: int) -> Callable[[int], str]:
        def tell(row: int) -> str:
            values = ", ".join(f"{name}={shown(batch[name][row])[:80]}" for name in self.columns.all)
            return f"row {first_row + row} ({values})"

        return tell


def _without_bad_text(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, np.ndarray | None]:
    """Make rows null that have a text that is not UTF-8; and the fault of each row, if there are any."""
    bad = np.unique(np.concatenate([bad_text(column) for column in batch.columns]))
    if not len(bad):
        return batch, None
    fault = np.zeros(batch.num_rows, np.uint8)
    fault[bad] = Fault.NOT_UTF8
    return batch.take(pa.array(np.arange(batch.num_rows), mask=fault > 0)), fault


@dataclass(frozen=True, slots=True)
class NpyItems:
    """An array of codes [n, levels]: the number of a row is the item's id; -1 at its end is a short SID."""

    path: Path
    columns: ItemColumns
    codes: np.ndarray

    @classmethod
    def open(cls, path: Path) -> "NpyItems":
        """Map the array; nothing in it is ever executed."""
        try:
            codes: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, OverflowError, EOFError, OSError, SyntaxError, TokenError) as error:
            raise DataError(f"{path} is not readable as an array", str(error).splitlines()[0]) from error
        shape = f"{path} holds {codes.dtype} of shape {codes.shape}"
        if codes.dtype.kind not in "iu" or codes.ndim != 2:
            raise DataError(shape, "a catalogue is an array of integers, items x levels")
        if not 0 < codes.shape[1] <= MAX_LEVELS:
            raise DataError(
                shape, f"that is {codes.shape[1]:,} codes per SID; {MAX_LEVELS} are possible", "turn it"
            )
        return cls(path, ItemColumns("row", tuple(f"level {n}" for n in range(codes.shape[1])), None), codes)

    @property
    def num_rows(self) -> int:
        """Items."""
        return len(self.codes)

    def pieces(self) -> Iterator[Piece]:
        """Stream the rows."""
        for start in range(0, self.num_rows, BATCH_ROWS):
            codes = np.asarray(self.codes[start : start + BATCH_ROWS])
            is_past_end = codes == -1 if codes.dtype.kind == "i" else np.zeros(codes.shape, bool)
            signed = codes.astype(np.int64)  # What does not fit becomes negative, and that is no code.
            levels = [pa.array(signed[:, n], mask=is_past_end[:, n]) for n in range(codes.shape[1])]
            ids = pa.array(np.arange(start, start + len(codes)))
            batch = pa.record_batch([ids, *levels], names=self.columns.all)
            yield Piece(
                batch, lambda row, codes=codes, start=start: f"row {start + row} ({codes[row].tolist()})"
            )
