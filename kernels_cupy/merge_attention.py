"""K3, one softmax from partial ones: K1's splits, K1 with K2; see merge_attention.cu."""

from itertools import product
from typing import Final

from torch import Tensor

from kernels_cupy.loader import Instance, Needs, ceil_div, dtype_name, i32, kernel, ptr

STEM: Final = "merge_attention"
ENTRY: Final = "grinf_merge_attention"
NEEDS: Final = Needs(sm_min=80, dtypes=("bfloat16", "float16", "float32"), head_dims=(64, 128))
THREADS: Final = 128
LANE_FLOATS: Final = 4

INSTANCES: Final = tuple(
    Instance(STEM, ENTRY, (("DTYPE", dtype), ("HEAD_DIM", head_dim)), default=head_dim == 128)
    for dtype, head_dim in product(("BF16", "FP16", "FP32"), (64, 128))
)


def teams(head_dim: int) -> int:
    """Rows that a thread block takes at a time."""
    return THREADS * LANE_FLOATS // head_dim


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor) -> None:
    """Write the attention over the union of two key sets (K3).

    Args:
        out_a, out_b: float32 [B, W, Hq, D], contiguous, each normalised over its own keys.
        lse_a, lse_b: float32 [B, W, Hq], natural log; -inf where there is no key, on both sides too (out is
            0).
        out: [B, W, Hq, D], contiguous, float16, bfloat16 or float32; written.

    Raises:
        ValueError: Shapes or strides that the kernel does not take.
        KernelCompileError: The compiler refuses the kernel.
    """
    merge_partials(out_a[None], lse_a[None], out_b, lse_b, out, None)


def merge_partials(
    parts: Tensor,
    part_lse: Tensor,
    out_b: Tensor | None,
    lse_b: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Write the attention over the union of n key sets, and of one more if `out_b` is given.

    Args:
        parts: float32 [n, B, W, Hq, D], contiguous.
        part_lse: float32 [n, B, W, Hq], natural log.
        out_b, lse_b: One more partial, or None.
        out: [B, W, Hq, D]; written.
        lse: float32 [B, W, Hq] or None; written.
    """
    head_dim = parts.shape[-1]
    if head_dim not in (NEEDS.head_dims or ()):
        raise ValueError(f"{STEM} has no instance for head_dim {head_dim}; {NEEDS}")
    for tensor in (parts[0], out_b, out):
        if tensor is not None and tensor.shape != parts.shape[1:]:
            raise ValueError(
                f"partials {tuple(parts.shape)} and {tuple(tensor.shape)} do not cover the same rows"
            )
    tensors = (parts, part_lse, out_b, lse_b, out, lse)
    if not all(tensor is None or tensor.is_contiguous() for tensor in tensors):
        raise ValueError("the tensors of a merge must be contiguous")
    rows = out.numel() // head_dim
    kernel(STEM, ENTRY, {"DTYPE": dtype_name(out.dtype), "HEAD_DIM": head_dim})(
        (ceil_div(rows, teams(head_dim)),),
        (THREADS,),
        (*(ptr(tensor) for tensor in tensors), i32(len(parts)), i32(rows)),
    )
