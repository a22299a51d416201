"""The specification of every op in plain torch: right on any device, fast on none, safe to capture."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from grinf.ops.contracts import BeamView, ContextView, Selection
from grinf.ops.reference_selection import row_logsumexp, select_constrained, select_unconstrained

__all__ = [
    "add_rms_norm",
    "beam_attention",
    "context_attention",
    "decode_attention",
    "extend_path",
    "merge_attention",
    "prefill_attention",
    "qk_norm_rope_write",
    "row_logsumexp",
    "select_constrained",
    "select_unconstrained",
    "swiglu",
]


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of a float32 tensor over its last axis, in float32."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `contracts.AddRmsNorm`."""
    total = x.float() if residual is None else x.float() + residual.float()
    return _rms_norm(total, weight, eps).to(x.dtype), total.to(x.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    """See `contracts.SwiGlu`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def _rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate [N, heads, D] by the rows cos_sin [N, D] (cos, then sin)."""
    cos, sin = cos_sin[:, None, :].chunk(2, dim=-1)
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


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
    """See `contracts.QkNormRopeWrite`."""
    num_kv_heads = k_pool.shape[1]
    q, k, v = qkv.split([qkv.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
    angles = cos_sin[positions]
    rotated = []
    for part, weight in ((q, q_norm), (k, k_norm)):
        part32 = part.float() if weight is None else _rms_norm(part.float(), weight, eps)
        rotated.append(_rotate(part32, angles).to(qkv.dtype))
    q.copy_(rotated[0])
    if keep_k:
        k.copy_(rotated[1])
    k_pool.index_copy_(0, rows, rotated[1])
    v_pool.index_copy_(0, rows, v)


def prefill_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, seq_lens: tuple[int, ...], scale: float
) -> Tensor:
    """See `contracts.PrefillAttention`; takes the prompt borders from the host lengths."""
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    start = 0
    for length in seq_lens:
        prompt = slice(start, start + length)
        one_q, one_k, one_v = (t[prompt].transpose(0, 1)[None] for t in (q, k, v))
        attended = F.scaled_dot_product_attention(
            one_q, one_k, one_v, is_causal=True, scale=scale, enable_gqa=True
        )
        out[prompt] = attended[0].transpose(0, 1)
        start += length
    return out


def context_attention(q: Tensor, context: ContextView, width: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """See `contracts.ContextAttention`; also computes the dead rows, which is harmless."""
    batch, beams, num_q_heads, head_dim = q.shape
    num_kv_heads = context.k.shape[2]
    k, v = (
        pool[context.page_table].flatten(1, 2).float() for pool in (context.k, context.v)
    )  # [B, S, Hkv, D]
    rows = (
        q.float().view(batch, beams, num_kv_heads, -1, head_dim).transpose(1, 2).flatten(2, 3)
    )  # [B, Hkv, W*g, D]
    scores = torch.matmul(rows, k.permute(0, 2, 3, 1)) * scale
    inside = torch.arange(k.shape[1], device=q.device) < context.context_len[:, None]
    scores = scores.masked_fill(~inside[:, None, None, :], -math.inf)
    out, lse = _softmax_weighted(scores, v.transpose(1, 2))
    out = out.unflatten(2, (beams, -1)).transpose(1, 2).reshape(batch, beams, num_q_heads, head_dim)
    return out, lse.unflatten(2, (beams, -1)).transpose(1, 2).reshape(batch, beams, num_q_heads)


def beam_attention(q: Tensor, beams: BeamView, width: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """See `contracts.BeamAttention`; also computes the dead rows, which is harmless."""
    batch, num_beams, num_q_heads, head_dim = q.shape
    num_steps = beams.ancestor.shape[1]
    steps = torch.arange(num_steps, device=q.device)
    slot = beams.slot[:, None, None]
    # [B, T, W, Hkv, D] -> [B, W, Hkv, T, D]
    k, v = (
        pool[slot, steps[None, :, None], beams.ancestor].permute(0, 2, 3, 1, 4).float()
        for pool in (beams.k, beams.v)
    )
    rows = q.float().view(batch, num_beams, k.shape[2], -1, head_dim)  # [B, W, Hkv, g, D]
    scores = torch.matmul(rows, k.transpose(-1, -2)) * scale
    on_path = steps <= beams.step[:, None]
    scores = scores.masked_fill(~on_path[:, None, None, None, :], -math.inf)
    out, lse = _softmax_weighted(scores, v)
    return out.reshape(batch, num_beams, num_q_heads, head_dim), lse.reshape(batch, num_beams, num_q_heads)


def _softmax_weighted(scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over the last axis of `scores` [..., rows, keys] applied to v [..., keys, D], and its LSE.

    Rows without a key give 0 and -inf.
    """
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    return torch.matmul(weights, v), lse


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor) -> None:
    """See `contracts.MergeAttention`."""
    peak = torch.maximum(lse_a, lse_b)
    peak = peak.masked_fill(peak == -math.inf, 0.0)  # (-inf) - (-inf) would be NaN
    weight_a, weight_b = torch.exp(lse_a - peak), torch.exp(lse_b - peak)
    total = (weight_a + weight_b).clamp_min(torch.finfo(torch.float32).tiny)
    out.copy_((out_a * weight_a[..., None] + out_b * weight_b[..., None]) / total[..., None])


def decode_attention(q: Tensor, context: ContextView, beams: BeamView, width: Tensor, scale: float) -> Tensor:
    """See `contracts.DecodeAttention`: K1, K2 and K3 in a row."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    partial_a = context_attention(q, context, width, scale)
    partial_b = beam_attention(q, beams, width, scale)
    merge_attention(*partial_a, *partial_b, out)
    return out


def extend_path(
    slot: Tensor,
    level: Tensor,
    selection: Selection,
    token: Tensor,
    ancestor: Tensor,
    cum: Tensor,
    node: Tensor,
    width: Tensor,
) -> None:
    """See `contracts.ExtendPath`."""
    beams = selection.score.shape[1]
    num_steps = ancestor.shape[1]
    steps = torch.arange(num_steps, device=slot.device)[None, :, None]
    parent = selection.parent.long()[:, None, :].expand(-1, num_steps, -1)
    inherited = ancestor[slot].gather(2, parent)
    chosen = torch.where(steps == (level - 1)[:, None, None], parent.to(ancestor.dtype), inherited)
    rank = torch.arange(beams, device=slot.device)[None]
    rows = slot[:, None]
    ancestor[rows[:, :, None], steps, rank[:, None, :]] = chosen
    token[rows, level[:, None], rank] = selection.token
    cum[rows, rank] = selection.score
    node[rows, rank] = selection.node
    width[slot] = torch.where(slot == width.shape[0] - 1, 0, selection.count).to(width.dtype)
