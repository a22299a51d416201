"""Retrieval metrics of a unit as sums, so that the sums of all units give the metrics of the job.

Targets and answers are sets: a repeated target counts once, a repeated answer at its first rank only. With
targets T of a query, and its first K answers A_K:

    recall@K  |A_K ∩ T| / |T|; recall_capped@K  |A_K ∩ T| / min(K, |T|)
    hit@K     1 if A_K ∩ T is not empty
    mrr@K     1 / rank of the first hit
    ndcg@K    sum of 1 / log2(1 + rank) over the hits, as a share of that of min(K, |T|) hits from rank 1 on
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from grinf.jobs.recall.bootstrap import resample

if TYPE_CHECKING:
    from grinf.jobs.recall.answers import Answers
    from grinf.jobs.recall.sid_lookup import Named

CUTOFFS = (1, 10, 50, 100, 300, 900, 1000)


@dataclass(frozen=True, slots=True)
class Ranked:
    """Answers of some queries, flat, by query and rank.

    Attributes:
        row: int64 [n], the query.
        rank: int64 [n], from 0 within each query.
        is_hit: bool [n].
    """

    row: np.ndarray
    rank: np.ndarray
    is_hit: np.ndarray


def rank_within(row: np.ndarray) -> np.ndarray:
    """Position of each element among those of its row; `row` is ascending."""
    return np.arange(len(row)) - np.searchsorted(row, row)


def rank_answers(row: np.ndarray, answer: np.ndarray, target_row: np.ndarray, target: np.ndarray) -> Ranked:
    """Drop repeated answers and mark the hits.

    Args:
        row, answer: int64 [n], by query and rank; equal numbers are the same thing.
        target_row, target: int64 [m].
    """
    span = 1 + max(int(part.max(initial=0)) for part in (answer, target))
    key = row * span + answer
    first = np.sort(np.unique(key, return_index=True)[1])
    row, key = row[first], key[first]
    return Ranked(row, rank_within(row), np.isin(key, target_row * span + target))


def count_targets(target_row: np.ndarray, target: np.ndarray, num_rows: int) -> np.ndarray:
    """Distinct targets of each row, int64 [rows]."""
    pairs = np.unique(np.stack([target_row, target]), axis=1)
    return np.bincount(pairs[0], minlength=num_rows)


def walk_targets(
    row: np.ndarray, sids: np.ndarray, target_row: np.ndarray, target_sids: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Compare SIDs with the targets of the same query, level by level, as if these were a trie.

    Args:
        row, sids: [n], [n, levels]: the answers.
        target_row, target_sids: [m], [m, levels]: the targets.

    Returns:
        bool [n, levels], whether the codes so far are those of a target; int64 [m], a number for each target.
    """
    state, target = row.astype(np.int64), target_row.astype(np.int64)
    matches = np.zeros(sids.shape, bool)
    for level in range(sids.shape[1]):
        codes, target_codes = (part[:, level].astype(np.int64) + 1 for part in (sids, target_sids))
        span = 1 + max(int(codes.max(initial=0)), int(target_codes.max(initial=0)))
        known, target = np.unique(target * span + target_codes, return_inverse=True)
        key = state * span + codes
        state = np.searchsorted(known, key)
        matches[:, level] = np.append(known, -1)[state] == key
        state = np.where(matches[:, level], state, len(known))  # No key of the next level begins with this.
    return matches, target


@dataclass(frozen=True, slots=True)
class Sums:
    """Metrics of some queries, to be added to those of others.

    Attributes:
        total: Sum by name.
        resampled: The sums of `n_eval` and of each recall in every replicate of the bootstrap,
            float64 [REPLICATES].
    """

    total: dict[str, float] = field(default_factory=dict[str, float])
    resampled: dict[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])


