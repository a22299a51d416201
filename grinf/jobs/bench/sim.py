"""A batch server on a virtual clock: an engine with a known answer, for trying the search."""

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from grinf.jobs.bench.clock import VirtualClock
from grinf.state.request import RecallResult, Request


@dataclass(frozen=True, slots=True)
class BatchServer:
    """Takes what waits, up to `max_batch`; a batch of n takes `base_ns` + n * `per_request_ns`."""

    base_ns: int = 9_000_000
    per_request_ns: int = 4_500_000
    max_batch: int = 16


class SimEngine:
    """Serves one batch per step.

    Args:
        server: The law of the service time.
        clock: The clock that `step` moves.
        beams: Width of every level; the last is the number of beams in an answer.
    """

    vocab_rows, levels = 32_000, 3

    def __init__(self, server: BatchServer, clock: VirtualClock, beams: tuple[int, ...] = (1,)) -> None:
        self.server, self.clock = server, clock
        self._waiting: deque[Request] = deque()
        ranks = np.arange(beams[-1], dtype=np.int32)
        self._answer = np.repeat(ranks[:, None], self.levels, axis=1), -ranks.astype(np.float32), None

    @property
    def is_idle(self) -> bool:
        """Whether no request waits."""
        return not self._waiting

    def submit(self, request: Request) -> None:
        """Queue a request."""
        request.timeline.submitted_ns = self.clock.now_ns()
        self._waiting.append(request)

    def step(self) -> list[RecallResult]:
        """Serve one batch and move the clock to its end."""
        batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), self.server.max_batch))]
        start, service = self.clock.now_ns(), self.server.base_ns + len(batch) * self.server.per_request_ns
        self.clock.sleep_until(start + service)
        for line in (request.timeline for request in batch):
            line.admitted_ns, line.done_ns = start, self.clock.now_ns()
            line.prefilled_ns, *line.step_ns = (start + service * n // self.levels for n in (1, 2, 3))
        return [RecallResult(request.request_id, *self._answer, request.timeline) for request in batch]

    def describe(self) -> dict[str, Any]:
        """The law of the service time."""
        return {"engine": "sim", "server": str(self.server)}

    def close(self) -> None:
        """Nothing to release."""
