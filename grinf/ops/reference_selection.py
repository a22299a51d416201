"""Beam selection in plain torch: exact, in the documented order, with shapes that never depend on data."""

import math

import torch
from torch import Tensor

from grinf.ops.contracts import Limits, PathView, Selection, TrieView

_CHUNK_ELEMENTS = 1 << 24
_UINT32 = 0xFFFFFFFF


def row_logsumexp(logits: Tensor) -> Tensor:
    """See `contracts.RowLogSumExp`."""
    rows = max(1, _CHUNK_ELEMENTS // max(1, logits.shape[-1]))
    return torch.cat([torch.logsumexp(chunk.float(), dim=-1) for chunk in logits.split(rows)])


def _sortable(x: Tensor) -> Tensor:
    """Map float32 to int64 in -2^31 .. 2^31 - 1 with the same order; the two zeros become one."""
    bits = (x + 0.0).view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()


def _best_first(score: Tensor, valid: Tensor, index: Tensor) -> Tensor:
    """Keys whose descending order is (score descending, index ascending), the invalid ones last.

    Packing both into one integer makes every key distinct, so `topk` has no ties to break its own way.
    """
    key = (_sortable(score) << 32) | (_UINT32 - index)
    return key.masked_fill(~valid, torch.iinfo(torch.int64).min)


def select_constrained(
    logits: Tensor, path: PathView, trie: TrieView, limits: Limits, score: str, log_z: Tensor | None
) -> Selection:
    """See `contracts.SelectConstrained`."""
    batch, beams, columns = logits.shape
    slot = path.slot.long()
    node = path.node[slot, :beams].long()
    cum = path.cum[slot, :beams]
    parent, child, valid = _children(node, path.width[slot], trie)
    code = _code(trie.code, child)
    column = code if trie.column is None else trie.column[limits.level[:, None], code].long()
    flat = parent * columns + column.masked_fill(~valid, 0)
    logit = logits.reshape(batch, -1).gather(1, flat).float()

    if score == "topk":
        valid = valid & (_rank_in_parent(logit, parent, valid, beams) < limits.score_k[:, None])
    if score != "given":
        log_z = _segment_logsumexp(logit, parent, valid, beams)
    assert log_z is not None
    parent_cum = cum.gather(1, parent)
    candidate = (logit - log_z.gather(1, parent)) + parent_cum
    ended = _is_end(node, limits.level - 1, trie).gather(1, parent)
    candidate = torch.where(ended, parent_cum, candidate)

    order = torch.arange(child.shape[1], device=child.device)
    best = _top(_best_first(candidate, valid, order), limits.width)
    safe = best.clamp_max(child.shape[1] - 1)
    picked_child = child.gather(1, safe)
    token = trie.token[limits.level[:, None], _code(trie.code, picked_child)]
    return _finish(
        candidate.gather(1, safe), parent.gather(1, safe), token, picked_child, valid.sum(1), limits
    )


def _children(node: Tensor, width: Tensor, trie: TrieView) -> tuple[Tensor, Tensor, Tensor]:
    """Lay out the children of all live beams in `capacity` slots: parent rank, child node, is it legal.

    Slots run by parent rank, then by code, since siblings ascend: the slot number is the tie order.
    """
    batch, beams = node.shape
    device = node.device
    first = trie.first_child[node].long()
    alive = torch.arange(beams, device=device) < width[:, None]
    degree = (trie.first_child[node + 1].long() - first).masked_fill(~alive, 0)
    end = degree.cumsum(1)
    slots = torch.arange(trie.capacity, device=device).expand(batch, -1).contiguous()
    parent = torch.searchsorted(end, slots, right=True).clamp_max(beams - 1)
    valid = slots < end[:, -1:]
    child = (first - (end - degree)).gather(1, parent) + slots
    child = child.masked_fill(~valid, 0)
    if trie.live is not None:
        assert trie.view is not None
        word = trie.live[trie.view[:, None], child // 32]
        valid = valid & ((word >> (child % 32)) & 1).bool()
    return parent, child, valid


def _code(codes: Tensor, node: Tensor) -> Tensor:
    """Unsigned code of each node as int64."""
    code = codes[node].long()
    return code & 0xFFFF if codes.dtype == torch.int16 else code


def _is_end(node: Tensor, level: Tensor, trie: TrieView) -> Tensor:
    """Whether each beam [B, W], whose node lies at `level` [B], has ended its SID."""
    end_code = trie.end_code[level.clamp_min(0)].masked_fill(level < 0, -1)
    return _code(trie.code, node) == end_code[:, None]


def _rank_in_parent(logit: Tensor, parent: Tensor, valid: Tensor, beams: int) -> Tensor:
    """Rank of each slot among its parent's valid slots by (logit descending, slot ascending)."""
    key = (parent << 32) | (0x7FFFFFFF - _sortable(logit))
    key = key.masked_fill(~valid, torch.iinfo(torch.int64).max)
    order = key.argsort(dim=1, stable=True)
    count = torch.zeros(parent.shape[0], beams, dtype=torch.long, device=parent.device)
    count.scatter_add_(1, parent, valid.long())
    start = count.cumsum(1) - count
    position = torch.arange(parent.shape[1], device=parent.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(1, order, position)
    return rank - start.gather(1, parent)


def _segment_logsumexp(logit: Tensor, parent: Tensor, valid: Tensor, beams: int) -> Tensor:
    """Log-sum-exp over the valid slots of each parent, float32 [B, W]; 0 where a parent has none."""
    masked = logit.masked_fill(~valid, -math.inf)
    peak = torch.full((logit.shape[0], beams), -math.inf, device=logit.device)
    peak.scatter_reduce_(1, parent, masked, "amax")
    peak = peak.masked_fill(peak == -math.inf, 0.0)
    total = torch.zeros_like(peak).scatter_add_(1, parent, torch.exp(masked - peak.gather(1, parent)))
    return peak + torch.log(total.masked_fill(total == 0, 1.0))


def _top(key: Tensor, width: int) -> Tensor:
    """Positions of the `width` largest keys of each row, largest first, padded past the row's end."""
    kept = min(width, key.shape[1])
    best = key.topk(kept, dim=1).indices
    return torch.nn.functional.pad(best, (0, width - kept), value=key.shape[1])


def _finish(
    score: Tensor, parent: Tensor, token: Tensor, node: Tensor, candidates: Tensor, limits: Limits
) -> Selection:
    """Cut at each request's width and margin, and blank what lies past the count."""
    rank = torch.arange(limits.width, device=score.device)[None]
    count = torch.minimum(limits.next_width.long(), candidates)
    near = (score >= score[:, :1] - limits.margin[:, None]) & (rank < count[:, None])
    kept = torch.maximum(near.sum(1), torch.minimum(limits.min_width.long(), count))
    count = torch.where(limits.margin == math.inf, count, kept)
    dead = rank >= count[:, None]
    int32 = torch.int32
    return Selection(
        score=score.masked_fill(dead, -math.inf),
        parent=parent.masked_fill(dead, 0).to(int32),
        token=token.masked_fill(dead, 0).to(int32),
        node=node.masked_fill(dead, 0).to(int32),
        count=count.to(int32),
    )


def select_unconstrained(
    logits: Tensor, path: PathView, limits: Limits, score: str, log_z: Tensor | None
) -> Selection:
    """See `contracts.SelectUnconstrained`; cuts each row to its best few before it compares rows."""
    batch, beams, vocab = logits.shape
    slot = path.slot.long()
    cum = path.cum[slot, :beams].reshape(-1, 1)
    rank = torch.arange(beams, device=logits.device)
    alive = (rank < path.width[slot][:, None]).reshape(-1, 1)
    score_k = limits.score_k[:, None].expand(-1, beams).reshape(-1, 1)
    first_index = (rank * vocab).expand(batch, -1).reshape(-1, 1)

    step = max(1, _CHUNK_ELEMENTS // vocab)
    flat = logits.reshape(-1, vocab)
    scores, keys = [], []
    for start in range(0, batch * beams, step):
        rows = slice(start, start + step)
        raw = flat[rows].float()
        valid = alive[rows].expand_as(raw)
        if score == "topk":
            valid = valid & (_rank_in_row(raw) < score_k[rows])
            z = _masked_logsumexp(raw, valid)
        else:
            z = row_logsumexp(raw) if log_z is None else log_z.reshape(-1)[rows]
        row_score = (raw - z[:, None]) + cum[rows]
        index = first_index[rows] + torch.arange(vocab, device=logits.device)
        key = _best_first(row_score, valid, index)
        best = key.topk(min(limits.width, vocab), dim=1)
        keys.append(best.values)
        scores.append(row_score.gather(1, best.indices))
    key, value = torch.cat(keys).view(batch, -1), torch.cat(scores).view(batch, -1)
    best = _top(key, limits.width).clamp_max(key.shape[1] - 1)
    index = _UINT32 - (key.gather(1, best) & _UINT32)
    lowest = torch.iinfo(torch.int64).min
    candidates = (key != lowest).sum(1)
    index = index.masked_fill(key.gather(1, best) == lowest, 0)
    node = torch.zeros_like(index)
    return _finish(value.gather(1, best), index // vocab, index % vocab, node, candidates, limits)


def _rank_in_row(raw: Tensor) -> Tensor:
    """Rank of each column of [rows, V] by (logit descending, column ascending)."""
    order = raw.argsort(dim=1, descending=True, stable=True)
    position = torch.arange(raw.shape[1], device=raw.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, position)


def _masked_logsumexp(raw: Tensor, valid: Tensor) -> Tensor:
    """Log-sum-exp of each row over its valid columns; 0 where a row has none."""
    z = torch.logsumexp(raw.masked_fill(~valid, -math.inf), dim=-1)
    return z.masked_fill(z == -math.inf, 0.0)
