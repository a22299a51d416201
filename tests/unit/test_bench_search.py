import pytest

from grinf.config.parse import parse_sla
from grinf.jobs.bench import search
from grinf.jobs.bench.claim import conclude
from grinf.jobs.bench.clock import VirtualClock
from grinf.jobs.bench.likely import likely_rate
from grinf.jobs.bench.probe import Stage
from grinf.jobs.bench.sim import BatchServer, SimEngine
from tests.bench_world import SERVER, find, true_max_rate, true_rate_of

SEEDS = range(20)


@pytest.fixture(scope="module")
def truth():
    return true_max_rate()


@pytest.mark.slow
def test_standard_claims_are_near_the_truth_and_hardly_ever_above(truth):
    errors = []
    for seed in SEEDS:
        claim, probes = find(seed=seed)
        assert claim.status == "ok"
        assert claim.max_rate < claim.first_failing_rate
        assert len([p for p in claim.evidence if p.record.stage is Stage.CONFIRM]) == 3
        assert len({p.record.seed for p in probes}) == len(probes)
        errors.append(claim.max_rate / truth - 1)
    assert max(errors) <= 0.05
    assert min(errors) >= -0.10
    assert sum(error > 0.02 for error in errors) <= 4
    assert abs(sum(errors) / len(errors)) < 0.03


def test_a_claim_rests_on_pooled_fresh_seeds():
    claim, _ = find(seed=3)
    n, misses = sum(p.n for p in claim.evidence), sum(p.misses[0] for p in claim.evidence)
    assert n >= 6000
    assert misses <= 0.01 * n
    assert sum(p.passed for p in claim.evidence) >= 2


def test_an_idle_engine_that_misses_the_sla_is_infeasible():
    claim, probes = find("12ms")
    assert claim.status == "infeasible"
    assert claim.floor_ms == pytest.approx(13.5)
    assert claim.max_rate is None
    assert {p.record.stage for p in probes} == {Stage.WARMUP, Stage.FLOOR}


def test_an_sla_that_never_binds_gives_the_capacity():
    claim, _ = find("10s", preset="quick")
    assert claim.max_rate == pytest.approx(16 / 0.081, rel=0.05)
    assert "capacity_bound" in claim.flags
    claim, probes = find("10s", seed=0)
    assert any(not p.passed and not any(p.misses) for p in probes)  # It could not keep up: no SLA bound it.
    assert "capacity_bound" in claim.flags


@pytest.mark.parametrize("sla", ["avg:60ms", "p50:50ms", "p95:80ms", "max:200ms"])
def test_other_statistics(sla):
    """`max` is the worst of the 2,000 requests of a quick claim: the truth is the median of such maxima."""
    stat, limit = sla.split(":")
    truth = true_rate_of(stat, float(limit.removesuffix("ms")))
    errors = [find(sla, seed=seed, preset="quick")[0].max_rate / truth - 1 for seed in range(3)]
    assert truth < 0.93 * 16 / 0.081
    assert max(errors) <= 0.06
    assert min(errors) >= -0.12


def test_a_rate_below_all_that_are_tried_is_not_called_infeasible():
    claim, probes = find("18ms", preset="quick")
    assert claim.floor_ms == pytest.approx(13.5)
    assert claim.status == "below_range"
    assert claim.max_rate is None
    assert claim.first_failing_rate == min(p.rate for p in probes if p.record.stage is Stage.BRACKET) < 4


def test_only_the_capacity_is_capacity_bound():
    limited, _ = find("p99:100ms,avg:60ms", open_loop=False)
    assert limited.max_rate > 0.94 * 16 / 0.081
    assert "capacity_bound" not in limited.flags
    free, _ = find("p99:10s,avg:10s", open_loop=False)
    assert "capacity_bound" in free.flags


def test_a_search_that_was_cut_off_claims_nothing():
    _, probes = find(preset="smoke")
    slas = [parse_sla("100ms")]
    for count in range(len(probes)):
        cut = conclude(probes[:count], slas, finished=False, open_loop=True, preset="smoke")
        assert (cut.status, cut.max_rate, cut.evidence) == ("budget", None, [])
    whole = conclude(probes, slas, finished=True, open_loop=True, preset="smoke")
    assert whole.status == "ok"


def test_every_sla_of_several_must_hold():
    both, _ = find("p99:100ms,avg:30ms", preset="quick")
    average, _ = find("avg:30ms", preset="quick")
    assert both.max_rate == pytest.approx(average.max_rate, rel=0.08)
    assert all(p.latency_ms["avg"] <= 31 for p in both.evidence)


def test_closed_loop_column_and_claim():
    claim, _ = find(preset="smoke")
    assert claim.closed_concurrency in (16, 18)
    assert claim.closed_avg_rps == pytest.approx(16 / 0.081, rel=0.02)
    closed, probes = find("p99:50ms", open_loop=False)
    assert closed.max_rate == pytest.approx(9 / (0.009 + 9 * 0.0045), rel=0.03)
    assert not [p for p in probes if p.record.rate is not None]


