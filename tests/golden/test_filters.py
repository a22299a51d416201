"""A filtered search equals a search of a trie that was built from the allowed items alone."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grinf import Engine, EngineOptions, Request
from grinf.errors import RowError
from grinf.trie import TokenMapping, trie_of
from tests.golden.conftest import BASES, END_TOKEN, VOCAB

CODES, LEVELS = 12, 3


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    share=st.sampled_from([0.02, 0.3, 0.9]),
    score=st.sampled_from(["vocab", "level", "children", "topk"]),
    short=st.booleans(),
    named=st.booleans(),
)
def test_a_filter_equals_a_rebuilt_trie(
    model_folder: Path, seed: int, share: float, score: str, short: bool, named: bool
) -> None:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, CODES, (150, LEVELS))
    if short:
        codes[np.arange(LEVELS)[None] >= rng.integers(1, LEVELS + 1, 150)[:, None]] = -1
        codes[0] = rng.integers(0, CODES, LEVELS)
    ids = np.arange(len(codes))
    allowed = rng.random(len(codes)) < share
    allowed[0] = True
    end = "<end>" if short else None
    mapping = TokenMapping.from_bases(BASES[:LEVELS], [CODES] * LEVELS, END_TOKEN if short else None)
    whole = trie_of(codes, ids, codebook_sizes=[CODES] * LEVELS, end_token=end).with_tokens(mapping)
    part = trie_of(codes[allowed], ids[allowed], codebook_sizes=[CODES] * LEVELS, end_token=end)
    live = np.zeros(whole.num_leaves, bool)
    live[whole.leaf_of_items(ids[allowed])] = True
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in (9, 30)]
    options = EngineOptions(str(model_folder), beams=(8,), score=score, max_context=64, filters=not named)
    if named:
        whole = whole.with_view("allowed", np.isin(whole.item_ids, ids[allowed]))
        requests = [Request(i, p, view="allowed") for i, p in enumerate(prompts)]
    else:
        mask = whole.mask_from_leaves(live)
        requests = [Request(i, p, live=mask) for i, p in enumerate(prompts)]
    requests.append(Request(len(prompts), prompts[0]))
    with Engine.load(options, whole) as engine:
        filtered = sorted(engine.run(requests), key=lambda r: r.request_id)
    with Engine.load(
        EngineOptions(str(model_folder), beams=(8,), score=score, max_context=64), part.with_tokens(mapping)
    ) as engine:
        rebuilt = sorted(engine.run(Request(i, p) for i, p in enumerate(prompts)), key=lambda r: r.request_id)
    for one, other in zip(filtered, rebuilt, strict=False):
        np.testing.assert_allclose(one.scores, other.scores, atol=1e-4)
        gaps = np.abs(np.diff(other.scores))
        if gaps.size == 0 or gaps.min() > 1e-3:
            np.testing.assert_array_equal(one.sids, other.sids)
    assert filtered[-1].beams_returned == 8, "a batch-mate without a filter sees every item"


def test_nothing_left_is_an_empty_answer(model_folder: Path) -> None:
    trie = trie_of(np.array([[0, 1, 2], [0, 3, 4]]), [1, 2], codebook_sizes=[CODES] * LEVELS)
    trie = trie.with_tokens(TokenMapping.from_bases(BASES[:LEVELS], [CODES] * LEVELS))
    nothing = trie.mask_from_leaves(np.zeros(2, bool))
    with Engine.load(
        EngineOptions(str(model_folder), beams=(4,), max_context=64, filters=True), trie
    ) as engine:
        [result] = engine.run([Request(0, [1, 2, 3], live=nothing)])
        [other] = engine.run([Request(1, [1, 2, 3])])
    assert result.error is None
    assert (result.beams_returned, result.sids.shape) == (0, (0, LEVELS))
    assert other.beams_returned == 2


def test_a_filter_needs_room(model_folder: Path) -> None:
    trie = trie_of(np.array([[0, 1, 2]]), [1], codebook_sizes=[CODES] * LEVELS)
    trie = trie.with_tokens(TokenMapping.from_bases(BASES[:LEVELS], [CODES] * LEVELS))
    options = EngineOptions(str(model_folder), beams=(4,), max_context=64)
    with Engine.load(options, trie) as engine, pytest.raises(RowError, match="without room for filters"):
        engine.submit(Request(0, [1], live=trie.mask_from_leaves(np.ones(1, bool))))
