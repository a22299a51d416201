"""`grinf recall --executor ray` on a local cluster of CPU workers, of which some die."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from grinf.errors import EnvironmentFault
from grinf.jobs.recall.plan import make_plan
from tests.recall_world import World, draw_prompts, make_world, write

UNIT, UNITS, BAD = 50, 12, 9
FATAL = """
import os, signal
from grinf.runtime.engine import Engine

run = Engine.run


def fatal(self, requests):
    requests = list(requests)
    if any(list(request.input_ids) == {poison} for request in requests):
        os.kill(os.getpid(), signal.SIGKILL)
    return run(self, requests)


Engine.run = fatal
"""
"""Python reads this when it starts: every process of the job, near or far, dies of one prompt."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("ray"))


@pytest.fixture(scope="module")
def queries(world: World) -> Path:
    rng = np.random.default_rng(0)
    prompts = draw_prompts(rng, UNIT * UNITS, shortest=4)
    return write(world.folder / "queries.parquet", {"input_ids": prompts})


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the extra `ray` is not installed")
def test_a_killed_worker_loses_nothing_and_a_query_of_death_costs_its_unit_alone(world, queries, tmp_path):
    (tmp_path / "site").mkdir()
    poison = pq.read_table(queries)["input_ids"][BAD * UNIT + 7].as_py()
    (tmp_path / "site" / "sitecustomize.py").write_text(FATAL.format(poison=poison))
    base = ["recall", "--model", world.model, "--trie", world.trie, "--input", queries, "--beams", "6"]
    own = ["--unit-rows", UNIT, "-o", "out.parquet", "--executor", "ray", "--devices", "cpu,cpu"]
    command = [sys.executable, "-m", "grinf", *map(str, base + own)]
    paths = os.pathsep.join([str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes) as job:
        while len(list(tmp_path.glob("out.parquet.partial/unit-*.parquet"))) < 2 and job.poll() is None:
            time.sleep(0.02)
        working = workers(tmp_path)
        os.kill(working[0], signal.SIGKILL)
        out, told = job.communicate(timeout=300)
    assert job.returncode == 4, told
    assert len(working) == 2
    assert "Traceback" not in told
    assert "raylet" not in out
    deadline = time.monotonic() + 30
    while workers(tmp_path) and time.monotonic() < deadline:  # Ray ends them just after the job.
        time.sleep(0.1)
    assert workers(tmp_path) == []

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    world.recall(tmp_path / "local.parquet", input=str(queries), unit_rows=str(UNIT))
    torch.set_num_threads(threads)
    ours, local = (pq.read_table(tmp_path / name) for name in ("out.parquet", "local.parquet"))
    assert ours.slice(0, BAD * UNIT).equals(local.slice(0, BAD * UNIT))
    assert ours.slice((BAD + 1) * UNIT).equals(local.slice((BAD + 1) * UNIT))
    lost = ours.slice(BAD * UNIT, UNIT)
    assert set(lost["error_code"].to_pylist()) == {"worker_crash"}
    assert "2 processes died" in lost["error"][0].as_py()


def workers(folder: Path) -> list[int]:
    """Ray's workers with an engine, of the job that has `folder` in its environment."""
    found: list[int] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            is_worker = b"ray::MapWorker" in (process / "cmdline").read_bytes()
            if is_worker and str(folder).encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue  # It has ended meanwhile.
    return found


def test_without_ray_the_message_says_what_to_install(world, queries, tmp_path, monkeypatch):
    monkeypatch.setattr("grinf.jobs.extras.find_spec", lambda name: None)
    settings = world.settings(input=str(queries), output=str(tmp_path / "out.parquet"), executor="ray")
    with pytest.raises(EnvironmentFault, match="ray is not installed") as caught:
        make_plan(settings)
    assert caught.value.fix == "pip install 'grinf[ray]'"
