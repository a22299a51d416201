"""A probe: one run of a point at one rate with one seed; its raw table, and the statistics that follow."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
from pydantic import AllowInfNan, PositiveFloat, PositiveInt

from grinf.config.parse import Sla
from grinf.jobs.bench.driver import LOST, TWICE, Recording
from grinf.jobs.bench.load import Phase
from grinf.jobs.bench.statistics import SUB_WINDOWS, allowed_misses, autocorrelation_time, quantile, rises

PERCENTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99.9": 0.999}
WORD = pa.dictionary(pa.int32(), pa.string())
LEAST_ACHIEVED = 0.98
"""A rate passes only if the engine also keeps up with it."""
LEAST_WINDOW = 0.1
"""Completions that span less of the time of the arrivals are a few at once, not a rate."""


class Stage(StrEnum):
    """What a probe is for."""

    WARMUP = "warmup"
    FLOOR = "floor"
    CAPACITY = "capacity"
    CLOSED = "closed"
    BRACKET = "bracket"
    REFINE = "refine"
    CONFIRM = "confirm"
    BLOCK = "block"


@dataclass(frozen=True, slots=True)
class ProbeSpec:
    """What to run: `n` measured requests, open at `rate` requests/s or in a loop of `concurrency` callers.

    Attributes:
        max_misses: Measured misses after which the probe may stop; None: it runs to its end.
        max_in_flight: Unanswered requests at which it stops.
        min_s, max_s: A closed loop lasts at least, and at most, this long.
    """

    stage: Stage
    n: int
    rate: float | None = None
    concurrency: int | None = None
    max_misses: int | None = None
    max_in_flight: float = math.inf
    min_s: float = 1.0
    max_s: float = 20.0


@dataclass(frozen=True, slots=True)
class ProbeRecord:
    """What the journal keeps of a probe; all the rest follows from its raw table."""

    point: str
    probe_id: int
    stage: Stage
    seed: int
    rate: Annotated[PositiveFloat, AllowInfNan(False)] | None
    concurrency: PositiveInt | None
    aborted: str
    started_utc: str
    file: str


@dataclass(frozen=True, slots=True)
class Probe:
    """A probe and the statistics of its measured requests; latencies count from the scheduled time.

    Attributes:
        misses: Requests above the limit of each SLA; one without an answer is a miss of infinite latency.
        latency_ms: Average, percentiles, maximum and standard deviation by name.
        n_lost: Requests of the whole probe that were never answered, or answered twice.
        rate_achieved: Completions/s; NaN where the probe was cut short, or holds too few answers for a rate.
        iat_miss: Integrated autocorrelation time of the misses; n / iat_miss requests are independent.
        wake_lag_p99_ms: How late the load generator itself was, after sleeping.
        verdict: `pass`: every SLA is met and the rate sustained; `fail`; `invalid`: the load came late.
    """

    record: ProbeRecord
    n: int
    misses: tuple[int, ...]
    n_error: int
    n_lost: int
    rate_achieved: float
    latency_ms: dict[str, float]
    window_s: float
    iat_miss: float
    in_flight_mean: float
    in_flight_max: int
    lag_p99_ms: float
    wake_lag_p99_ms: float
    beams_min: int
    beams_p50: int
    verdict: str
    flags: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether the verdict is `pass`."""
        return self.verdict == "pass"

    @property
    def rate(self) -> float:
        """Rate on offer; for a closed loop the rate that came about."""
        return self.rate_achieved if self.record.rate is None else self.record.rate

    @property
    def row(self) -> dict[str, Any]:
        """One row of `probes.parquet`; units in the names."""
        values = asdict(self)
        latency = {f"{name.replace('.', '')}_ms": value for name, value in values.pop("latency_ms").items()}
        record = values.pop("record")
        lists = {"n_miss": max(values.pop("misses")), "flags": ",".join(values.pop("flags"))}
        return {**record, "rate": self.rate, "rate_offered": self.record.rate, **values, **latency, **lists}


def miss_share(sla: Sla) -> float | None:
    """Share of requests that may exceed the limit; None where the SLA is on the average or the maximum."""
    return 1 - PERCENTILES[sla.stat] if sla.stat in PERCENTILES else None


