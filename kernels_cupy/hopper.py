"""What the kernels of attention_sm90.cuh share: sizes of tiles, and maps for the copy engine."""

import ctypes
import functools
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kernels_cupy.loader import Needs, ptr

ARCH: Final = "sm_90a"
HEAD_DIMS: Final = (64, 128)
GROUPS: Final = (1, 2, 4, 8)
NEEDS: Final = Needs(sm_min=90, sm_max=90, head_dims=HEAD_DIMS, groups=GROUPS)

THREADS: Final = 384
ROWS: Final = 128  # rows of a tile, keys of a block
CONTROL_BYTES: Final = 2048  # barriers and what else a thread block keeps beside its tiles

# Values of the driver's enumerations (cuda.h).
_TENSOR_TYPES: Final = {torch.float16: 6, torch.bfloat16: 9}
_SWIZZLE_128B: Final = 3
_PROMOTE_256B: Final = 3

_MAP_TYPE: Final = np.dtype([("opaque", np.uint8, 128)])  # CuPy passes arrays of one element by value
_MAP_ALIGNMENT: Final = 64
_PANEL: Final = 64  # columns of a swizzled panel of 16-bit elements


def shared_bytes(tiles: int, head_dim: int) -> int:
    """Dynamic shared memory of a thread block that holds so many tiles of 16-bit elements."""
    return tiles * ROWS * head_dim * 2 + CONTROL_BYTES


def row_map(rows: Tensor, box_rows: int, box_heads: int = 1) -> np.ndarray:
    """Describe rows of heads to the copy engine: the bytes of a CUtensorMap.

    Args:
        rows: [N, H, D], float16 or bfloat16; heads contiguous, rows at multiples of 16 bytes.
        box_rows, box_heads: What one copy brings, of 64 columns; what lies past the rows reads as zero.

    Raises:
        ValueError: The driver refuses the description.
    """
    return _row_map(ptr(rows), *rows.shape, rows.stride(0), rows.dtype, box_rows, box_heads)


@functools.lru_cache(maxsize=1024)
def _row_map(
    pointer: int,
    rows: int,
    heads: int,
    head_dim: int,
    row_stride: int,
    dtype: torch.dtype,
    box_rows: int,
    box_heads: int,
) -> np.ndarray:
    storage = np.zeros(_MAP_TYPE.itemsize + _MAP_ALIGNMENT, dtype=np.uint8)
    start = -storage.ctypes.data % _MAP_ALIGNMENT
    tensor_map = storage[start : start + _MAP_TYPE.itemsize]
    status = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(
        ctypes.c_void_p(tensor_map.ctypes.data),
        ctypes.c_int(_TENSOR_TYPES[dtype]),
        ctypes.c_uint32(3),
        ctypes.c_void_p(pointer),
        (ctypes.c_uint64 * 3)(head_dim, heads, rows),
        (ctypes.c_uint64 * 2)(head_dim * 2, row_stride * 2),
        (ctypes.c_uint32 * 3)(_PANEL, box_heads, box_rows),
        (ctypes.c_uint32 * 3)(1, 1, 1),
        ctypes.c_int(0),  # no interleaving
        ctypes.c_int(_SWIZZLE_128B),
        ctypes.c_int(_PROMOTE_256B),
        ctypes.c_int(0),  # out of bounds reads as zero
    )
    if status:
        raise ValueError(f"CUDA error {status} for {rows} rows of {heads} x {head_dim}, {row_stride} apart")
    return tensor_map.view(_MAP_TYPE)
