"""The whole engine against an exhaustive oracle and against transformers' own beam search, in float32."""

import copy
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grinf import Engine, EngineOptions, Request, Trie
from grinf.errors import UsageError
from grinf.trie import TokenMapping, trie_of
from tests.golden.conftest import BASES, END_TOKEN, VOCAB
from tests.golden.oracle import Oracle

CODES = 12
SCORES = ("vocab", "level", "children", "topk")


def catalogue(
    rng: np.random.Generator, levels: int, rows: int, short: bool = False
) -> tuple[list[tuple], Trie, list]:
    """Random SIDs, their trie bound to tokens, and the token of each (level, code)."""
    codes = rng.integers(0, CODES, (rows, levels))
    if short:
        depth = rng.integers(1, levels + 1, rows)
        depth[0] = levels
        codes[np.arange(levels)[None] >= depth[:, None]] = -1
    codes = np.unique(codes, axis=0)
    trie = trie_of(
        codes, np.arange(len(codes)), codebook_sizes=[CODES] * levels, end_token="<end>" if short else None
    )
    bases = [BASES[level % len(BASES)] for level in range(levels)]
    mapping = TokenMapping.from_bases(bases, [CODES] * levels, END_TOKEN if short else None)
    sids = [tuple(c for c in row if c >= 0) for row in codes.tolist()]
    return sids, trie.with_tokens(mapping), [range(base, base + CODES) for base in bases]


def recall(
    model_folder: Path, trie: Trie | None, prompts: Sequence[Sequence[int]], **options: object
) -> list:
    settings: dict = {"page_size": 16, "max_context": 128, "max_batch": 3} | options
    with Engine.load(EngineOptions(str(model_folder), **settings), trie) as engine:
        results = sorted(engine.run(Request(i, p) for i, p in enumerate(prompts)), key=lambda r: r.request_id)
    assert all(r.error is None for r in results)
    return results


def prompts_of(rng: np.random.Generator, *lengths: int) -> list[list[int]]:
    return [rng.integers(0, VOCAB, n).tolist() for n in lengths]


def assert_same(result, expected: list[tuple[tuple, float]]) -> None:
    """Equal scores rank by rank; equal SIDs wherever neighbours in rank are further apart than rounding."""
    scores = np.array([value for _, value in expected])
    np.testing.assert_allclose(result.scores, scores, atol=2e-4)
    got = [tuple(c for c in row if c >= 0) for row in result.sids.tolist()]
    assert len(set(got)) == len(got)
    gaps = np.abs(np.diff(scores))
    firm = np.append(gaps > 1e-3, False) & np.append(True, gaps > 1e-3)
    for rank in np.flatnonzero(firm):
        assert got[rank] == expected[rank][0]


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("levels", [1, 2, 3, 4])
def test_wide_beams_are_exhaustive(model, model_folder: Path, score: str, levels: int) -> None:
    rng = np.random.default_rng(levels)
    sids, trie, token_of = catalogue(rng, levels, 60)
    oracle = Oracle(model, sids, token_of)
    prompts = prompts_of(rng, 37, 21, 50, 1, 16, 17)
    results = recall(model_folder, trie, prompts, beams=(200,), score=score)
    for prompt, result in zip(prompts, results, strict=True):
        expected = oracle.search(prompt, [200] * levels, score)
        assert len(expected) == len(sids)
        assert result.beams_returned == len(sids)
        assert_same(result, expected)


@pytest.mark.parametrize("score", [*SCORES, "topk:3"])
@pytest.mark.parametrize("beams", [(4, 4, 4), (3, 9, 20), (20, 9, 3), (1, 1, 1)])
def test_narrow_beams_follow_the_schedule(model, model_folder: Path, score: str, beams: tuple) -> None:
    rng = np.random.default_rng(sum(beams))
    sids, trie, token_of = catalogue(rng, 3, 150)
    oracle = Oracle(model, sids, token_of)
    prompts = prompts_of(rng, 5, 64, 33)
    mode, _, k = score.partition(":")
    score_k = int(k) if k else None
    results = recall(model_folder, trie, prompts, beams=beams, score=mode, score_k=score_k)
    for prompt, result in zip(prompts, results, strict=True):
        assert_same(result, oracle.search(prompt, beams, mode, score_k))


