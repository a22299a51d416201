"""What Arrow's types hold, and texts that are none, asked in one place for all readers of columns."""

from typing import Any

import pyarrow as pa
from pyarrow import types


def is_list(kind: pa.DataType) -> bool:
    """Whether a type is any of Arrow's lists, of any length or a fixed one, or views of these."""
    return types.is_nested(kind) and hasattr(kind, "value_type")


def is_text(kind: pa.DataType) -> bool:
    """Whether a type is any of Arrow's strings."""
    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Undo encodings that few functions of Arrow take, and that may differ between files of one dataset."""
    if types.is_dictionary(kind):
        return plain_type(kind.value_type)
    return pa.string() if types.is_string_view(kind) else kind


def plain(column: pa.Array) -> pa.Array:
    """The values of a column in its plain type."""
    column = column.dictionary_decode() if types.is_dictionary(column.type) else column
    return column.cast(plain_type(column.type))


def bad_text(column: pa.Array | pa.ChunkedArray) -> list[int]:
    """Numbers of the rows with a text that is not UTF-8, in itself or in its list; ascending."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return [row for row, value in enumerate(column) if isinstance(_read(value), bytes)]
    return []


def shown(value: pa.Scalar) -> str:
    """A value as messages show it; what is not UTF-8 as its bytes."""
    return str(_read(value))


def _read(value: pa.Scalar) -> Any:
    """What a scalar holds; the bytes of the first text in it that is not UTF-8."""
    try:
        return value.as_py()
    except UnicodeDecodeError as error:
        return error.object
