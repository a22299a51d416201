"""Parquet files of a catalogue: which ones there are, and what each of them is."""

import os
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from glob import escape, glob, has_magic
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from grinf.errors import DataError, UsageError
from grinf.jobs.arrow_types import bad_text, shown
from grinf.trie.manifest import Source

READ_BUFFER_BYTES = 1 << 20


def find_files(paths: Sequence[Path]) -> list[Path]:
    """List parquet files of files, folders (hive-style too) and patterns, each once, sorted.

    Raises:
        UsageError: A path that does not exist, or without parquet files.
    """
    found: dict[Path, None] = {}
    for path in paths:
        is_pattern = has_magic(str(path)) and not os.path.exists(path)
        matches = [Path(name) for name in glob(str(path), recursive=True)] if is_pattern else [path]
        files = [
            file
            for match in matches
            for file in (_files_in(match) if os.path.isdir(match) else [match])
            if os.path.isfile(file)
        ]
        if not files:
            others = [os.path.basename(other) for other in glob(f"{escape(str(path.parent))}/*")]
            near = get_close_matches(path.name, [other for other in others if other != path.name], 1)
            why = f"did you mean {near[0]}?" if near else ""
            why = "a folder must hold *.parquet files" if os.path.isdir(path) else why
            raise UsageError(f"no parquet file at {path}", why, "give files, folders or patterns of parquet")
        found |= dict.fromkeys(sorted(files))
    return list(found)


def _files_in(folder: Path) -> list[Path]:
    """Parquet files below a folder; names that start with _ or . are not data."""
    return [file for file in folder.rglob("*") if is_data(file, folder)]


def is_data(file: Path, folder: Path) -> bool:
    """Whether a file below a folder, which need not exist, is read with it."""
    is_hidden = any(part[0] in "_." for part in file.relative_to(folder).parts)
    return file.suffix in (".parquet", ".pq") and not is_hidden


def open_parquet(path: Path) -> pq.ParquetFile:
    """Open a parquet file for reading in pieces, whatever the size of its row groups.

    Raises:
        DataError: It is not readable as parquet.
    """
    try:
        return pq.ParquetFile(path, buffer_size=READ_BUFFER_BYTES, pre_buffer=False)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is not readable as parquet", str(error).splitlines()[0]) from error


def columns_of(path: Path, file: pq.ParquetFile) -> list[str]:
    """Names of the columns.

    Raises:
        DataError: Two columns have one name, or a name is no text.
    """
    try:
        names: list[str] = file.schema_arrow.names
    except UnicodeDecodeError as error:
        raise DataError(f"{path} has a column whose name is not UTF-8: {error.object!r}") from error
    if len(set(names)) < len(names):
        raise DataError(f"{path} has columns of the same name", ", ".join(names), "rename all but one")
    return names


def stream(path: Path, columns: Sequence[str], rows: int) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield some columns in batches of at most `rows`, each with the number of its first row.

    Raises:
        DataError: The file is damaged.
    """
    first_row = 0
    with open_parquet(path) as file:
        try:
            for batch in file.iter_batches(rows, columns=list(columns)):
                yield first_row, batch
                first_row += batch.num_rows
        except (pa.ArrowInvalid, OSError) as error:
            what = f"{path} cannot be read past row {first_row}"
            raise DataError(what, str(error).splitlines()[0]) from error


def refuse_bad_text(path: Path, ids: pa.Array | pa.ChunkedArray, first_row: int = 0) -> None:
    """Refuse item ids that are no text.

    Raises:
        DataError: Names the row of the first one; `first_row` is that of the column.
    """
    for row in bad_text(ids)[:1]:
        what = f"{path} row {first_row + row} ({shown(ids[row])[:80]}): the item id is not UTF-8"
        raise DataError(what, fix="correct or remove it")


def mark_of(path: Path, key: bytes) -> bytes | None:
    """What the command that wrote a file noted in its metadata; None: another program wrote it."""
    try:
        return (pq.read_schema(path).metadata or {}).get(key)
    except (pa.ArrowException, OSError):
        return None


def source_of(path: Path, num_rows: int | None = None) -> Source:
    """Describe a file by size, rows (those of a parquet file, unless given) and digest of its bytes."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    if num_rows is None:
        with open_parquet(path) as table:
            num_rows = int(table.metadata.num_rows)
    return Source(str(path), path.stat().st_size, num_rows, digest.hexdigest())
