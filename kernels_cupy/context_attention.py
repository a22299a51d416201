"""K1, context attention on tensor cores of any GPU since sm_80; see context_attention.cu."""

import math
from dataclasses import dataclass
from itertools import product
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kernels_cupy.loader import (
    ARCHES,
    Define,
    Instance,
    Needs,
    ceil_div,
    dtype_name,
    f32,
    i32,
    kernel,
    multiprocessors,
    ptr,
    shared_per_multiprocessor,
)
from kernels_cupy.merge_attention import merge_partials

STEM: Final = "context_attention"
ENTRY: Final = "grinf_context_attention"
FUSED_ENTRY: Final = "grinf_decode_attention"
NEEDS: Final = Needs(sm_min=80, head_dims=(64, 128))

THREADS: Final = 128
WARPS: Final = 4
STAGES: Final = 2
RESERVED_BYTES: Final = 1024  # of shared memory, by the driver, per thread block
MIN_PAGE: Final = 16
MAX_SPLITS: Final = 16
MAX_POOL_BYTES: Final = 1 << 36  # the kernel counts 16-byte chunks in 32 bits


@dataclass(frozen=True, slots=True)
class Grid:
    """How the context attention of a bucket is cut up; a function of the bucket's shape and the device alone.

    Attributes:
        m_tiles: Sixteens of rows per warp.
        block_n: Keys of a tile.
        splits: Parts of each context, at most.
        min_split: Fewest keys of a part, a multiple of 64; a shorter context is one part.
        row_blocks: Thread blocks for the rows of one head of one request.
    """

    m_tiles: int
    block_n: int
    splits: int
    min_split: int
    row_blocks: int


def shared_bytes(m_tiles: int, block_n: int, head_dim: int) -> int:
    """Dynamic shared memory of a thread block: queries, and two stages of keys and of values."""
    return (16 * WARPS * m_tiles + 2 * STAGES * block_n) * head_dim * 2


def tile_sizes(rows: int, head_dim: int, shared: int, fused: bool) -> tuple[int, int]:
    """Choose (m_tiles, block_n): the largest tiles of which a multiprocessor holds two blocks.

    One block computes while the other waits. K1 alone has no registers to spare for tiles of 64 keys.
    """
    rows_per_warp = (2, 1) if rows > 16 * WARPS else (1,)
    sizes = product(rows_per_warp, (64, 32) if fused else (32,))
    fits = (s for s in sizes if 2 * (shared_bytes(*s, head_dim) + RESERVED_BYTES) <= shared)
    return next(fits, (1, 32))


# Shared memory of a multiprocessor.
SHARED: Final = {"sm_80": 164 << 10, "sm_89": 100 << 10, "sm_90a": 228 << 10, "sm_100": 228 << 10}


def arches(sizes: tuple[int, int], head_dim: int, fused: bool) -> tuple[str, ...]:
    """Return the architectures that use these tile sizes, for few rows or for many."""
    few, many = 1, 1 << 16
    return tuple(
        a for a in ARCHES if sizes in {tile_sizes(n, head_dim, SHARED[a], fused) for n in (few, many)}
    )


INSTANCES: Final = tuple(
    Instance(
        STEM,
        FUSED_ENTRY if fused else ENTRY,
        (
            ("DTYPE", dtype),
            ("HEAD_DIM", head_dim),
            ("GROUP", group),
            ("KV_HEADS", 8),
            ("PAGE_SIZE", page_size),
            ("M_TILES", sizes[0]),
            ("BLOCK_N", sizes[1]),
            ("FUSED", int(fused)),
        ),
        arches=arches(sizes, head_dim, fused),
        default=(dtype, head_dim, group, page_size) == ("BF16", 128, 2, 64),
    )
    for dtype, head_dim, group, page_size, sizes, fused in product(
        ("BF16", "FP16"), (64, 128), (1, 2, 4, 8), (16, 64), product((1, 2), (32, 64)), (False, True)
    )
    if arches(sizes, head_dim, fused)
)


def plan(
    batch: int,
    width: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    max_context: int,
    fused: bool,
    processors: int,
    shared: int,
) -> Grid:
    """Choose tiles and splits: contexts are split only where the beams alone leave multiprocessors idle.

    A part costs a round trip of its rows through memory in fp32. Where few parts fill the device there are
    many rows, and a part has to be long to earn that.

    Args:
        batch, width: The bucket.
        kv_heads, group, head_dim: Of the model.
        max_context: Tokens that the page table can name for one request.
        fused: Whether K2 and K3 run in the epilogue.
        processors: Multiprocessors of the device.
        shared: Bytes of shared memory of each.
    """
    rows = width * group
    m_tiles, block_n = tile_sizes(rows, head_dim, shared, fused)
    row_blocks = ceil_div(rows, 16 * WARPS * m_tiles)
    room = 2 * processors // (batch * kv_heads * row_blocks)
    min_split = 256 if room >= 4 else 1024
    splits = max(1, min(room, ceil_div(max_context, min_split), MAX_SPLITS))
    return Grid(m_tiles, block_n, splits, min_split, row_blocks)


