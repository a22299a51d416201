"""Engine and scheduler over a backend that only takes notes: leases, order, shapes, every end."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grinf.backend.interface import Batch, Beams, Capacity
from grinf.errors import RowError, UsageError
from grinf.runtime.beam_width import make_policy
from grinf.runtime.engine import Engine
from grinf.state.request import Request, RequestStatus

ROOMY = Capacity(
    num_pages=64,
    page_size=4,
    num_slots=16,
    max_context=40,
    max_batch=4,
    max_batch_tokens=60,
    max_width=50,
    vocab_rows=100,
    level_widths=(10, 40, 50),
)


@dataclass
class Done:
    """Results that become ready after a few polls, as a GPU's would."""

    beams: list[Beams]
    polls: int

    def is_ready(self) -> bool:
        self.polls -= 1
        return self.polls < 0

    def wait(self) -> list[Beams]:
        return self.beams

    def ages_ns(self, marks: Sequence[int | None]) -> list[int | None]:
        return [None if mark is None else 1000 - mark for mark in marks]


@dataclass
class NotingBackend:
    """Runs nothing, writes down every batch with the leases and steps of its requests."""

    capacity: Capacity
    polls: int = 0
    kept: int = 1
    has_clock: bool = False
    batches: list[Batch] = field(default_factory=list)
    steps: list[list[int]] = field(default_factory=list)
    rows: dict[int, int] = field(default_factory=dict)
    owner_of_page: dict[int, int] = field(default_factory=dict)

    def _note(self, batch: Batch) -> int | None:
        self.batches.append(batch)
        self.steps.append([request.level for request in batch.requests])
        pages: dict[int, int] = {}
        for request in batch.requests:
            assert request.lease is not None
            assert len(request.lease.pages) * self.capacity.page_size >= request.context_len
            for page in request.lease.pages:
                assert pages.setdefault(page, request.request_id) == request.request_id
        slots = [request.lease.beam_slot for request in batch.requests if request.lease]
        assert len(set(slots)) == len(slots)
        return len(self.batches) if self.has_clock else None

    def prefill(self, batch: Batch) -> int | None:
        for request in batch.requests:
            assert request.level == 0
            assert request.request_id not in self.rows, "a prompt is computed once"
            self.rows[request.request_id] = request.context_len
        return self._note(batch)

    def decode(self, batch: Batch) -> int | None:
        for request in batch.requests:
            assert 0 < request.level < self.capacity.levels
            assert request.width <= batch.width
            self.rows[request.request_id] += request.width
        return self._note(batch)

    def widths(self, requests: Sequence[Request]) -> list[int]:
        return [self.kept for _ in requests]

    def collect(self, requests: Sequence[Request]) -> Done:
        levels = self.capacity.levels
        found = [Beams(np.zeros((1, levels), np.int32), np.zeros(1, np.float32), None) for _ in requests]
        return Done(found, self.polls)

    def no_beams(self) -> Beams:
        return Beams(np.empty((0, self.capacity.levels), np.int32), np.empty(0, np.float32), None)

    def describe(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


def make_engine(
    capacity: Capacity, beams: tuple[int, ...] = (50,), margin: float | None = None, **notes: Any
):
    backend = NotingBackend(capacity, **notes)
    return Engine(backend, make_policy(beams, capacity.levels, margin)), backend


@given(
    lengths=st.lists(st.integers(1, 40), max_size=30),
    pages=st.integers(10, 40),
    slots=st.integers(1, 6),
    max_batch=st.integers(1, 5),
    tokens=st.integers(1, 100),
    beams=st.sampled_from([(50,), (5, 20, 50), (1,)]),
    margin=st.sampled_from([None, 3.0]),
    polls=st.integers(0, 3),
    mixed=st.booleans(),
)
def test_every_request_ends_and_no_lease_leaks(
    lengths: list,
    pages: int,
    slots: int,
    max_batch: int,
    tokens: int,
    beams: tuple,
    margin,
    polls: int,
    mixed: bool,
) -> None:
    margin = None if beams == (5, 20, 50) else margin
    capacity = replace(
        ROOMY,
        num_pages=pages,
        num_slots=slots,
        max_batch=max_batch,
        max_batch_tokens=tokens,
        mixed_levels=mixed,
        width_buckets=(8, 50),
    )
    engine, backend = make_engine(capacity, beams, margin, polls=polls, kept=2)
    results = list(engine.run(Request(i, [1] * n) for i, n in enumerate(lengths)))
    assert sorted(r.request_id for r in results) == list(range(len(lengths)))
    assert engine._ledger.free_pages == pages
    assert engine._ledger.free_slots == slots
    assert engine.is_idle
    for batch, levels in zip(backend.batches, backend.steps, strict=True):
        assert 1 <= len(batch.requests) <= max_batch
        prompt_tokens = sum(r.context_len for r in batch.requests)
        assert batch.phase == "decode" or prompt_tokens <= tokens or len(batch.requests) == 1
        assert mixed or len(set(levels)) == 1
    admitted = [r.request_id for batch in backend.batches if batch.phase == "prefill" for r in batch.requests]
    assert admitted == sorted(admitted), "admission keeps the order of arrival"


def test_model_rows_are_the_prompt_once_and_the_widths_before_the_last_level() -> None:
    engine, backend = make_engine(ROOMY, (5, 20, 50))
    list(engine.run([Request(0, [1] * 17), Request(1, [1] * 3)]))
    assert backend.rows == {0: 17 + 5 + 20, 1: 3 + 5 + 20}


def test_widths_are_bounded_by_the_catalogue() -> None:
    engine, backend = make_engine(ROOMY, (50,))
    list(engine.run([Request(0, [1] * 17)]))
    assert backend.rows == {0: 17 + 10 + 40}


def test_a_new_request_joins_between_the_steps_of_a_running_one() -> None:
    capacity = replace(ROOMY, level_widths=(50, 50, 50))
    engine, backend = make_engine(capacity)
    engine.submit(Request(0, [1] * 8))
    engine.step()  # prefill of 0
    engine.step()  # 0 at step 0
    engine.submit(Request(1, [1] * 8))
    while not engine.is_idle:
        engine.step()
    phases = [(batch.phase, [r.request_id for r in batch.requests]) for batch in backend.batches]
    assert phases == [
        ("prefill", [0]),
        ("decode", [0]),
        ("prefill", [1]),
        ("decode", [0, 1]),
        ("decode", [1]),
    ]
    assert backend.steps[3] == [2, 1], "one batch, two different decode steps"


def test_a_schedule_keeps_its_steps_apart() -> None:
    engine, backend = make_engine(replace(ROOMY, level_widths=(50, 50, 50)), (5, 20, 50))
    list(engine.run(Request(i, [1] * 8) for i in range(3)))
    assert all(len(set(levels)) == 1 for levels in backend.steps)


def test_a_margin_shrinks_the_rows_that_are_computed() -> None:
    engine, backend = make_engine(replace(ROOMY, level_widths=(50, 50, 50)), (50,), margin=2.0, kept=3)
    request = Request(0, [1] * 8)
    list(engine.run([request]))
    assert backend.rows == {0: 8 + 3 + 3} == {0: request.rows}


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (Request(0, []), "empty_input"),
        (Request(0, [1] * 41), "overlong"),
        (Request(0, [100]), "bad_token"),
        (Request(0, [-1]), "bad_token"),
        *((Request(0, ids), "bad_token") for ids in ([1.9], [1, None], "abc", [[1]], [2**64], None)),
        (Request(0, [1], status=RequestStatus.FINISHED), "served_twice"),
        (Request(0, [1], live=np.zeros(2, np.uint32)), "no_filters"),
        (Request(0, [1], view="fresh"), "unknown_view"),
        (Request(0, [1], policy=make_policy((51,), 3)), "too_wide"),
    ],
)
def test_a_request_that_can_never_run_fails_at_once(request_: Request, code: str) -> None:
    engine, _ = make_engine(replace(ROOMY, level_widths=(10**6,) * 3))
    with pytest.raises(RowError) as caught:
        engine.submit(request_)
    assert caught.value.code == code
    assert engine.is_idle


