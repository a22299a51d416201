"""Inputs for every op, in the shapes of a decode step, with what the op must read, write and compute."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grinf.ops.contracts import BeamView, ContextView, Limits, PathView, Selection, TrieView

CHILDREN, CODES, LEVELS, PAGE = 64, 8192, 3, 64


@dataclass(frozen=True, slots=True)
class Shape:
    """Requests, beams, context tokens and the model's sizes."""

    batch: int
    width: int
    context: int
    q_heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    inner: int
    vocab: int

    def __str__(self) -> str:
        return f"B={self.batch} W={self.width} S={self.context}"


@dataclass(frozen=True, slots=True)
class Case:
    """One call of an op.

    Attributes:
        args: Positional arguments.
        written: Which arguments the op writes in place; they are part of its result.
        moved_bytes, flops: What the call cannot do without: each input read and each output written once.
    """

    args: tuple[Any, ...]
    written: tuple[int, ...]
    moved_bytes: float
    flops: float


def make_case(op: str, s: Shape, dtype: torch.dtype, device: torch.device) -> Case:
    """Draw the inputs of `op`; the same ones every time."""
    return _CASES[op](s, _Draw(torch.Generator(device).manual_seed(0), dtype, device))


@dataclass(frozen=True, slots=True)
class _Draw:
    generator: torch.Generator
    dtype: torch.dtype
    device: torch.device

    def normal(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        value = torch.randn(*shape, generator=self.generator, device=self.device) * scale
        return value.to(dtype or self.dtype)

    def ints(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator, device=self.device, dtype=torch.int32)

    def full(self, value: int, *shape: int) -> Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=self.device)

    def count(self, n: int) -> Tensor:
        return torch.arange(n, dtype=torch.int32, device=self.device)


def _size(*tensors: Tensor) -> float:
    return float(sum(tensor.numel() * tensor.element_size() for tensor in tensors))


