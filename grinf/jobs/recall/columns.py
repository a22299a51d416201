"""What each column is for: the prompt, the query's id, the truth, or nothing but to be carried along."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

from grinf.config.parse import unknown
from grinf.errors import RowError, UsageError
from grinf.jobs.arrow_types import is_list, is_text
from grinf.jobs.recall.inputs import Queries

InputKind = Literal["input_ids", "messages", "text", "history"]

INPUT_NAMES: dict[str, InputKind] = {
    "input_ids": "input_ids",
    "messages": "messages",
    "prompt": "text",
    "query": "text",
    "history": "history",
}
"""Names that are looked for; the first one that exists wins."""

ID_NAMES = ("query_id", "qid", "uid", "user_id", "id")
OUTPUT_NAMES = {
    *("row", "query_id", "status", "beams_returned", "sid", "score"),
    *("item_id", "item_score", "item_beam", "error_code", "error"),
}

_SLICE = 256
"""Rows that are Python objects at the same time."""


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns in use.

    Attributes:
        input: Prompts.
        kind: How they are given.
        query_id: Ids of queries; None: the row number is the id.
        truth: Relevant items or SIDs; None: no metrics.
        carried: Column -> its name in the output, which differs only where the output has that name itself.
        allow, deny: Lists of items that a query may, or may not, be given; None: there are none.
    """

    input: str
    kind: InputKind
    query_id: str | None
    truth: str | None
    carried: dict[str, str]
    allow: str | None = None
    deny: str | None = None

    @property
    def read(self) -> list[str]:
        """Every column to read."""
        others = (self.query_id, self.allow, self.deny)
        return list(dict.fromkeys([self.input, *filter(None, others), *self.carried]))


def pick_columns(
    queries: Queries,
    input_column: str | None,
    truth_column: str | None,
    allow_column: str | None = None,
    deny_column: str | None = None,
) -> Columns:
    """Find the columns by name and type.

    Args:
        queries: The files.
        input_column: Column of prompts; None: the first of INPUT_NAMES that exists.
        truth_column: Column of relevant items or SIDs.
        allow_column, deny_column: Columns of lists of items; they are not carried along.

    Raises:
        UsageError: A column that is missing in one of the files, or of a type that cannot be used.
    """
    names: list[str] = queries.schema.names
    name = input_column or next((name for name in INPUT_NAMES if name in names), None)
    if name is None:
        why = f"the files have: {', '.join(names)}"
        raise UsageError(f"no column is named {', '.join(INPUT_NAMES)}", why, "name one by --input-column")
    for column in filter(None, (name, truth_column, allow_column, deny_column)):
        _require(queries, column)
    query_id = next((name for name in ID_NAMES if name in names), None)
    used = {name, query_id, allow_column, deny_column} - {truth_column}
    carried = {column: free_name(column, OUTPUT_NAMES, names) for column in names if column not in used}
    kind = _kind(name, queries.schema.field(name).type)
    return Columns(name, kind, query_id, truth_column, carried, allow_column, deny_column)


def _require(queries: Queries, name: str) -> None:
    for file in queries.files:
        if name not in file.columns and sum(file.row_groups):
            error = unknown("column", name, file.columns)
            raise UsageError(f"{file.path}: {error.what}", f"it has: {', '.join(file.columns)}", error.fix)


def free_name(column: str, ours: Collection[str], names: Collection[str]) -> str:
    """Name of a column of the input, one of `names`, beside ours: its own, or `input_NAME`."""
    name = column
    while name in ours or (name != column and name in names):
        name = f"input_{name}"
    return name


def values(column: pa.ChunkedArray) -> Iterator[Any]:
    """Yield a column's values as Python objects, some rows at a time; what is none becomes a RowError."""
    for start in range(0, len(column), _SLICE):
        part = column.slice(start, _SLICE)
        try:
            yield from part.to_pylist()
        except (ValueError, OverflowError):  # No UTF-8, a time beyond its calendar, an unknown time zone.
            yield from map(_value, part)


def _value(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except (ValueError, OverflowError) as error:
        return RowError("bad_type", "the value cannot be read", str(error))


def _kind(name: str, type_: pa.DataType) -> InputKind:
    """What a column holds: by its type, and by its name where the type leaves a choice."""
    named = INPUT_NAMES.get(name)
    possible = _possible_kinds(type_)
    if named is None and "hist" in name.lower() and "history" in possible:
        return "history"
    if not possible or (named or possible[0]) not in possible:
        fix = "give text, token ids (list of numbers), messages, or a history (list of items or SIDs)"
        raise UsageError(f"column {name!r} holds {type_}, which is no {named or 'prompt'}", fix=fix)
    return named or possible[0]


def _possible_kinds(type_: pa.DataType) -> tuple[InputKind, ...]:
    """Kinds of prompt that a type can hold, the usual one first."""
    if pa.types.is_null(type_):
        return ("text", "input_ids", "messages", "history")
    if is_text(type_):
        return ("text", "messages")
    if not is_list(type_):
        return ()
    element = type_.value_type
    if pa.types.is_integer(element) or pa.types.is_null(element):
        return ("input_ids", "history")
    if pa.types.is_struct(element):
        return ("messages",)
    return ("history",) if is_list(element) or is_text(element) else ()
