"""Grid arithmetic of the attention kernels for any GPU, and what their bindings refuse."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels_cupy import beam_attention, context_attention, decode_attention, merge_attention
from kernels_cupy.context_attention import Grid, plan, shared_bytes, tile_sizes

H200 = {"processors": 132, "shared": 228 << 10}
A100 = {"processors": 108, "shared": 164 << 10}
L40S = {"processors": 142, "shared": 100 << 10}
QWEN3 = {"kv_heads": 8, "group": 2, "head_dim": 128}


def of(batch: int, width: int, max_context: int, device: dict[str, int], fused: bool = True) -> Grid:
    return plan(batch, width, max_context=max_context, fused=fused, **QWEN3, **device)


def test_tiles_are_the_largest_of_which_two_blocks_fit() -> None:
    assert tile_sizes(1800, 128, H200["shared"], fused=True) == (2, 64)
    assert tile_sizes(1800, 128, H200["shared"], fused=False) == (2, 32)
    assert tile_sizes(40, 128, H200["shared"], fused=True) == (1, 64)
    assert tile_sizes(1800, 128, A100["shared"], fused=True) == (2, 32)
    assert tile_sizes(1800, 128, L40S["shared"], fused=True) == (1, 32)
    assert tile_sizes(1800, 64, L40S["shared"], fused=True) == (2, 64)


@pytest.mark.parametrize("device", [H200, A100, L40S])
@given(rows=st.integers(1, 40_000), head_dim=st.sampled_from([64, 128]), fused=st.booleans())
def test_two_blocks_fit_on_a_multiprocessor(
    device: dict[str, int], rows: int, head_dim: int, fused: bool
) -> None:
    m_tiles, block_n = tile_sizes(rows, head_dim, device["shared"], fused)
    assert 2 * (shared_bytes(m_tiles, block_n, head_dim) + 1024) <= device["shared"]
    assert m_tiles == 1 or rows > 64


def test_every_size_that_is_chosen_is_compiled_somewhere() -> None:
    assert context_attention.arches((2, 64), 128, fused=True) == ("sm_90a", "sm_100")
    assert context_attention.arches((2, 32), 128, fused=True) == ("sm_80",)
    assert context_attention.arches((1, 32), 128, fused=True) == ("sm_89",)
    assert context_attention.arches((2, 64), 64, fused=True) == context_attention.ARCHES


def test_shared_memory_holds_queries_and_two_stages_of_keys_and_values() -> None:
    assert shared_bytes(2, 64, 128) == (128 + 2 * 64 + 2 * 64) * 128 * 2
    assert shared_bytes(1, 32, 64) == (64 + 2 * 32 + 2 * 32) * 64 * 2


def test_a_full_grid_is_not_split() -> None:
    assert of(8, 900, 5000, H200) == Grid(m_tiles=2, block_n=64, splits=1, min_split=1024, row_blocks=15)
    assert of(2, 900, 5000, H200).splits == 1


def test_a_small_grid_is_split_until_it_fills_the_device() -> None:
    assert of(1, 900, 5000, H200).splits == 2
    assert of(1, 900, 1000, H200).splits == 1, "one part would be shorter than is worth its merge"
    assert of(1, 300, 1024, H200) == Grid(m_tiles=2, block_n=64, splits=4, min_split=256, row_blocks=5)
    assert of(1, 20, 100_000, H200).splits == context_attention.MAX_SPLITS


@given(
    batch=st.integers(1, 64),
    width=st.integers(1, 4096),
    max_context=st.integers(16, 20_000),
    device=st.sampled_from([H200, A100, L40S]),
    fused=st.booleans(),
)
def test_a_grid_covers_every_row_and_fits_one_wave_if_split(
    batch: int, width: int, max_context: int, device: dict[str, int], fused: bool
) -> None:
    grid = of(batch, width, max_context, device, fused)
    rows_per_block = 64 * grid.m_tiles
    assert (grid.row_blocks - 1) * rows_per_block < width * 2 <= grid.row_blocks * rows_per_block
    blocks = grid.row_blocks * QWEN3["kv_heads"] * batch * grid.splits
    assert grid.splits == 1 or blocks <= 2 * device["processors"]
    assert grid.splits == 1 or (grid.splits - 1) * grid.min_split < max_context
    assert grid.min_split % 64 == 0, "parts begin at a whole tile"
    assert grid.min_split % grid.block_n == 0


@pytest.mark.parametrize("head_dim", [64, 128])
def test_teams_fill_a_block(head_dim: int) -> None:
    assert beam_attention.teams(head_dim) * head_dim * 2 == beam_attention.THREADS * 16
    assert merge_attention.teams(head_dim) * head_dim * 4 == merge_attention.THREADS * 16


def tensors(head_dim: int = 128, page_size: int = 16, q_heads: int = 4) -> dict[str, torch.Tensor]:
    batch, beams, kv_heads, steps, dtype = 2, 3, 2, 2, torch.bfloat16
    return {
        "q": torch.zeros(batch, beams, q_heads, head_dim, dtype=dtype),
        "k_pages": torch.zeros(5, page_size, kv_heads, head_dim, dtype=dtype),
        "v_pages": torch.zeros(5, page_size, kv_heads, head_dim, dtype=dtype),
        "page_table": torch.zeros(batch, 2, dtype=torch.int32),
        "context_len": torch.zeros(batch, dtype=torch.int32),
        "k_beams": torch.zeros(3, steps, beams, kv_heads, head_dim, dtype=dtype),
        "v_beams": torch.zeros(3, steps, beams, kv_heads, head_dim, dtype=dtype),
        "slot": torch.zeros(batch, dtype=torch.int32),
        "ancestor": torch.zeros(batch, steps, beams, dtype=torch.int32),
        "step": torch.zeros(batch, dtype=torch.int32),
        "width": torch.zeros(batch, dtype=torch.int32),
        "out": torch.zeros(batch, beams, q_heads, head_dim, dtype=dtype),
    }


def wrong(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    return {**tensors(), name: tensor}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (tensors(head_dim=96), "96"),
        (tensors(q_heads=5), "5 query heads over 2"),
        (tensors(page_size=24), "page_size 24"),
        (tensors(page_size=8), "page_size 8"),
        (wrong("q", torch.zeros(2, 3, 128, 4, dtype=torch.bfloat16).transpose(2, 3)), "strides"),
        (wrong("v_pages", tensors()["v_pages"].half()), "v_pages"),
        (wrong("k_pages", torch.zeros(5, 2, 16, 128, dtype=torch.bfloat16).transpose(1, 2)), "_pages"),
        (wrong("page_table", torch.zeros(3, 2, dtype=torch.int32)), "page_table"),
        (wrong("v_beams", tensors()["v_beams"][:, :1]), "v_beams"),
        (wrong("ancestor", torch.zeros(2, 2, 4, dtype=torch.int32)), "ancestor"),
        (wrong("out", torch.zeros(2, 3, 4, 128)), "out"),
    ],
)
def test_what_the_kernels_would_misread_is_refused(arguments: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode_attention.decode_attention(**arguments, scale=1.0)


def test_merges_of_different_rows_are_refused() -> None:
    out, lse = torch.zeros(2, 3, 4, 128), torch.zeros(2, 3, 4)
    with pytest.raises(ValueError, match="same rows"):
        merge_attention.merge_attention(out, lse, out[:, :2], lse[:, :2], out)
    with pytest.raises(ValueError, match="head_dim 96"):
        merge_attention.merge_attention(out[..., :96], lse, out[..., :96], lse, out[..., :96])
    strided = torch.zeros(2, 4, 3, 128).transpose(1, 2)
    with pytest.raises(ValueError, match="contiguous"):
        merge_attention.merge_attention(out, lse, strided, lse, out)
