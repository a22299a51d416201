"""Where answers go: units are committed one by one beside the output, which appears when all are there.

    OUT.partial/                          while a job runs, and after it was killed
        _grinf/manifest.json              inputs and settings; a job goes on only where they are the same
        _grinf/engine.json                what engines have settled on, so that every batch stays the same
        _grinf/lock                       held by the process that works on it
        _grinf/rejects/unit-000000.parquet    rejected queries of a unit, there before the unit is
        unit-000000.parquet               committed: the name appears when the whole file is on disk
    OUT                                   finished: one parquet file, or the folder itself
    OUT's name with .rejects.parquet      rejected queries, beside a single file

A unit's file says which unit of which job it is, and what that counted (rows, errors, sums of metrics). So
the numbers of a job are the sums over its files, whichever run wrote them. A file that is there and is not
what was written is never passed over in silence: the user may know what has befallen it.
"""

import fcntl
import json
import os
import re
import shutil
import socket
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from grinf.errors import StorageError, UsageError
from grinf.jobs.outputs import writing
from grinf.jobs.recall.signals import GOES_ON
from grinf.jobs.recall.unit_files import ENCODING, facts_of, merge, read_sealed, write_sealed
from grinf.jobs.recall.units import Unit
from grinf.trie.publish import publish, replacing

REJECTS = Path("_grinf", "rejects")
REPLACED = Path("_grinf", "replaced")
"""A finished folder that a new one takes the place of, for a moment."""

