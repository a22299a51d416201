"""Where a command may write: where a file can be, never over an input, never over what is not its own."""

import errno
import os
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from grinf.errors import StorageError, UsageError
from grinf.jobs.parquet_files import is_data
from grinf.trie.publish import follow

T = TypeVar("T")

BESIDE = ".rejects.tmp-4194304"
"""The longest ending of a name that a command uses beside that of its output."""


def place(path: Path, flag: str = "-o") -> Path:
    """Say where an output really goes: where a link leads to, or the path itself.

    Args:
        path: As it was given.
        flag: Of the output.

    Raises:
        UsageError: Nothing can be there: a file is in the place of a folder, a name is too long, or links
            lead in a circle.
    """
    real = follow(path)
    if why := _fault(real):
        raise UsageError(f"{flag} {path} cannot be written", why, f"choose another {flag}")
    return real


def _fault(path: Path) -> str:
    """Why nothing can be at a path, which is no link; empty: something can."""
    if os.path.islink(path):
        return "the links lead in a circle"
    full = path.absolute()
    folder = next((above for above in full.parents if os.path.isdir(above)), full)
    *new, name = full.relative_to(folder).parts or ("",)
    if new and os.path.lexists(folder / new[0]):
        return f"{folder / new[0]} is no folder"
    for part in (*(folder / one for one in new), folder / (name + BESIDE), Path(f"{full}{BESIDE}")):
        try:
            os.lstat(part)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return f"a name is too long, with the {len(BESIDE)} bytes that are put behind it for a time"
    return ""


def refuse_inputs(
    written: Sequence[Path], files: Iterable[Path], given: Iterable[Path] = (), flag: str = "-o"
) -> None:
    """Refuse an output in the place of an input, or where the same command would read it the next time.

    Args:
        written: The output, then what is written or removed beside it.
        files: Every input.
        given: Inputs as they were given: a folder holds whatever parquet files are in it.
        flag: Of the output.

    Raises:
        UsageError: Names both.
    """
    fix = f"choose another {flag}"
    places = [_real(path) for path in written]
    for file in map(_real, files):
        if any(at in (file, *file.parents) for at in places):
            raise UsageError(f"{flag} {written[0]} would replace the input {file}", fix=fix)
    for folder in (_real(path) for path in given if path.is_dir()):
        if any(at.is_relative_to(folder) and is_data(at, folder) for at in places):
            why = "the same command would read it as an input the next time"
            raise UsageError(f"{flag} {written[0]} is inside the input {folder}", why, fix)


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


def existing(output: Path, read: Callable[[Path], T | None], command: str) -> T | None:
    """What made the file that is in the place of an output; None: there is none.

    Args:
        output: The file to be written.
        read: Gives what made a file; None: another program did.
        command: The command, for messages.

    Raises:
        UsageError: There is a folder, or a file that the command did not write.
    """
    if output.is_dir() or not output.name:
        raise UsageError(f"{output} is a folder", fix="name a file by -o")
    if not output.exists():
        return None
    made_by = read(output)
    if made_by is None:
        why = f"`{command}` did not write it"
        raise UsageError(f"{output} exists", why, "move it away, or choose another -o")
    return made_by


def exists(output: Path, why: str = "it was made from other inputs or settings") -> UsageError:
    """Make the error for an output of the command itself that only `--overwrite` replaces."""
    return UsageError(f"{output} exists", why, "choose another -o, or replace it by --overwrite")


@contextmanager
def writing(output: Path) -> Generator[None]:
    """Tell what the file system refuses as a failure to write the output."""
    try:
        yield
    except OSError as error:
        fix = "free some space, check the permissions, or choose another -o"
        raise StorageError(f"cannot write {output}", str(error), fix) from error
