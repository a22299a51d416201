"""Where answers go: units are committed one by one beside the output, which appears when all are there.

    OUT.partial/                          while a job runs, and after it was killed
        _grinf/manifest.json              inputs and settings; a job goes on only where they are the same
        _grinf/engine.json                what engines have settled on, so that every batch stays the same
        _grinf/lock                       held by the process that works on it
        _grinf/rejects/unit-000000.parquet    rejected queries of a unit, there before the unit is
        unit-000000.parquet               committed: the name appears when the whole file is on disk
    OUT                                   finished: one parquet file, or the folder itself
    OUT's name with .rejects.parquet      rejected queries, beside a single file

A unit's file says what the unit counted (rows, errors, sums of metrics). So the numbers of a job are the sums
over its files, whichever run wrote them.
"""

import fcntl
import json
import os
import shutil
import socket
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from glob import escape
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from grinf.errors import StorageError, UsageError
from grinf.jobs.recall.units import Unit
from grinf.trie.publish import publish, replacing

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

REJECTS = Path("_grinf", "rejects")
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
    def rejects(self) -> Path:
        """Where rejected queries are when the job is finished: a file beside the file, or a folder."""
        beside = self.path.with_name(f"{self.path.stem}.rejects.parquet")
        return beside if self.is_file else self.path / REJECTS

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
        if self.is_file and os.path.lexists(self.rejects) and not _is_rejects(self.rejects):
            why = "it is no file of rejected queries of `grinf recall`"
            raise UsageError(f"{self.rejects} is in the way", why, "move it away")
        if not _is_there(self.path):
            return None
        facts = _file_facts(self.path) if self.is_file else _folder_facts(self.path)
        strangers = [] if self.is_file else _strangers(self.path)
        if "manifest" not in facts or "summary" not in facts or strangers:
            why = f"{', '.join(strangers[:SHOWN])}: {FOREIGN}" if strangers else FOREIGN
            fix = "move it away, or choose another --output"
            raise UsageError(f"the output {self.path} exists", why, fix)
        if self._is_same(facts["manifest"], f"the output {self.path}", overwrite):
            if _folder_facts(self.partial).get("manifest") in (None, self.manifest):
                _discard(self.partial)  # Of a run that was killed while it did so.
            return facts["summary"]
        return None

    def committed_bytes(self, unit: Unit) -> int:
        """Bytes of a committed unit, with its rejected queries; 0: it is not committed."""
        files = (self.partial / unit.name, self.partial / REJECTS / unit.name)
        return sum(file.stat().st_size for file in files if file.exists()) if files[0].exists() else 0

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
        with (own / "lock").open("a+") as lock:
            _hold(lock, self.partial)
            old = _folder_facts(self.partial).get("manifest")
            what = f"the unfinished job {self.partial}"
            if old is None or not self._is_same(old, what, overwrite or not resume) or not resume:
                for path in (*self.partial.glob("unit-*"), *self.partial.glob(f"{REJECTS}/unit-*")):
                    path.unlink()
                (own / "engine.json").unlink(missing_ok=True)
                _write_json(own / "manifest.json", self.manifest)
            self._clear()
            try:
                yield Parts(self)
            finally:
                self._clear()
                if self.partial.is_dir() and not any(self.partial.glob("unit-*")):
                    shutil.rmtree(self.partial)

    def _clear(self) -> None:
        """Remove what a process that was killed had begun to write."""
        beside = (f"{escape(path.name)}.tmp-*" for path in (self.path, self.rejects) if self.is_file)
        merged = [path for pattern in beside for path in self.path.parent.glob(pattern)]
        for path in (*self.partial.rglob("*.tmp-*"), *merged):
            path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Parts:
    """The committed units of a job."""

    output: Output

    def read(self, unit: Unit) -> dict[str, Any] | None:
        """What the file of a committed unit says about it and its search; None: it is not committed."""
        facts = _file_facts(self.output.partial / unit.name)
        return facts if facts.get("digest") == self.output.digest else None

    @property
    def rejects(self) -> Path:
        """Folder of rejected queries while the job runs."""
        return self.output.partial / REJECTS

    def settled(self) -> dict[str, Any]:
        """What the engines of the job have settled on; empty: there was none."""
        try:
            return json.loads(self._engine.read_text())
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise StorageError(
                f"{self._engine} is damaged", str(error), "start again: --no-resume"
            ) from error

    def settle(self, facts: Mapping[str, Any], *, replace_it: bool = False) -> dict[str, Any]:
        """Write down what engines are to do, unless another process was first; return what holds."""
        if replace_it:
            _write_json(self._engine, facts)
        else:
            temporary = self._engine.with_name(f"{self._engine.name}.tmp-{os.getpid()}")
            temporary.write_text(_to_json(facts))
            try:
                with suppress(FileExistsError):
                    os.link(temporary, self._engine)
            finally:
                temporary.unlink()
        return self.settled()

    def commit(self, unit: Unit, table: pa.Table, rejects: pa.Table | None, facts: Mapping[str, Any]) -> None:
        """Write a unit; when this returns it is on disk, and before it there is nothing of its name.

        Args:
            unit: The unit.
            table: Its answers.
            rejects: Its rejected queries; None: there are none.
            facts: What its file says beside them: `counts`, and any text.
        """
        digest = {"digest": self.output.digest}
        if rejects is None:
            (self.rejects / unit.name).unlink(missing_ok=True)  # Of an attempt that went otherwise.
        else:
            with replacing(self.rejects / unit.name) as temporary:
                pq.write_table(rejects.replace_schema_metadata(_metadata(digest)), temporary)
        metadata = _metadata({**facts, **digest})
        with replacing(self.output.partial / unit.name) as temporary:
            pq.write_table(table.replace_schema_metadata(metadata), temporary, **ENCODING)

    @property
    def _engine(self) -> Path:
        return self.output.partial / "_grinf" / "engine.json"

    def finish(self, units: Sequence[Unit], summary: Mapping[str, Any]) -> None:
        """Give the output its name.

        Args:
            units: All units, in order.
            summary: Numbers of the job, kept with the output.
        """
        path, partial = self.output.path, self.output.partial
        if self.output.is_file:
            self._merge_rejects(units)
            with replacing(path) as temporary:
                self._merge_answers(units, temporary, summary)
            _discard(partial)
            return
        _write_json(partial / "_grinf" / "summary.json", summary)
        (partial / "_grinf" / "lock").unlink()
        old = path.with_name(f"{path.name}.old-{os.getpid()}")
        if path.exists():
            path.rename(old)
        publish(partial, path)
        shutil.rmtree(old, ignore_errors=True)

    def _merge_answers(self, units: Sequence[Unit], path: Path, summary: Mapping[str, Any]) -> None:
        files = [self.output.partial / unit.name for unit in units]
        facts = {**_file_facts(files[0]), "manifest": self.output.manifest, "summary": summary}
        del facts["counts"]
        rows = _merge(files, path, facts, ENCODING)
        if rows != sum(unit.num_rows for unit in units):
            raise StorageError(f"{self.output.partial} holds {rows:,} rows", "a file in it was changed")

    def _merge_rejects(self, units: Sequence[Unit]) -> None:
        """Put the rejected queries into one file, beside the output that does not exist yet."""
        files = [file for unit in units if (file := self.rejects / unit.name).exists()]
        if not files:
            self.output.rejects.unlink(missing_ok=True)  # Of an output that is replaced.
            return
        with replacing(self.output.rejects) as temporary:
            _merge(files, temporary, {"digest": self.output.digest}, {})


