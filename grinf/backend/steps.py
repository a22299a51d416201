"""The only forward code: compute prompts, advance beams by a token, choose the next beams.

Every function reads and writes only the tensors of its arguments, asks the host for nothing, and has shapes
that depend on the bucket alone. So each can be called, or captured in a CUDA graph and replayed: how a step
is run is not its business.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from grinf.backend.buffers import BatchBuffers
from grinf.backend.registry import Ops
from grinf.backend.scoring import Columns, Scoring
from grinf.model.decoder import Decoder
from grinf.ops.contracts import BeamView, ContextView, Limits, PathView, Selection, TrieView
from grinf.state.beam_kv import BeamKV
from grinf.state.beam_path import BeamPath
from grinf.state.context_kv import ContextKV


@dataclass(frozen=True, slots=True)
class BackendState:
    """Everything on the device that outlives a step.

    Attributes:
        cos_sin: float32 [positions, D], rotary table.
    """

    model: Decoder
    context_kv: ContextKV
    beam_kv: BeamKV
    path: BeamPath
    cos_sin: Tensor
    scoring: Scoring

    @property
    def scale(self) -> float:
        """Factor on q·k."""
        return self.model.config.head_dim**-0.5


def prefill_forward(state: BackendState, ops: Ops, buf: BatchBuffers, seq_lens: tuple[int, ...]) -> Tensor:
    """Compute the prompts of a batch: a prefill is a beam of width 1 at the root.

    Args:
        state, ops: Device state and op table.
        buf: The batch, with its tokens.
        seq_lens: Host lengths that bound the prompts; see `contracts.PrefillAttention`.

    Returns:
        [B, 1, hidden]: the hidden state of each prompt's last token.
    """
    config = state.model.config
    rows = buf.rows.long()
    heads = (config.num_q_heads, config.num_kv_heads, config.num_kv_heads)

    def attend(layer: int, qkv: Tensor) -> Tensor:
        qkv = qkv.view(qkv.shape[0], sum(heads), config.head_dim)
        _finish_qkv(state, ops, layer, qkv, buf.positions, state.context_kv.rows(layer), rows, keep_k=True)
        q, k, v = qkv.split(heads, dim=1)
        return ops.prefill_attention(q, k, v, buf.cu_seqlens, seq_lens, state.scale).flatten(1)

    state.path.start(buf.slot)
    return state.model.forward(buf.tokens, attend, ops, last_rows=buf.last_rows.long())[:, None]


def decode_forward(state: BackendState, ops: Ops, buf: BatchBuffers, width: int) -> Tensor:
    """Feed the last chosen token of every live beam, and store its keys and values.

    Args:
        state, ops: Device state and op table.
        buf: The batch.
        width: Beams per request in the bucket, W.

    Returns:
        [B, W, hidden]; rows at and past a request's live width hold anything.
    """
    config, path = state.model.config, state.path
    tokens = path.tokens_at(buf.slot, buf.step, width)
    live = path.width[buf.slot]
    ancestor = path.gather_index(buf.slot, buf.step, width)
    rows = state.beam_kv.row_index(buf.slot, buf.step, width).flatten()
    # The token of level t stands right behind the prompt and the t tokens before it.
    positions = (buf.context_len + buf.step)[:, None].expand_as(tokens).contiguous().flatten()

    def attend(layer: int, qkv: Tensor) -> Tensor:
        qkv = qkv.view(qkv.shape[0], -1, config.head_dim)
        _finish_qkv(state, ops, layer, qkv, positions, state.beam_kv.rows(layer), rows, keep_k=False)
        q = qkv[:, : config.num_q_heads].unflatten(0, tokens.shape)
        context = ContextView(*state.context_kv.layer(layer), buf.page_table, buf.context_len)
        beams = BeamView(*state.beam_kv.layer(layer), buf.slot, ancestor, buf.step)
        return ops.decode_attention(q, context, beams, live, state.scale).flatten(2).flatten(0, 1)

    return state.model.forward(tokens.flatten(), attend, ops).unflatten(0, tokens.shape)


def _finish_qkv(
    state: BackendState,
    ops: Ops,
    layer: int,
    qkv: Tensor,
    positions: Tensor,
    pools: tuple[Tensor, Tensor],
    rows: Tensor,
    keep_k: bool,
) -> None:
    weights = state.model.weights.layers[layer]
    eps = state.model.config.rms_norm_eps
    ops.qk_norm_rope_write(
        qkv, weights.q_norm, weights.k_norm, eps, state.cos_sin, positions, *pools, rows, keep_k=keep_k
    )


def select_beams(
    state: BackendState,
    ops: Ops,
    buf: BatchBuffers,
    hidden: Tensor,
    columns: Columns,
    capacity: int,
    first_codes: Tensor | None = None,
) -> None:
    """Score the candidates of every live beam, keep the best, and append them to BeamPath.

    Logits exist for a few requests at a time, so that their size is bounded whatever the batch.

    Args:
        state, ops: Device state and op table.
        buf: The batch; its limits say how many beams live on.
        hidden: [B, W, hidden], from either forward.
        columns: Which lm_head rows to compute.
        capacity: Candidates per request at most; meaningless without a trie.
        first_codes: int64 [codes], columns whose probability is to be stored as the request's `mass`, where
            the selection chooses level 0 and has a normaliser; None: it is not asked for.
    """
    batch, width = hidden.shape[:2]
    step = state.scoring.requests_per_chunk(width, columns)
    for start in range(0, batch, step):
        part = slice(start, min(start + step, batch))
        logits = F.linear(hidden[part].flatten(0, 1), columns.head).unflatten(0, (-1, width))
        slot, limits = buf.slot[part], buf.limits.part(part)
        path = PathView(slot, state.path.cum, state.path.node, state.path.width, width)
        trie = state.scoring.trie_view(columns, buf.view[part], capacity)
        log_z = _normaliser(ops, state.scoring.score, logits, trie)
        selection = _select(ops, state.scoring.score, logits, path, trie, limits, log_z)
        pools = state.path
        if first_codes is not None and log_z is not None:
            mass = logits[:, 0, first_codes].float().logsumexp(1) - log_z[:, 0]
            pools.mass.index_copy_(0, slot.long(), mass.exp())
        ops.extend_path(
            slot, limits.level, selection, pools.token, pools.ancestor, pools.cum, pools.node, pools.width
        )


def _normaliser(ops: Ops, score: str, logits: Tensor, trie: TrieView | None) -> Tensor | None:
    """Log-sum-exp of each beam's logits, float32 [B, W]; None where the selection brings its own."""
    if trie is None or score in ("children", "topk"):
        return None
    return ops.row_logsumexp(logits.flatten(0, 1)).view(logits.shape[:2])


def _select(
    ops: Ops,
    score: str,
    logits: Tensor,
    path: PathView,
    trie: TrieView | None,
    limits: Limits,
    log_z: Tensor | None,
) -> Selection:
    if trie is None:
        return ops.select_unconstrained(logits, path, limits, score, None)
    mode = score if log_z is None else "given"
    return ops.select_constrained(logits, path, trie, limits, mode, log_z)
