"""From files of items to checked rows of a catalogue; every row that cannot be used is named."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from grinf.config.settings import BuildTrieSettings
from grinf.errors import DataError, UsageError
from grinf.jobs.arrow_types import is_text, plain_type
from grinf.jobs.code_rules import TOKEN_IDS_FORMAT, CodeRules
from grinf.jobs.item_columns import TOKEN_IDS, ItemFile, Piece
from grinf.jobs.sid_columns import Fault, SidReader
from grinf.trie.build import ItemRows

SHOWN = 5


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


class ItemReader:
    """Reads the rows of many files, and keeps count of those it cannot use.

    Args:
        settings: Formats, codebook sizes, END.

    Attributes:
        first_of_depth: Of each number of codes, where the first row is and what it holds.
    """

    def __init__(self, settings: BuildTrieSettings) -> None:
        self.bad_rows = BadRows()
        self.rows_read = 0
        self.first_of_depth: dict[int, str] = {}
        self._format = settings.sid_format
        self._sids = SidReader("codes" if self._format == TOKEN_IDS_FORMAT else self._format)
        self.rules = CodeRules(settings, self._sids.packed)
        self._id_type: pa.DataType | None = None

    def read(self, file: ItemFile) -> Iterator[ItemRows]:
        """Yield the usable rows of a file.

        Raises:
            UsageError: A column is of a type that cannot be used.
            DataError: The file is damaged.
        """
        for piece in file.pieces():
            if piece.batch.num_rows:
                try:
                    rows = self._check(piece, file)
                except UsageError as error:
                    raise UsageError(f"{file.path}: {error.what}", error.why, error.fix) from error
                if len(rows.codes):
                    yield rows
            self.rows_read += piece.batch.num_rows

    def refuse_settings(self) -> None:
        """Refuse settings that no row has fitted, once all are read.

        Raises:
            UsageError: Names the setting.
        """
        self._sids.refuse_unread()
        self.rules.refuse_levels()

    def _check(self, piece: Piece, file: ItemFile) -> ItemRows:
        columns, batch = file.columns, piece.batch

        def describe(row: int) -> str:
            return f"{file.path} {piece.tell(row)}"

        sids = self._sids.read([batch[name] for name in columns.sids], columns.sids)
        ids = read_ids(batch[columns.item], columns.item, self._id_type)
        self._id_type = None if pa.types.is_null(ids.type) else ids.type
        weights = None if columns.weight is None else _read_weights(batch[columns.weight], columns.weight)
        fault = np.where(piece.fault, piece.fault, sids.fault)
        is_named_so = self._format == "auto" and columns.sids == (TOKEN_IDS,)
        are_token_ids = self._format == TOKEN_IDS_FORMAT or is_named_so
        codes = self.rules.check(sids.codes, fault, are_token_ids=are_token_ids)
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


def read_ids(
    column: pa.Array | pa.ChunkedArray, name: str, before: pa.DataType | None = None
) -> pa.Array | pa.ChunkedArray:
    """Item ids as int64 or large_string; nulls as `before`, the type of those in earlier files.

    Raises:
        UsageError: Another type, or not that of the ids before.
    """
    kind = plain_type(column.type)
    if pa.types.is_null(kind):
        return pa.nulls(len(column), before)
    if not is_text(kind) and not pa.types.is_integer(kind):
        fix = "item ids are integers or strings: cast the column"
        raise UsageError(f"item column {name!r} is of type {kind}", fix=fix)
    wanted = pa.large_string() if is_text(kind) else pa.int64()
    if before not in (None, wanted):
        what = f"item column {name!r} is {kind} here and {before} before"
        raise UsageError(what, fix="use one type in all files")
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
