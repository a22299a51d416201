"""`grinf recall` with several devices: a process for each, on CPUs as it would be on GPUs."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from grinf.errors import EnvironmentFault
from tests.cli.test_app import run
from tests.recall_world import World, draw_prompts, make_world, write

UNIT, UNITS = 60, 20
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # Sums depend on the number of threads.
FATAL = """
import os, signal
from grinf.runtime.engine import Engine

run = Engine.run


def fatal(self, requests):
    requests = list(requests)
    if {condition}:
        os.kill(os.getpid(), signal.SIGKILL)
    return run(self, requests)


Engine.run = fatal
if __name__ == "__main__":
    from grinf.cli.app import main

    raise SystemExit(main())
"""
"""A grinf whose processes die of some requests; its children run this file, too."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("devices"))


@pytest.fixture(scope="module")
def queries(world: World) -> Path:
    rng = np.random.default_rng(0)
    prompts = draw_prompts(rng, UNIT * UNITS, shortest=4)
    truth = rng.integers(100, 160, UNIT * UNITS)[:, None].tolist()
    return write(world.folder / "queries.parquet", {"input_ids": prompts, "truth": truth}, row_group_size=500)


def arguments(world: World, queries: Path) -> list[str]:
    base = ["recall", "--model", world.model, "--trie", world.trie, "--input", queries, "--beams", "6"]
    own = ["--truth-column", "truth", "--unit-rows", UNIT, "-o", "out.parquet", "--devices", "cpu,cpu"]
    return list(map(str, base + own))


@pytest.fixture(scope="module")
def one_device(world: World, queries: Path) -> Callable[[Path], bytes]:
    """Answers everything, or what is left, in this process; gives the bytes of the output."""

    def answer(path: Path) -> bytes:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        changes = {"input": str(queries), "truth_column": "truth", "unit_rows": str(UNIT)}
        world.recall(path, **changes)
        torch.set_num_threads(threads)
        return path.read_bytes()

    return answer


@pytest.fixture(scope="module")
def expected(world: World, one_device: Callable[[Path], bytes]) -> bytes:
    return one_device(world.folder / "one.parquet")


@contextmanager
def started(folder: Path, command: list[str]) -> Generator[subprocess.Popen[str]]:
    """A job of two processes that has committed some units."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = os.environ | ONE_THREAD
    with subprocess.Popen(
        [sys.executable, "-m", "grinf", *command],
        cwd=folder,
        env=environment,
        start_new_session=True,
        **pipes,
    ) as job:
        wait_for(lambda: len(committed(folder)) >= 2 or job.poll() is not None)
        yield job
        if job.poll() is None:
            job.kill()


def run_fatal(folder: Path, condition: str, command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a grinf whose processes die of `requests` that meet a condition."""
    harness = folder / "harness.py"
    harness.write_text(FATAL.format(condition=condition))
    environment = os.environ | ONE_THREAD | {"PYTHONPATH": str(Path(__file__).parents[2])}
    pipes = {"capture_output": True, "text": True}
    return subprocess.run(
        [sys.executable, str(harness), *command], cwd=folder, env=environment, check=False, **pipes
    )


def committed(folder: Path) -> list[Path]:
    return sorted(folder.glob("out.parquet.partial/unit-*.parquet"))


def wait_for(condition, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)


def workers(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def is_alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_nothing_is_lost_when_a_worker_is_killed_and_then_the_job_itself(
    world, queries, one_device, expected, tmp_path
):
    """The children end with their parent, and one device ends what two began."""
    with started(tmp_path, arguments(world, queries)) as job:
        before = workers(job.pid)
        os.kill(before[1], signal.SIGKILL)
        wait_for(lambda: len(set(workers(job.pid)) - set(before)) == 1)  # Another one takes its place.
        children = workers(job.pid)
        job.kill()
        job.wait()
        wait_for(lambda: not any(map(is_alive, children)), 10)
    assert 2 <= len(committed(tmp_path)) < UNITS
    assert one_device(tmp_path / "out.parquet") == expected


@pytest.mark.slow
def test_ctrl_c_lets_running_units_end(world, queries, tmp_path):
    with started(tmp_path, arguments(world, queries)) as job:
        children = workers(job.pid)
        os.killpg(job.pid, signal.SIGINT)  # As a terminal does: it reaches every process.
        _, told = job.communicate(timeout=60)
    assert job.returncode == 130, told
    assert "stopped by SIGINT at" in told
    assert "Traceback" not in told
    assert len(children) == 2
    assert not any(map(is_alive, children))
    assert 2 <= len(committed(tmp_path)) < UNITS
    assert {pq.read_metadata(path).num_rows for path in committed(tmp_path)} == {UNIT}
    assert not list(tmp_path.rglob("*.tmp-*"))


@pytest.mark.slow
def test_a_query_of_death_becomes_error_rows_of_its_unit_and_the_job_ends(world, queries, expected, tmp_path):
    poison = pq.read_table(queries)["input_ids"][UNIT + 3].as_py()
    condition = f"any(list(request.input_ids) == {poison} for request in requests)"
    finished = run_fatal(tmp_path, condition, arguments(world, queries))
    assert finished.returncode == 4, finished.stderr
    (tmp_path / "expected.parquet").write_bytes(expected)
    ours, theirs = (pq.read_table(tmp_path / name) for name in ("out.parquet", "expected.parquet"))
    rows = ours.slice(UNIT, UNIT)
    assert set(rows["error_code"].to_pylist()) == {"worker_crash"}
    assert "2 processes died" in rows["error"][0].as_py()
    assert ours.slice(0, UNIT).equals(theirs.slice(0, UNIT))
    assert ours.slice(2 * UNIT).equals(theirs.slice(2 * UNIT))


@pytest.mark.slow
def test_when_every_worker_dies_the_job_says_so(world, queries, tmp_path):
    finished = run_fatal(tmp_path, "True", arguments(world, queries))
    assert finished.returncode == 3, finished.stderr
    assert "every worker died" in finished.stderr
    assert "ended by SIGKILL" in finished.stderr
    assert "the same command goes on" in finished.stderr
    assert finished.stderr.count("error:") == 1


def test_what_a_worker_refuses_is_told_once(world, queries, tmp_path):
    changes = {"input": str(queries), "device": "7,8"}
    with pytest.raises(EnvironmentFault, match=r"--device cuda:[78]: this machine shows"):
        world.recall(tmp_path / "out.parquet", **changes)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("devices", ["cpu,0", "0,", "auto,auto", "cuda,cuda", "gpu0", "0;1"])
def test_a_list_that_is_none_is_refused(world, queries, devices):
    with pytest.raises(ValueError, match="is not a device"):
        world.settings(input=str(queries), device=devices)


def test_one_setting_has_two_spellings_of_its_flag(world, queries, tmp_path):
    for flag in ("--device", "--devices"):
        finished = run(*arguments(world, queries)[:-2], flag, "0,", cwd=tmp_path)
        assert finished.returncode == 2
        assert "'0,' is not a device" in finished.stderr
