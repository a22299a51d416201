"""`grinf recall` as a job that is to be trusted with a night's run: rejected rows, memory, what it says."""

import errno
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from grinf.backend.torch_backend import TorchBackend
from grinf.errors import (
    CapacityError,
    DataError,
    RejectsError,
    RowError,
    StoppedError,
    StorageError,
    UsageError,
)
from grinf.jobs.processes import Child
from grinf.jobs.recall import output, run_recall, space
from grinf.jobs.recall.engines import Engines
from grinf.jobs.recall.plan import make_plan
from grinf.jobs.recall.signals import EXIT_CODES, catching_signals
from grinf.jobs.recall.units import Unit
from grinf.jobs.recall.worker import UnitWorker
from tests.recall_world import World, ignore, make_world, stop_after, write


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("recall_job"))


def rows_of(path: Path) -> list[dict]:
    return pq.read_table(path).to_pylist()


# Rejected rows.

BAD = {
    "id": list("abcdefghij"),
    "input_ids": [[1], None, [2], [], [3], [4], None, [5], [6], [7]],
    "score": range(10),
}


def queries_with_bad_rows(folder: Path) -> Path:
    columns = {**BAD, "input_ids": pa.array(BAD["input_ids"], pa.list_(pa.int16()))}
    return write(folder / "queries.parquet", columns)


@pytest.mark.parametrize("name", ["out.parquet", "out"])
def test_rejected_rows_are_kept_as_they_were_given(world: World, tmp_path: Path, name: str) -> None:
    queries, output = queries_with_bad_rows(tmp_path), tmp_path / name
    report = world.recall(output, input=str(queries), unit_rows="3")
    place = tmp_path / "out.rejects.parquet" if name == "out.parquet" else output / "_grinf" / "rejects"
    assert report.rejects == place
    table = pq.read_table(place)
    assert table.column_names == ["input_ids", "id", "score", "row", "error_code", "error"]
    assert table.schema.field("input_ids").type == pa.list_(pa.int16())
    assert table["id"].to_pylist() == ["b", "d", "g"]
    assert table["row"].to_pylist() == [1, 3, 6]
    assert table["error_code"].to_pylist() == ["null_input", "empty_input", "null_input"]
    answers = rows_of(output)
    assert [row["status"] == "error" for row in answers] == [row in (1, 3, 6) for row in range(10)]
    assert [row["error"] for row in answers if row["error"]] == table["error"].to_pylist()
    if name == "out":
        assert sorted(path.name for path in place.iterdir()) == [f"unit-00000{i}.parquet" for i in (0, 1, 2)]


def test_rejected_rows_can_be_given_again(world: World, tmp_path: Path) -> None:
    world.recall(tmp_path / "out.parquet", input=str(queries_with_bad_rows(tmp_path)))
    rejects = tmp_path / "out.rejects.parquet"
    mended = pq.read_table(rejects).to_pylist()
    mended[0]["input_ids"], mended[1]["input_ids"] = [8], [9]
    write(rejects, {name: [row[name] for row in mended] for name in mended[0]})
    report = world.recall(tmp_path / "second.parquet", input=str(rejects))
    assert report.errors == {"null_input": 1}
    again = rows_of(tmp_path / "second.parquet")
    assert [(row["query_id"], row["input_row"], row["status"]) for row in again] == [
        ("b", 1, "ok"),
        ("d", 3, "ok"),
        ("g", 6, "error"),
    ]
    (last,) = rows_of(tmp_path / "second.rejects.parquet")
    assert (last["id"], last["row"], last["input_row"], last["input_error_code"]) == ("g", 2, 6, "null_input")
    with pytest.raises(UsageError, match="would replace the input"):
        world.recall(tmp_path / "out.parquet", input=str(rejects), overwrite="yes")


