"""What a command prints: tables for a reader, one document for a program, talk on stderr."""

import json
import re
import time
from pathlib import Path

import pytest

from grinf.cli import render
from grinf.cli.render import CommandResult, Console, Table
from grinf.errors import DataError, ExitCode, RowError

TABLE = Table("Recall", ["method", "R@10"], [["[beam] 900", "0.76"], ["BM25", "0.62 %"]])


def test_a_result_is_one_json_document(capsys):
    data = {"path": Path("a/b"), "recall": float("nan"), "sizes": (1, 2), "nested": [{"x": float("inf")}]}
    Console(as_json=True).emit(CommandResult("recall", data, [TABLE], ["done"], ExitCode.REJECTED))
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {
        "schema": "grinf.recall/1",
        "status": "rejected",
        "exit_code": 4,
        "data": {"path": "a/b", "recall": None, "sizes": [1, 2], "nested": [{"x": None}]},
        "messages": ["done"],
    }
    assert printed.err == ""


def test_a_reader_gets_tables_then_messages(capsys):
    Console().emit(CommandResult("recall", {}, [TABLE], ["wrote out.parquet"]))
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "Recall"
    assert "  [beam] 900     0.76" in lines
    assert lines[-1] == "wrote out.parquet"


def test_an_alarm_is_red_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for alarm in (True, False):
        Console().emit(CommandResult("bench", {}, [Table("WRONG", ["a"], [["1"]], alarm)]))
        assert ("\x1b[1;31mWRONG" in capsys.readouterr().out) is alarm


def test_quiet_leaves_the_result_and_drops_the_talk(capsys):
    console = Console(quiet=True)
    console.emit(CommandResult("recall", {}, [TABLE], ["wrote out.parquet"]))
    console.info("reading")
    console.warn("slow")
    with console.progress() as on_progress:
        on_progress("rows", 1, 2)
    printed = capsys.readouterr()
    assert "BM25" in printed.out
    assert "wrote" not in printed.out
    assert printed.err == ""


def test_a_wide_table_is_not_cut_where_there_is_no_terminal(capsys):
    cell = "x" * 500
    Console().emit(CommandResult("show", {}, [Table("", ["text"], [[cell]])]))
    assert cell in capsys.readouterr().out


def test_a_failure_is_told_in_three_lines_on_stderr(capsys):
    Console().fail("recall", DataError("what [x]", "why", "fix"), ExitCode.USAGE)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == ["error: what [x]", "  why: why", "  fix: fix"]


@pytest.mark.parametrize(
    ("error", "code"),
    [(DataError("w", "y", "f"), "data_error"), (RowError("overlong", "w", "y", "f"), "overlong")],
)
def test_a_failure_is_one_json_document_too(capsys, error, code):
    Console(as_json=True).fail("recall", error, error.exit_code)
    document = json.loads(capsys.readouterr().out)
    assert document == {
        "schema": "grinf.recall/1",
        "status": "error",
        "exit_code": int(error.exit_code),
        "error": {"code": code, "message": "w", "why": "y", "hint": "f"},
    }


def test_progress_says_a_line_at_the_start_and_the_end_where_there_is_no_terminal(capsys):
    with Console().progress() as on_progress:
        for done in range(0, 1001, 100):
            on_progress("rows", done, 1000)
        on_progress("sort", 5, None)
    assert capsys.readouterr().err.splitlines() == [
        "rows: 0 / 1,000 (0%)",
        "rows: 1,000 / 1,000 (100%)",
        "sort: 5",
    ]


def test_progress_tells_the_time_that_is_left_of_one_stage(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(render.time, "monotonic", lambda: now[0])
    with Console().progress(timed="tokens") as on_progress:
        for done in range(5):
            now[0] = 20.0 * done
            on_progress("rows", done, 100)
            on_progress("tokens", 7 * done, 70)
    assert capsys.readouterr().err.splitlines() == [
        "rows: 0 / 100 (0%)",
        "tokens: 0 / 70 (0%)",
        "rows: 2 / 100 (2%)",
        "tokens: 14 / 70 (20%), 0:02:40 left",
        "rows: 4 / 100 (4%)",
        "tokens: 28 / 70 (40%), 0:02:00 left",
    ]


def test_progress_can_be_turned_off(capsys, monkeypatch):
    monkeypatch.setenv("GRINF_NO_PROGRESS", "1")
    with Console().progress() as on_progress:
        on_progress("rows", 0, 10)
    assert capsys.readouterr().err == ""


def test_progress_draws_a_bar_per_stage_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    with Console().progress() as on_progress:
        on_progress("read", 1, 2)
        on_progress("sort", 2, 2)
    printed = capsys.readouterr().err
    assert "read" in printed
    assert "2/2" in printed


def test_one_bar_tells_the_time_that_is_left(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    with Console().progress(timed="tokens") as on_progress:
        for done in range(1, 4):
            on_progress("rows", done, 10)
            on_progress("tokens", 10 * done, 100 + done)  # The total is an estimate that changes.
            time.sleep(0.02)
    lines = capsys.readouterr().err.splitlines()
    for stage, has_time in (("rows", False), ("tokens", True)):
        last = [line for line in lines if stage in line][-1]
        assert bool(re.search(r"\d:\d\d:\d\d", last)) == has_time
