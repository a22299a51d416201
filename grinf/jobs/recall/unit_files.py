"""Parquet files with notes: what made them, what is in them, and for those of a unit a seal.

The seal is a digest of every other byte of the file. It stands in the footer, so that one file is all that a
commit needs, and whatever befalls a file afterwards is found when it is read.
"""

import json
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

PREFIX = "grinf."
"""Of our keys in a file's metadata."""

NESTED = ("manifest", "summary", "counts", "unit")
"""Keys whose values are JSON; the others are text."""

ENCODING: Mapping[str, Any] = {
    "compression": "zstd",
    "use_dictionary": ["status", "sid.list.element.list.element"],
    "use_byte_stream_split": ["score.list.element", "item_score.list.element"],
}
"""A fifth smaller than Arrow's defaults, and quicker: codes repeat, and the high bytes of scores do."""

_SEAL = b"grinf.seal"
_BLANK = b"0" * 32


def write_sealed(path: Path, table: pa.Table, facts: Mapping[str, Any], encoding: Mapping[str, Any]) -> None:
    """Write the file of a unit."""
    with pq.ParquetWriter(path, table.schema.with_metadata(_spell(facts)), **encoding) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({_SEAL.decode(): _BLANK.decode()})
    data = path.read_bytes()
    place, seal = _seal(data)
    assert data[place:][: len(_BLANK)] == _BLANK, "parquet puts a value two bytes behind its key"
    with path.open("r+b") as file:
        file.seek(place)
        file.write(seal)


def read_sealed(path: Path) -> tuple[dict[str, Any], pq.ParquetFile]:
    """What the file of a unit says, and the file.

    Raises:
        OSError: It cannot be read.
        ValueError: It is not as it was written.
    """
    data = path.read_bytes()
    place, seal = _seal(data)
    if data[place:][: len(_BLANK)] != seal:
        raise ValueError("its bytes are not those that were written")
    facts = facts_of(pa.BufferReader(data))
    del facts["seal"]
    return facts, pq.ParquetFile(pa.BufferReader(data))


def _seal(data: bytes) -> tuple[int, bytes]:
    """Where the seal of a file stands, and what it has to be."""
    view, place = memoryview(data), data.rfind(_SEAL) + len(_SEAL) + 2
    digest = xxhash.xxh3_128(view[:place])
    digest.update(view[place + len(_BLANK) :])
    return place, digest.hexdigest().encode()


def merge(
    tables: Iterable[pa.Table], path: Path, facts: Mapping[str, Any], encoding: Mapping[str, Any]
) -> None:
    """Write tables of one schema, at least one, into a file, a row group each."""
    rest = iter(tables)
    first = next(rest)
    with pq.ParquetWriter(path, first.schema.with_metadata(_spell(facts)), **encoding) as writer:
        for table in chain([first], rest):
            writer.write_table(table, row_group_size=len(table))


def facts_of(source: Path | pa.NativeFile) -> dict[str, Any]:
    """What we wrote into the metadata of a parquet file; empty: nothing, or there is no readable file."""
    try:
        metadata = pq.read_metadata(source).metadata or {}
        ours = {key.decode(): text for key, text in metadata.items() if key.startswith(PREFIX.encode())}
        facts = {key.removeprefix(PREFIX): text.decode() for key, text in ours.items()}
        facts |= {key: json.loads(facts[key]) for key in NESTED if key in facts}
    except (OSError, ValueError, pa.ArrowException):
        return {}
    return {key: value for key, value in facts.items() if isinstance(value, dict if key in NESTED else str)}


def _spell(facts: Mapping[str, Any]) -> dict[str, str]:
    return {PREFIX + key: json.dumps(value) if key in NESTED else value for key, value in facts.items()}