def test_a_bad_request_does_not_stop_the_others() -> None:
    engine, _ = make_engine(ROOMY)
    results = {r.request_id: r for r in engine.run([Request(0, [1]), Request(1, []), Request(2, [2])])}
    assert results[1].error is not None
    assert results[1].error.code == "empty_input"
    assert (results[1].beams_returned, results[1].sids.shape) == (0, (0, 3))
    assert results[0].error is results[2].error is None


@pytest.mark.parametrize(
    "live", [np.zeros(3, np.uint32), np.zeros(2, np.int32), np.zeros((2, 1), np.uint32), [0, 0], "x"]
)
def test_a_filter_of_another_trie_is_refused(live: Any) -> None:
    engine, _ = make_engine(replace(ROOMY, filter_words=2))
    engine.submit(Request(0, [1], live=np.zeros(2, np.uint32)))
    with pytest.raises(RowError, match="filter"):
        engine.submit(Request(0, [1], live=live))


@pytest.mark.parametrize("ids", [(7, 8), np.array([7, 8], np.uint16), b"\7\10", range(7, 9)])
def test_token_ids_come_in_any_sequence(ids: Sequence[int]) -> None:
    engine, _ = make_engine(ROOMY)
    request = Request(0, ids)
    [result] = engine.run([request])
    assert result.error is None
    assert list(request.input_ids) == [7, 8]


