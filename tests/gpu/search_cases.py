"""Random searches: tries in CSR form, live beams somewhere in them, logits with many equal values."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from grinf.ops.contracts import Limits, PathView, TrieView


@dataclass(frozen=True)
class Catalogue:
    """A trie as numpy arrays; nodes are numbered level by level, the root is node 0.

    Attributes:
        first_child: [inner nodes + 1]. code: [nodes]. level_start: first node of each SID level, and the end.
        end_code: Code that ends a short SID at each level but the first; -1: none.
    """

    first_child: np.ndarray
    code: np.ndarray
    level_start: tuple[int, ...]
    end_code: int

    @property
    def levels(self) -> int:
        return len(self.level_start) - 1

    def nodes(self, level: int) -> np.ndarray:
        """Nodes of a SID level."""
        return np.arange(self.level_start[level], self.level_start[level + 1])

    def capacity(self, level: int, width: int) -> int:
        """Candidates of a selection at `level` from `width` beams, at most."""
        parents = self.nodes(level - 1) if level else np.array([0])
        degree = self.first_child[parents + 1] - self.first_child[parents]
        return int(np.sort(degree)[::-1][:width].sum())


def build_catalogue(sids: np.ndarray, end_code: int = -1) -> Catalogue:
    """Build the trie of SIDs [n, levels]; a short SID is padded with `end_code`."""
    sids = np.unique(sids, axis=0)
    levels = sids.shape[1]
    first_child, code, start, rank = [np.array([1])], [np.array([0])], [1], np.zeros(len(sids), np.int64)
    for level in range(levels):
        new = np.ones(len(sids), bool)
        new[1:] = (sids[1:, : level + 1] != sids[:-1, : level + 1]).any(1)
        code.append(sids[new, level])
        children = np.bincount(rank[new], minlength=rank.max() + 1)
        first_child.append(first_child[-1][-1] + children.cumsum())
        start.append(start[-1] + int(new.sum()))
        rank = new.cumsum() - 1
    return Catalogue(np.concatenate(first_child), np.concatenate(code), tuple(start), end_code)


def random_sids(rng: np.random.Generator, items: int, sizes: Sequence[int], end_code: int = -1) -> np.ndarray:
    """SIDs of skewed codes below `sizes`, some of them short if there is an end code."""
    columns = [np.minimum(rng.pareto(1.2, items) * size / 20, size - 1).astype(np.int64) for size in sizes]
    sids = np.stack(columns, 1)
    if end_code >= 0:
        depth = rng.integers(1, len(sizes) + 1, items)
        sids[np.arange(len(sizes)) >= depth[:, None]] = end_code
    return sids


@dataclass(frozen=True)
class Problem:
    """The arguments of a constrained selection but for the scores."""

    logits: Tensor
    path: PathView
    trie: TrieView
    limits: Limits
    log_z: Tensor


def quantised(rng: np.random.Generator, shape: Sequence[int], step: float) -> np.ndarray:
    """Normal numbers rounded to multiples of `step`."""
    return (np.round(rng.standard_normal(shape, np.float32) * 2 / step) * step).astype(np.float32)


def make_path(rng: np.random.Generator, widths: Sequence[int], rows: int, step: float) -> PathView:
    """Pools with shuffled slots, garbage past the live widths, and a scratch row at the end."""
    slots = rng.permutation(len(widths) + 2)[: len(widths)]
    pool_width = rows + 3
    cum = np.full((len(widths) + 3, pool_width), np.nan, np.float32)
    width = np.zeros(len(widths) + 3, np.int32)
    for slot, live in zip(slots, widths, strict=True):
        cum[slot, :live] = -np.abs(quantised(rng, (live,), step))
        width[slot] = live
    node = np.zeros_like(cum, np.int32)
    return PathView(*(torch.from_numpy(a) for a in (slots.astype(np.int32), cum, node, width)), rows)


def make_limits(
    levels: Sequence[int], next_widths: Sequence[int], width: int, score_k: int, margin: float, min_width: int
) -> Limits:
    """Limits of a batch; only levels and widths differ between its requests."""
    batch = len(levels)
    return Limits(
        level=torch.tensor(levels, dtype=torch.int32),
        next_width=torch.tensor(next_widths, dtype=torch.int32),
        score_k=torch.full((batch,), score_k, dtype=torch.int32),
        margin=torch.full((batch,), margin),
        min_width=torch.full((batch,), min_width, dtype=torch.int32),
        width=width,
    )


def make_problem(
    catalogue: Catalogue,
    levels: Sequence[int],
    widths: Sequence[int],
    next_widths: Sequence[int],
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    step: float = 0.25,
    mapped: bool = True,
    filtered: bool = False,
    score_k: int = 5,
    margin: float = math.inf,
    min_width: int = 1,
    rows: int | None = None,
    width: int | None = None,
) -> Problem:
    """A batch of requests that choose `levels` from `widths` live beams, the widest nodes among them."""
    rng = np.random.default_rng(seed)
    rows = max(1, *widths) if rows is None else rows
    codes = int(catalogue.code.max()) + 1
    columns = 2 * codes * catalogue.levels if mapped else codes
    path = make_path(rng, widths, rows, step)
    for slot, level, live in zip(path.slot, levels, widths, strict=True):
        nodes = catalogue.nodes(level - 1) if level else np.array([0])
        degree = catalogue.first_child[nodes + 1] - catalogue.first_child[nodes]
        wide = nodes[np.argsort(-degree, kind="stable")[: live // 2]]
        others = rng.permutation(np.setdiff1d(nodes, wide))[: live - len(wide)]
        chosen = rng.permutation(np.concatenate([wide, others])).astype(np.int32)
        path.width[slot] = len(chosen)
        path.node[slot, : len(chosen)] = torch.from_numpy(chosen)
    places = rng.permutation(2 * codes * catalogue.levels)[: codes * catalogue.levels].reshape(-1, codes)
    code_type = np.int16 if codes <= 2**16 else np.int32
    masks = rng.random((2, len(catalogue.code))) < 0.6
    padded = np.zeros((2, -(-masks.shape[1] // 32) * 32), bool)
    padded[:, : masks.shape[1]] = masks
    trie = TrieView(
        first_child=torch.from_numpy(catalogue.first_child.astype(np.int32)),
        code=torch.from_numpy(catalogue.code.astype(np.uint32).astype(code_type)),
        column=torch.from_numpy(places.astype(np.int32)) if mapped else None,
        token=torch.from_numpy((7 + np.arange(codes * catalogue.levels)).reshape(-1, codes).astype(np.int32)),
        end_code=torch.tensor([-1] + [catalogue.end_code] * (catalogue.levels - 1), dtype=torch.int32),
        live=torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32))
        if filtered
        else None,
        view=torch.tensor(rng.integers(0, 2, len(levels)), dtype=torch.int32) if filtered else None,
        capacity=max(catalogue.capacity(level, live) for level, live in zip(levels, widths, strict=True)),
    )
    logits = torch.from_numpy(quantised(rng, (len(levels), rows, columns), step)).to(dtype)
    width = max(1, *next_widths) if width is None else width
    limits = make_limits(levels, next_widths, width, score_k, margin, min_width)
    log_z = torch.from_numpy(3 + quantised(rng, (len(levels), rows), step))
    return Problem(logits, path, trie, limits, log_z)


def to_device(value: object, device: torch.device | str) -> object:
    """Move a tensor, or every tensor of a view."""
    if isinstance(value, Tensor):
        return value.to(device)
    fields = getattr(value, "__dataclass_fields__", None)
    return (
        value
        if fields is None
        else replace(value, **{f: to_device(getattr(value, f), device) for f in fields})
    )