def test_no_reject_is_lost_or_doubled_when_a_job_goes_on(world: World, tmp_path: Path) -> None:
    queries = queries_with_bad_rows(tmp_path)
    changes = {"input": str(queries), "unit_rows": "3"}
    world.recall(tmp_path / "whole.parquet", **changes)
    settings = world.settings(output=str(tmp_path / "out.parquet"), **changes)
    for queries_done in (4, 5):
        with pytest.raises(KeyboardInterrupt):
            run_recall(settings, stop_after(queries_done))
    # As if it had died between the rejected rows of a unit and the unit itself.
    rejects = tmp_path / "out.parquet.partial" / "_grinf" / "rejects"
    (rejects / "unit-000003.parquet").write_bytes((rejects / "unit-000000.parquet").read_bytes())
    run_recall(settings, ignore)
    whole, resumed = tmp_path / "whole.rejects.parquet", tmp_path / "out.rejects.parquet"
    assert resumed.read_bytes() == whole.read_bytes()
    assert (tmp_path / "out.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()


IDS_WITHOUT_OBJECT = {
    "a moment beyond the calendar": pa.array([1, 2**62, 3], pa.timestamp("us")),
    "a day beyond it": pa.array([1, 2**30, 3], pa.date32()),
    "a span beyond it": pa.array([1, 2**62, 3], pa.duration("s")),
    "an unknown time zone": pa.array([1, 2, 3], pa.timestamp("us", "Mars/Crater")),
    "no UTF-8": pa.array([b"a", b"\xff", b"c"], pa.binary()).view(pa.string()),
}


@pytest.mark.parametrize("kind", list(IDS_WITHOUT_OBJECT))
def test_a_rejected_row_may_have_an_id_that_python_cannot_hold(world, tmp_path, kind: str) -> None:
    ids = IDS_WITHOUT_OBJECT[kind]
    report = world.recall(tmp_path / "out.parquet", {"query_id": ids, "input_ids": [[1], None, [2]]})
    assert report.errors == {"null_input": 1}
    assert report.summary["examples"] == ["row 1, column 'input_ids': the input is null"]
    assert pq.read_table(tmp_path / "out.parquet")["query_id"].combine_chunks().equals(ids)
    assert pq.read_table(tmp_path / "out.rejects.parquet")["query_id"].combine_chunks().equals(ids[1:2])


def test_a_message_that_python_cannot_hold_is_rejected(world: World, tmp_path: Path) -> None:
    sent = IDS_WITHOUT_OBJECT["a moment beyond the calendar"]
    texts = pa.StructArray.from_arrays(
        [pa.array(["user"] * 3), pa.array(["w1"] * 3), sent], ["role", "content", "at"]
    )
    messages = pa.ListArray.from_arrays([0, 1, 2, 3], texts)
    report = world.recall(tmp_path / "out.parquet", {"messages": messages})
    assert report.errors == {"bad_type": 1}
    assert (
        "the value cannot be read; date value out of range" in rows_of(tmp_path / "out.parquet")[1]["error"]
    )


def test_an_output_without_rejects_leaves_none_of_an_earlier_one(world: World, tmp_path: Path) -> None:
    world.recall(tmp_path / "out.parquet", {"input_ids": [[1], None]})
    assert (tmp_path / "out.rejects.parquet").exists()
    report = world.recall(tmp_path / "out.parquet", {"input_ids": [[1], [2]]}, overwrite="yes")
    assert report.rejects is None
    assert not (tmp_path / "out.rejects.parquet").exists()
    write(tmp_path / "out.rejects.parquet", {"thesis": ["dear"]})
    with pytest.raises(UsageError, match=r"out\.rejects\.parquet is in the way"):
        world.recall(tmp_path / "out.parquet", {"input_ids": [[1], None]}, overwrite="yes")
    assert rows_of(tmp_path / "out.rejects.parquet") == [{"thesis": "dear"}]


def test_a_wrong_column_ends_the_job_early(world: World, tmp_path: Path) -> None:
    prompts = [[1] if row % 3 == 0 else None for row in range(1500)]
    changes = {"unit_rows": "250", "beams": "2"}
    with pytest.raises(RejectsError, match="666 of the first 1,000 queries were rejected") as refused:
        world.recall(tmp_path / "out.parquet", {"input_ids": prompts}, **changes)
    assert "it is not the queries that are wrong, but column 'input_ids'" in refused.value.why
    assert refused.value.exit_code == 4
    partial = tmp_path / "out.parquet.partial"
    assert len(list(partial.glob("unit-*"))) == 4
    changes["input"] = str(tmp_path / "queries.parquet")
    with pytest.raises(RejectsError):
        world.recall(tmp_path / "out.parquet", **changes)
    assert len(list(partial.glob("unit-*"))) == 4
    report = world.recall(tmp_path / "out.parquet", abort_rejects="70%", **changes)
    assert (report.units_kept, report.errors) == (4, {"null_input": 1000})
    with pytest.raises(RejectsError, match="3 of the first 5 queries"):
        world.recall(
            tmp_path / "few",
            {"input_ids": [None, None, None, [1], [2], [3]]},
            abort_rejects="2",
            unit_rows="5",
        )


def test_a_job_that_is_done_is_not_ended_early(world: World, tmp_path: Path) -> None:
    report = world.recall(tmp_path / "out.parquet", {"input_ids": pa.nulls(1200)}, unit_rows="600")
    assert (report.status, report.rejected) == ("done", 1200)


def test_on_error_fail_keeps_what_is_committed(world: World, tmp_path: Path) -> None:
    changes = {"unit_rows": "2", "on_error": "fail"}
    with pytest.raises(RowError, match="row 3, column 'input_ids': the input is null"):
        world.recall(tmp_path / "out.parquet", {"input_ids": [[1], [2], [3], None]}, **changes)
    changes |= {"input": str(tmp_path / "queries.parquet"), "on_error": "reject"}
    report = world.recall(tmp_path / "out.parquet", **changes)
    assert (report.units_kept, report.errors) == (1, {"null_input": 1})


# The disk.


@pytest.mark.parametrize(
    ("number", "what"),
    [
        (errno.ENOSPC, "no space left for"),
        (errno.EDQUOT, "no space left for"),
        (errno.EIO, "writing to"),
        (errno.EACCES, "writing to"),
    ],
)
def test_a_disk_that_fails_is_told(world: World, tmp_path: Path, monkeypatch, number: int, what: str) -> None:
    write_sealed, calls = output.write_sealed, []

    def fail_the_third(path: Path, *rest: Any) -> None:
        calls.append(path)
        write_sealed(path, *rest)
        if len(calls) == 3:
            raise OSError(number, os.strerror(number))

    queries = write(tmp_path / "queries.parquet", {"input_ids": [[row] for row in range(10)]})
    monkeypatch.setattr(output, "write_sealed", fail_the_third)
    with pytest.raises(StorageError) as failed:
        world.recall(tmp_path / "out", input=str(queries), unit_rows="2")
    told = failed.value
    assert told.exit_code == 7
    assert told.what.startswith(what)
    assert told.what.endswith("out.partial") or told.what.endswith("out.partial failed")
    assert told.why.startswith(os.strerror(number))
    assert ("KB more are needed" in told.why) == (what == "no space left for")
    assert told.fix.endswith("the same command goes on where it stopped")
    partial = tmp_path / "out.partial"
    assert sorted(path.name for path in partial.glob("*.parquet*")) == [
        f"unit-00000{i}.parquet" for i in (0, 1)
    ]


@pytest.mark.parametrize(("free", "count"), [(130_000, 0), (120_000, 1)])
def test_a_tight_disk_is_a_warning(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, count: int
) -> None:
    queries = write(tmp_path / "queries.parquet", {"input_ids": [[row] for row in range(10)]})
    settings = world.settings(input=str(queries), output=str(tmp_path / "out.parquet"), unit_rows="2")
    usage, said = shutil.disk_usage(tmp_path)._replace(free=free), []
    monkeypatch.setattr(space.shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(space, "needed_bytes", lambda output, units: 100_000)
    assert run_recall(settings, ignore, said.append).status == "done"
    assert (
        said
        == [f"about 100.0 KB more are needed at {tmp_path / 'out.parquet.partial'}, 120.0 KB are free"]
        * count
    )


# Memory.


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[int]]:
    """Let a prefill of more tokens than so many run out of memory; returns the tokens of each that ran."""

    def limit(tokens: int) -> list[int]:
        sizes: list[int] = []
        prefill = TorchBackend.prefill

        def checked(self: TorchBackend, batch) -> None:
            size = sum(request.context_len for request in batch.requests)
            if size > tokens:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
            sizes.append(size)
            prefill(self, batch)

        monkeypatch.setattr(TorchBackend, "prefill", checked)
        return sizes

    return limit


LONG = {"input_ids": [[1] * 20, [2] * 20, [3] * 20, [4] * 5] * 3}


def facts_of(path: Path) -> dict[str, str]:
    return {key.decode(): value.decode() for key, value in pq.read_schema(path).metadata.items()}


def test_out_of_memory_halves_the_budget_once_and_for_the_rest(world, tmp_path, small_memory) -> None:
    changes = {"unit_rows": "4", "max_batch_tokens": "60"}
    plain = world.recall(tmp_path / "plain.parquet", LONG, **changes)
    assert plain.summary["budgets"] == [[8, 60]]
    sizes = small_memory(40)
    settings = world.settings(
        input=str(tmp_path / "queries.parquet"), output=str(tmp_path / "out"), **changes
    )
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run_recall(settings, stop_after(10), said.append)
    assert said == ["memory ran out: from now on a batch is half as large, 4 queries, 30 prompt tokens"]
    settled = json.loads((tmp_path / "out.partial" / "_grinf" / "engine.json").read_text())
    assert (settled["max_batch"], settled["max_batch_tokens"], settled["is_halved"]) == (4, 30, True)
    del sizes[:]
    report = run_recall(settings, ignore, said.append)
    assert len(said) == 1
    assert sizes == [20, 20, 25]  # Though there would be room for 40.
    assert report.summary["budgets"] == [[4, 30]]
    units = sorted((tmp_path / "out").glob("unit-*"))
    assert [facts_of(unit)["grinf.max_batch_tokens"] for unit in units] == ["30"] * 3
    for row, other in zip(rows_of(tmp_path / "out"), rows_of(tmp_path / "plain.parquet"), strict=True):
        assert row["sid"] == other["sid"]
        np.testing.assert_allclose(row["score"], other["score"], atol=1e-4)


def test_memory_that_runs_out_later_is_told_per_unit(world, tmp_path, small_memory) -> None:
    prompts = [[1] * 5] * 4 + LONG["input_ids"][:4]
    small_memory(40)
    report = world.recall(tmp_path / "out", {"input_ids": prompts}, unit_rows="4", max_batch_tokens="60")
    assert report.summary["budgets"] == [[8, 60], [4, 30]]
    assert any("memory ran out" in warning for warning in report.warnings)


def test_a_query_that_never_fits_is_an_error_row(world, tmp_path, small_memory) -> None:
    sizes = small_memory(25)
    prompts = [[1] * 5, [2] * 30, [3] * 20, [4] * 5, [1] * 10, [2] * 10]
    report = world.recall(tmp_path / "out", {"input_ids": prompts}, unit_rows="4", max_batch_tokens="60")
    rows = rows_of(tmp_path / "out")
    assert [row["error_code"] for row in rows] == [None, "oom", None, None, None, None]
    assert "its prompt of 30 tokens" in rows[1]["error"]
    assert sizes[-4:] == [20, 5, 5, 20]  # The unit one by one, the next one in batches again.
    assert report.summary["budgets"] == [[1, 30], [4, 30]]
    assert rows_of(tmp_path / "out" / "_grinf" / "rejects")[0]["input_ids"] == [2] * 30


def test_an_engine_makes_the_batches_that_the_job_began_with(world, tmp_path, monkeypatch) -> None:
    changes = {"unit_rows": "4", "input": str(write(tmp_path / "queries.parquet", LONG))}
    whole = world.recall(tmp_path / "whole.parquet", **changes)
    settings = world.settings(output=str(tmp_path / "out.parquet"), **changes)

    def room_for(requests: int) -> None:
        from grinf.backend import load

        plan = load.plan_memory

        def few(shape, budget_bytes, page_size, max_context, num_steps, max_width, max_slots):
            most = min(requests, max_slots)
            return plan(shape, budget_bytes, page_size, max_context, num_steps, max_width, most)

        monkeypatch.setattr(load, "plan_memory", few)

    room_for(3)
    with pytest.raises(KeyboardInterrupt):
        run_recall(settings, stop_after(6))
    room_for(2)
    with pytest.raises(CapacityError, match="there is memory for 2 queries at a time, the job needs 3"):
        run_recall(settings, ignore)
    monkeypatch.undo()
    report = run_recall(settings, ignore)
    assert report.summary["budgets"] == [[3, 8192]]
    assert whole.summary["budgets"] == [[8, 8192]]
    assert report.units_kept == 1


def test_a_job_goes_on_with_as_many_threads_as_it_began_with(world, tmp_path) -> None:
    changes = {"unit_rows": "4", "input": str(write(tmp_path / "queries.parquet", LONG))}
    settings = world.settings(output=str(tmp_path / "out.parquet"), **changes)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        world.recall(tmp_path / "whole.parquet", **changes)
        with pytest.raises(KeyboardInterrupt):
            run_recall(settings, stop_after(6))
        settled = json.loads((tmp_path / "out.parquet.partial" / "_grinf" / "engine.json").read_text())
        assert settled["threads"] == 3
        torch.set_num_threads(1)
        assert run_recall(settings, ignore).units_kept == 1
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert (tmp_path / "out.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()


def test_engines_of_several_processes_settle_on_one_thing(world: World, tmp_path: Path) -> None:
    queries = write(tmp_path / "queries.parquet", LONG)
    settings = world.settings(input=str(queries), output=str(tmp_path / "out"), max_batch_tokens="60")
    plan = make_plan(settings)
    with plan.output.open(resume=True, overwrite=False) as parts:
        one, other = Engines(plan, parts), Engines(plan, parts)
        for engines in (one, other):
            engines.load()
            assert engines.budget == (8, 60)
        assert parts.settle({"max_batch": 1}) == parts.settled()
        assert parts.settled()["max_batch"] == 8
        for engines in (one, other):  # Both ran out of memory; it is halved once.
            engines.lighten()
        for engines in (one, other):
            engines.load()
            assert engines.budget == (4, 30)
        one.lighten()
        one.load()
        assert one.budget == (1, 30)
        assert parts.settled()["max_batch"] == 4
        with pytest.raises(CapacityError, match="memory ran out beside the engine"):
            one.lighten()
        for engines in (one, other):
            engines.close()


# The commit of a unit, while the next one is answered.


def watch_order(monkeypatch: pytest.MonkeyPatch, fail: int | None = None) -> list[tuple[str, int]]:
    """Make every commit slow, and one fail; return what begins and ends, in order."""
    order: list[tuple[str, int]] = []
    answer, commit = UnitWorker.answer, output.Parts.commit

    def noted_answer(self: UnitWorker, unit: Unit, *rest: Any) -> Any:
        order.append(("answer", unit.index))
        return answer(self, unit, *rest)

    def slow_commit(self: output.Parts, unit: Unit, *rest: Any) -> None:
        order.append(("commit", unit.index))
        time.sleep(0.3)
        if unit.index == fail:
            raise OSError(errno.EIO, "Input/output error")
        commit(self, unit, *rest)
        order.append(("committed", unit.index))

    monkeypatch.setattr(UnitWorker, "answer", noted_answer)
    monkeypatch.setattr(output.Parts, "commit", slow_commit)
    return order


def test_a_unit_is_committed_while_the_next_is_answered(world, tmp_path, monkeypatch) -> None:
    queries = {"input_ids": [[row] for row in range(8)]}
    plain = world.recall(tmp_path / "plain.parquet", queries, unit_rows="2")
    order = watch_order(monkeypatch)
    assert world.recall(tmp_path / "out.parquet", queries, unit_rows="2").summary == plain.summary
    commits = [event for event in order if event[0] != "answer"]
    assert commits == [(what, unit) for unit in range(4) for what in ("commit", "committed")]
    for unit in range(3):
        assert order.index(("answer", unit + 1)) < order.index(("committed", unit))
    assert (tmp_path / "out.parquet").read_bytes() == (tmp_path / "plain.parquet").read_bytes()


def test_a_commit_that_fails_ends_the_job_before_the_next(world, tmp_path, monkeypatch) -> None:
    order = watch_order(monkeypatch, fail=1)
    with pytest.raises(StorageError, match=r"writing to .* failed\nInput/output error"):
        world.recall(tmp_path / "out", {"input_ids": [[row] for row in range(8)]}, unit_rows="2")
    assert order[-1] in (("answer", 2), ("commit", 1))
    monkeypatch.undo()
    report = world.recall(tmp_path / "out", input=str(tmp_path / "queries.parquet"), unit_rows="2")
    assert (report.units_kept, report.answered) == (1, 6)


def test_more_signals_than_two_do_not_break_into_the_clean_up(world, tmp_path, monkeypatch) -> None:
    order = watch_order(monkeypatch)

    def strike(stage: str, done: int, whole: int | None) -> None:
        if order[-1] != ("committed", 0) and ("answer", 1) in order:  # While the first unit is committed.
            for late_s in (0.1, 0.15, 0.2):
                threading.Timer(late_s, os.kill, (os.getpid(), signal.SIGINT)).start()
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    queries = write(tmp_path / "queries.parquet", {"input_ids": [[row] for row in range(8)]})
    settings = world.settings(input=str(queries), output=str(tmp_path / "out"), unit_rows="2")
    with pytest.raises(StoppedError, match=r"stopped by SIGTERM at 25% \(1 of 4 units\)"):
        run_recall(settings, strike)
    assert signal.getsignal(signal.SIGINT) is before
    assert not list(tmp_path.rglob("*.tmp-*"))
    monkeypatch.undo()
    report = run_recall(settings, ignore)
    assert (report.units_kept, report.answered) == (1, 6)


@pytest.mark.parametrize("before", [[], [signal.SIGTERM], [signal.SIGTERM, signal.SIGINT]])
def test_a_signal_in_the_clean_up_changes_nothing(before: list[signal.Signals]) -> None:
    cleaned: list[signal.Signals] = []

    def work() -> None:
        with catching_signals() as signals:
            try:
                with signals.deferring():
                    for number in before:
                        os.kill(os.getpid(), number)
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                for number in EXIT_CODES:
                    os.kill(os.getpid(), number)
                    cleaned.append(number)

    with pytest.raises(StoppedError, match="stopped by SIGTERM"):
        work()
    assert cleaned == list(EXIT_CODES)


def test_every_worker_is_waited_for(world: World, tmp_path: Path, monkeypatch) -> None:
    closed, close = [], Child.close

    def noted_close(self: Child) -> None:
        close(self)
        closed.append(self.name)

    monkeypatch.setattr(Child, "close", noted_close)
    world.recall(tmp_path / "out", {"input_ids": [[1], [2]]}, unit_rows="1", device="cpu,cpu")
    assert closed == ["device cpu"] * 2


# What the model gives to SIDs.


@pytest.mark.parametrize("short", [False, True])
def test_sid_mass_is_the_probability_of_the_first_level(tmp_path: Path, short: bool) -> None:
    world = make_world(tmp_path, short=short)
    prompts = [[1, 2, 3], [4], [5, 6] * 9, [7]]
    report = world.recall(tmp_path / "out.parquet", {"input_ids": [*prompts, None]}, max_batch="2")
    expected = []
    for prompt in prompts:
        logits = world.oracle.model(torch.tensor([prompt])).logits[0, -1]
        expected.append(logits.log_softmax(0).exp()[world.oracle.token_of[0]].sum().item())
    assert report.summary["sid_mass"] == pytest.approx(np.mean(expected), rel=1e-4)
    assert np.mean(expected) < 0.5
    assert any("model and catalogue do not belong together" in warning for warning in report.warnings)
    level = world.recall(tmp_path / "level.parquet", {"input_ids": prompts}, score="level")
    assert level.summary["sid_mass"] is None
    assert not any("belong together" in warning for warning in level.warnings)


def test_what_is_no_output_of_ours_is_never_replaced(world: World, tmp_path: Path) -> None:
    queries = {"input_ids": [[1], [2]]}
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="pipe exists"):
        world.recall(tmp_path / "pipe", queries, overwrite="yes")
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "folder.parquet").mkdir()  # Refused before the work, not at its end.
    with pytest.raises(UsageError, match=r"folder\.parquet exists"):
        world.recall(tmp_path / "folder.parquet", queries, overwrite="yes")
    world.recall(tmp_path / "other.rejects.parquet", queries)
    with pytest.raises(UsageError, match=r"other\.rejects\.parquet is in the way"):
        world.recall(tmp_path / "other.parquet", {"input_ids": [[1], None]})
    assert len(rows_of(tmp_path / "other.rejects.parquet")) == 2
    world.recall(tmp_path / "folder", queries)
    (tmp_path / "folder" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"notes\.txt"):
        world.recall(tmp_path / "folder", {"input_ids": [[3]]}, overwrite="yes")
    assert (tmp_path / "folder" / "notes.txt").read_text() == "mine"


