"""`grinf demo` in a process of its own: what it prints, and what it refuses to touch."""

import json
import subprocess
import sys

import pytest

pytest_plugins = ["tests.demo_fixture"]


def run(folder, *arguments):
    command = [sys.executable, "-m", "grinf", "demo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)


@pytest.mark.slow
def test_a_finished_demo_is_told_again(small_demo):
    told = run(small_demo.folder)
    assert told.returncode == 0, told.stderr
    assert "93 held-out queries, 401 items" in told.stdout
    for system in (
        "chance",
        "popularity",
        "nearest neighbour",
        "BM25 on titles + training queries",
        "grinf, beams",
    ):
        assert system in told.stdout
    *others, ours = (score.recall for score in small_demo.report.systems)
    is_beaten = any(theirs > own for other in others for theirs, own in zip(other, ours, strict=True))
    assert ("Better than grinf here" in told.stdout) == is_beaten
    assert "Not for clinical use" in told.stdout
    assert "CDC and NCHS do not endorse" in told.stdout
    assert "--overwrite makes it again" in told.stdout
    for line in ("build-trie demo/items.parquet", "recall --input demo/queries.parquet", "bench --sla 100ms"):
        assert f"  grinf {line}" in told.stdout.splitlines()


@pytest.mark.slow
def test_json_holds_the_whole_report(small_demo):
    data = json.loads(run(small_demo.folder, "--json").stdout)["data"]
    assert data["is_new"] is False
    assert data["cutoffs"] == [1, 10, 100]
    assert [one["system"] for one in data["systems"]] == [one.system for one in small_demo.report.systems]
    assert data["widths"][0]["recall"][2:] == [None, None]


def test_a_users_settings_file_is_not_touched(tmp_path):
    pytest.importorskip("bm25s")
    (tmp_path / "grinf.toml").write_text('model = "mine"\n')
    refused = run(tmp_path)
    assert refused.returncode == 2
    assert "grinf.toml exists" in refused.stderr
    assert "move the file away" in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["grinf.toml"]
