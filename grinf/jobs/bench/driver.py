"""Runs one probe: pulls due arrivals inside the engine's own loop and notes when everything happened.

There is no generator thread. A request that comes due while the engine computes is handed over at the next
iteration, and its wait counts, since latency runs from the scheduled time.
"""

import gc
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import xxhash

from grinf.errors import EnvironmentFault, RowError
from grinf.jobs.bench.clock import Clock, VirtualClock
from grinf.jobs.bench.load import ClosedLoop, OpenLoop, Phase
from grinf.state.request import RecallResult, Request, Timeline

LOST, TWICE, NO_BEAMS = "lost", "answered_twice", "no_beams"
"""Errors that the driver sees: an engine that is done without an answer, a second answer, an empty one."""
STALLED_NS = 600_000_000_000
"""A busy engine that has answered nothing for this long never will."""


class BenchEngine(Protocol):
    """What can be measured: the part of `grinf.Engine` that the baselines have, too."""

    @property
    def vocab_rows(self) -> int: ...  # noqa: D102 - as grinf.Engine
    @property
    def levels(self) -> int: ...  # noqa: D102
    @property
    def is_idle(self) -> bool: ...  # noqa: D102
    def submit(self, request: Request) -> None: ...  # noqa: D102
    def step(self) -> list[RecallResult]: ...  # noqa: D102
    def describe(self) -> dict[str, Any]: ...  # noqa: D102
    def close(self) -> None: ...  # noqa: D102


@dataclass(slots=True)
class Sample:
    """What happened to one request; nanoseconds since the start of the probe, -1 where not reached.

    Attributes:
        in_flight: Unanswered requests when this one was handed over.
        after_idle: Whether the driver slept until this request, so that its lag is the load generator's own.
        done_ns: When the answer was complete in host memory.
    """

    sched_ns: int
    submit_ns: int
    in_flight: int
    phase: Phase
    after_idle: bool
    timeline: Timeline = field(default_factory=Timeline)
    done_ns: int = -1
    beams_returned: int = 0
    out_digest: int = 0
    error: str | None = None


@dataclass(slots=True)
class Watch:
    """Ends a probe that can only fail, so that an overload costs little time.

    Attributes:
        sla_ns: A request that takes longer is a miss.
        max_wait_ns: Age of the oldest unanswered request at which the queue has run away.
        max_in_flight: Unanswered requests at which it has, too.
        max_misses: Measured misses that the window affords; None: misses are no reason to stop.
    """

    sla_ns: int
    max_wait_ns: int
    max_in_flight: float
    max_misses: int | None = None
    misses: int = 0
    done: int = 0

    LEAST = 5
    """Answers to see first, so that even a hopeless engine gets a floor latency."""

    def answered(self, sample: Sample) -> None:
        """Count a finished request."""
        self.done += 1
        late = sample.error is not None or sample.done_ns - sample.sched_ns > self.sla_ns
        self.misses += late and sample.phase is Phase.MEASURE

    def reason(self, oldest_ns: int, in_flight: int) -> str:
        """Why the probe should end now; empty: go on."""
        reasons = {
            "runaway": oldest_ns > self.max_wait_ns,
            "in_flight": in_flight > self.max_in_flight,
            "misses": self.max_misses is not None and self.misses > self.max_misses,
        }
        return next((name for name, holds in reasons.items() if holds and self.done >= self.LEAST), "")


@dataclass(slots=True)
class Recording:
    """All of a probe: its start on the engine's clock, a sample per request, and why it ended early."""

    start_ns: int
    samples: list[Sample] = field(default_factory=list[Sample])
    aborted: str = ""


def drive(
    engine: BenchEngine,
    clock: Clock,
    arrivals: OpenLoop | ClosedLoop,
    prompt: Callable[[int], Sequence[int]],
    watch: Watch,
    finish: Callable[[RecallResult], object] = lambda result: None,
) -> Recording:
    """Feed `arrivals` to an idle engine until all are answered; the engine is idle again then.

    Args:
        engine: Takes requests.
        clock: The clock of the engine's timelines.
        arrivals: When requests come.
        prompt: Token ids of request i.
        watch: Ends the probe early.
        finish: Work that belongs to an answer, such as mapping SIDs to items; done before the answer counts.

    Raises:
        EnvironmentFault: The engine answers a request that nobody asked, or nothing for ten minutes.
    """
    with _quiet_collector(clock):
        recording = Recording(clock.now_ns())
        samples, start = recording.samples, recording.start_ns
        oldest = in_flight = answered_ns = 0
        slept = False
        while True:
            now = clock.now_ns() - start
            for index, sched_ns in arrivals.due(now, in_flight) if not recording.aborted else ():
                samples.append(Sample(sched_ns, now, in_flight, arrivals.phase_of(index), slept))
                if _submit(engine, samples[index], Request(index, prompt(index))):
                    in_flight += 1
                else:
                    watch.answered(samples[index])
            if engine.is_idle:
                _lose(samples[oldest:], now, watch)
                oldest, in_flight, answered_ns = len(samples), 0, now
                upcoming = None if recording.aborted else arrivals.next_ns()
                if upcoming is None:
                    return recording
                clock.sleep_until(start + upcoming)
                slept = True
                continue
            slept = False
            for result in engine.step():
                sample = _sample_of(samples, result)
                if sample.done_ns >= 0:
                    sample.error = TWICE
                    continue
                in_flight -= 1
                _answer(sample, result, finish)
                sample.done_ns = answered_ns = clock.now_ns() - start
                watch.answered(sample)
            while oldest < len(samples) and samples[oldest].done_ns >= 0:
                oldest += 1
            now = clock.now_ns() - start
            waited = now - samples[oldest].sched_ns if oldest < len(samples) else 0
            recording.aborted = recording.aborted or watch.reason(waited, in_flight)
            _check_pulse(now - answered_ns, in_flight)


def _lose(samples: Sequence[Sample], now_ns: int, watch: Watch) -> None:
    """Give up on what an idle engine has not answered."""
    for sample in (sample for sample in samples if sample.done_ns < 0):
        sample.done_ns, sample.error = now_ns, LOST
        watch.answered(sample)


def _check_pulse(silent_ns: int, in_flight: int) -> None:
    if silent_ns > STALLED_NS and in_flight:
        why = f"it holds {in_flight} requests, and has answered nothing for {silent_ns // 10**9} s"
        raise EnvironmentFault("the engine stands still", why)


def _sample_of(samples: Sequence[Sample], result: RecallResult) -> Sample:
    if not 0 <= result.request_id < len(samples):
        why = f"{len(samples)} requests were handed over, numbered from 0"
        raise EnvironmentFault(f"the engine answered request {result.request_id}", why)
    return samples[result.request_id]


def _submit(engine: BenchEngine, sample: Sample, request: Request) -> bool:
    """Hand over a request; whether the engine took it."""
    try:
        engine.submit(request)
    except RowError as error:
        sample.done_ns, sample.error = sample.submit_ns, error.code
    return sample.error is None


def _answer(sample: Sample, result: RecallResult, finish: Callable[[RecallResult], object]) -> None:
    if result.error is not None:
        sample.error = result.error.code
    elif not result.beams_returned:
        sample.error = NO_BEAMS
    else:
        finish(result)
    sample.timeline, sample.beams_returned = result.timeline, result.beams_returned
    sample.out_digest = xxhash.xxh3_64_intdigest(result.sids.tobytes())


@contextmanager
def _quiet_collector(clock: Clock) -> Generator[None]:
    """Keep Python's garbage collector out of the measured window; virtual time needs no such care."""
    if isinstance(clock, VirtualClock):
        yield
        return
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