@pytest.mark.parametrize("score", SCORES)
def test_short_sids(model, model_folder: Path, score: str) -> None:
    rng = np.random.default_rng(7)
    sids, trie, token_of = catalogue(rng, 3, 80, short=True)
    assert {len(sid) for sid in sids} == {1, 2, 3}
    oracle = Oracle(model, sids, token_of, END_TOKEN)
    prompts = prompts_of(rng, 12, 40)
    for beams in ((200,) * 3, (5, 9, 9)):
        results = recall(model_folder, trie, prompts, beams=beams, score=score)
        for prompt, result in zip(prompts, results, strict=True):
            assert_same(result, oracle.search(prompt, beams, score))


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_batch": 0}, {"max_batch_tokens": -1}, {"max_context": 0}, {"page_size": -3}, {"score_k": -1},
        {"workspace_bytes": 0}, {"memory_fraction": 5.0}, {"score_margin": float("nan")}, {"beams": (0,)},
        {"max_batch": 2.0}, {"beams": (4097,)}, {"beams": 8}, {"beams": ()}, {"beams": ("4",)},
        {"memory_fraction": "0.5"}, {"score_margin": "1"}, {"max_batch": True},
    ],
)  # fmt: skip
def test_options_that_no_engine_can_have_are_refused(model_folder: Path, wrong: dict) -> None:
    with pytest.raises(UsageError):
        Engine.load(EngineOptions(str(model_folder), **wrong))


def test_options_may_be_numpy_s_numbers(model_folder: Path) -> None:
    numbers = {"max_batch": np.int64(2), "beams": [np.int32(4)], "memory_fraction": np.float32(0.5)}
    with Engine.load(EngineOptions(str(model_folder), **numbers)) as engine:  # type: ignore[arg-type]
        assert next(engine.run([Request(0, [1])])).beams_returned == 4


@pytest.mark.parametrize("margin", [0.0, 1.0, 3.0])
def test_score_margin(model, model_folder: Path, margin: float) -> None:
    rng = np.random.default_rng(11)
    sids, trie, token_of = catalogue(rng, 4, 300)
    oracle = Oracle(model, sids, token_of)
    prompts = prompts_of(rng, 12, 40, 25, 60)
    results = recall(model_folder, trie, prompts, beams=(10,), score_margin=margin, min_beams=2)
    for prompt, result in zip(prompts, results, strict=True):
        assert_same(result, oracle.search(prompt, [10] * 4, margin=margin, min_beams=2))


def test_equals_transformers_generate(model, model_folder: Path) -> None:
    rng = np.random.default_rng(3)
    sids, trie, token_of = catalogue(rng, 3, 400)
    children: dict[tuple, list[int]] = {}
    for sid in sids:
        tokens = tuple(token_of[level][code] for level, code in enumerate(sid))
        for level in range(3):
            children.setdefault(tokens[:level], []).append(tokens[level])
    [prompt] = prompts_of(rng, 30)
    width = 10
    [result] = recall(model_folder, trie, [prompt], beams=(width,))
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=3,
        do_sample=False,
        length_penalty=0.0,
        early_stopping=False,
        prefix_allowed_tokens_fn=lambda _, ids: sorted(
            set(children.get(tuple(ids[len(prompt) :].tolist()), [0]))
        ),
        return_dict_in_generate=True,
        output_scores=True,
    )
    got = [tuple(token_of[level][code] for level, code in enumerate(sid)) for sid in result.sids.tolist()]
    assert set(got) == {tuple(row) for row in out.sequences[:, len(prompt) :].tolist()}
    np.testing.assert_allclose(result.scores, out.sequences_scores, atol=1e-4)