def context_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    context_len: Tensor,
    width: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attend every live beam of a request to that request's shared context (K1).

    Args:
        q: [B, W, Hq, D], float16 or bfloat16; the first two axes may be strided.
        k_pages, v_pages: [pages + 1, page_size, Hkv, D], page by page contiguous.
        page_table: int32 [B, P], contiguous.
        context_len, width: int32 [B]; tokens, live beams.
        scale: Factor on q·k.

    Returns:
        out: float32 [B, W, Hq, D]; 0 where context_len is 0.
        lse: float32 [B, W, Hq], natural log; -inf where context_len is 0. Rows w >= width[b] hold anything.

    Raises:
        ValueError: Shapes or strides that the kernel does not take.
        KernelCompileError: The compiler refuses the kernel.
    """
    check_queries(q, k_pages.shape[2])
    check_pages(q, k_pages, v_pages, page_table)
    grid = bucket_plan(q, k_pages, page_table, fused=False)
    part, part_lse = new_partials(q, grid.splits)
    launch(ENTRY, q, k_pages, v_pages, page_table, context_len, width, scale, grid, part, part_lse, NO_BEAMS)
    if grid.splits == 1:
        return part[0], part_lse[0]
    out, lse = torch.empty_like(part[0]), torch.empty_like(part_lse[0])
    merge_partials(part, part_lse, None, None, out, lse)
    return out, lse


def bucket_plan(q: Tensor, k_pages: Tensor, page_table: Tensor, fused: bool) -> Grid:
    """The plan of a call."""
    batch, width, q_heads, head_dim = q.shape
    _, page_size, kv_heads, _ = k_pages.shape
    max_context, device = page_table.shape[1] * page_size, q.device.index or 0
    hardware = multiprocessors(device), shared_per_multiprocessor(device)
    return plan(batch, width, kv_heads, q_heads // kv_heads, head_dim, max_context, fused, *hardware)


def new_partials(q: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """Workspace for the parts of each context: float32 [splits, B, W, Hq, D] and [splits, B, W, Hq]."""
    shape = (splits, *q.shape)
    return q.new_empty(shape, dtype=torch.float32), q.new_empty(shape[:-1], dtype=torch.float32)


# The fused entry's own arguments: k_beams, v_beams, slot, ancestor, step, out, two strides, steps.
NO_BEAMS: Final = (*(0,) * 6, np.int64(0), np.int64(0), i32(0))


def launch(
    entry: str,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    context_len: Tensor,
    width: Tensor,
    scale: float,
    grid: Grid,
    part: Tensor | None,
    part_lse: Tensor | None,
    beams: tuple[int | np.generic, ...],
) -> None:
    """Launch an entry of the file; `beams` are the arguments that only the fused one reads."""
    batch, rows, q_heads, head_dim = q.shape
    _, page_size, kv_heads, _ = k_pages.shape
    defines: dict[str, Define] = {
        "DTYPE": dtype_name(q.dtype),
        "HEAD_DIM": head_dim,
        "GROUP": q_heads // kv_heads,
        "KV_HEADS": kv_heads,
        "PAGE_SIZE": page_size,
        "M_TILES": grid.m_tiles,
        "BLOCK_N": grid.block_n,
        "FUSED": int(entry == FUSED_ENTRY),
    }
    pointers = (q, k_pages, v_pages, page_table, context_len, width, part, part_lse)
    sizes = (k_pages.stride(0) // 8, page_table.shape[1], rows, grid.splits, grid.min_split)
    kernel(STEM, entry, defines, shared_bytes(grid.m_tiles, grid.block_n, head_dim))(
        (grid.row_blocks, kv_heads, batch * grid.splits),
        (THREADS,),
        (
            *(ptr(tensor) for tensor in pointers),
            *(np.int64(stride) for stride in q.stride()[:2]),
            *(i32(size) for size in sizes),
            f32(scale * math.log2(math.e)),
            *beams,
        ),
    )


def check_queries(q: Tensor, kv_heads: int) -> None:
    """Refuse queries that no instance takes."""
    q_heads, head_dim = q.shape[2:]
    if head_dim not in (NEEDS.head_dims or ()) or q_heads % kv_heads:
        raise ValueError(
            f"{STEM} has no instance for {q_heads} query heads over {kv_heads} of {head_dim}; {NEEDS}"
        )
    if q.stride()[2:] != (head_dim, 1) or any(stride % 8 for stride in q.stride()[:2]) or ptr(q) % 16:
        raise ValueError(f"q with strides {q.stride()} is not heads of {head_dim} at 16-byte boundaries")


def check_pages(q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor) -> None:
    """Refuse pages that the kernel would misread."""
    pages, page_size, kv_heads, head_dim = k_pages.shape
    if page_size < MIN_PAGE or page_size & (page_size - 1):
        raise ValueError(f"page_size {page_size} is not a power of two of at least {MIN_PAGE}")
    for name, pool in (("k_pages", k_pages), ("v_pages", v_pages)):
        if (
            pool.shape != k_pages.shape
            or pool.stride() != k_pages.stride()
            or pool.dtype != q.dtype
            or head_dim != q.shape[3]
        ):
            raise ValueError(
                f"{name}, {pool.dtype} {tuple(pool.shape)}, does not fit q, {q.dtype} {tuple(q.shape)}"
            )
        if pool.stride()[1:] != (kv_heads * head_dim, head_dim, 1) or pool.stride(0) % 8 or ptr(pool) % 16:
            raise ValueError(f"{name} with strides {pool.stride()} is not pages of contiguous keys")
        if pages * pool.stride(0) * pool.element_size() > MAX_POOL_BYTES:
            raise ValueError(f"{name} spans more than {MAX_POOL_BYTES >> 30} GiB; use fewer pages")
    if page_table.shape[0] != q.shape[0] or not page_table.is_contiguous():
        raise ValueError(f"page_table {tuple(page_table.shape)} is not one contiguous row a request")
