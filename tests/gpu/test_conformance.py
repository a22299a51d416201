"""Every registered implementation of every op against the reference, through the contract of the steps."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from grinf.backend.registry import OPS, PARTS, Implementation, Site, default_registry
from grinf.ops import reference
from grinf.ops.contracts import BeamView, ContextView, Selection
from tests.gpu import attention_cases
from tests.gpu.attention_cases import Case, Inputs
from tests.gpu.tolerances import ATTENTION, ELEMENTWISE, LSE

pytestmark = pytest.mark.gpu

ONE = Case()
ATTENTION_CASES = {
    "context 1": replace(ONE, lengths=(1,)),
    "no context": replace(ONE, lengths=(0,)),
    "width 1": replace(ONE, live=(1,), beams=1),
    "last page partial": replace(ONE, lengths=(64 * 3 + 7,)),
    "seven steps": replace(ONE, steps=(6,), decode_steps=7),
    **{f"group {g}": replace(ONE, q_heads=2 * g, steps=(g % 3,), decode_steps=3) for g in (1, 2, 4, 8)},
    "head dim 64": replace(ONE, head_dim=64),
    "float16": replace(ONE, dtype=torch.float16),
    "width 0 rows": Case(live=(67, 0, 300), lengths=(100, 0, 700), steps=(1, 0, 0), beams=300),
    "900": Case(live=(900, 899), lengths=(1000, 500), steps=(1, 0), beams=900, q_heads=16, kv_heads=8),
    "4096": Case(live=(4096,), lengths=(260,), beams=4096),
}
ROWS = {"one row": 1, "odd": 77, "wave": 3600}


@functools.cache
def site(dtype: torch.dtype, head_dim: int, group: int) -> Site:
    major, minor = torch.cuda.get_device_capability()
    return Site("cuda", 10 * major + minor, str(dtype).removeprefix("torch."), head_dim, group, 64)


def candidates(*ops: str) -> list[Any]:
    """The implementations of some ops but the reference itself, as test parameters."""
    found = [i for op in ops for i in default_registry().candidates(op) if i.name != "torch"]
    return [pytest.param(i, id=f"{i.op}-{i.name}") for i in found]


def load(
    implementation: Implementation, dtype: torch.dtype, head_dim: int = 128, group: int = 2
) -> Callable[..., Any]:
    where = site(dtype, head_dim, group)
    reason = implementation.needs.rejects(where)
    if reason is not None:
        pytest.skip(f"{implementation.name}: {reason}")
    return implementation.load(where)


def test_every_op_has_a_candidate_beside_the_reference() -> None:
    registry = default_registry()
    alone = [op for op in (*OPS, *PARTS) if len(registry.candidates(op)) < 2]
    assert alone == []


def views(inputs: Inputs) -> tuple[ContextView, BeamView]:
    context = ContextView(inputs.k_pages, inputs.v_pages, inputs.page_table, inputs.context_len)
    return context, BeamView(inputs.k_beams, inputs.v_beams, inputs.slot, inputs.ancestor, inputs.step)


@pytest.mark.parametrize("name", ATTENTION_CASES)
@pytest.mark.parametrize(
    "implementation", candidates("decode_attention", "context_attention", "beam_attention")
)
def test_attention(implementation: Implementation, name: str) -> None:
    case = ATTENTION_CASES[name]
    inputs = attention_cases.make_inputs(case)
    context, beams = views(inputs)
    call = load(implementation, case.dtype, case.head_dim, case.q_heads // case.kv_heads)
    arguments, parts = {
        "decode_attention": ((context, beams), "context own"),
        "context_attention": ((context,), "context"),
        "beam_attention": ((beams,), "own"),
    }[implementation.op]
    got = call(inputs.q, *arguments, inputs.width, inputs.scale)
    out, lse = got if isinstance(got, tuple) else (got, None)
    for b, live in enumerate(case.live):
        expected, expected_lse = attention_cases.expected(case, inputs, b, parts)
        error = (out[b, :live].double() - expected).abs()
        tolerance = ATTENTION[case.dtype]
        assert live == 0 or error.max() <= tolerance.absolute
        assert error.norm() <= tolerance.relative * expected.norm() + 1e-9
        if lse is not None and live:
            torch.testing.assert_close(lse[b, :live].double(), expected_lse, atol=LSE, rtol=0)


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("implementation", candidates("add_rms_norm", "swiglu"))
def test_elementwise(implementation: Implementation, dtype: torch.dtype, rows: int) -> None:
    call = load(implementation, dtype)
    x = torch.randn(rows, 2048, device="cuda", dtype=dtype)
    if implementation.op == "swiglu":
        assert_close(call(x), reference.swiglu(x))
        return
    weight = torch.randn(2048, device="cuda", dtype=dtype)
    for residual in (None, torch.randn_like(x)):
        for got, expected in zip(
            call(x, residual, weight, 1e-6), reference.add_rms_norm(x, residual, weight, 1e-6), strict=True
        ):
            assert_close(got, expected)


def assert_close(got: Tensor, expected: Tensor) -> None:
    ulp = ELEMENTWISE[expected.dtype]
    torch.testing.assert_close(got.float(), expected.float(), atol=ulp * 0.05, rtol=2 * ulp)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("keep_k", [True, False])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("implementation", candidates("qk_norm_rope_write"))
def test_qk_norm_rope_write(
    implementation: Implementation, head_dim: int, keep_k: bool, normed: bool
) -> None:
    dtype, rows, heads = torch.bfloat16, 300, (16, 8)
    call = load(implementation, dtype, head_dim)
    qkv = torch.randn(rows, heads[0] + 2 * heads[1], head_dim, device="cuda", dtype=dtype)
    weights = [torch.randn(head_dim, device="cuda", dtype=dtype) if normed else None for _ in "qk"]
    angle = torch.rand(500, head_dim // 2, device="cuda") * 6
    cos_sin = torch.cat([angle.cos(), angle.sin()], -1)
    positions = torch.randint(500, (rows,), device="cuda", dtype=torch.int32)
    where = torch.randperm(1000, device="cuda")[:rows]
    results = []
    for function in (call, reference.qk_norm_rope_write):
        mine = qkv.clone()
        pools = [torch.full((1000, heads[1], head_dim), 7.0, device="cuda", dtype=dtype) for _ in "kv"]
        function(mine, *weights, 1e-6, cos_sin, positions, *pools, where, keep_k=keep_k)
        results.append((mine, *pools))
    for got, expected in zip(*results, strict=True):
        assert_close(got, expected)


@pytest.mark.parametrize("columns", [1, 300, 8192, 151_936])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("implementation", candidates("row_logsumexp"))
def test_row_logsumexp(implementation: Implementation, dtype: torch.dtype, columns: int) -> None:
    logits = (torch.randn(50, columns, device="cuda") * 8).to(dtype)
    got = load(implementation, dtype)(logits)
    torch.testing.assert_close(got, logits.double().logsumexp(-1).float(), atol=1e-4, rtol=1e-6)


@pytest.mark.parametrize("lengths", [(1,), (7, 300, 64), (513, 1, 1000), (500,) * 8], ids=str)
@pytest.mark.parametrize(
    ("dtype", "head_dim", "group"),
    [(torch.bfloat16, 64, 2), (torch.float16, 64, 8), *((torch.bfloat16, 128, g) for g in (1, 2, 4, 8))],
)
@pytest.mark.parametrize("implementation", candidates("prefill_attention"))
def test_prefill_attention(
    implementation: Implementation, dtype: torch.dtype, head_dim: int, group: int, lengths: tuple[int, ...]
) -> None:
    """With the exact lengths, and with a bucket's bound and padding rows behind, as in a graph.

    What the padding holds must not matter: it is NaN here.
    """
    call = load(implementation, dtype, head_dim, group)
    total, heads = sum(lengths), (8 * group, 8, 8)
    qkv = torch.randn(total + 50, sum(heads), head_dim, device="cuda", dtype=dtype)
    qkv[total:] = torch.nan
    ends = np.cumsum([0, *lengths, 0]).tolist()
    cu_seqlens = torch.tensor(ends, device="cuda", dtype=torch.int32)
    expected = reference.prefill_attention(
        *qkv[:total].float().split(heads, 1), cu_seqlens, lengths, head_dim**-0.5
    )
    for rows, bound in ((total, lengths), (total + 50, (total + 50,))):
        got = call(*qkv[:rows].split(heads, 1), cu_seqlens, bound, head_dim**-0.5)
        error = (got[:total].float() - expected).abs().max()
        assert error <= ATTENTION[dtype].absolute


@pytest.mark.parametrize("implementation", candidates("extend_path"))
@pytest.mark.parametrize("width", [1, 300, 4096])
def test_extend_path(implementation: Implementation, width: int) -> None:
    levels, slots, batch = 4, 5, 3
    call = load(implementation, torch.bfloat16)
    rng = torch.Generator("cuda").manual_seed(width)

    def ints(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=rng, device="cuda", dtype=torch.int32)

    selection = Selection(
        torch.randn(batch, width, generator=rng, device="cuda"),
        ints(width, batch, width),
        ints(1000, batch, width),
        ints(1000, batch, width),
        torch.tensor([width, 0, width // 2], dtype=torch.int32, device="cuda"),
    )
    slot = torch.tensor([3, slots, 0], dtype=torch.int32, device="cuda")
    level = torch.tensor([2, 1, 3], dtype=torch.int32, device="cuda")
    pools = [
        ints(1000, slots + 1, levels, width),
        ints(width, slots + 1, levels - 1, width),
        torch.randn(slots + 1, width, generator=rng, device="cuda"),
        ints(1000, slots + 1, width),
        ints(width + 1, slots + 1),
    ]
    results = []
    for function in (call, reference.extend_path):
        mine = [pool.clone() for pool in pools]
        function(slot, level, selection, *mine)
        results.append(mine)
    for got, expected in zip(*results, strict=True):
        for b in (0, 2):  # the scratch slot may hold anything but a width
            torch.testing.assert_close(got[slot[b]], expected[slot[b]], rtol=0, atol=0)
        untouched = [s for s in range(slots) if s not in (0, 3)]
        torch.testing.assert_close(got[untouched], expected[untouched], rtol=0, atol=0)
    assert results[0][-1][slots] == 0


def test_selections_have_no_other_implementation_than_test_selection_covers() -> None:
    """test_selection.py compares these kernels with the reference, on many more cases."""
    ops = ("select_constrained", "select_unconstrained")
    assert {i.name for op in ops for i in default_registry().candidates(op)} == {"torch", "cupy"}
