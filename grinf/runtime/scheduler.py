"""Which batch runs next, and who is done. Pure policy: knows no tensor, no clock and no file."""

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice

from grinf.backend.interface import Batch, Capacity
from grinf.errors import RowError
from grinf.state.ledger import Ledger
from grinf.state.request import BeamWidthPolicy, Request, RequestStatus


class Scheduler:
    """Continuous batching of requests.

    1. Waiting requests join, between two steps, once no more than a quarter of a batch still runs: all
       requests cost about the same, so that to start late ones at once would only delay those before them.
       They are admitted in order, as far as the batch has room and the ledger grants leases; nobody starves.
    2. A decode batch holds the requests that share the oldest one's shape: width bucket and next width
       bucket, and the level where the columns of the logits depend on it. With a fixed width every step has
       the same shape, so requests at different steps share a batch; with a schedule the shape itself keeps
       the steps apart.
    3. A request that can never run fails when it is added, with the reason.
    """

    def __init__(self, capacity: Capacity, default_policy: BeamWidthPolicy) -> None:
        self.capacity = capacity
        self._default_policy = default_policy
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []

    @property
    def is_idle(self) -> bool:
        """Whether no request waits or runs."""
        return not self._waiting and not self._running

    @property
    def num_waiting(self) -> int:
        """Requests that wait for admission."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold a lease."""
        return len(self._running)

    def policy(self, request: Request) -> BeamWidthPolicy:
        """The request's own beam width policy, or the default one."""
        return request.policy or self._default_policy

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RowError: It could never run; the code says why.
        """
        self._check(request)
        request.status = RequestStatus.WAITING
        self._waiting.append(request)

    def clear(self) -> list[Request]:
        """Forget every request; return those that hold a lease."""
        held, self._running = self._running, []
        self._waiting.clear()
        return held

    def _check(self, request: Request) -> None:
        if request.status is not RequestStatus.NEW:
            what = f"request {request.request_id} is {request.status} already"
            raise RowError("served_twice", what, fix="make a new one")
        request.input_ids = ids = _token_ids(request.input_ids)
        limit, rows = self.capacity.max_context, self.capacity.vocab_rows
        if len(ids) == 0:
            raise RowError("empty_input", "the prompt has no tokens")
        if len(ids) > limit:
            raise RowError("overlong", f"the prompt has {len(ids)} tokens, the limit is {limit}")
        low, high = min(ids), max(ids)
        if low < 0 or high >= rows:
            wrong = low if low < 0 else high
            raise RowError("bad_token", f"token id {wrong} is outside the model's vocabulary of {rows}")
        self._check_filter(request)
        policy = self.policy(request)
        widest = max(min(policy.width(level), most) for level, most in enumerate(self.capacity.level_widths))
        if widest > self.capacity.max_width:
            raise RowError(
                "too_wide", f"{widest} beams exceed the {self.capacity.max_width} that the pool holds"
            )

    def _check_filter(self, request: Request) -> None:
        if request.view is not None and request.view not in self.capacity.views:
            raise RowError(
                "unknown_view", f"the trie has no view {request.view!r}", f"it has {self.capacity.views}"
            )
        live, words = request.live, self.capacity.filter_words
        if live is None:
            return
        if not words:
            raise RowError("no_filters", "the engine was loaded without room for filters of single requests")
        kind = f"{getattr(live, 'dtype', type(live).__name__)} {list(getattr(live, 'shape', ()))}"
        if kind != f"uint32 [{words}]":
            what = f"the filter is {kind}, the trie's nodes need uint32 [{words}]"
            raise RowError("bad_filter", what, fix="make it with Trie.mask_from_leaves, of bool [SIDs]")

    def next_batch(self, ledger: Ledger) -> Batch | None:
        """The batch to run now; None when nothing is left to do.

        Requests of a prefill batch have been given their lease.
        """
        may_join = len(self._running) <= self.capacity.max_batch // 4
        return (self._prefill_batch(ledger) if may_join else None) or self._decode_batch()

    def _prefill_batch(self, ledger: Ledger) -> Batch | None:
        admitted: list[Request] = []
        tokens = 0
        next_width = 0
        while self._waiting and len(self._running) < self.capacity.max_batch:
            request = self._waiting[0]
            tokens += request.context_len
            if admitted and tokens > self.capacity.max_batch_tokens:
                break
            width = self.capacity.bucket(self._bound(request, 0))
            if admitted and width != next_width:
                break
            lease = ledger.lease(request.context_len)
            if lease is None:
                break
            next_width = width
            request.lease, request.status, request.width = lease, RequestStatus.RUNNING, 1
            admitted.append(self._waiting.popleft())
            self._running.append(request)
        if not admitted:
            return None
        return Batch("prefill", tuple(admitted), 1, next_width, self._batch_level(0))

    def _decode_batch(self) -> Batch | None:
        if not self._running:
            return None
        shape = self._shape(self._running[0])
        alike = (request for request in self._running if self._shape(request) == shape)
        width, next_width, level = shape
        return Batch("decode", tuple(islice(alike, self.capacity.max_batch)), width, next_width, level)

    def _shape(self, request: Request) -> tuple[int, int, int | None]:
        """(width bucket, next width bucket, level or None): requests that agree may share a decode batch."""
        bucket = self.capacity.bucket
        return (
            bucket(request.width),
            bucket(self._bound(request, request.level)),
            self._batch_level(request.level),
        )

    def _batch_level(self, level: int) -> int | None:
        return None if self.capacity.mixed_levels and level > 0 else level

    def _bound(self, request: Request, level: int) -> int:
        """Beams that can be alive after the selection of `level`, as far as the host knows."""
        policy = self.policy(request)
        bound = min(policy.width(level), self.capacity.level_widths[level])
        return min(bound, request.width) if policy.margin is not None and level > 0 else bound

    def next_width(self, request: Request) -> int:
        """Beams that the coming selection of a running request may keep."""
        return self._bound(request, request.level)

    def needs_widths(self, batch: Batch) -> bool:
        """Whether the batch's live widths must be read back before the next step can be planned."""
        return any(
            self.policy(request).margin is not None and request.level + 1 < self.capacity.levels
            for request in batch.requests
        )

    def commit(self, batch: Batch, widths: Sequence[int] | None = None) -> list[Request]:
        """Record that a batch's selection was enqueued; return the requests that are done.

        Args:
            batch: What `next_batch` returned.
            widths: Live beams of each request of the batch, where `needs_widths` asked for them.
        """
        finished = []
        for index, request in enumerate(batch.requests):
            request.rows += request.width if request.level else request.context_len
            bound = self._bound(request, request.level)
            request.width = bound if widths is None else max(1, min(bound, widths[index]))
            request.level += 1
            if request.level == self.capacity.levels:
                request.status = RequestStatus.FINISHED
                self._running.remove(request)
                finished.append(request)
        return finished


def _token_ids(given: Iterable[int]) -> "array[int]":
    """The token ids of a prompt, whatever holds them.

    Raises:
        RowError: They are no integers, or of more than 64 bits.
    """
    try:
        return array("q", iter(given))
    except (TypeError, OverflowError) as error:
        raise RowError("bad_token", "the prompt is no sequence of token ids", str(error)) from error
