"""K1, K2, K3 and the fused decode attention for any GPU since sm_80, against attention in float64."""

import math
from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from tests.gpu.attention_cases import Case, Inputs, expected, make_inputs
from tests.gpu.tolerances import ATTENTION, LSE, Tolerance

pytestmark = pytest.mark.gpu

ONE = Case()
CASES = {
    "context_1": replace(ONE, lengths=(1,)),
    "no_context": replace(ONE, lengths=(0,)),
    "last_page_partial": replace(ONE, lengths=(64 * 3 + 7,)),
    "whole_tiles": replace(ONE, lengths=(128,)),
    "one_past_a_tile": replace(ONE, lengths=(257,)),
    "width_1": replace(ONE, live=(1,), beams=1),
    "first_step": replace(ONE, steps=(0,)),
    "seven_steps": replace(ONE, steps=(6,), decode_steps=7),
    "group_1": replace(ONE, q_heads=2, live=(130,), beams=130, steps=(2,), decode_steps=3),
    "group_1_no_context": replace(ONE, q_heads=2, live=(130,), beams=130, lengths=(0,)),
    "group_3": replace(ONE, q_heads=6, steps=(1,)),
    "group_4": replace(ONE, q_heads=8, steps=(4,), decode_steps=7),
    "group_8": replace(ONE, q_heads=16, steps=(6,), decode_steps=7),
    "one_kv_head": replace(ONE, q_heads=7, kv_heads=1),
    "head_dim_64": replace(ONE, head_dim=64),
    "head_dim_64_page_16": replace(ONE, head_dim=64, page_size=16, lengths=(203,)),
    "fp16": replace(ONE, dtype=torch.float16),
    "fp16_head_dim_64": replace(ONE, dtype=torch.float16, head_dim=64),
    "page_16": replace(ONE, page_size=16, lengths=(203,)),
    "page_32": replace(ONE, page_size=32),
    "page_256": replace(ONE, page_size=256, lengths=(700,)),
    "mixed_batch": Case(
        live=(67, 0, 1, 300, 64, 0),
        lengths=(100, 0, 1, 1000, 513, 77),
        steps=(1, 0, 0, 2, 1, 1),
        beams=300,
        decode_steps=3,
        q_heads=16,
        kv_heads=8,
    ),
    "splits": replace(ONE, lengths=(1500,), live=(20,), beams=20),
    "splits_group_1": replace(ONE, q_heads=2, lengths=(2047,), live=(70,)),
    "splits_mixed": replace(
        ONE, lengths=(0, 5, 900, 2000), live=(20, 1, 32, 17), steps=(0, 1, 1, 0), beams=32
    ),
    "wide": Case(live=(900, 899), lengths=(1000, 500), steps=(1, 0), beams=900, q_heads=16, kv_heads=8),
    "wide_split": Case(live=(900,), lengths=(5000,), beams=900, q_heads=16, kv_heads=8),
    "width_4096": Case(live=(4096,), lengths=(260,), beams=4096),
}
PAIRS = [field.name for field in fields(Inputs)]


def decode(inputs: Inputs) -> Tensor:
    """The fused attention over a poisoned output."""
    from kernels_cupy.decode_attention import decode_attention

    out = torch.full(inputs.q.shape, torch.nan, dtype=inputs.q.dtype, device="cuda")
    decode_attention(*(getattr(inputs, name) for name in PAIRS), out)
    return out


