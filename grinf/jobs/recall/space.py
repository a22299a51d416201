"""Room on the disk: how much a job will still write, and what to say when it is not there."""

import errno
import shutil
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from grinf.errors import StorageError
from grinf.jobs.recall.output import REJECTS, Output
from grinf.jobs.recall.signals import GOES_ON
from grinf.jobs.recall.units import Unit

TIGHT = 0.8
"""Share of the free bytes from which on a job may not fit."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def needed_bytes(output: Output, units: Sequence[Unit]) -> int | None:
    """Bytes that a job will still write, judged by the units that it has committed; None: there are none."""
    done = [unit for unit in units if (output.partial / unit.name).exists()]
    if not done:
        return None
    files = [folder / unit.name for unit in done for folder in (output.partial, output.partial / REJECTS)]
    on_disk, of_rows, merged = np.sum([_sizes(path) for path in files], 0).tolist()
    rows, units_left = sum(unit.num_rows for unit in done), len(units) - len(done)
    rows_left = sum(unit.num_rows for unit in units) - rows

    def left(size: int) -> int:
        """What the units to come add to a size: so much each, and so much for each row."""
        return units_left * (size - of_rows) // len(done) + rows_left * of_rows // rows

    # A single file is made beside the units that it is made of.
    return left(on_disk) + (merged + left(merged) if output.is_file else 0)


def _sizes(path: Path) -> tuple[int, int, int]:
    """Bytes of a unit's file, if it is there: on the disk, of its rows, what a merged file has of it."""
    try:
        found, footer = path.stat(), pq.read_metadata(path)
    except (OSError, pa.ArrowException):  # Damaged: told where it is read.
        return 0, 0, 0
    notes = sum(len(key) + len(text) for key, text in (footer.metadata or {}).items())
    on_disk = max(found.st_size, found.st_blocks * 512)
    return on_disk, found.st_size - footer.serialized_size, found.st_size - notes


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
    """Tell how much room is missing when a write finds none, or that a write failed otherwise.

    Raises:
        StorageError: In place of the OSError.
    """
    try:
        yield
    except OSError as error:
        place, reason = output.partial, error.strerror or str(error)
        if error.errno not in _FULL:
            fix = f"check the disk and the permissions: {GOES_ON}"
            raise StorageError(f"writing to {place} failed", reason, fix) from error
        need = needed_bytes(output, units)
        size = f": about {format_bytes(need)} more are needed" if need else ""
        fix = f"free some space: {GOES_ON}"
        raise StorageError(f"no space left for {place}", f"{reason}{size}", fix) from error


def format_bytes(number: int) -> str:
    """Spell bytes for a reader: `5.1 GB`."""
    value, unit = float(number), "bytes"
    for larger in ("KB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.1f} {unit}" if unit != "bytes" else f"{number} {unit}"
