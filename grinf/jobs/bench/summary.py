"""Tables of a run: pure functions of its journal and raw data, so that they can be made again anywhere."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv

from grinf.config.parse import Sla, format_beams, parse_sla
from grinf.jobs.bench.claim import Claim, conclude
from grinf.jobs.bench.environment import busy, machine_name
from grinf.jobs.bench.journal import read_journal, reading
from grinf.jobs.bench.point import Point
from grinf.jobs.bench.probe import Probe, Stage, end_to_end_ms, latencies
from grinf.jobs.bench.prober import measured
from grinf.jobs.bench.run_dir import RunDir
from grinf.jobs.bench.statistics import paired_ratio
from grinf.trie.publish import replacing

VERIFIED = ("score_error", "overlap", "yardstick", "yardstick_overlap")
FAILED = "VERIFICATION FAILED, speed means nothing"
LAST = {"free": "hand over", "constrained": "map items"}
"""What the host does with a result before it counts."""
SHOWN = {
    "engine": "engine",
    "input_len": "len",
    "beams": "beams",
    "constraint": "search",
    "catalog": "catalogue",
    "score": "score",
    "status": "status",
    "preset": "preset",
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
ALARMS = {
    "lost": "requests were never answered, or answered twice: no number of theirs is to be trusted",
    "failing": "the idle engine does not answer every request",
    "unstable": "no rate could be confirmed",
    "invalid": "the load came late",
    "budget": "time ran out; the same command with --resume goes on",
}
"""Statuses that a reader should not overlook, and what they mean."""


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
    def slas(self) -> list[Sla]:
        """Statistics and limits."""
        return [parse_sla(text) for text in self.header["sla"]]


def summarise(run: RunDir) -> Summary:
    """Derive everything from the journal and the raw tables of a run."""
    journal = read_journal(run)
    header, said = journal.header, journal.said
    open_loop, rival = header["arrival"] == "poisson", header["rival"]
    probes = {
        key: [measured(run, record, journal.slas) for record in records]
        for key, records in journal.records.items()
    }
    rows, stages = [], {}
    for point in journal.points:
        own, sides = probes.get(point.key, []), [point.key]
        preset, finished = journal.preset_of(point.key), ("done", point.key) in said
        claim = conclude(own, journal.slas, finished=finished, open_loop=open_loop, preset=preset)
        row = {"point": point.key, **point_columns(point), **_claim_columns(claim, own, run, point, header)}
        if rival:
            sides.append(point.of(rival).key)
            row["status"] = _interleaved([probe for key in sides for probe in probes.get(key, [])], finished)
        row |= _verified([said[key] for side in sides if (key := ("verify", side)) in said])
        row |= {"preset": preset, "config_hash": header["config_hash"]}
        start = said.get(("start", point.key), {})
        rows.append(row | {name: start.get(name, "") for name in ("workload_hash", "model_hash")})
        floors = [probe for probe in own if probe.record.stage is Stage.FLOOR]
        parts = {"floor": floors[-1:], "claim": claim.evidence}
        found = {part: _stages(run, runs, last=LAST[point.constraint]) for part, runs in parts.items()}
        stages[point.key] = {part: times for part, times in found.items() if times}
    ratios = [ratio for point in journal.points if rival and (ratio := _ratio(point, rival, probes))]
    simulated = journal.points[0].engine.startswith("sim")
    environment = {} if simulated else run.read_json("env.json")
    shown = {key: value for key, value in header.items() if key not in ("event", "points")}
    with reading(str(run.path / "env.json")):
        shown |= {"machine": "simulated" if simulated else machine_name(environment)}
        shown |= {"busy": busy(environment)}
    return Summary(shown, rows, ratios, probes, stages)


def _interleaved(probes: Sequence[Probe], finished: bool) -> str:
    """Status of a point whose engines took turns."""
    if any(probe.n_lost for probe in probes):
        return "lost"
    failing = any(probe.n_error for probe in probes if probe.record.stage is Stage.BLOCK)
    return "failing" if failing else "interleaved" if finished else "budget"


def _verified(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Columns of a point's verification; of two engines the worse verdict, and the first one's numbers."""
    verdicts = [event["status"] for event in events]
    verdict = next((word for word in ("failed", "skipped", "ok") if word in verdicts), "")
    told = [(event["point"].split("_")[0], event.get("faults", [])) for event in events]
    faults = [f"{engine}: {fault}" for engine, found in told for fault in found]
    first = events[0] if events else {}
    numbers = {f"verify_{name}": first.get(name) for name in VERIFIED}
    skipped = next((event["skipped"] for event in events if event.get("skipped")), "")
    return {"verify": verdict, "verify_faults": "; ".join(faults[:3]) or skipped, **numbers}


