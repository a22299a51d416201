"""Parquet files of a catalogue: which ones there are, and what each of them is."""

from collections.abc import Sequence
from difflib import get_close_matches
from glob import glob, has_magic
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from grinf.errors import DataError, UsageError
from grinf.trie.manifest import Source

READ_BUFFER_BYTES = 1 << 20


def find_files(paths: Sequence[Path]) -> list[Path]:
    """List parquet files of files, folders (hive-style too) and patterns, each once, sorted.

    Raises:
        UsageError: A path that does not exist, or without parquet files.
    """
    found: dict[Path, None] = {}
    for path in paths:
        is_pattern = has_magic(str(path)) and not path.exists()
        matches = [Path(name) for name in glob(str(path), recursive=True)] if is_pattern else [path]
        files = [
            file
            for match in matches
            for file in (_files_in(match) if match.is_dir() else [match])
            if file.is_file()
        ]
        if not files:
            near = get_close_matches(path.name, [other.name for other in path.parent.glob("*")], 1)
            why = f"did you mean {near[0]}?" if near else ""
            why = "a folder must hold *.parquet files" if path.is_dir() else why
            raise UsageError(f"no parquet file at {path}", why, "give files, folders or patterns of parquet")
        found |= dict.fromkeys(sorted(files))
    return list(found)


def _files_in(folder: Path) -> list[Path]:
    """Parquet files below a folder; names that start with _ or . are not data."""
    files = [file for file in folder.rglob("*") if file.suffix in (".parquet", ".pq")]
    return [file for file in files if not any(part[0] in "_." for part in file.relative_to(folder).parts)]


def open_parquet(path: Path) -> pq.ParquetFile:
    """Open a parquet file for reading in pieces, whatever the size of its row groups.

    Raises:
        DataError: It is not readable as parquet.
    """
    try:
        return pq.ParquetFile(path, buffer_size=READ_BUFFER_BYTES, pre_buffer=False)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is not readable as parquet", str(error).splitlines()[0]) from error


def source_of(path: Path) -> Source:
    """Describe a file by size, rows and digest of its bytes."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    with open_parquet(path) as opened:
        return Source(str(path), path.stat().st_size, opened.metadata.num_rows, digest.hexdigest())
