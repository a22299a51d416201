# pyright: reportAttributeAccessIssue=false
# pyarrow.compute makes its functions when it is imported.
"""Reading SIDs from Arrow columns, in every form that people store them.

[12, 7, 99]                list of integers, any Arrow list type
["<a_12>", "<b_7>", ...]   list of token texts
12 | 7 | 99                one column per level
"<a_12><b_7><c_99>"        one text of tokens; also "3-9-1", "3,9,1", "C12C7C99", or a pattern of one's own
805421155                  one packed integer
"""

import itertools
import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from grinf.errors import UsageError
from grinf.jobs.arrow_types import is_list, is_text, plain, plain_type
from grinf.jobs.item_columns import ONLY_LEVEL

MAX_LEVELS = 16
MAX_CODE = 2**31 - 1
SAMPLE = 1000
FORMATS = "auto, codes, tokens, token-ids, packed:KxL, or regex:PATTERN with one group per level"


class Fault(IntEnum):
    """Why a row cannot be used; `reason` is the fault in words."""

    reason: str

    def __new__(cls, number: int, reason: str) -> "Fault":
        """Keep the reason with the number."""
        fault = int.__new__(cls, number)
        fault._value_, fault.reason = number, reason
        return fault

    NONE = 0, ""
    NULL_SID = 1, "SID is null"
    NULL_CODE = 2, "SID has a null code"
    NO_CODES = 3, "SID has no codes"
    TOO_DEEP = 4, f"SID has more than {MAX_LEVELS} codes"
    BAD_CODE = 5, "code is not in the codebook"
    UNREADABLE = 6, "SID is not in the expected format"
    WRONG_DEPTH = 7, "SID has another number of codes"
    NULL_ITEM = 8, "item id is null"
    BAD_WEIGHT = 9, "weight is null or NaN"
    BAD_RECORD = 10, "it is no JSON object, or has a name twice"
    BAD_ITEM = 11, "item id is no text or int64, or not of the type of most ids"
    NOT_UTF8 = 12, "text is not UTF-8"


@dataclass(frozen=True, slots=True)
class ReadSids:
    """SIDs of a batch.

    Attributes:
        codes: int64 [n, levels], -1 past the end of a SID; rows with a fault hold anything.
        fault: uint8 [n], `Fault` of each row.
    """

    codes: np.ndarray
    fault: np.ndarray


