"""Where a search begins: the rate that a simple server with the measured floor and capacity would keep."""

import math
from collections.abc import Sequence

import numpy as np

from grinf.config.parse import Sla
from grinf.jobs.bench.probe import latencies, meets

ARRIVALS = 4000


def likely_rate(
    floor_ms: float, capacity: float, max_batch: int, slas: Sequence[Sla], lowest: float
) -> float:
    """Highest rate, requests/s, at which a batch server keeps every SLA, between `lowest` and `capacity`.

    The server takes what waits, up to `max_batch`; a batch of one takes the floor, and a full one as long as
    the capacity says. A real engine differs from it, so this is a place to start, and no result.

    Args:
        floor_ms: Latency of a request alone.
        capacity: Completions/s of the full engine.
        max_batch: Requests that the engine holds at once.
        slas: What must be kept.
        lowest: Rate to give where none is kept.
    """
    full_ms = 1e3 * max_batch / capacity
    each_ms = max(0.0, (full_ms - floor_ms) / (max_batch - 1)) if max_batch > 1 else full_ms
    base_ms, gaps = full_ms - max_batch * each_ms, np.random.default_rng(0).exponential(size=ARRIVALS)

    def keeps(rate: float) -> bool:
        e2e_ms = served_ms(np.cumsum(gaps) * 1e3 / rate, base_ms, each_ms, max_batch)
        misses = [int((e2e_ms > sla.limit_ns / 1e6).sum()) for sla in slas]
        return meets(slas, ARRIVALS, misses, latencies(e2e_ms))

    low, high = (capacity, capacity) if keeps(capacity) else (lowest, capacity)
    while high > 1.02 * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low


def served_ms(arrival_ms: np.ndarray, base_ms: float, each_ms: float, max_batch: int) -> np.ndarray:
    """Latency of each arrival at the batch server, ms."""
    e2e_ms, served, now = np.empty_like(arrival_ms), 0, 0.0
    while served < len(arrival_ms):
        now = max(now, float(arrival_ms[served]))
        end = min(served + max_batch, int(np.searchsorted(arrival_ms, now, side="right")))
        now += base_ms + each_ms * (end - served)
        e2e_ms[served:end] = now - arrival_ms[served:end]
        served = end
    return e2e_ms
