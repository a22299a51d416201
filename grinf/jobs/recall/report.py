"""What a recall job did, in numbers: every unit counts for itself, and the counts add up."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from grinf.jobs.recall.bootstrap import interval, read_sums
from grinf.jobs.recall.columns import Columns

Status = Literal["done", "unchanged", "planned"]
SHOWN_ERRORS = 5
COUNTED = ("rows", "ok", "sids", "items", "unknown_items", "sid_mass_rows")

LOW_SID_MASS = 0.5
"""A model that was trained on the catalogue's SIDs gives them nearly all of its probability."""


@dataclass(frozen=True, slots=True)
class RecallReport:
    """What was done.

    Attributes:
        status: `done`; `unchanged`: the output is of the same inputs and settings; `planned`: a dry run.
        output: File or folder.
        columns: Columns in use.
        rows: Queries of the input.
        units: Units of work. units_kept: those that an earlier run had committed.
        warnings: What a reader should know.
        summary: What `summarise` gives; empty for a dry run.
        rejects: File or folder of the queries without an answer; None: there are none.
        search: Model, catalogue, schedule, score, dtype and kernels; empty unless `done`.
        answered: Queries that were answered now. seconds: the time that it took, without the engine's start.
    """

    status: Status
    output: Path
    columns: Columns
    rows: int
    units: int
    warnings: list[str]
    summary: Mapping[str, Any] = field(default_factory=dict[str, Any])
    search: Mapping[str, str] = field(default_factory=dict[str, str])
    rejects: Path | None = None
    units_kept: int = 0
    answered: int = 0
    seconds: float = 0.0

    @property
    def errors(self) -> dict[str, int]:
        """Queries without an answer, by code."""
        return self.summary.get("errors", {})

    @property
    def rejected(self) -> int:
        """Queries without an answer."""
        return sum(self.errors.values())


def summarise(counts: Iterable[Mapping[str, Any]], requested: int) -> dict[str, Any]:
    """Add up what units counted.

    Args:
        counts: Of each unit, in order.
        requested: SIDs that each query asked for.

    Returns:
        `rows`, `ok`, `errors` by code, `examples` of errors, `sids`, `items`, `unknown_items` (in allow and
        deny lists), `fill_rate` (SIDs returned over SIDs asked for), `sid_mass` (mean probability that level
        0 gave to the codes of SIDs; None: not known with this score mode), `budgets` (each pair of requests
        and prompt tokens of a batch that there was),
        and `metrics`, None where there is no truth.
    """
    total: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    examples: list[str] = []
    budgets: list[Any] = []
    sums: dict[str, float] = {}
    resampled: dict[str, np.ndarray] = {}
    mass = 0.0
    for unit in counts:
        total.update({name: unit[name] for name in COUNTED})
        mass += unit["sid_mass"]
        budgets += [unit["budget"]] if unit["budget"] not in budgets else []
        errors.update(unit["errors"])
        examples += unit["examples"]
        for name, value in unit["sums"].items():
            sums[name] = sums.get(name, 0.0) + value
        for name, text in unit["resampled"].items():
            resampled[name] = resampled.get(name, 0.0) + read_sums(text)
        del examples[SHOWN_ERRORS:]
    known = total.pop("sid_mass_rows")
    return dict(total) | {
        "errors": dict(sorted(errors.items())),
        "examples": examples,
        "sid_mass": mass / known if known else None,
        "budgets": budgets,
        "fill_rate": total["sids"] / max(1, total["ok"] * requested),
        "metrics": _means(sums, resampled) if sums else None,
    }


def judge(summary: Mapping[str, Any]) -> list[str]:
    """Say what is suspicious about a job's numbers."""
    warnings: list[str] = []
    mass, budgets = summary["sid_mass"], summary["budgets"]
    if mass is not None and mass < LOW_SID_MASS:
        what = f"model and catalogue do not belong together: where a SID begins, the model gives {mass:.2g}"
        warnings.append(f"{what} of its probability to the codes of SIDs; check --trie, --template, --suffix")
    if summary["unknown_items"]:
        warnings.append(f"{summary['unknown_items']:,} ids of allow and deny lists are not in the catalogue")
    if len(budgets) > 1:
        told = ", then ".join(f"{requests} queries or {tokens} prompt tokens" for requests, tokens in budgets)
        warnings.append(f"memory ran out: a batch held {told}; a smaller --max-batch avoids that")
    return warnings


def _means(sums: Mapping[str, float], resampled: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Averages over the judged queries, and the interval of each recall; None where there are no such."""
    means: dict[str, Any] = {"items": {}, "sids": {}}
    for name, value in sums.items():
        group, _, metric = name.rpartition(".")
        if name.startswith("n_"):
            means[name] = int(value)
        else:
            place = means[group] if group else means
            place[metric] = value / sums["n_eval"] if sums["n_eval"] else None
        if name in resampled and name != "n_eval":
            place = means[group]
            place[metric.replace("@", "_interval@")] = interval(resampled[name], resampled["n_eval"])
    return means
