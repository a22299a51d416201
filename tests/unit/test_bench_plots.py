"""What the figures say: labels that tell points apart, the statistic of the SLA, and claims that are none."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest

from grinf.config.load import resolve
from grinf.config.settings import BenchSettings
from grinf.jobs.bench.plots import PINK, STAGES, VERDICTS, _curve, draw_all
from grinf.jobs.bench.sweep import run_bench

CATALOGS = ["synthetic:items=1M", "synthetic:items=1M,skew=0"]


def bench(folder, **flags):
    given = {"engine": "sim:", "preset": "smoke", "input_len": "100", "beams": "900", "output": str(folder)}
    return run_bench(resolve(BenchSettings, given | flags), lambda *_: None)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return bench(tmp_path_factory.mktemp("bench"))


def drawn(report, monkeypatch):
    """Each figure's name, its numbers, and all of its text."""
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    texts, save = [], Figure.savefig

    def noted(figure, *args, **style):
        save(figure, *args, **style)
        texts.append([text.get_text() for text in figure.findobj(Text)])

    monkeypatch.setattr(Figure, "savefig", noted)
    paths = draw_all(report.run, report.summary)
    return {
        path.stem: (json.loads(path.with_suffix(".json").read_text()), found)
        for path, found in zip(paths, texts, strict=True)
    }


def test_labels_name_whatever_differs(tmp_path, monkeypatch):
    report = bench(tmp_path, constrained="both", catalog=CATALOGS, scores="vocab,level")
    figures = drawn(report, monkeypatch)
    constrained = ["items=1M, vocab", "items=1M, level", "items=1M,skew=0, vocab", "items=1M,skew=0, level"]
    data, texts = figures["sla_throughput_vs_len_constrained"]
    assert [line["label"] for line in data["lines"]] == constrained
    assert set(constrained) < set(texts)
    data, texts = figures["schedules"]
    assert [line["label"] for line in data["lines"]] == ["free, vocab", *constrained]
    bars = [bar["label"] for bar in figures["stage_breakdown"][0]["bars"]]
    assert len(bars) == len(set(bars)) == 10
    panels = [panel["label"] for panel in figures["search_path"][0]["panels"]]
    assert panels == ["free, vocab", *constrained]


