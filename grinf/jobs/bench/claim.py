"""The verdict on a point: a pure function of its probes."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from grinf.config.parse import Sla
from grinf.jobs.bench.probe import Probe, Stage
from grinf.jobs.bench.search import PRECISION, PRESETS, confirmed

LEAST_N = {"p99": 1_000, "p99.9": 10_000, "max": 10_000}
"""Measured requests below which a statistic is only indicative."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What the probes of a point say.

    Attributes:
        status: `ok`; `infeasible`: the idle engine misses the SLA; `below_range`: it meets it, but the lowest
            rate that was tried does not; `budget`: time ran out first; `unstable`: no rate could be
            confirmed; `invalid`: the load came late; `failing`: the idle engine does not answer every
            request; `lost`: requests were never answered, or twice.
        max_rate: Highest passing rate, requests/s; None without a claim.
        first_failing_rate: Lowest rate above it that a confirming run failed, or else any run; without a
            claim the lowest that failed at all. A late load is no failure.
        floor_ms: Median latency of the idle engine.
        capacity_rps: Completions/s of the full engine.
        closed_avg_rps, closed_concurrency: Highest closed-loop rate with an average inside the limit.
        evidence: Probes that made the claim.
        flags: What a reader should know before trusting the number.
    """

    status: str
    max_rate: float | None = None
    first_failing_rate: float | None = None
    floor_ms: float | None = None
    capacity_rps: float | None = None
    closed_avg_rps: float | None = None
    closed_concurrency: int | None = None
    evidence: list[Probe] = field(default_factory=list[Probe])
    flags: list[str] = field(default_factory=list[str])


def conclude(
    probes: Sequence[Probe], slas: Sequence[Sla], *, finished: bool, open_loop: bool, preset: str
) -> Claim:
    """Derive the claim of a point.

    Args:
        probes: All of the point's probes, in order.
        slas: Statistics and limits.
        finished: Whether the search came to its end.
        open_loop: Whether the claim is about Poisson arrivals.
        preset: Name of the preset that the search ran with.
    """
    stages: dict[Stage, list[Probe]] = defaultdict(list)
    for probe in probes:
        stages[probe.record.stage].append(probe)
    closed = stages[Stage.FLOOR] + stages[Stage.CLOSED] + stages[Stage.CAPACITY]
    searched = stages[Stage.CONFIRM] + stages[Stage.BRACKET] + stages[Stage.REFINE] if open_loop else closed
    status = _status(stages, finished)
    if status:
        evidence = []
    elif open_loop and PRESETS[preset].confirm_runs:
        evidence = _confirmed_runs(stages[Stage.CONFIRM], slas, PRESETS[preset].confirm_runs)
    else:
        evidence = _fastest(p for p in (stages[Stage.BRACKET] if open_loop else closed) if p.passed)
    average = _fastest(p for p in closed if p.latency_ms["avg"] * 1e6 <= slas[0].limit_ns)
    max_rate = evidence[0].rate if evidence else None
    above = [probe for probe in searched if probe.verdict == "fail" and probe.rate > (max_rate or 0.0)]
    surest = [probe for probe in above if probe.record.stage is Stage.CONFIRM] or above
    capacity = next((p.rate for p in stages[Stage.CAPACITY][-1:] if p.rate > 0), None)
    most = (1 - PRECISION) * (capacity or math.inf)
    bound = (max_rate or 0.0) > most and all(p.passed or not any(p.misses) for p in searched)
    return Claim(
        status=status or ("ok" if evidence else _without_claim(stages)),
        max_rate=max_rate,
        first_failing_rate=min((probe.rate for probe in surest), default=None),
        floor_ms=stages[Stage.FLOOR][-1].latency_ms["p50"] if stages[Stage.FLOOR] else None,
        capacity_rps=capacity,
        closed_avg_rps=average[0].rate_achieved if average else None,
        closed_concurrency=average[0].record.concurrency if average else None,
        evidence=evidence,
        flags=_flags(stages[Stage.BRACKET], evidence, slas, preset, bound=bound) if evidence else [],
    )


def _fastest(probes: Iterable[Probe]) -> list[Probe]:
    return sorted((probe for probe in probes if probe.rate > 0), key=lambda probe: probe.rate)[-1:]


def _confirmed_runs(probes: list[Probe], slas: Sequence[Sla], planned: int) -> list[Probe]:
    """The runs of the highest rate that was confirmed."""
    by_rate: dict[float, list[Probe]] = defaultdict(list)
    for probe in probes:
        if probe.verdict != "invalid":
            by_rate[probe.rate].append(probe)
    passing = [rate for rate, runs in by_rate.items() if len(runs) >= planned and confirmed(slas, runs)]
    return by_rate[max(passing)] if passing else []


def _status(stages: dict[Stage, list[Probe]], finished: bool) -> str:
    """Why there can be no claim, whatever the rates say; empty: there can be one."""
    if any(probe.n_lost for probes in stages.values() for probe in probes):
        return "lost"
    if not finished:
        return "budget"
    return "failing" if any(probe.n_error for probe in stages[Stage.FLOOR][-1:]) else ""


def _without_claim(stages: dict[Stage, list[Probe]]) -> str:
    """Why a finished search has no claim."""
    searched = {(p.record.stage, p.rate): p for p in [*stages[Stage.BRACKET], *stages[Stage.CONFIRM]]}
    if any(probe.verdict == "invalid" for probe in searched.values()):  # Not even when it was run again.
        return "invalid"
    if any(probe.passed for probe in stages[Stage.BRACKET]):
        return "unstable"
    return "below_range" if any(probe.passed for probe in stages[Stage.FLOOR]) else "infeasible"


def _flags(
    bracket: list[Probe], evidence: list[Probe], slas: Sequence[Sla], preset: str, *, bound: bool
) -> list[str]:
    """Doubts about a claim, by name: what its runs say of themselves, then what the search saw."""
    rate, failed = evidence[0].rate, [probe for probe in bracket if probe.verdict == "fail"]
    near = [p for p in failed if p.rate < (1 + PRECISION) * rate and p.record.aborted != "misses"]
    calm = all(max(probe.misses) < 0.005 * probe.n for probe in evidence)
    doubts = {
        "unconfirmed": not PRESETS[preset].confirm_runs,
        "indicative": sum(p.n for p in evidence) < max(LEAST_N.get(sla.stat, 0) for sla in slas),
        "capacity_bound": bound,
        "non_monotone": any(probe.rate < (1 - PRECISION) * rate for probe in failed),
        "cliff": calm and any(max(probe.misses) > 0.05 * probe.n for probe in near),
    }
    own = {flag.split(":")[0] for probe in evidence for flag in probe.flags}
    return sorted(own) + [name for name, holds in doubts.items() if holds]