def point_columns(point: Point) -> dict[str, Any]:
    """What a point asks, as columns."""
    columns = {"engine": point.engine, "input_len": point.input_len, "beams": format_beams(point.beams)}
    return columns | {"constraint": point.constraint, "catalog": point.catalog, "score": point.score}


def _claim_columns(
    claim: Claim, probes: Sequence[Probe], run: RunDir, point: Point, header: dict[str, Any]
) -> dict[str, Any]:
    """Rates and pooled statistics of the claim; without one, the beams of the last probe."""
    runs = claim.evidence
    table = _measured(run, runs)
    beams = _measured(run, runs or probes[-1:])["beams_returned"].to_numpy() if probes else np.empty(0)
    e2e_ms = end_to_end_ms(table) if runs else np.empty(0)
    throughput = float(np.mean([probe.rate_achieved for probe in runs])) if runs else None
    n, misses = sum(probe.n for probe in runs), sum(max(probe.misses) for probe in runs)
    return {
        "status": claim.status,
        "max_rate": claim.max_rate,
        "first_failing_rate": claim.first_failing_rate,
        "throughput_rps": throughput,
        "rps_per_device": throughput / header.get("devices", 1) if throughput else None,
        "prompt_tokens_per_s": throughput * point.input_len if throughput else None,
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
    if not probes:
        return pa.table({})
    tables = [run.read_table(probe.record.file) for probe in probes]
    table = pa.concat_tables(tables, promote_options="permissive").unify_dictionaries()
    return table.filter(pa.array(table["phase"].to_numpy() == "measure"))


def _stages(run: RunDir, probes: Sequence[Probe], last: str) -> dict[str, float]:
    """Mean milliseconds of each stage over the tenth of requests around the median: they add up to it."""
    table = _measured(run, probes)
    table = table.filter(pa.array(table["status"].to_numpy() == "ok")) if len(table) else table
    if not len(table):
        return {}
    total = table["t_done_ns"].to_numpy() - table["t_sched_ns"].to_numpy()
    low, high = np.quantile(total, 0.45, method="lower"), np.quantile(total, 0.55, method="higher")
    table = table.filter(pa.array((total >= low) & (total <= high)))
    lists = table["step_ns"].to_pylist()
    steps = np.array([step[: min(map(len, lists))] for step in lists])
    marks = {"queue": "t_admit_ns", "prefill": "t_prefill_ns"}
    at = {name: table[column].to_numpy() for name, column in marks.items()}
    at |= {f"step {index + 1}": column for index, column in enumerate(steps.T)}
    at |= {"collect": table["t_result_ns"].to_numpy(), last: table["t_done_ns"].to_numpy()}
    found, before = {"median": float(np.median(total)) / 1e6}, table["t_sched_ns"].to_numpy()
    for name, times in at.items():
        if (times >= 0).all():
            found[name], before = float((times - before).mean()) / 1e6, times
    return found


def _ratio(point: Point, rival: str, probes: dict[str, list[Probe]]) -> dict[str, Any] | None:
    """Throughput of two engines that took turns, as a ratio over pairs of blocks; None: no whole pair."""
    keys = (point.key, point.of(rival).key)
    blocks = [[p for p in probes.get(key, []) if p.record.stage is Stage.BLOCK] for key in keys]
    pairs = min(map(len, blocks))
    a, b = (np.array([probe.rate_achieved for probe in side[:pairs]]) for side in blocks)
    if not pairs or not min(a.min(), b.min()) > 0:
        return None
    ratio, low, high = paired_ratio(a, b)
    found = {"point": point.key, **point_columns(point), "versus": rival, "pairs": pairs}
    for name, side, rates in zip(("", "versus_"), blocks, (a, b), strict=True):
        found |= {f"{name}rps": float(np.median(rates))}
        found |= {f"{name}p50_ms": float(np.median([probe.latency_ms["p50"] for probe in side]))}
        found |= {f"{name}beams_min": min(probe.beams_min for probe in side)}
        found |= {f"{name}beams_p50": int(np.median([probe.beams_p50 for probe in side]))}
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
    terms = f"{header['arrival']} arrivals · SLA {' and '.join(header['sla'])}"
    if header["rival"]:
        callers = [probe.record.concurrency or 0 for probes in summary.probes.values() for probe in probes]
        terms = f"two engines in turns, each in a closed loop of {max(callers, default=0)} callers"
    elif n:
        terms += f" · up to {n:,} requests per claim"
    return f"{header['machine']} · {terms} · config {header['config_hash']} · {header['started_utc'][:10]}"


def tables(summary: Summary) -> list[tuple[list[str], list[list[str]]]]:
    """Headings and cells for a reader: the points, then the ratios of an interleaved run."""
    rows = summary.rows
    dull = {"preset"} if all(row["preset"] == summary.header["preset"] for row in rows) else set[str]()
    dull |= {"catalog"} if len({row["catalog"] for row in rows if row["catalog"]}) < 2 else set[str]()
    filled = [name for name in SHOWN if any("".join(row) for row in cells(rows, [name]))]
    columns = [name for name in filled if name not in dull]
    found = [([SHOWN[name] for name in columns], cells(rows, columns))]
    if summary.ratios:
        names = [name for name in summary.ratios[0] if name != "point"]
        found.append((names, cells(summary.ratios, names)))
    return found


def notes(summary: Summary) -> list[str]:
    """What a reader must know before the numbers, a line each."""
    rows, asked = summary.rows, summary.header["preset"]
    failed = [row for row in rows if row["verify"] == "failed"]
    said = [f"{FAILED}: {row['verify_faults']}" for row in failed[:1]]
    skipped = [row for row in rows if row["verify"] == "skipped" and summary.header["machine"] != "simulated"]
    said += [f"NOT VERIFIED: {row['verify_faults']}" for row in skipped[:1]]
    if busy := summary.header["busy"]:
        said.append(f"the machine was busy before this run began ({busy}): latencies may be too long")
    if fewer := sum(map(_lacks_beams, rows)):
        said.append(f"fewer beams than asked for in {fewer} of {len(rows)} points: the column beams min")
    for status, meaning in ALARMS.items():
        if count := sum(row["status"] == status for row in rows):
            said.append(f"{status}, {count} of {len(rows)} points: {meaning}")
    if lowered := [row["preset"] for row in rows if row["preset"] != asked]:
        names = ", ".join(dict.fromkeys(lowered))
        said.append(f"the budget lowered {len(lowered)} of {len(rows)} points from {asked} to {names}")
    if unconfirmed := sum("unconfirmed" in row["flags"] for row in rows):
        said.append(f"indicative, not confirmed: {unconfirmed} of {len(rows)} points (preset smoke)")
    return said


def _lacks_beams(row: dict[str, Any]) -> bool:
    return 0 < (row["beams_min"] or 0) < int(row["beams"].rpartition("-")[2])


def cells(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> list[list[str]]:
    """Values as a reader wants them: four digits, nothing for what is not there."""

    def text(value: object) -> str:
        missing = value is None or (isinstance(value, float) and math.isnan(value))
        return "" if missing else short(value, 4) if isinstance(value, float) else str(value)

    return [[text(row.get(column)) for column in columns] for row in rows]


def short(value: float, digits: int = 3) -> str:
    """A number in few digits; a large one whole, not with an exponent."""
    return f"{value:.{digits}g}" if abs(value) < 10**digits - 0.5 else f"{value:,.0f}"


def markdown(summary: Summary) -> str:
    """The tables of a run, ready to paste."""
    parts = [f"**{line}**" for line in notes(summary)]
    for headings, rows in tables(summary):
        lines = [headings, ["---"] * len(headings), *rows]
        parts.append("\n".join("| " + " | ".join(line) + " |" for line in lines))
    return "\n\n".join([*parts, footer(summary)]) + "\n"
