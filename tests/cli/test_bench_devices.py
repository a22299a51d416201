"""`grinf bench` with several devices: a process for each behind one queue, on CPUs as it would be on GPUs."""

import json
import os
import signal
import statistics
import time
from pathlib import Path

import numpy as np
import pytest

from grinf.config.load import resolve
from grinf.config.settings import BenchSettings
from grinf.errors import EnvironmentFault, GrinfError
from grinf.jobs.bench.clock import Clock
from grinf.jobs.bench.engines import OpenEngine, open_engine
from grinf.jobs.bench.plan import make_plan
from grinf.jobs.bench.verify import serve
from grinf.jobs.processes import ChildDied
from grinf.state.request import Request
from tests.cli.test_app import run

CATALOG = "synthetic:items=2k,codebook=64"
FLAGS = ["--catalog", CATALOG, "--constrained", "on", "--input-len", "24", "--beams", "8"]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Sums depend on the number of threads; a child takes it from its environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


def open_on(device: str) -> OpenEngine:
    flags = {"device": device, "catalog": [CATALOG], "constrained": "on", "input_len": "24", "beams": "8"}
    plan = make_plan(resolve(BenchSettings, flags))
    return open_engine(plan.settings, "grinf", plan.points[0], Clock())


@pytest.fixture(scope="module")
def fleet():
    opened = open_on("cpu,cpu")
    yield opened
    opened.engine.close()


def requests(lengths) -> list[Request]:
    rng = np.random.default_rng(3)
    return [Request(i, rng.integers(0, 400, length).tolist()) for i, length in enumerate(lengths)]


def test_the_answers_are_those_of_one_engine(fleet):
    single = open_on("cpu")
    assert fleet.max_batch == 2 * single.max_batch
    assert (fleet.engine.levels, fleet.engine.vocab_rows) == (single.engine.levels, single.engine.vocab_rows)
    lengths = [24, 7, 3, 19, 24, 5]
    for one, same in zip(requests(lengths), requests(lengths), strict=True):
        # One at a time: the batches are the same.
        expected, found = serve(single, [one])[one.request_id], serve(fleet, [same])[one.request_id]
        np.testing.assert_array_equal(found.sids, expected.sids)
        np.testing.assert_array_equal(found.leaves, expected.leaves)
        np.testing.assert_array_equal(found.scores, expected.scores)
    single.engine.close()


def test_a_request_goes_to_the_engine_with_the_fewest_tokens(fleet):
    engine, loads = fleet.engine, []
    for request in requests([20, 6, 6, 6, 6]):
        engine.submit(request)
        loads.append(list(engine.tokens))
    assert loads == [[20, 0], [20, 6], [20, 12], [20, 18], [20, 24]]
    done = serve(fleet, [])
    assert sorted(done) == [0, 1, 2, 3, 4]
    assert engine.tokens == [0, 0]


def test_times_of_all_processes_are_on_one_clock(fleet):
    before = time.perf_counter_ns()
    for result in serve(fleet, requests([9, 9, 9, 9])).values():
        line = result.timeline
        assert before < line.submitted_ns < line.admitted_ns <= line.prefilled_ns < line.done_ns
        assert line.done_ns < time.perf_counter_ns()


def test_a_request_that_cannot_be_served_is_told_by_its_result(fleet):
    results = serve(fleet, requests([9, 100_000]))
    assert results[0].error is None
    assert results[1].error is not None
    assert results[1].error.code == "overlong"
    assert "100000" in results[1].error.what.replace(",", "")
    assert results[1].sids.shape == (0, 3)


def test_a_due_arrival_never_waits_long_for_a_step(fleet):
    for request in requests([24] * 32):
        fleet.engine.submit(request)
    waits = []
    while not fleet.engine.is_idle:
        start = time.perf_counter()
        if not fleet.engine.step():
            waits.append(time.perf_counter() - start)
    assert 10e-6 < statistics.median(waits) < 300e-6, "neither a busy loop nor late"


def test_a_process_that_dies_ends_the_run(fleet):
    del fleet  # It has been closed, or will be; this test has one of its own.
    opened = open_on("cpu,cpu")
    victim = max(_children(os.getpid()))
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(ChildDied, match="device cpu was ended by SIGKILL") as caught:
        serve(opened, requests([24] * 400))
    assert caught.value.exit_code == 3
    opened.engine.close()
    assert victim not in _children(os.getpid())


def test_what_a_process_refuses_is_told_once(monkeypatch):
    monkeypatch.setattr("grinf.jobs.bench.plan._has_gpu", lambda: False)
    with pytest.raises(EnvironmentFault, match="--device cuda:9") as caught:
        open_on("cuda:9,cuda:9")
    assert isinstance(caught.value, GrinfError)


def test_the_command_measures_both(tmp_path):
    turns = ["--verify", "2", "--aa", "--interleave", "1"]  # Two short blocks, whatever the machine does.
    finished = run("bench", *FLAGS, *turns, "--devices", "cpu,cpu", "--json", cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    (folder,) = (tmp_path / "results").iterdir()
    events = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    assert {event["status"] for event in events if event["event"] == "verify"} == {"ok"}
    probes = [event for event in events if event["event"] == "probe"]
    assert {probe["stage"] for probe in probes} == {"warmup", "block"}
    assert {probe["concurrency"] for probe in probes} == {2 * 2 * 8}, "callers for two engines of 8"
    (engine,) = json.loads((folder / "env.json").read_text())["engines"].values()
    assert [device["device"] for device in engine["devices"]] == ["cpu", "cpu"]


def test_a_simulated_engine_has_no_devices(tmp_path):
    finished = run("bench", "--engine", "sim:", "--devices", "0,1", cwd=tmp_path)
    assert finished.returncode == 2
    assert "sim: takes no --devices cuda:0,cuda:1" in finished.stderr
    assert not list(tmp_path.iterdir())


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]
