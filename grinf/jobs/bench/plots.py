"""The figures of a run, drawn from its summary alone; beside each picture lies a .json with its numbers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grinf.jobs.bench.probe import Stage
from grinf.jobs.bench.run_dir import RunDir, replacing
from grinf.jobs.bench.summary import Summary, footer

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
SEARCH = (Stage.BRACKET, Stage.REFINE, Stage.CONFIRM)
LINE_COLUMNS = ("engine", "beams", "score", "catalog")
POINT_COLUMNS = ("input_len", "status", "max_rate", "first_failing_rate", "floor_ms", "closed_avg_rps")


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
        data = {"sla": summary.header["sla"], "sla_ms": summary.limit_ms, **chart.data}
        chart.draw(body, data)
        head.text(0.5, 0.5, chart.title, ha="center", va="center", fontsize=12, fontweight="bold")
        foot.text(0.5, 0.5, footer(summary), ha="center", va="center", fontsize=7, color="#555555")
        paths.append(run.path / "plots" / f"{chart.name}.png")
        with replacing(paths[-1]) as temporary:
            figure.savefig(temporary, dpi=150, format="png")
        run.write_json(f"plots/{chart.name}.json", {"title": chart.title, **data})
    return paths


def _charts(summary: Summary) -> Iterator[Chart]:
    rows = [row for row in summary.rows if row["status"] != "interleaved"]
    sla = " and ".join(text.replace(":", " ≤ ") for text in summary.header["sla"])
    for constraint in ("free", "constrained"):
        if lines := _lines([row for row in rows if row["constraint"] == constraint]):
            title = f"Highest request rate with {sla} ({constraint} search)"
            yield Chart(f"sla_throughput_vs_len_{constraint}", title, {"lines": lines}, _draw_throughput)
    panels = [panel for row in rows if (panel := _latency_panel(summary, row))["probes"]]
    title = f"Latency under load, {sla}"
    for panel in panels:
        yield Chart(f"latency_throughput_{panel['point']}", title, {"panels": [panel]}, _draw_latency)
    if len(panels) > 1:
        height = 1.0 + 2.8 * ((len(panels) + 1) // 2)
        yield Chart("latency_throughput_grid", title, {"panels": panels}, _draw_latency, height)
    bars = [
        {"label": f"{_label(row)} ({'at the claim' if part == 'claim' else 'idle'})", "stages": stages}
        for row in rows
        for part, stages in summary.stages.get(row["point"], {}).items()
    ]
    if bars:
        title, height = "Where the time of a median request goes", 1.8 + 0.3 * len(bars)
        yield Chart("stage_breakdown", title, {"bars": bars}, _draw_stages, height)
    rated = [row for row in rows if row["max_rate"]]
    if len({(row["beams"], row["constraint"]) for row in rated}) > 1:
        kept = ("input_len", "beams", "constraint", "max_rate")
        data = {"rows": [{name: row[name] for name in kept} for row in rated]}
        yield Chart("schedules", f"Highest request rate with {sla}, by beam schedule", data, _draw_schedules)
    if panels:
        height = 1.2 + 1.5 * len(panels)
        yield Chart("search_path", f"How each rate was found, {sla}", {"panels": panels}, _draw_path, height)


def _label(row: dict[str, Any]) -> str:
    return f"{row['input_len']} tokens, beams {row['beams']}, {row['constraint']}"


def _lines(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line per engine, schedule, score and catalogue; its label says what differs."""
    keys = list(dict.fromkeys(tuple(row[name] for name in LINE_COLUMNS) for row in rows))
    differing = [i for i in range(len(LINE_COLUMNS)) if len({key[i] for key in keys}) > 1]
    lines: list[dict[str, Any]] = []
    for key in keys:
        own = [row for row in rows if tuple(row[name] for name in LINE_COLUMNS) == key]
        label = ", ".join(key[i].rsplit("/", 1)[-1] for i in differing or (0, 1))
        lines.append({"label": label, "points": [{name: row[name] for name in POINT_COLUMNS} for row in own]})
    return lines