class SidReader:
    """Reads SIDs of one catalogue; its texts have one spelling, whatever their order.

    Args:
        sid_format: `--sid-format`.
        is_mixed: Whether each text may have a spelling of its own: for SIDs that are then looked up.
    """

    def __init__(self, sid_format: str = "auto", *, is_mixed: bool = False) -> None:
        self._is_mixed = is_mixed
        self.packed = _parse_packed(sid_format)
        self._format = "packed" if self.packed else sid_format
        self._pattern, self._joint = "", " "  # A user's pattern takes joined texts as they are.
        self._possible = self._spellings = _SPELLINGS.get(sid_format, ())
        self._example = ""
        self._unread: tuple[str, str] | None = None
        if sid_format.startswith("regex:"):
            self._format, self._joint = "regex", ""
            self._pattern = _name_groups(sid_format.removeprefix("regex:"))
        elif self._format not in ("auto", "codes", "tokens", "packed"):
            raise UsageError(f"--sid-format {sid_format!r} is unknown", fix=f"use {FORMATS}")

    def read(self, columns: Sequence[pa.Array], names: Sequence[str]) -> ReadSids:
        """Read the SIDs of some rows.

        Args:
            columns: One column, or one per level; any chunk of a table.
            names: Their names, for messages.

        Raises:
            UsageError: A type that cannot hold SIDs, or texts of several spellings.
        """
        columns = [plain(column) for column in columns]
        kinds = [column.type for column in columns]
        kind, is_one = kinds[0], len(columns) == 1
        if all(map(types.is_null, kinds)):
            return _all_null(len(columns[0]))
        if all(map(is_text, kinds)) and not self.packed:
            texts = columns[0] if is_one else pc.binary_join_element_wise(*columns, self._joint)
            return self._read_texts(texts, texts.is_null(), names[0])
        if is_one and self.packed and types.is_integer(kind):
            return _read_packed(columns[0], *self.packed)
        is_level = not is_one or self._format == "codes" or ONLY_LEVEL.fullmatch(names[0]) is not None
        if all(map(types.is_integer, kinds)) and is_level:
            return _read_level_columns(columns)
        if is_one and is_list(kind) and types.is_integer(kind.value_type):
            return _read_lists(columns[0])
        if is_one and is_list(kind) and is_text(plain_type(kind.value_type)) and not self.packed:
            return self._read_texts(_join_lists(columns[0], self._joint), columns[0].is_null(), names[0])
        why = "integers of one column are codes of one level, or packed" if types.is_integer(kind) else ""
        is_float = any(types.is_floating(each.value_type if is_list(each) else each) for each in kinds)
        fix = "write 3-9-1, or lists of codes" if self._is_mixed else f"set --sid-format: {FORMATS}"
        fix = "cast the codes to integers" if is_float else fix
        raise UsageError(f"column {names[0]!r} of type {kind} holds no SIDs", why, fix)

    def refuse_unread(self) -> None:
        """Refuse a catalogue whose texts have all been unreadable: it is not the rows.

        Raises:
            UsageError: Names one of them.
        """
        if self._unread is not None and not self._example:
            name, text = self._unread
            what = f"column {name!r} holds no SIDs that can be read: its first value is {text!r}"
            fix = r"write --sid-format 'regex:<a_(\d+)><b_(\d+)>', with one group per level"
            raise UsageError(what, f"--sid-format is {self._format}", fix)

    def _read_texts(self, texts: pa.Array, is_null: pa.Array, name: str) -> ReadSids:
        null_rows = is_null.to_numpy(zero_copy_only=False)
        if null_rows.all():
            return _all_null(len(texts))
        patterns = [self._pattern]
        if self._format != "regex":
            patterns = self._find_patterns(texts.filter(pa.array(~null_rows)), name)
        levels = max((pattern.count("(?P<") for pattern in patterns), default=1)
        codes = np.full((len(texts), levels), -1, np.int64)
        fault = np.full(len(texts), Fault.UNREADABLE, np.uint8)
        for pattern in patterns:  # Each reads what those before could not.
            if (is_left := (fault == Fault.UNREADABLE) & ~null_rows).any():
                found = _extract(texts, pattern)
                part = [_to_codes(found.field(level)) for level in range(found.type.num_fields)]
                read = np.stack(part, axis=1)
                is_left &= found.is_valid().to_numpy(zero_copy_only=False) & (read >= -1).all(1)
                codes[is_left, : read.shape[1]] = read[is_left]
                fault[is_left] = Fault.NONE
        fault[null_rows] = Fault.NULL_SID
        deepest = int((codes >= 0).sum(1).max(initial=1))
        return ReadSids(codes[:, :deepest], fault)

    def _find_patterns(self, texts: pa.Array, name: str) -> list[str]:
        """Patterns of the spellings of some texts; texts that have none are bad rows, no more.

        The spellings that all texts so far have are kept: a text of several means the same SID in each.

        Raises:
            UsageError: Texts that have no spelling in common.
        """
        matches = [_matches(texts, form) for form in self._spellings]
        has_one = np.logical_or.reduce(matches)
        if has_one.any():
            self._example = self._example or texts[int(has_one.argmax())].as_py()
        elif self._unread is None:
            self._unread = (name, texts[0].as_py())
        pairs = list(zip(self._spellings, matches, strict=True))
        if self._is_mixed:
            return [form(MAX_LEVELS) for form, fits in pairs if fits.any()]
        others = [form for form in self._possible if form not in self._spellings]
        unread = texts.filter(pa.array(~has_one))
        is_other = np.any([_matches(unread, form) for form in others], axis=0)
        kept = [form for form, fits in pairs if fits[has_one].all()]
        if np.any(is_other) or not kept:
            apart = max(int(np.argmax(has_one & ~fits)) for fits in matches)
            other = unread[int(np.argmax(is_other))] if np.any(is_other) else texts[apart]
            what = f"column {name!r} spells SIDs in two ways: {self._example!r} and {other.as_py()!r}"
            fix = "write them alike, or say by --sid-format which are SIDs: the others are then bad rows"
            raise UsageError(what, "a text of another spelling may mean another SID", fix)
        self._spellings = tuple(kept)
        return [kept[0](_depth(texts, kept[0])), kept[0](MAX_LEVELS)]