def meets(slas: Sequence[Sla], n: int, misses: Sequence[int], latency_ms: Mapping[str, float]) -> bool:
    """Whether `n` requests meet every SLA."""
    return n > 0 and all(
        missed <= allowed_misses(PERCENTILES[sla.stat], n)
        if sla.stat in PERCENTILES
        else latency_ms[sla.stat] <= sla.limit_ns / 1e6
        for sla, missed in zip(slas, misses, strict=True)
    )


def raw_table(recording: Recording, record: ProbeRecord, input_len: int) -> pa.Table:
    """The requests of a probe, one row each; nanoseconds since its start, -1 where not reached."""
    samples, n = recording.samples, len(recording.samples)
    lines = [sample.timeline for sample in samples]

    def since(times: Iterable[int]) -> list[int]:
        return [time - recording.start_ns if time else -1 for time in times]

    names = ("sched_ns", "submit_ns", "done_ns")
    sched, submit, done = ([getattr(sample, name) for sample in samples] for name in names)
    admit = since(line.admitted_ns for line in lines)
    spans = {
        "e2e": (sched, done),
        "service": (submit, done),
        "queue": (submit, admit),
        "dispatch_lag": (sched, submit),
    }
    columns: dict[str, tuple[list[Any], pa.DataType]] = {
        "point": ([record.point] * n, WORD),
        "probe_id": ([record.probe_id] * n, pa.int32()),
        "seed": ([record.seed] * n, pa.int64()),
        "req_id": (list(range(n)), pa.int64()),
        "phase": ([s.phase.name.lower() for s in samples], WORD),
        "input_len": ([input_len] * n, pa.int32()),
        "t_sched_ns": (sched, pa.int64()),
        "t_submit_ns": (submit, pa.int64()),
        "t_admit_ns": (admit, pa.int64()),
        "t_prefill_ns": (since(line.prefilled_ns for line in lines), pa.int64()),
        "step_ns": ([since(line.step_ns) for line in lines], pa.list_(pa.int64())),
        "t_result_ns": (since(line.done_ns for line in lines), pa.int64()),
        "t_done_ns": (done, pa.int64()),
        **{f"{name}_ms": (_ms(*span), pa.float32()) for name, span in spans.items()},
        "in_flight_at_submit": ([s.in_flight for s in samples], pa.int32()),
        "after_idle": ([s.after_idle for s in samples], pa.bool_()),
        "beams_returned": ([s.beams_returned for s in samples], pa.int32()),
        "status": ([_status(s.error) for s in samples], WORD),
        "error": ([s.error for s in samples], WORD),
        "out_digest": ([s.out_digest for s in samples], pa.uint64()),
    }
    return pa.table({name: pa.array(values, type_) for name, (values, type_) in columns.items()})


def _status(error: str | None) -> str:
    return error if error in (LOST, TWICE) else "error" if error else "ok"


def _ms(begin: Sequence[int], end: Sequence[int]) -> list[float | None]:
    return [(b - a) / 1e6 if a >= 0 and b >= 0 else None for a, b in zip(begin, end, strict=True)]


