"""Where answers go: units are committed one by one beside the output, which appears when all are there.

    OUT.partial/                  while a job runs, and after it was killed
        _grinf/manifest.json      inputs and settings; a job goes on only where they are the same
        _grinf/lock               held by the process that works on it
        unit-000000.parquet       committed: the name appears when the whole file is on disk
    OUT                           finished: one parquet file, or the folder itself

A unit's file says what the unit counted (rows, errors, sums of metrics). So the numbers of a job are the sums
over its files, whichever run wrote them.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from grinf.errors import StorageError, UsageError
from grinf.jobs.recall.units import Unit
from grinf.trie.store import publish

PREFIX = "grinf."
"""Of our keys in a file's metadata."""

NESTED = ("manifest", "summary", "counts")
"""Keys whose values are JSON; the others are text."""

ENCODING: Mapping[str, Any] = {
    "compression": "zstd",
    "use_dictionary": ["status", "sid.list.element.list.element"],
    "use_byte_stream_split": ["score.list.element", "item_score.list.element"],
}
"""A fifth smaller than Arrow's defaults, and quicker: codes repeat, and the high bytes of scores do."""

FOREIGN = "`grinf recall` did not write it"
SHOWN = 3


@dataclass(frozen=True, slots=True)
class Output:
    """A place for answers.

    Attributes:
        path: A file if it ends in `.parquet`, else a folder of one file per unit.
        manifest: What decides the answers: every input and setting, by name.
    """

    path: Path
    manifest: Mapping[str, Any]

    @property
    def is_file(self) -> bool:
        """Whether the units are merged into one file."""
        return self.path.suffix == ".parquet"

    @property
    def partial(self) -> Path:
        """Folder of a job that is not finished."""
        return self.path.with_name(f"{self.path.name}.partial")

    @property
    def digest(self) -> str:
        """Digest of the manifest."""
        return xxhash.xxh3_128(json.dumps(self.manifest, sort_keys=True).encode()).hexdigest()

    def finished(self, *, overwrite: bool) -> dict[str, Any] | None:
        """The summary of an output of the same inputs and settings; None: there is none, or it is replaced.

        Args:
            overwrite: Whether an output of other inputs or settings may be replaced.

        Raises:
            UsageError: It is of other inputs or settings, or not ours.
        """
        if _is_there(self.partial) and not (self.partial / "_grinf").is_dir():
            raise UsageError(f"{self.partial} is in the way", FOREIGN, "move it away")
        if not _is_there(self.path):
            return None
        facts = _file_facts(self.path) if self.is_file else _folder_facts(self.path)
        if "manifest" not in facts or "summary" not in facts:
            raise UsageError(
                f"the output {self.path} exists", FOREIGN, "move it away, or choose another --output"
            )
        if self._is_same(facts["manifest"], f"the output {self.path}", overwrite):
            return facts["summary"]
        return None

    def _is_same(self, manifest: Mapping[str, Any], what: str, overwrite: bool) -> bool:
        names = [
            name for name in {**manifest, **self.manifest} if manifest.get(name) != self.manifest.get(name)
        ]
        changes = [f"{name} was {manifest.get(name)}, is {self.manifest.get(name)}" for name in names[:SHOWN]]
        if names and not overwrite:
            more = f"; and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            fix = "--overwrite replaces it, another --output keeps it"
            raise UsageError(f"{what} is of other inputs or settings", "; ".join(changes) + more, fix)
        return not names

    @contextmanager
    def open(self, *, resume: bool, overwrite: bool) -> Generator["Parts"]:
        """Hold the folder of parts, with what an earlier run committed there.

        Args:
            resume: Keep what is there.
            overwrite: Drop what is there if it is of other inputs or settings.

        Raises:
            UsageError: Another process works on it, or it is of other inputs or settings.
        """
        own = self.partial / "_grinf"
        own.mkdir(parents=True, exist_ok=True)
        with (own / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(
                    f"{self.partial} is in use", "another job writes to it", "let it end"
                ) from None
            old = _folder_facts(self.partial).get("manifest")
            what = f"the unfinished job {self.partial}"
            if old is None or not self._is_same(old, what, overwrite or not resume) or not resume:
                for path in self.partial.glob("unit-*"):
                    path.unlink()
                _write_json(own / "manifest.json", self.manifest)
            for path in self.partial.glob("*.tmp-*"):
                path.unlink()
            try:
                yield Parts(self)
            finally:
                if self.partial.is_dir() and not any(self.partial.glob("unit-*")):
                    shutil.rmtree(self.partial)


@dataclass(frozen=True, slots=True)
class Parts:
    """The committed units of a job."""

    output: Output

    def read(self, unit: Unit) -> dict[str, Any] | None:
        """What the file of a committed unit says about it and its search; None: it is not committed."""
        facts = _file_facts(self.output.partial / unit.name)
        return facts if facts.get("digest") == self.output.digest else None

    def commit(self, unit: Unit, table: pa.Table, facts: Mapping[str, Any]) -> None:
        """Write a unit; when this returns it is on disk, and before it there is nothing of its name.

        Args:
            unit: The unit.
            table: Its answers.
            facts: What its file says beside them: `counts`, and any text.
        """
        metadata = _metadata({**facts, "digest": self.output.digest})
        with _replacing(self.output.partial / unit.name) as temporary:
            pq.write_table(table.replace_schema_metadata(metadata), temporary, **ENCODING)

    def finish(self, units: Sequence[Unit], summary: Mapping[str, Any]) -> None:
        """Give the output its name.

        Args:
            units: All units, in order.
            summary: Numbers of the job, kept with the output.
        """
        path, partial = self.output.path, self.output.partial
        if self.output.is_file:
            with _replacing(path) as temporary:
                self._merge(units, temporary, summary)
            shutil.rmtree(partial)
            return
        _write_json(partial / "_grinf" / "summary.json", summary)
        (partial / "_grinf" / "lock").unlink()
        old = path.with_name(f"{path.name}.old-{os.getpid()}")
        if path.exists():
            path.rename(old)
        publish(partial, path)
        shutil.rmtree(old, ignore_errors=True)

    def _merge(self, units: Sequence[Unit], path: Path, summary: Mapping[str, Any]) -> None:
        """Copy the units into one file, one row group each."""
        files = [self.output.partial / unit.name for unit in units]
        facts = {**_file_facts(files[0]), "manifest": self.output.manifest, "summary": summary}
        del facts["counts"]
        schema = pq.read_schema(files[0]).with_metadata(_metadata(facts))
        rows = 0
        with pq.ParquetWriter(path, schema, **ENCODING) as writer:
            for file in files:
                table = pq.ParquetFile(file).read()
                writer.write_table(table, row_group_size=len(table))
                rows += len(table)
        if rows != sum(unit.num_rows for unit in units):
            raise StorageError(f"{self.output.partial} holds {rows:,} rows", "a file in it was changed")


def _file_facts(path: Path) -> dict[str, Any]:
    """What we wrote into the metadata of a parquet file; empty: nothing, or there is no readable file."""
    try:
        metadata = pq.read_metadata(path).metadata or {}
    except (OSError, pa.ArrowException):
        return {}
    texts = {key.decode(): text.decode() for key, text in metadata.items() if key.startswith(b"grinf.")}
    ours = {key.removeprefix(PREFIX): text for key, text in texts.items()}
    return {key: json.loads(text) if key in NESTED else text for key, text in ours.items()}


def _metadata(facts: Mapping[str, Any]) -> dict[str, str]:
    return {PREFIX + key: json.dumps(value) if key in NESTED else value for key, value in facts.items()}


def _folder_facts(path: Path) -> dict[str, Any]:
    files = [path / "_grinf" / f"{name}.json" for name in ("manifest", "summary")]
    return {file.stem: json.loads(file.read_text()) for file in files if file.is_file()}


def _is_there(path: Path) -> bool:
    """Whether there is anything: an empty folder is nothing."""
    return path.is_file() or (path.is_dir() and any(path.iterdir()))


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    with _replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1) + "\n")


@contextmanager
def _replacing(path: Path) -> Generator[Path]:
    """Yield a temporary path that becomes `path`, durably, unless an error comes in between."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
