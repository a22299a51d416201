"""Catalogues in JSON, as other projects write them; every value is checked, for JSON promises nothing.

{"7": ["<a_1>", "<b_2>", "<c_3>"]}         item -> SID, in any form that a column may have
{"<a_1><b_2><c_3>": [7, 8]}                SID -> items; or objects, with an item and perhaps a weight
{"item_id": 7, "sid": [1, 2, 3]}           a line per item (or an array of these); also token_ids
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from grinf.config.settings import BuildTrieSettings
from grinf.errors import DataError, UsageError
from grinf.jobs.item_columns import BATCH_ROWS, ITEM_NAMES, ItemColumns, ItemFile, Piece, choose_columns
from grinf.jobs.json_rows import Kinds, Row, kind_of, to_pieces
from grinf.jobs.sid_columns import Fault, SidReader
from grinf.trie.build import DEFAULT_MEMORY_LIMIT

PARSED_SIZE = 16
"""Bytes of memory per byte of JSON, about."""
MAX_LINE_BYTES = 1 << 24

_INTEGER = re.compile("0|-?[1-9][0-9]{0,18}")

Values = Iterable[tuple[int, Any]]
"""Parsed values, each with its number in the file."""


class Pairs(list[tuple[str, Any]]):
    """A JSON object as it stands: a name may occur twice, and says so."""


def open_document(path: Path, settings: BuildTrieSettings) -> ItemFile:
    """Open a JSON file, an object or an array of objects; it is read whole, now and for its rows.

    Raises:
        UsageError: Its meaning is open.
        DataError: It is too large to be read whole, or no JSON of items.
    """
    limit = (settings.memory_limit or DEFAULT_MEMORY_LIMIT) // PARSED_SIZE
    if (size := path.stat().st_size) > limit:
        why = f"JSON is read whole, which takes {PARSED_SIZE} times its size, and {limit:,} bytes fit"
        raise DataError(f"{path} has {size:,} bytes", why, "raise --memory-limit, or write JSON lines")
    document = _load(path)
    if not isinstance(document, list) or not document:
        raise DataError(f"{path} holds no items", "it is no object and no array of objects, or is empty")
    if isinstance(document, Pairs):
        return _open_mapping(path, document, settings)
    return _open_records(path, settings, "entry", enumerate(document), lambda: enumerate(_load(path)))


def open_lines(path: Path, settings: BuildTrieSettings) -> ItemFile:
    """Open a file with an object per line; it is streamed, now to see what is in it, and for its rows.

    Raises:
        UsageError: A name is missing.
        DataError: There are no objects.
    """
    return _open_records(path, settings, "line", _lines(path), lambda: _lines(path))


def _load(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes(), object_pairs_hook=Pairs)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not readable as JSON", str(error)) from error


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Number, from 1, and value of each line that is not blank; what is no JSON is None."""
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b""), start=1):
            if len(line) == MAX_LINE_BYTES:
                what = f"line {number} of {path} has more than {MAX_LINE_BYTES:,} bytes"
                raise DataError(what, "JSON lines have an item per line")
            if line.strip():
                try:
                    yield number, json.loads(line, object_pairs_hook=Pairs)
                except (ValueError, RecursionError):
                    yield number, None


def _open_records(
    path: Path, settings: BuildTrieSettings, unit: str, values: Values, again: Callable[[], Values]
) -> ItemFile:
    """Open a file of objects with an item and a SID each; the names are chosen among those of all objects."""
    counts, num_rows = Counter[tuple[str, str]](), 0
    for _, value in values:
        num_rows += 1
        counts.update((name, kind_of(part)) for name, part in (value if isinstance(value, Pairs) else ()))
    if not counts:
        raise DataError(f"{path} holds no items", "there is no JSON object in it")
    named = choose_columns(path, list(dict.fromkeys(name for name, _ in counts)), settings)
    columns = ItemColumns(named.item, (",".join(named.sids),), named.weight)
    kinds = Kinds.of(counts, named.item, named.sids)

    def pieces() -> Iterator[Piece]:
        rows = (_row(f"{unit} {number}", value, named, _join_levels) for number, value in again())
        return to_pieces(rows, columns, kinds, BATCH_ROWS)

    return ItemFile(path, columns, num_rows, pieces)


def _row(where: str, value: Any, named: ItemColumns, join: Callable[[list[Any]], Any]) -> Row:
    """Take an object apart, in which no name may occur twice; `join` makes a SID of what is at its names."""
    found: dict[str | None, Any] = dict(value) if isinstance(value, Pairs) else {}
    if not isinstance(value, Pairs) or len(found) < len(value):
        return Row(where, None, None, fault=Fault.BAD_RECORD)
    sid = join([found.get(name) for name in named.sids])
    return Row(where, found.get(named.item), sid, found.get(named.weight))


def _join_levels(codes: list[Any]) -> Any:
    """A whole SID, or one of codes at a name for each level; nulls at its end are a short SID."""
    if len(codes) == 1:
        return codes[0]
    depth = max((level for level, code in enumerate(codes, start=1) if code is not None), default=0)
    return codes[:depth] or None


