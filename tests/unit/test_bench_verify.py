"""`--verify` on the real engine with a tiny random model, and on engines that lie."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from grinf.backend.interface import EngineOptions
from grinf.errors import UsageError
from grinf.jobs.bench import verify as verification
from grinf.jobs.bench.engines import OpenEngine, load_catalog
from grinf.jobs.bench.hf import HfEngine
from grinf.jobs.bench.plan import shipped_model
from grinf.jobs.bench.sim import BatchServer, SimEngine
from grinf.jobs.bench.verify import beams_due, least_overlap, serve, verify
from grinf.runtime.engine import Engine
from grinf.state.request import Request
from grinf.trie import TokenMapping, trie_of
from tests.bench_world import VirtualClock

TINY = str(shipped_model("tiny"))
CATALOG = load_catalog("synthetic:items=5k,codebook=64", TINY)


def requests(count=3):
    rng = np.random.default_rng(5)
    return [Request(i, rng.integers(0, 800, 20 + 3 * i).tolist()) for i in range(count)]


def checked(engine, count=3):
    (report,) = verify(engine, [requests(count)])
    return report


def opened(trie=CATALOG, **options):
    chosen = EngineOptions(TINY, device="cpu", **{"beams": (16,), "dtype": "float32", **options})
    return OpenEngine(Engine.load(chosen, trie), 8, trie, chosen)


class Altered:
    """An engine whose answers are changed on the way out."""

    def __init__(self, engine, change):
        self.engine, self.change = engine, change

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def step(self):
        return [self.change(result) for result in self.engine.step()]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"beams": (4, 16, 12)},
        {"score": "level"},
        {"score": "children"},
        {"score": "topk", "score_k": 5},
        {"trie": None, "beams": (8, 12, 20)},
        {"trie": None, "score": "topk"},
    ],
)
def test_the_engine_is_what_teacher_forcing_says(options):
    report = checked(opened(**options))
    assert report.faults == []
    assert report.status == "ok"
    assert report.score_error < 1e-4
    assert report.overlap >= 0.99
    assert report.top1 == 1.0


@pytest.mark.parametrize(
    ("options", "yardstick"),
    [
        ({}, "transformers and teacher"),
        ({"dtype": "float16"}, "transformers and teacher"),
        ({"beams": (4, 16, 12)}, "teacher"),
        ({"score": "children"}, "teacher"),
        ({"score": "topk", "trie": None}, "teacher"),
    ],
)
def test_a_narrow_dtype_is_held_to_another_search_of_the_same_dtype_and_prompts(options, yardstick):
    report = checked(opened(**{"dtype": "bfloat16"} | options), 6)
    assert report.faults == []
    assert report.yardstick == yardstick
    assert 0.7 < report.yardstick_overlap <= 1
    assert report.overlap >= report.yardstick_overlap - 0.15


def test_a_fault_that_shows_on_prompts_that_transformers_is_not_asked_is_found():
    right = opened(dtype="bfloat16")
    late = Altered(right.engine, lambda result: result if result.request_id < 4 else worst(result))
    report = checked(replace(right, engine=late), 8)
    assert report.yardstick == "transformers and teacher"
    assert report.yardstick_overlap > 0.7 > report.overlap
    assert any("of the exact beams" in fault for fault in report.faults)


def test_a_prompt_too_long_for_transformers_is_left_to_the_teacher(monkeypatch):
    monkeypatch.setattr(verification, "HF_TOKENS", 16 * 24)
    reports = verify(opened(dtype="bfloat16"), [requests(2), [Request(9, list(range(40)))]])
    assert [report.yardstick for report in reports] == ["transformers", "teacher"]
    assert [report.status for report in reports] == ["ok", "ok"]


def test_chance_is_allowed_for_and_little_else():
    """Of many beams a hundredth may be missed beside chance; of 256, eight are chance, a tenth is not."""
    assert least_overlap(0.94, 0.95, 16 * 900) < 0.94
    assert least_overlap(0.92, 0.95, 16 * 900) > 0.92
    assert least_overlap(1 - 8 / 256, 1.0, 256) < 1 - 8 / 256
    assert least_overlap(0.9, 1.0, 256) > 0.9
    assert least_overlap(1 / 32, 0.97, 32) > 1 / 32


@pytest.mark.parametrize(
    ("beams", "trie", "due"),
    [
        ((16,), None, (16, 16)),
        ((16,), CATALOG, (16, 16)),
        ((1, 1, 64), CATALOG, None),
        ((10_000,), CATALOG, (len(CATALOG.sids(np.arange(CATALOG.num_nodes[-1]))),) * 2),
    ],
)
def test_as_many_beams_are_due_as_schedule_and_catalogue_give(beams, trie, due):
    found = beams_due(EngineOptions(TINY, beams=beams), trie, 3, 800)
    assert found == due if due else found[0] < found[1] <= 64


def shift(result):
    return replace(result, scores=result.scores - 0.01)


def swap(result):
    return replace(result, scores=result.scores[::-1].copy())


def repeat(result):
    sids = result.sids.copy()
    sids[1] = sids[0]
    return replace(result, sids=sids)


def invent(result):
    sids = result.sids.copy()
    sids[3] = 63, 63, 63
    return replace(result, sids=sids)


def misplace(result):
    return replace(result, leaves=result.leaves[::-1].copy())


def forget(result):
    keep = slice(0, len(result.scores) // 2)
    return replace(result, sids=result.sids[keep], scores=result.scores[keep], leaves=result.leaves[keep])


def keep_one(result):
    return replace(result, sids=result.sids[:1], scores=result.scores[:1], leaves=result.leaves[:1])


def drop_items(result):
    return replace(result, leaves=None)


def score(value, place=slice(None)):
    def change(result):
        scores = result.scores.copy()
        scores[place] = value
        return replace(result, scores=scores)

    return change


def worst(result):
    """As many legal beams as are due, of the wrong end of the catalogue."""
    leaves = np.arange(len(result.sids)) + CATALOG.num_nodes[-1] // 2
    return replace(result, sids=CATALOG.sids(leaves), leaves=leaves)


FLAWS = [
    (swap, "not sorted"),
    (repeat, "returned twice"),
    (invent, "not in the catalogue"),
    (misplace, "another's items"),
    (drop_items, "another's items"),
    (forget, "8 beams came back, 16 are due"),
    (keep_one, "1 beams came back, 16 are due"),
    (score(np.nan), "not finite"),
    (score(np.nan, -1), "not finite"),
    (score(-np.inf, -1), "not finite"),
    (score(np.inf, 0), "not finite"),
    (worst, " beam"),
]


@pytest.mark.parametrize(
    ("options", "change", "message"),
    [
        ({}, shift, "nats off"),
        *[({}, *flaw) for flaw in FLAWS],
        *[({"dtype": "bfloat16"}, *flaw) for flaw in FLAWS],
        *[({"dtype": "bfloat16", "score": "level"}, *flaw) for flaw in FLAWS[5:]],
        *[  # How many are due after a narrow start depends on the beams: the overlap tells then.
            ({"dtype": "bfloat16", "beams": (4, 20, 16)}, change, "beams" if "due" in message else message)
            for change, message in FLAWS[5:]
        ],
    ],
)
def test_wrong_answers_are_found(options, change, message):
    right = opened(**options)
    report = checked(replace(right, engine=Altered(right.engine, change)))
    assert report.status == "failed"
    assert any(message in fault for fault in report.faults), report.faults


def test_only_an_engine_that_says_so_may_leave_scores_out():
    right = opened()
    silent = replace(right, engine=Altered(right.engine, score(np.nan)), sids_only=True)
    report = checked(silent)
    assert (report.status, report.score_error, report.overlap) == ("ok", None, 1.0)


def test_a_lost_answer_is_a_fault():
    class Forgetful(Altered):
        def step(self):
            return super().step()[1:]

    right = opened()
    report = checked(replace(right, engine=Forgetful(right.engine, lambda result: result)))
    assert any("no answer: lost" in fault for fault in report.faults)


def test_catalogues_with_short_sids_are_checked_as_far_as_possible():
    sids = [[a, b, c] for a in range(6) for b in range(4) for c in range(4)] + [[a, 5, -1] for a in range(6)]
    trie = trie_of(np.array(sids), range(len(sids)), codebook_sizes=(8, 8, 8), end_token="END")
    trie = trie.with_tokens(TokenMapping.from_bases((10, 20, 30), trie.codebook_sizes, end_token_id=40))
    report = checked(opened(trie))
    assert report.status == "ok"
    assert report.score_error is None


def test_a_simulated_engine_is_not_verified():
    report = checked(OpenEngine(SimEngine(BatchServer(), VirtualClock()), 16))
    assert report.status == "skipped"


def test_a_fault_that_was_seen_before_memory_ran_out_stays_one(monkeypatch):
    def compare(opened, groups, results, reports):
        reports[0].faults.append("a beam is wrong")
        raise torch.OutOfMemoryError

    monkeypatch.setattr(verification, "_compare", compare)
    reports = verify(opened(), [requests(1), [Request(9, list(range(40)))]])
    assert [report.status for report in reports] == ["failed", "skipped"]
    assert "no memory beside the engine" in reports[1].skipped


@pytest.mark.parametrize("trie", [None, CATALOG])
def test_transformers_gives_the_same_beams_from_the_same_weights(trie):
    ours = opened(trie)
    theirs = OpenEngine(HfEngine(ours.options, trie), 1, trie, ours.options, sids_only=True)
    assert checked(theirs).faults == []
    a, b = serve(ours, requests()), serve(theirs, requests())
    for i in a:
        assert set(map(tuple, a[i].sids.tolist())) == set(map(tuple, b[i].sids.tolist()))


def test_transformers_returns_no_padding_where_the_catalogue_is_small():
    trie = trie_of(np.array([[0, 0, 0], [0, 1, 0], [1, 0, 1]]), [1, 2, 3], codebook_sizes=(2, 2, 2))
    trie = trie.with_tokens(TokenMapping.from_bases((10, 20, 30), trie.codebook_sizes))
    options = EngineOptions(TINY, device="cpu", beams=(8,), dtype="float32")
    result = serve(OpenEngine(HfEngine(options, trie), 1, trie, options), requests(1))[0]
    assert sorted(map(tuple, result.sids.tolist())) == [(0, 0, 0), (0, 1, 0), (1, 0, 1)]


def test_transformers_refuses_what_it_cannot_do():
    with pytest.raises(UsageError, match="cannot run this point"):
        HfEngine(EngineOptions(TINY, device="cpu", beams=(2, 4)), None)


def test_a_catalogue_needs_room_in_the_vocabulary():
    with pytest.raises(UsageError, match="too few token ids"):
        load_catalog("synthetic:items=100,codebook=512", TINY)
    with pytest.raises(UsageError, match="no synthetic catalogue"):
        load_catalog("synthetic:items=100,levels=7", TINY)
    uniform = load_catalog("synthetic:items=2k,codebook=64,skew=0,levels=2", TINY)
    assert uniform.levels == 2
    assert len(uniform.item_ids) == 2000
    assert max(int(ids.max()) for ids in uniform.token_ids) == 1023
