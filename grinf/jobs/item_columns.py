"""Which columns of a catalogue hold items, SIDs and weights: by the settings, else by their usual names."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import numpy as np
import pyarrow as pa

from grinf.config.settings import BuildTrieSettings
from grinf.errors import UsageError

ITEM_NAMES = ("item_id", "item", "iid", "pid", "product_id", "note_id", "video_id", "id")
TOKEN_IDS = "token_ids"
BATCH_ROWS = 1 << 18
SID_NAMES = (
    *("sid", "sids", "semantic_id", "semantic_ids", "codes", "codebook", "sid_codes", "sid_text"),
    TOKEN_IDS,
)
LEVEL_NAME = re.compile(r"(?:sid|code|codebook|codebook_lv|level|c)_?([0-9]+)")
ONLY_LEVEL = re.compile(r"(?:sid|code|codebook|codebook_lv)_?0")
"""Name of the column of SIDs that have one level."""


@dataclass(frozen=True, slots=True)
class ItemColumns:
    """Which columns hold what."""

    item: str
    sids: tuple[str, ...]
    weight: str | None

    @property
    def all(self) -> list[str]:
        """Every column to read, each once."""
        return list(dict.fromkeys([self.item, *self.sids, *([self.weight] if self.weight else [])]))


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of a file.

    Attributes:
        batch: The columns, by the names of the file's `ItemColumns`.
        tell: Says where a row is and what it holds, for messages.
        fault: uint8 [n], `Fault` of rows that a column cannot express, and that are null in the batch; None:
            there are none.
    """

    batch: pa.RecordBatch
    tell: Callable[[int], str]
    fault: np.ndarray | None = None


def choose_columns(names: Sequence[str], settings: BuildTrieSettings) -> ItemColumns:
    """Take the columns that the settings name, else those with a usual name.

    Raises:
        UsageError: A column is missing or cannot be found by name.
    """
    sids = settings.sid_columns or ((settings.sid_column,) if settings.sid_column else ())
    for flag, column in (
        ("--item-column", settings.item_column),
        ("--weight-column", settings.weight_column),
        *(("--sid-column", column) for column in sids),
    ):
        if column is not None and column not in names:
            raise missing(f"there is no column {column!r} for {flag}", names, column)
    item = settings.item_column or next((name for name in ITEM_NAMES if name in names), None)
    if item is None:
        raise missing("no column looks like item ids; name it by --item-column", names, "item_id")
    sids = (
        sids
        or next(((name,) for name in SID_NAMES if name in names and name != item), ())
        or _level_columns(names)
    )
    if not sids:
        raise missing("no column looks like SIDs; name it by --sid-column or --sid-columns", names, "sid")
    return ItemColumns(item, sids, settings.weight_column)


def _level_columns(names: Sequence[str]) -> tuple[str, ...]:
    """Columns such as sid_0, sid_1, sid_2 in order of their numbers."""
    numbered = {int(match[1]): name for name in names if (match := LEVEL_NAME.fullmatch(name))}
    if len(numbered) > 1:
        return tuple(numbered[number] for number in sorted(numbered))
    return tuple(name for name in numbered.values() if ONLY_LEVEL.fullmatch(name))


def missing(what: str, names: Sequence[str], wanted: str) -> UsageError:
    """Make the error for a column that is not there."""
    near = get_close_matches(wanted, names, 1)
    fix = f"did you mean {near[0]!r}?" if near else ""
    return UsageError(what, f"the columns are: {', '.join(names)}", fix)
