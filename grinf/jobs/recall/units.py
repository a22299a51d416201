"""The unit of work: rows that are read, answered and committed together, and done again after a crash."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Unit:
    """A range of rows within one row group.

    Attributes:
        index: Position of the unit in the job; the output keeps this order.
        file, row_group: Where the rows are.
        start: First row within the row group.
        num_rows: Its rows.
        first_row: Number of the first row in the whole input.
    """

    index: int
    file: int
    row_group: int
    start: int
    num_rows: int
    first_row: int

    @property
    def name(self) -> str:
        """File that holds the unit's answers."""
        return f"unit-{self.index:06d}.parquet"

    @property
    def place(self) -> dict[str, int]:
        """Which rows it is of, as its file says."""
        return {"index": self.index, "first_row": self.first_row, "rows": self.num_rows}


def plan_units(row_groups: Sequence[Sequence[int]], most_rows: int, limit: int | None = None) -> list[Unit]:
    """Cut the input into units; the same files always give the same units.

    Args:
        row_groups: For each file, the rows of its row groups.
        most_rows: Rows of a unit at most: enough that its last, ragged batches cost little, few enough to be
            answered again after a crash.
        limit: Rows to take from the front; None: all.
    """
    total = sum(map(sum, row_groups))
    left = total if limit is None else min(limit, total)
    units: list[Unit] = []
    for file, groups in enumerate(row_groups):
        for row_group, rows in enumerate(groups):
            first_row = units[-1].first_row + units[-1].num_rows if units else 0
            for start in range(0, min(rows, left - first_row), most_rows):
                num_rows = min(most_rows, rows - start, left - first_row - start)
                units.append(Unit(len(units), file, row_group, start, num_rows, first_row + start))
    return units
