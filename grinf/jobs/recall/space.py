"""Room on the disk: how much a job will still write, and what to say when it is not there."""

import errno
import os
import shutil
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from grinf.errors import StorageError
from grinf.jobs.recall.output import Output
from grinf.jobs.recall.signals import GOES_ON
from grinf.jobs.recall.units import Unit

TIGHT = 0.8
"""Share of the free bytes from which on a job may not fit."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def needed_bytes(output: Output, units: Sequence[Unit]) -> int | None:
    """Bytes that a job will still write, judged by the units that it has committed; None: there are none."""
    sizes = [output.committed_bytes(unit) for unit in units]
    rows = sum(unit.num_rows for unit, size in zip(units, sizes, strict=True) if size)
    total = sum(unit.num_rows for unit in units)
    if not rows:
        return None
    # A single file is made beside the units that it is made of.
    to_write = total - rows + (total if output.is_file else 0)
    return to_write * sum(sizes) // rows


def check_space(output: Output, units: Sequence[Unit]) -> str:
    """Compare what a job will write with what is free; return a warning, or nothing.

    Raises:
        StorageError: It cannot fit.
    """
    need, free = needed_bytes(output, units) or 0, shutil.disk_usage(output.partial).free
    story = f"about {format_bytes(need)} more are needed at {output.partial}, {format_bytes(free)} are free"
    if need > free:
        raise StorageError("the answers will not fit", story, f"free some space: {GOES_ON}; or lower --top-k")
    return story if need > TIGHT * free else ""


@contextmanager
def explaining_full_disk(output: Output, units: Sequence[Unit]) -> Generator[None]:
    """Tell how much room is missing when a write finds none, or the disk fails.

    Raises:
        StorageError: In place of the OSError.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL | {errno.EIO}:
            raise
        place, reason = output.partial, os.strerror(error.errno)
        what = f"no space left for {place}" if error.errno in _FULL else f"writing to {place} failed"
        need = needed_bytes(output, units)
        size = f": about {format_bytes(need)} more are needed" if need and error.errno in _FULL else ""
        fix = f"free some space: {GOES_ON}" if error.errno in _FULL else f"check the disk: {GOES_ON}"
        raise StorageError(what, f"{reason}{size}", fix) from error


def format_bytes(number: int) -> str:
    """Spell bytes for a reader: `5.1 GB`."""
    value, unit = float(number), "bytes"
    for larger in ("KB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.1f} {unit}" if unit != "bytes" else f"{number} {unit}"
