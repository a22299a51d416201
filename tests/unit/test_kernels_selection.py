"""Grid arithmetic and workspaces of the selection, element-wise and path kernels; runs without a GPU."""

import math

import pytest
import torch

from kernels_cupy import constrained_topk, elementwise, path, selection, vocab_topk
from kernels_cupy.selection import Beams, Limits, Path, Trie


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def limits(batch: int, width: int) -> Limits:
    return Limits(ints(batch), ints(batch), ints(batch), torch.zeros(batch), ints(batch), width)


def live_path(batch: int, rows: int) -> Path:
    return Path(ints(batch), torch.zeros(batch + 1, rows), ints(batch + 1, rows), ints(batch + 1), rows)


@pytest.mark.parametrize(
    ("capacity", "groups"), [(0, 1), (1, 1), (256, 1), (257, 2), (8192, 32), (7_372_800, 28_800)]
)
def test_groups_cover_the_capacity(capacity: int, groups: int) -> None:
    assert constrained_topk.max_groups(capacity) == groups
    assert groups * constrained_topk.GROUP >= capacity


@pytest.mark.parametrize("batch", [1, 8, 16, 64, 4000])
@pytest.mark.parametrize("capacity", [1, 10, 8192, 1_800_000, 7_372_800])
def test_scan_blocks_are_bounded_and_never_idle_by_design(batch: int, capacity: int) -> None:
    blocks = constrained_topk.scan_blocks(batch, capacity)
    useful = math.ceil(capacity / (constrained_topk.GROUP * constrained_topk.BLOCK_GROUPS))
    assert 1 <= blocks <= useful
    assert blocks >= min(useful, 256)
    assert blocks * batch <= max(4096, 256 * batch)


def test_the_constrained_workspace_grows_with_candidates_not_with_width_times_vocabulary() -> None:
    def of(rows: int, width: int, capacity: int) -> int:
        return selection.num_bytes(constrained_topk.workspace(1, rows, width, capacity))

    assert of(900, 900, 8_000_000) - of(900, 900, 4_000_000) == pytest.approx(4_000_000 * 69 / 256, rel=1e-3)
    assert of(900, 900, 1_000_000) < 1_000_000
    assert of(900, 900, 300) < of(900, 900, 300_000)
    assert selection.num_bytes(constrained_topk.workspace(7, 900, 900, 300)) == 7 * of(900, 900, 300)


def test_a_rescan_has_room_for_every_slot_it_may_look_at() -> None:
    for width, capacity in ((1, 1), (900, 100), (900, 7_372_800), (4096, 4096 * 8192)):
        shapes = constrained_topk.workspace(2, width, width, capacity)
        picked = shapes["picked"][1][1]
        groups = constrained_topk.max_groups(capacity)
        assert picked == min(2 * width, groups * constrained_topk.FAN)
        assert picked >= min(width, math.ceil(capacity / constrained_topk.LEAF))
        assert shapes["survivors"][1] == (2, picked, constrained_topk.LEAF)


@pytest.mark.parametrize("mode", ["GIVEN", "FULL", "TOPK"])
@pytest.mark.parametrize("columns", [1, 127, 4096, 4097, 151_936, 262_144])
def test_tiles_cover_a_row(mode: str, columns: int) -> None:
    tile = vocab_topk.tile(mode, 5, 900, columns)
    shapes = vocab_topk.workspace(3, 5, 900, columns, tile)
    _, rows, groups, fan = shapes["tile_key"][1]
    assert rows == 5
    assert shapes["group_key"][1] == (3, 5, groups)
    assert groups * fan * tile >= columns > (groups - 1) * vocab_topk.GROUP
    listed = 8 * vocab_topk.LIST if mode == "TOPK" else 0
    assert vocab_topk.group_bytes(columns, mode, tile) >= 4 * math.ceil(columns / tile) + listed


def test_a_few_beams_are_cut_into_more_tiles_than_they_yield_beams() -> None:
    for rows in (1, 2, 3, 20, 900):
        tile = vocab_topk.tile("FULL", rows, 900, 151_936)
        assert tile in vocab_topk.TILES
        assert rows * math.ceil(151_936 / tile) > 900


def test_the_free_workspace_is_a_small_part_of_the_logits() -> None:
    tile = vocab_topk.tile("FULL", 900, 900, 151_936)
    shapes = vocab_topk.workspace(1, 900, 900, 151_936, tile)
    assert selection.num_bytes(shapes) < 0.04 * 900 * 151_936 * 2


@pytest.mark.parametrize("hidden", [8, 64, 896, 1024, 4096, 5120, 32_768])
def test_a_row_fits_its_threads(hidden: int) -> None:
    threads = elementwise.row_threads(hidden)
    assert threads & (threads - 1) == 0
    assert 32 <= threads <= 1024
    assert threads * 32 >= hidden
    rows_per_block = max(elementwise.BLOCK, threads) // threads
    assert elementwise.norm_blocks(7200, hidden) == math.ceil(7200 / rows_per_block)


@pytest.mark.parametrize(("heads", "head_dim"), [(3, 64), (32, 128), (48, 128), (8, 128)])
def test_rotation_blocks_cover_every_head(heads: int, head_dim: int) -> None:
    warps = elementwise.rope_blocks(29, heads, head_dim) * 8
    heads_per_warp = elementwise.ROUNDS * 512 // head_dim
    assert warps * heads_per_warp >= 29 * heads


def test_what_the_kernels_were_not_built_for_is_refused() -> None:
    logits = torch.zeros(2, 3, 64)
    with pytest.raises(ValueError, match="contiguous"):
        vocab_topk.select_unconstrained(logits.transpose(1, 2), live_path(2, 64), limits(2, 4), "vocab", None)
    with pytest.raises(ValueError, match="4096"):
        vocab_topk.select_unconstrained(logits, live_path(2, 3), limits(2, 4097), "vocab", None)
    with pytest.raises(ValueError, match="level"):
        vocab_topk.select_unconstrained(logits, live_path(2, 3), limits(2, 4), "level", None)
    trie = Trie(ints(2), ints(9), None, ints(1, 9), ints(1), None, None, 9)
    with pytest.raises(ValueError, match="missing"):
        constrained_topk.select_constrained(logits, live_path(2, 3), trie, limits(2, 4), "given", None)
    with pytest.raises(ValueError, match="32-bit"):
        constrained_topk.select_constrained(
            logits, live_path(2, 3), trie._replace(capacity=2**31), limits(2, 4), "children", None
        )
    with pytest.raises(ValueError, match="multiple of 8"):
        elementwise.add_rms_norm(torch.zeros(2, 12), None, torch.zeros(12), 1e-6)
    with pytest.raises(ValueError, match="multiple of 8"):
        elementwise.swiglu(torch.zeros(2, 12))
    chosen = Beams(torch.zeros(1, 9), ints(1, 9), ints(1, 9), ints(1, 9), ints(1))
    with pytest.raises(ValueError, match="the pools hold 8"):
        path.extend_path(
            ints(1), ints(1), chosen, ints(2, 3, 8), ints(2, 2, 8), torch.zeros(2, 8), ints(2, 8), ints(2)
        )
