"""Several devices behind one queue of arrivals: an engine in a process for each, the least loaded is next.

In one process the engines would wait for each other's Python. The clock of Linux's `perf_counter_ns` is that
of the machine, so times from all processes compare.
"""

import gc
import select
from dataclasses import dataclass
from typing import Any

import numpy as np

from grinf.backend.interface import EngineOptions
from grinf.config.settings import BenchSettings
from grinf.errors import RowError
from grinf.jobs.bench.clock import Clock
from grinf.jobs.bench.engines import OpenEngine, load_catalog, open_engine
from grinf.jobs.bench.point import Point
from grinf.jobs.processes import Child, Inbox, Send, close_all, settings_on, share_cores
from grinf.state.request import RecallResult, Request

WAIT_S = 50e-6
"""Longest wait of a step: an arrival that comes due meanwhile is handed over this late, or little more."""


@dataclass(frozen=True, slots=True)
class Ready:
    """What a process says of its engine when it is open."""

    vocab_rows: int
    levels: int
    max_batch: int
    options: EngineOptions | None
    max_context: int | None
    sids_only: bool
    description: dict[str, Any]


def open_fleet(settings: BenchSettings, spec: str, point: Point) -> OpenEngine:
    """Open the engine of a point on every device of the settings.

    Raises:
        GrinfError: What a process refuses.
    """
    fleet = Fleet(settings, spec, point)
    first, options = fleet.ready[0], fleet.ready[0].options
    trie = load_catalog(point.catalog, options.model) if point.catalog and options else None
    capacity = first.max_batch * len(fleet.ready)
    return OpenEngine(fleet, capacity, trie, options, first.max_context, sids_only=first.sids_only)


class Fleet:
    """The engines of several processes as one `BenchEngine`.

    A request goes to the engine with the fewest prompt tokens in flight.

    Attributes:
        ready: What each process said.
        tokens: Prompt tokens in flight at each.
    """

    def __init__(self, settings: BenchSettings, spec: str, point: Point) -> None:
        self._children: list[Child] = []
        try:
            for device in settings.devices:
                arguments = (settings_on(settings, device), spec, point, len(settings.devices))
                self._children.append(Child(f"device {device}", _serve, *arguments))
            self.ready: list[Ready] = [child.receive() for child in self._children]
        except BaseException:
            self.close()
            raise
        self.tokens = [0] * len(self._children)
        self._in_flight: dict[int, tuple[int, int]] = {}  # Child and tokens of each request.
        self._number_of = {child.pipe.fileno(): number for number, child in enumerate(self._children)}

    @property
    def vocab_rows(self) -> int:
        """As `grinf.Engine`."""
        return self.ready[0].vocab_rows

    @property
    def levels(self) -> int:
        """As `grinf.Engine`."""
        return self.ready[0].levels

    @property
    def is_idle(self) -> bool:
        """Whether every request was answered."""
        return not self._in_flight

    def submit(self, request: Request) -> None:
        """Send a request to the least loaded engine; that it cannot be served is told by its result."""
        number = self.tokens.index(min(self.tokens))
        request.timeline.submitted_ns = Clock().now_ns()
        self._children[number].send(request)
        self.tokens[number] += request.context_len
        self._in_flight[request.request_id] = number, request.context_len

    def step(self) -> list[RecallResult]:
        """Give the results that have come; without any, wait for a moment.

        Raises:
            ChildDied: A process ended.
            GrinfError, RuntimeError: What one failed with.
        """
        readable, _, _ = select.select(self._number_of, [], [], WAIT_S)
        results: list[RecallResult] = []
        for file in readable:
            results += self._children[self._number_of[file]].receive()
        for result in results:
            number, tokens = self._in_flight.pop(result.request_id)
            self.tokens[number] -= tokens
        return results

    def describe(self) -> dict[str, Any]:
        """What each engine says of itself."""
        pairs = zip(self._children, self.ready, strict=True)
        return {"devices": [{"process": child.name} | ready.description for child, ready in pairs]}

    def close(self) -> None:
        """End the processes."""
        close_all(self._children)


def _serve(
    inbox: Inbox, send: Send, settings: BenchSettings, spec: str, point: Point, processes: int
) -> None:
    """Be the engine of a device; see `Child`."""
    share_cores(processes)
    opened = open_engine(settings, spec, point, Clock())
    engine = opened.engine
    gc.collect()
    gc.freeze()  # What is here stays; a collection that had to look through it would take long.
    ours = (opened.max_batch, opened.options, opened.max_context, opened.sids_only)
    send(Ready(engine.vocab_rows, engine.levels, *ours, engine.describe()))
    while True:
        while engine.is_idle or not inbox.empty():
            request: Request = inbox.get()
            try:
                engine.submit(request)
            except RowError as error:
                none = np.empty((0, engine.levels), np.int32), np.empty(0, np.float32), None
                send([RecallResult(request.request_id, *none, request.timeline, error)])
        if results := engine.step():
            send(results)