def _context(s: Shape, draw: _Draw) -> ContextView:
    pages = -(-s.context // PAGE)
    shape = (s.batch * pages + 1, PAGE, s.kv_heads, s.head_dim)
    order = torch.randperm(s.batch * pages, generator=draw.generator, device=draw.device)
    table, lengths = order.int().view(s.batch, pages), draw.full(s.context, s.batch)
    return ContextView(draw.normal(*shape), draw.normal(*shape), table, lengths)


def _beams(s: Shape, draw: _Draw) -> BeamView:
    steps = LEVELS - 1
    shape = (s.batch + 1, steps, s.width, s.kv_heads, s.head_dim)
    ancestor = draw.ints(s.width, s.batch, steps, s.width)
    ancestor[:, -1] = draw.count(s.width)
    slots, step = draw.count(s.batch), draw.full(steps - 1, s.batch)
    return BeamView(draw.normal(*shape), draw.normal(*shape), slots, ancestor, step)


def _query(s: Shape, draw: _Draw) -> tuple[Tensor, Tensor, float]:
    q = draw.normal(s.batch, s.width, s.q_heads, s.head_dim)
    return q, draw.full(s.width, s.batch), s.head_dim**-0.5


def _attention(parts: str) -> Callable[[Shape, _Draw], Case]:
    """Attention of a decode step over the context, the beams' own tokens, or both."""

    def make(s: Shape, draw: _Draw) -> Case:
        q, width, scale = _query(s, draw)
        views = [view(s, draw) for name, view in (("context", _context), ("beams", _beams)) if name in parts]
        keys = s.context * ("context" in parts) + (LEVELS - 1) * ("beams" in parts)
        kv = s.batch * s.kv_heads * s.head_dim * q.element_size() * 2.0
        moved = kv * (s.context * ("context" in parts) + s.width * (LEVELS - 1) * ("beams" in parts))
        out = _size(q) if len(views) == 2 else q.numel() * 4.0
        return Case((q, *views, width, scale), (), moved + _size(q) + out, 4.0 * q.numel() * keys)

    return make


def _merge(s: Shape, draw: _Draw) -> Case:
    shape = (s.batch, s.width, s.q_heads)
    partial = [draw.normal(*shape, *tail, dtype=torch.float32) for _ in "ab" for tail in ((s.head_dim,), ())]
    out = torch.empty(*shape, s.head_dim, dtype=draw.dtype, device=draw.device)
    return Case((*partial, out), (4,), _size(*partial, out), 0.0)


def _prefill(s: Shape, draw: _Draw) -> Case:
    n, lengths = s.batch * s.context, (s.context,) * s.batch
    q, (k, v) = draw.normal(n, s.q_heads, s.head_dim), (draw.normal(n, s.kv_heads, s.head_dim) for _ in "kv")
    borders = draw.count(s.batch + 1) * s.context
    args = (q, k, v, borders, lengths, s.head_dim**-0.5)
    return Case(args, (), _size(q, q, k, v), 2.0 * q.numel() * s.context)


def _rope(s: Shape, draw: _Draw) -> Case:
    n, norm = s.batch * s.width, draw.normal(s.head_dim)
    qkv = draw.normal(n, s.q_heads + 2 * s.kv_heads, s.head_dim)
    pools = [draw.normal(n, s.kv_heads, s.head_dim) for _ in "kv"]
    angles = draw.normal(s.context + LEVELS, s.head_dim, dtype=torch.float32)
    args = (qkv, norm, norm, 1e-6, angles, draw.ints(s.context, n), *pools, draw.count(n).long(), True)
    return Case(args, (0, 6, 7), 2 * _size(qkv) + _size(*pools), 0.0)


def _add_norm(s: Shape, draw: _Draw) -> Case:
    x, residual = (draw.normal(s.batch * s.width, s.hidden) for _ in "xr")
    return Case((x, residual, draw.normal(s.hidden), 1e-6), (), 2 * _size(x, residual), 0.0)


def _swiglu(s: Shape, draw: _Draw) -> Case:
    gate_up = draw.normal(s.batch * s.width, 2 * s.inner)
    return Case((gate_up,), (), 1.5 * _size(gate_up), 0.0)


def _logsumexp(s: Shape, draw: _Draw) -> Case:
    logits = draw.normal(s.batch * s.width, s.vocab)
    return Case((logits,), (), _size(logits), 0.0)


def _path(s: Shape, draw: _Draw, nodes: int) -> tuple[PathView, Limits, Tensor]:
    cum = draw.normal(s.batch + 1, s.width, dtype=torch.float32)
    node = 1 + draw.ints(nodes, s.batch + 1, s.width)
    width = draw.full(s.width, s.batch + 1)
    width[-1] = 0
    margin = torch.full((s.batch,), torch.inf, device=draw.device)
    level, most, least = draw.full(1, s.batch), draw.full(s.width, s.batch), draw.full(1, s.batch)
    limits = Limits(level, most, most, margin, least, s.width)
    log_z = draw.normal(s.batch, s.width, dtype=torch.float32) + 10.0
    return PathView(draw.count(s.batch), cum, node, width, s.width), limits, log_z


def _constrained(s: Shape, draw: _Draw) -> Case:
    """A trie of 2,048 inner nodes with CHILDREN children each."""
    inner = 2048
    path, limits, log_z = _path(s, draw, inner - 1)
    first = 1 + draw.count(inner + 1) * CHILDREN
    total = 1 + inner * CHILDREN
    code = (draw.count(total) - 1) % CHILDREN * (min(CODES, s.vocab) // CHILDREN)
    ends, token = draw.full(-1, LEVELS), draw.ints(s.vocab, LEVELS, CODES + 1)
    trie = TrieView(first, code.to(torch.int16), None, token, ends, None, None, s.width * CHILDREN)
    logits = draw.normal(s.batch, s.width, min(CODES, s.vocab))
    moved = s.batch * s.width * (CHILDREN * (2 + logits.element_size()) + 16.0)
    return Case((logits, path, trie, limits, "given", log_z), (), moved, 0.0)


def _unconstrained(s: Shape, draw: _Draw) -> Case:
    path, limits, log_z = _path(s, draw, 1)
    logits = draw.normal(s.batch, s.width, s.vocab)
    return Case((logits, path, limits, "vocab", log_z), (), _size(logits), 0.0)


def _extend(s: Shape, draw: _Draw) -> Case:
    shape = (s.batch, s.width)
    parent, token, node = (draw.ints(s.width, *shape) for _ in range(3))
    score, count = draw.normal(*shape, dtype=torch.float32), draw.full(s.width, s.batch)
    chosen = Selection(score, parent, token, node, count)
    pools = [draw.ints(9, s.batch + 1, levels, s.width) for levels in (LEVELS, LEVELS - 1)]
    state = [draw.normal(s.batch + 1, s.width, dtype=torch.float32), draw.ints(9, s.batch + 1, s.width)]
    args = (draw.count(s.batch), draw.full(1, s.batch), chosen, *pools, *state, draw.full(0, s.batch + 1))
    return Case(args, (3, 4, 5, 6, 7), 2 * _size(score, parent, token, node) + _size(pools[1]), 0.0)


_CASES: dict[str, Callable[[Shape, _Draw], Case]] = {
    "qk_norm_rope_write": _rope,
    "add_rms_norm": _add_norm,
    "swiglu": _swiglu,
    "prefill_attention": _prefill,
    "decode_attention": _attention("context beams"),
    "context_attention": _attention("context"),
    "beam_attention": _attention("beams"),
    "merge_attention": _merge,
    "row_logsumexp": _logsumexp,
    "select_constrained": _constrained,
    "select_unconstrained": _unconstrained,
    "extend_path": _extend,
}