def context(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """K1 alone."""
    from kernels_cupy.context_attention import context_attention

    names = ("q", "k_pages", "v_pages", "page_table", "context_len", "width", "scale")
    return context_attention(*(getattr(inputs, name) for name in names))


def own(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """K2 alone."""
    from kernels_cupy.beam_attention import beam_attention

    names = ("q", "k_beams", "v_beams", "slot", "ancestor", "step", "width", "scale")
    return beam_attention(*(getattr(inputs, name) for name in names))


def composed(inputs: Inputs) -> Tensor:
    """K1, K2 and K3."""
    from kernels_cupy.merge_attention import merge_attention

    out = torch.full(inputs.q.shape, torch.nan, dtype=inputs.q.dtype, device="cuda")
    merge_attention(*context(inputs), *own(inputs), out)
    return out


def errors(got: Tensor, case: Case, inputs: Inputs, parts: str) -> tuple[float, float]:
    """Largest absolute error and relative L2 error over the live rows; NaN where a live row is."""
    pairs = [
        (got[b, :live].double(), expected(case, inputs, b, parts)[0]) for b, live in enumerate(case.live)
    ]
    result, truth = (torch.cat([side.flatten() for side in sides]) for sides in zip(*pairs, strict=True))
    difference = result - truth
    return difference.abs().max().item(), (difference.norm() / truth.norm().clamp(min=1e-30)).item()


def lse_error(lse: Tensor, case: Case, inputs: Inputs, parts: str) -> float:
    """Largest absolute error of the log-sum-exp over the live rows; equal infinities agree."""
    worst = 0.0
    for b, live in enumerate(case.live):
        truth = expected(case, inputs, b, parts)[1]
        error = (lse[b, :live] - truth).abs()[lse[b, :live] != truth]
        worst = max([worst, *error.nan_to_num(nan=math.inf).tolist()])
    return worst


def assert_close(got: Tensor, case: Case, inputs: Inputs, parts: str, limit: Tolerance) -> None:
    absolute, relative = errors(got, case, inputs, parts)
    assert absolute <= limit.absolute
    assert relative <= limit.relative


@pytest.mark.parametrize("attend", [decode, composed])
@pytest.mark.parametrize("name", CASES)
def test_whole_attention(name: str, attend: Callable[[Inputs], Tensor]) -> None:
    case = CASES[name]
    inputs = make_inputs(case)
    assert_close(attend(inputs), case, inputs, "context own", ATTENTION[case.dtype])


@pytest.mark.parametrize(("attend", "parts"), [(context, "context"), (own, "own")])
@pytest.mark.parametrize("name", CASES)
def test_partial_attention(name: str, attend: Callable[[Inputs], tuple[Tensor, Tensor]], parts: str) -> None:
    case = CASES[name]
    inputs = make_inputs(case)
    out, lse = attend(inputs)
    assert_close(out, case, inputs, parts, ATTENTION[case.dtype])
    assert lse_error(lse, case, inputs, parts) <= LSE


def test_merge_of_empty_sides() -> None:
    from kernels_cupy.merge_attention import merge_partials

    shape = (3, 1, 5, 2, 64)
    parts, out_b = torch.randn(shape, device="cuda"), torch.randn(shape[1:], device="cuda")
    part_lse, lse_b = torch.randn(shape[:-1], device="cuda"), torch.randn(shape[1:-1], device="cuda")
    for i, row in ((0, 0), (1, 1), (slice(None), 2), (slice(None), 3)):
        part_lse[i, 0, row] = -math.inf
        parts[i, 0, row] = torch.nan
    lse_b[0, 3:] = -math.inf
    out_b[0, 3:] = torch.nan
    out, lse = torch.full_like(out_b, torch.nan), torch.full_like(lse_b, torch.nan)
    merge_partials(parts, part_lse, out_b, lse_b, out, lse)
    all_lse = torch.cat([part_lse, lse_b[None]]).double()
    weights = torch.softmax(all_lse, 0).nan_to_num()
    truth = (weights[..., None] * torch.cat([parts, out_b[None]]).double().nan_to_num()).sum(0)
    assert torch.allclose(out.double(), truth, rtol=1e-5, atol=1e-6)
    assert torch.allclose(lse.double(), torch.logsumexp(all_lse, 0), rtol=1e-5, atol=1e-6)


def test_rows_past_the_width_are_left_alone() -> None:
    for name in ("mixed_batch", "splits_mixed"):
        case = CASES[name]
        out = decode(make_inputs(case))
        for b, live in enumerate(case.live):
            assert not out[b, :live].isnan().any()
            assert out[b, live:].isnan().all()


def test_same_bits_every_time_and_in_any_batch_position() -> None:
    case = CASES["splits_mixed"]
    inputs = make_inputs(case)
    first, order = decode(inputs), torch.tensor([3, 2, 0, 1], device="cuda")
    per_request = ("q", "page_table", "context_len", "slot", "ancestor", "step", "width")
    moved = decode(
        replace(inputs, **{name: getattr(inputs, name)[order].contiguous() for name in per_request})
    )
    for b, live in enumerate(case.live):
        assert torch.equal(first[b, :live], moved[(order == b).nonzero().item(), :live])
    assert torch.equal(first.nan_to_num(), decode(inputs).nan_to_num())


def test_replays_in_a_graph_with_other_requests() -> None:
    case = CASES["splits_mixed"]
    static, fresh = make_inputs(case), make_inputs(case, seed=1)
    decode(static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode(static)
    for name in PAIRS:
        if name != "scale":
            getattr(static, name).copy_(getattr(fresh, name))
    graph.replay()
    assert torch.equal(out.nan_to_num(), decode(fresh).nan_to_num())


def test_unsupported_shapes_are_named() -> None:
    inputs = make_inputs(replace(ONE, head_dim=96))
    with pytest.raises(ValueError, match="96"):
        decode(inputs)
    inputs = make_inputs(replace(ONE, page_size=24))
    with pytest.raises(ValueError, match="page_size 24"):
        decode(inputs)
