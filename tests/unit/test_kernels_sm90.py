"""How the Hopper attention kernels cut a batch into tiles and splits."""

import pytest

from kernels_cupy import decode_attention_sm90, prefill_attention_sm90
from kernels_cupy.decode_attention_sm90 import MAX_SPLITS, plan
from kernels_cupy.hopper import HEAD_DIMS, ROWS, shared_bytes

H200 = 132
OPT_IN_SHARED_BYTES = 227 * 1024


def test_a_wide_bucket_is_one_wave_without_splits():
    grid = plan(1, 900, 8, 2, 5000, H200)
    assert (grid.splits, grid.blocks, grid.own_last) == (1, 15 * 8, True)


def test_a_large_batch_fills_the_card_and_no_more():
    grid = plan(8, 900, 8, 2, 5000, H200)
    assert (grid.splits, grid.blocks, grid.own_last) == (1, H200, False)


@pytest.mark.parametrize(
    ("width", "max_context", "splits"),
    [
        (300, 5000, 3),  # 40 tiles on 132 multiprocessors
        (20, 5000, MAX_SPLITS),
        (20, 1000, 4),  # no part under two key blocks
        (20, ROWS, 1),
        (20, 0, 1),
    ],
)
def test_a_narrow_bucket_splits_contexts(width, max_context, splits):
    assert plan(1, width, 8, 2, max_context, H200).splits == splits


def test_splits_never_make_a_second_wave():
    for width in range(1, 1000, 37):
        grid = plan(2, width, 8, 2, 5000, H200)
        tiles = 2 * 8 * -(-width * 2 // ROWS)
        assert grid.blocks <= H200
        assert grid.splits == 1 or tiles * grid.splits <= H200
        assert grid.own_last == (tiles * grid.splits == grid.blocks)


def test_few_prompts_take_no_more_blocks_than_tiles():
    assert prefill_attention_sm90.blocks(64, 1, 8, 2, H200) == 2 * 8
    assert prefill_attention_sm90.blocks(4096, 8, 8, 2, H200) == H200


@pytest.mark.parametrize("kernel", [decode_attention_sm90, prefill_attention_sm90])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_thread_block_fits_into_shared_memory(kernel, head_dim):
    assert shared_bytes(kernel.TILES_IN_SHARED, head_dim) <= OPT_IN_SHARED_BYTES