def _latency_panel(summary: Summary, row: dict[str, Any]) -> dict[str, Any]:
    """Every open probe of a point, in the order of measuring."""
    probes = [
        {"rate": p.rate, "achieved": p.rate_achieved, "stage": str(p.record.stage), "verdict": p.verdict}
        | {"aborted": p.record.aborted, **{name: p.latency_ms[name] for name in ("p50", "p95", "p99")}}
        for p in summary.probes.get(row["point"], [])
        if p.record.stage in SEARCH and p.n
    ]
    found = {"point": row["point"], "label": _label(row), "claim": row["max_rate"], "probes": probes}
    return found | {"capacity": row["capacity_rps"]}


def _draw_throughput(figure: "SubFigure", data: dict[str, Any]) -> None:
    axes: Any = figure.subplots()
    for number, (line, colour, marker) in enumerate(
        zip(data["lines"], COLOURS * 9, MARKERS * 9, strict=False)
    ):
        rated = [point for point in line["points"] if point["max_rate"]]
        x, y = [point["input_len"] for point in rated], [point["max_rate"] for point in rated]
        whisker = [max(0.0, (p["first_failing_rate"] or p["max_rate"]) - p["max_rate"]) for p in rated]
        style: dict[str, Any] = {"color": colour, "marker": marker, "ms": 6}
        axes.errorbar(x, y, [[0] * len(y), whisker], capsize=3, lw=1.8, label=line["label"], **style)
        for at in zip(x, y, strict=True):
            side: dict[str, Any] = {
                "xytext": (-7 if number % 2 else 7, 5),
                "ha": "right" if number % 2 else "left",
            }
            axes.annotate(f"{at[1]:.3g}", at, textcoords="offset points", fontsize=8, color=colour, **side)
        closed = [(p["input_len"], p["closed_avg_rps"]) for p in line["points"] if p["closed_avg_rps"]]
        if closed:
            label = f"{line['label']} (closed loop, average)"
            axes.plot(*zip(*closed, strict=True), ls=":", lw=1.2, mfc="none", label=label, **style)
        for point in (point for point in line["points"] if point["status"] == "infeasible"):
            axes.plot(point["input_len"], 0, marker="x", ms=9, mew=2, ls="", color=colour, clip_on=False)
            note = f"infeasible:\n{point['floor_ms'] or 0:.0f} ms idle"
            axes.annotate(
                note, (point["input_len"], 0), (0, 9), textcoords="offset points", ha="center", fontsize=7
            )
    axes.set_xticks(sorted({point["input_len"] for line in data["lines"] for point in line["points"]}))
    axes.set(xlabel="input length, tokens", ylabel="requests/s (whisker: lowest rate that failed)")
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    axes.grid(alpha=0.3)
    figure.legend(loc="outside upper center", ncols=4, fontsize=8, frameon=False)


