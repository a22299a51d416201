"""The reference selection against a plain Python search: random tries, ties, widths, margins, scores."""

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from grinf.ops import reference
from grinf.ops.contracts import Limits, PathView, Selection, TrieView

LEVELS = 3


def random_trie(
    rng: np.random.Generator, codes: int, paths: int, with_end: bool
) -> tuple[list[list[int]], TrieView]:
    """A trie over SIDs of `LEVELS` levels as children lists and as the device sees it."""
    sids = rng.integers(0, codes, (paths, LEVELS))
    if with_end:
        ends_at = rng.integers(1, LEVELS + 1, paths)
        sids[np.arange(LEVELS)[None] >= ends_at[:, None]] = codes  # END, up to the full depth
    sids = np.unique(sids, axis=0)
    nodes, children, code = [()], [], [0]
    for level in range(LEVELS):
        nodes += sorted({tuple(s[: level + 1]) for s in sids.tolist()})
    index = {node: number for number, node in enumerate(nodes)}
    children = [[index[n] for n in nodes if len(n) == len(p) + 1 and n[: len(p)] == p] for p in nodes]
    code = [node[-1] if node else 0 for node in nodes]
    inner = [kids for node, kids in zip(nodes, children, strict=True) if len(node) < LEVELS]
    first = [1]
    for kids in inner:
        first.append(first[-1] + len(kids))
    token = np.zeros((LEVELS, codes + 2), np.int32)
    token[:, : codes + 1] = 3 + np.arange(codes + 1)[None] + 11 * np.arange(LEVELS)[:, None]
    view = TrieView(
        first_child=torch.tensor(first, dtype=torch.int32),
        code=torch.tensor(code, dtype=torch.int32).to(torch.int16),
        column=torch.from_numpy(token),
        token=torch.from_numpy(token),
        end_code=torch.tensor([-1] + [codes if with_end else -1] * (LEVELS - 1), dtype=torch.int32),
        live=None,
        view=None,
        capacity=sum(sorted((len(kids) for kids in inner), reverse=True)),
    )
    return children, view


