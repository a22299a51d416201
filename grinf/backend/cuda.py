"""The one door to `kernels_cupy`: registers its kernels as implementations of our ops."""

import functools
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from grinf.backend.registry import Implementation, Needs, Site
from grinf.errors import KernelUnavailable
from grinf.ops.contracts import BeamView, ContextView
from kernels_cupy import (
    beam_attention,
    constrained_topk,
    context_attention,
    decode_attention,
    decode_attention_sm90,
    elementwise,
    loader,
    merge_attention,
    path,
    prefill_attention_sm90,
    vocab_topk,
)

Function = Callable[..., Any]


def cupy_implementations() -> list[Implementation]:
    """Every kernel of `kernels_cupy`, with what it needs."""
    kernels: list[tuple[str, str, int, loader.Needs, Function]] = [
        ("prefill_attention", "cupy_sm90", 30, prefill_attention_sm90.NEEDS, prefill_on_hopper),
        ("decode_attention", "cupy_sm90", 30, decode_attention_sm90.NEEDS, decode_on_hopper),
        ("decode_attention", "cupy", 20, decode_attention.NEEDS, decode_fused),
        ("decode_attention", "cupy_split", 10, context_attention.NEEDS, decode_in_three),
        ("context_attention", "cupy", 20, context_attention.NEEDS, attend_to_context),
        ("beam_attention", "cupy", 20, beam_attention.NEEDS, attend_to_beams),
        ("merge_attention", "cupy", 20, merge_attention.NEEDS, merge_attention.merge_attention),
        ("qk_norm_rope_write", "cupy", 20, elementwise.NEEDS, elementwise.qk_norm_rope_write),
        ("add_rms_norm", "cupy", 20, elementwise.NEEDS, elementwise.add_rms_norm),
        ("swiglu", "cupy", 20, elementwise.NEEDS, elementwise.swiglu),
        ("row_logsumexp", "cupy", 20, vocab_topk.NEEDS, vocab_topk.row_logsumexp),
        ("select_constrained", "cupy", 20, constrained_topk.NEEDS, constrained_topk.select_constrained),
        ("select_unconstrained", "cupy", 20, vocab_topk.NEEDS, vocab_topk.select_unconstrained),
        ("extend_path", "cupy", 20, path.NEEDS, path.extend_path),
    ]
    missing = _missing()
    return [
        Implementation(op, name, _needs(needs, missing), rank, functools.partial(_load, function))
        for op, name, rank, needs, function in kernels
    ]


def _missing() -> str:
    """What the kernels lack on this machine, in words; empty if nothing."""
    if find_spec("cupy") is None:
        return "CuPy is not installed (pip install 'grinf[cuda13]', or cuda12)"
    if torch.version.cuda is None:
        return "torch was built without CUDA"
    try:
        cupy_cuda = loader.cuda_major()
    except ImportError as error:
        return f"CuPy does not import: {error}"
    torch_cuda = int(torch.version.cuda.partition(".")[0])
    if cupy_cuda != torch_cuda:
        return f"CuPy is for CUDA {cupy_cuda}, torch for CUDA {torch_cuda}: install grinf[cuda{torch_cuda}]"
    return ""


def _needs(needs: loader.Needs, missing: str) -> Needs:
    return Needs("cuda", needs.sm_min, needs.sm_max, needs.dtypes, needs.head_dims, needs.groups, missing)


def _load(function: Function, site: Site) -> Function:
    """Wrap a kernel so that what its compiler says reaches the user as our error."""
    del site

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except loader.KernelCompileError as error:
            raise KernelUnavailable(
                f"kernel {error.stem}.cu does not compile on this machine",
                error.log,
                f"override it with another implementation of the op, and report the log: see {error.stem}.cu",
            ) from error

    return call


def _beams(beams: BeamView) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return beams.k, beams.v, beams.slot, beams.ancestor, beams.step


def _context(context: ContextView) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return context.k, context.v, context.page_table, context.context_len


def prefill_on_hopper(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, seq_lens: tuple[int, ...], scale: float
) -> Tensor:
    """See `contracts.PrefillAttention`; takes the prompt borders from the device."""
    del seq_lens
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    prefill_attention_sm90.prefill_attention(q, k, v, cu_seqlens, scale, out)
    return out


def decode_on_hopper(q: Tensor, context: ContextView, beams: BeamView, width: Tensor, scale: float) -> Tensor:
    """See `contracts.DecodeAttention`: one kernel with wgmma."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    decode_attention_sm90.decode_attention(q, *_context(context), *_beams(beams), width, scale, out)
    return out


def decode_fused(q: Tensor, context: ContextView, beams: BeamView, width: Tensor, scale: float) -> Tensor:
    """See `contracts.DecodeAttention`: K2 and K3 in K1's epilogue."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    decode_attention.decode_attention(q, *_context(context), *_beams(beams), width, scale, out)
    return out


def decode_in_three(q: Tensor, context: ContextView, beams: BeamView, width: Tensor, scale: float) -> Tensor:
    """See `contracts.DecodeAttention`: K1, K2 and K3 in a row."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    partial_a = attend_to_context(q, context, width, scale)
    partial_b = attend_to_beams(q, beams, width, scale)
    merge_attention.merge_attention(*partial_a, *partial_b, out)
    return out


def attend_to_context(q: Tensor, context: ContextView, width: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """See `contracts.ContextAttention`."""
    return context_attention.context_attention(q, *_context(context), width, scale)


def attend_to_beams(q: Tensor, beams: BeamView, width: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """See `contracts.BeamAttention`."""
    return beam_attention.beam_attention(q, *_beams(beams), width, scale)
