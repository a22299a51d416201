"""The engine on a GPU: graphs equal eager calls, and company changes nothing."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from grinf import Engine, EngineOptions, RecallResult, Request, Trie
from grinf.trie import TokenMapping, trie_of
from grinf.trie.views import live_leaves

pytestmark = pytest.mark.gpu

CODES, LEVELS, VOCAB = 256, 3, 2048
BASES = [VOCAB - CODES * (LEVELS - level) for level in range(LEVELS)]


@pytest.fixture(scope="module")
def architecture(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small Qwen3 with the head sizes that the kernels are built for."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": VOCAB,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    file = tmp_path_factory.mktemp("model") / "small.json"
    file.write_text(json.dumps(config), encoding="utf-8")
    return str(file)


@pytest.fixture(scope="module")
def trie() -> Trie:
    rng = np.random.default_rng(0)
    codes = np.minimum((rng.pareto(1.1, (20_000, LEVELS)) * 30).astype(int), CODES - 1)
    codes[:, -1] = rng.integers(0, CODES, len(codes))
    codes = np.unique(codes, axis=0)
    mapping = TokenMapping.from_bases(BASES, [CODES] * LEVELS)
    return trie_of(codes, np.arange(len(codes)), codebook_sizes=[CODES] * LEVELS).with_tokens(mapping)


def serve(options: EngineOptions, trie: Trie | None, prompts: Sequence[np.ndarray]) -> list[RecallResult]:
    with Engine.load(options, trie) as engine:
        results = sorted(engine.run(Request(i, p) for i, p in enumerate(prompts)), key=lambda r: r.request_id)
    assert all(result.error is None for result in results)
    return results


def options(architecture: str, **changes: object) -> EngineOptions:
    defaults = {
        "device": "cuda:0",
        "beams": (300,),
        "max_batch": 4,
        "max_context": 600,
        "max_batch_tokens": 1024,
    }
    return EngineOptions(architecture, **(defaults | changes))  # type: ignore[arg-type]


def prompts_of(*lengths: int) -> list[np.ndarray]:
    rng = np.random.default_rng(sum(lengths))
    return [rng.integers(0, VOCAB, n, dtype=np.int32) for n in lengths]


def assert_equal(one: RecallResult, other: RecallResult) -> None:
    np.testing.assert_array_equal(one.sids, other.sids)
    np.testing.assert_array_equal(one.scores, other.scores)


@pytest.mark.parametrize("score", ["vocab", "level", "children", "topk", "free"])
def test_graphs_replay_the_eager_step_bit_for_bit(architecture: str, trie: Trie, score: str) -> None:
    """Two requests per batch in the bucket of two, prompts that fill their token bucket: the shapes agree."""
    catalogue = None if score == "free" else trie
    mode = "vocab" if score == "free" else score
    prompts = prompts_of(256, 256, 256, 256)
    shape = {"max_batch": 1, "max_context": 256, "score": mode, "levels": None if catalogue else LEVELS}
    graphs = serve(options(architecture, **shape), catalogue, prompts)
    eager = serve(options(architecture, **shape, graphs=False), catalogue, prompts)
    for one, other in zip(graphs, eager, strict=True):
        assert one.beams_returned == 300
        assert_equal(one, other)


@pytest.mark.parametrize("beams", [(300,), (20, 100, 300)])
def test_company_changes_nothing_in_the_same_shape(architecture: str, trie: Trie, beams: tuple) -> None:
    """The same request first and last in full batches of the same bucket: equal bit for bit."""
    lone, *others = prompts_of(333, 20, 450, 77)
    config = options(architecture, beams=beams, max_batch_tokens=4 * 600)
    first = serve(config, trie, [lone, *others])[0]
    last = serve(config, trie, [*reversed(others), lone])[3]
    assert_equal(first, last)


def test_draining_batches_agree_to_rounding(architecture: str, trie: Trie) -> None:
    prompts = prompts_of(333, 20, 450, 77, 5)
    together = serve(options(architecture), trie, prompts)
    alone = [serve(options(architecture, max_batch=1), trie, [prompt])[0] for prompt in prompts]
    for one, other in zip(together, alone, strict=True):
        shared = {tuple(s) for s in one.sids.tolist()} & {tuple(s) for s in other.sids.tolist()}
        assert len(shared) >= 0.97 * 300
        assert abs(one.scores[0] - other.scores[0]) < 0.02


def test_float32_equals_the_cpu(architecture: str, trie: Trie) -> None:
    """Reference attention in float32 with our selection kernels: exact but for swaps within 1e-4."""
    prompts = prompts_of(50, 333)
    torch.backends.cuda.matmul.allow_tf32 = False
    gpu = serve(options(architecture, dtype="float32", beams=(60,)), trie, prompts)
    cpu = serve(options(architecture, dtype="float32", beams=(60,), device="cpu"), trie, prompts)
    for one, other in zip(gpu, cpu, strict=True):
        np.testing.assert_allclose(one.scores, other.scores, atol=2e-4)
        cut = float(other.scores[-1])
        found = {tuple(s) for s in one.sids.tolist()}
        for sid, score in zip(other.sids.tolist(), other.scores.tolist(), strict=True):
            assert tuple(sid) in found or score - cut < 1e-3


def test_sid_mass_is_the_same_in_a_graph_and_on_the_cpu(architecture: str, trie: Trie) -> None:
    prompts = prompts_of(256, 256, 256)
    shape = {"max_batch": 1, "max_context": 256, "sid_mass": True}
    graphs, eager = (serve(options(architecture, **shape, graphs=g), trie, prompts) for g in (True, False))
    cpu = serve(options(architecture, **shape, device="cpu", dtype="float32"), trie, prompts)
    plain = serve(options(architecture, max_batch=1, max_context=256), trie, prompts)
    for one, other, exact, without in zip(graphs, eager, cpu, plain, strict=True):
        assert one.sid_mass is not None
        assert one.sid_mass == other.sid_mass
        assert one.sid_mass == pytest.approx(exact.sid_mass, rel=0.05)
        assert without.sid_mass is None
        assert_equal(one, without)


def test_a_margin_reads_widths_and_shrinks(architecture: str, trie: Trie) -> None:
    prompts = prompts_of(100, 200)
    wide = serve(options(architecture), trie, prompts)
    narrow = serve(options(architecture, score_margin=0.5, min_beams=4), trie, prompts)
    for one, other in zip(narrow, wide, strict=True):
        assert 4 <= one.beams_returned < other.beams_returned
        assert (np.diff(one.scores) <= 0).all()


def test_shapes_outside_the_buckets_run_eagerly(architecture: str, trie: Trie) -> None:
    """A prompt beyond the token buckets is served all the same."""
    config = options(architecture, max_batch_tokens=128)
    inside = serve(options(architecture), trie, prompts_of(500))
    outside = serve(config, trie, prompts_of(500))
    assert abs(inside[0].scores[0] - outside[0].scores[0]) < 0.02
    assert outside[0].beams_returned == 300


def test_every_answer_is_legal_unique_and_sorted(architecture: str, trie: Trie) -> None:
    for result in serve(options(architecture), trie, prompts_of(1, 64, 600)):
        assert (trie.leaf_of(result.sids) == result.leaves).all()
        assert len(np.unique(result.leaves)) == result.beams_returned
        assert (np.diff(result.scores) <= 0).all()


def test_no_memory_is_allocated_between_replays(architecture: str, trie: Trie) -> None:
    with Engine.load(options(architecture), trie) as engine:
        list(engine.run(Request(i, p) for i, p in enumerate(prompts_of(100, 200, 300, 400))))
        before = torch.cuda.memory_stats()["num_alloc_retries"], torch.cuda.memory_reserved()
        list(engine.run(Request(i, p) for i, p in enumerate(prompts_of(100, 200, 300, 400) * 3)))
        assert (torch.cuda.memory_stats()["num_alloc_retries"], torch.cuda.memory_reserved()) == before


def test_kernels_are_what_the_default_promises(architecture: str, trie: Trie) -> None:
    with Engine.load(options(architecture), trie) as engine:
        names = engine.describe()["kernels"]
    assert all(name.startswith("cupy") for name in names.values()), names


def test_an_unknown_device_is_refused(architecture: str, tmp_path: Path) -> None:
    from grinf.errors import EnvironmentFault

    with pytest.raises(EnvironmentFault, match="shows"):
        Engine.load(options(architecture, device="cuda:63"))


def test_filtered_requests_see_their_items_and_no_others(architecture: str, trie: Trie) -> None:
    """Deletions, a view and lists of single requests share a batch; each answer is that of a rebuilt trie."""
    rng = np.random.default_rng(7)
    deleted, shown, allowed = (rng.random(trie.manifest.num_items) < share for share in (0.2, 0.5, 0.03))
    filtered = replace(trie, deleted=np.packbits(deleted, bitorder="little")).with_view("shown", shown)
    live = [~deleted, ~deleted & shown, ~deleted & allowed, np.zeros_like(deleted)]
    prompts = prompts_of(300, 17, 300, 40)
    requests = [Request(0, prompts[0]), Request(1, prompts[1], view="shown")]
    requests += [
        Request(i, prompts[i], live=filtered.mask_from_leaves(live_leaves(live[i], trie.item_ptr)))
        for i in (2, 3)
    ]
    with Engine.load(options(architecture, filters=True), filtered) as engine:
        found = sorted(engine.run(requests), key=lambda result: result.request_id)
    assert found[3].beams_returned == 0
    for index in range(3):
        kept = trie.item_rows(np.flatnonzero(live_leaves(live[index], trie.item_ptr)))[0]
        sids, ids = trie.sids(trie.leaf_of_rows(kept)), np.arange(len(kept))
        mapping = TokenMapping.from_bases(BASES, [CODES] * LEVELS)
        rebuilt = trie_of(sids, ids, codebook_sizes=[CODES] * LEVELS).with_tokens(mapping)
        [expected] = serve(options(architecture), rebuilt, [prompts[index]])
        assert found[index].beams_returned == expected.beams_returned
        common = set(map(tuple, found[index].sids.tolist())) & set(map(tuple, expected.sids.tolist()))
        assert len(common) >= 0.97 * expected.beams_returned, "but for ties in bfloat16, the same SIDs"
        assert live_leaves(live[index], trie.item_ptr)[found[index].leaves].all()
