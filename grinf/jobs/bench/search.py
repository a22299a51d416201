"""Finds the highest rate of a point: floor, capacity, closed loop, bracket, refine, confirm.

A single probe of a high percentile is noisy, and the highest of several that passed is biased upward. So
probes only say where to look, and the claim is made by fresh seeds, stepping down until they pass.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from grinf.config.parse import Sla
from grinf.jobs.bench.likely import likely_rate
from grinf.jobs.bench.probe import PERCENTILES, Probe, ProbeSpec, Stage, meets, miss_share
from grinf.jobs.bench.statistics import allowed_misses, isotonic_root, logistic_root

LOWEST_SHARE = 0.01
"""Share of the capacity below which no rate is tried."""
FIRST_SHARE = 0.1
"""Share of the capacity below which the bracket does not start: a probe of a low rate takes long."""
PRECISION = 0.06
FIT_SHARE = 0.2
"""Share of misses above which a probe says nothing about the rate at which they begin."""
GIVE_UP = 0.8
"""Confirmation steps down to this share of the bracket's lower end before it calls the point unstable."""


@dataclass(frozen=True, slots=True)
class Preset:
    """How much evidence a claim needs.

    Attributes:
        probe_n: Measured requests of a probe while searching.
        refine_rates: Rates around the bracket's middle that the fit gets; 0: no fit.
        confirm_runs, confirm_n: Fresh seeds, and measured requests of each; 0: nothing is confirmed.
        step: Factor on the rate after a failed confirmation.
        min_s, max_s: An open probe measures at least, and at most, this long.
        requests: Requests of a whole point, from searches of the simulated server.
    """

    name: str
    probe_n: int
    refine_rates: int
    confirm_runs: int
    confirm_n: int
    step: float
    min_s: float
    max_s: float
    requests: int


_LIST = (
    Preset("smoke", 200, 0, 0, 0, 1.0, 2.0, 4.0, 3_600),
    Preset("quick", 500, 4, 2, 1000, 0.97, 5.0, 120.0, 12_300),
    Preset("standard", 1000, 5, 3, 2000, 0.98, 5.0, 120.0, 20_500),
    Preset("thorough", 2500, 6, 5, 4000, 0.985, 5.0, 120.0, 55_000),
)
PRESETS = {preset.name: preset for preset in _LIST}


