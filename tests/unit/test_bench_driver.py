import math
from dataclasses import replace

import numpy as np
import pytest

from grinf.config.parse import parse_sla
from grinf.errors import EnvironmentFault, RowError
from grinf.jobs.bench.clock import VirtualClock
from grinf.jobs.bench.driver import Watch, drive
from grinf.jobs.bench.load import OpenLoop, Phase
from grinf.jobs.bench.probe import ProbeRecord, Stage, end_to_end_ms, measure, raw_table
from grinf.jobs.bench.sim import BatchServer, SimEngine
from grinf.state.request import RecallResult
from tests.bench_world import SERVER, closed, constant, find

SLA = [parse_sla("p99:100ms")]


def record(rate=None, concurrency=None, aborted=""):
    return ProbeRecord("p", 0, Stage.BRACKET, 0, rate, concurrency, aborted, "2026-01-01T00:00:00", "f")


def probe_of(recording, rate=None):
    return measure(record(rate, aborted=recording.aborted), raw_table(recording, record(), 7), SLA)


def watch():
    return Watch(100_000_000, 1 << 62, math.inf)


def open_loop(sched_ns):
    return OpenLoop(sched_ns, np.full(len(sched_ns), Phase.MEASURE, np.uint8))


class StallingEngine(SimEngine):
    """Stands still for a second, once."""

    def step(self):
        if 2e9 <= self.clock.now_ns() < 2.9e9:
            self.clock.sleep_until(self.clock.now_ns() + 1_000_000_000)
        return super().step()


class FailingEngine(SimEngine):
    """Fails every twentieth request: half of these when they are handed over, half when they run."""

    def submit(self, request):
        if request.request_id % 40 == 0:
            raise RowError("overlong", "too long")
        super().submit(request)

    def step(self):
        return [
            self._spoiled(result) if result.request_id % 40 == 20 else result for result in super().step()
        ]

    def _spoiled(self, result):
        empty = np.empty((0, 3), np.int32), np.empty(0, np.float32)
        return RecallResult(result.request_id, *empty, None, result.timeline, RowError("internal", "broken"))


def test_a_request_waits_for_its_batch_and_latency_runs_from_the_schedule():
    clock = VirtualClock()
    recording = drive(SimEngine(SERVER, clock), clock, open_loop(np.array([5, 6, 7])), lambda i: [1], watch())
    first, second, third = recording.samples
    assert first.done_ns - first.sched_ns == 13_500_000
    assert second.submit_ns == first.done_ns
    assert second.done_ns == third.done_ns == first.done_ns + 18_000_000
    assert [sample.after_idle for sample in recording.samples] == [True, False, False]


def test_a_stall_is_charged_to_every_request_that_was_due():
    """A generator that waits for the engine would send none of these requests, and see one slow one."""
    clock = VirtualClock()
    engine = StallingEngine(BatchServer(1_000_000, 100_000, 64), clock)
    recording = drive(engine, clock, open_loop(constant(50, 250)), lambda i: [1], watch())
    waits = np.array([sample.done_ns - sample.sched_ns for sample in recording.samples]) / 1e6
    stalled = waits[waits > 20]
    assert 48 <= len(stalled) <= 52
    assert np.allclose(np.sort(stalled), np.linspace(stalled.min(), stalled.max(), len(stalled)), atol=25)
    assert stalled.max() == pytest.approx(1000, abs=40)


def test_failures_are_misses_of_infinite_latency():
    clock = VirtualClock()
    recording = drive(
        FailingEngine(SERVER, clock), clock, open_loop(constant(50, 400)), lambda i: [1], watch()
    )
    probe = probe_of(recording, rate=50.0)
    assert probe.n == 400
    assert probe.n_error == 20
    assert probe.misses == (20,)
    assert probe.latency_ms["p99"] == math.inf
    assert probe.latency_ms["p90"] < 100
    assert probe.verdict == "fail"
    assert "errors:20" in probe.flags


def test_shedding_load_never_makes_a_rate_pass():
    claim, _ = find(engine=FailingEngine(SERVER, VirtualClock()), preset="smoke")
    assert claim.status == "failing"
    assert claim.max_rate is None


class Unreliable(SimEngine):
    """Changes its list of answers before it gives it."""

    def __init__(self, change, every=50):
        super().__init__(SERVER, VirtualClock())
        self.change, self.every, self.answered = change, every, 0

    def step(self):
        given = []
        for result in super().step():
            self.answered += 1
            given += self.change(result) if self.answered % self.every == 0 else [result]
        return given


def nothing(result):
    return []


def twice(result):
    return [result, result]


def no_beams(result):
    return [replace(result, sids=result.sids[:0], scores=result.scores[:0])]


def anothers(result):
    return [replace(result, request_id=0)]