_UNIT = re.compile(r"unit-\d{6,}\.parquet")
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

    def finished(self, units: Sequence[Unit], *, overwrite: bool) -> dict[str, Any] | None:
        """The summary of an output of the same inputs and settings; None: there is none, or it is replaced.

        Args:
            units: Of the job.
            overwrite: Whether an output of other inputs or settings may be replaced.

        Raises:
            UsageError: It is of other inputs or settings, not whole, or not ours.
        """
        is_ours = (self.partial / "_grinf").is_dir() and not self.partial.is_symlink()
        if _is_there(self.partial) and not is_ours:
            raise UsageError(f"{self.partial} is in the way", FOREIGN, "move it away")
        if self.is_file and os.path.lexists(self.rejects) and not _is_rejects(self.rejects):
            why = "it is no file of rejected queries of `grinf recall`"
            raise UsageError(f"{self.rejects} is in the way", why, "move it away")
        if not (os.path.lexists(self.path) if self.is_file else _is_there(self.path)):
            return None
        facts = facts_of(self.path) if self.is_file else _folder_facts(self.path)
        strangers = [] if self.is_file else _strangers(self.path)
        if "manifest" not in facts or "summary" not in facts or strangers:
            why = f"{', '.join(strangers[:SHOWN])}: {FOREIGN}" if strangers else FOREIGN
            fix = "move it away, or choose another --output"
            raise UsageError(f"the output {self.path} exists", why, fix)
        if not self._is_same(facts["manifest"], f"the output {self.path}", overwrite):
            return None
        files = [] if self.is_file else [self.path / unit.name for unit in units]
        gone = [path for path in files if not path.exists()]
        if gone and not overwrite:
            why = f"the output {self.path} was finished, and is not whole"
            raise UsageError(f"{gone[0]} is gone", why, "bring it back, or make all again by --overwrite")
        if gone:
            return None
        _discard(self.path / REPLACED)  # Of a run that was killed while it did so.
        if _folder_facts(self.partial).get("manifest") in (None, self.manifest):
            _discard(self.partial)
        return facts["summary"]

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
            StorageError: It cannot be written.
        """
        own, what = self.partial / "_grinf", f"the unfinished job {self.partial}"
        with writing(self.partial):
            own.mkdir(parents=True, exist_ok=True)
            lock = (own / "lock").open("a+")
        with lock:
            with writing(self.partial):
                _hold(lock, self.partial)
                old, units = _folder_facts(self.partial).get("manifest"), [*self.partial.glob("unit-*")]
                # Where the manifest is lost, each unit says of itself which job it is of.
                is_same = (
                    self._is_same(old, what, overwrite or not resume) if old else units and not overwrite
                )
                if not is_same or not resume:
                    for path in (*units, *self.partial.glob(f"{REJECTS}/unit-*")):
                        path.unlink()
                    (own / "engine.json").unlink(missing_ok=True)
                    _write_json(own / "manifest.json", self.manifest)
                self._clear()
            try:
                yield Parts(self)
            finally:
                self._clear()
                if self.partial.is_dir() and not any(self.partial.glob("unit-*")):
                    _discard(self.partial)

    def _clear(self) -> None:
        """Remove what a process that was killed had begun to write."""
        beside = (f"{escape(path.name)}.tmp-[0-9]*" for path in (self.path, self.rejects) if self.is_file)
        merged = [path for pattern in beside for path in self.path.parent.glob(pattern)]
        for path in (*self.partial.rglob("*.tmp-[0-9]*"), *merged):
            path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Parts:
    """The committed units of a job."""

    output: Output

    def read(self, unit: Unit) -> dict[str, Any] | None:
        """What the file of a committed unit says about it and its search; None: it is not committed.

        Raises:
            StorageError: The file, or that of its rejected queries, is not what was written.
        """
        if not (self.output.partial / unit.name).exists():
            return None
        facts, _ = self._open(unit, self.output.partial)
        counts, rejected = facts["counts"], 0
        if (self.rejects / unit.name).exists():
            rejected = self._open(unit, self.rejects)[1].metadata.num_rows
        if rejected != counts["rows"] - counts["ok"]:
            why = f"{rejected:,} rejected queries are there, {counts['rows'] - counts['ok']:,} were written"
            raise self._damaged(unit, self.rejects, why)
        return facts

    def committed(self, unit: Unit) -> dict[str, Any]:
        """What `read` gives of a unit that was committed.

        Raises:
            StorageError: It is gone, or not what was written.
        """
        facts = self.read(unit)
        if facts is None:
            raise StorageError(f"{self.output.partial / unit.name} is gone", "it was committed", GOES_ON)
        return facts

    def _open(self, unit: Unit, folder: Path) -> tuple[dict[str, Any], pq.ParquetFile]:
        """Open a file of a committed unit, and make sure that it is that file and whole."""
        try:
            facts, file = read_sealed(folder / unit.name)
        except (OSError, ValueError) as error:
            raise self._damaged(unit, folder, str(error)) from error
        if facts.get("digest") != self.output.digest:
            raise self._damaged(unit, folder, "it is of other inputs or settings")
        if facts["unit"] != unit.place:
            why = "it is unit {index} of {rows} rows from row {first_row} on".format(**facts["unit"])
            raise self._damaged(unit, folder, why)
        return facts, file

    def _damaged(self, unit: Unit, folder: Path, why: str) -> StorageError:
        fix = f"remove {self.output.partial / unit.name}: the same command answers its rows again"
        return StorageError(f"{folder / unit.name} is not what was committed", why, fix)

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
            fix = "remove it: the next engine derives it again"
            raise StorageError(f"{self._engine} is damaged", str(error), fix) from error

    def settle(self, facts: Mapping[str, Any], *, replace_it: bool = False) -> dict[str, Any]:
        """Write down what engines are to do, unless another process was first; return what holds."""
        with writing(self._engine):
            if replace_it:
                _write_json(self._engine, facts)
                return self.settled()
            temporary = self._engine.with_name(f"{self._engine.name}.tmp-{os.getpid()}")
            temporary.write_text(_to_json(facts))
            try:
                os.link(temporary, self._engine)
            except FileExistsError:
                pass
            except OSError:  # There are file systems without links: the last one is as good as the first.
                os.replace(temporary, self._engine)
            finally:
                temporary.unlink(missing_ok=True)
        return self.settled()

    def commit(self, unit: Unit, table: pa.Table, rejects: pa.Table | None, facts: Mapping[str, Any]) -> None:
        """Write a unit; when this returns it is on disk, and before it there is nothing of its name.

        Args:
            unit: The unit.
            table: Its answers.
            rejects: Its rejected queries; None: there are none.
            facts: What its file says beside them: `counts`, and any text.
        """
        ours = {"digest": self.output.digest, "unit": unit.place}
        if rejects is None:
            (self.rejects / unit.name).unlink(missing_ok=True)  # Of an attempt that went otherwise.
        else:
            with replacing(self.rejects / unit.name) as temporary:
                write_sealed(temporary, rejects, ours, {})
        with replacing(self.output.partial / unit.name) as temporary:
            write_sealed(temporary, table, {**facts, **ours}, ENCODING)

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
        if strangers := _strangers(partial, [unit.name for unit in units]):
            why = "the finished folder would hold it"
            raise StorageError(f"{partial / strangers[0]} is not of the job", why, f"move it away; {GOES_ON}")
        for name, facts in (("manifest", self.output.manifest), ("summary", summary)):
            _write_json(partial / "_grinf" / f"{name}.json", facts)
        if path.exists():
            _discard(partial / REPLACED)
            path.rename(partial / REPLACED)
        publish(partial, path)
        (path / "_grinf" / "lock").unlink()
        _discard(path / REPLACED)

    def _merge_answers(self, units: Sequence[Unit], path: Path, summary: Mapping[str, Any]) -> None:
        first, _ = self._open(units[0], self.output.partial)
        facts = {**first, "manifest": self.output.manifest, "summary": summary}
        del facts["counts"], facts["unit"]
        merge(self._tables(units, self.output.partial), path, facts, ENCODING)

    def _merge_rejects(self, units: Sequence[Unit]) -> None:
        """Put the rejected queries into one file, beside the output that does not exist yet."""
        units = [unit for unit in units if (self.rejects / unit.name).exists()]
        if not units:
            self.output.rejects.unlink(missing_ok=True)  # Of an output that is replaced.
            return
        with replacing(self.output.rejects) as temporary:
            merge(self._tables(units, self.rejects), temporary, {"digest": self.output.digest}, {})

    def _tables(self, units: Sequence[Unit], folder: Path) -> Iterator[pa.Table]:
        for unit in units:
            yield self._open(unit, folder)[1].read()


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


def _folder_facts(path: Path) -> dict[str, Any]:
    """What `_grinf` says of a folder; what is damaged there says nothing."""
    facts: dict[str, Any] = {}
    for file in (path / "_grinf" / f"{name}.json" for name in ("manifest", "summary")):
        with suppress(FileNotFoundError, NotADirectoryError, ValueError):
            found = json.loads(file.read_text())
            facts |= {file.stem: found} if isinstance(found, dict) and found else {}
    return facts


def _is_rejects(path: Path) -> bool:
    facts = facts_of(path)
    return "digest" in facts and "manifest" not in facts


def _strangers(folder: Path, names: Sequence[str] = ()) -> list[str]:
    """What is in a finished folder that no job has written; or where there are names, what is not named."""
    found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    ours = [name for name in found if name in names or (not names and _UNIT.fullmatch(name))]
    return [name for name in found if name not in ("_grinf", *ours)]


def _discard(folder: Path) -> None:
    """Remove a folder of units, last what says that it is one: a kill leaves nothing in the way."""
    if (folder / "_grinf").is_dir():
        for path in folder.iterdir():
            if _UNIT.fullmatch(path.name):
                path.unlink(missing_ok=True)
        shutil.rmtree(folder / "_grinf", ignore_errors=True)
    with suppress(OSError):  # There is something of someone else in it.
        folder.rmdir()


def _is_there(path: Path) -> bool:
    """Whether there is anything: an empty folder is nothing."""
    return os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir()))


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    with replacing(path) as temporary:
        temporary.write_text(_to_json(value))


def _to_json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=1) + "\n"
