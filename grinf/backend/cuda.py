"""The one door to `kernels_cupy`: registers its kernels as implementations of our ops."""

import functools
from collections.abc import Callable
from typing import Any

from grinf.backend.registry import Implementation
from kernels_cupy import (
    beam_attention,
    constrained_topk,
    context_attention,
    decode_attention_sm90,
    elementwise,
    loader,
    merge_attention,
    path,
    vocab_topk,
)


def cupy_implementations() -> list[Implementation]:
    """Every kernel of `kernels_cupy`, with what it needs."""
    missing = _missing_cupy()
    rows: list[tuple[str, str, loader.Needs, int, Callable[..., Any]]] = [
        ("decode_attention", "cupy_sm90", decode_attention_sm90.NEEDS, 30, decode_on_hopper),
        ("decode_attention", "cupy", context_attention.NEEDS, 20, decode_anywhere),
        ("decode_attention", "cupy_split", context_attention.NEEDS, 10, decode_in_three),
        ("context_attention", "cupy", context_attention.NEEDS, 20, attend_to_context),
        ("beam_attention", "cupy", beam_attention.NEEDS, 20, attend_to_beams),
        ("merge_attention", "cupy", merge_attention.NEEDS, 20, merge_attention.merge_attention),
        ("qk_norm_rope_write", "cupy", elementwise.NEEDS, 20, elementwise.qk_norm_rope_write),
        ("add_rms_norm", "cupy", elementwise.NEEDS, 20, elementwise.add_rms_norm),
        ("swiglu", "cupy", elementwise.NEEDS, 20, elementwise.swiglu),
        ("row_logsumexp", "cupy", vocab_topk.NEEDS, 20, vocab_topk.row_logsumexp),
        ("select_constrained", "cupy", constrained_topk.NEEDS, 20, select_constrained),
        ("select_unconstrained", "cupy", vocab_topk.NEEDS, 20, select_unconstrained),
        ("extend_path", "cupy", path.NEEDS, 20, extend_path),
    ]
    return [
        Implementation(op, name, _needs(needs, missing), rank, functools.partial(_load, function))
        for op, name, needs, rank, function in rows
    ]
