"""`grinf recall` that is killed, interrupted, out of space or huge: processes that really are."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.forked import Job
from tests.recall_world import World, make_world, write

PATIENCE_S = 120
GOES_ON = "the same command goes on where it stopped"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = make_world(tmp_path_factory.mktemp("recall_job_cli"))
    toml = f'model = "{world.model}"\ntrie = "{world.trie}"\nbeams = "20"\n'
    (world.folder / "grinf.toml").write_text(toml)
    return world


def make_queries(path: Path, rows: int, *, bad: int = 7) -> Path:
    """Write prompts of different lengths, each `bad`-th of them null, with a target each."""
    rng = np.random.default_rng(5)
    lengths = rng.integers(1, 30, rows)
    texts = [" ".join(f"w{word}" for word in rng.integers(0, 30, length)) for length in lengths]
    prompts = [None if row % bad == 3 else text for row, text in enumerate(texts)]
    columns = {"prompt": prompts, "truth": [[100 + row % 60] for row in range(rows)]}
    return write(path, columns, row_group_size=max(1, rows // 3))


def start(world: World, *arguments: object, ignored: Sequence[signal.Signals] = ()) -> Job:
    return Job("recall", *arguments, folder=world.folder, ignored=ignored)


def recall(world: World, *arguments: object) -> Job:
    """Run a job to its end."""
    return start(world, *arguments).wait()


def wait_until(is_so: Callable[[], bool], job: Job) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert job.returncode is None, job.stderr
        assert time.monotonic() < deadline
        time.sleep(0.002)


def units_in(output: Path) -> list[Path]:
    return sorted(output.with_name(f"{output.name}.partial").glob("unit-*.parquet"))


def test_a_job_that_is_killed_again_and_again_gives_the_same_bytes(world: World, tmp_path: Path) -> None:
    queries, rng = make_queries(tmp_path / "q.parquet", 120), random.Random(1)
    base = ["--input", str(queries), "--truth-column", "truth", "--unit-rows", "2", "--allow-rejects", "20%"]
    whole = recall(world, *base, "-o", tmp_path / "whole.parquet")
    assert whole.returncode == 0, whole.stderr
    output = tmp_path / "out.parquet"
    for units in (1, 18, 40):
        job = start(world, *base, "-o", output)
        wait_until(lambda units=units: len(units_in(output)) >= units, job)
        time.sleep(rng.random() * 0.05)
        job.send_signal(signal.SIGKILL)
        assert job.wait().returncode == -signal.SIGKILL
        assert not output.exists()
    kept = len(units_in(output))
    assert kept < 60
    last = recall(world, *base, "-o", output)
    assert last.returncode == 0, last.stderr
    assert f"{kept} of 60 units were there already" in last.stdout
    for name in ("{}.parquet", "{}.rejects.parquet"):
        resumed, plain = (tmp_path / name.format(stem) for stem in ("out", "whole"))
        assert resumed.read_bytes() == plain.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("out.parquet", "out.rejects.parquet", "q.parquet", "whole.parquet", "whole.rejects.parquet")
    ]
    again = recall(world, *base, "-o", output)
    assert (again.returncode, "nothing was done" in again.stdout) == (0, True)


def test_the_first_signal_lets_the_unit_end(world: World, tmp_path: Path) -> None:
    queries = make_queries(tmp_path / "q.parquet", 20_000)
    codes = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGUSR1: 143}
    base = ["--input", str(queries), "--unit-rows", "100", "--json"]
    jobs = {number: start(world, *base, "-o", tmp_path / f"{number.name}.parquet") for number in codes}
    for number, job in jobs.items():
        output = tmp_path / f"{number.name}.parquet"
        wait_until(lambda output=output: len(units_in(output)) >= 2, job)
        if number == signal.SIGTERM:
            second = recall(world, *base, "-o", output)
            assert second.returncode == 2
            error = json.loads(second.stdout)["error"]
            assert error["message"] == f"{output}.partial is in use"
            assert f"process {job.pid} on " in error["why"]
        job.send_signal(number)
    for number, job in jobs.items():
        assert job.wait().returncode == codes[number], job.stderr
        assert "Traceback" not in job.stderr
        document = json.loads(job.stdout)
        assert document["exit_code"] == codes[number]
        units = units_in(tmp_path / f"{number.name}.parquet")
        assert f"stopped by {number.name} at " in document["error"]["message"]
        assert f"({len(units)} of " in document["error"]["message"]
        assert document["error"]["hint"] == GOES_ON
        assert not list((tmp_path / f"{number.name}.parquet.partial").rglob("*.tmp-*"))
        assert all(pq.read_table(path).num_rows <= 100 for path in units)


def test_the_second_signal_ends_the_unit_too(world: World, tmp_path: Path) -> None:
    queries = make_queries(tmp_path / "q.parquet", 30_000)
    job = start(world, "--input", queries, "--unit-rows", "100000", "-o", tmp_path / "out", "--json")
    wait_until(lambda: "queries:" in job.stderr, job)
    job.send_signal(signal.SIGTERM)
    wait_until(lambda: "again: stopping now" in job.stderr, job)
    sent = time.monotonic()
    job.send_signal(signal.SIGINT)
    assert job.wait().returncode == 143
    assert time.monotonic() - sent < 10
    assert "Traceback" not in job.stderr
    assert json.loads(job.stdout)["error"]["message"] == "stopped by SIGTERM at 0% (0 of 3 units)"
    assert not (tmp_path / "out.partial").exists()  # There was nothing to keep.


def test_a_signal_that_is_ignored_stays_ignored(world: World, tmp_path: Path) -> None:
    queries = make_queries(tmp_path / "q.parquet", 400)
    base = ["--input", queries, "--unit-rows", "20", "--allow-rejects", "100%", "-o", tmp_path / "out"]
    job = start(world, *base, ignored=[signal.SIGHUP])
    wait_until(lambda: len(units_in(tmp_path / "out")) >= 1, job)
    job.send_signal(signal.SIGHUP)
    assert job.wait().returncode == 0, job.stderr


def test_an_input_that_changed_is_refused_and_a_copy_is_not(world: World, tmp_path: Path) -> None:
    queries, output = make_queries(tmp_path / "q.parquet", 200), tmp_path / "out"
    base = ["--unit-rows", "20", "--allow-rejects", "100%", "-o", str(output)]
    job = start(world, "--input", queries, *base)
    wait_until(lambda: len(units_in(output)) >= 2, job)
    job.send_signal(signal.SIGKILL)
    job.wait()
    copy = tmp_path / "copy" / "q.parquet"
    copy.parent.mkdir()
    shutil.copy(queries, copy)
    os.utime(copy, (1, 1))
    make_queries(queries, 200, bad=9)
    refused = recall(world, "--input", queries, *base)
    assert refused.returncode == 2
    assert f"the unfinished job {output}.partial is of other inputs or settings" in refused.stderr
    assert "input 0 was q.parquet " in refused.stderr
    other = recall(world, "--input", copy, *base, "--unit-rows", "10")
    assert other.returncode == 2
    assert "unit-rows was 20, is 10" in other.stderr
    assert len(units_in(output)) >= 2
    finished = recall(world, "--input", copy, *base)
    assert finished.returncode == 0, finished.stderr
    assert "units were there already" in finished.stdout


# Space on the disk.

FULL_DISK = """
set -e
mount -t tmpfs -o size=$SIZE tmpfs disk
code=0
"$@" -o disk/out.parquet >first.out 2>first.err || code=$?
echo $code >first.code
find disk -type f >first.files
test -n "$AGAIN" || exit 0
mount -o remount,size=50m disk
"$@" -o disk/out.parquet >second.out 2>second.err
cp disk/*.parquet .
"""


def run_on_a_small_disk(
    world: World, folder: Path, size: str, again: bool, *arguments: str
) -> dict[str, str]:
    """Run a command on a tmpfs of `size`, perhaps again once that has grown; give what the files say."""
    (folder / "disk").mkdir()
    shutil.copy(world.folder / "grinf.toml", folder)
    own_namespace = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
    env = os.environ | {"SIZE": size, "AGAIN": "yes" if again else ""}

    def script(text: str, *words: str) -> int:
        command = [*own_namespace, text, "sh", *words]
        return subprocess.run(command, cwd=folder, env=env, capture_output=True, check=False).returncode

    if script("mount -t tmpfs tmpfs disk"):
        pytest.skip("this machine lets nobody mount a tmpfs in a namespace of his own")
    command = [sys.executable, "-m", "grinf", "recall", *arguments]
    code = script(FULL_DISK, *command)
    told = {path.name: path.read_text() for path in folder.iterdir() if path.stem in ("first", "second")}
    assert code == 0, told
    assert "Traceback" not in told["first.err"]
    return told


def test_a_full_disk_keeps_the_units_and_tells_what_is_missing(world: World, tmp_path: Path) -> None:
    """The first unit is small, so nothing foretells it."""
    long = np.random.default_rng(0).integers(0, 256, 400_000, np.uint8).tobytes().hex()
    columns = {"prompt": ["w1"] * 20, "blob": ["x"] * 10 + [long] * 10}
    queries = write(tmp_path / "q.parquet", columns, row_group_size=20)
    told = run_on_a_small_disk(world, tmp_path, "1m", True, "--input", str(queries), "--unit-rows", "2")
    assert told["first.code"] == "7\n", told["first.err"]
    assert "error: no space left for disk/out.parquet.partial" in told["first.err"]
    assert "MB more are needed" in told["first.err"]
    assert GOES_ON in told["first.err"]
    files = told["first.files"].split()
    kept = [name for name in files if "unit-" in name]
    assert 5 <= len(kept) < 10
    assert not [name for name in files if ".tmp-" in name or name == "disk/out.parquet"]
    assert f"{len(kept)} of 10 units were there already" in told["second.out"]
    assert pq.read_table(tmp_path / "out.parquet")["blob"].to_pylist() == columns["blob"]


def test_a_job_that_cannot_fit_is_refused_after_the_first_unit(world: World, tmp_path: Path) -> None:
    queries = make_queries(tmp_path / "q.parquet", 200)
    told = run_on_a_small_disk(world, tmp_path, "160k", False, "--input", str(queries), "--unit-rows", "10")
    assert told["first.code"] == "7\n", told["first.err"]
    assert "error: the answers will not fit" in told["first.err"]
    assert "KB more are needed at disk/out.parquet.partial" in told["first.err"]
    assert GOES_ON in told["first.err"]
    assert told["first.files"].count("/unit-000000.parquet") == 2  # Its answers, and its rejected queries.
    assert told["first.files"].count("/unit-") == 2


# Memory.


UNIT_ROWS, BLOB_BYTES = 256, 16_384


def make_large(path: Path, units: int) -> Path:
    """Write queries with a large column, a hundredth of them good: that the others are kept twice makes it
    quick and no easier."""
    rng, writer = np.random.default_rng(0), None
    prompts = ["w1" if row % 100 == 0 else (None, "w1 " * 60)[row % 2] for row in range(UNIT_ROWS)]
    for _ in range(units):
        blobs = [rng.bytes(BLOB_BYTES) for _ in range(UNIT_ROWS)]
        table = pa.table({"prompt": prompts, "truth": [[100]] * UNIT_ROWS, "blob": blobs})
        writer = writer or pq.ParquetWriter(path, table.schema, compression="none", use_dictionary=False)
        writer.write_table(table)
    assert writer is not None
    writer.close()
    return path


def test_memory_does_not_grow_with_the_input(world: World, tmp_path: Path) -> None:
    base = ["--unit-rows", UNIT_ROWS, "--truth-column", "truth", "--allow-rejects", "100%"]
    jobs = {}
    for units in (8, 80):
        queries, output = make_large(tmp_path / f"q{units}.parquet", units), tmp_path / f"out{units}.parquet"
        jobs[units] = recall(world, "--input", queries, "-o", output, *base, "--abort-rejects", "100%")
        assert jobs[units].returncode == 0, jobs[units].stderr
        assert pq.read_metadata(output).num_rows == UNIT_ROWS * units
    more = 72 * UNIT_ROWS * BLOB_BYTES
    assert jobs[80].peak_bytes - jobs[8].peak_bytes < more / 4


# What is said.


def test_rejects_are_told_and_allowed(world: World, tmp_path: Path) -> None:
    queries = make_queries(tmp_path / "q.parquet", 70)
    base = ["--input", str(queries), "--unit-rows", "30"]
    cases = {"9": 4, "15%": 0}
    for number, (quota, code) in enumerate(cases.items()):
        output = tmp_path / f"{number}.parquet"
        told = recall(world, *base, "-o", output, "--allow-rejects", quota)
        assert told.returncode == code, told.stderr
        assert "10 queries have an error instead of an answer: null_input 10" in told.stderr
        assert told.stderr.count("the input is null") == 5
        assert f"10 rejected queries are in {output.with_suffix('.rejects.parquet')}" in told.stdout
        assert 2 <= sum(line.startswith(("queries: ", "prompt ")) for line in told.stderr.splitlines()) <= 8
    quiet = recall(world, *base, "-o", tmp_path / "q", "--allow-rejects", "100%", "-q")
    assert (quiet.returncode, quiet.stderr) == (0, "")
    wrong = recall(world, *base, "--allow-rejects", "120%")
    assert wrong.returncode == 2
    assert "'120%' is no share of the rows" in wrong.stderr
