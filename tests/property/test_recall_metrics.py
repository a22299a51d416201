"""The metrics of `grinf recall` against plain Python and against ranx, on random answers and targets."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grinf.jobs.recall.answers import Answers
from grinf.jobs.recall.bootstrap import REPLICATES, draw_weights, interval, resample, spell_sums
from grinf.jobs.recall.metrics import Sums
from grinf.jobs.recall.metrics import measure as measure_all
from grinf.jobs.recall.report import COUNTED, summarise
from grinf.jobs.recall.sid_lookup import Named

LEVELS = 3
CUTOFFS = (1, 3, 10)
SIDS = st.tuples(*[st.integers(0, 2)] * LEVELS)
UNKNOWN = (-1,) * LEVELS


def plain_metrics(answers: Sequence, targets: set, k: int) -> dict[str, float]:
    """Metrics of one query, from the definitions."""
    first = list(dict.fromkeys(answers))[:k]
    hits = [rank for rank, answer in enumerate(first) if answer in targets]
    ideal = sum(1 / math.log2(rank + 2) for rank in range(min(k, len(targets))))
    return {
        f"recall@{k}": len(hits) / len(targets),
        f"recall_capped@{k}": len(hits) / min(k, len(targets)),
        f"hit@{k}": float(bool(hits)),
        f"mrr@{k}": 1 / (hits[0] + 1) if hits else 0.0,
        f"ndcg@{k}": sum(1 / math.log2(rank + 2) for rank in hits) / ideal,
    }


def answers_of(sids: list[list[tuple]], items: list[list[int]]) -> Answers:
    """Answers of queries; each item is put on the first SID of its query."""
    offsets = np.append(0, np.cumsum([len(row) for row in sids]))
    flat = np.array([sid for row in sids for sid in row], np.int32).reshape(-1, LEVELS)
    item_sid = np.repeat(offsets[:-1], [len(row) for row in items])
    ids = pa.array([item for row in items for item in row], pa.int64())
    return Answers(offsets, flat, np.zeros(len(flat), np.float32), item_sid, ids)


def named(rows: list[list], sid_of, given: pa.DataType | None = None) -> Named:
    row = np.repeat(np.arange(len(rows)), [len(one) for one in rows])
    flat = [target for one in rows for target in one]
    sids = np.array([sid_of(target) for target in flat], np.int32).reshape(-1, LEVELS)
    return Named(row, sids, pa.array(flat, given), sids[:, 0] >= 0)


def measure(answers: Answers, *rest: Any, first_row: int = 0) -> Sums:
    return measure_all(answers, *rest, draw_weights(first_row, answers.num_rows))


def sid_of_item(item: int) -> tuple[int, ...]:
    """SID of an item; items from 20 on are not in the catalogue."""
    return (item % 3, item // 3 % 3, 0) if item < 20 else UNKNOWN


@given(
    st.lists(
        st.tuples(
            st.lists(SIDS, unique=True, min_size=1, max_size=12),
            st.lists(st.integers(0, 25), max_size=14),
            st.lists(st.integers(0, 25), max_size=5),
            st.booleans(),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_sums_equal_the_definitions(queries) -> None:
    sids = [[] if failed else found for found, _, _, failed in queries]
    items = [[] if failed else found for _, found, _, failed in queries]
    truth = [targets for _, _, targets, _ in queries]
    failed = np.array([failed for *_, failed in queries])
    target = named(truth, sid_of_item, pa.int64())
    sums = measure(answers_of(sids, items), failed, target, CUTOFFS, CUTOFFS).total
    judged = [i for i in range(len(queries)) if truth[i] and not failed[i]]
    assert sums["n_eval"] == len(judged)
    assert sums["n_no_truth"] == sum(not targets for targets in truth)
    assert sums["n_error"] == sum(bool(targets) and bad for targets, bad in zip(truth, failed, strict=True))
    expected: dict[str, float] = {"target_in_catalogue": 0.0}
    for i in judged:
        wanted = {(sid_of_item(item), item if item >= 20 else None) for item in truth[i]}
        expected["target_in_catalogue"] += sum(item < 20 for item in set(truth[i])) / len(set(truth[i]))
        for k in CUTOFFS:
            for group, answers, targets in (
                ("items", items[i], set(truth[i])),
                ("sids", [(sid, None) for sid in sids[i]], wanted),
            ):
                for name, value in plain_metrics(answers, targets, k).items():
                    expected[f"{group}.{name}"] = expected.get(f"{group}.{name}", 0.0) + value
            for level in range(LEVELS):
                begins = {sid[: level + 1] for sid, _ in wanted if sid != UNKNOWN}
                hit = any(sid[: level + 1] in begins for sid in sids[i][:k])
                name = f"sids.level_hit@{k}[{level}]"
                expected[name] = expected.get(name, 0.0) + hit
    for name, value in expected.items():
        assert sums[name] == pytest.approx(value), name


def test_repeated_targets_and_answers_count_once() -> None:
    answers = answers_of([[(0, 0, 0)]], [[7, 7, 8]])
    target = named([[7, 7]], sid_of_item, pa.int64())
    sums = measure(answers, np.zeros(1, bool), target, (1,), (1, 10)).total
    assert sums["items.recall@1"] == sums["items.recall@10"] == sums["items.ndcg@10"] == 1.0


@pytest.mark.parametrize("targets", [[7, 7, 7, 25], [25, 25, 7]])
def test_a_repeated_target_is_in_the_catalogue_once(targets: list[int]) -> None:
    """Item 7 is in the catalogue, item 25 is not: half of the targets are, however often each is named."""
    answers, failed = answers_of([[(0, 0, 0)]], [[1]]), np.zeros(1, bool)
    items = named([targets], sid_of_item, pa.int64())
    assert measure(answers, failed, items, (1,), (1,)).total["target_in_catalogue"] == 0.5
    sids = named([[(1, 2, 0) if item == 7 else UNKNOWN for item in targets]], lambda sid: sid)
    assert measure(answers, failed, sids, (1,), ()).total["target_in_catalogue"] == 0.5


def test_string_ids() -> None:
    answers = answers_of([[(0, 0, 0)]], [[1, 2]])
    text = Answers(answers.offsets, answers.sids, answers.scores, answers.item_sid, pa.array(["a", "b"]))
    truth = named([["b", "z"]], lambda item: UNKNOWN, pa.large_string())
    assert measure(text, np.zeros(1, bool), truth, (1,), (1, 10)).total["items.recall@10"] == 0.5


NO_COUNTS = dict.fromkeys((*COUNTED, "sid_mass"), 1)
NO_COUNTS |= {"errors": {}, "examples": [], "budget": [8, 100]}


def test_sums_of_units_add_up() -> None:
    rng = np.random.default_rng(0)
    items = [rng.integers(0, 26, 10).tolist() for _ in range(9)]
    truth = [rng.integers(0, 26, 3).tolist() for _ in range(9)]
    sids = [[(0, 0, 0)]] * 9

    def count(part: slice) -> dict:
        target = named(truth[part], sid_of_item, pa.int64())
        failed = np.zeros(len(items[part]), bool)
        answers, first_row = answers_of(sids[part], items[part]), part.start or 0
        sums = measure(answers, failed, target, CUTOFFS, CUTOFFS, first_row=first_row)
        resampled = {name: spell_sums(values) for name, values in sums.resampled.items()}
        return {"sums": sums.total, "resampled": resampled, **NO_COUNTS}

    whole = summarise([count(slice(None))], 1)["metrics"]
    parts = summarise([count(slice(0, 2)), count(slice(2, 5)), count(slice(5, 9))], 1)["metrics"]
    assert parts["n_eval"] == whole["n_eval"] == 9
    for group in ("items", "sids"):
        assert parts[group].keys() == whole[group].keys()
        for name, value in whole[group].items():
            assert parts[group][name] == pytest.approx(value), name
    low, high = parts["items"]["recall_interval@10"]
    assert low < parts["items"]["recall@10"] < high
    other = summarise([count(slice(0, 2)), count(slice(0, 9))], 1)["metrics"]
    assert other["items"]["recall_interval@10"] != (low, high)


def test_the_weights_of_a_row_are_poisson_and_its_own() -> None:
    weights = draw_weights(0, 4000)
    assert weights.shape == (4000, REPLICATES)
    for count in range(5):
        assert (weights == count).mean() == pytest.approx(math.exp(-1) / math.factorial(count), rel=0.01)
    assert abs(np.corrcoef(weights[:, :40].T)[~np.eye(40, dtype=bool)]).max() < 0.08
    assert abs(np.corrcoef(weights[:40])[~np.eye(40, dtype=bool)]).max() < 0.25
    assert np.array_equal(np.vstack([draw_weights(0, 7), draw_weights(7, 3993)]), weights)


def test_an_interval_covers_as_often_as_it_says() -> None:
    """Means of 60 queries with a known expectation: 95 % of the intervals hold it, give or take."""
    rng, covered = np.random.default_rng(1), 0
    for trial in range(400):
        values = (rng.random(60) < 0.3).astype(float)
        weights = draw_weights(60 * trial, 60)
        low, high = interval(resample(weights, values), resample(weights, np.ones(60))) or (1, 0)
        covered += low <= 0.3 <= high
    assert 0.91 <= covered / 400 <= 0.98
    assert interval(np.zeros(REPLICATES), np.zeros(REPLICATES)) is None


BY_RANX = """
import json, sys
from ranx import Qrels, Run, evaluate
truth, items, metrics = json.load(sys.stdin)
qrels = Qrels({f"q{i}": {str(item): 1 for item in row} for i, row in enumerate(truth)})
run = Run({f"q{i}": {str(item): 1.0 - r / 100 for r, item in enumerate(row)} for i, row in enumerate(items)})
print(json.dumps({name: float(value) for name, value in evaluate(qrels, run, metrics).items()}))
"""


def by_ranx(truth: list[list[int]], items: list[list[int]], metrics: list[str]) -> dict[str, float]:
    """Means by ranx, in a process of its own: without numba's compiler, which would take a minute."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BY_RANX],
        input=json.dumps([truth, items, metrics]),
        env=os.environ | {"NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_ranx_agrees() -> None:
    rng = np.random.default_rng(3)
    items = [rng.permutation(60)[: rng.integers(1, 40)].tolist() for _ in range(40)]
    truth = [rng.permutation(60)[: rng.integers(1, 9)].tolist() for _ in range(40)]
    names = {"recall": "recall", "hit": "hit_rate", "mrr": "mrr", "ndcg": "ndcg"}
    theirs = by_ranx(truth, items, [f"{name}@{k}" for name in names.values() for k in CUTOFFS])
    sids = [[(0, 0, 0)]] * 40
    target = named(truth, lambda item: (item % 3, 0, 0), pa.int64())
    sums = measure(answers_of(sids, items), np.zeros(40, bool), target, CUTOFFS, CUTOFFS).total
    for ours, name in names.items():
        for k in CUTOFFS:
            assert sums[f"items.{ours}@{k}"] / 40 == pytest.approx(theirs[f"{name}@{k}"])
