"""Answers: the engine's results of a unit as flat arrays in input order, and as the rows of the output."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import pyarrow as pa

from grinf.errors import RowError
from grinf.jobs.recall.columns import Columns
from grinf.jobs.recall.rejects import one_line
from grinf.jobs.recall.units import Unit
from grinf.state.request import RecallResult

if TYPE_CHECKING:
    from grinf.trie import Trie


@dataclass(frozen=True, slots=True)
class Answers:
    """SIDs and items of some queries, flat, by query and rank.

    Attributes:
        offsets: int64 [rows + 1], the SIDs of each query.
        sids: int32 [n, levels], -1 past a short SID.
        scores: float32 [n].
        item_sid: int64 [items], which of the n SIDs each item has.
        items: Their ids; None: there is no catalogue.
    """

    offsets: np.ndarray
    sids: np.ndarray
    scores: np.ndarray
    item_sid: np.ndarray
    items: pa.Array | None

    @property
    def num_rows(self) -> int:
        """Queries."""
        return len(self.offsets) - 1

    @property
    def row(self) -> np.ndarray:
        """Query of each SID, int64 [n]."""
        return np.repeat(np.arange(self.num_rows), np.diff(self.offsets))

    @property
    def item_row(self) -> np.ndarray:
        """Query of each item, int64 [items]."""
        return self.row[self.item_sid]


def gather(
    outcomes: Sequence[RecallResult | RowError],
    levels: int,
    top_k: int | None,
    trie: "Trie | None",
    expand: Literal["all", "top1"],
    kept: Mapping[int, np.ndarray] | None = None,
) -> Answers:
    """Collect results, which are in input order, and look up their items.

    Args:
        outcomes: A result, or why there is none, of each query.
        levels: Tokens per SID.
        top_k: SIDs to keep of each query; None: all.
        trie: Knows the items.
        expand: Every item of a SID, or its first.
        kept: For each result, by its request, bool per item row of its SIDs; None: all are returned.
    """
    found = [outcome for outcome in outcomes if isinstance(outcome, RecallResult)]
    counts = [len(one.scores[:top_k]) if isinstance(one, RecallResult) else 0 for one in outcomes]
    sids = np.concatenate([np.empty((0, levels), np.int32), *(result.sids[:top_k] for result in found)])
    scores = np.concatenate([np.empty(0, np.float32), *(result.scores[:top_k] for result in found)])
    offsets = np.append(0, np.cumsum(counts, dtype=np.int64))
    if trie is None:
        return Answers(offsets, sids, scores, np.empty(0, np.int64), None)
    leaves = [result.leaves[:top_k] for result in found if result.leaves is not None]
    rows, ends = trie.item_rows(np.concatenate([np.empty(0, np.int64), *leaves]))
    item_sid = np.repeat(np.arange(len(scores)), np.diff(ends))
    if kept is not None:
        is_kept = np.concatenate([np.empty(0, bool), *(kept[result.request_id] for result in found)])
        rows, item_sid = rows[is_kept], item_sid[is_kept]
    if expand == "top1":
        first = np.searchsorted(item_sid, np.arange(len(scores)))  # Every SID that is found has a live item.
        rows, item_sid = rows[first], item_sid[first]
    return Answers(offsets, sids, scores, item_sid, trie.item_ids.take(pa.array(rows)))


def output_schema(columns: Columns, queries: pa.Schema, id_type: pa.DataType) -> pa.Schema:
    """Columns of the output; `columns` and `queries` are those of the input."""
    ids = queries.field(columns.query_id).type if columns.query_id else pa.int64()
    carried = [(name, queries.field(column).type) for column, name in columns.carried.items()]
    return pa.schema(
        [
            ("row", pa.int64()),
            ("query_id", ids),
            *carried,
            ("status", pa.string()),
            ("beams_returned", pa.int32()),
            ("sid", pa.list_(pa.list_(pa.int32()))),
            ("score", pa.list_(pa.float32())),
            ("item_id", pa.list_(id_type)),
            ("item_score", pa.list_(pa.float32())),
            ("item_beam", pa.list_(pa.int32())),
            ("error_code", pa.string()),
            ("error", pa.string()),
        ]
    )


def to_table(
    unit: Unit,
    queries: pa.Table,
    columns: Columns,
    answers: Answers,
    errors: Sequence[RowError | None],
    schema: pa.Schema,
) -> pa.Table:
    """Write answers as rows of the output, in input order; a query with an error has empty lists."""
    rows = np.arange(unit.num_rows) + unit.first_row
    item_ends = np.searchsorted(answers.item_sid, answers.offsets)
    item_beam = answers.item_sid - np.repeat(answers.offsets[:-1], np.diff(item_ends))
    is_code = answers.sids >= 0
    codes = _lists(np.append(0, np.cumsum(is_code.sum(1))), answers.sids[is_code])
    ours = {
        **{name: queries[column] for column, name in columns.carried.items()},
        "row": rows,
        "query_id": queries[columns.query_id] if columns.query_id else rows,
        "status": ["ok" if error is None else "error" for error in errors],
        "beams_returned": np.diff(answers.offsets),
        "sid": _lists(answers.offsets, codes),
        "score": _lists(answers.offsets, answers.scores),
        "item_id": _lists(item_ends, np.empty(0, np.int64) if answers.items is None else answers.items),
        "item_score": _lists(item_ends, answers.scores[answers.item_sid]),
        "item_beam": _lists(item_ends, item_beam),
        "error_code": [None if error is None else error.code for error in errors],
        "error": [None if error is None else one_line(error) for error in errors],
    }
    return pa.table(ours).select(schema.names).cast(schema)


def _lists(ends: np.ndarray, elements: np.ndarray | pa.Array) -> pa.Array:
    flat = elements if isinstance(elements, pa.Array) else pa.array(elements)
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), flat)