def _all_null(rows: int) -> ReadSids:
    return ReadSids(np.zeros((rows, 1), np.int64), np.full(rows, Fault.NULL_SID, np.uint8))


def _read_lists(lists: pa.Array) -> ReadSids:
    """Read lists of integers. Null lists have length 0 here and no values, so that no row shifts another."""
    depth = pc.fill_null(pc.list_value_length(lists), 0).to_numpy().astype(np.int64)
    values = pc.list_flatten(lists)
    flat = (pc.fill_null(values, 0) if values.null_count else values).cast(pa.int64(), safe=False).to_numpy()
    deepest = min(max(int(depth.max(initial=1)), 1), MAX_LEVELS)
    row = np.repeat(np.arange(len(depth)), depth)
    if depth.min(initial=deepest) == depth.max(initial=deepest) == deepest:
        codes = flat.reshape(-1, deepest)
    else:
        level = np.arange(len(flat)) - np.repeat(np.cumsum(depth) - depth, depth)
        fits = level < deepest
        codes = np.full((len(depth), deepest), -1, np.int64)
        codes[row[fits], level[fits]] = flat[fits]
    fault = np.zeros(len(depth), np.uint8)
    fault[row[(flat < 0) | (flat > MAX_CODE)]] = Fault.BAD_CODE
    fault[row[values.is_null().to_numpy(zero_copy_only=False)]] = Fault.NULL_CODE
    fault[depth > MAX_LEVELS] = Fault.TOO_DEEP
    fault[depth == 0] = Fault.NO_CODES
    fault[lists.is_null().to_numpy(zero_copy_only=False)] = Fault.NULL_SID
    return ReadSids(codes, fault)


def _read_level_columns(columns: Sequence[pa.Array]) -> ReadSids:
    """Read one column of integers per level; nulls at the end of a row are a short SID."""
    nulls = np.stack([column.is_null().to_numpy(zero_copy_only=False) for column in columns], axis=1)
    filled = [pc.fill_null(column, 0).cast(pa.int64(), safe=False).to_numpy() for column in columns]
    codes = np.where(nulls, -1, np.stack(filled, axis=1))
    fault = np.zeros(len(codes), np.uint8)
    fault[(~nulls & ((codes < 0) | (codes > MAX_CODE))).any(1)] = Fault.BAD_CODE
    fault[(nulls[:, :-1] & ~nulls[:, 1:]).any(1)] = Fault.NULL_CODE
    fault[nulls.all(1)] = Fault.NULL_SID
    return ReadSids(codes, fault)


