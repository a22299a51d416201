"""The whole of a decode step's attention on any GPU since sm_80: K1 with K2 and K3 in its epilogue.

One kernel finishes every request whose context is not split; a second pass, K2 and K3 together, finishes the
others. Without splits nothing goes through memory in fp32 and the second pass is not launched.
"""

import numpy as np
from torch import Tensor

from kernels_cupy import beam_attention, context_attention
from kernels_cupy.loader import i32, ptr

INSTANCES = ()  # those of context_attention.cu and beam_attention.cu
NEEDS = context_attention.NEEDS


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
        k_pages, v_pages: [pages + 1, page_size, Hkv, D], page by page contiguous.
        page_table: int32 [B, P], contiguous.
        context_len: int32 [B], tokens; 0 for a padding request.
        k_beams, v_beams: [slots + 1, T, W_max, Hkv, D], step by step contiguous.
        slot, step, width: int32 [B]; request b has step[b] + 1 own keys and width[b] live beams.
        ancestor: int32 [B, T, W], contiguous.
        scale: Factor on q·k.
        out: [B, W, Hq, D], contiguous; rows w >= width[b] are not written.

    Raises:
        ValueError: Shapes or strides that the kernels do not take.
        KernelCompileError: The compiler refuses a kernel.
    """
    context_attention.check_queries(q, k_pages.shape[2])
    context_attention.check_pages(q, k_pages, v_pages, page_table)
    beam_attention.check_beams(q, k_beams, v_beams, ancestor)
    if out.shape != q.shape or out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)}; needs a contiguous {q.dtype} {tuple(q.shape)}"
        )
    grid = context_attention.bucket_plan(q, k_pages, page_table, fused=True)
    part = part_lse = None
    if grid.splits > 1:
        part, part_lse = context_attention.new_partials(q, grid.splits)
    beams = tuple(ptr(tensor) for tensor in (k_beams, v_beams, slot, ancestor, step, out))
    strides = tuple(np.int64(stride) for stride in k_beams.stride()[:2])
    context_attention.launch(
        context_attention.FUSED_ENTRY,
        q,
        k_pages,
        v_pages,
        page_table,
        context_len,
        width,
        scale,
        grid,
        part,
        part_lse,
        (*beams, *strides, i32(k_beams.shape[1])),
    )
    if grid.splits > 1:
        merge = (ptr(out), ptr(context_len), ptr(part), ptr(part_lse), i32(grid.splits), i32(grid.min_split))
        beam_attention.launch(
            beam_attention.MERGE_ENTRY, q, k_beams, v_beams, slot, ancestor, step, width, scale, merge
        )
