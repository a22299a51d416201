"""Rejected queries: the rows as they were given and what is wrong with them, to be mended and given again."""

from collections.abc import Sequence

import pyarrow as pa

from grinf.errors import RowError
from grinf.jobs.recall.columns import free_name
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
    rejected = [(row, error) for row, error in enumerate(errors) if error is not None]
    if not rejected:
        return None
    # Not every type can be taken from.
    table = pa.concat_tables(queries.slice(row, 1) for row, _ in rejected)
    names = table.column_names
    table = table.rename_columns([free_name(name, OUR_NAMES, names) for name in names])
    ours = zip(*((unit.first_row + row, error.code, one_line(error)) for row, error in rejected), strict=True)
    for name, column in zip(OUR_NAMES, ours, strict=True):
        table = table.append_column(name, pa.array(column))
    return table


def one_line(error: RowError) -> str:
    """What, why and fix in one line."""
    return "; ".join(str(error).splitlines())
