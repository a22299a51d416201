"""Which columns of a catalogue hold items, SIDs and weights: by the settings, else by their usual names."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

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
        fault: uint8 [n], `Fault` of rows that a column cannot express, and that are null in the batch.
    """

    batch: pa.RecordBatch
    tell: Callable[[int], str]
    fault: np.ndarray


@dataclass(frozen=True, slots=True)
class ItemFile:
    """A file of items, whatever its format.

    Attributes:
        columns: What its rows hold.
        num_rows: Rows, with those that cannot be used.
        pieces: Reads all rows, some at a time. DataError: the file is damaged.
    """

    path: Path
    columns: ItemColumns
    num_rows: int
    pieces: Callable[[], Iterator[Piece]]


def choose_columns(path: Path, names: Sequence[str], settings: BuildTrieSettings) -> ItemColumns:
    """Take the columns of a file that the settings name, else those with a usual name.

    Raises:
        UsageError: A column is missing or cannot be found by name.
    """
    item = find_column(path, names, "--item-column", settings.item_column, ITEM_NAMES, "item ids")
    if settings.weight_column is not None:
        find_column(path, names, "--weight-column", settings.weight_column)
    given = settings.sid_columns or ((settings.sid_column,) if settings.sid_column else ())
    sids = tuple(find_column(path, names, "--sid-column", column) for column in given)
    others = [name for name in names if name != item]
    if not sids and not any(name in SID_NAMES for name in others):
        sids = _level_columns(others)
    if not sids:
        sids = (find_column(path, others, "--sid-column or --sid-columns", None, SID_NAMES, "SIDs"),)
    return ItemColumns(item, sids, settings.weight_column)


def _level_columns(names: Sequence[str]) -> tuple[str, ...]:
    """Columns such as sid_0, sid_1, sid_2 in order of their numbers."""
    numbered = {int(match[1]): name for name in names if (match := LEVEL_NAME.fullmatch(name))}
    if len(numbered) > 1:
        return tuple(numbered[number] for number in sorted(numbered))
    return tuple(name for name in numbered.values() if ONLY_LEVEL.fullmatch(name))


def find_column(
    path: Path, names: Sequence[str], flag: str, given: str | None, usual: Sequence[str] = (), holds: str = ""
) -> str:
    """Find a column of a file: the given one, else the first that has a usual name.

    Args:
        path, names: The file and its columns.
        flag: Names such a column.
        given: What the flag says; None: nothing.
        usual: Usual names.
        holds: What is in such a column.

    Raises:
        UsageError: There is none.
    """
    found = next((name for name in ((given,) if given is not None else usual) if name in names), None)
    if found is not None:
        return found
    what = f"{path} has no column {given!r}" if given is not None else f"{path}: no column looks like {holds}"
    near = get_close_matches(given or usual[0], names, 1)
    fix = f"did you mean {near[0]!r}?" if near else f"name one by {flag}"
    raise UsageError(what, f"the columns are: {', '.join(names)}", fix)
