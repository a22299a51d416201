"""Free search: exact top-K over live beams x vocabulary, and the normaliser of rows; see vocab_topk.cu."""

from itertools import product
from typing import Any, Final

import torch
from torch import Tensor

from kernels_cupy.loader import Instance, Needs, ceil_div, dtype_name, i32, kernel, ptr
from kernels_cupy.selection import (
    RESCAN_LEAVES,
    SCAN_THREADS,
    SELECT_THREADS,
    Beams,
    Limits,
    Path,
    Shapes,
    allocate,
    check_widths,
    finish_blocks,
    max_picked,
    new_beams,
    pointers,
)

STEM: Final = "vocab_topk"
NEEDS: Final = Needs(sm_min=80, dtypes=("bfloat16", "float16", "float32"))
GROUP: Final = 4096  # columns of a group of tiles
TILES: Final = (128, 512)  # columns of a tile, the leaf group
LIST: Final = 4096  # candidates of a row that `topk` scores select in shared memory
SCORES: Final = ("vocab", "topk")
INSTANCES: Final = tuple(
    Instance(
        STEM,
        "grinf_group_columns",
        (("DTYPE", dtype), ("ALIGNED", aligned), ("ROW_THREADS", threads), ("MODE", mode), ("TILE", columns)),
        default=(dtype, aligned, threads) == ("BF16", 1, 256),
    )
    for dtype, aligned, threads, (mode, columns) in product(
        ("BF16", "FP16", "FP32"), (0, 1), (128, 256), (*product(("GIVEN", "FULL"), TILES), ("TOPK", TILES[0]))
    )
)


def row_threads(columns: int) -> int:
    """Threads that stream one row: a short row is over before many threads have started."""
    return 128 if columns <= 16384 else 256


def tile(mode: str, rows: int, width: int, columns: int) -> int:
    """Columns of a tile: few for `topk` scores, which seek the best logits of a row in its best tiles.

    And few where `rows` beams have fewer large tiles than the `width` beams they yield: every tile would be
    looked at again, with nothing to tell which of its candidates matter.
    """
    small, large = TILES
    return small if mode == "TOPK" or rows * ceil_div(columns, large) <= width else large


def row_groups(columns: int) -> int:
    """Groups of tiles of one row."""
    return ceil_div(columns, GROUP)


def group_bytes(columns: int, mode: str, tile_columns: int) -> int:
    """Shared memory of a block that groups a row: its tiles' maxima, and the list of its best logits."""
    tiles = ceil_div(columns, tile_columns)
    return ceil_div(tiles, 4) * 16 + (8 * LIST if mode == "TOPK" else 0)


