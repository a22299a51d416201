"""Both searches on the GPU against the reference, bit for bit, given the same logits and normalisers."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from grinf.ops import contracts, reference, reference_selection
from kernels_cupy import constrained_topk, vocab_topk
from kernels_cupy.selection import Beams
from tests.gpu import search_cases as cases

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
FIELDS = ("score", "parent", "token", "node", "count")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LSE_TOLERANCE = {"rtol": 5e-6, "atol": 5e-6}  # fp32 sums in two orders


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill what torch.empty returns with NaN and the largest integers, so that an unwritten element shows."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def assert_same(got: Beams, expected: contracts.Selection) -> None:
    for field in FIELDS:
        assert torch.equal(getattr(got, field), getattr(expected, field)), field


def live_rows(path: contracts.PathView) -> Tensor:
    return torch.arange(path.rows, device=path.slot.device) < path.width[path.slot.long()][:, None]


def check_constrained(problem: cases.Problem, score: str, monkeypatch: pytest.MonkeyPatch) -> Beams:
    """Compare with the reference under the kernel's normaliser, and that normaliser with the reference's."""
    p: Any = cases.to_device(problem, DEVICE)
    given = p.log_z if score == "given" else None
    with poisoned():
        got, log_z = constrained_topk.select_and_normalise(p.logits, p.path, p.trie, p.limits, score, given)
    if score != "given":
        seen = []
        normalise = reference_selection._segment_logsumexp
        log_z = log_z.masked_fill(~live_rows(p.path), 0.0)

        def record(*args: Any) -> Tensor:
            seen.append(normalise(*args))
            return log_z

        monkeypatch.setattr(reference_selection, "_segment_logsumexp", record)
    expected = reference.select_constrained(p.logits, p.path, p.trie, p.limits, score, given)
    monkeypatch.undo()
    assert_same(got, expected)
    if score != "given":
        node = p.path.node[p.path.slot.long(), : p.path.rows].long()
        scored = live_rows(p.path) & ~reference_selection._is_end(node, p.limits.level - 1, p.trie)
        torch.testing.assert_close(log_z[scored], seen[0][scored], **LSE_TOLERANCE)
    return got


SCORES = ("given", "children", "topk")
SMALL = cases.build_catalogue(cases.random_sids(np.random.default_rng(1), 3000, (40, 30, 50)))
SHORT = cases.build_catalogue(
    cases.random_sids(np.random.default_rng(2), 3000, (40, 30, 50, 9), 50), end_code=50
)
DEEP = cases.build_catalogue(cases.random_sids(np.random.default_rng(3), 5000, (6,) * 8))
WIDE = cases.build_catalogue(np.stack(np.divmod(np.arange(3 * 8192), 8192), 1))
LARGE = cases.build_catalogue(np.stack(np.divmod(np.arange(300 * 3500), 3500), 1))
SPARSE = cases.build_catalogue(np.stack([np.arange(5000), np.arange(5000) % 7], 1))


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("filtered", [False, True])
def test_mixed_levels_widths_and_padding(
    score: str, dtype: torch.dtype, filtered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = cases.make_problem(
        SMALL, (0, 1, 2, 2, 1), (1, 17, 300, 1, 0), (30, 300, 64, 300, 0), dtype=dtype, filtered=filtered
    )
    check_constrained(problem, score, monkeypatch)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("level", range(4))
def test_ended_beams_hand_their_score_on(score: str, level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = cases.make_problem(
        SHORT, (level,) * 2, (1 if level == 0 else 200,) * 2, (150, 900), filtered=True
    )
    check_constrained(problem, score, monkeypatch)


def test_score_modes_take_turns_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """`topk` launches with shared memory what `children` launches without."""
    problem = cases.make_problem(
        WIDE, (1, 1), (1, 3), (900,) * 2, mapped=False, dtype=torch.float32, score_k=1000
    )
    for score in ("topk", "children", "topk", "given"):
        check_constrained(problem, score, monkeypatch)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("level", range(8))
def test_deep_tries(score: str, level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = cases.make_problem(DEEP, (level,), (1 if level == 0 else 500,), (500,), seed=level)
    check_constrained(problem, score, monkeypatch)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("step", [4.0, 0.25, 1e-6])
@pytest.mark.parametrize("next_width", [1, 900, 4096])
def test_one_node_with_8192_children(
    score: str, step: float, next_width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a step of 4 nearly all scores are equal: the cut is made by slot alone."""
    problem = cases.make_problem(
        WIDE, (1, 1), (1, 3), (next_width,) * 2, step=step, mapped=False, dtype=torch.float32, score_k=1000
    )
    check_constrained(problem, score, monkeypatch)


