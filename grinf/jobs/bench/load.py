"""Load of a probe: when each request arrives, decided before the probe starts, and what it asks."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np


class Phase(IntEnum):
    """Part of a probe that a request belongs to; only MEASURE counts."""

    RAMP = 0
    MEASURE = 1
    TAIL = 2


@dataclass(slots=True)
class OpenLoop:
    """Arrivals at absolute times, whatever the engine does.

    Attributes:
        sched_ns: int64 [n], ascending, relative to the start of the probe.
        phases: uint8 [n], `Phase` of each request.
    """

    sched_ns: np.ndarray
    phases: np.ndarray
    _next: int = 0

    def due(self, now_ns: int, in_flight: int) -> list[tuple[int, int]]:
        """(index, scheduled time) of every request that has arrived by now."""
        first, self._next = self._next, int(np.searchsorted(self.sched_ns, now_ns, side="right"))
        return [(i, int(self.sched_ns[i])) for i in range(first, self._next)]

    def next_ns(self) -> int | None:
        """Scheduled time of the next request; None: no request is left."""
        return int(self.sched_ns[self._next]) if self._next < len(self.sched_ns) else None

    def phase_of(self, index: int) -> Phase:
        """Ramp, measured or tail."""
        return Phase(self.phases[index])


class ClosedLoop:
    """`concurrency` callers that ask again as soon as they are answered; their first requests are the ramp.

    It ends after `n` measured requests and `min_ns`, or at `max_ns`, but not before it has a rate.
    """

    def __init__(self, concurrency: int, n: int, *, min_ns: int, max_ns: int) -> None:
        self._concurrency, self._n, self._min_ns, self._max_ns = concurrency, n, min_ns, max_ns
        self._ramp, self._least = concurrency if concurrency > 1 else 0, max(5, 2 * concurrency)
        self._issued = self._now = 0

    def due(self, now_ns: int, in_flight: int) -> list[tuple[int, int]]:
        """One request for each caller that waits for nothing; it is scheduled now."""
        self._now = now_ns
        free = self._concurrency - in_flight if self.next_ns() is not None else 0
        first, self._issued = self._issued, self._issued + free
        return [(i, now_ns) for i in range(first, self._issued)]

    def next_ns(self) -> int | None:
        """Now, while the loop goes on."""
        measured = self._issued - self._ramp
        ended = (measured >= self._n and self._now >= self._min_ns) or self._now >= self._max_ns
        return None if ended and measured >= self._least else self._now

    def phase_of(self, index: int) -> Phase:
        """Ramp or measured."""
        return Phase.RAMP if index < self._ramp else Phase.MEASURE


def poisson(rate: float, n: int, rng: np.random.Generator, *, ramp_ns: int, tail_ns: int) -> OpenLoop:
    """Poisson arrivals at `rate` requests/s: a ramp, `n` measured ones, and a tail that keeps the load up.

    Each part is rescaled to last exactly its count divided by `rate`: else the rate on offer is off by 1-2 %.
    """
    sizes = [max(1, round(rate * ramp_ns / 1e9)), n, max(1, round(rate * tail_ns / 1e9))]
    gaps = [rng.exponential(size=size) for size in sizes]
    scaled = [gap * (size / rate / gap.sum()) for gap, size in zip(gaps, sizes, strict=True)]
    sched_ns = (np.cumsum(np.concatenate(scaled)) * 1e9).astype(np.int64)
    return OpenLoop(sched_ns, np.repeat(np.array(Phase, np.uint8), sizes))


def random_prompts(length: int, vocab_rows: int, rng: np.random.Generator) -> Callable[[int], Sequence[int]]:
    """Distinct prompts of uniform token ids, so that no prefix is ever shared.

    Prompt i is one window of a long random sequence; the stride and the number of windows are coprime.
    """
    windows, stride = 999_983, 7_919
    table = rng.integers(0, vocab_rows, windows + length, dtype=np.int32)

    def prompt(index: int) -> Sequence[int]:
        start = index * stride % windows
        return array("i", table[start : start + length].tobytes())

    return prompt
