"""A whole run on a simulated engine: what it writes, how it resumes, and what is drawn from it."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from grinf.cli.bench import _planned
from grinf.config.load import resolve
from grinf.config.settings import BenchSettings, BuildTrieSettings
from grinf.errors import EnvironmentFault, ExitCode, GrinfError, UsageError
from grinf.jobs.bench import sweep
from grinf.jobs.bench.compare import compare_runs
from grinf.jobs.bench.engines import OpenEngine, sim_server
from grinf.jobs.bench.environment import busy, used_gpus
from grinf.jobs.bench.plan import make_plan
from grinf.jobs.bench.plots import draw_all
from grinf.jobs.bench.run_dir import RunDir
from grinf.jobs.bench.sim import SimEngine
from grinf.jobs.bench.summary import _stages, footer, markdown, notes, short, summarise, tables
from grinf.jobs.bench.sweep import run_bench
from grinf.jobs.bench.verify import VerifyReport
from grinf.jobs.build_trie import run_build_trie

COMMON = {"engine": "sim:", "preset": "quick", "input_len": "100,500", "beams": "900"}


def bench(folder, **flags):
    given = COMMON | {"output": str(folder)} | flags
    return run_bench(resolve(BenchSettings, given), lambda stage, done, total: None)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return bench(tmp_path_factory.mktemp("bench"), constrained="both", catalog=["synthetic:items=1M"])


def test_the_folder_holds_raw_data_first_and_tables_from_it(report):
    run = report.run.path
    names = {path.name for path in run.iterdir()}
    assert {"journal.jsonl", "env.json", "config.resolved.toml", "probes.parquet", "requests"} <= names
    assert {"summary.csv", "summary.json", "summary.md"} <= names
    assert not list(run.rglob("*.tmp-*"))
    probes = pd.read_parquet(run / "probes.parquet")
    assert set(probes["stage"]) >= {"warmup", "floor", "capacity", "closed", "bracket", "refine", "confirm"}
    one = pq.ParquetFile(run / probes["file"].iloc[-1]).read().to_pandas()
    assert len(one[one["phase"] == "measure"]) == probes["n"].iloc[-1]
    e2e = (one["t_done_ns"] - one["t_sched_ns"]) / 1e6
    assert e2e.to_numpy() == pytest.approx(one["e2e_ms"].to_numpy(), rel=1e-5)
    assert (one["t_sched_ns"] <= one["t_submit_ns"]).all()
    assert (one["t_submit_ns"] <= one["t_admit_ns"]).all()
    assert (one["beams_returned"] == 900).all()


def test_the_summary_has_a_row_per_point_and_the_json_agrees_with_the_csv(report):
    rows = pd.read_csv(report.run.path / "summary.csv")
    assert len(rows) == 4
    assert set(rows["status"]) == {"ok"}
    document = json.loads((report.run.path / "summary.json").read_text())
    assert [row["max_rate"] for row in document["points"]] == pytest.approx(rows["max_rate"].tolist())
    assert (rows["first_failing_rate"] > rows["max_rate"]).all()
    assert (rows["p99_ms"] <= 100).all()
    assert (rows["throughput_rps"] > 0.97 * rows["max_rate"]).all()
    assert rows["workload_hash"].nunique() == 4
    text = markdown(report.summary)
    assert text.count("\n| sim:") == 4
    assert "SLA p99:100ms" in text


def test_tables_are_a_pure_function_of_the_raw_data(report):
    again = summarise(RunDir.open(report.run.path))
    assert markdown(again) == markdown(report.summary)
    assert again.stages == report.summary.stages


def test_stages_add_up_to_the_median(report):
    for parts in report.summary.stages.values():
        assert set(parts) == {"floor", "claim"}
        for stages in parts.values():
            total = sum(ms for name, ms in stages.items() if name != "median")
            assert total == pytest.approx(stages["median"], rel=0.05)


@pytest.fixture(scope="module")
def drawing(report):
    """Paths of the plots, and every horizontal and vertical line that was drawn."""
    from matplotlib.axes import Axes

    lines, across, upright = [], Axes.axhline, Axes.axvline
    with pytest.MonkeyPatch.context() as patch:
        for name, draw in (("axhline", across), ("axvline", upright)):

            def noted(self, at, draw=draw, **style):
                lines.append((at, style.get("label")))
                return draw(self, at, **style)

            patch.setattr(Axes, name, noted)
        return draw_all(report.run, report.summary), lines


def test_every_plot_has_ink_and_its_numbers_beside_it(drawing):
    from matplotlib.image import imread

    paths, _ = drawing
    names = {path.stem for path in paths}
    assert {
        "sla_throughput_vs_len_free",
        "sla_throughput_vs_len_constrained",
        "latency_throughput_grid",
    } <= names
    assert {"stage_breakdown", "schedules", "search_path"} <= names
    assert sum(name.startswith("latency_throughput_sim") for name in names) == 4
    for path in paths:
        picture = imread(path)[..., :3]
        assert (picture < 0.9).any(axis=2).mean() > 0.005
        data = json.loads(path.with_suffix(".json").read_text())
        assert data["limits"] == [{"stat": "p99", "ms": 100.0}]
        assert data["sla"] == ["p99:100ms"]
        assert data["title"]


def test_latency_plots_and_breakdown_draw_the_sla_line(drawing):
    _, lines = drawing
    assert lines.count((100.0, "SLA p99 100 ms")) == 4 + 4 + 1


def test_a_finished_run_is_not_measured_again(report, tmp_path):
    first = bench(tmp_path, input_len="100", beams="900")
    again = bench(tmp_path, input_len="100", beams="900", resume=True)
    assert again.run.path == first.run.path
    assert again.was_complete
    assert markdown(again.summary) == markdown(first.summary)
    other = bench(tmp_path, input_len="100", beams="900", sla=["200ms"], resume=True)
    assert other.run.path != first.run.path


@pytest.mark.parametrize("probes", [3, 15])
def test_a_killed_run_goes_on_and_comes_to_the_same_result(tmp_path, probes):
    whole = bench(tmp_path / "whole", input_len="100", beams="900")
    flags = f"--engine sim: --preset quick --input-len 100 --beams 900 --output {tmp_path}/cut".split()
    process = subprocess.Popen([sys.executable, "-m", "grinf", "bench", *flags], stderr=subprocess.DEVNULL)
    journal = None
    while process.poll() is None:
        journal = next((tmp_path / "cut").glob("*/journal.jsonl"), None)
        if journal and journal.read_text().count('"probe"') >= probes:
            break
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = [json.loads(line) for line in journal.read_text().splitlines() if line.endswith("}")]
    with journal.open("a") as file:
        file.write('{"event": "probe", "poi')
    resumed = bench(tmp_path / "cut", input_len="100", beams="900", resume=True)
    assert resumed.run.path == journal.parent
    after = [event["probe_id"] for _, event in resumed.run.events() if event["event"] == "probe"]
    assert after == list(range(len(after)))
    assert len(after) >= sum(event["event"] == "probe" for event in before) >= probes
    assert [row | {"config_hash": ""} for row in resumed.summary.rows] == [
        row | {"config_hash": ""} for row in whole.summary.rows
    ]


def test_a_budget_ends_the_run_normally_and_lowers_the_preset(tmp_path):
    report = bench(tmp_path, preset="thorough", budget="3m")
    assert report.exit_code is ExitCode.OK
    statuses = [row["status"] for row in report.summary.rows]
    assert statuses[0] == "ok"
    assert {row["preset"] for row in report.summary.rows if row["status"] == "ok"} < {
        "smoke",
        "quick",
        "standard",
    }
    assert bench(tmp_path, preset="thorough", budget="1h", resume=True).summary.rows[-1]["status"] == "ok"


@pytest.mark.parametrize("arrival", ["poisson", "closed"])
def test_a_search_that_the_budget_cuts_off_is_no_result(tmp_path, arrival):
    flags = {"preset": "smoke", "input_len": "100", "arrival": arrival}
    (row,) = bench(tmp_path, budget="9s", **flags).summary.rows
    assert (row["status"], row["max_rate"], row["flags"]) == ("budget", None, "")
    assert row["floor_ms"] == pytest.approx(13.5)
    report = bench(tmp_path, budget="1h", resume=True, **flags)
    assert report.summary.rows[0]["status"] == "ok"


def test_a_lowered_preset_and_a_budget_that_ended_are_told(tmp_path):
    report = bench(tmp_path, preset="thorough", budget="50s", input_len="100,200,500")
    told = notes(report.summary)
    assert any("budget, " in line and "time ran out" in line for line in told)
    assert any("lowered" in line and "from thorough to" in line for line in told)
    text = markdown(report.summary)
    assert all(line in text for line in told)
    ((headings, cells), *_) = tables(report.summary)
    assert cells[0][headings.index("preset")] == report.summary.rows[0]["preset"] != "thorough"
    (plain, *_) = tables(bench(tmp_path, input_len="100").summary)
    assert "preset" not in plain[0]


def test_an_infeasible_point_is_a_result(tmp_path):
    report = bench(tmp_path, sla=["10ms"], input_len="100", beams="900")
    assert report.summary.rows[0]["status"] == "infeasible"
    assert report.exit_code is ExitCode.OK
    names = {path.stem for path in draw_all(report.run, report.summary)}
    assert names == {"sla_throughput_vs_len_free", "stage_breakdown"}


def test_two_runs_are_compared_by_their_brackets(tmp_path, report):
    base = bench(tmp_path / "a", input_len="100", beams="900")
    faster = bench(
        tmp_path / "b", input_len="100", beams="900", engine="sim:base=6ms,per_req=3ms,max_batch=16"
    )
    found = compare_runs([base.run.path, faster.run.path])
    assert found.rows[0]["verdict"] == "faster"
    assert found.geomean == pytest.approx(found.rows[0]["ratio"])
    assert 1.2 < found.geomean < 2
    assert found.gate(0.0) == []
    assert "is slower" in compare_runs([faster.run.path, base.run.path]).gate(0.05)[0]
    same = compare_runs([base.run.path, base.run.path])
    assert same.rows[0]["verdict"] == "~"
    assert same.differences == []


def test_runs_of_other_work_are_not_compared_unless_forced(tmp_path):
    a = bench(tmp_path / "a", input_len="100", beams="900", preset="smoke")
    b = bench(tmp_path / "b", input_len="100", beams="900", preset="smoke", seed="7")
    c = bench(tmp_path / "c", input_len="100", beams="900", preset="smoke", sla=["200ms"])
    with pytest.raises(UsageError, match="work of sim_len100"):
        compare_runs([a.run.path, b.run.path])
    with pytest.raises(UsageError, match="differ in sla"):
        compare_runs([a.run.path, c.run.path])
    assert compare_runs([a.run.path, b.run.path], force=True).notes[-1].startswith("FORCED")
    with pytest.raises(EnvironmentFault, match="not a bench run"):
        compare_runs([tmp_path, a.run.path])
    with pytest.raises(UsageError, match="not an interleaved run"):
        compare_runs([a.run.path])


def test_a_footer_says_how_the_load_really_was(tmp_path):
    turns = bench(tmp_path / "a", input_len="100", versus="sim:base=8ms", interleave="2")
    assert "two engines in turns, each in a closed loop of 32 callers" in footer(turns.summary)
    assert "poisson" not in footer(turns.summary)
    narrow = bench(tmp_path / "c", input_len="100", versus="sim:max_batch=1", interleave="1")
    assert "closed loop of 2 callers" in footer(narrow.summary)
    hopeless = bench(tmp_path / "b", input_len="100", engine="sim:base=200ms")
    assert "poisson arrivals" in footer(hopeless.summary)
    assert "requests per claim" not in footer(hopeless.summary)


def test_every_row_tells_its_beams(tmp_path):
    """Also one without a claim: an engine that returns less looks fast on the floor, too."""
    for flags in ({"engine": "sim:base=200ms"}, {"versus": "sim:base=8ms", "interleave": "1"}):
        (row,) = bench(tmp_path / str(len(flags)), input_len="100", **flags).summary.rows
        assert row["max_rate"] is None
        assert (row["beams_min"], row["beams_p50"]) == (900, 900)


@pytest.mark.parametrize(
    ("value", "text"), [(0.01234, "0.0123"), (97.25, "97.2"), (999.7, "1,000"), (12345.6, "12,346")]
)
def test_a_rate_is_never_written_with_an_exponent(value, text):
    assert short(value) == text


def test_a_busy_machine_is_told():
    assert busy({}) == ""
    assert busy({"load_average": 1.2, "cores": 2, "gpu_processes": []}) == ""
    told = busy({"load_average": 1.8, "cores": 2, "gpu_processes": [{"pid": "1"}]})
    assert told == "load 1.8 on 2 cores, 1 processes on the GPU"


def test_only_the_gpus_of_a_run_are_looked_at():
    gpus = [{"index": str(i), "uuid": f"GPU-{i}{i}ab"} for i in range(3)]
    found = {
        (("cuda:0",), ""): [0],
        (("auto",), ""): [0],
        (("cuda:0", "cuda:2"), ""): [0, 2],
        (("cuda:0",), "2"): [2],
        (("cuda:1",), "GPU-22,GPU-11"): [1],
        (("cuda:0",), "MIG-7"): [0, 1, 2],
        (("cpu",), ""): [],
        ((), "0"): [],
    }
    for (devices, visible), indices in found.items():
        assert used_gpus(gpus, devices, visible) == [gpus[i] for i in indices]


def test_what_was_not_verified_stands_above_the_tables(tmp_path, report, monkeypatch):
    monkeypatch.setattr(
        sweep, "verify", lambda opened, groups: [VerifyReport(skipped="no memory")] * len(groups)
    )
    summary = bench(tmp_path, input_len="100", preset="smoke").summary
    real = replace(summary, header=summary.header | {"machine": "a GPU"})
    assert markdown(real).startswith("**NOT VERIFIED: no memory**")
    assert not any("NOT VERIFIED" in line for line in notes(report.summary))


def test_what_else_ran_stands_above_the_tables(report):
    summary = replace(report.summary, header=report.summary.header | {"busy": "load 3.0 on 2 cores"})
    assert notes(report.summary) == []
    assert "busy before this run began (load 3.0 on 2 cores)" in markdown(summary).splitlines()[0]


def test_engines_that_take_turns_meet_the_same_work(tmp_path):
    slower = "sim:base=9ms,per_req=5ms,max_batch=16"
    report = bench(tmp_path, input_len="100", beams="900", versus=slower, interleave="8")
    (ratio,) = report.summary.ratios
    assert ratio["pairs"] == 8
    assert ratio["ratio"] == pytest.approx((9 + 16 * 5) / (9 + 16 * 4.5), rel=0.01)
    assert ratio["low"] <= ratio["ratio"] <= ratio["high"]
    probes = pd.read_parquet(report.run.path / "probes.parquet")
    blocks = probes[probes["stage"] == "block"].sort_values("started_utc")
    first, second = blocks.groupby("point")["seed"].apply(list)
    assert first == second
    assert compare_runs([report.run.path]).rows[0]["verdict"] == "faster"


class DriftingEngine(SimEngine):
    """Slows down by a hundredth every ten seconds, with noise, as a machine that gets hot."""

    noise = np.random.default_rng(7)

    def step(self):
        results, hot = super().step(), 1e-3 * self.clock.now_ns() / 1e9
        late_ns = (hot + abs(self.noise.normal(0, 0.2))) * self.server.base_ns
        self.clock.sleep_until(self.clock.now_ns() + int(late_ns))
        return results


def drifting(settings, spec, point, clock):
    server = sim_server(spec.removesuffix("#2"))
    return OpenEngine(DriftingEngine(server, clock, point.beams), server.max_batch)


def test_an_engine_against_itself_shows_what_the_machine_can_see(tmp_path, monkeypatch):
    """Taking turns always in one order would charge the drift to the second engine."""
    monkeypatch.setattr(sweep, "open_engine", drifting)
    report = bench(tmp_path, input_len="100", beams="900", aa=True, interleave="20")
    (ratio,) = report.summary.ratios
    assert [ratio[name] for name in ("beams_min", "versus_beams_min")] == [900, 900]
    assert ratio["low"] <= 1 <= ratio["high"]
    assert 0 < ratio["high"] - ratio["low"] < 0.02
    assert report.summary.rows[0]["status"] == "interleaved"
    for status in ("interleaved", "budget"):
        rows = [row | {"status": status} for row in report.summary.rows]
        assert draw_all(report.run, replace(report.summary, rows=rows)) == []
    slower = "sim:base=9ms,per_req=4.6ms,max_batch=16"
    report = bench(tmp_path, input_len="100", beams="900", versus=slower, interleave="20")
    assert report.summary.ratios[0]["low"] > 1


def test_both_engines_are_verified_at_every_length_and_tell_their_beams(tmp_path, monkeypatch):
    """The rival is wrong at the longer length alone."""
    asked = []

    def judge(opened, groups):
        lengths = [{request.context_len for request in group} for group in groups]
        asked.append((type(opened.engine).__name__, lengths, [len(group) for group in groups]))
        wrong = [isinstance(opened.engine, Rival) and 40 in found for found in lengths]
        return [VerifyReport(1, ["a beam is wrong"] * fault) for fault in wrong]

    class Rival(SimEngine):
        pass

    def opens(settings, spec, point, clock):
        kind, beams = (Rival, (7,)) if "5ms" in spec.split("per_req=")[1][:3] else (SimEngine, point.beams)
        return OpenEngine(kind(sim_server(spec), clock, beams), 16)

    monkeypatch.setattr(sweep, "open_engine", opens)
    monkeypatch.setattr(sweep, "verify", judge)
    engine, rival = "sim:base=9ms,per_req=4.5ms", "sim:base=9ms,per_req=5ms"
    report = bench(tmp_path, engine=engine, versus=rival, input_len="20,40", interleave="1", verify="1")
    assert asked == [("SimEngine", [{20}, {40}], [1, 1]), ("Rival", [{20}, {40}], [1, 1])]
    assert [row["verify"] for row in report.summary.rows] == ["ok", "failed"]
    assert "per-req-5ms" in report.summary.rows[1]["verify_faults"]
    assert report.exit_code is ExitCode.REJECTED
    for ratio in report.summary.ratios:
        assert (ratio["beams_min"], ratio["beams_p50"]) == (900, 900)
        assert (ratio["versus_beams_min"], ratio["versus_beams_p50"]) == (7, 7)
    resumed = bench(
        tmp_path, engine=engine, versus=rival, input_len="20,40", interleave="1", verify="1", resume=True
    )
    assert resumed.was_complete
    assert len(asked) == 2


def test_an_engine_that_loses_answers_is_not_trusted(tmp_path, monkeypatch):
    class Forgetful(SimEngine):
        def step(self):
            results = super().step()
            return results[:-1] if self.clock.now_ns() > 5e9 else results

    def opens(settings, spec, point, clock):
        return OpenEngine(Forgetful(sim_server(spec), clock, point.beams), 16)

    monkeypatch.setattr(sweep, "open_engine", opens)
    report = bench(tmp_path, input_len="100", preset="smoke")
    assert report.summary.rows[0]["status"] == "lost"
    assert report.exit_code is ExitCode.UNTRUSTED
    assert any("never answered" in line for line in notes(report.summary))
    report = bench(tmp_path, input_len="100", preset="smoke", aa=True)
    assert report.summary.rows[0]["status"] == "lost"


@pytest.mark.parametrize(
    ("catalog", "told"),
    [
        ("no.trie", "there is no trie no.trie"),
        (__file__, "is not a whole trie file"),
        ("synthetic:items=1M,items=2M", "'items' twice"),
    ],
)
def test_a_catalogue_that_cannot_be_is_refused_before_anything_runs(tmp_path, catalog, told):
    with pytest.raises(GrinfError, match=told):
        bench(tmp_path, constrained="on", catalog=["synthetic:items=1M", catalog])
    assert not list(tmp_path.iterdir())


def test_a_catalogue_that_is_named_is_searched():
    given = COMMON | {"catalog": ["synthetic:items=1M"], "input_len": "100"}
    for flags, searched in (({}, ["synthetic:items=1M"]), ({"constrained": "off"}, [""])):
        plan = make_plan(resolve(BenchSettings, given | flags))
        assert [point.catalog for point in plan.points] == searched


def test_stages_of_a_few_requests_are_numbers(report):
    point, probes = next(iter(report.summary.probes.items()))
    few = _stages(report.run, probes[:1], "items")
    assert all(np.isfinite(list(few.values())))
    for n in (1, 2, 3, 4):
        table = report.run.read_table(probes[0].record.file).slice(0, n)
        report.run.write_table("few.parquet", table)
        record = replace(probes[0].record, file="few.parquet")
        stages = _stages(report.run, [replace(probes[0], record=record)], "items")
        assert all(np.isfinite(list(stages.values()))), point


def test_the_estimate_of_engines_in_turns_counts_the_turns():
    plans = [make_plan(resolve(BenchSettings, COMMON | {"aa": True, "interleave": n})) for n in ("1", "99")]
    once, often = (_planned(plan).data["points"][0]["seconds"] for plan in plans)
    assert often == 50 * once > 0


def test_catalogues_of_one_name_are_points_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("sids.npy", np.array([[0, 1, 2], [3, 4, 5]]))
    for path in ("a/items.trie", "b/items.trie"):
        given = {"items": ["sids.npy"], "output": path, "codebook_sizes": "8,8,8"}
        run_build_trie(resolve(BuildTrieSettings, given), lambda stage, done, total: None)
    tries = ["a/items.trie", "b/items.trie", "a/items.trie", "synthetic:items=1M", "synthetic:items=1M"]
    report = bench(tmp_path, constrained="on", catalog=tries, preset="smoke", input_len="100")
    rows = report.summary.rows
    assert len(rows) == len({row["point"] for row in rows}) == 3
    files = [probe.record.file for probes in report.summary.probes.values() for probe in probes]
    assert len(set(files)) == len(files)
    ((headings, cells), *_) = tables(report.summary)
    assert [line[headings.index("catalogue")] for line in cells] == tries[:2] + tries[3:4]
    assert rows[2]["point"] == "sim_len100_beams900_synthetic-items-1M_vocab"
    data = json.loads((draw_all(report.run, report.summary)[0].with_suffix(".json")).read_text())
    assert [line["label"] for line in data["lines"]] == ["a/items.trie", "b/items.trie", "items=1M"]


def test_a_gate_does_not_pass_what_was_not_compared(tmp_path):
    one = bench(tmp_path / "a", input_len="100", preset="smoke").run.path
    two = bench(tmp_path / "b", input_len="100,200", preset="smoke").run.path
    slow = bench(tmp_path / "c", input_len="100", preset="smoke", engine="sim:base=200ms").run.path
    other = bench(tmp_path / "d", input_len="300", preset="smoke").run.path
    assert compare_runs([one, two]).gate(0.05) == []
    assert any(
        "200 900 free vocab is in the candidate only" in note for note in compare_runs([one, two]).notes
    )
    assert any(
        "200 900 free vocab is in the baseline only" in why for why in compare_runs([two, one]).gate(0.05)
    )
    infeasible = compare_runs([one, slow])
    assert any("has no rate in the candidate: infeasible" in why for why in infeasible.gate(0.05))
    assert infeasible.geomean is None
    assert "no point was compared" in compare_runs([one, other]).gate(0.05)
    assert "no point was compared" in compare_runs([slow, slow]).gate(0.05)


def test_an_interleaved_run_has_no_rates_to_compare(tmp_path):
    searched = bench(tmp_path / "a", input_len="100", preset="smoke").run.path
    turns = bench(tmp_path / "b", input_len="100", versus="sim:base=8ms", interleave="1").run.path
    for pair in ([searched, turns], [turns, searched], [turns, turns]):
        with pytest.raises(UsageError, match="is an interleaved run"):
            compare_runs(pair, force=True)


def test_fewer_beams_than_asked_for_stand_above_the_tables(tmp_path, monkeypatch):
    """Whatever the reason: also an engine that answers in full only while it is verified."""

    class Thrifty(SimEngine):
        def step(self):
            answers = super().step()
            return [replace(one, sids=one.sids[:90], scores=one.scores[:90]) for one in answers]

    def opened(settings, spec, point, clock):
        server = sim_server(spec)
        return OpenEngine(Thrifty(server, clock, point.beams), server.max_batch)

    assert not any("fewer beams" in note for note in notes(bench(tmp_path / "a").summary))
    monkeypatch.setattr(sweep, "open_engine", opened)
    report = bench(tmp_path / "b", input_len="100", beams="20-300-900,90,20-90")
    assert any("fewer beams than asked for in 1 of 3 points" in note for note in notes(report.summary))


def test_two_processes_do_not_write_to_one_run(report):
    with report.run.locked(), pytest.raises(UsageError, match="in use"), report.run.locked():
        pass


def test_the_grid_fills_what_is_left_open(tmp_path):
    (tmp_path / "grinf.toml").write_text("")
    plan = make_plan(resolve(BenchSettings, {"device": "cpu"}))
    assert plan.settings.model.name == "tiny.json"
    assert plan.preset == "smoke"
    assert plan.budget_ns == 120_000_000_000
    assert {point.constraint for point in plan.points} == {"free"}
    swept = make_plan(resolve(BenchSettings, COMMON | {"scores": "vocab,children", "constrained": "both"}))
    assert [(p.constraint, p.score) for p in swept.points if p.input_len == 100 and p.beams == (900,)] == [
        ("free", "vocab"),
        ("constrained", "vocab"),
        ("constrained", "children"),
    ]
    assert len({point.key for point in swept.points}) == len(swept.points)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"engine": "sin:"}, "unknown engine 'sin'"),
        ({"engine": "sim:base=0ms"}, "zero"),
        ({"engine": "sim:base=1ns,per_req=1ns,max_batch=1"}, "too fast"),
        ({"engine": "sim:max_batch=1M"}, "too fast"),
        ({"engine": "sim:speed=3"}, "unknown name 'speed'"),
        ({"engine": "sim:", "versus": "grinf"}, "different clocks"),
        ({"engine": "sim:base=9"}, "no unit"),
        ({"engine": "sim:", "versus": "sim"}, "is the engine itself"),
        ({"engine": "grinf", "versus": "grinf"}, "is the engine itself"),
        ({"engine": "sim:", "versus": "sim:base=8ms", "aa": True}, "--aa takes no --versus"),
        ({"engine": "sim:", "interleave": "5"}, "--interleave 5 has no second engine"),
        ({"engine": "grinf:max_batch=0"}, "grinf:max_batch=0: '0' is below 1"),
        ({"engine": "grinf", "versus": "grinf:dtype=int4"}, "unknown dtype"),
        ({"name": "../../esc"}, "is no name"),
        ({"name": "a/b"}, "is no name"),
    ],
)
def test_engines_that_cannot_be(flags, message):
    with pytest.raises(UsageError, match=message):
        make_plan(resolve(BenchSettings, COMMON | flags))


def test_no_sla_is_none_to_keep(tmp_path):
    settings = resolve(BenchSettings, COMMON | {"output": str(tmp_path)}).model_copy(update={"sla": ()})
    with pytest.raises(UsageError, match="there is no SLA"):
        run_bench(settings, lambda *_: None)
    assert list(tmp_path.iterdir()) == []