def test_a_kill_while_the_parts_are_removed_leaves_nothing_in_the_way(world: World, tmp_path: Path) -> None:
    queries, path = {"input_ids": [[1]] * 9}, tmp_path / "out.parquet"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "_discard", lambda partial: (partial / "unit-000001.parquet").unlink())
        world.recall(path, queries, unit_rows="3")
    assert (tmp_path / "out.parquet.partial").is_dir()
    assert world.recall(path, queries, unit_rows="3").status == "unchanged"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["out.parquet", "queries.parquet"]


def test_damaged_notes_of_a_job_begin_it_again(world: World, tmp_path: Path) -> None:
    queries, path = {"input_ids": [[1]] * 9}, tmp_path / "out.parquet"
    own = tmp_path / "out.parquet.partial" / "_grinf"
    own.mkdir(parents=True)
    (own / "manifest.json").write_text("{")
    (own / "engine.json").write_text("{")
    assert world.recall(path, queries).status == "done"
    world.recall(tmp_path / "folder", queries)
    (tmp_path / "folder" / "_grinf" / "summary.json").write_text("[]")
    with pytest.raises(UsageError, match="folder exists"):
        world.recall(tmp_path / "folder", queries)


def test_rejected_rows_may_hold_any_type(world: World, tmp_path: Path) -> None:
    views = pa.array([["a"], None, ["b", "c"]], pa.list_(pa.string_view()))
    world.recall(tmp_path / "out.parquet", {"input_ids": [[1], None, [2]], "views": views})
    assert rows_of(tmp_path / "out.rejects.parquet")[0]["views"] is None


