"""Catalogues in JSON, as other projects write them; every value is checked, for JSON promises nothing.

{"7": ["<a_1>", "<b_2>", "<c_3>"]}         item -> SID, in any form that a column may have
{"<a_1><b_2><c_3>": [7, 8]}                SID -> items; or objects, with an item and perhaps a weight
{"item_id": 7, "sid": [1, 2, 3]}           a line per item (or an array of these); also token_ids
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from grinf.config.settings import BuildTrieSettings
from grinf.errors import DataError, UsageError
from grinf.jobs.item_columns import BATCH_ROWS, ITEM_NAMES, ItemColumns, Piece, choose_columns
from grinf.jobs.json_rows import Row, Survey, Types
from grinf.jobs.sid_columns import Fault, SidReader
from grinf.trie.build import DEFAULT_MEMORY_LIMIT

PARSED_SIZE = 16
"""Bytes of memory per byte of JSON, about."""
MAX_LINE_BYTES = 1 << 24

KeysAre = Literal["items", "sids"]


class Pairs(list[tuple[str, Any]]):
    """A JSON object as it stands: a name may occur twice, and says so."""

    def as_dict(self) -> dict[str, Any] | None:
        """Its values by name; None: a name occurs twice."""
        values = dict(self)
        return values if len(values) == len(self) else None


@dataclass(frozen=True, slots=True)
class JsonItems:
    """A JSON file, which is read whole.

    Attributes:
        columns: Of its rows; of an object, the names are `key` and `value`.
    """

    path: Path
    columns: ItemColumns
    num_rows: int
    types: Types
    parse: Callable[[], Iterator[Row]]

    @classmethod
    def open(cls, path: Path, settings: BuildTrieSettings) -> "JsonItems":
        """Read the file, to see what it is.

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
            mapping = Mapping.of(path, document, settings)
            num_rows, types = mapping.survey(document)
            return cls(path, mapping.columns, num_rows, types, lambda: mapping.rows(_load(path)))
        records, num_rows = _Records.of(path, document, settings)
        return cls(
            path,
            records.columns,
            num_rows,
            records.types,
            lambda: records.rows("entry", enumerate(_load(path))),
        )

    def pieces(self) -> Iterator[Piece]:
        """Read all rows."""
        return self.types.to_pieces(self.parse(), self.columns, BATCH_ROWS)


@dataclass(frozen=True, slots=True)
class JsonLines:
    """A file with an object per line, which is streamed."""

    path: Path
    columns: ItemColumns
    num_rows: int
    records: "_Records"

    @classmethod
    def open(cls, path: Path, settings: BuildTrieSettings) -> "JsonLines":
        """Read all lines, to see what is in them."""
        records, num_rows = _Records.of(path, (value for _, value in _lines(path)), settings)
        return cls(path, records.columns, num_rows, records)

    def pieces(self) -> Iterator[Piece]:
        """Stream the lines."""
        rows = self.records.rows("line", _lines(self.path))
        return self.records.types.to_pieces(rows, self.columns, BATCH_ROWS)


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


@dataclass(frozen=True, slots=True)
class _Records:
    """How objects with an item and a SID each are read.

    Attributes:
        named: The names to look for.
        columns: Of the rows; several names of a SID's codes are one column.
        types: Of the columns.
    """

    named: ItemColumns
    columns: ItemColumns
    types: Types

    @classmethod
    def of(cls, path: Path, values: Iterable[Any], settings: BuildTrieSettings) -> "tuple[_Records, int]":
        """Choose among the names of all objects, and count the values.

        Raises:
            UsageError: A name is missing.
            DataError: There are no objects.
        """
        survey, num_rows = Survey(), 0
        for value in values:
            num_rows += 1
            for name, part in value if isinstance(value, Pairs) else ():
                survey.note(name, part)
        if not survey.counts:
            raise DataError(f"{path} holds no items", "there is no JSON object in it")
        try:
            named = choose_columns(survey.names, settings)
        except UsageError as error:
            raise UsageError(f"{path}: {error.what}", error.why, error.fix) from error
        columns = ItemColumns(named.item, (",".join(named.sids),), named.weight)
        return cls(named, columns, survey.types(named.item, named.sids)), num_rows

    def rows(self, unit: str, values: Iterator[tuple[int, Any]]) -> Iterator[Row]:
        """Give the rows of numbered values."""
        for number, value in values:
            where = f"{unit} {number}"
            found = value.as_dict() if isinstance(value, Pairs) else None
            if found is None:
                yield Row(where, None, None, fault=Fault.BAD_RECORD)
                continue
            weight = None if self.named.weight is None else found.get(self.named.weight)
            yield Row(where, found.get(self.named.item), self._sid(found), weight)

    def _sid(self, found: dict[str, Any]) -> Any:
        codes = [found.get(name) for name in self.named.sids]
        if len(codes) == 1:
            return codes[0]
        depth = max((level for level, code in enumerate(codes, start=1) if code is not None), default=0)
        return codes[:depth] or None


