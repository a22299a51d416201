"""A late load says nothing about the engine: neither that it keeps a rate, nor that it does not."""

from dataclasses import replace

import pytest

from grinf.config.parse import parse_sla
from grinf.jobs.bench.claim import conclude
from grinf.jobs.bench.probe import Stage
from tests.bench_world import find

SLAS = [parse_sla("100ms")]


def concluded(probes):
    return conclude(probes, SLAS, finished=True, open_loop=True, preset="quick")


@pytest.fixture(scope="module")
def found():
    return find(preset="quick")


def test_a_rate_whose_load_came_late_has_not_failed(found):
    claim, probes = found
    failed = [probe.rate for probe in probes if probe.verdict == "fail" and probe.rate > claim.max_rate]
    assert claim.first_failing_rate in failed
    late = [replace(probe, verdict="invalid" if probe.rate in failed else probe.verdict) for probe in probes]
    assert concluded(late).max_rate == claim.max_rate
    assert concluded(late).first_failing_rate is None
    between = replace(
        late[-1], record=replace(late[-1].record, rate=1.001 * claim.max_rate), verdict="invalid"
    )
    assert concluded([*probes, between]).first_failing_rate == claim.first_failing_rate


@pytest.mark.parametrize(("verdict", "flagged"), [("fail", True), ("invalid", False)])
def test_a_late_load_at_a_low_rate_makes_no_search_non_monotone(found, verdict, flagged):
    claim, probes = found
    bracket = next(probe for probe in probes if probe.record.stage is Stage.BRACKET)
    low = replace(bracket, record=replace(bracket.record, rate=0.8 * claim.max_rate), verdict=verdict)
    assert ("non_monotone" in concluded([*probes, low]).flags) is flagged


@pytest.mark.parametrize(
    ("verdicts", "status"),
    [
        (("fail",), "below_range"),
        (("invalid", "fail"), "below_range"),
        (("invalid", "invalid"), "invalid"),
        (("pass",), "unstable"),
        (("invalid", "pass"), "unstable"),
    ],
)
def test_a_late_load_that_was_run_again_is_forgotten(found, verdicts, status):
    _, probes = found
    closed = [probe for probe in probes if probe.record.rate is None]
    bracket = next(probe for probe in probes if probe.record.stage is Stage.BRACKET)
    claim = concluded([*closed, *(replace(bracket, verdict=verdict) for verdict in verdicts)])
    assert (claim.status, claim.max_rate) == (status, None)


@pytest.mark.parametrize("stage", [Stage.BRACKET, Stage.REFINE, Stage.CONFIRM])
def test_where_an_sla_bound_in_any_stage_the_capacity_did_not(stage):
    claim, probes = find("10s", preset="quick")
    assert "capacity_bound" in claim.flags
    top = next(probe for probe in probes if probe.record.stage is Stage.BRACKET)
    record = replace(top.record, stage=stage, rate=1.01 * claim.max_rate)
    missed = replace(top, record=record, verdict="fail", misses=[top.n])
    bound = conclude([*probes, missed], [parse_sla("10s")], finished=True, open_loop=True, preset="quick")
    assert bound.max_rate == claim.max_rate
    assert "capacity_bound" not in bound.flags
