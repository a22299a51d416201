"""Where a command may write: never over an input, and never over a file that it did not write itself."""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from grinf.errors import StorageError, UsageError
from grinf.jobs.parquet_files import is_data

T = TypeVar("T")


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
    places = [path.resolve() for path in written]
    for file in map(Path.resolve, files):
        if any(place in (file, *file.parents) for place in places):
            raise UsageError(f"{flag} {written[0]} would replace the input {file}", fix=fix)
    for folder in (path.resolve() for path in given if path.is_dir()):
        if any(place.is_relative_to(folder) and is_data(place, folder) for place in places):
            why = "the same command would read it as an input the next time"
            raise UsageError(f"{flag} {written[0]} is inside the input {folder}", why, fix)


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
        fix = "free some space, or choose another -o"
        raise StorageError(f"cannot write {output}", str(error), fix) from error
