"""Tables of a run: pure functions of its journal and raw data, so that they can be made again anywhere."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv

from grinf.config.parse import format_beams, parse_sla
from grinf.jobs.bench.claim import Claim, conclude
from grinf.jobs.bench.environment import machine_name
from grinf.jobs.bench.point import Point
from grinf.jobs.bench.probe import Probe, Stage, latencies, measure
from grinf.jobs.bench.prober import recorded
from grinf.jobs.bench.run_dir import RunDir, replacing
from grinf.jobs.bench.statistics import paired_ratio

SHOWN = {
    "engine": "engine",
    "input_len": "len",
    "beams": "beams",
    "constraint": "search",
    "score": "score",
    "status": "status",
    "max_rate": "max req/s",
    "first_failing_rate": "fails at",
    "p99_ms": "p99 ms",
    "floor_ms": "floor ms",
    "capacity_rps": "capacity req/s",
    "closed_avg_rps": "closed avg req/s",
    "beams_min": "beams min",
    "verify": "verify",
    "flags": "flags",
}
"""Columns of the table for a reader, and their headings."""


@dataclass(frozen=True, slots=True)
class Summary:
    """A run in numbers.

    Attributes:
        header: What holds for all rows: SLA, arrival, machine, config hash.
        rows: One per point, columns of `summary.csv`.
        ratios: One per point of an interleaved run: the first engine's throughput over the second's.
        probes: By point.
        stages: Milliseconds of each stage of a median request, by point, at the `claim` and on the `floor`.
    """

    header: dict[str, Any]
    rows: list[dict[str, Any]]
    ratios: list[dict[str, Any]]
    probes: dict[str, list[Probe]]
    stages: dict[str, dict[str, dict[str, float]]]

    @property
    def limit_ms(self) -> float:
        """Limit of the first SLA."""
        return parse_sla(self.header["sla"][0]).limit_ns / 1e6


def summarise(run: RunDir) -> Summary:
    """Derive everything from the journal and the raw tables of a run."""
    events = list(run.events())
    header = next(event for event in events if event["event"] == "run")
    slas = [parse_sla(text) for text in header["sla"]]
    said = {(event["event"], event["point"]): event for event in events if "point" in event}
    probes = {
        key: [measure(record, run.read_table(record.file), slas) for record in records]
        for key, records in recorded(events).items()
    }
    points = [Point(**entry | {"beams": tuple(entry["beams"])}) for entry in header["points"]]
    rows, stages = [], {}
    for point in points:
        own = probes.get(point.key, [])
        preset = said.get(("preset", point.key), header)["preset"]
        finished, open_loop = ("done", point.key) in said, header["arrival"] == "poisson"
        claim = conclude(own, slas, finished=finished, open_loop=open_loop, preset=preset)
        row = {"point": point.key, **point_columns(point), **_claim_columns(claim, run)}
        row |= {"status": "interleaved"} if header["rival"] else {}
        checked = said.get(("verify", point.key), {})
        row |= {
            "verify": checked.get("status", ""),
            "verify_faults": "; ".join(checked.get("faults", [])[:3]),
        }
        row |= {f"verify_{name}": checked.get(name) for name in ("score_error", "overlap", "hf_overlap")}
        row |= {"preset": preset, "config_hash": header["config_hash"]}
        rows.append(row | {"workload_hash": said.get(("start", point.key), {}).get("workload_hash", "")})
        floors = [probe for probe in own if probe.record.stage is Stage.FLOOR]
        parts = {"floor": _stages(run, floors[-1:]), "claim": _stages(run, claim.evidence)}
        stages[point.key] = {name: part for name, part in parts.items() if part}
    ratios = [_ratio(point, header["rival"], probes) for point in points] if header["rival"] else []
    simulated = points[0].engine.startswith("sim")
    machine = "simulated" if simulated else machine_name(run.read_json("env.json"))
    shown = {key: value for key, value in header.items() if key not in ("event", "points")}
    return Summary(shown | {"machine": machine}, rows, [ratio for ratio in ratios if ratio], probes, stages)


def point_columns(point: Point) -> dict[str, Any]:
    """What a point asks, as columns."""
    columns = {"engine": point.engine, "input_len": point.input_len, "beams": format_beams(point.beams)}
    return columns | {"constraint": point.constraint, "catalog": point.catalog, "score": point.score}


def _claim_columns(claim: Claim, run: RunDir) -> dict[str, Any]:
    """Rates of the claim, and the pooled statistics of its evidence."""
    runs = claim.evidence
    table = _measured(run, runs)
    beams = table["beams_returned"].to_numpy() if runs else np.empty(0)
    e2e_ms = np.nan_to_num(table["e2e_ms"].to_numpy(), nan=np.inf) if runs else np.empty(0)
    throughput = float(np.mean([probe.rate_achieved for probe in runs])) if runs else None
    n, misses = sum(probe.n for probe in runs), sum(max(probe.misses) for probe in runs)
    return {
        "status": claim.status,
        "max_rate": claim.max_rate,
        "first_failing_rate": claim.first_failing_rate,
        "throughput_rps": throughput,
        "beams_per_s": throughput * float(beams.mean()) if throughput else None,
        **{f"{name.replace('.', '')}_ms": value for name, value in latencies(e2e_ms).items()},
        "goodput_pct": 100 * (1 - misses / n) if n else None,
        "n": n,
        "n_eff": n / float(np.mean([probe.iat_miss for probe in runs])) if n else None,
        "miss_pct_per_run": ";".join(f"{100 * max(probe.misses) / probe.n:.2f}" for probe in runs),
        "floor_ms": claim.floor_ms,
        "capacity_rps": claim.capacity_rps,
        "closed_avg_rps": claim.closed_avg_rps,
        "closed_concurrency": claim.closed_concurrency,
        "beams_min": int(beams.min()) if len(beams) else None,
        "beams_p50": int(np.median(beams)) if len(beams) else None,
        "flags": ",".join(claim.flags),
    }


def _measured(run: RunDir, probes: Sequence[Probe]) -> pa.Table:
    """Measured requests of some probes."""
    tables = [run.read_table(probe.record.file) for probe in probes]
    table = (
        pa.concat_tables(tables, promote_options="permissive").unify_dictionaries()
        if tables
        else pa.table({})
    )
    return table.filter(pa.array(table["phase"].to_numpy() == "measure")) if tables else table


def _stages(run: RunDir, probes: Sequence[Probe]) -> dict[str, float]:
    """Mean milliseconds of each stage over the tenth of requests around the median: they add up to it."""
    table = _measured(run, probes)
    table = table.filter(pa.array(table["status"].to_numpy() == "ok")) if len(table) else table
    if not len(table):
        return {}
    total = table["t_done_ns"].to_numpy() - table["t_sched_ns"].to_numpy()
    low, high = np.quantile(total, [0.45, 0.55])
    table = table.filter(pa.array((total >= low) & (total <= high)))
    steps = np.array(
        [step[: min(map(len, table["step_ns"].to_pylist()))] for step in table["step_ns"].to_pylist()]
    )
    marks = {"queue": "t_admit_ns", "prefill": "t_prefill_ns"}
    at = {name: table[column].to_numpy() for name, column in marks.items()}
    at |= {f"step {index + 1}": column for index, column in enumerate(steps.T)}
    at |= {"collect": table["t_result_ns"].to_numpy(), "map items": table["t_done_ns"].to_numpy()}
    found, before = {"median": float(np.median(total)) / 1e6}, table["t_sched_ns"].to_numpy()
    for name, times in at.items():
        if (times >= 0).all():
            found[name], before = float((times - before).mean()) / 1e6, times
    return found


def _ratio(point: Point, rival: str, probes: dict[str, list[Probe]]) -> dict[str, Any] | None:
    """Throughput of two engines that took turns, as a ratio over pairs of blocks; None: no whole pair."""
    keys = (point.key, replace(point, engine=rival).key)
    blocks = [[p for p in probes.get(key, []) if p.record.stage is Stage.BLOCK] for key in keys]
    pairs = min(map(len, blocks))
    a, b = (np.array([probe.rate_achieved for probe in side[:pairs]]) for side in blocks)
    if not pairs or min(a.min(), b.min()) <= 0:
        return None
    ratio, low, high = paired_ratio(a, b)
    p50 = [float(np.median([probe.latency_ms["p50"] for probe in side])) for side in blocks]
    found = {"point": point.key, **point_columns(point), "versus": rival, "pairs": pairs}
    found |= {
        "rps": float(np.median(a)),
        "versus_rps": float(np.median(b)),
        "p50_ms": p50[0],
        "versus_p50_ms": p50[1],
    }
    return found | {"ratio": ratio, "low": low, "high": high}


def write_summary(run: RunDir, summary: Summary) -> None:
    """Write `probes.parquet`, `summary.csv`, `.json` and `.md`."""
    if rows := [probe.row for probes in summary.probes.values() for probe in probes]:
        run.write_table("probes.parquet", pa.Table.from_pylist(rows))
    with replacing(run.path / "summary.csv") as temporary:
        pyarrow.csv.write_csv(pa.Table.from_pylist(summary.rows), temporary)
    document = {"schema": "grinf.bench.summary/1", **summary.header, "points": summary.rows}
    run.write_json("summary.json", document | {"ratios": summary.ratios, "stages": summary.stages})
    with replacing(run.path / "summary.md") as temporary:
        temporary.write_text(markdown(summary))


def footer(summary: Summary) -> str:
    """What every table and figure says below: without it a number cannot be compared."""
    header, n = summary.header, max(row["n"] for row in summary.rows)
    terms = (
        f"{header['arrival']} arrivals · SLA {' and '.join(header['sla'])} · up to {n:,} requests per claim"
    )
    return f"{header['machine']} · {terms} · config {header['config_hash']} · {header['started_utc'][:10]}"


def tables(summary: Summary) -> list[tuple[list[str], list[list[str]]]]:
    """Headings and cells for a reader: the points, then the ratios of an interleaved run."""
    columns = [name for name in SHOWN if any("".join(row) for row in cells(summary.rows, [name]))]
    found = [([SHOWN[name] for name in columns], cells(summary.rows, columns))]
    if summary.ratios:
        names = [name for name in summary.ratios[0] if name != "point"]
        found.append((names, cells(summary.ratios, names)))
    return found


def cells(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> list[list[str]]:
    """Values as a reader wants them: four digits, nothing for what is not there."""

    def text(value: object) -> str:
        missing = value is None or (isinstance(value, float) and math.isnan(value))
        return "" if missing else f"{value:.4g}" if isinstance(value, float) else str(value)

    return [[text(row.get(column)) for column in columns] for row in rows]


def markdown(summary: Summary) -> str:
    """The tables of a run, ready to paste."""
    failed = any(row["verify"] == "failed" for row in summary.rows)
    parts = ["**VERIFICATION FAILED: these answers are wrong, their speed means nothing.**"] if failed else []
    for headings, rows in tables(summary):
        lines = [headings, ["---"] * len(headings), *rows]
        parts.append("\n".join("| " + " | ".join(line) + " |" for line in lines))
    return "\n\n".join([*parts, footer(summary)]) + "\n"
