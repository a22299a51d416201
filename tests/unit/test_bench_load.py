import numpy as np
import pytest

from grinf.jobs.bench.clock import Clock, VirtualClock
from grinf.jobs.bench.load import Phase, poisson, random_prompts
from tests.bench_world import closed


def test_poisson_schedule_is_ascending_random_and_exact_in_rate():
    load = poisson(130.0, 1000, np.random.default_rng(1), ramp_ns=10**9, tail_ns=5 * 10**8)
    sched = load.sched_ns / 1e9
    assert (np.diff(load.sched_ns) >= 0).all()
    phases = np.bincount(load.phases)
    assert phases.tolist() == [130, 1000, 65]
    measured = sched[load.phases == Phase.MEASURE]
    assert measured[-1] - sched[129] == pytest.approx(1000 / 130, rel=1e-6)
    gaps = np.diff(measured)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.1)


def test_open_loop_hands_out_each_request_once_when_it_is_due():
    load = poisson(100.0, 50, np.random.default_rng(2), ramp_ns=10**8, tail_ns=10**8)
    seen = []
    for now in range(0, 2 * 10**9, 3 * 10**6):
        due = load.due(now, in_flight=0)
        assert all(sched <= now for _, sched in due)
        seen += [index for index, _ in due]
    assert seen == list(range(len(load.sched_ns)))
    assert load.next_ns() is None


def test_closed_loop_keeps_its_concurrency_and_ramps_once():
    load = closed(n=10, concurrency=4)
    first = load.due(0, in_flight=0)
    assert [index for index, _ in first] == [0, 1, 2, 3]
    assert load.due(5, in_flight=4) == []
    assert load.due(7, in_flight=3) == [(4, 7)]
    assert load.phase_of(3) is Phase.RAMP
    assert load.phase_of(4) is Phase.MEASURE


def test_closed_loop_ends_at_its_time_limit_but_not_before_five_requests():
    load = closed(n=1000, concurrency=1, max_ns=10)
    issued = 0
    for now in range(0, 1000, 100):
        issued += len(load.due(now, in_flight=0))
    assert issued == 5


def test_prompts_are_distinct_and_in_the_vocabulary():
    prompt = random_prompts(3268, 500, np.random.default_rng(3))
    some = [tuple(prompt(index)) for index in range(300)]
    assert len(set(some)) == 300
    assert len({text[:16] for text in some}) == 300
    assert all(0 <= token < 500 for token in some[7])


def test_clocks_reach_their_deadline():
    real, virtual = Clock(), VirtualClock()
    deadline = real.now_ns() + 2_000_000
    real.sleep_until(deadline)
    assert real.now_ns() >= deadline
    virtual.sleep_until(5)
    virtual.sleep_until(3)
    assert virtual.now_ns() == 5