@pytest.mark.parametrize("width", [900, 4096])
def test_widths_of_4096(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = cases.make_problem(SPARSE, (1, 0), (4096, 1), (width, 4096), step=1e-6, mapped=False)
    check_constrained(problem, "given", monkeypatch)
    check_constrained(problem, "children", monkeypatch)


@pytest.mark.parametrize("step", [4.0, 0.25, 1e-6])
@pytest.mark.parametrize("next_width", [50, 900])
def test_a_million_candidates(step: float, next_width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = cases.make_problem(LARGE, (1, 0), (300, 1), (next_width, 300), step=step, mapped=False)
    check_constrained(problem, "given", monkeypatch)


@pytest.mark.parametrize("margin", [0.0, 1.5, 1000.0])
@pytest.mark.parametrize("min_width", [0, 40, 5000])
def test_margins(margin: float, min_width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = cases.make_problem(
        SMALL, (1, 2), (20, 90), (300, 20), margin=margin, min_width=min_width, filtered=True
    )
    check_constrained(problem, "given", monkeypatch)


def test_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = cases.make_problem(SMALL, (1, 2), (20, 90), (300, 20), filtered=True)
    assert problem.trie.live is not None
    problem.trie.live.zero_()
    for score in SCORES:
        assert check_constrained(problem, score, monkeypatch).count.tolist() == [0, 0]


def test_nodes_without_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """No trie file has them; the layout of slots does not mind."""
    problem = cases.make_problem(SMALL, (1,), (30,), (300,))
    first_child = problem.trie.first_child
    nodes = slice(SMALL.level_start[0], SMALL.level_start[1])
    first_child[nodes] = first_child[nodes][torch.arange(first_child[nodes].numel()) // 3 * 3]
    check_constrained(problem, "given", monkeypatch)


def test_wide_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    sids = np.stack([np.arange(300) % 20, np.arange(300) * 250], 1)
    problem = cases.make_problem(cases.build_catalogue(sids), (1,), (20,), (90,), mapped=False)
    assert problem.trie.code.dtype == torch.int32
    check_constrained(problem, "given", monkeypatch)


def test_a_request_does_not_depend_on_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    levels, widths, next_widths = (0, 1, 2, 2), (1, 17, 300, 80), (30, 300, 64, 300)
    problem = cases.make_problem(SMALL, levels, widths, next_widths, step=1e-6)
    for score in SCORES:
        together = check_constrained(problem, score, monkeypatch)
        for b in range(4):
            one = slice(b, b + 1)
            p: Any = cases.to_device(problem, DEVICE)
            path = contracts.PathView(p.path.slot[one], p.path.cum, p.path.node, p.path.width, p.path.rows)
            given = p.log_z[one] if score == "given" else None
            alone = constrained_topk.select_constrained(
                p.logits[one], path, p.trie, p.limits.part(one), score, given
            )
            for field in FIELDS:
                assert torch.equal(getattr(alone, field)[0], getattr(together, field)[b])


def check_free(
    logits: Tensor, path: contracts.PathView, limits: contracts.Limits, score: str, log_z: Tensor | None,
    monkeypatch: pytest.MonkeyPatch,
) -> Beams:  # fmt: skip
    """As `check_constrained`."""
    logits, path, limits, log_z = (cases.to_device(x, DEVICE) for x in (logits, path, limits, log_z))  # type: ignore
    with poisoned():
        got, z = vocab_topk.select_and_normalise(logits, path, limits, score, log_z)
    alive = live_rows(path).flatten()
    z, own = z.flatten().masked_fill(~alive, 0.0), []
    for name in ("row_logsumexp", "_masked_logsumexp"):
        normalise = getattr(reference_selection, name)

        def record(raw: Tensor, *args: Tensor, normalise: Callable[..., Tensor] = normalise) -> Tensor:
            own.append(normalise(raw, *args))
            start = sum(len(part) for part in own[:-1])
            return z[start : start + len(raw)]

        monkeypatch.setattr(reference_selection, name, record)
    expected = reference.select_unconstrained(logits, path, limits, score, log_z)
    monkeypatch.undo()
    assert_same(got, expected)
    if own:
        torch.testing.assert_close(z[alive], torch.cat(own)[alive], **LSE_TOLERANCE)
    return got


def make_free(
    vocab: int, widths: Sequence[int], next_widths: Sequence[int], *, dtype: torch.dtype = torch.bfloat16,
    step: float = 0.25, score_k: int = 50, margin: float = math.inf, seed: int = 0,
) -> tuple[Tensor, contracts.PathView, contracts.Limits]:  # fmt: skip
    rng = np.random.default_rng(seed)
    path = cases.make_path(rng, widths, max(1, *widths), step)
    logits = torch.from_numpy(cases.quantised(rng, (len(widths), path.rows, vocab), step)).to(dtype)
    limits = cases.make_limits([0] * len(widths), next_widths, max(1, *next_widths), score_k, margin, 1)
    return logits, path, limits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 127, 1000, 4096, 8193])
@pytest.mark.parametrize("score", ["given", "vocab", "topk"])
def test_free_search(dtype: torch.dtype, vocab: int, score: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, path, limits = make_free(vocab, (7, 0, 30, 1), (300, 20, 64, 900), dtype=dtype)
    log_z = torch.linspace(1, 4, path.rows).expand(4, -1).contiguous() if score == "given" else None
    check_free(logits, path, limits, "topk" if score == "topk" else "vocab", log_z, monkeypatch)


@pytest.mark.parametrize("step", [4.0, 0.25, 1e-6])
@pytest.mark.parametrize("score_k", [1, 50, 900, 10**6])
@pytest.mark.parametrize("next_width", [4, 900])
def test_free_search_ties(
    step: float, score_k: int, next_width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Distinct logits can have equal scores after rounding: order is by score, then by rank and token."""
    logits, path, limits = make_free(
        20000, (3, 1), (next_width,) * 2, dtype=torch.float32, step=step, score_k=score_k, margin=6.0
    )
    path.cum[path.cum < 0] *= 1e5
    check_free(logits, path, limits, "vocab", None, monkeypatch)
    check_free(logits, path, limits, "topk", None, monkeypatch)


@pytest.mark.parametrize("width", [900, 4096])
def test_free_search_wide(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, path, limits = make_free(1024, (width, 5), (width, 4096), step=0.01)
    check_free(logits, path, limits, "vocab", None, monkeypatch)
    logits, path, limits = make_free(151936, (1, 2), (width, 900), step=0.01, score_k=width)
    check_free(logits, path, limits, "vocab", None, monkeypatch)
    check_free(logits, path, limits, "topk", None, monkeypatch)


def test_free_search_finds_what_one_row_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    """All winners lie side by side in one row, far above everything else."""
    logits, path, limits = make_free(50000, (40,), (900,), step=0.01)
    path.cum.sub_(100.0)
    path.cum[path.slot, 17] = 0.0
    logits[0, 17, 30000:31000] += 30
    got = check_free(logits, path, limits, "vocab", None, monkeypatch)
    assert set(got.parent[0].tolist()) == {17}


@pytest.mark.parametrize("next_width", [2, 20, 300])
@pytest.mark.parametrize("is_free", [True, False])
def test_scores_that_are_no_numbers_are_the_best(is_free: bool, next_width: int) -> None:
    """They are how a request tells that its logits overflowed, and must not lead out of its memory."""
    if is_free:
        logits, path, limits = (cases.to_device(x, DEVICE) for x in make_free(151936, (20,), (next_width,)))
        log_z = torch.ones(1, 20, device=DEVICE)
        log_z[0, 3] = math.nan
        got, _ = vocab_topk.select_and_normalise(logits, path, limits, "vocab", log_z)  # type: ignore
    else:
        problem = cases.make_problem(WIDE, (1,), (3,), (next_width,), mapped=False, dtype=torch.float32)
        problem.log_z[0, 1] = math.nan
        p: Any = cases.to_device(problem, DEVICE)
        got, _ = constrained_topk.select_and_normalise(p.logits, p.path, p.trie, p.limits, "given", p.log_z)
    assert got.count.tolist() == [next_width]
    assert got.score[0].isnan().all()
    assert set(got.parent[0].tolist()) == {3 if is_free else 1}
    places = got.token[0] if is_free else got.node[0]
    assert torch.equal(places, places[0] + torch.arange(next_width, device=DEVICE, dtype=places.dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 8, 129, 8192, 8193, 151936])
def test_row_logsumexp(dtype: torch.dtype, columns: int) -> None:
    logits = (
        (torch.randn(37, columns, generator=torch.Generator().manual_seed(columns)) * 4).to(dtype).to(DEVICE)
    )
    logits[3, columns // 2] = 80
    logits[5, : columns // 2] = -math.inf
    expected = torch.logsumexp(logits.double(), -1).float()
    torch.testing.assert_close(vocab_topk.row_logsumexp(logits), expected, **LSE_TOLERANCE)
    for row in range(0, 37, 9):
        assert torch.equal(
            vocab_topk.row_logsumexp(logits[row : row + 1]), vocab_topk.row_logsumexp(logits)[row : row + 1]
        )


def test_a_captured_selection_follows_its_metadata() -> None:
    """Graphs are replayed with other levels, widths and slots than they were captured with."""
    batches = (((0, 1, 2), (1, 17, 300), (30, 300, 64)), ((2, 2, 0), (300, 44, 1), (64, 30, 300)))
    problems = [cases.make_problem(SMALL, *batch, seed=3, rows=300, width=300) for batch in batches]
    capacity = max(p.trie.capacity for p in problems)
    problems = [replace(p, trie=replace(p.trie, capacity=capacity)) for p in problems]
    static: Any = cases.to_device(problems[0], DEVICE)

    def run(p: Any) -> Beams:
        return constrained_topk.select_constrained(p.logits, p.path, p.trie, p.limits, "given", p.log_z)

    run(static)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(static)
    for problem in (problems[1], problems[0]):
        p: Any = cases.to_device(problem, DEVICE)
        for old, new in (
            (static, p),
            (static.path, p.path),
            (static.limits, p.limits),
            (static.trie, p.trie),
        ):
            for field in old.__dataclass_fields__:
                if isinstance(getattr(old, field), Tensor):
                    getattr(old, field).copy_(getattr(new, field))
        graph.replay()
        assert_same(out, run(p))