def _merge(files: Sequence[Path], path: Path, facts: Mapping[str, Any], encoding: Mapping[str, Any]) -> int:
    """Copy files of one schema into one, a row group each, and return the rows."""
    rows = 0
    schema = pq.read_schema(files[0]).with_metadata(_metadata(facts))
    with pq.ParquetWriter(path, schema, **encoding) as writer:
        for file in files:
            table = pq.ParquetFile(file).read()
            writer.write_table(table, row_group_size=len(table))
            rows += len(table)
    return rows


def _hold(lock: TextIO, partial: Path) -> None:
    """Lock a file for as long as it is open, and write down who does.

    Raises:
        UsageError: Another process has locked it.
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        owner = lock.read().strip() or "another job"
        raise UsageError(f"{partial} is in use", f"{owner} writes to it", "let it end") from None
    if os.fstat(lock.fileno()).st_nlink == 0:
        raise UsageError(f"{partial} is in use", "another job has just ended there", "try again")
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}")
    lock.flush()


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
    """What `_grinf` says of a folder; what is damaged there says nothing."""
    facts: dict[str, Any] = {}
    for file in (path / "_grinf" / f"{name}.json" for name in ("manifest", "summary")):
        with suppress(FileNotFoundError, NotADirectoryError, ValueError):
            found = json.loads(file.read_text())
            facts |= {file.stem: found} if isinstance(found, dict) and found else {}
    return facts


def _is_rejects(path: Path) -> bool:
    facts = _file_facts(path)
    return "digest" in facts and "manifest" not in facts


def _strangers(folder: Path) -> list[str]:
    """Files in a finished folder that no job has written."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return [name for name in names if name != "_grinf" and not fnmatch(name, "unit-*.parquet")]


def _discard(partial: Path) -> None:
    """Remove a folder of parts, last what says that it is one: a kill leaves nothing in the way."""
    if not (partial / "_grinf").is_dir():
        return
    for path in partial.glob("unit-*"):
        path.unlink(missing_ok=True)
    shutil.rmtree(partial, ignore_errors=True)


def _is_there(path: Path) -> bool:
    """Whether there is anything: an empty folder is nothing."""
    return os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir()))


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    with replacing(path) as temporary:
        temporary.write_text(_to_json(value))


def _to_json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=1) + "\n"
