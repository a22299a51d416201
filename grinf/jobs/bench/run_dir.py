"""The folder of a run: raw tables, and a journal that says which of them are whole.

A probe's table is on disk before the journal names it, so that a run killed at any time goes on from there.
"""

import fcntl
import json
import os
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from grinf.errors import EnvironmentFault, UsageError
from grinf.jobs import outputs
from grinf.trie.publish import replacing

JOURNAL = "journal.jsonl"


@dataclass(frozen=True, slots=True)
class RunDir:
    """One run under `results/`."""

    path: Path

    @classmethod
    def create(cls, results: Path, name: str, config_hash: str, settings: Mapping[str, Any]) -> "RunDir":
        """Make a new folder, named by time, name and configuration."""
        run = cls(outputs.place(results / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{name}-{config_hash}"))
        with outputs.writing(run.path):
            try:
                run.path.mkdir(parents=True)
            except FileExistsError:
                why = "two runs began in the same second"
                raise UsageError(f"{run.path} exists", why, "start again") from None
        with replacing(run.path / "config.resolved.toml") as temporary:
            lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in settings.items()]
            temporary.write_text("\n".join(["[bench]", *lines]) + "\n")
        return run

    @classmethod
    def open(cls, path: Path) -> "RunDir":
        """Open a run that exists.

        Raises:
            EnvironmentFault: The folder holds no journal.
        """
        if not os.path.isfile(path / JOURNAL):
            fix = "name a folder that `grinf bench` wrote, such as results/2026..."
            raise EnvironmentFault(f"{path} is not a bench run", f"it has no {JOURNAL}", fix)
        return cls(path)

    @classmethod
    def newest(cls, results: Path, config_hash: str) -> "RunDir | None":
        """The newest run with the same configuration."""
        found = sorted(path.parent for path in results.glob(f"*-{config_hash}/{JOURNAL}"))
        return cls(found[-1]) if found else None

    def append(self, event: str, **fields: object) -> None:
        """Add a line to the journal, durably; a line that a crash cut off makes room for it."""
        with (self.path / JOURNAL).open("ab+") as file:
            file.seek(0)
            file.truncate(len(_whole_lines(file.read())))
            file.write((json.dumps({"event": event, **fields}) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())

    def events(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The journal's lines, with their places; one that a crash cut off is none, its probe is run again.

        Raises:
            EnvironmentFault: A line is no event.
        """
        path = self.path / JOURNAL
        for number, line in enumerate(_whole_lines(path.read_bytes()).splitlines(), 1):
            place = f"{path}, line {number}"
            event = _json(line, place)
            if not isinstance(event.get("event"), str):
                raise damaged(place, "it names no event")
            yield place, event

    def write_json(self, name: str, value: object) -> None:
        """Write a JSON file in one step; infinite and undefined numbers become null."""
        plain = json.loads(json.dumps(value, default=str), parse_constant=lambda name: None)
        with replacing(self.path / name) as temporary:
            temporary.write_text(json.dumps(plain, indent=2, ensure_ascii=False) + "\n")

    def read_json(self, name: str) -> dict[str, Any]:
        """Read a JSON file of the run; empty where there is none.

        Raises:
            EnvironmentFault: The file holds no JSON object.
        """
        path = self.path / name
        return _json(path.read_bytes(), str(path)) if path.is_file() else {}

    def write_table(self, name: str, table: pa.Table) -> None:
        """Write a parquet file in one step."""
        packed = dict(filter(None, map(_packed, table.schema)))
        plain: Any = [column for column in table.column_names if column not in packed]  # stubs know no list
        with replacing(self.path / name) as temporary:
            pq.write_table(table, temporary, compression="zstd", use_dictionary=plain, column_encoding=packed)

    def read_table(self, name: str) -> pa.Table:
        """Read a parquet file of the run.

        Raises:
            EnvironmentFault: The file is missing or damaged.
        """
        try:
            return pq.ParquetFile(self.path / name).read()
        except FileNotFoundError as error:
            why = "the journal names it, and it is not there"
            raise damaged(str(self.path / name), why) from error
        except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
            raise damaged(str(self.path / name), str(error)) from error

    @contextmanager
    def locked(self) -> Generator[None]:
        """Keep a second process out of the run.

        Raises:
            UsageError: Another process writes to it.
        """
        with (self.path / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                why = "another bench writes to it"
                raise UsageError(f"{self.path} is in use", why, "wait for it to end") from None
            yield


def damaged(place: str, why: str) -> EnvironmentFault:
    """Say that a file of a run is not what `grinf bench` wrote."""
    return EnvironmentFault(f"{place} is damaged", why, "restore the file, or measure again")


def _whole_lines(text: bytes) -> bytes:
    return text[: text.rfind(b"\n") + 1]


def _json(text: bytes, place: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise damaged(place, str(error)) from error
    if not isinstance(value, dict):
        raise damaged(place, "it is no JSON object")
    return value


def _packed(field: pa.Field) -> tuple[str, str] | None:
    """A column of numbers, and the encoding that suits times: 0.7 of the default's bytes."""
    values, path = field.type, field.name
    if pa.types.is_list(values):
        values, path = values.value_type, f"{path}.list.element"
    if pa.types.is_signed_integer(values) and values.bit_width >= 32:
        return path, "DELTA_BINARY_PACKED"
    return (path, "BYTE_STREAM_SPLIT") if pa.types.is_floating(values) else None
