"""What a recall job did, in numbers: every unit counts for itself, and the counts add up."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from grinf.jobs.recall.columns import Columns

Status = Literal["done", "unchanged", "planned"]
SHOWN_ERRORS = 5


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
    units_kept: int = 0
    answered: int = 0
    seconds: float = 0.0

    @property
    def errors(self) -> dict[str, int]:
        """Queries without an answer, by code."""
        return self.summary.get("errors", {})


def summarise(counts: Sequence[Mapping[str, Any]], requested: int) -> dict[str, Any]:
    """Add up what units counted.

    Args:
        counts: Of each unit, in order.
        requested: SIDs that each query asked for.

    Returns:
        `rows`, `ok`, `errors` by code, `examples` of errors, `sids`, `items`, `fill_rate` (SIDs returned over
        SIDs asked for), and `metrics`, None where there is no truth.
    """
    total: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    examples: list[str] = []
    sums: dict[str, float] = {}
    for unit in counts:
        total.update({name: unit[name] for name in ("rows", "ok", "sids", "items")})
        errors.update(unit["errors"])
        examples += unit["examples"]
        for name, value in unit["sums"].items():
            sums[name] = sums.get(name, 0.0) + value
    return dict(total) | {
        "errors": dict(sorted(errors.items())),
        "examples": examples[:SHOWN_ERRORS],
        "fill_rate": total["sids"] / max(1, total["ok"] * requested),
        "metrics": _means(sums) if sums else None,
    }


def _means(sums: Mapping[str, float]) -> dict[str, Any]:
    """Averages over the queries that were judged; None where there are none."""
    means: dict[str, Any] = {"items": {}, "sids": {}}
    for name, value in sums.items():
        group, _, metric = name.rpartition(".")
        if name.startswith("n_"):
            means[name] = int(value)
        else:
            place = means[group] if group else means
            place[metric] = value / sums["n_eval"] if sums["n_eval"] else None
    return means
