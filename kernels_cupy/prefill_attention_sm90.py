"""Causal attention within packed prompts on Hopper; see prefill_attention_sm90.cu."""

from itertools import product
from typing import Final

from torch import Tensor

from kernels_cupy.hopper import ARCH, GROUPS, HEAD_DIMS, NEEDS, ROWS, THREADS, row_map, shared_bytes
from kernels_cupy.loader import Define, Instance, ceil_div, dtype_name, f32, i32, kernel, multiprocessors, ptr

__all__ = ["INSTANCES", "NEEDS", "prefill_attention"]

STEM: Final = "prefill_attention_sm90"
ENTRY: Final = "grinf_prefill_attention_sm90"
TILES_IN_SHARED: Final = 6  # two stages each of queries, of keys and of values

INSTANCES: Final = tuple(
    Instance(
        STEM,
        ENTRY,
        (("DTYPE", dtype), ("HEAD_DIM", head_dim), ("GROUP", group)),
        arches=(ARCH,),
        default=(dtype, head_dim, group) == ("BF16", 128, 2),
    )
    for dtype, head_dim, group in product(("BF16", "FP16"), HEAD_DIMS, GROUPS)
)


def blocks(tokens: int, prompts: int, kv_heads: int, group: int, processors: int) -> int:
    """Thread blocks: one a multiprocessor, unless there are fewer tiles.

    Args:
        tokens, prompts: Rows and prompts of the batch.
        kv_heads, group: Heads of the model.
        processors: Multiprocessors of the device.
    """
    return min(processors, (ceil_div(tokens * group, ROWS) + prompts) * kv_heads)


def prefill_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, out: Tensor) -> None:
    """Write the causal attention of every token within its prompt.

    Args:
        q: [N, Hq, D], float16 or bfloat16; heads contiguous, rows may be strided by multiples of 8 elements.
        k, v: [N, Hkv, D], likewise.
        cu_seqlens: int32 [B + 1], contiguous; first row of each prompt, and the end of the last.
        scale: Factor on q·k, positive.
        out: [N, Hq, D], contiguous; rows past the last prompt are not written.

    Raises:
        ValueError: Shapes or strides that the kernel does not take.
        KernelCompileError: The compiler refuses the kernel.
    """
    tokens, q_heads, head_dim = q.shape
    kv_heads, prompts = k.shape[1], cu_seqlens.shape[0] - 1
    _check(q, k, v, out)
    group = q_heads // kv_heads
    defines: dict[str, Define] = {"DTYPE": dtype_name(q.dtype), "HEAD_DIM": head_dim, "GROUP": group}
    processors = multiprocessors(q.device.index or 0)
    kernel(STEM, ENTRY, defines, shared_bytes(TILES_IN_SHARED, head_dim), ARCH)(
        (blocks(tokens, prompts, kv_heads, group, processors),),
        (THREADS,),
        (
            row_map(q, ROWS // group, group), row_map(k, ROWS), row_map(v, ROWS),
            ptr(cu_seqlens), ptr(out), i32(prompts), i32(kv_heads), f32(scale),
        ),
    )  # fmt: skip


def _check(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    """Refuse what no instance takes."""
    tokens, q_heads, head_dim = q.shape
    kv_heads = k.shape[1]
    if head_dim not in HEAD_DIMS or q_heads % kv_heads or q_heads // kv_heads not in GROUPS:
        raise ValueError(f"{STEM} has no instance for {q_heads} query and {kv_heads} key heads of {head_dim}")
    for name, rows, heads in (("q", q, q_heads), ("k", k, kv_heads), ("v", v, kv_heads)):
        if rows.shape != (tokens, heads, head_dim) or rows.dtype != q.dtype:
            raise ValueError(f"{name} is {rows.dtype} {tuple(rows.shape)}, q is {q.dtype} {tuple(q.shape)}")
        if rows.stride()[1:] != (head_dim, 1) or rows.stride(0) % 8 or ptr(rows) % 16:
            raise ValueError(f"{name} with strides {rows.stride()} is not heads at 16-byte boundaries")
    if out.shape != q.shape or out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError(f"out is {out.dtype} {tuple(out.shape)}; needs a contiguous copy of q's shape")
