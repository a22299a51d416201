"""`--verify` on the real engine with a tiny random model, and on engines that lie."""

from dataclasses import replace

import numpy as np
import pytest

from grinf.backend.interface import EngineOptions
from grinf.errors import UsageError
from grinf.jobs.bench.engines import OpenEngine, load_catalog
from grinf.jobs.bench.hf import HfEngine
from grinf.jobs.bench.plan import shipped_model
from grinf.jobs.bench.sim import BatchServer, SimEngine
from grinf.jobs.bench.verify import serve, verify
from grinf.runtime.engine import Engine
from grinf.state.request import Request
from grinf.trie import TokenMapping, trie_of
from tests.bench_world import VirtualClock

TINY = str(shipped_model("tiny"))
CATALOG = load_catalog("synthetic:items=5k,codebook=64", TINY)


def requests(count=3):
    rng = np.random.default_rng(5)
    return [Request(i, rng.integers(0, 800, 20 + 3 * i).tolist()) for i in range(count)]


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
    report = verify(opened(**options), requests())
    assert report.faults == []
    assert report.status == "ok"
    assert report.score_error < 1e-4
    assert report.overlap >= 0.99
    assert report.top1 == 1.0


def test_a_narrow_dtype_is_held_to_what_transformers_reaches():
    report = verify(opened(dtype="bfloat16"), requests())
    assert report.status == "ok"
    assert report.hf_overlap is not None
    assert report.overlap >= report.hf_overlap - 0.01


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shift, "nats off"),
        (swap, "not sorted"),
        (repeat, "returned twice"),
        (invent, "not in the catalogue"),
        (misplace, "another's items"),
        (forget, "of the exact beams"),
    ],
)
def test_wrong_answers_are_found(change, message):
    right = opened()
    report = verify(replace(right, engine=Altered(right.engine, change)), requests())
    assert report.status == "failed"
    assert any(message in fault for fault in report.faults)


def test_catalogues_with_short_sids_are_checked_as_far_as_possible():
    sids = [[a, b, c] for a in range(6) for b in range(4) for c in range(4)] + [[a, 5, -1] for a in range(6)]
    trie = trie_of(np.array(sids), range(len(sids)), codebook_sizes=(8, 8, 8), end_token="END")
    trie = trie.with_tokens(TokenMapping.from_bases((10, 20, 30), trie.codebook_sizes, end_token_id=40))
    report = verify(opened(trie), requests())
    assert report.status == "ok"
    assert report.score_error is None


def test_a_simulated_engine_is_not_verified():
    report = verify(OpenEngine(SimEngine(BatchServer(), VirtualClock()), 16), requests())
    assert report.status == "skipped"


@pytest.mark.parametrize("trie", [None, CATALOG])
def test_transformers_gives_the_same_beams_from_the_same_weights(trie):
    ours = opened(trie)
    theirs = OpenEngine(HfEngine(ours.options, trie), 1, trie, ours.options)
    assert verify(theirs, requests()).faults == []
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
