"""`grinf bench` in a process of its own: exit codes, one JSON document, no side effects of a dry run."""

import json
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.cli.test_app import run

SIM = ["bench", "--engine", "sim:base=9ms,per_req=4.5ms,max_batch=16", "--input-len", "100", "--beams", "900"]
SMOKE = [*SIM, "--preset", "smoke"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("bench_cli")


@pytest.fixture(scope="module")
def finished(folder):
    return run(*SMOKE, "--json", cwd=folder)


def only_run(folder):
    (path,) = (folder / "results").iterdir()
    return path


def test_a_sweep_prints_exactly_one_json_document(finished, folder):
    assert finished.returncode == 0, finished.stderr
    document = json.loads(finished.stdout)
    assert (document["schema"], document["status"], document["exit_code"]) == ("grinf.bench/1", "ok", 0)
    (point,) = document["data"]["points"]
    assert point["status"] == "ok"
    assert 100 < point["max_rate"] < 180
    assert document["data"]["sla"] == ["p99:100ms"]
    assert (only_run(folder) / "plots" / "search_path.png").stat().st_size > 10_000


def test_show_and_plot_work_from_the_folder_alone(finished, folder):
    path = only_run(folder)
    shown = run("bench", "show", path, cwd=folder)
    assert shown.returncode == 0, shown.stderr
    assert "max req/s" in shown.stdout
    for plot in (path / "plots").iterdir():
        plot.unlink()
    (path / "summary.md").unlink()
    again = run("bench", "plot", path, "--json", cwd=folder)
    assert again.returncode == 0, again.stderr
    assert len(json.loads(again.stdout)["data"]["plots"]) == len(list((path / "plots").glob("*.png"))) == 4
    assert "\n| engine |" in (path / "summary.md").read_text()


def test_resume_of_a_finished_run_says_so(finished, folder):
    again = run(*SMOKE, "--resume", cwd=folder)
    assert again.returncode == 0, again.stderr
    assert "this run was complete" in again.stdout
    only_run(folder)


def test_a_dry_run_writes_nothing(tmp_path):
    dry = run(*SIM, "--dry-run", "--json", cwd=tmp_path)
    assert dry.returncode == 0, dry.stderr
    assert [point["point"] for point in json.loads(dry.stdout)["data"]["points"]]
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_knows_that_no_probe_lasts_for_ever(tmp_path):
    dry = run("bench", "--sla", "100ms", "--device", "cpu", "--dry-run", "--json", cwd=tmp_path)
    assert all(10 < point["seconds"] <= 40 for point in json.loads(dry.stdout)["data"]["points"])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_says_how_it_goes_on(tmp_path, number, code):
    flags = ["--engine", "sim:", "--preset", "thorough", "--input-len", "100:900:100"]
    command = [sys.executable, "-m", "grinf", "bench", *flags]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    while not any('"probe"' in path.read_text() for path in tmp_path.glob("results/*/journal.jsonl")):
        time.sleep(0.05)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code
    assert "what was measured is kept: the same command with --resume goes on" in said


def test_a_gate_fails_with_5_and_only_when_it_is_certain(finished, folder, tmp_path):
    slow = ["bench", "--engine", "sim:base=20ms,per_req=9ms,max_batch=16", "--preset", "smoke"]
    slow += ["--input-len", "100", "--beams", "900", "--output", tmp_path]
    assert run(*slow, cwd=tmp_path).returncode == 0
    (candidate,) = tmp_path.glob("*-bench-*")
    baseline = only_run(folder)
    failed = run("bench", "compare", baseline, candidate, "--fail-if-slower", "5%", "--json", cwd=folder)
    assert failed.returncode == 5, failed.stderr
    assert json.loads(failed.stdout)["data"]["rows"][0]["verdict"] == "slower"
    assert run("bench", "compare", candidate, baseline, "--fail-if-slower", "5%", cwd=folder).returncode == 0
    assert run("bench", "compare", baseline, candidate, cwd=folder).returncode == 0


def test_a_gate_says_why_it_failed(finished, folder, tmp_path):
    hopeless = ["bench", "--engine", "sim:base=200ms", "--preset", "smoke", "--input-len", "100"]
    assert run(*hopeless, "--beams", "900", "--output", tmp_path, cwd=tmp_path).returncode == 0
    (candidate,) = tmp_path.glob("*-bench-*")
    failed = run("bench", "compare", only_run(folder), candidate, "--fail-if-slower", "5%", cwd=folder)
    assert failed.returncode == 5
    assert "GATE: 100 900 free vocab has no rate in the candidate: infeasible" in failed.stdout
    assert "nan" not in failed.stdout


def test_a_damaged_run_is_told_with_its_line(finished, folder, tmp_path):
    broken = shutil.copytree(only_run(folder), tmp_path / "broken")
    journal = broken / "journal.jsonl"
    journal.write_bytes(journal.read_bytes().replace(b'"stage": "floor"', b'"stage": "flour"', 1))
    for command in (["show", broken], ["plot", broken], ["compare", broken, broken]):
        told = run("bench", *command, cwd=tmp_path)
        assert told.returncode == 3, told.stderr
        assert "journal.jsonl, line" in told.stderr
        assert "fault in grinf" not in told.stderr


def test_a_budget_that_ends_is_told_above_the_table(tmp_path):
    cut = run(*SMOKE, "--budget", "9s", "--output", tmp_path, cwd=tmp_path)
    assert cut.returncode == 0, cut.stderr
    assert "time ran out; the same command with --resume goes on" in cut.stdout.partition("engine")[0]


def test_errors_are_printed_as_they_are(tmp_path):
    told = run("bench", "--input-len", "100:100:100:100", cwd=tmp_path)
    assert "100:100:100:100" in told.stderr
    named = run("bench", "show", "runs[bold]:smile:", cwd=tmp_path)
    assert "runs[bold]:smile:" in named.stderr


TINY = ["bench", "--device", "cpu", "--verify", "0"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([*TINY, "--input-len", "8,100000"], 2, "--input-len 100000 is longer than the"),
        ([*TINY, "--input-len", "8,64", "--max-context", "32"], 2, "longer than the 32 tokens"),
        ([*TINY, "--engine", "grinf:max_batch=0"], 2, "'0' is below 1"),
        (["bench", "--name", "../../esc"], 2, "is no name"),
        (["bench", "--versus", "grinf"], 2, "use --aa"),
        (["bench", "--versus", "hf", "--aa"], 2, "--aa takes no --versus hf"),
        (["bench", "--sla", "100"], 2, "has no unit"),
        (["bench", "--beams", "20-"], 2, "redirect"),
        (["bench", "--engine", "sgl"], 2, "unknown engine"),
        (["bench", "--engine", "sim:base=9"], 2, "no unit"),
        (["bench", "--input-len", "100:10:5"], 2, "holds no values"),
        (["bench", "show", "nowhere"], 3, "not a bench run"),
        (["bench", "compare", "a", "b", "--fail-if-slower", "200%"], 2, "no share"),
        (["bench", "--device", "cpu", "--model", "missing.json", "--verify", "0"], 3, "no model at"),
        (["bench", "kernels", "attenion"], 2, "unknown op"),
    ],
)
def test_exit_codes_of_mistakes(tmp_path, arguments, code, message):
    finished = run(*arguments, "--json", cwd=tmp_path)
    assert finished.returncode == code, finished.stderr
    document = json.loads(finished.stdout)
    assert document["exit_code"] == code
    assert message in json.dumps(document["error"], ensure_ascii=False)
    assert "Traceback" not in finished.stderr
    assert not list(tmp_path.glob("results/*"))


def test_the_shipped_configurations_are_valid(repository, tmp_path):
    names = sorted(path.name for path in (repository / "bench_configs").glob("*.toml"))
    assert names == ["article.toml", "constraint.toml", "quick.toml", "schedules.toml", "smoke_cpu.toml"]
    for name in names:
        config = repository / "bench_configs" / name
        dry = run("bench", "--config", config, "--dry-run", "--device", "cpu", "--json", cwd=repository)
        assert dry.returncode == 0, dry.stderr
        assert json.loads(dry.stdout)["data"]["points"]
    (tmp_path / "typo.toml").write_text('[sweep]\nbeam = "900"\n')
    typo = run("bench", "--config", "typo.toml", "--dry-run", cwd=tmp_path)
    assert typo.returncode == 2
    assert "beams" in typo.stderr