def _draw_latency(figure: "SubFigure", data: dict[str, Any]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    panels = data["panels"]
    columns = min(2, len(panels))
    subplots: Any = figure.subplots(-(-len(panels) // columns), columns, squeeze=False)
    grid = list(subplots.flat)
    for axes, panel in zip(grid, panels, strict=False):
        whole = sorted((p for p in panel["probes"] if not p["aborted"]), key=lambda probe: probe["rate"])
        for name, colour in (("p50", SKY), ("p95", BLUE), ("p99", BLACK)):
            axes.plot([p["rate"] for p in whole], [p[name] for p in whole], color=colour, lw=1.1, label=name)
        _dots(
            axes, panel["probes"], [p["rate"] for p in panel["probes"]], [p["p99"] for p in panel["probes"]]
        )
        axes.axhline(data["sla_ms"], color=PINK, lw=1.6, ls="--", label=f"SLA {data['sla_ms']:g} ms")
        if panel["claim"]:
            axes.axvline(panel["claim"], color=GREEN, lw=1.4, label="claim")
        if panel["capacity"]:
            axes.axvline(panel["capacity"], color="#888888", lw=1.0, ls=":", label="capacity")
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.tick_params(labelsize=8, which="both")
        axes.grid(alpha=0.3, which="both")
        axes.set_xlabel("offered requests/s", fontsize=8)
        axes.set_ylabel("latency, ms", fontsize=8)
        axes.set_title(f"{panel['label']}: {_claim(panel)}", fontsize=9)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    figure.legend(
        *grid[0].get_legend_handles_labels(), loc="outside upper center", ncols=8, fontsize=8, frameon=False
    )


def _dots(axes: Any, probes: Sequence[dict[str, Any]], x: Sequence[float], y: Sequence[float]) -> None:
    """A mark per probe: a circle passed, a cross failed; confirmations are larger."""
    for passed, marker, colour in ((True, "o", GREEN), (False, "x", ORANGE)):
        own = [i for i, probe in enumerate(probes) if (probe["verdict"] == "pass") is passed]
        sizes = [60 if probes[i]["stage"] == Stage.CONFIRM else 24 for i in own]
        label = "p99, passed" if passed else "p99, failed"
        at = [x[i] for i in own], [y[i] for i in own]
        axes.scatter(*at, sizes, color=colour, marker=marker, zorder=3, label=label)


def _claim(panel: dict[str, Any]) -> str:
    return f"{panel['claim']:.3g} req/s" if panel["claim"] else "no claim"


def _draw_stages(figure: "SubFigure", data: dict[str, Any]) -> None:
    axes: Any = figure.subplots()
    names = list(dict.fromkeys(name for bar in data["bars"] for name in bar["stages"] if name != "median"))
    labels, left = [bar["label"] for bar in data["bars"]], [0.0] * len(data["bars"])
    for name, colour in zip(names, COLOURS * 2, strict=False):
        widths = [bar["stages"].get(name, 0.0) for bar in data["bars"]]
        axes.barh(labels, widths, left=left, color=colour, label=name, height=0.7, edgecolor="white", lw=0.5)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for y, (bar, total) in enumerate(zip(data["bars"], left, strict=True)):
        off = abs(total - bar["stages"]["median"]) > 0.05 * bar["stages"]["median"]
        note = f" {total:.1f} ms" + (f" (median {bar['stages']['median']:.1f}!)" if off else "")
        axes.annotate(note, (total, y), va="center", fontsize=7)
    axes.axvline(data["sla_ms"], color=BLACK, lw=1.6, ls="--", label=f"SLA {data['sla_ms']:g} ms")
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.set_xlabel("ms")
    axes.tick_params(axis="y", labelsize=8)
    figure.legend(loc="outside upper center", ncols=8, fontsize=8, frameon=False)


def _draw_schedules(figure: "SubFigure", data: dict[str, Any]) -> None:
    axes: Any = figure.subplots()
    lengths = sorted({row["input_len"] for row in data["rows"]})
    series = list(dict.fromkeys((row["beams"], row["constraint"]) for row in data["rows"]))
    width = 0.8 / len(series)
    for index, (key, colour) in enumerate(zip(series, COLOURS * 9, strict=False)):
        own = [row for row in data["rows"] if (row["beams"], row["constraint"]) == key]
        x = [lengths.index(row["input_len"]) + (index - (len(series) - 1) / 2) * width for row in own]
        style: dict[str, Any] = {
            "color": colour,
            "edgecolor": "white",
            "hatch": "//" * (key[1] == "constrained"),
        }
        bars = axes.bar(x, [row["max_rate"] for row in own], 0.92 * width, label=" ".join(key), **style)
        axes.bar_label(bars, fmt="%.3g", fontsize=7)
    axes.set_xticks(range(len(lengths)), map(str, lengths))
    axes.set(xlabel="input length, tokens", ylabel="requests/s")
    figure.legend(loc="outside upper center", ncols=4, fontsize=8, frameon=False)


def _draw_path(figure: "SubFigure", data: dict[str, Any]) -> None:
    panels = data["panels"]
    grid: Any = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axes, panel in zip(grid, panels, strict=True):
        rates = [probe["rate"] for probe in panel["probes"]]
        axes.plot(rates, color="#bbbbbb", lw=1, zorder=1)
        _dots(axes, panel["probes"], range(len(rates)), rates)
        if panel["claim"]:
            axes.axhline(panel["claim"], color=GREEN, lw=1.2)
        axes.set_xticks(range(len(rates)), [probe["stage"][0] for probe in panel["probes"]], fontsize=7)
        axes.set_title(f"{panel['label']}: {_claim(panel)}", fontsize=8, loc="left")
        axes.set_ylabel("requests/s", fontsize=8)
        axes.grid(alpha=0.3)
    grid[-1].set_xlabel(
        "probes in order: b(racket), r(efine), c(onfirm); circle passed, cross failed", fontsize=8
    )