def test_smoke_says_that_nothing_is_confirmed():
    claim, _ = find(preset="smoke")
    assert claim.status == "ok"
    assert {"unconfirmed", "indicative"} <= set(claim.flags)


def test_a_slow_engine_is_searched_below_one_request_per_second():
    claim, _ = find("20s", server=BatchServer(3_000_000_000, 1_000_000_000, 2), preset="smoke")
    assert 0.1 < claim.max_rate <= 0.4


def test_probes_that_can_only_fail_are_cut_short():
    _, probes = find(seed=1)
    planned = {Stage.BRACKET: 1000, Stage.CONFIRM: 2000}
    cut = [probe for probe in probes if probe.record.aborted and probe.record.rate]
    assert cut
    for probe in cut:
        assert probe.verdict == "fail"
        assert probe.n < planned[probe.record.stage]


SERVERS = [
    (SERVER, 100, 0.69),
    (SERVER, 40, 0.26),
    (BatchServer(3_000_000, 7_000_000, 8), 100, 0.73),
    (BatchServer(100_000, 10_000_000, 1), 100, 0.76),
    (BatchServer(50_000_000, 1_000_000, 64), 200, 0.82),
]
"""Servers, SLAs in ms, and the true rate as a share of the capacity."""


def capacity_of(server):
    return server.max_batch / ((server.base_ns + server.max_batch * server.per_request_ns) / 1e9)


@pytest.mark.parametrize(("server", "limit_ms", "share"), SERVERS)
def test_a_search_begins_near_its_end(server, limit_ms, share):
    floor_ms, capacity = (server.base_ns + server.per_request_ns) / 1e6, capacity_of(server)
    slas = [parse_sla(f"{limit_ms}ms")]
    start = likely_rate(floor_ms, capacity, server.max_batch, slas, capacity / 100)
    assert start / capacity == pytest.approx(share, abs=0.05)
    assert likely_rate(floor_ms, capacity, server.max_batch, [parse_sla("1m")], 1.0) == capacity
    assert likely_rate(floor_ms, capacity, server.max_batch, [parse_sla("1us")], 1.0) == 1.0
    claim, probes = find(f"{limit_ms}ms", preset="quick", server=server)
    assert claim.max_rate / capacity == pytest.approx(share, abs=0.08)
    assert sum(probe.record.stage is Stage.BRACKET for probe in probes) <= 4


@pytest.mark.parametrize("start", [0.1, 0.3, 5.0])
def test_a_bad_start_costs_a_few_probes_and_no_verdict(monkeypatch, start):
    """As where an engine is nothing like the server that the start is worked out for."""
    monkeypatch.setattr(search, "likely_rate", lambda *args: start * 197.5)
    claim, probes = find(preset="smoke", seed=2)
    bracket = [probe for probe in probes if probe.record.stage is Stage.BRACKET]
    assert claim.first_failing_rate / claim.max_rate <= 1 / 0.94
    assert 120 < claim.max_rate < 165
    assert len(bracket) <= 12
    assert all(197.5 / 101 < probe.rate < 198 for probe in bracket)


def test_the_fit_is_not_made_of_lucky_probes_alone():
    """A probe near the answer that was cut off for its misses would be missing, one that had few is there."""
    rates = [true_max_rate(n=60_000) * factor for factor in (0.97, 1.0, 1.03)]
    for seed in range(12):
        _, probes = find(preset="quick", seed=seed)
        near = [p for p in probes if p.record.stage is Stage.BRACKET and rates[0] < p.rate < rates[-1]]
        assert not any(p.record.aborted == "misses" for p in near)


def test_a_confirmation_ends_with_the_run_that_settles_it():
    """Of two runs both must pass, so ten misses of a thousand are the end of the first one already."""
    ended = []
    for seed in range(12):
        _, probes = find(preset="quick", seed=seed)
        runs = [p for p in probes if p.record.stage is Stage.CONFIRM]
        for rate in {p.rate for p in runs}:
            own = [p for p in runs if p.rate == rate]
            assert all(p.passed for p in own[:-1])
            ended += [p for p in own if p.record.aborted == "misses"]
    assert ended
    assert all(10 <= p.misses[0] <= 10 + 16 for p in ended)


@pytest.mark.parametrize("seed", range(4))
def test_a_host_that_stutters_does_not_lower_the_claim(seed):
    class StutteringClock(VirtualClock):
        def sleep_until(self, deadline_ns):
            stutters = self._now_ns % 20_000_000_000 < 4_000_000_000
            super().sleep_until(deadline_ns + 5_000_000 * stutters)

    claim, probes = find(seed=seed, preset="quick", engine=SimEngine(SERVER, StutteringClock()))
    assert any(probe.verdict == "invalid" for probe in probes)
    assert claim.max_rate == pytest.approx(find(seed=seed, preset="quick")[0].max_rate, rel=0.04)
