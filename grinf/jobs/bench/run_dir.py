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

JOURNAL = "journal.jsonl"


@dataclass(frozen=True, slots=True)
class RunDir:
    """One run under `results/`."""

    path: Path

    @classmethod
    def create(cls, results: Path, name: str, config_hash: str, settings: Mapping[str, Any]) -> "RunDir":
        """Make a new folder, named by time, name and configuration."""
        run = cls(results / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{name}-{config_hash}")
        try:
            run.path.mkdir(parents=True)
        except FileExistsError:
            raise UsageError(
                f"{run.path} exists", "two runs began in the same second", "start again"
            ) from None
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
        if not (path / JOURNAL).is_file():
            fix = "name a folder that `grinf bench` wrote, such as results/2026..."
            raise EnvironmentFault(f"{path} is not a bench run", f"it has no {JOURNAL}", fix)
        return cls(path)

    @classmethod
    def newest(cls, results: Path, config_hash: str) -> "RunDir | None":
        """The newest run with the same configuration."""
        found = sorted(path.parent for path in results.glob(f"*-{config_hash}/{JOURNAL}"))
        return cls(found[-1]) if found else None

    def append(self, event: str, **fields: object) -> None:
        """Add a line to the journal, durably."""
        with (self.path / JOURNAL).open("a") as file:
            file.write(json.dumps({"event": event, **fields}) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def events(self) -> Iterator[dict[str, Any]]:
        """Lines of the journal; one that was cut off by a crash is skipped, its probe is run again."""
        for line in _text(self.path / JOURNAL).splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue

    def write_json(self, name: str, value: object) -> None:
        """Write a JSON file in one step; infinite and undefined numbers become null."""
        plain = json.loads(json.dumps(value, default=str), parse_constant=lambda name: None)
        with replacing(self.path / name) as temporary:
            temporary.write_text(json.dumps(plain, indent=2, ensure_ascii=False) + "\n")

    def read_json(self, name: str) -> dict[str, Any]:
        """Read a JSON file of the run; empty where there is none."""
        return json.loads(_text(self.path / name) or "{}")

    def write_table(self, name: str, table: pa.Table) -> None:
        """Write a parquet file in one step."""
        with replacing(self.path / name) as temporary:
            pq.write_table(table, temporary, compression="zstd")

    def read_table(self, name: str) -> pa.Table:
        """Read a parquet file of the run.

        Raises:
            EnvironmentFault: The file is missing or damaged.
        """
        try:
            return pq.ParquetFile(self.path / name).read()
        except (OSError, pa.ArrowException) as error:
            raise EnvironmentFault(f"cannot read {self.path / name}", str(error)) from error

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


def _text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


@contextmanager
def replacing(path: Path) -> Generator[Path]:
    """Yield a temporary path that becomes `path` on success; a crash leaves nothing under that name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
