"""Implementations that the installed torch brings: probed, not assumed."""

from collections.abc import Callable

import torch
from torch import Tensor

from grinf.backend.registry import Implementation, Needs, Site

_DTYPES = ("bfloat16", "float16")
_HEAD_DIMS = tuple(range(8, 257, 8))


def library_implementations() -> list[Implementation]:
    """Library paths that are good enough to be chosen."""
    needs = Needs("cuda", sm_min=80, dtypes=_DTYPES, head_dims=_HEAD_DIMS, missing=_missing_flash())
    return [Implementation("prefill_attention", "torch_flash", needs, 10, _load_flash)]


def _missing_flash() -> str:
    """Why torch's packed FlashAttention cannot be called; empty if it can."""
    schema = getattr(getattr(torch.ops.aten, "_flash_attention_forward", None), "default", None)
    if schema is None:
        return f"torch {torch.__version__} has no _flash_attention_forward"
    if not torch.backends.cuda.is_flash_attention_available():
        return "torch was built without FlashAttention"
    return ""


def _load_flash(site: Site) -> Callable[..., Tensor]:
    del site
    return flash_prefill_attention


def flash_prefill_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, seq_lens: tuple[int, ...], scale: float
) -> Tensor:
    """See `contracts.PrefillAttention`; takes the prompt borders from the device, so it can be captured."""
    longest = max(
        2, *seq_lens
    )  # where all prompts have one token FlashAttention swaps axes, and trips on padding
    return torch.ops.aten._flash_attention_forward(
        q, k, v, cu_seqlens, cu_seqlens, longest, longest, 0.0, True, False, scale=scale
    )[0]
