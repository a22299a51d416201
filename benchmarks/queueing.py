"""Which rule of admission serves most requests inside a latency SLA: the scheduler before a model of the GPU.

    python -m benchmarks.queueing [--lengths 100,500,1000] [--max-batch 8]

Poisson arrivals on a virtual clock. A step takes as long as measured on an H200, Qwen3-0.6B and 900 beams;
one step is in flight while the next is enqueued. A line for each rule: the highest rate with p99 <= 100 ms at
each length.
"""

import argparse
from collections import deque

import numpy as np

from benchmarks.throughput import say
from grinf.backend.interface import Batch, Capacity
from grinf.runtime.beam_width import make_policy
from grinf.runtime.scheduler import Scheduler
from grinf.state.ledger import Ledger
from grinf.state.request import Request

STEP_MS = {100: (0.85, 2.0), 500: (0.87, 2.03), 1000: (0.95, 2.2)}
"""Prompt tokens -> milliseconds of a decode step, and of each request in it."""
PREFILL_MS, TOKEN_MS = 1.8, 2.3e-3
HOST_MS, TRANSFER_MS, SLA_MS = 0.3, 0.4, 100.0
SEEDS, ARRIVALS = 3, 3000


class JoinsAtOnce(Scheduler):
    """Requests join as soon as there is room."""

    def next_batch(self, ledger: Ledger) -> Batch | None:
        """As the base class, without waiting."""
        return self._prefill_batch(ledger) or self._decode_batch()


class WaitsForAll(Scheduler):
    """Requests join when nothing runs."""

    def next_batch(self, ledger: Ledger) -> Batch | None:
        """As the base class, with an empty batch only."""
        return (None if self.num_running else self._prefill_batch(ledger)) or self._decode_batch()


RULES = {"at once": JoinsAtOnce, "a quarter runs (grinf)": Scheduler, "nothing runs": WaitsForAll}


def latencies(rule: type[Scheduler], length: int, rate: float, max_batch: int, seed: int) -> np.ndarray:
    """Serve one seed's arrivals at `rate` requests/s; milliseconds from each arrival to its result."""
    pages = -(-length // 64)
    capacity = Capacity(
        num_pages=2 * max_batch * pages, page_size=64, num_slots=2 * max_batch, max_context=length,
        max_batch=max_batch, max_batch_tokens=8192, max_width=900, vocab_rows=2, level_widths=(900,) * 3,
        width_buckets=(900,),
    )  # fmt: skip
    scheduler = rule(capacity, make_policy((900,), 3, None))
    ledger = Ledger(capacity.num_pages, capacity.page_size, capacity.num_slots)
    arrivals = np.cumsum(np.random.default_rng(seed).exponential(1e3 / rate, ARRIVALS))
    done, prompt = np.zeros(ARRIVALS), [1] * length
    now = device_free = 0.0
    upcoming, in_flight = 0, deque[float]()
    while True:
        while upcoming < ARRIVALS and arrivals[upcoming] <= now:
            scheduler.add(Request(upcoming, prompt))
            upcoming += 1
        batch = scheduler.next_batch(ledger)
        if batch is None:
            if upcoming == ARRIVALS:
                return done - arrivals
            now = max(now, arrivals[upcoming])
            continue
        device_free = max(now, device_free) + step_ms(batch, length)
        in_flight.append(device_free)
        for request in scheduler.commit(batch):
            done[request.request_id] = device_free + TRANSFER_MS
            assert request.lease is not None
            ledger.release(request.lease)
        while len(in_flight) > 1:
            now = max(now, in_flight.popleft())
        now += HOST_MS


def step_ms(batch: Batch, length: int) -> float:
    """Milliseconds of a step on the device."""
    step, each = (PREFILL_MS, TOKEN_MS * length) if batch.phase == "prefill" else STEP_MS[length]
    return step + each * len(batch.requests)


def highest_rate(rule: type[Scheduler], length: int, max_batch: int) -> float:
    """Bisect the rate at which the mean p99 of some seeds reaches the SLA."""
    low, high = 20.0, 400.0
    while high - low > 1.0:
        rate = (low + high) / 2
        p99 = [np.quantile(latencies(rule, length, rate, max_batch, seed), 0.99) for seed in range(SEEDS)]
        low, high = (rate, high) if np.mean(p99) <= SLA_MS else (low, rate)
    return low


def main() -> None:
    """Print a line for each rule."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", default="100,500,1000")
    parser.add_argument("--max-batch", type=int, default=8)
    args = parser.parse_args()
    for name, rule in RULES.items():
        rates = {n: round(highest_rate(rule, n, args.max_batch)) for n in map(int, args.lengths.split(","))}
        say(
            {
                "requests join when": name,
                "max_batch": args.max_batch,
                **{f"{n} tokens": r for n, r in rates.items()},
            }
        )


if __name__ == "__main__":
    main()
