"""Rejected queries: the rows as they were given and what is wrong with them, to be mended and given again."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from grinf.errors import RowError
from grinf.jobs.recall.units import Unit

OUR_NAMES = ("row", "error_code", "error")


def to_rejects(unit: Unit, queries: pa.Table, errors: Sequence[RowError | None]) -> pa.Table | None:
    """Collect the rejected rows of a unit; None: there are none.

    Args:
        unit: The unit.
        queries: Its rows, every column of the input.
        errors: For each row why it has no answer, or None.

    Returns:
        The columns of the input and OUR_NAMES; a column of the input whose name is one of these, as in a file
        of rejects that was given again, is called `input_NAME`.
    """
    rejected = [row for row, error in enumerate(errors) if error is not None]
    if not rejected:
        return None
    table = pa.concat_tables(queries.slice(row, 1) for row in rejected)  # Not every type can be taken from.
    table = table.rename_columns([_free_name(name, table.column_names) for name in table.column_names])
    rows = pa.array(np.array(rejected, np.int64) + unit.first_row)
    found = [error for error in errors if error is not None]
    codes, texts = [error.code for error in found], [one_line(error) for error in found]
    for name, values in zip(OUR_NAMES, (rows, codes, texts), strict=True):
        table = table.append_column(name, pa.array(values, None if name == "row" else pa.string()))
    return table


def one_line(error: RowError) -> str:
    """What, why and fix in one line."""
    return "; ".join(str(error).splitlines())


def _free_name(name: str, taken: Sequence[str]) -> str:
    free = name
    while free in OUR_NAMES or (free != name and free in taken):
        free = f"input_{free}"
    return free