def _open_mapping(path: Path, pairs: Pairs, settings: BuildTrieSettings) -> ItemFile:
    """Open an object whose names are items, or SIDs; the names are its column `key`, the values `value`."""
    told = _told(settings)
    are_items = _look_like_items(path, pairs, settings) if told is None else told
    elements = (element for _, value in pairs for element in (value if _is_array(value) else [value]))
    fields = {name: None for element in elements if isinstance(element, Pairs) for name, _ in element}
    item = next((name for name in (settings.item_column, *ITEM_NAMES) if name in fields), None)
    if not are_items and fields and item is None:
        why = f"they have: {', '.join(fields)}"
        raise UsageError(f"the objects in {path} have no item id", why, "name it by --item-column")
    if settings.weight_column is not None and (are_items or not fields):
        raise UsageError(f"{path} has no weights", fix="leave out --weight-column")
    if are_items:
        columns, rows_of = ItemColumns("key", ("value",), None), _rows_by_item
    else:
        columns = ItemColumns("value", ("key",), settings.weight_column)
        named = ItemColumns(item or "", (), settings.weight_column)
        rows_of = partial(_rows_by_sid, named=named, is_packed=settings.sid_format.startswith("packed:"))
    counts, num_rows = Counter[tuple[str, str]](), 0
    for row in rows_of(pairs):
        num_rows += 1
        counts.update([("item", kind_of(row.item)), ("sid", kind_of(row.sid))])
    kinds = Kinds.of(counts, "item", ["sid"])

    def pieces() -> Iterator[Piece]:
        return to_pieces(rows_of(_load(path)), columns, kinds, BATCH_ROWS)

    return ItemFile(path, columns, num_rows, pieces)


def _rows_by_item(pairs: Pairs) -> Iterator[Row]:
    are_numbers = all(is_integer(key) for key, _ in pairs)
    for key, value in pairs:
        yield Row(f"key {key[:80]!r}", int(key) if are_numbers else key, value)


def _rows_by_sid(pairs: Pairs, named: ItemColumns, *, is_packed: bool) -> Iterator[Row]:
    """Give a row for each item of each SID; `named`: of the objects that may stand for items."""
    for key, value in pairs:
        where, sid = f"key {key[:80]!r}", int(key) if is_packed and is_integer(key) else key
        for element in (value or [None]) if _is_array(value) else [value]:
            if isinstance(element, Pairs):
                yield _row(where, element, named, lambda _, sid=sid: sid)
            else:
                yield Row(where, element, sid)


def _told(settings: BuildTrieSettings) -> bool | None:
    """Whether the settings say that the names are items; None: they say nothing of it."""
    if settings.item_column == "key" or settings.sid_column == "value":
        return True
    return False if settings.item_column == "value" or settings.sid_column == "key" else None


def _look_like_items(path: Path, pairs: Pairs, settings: BuildTrieSettings) -> bool:
    """Whether the values look like SIDs, or alone are tokens, and not the names, which are then items.

    Raises:
        UsageError: Both do, or neither.
    """
    values = [value for _, value in pairs if value not in (None, [])]
    arrays = [value for value in values if _is_array(value)]
    if _are_most(isinstance(value[0], Pairs) for value in arrays):
        return False
    keys = [key for key, _ in pairs]
    are_sids = _look_like_sids(keys, settings.sid_format)
    if _are_most(type(value[0]) is int for value in arrays):
        is_packed, lengths = settings.sid_format.startswith("packed:"), set(map(len, arrays))
        are_sids = are_sids or is_packed
        hold_sids = not is_packed and (not are_sids or (len(lengths) == 1 and lengths != {1}))
    else:
        hold_sids = _look_like_sids(_texts(values), settings.sid_format)
    if are_sids and hold_sids:
        are_sids, hold_sids = (
            _are_most(str(text).startswith("<") for text in some) for some in (keys, _texts(values))
        )
    if are_sids == hold_sids:
        fix = "say --item-column key --sid-column value, or --item-column value --sid-column key"
        raise UsageError(f"the names in {path} may be items or SIDs: the first is {pairs[0][0]!r}", fix=fix)
    return hold_sids


def _look_like_sids(texts: Sequence[Any], sid_format: str) -> bool:
    """Whether most of some values are texts of at least two codes."""
    some = pa.array([text for text in texts if isinstance(text, str) and text.isascii()], pa.string())
    try:
        read = SidReader("auto" if sid_format.startswith("packed:") else sid_format).read([some], ["value"])
    except UsageError:
        return False
    good = (read.fault == Fault.NONE) & ((read.codes >= 0).sum(1) > 1)
    return int(good.sum()) * 2 > len(texts)


def _are_most(answers: Iterable[bool]) -> bool:
    given = list(answers)
    return sum(given) * 2 > len(given)


def _texts(values: Sequence[Any]) -> list[Any]:
    return [" ".join(map(str, value)) if _is_array(value) else value for value in values]


def _is_array(value: Any) -> bool:
    return isinstance(value, list) and not isinstance(value, Pairs)


def is_integer(text: str) -> bool:
    """Whether a text is an int64 as JSON would write it, so that no two texts are one number."""
    return _INTEGER.fullmatch(text) is not None and -(2**63) <= int(text) < 2**63