def workspace(batch: int, rows: int, width: int, columns: int, tile_columns: int) -> Shapes:
    """Dtype and shape of every intermediate, by the names of vocab_topk.cu; `rows` beams yield `width`."""
    groups = row_groups(columns)
    return {
        "log_z": (torch.float32, (batch, rows)),
        "cut": (torch.int64, (batch, rows)),
        "group_key": (torch.int32, (batch, rows, groups)),
        "tile_key": (torch.int32, (batch, rows, groups, GROUP // tile_columns)),
        "picked": (torch.int32, (batch, max_picked(width))),
        "num_picked": (torch.int32, (batch,)),
        "floor_key": (torch.int32, (batch,)),
        "survivors": (torch.int64, (batch, max_picked(width), tile_columns)),
        "num_survivors": (torch.int32, (batch,)),
    }


def row_logsumexp(logits: Tensor) -> Tensor:
    """See `grinf.ops.contracts.RowLogSumExp`.

    Raises:
        ValueError: Logits that are not contiguous [rows, V].
    """
    if logits.dim() != 2 or not logits.is_contiguous():
        raise ValueError(f"logits must be contiguous [rows, V], not {tuple(logits.shape)}")
    rows, columns = logits.shape
    log_z = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        launch = kernel(STEM, "grinf_row_logsumexp", _defines(logits, "FULL", TILES[1]))
        launch((rows,), (row_threads(columns),), (ptr(logits), i32(columns), ptr(log_z)))
    return log_z


def select_unconstrained(
    logits: Tensor, path: Path, limits: Limits, score: str, log_z: Tensor | None
) -> Beams:
    """See `grinf.ops.contracts.SelectUnconstrained`.

    Raises:
        ValueError: Shapes or widths that the kernels were not built for, or an unknown score mode.
    """
    beams, _ = select_and_normalise(logits, path, limits, score, log_z)
    return beams


def select_and_normalise(
    logits: Tensor, path: Path, limits: Limits, score: str, log_z: Tensor | None
) -> tuple[Beams, Tensor]:
    """As `select_unconstrained`, and the normalisers float32 [B, W] that the scores were made with."""
    check_widths(logits, path, limits)
    if score not in SCORES or (score == "topk" and log_z is not None):
        raise ValueError(f"score {score!r} with log_z {'given' if log_z is not None else 'missing'}")
    batch, rows, columns = logits.shape
    if rows * columns >= 2**32:
        raise ValueError(f"{rows} beams x {columns} columns do not fit into 32-bit positions")
    mode = "TOPK" if score == "topk" else "FULL" if log_z is None else "GIVEN"
    tile_columns = tile(mode, rows, limits.width, columns)
    defines = _defines(logits, mode, tile_columns)
    work = allocate(workspace(batch, rows, limits.width, columns, tile_columns), logits.device)
    log_z = work["log_z"] if log_z is None else log_z
    cut = ptr(work["cut"]) if score == "topk" else 0
    groups, pool_width = i32(row_groups(columns)), i32(path.cum.shape[1])
    width, picked = limits.width, max_picked(limits.width)

    def launch(entry: str, grid: tuple[int, ...], threads: int, *args: Any, smem_bytes: int = 0) -> None:
        kernel(STEM, entry, defines, smem_bytes)(grid, (threads,), args)

    launch(
        "grinf_group_columns", (rows, batch), row_threads(columns),
        ptr(logits), i32(columns), groups, ptr(path.slot), ptr(path.cum), ptr(path.width), pool_width,
        ptr(limits.score_k), ptr(log_z), cut, *pointers(work, "group_key", "tile_key", "num_survivors"),
        smem_bytes=group_bytes(columns, mode, tile_columns),
    )  # fmt: skip
    launch(
        "grinf_pick_groups", (batch,), SELECT_THREADS,
        ptr(path.slot), ptr(path.width), i32(rows), groups, *pointers(work, "group_key", "tile_key"),
        ptr(limits.next_width), i32(picked), *pointers(work, "picked", "num_picked", "floor_key"),
    )  # fmt: skip
    launch(
        "grinf_rescan_columns", (ceil_div(picked, RESCAN_LEAVES), batch), SCAN_THREADS,
        ptr(logits), i32(rows), i32(columns), groups, ptr(path.slot), ptr(path.cum), pool_width,
        ptr(log_z), cut, *pointers(work, "picked", "num_picked", "floor_key"), i32(picked),
        *pointers(work, "survivors", "num_survivors"),
    )  # fmt: skip
    out = new_beams(batch, width, logits.device)
    launch(
        "grinf_finish_selection", (finish_blocks(batch), batch), SELECT_THREADS,
        *pointers(work, "survivors", "num_survivors"),
        ptr(limits.next_width), ptr(limits.margin), ptr(limits.min_width),
        i32(columns), i32(width), i32(picked), *out.pointers(),
    )  # fmt: skip
    return out, log_z


def _defines(logits: Tensor, mode: str, tile_columns: int) -> dict[str, str | int]:
    """Compile constants for rows of these logits; a row is aligned where all rows start at 16 bytes."""
    columns = logits.shape[-1]
    aligned = columns * logits.element_size() % 16 == 0 and logits.data_ptr() % 16 == 0
    return {
        "DTYPE": dtype_name(logits.dtype),
        "ALIGNED": int(aligned),
        "ROW_THREADS": row_threads(columns),
        "MODE": mode,
        "TILE": tile_columns,
    }
