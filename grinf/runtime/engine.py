"""The engine: admits requests, runs one batch per tick, hands results back. Knows no tensor."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Self

from grinf.backend.interface import Batch, Beams, EngineOptions, ExecutionBackend, Pending
from grinf.errors import RowError, UsageError
from grinf.runtime.beam_width import make_policy
from grinf.runtime.scheduler import Scheduler
from grinf.state.ledger import Ledger
from grinf.state.request import BeamWidthPolicy, RecallResult, Request, RequestStatus

if TYPE_CHECKING:
    from grinf.trie import Trie

_END: Any = object()  # No request, not even a wrong one.


class Engine:
    """Generative retrieval over one model and, with a trie, one catalogue.

    Attributes:
        max_context: Longest prompt, tokens.
        levels: Tokens per SID.
        vocab_rows: Valid token ids are below this.
        max_batch: Requests of one batch at most.
    """

    def __init__(
        self,
        backend: ExecutionBackend,
        policy: BeamWidthPolicy,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        capacity = backend.capacity
        self._backend, self._clock = backend, clock
        self._scheduler = Scheduler(capacity, policy)
        self._ledger = Ledger(capacity.num_pages, capacity.page_size, capacity.num_slots)
        self._pending: deque[tuple[Pending, list[Request]]] = deque()
        self._is_running = self._is_closed = False
        self.max_context, self.levels, self.vocab_rows, self.max_batch = (
            capacity.max_context,
            capacity.levels,
            capacity.vocab_rows,
            capacity.max_batch,
        )

    @classmethod
    def load(cls, options: EngineOptions, trie: "Trie | None" = None) -> Self:
        """Build an engine.

        Raises:
            UsageError: Options that contradict each other.
            ModelError, TrieFileError: A model or a catalogue that cannot be used, or not together.
            CapacityError: Not even one request fits into memory.
            KernelUnavailable: No implementation of an op fits the device.
        """
        from grinf.backend.load import checked, load_backend, sid_levels

        options = checked(options)
        levels = sid_levels(options, trie)
        policy = make_policy(options.beams, levels, options.score_margin, options.min_beams)
        return cls(load_backend(options, policy, levels, trie), policy)

    @property
    def is_idle(self) -> bool:
        """Whether no request waits, runs, or has a result on its way."""
        return self._scheduler.is_idle and not self._pending

    @property
    def num_in_flight(self) -> int:
        """Requests submitted and not yet returned."""
        on_the_way = sum(len(requests) for _, requests in self._pending)
        return self._scheduler.num_waiting + self._scheduler.num_running + on_the_way

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RowError: It can never be served: empty, overlong, an unknown token or view, too many beams.
            UsageError: The engine is closed.
        """
        self._refuse_if_closed()
        if not request.timeline.submitted_ns:
            request.timeline.submitted_ns = self._clock()
        self._scheduler.add(request)

    def step(self) -> list[RecallResult]:
        """Run one tick: return what has finished, or else enqueue at most one batch.

        Finished results never wait behind a batch, since to enqueue one may wait for the device. Only when
        nothing can be enqueued does it wait for results that are on their way.
        """
        self._refuse_if_closed()
        if results := self._take_ready():
            return results
        batch = self._scheduler.next_batch(self._ledger)
        if batch is None:
            return self._take_oldest()
        self._run(batch)
        return []

    def run(self, requests: Iterable[Request]) -> Iterator[RecallResult]:
        """Serve requests, pulling them lazily; results come in order of completion.

        A request that cannot be served yields a result with its `error`. Whoever leaves early gives up the
        requests that have no result yet.

        Raises:
            UsageError: The engine is closed, or still at work for another run.
        """
        if self._is_running or not self.is_idle:
            what = f"another run has not ended: {self.num_in_flight} requests are in flight"
            raise UsageError(
                what, "an engine serves one run at a time", "take all of its results, or close it"
            )
        self._is_running = True
        try:
            yield from self._serve(iter(requests))
        finally:
            self._is_running = False
            self._abandon()

    def _serve(self, source: Iterator[Request]) -> Iterator[RecallResult]:
        more = True
        while more or not self.is_idle:
            while more and self._scheduler.num_waiting < self.max_batch:
                request = next(source, _END)
                if request is _END:
                    more = False
                    break
                try:
                    self.submit(request)
                except RowError as error:
                    yield self._failed(request, error.kept())
            yield from self.step()

    def _abandon(self) -> None:
        """Forget all requests; what the device still does for them comes before any later work."""
        for request in self._scheduler.clear():
            if request.lease is not None:
                self._ledger.release(request.lease)
        self._pending.clear()

    def describe(self) -> dict[str, Any]:
        """Device, memory plan, kernels and buckets, ready for JSON; saved with every result."""
        return self._backend.describe()

    def close(self) -> None:
        """Free what the device holds; the engine can serve nothing then."""
        if not self._is_closed:
            self._is_closed = True
            self._backend.close()

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise UsageError("the engine is closed", fix="load another one")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, batch: Batch) -> None:
        now, is_prefill = self._clock(), batch.phase == "prefill"
        if is_prefill:
            for request in batch.requests:
                request.timeline.admitted_ns = now
        mark = self._backend.prefill(batch) if is_prefill else self._backend.decode(batch)
        widths = self._backend.widths(batch.requests) if self._scheduler.needs_widths(batch) else None
        now = self._clock()
        for request in batch.requests:
            request.marks.append(mark)
            if is_prefill:
                request.timeline.prefilled_ns = now
            else:
                request.timeline.step_ns.append(now)
        finished = self._scheduler.commit(batch, widths)
        if finished:
            self._pending.append((self._backend.collect(finished), finished))
            for request in finished:
                assert request.lease is not None
                self._ledger.release(request.lease)
                request.lease = None

    def _take_ready(self) -> list[RecallResult]:
        results = []
        while self._pending and self._pending[0][0].is_ready():
            results += self._take_oldest()
        return results

    def _take_oldest(self) -> list[RecallResult]:
        if not self._pending:
            return []
        pending, requests = self._pending.popleft()
        beams = pending.wait()
        now = self._clock()
        for request in requests:
            _finish_timeline(request, now, pending.ages_ns(request.marks))
        return [self._result(request, found) for request, found in zip(requests, beams, strict=True)]

    def _result(self, request: Request, beams: Beams) -> RecallResult:
        if beams.fault:
            return self._failed(
                request, RowError("non_finite", beams.fault, "the checkpoint is broken, or overflows")
            )
        return RecallResult(
            request.request_id,
            beams.sids,
            beams.scores,
            beams.leaves,
            request.timeline,
            sid_mass=beams.sid_mass,
        )

    def _failed(self, request: Request, error: RowError) -> RecallResult:
        request.status = RequestStatus.FAILED
        none = self._backend.no_beams()
        return RecallResult(request.request_id, none.sids, none.scores, none.leaves, request.timeline, error)


def _finish_timeline(request: Request, now: int, ages: list[int | None]) -> None:
    """Note the end; where the device knows when a step ended, that replaces the time of its launch."""
    timeline = request.timeline
    timeline.done_ns = now
    ends = [
        known if age is None else now - age
        for age, known in zip(ages, [timeline.prefilled_ns, *timeline.step_ns], strict=True)
    ]
    timeline.prefilled_ns, timeline.step_ns = ends[0], ends[1:]
