"""Decode attention on Hopper, context and own keys in one kernel; see decode_attention_sm90.cu."""

from dataclasses import dataclass
from itertools import product
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kernels_cupy.hopper import ARCH, GROUPS, HEAD_DIMS, NEEDS, ROWS, THREADS, row_map, shared_bytes
from kernels_cupy.loader import Define, Instance, ceil_div, dtype_name, f32, i32, kernel, multiprocessors, ptr
from kernels_cupy.merge_attention import merge_partials

__all__ = ["INSTANCES", "NEEDS", "decode_attention", "plan"]

STEM: Final = "decode_attention_sm90"
ENTRY: Final = "grinf_decode_attention_sm90"
TILES_IN_SHARED: Final = 7  # queries, own keys and values, two stages of context keys and of values
MAX_SPLITS: Final = 16
MIN_SPLIT_BLOCKS: Final = 2  # a shorter part costs more in the merge than it saves
MIN_PAGE: Final = 16
MAX_CHUNKS: Final = 2**31  # the kernel counts 16-byte chunks in 32 bits

INSTANCES: Final = tuple(
    Instance(
        STEM,
        ENTRY,
        tuple(zip(("DTYPE", "HEAD_DIM", "GROUP", "PAGE_SIZE", "OWN_LAST"), values, strict=True)),
        arches=(ARCH,),
        default=values[:4] == ("BF16", 128, 2, 64),
    )
    for values in product(("BF16", "FP16"), HEAD_DIMS, GROUPS, (16, 64, 128), (0, 1))
)


@dataclass(frozen=True, slots=True)
class Grid:
    """How the attention of a bucket is cut up; a function of the bucket's shape alone.

    Attributes:
        splits: Parts of each request's context.
        blocks: Thread blocks; each takes every blocks-th tile.
        own_last: A block has one tile at most, and attends to the context before its own keys have come.
    """

    splits: int
    blocks: int
    own_last: bool


def plan(batch: int, width: int, kv_heads: int, group: int, max_context: int, processors: int) -> Grid:
    """Fill the card once, by splitting contexts where the beams alone leave multiprocessors idle.

    Args:
        batch, width: The bucket.
        kv_heads, group: Heads of the model.
        max_context: Tokens that the page table can name for one request.
        processors: Multiprocessors of the card; each holds one thread block.
    """
    tiles = batch * kv_heads * ceil_div(width * group, ROWS)
    useful = ceil_div(ceil_div(max_context, ROWS), MIN_SPLIT_BLOCKS)
    splits = max(1, min(processors // tiles, useful, MAX_SPLITS))
    return Grid(splits, min(tiles * splits, processors), tiles * splits <= processors)


def decode_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    context_len: Tensor,
    k_beams: Tensor,
    v_beams: Tensor,
    slot: Tensor,
    ancestor: Tensor,
    step: Tensor,
    width: Tensor,
    scale: float,
    out: Tensor,
) -> None:
    """Write the attention of every live beam over its request's context and its own keys.

    Args:
        q: [B, W, Hq, D], float16 or bfloat16; heads contiguous, the first two axes may be strided.
        k_pages, v_pages: [pages + 1, page_size, Hkv, D], contiguous.
        page_table: int32 [B, P], contiguous.
        context_len: int32 [B], tokens; 0 for a padding request.
        k_beams, v_beams: [slots + 1, T, W_max, Hkv, D], contiguous.
        slot, step, width: int32 [B]; request b has step[b] + 1 own keys and width[b] live beams.
        ancestor: int32 [B, T, W], contiguous.
        scale: Factor on q·k, positive.
        out: [B, W, Hq, D], contiguous; rows w >= width[b] hold anything.

    Raises:
        ValueError: Shapes or strides that the kernel does not take.
        KernelCompileError: The compiler refuses the kernel.
    """
    batch, beams, q_heads, head_dim = q.shape
    _, page_size, kv_heads, _ = k_pages.shape
    _check(q, k_pages, v_pages, page_table, k_beams, v_beams, ancestor, out)
    max_context, processors = page_table.shape[1] * page_size, multiprocessors(q.device.index or 0)
    grid = plan(batch, beams, kv_heads, q_heads // kv_heads, max_context, processors)
    part = part_lse = None
    if grid.splits > 1:
        part = q.new_empty((grid.splits, *q.shape), dtype=torch.float32)
        part_lse = q.new_empty((grid.splits, *q.shape[:-1]), dtype=torch.float32)
    defines: dict[str, Define] = {
        "DTYPE": dtype_name(q.dtype),
        "HEAD_DIM": head_dim,
        "GROUP": q_heads // kv_heads,
        "PAGE_SIZE": page_size,
        "OWN_LAST": int(grid.own_last),
    }
    tables = (page_table, context_len, slot, ancestor, step, width)
    sizes = (batch, beams, kv_heads, page_table.shape[1], *k_beams.shape[1:3], grid.splits)
    kernel(STEM, ENTRY, defines, shared_bytes(TILES_IN_SHARED, head_dim), ARCH)(
        (grid.blocks,),
        (THREADS,),
        (
            *(row_map(pages.flatten(0, 1), min(page_size, ROWS)) for pages in (k_pages, v_pages)),
            *(ptr(tensor) for tensor in (q, k_beams, v_beams, *tables, out, part, part_lse)),
            *(np.int64(stride) for stride in q.stride()[:2]),
            *(i32(size) for size in sizes),
            f32(scale),
        ),
    )
    if part is not None and part_lse is not None:
        merge_partials(part, part_lse, None, None, out, None)


def _check(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    k_beams: Tensor,
    v_beams: Tensor,
    ancestor: Tensor,
    out: Tensor,
) -> None:
    """Refuse what no instance takes."""
    batch, beams, q_heads, head_dim = q.shape
    _, page_size, kv_heads, _ = k_pages.shape
    if head_dim not in HEAD_DIMS or q_heads % kv_heads or q_heads // kv_heads not in GROUPS:
        raise ValueError(f"{STEM} has no instance for {q_heads} query and {kv_heads} key heads of {head_dim}")
    if page_size < MIN_PAGE or page_size & (page_size - 1):
        raise ValueError(f"page_size {page_size} is not a power of two of at least {MIN_PAGE}")
    if q.stride()[2:] != (head_dim, 1) or any(stride % 8 for stride in q.stride()[:2]) or ptr(q) % 16:
        raise ValueError(f"q with strides {q.stride()} is not heads of {head_dim} at 16-byte boundaries")
    pools = {"k_pages": k_pages, "v_pages": v_pages, "k_beams": k_beams, "v_beams": v_beams}
    for name, pool in pools.items():
        if pool.shape[-2:] != (kv_heads, head_dim) or pool.dtype != q.dtype:
            raise ValueError(f"{name} is {pool.dtype} {tuple(pool.shape)}, q is {q.dtype} {tuple(q.shape)}")
    for name, tensor in {**pools, "page_table": page_table, "ancestor": ancestor, "out": out}.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} with strides {tensor.stride()} is not contiguous")
    if max(k_beams.numel(), batch * q.stride(0)) // 8 >= MAX_CHUNKS:
        raise ValueError(f"a pool of {tuple(k_beams.shape)} or queries of {tuple(q.shape)} exceed 32 GiB")
    if out.shape != q.shape or ancestor.shape != (batch, k_beams.shape[1], beams):
        raise ValueError(
            f"out {tuple(out.shape)} or ancestor {tuple(ancestor.shape)} do not fit {tuple(q.shape)}"
        )