def test_every_bar_has_a_place_of_its_own(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    places, draw = [], Axes.barh

    def noted(axes, y, *args, **style):
        places.append(list(y))
        return draw(axes, y, *args, **style)

    monkeypatch.setattr(Axes, "barh", noted)
    draw_all((report := bench(tmp_path, input_len="100,200", beams="900,20-300-900")).run, report.summary)
    assert all(len(set(ys)) == len(ys) for ys in places)
    assert max(map(len, places)) == 8


def test_titles_of_panels_do_not_reach_into_each_other(report, monkeypatch):
    from matplotlib.axes import Axes

    titles, draw = [], Axes.set_title

    def noted(axes, label, **style):
        titles.append(label)
        return draw(axes, label, **style)

    (row,), (probes,) = report.summary.rows, report.summary.probes.values()
    names = [f"synthetic:items={n}k,codebook=256,levels=3,skew=1.1" for n in range(3)]
    rows = [row | {"point": name, "catalog": name, "constraint": "constrained"} for name in names]
    monkeypatch.setattr(Axes, "set_title", noted)
    summary = replace(report.summary, rows=rows, probes=dict.fromkeys(names, probes), stages={})
    draw_all(report.run, summary)
    grid = [title for title in titles if "\n" in title]
    assert len(grid) == 3
    assert all(len(line) <= 60 for title in grid for line in title.splitlines())


@pytest.mark.parametrize("count", [2, 20])
def test_a_legend_stays_inside_its_figure(report, monkeypatch, count):
    from matplotlib.figure import Figure

    inside, save = [], Figure.savefig

    def noted(figure, *args, **style):
        save(figure, *args, **style)
        boxes = [legend.get_window_extent() for part in figure.subfigs for legend in part.legends]
        width, height = figure.get_size_inches() * figure.dpi
        inside.extend(b.x0 >= 0 and b.y0 >= 0 and b.x1 <= width and b.y1 <= height for b in boxes)

    (row,) = report.summary.rows
    catalogs = [f"synthetic:items={n}k,codebook=256,levels=3,skew=1.1" for n in range(count)]
    rows = [
        row | {"point": f"{catalog} {length}", "catalog": catalog, "input_len": length}
        for catalog in catalogs
        for length in (100, 200)
    ]
    monkeypatch.setattr(Figure, "savefig", noted)
    draw_all(report.run, replace(report.summary, rows=rows, probes={}, stages={}))
    assert inside == [True]


def test_dots_and_lines_show_every_sla(tmp_path, monkeypatch):
    report = bench(tmp_path, sla=["avg:60ms", "p99.9:200ms"])
    figures = drawn(report, monkeypatch)
    name = next(name for name in figures if name.startswith("latency_throughput_sim"))
    data, texts = figures[name]
    assert data["limits"] == [{"stat": "avg", "ms": 60.0}, {"stat": "p99.9", "ms": 200.0}]
    assert {"avg", "p99.9", "SLA avg 60 ms", "SLA p99.9 200 ms"} < set(texts)
    assert all({"avg", "p99.9"} < set(probe) for probe in data["panels"][0]["probes"])
    assert {"SLA avg 60 ms", "SLA p99.9 200 ms"} < set(figures["stage_breakdown"][1])


def test_dots_are_drawn_at_the_statistic_of_the_sla(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    heights, draw = [], Axes.scatter

    def noted(axes, x, y, *args, **style):
        heights.extend(y)
        return draw(axes, x, y, *args, **style)

    report = bench(tmp_path, sla=["avg:60ms"])
    monkeypatch.setattr(Axes, "scatter", noted)
    figures = drawn(report, monkeypatch)
    (panel,) = figures[next(name for name in figures if name.startswith("latency_throughput_sim"))][0][
        "panels"
    ]
    assert {probe["avg"] for probe in panel["probes"]} <= set(heights)
    assert not {probe["p99"] for probe in panel["probes"]} & set(heights)


@pytest.mark.parametrize("verdict", ["pass", "fail", "invalid"])
def test_a_probe_looks_like_its_verdict_and_nothing_else_is_named(report, monkeypatch, verdict):
    """A late load is no failure, and a kind of probe that is not there has no entry in the legend."""
    ((point, probes),) = report.summary.probes.items()
    probes = [replace(probe, verdict=verdict) for probe in probes]
    changed = replace(report, summary=replace(report.summary, probes={point: probes}))
    figures = drawn(changed, monkeypatch)
    data, texts = figures[next(name for name in figures if name.startswith("latency_throughput_sim"))]
    assert {label for label, *_ in VERDICTS.values()} & set(texts) == {VERDICTS[verdict][0]}
    assert {probe["verdict"] for probe in data["panels"][0]["probes"]} == {verdict}
    assert len(_curve(data["panels"][0])) == 1 or verdict != "invalid"


def test_what_is_not_confirmed_is_not_called_a_claim(report, tmp_path, monkeypatch):
    figures = drawn(report, monkeypatch)
    said = {name: " ".join(texts) for name, (_, texts) in figures.items()}
    assert all("claim" not in text.replace("requests per claim", "") for text in said.values())
    for name, text in said.items():
        assert "not confirmed" in text, name
    confirmed = drawn(bench(tmp_path / "quick", preset="quick"), monkeypatch)
    latency = next(texts for name, (_, texts) in confirmed.items() if name.startswith("latency"))
    assert "claim" in latency
    assert all("indicative" not in " ".join(texts) for _, texts in confirmed.values())


@pytest.mark.parametrize("lengths", ["100", "100,200"])
def test_a_figure_without_a_rate_has_no_scale_of_rates(tmp_path, monkeypatch, lengths):
    figures = drawn(bench(tmp_path, input_len=lengths, engine="sim:base=200ms"), monkeypatch)
    _, texts = figures["sla_throughput_vs_len_free"]
    assert any(text.strip().startswith("infeasible") for text in texts)
    assert not any(text.startswith("0.0") for text in texts)


def test_a_free_search_maps_no_items(tmp_path):
    report = bench(tmp_path, constrained="both", catalog=CATALOGS[:1])
    free, constrained = (report.summary.stages[row["point"]]["claim"] for row in report.summary.rows)
    assert "map items" in constrained
    assert "map items" not in free
    assert "hand over" in free


def test_a_curve_starts_at_the_idle_engine_and_goes_through_medians(tmp_path, monkeypatch):
    """Single probes of nearly one rate jump up and down; the line between them would be a zigzag."""
    from matplotlib.axes import Axes

    curves, draw = {}, Axes.plot

    def noted(axes, *args, **style):
        if style.get("label") == "p99":
            curves["p99"] = args
        return draw(axes, *args, **style)

    report = bench(tmp_path, preset="quick")
    monkeypatch.setattr(Axes, "plot", noted)
    figures = drawn(report, monkeypatch)
    data, texts = figures[next(name for name in figures if name.startswith("latency_throughput_sim"))]
    (panel,) = data["panels"]
    assert panel["idle"]["p99"] == pytest.approx(13.5)
    rates = curves["p99"][0]
    assert all(later > 1.01 * rate for rate, later in pairwise(rates))
    assert len(rates) < sum(not probe["aborted"] for probe in panel["probes"])
    assert any("diamond: idle" in text for text in texts)


def test_rates_are_written_where_they_cover_no_other(report, monkeypatch):
    from matplotlib.figure import Figure

    boxes, save = [], Figure.savefig

    def noted(figure, *args, **style):
        figure.set_dpi(style["dpi"])  # Texts are measured in what was drawn.
        save(figure, *args, **style)
        frame = figure.axes[0].get_window_extent()
        found = [text.get_window_extent() for text in figure.axes[0].texts]
        boxes.append((frame.x0, frame.x1, found))

    (row,) = report.summary.rows
    rows = [
        row
        | {"point": f"{beams} {length}", "beams": beams, "input_len": length, "max_rate": 1e5 / length + near}
        for beams, near in (("900", 0), ("300", 1.5), ("100", 30))
        for length in (100, 500, 4000)
    ]
    monkeypatch.setattr(Figure, "savefig", noted)
    draw_all(report.run, replace(report.summary, rows=rows, probes={}, stages={}))
    left, right, found = boxes[0]
    assert 3 <= len(found) <= 9
    assert all(left <= box.x0 and box.x1 <= right for box in found)
    assert not any(a.overlaps(b) for i, a in enumerate(found) for b in found[:i])


def test_no_stage_has_the_colour_of_the_sla():
    assert PINK not in STAGES
    assert len(set(STAGES)) == 7


def test_figures_of_wrong_answers_say_so(report, monkeypatch):
    from matplotlib.figure import Figure

    boxes, save = [], Figure.savefig

    def noted(figure, *args, **style):
        figure.set_dpi(style["dpi"])  # Texts are measured in what was drawn.
        save(figure, *args, **style)
        (title,) = figure.subfigs[0].texts
        height = figure.get_size_inches()[1] * figure.dpi
        boxes.append((title.get_window_extent().y1, height))

    monkeypatch.setattr(Figure, "savefig", noted)
    rows = [row | {"verify": "failed"} for row in report.summary.rows]
    figures = drawn(replace(report, summary=replace(report.summary, rows=rows)), monkeypatch)
    assert all(any("VERIFICATION FAILED" in text for text in texts) for _, texts in figures.values())
    assert all(top <= height for top, height in boxes)
    assert not any("VERIFICATION" in " ".join(texts) for _, texts in drawn(report, monkeypatch).values())