@pytest.mark.parametrize("score", ["vocab", "topk"])
def test_free_search(model, model_folder: Path, score: str) -> None:
    rng = np.random.default_rng(5)
    every = [(a, b) for a in range(VOCAB) for b in range(VOCAB)]
    oracle = Oracle(model, every, [range(VOCAB)] * 2)
    prompts = prompts_of(rng, 9, 31)
    for beams in ((4, 4), (7, 50), (200, 300)):
        results = recall(model_folder, None, prompts, beams=beams, score=score, levels=2)
        for prompt, result in zip(prompts, results, strict=True):
            assert result.leaves is None
            assert_same(result, oracle.search(prompt, beams, score))


def test_leaves_name_the_sids(model_folder: Path) -> None:
    rng = np.random.default_rng(2)
    _, trie, _ = catalogue(rng, 3, 90)
    [result] = recall(model_folder, trie, prompts_of(rng, 8), beams=(50,))
    np.testing.assert_array_equal(trie.sids(result.leaves), result.sids)
    np.testing.assert_array_equal(trie.leaf_of(result.sids), result.leaves)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    beams=st.sampled_from([(6,), (3, 8, 12)]),
    max_batch=st.integers(1, 5),
    page_size=st.sampled_from([1, 4, 16, 64]),
    score=st.sampled_from(SCORES),
)
def test_company_and_paging_change_nothing(
    model_folder: Path, seed: int, beams: tuple, max_batch: int, page_size: int, score: str
) -> None:
    """Alone, in a full batch, in a draining batch, on other pages: the same SIDs and scores."""
    rng = np.random.default_rng(seed)
    _, trie, _ = catalogue(rng, 3, 120)
    prompts = prompts_of(rng, *rng.integers(1, 60, 7))
    alone = recall(model_folder, trie, prompts, beams=beams, score=score, max_batch=1)
    together = recall(
        model_folder,
        trie,
        prompts,
        beams=beams,
        score=score,
        max_batch=max_batch,
        page_size=page_size,
        max_batch_tokens=80,
    )
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_allclose(one.scores, other.scores, atol=1e-4)
        gaps = np.abs(np.diff(one.scores))
        if gaps.size == 0 or gaps.min() > 1e-3:
            np.testing.assert_array_equal(one.sids, other.sids)


def test_equal_logits_keep_their_order_in_any_batch(model, model_folder: Path, tmp_path: Path) -> None:
    """Codes that the model cannot tell apart tie exactly: parent's order, then code's, in any company."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for weight in (twin.lm_head.weight, twin.model.embed_tokens.weight):
            for base in BASES[:3]:
                weight[base : base + CODES] = weight[base].clone()
    twin.save_pretrained(tmp_path)
    rng = np.random.default_rng(1)
    sids, trie, _ = catalogue(rng, 3, 100)
    firsts = sorted({sid[0] for sid in sids})[:8]
    seconds = sorted({sid[:2] for sid in sids if sid[0] in firsts})[:8]
    thirds = sorted(sid for sid in sids if sid[:2] in seconds)[:8]
    prompts = prompts_of(rng, 12, 12, 30, 7)
    for max_batch in (1, 4):
        for result in recall(tmp_path, trie, prompts, beams=(8,), max_batch=max_batch):
            assert len(set(result.scores.tolist())) == 1
            assert [tuple(sid) for sid in result.sids.tolist()] == thirds


def test_a_checkpoints_generation_config_changes_nothing(model, model_folder: Path, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(
        '{"do_sample": true, "temperature": 0.6, "top_p": 0.5, "num_beams": 7, "length_penalty": 2.0}',
        encoding="utf-8",
    )
    rng = np.random.default_rng(9)
    _, trie, _ = catalogue(rng, 3, 90)
    prompts = prompts_of(rng, 20)
    [plain], [configured] = (
        recall(folder, trie, prompts, beams=(20,)) for folder in (model_folder, tmp_path)
    )
    np.testing.assert_array_equal(plain.sids, configured.sids)
    np.testing.assert_array_equal(plain.scores, configured.scores)


def test_what_the_page_cache_holds_counts_as_free_memory(model_folder: Path, monkeypatch) -> None:
    monkeypatch.setattr("os.sysconf", lambda name: 1)
    with Engine.load(EngineOptions(str(model_folder), beams=(4,))) as engine:
        assert engine.describe()["memory"]["budget_bytes"] > 1 << 20