def measure(record: ProbeRecord, table: pa.Table, slas: Sequence[Sla]) -> Probe:
    """Derive the statistics of a probe from its raw table; a pure function."""
    raw = _arrays(table)
    rows = np.flatnonzero(raw["phase"] == Phase.MEASURE.name.lower())
    rows = rows[np.argsort(raw["t_sched_ns"][rows], kind="stable")]
    ok, e2e_ms = raw["status"][rows] == "ok", end_to_end_ms(table)[rows]
    late = [e2e_ms > sla.limit_ns / 1e6 for sla in slas]
    achieved, window_s = _rate(raw["t_done_ns"][rows][ok], raw["t_sched_ns"][rows], raw["t_sched_ns"])
    n_lost = int(np.isin(raw["status"], (LOST, TWICE)).sum())
    in_flight, beams = raw["in_flight_at_submit"][rows], raw["beams_returned"][rows][ok]
    lag_ms = raw["dispatch_lag_ms"][rows].astype(np.float64)
    wake_lag_ms = quantile(lag_ms[raw["after_idle"][rows]], 0.99)
    latency_ms, misses = latencies(e2e_ms), tuple(int(missed.sum()) for missed in late)
    doubts = {
        f"aborted:{record.aborted}": bool(record.aborted),
        f"errors:{(~ok).sum()}": not ok.all(),
        f"lost:{n_lost}": n_lost > 0,
        "drifting": _drifts(e2e_ms, in_flight),
    }
    owed = LEAST_ACHIEVED * (record.rate or 0.0) * window_s
    keeps_up = achieved * window_s >= owed - 1  # one request is no backlog
    passes = keeps_up and not record.aborted and meets(slas, len(rows), misses, latency_ms)
    overloaded = record.aborted not in ("", "misses")  # then a late request more or less changes nothing
    is_late = wake_lag_ms > max(1.0, slas[0].limit_ns / 1e8) and not overloaded
    return Probe(
        record=record,
        n=len(rows),
        misses=misses,
        n_error=int((~ok).sum()),
        n_lost=n_lost,
        rate_achieved=math.nan if record.aborted else achieved,
        latency_ms=latency_ms,
        window_s=window_s,
        iat_miss=autocorrelation_time(late[0].astype(np.float64)),
        in_flight_mean=float(e2e_ms[ok].sum() / 1e3 / window_s) if window_s else 0.0,
        in_flight_max=int(raw["in_flight_at_submit"].max(initial=0)) + 1,
        lag_p99_ms=quantile(lag_ms, 0.99),
        wake_lag_p99_ms=wake_lag_ms,
        beams_min=int(beams.min()) if len(beams) else 0,
        beams_p50=int(np.median(beams)) if len(beams) else 0,
        verdict="invalid" if is_late else "pass" if passes else "fail",
        flags=tuple(name for name, holds in doubts.items() if holds),
    )


def latencies(e2e_ms: np.ndarray) -> dict[str, float]:
    """Average, percentiles, maximum and standard deviation; infinite where a failed request decides."""
    if not len(e2e_ms):
        return dict.fromkeys(("avg", *PERCENTILES, "max", "std"), math.nan)
    percentiles = {name: quantile(e2e_ms, p) for name, p in PERCENTILES.items()}
    std = float(e2e_ms.std()) if np.isfinite(e2e_ms).all() else math.inf
    return {"avg": float(e2e_ms.mean()), **percentiles, "max": float(e2e_ms.max()), "std": std}


def end_to_end_ms(table: pa.Table) -> np.ndarray:
    """Latency of each request of a raw table, float64 [n]; infinite without an answer."""
    raw = _arrays(table)
    taken_ms = (raw["t_done_ns"] - raw["t_sched_ns"]) / 1e6
    return np.where(raw["status"] == "ok", taken_ms, math.inf)


def _arrays(table: pa.Table) -> dict[str, np.ndarray]:
    return {name: table[name].to_numpy() for name in table.column_names if name not in ("step_ns", "error")}


def _rate(done_ns: np.ndarray, sched_ns: np.ndarray, all_sched_ns: np.ndarray) -> tuple[float, float]:
    """Completions per second, and the window in seconds: from the first completion to the last arrival.

    Completions at the very start of the window do not count: the time that they took lies before it. The rate
    is NaN where the window is too short to hold one.
    """
    first, last = int(sched_ns.min(initial=1 << 62)), int(all_sched_ns.max(initial=0))
    done_ns = np.sort(done_ns[done_ns <= last])
    window_ns = int(done_ns[-1] - done_ns[0]) if len(done_ns) else 0
    if window_ns <= max(0.0, LEAST_WINDOW * (last - first)):
        return math.nan, window_ns / 1e9
    return float((done_ns > done_ns[0]).sum()) / (window_ns / 1e9), window_ns / 1e9


def _drifts(e2e_ms: np.ndarray, in_flight: np.ndarray) -> bool:
    """Whether latency and load both climb through the window: the engine does not keep up."""
    if len(e2e_ms) < 10 * SUB_WINDOWS:
        return False
    medians = [float(np.median(part)) for part in np.array_split(e2e_ms, SUB_WINDOWS)]
    return rises(medians) and rises([float(part.mean()) for part in np.array_split(in_flight, SUB_WINDOWS)])