@pytest.mark.parametrize("polls", [0, 3])
def test_who_leaves_a_run_early_leaves_nothing_behind(polls: int) -> None:
    engine, _ = make_engine(ROOMY, polls=polls)
    for _ in engine.run(Request(n, [1]) for n in range(20)):
        break
    assert engine.is_idle
    assert [r.request_id for r in engine.run([Request(100, [2]), Request(101, [2])])] == [100, 101]

    def breaks() -> Iterator[Request]:
        yield Request(200, [1])
        raise KeyError("the caller's own")

    with pytest.raises(KeyError, match="own"):
        list(engine.run(breaks()))
    more = list(range(300, 340))
    assert sorted(r.request_id for r in engine.run(Request(n, [1] * 40) for n in more)) == more


def test_a_run_pulls_requests_one_by_one_and_to_the_end() -> None:
    engine, _ = make_engine(ROOMY)
    pulled = []

    def source() -> Iterator[Request]:
        for n in range(20):
            pulled.append(n)
            if n == 6:  # The caller's own, beside the run, more than a batch: nothing of the run may be lost.
                for own in range(100, 106):
                    engine.submit(Request(own, [1]))
            yield Request(n, [] if n == 0 else [1])

    results = engine.run(source())
    assert next(results).error is not None
    assert pulled == [0], "a request that fails is told before the next is pulled"
    assert {r.request_id for r in results} == {*range(1, 20), *range(100, 106)}


def test_a_request_is_served_once() -> None:
    engine, _ = make_engine(ROOMY)
    request = Request(0, [1])
    first, second = engine.run([request, request])
    assert sorted([first.error is None, second.error is None]) == [False, True]
    assert next(engine.run([request])).error is not None
    assert next(engine.run([Request(1, [1])])).error is None


def test_an_engine_serves_one_run_at_a_time_and_none_once_closed() -> None:
    engine, _ = make_engine(ROOMY)
    first = engine.run(Request(n, [1]) for n in range(20))
    next(first)
    with pytest.raises(UsageError, match="in flight"):
        next(engine.run([Request(100, [1])]))
    assert len(list(first)) == 19
    refused = engine.run([Request(0, []), Request(1, [1])])
    next(refused)  # Nothing is in flight, and yet the run has not ended.
    with pytest.raises(UsageError, match="not ended"):
        next(engine.run([Request(100, [1])]))
    refused.close()
    assert len(list(engine.run([Request(100, [1])]))) == 1
    with engine:
        engine.close()
    for use in (lambda: engine.submit(Request(0, [1])), engine.step, lambda: list(engine.run([]))):
        with pytest.raises(UsageError, match="closed"):
            use()


def test_a_result_that_is_not_a_number_is_an_error() -> None:
    engine, backend = make_engine(ROOMY)
    nan = Beams(np.zeros((1, 3), np.int32), np.full(1, math.nan, np.float32), None, fault="not a number")
    backend.collect = lambda requests: Done([nan for _ in requests], 0)  # type: ignore[method-assign]
    [result] = engine.run([Request(0, [1])])
    assert result.error is not None
    assert result.error.code == "non_finite"


def test_the_host_clock_of_a_request_is_ordered() -> None:
    engine, _ = make_engine(ROOMY)
    request = Request(0, [1] * 8)
    [result] = engine.run([request])
    t = result.timeline
    stamps = [t.submitted_ns, t.admitted_ns, t.prefilled_ns, *t.step_ns, t.done_ns]
    assert stamps == sorted(stamps)
    assert len(t.step_ns) == 2
    assert request.status is RequestStatus.FINISHED


def test_ends_of_steps_are_counted_back_from_the_result_where_the_device_knows_them() -> None:
    engine, _ = make_engine(ROOMY, has_clock=True)
    [result] = engine.run([Request(0, [1] * 8)])
    t = result.timeline
    assert [t.done_ns - end for end in (t.prefilled_ns, *t.step_ns)] == [999, 998, 997]


def test_late_requests_wait_until_most_of_the_batch_is_done() -> None:
    """To start them at once would delay all that came before; nobody would be done earlier."""
    engine, backend = make_engine(replace(ROOMY, level_widths=(50, 50, 50), max_batch=8))
    for index in range(3):
        engine.submit(Request(index, [1] * 8))
    engine.step()  # prefill of three: more than a quarter of a batch
    engine.submit(Request(3, [1] * 8))
    while not engine.is_idle:
        engine.step()
    phases = [(batch.phase, [r.request_id for r in batch.requests]) for batch in backend.batches]
    assert phases == [
        ("prefill", [0, 1, 2]),
        ("decode", [0, 1, 2]),
        ("decode", [0, 1, 2]),
        ("prefill", [3]),
        ("decode", [3]),
        ("decode", [3]),
    ]
