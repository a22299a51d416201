"""From parquet files to checked rows of a catalogue; every row that cannot be used is named."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

import numpy as np
import pyarrow as pa

from grinf.config.settings import BuildTrieSettings
from grinf.errors import DataError, UsageError
from grinf.jobs.parquet_files import open_parquet
from grinf.jobs.sid_columns import Fault, SidReader
from grinf.trie.build import ItemRows

ITEM_NAMES = ("item_id", "item", "iid", "pid", "product_id", "note_id", "video_id", "id")
SID_NAMES = ("sid", "sids", "semantic_id", "semantic_ids", "codes", "codebook", "sid_codes", "sid_text")
LEVEL_NAME = re.compile(r"(?:sid|code|codebook|codebook_lv|level|c)_?([0-9]+)")
BATCH_ROWS = 1 << 18
SHOWN = 5


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


@dataclass(slots=True)
class BadRows:
    """Rows that cannot be used: how many for each reason, and the first few in full."""

    counts: Counter[str] = field(default_factory=Counter[str])
    examples: list[str] = field(default_factory=list[str])

    @property
    def total(self) -> int:
        """All of them."""
        return self.counts.total()

    def add(self, fault: np.ndarray, describe: Callable[[int], str]) -> None:
        """Note the rows of a batch that have a fault."""
        bad = np.flatnonzero(fault)
        kinds, counts = np.unique(fault[bad], return_counts=True)
        reasons = [Fault(kind).reason for kind in kinds.tolist()]
        self.counts.update(dict(zip(reasons, counts.tolist(), strict=True)))
        for row in bad[: SHOWN - len(self.examples)].tolist():
            self.examples.append(f"{describe(row)}: {Fault(int(fault[row])).reason}")

    def error(self, rows_read: int) -> DataError:
        """Say it as an error."""
        more = f"; and {self.total - len(self.examples):,} more" if self.total > len(self.examples) else ""
        reasons = ", ".join(f"{reason}: {count:,}" for reason, count in sorted(self.counts.items()))
        return DataError(
            f"{self.total:,} of {rows_read:,} rows cannot be used ({reasons})",
            "; ".join(self.examples) + more,
            "correct them, or leave them out by --on-bad-row drop",
        )


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
            raise _missing(f"there is no column {column!r} for {flag}", names, column)
    item = settings.item_column or next((name for name in ITEM_NAMES if name in names), None)
    if item is None:
        raise _missing("no column looks like item ids; name it by --item-column", names, "item_id")
    sids = (
        sids
        or next(((name,) for name in SID_NAMES if name in names and name != item), ())
        or _level_columns(names)
    )
    if not sids:
        raise _missing("no column looks like SIDs; name it by --sid-column or --sid-columns", names, "sid")
    return ItemColumns(item, sids, settings.weight_column)


def _level_columns(names: Sequence[str]) -> tuple[str, ...]:
    """Columns such as sid_0, sid_1, sid_2 in order of their numbers."""
    numbered = {int(match[1]): name for name in names if (match := LEVEL_NAME.fullmatch(name))}
    return tuple(numbered[number] for number in sorted(numbered)) if len(numbered) > 1 else ()


def _missing(what: str, names: Sequence[str], wanted: str) -> UsageError:
    near = get_close_matches(wanted, names, 1)
    fix = f"did you mean {near[0]!r}?" if near else ""
    return UsageError(what, f"the columns are: {', '.join(names)}", fix)


class ItemReader:
    """Reads the rows of many files, and keeps count of those it cannot use.

    Args:
        columns: Which columns to read.
        settings: Formats, codebook sizes, END.
    """

    def __init__(self, columns: ItemColumns, settings: BuildTrieSettings) -> None:
        self.columns = columns
        self.bad_rows = BadRows()
        self.rows_read = 0
        self.first_of_depth: dict[int, str] = {}
        self._sids = SidReader(settings.sid_format)
        packed = self._sids.packed
        self.codebook_sizes = settings.codebook_sizes or ((packed[0],) * packed[1] if packed else None)
        self._allows_short = settings.end_token is not None
        if settings.offset_codes and self.codebook_sizes is None:
            why = "a level starts where the sizes before it end"
            raise UsageError("--offset-codes needs --codebook-sizes", why)
        self._offset = settings.offset_codes
        self._id_type: pa.DataType | None = None

    def read(self, path: Path) -> Iterator[ItemRows]:
        """Yield the usable rows of a file.

        Raises:
            UsageError: A column is missing or of a type that cannot be used.
            DataError: The file is damaged.
        """
        with open_parquet(path) as file:
            names = file.schema_arrow.names
            for column in self.columns.all:
                if column not in names:
                    raise _missing(f"{path} has no column {column!r}", names, column)
            first_row = 0
            try:
                for batch in file.iter_batches(BATCH_ROWS, columns=self.columns.all):
                    if batch.num_rows:
                        rows = self._check(batch, path, first_row)
                        if len(rows.codes):
                            yield rows
                    first_row += batch.num_rows
                    self.rows_read += batch.num_rows
            except (pa.ArrowInvalid, OSError) as error:
                what = f"{path} cannot be read past row {first_row}"
                raise DataError(what, str(error).splitlines()[0]) from error

    def _check(self, batch: pa.RecordBatch, path: Path, first_row: int) -> ItemRows:
        columns = self.columns

        def describe(row: int) -> str:
            values = ", ".join(f"{name}={str(batch[name][row].as_py())[:80]}" for name in columns.all)
            return f"{path} row {first_row + row} ({values})"

        try:
            sids = self._sids.read([batch[name] for name in columns.sids], columns.sids)
            ids = self._read_ids(batch[columns.item])
            weights = None if columns.weight is None else _read_weights(batch[columns.weight], columns.weight)
        except UsageError as error:
            raise UsageError(f"{path}: {error.what}", error.why, error.fix) from error
        fault = sids.fault
        codes = self._check_codes(sids.codes, fault)
        fault[(fault == Fault.NONE) & ids.is_null().to_numpy(zero_copy_only=False)] = Fault.NULL_ITEM
        if weights is not None:
            fault[(fault == Fault.NONE) & np.isnan(weights)] = Fault.BAD_WEIGHT
        if fault.any():
            self.bad_rows.add(fault, describe)
            keep = fault == Fault.NONE
            codes, ids = codes[keep], ids.filter(pa.array(keep))
            weights = None if weights is None else weights[keep]
        rows = ItemRows(codes.astype(np.int32), ids, weights)
        depth = rows.depth()
        for levels in set(np.flatnonzero(np.bincount(depth)).tolist()) - self.first_of_depth.keys():
            row = int(np.flatnonzero(fault == Fault.NONE)[np.argmax(depth == levels)])
            self.first_of_depth[levels] = describe(row)
        return rows

    def _check_codes(self, codes: np.ndarray, fault: np.ndarray) -> np.ndarray:
        """Mark codes that are out of place or out of range; return the codes without level offsets."""
        is_gap = (codes[:, :-1] < 0) & (codes[:, 1:] >= 0)
        fault[(fault == Fault.NONE) & is_gap.any(1)] = Fault.NULL_CODE
        if self.codebook_sizes is None:
            return codes
        levels = len(self.codebook_sizes)
        depth = (codes >= 0).sum(1)
        is_wrong = (depth > levels) if self._allows_short else (depth != levels)
        fault[(fault == Fault.NONE) & is_wrong] = Fault.WRONG_DEPTH
        codes = codes[:, :levels]
        sizes, is_code = np.array(self.codebook_sizes[: codes.shape[1]]), codes >= 0
        if self._offset:
            codes = codes - np.where(is_code, np.cumsum(sizes) - sizes, 0)
        is_out = is_code & ((codes < 0) | (codes >= sizes))
        fault[(fault == Fault.NONE) & is_out.any(1)] = Fault.BAD_CODE
        return codes

    def _read_ids(self, column: pa.Array) -> pa.Array:
        """Item ids as int64 or large_string.

        Raises:
            UsageError: Another type, or not the type of the files before.
        """
        kind, name = column.type, self.columns.item
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if pa.types.is_null(kind):
            return pa.nulls(len(column), self._id_type or pa.int64())
        is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
        if not is_text and not pa.types.is_integer(kind):
            fix = "item ids are integers or strings: cast the column"
            raise UsageError(f"item column {name!r} is of type {kind}", fix=fix)
        wanted = pa.large_string() if is_text else pa.int64()
        if self._id_type not in (None, wanted):
            what = f"item column {name!r} is {kind} here and {self._id_type} before"
            raise UsageError(what, fix="use one type in all files")
        self._id_type = wanted
        try:
            return column.cast(wanted)
        except pa.ArrowInvalid as error:
            what = f"item column {name!r} does not fit in int64"
            raise UsageError(what, str(error), "use strings") from error


def _read_weights(column: pa.Array, name: str) -> np.ndarray:
    """Weights as float64, NaN where null; -0.0 becomes 0.0, so that equal weights have equal bytes."""
    try:
        weights = column.cast(pa.float64(), safe=False)
    except pa.ArrowException as error:
        what = f"weight column {name!r} is of type {column.type}"
        raise UsageError(what, str(error), "weights are numbers") from error
    return weights.to_numpy(zero_copy_only=False) + 0.0