def _read_packed(column: pa.Array, size: int, levels: int) -> ReadSids:
    value = pc.fill_null(column, 0).cast(pa.int64(), safe=False).to_numpy()
    fault = np.where((value < 0) | (value >= size**levels), Fault.BAD_CODE, Fault.NONE).astype(np.uint8)
    fault[column.is_null().to_numpy(zero_copy_only=False)] = Fault.NULL_SID
    places = [size**place for place in reversed(range(levels))]
    return ReadSids(np.stack([value // place % size for place in places], axis=1), fault)


def _parse_packed(sid_format: str) -> tuple[int, int] | None:
    """Read K and L of `packed:KxL`."""
    if not sid_format.startswith("packed:"):
        return None
    match = re.fullmatch(r"packed:([0-9]{1,9})x([0-9]{1,2})", sid_format)
    size, levels = (int(match[1]), int(match[2])) if match else (0, 0)
    if size < 1 or not 0 < levels <= MAX_LEVELS or size**levels > 2**63:
        why = "KxL is codes per level x levels, and K^L fits in 63 bits"
        raise UsageError(f"--sid-format {sid_format!r} names no packing", why, "write packed:8192x3")
    return size, levels


def _join_lists(lists: pa.Array, joint: str) -> pa.Array:
    """Join the texts of each list; a list with a null in it gives null, a null list an empty text."""
    depth = pc.fill_null(pc.list_value_length(lists), 0).to_numpy().astype(np.int64)
    texts = plain(pc.list_flatten(lists))
    offsets = pa.array(np.append(0, np.cumsum(depth)), pa.int32())
    return pc.binary_join(pa.ListArray.from_arrays(offsets, texts.cast(pa.string())), joint)


Form = Callable[[int], str]
"""Takes a number of levels, gives a pattern for texts of one to so many."""


def _form(unit: Callable[[int], str], joint: str, around: str = "{}") -> Form:
    def pattern(levels: int) -> str:
        nested = unit(levels - 1)
        for level in reversed(range(levels - 1)):
            nested = f"{unit(level)}(?:{joint}{nested})?"
        return _name_groups(around.format(nested))

    return pattern


_NUMBER = r"(\d{1,9})"
_LETTER = string.ascii_lowercase
_TOKENS: tuple[Form, ...] = (  # The letter or number of a level must be in its place.
    _form(lambda level: rf"<\|?(?:\w+_)?{_LETTER[level]}_?{_NUMBER}\|?>", r"\s*"),
    _form(lambda level: rf"<\|?(?:\w+_)?{level}_{_NUMBER}\|?>", r"\s*"),
    _form(lambda level: rf"<\|?(?:\w+_)?{level + 1}_{_NUMBER}\|?>", r"\s*"),
    _form(lambda level: rf"{_LETTER[level]}_?{_NUMBER}", r"\s*"),
    _form(lambda level: f"C{_NUMBER}", r"\s*"),
)
_JOINTS = (*(rf"\s*{re.escape(mark)}\s*" for mark in "-,_:;/|."), r"\s+")
_CODES: tuple[Form, ...] = tuple(
    _form(lambda level: _NUMBER, joint, r"\s*[\[(]?\s*{}\s*[\])]?\s*") for joint in _JOINTS
)


_SPELLINGS = {"auto": _TOKENS + _CODES, "tokens": _TOKENS, "codes": _CODES}


def _matches(texts: pa.Array, form: Form) -> np.ndarray:
    """Which texts have a spelling, bool [n]."""
    fits = pc.match_substring_regex(texts, form(MAX_LEVELS))
    return pc.fill_null(fits, False).to_numpy(zero_copy_only=False)


def _depth(texts: pa.Array, form: Form) -> int:
    """Codes of the deepest of the first few texts: a pattern for so many is quicker than one for any."""
    found = _extract(texts.slice(0, SAMPLE), form(MAX_LEVELS)).drop_null()
    depth = sum(bool(pc.any(pc.not_equal(found.field(level), "")).as_py()) for level in range(MAX_LEVELS))
    return max(depth, 1)


def _name_groups(pattern: str) -> str:
    """Name every bare group, as Arrow wants it, and anchor the pattern; leave escapes and classes alone."""
    level = itertools.count(1)
    named = re.sub(
        r"\\.|\[(?:\\.|[^\]\\])+\]|\((?!\?)",
        lambda match: f"(?P<level{next(level)}>" if match[0] == "(" else match[0],
        pattern,
    )
    if "(?P<" not in named:
        fix = r"give it one group per level: (\d+)-(\d+)"
        raise UsageError(f"the pattern {pattern!r} has no groups", fix=fix)
    return f"^(?:{named})$"


def _extract(texts: pa.Array, pattern: str) -> pa.StructArray:
    try:
        return pc.extract_regex(texts, pattern=pattern)
    except pa.ArrowInvalid as error:
        raise UsageError(f"--sid-format regex:{pattern[4:-2]!r} is no pattern", str(error)) from error


def _to_codes(digits: pa.Array) -> np.ndarray:
    """Texts of digits as int64 codes: -1 where empty or null, -2 where it is no code."""
    digits = pc.if_else(pc.equal(pc.fill_null(digits, ""), ""), "-1", digits)
    try:
        codes = digits.cast(pa.int64()).to_numpy()
    except pa.ArrowInvalid:  # A pattern of the user's caught something else.
        is_code = pc.match_substring_regex(digits, r"^(-1|\d{1,18})$")
        codes = pc.if_else(is_code, digits, "-2").cast(pa.int64()).to_numpy()
    return np.where(codes > MAX_CODE, -2, codes)