@pytest.mark.parametrize("change", [nothing, twice, anothers])
@pytest.mark.parametrize("concurrency", [None, 1, 8])
def test_lost_and_doubled_answers_end_no_probe_but_are_told(change, concurrency):
    engine = Unreliable(change)
    load = closed(n=400, concurrency=concurrency) if concurrency else open_loop(constant(50, 400))
    recording = drive(engine, engine.clock, load, lambda i: [1], watch())
    probe = probe_of(recording, rate=None if concurrency else 50.0)
    assert probe.n_lost >= 7
    assert f"lost:{probe.n_lost}" in probe.flags
    assert probe.verdict == "fail"
    table = raw_table(recording, record(), 7)
    assert min(table["t_done_ns"].to_pylist()) >= 0
    assert probe.latency_ms["max"] == math.inf
    assert min(end_to_end_ms(table)) > 0
    assert {"lost", "answered_twice"} >= set(table["status"].to_pylist()) - {"ok"}


@pytest.mark.parametrize("change", [nothing, twice, anothers])
def test_no_rate_is_claimed_of_an_engine_that_loses_answers(change):
    claim, _ = find(engine=Unreliable(change, every=3000), preset="smoke")
    assert (claim.status, claim.max_rate) == ("lost", None)


def test_an_answer_without_beams_is_none():
    claim, probes = find(engine=Unreliable(no_beams, every=1), preset="smoke")
    assert (claim.status, claim.max_rate) == ("failing", None)
    assert all(probe.n_error == probe.n and probe.beams_min == 0 for probe in probes)


def test_an_answer_to_no_question_ends_the_run():
    engine = Unreliable(lambda result: [replace(result, request_id=10**6)])
    with pytest.raises(EnvironmentFault, match="answered request 1000000"):
        drive(engine, engine.clock, open_loop(constant(50, 400)), lambda i: [1], watch())


def test_an_engine_that_stays_busy_without_an_answer_is_given_up():
    class Stuck(SimEngine):
        def step(self):
            self.clock.sleep_until(self.clock.now_ns() + 1_000_000_000)
            return []

    clock = VirtualClock()
    with pytest.raises(EnvironmentFault, match="stands still"):
        drive(Stuck(SERVER, clock), clock, closed(n=10, concurrency=2), lambda i: [1], watch())
    assert 600e9 < clock.now_ns() < 700e9


def test_a_few_answers_at_once_are_no_rate():
    """An engine that gives 16 answers within a microsecond and is overrun serves no 10 million requests/s."""

    class Burst(SimEngine):
        def step(self):
            for place, result in enumerate(super().step()):
                result.timeline.done_ns += place
                yield result
                self.clock.sleep_until(self.clock.now_ns() + 60)

    clock = VirtualClock()
    slow = Burst(BatchServer(1_000_000_000, 1, 16), clock)
    limits = Watch(100_000_000, 400_000_000, math.inf, 10)
    recording = drive(slow, clock, open_loop(constant(600, 6_000)), lambda i: [1], limits)
    aborted = probe_of(recording, rate=600.0)
    assert recording.aborted
    assert aborted.n_error == 0
    assert math.isnan(aborted.rate_achieved)
    assert math.isnan(probe_of(replace(recording, aborted=""), rate=600.0).rate_achieved)
    assert probe_of(replace(recording, aborted=""), rate=600.0).verdict == "fail"


def test_an_overload_ends_within_four_limits_and_a_second():
    clock = VirtualClock()
    limits = Watch(100_000_000, 400_000_000, 4 * 197.5 * 0.1, 10)
    recording = drive(
        SimEngine(SERVER, clock), clock, open_loop(constant(600, 60_000)), lambda i: [1], limits
    )
    assert recording.aborted
    last = max(sample.sched_ns for sample in recording.samples)
    assert last <= 4 * 100_000_000 + 1_000_000_000
    assert all(sample.done_ns >= 0 for sample in recording.samples)
    assert probe_of(recording, rate=600.0).verdict == "fail"


@pytest.mark.parametrize("concurrency", [1, 3, 16, 40])
def test_closed_loop_rate_is_that_of_the_batch_server(concurrency):
    clock = VirtualClock()
    loop = closed(n=800, concurrency=concurrency)
    probe = probe_of(drive(SimEngine(SERVER, clock), clock, loop, lambda i: [1], watch()))
    batch = min(concurrency, 16)
    assert probe.rate_achieved == pytest.approx(batch / (0.009 + 0.0045 * batch), rel=0.02)


def test_a_late_generator_makes_a_probe_invalid():
    class LateClock(VirtualClock):
        def sleep_until(self, deadline_ns):
            super().sleep_until(deadline_ns + 5_000_000)

    clock = LateClock()
    fast = SimEngine(BatchServer(1, 1, 16), clock)
    probe = probe_of(drive(fast, clock, open_loop(constant(20, 100)), lambda i: [1], watch()), rate=20.0)
    assert probe.verdict == "invalid"


def test_finish_is_part_of_the_latency():
    clock = VirtualClock()
    slow = drive(
        SimEngine(SERVER, clock),
        clock,
        open_loop(np.array([1])),
        lambda i: [1],
        watch(),
        finish=lambda result: clock.sleep_until(clock.now_ns() + 7_000_000),
    )
    assert slow.samples[0].done_ns - slow.samples[0].sched_ns == 20_500_000