def ranking_values(ranked: Ranked, num_targets: np.ndarray, cutoffs: Sequence[int]) -> dict[str, np.ndarray]:
    """Compute recall, capped recall, hit, MRR and NDCG of each query.

    Args:
        ranked: The answers.
        num_targets: int64 [rows], distinct targets.
        cutoffs: Each K.

    Returns:
        float64 [rows] by name; 0 where there are no targets.
    """
    rows, wanted = len(num_targets), np.maximum(1, num_targets)
    row, rank = ranked.row[ranked.is_hit], ranked.rank[ranked.is_hit]
    discount = 1 / np.log2(np.arange(max(cutoffs, default=0)) + 2)
    ideal = np.append(0, np.cumsum(discount))
    first = np.full(rows, np.inf)
    np.minimum.at(first, row, rank)
    values: dict[str, np.ndarray] = {}
    for k in cutoffs:
        within = rank < k
        hits = np.bincount(row[within], minlength=rows)
        gain = np.bincount(row[within], discount[rank[within]], minlength=rows)
        values[f"recall@{k}"] = hits / wanted
        values[f"recall_capped@{k}"] = hits / np.minimum(wanted, k)
        values[f"hit@{k}"] = (hits > 0).astype(float)
        values[f"mrr@{k}"] = np.where(first < k, 1 / (first + 1), 0.0)
        values[f"ndcg@{k}"] = gain / ideal[np.minimum(wanted, k)]
    return values


def ranking_sums(ranked: Ranked, num_targets: np.ndarray, cutoffs: Sequence[int]) -> dict[str, float]:
    """Sum what `ranking_values` computes."""
    return _total(ranking_values(ranked, num_targets, cutoffs))


def measure(
    answers: "Answers",
    failed: np.ndarray,
    truth: "Named",
    cutoffs: Sequence[int],
    item_cutoffs: Sequence[int],
    weights: np.ndarray,
) -> Sums:
    """Sum the metrics of a unit.

    Args:
        answers: One entry per query.
        failed: bool [rows], queries with an error instead of an answer.
        truth: Targets of the same queries.
        cutoffs: Each K on SIDs. item_cutoffs: each K on items, if the truth names items.
        weights: [rows, REPLICATES], how often each query counts in each replicate of the bootstrap.

    Returns:
        Sums over the `n_eval` queries with targets and an answer, by name; `n_no_truth` have no targets,
        `n_error` have targets and an error. `level_hit@K[l]` counts the queries with a SID among the first K
        that agrees with a target's up to level l.
    """
    rows = answers.num_rows
    has_targets = np.bincount(truth.row, minlength=rows) > 0
    keep = ~failed[truth.row]
    row, is_known = truth.row[keep], truth.in_catalogue[keep]
    groups = {"n_eval": has_targets & ~failed, "n_no_truth": ~has_targets, "n_error": has_targets & failed}
    sums = _total(groups)
    resampled = {"n_eval": resample(weights, groups["n_eval"])}

    matches, target = walk_targets(answers.row, answers.sids, row, truth.sids[keep])
    wanted = target
    if answers.items is not None and item_cutoffs:
        items, wanted = _number_ids(answers.items, truth.given.filter(pa.array(keep)))
        on_items = rank_answers(answers.item_row, items, row, wanted)
        values = _named("items", ranking_values(on_items, count_targets(row, wanted, rows), item_cutoffs))
        sums, resampled = sums | _total(values), resampled | _resampled(values, weights)
        # Each unknown item is one more.
        target = np.where(is_known, target, wanted + target.max(initial=0) + 1)
    known, named = (count_targets(row[part], wanted[part], rows) for part in (is_known, slice(None)))
    sums["target_in_catalogue"] = float((known / np.maximum(1, named)).sum())
    on_sids = Ranked(answers.row, rank_within(answers.row), matches[:, -1])
    values = _named("sids", ranking_values(on_sids, count_targets(row, target, rows), cutoffs))
    sums, resampled = sums | _total(values), resampled | _resampled(values, weights)
    for k in cutoffs:
        for level, match in enumerate(matches.T):
            found = on_sids.row[match & (on_sids.rank < k)]
            sums[f"sids.level_hit@{k}[{level}]"] = float(len(np.unique(found)))
    return Sums(sums, resampled)


def _number_ids(answers: pa.Array, targets: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Number ids of either type, int64; equal ids get equal numbers."""
    both = pa.concat_arrays([answers, targets.cast(answers.type)])
    numbers = both.dictionary_encode().indices.to_numpy().astype(np.int64)
    return numbers[: len(answers)], numbers[len(answers) :]


def _named(group: str, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {f"{group}.{name}": value for name, value in values.items()}


def _total(values: Mapping[str, np.ndarray]) -> dict[str, float]:
    return {name: float(value.sum()) for name, value in values.items()}


def _resampled(values: Mapping[str, np.ndarray], weights: np.ndarray) -> dict[str, np.ndarray]:
    """Resample the metric that gets an interval."""
    return {name: resample(weights, value) for name, value in values.items() if ".recall@" in name}
