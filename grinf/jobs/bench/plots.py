"""The figures of a run, drawn from its summary alone; beside each picture lies a .json with its numbers."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from grinf.config.parse import Sla, format_duration
from grinf.jobs.bench.point import SYNTHETIC
from grinf.jobs.bench.probe import Stage
from grinf.jobs.bench.run_dir import RunDir
from grinf.jobs.bench.summary import FAILED, Summary, footer, short
from grinf.trie.publish import replacing

if TYPE_CHECKING:
    from matplotlib.figure import SubFigure

BLUE, ORANGE, GREEN, PINK, YELLOW, SKY, BLACK = COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
)
"""Told apart with every common colour blindness. Source: Okabe and Ito (2008)."""
MARKERS = "osD^vP*"
STAGES = (BLUE, ORANGE, GREEN, YELLOW, SKY, "#999999", BLACK)
"""Colours of stages: none is that of the SLA's line."""
STYLES = [(COLOURS[i % 7], MARKERS[(i + i // 7) % 7]) for i in range(49)]
"""Colour and marker of a line: both differ from one to the next, and no pair comes twice."""
STATS = {"avg": YELLOW, "p50": SKY, "p90": GREEN, "p95": BLUE, "p99": BLACK, "p99.9": PINK, "max": ORANGE}
"""Colours of statistics."""
VERDICTS = {
    "pass": ("passed", "o", GREEN),
    "fail": ("failed", "x", ORANGE),
    "invalid": ("load late", "2", BLACK),
}
"""Label, marker and colour of a probe; a late load says nothing about the engine."""
SEARCH = (Stage.BRACKET, Stage.REFINE, Stage.CONFIRM)
LINE_COLUMNS = ("engine", "beams", "constraint", "catalog", "score")
POINT_COLUMNS = ("input_len", "status", "max_rate", "first_failing_rate", "floor_ms", "closed_avg_rps")
UNCONFIRMED = "indicative, not confirmed"


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure: its file name, its title, the numbers in it, how they are drawn, and its height in inches."""

    name: str
    title: str
    data: dict[str, Any]
    draw: Callable[["SubFigure", dict[str, Any]], None]
    height: float = 5.0


def draw_all(run: RunDir, summary: Summary) -> list[Path]:
    """Draw every figure that the run has data for, as `plots/NAME.png` with `plots/NAME.json`."""
    from matplotlib.figure import Figure

    paths: list[Path] = []
    for chart in _charts(summary):
        figure = Figure(figsize=(8.5, chart.height), layout="constrained")
        parts: Any = figure.subfigures(3, 1, height_ratios=(0.35, chart.height - 0.6, 0.25))
        head, body, foot = parts
        limits = [{"stat": sla.stat, "ms": sla.limit_ns / 1e6} for sla in summary.slas]
        data = {"sla": summary.header["sla"], "limits": limits, **chart.data}
        chart.draw(body, data)
        wrong = any(row["verify"] == "failed" for row in summary.rows)
        title, colour = (f"{FAILED}\n{chart.title}", "red") if wrong else (chart.title, "black")
        style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 9 if wrong else 12}
        head.text(0.5, 0.5, title, color=colour, fontweight="bold", **style)
        foot.text(0.5, 0.5, footer(summary), ha="center", va="center", fontsize=7, color="#555555")
        paths.append(run.path / "plots" / f"{chart.name}.png")
        with replacing(paths[-1]) as temporary:
            figure.savefig(temporary, dpi=150, format="png")
        run.write_json(f"plots/{chart.name}.json", {"title": chart.title, **data})
    return paths


def _charts(summary: Summary) -> Iterator[Chart]:
    rows = [] if summary.header["rival"] else summary.rows
    told = _labels(rows, ("input_len", *LINE_COLUMNS))
    labels = {row["point"]: label for row, label in zip(rows, told, strict=True)}
    rated, sla = [row for row in rows if row["max_rate"]], " and ".join(map(_limit, summary.slas))
    doubt = f" ({UNCONFIRMED})" if rated and all(map(_unconfirmed, rated)) else ""
    for constraint in ("free", "constrained"):
        if lines := _lines([row for row in rows if row["constraint"] == constraint]):
            title = f"Highest request rate with {sla}, {constraint} search{doubt}"
            lengths = {point["input_len"] for line in lines for point in line["points"]}
            height = 5.0 + 0.4 * len(lines) / _legend_columns(lines) if len(lengths) > 1 else _height(lines)
            name = f"sla_throughput_vs_len_{constraint}"
            yield Chart(name, title, {"lines": lines}, _draw_throughput, height)
    panels = [panel for row in rows if (panel := _latency_panel(summary, row, labels))["probes"]]
    title = f"Latency under load, {sla}"
    for panel in panels:
        yield Chart(f"latency_throughput_{panel['point']}", title, {"panels": [panel]}, _draw_latency)
    if len(panels) > 1:
        height = 1.0 + 2.8 * ((len(panels) + 1) // 2)
        yield Chart("latency_throughput_grid", title, {"panels": panels}, _draw_latency, height)
    bars = [
        {"label": f"{labels[row['point']]} ({_at(row) if part == 'claim' else 'idle'})", "stages": stages}
        for row in rows
        for part, stages in summary.stages.get(row["point"], {}).items()
    ]
    if bars:
        title, height = "Where the time of a median request goes", 1.8 + 0.3 * len(bars)
        yield Chart("stage_breakdown", title, {"bars": bars}, _draw_stages, height)
    if len(lines := _lines(rated)) > 1:
        title = f"Highest request rate with {sla}{doubt}"
        yield Chart("schedules", title, {"lines": lines}, _draw_rates, _height(lines))
    if panels:
        height = 1.2 + 1.5 * len(panels)
        yield Chart("search_path", f"How each rate was found, {sla}", {"panels": panels}, _draw_path, height)


def _height(lines: Sequence[dict[str, Any]]) -> float:
    """Of a figure with a bar per point, inches."""
    return 1.8 + 0.26 * sum(len(line["points"]) for line in lines)


def _limit(sla: Sla) -> str:
    return f"{sla.stat} ≤ {format_duration(sla.limit_ns)}"


def _unconfirmed(row: dict[str, Any]) -> bool:
    return "unconfirmed" in row["flags"]


def _at(row: dict[str, Any]) -> str:
    return f"at {short(row['max_rate'])}/s, {'not confirmed' if _unconfirmed(row) else 'the claim'}"


def _labels(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> list[str]:
    """What tells each row from the others: the columns that differ."""
    catalogs = {row["catalog"] for row in rows if row["catalog"]}
    clash = len({catalog.rsplit("/", 1)[-1] for catalog in catalogs}) < len(catalogs)

    def text(name: str, row: dict[str, Any]) -> str:
        if name == "catalog":
            return row[name].removeprefix(SYNTHETIC).rsplit("/", 0 if clash else 1)[-1] or "free"
        return {"input_len": "{} tokens", "beams": "{} beams"}.get(name, "{}").format(row[name])

    dull = "catalog" if len(catalogs) < 2 else "constraint"  # Where both differ, one says it all.
    differing = [name for name in columns if name != dull and len({row[name] for row in rows}) > 1]
    return [", ".join(text(name, row) for name in differing or ["beams"]) for row in rows]


def _lines(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line per engine, schedule, catalogue and score; its label says what differs."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in LINE_COLUMNS), []).append(row)
    labels = _labels([own[0] for own in groups.values()], LINE_COLUMNS)
    points = [
        [{name: row[name] for name in POINT_COLUMNS} | {"confirmed": not _unconfirmed(row)} for row in own]
        for own in groups.values()
    ]
    return [{"label": label, "points": own} for label, own in zip(labels, points, strict=True)]


def _latency_panel(summary: Summary, row: dict[str, Any], labels: dict[str, str]) -> dict[str, Any]:
    """Every open probe of a point, in the order of measuring."""
    stats = dict.fromkeys(("p50", "p95", "p99", *(sla.stat for sla in summary.slas)))
    probes = [
        {"rate": p.rate, "achieved": p.rate_achieved, "stage": str(p.record.stage), "verdict": p.verdict}
        | {"aborted": p.record.aborted, **{name: p.latency_ms[name] for name in stats}}
        for p in summary.probes.get(row["point"], [])
        if p.record.stage in SEARCH and p.n
    ]
    found = {"point": row["point"], "label": labels[row["point"]], "claim": row["max_rate"], "probes": probes}
    floors = [p for p in summary.probes.get(row["point"], []) if p.record.stage is Stage.FLOOR]
    found["idle"] = {name: floors[-1].latency_ms[name] if floors else math.nan for name in stats}
    return found | {"capacity": row["capacity_rps"], "confirmed": not _unconfirmed(row)}


def _legend_columns(lines: Sequence[dict[str, Any]]) -> int:
    """Entries of a legend that fit beside each other."""
    return max(1, min(4, 110 // (34 + max(len(line["label"]) for line in lines))))


def _draw_throughput(figure: "SubFigure", data: dict[str, Any]) -> None:
    lengths = sorted({point["input_len"] for line in data["lines"] for point in line["points"]})
    if len(lengths) == 1:
        _draw_rates(figure, data)
        return
    axes: Any = figure.subplots()
    marks: list[tuple[int, float, str]] = []
    for line, (colour, marker) in zip(data["lines"], cycle(STYLES), strict=False):
        rated = [point for point in line["points"] if point["max_rate"]]
        x, y = [point["input_len"] for point in rated], [point["max_rate"] for point in rated]
        style: dict[str, Any] = {"color": colour, "marker": marker, "ms": 6}
        axes.errorbar(x, y, _whiskers(rated), capsize=3, lw=1.8, label=line["label"], **style)
        hollow = [(p["input_len"], p["max_rate"]) for p in rated if not p["confirmed"]]
        if hollow:
            axes.plot(*zip(*hollow, strict=True), ls="", mfc="white", zorder=4, **style)
        marks += [(at, height, colour) for at, height in zip(x, y, strict=True)]
        closed = [(p["input_len"], p["closed_avg_rps"]) for p in line["points"] if p["closed_avg_rps"]]
        if closed:
            label = f"{line['label']} (closed loop, average)"
            axes.plot(*zip(*closed, strict=True), ls=":", lw=1.2, mfc="none", label=label, **style)
        for point in (point for point in line["points"] if not point["max_rate"]):
            axes.plot(point["input_len"], 0, marker="x", ms=9, mew=2, ls="", color=colour, clip_on=False)
            at = (point["input_len"], 0)
            axes.annotate(_why(point), at, (0, 9), textcoords="offset points", ha="center", fontsize=7)
    axes.set_xticks(lengths)
    whiskers = "whisker: lowest rate that failed; hollow: not confirmed"
    axes.set(xlabel=f"input length, tokens ({whiskers})", ylabel="requests/s")
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    axes.margins(x=0.1)
    if not any(p["max_rate"] or p["closed_avg_rps"] for line in data["lines"] for p in line["points"]):
        axes.set_yticks([0])  # A scale of nothing would be made up.
    _write_rates(axes, marks if len(data["lines"]) <= 4 else [])
    axes.grid(alpha=0.3)
    figure.legend(loc="outside upper center", ncols=_legend_columns(data["lines"]), fontsize=8, frameon=False)


def _write_rates(axes: Any, marks: Sequence[tuple[int, float, str]]) -> None:
    """Write each rate beside its mark, left and right in turn; one that would cover another is left out."""
    apart = 0.045 * axes.get_ylim()[1]
    written: dict[tuple[int, int], float] = {}
    for at, height, colour in sorted(marks):
        side = next((s for s in (1, -1) if height - written.get((at, s), -math.inf) > apart), 0)
        if side:
            written[at, side] = height
            style: dict[str, Any] = {"ha": "left" if side > 0 else "right", "fontsize": 8, "color": colour}
            style["bbox"] = {"fc": "white", "ec": "none", "alpha": 0.7, "pad": 0.5}
            text, place = f"{short(height)}", (7 * side, 3)
            axes.annotate(text, (at, height), place, textcoords="offset points", **style)


def _draw_rates(figure: "SubFigure", data: dict[str, Any]) -> None:
    """A bar per point, those of one length together."""
    axes: Any = figure.subplots()
    lengths = sorted({point["input_len"] for line in data["lines"] for point in line["points"]})
    bars = [
        (f"{length} tokens, {line['label']}" if len(lengths) > 1 else line["label"], point, colour)
        for length in lengths
        for line, (colour, _) in zip(data["lines"], cycle(STYLES), strict=False)
        for point in line["points"]
        if point["input_len"] == length
    ]
    points = [point for _, point, _ in bars]
    many = len(data["lines"]) > len(COLOURS)  # A colour that comes again would tie what is not alike.
    colours = BLUE if many else [colour for *_, colour in bars]
    style: dict[str, Any] = {"color": colours, "error_kw": {"capsize": 2, "lw": 1}}
    rates = [point["max_rate"] or 0.0 for point in points]
    axes.barh(range(len(bars)), rates, 0.7, xerr=_whiskers(points), alpha=0.8, **style)
    for y, (point, high) in enumerate(zip(points, _whiskers(points)[1], strict=True)):
        text = f"{short(point['max_rate'])}" if point["max_rate"] else _why(point)
        axes.annotate(f"  {text}", ((point["max_rate"] or 0.0) + high, y), va="center", fontsize=8)
    axes.set_yticks(range(len(bars)), [label for label, *_ in bars], fontsize=8)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlim(0, 1.12 * axes.get_xlim()[1])
    if not any(rates):
        axes.set_xticks([0])
    at = f", {lengths[0]} tokens" if len(lengths) == 1 else ""
    axes.set_xlabel(f"requests/s (whisker: lowest rate that failed){at}")
    axes.grid(alpha=0.3, axis="x")


def _whiskers(points: Sequence[dict[str, Any]]) -> list[list[float]]:
    """From each rate up to the lowest one that failed."""
    high = [
        max(0.0, (p["first_failing_rate"] or 0.0) - p["max_rate"]) if p["max_rate"] else 0.0 for p in points
    ]
    return [[0.0] * len(high), high]


def _why(point: dict[str, Any]) -> str:
    """Why a point has no rate."""
    notes = {
        "infeasible": f"infeasible:\n{point['floor_ms'] or 0:.0f} ms idle",
        "below_range": f"below\n{short(point['first_failing_rate'] or 0)}/s",
    }
    return notes.get(str(point["status"]), str(point["status"]))


def _draw_latency(figure: "SubFigure", data: dict[str, Any]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    panels = data["panels"]
    columns = min(2, len(panels))
    subplots: Any = figure.subplots(-(-len(panels) // columns), columns, squeeze=False)
    grid = list(subplots.flat)
    for axes, panel in zip(grid, panels, strict=False):
        curve = _curve(panel)
        limits = {limit["stat"]: limit["ms"] for limit in data["limits"]}
        for name in dict.fromkeys(("p50", "p95", "p99", *limits)):
            style: dict[str, Any] = {"color": STATS[name], "lw": 1.8 if name in limits else 0.9}
            x, y = [at["rate"] for at in curve], [at[name] for at in curve]
            axes.plot(x[1:], y[1:], label=name, **style)
            axes.plot(x[:2], y[:2], **style | {"ls": ":"}, marker="D", ms=4, markevery=[0], clip_on=False)
        for name in limits:
            probes = panel["probes"]
            _dots(axes, probes, [p["rate"] for p in probes], [p[name] for p in probes])
        _draw_limits(axes.axhline, data)
        if panel["claim"]:
            style = {"color": GREEN, "lw": 1.4, "ls": "-" if panel["confirmed"] else "-."}
            axes.axvline(panel["claim"], label="claim" if panel["confirmed"] else UNCONFIRMED, **style)
        if panel["capacity"]:
            axes.axvline(panel["capacity"], color="#888888", lw=1.0, ls=":", label="capacity")
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.tick_params(labelsize=8, which="both")
        axes.grid(alpha=0.3, which="both")
        axes.set_xlim(left=0)
        axes.set_xlabel("offered requests/s (diamond: idle; dotted: not measured)", fontsize=8)
        axes.set_ylabel("latency, ms", fontsize=8)
        axes.set_title(fill(f"{panel['label']}: {_claim(panel)}", 120 // columns), fontsize=10 - columns)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    shown = [axes.get_legend_handles_labels() for axes in grid]
    handles = {label: handle for pair in shown for handle, label in zip(*pair, strict=True)}
    style = {"loc": "outside upper center", "ncols": 5, "fontsize": 8, "frameon": False}
    figure.legend(handles.values(), handles.keys(), **style)


def _curve(panel: dict[str, Any]) -> list[dict[str, float]]:
    """The idle engine at rate 0, then medians of probes at about one rate: single ones jump near the knee."""
    groups: list[list[dict[str, Any]]] = []
    for probe in sorted(panel["probes"], key=lambda probe: probe["rate"]):
        if probe["aborted"] or probe["verdict"] == "invalid":
            continue
        if not groups or probe["rate"] > 1.03 * groups[-1][0]["rate"]:
            groups.append([])
        groups[-1].append(probe)
    names = ("rate", *panel["idle"])
    return [{"rate": 0.0, **panel["idle"]}] + [
        {name: float(np.median([probe[name] for probe in group])) for name in names} for group in groups
    ]


def _draw_limits(draw: Callable[..., Any], data: dict[str, Any]) -> None:
    """A line for each SLA."""
    for limit, style in zip(data["limits"], ("--", "-.", ":", (0, (1, 3))) * 9, strict=False):
        label = f"SLA {limit['stat']} {limit['ms']:g} ms"
        draw(limit["ms"], color=PINK, lw=1.6, ls=style, label=label)


def _dots(axes: Any, probes: Sequence[dict[str, Any]], x: Sequence[float], y: Sequence[float]) -> None:
    """A mark per probe, as in VERDICTS; confirmations are larger."""
    for verdict, (label, marker, colour) in VERDICTS.items():
        if own := [i for i, probe in enumerate(probes) if probe["verdict"] == verdict]:
            sizes = [60 if probes[i]["stage"] == Stage.CONFIRM else 24 for i in own]
            at = [x[i] for i in own], [y[i] for i in own]
            axes.scatter(*at, sizes, color=colour, marker=marker, zorder=3, label=label)


def _claim(panel: dict[str, Any]) -> str:
    if not panel["claim"]:
        return "no claim"
    return f"{short(panel['claim'])} req/s" + ("" if panel["confirmed"] else f" ({UNCONFIRMED})")


def _draw_stages(figure: "SubFigure", data: dict[str, Any]) -> None:
    axes: Any = figure.subplots()
    names = list(dict.fromkeys(name for bar in data["bars"] for name in bar["stages"] if name != "median"))
    places, left = range(len(data["bars"])), [0.0] * len(data["bars"])
    for name, colour in zip(names, STAGES * 2, strict=False):
        widths = [bar["stages"].get(name, 0.0) for bar in data["bars"]]
        axes.barh(places, widths, left=left, color=colour, label=name, height=0.7, edgecolor="white", lw=0.5)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for y, (bar, total) in enumerate(zip(data["bars"], left, strict=True)):
        off = abs(total - bar["stages"]["median"]) > 0.05 * bar["stages"]["median"]
        note = f" {total:.1f} ms" + (f" (median {bar['stages']['median']:.1f}!)" if off else "")
        axes.annotate(note, (total, y), va="center", fontsize=7)
    _draw_limits(axes.axvline, data)
    axes.set_yticks(places, [bar["label"] for bar in data["bars"]], fontsize=8)
    axes.set_ylim(len(places) - 0.4, -0.6)
    axes.set_xlim(0, 1.08 * axes.get_xlim()[1])
    axes.set_xlabel("ms")
    figure.legend(loc="outside upper center", ncols=5, fontsize=8, frameon=False)


def _draw_path(figure: "SubFigure", data: dict[str, Any]) -> None:
    panels = data["panels"]
    grid: Any = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axes, panel in zip(grid, panels, strict=True):
        rates = [probe["rate"] for probe in panel["probes"]]
        axes.plot(rates, color="#bbbbbb", lw=1, zorder=1)
        _dots(axes, panel["probes"], range(len(rates)), rates)
        if panel["claim"]:
            axes.axhline(panel["claim"], color=GREEN, lw=1.2, ls="-" if panel["confirmed"] else "-.")
        axes.set_xticks(range(len(rates)), [probe["stage"][0] for probe in panel["probes"]], fontsize=7)
        axes.set_title(f"{panel['label']}: {_claim(panel)}", fontsize=8, loc="left")
        axes.set_ylabel("requests/s", fontsize=8)
        axes.grid(alpha=0.3)
    what = "b(racket), r(efine), c(onfirm); circle passed, cross failed, fork: the load came late"
    grid[-1].set_xlabel(f"probes in order: {what}", fontsize=8)