@pytest.mark.parametrize("put", [os.replace, shutil.copyfile])
@pytest.mark.parametrize("row_group_size", [2, 4])
def test_an_input_that_is_replaced_while_the_job_runs_ends_it(
    world: World, tmp_path: Path, put: Callable, row_group_size: int
) -> None:
    rows = {"queries": [[1], [2], [3], [4]], "others": [[4], [3], [2], [1]]}
    for name, ids in rows.items():
        pq.write_table(
            pa.table({"input_ids": ids}), tmp_path / f"{name}.parquet", row_group_size=row_group_size
        )

    def swap(stage: str, done: int, whole: int | None) -> None:
        if (stage, done) == ("queries", 2) and (tmp_path / "others.parquet").exists():
            put(tmp_path / "others.parquet", tmp_path / "queries.parquet")

    flags = {"output": str(tmp_path / "out.parquet"), "unit_rows": "1"}
    settings = world.settings(input=str(tmp_path / "queries.parquet"), **flags)
    with pytest.raises(DataError, match="was changed while the job ran"):
        run_recall(settings, swap)
    assert not (tmp_path / "out.parquet").exists()


def test_an_input_that_is_only_touched_is_the_same(world: World, tmp_path: Path) -> None:
    pq.write_table(pa.table({"input_ids": [[1], [2], [3], [4]]}), tmp_path / "q.parquet")
    flags = {"output": str(tmp_path / "out.parquet"), "unit_rows": "1", "input": str(tmp_path / "q.parquet")}
    report = run_recall(world.settings(**flags), lambda *_: os.utime(tmp_path / "q.parquet"))
    assert report.status == "done"
