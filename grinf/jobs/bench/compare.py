"""Compares two runs, or the two engines of one interleaved run, and says only what the data can carry."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from grinf.errors import UsageError
from grinf.jobs.bench.run_dir import RunDir
from grinf.jobs.bench.summary import summarise

KEY = ("input_len", "beams", "constraint", "catalog", "score")
SEPARATE = "the runs were not interleaved: a difference may be the machine's; only brackets are compared"
PASSING = ("argv", "load_average", "engines", "gpu_processes", "temperature", "clocks.sm")
"""Parts of the environment that differ between any two runs."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """How the candidate does against the baseline.

    Attributes:
        rows: One per matched point: rates, `ratio` candidate / baseline within [low, high], and `verdict`:
            `faster`, `slower`, or `~` where the interval holds 1.
        geomean: Of the ratios.
        infeasible: Points without a rate in the baseline and in the candidate; they are in no ratio.
        lost: Points that the candidate cannot be judged by, and why.
        differences: What differs between the environments.
        notes: What to keep in mind.
    """

    rows: list[dict[str, Any]]
    geomean: float | None
    infeasible: tuple[int, int]
    lost: list[str]
    differences: list[str]
    notes: list[str]

    def gate(self, share: float) -> list[str]:
        """Why the candidate does not pass: what is slower by more than `share` for certain, or unproven."""
        slower = [
            f"{_name(row)} is slower: the ratio is {row['high']:.4g} at best"
            for row in self.rows
            if row["high"] < 1 - share
        ]
        return slower + self.lost + ["no point was compared"] * (not self.rows)


def compare_runs(paths: Sequence[Path], *, force: bool = False) -> Comparison:
    """Compare run BASELINE with run CANDIDATE, or show the ratios of one interleaved run.

    Raises:
        UsageError: The runs did other work, or are held to other SLAs; `force` compares them all the same.
    """
    runs = [RunDir.open(path) for path in paths]
    base, *others = [summarise(run) for run in runs]
    if not others:
        if not base.header["rival"]:
            fix = "name two runs, or use --versus or --aa"
            raise UsageError(f"{paths[0]} is not an interleaved run", fix=fix)
        rows = [row | {"verdict": _verdict(row["low"], row["high"])} for row in base.ratios]
        rated = {row["point"] for row in rows}
        lost = [line for row in base.rows if (line := _unproven(row, row["point"] in rated))]
        return Comparison(rows, _geomean(rows), (0, 0), lost, [], lost)
    for path, told in zip(paths, (base, *others), strict=True):
        if told.header["rival"]:
            raise UsageError(f"{path} is an interleaved run", "it has ratios, no rates", "name it alone")
    candidate = {tuple(row[name] for name in KEY): row for row in others[0].rows}
    matched = [(row, candidate.get(tuple(row[name] for name in KEY))) for row in base.rows]
    pairs = [(a, b) for a, b in matched if b is not None]
    known = {tuple(row[name] for name in KEY) for row in base.rows}
    missing = [f"{_name(a)} is in the baseline only" for a, b in matched if b is None]
    extra = [f"{_name(row)} is in the candidate only" for key, row in candidate.items() if key not in known]
    judged = [(b, bool(b["max_rate"] or not a["max_rate"])) for a, b in pairs]
    lost = missing + [line for row, rated in judged if (line := _unproven(row, rated))]
    terms = [(name, base.header[name], others[0].header[name]) for name in ("sla", "arrival")]
    terms += [(f"the work of {a['point']}", a["workload_hash"], b["workload_hash"]) for a, b in pairs]
    models = [(a["point"], a["model_hash"], b["model_hash"]) for a, b in pairs]
    terms += [(f"the model of {point}", *both) for point, *both in models if all(both)]
    differing = next((term for term in terms if term[1] != term[2]), None)
    if differing and not force:
        what = "the runs differ in {}: {} and {}".format(*differing)
        raise UsageError(what, "their rates do not mean the same", "add --force to compare anyway")
    rows = [_row(a, b) for a, b in pairs if a["max_rate"] and b["max_rate"]]
    infeasible = sum(not a["max_rate"] for a, _ in pairs), sum(not b["max_rate"] for _, b in pairs)
    forced = ["FORCED: the runs did not do the same work"] * (differing is not None)
    notes = [*extra, *lost, SEPARATE, *forced]
    left, right = (_flat(run.read_json("env.json")) for run in runs)
    names = [name for name in sorted(left.keys() | right.keys()) if left.get(name) != right.get(name)]
    names = [name for name in names if not any(word in name for word in PASSING)]
    differences = [f"{name}: {left.get(name)} / {right.get(name)}" for name in names]
    devices = [run.header["devices"] for run in (base, others[0])]
    differences += ["devices: {} / {}".format(*devices)] * (devices[0] != devices[1])
    return Comparison(rows, _geomean(rows), infeasible, lost, differences, notes)


def _name(row: dict[str, Any]) -> str:
    return " ".join(str(row[name]) for name in KEY if row[name])


def _unproven(row: dict[str, Any], rated: bool) -> str:
    """Why a candidate's point proves nothing; empty: it does."""
    if row["verify"] == "failed":
        return f"{_name(row)} gave wrong answers"
    return "" if rated else f"{_name(row)} has no rate in the candidate: {row['status']}"


def _row(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Outer bounds of the ratio: each rate lies between what passed and what failed."""
    (a_low, a_high), (b_low, b_high) = (
        (row["max_rate"], row["first_failing_rate"] or row["max_rate"]) for row in (a, b)
    )
    found = {name: a[name] for name in KEY} | {"baseline_rps": a_low, "candidate_rps": b_low}
    low, high = b_low / a_high, b_high / a_low
    return found | {"ratio": b_low / a_low, "low": low, "high": high, "verdict": _verdict(low, high)}


def _verdict(low: float, high: float) -> str:
    return "faster" if low > 1 else "slower" if high < 1 else "~"


def _geomean(rows: Sequence[dict[str, Any]]) -> float | None:
    return math.exp(float(np.mean([math.log(row["ratio"]) for row in rows]))) if rows else None


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Leaves of nested dictionaries and lists by dotted name."""
    if not isinstance(value, dict | list):
        return {name: value}
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    return {
        path: leaf for key, part in entries for path, leaf in _flat(part, f"{name}.{key}".lstrip(".")).items()
    }
