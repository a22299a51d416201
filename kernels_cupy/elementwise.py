"""The element-wise work of a layer: residual and RMSNorm, q/k norm with rotation and KV write, SwiGLU."""

from itertools import product
from typing import Final

import torch
from torch import Tensor

from kernels_cupy.loader import Instance, Needs, ceil_div, dtype_name, f32, i32, kernel, ptr

STEM: Final = "elementwise"
NEEDS: Final = Needs(sm_min=80, head_dims=(64, 128))
PACK: Final = 8  # elements of a 16-byte access
BLOCK: Final = 256
PACKS_PER_THREAD: Final = 4
ROUNDS: Final = 2  # heads that a lane takes part in
MAX_HIDDEN: Final = 1024 * PACK * PACKS_PER_THREAD
NORM_ENTRY: Final = "grinf_add_rms_norm"
ROPE_ENTRY: Final = "grinf_qk_norm_rope_write"
SWIGLU_ENTRY: Final = "grinf_swiglu"


def row_threads(hidden: int) -> int:
    """Threads that hold one row of hidden states, at most 32 values each: a power of two, a warp at least."""
    packs = ceil_div(hidden, PACK * PACKS_PER_THREAD)
    return max(32, 1 << (packs - 1).bit_length())


def norm_blocks(rows: int, hidden: int) -> int:
    """Blocks of a residual-and-norm."""
    return ceil_div(rows, max(1, BLOCK // row_threads(hidden)))


def rope_blocks(tokens: int, heads: int, head_dim: int) -> int:
    """Blocks of a q/k norm and rotation; 16 dimensions of a head make a lane, `heads` counts q, k and v."""
    heads_per_warp = ROUNDS * 32 * 16 // head_dim
    return ceil_div(tokens * ceil_div(heads, heads_per_warp), BLOCK // 32)


INSTANCES: Final = (
    *(
        Instance(
            STEM,
            NORM_ENTRY,
            (("DTYPE", dtype), ("HIDDEN", hidden), ("ROW_THREADS", row_threads(hidden))),
            default=(dtype, hidden) == ("BF16", 1024),
        )
        for dtype, hidden in product(("BF16", "FP16"), (896, 1024, 2048, 2560, 4096, 5120, 8192))
    ),
    *(
        Instance(STEM, ROPE_ENTRY, (("DTYPE", dtype), ("HEAD_DIM", head_dim)), default=dtype == "BF16")
        for dtype, head_dim in product(("BF16", "FP16"), (64, 128))
    ),
    *(
        Instance(STEM, SWIGLU_ENTRY, (("DTYPE", dtype), ("FEATURES", features)))
        for dtype, features in product(("BF16", "FP16"), (3072, 6144, 9728, 12288))
    ),
)


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `grinf.ops.contracts.AddRmsNorm`; without a residual the sum is `x` itself.

    Raises:
        ValueError: Strided tensors, or a hidden size that is no multiple of 8 or above 32,768.
    """
    rows, hidden = x.shape
    if hidden % PACK or hidden > MAX_HIDDEN:
        raise ValueError(f"hidden size {hidden} must be a multiple of {PACK} and at most {MAX_HIDDEN}")
    _check_contiguous(x=x, residual=residual, weight=weight)
    out = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    threads = row_threads(hidden)
    defines = {"DTYPE": dtype_name(x.dtype), "HIDDEN": hidden, "ROW_THREADS": threads}
    args = (
        ptr(x), ptr(residual), ptr(weight), ptr(out), 0 if residual is None else ptr(total),
        i32(rows), f32(eps),
    )  # fmt: skip
    if rows:
        kernel(STEM, NORM_ENTRY, defines)((norm_blocks(rows, hidden),), (max(BLOCK, threads),), args)
    return out, total


def qk_norm_rope_write(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    rows: Tensor,
    keep_k: bool,
) -> None:
    """See `grinf.ops.contracts.QkNormRopeWrite`.

    Raises:
        ValueError: Strided tensors, or a head_dim other than 64 and 128.
    """
    tokens, heads, head_dim = qkv.shape
    if head_dim not in (64, 128):
        raise ValueError(f"head_dim {head_dim} must be 64 or 128")
    _check_contiguous(
        qkv=qkv, q_norm=q_norm, k_norm=k_norm, cos_sin=cos_sin, positions=positions,
        k_pool=k_pool, v_pool=v_pool, rows=rows,
    )  # fmt: skip
    kv_heads = k_pool.shape[-2]
    args = (
        ptr(qkv), ptr(q_norm), ptr(k_norm), f32(eps), ptr(cos_sin), ptr(positions), ptr(k_pool), ptr(v_pool),
        ptr(rows), i32(tokens), i32(heads - 2 * kv_heads), i32(kv_heads), i32(keep_k),
    )  # fmt: skip
    if tokens:
        defines = {"DTYPE": dtype_name(qkv.dtype), "HEAD_DIM": head_dim}
        kernel(STEM, ROPE_ENTRY, defines)((rope_blocks(tokens, heads, head_dim),), (BLOCK,), args)


def swiglu(gate_up: Tensor) -> Tensor:
    """See `grinf.ops.contracts.SwiGlu`.

    Raises:
        ValueError: A strided tensor, or a width of the MLP that is no multiple of 8.
    """
    rows, features = gate_up.shape[0], gate_up.shape[1] // 2
    if features % PACK:
        raise ValueError(f"the MLP's width {features} must be a multiple of {PACK}")
    _check_contiguous(gate_up=gate_up)
    out = torch.empty((rows, features), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        defines = {"DTYPE": dtype_name(gate_up.dtype), "FEATURES": features}
        blocks = ceil_div(rows * features, PACK * BLOCK * PACKS_PER_THREAD)
        kernel(STEM, SWIGLU_ENTRY, defines)((blocks,), (BLOCK,), (ptr(gate_up), ptr(out), i32(rows)))
    return out


def _check_contiguous(**tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, its strides are {tensor.stride()}")