def pack_bits(mask: np.ndarray) -> torch.Tensor:
    words = np.zeros(-(-len(mask) // 32) * 32, bool)
    words[: len(mask)] = mask
    packed = np.packbits(words, bitorder="little").view(np.int32)
    return torch.from_numpy(packed.copy())


def python_selection(
    logits: np.ndarray, log_z: np.ndarray | None, cum: list, parents: list, kids: list, case: dict
) -> list[tuple]:
    """(score, parent, column code, node) of the kept beams of one request, by the written rules."""
    found = []
    for rank, node in enumerate(parents):
        legal = [
            (float(logits[rank, case["column"][child]]), child) for child in kids[node] if case["live"][child]
        ]
        if case["score"] == "topk":
            legal = sorted(legal, key=lambda pair: (-pair[0], pair[1]))[: case["score_k"]]
        if not legal:
            continue
        peak = max(value for value, _ in legal)
        z = peak + math.log(sum(math.exp(value - peak) for value, _ in legal))
        z = z if log_z is None else float(log_z[rank])
        for value, child in legal:
            ended = case["end"] is not None and case["code"][node] == case["end"] and node != 0
            score = (
                cum[rank] if ended else np.float32(np.float32(value - np.float32(z)) + np.float32(cum[rank]))
            )
            found.append((float(score), rank, child))
    found.sort(key=lambda f: (-f[0], f[1], f[2]))
    kept = found[: case["next_width"]]
    if case["margin"] < math.inf and kept:
        near = sum(score >= np.float32(kept[0][0]) - np.float32(case["margin"]) for score, *_ in kept)
        kept = kept[: max(near, min(case["min_width"], len(kept)))]
    return kept


@given(
    seed=st.integers(0, 2**32 - 1),
    score=st.sampled_from(["given", "children", "topk"]),
    with_end=st.booleans(),
    quantum=st.sampled_from([0.5, 1e-6]),
    filtered=st.booleans(),
)
def test_constrained_selection_follows_the_rules(
    seed: int, score: str, with_end: bool, quantum: float, filtered: bool
) -> None:
    rng = np.random.default_rng(seed)
    codes = int(rng.integers(1, 7))
    children, trie = random_trie(rng, codes, int(rng.integers(1, 40)), with_end)
    num_nodes = len(children)
    level_of = np.zeros(num_nodes, int)
    for node, kids in enumerate(children):
        level_of[kids] = level_of[node] + 1
    batch, width, beams, vocab = (
        int(rng.integers(1, 4)),
        int(rng.integers(1, 9)),
        int(rng.integers(1, 12)),
        50,
    )
    masks = rng.random((2, num_nodes)) < (0.6 if filtered else 2.0)
    live = torch.stack([pack_bits(mask) for mask in masks])
    view = rng.integers(0, 2, batch)
    levels = rng.integers(0, LEVELS, batch)
    limits = Limits(
        level=torch.tensor(levels, dtype=torch.int32),
        next_width=torch.tensor(rng.integers(0, beams + 1, batch), dtype=torch.int32),
        score_k=torch.tensor(rng.integers(1, 5, batch), dtype=torch.int32),
        margin=torch.tensor(rng.choice([math.inf, 0.0, 1.0], batch), dtype=torch.float32),
        min_width=torch.tensor(rng.integers(1, 4, batch), dtype=torch.int32),
        width=beams,
    )
    slots = rng.permutation(5)[:batch]
    pool_cum, pool_node = np.zeros((6, width), np.float32), np.zeros((6, width), np.int64)
    pool_width = np.zeros(6, int)
    for level, slot in zip(levels, slots, strict=True):
        parents = np.flatnonzero(level_of == level)
        pool_width[slot] = min(len(parents), width, 1 if level == 0 else width)
        pool_node[slot, : pool_width[slot]] = rng.permutation(parents)[: pool_width[slot]]
        pool_cum[slot] = np.round(rng.normal(size=width) / quantum) * quantum
    logits = (np.round(rng.normal(size=(batch, width, vocab)) * 2 / quantum) * quantum).astype(np.float32)
    log_z = rng.normal(size=(batch, width)).astype(np.float32) if score == "given" else None
    got = reference.select_constrained(
        torch.from_numpy(logits),
        PathView(
            torch.tensor(slots, dtype=torch.int32),
            torch.from_numpy(pool_cum),
            torch.tensor(pool_node, dtype=torch.int32),
            torch.tensor(pool_width, dtype=torch.int32),
            width,
        ),
        TrieView(
            trie.first_child,
            trie.code,
            trie.column,
            trie.token,
            trie.end_code,
            live if filtered else None,
            torch.tensor(view, dtype=torch.int32),
            trie.capacity,
        ),
        limits,
        score,
        None if log_z is None else torch.from_numpy(log_z),
    )
    for b, slot in enumerate(slots):
        code = trie.code.tolist()
        case = {
            "column": [int(trie.column[levels[b], c]) for c in code],
            "code": code,
            "live": masks[view[b]] if filtered else np.ones(num_nodes, bool),
            "score": score,
            "score_k": int(limits.score_k[b]),
            "next_width": int(limits.next_width[b]),
            "margin": float(limits.margin[b]),
            "min_width": int(limits.min_width[b]),
            "end": codes if with_end and levels[b] > 1 else None,
        }
        parents = pool_node[slot, : pool_width[slot]].tolist()
        expected = python_selection(
            logits[b], None if log_z is None else log_z[b], pool_cum[slot].tolist(), parents, children, case
        )
        check(got, b, expected, exact=score == "given")
        tokens = [int(trie.token[levels[b], code[child]]) for *_, child in expected]
        assert got.token[b, : len(expected)].tolist() == tokens or score != "given"


def check(got: Selection, b: int, expected: list[tuple], exact: bool) -> None:
    count = int(got.count[b])
    assert count == len(expected)
    scores = got.score[b].tolist()
    assert scores[:count] == sorted(scores[:count], reverse=True)
    assert all(value == -math.inf for value in scores[count:])
    if exact:
        rows = zip(scores, got.parent[b].tolist(), got.node[b].tolist(), strict=True)
        assert list(rows)[:count] == expected
    else:  # torch and Python sum exponentials in another order: the sets agree up to rounding at the cut
        np.testing.assert_allclose(scores[:count], [e[0] for e in expected], atol=1e-5)


@given(
    seed=st.integers(0, 2**32 - 1),
    score=st.sampled_from(["vocab", "topk"]),
    quantum=st.sampled_from([0.5, 1e-6]),
)
def test_free_selection_follows_the_rules(seed: int, score: str, quantum: float) -> None:
    rng = np.random.default_rng(seed)
    batch, width, beams, vocab = int(rng.integers(1, 4)), int(rng.integers(1, 6)), int(rng.integers(1, 30)), 9
    live = rng.integers(0, width + 1, batch)
    logits = (np.round(rng.normal(size=(batch, width, vocab)) * 2 / quantum) * quantum).astype(np.float32)
    cum = (np.round(rng.normal(size=(batch, width)) / quantum) * quantum).astype(np.float32)
    log_z = rng.normal(size=(batch, width)).astype(np.float32) if score == "vocab" else None
    limits = Limits(
        level=torch.zeros(batch, dtype=torch.int32),
        next_width=torch.tensor(rng.integers(0, beams + 1, batch), dtype=torch.int32),
        score_k=torch.tensor(rng.integers(1, 5, batch), dtype=torch.int32),
        margin=torch.full((batch,), math.inf),
        min_width=torch.ones(batch, dtype=torch.int32),
        width=beams,
    )
    got = reference.select_unconstrained(
        torch.from_numpy(logits),
        PathView(
            torch.arange(batch, dtype=torch.int32),
            torch.from_numpy(cum),
            torch.zeros(batch, width, dtype=torch.int32),
            torch.tensor(live, dtype=torch.int32),
            width,
        ),
        limits,
        score,
        None if log_z is None else torch.from_numpy(log_z),
    )
    for b in range(batch):
        case = {
            "column": [0, *range(vocab)],
            "code": [0, *range(vocab)],
            "live": np.ones(vocab + 1, bool),
            "score": score,
            "score_k": int(limits.score_k[b]),
            "next_width": int(limits.next_width[b]),
            "margin": math.inf,
            "min_width": 1,
            "end": None,
        }
        kids = [list(range(1, vocab + 1))]
        z = None if log_z is None else log_z[b]
        expected = python_selection(logits[b], z, cum[b].tolist(), [0] * int(live[b]), kids, case)
        expected = [(value, rank, child - 1) for value, rank, child in expected]
        count = int(got.count[b])
        assert count == len(expected)
        if score == "vocab":
            rows = zip(got.score[b].tolist(), got.parent[b].tolist(), got.token[b].tolist(), strict=True)
            assert list(rows)[:count] == expected
        else:
            np.testing.assert_allclose(got.score[b, :count], [e[0] for e in expected], atol=1e-5)


@given(seed=st.integers(0, 2**32 - 1))
def test_merging_any_split_of_the_keys_gives_the_softmax(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    keys = int(torch.randint(1, 9, (), generator=generator))
    scores = torch.randn(1, 2, 3, keys, generator=generator) * 5
    values = torch.randn(1, 2, 3, keys, 4, generator=generator)
    expected = (scores.softmax(-1)[..., None] * values).sum(-2)

    def partial(part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        if scores[..., part].numel() == 0:
            return torch.zeros(1, 2, 3, 4), torch.full((1, 2, 3), -math.inf)
        weights = scores[..., part].softmax(-1)
        return (weights[..., None] * values[..., part, :]).sum(-2), scores[..., part].logsumexp(-1)

    cut = int(torch.randint(0, keys + 1, (), generator=generator))
    out = torch.empty_like(expected)
    reference.merge_attention(*partial(slice(0, cut)), *partial(slice(cut, None)), out)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_merging_two_empty_sets_is_zero() -> None:
    nothing = torch.zeros(1, 1, 1, 2), torch.full((1, 1, 1), -math.inf)
    out = torch.full((1, 1, 1, 2), math.nan)
    reference.merge_attention(*nothing, *nothing, out)
    assert out.tolist() == [[[[0.0, 0.0]]]]
