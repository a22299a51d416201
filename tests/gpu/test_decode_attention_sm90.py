"""Fused decode attention on Hopper against attention in float64, on inputs where everything unused is NaN."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from tests.gpu.tolerances import ATTENTION

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]


@dataclass(frozen=True)
class Case:
    """One call. live, lengths, steps: width, context length and decode step of each request."""

    live: tuple[int, ...] = (67,)
    lengths: tuple[int, ...] = (300,)
    steps: tuple[int, ...] = (1,)
    beams: int = 70
    decode_steps: int = 2
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 128
    page_size: int = 64
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class Inputs:
    """The arguments of `decode_attention`, in its order but for `out`."""

    q: Tensor
    k_pages: Tensor
    v_pages: Tensor
    page_table: Tensor
    context_len: Tensor
    k_beams: Tensor
    v_beams: Tensor
    slot: Tensor
    ancestor: Tensor
    step: Tensor
    width: Tensor
    scale: float


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    """Random queries, keys and values; shuffled pages, slots and ancestors; NaN where nothing may be read."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.float32).to(case.dtype)

    def shuffled(n: int) -> Tensor:
        return torch.randperm(n, generator=generator, device="cuda")

    batch, kv_shape = len(case.live), (case.kv_heads, case.head_dim)
    pages_each = max(1, -(-max(case.lengths) // case.page_size))
    num_pages, max_width = batch * pages_each + 2, case.beams + 5
    pools = [torch.full((num_pages + 1, case.page_size, *kv_shape), torch.nan, dtype=case.dtype, device="cuda") for _ in "kv"]
    own = [
        torch.full((batch + 3, case.decode_steps, max_width, *kv_shape), torch.nan, dtype=case.dtype, device="cuda")
        for _ in "kv"
    ]
    page_table = torch.full((batch, pages_each + 1), num_pages, dtype=torch.int32, device="cuda")
    page_table[:, :pages_each] = shuffled(num_pages)[: batch * pages_each].view(batch, pages_each)
    slot = shuffled(batch + 2)[:batch]
    for b in range(batch):
        rows = torch.arange(case.lengths[b], device="cuda")
        pages, offsets = page_table[b, rows // case.page_size].long(), rows % case.page_size
        for pool in pools:
            pool[pages, offsets] = normal(len(rows), *kv_shape)
        for pool in own:
            pool[slot[b], : case.steps[b] + 1] = normal(case.steps[b] + 1, max_width, *kv_shape)
    shape = (batch, case.decode_steps, case.beams)
    ancestor = torch.randint(max_width, shape, generator=generator, device="cuda", dtype=torch.int32)
    for b, step in enumerate(case.steps):
        ancestor[b, step] = torch.arange(case.beams, device="cuda")
    qkv = normal(batch * case.beams, (case.q_heads + 2 * case.kv_heads) * case.head_dim)
    q = qkv[:, : case.q_heads * case.head_dim].view(batch, case.beams, case.q_heads, case.head_dim)
    numbers = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in (case.lengths, case.steps, case.live))
    context_len, step, width = numbers
    scale = case.head_dim**-0.5
    return Inputs(q, *pools, page_table, context_len, *own, slot.int(), ancestor, step, width, scale)


def expected_rows(case: Case, inputs: Inputs, b: int) -> Tensor:
    """Attention of the live beams of request b, float64 [width, Hq, D]."""
    live, group = case.live[b], case.q_heads // case.kv_heads
    rows = torch.arange(case.lengths[b], device="cuda")
    at = inputs.page_table[b, rows // case.page_size].long(), rows % case.page_size
    steps = torch.arange(case.steps[b] + 1, device="cuda")[:, None]
    own = inputs.slot[b].long(), steps, inputs.ancestor[b, : case.steps[b] + 1, :live].long()
    q = inputs.q[b, :live].double().unflatten(1, (case.kv_heads, group))  # [w, h, g, D]
    context = torch.einsum("whgd,jhd->whgj", q, inputs.k_pages[at].double())
    path = torch.einsum("whgd,swhd->whgs", q, inputs.k_beams[own].double())
    weights = torch.softmax(torch.cat([context, path], -1) * inputs.scale, -1)
    context, path = weights.split([len(rows), len(steps)], -1)
    out = torch.einsum("whgj,jhd->whgd", context, inputs.v_pages[at].double())
    return (out + torch.einsum("whgs,swhd->whgd", path, inputs.v_beams[own].double())).flatten(1, 2)


def attend(inputs: Inputs) -> Tensor:
    """Run the kernel over a poisoned output."""
    from kernels_cupy.decode_attention_sm90 import decode_attention

    out = torch.full(inputs.q.shape, torch.nan, dtype=inputs.q.dtype, device="cuda")
    arguments = (getattr(inputs, name) for name in Inputs.__dataclass_fields__)
    decode_attention(*arguments, out)
    return out


def errors(case: Case, inputs: Inputs, out: Tensor) -> tuple[float, float]:
    """Largest absolute error and relative L2 error over the live rows."""
    pairs = [(out[b, :live].double(), expected_rows(case, inputs, b)) for b, live in enumerate(case.live)]
    got, want = (torch.cat([side.flatten() for side in sides]) for sides in zip(*pairs, strict=True))
    difference = got - want
    return difference.abs().max().item(), (difference.norm() / want.norm()).item()


ONE = Case()
CASES = {
    "context_1": replace(ONE, lengths=(1,)),
    "own_keys_only": replace(ONE, lengths=(0,)),
    "last_page_partial": replace(ONE, lengths=(64 * 3 + 7,)),
    "whole_block": replace(ONE, lengths=(128,)),
    "one_past_block": replace(ONE, lengths=(257,)),
    "width_1": replace(ONE, live=(1,), beams=1),
    "first_step": replace(ONE, steps=(0,)),
    "seven_steps": replace(ONE, steps=(6,), decode_steps=7),
    "group_1": replace(ONE, q_heads=2, live=(130,), beams=130, steps=(2,), decode_steps=3),
    "group_4": replace(ONE, q_heads=8, steps=(4,), decode_steps=7),
    "group_8": replace(ONE, q_heads=16, steps=(6,), decode_steps=7),
    "head_dim_64": replace(ONE, head_dim=64),
    "head_dim_64_group_1": replace(ONE, head_dim=64, q_heads=2, live=(200,), beams=200),
    "fp16": replace(ONE, dtype=torch.float16),
    "fp16_head_dim_64": replace(ONE, dtype=torch.float16, head_dim=64),
    "page_16": replace(ONE, page_size=16, lengths=(203,)),
    "page_32": replace(ONE, page_size=32),
    "page_128": replace(ONE, page_size=128),
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
    "splits_mixed": replace(ONE, lengths=(0, 5, 900, 2000), live=(20, 1, 32, 17), steps=(0, 1, 1, 0), beams=32),
    "wide": Case(live=(900, 899), lengths=(1000, 500), steps=(1, 0), beams=900, q_heads=16, kv_heads=8),
    "wide_head_dim_64": Case(live=(900,), lengths=(333,), beams=900, q_heads=16, kv_heads=8, head_dim=64),
    "width_4096": Case(live=(4096,), lengths=(260,), beams=4096, q_heads=4, kv_heads=2),
    "many_waves": Case(live=(900,) * 8, lengths=(100, 90, 300, 128, 64, 1, 0, 257), steps=(1,) * 8, beams=900, q_heads=16, kv_heads=8),
}


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_float64(name: str) -> None:
    case = CASES[name]
    inputs = make_inputs(case)
    absolute, relative = errors(case, inputs, attend(inputs))
    limit = ATTENTION[case.dtype]
    assert absolute <= limit.absolute
    assert relative <= limit.relative


def test_rows_past_the_width_are_left_alone() -> None:
    case = CASES["mixed_batch"]
    out = attend(make_inputs(case))
    for b, live in enumerate(case.live):
        assert not out[b, :live].isnan().any()
        assert out[b, live:].isnan().all()


def test_same_bits_every_time_and_in_any_batch_position() -> None:
    case = CASES["mixed_batch"]
    inputs = make_inputs(case)
    first, order = attend(inputs), torch.tensor([3, 5, 0, 4, 2, 1], device="cuda")
    per_request = ("q", "page_table", "context_len", "slot", "ancestor", "step", "width")
    moved = attend(replace(inputs, **{name: getattr(inputs, name)[order] for name in per_request}))
    for b, live in enumerate(case.live):
        assert torch.equal(first[b, :live], moved[(order == b).nonzero().item(), :live])
    assert torch.equal(first.nan_to_num(), attend(inputs).nan_to_num())


def test_replays_in_a_graph_with_other_requests() -> None:
    case = CASES["mixed_batch"]
    static, fresh = make_inputs(case), make_inputs(case, seed=1)
    attend(static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(static)
    for name in Inputs.__dataclass_fields__:
        if name != "scale":
            getattr(static, name).copy_(getattr(fresh, name))
    graph.replay()
    assert torch.equal(out.nan_to_num(), attend(fresh).nan_to_num())
