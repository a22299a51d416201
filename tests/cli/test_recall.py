"""`grinf recall` in a process of its own: what a user types, reads and gets."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.cli.test_app import run
from tests.recall_world import World, make_world, write


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = make_world(tmp_path_factory.mktemp("recall_cli"))
    toml = f'model = "{world.model}"\ntrie = "{world.trie}"\nbeams = "6"\n[recall]\ntruth_column = "truth"\n'
    (world.folder / "grinf.toml").write_text(toml)
    return world


def test_the_short_command_with_settings_from_a_file(world: World) -> None:
    write(world.folder / "queries.parquet", {"prompt": ["w1 w2", None, "w3"], "truth": [[100], [101], None]})
    finished = run("recall", "--input", "queries.parquet", "--json", cwd=world.folder)
    assert finished.returncode == 4, finished.stderr
    document = json.loads(finished.stdout)
    assert document["schema"] == "grinf.recall/1"
    data = document["data"]
    assert data["output"] == "results/queries.recall.parquet"
    assert (data["rows"], data["ok"], data["errors"]) == (3, 2, {"null_input": 1})
    assert (data["metrics"]["n_eval"], data["metrics"]["n_error"]) == (1, 1)
    assert pq.read_table(world.folder / data["output"])["status"].to_pylist() == ["ok", "error", "ok"]
    assert "row 1, column 'prompt': the input is null" in finished.stdout

    again = run("recall", "--input", "queries.parquet", cwd=world.folder)
    assert again.returncode == 0, again.stderr
    assert "is up to date, nothing was done" in again.stdout
    assert "on SIDs" in again.stdout

    other = run("recall", "--input", "queries.parquet", "--beams", "5", cwd=world.folder)
    assert other.returncode == 2
    assert "beams was 6, is 5" in other.stderr
    assert "--overwrite" in other.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--input", "queries.parquet", "--input-column", "promt"], 2, "did you mean 'prompt'"),
        (["--input", "nothing.parquet"], 2, "no parquet file at nothing.parquet"),
        (["--input", "queries.parquet", "--trie", "nothing.grtrie"], 3, "nothing.grtrie"),
        (["--input", "queries.parquet", "--trie", "cut.grtrie"], 3, "cut.grtrie"),
        (["--input", "queries.parquet", "--model", "nowhere"], 3, "no model at nowhere"),
        (
            ["--input", "queries.parquet", "-o", "queries.parquet/x/out.parquet"],
            2,
            "queries.parquet is no folder",
        ),
        (["--input", "queries.parquet", "-o", "x" * 240 + ".parquet"], 2, "a name is too long"),
        (["--input", "x" * 300], 2, "no parquet file at xxx"),
        (
            ["--input", "queries.parquet", "--on-error", "fail"],
            4,
            "row 1, column 'prompt': the input is null",
        ),
    ],
)
def test_refusals_name_the_fault_and_leave_nothing(
    world: World, tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    write(tmp_path / "queries.parquet", {"prompt": ["w1", None]})
    (tmp_path / "cut.grtrie").write_bytes(world.trie.read_bytes()[:-100])
    base = [
        "recall",
        "--model",
        str(world.model),
        "--trie",
        str(world.trie),
        "--beams",
        "6",
        "-o",
        "out.parquet",
    ]
    finished = run(*base, *arguments, cwd=tmp_path)
    assert finished.returncode == code, finished.stderr
    assert message in finished.stderr
    assert "Traceback" not in finished.stderr
    assert finished.stdout == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut.grtrie", "queries.parquet"]


def test_ctrl_c_keeps_what_is_committed(world: World, tmp_path: Path) -> None:
    queries = write(tmp_path / "q.parquet", {"prompt": ["w1 w2 w3"] * 9000}, row_group_size=200)
    base = [
        "--model",
        str(world.model),
        "--trie",
        str(world.trie),
        "--input",
        str(queries),
        "-o",
        "out.parquet",
    ]
    command = [sys.executable, "-m", "grinf", "recall", *base, "--beams", "40"]
    with subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as job:
        partial = tmp_path / "out.parquet.partial"
        deadline = time.monotonic() + 120
        while len(list(partial.glob("unit-*.parquet"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        job.send_signal(signal.SIGINT)
        job.communicate(timeout=60)
    assert job.returncode == 130
    committed = sorted(partial.glob("unit-*.parquet"))
    assert len(committed) >= 2
    assert not list(partial.glob("*.tmp-*"))
    assert all(pq.read_table(path).num_rows == 200 for path in committed)
    assert not (tmp_path / "out.parquet").exists()