@dataclass(frozen=True, slots=True)
class Mapping:
    """How an object is read whose names are items, or SIDs.

    Attributes:
        keys: What the names are.
        columns: `key` and `value`.
        item_field: Name of the item where SIDs lead to objects.
        is_packed: Whether SIDs are packed numbers. are_numbers: whether all names are.
    """

    keys: KeysAre
    columns: ItemColumns
    item_field: str
    is_packed: bool
    are_numbers: bool

    @classmethod
    def of(cls, path: Path, pairs: Pairs, settings: BuildTrieSettings) -> "Mapping":
        """See what the names are.

        Raises:
            UsageError: That is open, or weights are asked for that there are not.
        """
        keys = _told(settings) or _found(pairs, settings)
        if keys is None:
            fix = "say --item-column key --sid-column value, or --item-column value --sid-column key"
            what = f"the names in {path} may be items or SIDs: the first is {pairs[0][0]!r}"
            raise UsageError(what, fix=fix)
        elements = (element for _, value in pairs for element in (value if _is_array(value) else [value]))
        fields = {name: None for element in elements if isinstance(element, Pairs) for name, _ in element}
        item = next((name for name in (settings.item_column, *ITEM_NAMES) if name in fields), "")
        if keys == "sids" and fields and not item:
            why = f"they have: {', '.join(fields)}"
            raise UsageError(f"the objects in {path} have no item id", why, "name it by --item-column")
        if settings.weight_column is not None and (keys == "items" or not fields):
            raise UsageError(f"{path} has no weights", fix="leave out --weight-column")
        items = ItemColumns("key", ("value",), None)
        columns = items if keys == "items" else ItemColumns("value", ("key",), settings.weight_column)
        are_numbers = all(_is_number(key) for key, _ in pairs)
        return cls(keys, columns, item, settings.sid_format.startswith("packed:"), are_numbers)

    def survey(self, pairs: Pairs) -> tuple[int, Types]:
        """Count the rows, and say what types they have."""
        survey, num_rows = Survey(), 0
        for row in self.rows(pairs):
            num_rows += 1
            survey.note("item", row.item)
            survey.note("sid", row.sid)
        return num_rows, survey.types("item", ["sid"])

    def rows(self, pairs: Pairs) -> Iterator[Row]:
        """Give the rows of an object."""
        for key, value in pairs:
            where = f"key {key[:80]!r}"
            if self.keys == "items":
                yield Row(where, int(key) if self.are_numbers else key, value)
                continue
            sid = int(key) if self.is_packed and _is_number(key) else key
            for element in (value or [None]) if _is_array(value) else [value]:
                yield self._row(where, sid, element)

    def _row(self, where: str, sid: Any, element: Any) -> Row:
        if not isinstance(element, Pairs):
            return Row(where, element, sid)
        found = element.as_dict()
        if found is None:
            return Row(where, None, None, fault=Fault.BAD_RECORD)
        weight = None if self.columns.weight is None else found.get(self.columns.weight)
        return Row(where, found.get(self.item_field), sid, weight)


def _told(settings: BuildTrieSettings) -> KeysAre | None:
    """What the settings say about the names."""
    if settings.item_column == "key" or settings.sid_column == "value":
        return "items"
    return "sids" if settings.item_column == "value" or settings.sid_column == "key" else None


def _found(pairs: Sequence[tuple[str, Any]], settings: BuildTrieSettings) -> KeysAre | None:
    """What names and values look like; None: both possible, or neither."""
    values = [value for _, value in pairs if value not in (None, [])]
    arrays = [value for value in values if _is_array(value)]
    if _are_most(isinstance(value[0], Pairs) for value in arrays):
        return "sids"
    have_sids = _look_like_sids([key for key, _ in pairs], settings.sid_format)
    if _are_most(type(value[0]) is int for value in arrays):
        lengths = set(map(len, arrays))
        if have_sids:
            return None if len(lengths) == 1 and lengths != {1} else "sids"
        return "sids" if settings.sid_format.startswith("packed:") else "items"
    texts = [" ".join(map(str, value)) if _is_array(value) else value for value in values]
    hold_sids = _look_like_sids(texts, settings.sid_format)
    if have_sids == hold_sids:
        return None
    return "sids" if have_sids else "items"


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


def _is_array(value: Any) -> bool:
    return isinstance(value, list) and not isinstance(value, Pairs)


def _is_number(text: str) -> bool:
    """Whether a text is an int64 as JSON would write it, so that no two texts are one number."""
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal()) or len(digits) > 19 or text == "-0":
        return False
    return (digits == "0" or digits[0] != "0") and -(2**63) <= int(text) < 2**63