@dataclass(slots=True)
class Search:
    """The search of one point; `run` measures, this class decides what to measure next.

    Attributes:
        run: Runs a probe.
        slas: Statistics and limits; all must hold. The first one tells when a probe has failed early.
        max_batch: Requests that the engine holds at once.
        choose_preset: Given the capacity in requests/s, how much evidence the time allows.
        open_loop: Whether the claim is about Poisson arrivals; else about a closed loop.
    """

    run: Callable[[ProbeSpec], Probe]
    slas: Sequence[Sla]
    max_batch: int
    choose_preset: Callable[[float], Preset]
    open_loop: bool = True

    def find(self) -> None:
        """Measure the point; the verdict follows from the probes (`claim.conclude`)."""
        floor = self._floor()
        if not floor.passed:
            return
        capacity = self._steady(ProbeSpec(Stage.CAPACITY, 200, concurrency=2 * self.max_batch, min_s=3.0))
        self._closed(2 * self.max_batch)
        if not self.open_loop or not capacity.rate > 0:
            return
        mu, preset = capacity.rate_achieved, self.choose_preset(capacity.rate_achieved)
        start = likely_rate(floor.latency_ms["p50"], mu, self.max_batch, self.slas, FIRST_SHARE * mu)
        bracket = self._bracket(preset, mu, start)
        if bracket is None or not preset.confirm_runs:
            return
        low, high, probes = bracket
        start = self._refine(preset, low, high, probes) if high > low else low
        self._confirm(preset, start, low)

    def _floor(self) -> Probe:
        """The idle engine, which may miss the SLA; a hiccup gets a second chance."""
        spec = ProbeSpec(Stage.FLOOR, 100, concurrency=1, max_misses=self._affordable(100), max_s=10.0)
        probe = self._steady(spec)
        if not probe.passed and probe.latency_ms["p50"] * 1e6 <= min(sla.limit_ns for sla in self.slas):
            probe = self.run(spec)
        return probe

    def _steady(self, spec: ProbeSpec) -> Probe:
        """Repeat a closed loop until two runs in a row agree within 5 %, or one is cut short."""
        before = self.run(
            ProbeSpec(Stage.WARMUP, spec.n // 2, concurrency=spec.concurrency, max_s=spec.max_s / 2)
        )
        for _ in range(3):
            probe = self.run(spec)
            agrees = abs(probe.rate_achieved - before.rate_achieved) <= 0.05 * probe.rate_achieved
            if agrees or probe.record.aborted:
                return probe
            before = probe
        return self.run(spec)

    def _closed(self, top: int) -> None:
        """Bracket the highest concurrency that keeps the limit on average; for a closed claim, every SLA."""
        average = [Sla("avg", self.slas[0].limit_ns)]
        for slas in (average,) if self.open_loop or self.slas == average else (average, self.slas):
            good, bad = 1, top
            while bad - good > max(1, bad // 8):
                trial = min(2 * good, (good + bad) // 2)
                probe = self.run(ProbeSpec(Stage.CLOSED, 200, concurrency=trial, max_s=4.0))
                if meets(slas, probe.n, probe.misses[: len(slas)], probe.latency_ms):
                    good = trial
                else:
                    bad = trial

    def _bracket(
        self, preset: Preset, capacity: float, start: float
    ) -> tuple[float, float, list[Probe]] | None:
        """Rates (passing, failing) within PRECISION, and the probes; equal rates: the capacity passes.

        Strides from `start` grow until the verdict turns: a good start takes two probes, a bad one not many.
        """
        probes: list[Probe] = []

        def passes(rate: float) -> bool:
            spec = self._open(Stage.BRACKET, rate, preset.probe_n, preset, capacity)
            probes.append(self.run(spec))
            return probes[-1].passed

        low, high, rate, stride = 0.0, math.inf, min(start, capacity), 1 / (1 - PRECISION)
        while not low or high == math.inf:
            if passes(rate):
                low, following = rate, min(capacity, rate * stride)
            else:
                high, following = rate, max(LOWEST_SHARE * capacity, rate / stride)
            if following == rate:  # There is nothing beyond.
                return (low, low, probes) if low else None
            rate, stride = following, min(2.0, stride * stride)
        while (high - low) / high > PRECISION + 1e-9:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if passes(middle) else (low, middle)
        return low, high, probes

    def _refine(self, preset: Preset, low: float, high: float, probes: list[Probe]) -> float:
        """Fit the statistic around the bracket; return one step below the rate at which it reaches the limit.

        A fit whose root lies outside its rates is made again (one unlucky probe can misplace the bracket),
        around that root, twice at most. Half of all roots are too high, hence the step.
        """
        middle = root = math.sqrt(low * high)
        for _ in range(3):
            rates = np.linspace(0.92 * middle, 1.08 * middle, preset.refine_rates)
            fresh = [
                self.run(self._open(Stage.REFINE, float(rate), preset.probe_n, preset)) for rate in rates
            ]
            probes += fresh
            beyond = 1.16 * middle if all(probe.passed for probe in fresh) else middle
            root = self._root(probes, middle) or beyond
            if abs(root / middle - 1) <= 0.08:
                break
            middle = min(max(root, 0.8 * middle), 1.25 * middle)
        return preset.step * root

    def _root(self, probes: list[Probe], middle: float) -> float | None:
        """Lowest rate at which the fit of an SLA reaches its limit; None: none does."""
        whole = [probe for probe in probes if not probe.record.aborted and probe.verdict != "invalid"]
        near = [probe for probe in whole if abs(probe.rate / middle - 1) <= 0.2]
        roots = [_root(sla, which, near) for which, sla in enumerate(self.slas)]
        return min((root for root in roots if root is not None), default=None)

    def _confirm(self, preset: Preset, rate: float, low: float) -> None:
        """Step down from `rate` until fresh seeds pass."""
        while not self._confirmed(preset, rate) and rate > GIVE_UP * low:
            rate *= preset.step

    def _confirmed(self, preset: Preset, rate: float) -> bool:
        runs: list[Probe] = []
        spec = self._open(Stage.CONFIRM, rate, preset.confirm_n, preset)
        own, spare = self._affordable(spec.n), self._affordable(preset.confirm_runs * spec.n)
        while len(runs) < preset.confirm_runs:
            left = None if spare is None else spare - sum(run.misses[0] for run in runs)
            if left is not None and own is not None and not confirmable(runs, preset.confirm_runs, failing=1):
                left = min(left, own)  # This run must pass.
            runs.append(self.run(replace(spec, max_misses=left)))
            if runs[-1].record.aborted or not confirmable(runs, preset.confirm_runs):
                return False
        return confirmed(self.slas, runs)

    def _open(
        self, stage: Stage, rate: float, n: int, preset: Preset, capacity: float = math.inf
    ) -> ProbeSpec:
        """An open probe; one of a bracket may end as soon as it has failed."""
        n = max(20, round(min(max(n, rate * preset.min_s), rate * preset.max_s)))
        in_flight = max(8.0, 4 * capacity * self.slas[0].limit_ns / 1e9)
        misses = self._affordable(n) if stage is Stage.BRACKET else None
        if misses is not None and preset.refine_rates:  # The fit would be biased by those that passed alone.
            misses = max(misses, round(FIT_SHARE * n))
        return ProbeSpec(stage, n, rate, max_misses=misses, max_in_flight=in_flight)

    def _affordable(self, n: int) -> int | None:
        """Misses of the first SLA that `n` requests may have; None: misses alone decide nothing."""
        stat = self.slas[0].stat
        return 0 if stat == "max" else allowed_misses(PERCENTILES[stat], n) if stat in PERCENTILES else None


def _root(sla: Sla, which: int, probes: list[Probe]) -> float | None:
    share = miss_share(sla)
    probes = [probe for probe in probes if share is None or probe.misses[which] <= FIT_SHARE * probe.n]
    if len(probes) < 2:
        return None
    rates = np.array([probe.rate for probe in probes])
    if share is None:
        return isotonic_root(rates, np.array([p.latency_ms[sla.stat] for p in probes]), sla.limit_ns / 1e6)
    misses = np.array([float(probe.misses[which]) for probe in probes])
    return logistic_root(rates, misses, np.array([float(probe.n) for probe in probes]), share)


def confirmable(runs: Sequence[Probe], planned: int, failing: int = 0) -> bool:
    """Whether two thirds of the planned runs can still pass on their own if `failing` more do not."""
    return sum(not run.passed for run in runs) + failing <= planned - math.ceil(2 * planned / 3)


def confirmed(slas: Sequence[Sla], runs: Sequence[Probe]) -> bool:
    """Whether the pooled requests meet every SLA, and at least two thirds of the runs do on their own."""
    n = sum(run.n for run in runs)
    average = sum(run.n * run.latency_ms["avg"] for run in runs) / n
    pooled = {"avg": average, "max": max(run.latency_ms["max"] for run in runs)}
    misses = [sum(counts) for counts in zip(*(run.misses for run in runs), strict=True)]
    return confirmable(runs, len(runs)) and meets(slas, n, misses, pooled)
