"""Decode attention on Hopper (sm_90a): context and own keys of every beam in one kernel; see decode_attention_sm90.cu."""

import ctypes
import functools
from dataclasses import dataclass
from itertools import product
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kernels_cupy.loader import Define, Instance, Needs, ceil_div, dtype_name, f32, i32, kernel, multiprocessors, ptr

STEM: Final = "decode_attention_sm90"
ENTRY: Final = "grinf_decode_attention_sm90"
MERGE_ENTRY: Final = "grinf_merge_splits"
ARCH: Final = "sm_90a"
NEEDS: Final = Needs(sm_min=90, sm_max=90, head_dims=(64, 128), groups=(1, 2, 4, 8))

ROWS: Final = 128  # rows of a tile and keys of a context block
TILES_IN_SHARED: Final = 7  # queries, own keys and values, two stages of context keys and of values
CONTROL_BYTES: Final = 2048  # barriers, the tile at hand, the rows of its own keys
MAX_SPLITS: Final = 16
MIN_SPLIT_BLOCKS: Final = 2  # a shorter part costs more in the merge than it saves
THREADS: Final = 384
MERGE_ROWS: Final = 8  # rows of a block of the merge

INSTANCES: Final = tuple(
    Instance(
        STEM,
        entry,
        (("DTYPE", dtype), ("HEAD_DIM", head_dim), ("GROUP", group), ("PAGE_SIZE", page_size)),
        arches=(ARCH,),
        default=(dtype, head_dim, group, page_size) == ("BF16", 128, 2, 64),
    )
    for entry in (ENTRY, MERGE_ENTRY)
    for dtype, head_dim, group, page_size in product(("BF16", "FP16"), (64, 128), (1, 2, 4, 8), (16, 64, 128))
)


@dataclass(frozen=True, slots=True)
class Grid:
    """How a bucket's attention is cut up; a function of the bucket's shape alone.

    Attributes:
        splits: Parts of each request's context.
        blocks: Thread blocks, each of which takes every blocks-th tile.
        merge_blocks: Thread blocks of the merge; 0: nothing to merge.
    """

    splits: int
    blocks: int
    merge_blocks: int


