"""Runs the probes of one point, or takes them from the journal of an earlier session."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

import numpy as np

from grinf.config.parse import Sla
from grinf.errors import UsageError
from grinf.jobs.bench.clock import Clock
from grinf.jobs.bench.driver import BenchEngine, Watch, drive
from grinf.jobs.bench.load import ClosedLoop, OpenLoop, poisson, random_prompts
from grinf.jobs.bench.point import Point
from grinf.jobs.bench.probe import Probe, ProbeRecord, ProbeSpec, Stage, measure, raw_table
from grinf.jobs.bench.run_dir import RunDir, damaged
from grinf.state.request import RecallResult

SECOND = 1_000_000_000
REPEATS = {Stage.BRACKET: 4, Stage.CONFIRM: 4}
"""How often a late probe is run again, where one that stays late would lower the claim; others once."""


class BudgetSpent(Exception):
    """The time for the sweep is over; what was measured stays."""


@dataclass(slots=True)
class Prober:
    """Measures one point.

    Attributes:
        earlier: Probes of the point that an earlier session finished, in order; they are not run again.
        deadline_ns: Time on `clock` after which no probe starts.
        finish: Host work that belongs to an answer.
        on_probe: Called with each finished probe.
    """

    point: Point
    engine: BenchEngine
    clock: Clock
    run_dir: RunDir
    slas: Sequence[Sla]
    seed: int
    earlier: Iterator[ProbeRecord]
    deadline_ns: float
    finish: Callable[[RecallResult], object]
    on_probe: Callable[[Probe], None]
    probe_id: int = -1

    def run(self, spec: ProbeSpec) -> Probe:
        """Run a probe; again while the load comes late, since that says nothing about the engine.

        Raises:
            BudgetSpent: The deadline has passed.
        """
        probe = self._once(spec)
        for _ in range(REPEATS.get(spec.stage, 1)):
            if probe.verdict != "invalid":
                break
            probe = self._once(spec)
        return probe

    def _once(self, spec: ProbeSpec) -> Probe:
        self.probe_id += 1
        record = next(self.earlier, None)
        if record is None:
            if self.clock.now_ns() >= self.deadline_ns:
                raise BudgetSpent
            record = self._measure(spec)
        elif (record.stage, record.rate, record.concurrency) != (spec.stage, spec.rate, spec.concurrency):
            held, wanted = (f"{s.stage} (rate {s.rate}, concurrency {s.concurrency})" for s in (record, spec))
            why = f"it holds a probe {held} where this version runs {wanted}"
            raise UsageError(f"cannot resume {self.run_dir.path}", why, "start a new run, without --resume")
        probe = measured(self.run_dir, record, self.slas)
        self.on_probe(probe)
        return probe

    def _measure(self, spec: ProbeSpec) -> ProbeRecord:
        seed = self.point.seed(self.seed, self.probe_id)
        arrival_rng, prompt_rng = map(np.random.default_rng, np.random.SeedSequence(seed).spawn(2))
        prompts = random_prompts(self.point.input_len, self.engine.vocab_rows, prompt_rng)
        limit_ns = self.slas[0].limit_ns
        runs_away = spec.rate is not None or spec.stage is Stage.FLOOR  # a full closed loop waits by nature
        watch = Watch(limit_ns, 4 * limit_ns if runs_away else 1 << 62, spec.max_in_flight, spec.max_misses)
        started = datetime.now(UTC).isoformat(timespec="milliseconds")
        arrivals = self._arrivals(spec, arrival_rng)
        recording = drive(self.engine, self.clock, arrivals, prompts, watch, self.finish)
        file = f"requests/point={self.point.key}/probe={self.probe_id}.parquet"
        what = (self.point.key, self.probe_id, spec.stage, seed, spec.rate, spec.concurrency)
        record = ProbeRecord(*what, recording.aborted, started, file)
        self.run_dir.write_table(file, raw_table(recording, record, self.point.input_len))
        self.run_dir.append("probe", **asdict(record))
        return record

    def _arrivals(self, spec: ProbeSpec, rng: np.random.Generator) -> OpenLoop | ClosedLoop:
        if spec.rate is None:
            bounds = {"min_ns": int(spec.min_s * SECOND), "max_ns": int(spec.max_s * SECOND)}
            return ClosedLoop(spec.concurrency or 1, spec.n, **bounds)
        limit_ns = self.slas[0].limit_ns
        ramp_ns = min(max(SECOND, 5 * limit_ns), 10 * SECOND)
        tail_ns = min(max(SECOND // 2, 3 * limit_ns), 5 * SECOND)
        return poisson(spec.rate, spec.n, rng, ramp_ns=ramp_ns, tail_ns=tail_ns)


def measured(run_dir: RunDir, record: ProbeRecord, slas: Sequence[Sla]) -> Probe:
    """Derive a finished probe from its raw table.

    Raises:
        EnvironmentFault: The table is missing, damaged, or none of a probe.
    """
    table = run_dir.read_table(record.file)
    try:
        told = {name: table[name].unique().to_pylist() for name in ("probe_id", "seed")}
        if table.num_rows and told != {name: [getattr(record, name)] for name in told}:
            raise ValueError(f"it is of the probe {told}")
        return measure(record, table, slas)
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(str(run_dir.path / record.file), f"it is no table of requests: {error}") from error
