"""Element-wise ops and BeamPath on the GPU against the reference: one unit in the last place, or exact."""

from typing import Any

import pytest
import torch
from torch import Tensor

from grinf.ops import reference
from grinf.state.beam_path import BeamPath
from kernels_cupy import elementwise, path
from kernels_cupy.selection import Beams
from tests.gpu.tolerances import ELEMENTWISE

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
DTYPES = (torch.bfloat16, torch.float16)


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


def assert_close(got: Tensor, expected: Tensor) -> None:
    """Within one unit in the last place of the dtype; near zero, of values of size one in fp32."""
    torch.testing.assert_close(got, expected, rtol=ELEMENTWISE[got.dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [8, 64, 896, 1000, 1024, 2560, 5120, 32768])
@pytest.mark.parametrize("rows", [0, 1, 37])
@pytest.mark.parametrize("with_residual", [False, True])
def test_add_rms_norm(dtype: torch.dtype, hidden: int, rows: int, with_residual: bool) -> None:
    x, weight = normal(rows, hidden, dtype=dtype), normal(hidden, dtype=dtype, seed=1)
    residual = normal(rows, hidden, dtype=dtype, seed=2) * 10 if with_residual else None
    before = x.clone()
    got = elementwise.add_rms_norm(x, residual, weight, 1e-6)
    expected = reference.add_rms_norm(x, residual, weight, 1e-6)
    assert_close(got[0], expected[0])
    assert torch.equal(got[1], expected[1])
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("features", [8, 3072, 9736])
@pytest.mark.parametrize("rows", [0, 1, 37])
def test_swiglu(dtype: torch.dtype, features: int, rows: int) -> None:
    gate_up = normal(rows, 2 * features, dtype=dtype) * 3
    gate_up[:, : min(8, features)] *= 1000  # far beyond where exp overflows
    assert_close(elementwise.swiglu(gate_up), reference.swiglu(gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (14, 2), (16, 8), (32, 8)])
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("keep_k", [False, True])
@pytest.mark.parametrize("tokens", [1, 29])
def test_qk_norm_rope_write(
    dtype: torch.dtype, head_dim: int, heads: tuple[int, int], with_norm: bool, keep_k: bool, tokens: int
) -> None:
    q_heads, kv_heads = heads
    norms = [1 + normal(head_dim, dtype=dtype, seed=s) / 4 if with_norm else None for s in (1, 2)]
    angle = torch.arange(50)[:, None] * torch.rand(head_dim // 2, generator=torch.Generator().manual_seed(3))
    cos_sin = torch.cat([angle.cos(), angle.sin()], -1).to(DEVICE)
    positions = torch.randint(0, 50, (tokens,), generator=torch.Generator().manual_seed(4)).int().to(DEVICE)
    rows = torch.randperm(60, generator=torch.Generator().manual_seed(5))[:tokens].to(DEVICE)
    results: list[list[Tensor]] = []
    for op in (elementwise.qk_norm_rope_write, reference.qk_norm_rope_write):
        qkv = normal(tokens, q_heads + 2 * kv_heads, head_dim, dtype=dtype)
        pools = [torch.full((60, kv_heads, head_dim), 7.0, dtype=dtype, device=DEVICE) for _ in range(2)]
        op(qkv, *norms, 1e-6, cos_sin, positions, *pools, rows, keep_k)
        results.append([qkv, *pools])
    for got, expected in zip(*results, strict=True):
        assert_close(got, expected)


def random_path(levels: int, width: int, slots: int) -> BeamPath:
    pools = BeamPath(slots, levels, width, torch.device(DEVICE))
    generator = torch.Generator().manual_seed(levels)
    for pool in (pools.token, pools.ancestor, pools.node):
        pool.copy_(torch.randint(0, width, pool.shape, generator=generator))
    pools.width.copy_(torch.randint(0, width + 1, pools.width.shape, generator=generator))
    pools.width[-1] = 0
    return pools


def parts(pools: BeamPath) -> tuple[Tensor, ...]:
    return pools.token, pools.ancestor, pools.cum, pools.node, pools.width


@pytest.mark.parametrize("levels", [1, 2, 3, 8])
@pytest.mark.parametrize("width", [1, 900, 4096])
def test_extend_path(levels: int, width: int) -> None:
    beams = max(1, width - 3)
    slot = torch.tensor([3, 0, 5, 2], dtype=torch.int32, device=DEVICE)  # 5 is scratch
    level = torch.tensor([levels - 1, 0, levels // 2, levels // 2], dtype=torch.int32, device=DEVICE)
    generator = torch.Generator().manual_seed(width)

    def numbers(*shape: int) -> Tensor:
        return torch.randint(0, beams, shape, generator=generator, dtype=torch.int32).to(DEVICE)

    score = torch.randn(4, beams, generator=generator).to(DEVICE)
    chosen = Beams(score, *(numbers(4, beams) for _ in range(3)), numbers(4))
    got, expected = random_path(levels, width, 5), random_path(levels, width, 5)
    path.extend_path(slot, level, chosen, *parts(got))
    untyped: Any = chosen
    reference.extend_path(slot, level, untyped, *parts(expected))
    for a, b in zip(parts(got), parts(expected), strict=True):
        assert torch.equal(a[:5], b[:5])
    assert got.width[5] == 0
