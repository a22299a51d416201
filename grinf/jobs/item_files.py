"""Files of items, whatever their format: each gives its rows piece by piece, as columns of Arrow."""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from tokenize import TokenError
from typing import Literal

import numpy as np
import pyarrow as pa

from grinf.config.settings import BuildTrieSettings
from grinf.errors import DataError
from grinf.jobs.arrow_types import bad_text, shown
from grinf.jobs.item_columns import BATCH_ROWS, ItemColumns, ItemFile, Piece, choose_columns, find_column
from grinf.jobs.json_items import open_document, open_lines
from grinf.jobs.parquet_files import columns_of, open_parquet, stream
from grinf.jobs.sid_columns import MAX_LEVELS, Fault

HEAD_BYTES = 1 << 16


def open_items(paths: Sequence[Path], settings: BuildTrieSettings) -> list[ItemFile]:
    """Open files by their content, or by their suffix where that says nothing.

    The parquet files among them have the columns of the first one.

    Raises:
        UsageError: Columns that are missing, or content whose meaning is open.
        DataError: A file that cannot be read.
    """
    files: list[ItemFile] = []
    usual: ItemColumns | None = None
    for path in paths:
        match _format_of(path):
            case "parquet":
                files.append(_open_table(path, settings, usual))
                usual = files[-1].columns
            case "array":
                files.append(_open_array(path))
            case "lines":
                files.append(open_lines(path, settings))
            case "document":
                files.append(open_document(path, settings))
    return files


def _format_of(path: Path) -> Literal["parquet", "array", "lines", "document"]:
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if head.startswith(b"\x1f\x8b"):
        raise DataError(f"{path} is compressed", "it begins with the bytes of gzip", "decompress it")
    suffix = path.suffix.lower()
    if suffix in (".parquet", ".pq") or head.startswith(b"PAR1"):
        return "parquet"
    if suffix == ".npy" or head.startswith(b"\x93NUMPY"):
        return "array"
    if suffix in (".jsonl", ".ndjson") or _is_lines(head):
        return "lines"
    if suffix == ".json" or head.lstrip()[:1] in (b"{", b"["):
        return "document"
    fix = "give it as parquet, JSON (.json), JSON lines (.jsonl) or arrays (.npy)"
    raise DataError(f"{path} is no catalogue that can be read", fix=fix)


def _is_lines(head: bytes) -> bool:
    """Whether a text begins with a JSON object on a line of its own, and another one follows."""
    first, _, rest = head.partition(b"\n")
    try:
        return isinstance(json.loads(first), dict) and rest.lstrip().startswith(b"{")
    except (ValueError, RecursionError):
        return False


def _open_table(path: Path, settings: BuildTrieSettings, usual: ItemColumns | None) -> ItemFile:
    """Open a parquet file: one row per item."""
    with open_parquet(path) as file:
        names, num_rows = columns_of(path, file), file.metadata.num_rows
    columns = usual or choose_columns(path, names, settings)
    for column in columns.all:
        find_column(path, names, "--item-column, --sid-column or --weight-column", column)
    return ItemFile(path, columns, num_rows, partial(_read_table, path, columns.all))


def _read_table(path: Path, names: list[str]) -> Iterator[Piece]:
    """Stream the row groups."""
    for first_row, batch in stream(path, names, BATCH_ROWS):
        readable, fault = _without_bad_text(batch)
        yield Piece(readable, partial(_tell, batch, names, first_row), fault)


def _tell(batch: pa.RecordBatch, names: list[str], first_row: int, row: int) -> str:
    values = ", ".join(f"{name}={shown(batch[name][row])[:80]}" for name in names)
    return f"row {first_row + row} ({values})"


def _without_bad_text(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, np.ndarray]:
    """Make rows null that have a text that is not UTF-8; and the fault of each row."""
    fault = np.zeros(batch.num_rows, np.uint8)
    for column in batch.columns:
        fault[bad_text(column)] = Fault.NOT_UTF8
    return (batch.take(pa.array(np.arange(len(fault)), mask=fault > 0)) if fault.any() else batch), fault


def _open_array(path: Path) -> ItemFile:
    """Map an array of codes [n, levels], -1 at the end of a short SID; an item's id is its row's number.

    Nothing in it is ever executed.
    """
    try:
        codes: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OverflowError, EOFError, OSError, SyntaxError, TokenError) as error:
        raise DataError(f"{path} is not readable as an array", str(error).splitlines()[0]) from error
    shape = f"{path} holds {codes.dtype} of shape {codes.shape}"
    if codes.dtype.kind not in "iu" or codes.ndim != 2:
        raise DataError(shape, "a catalogue is an array of integers, items x levels")
    levels = codes.shape[1]
    if not 0 < levels <= MAX_LEVELS:
        raise DataError(shape, f"that is {levels:,} codes per SID; {MAX_LEVELS} are possible", "turn it")
    columns = ItemColumns("row", tuple(f"level {level}" for level in range(levels)), None)
    return ItemFile(path, columns, len(codes), partial(_read_array, codes, columns.all))


def _read_array(array: np.ndarray, names: list[str]) -> Iterator[Piece]:
    """Stream the rows."""
    for start in range(0, len(array), BATCH_ROWS):
        codes = np.asarray(array[start : start + BATCH_ROWS])
        signed = codes.astype(np.int64)  # What does not fit becomes negative, and that is no code.
        is_past_end = (signed == -1) & (codes.dtype.kind == "i")
        levels = [
            pa.array(level, mask=is_past) for level, is_past in zip(signed.T, is_past_end.T, strict=True)
        ]
        ids = pa.array(np.arange(start, start + len(codes)))
        batch = pa.record_batch([ids, *levels], names=names)
        yield Piece(batch, partial(_tell_codes, codes, start), np.zeros(len(codes), np.uint8))


def _tell_codes(codes: np.ndarray, first_row: int, row: int) -> str:
    return f"row {first_row + row} ({codes[row].tolist()})"
