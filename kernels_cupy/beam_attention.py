"""K2, attention of every beam to its own tokens, alone or merged with K1's splits; see beam_attention.cu."""

import math
from itertools import product
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kernels_cupy.loader import Define, Instance, Needs, ceil_div, dtype_name, f32, i32, kernel, ptr

STEM: Final = "beam_attention"
ENTRY: Final = "grinf_beam_attention"
MERGE_ENTRY: Final = "grinf_beam_merge"
NEEDS: Final = Needs(sm_min=80, head_dims=(64, 128))
THREADS: Final = 128
LANE_BYTES: Final = 16

INSTANCES: Final = tuple(
    Instance(
        STEM,
        MERGE_ENTRY if merge else ENTRY,
        (
            ("DTYPE", dtype),
            ("HEAD_DIM", head_dim),
            ("GROUP", group),
            ("KV_HEADS", 8),
            ("STEPS", steps),
            ("MERGE", merge),
        ),
        default=(dtype, head_dim, group) == ("BF16", 128, 2),
    )
    for dtype, head_dim, group, steps, merge in product(
        ("BF16", "FP16"), (64, 128), (1, 2, 4, 8), (2, 7), (0, 1)
    )
)


def teams(head_dim: int) -> int:
    """Key-value heads that a thread block takes at a time."""
    return THREADS * LANE_BYTES // (2 * head_dim)


def beam_attention(
    q: Tensor,
    k_beams: Tensor,
    v_beams: Tensor,
    slot: Tensor,
    ancestor: Tensor,
    step: Tensor,
    width: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attend every live beam to the step[b] + 1 keys on its own path (K2).

    Args:
        q: [B, W, Hq, D], float16 or bfloat16; the first two axes may be strided.
        k_beams, v_beams: [slots + 1, T, W_max, Hkv, D], step by step contiguous.
        slot, step, width: int32 [B].
        ancestor: int32 [B, T, W], contiguous.
        scale: Factor on q·k.

    Returns:
        out: float32 [B, W, Hq, D].
        lse: float32 [B, W, Hq], natural log. Rows w >= width[b] hold anything.

    Raises:
        ValueError: Shapes or strides that the kernel does not take.
        KernelCompileError: The compiler refuses the kernel.
    """
    check_beams(q, k_beams, v_beams, ancestor)
    out = q.new_empty(q.shape, dtype=torch.float32)
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    launch(ENTRY, q, k_beams, v_beams, slot, ancestor, step, width, scale, (ptr(out), ptr(lse)))
    return out, lse


def launch(
    entry: str,
    q: Tensor,
    k_beams: Tensor,
    v_beams: Tensor,
    slot: Tensor,
    ancestor: Tensor,
    step: Tensor,
    width: Tensor,
    scale: float,
    outputs: tuple[int | np.generic, ...],
) -> None:
    """Launch an entry of the file; `outputs` are the arguments in which the two differ."""
    batch, beams, q_heads, head_dim = q.shape
    _, steps, _, kv_heads, _ = k_beams.shape
    defines: dict[str, Define] = {
        "DTYPE": dtype_name(q.dtype),
        "HEAD_DIM": head_dim,
        "GROUP": q_heads // kv_heads,
        "KV_HEADS": kv_heads,
        "STEPS": steps,
        "MERGE": int(entry == MERGE_ENTRY),
    }
    pointers = (q, k_beams, v_beams, slot, ancestor, step, width)
    strides = (*q.stride()[:2], *k_beams.stride()[:2])
    kernel(STEM, entry, defines)(
        (ceil_div(beams * kv_heads, teams(head_dim)), batch),
        (THREADS,),
        (
            *(ptr(tensor) for tensor in pointers),
            *(np.int64(stride) for stride in strides),
            i32(beams),
            f32(scale * math.log2(math.e)),
            *outputs,
        ),
    )


def check_beams(q: Tensor, k_beams: Tensor, v_beams: Tensor, ancestor: Tensor) -> None:
    """Refuse beam keys that the kernels would misread."""
    batch, beams, q_heads, head_dim = q.shape
    _, steps, _, kv_heads, _ = k_beams.shape
    if head_dim not in (NEEDS.head_dims or ()) or q_heads % kv_heads:
        raise ValueError(
            f"{STEM} has no instance for {q_heads} query heads over {kv_heads} of {head_dim}; {NEEDS}"
        )
    for name, pool in (("k_beams", k_beams), ("v_beams", v_beams)):
        if pool.shape != k_beams.shape or pool.stride() != k_beams.stride() or pool.dtype != q.dtype:
            raise ValueError(
                f"{name} is {pool.dtype} {tuple(pool.shape)}, which does not fit k_beams or q, {q.dtype}"
            )
        if pool.stride()[2:] != (kv_heads * head_dim, head_dim, 1) or pool.shape[4] != head_dim:
            raise ValueError(
                f"{name} with strides {pool.stride()} is not steps of contiguous keys of {head_dim}"
            )
    if ancestor.shape != (batch, steps, beams) or not ancestor.is_contiguous():
        raise ValueError(f"ancestor {tuple(ancestor.shape)} is not a contiguous {(batch, steps, beams)}")
