"""Results on their way from the device to the host, and into SIDs."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from grinf.backend.interface import Beams
from grinf.trie import Trie


class HostBeams:
    """The final beams of a few requests; implements `interface.Pending`."""

    def __init__(
        self, width: Tensor, cum: Tensor, found: Tensor, mass: Tensor | None, trie: Trie | None
    ) -> None:
        """Start the copies.

        Args:
            width: int32 [B], live beams.
            cum: float32 [B, W], scores.
            found: int32 [B, W] trie nodes with a trie, int32 [B, W, levels] token ids without.
            mass: float32 [B], probability of the codes of level 0; None: it was not asked for.
            trie: Turns nodes into SIDs.
        """
        self._trie = trie
        self._event: torch.cuda.Event | None = None
        self._host = tuple(_to_host(t) for t in (width, cum, found))
        self._mass = None if mass is None else _to_host(mass)
        if width.is_cuda:
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def is_ready(self) -> bool:
        """Whether `wait` would return at once."""
        return self._event is None or self._event.query()

    def wait(self) -> list[Beams]:
        """Block until the results are on the host."""
        if self._event is not None:
            self._event.synchronize()
        width, cum, found = (t.numpy() for t in self._host)
        masses = [None] * len(width) if self._mass is None else self._mass.tolist()
        return [
            self._beams(cum[b, :n].copy(), found[b, :n], mass)
            for b, (n, mass) in enumerate(zip(width.tolist(), masses, strict=True))
        ]

    def ages_ns(self, marks: Sequence[torch.cuda.Event | None]) -> list[int | None]:
        """How long before these results each mark was reached, by the device's clock; None: no mark."""
        event = self._event
        if event is None:
            return [None] * len(marks)
        return [None if mark is None else round(mark.elapsed_time(event) * 1e6) for mark in marks]

    def _beams(self, scores: np.ndarray, found: np.ndarray, mass: float | None) -> Beams:
        fault = "" if np.isfinite(scores).all() else "the model computed a score that is not a finite number"
        if self._trie is None:
            return Beams(found.copy(), scores, None, fault)
        leaves = found.astype(np.int64) - self._trie.leaf_offset
        return Beams(self._trie.sids(leaves), scores, leaves, fault, mass)


def _to_host(tensor: Tensor) -> Tensor:
    """Copy to the host; asynchronously, into pinned memory, from a GPU."""
    if not tensor.is_cuda:
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