def plan(batch: int, width: int, q_heads: int, kv_heads: int, max_context: int, processors: int) -> Grid:
    """Fill the card's multiprocessors once, by splitting contexts where the beams alone do not.

    Args:
        batch, width: The bucket.
        q_heads, kv_heads: Heads of the model.
        max_context: Tokens that the page table can name for one request.
        processors: Multiprocessors of the card; each holds one thread block.
    """
    tiles = batch * kv_heads * ceil_div(width * (q_heads // kv_heads), ROWS)
    useful = ceil_div(ceil_div(max_context, ROWS), MIN_SPLIT_BLOCKS)
    splits = max(1, min(processors // tiles, useful, MAX_SPLITS))
    merge_blocks = ceil_div(batch * width * q_heads, MERGE_ROWS) if splits > 1 else 0
    return Grid(splits, min(tiles * splits, processors), merge_blocks)


def shared_bytes(head_dim: int) -> int:
    """Dynamic shared memory of a thread block."""
    return TILES_IN_SHARED * ROWS * head_dim * 2 + CONTROL_BYTES


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
        out: [B, W, Hq, D], contiguous; rows w >= width[b] are not written.

    Raises:
        ValueError: Shapes or strides that the kernel does not take.
        KernelCompileError: The compiler refuses the kernel.
    """
    batch, beams, q_heads, head_dim = q.shape
    page_size, kv_heads = k_pages.shape[1:3]
    _check(q, k_pages, v_pages, page_table, k_beams, v_beams, ancestor, out)
    grid = plan(batch, beams, q_heads, kv_heads, page_table.shape[1] * page_size, multiprocessors(q.device.index or 0))
    defines = {
        "DTYPE": dtype_name(q.dtype),
        "HEAD_DIM": head_dim,
        "GROUP": q_heads // kv_heads,
        "PAGE_SIZE": page_size,
    }
    part = part_lse = None
    if grid.splits > 1:
        part = q.new_empty((grid.splits, batch, beams, q_heads, head_dim), dtype=torch.float32)
        part_lse = q.new_empty((grid.splits, batch, beams, q_heads), dtype=torch.float32)
    pointers = (q, k_beams, v_beams, page_table, context_len, slot, ancestor, step, width, out, part, part_lse)
    sizes = (batch, beams, kv_heads, page_table.shape[1], *k_beams.shape[1:3], grid.splits)
    kernel(STEM, ENTRY, defines, shared_bytes(head_dim), ARCH)(
        (grid.blocks,),
        (THREADS,),
        (
            *(page_map(ptr(pages), *pages.shape, pages.dtype) for pages in (k_pages, v_pages)),
            *(ptr(tensor) for tensor in pointers),
            *(np.int64(stride) for stride in q.stride()[:2]),
            *(i32(size) for size in sizes),
            f32(scale),
        ),
    )
    if grid.splits > 1:
        _merge(defines, grid, part, part_lse, context_len, width, out)


def _merge(
    defines: dict[str, Define],
    grid: Grid,
    part: Tensor | None,
    part_lse: Tensor | None,
    context_len: Tensor,
    width: Tensor,
    out: Tensor,
) -> None:
    batch, beams, heads, _ = out.shape
    pointers = (part, part_lse, context_len, width, out)
    sizes = (batch * beams * heads, beams, heads, grid.splits)
    kernel(STEM, MERGE_ENTRY, defines, arch=ARCH)(
        (grid.merge_blocks,), (MERGE_ROWS * 32,), (*(ptr(t) for t in pointers), *(i32(size) for size in sizes))
    )


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
    batch, beams, q_heads, head_dim = q.shape
    _, page_size, kv_heads, _ = k_pages.shape
    group = q_heads // kv_heads
    if head_dim not in (NEEDS.head_dims or ()) or group not in (NEEDS.groups or ()) or q_heads % kv_heads:
        raise ValueError(f"{STEM} has no instance for {q_heads} query heads over {kv_heads} of {head_dim}; {NEEDS}")
    if page_size < 16 or page_size & (page_size - 1):
        raise ValueError(f"page_size {page_size} is not a power of two of at least 16")
    if q.stride()[2:] != (head_dim, 1) or any(stride % 8 for stride in q.stride()[:2]) or ptr(q) % 16:
        raise ValueError(f"q with strides {q.stride()} is not heads of {head_dim} at 16-byte boundaries")
    pools = {"k_pages": k_pages, "v_pages": v_pages, "k_beams": k_beams, "v_beams": v_beams}
    for name, tensor in pools.items():
        if tensor.shape[-2:] != (kv_heads, head_dim) or tensor.dtype != q.dtype:
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}; q needs {q.dtype} [..., {kv_heads}, {head_dim}]")
    for name, tensor in {**pools, "page_table": page_table, "ancestor": ancestor, "out": out}.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} with strides {tensor.stride()} is not contiguous")
    if out.shape != q.shape or ancestor.shape != (batch, k_beams.shape[1], beams):
        raise ValueError(f"out {tuple(out.shape)} or ancestor {tuple(ancestor.shape)} does not fit q {tuple(q.shape)}")


# Values of the driver's enumerations (cuda.h).
_TENSOR_TYPES: Final = {torch.float16: 6, torch.bfloat16: 9}
_SWIZZLE_128B: Final = 3
_PROMOTE_256B: Final = 3
_MAP_BYTES: Final = 128
_MAP_ALIGNMENT: Final = 64
_MAP_TYPE: Final = np.dtype([("opaque", np.uint8, _MAP_BYTES)])  # CuPy passes arrays of one element by value
_PANEL: Final = 64  # columns of a swizzled panel of 16-bit elements


@functools.lru_cache(maxsize=1024)
def page_map(
    pointer: int, pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> np.ndarray:
    """Describe a page pool to the copy engine: the bytes of a CUtensorMap, passed to the kernel by value.

    Args:
        pointer: Device address of [pages, page_size, kv_heads, head_dim].
        pages, page_size, kv_heads, head_dim: That shape.
        dtype: Its dtype.

    Raises:
        ValueError: The driver refuses the description.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    storage = np.zeros(_MAP_BYTES + _MAP_ALIGNMENT, dtype=np.uint8)
    start = -storage.ctypes.data % _MAP_ALIGNMENT
    tensor_map = storage[start : start + _MAP_BYTES]
    row_bytes = head_dim * 2
    status = driver.cuTensorMapEncodeTiled(
        ctypes.c_void_p(tensor_map.ctypes.data),
        ctypes.c_int(_TENSOR_TYPES[dtype]),
        ctypes.c_uint32(3),
        ctypes.c_void_p(pointer),
        (ctypes.c_uint64 * 3)(head_dim, kv_heads, pages * page_size),
        (ctypes.c_uint64 * 2)(row_bytes, kv_heads * row_bytes),
        (ctypes.c_uint32 * 3)(_PANEL, 1, min(page_size, ROWS)),
        (ctypes.c_uint32 * 3)(1, 1, 1),
        ctypes.c_int(0),  # no interleaving
        ctypes.c_int(_SWIZZLE_128B),
        ctypes.c_int(_PROMOTE_256B),
        ctypes.c_int(0),  # out of bounds reads as zero
    )
    if status:
        raise ValueError(f"cuTensorMapEncodeTiled refuses {pages} pages of {page_size} x {kv_heads} x {head_dim}: {status}")
    return tensor_map.view(_MAP_TYPE)
