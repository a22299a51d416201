"""The judge of `--verify`: the same weights in float32, plain attention over the tree of beams, no cache.

Left in the engine's dtype, it is the yardstick of what rounding alone does to a search.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from grinf.backend.interface import EngineOptions
from grinf.model.config import read_config
from grinf.model.decoder import Decoder, rotary_table
from grinf.model.weights import load_weights
from grinf.ops import reference
from grinf.trie import Trie

Sids = np.ndarray | Sequence[np.ndarray]
OPS: Any = SimpleNamespace(add_rms_norm=reference.add_rms_norm, swiglu=reference.swiglu)


@dataclass(frozen=True, slots=True)
class Continuations:
    """What may follow the beams of a level: int64 [m] each; `row` is the beam, `node` the trie node.

    Attributes:
        log_prob: float32 [m], under the score mode; -inf for what the mode cuts off.
    """

    row: Tensor
    token: Tensor
    node: Tensor
    log_prob: Tensor

    def at(self, index: Tensor) -> "Continuations":
        """Some of them: the beams of the next level."""
        return Continuations(self.row[index], self.token[index], self.node[index], self.log_prob[index])


class Teacher:
    """Scores given SIDs, and searches for the best ones.

    Args:
        options: How the engine under test was built; its weights are rounded to its dtype, then widened.
        trie: The engine's catalogue, without short SIDs.
        widen: Compute in float32; else in the engine's dtype.
    """

    def __init__(self, options: EngineOptions, trie: Trie | None, *, widen: bool = True) -> None:
        path = Path(options.model)
        self._options, self._trie, self._config = options, trie, read_config(path)
        self._levels = trie.levels if trie is not None else options.levels or 3
        on_gpu = options.device != "cpu" and torch.cuda.is_available()
        name = ("cuda:0" if options.device == "auto" else options.device) if on_gpu else "cpu"
        self._device = torch.device(name)
        natural = self._config.dtype if on_gpu else "float32"
        self.dtype = natural if options.dtype == "auto" else options.dtype
        narrow: Any = load_weights(path, self._config, getattr(torch, self.dtype), self._device, options.seed)
        if widen:
            narrow = replace(_widened(narrow), layers=[_widened(layer) for layer in narrow.layers])
        self._model = Decoder(self._config, narrow)
        self._tokens: list[Tensor] = []
        if trie is not None and trie.token_ids is not None:
            self._children = [self._int64(ptr) for ptr in trie.child_ptr]
            self._codes = [self._int64(codes) for codes in trie.codes]
            self._tokens = [self._int64(ids) for ids in trie.token_ids]

    def scores(self, prompt: Sequence[int], sids: np.ndarray) -> np.ndarray:
        """Score of each SID, float32 [n]; -inf where the search could not have chosen it."""
        beams: list[Continuations] = []
        row, total = self._int64(np.zeros(len(sids))), torch.zeros(len(sids), device=self._device)
        for token in self._tokens_of(sids).T:
            found = self._continue(prompt, beams)
            place, known = self._places(found, row, token)
            total += torch.where(known, found.log_prob[place], -torch.inf)
            kept, row = torch.unique(place, return_inverse=True)
            beams.append(found.at(kept))
        return total.cpu().numpy()

    def search(
        self, prompt: Sequence[int], near: Sids = (), away: Sids = (), slack: float = 0.0
    ) -> tuple[np.ndarray, np.ndarray]:
        """The answer of a beam search, best first, and how far each beam is from being none.

        Which of two beams at a border is kept is decided by rounding, and all that follows from them with it.
        To be comparable, this search follows another one there: before the last level, a beam that leads to
        one of the SIDs `near` counts as `slack` nats better, and one that only leads to SIDs `away` worse.

        Returns:
            int32 [n, levels], codes, or token ids without a trie; and float32 [n], the least that the beam or
            one before it lies above what was cut, nats: infinite if nothing was, or if `near` has it.
        """
        beams: list[Continuations] = []
        both = [np.reshape(sids, (-1, self._levels)) for sids in (away, near)]
        follow = self._tokens_of(np.concatenate(both))
        row, liked = self._int64(np.zeros(len(follow))), self._int64(np.arange(len(follow))) >= len(away)
        cum, paths = torch.zeros(1, device=self._device), self._int64(np.empty((1, 0)))
        clear = cum + torch.inf
        for level in range(self._levels):
            found = self._continue(prompt, beams)
            value = found.log_prob + cum[found.row]
            place, known = self._places(found, row, follow[:, level])
            follow, place, liked = follow[known], place[known], liked[known]
            ranked, good, bad = value.clone(), place[liked], place[~liked]
            if level < self._levels - 1:
                ranked[bad] = value[bad] - slack
                ranked[good] = value[good] + slack
            keep = min(self._width(level), int((value > -torch.inf).sum()))
            top, best = ranked.topk(min(keep + 1, len(ranked)))
            border, best = top[keep] if keep < len(top) else -torch.inf, best[:keep]
            cum = value[best]
            sure = top[:keep] > cum
            clear = torch.minimum(clear[found.row[best]], torch.where(sure, torch.inf, cum - border))
            beams.append(found.at(best))
            paths = torch.cat([paths[beams[-1].row], beams[-1].token[:, None]], dim=1)
            sorted_best, order = best.sort()
            kept = torch.isin(place, best)
            row = order[torch.searchsorted(sorted_best, place[kept])]
            follow, liked = follow[kept], liked[kept]
        nodes = beams[-1].node.cpu().numpy()
        sids = paths.int().cpu().numpy() if self._trie is None else self._trie.sids(nodes)
        return sids, clear.cpu().numpy()

    def _tokens_of(self, sids: np.ndarray) -> Tensor:
        """Token ids of SIDs, int64 [n, levels]."""
        columns = self._int64(sids)
        if not self._tokens:
            return columns
        return torch.stack([ids[codes] for ids, codes in zip(self._tokens, columns.T, strict=True)], dim=1)

    def _places(self, found: Continuations, row: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """Where continuations (beam, token id) stand in `found`, int64 [n], and whether they do, bool [n]."""
        wanted, rows = row * self._config.vocab_rows + token, self._config.vocab_rows
        if not self._tokens:  # Every continuation is there, in this order.
            return wanted, torch.ones_like(wanted, dtype=torch.bool)
        keys, order = torch.sort(found.row * rows + found.token)
        place = torch.searchsorted(keys, wanted).clamp(max=len(keys) - 1)
        return order[place], keys[place] == wanted

    def _int64(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._device)

    def _width(self, level: int) -> int:
        return self._options.beams[min(level, len(self._options.beams) - 1)]

    def _continue(self, prompt: Sequence[int], beams: list[Continuations]) -> Continuations:
        """Every continuation of the last beams, in order of beam, then code or token id."""
        logits, level = self._logits(prompt, beams), len(beams)
        if not self._tokens:
            every = torch.arange(logits.numel(), device=self._device)
            row, token = every // logits.shape[1], every % logits.shape[1]
            return Continuations(row, token, token, self._log_prob(logits, row, token, level))
        first, end = self._int64(np.zeros(1)), self._int64(np.array([len(self._codes[0])]))
        if level:
            first, end = (self._children[level - 1][beams[-1].node + side] for side in (0, 1))
        row = torch.repeat_interleave(end - first)
        node = torch.arange(len(row), device=self._device) + (end - (end - first).cumsum(0))[row]
        token = self._tokens[level][self._codes[level][node]]
        return Continuations(row, token, node, self._log_prob(logits, row, token, level))

    def _log_prob(self, logits: Tensor, row: Tensor, token: Tensor, level: int) -> Tensor:
        score, value = self._options.score, logits[row, token]
        if score == "vocab":
            return value - logits.logsumexp(1)[row]
        if score == "level":
            return value - logits[:, self._tokens[level][self._tokens[level] >= 0]].logsumexp(1)[row]
        legal = torch.full_like(logits, -torch.inf)
        legal[row, token] = value
        if score == "topk":
            k = min(self._options.score_k or self._width(level), legal.shape[1])
            legal.masked_fill_(legal < legal.topk(k).values[:, -1:], -torch.inf)
        return legal[row, token] - legal.logsumexp(1)[row]

    def _logits(self, prompt: Sequence[int], beams: list[Continuations]) -> Tensor:
        """Float32 logits [n, V] after the last beams (or the prompt): one forward over prompt and tree."""
        length = len(prompt)
        starts = np.cumsum([0, length, *(len(level.row) for level in beams)]).tolist()
        mask = torch.zeros(starts[-1], starts[-1], dtype=torch.bool, device=self._device)
        mask[:length, :length] = True
        mask.tril_()
        positions = torch.arange(starts[-1], device=self._device)
        for depth, (first, end) in enumerate(pairwise(starts[1:])):
            mask[first:end] = mask[starts[depth] + beams[depth].row] if depth else mask[length - 1]
            mask[first:end, first:end] = torch.eye(end - first, dtype=torch.bool, device=self._device)
            positions[first:end] = length + depth
        tokens = torch.cat([self._int64(np.asarray(prompt)), *(level.token for level in beams)])
        hidden = self._forward(tokens, positions, mask)
        return F.linear(hidden[starts[-2] :] if beams else hidden[-1:], self._model.weights.head).float()

    def _forward(self, tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        config, n, device = self._config, len(tokens), self._device
        cos_sin, rows = rotary_table(config, int(positions.max()) + 1, device), torch.arange(n, device=device)
        shape, dtype = (n, config.num_kv_heads, config.head_dim), self._model.weights.head.dtype
        k, v = (torch.empty(shape, dtype=dtype, device=device) for _ in "kv")

        def attend(layer: int, qkv: Tensor) -> Tensor:
            heads, w = qkv.view(n, -1, config.head_dim), self._model.weights.layers[layer]
            norms = w.q_norm, w.k_norm, config.rms_norm_eps
            reference.qk_norm_rope_write(heads, *norms, cos_sin, positions, k, v, rows, keep_k=False)
            q = heads[:, : config.num_q_heads].transpose(0, 1)[None]
            past = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
            attended = F.scaled_dot_product_attention(q, *past, mask, enable_gqa=True)
            return attended[0].transpose(0, 1).flatten(1)

        with torch.inference_mode():
            return self._model.forward(tokens, attend, OPS)


def _widened(weights: Any) -> Any:
    """The tensors of a weights dataclass in float32."""
    tensors = {field.name: getattr(weights, field.name) for field in fields(weights)}
    return replace(weights, **{name: t.float() for name, t in tensors.items() if isinstance(t, Tensor)})
