"""A file appears under its name when all of it is on disk, or not at all."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


def follow(path: Path) -> Path:
    """Where a link leads to, be there something or not; a path that is no link stays as it is."""
    return Path(os.path.realpath(path)) if os.path.islink(path) else path


@contextmanager
def replacing(path: Path) -> Generator[Path]:
    """Yield a temporary path that becomes `path`, unless an error comes in between; makes its folder."""
    path = follow(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        yield temporary
        publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def publish(temporary: Path, path: Path) -> None:
    """Give a finished file or folder its name, atomically and durably."""
    _sync(temporary)
    os.replace(temporary, path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
