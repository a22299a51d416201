"""The only file that prints: a result on stdout (tables, or one JSON document), all talk on stderr."""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, TextIO

from grinf.errors import ExitCode, GrinfError, RowError

if TYPE_CHECKING:
    import rich.console

OnProgress = Callable[[str, int, int | None], None]
"""Called by a job as `on_progress(stage, done, total)`; `total` is None where it is not known yet."""

PLAIN_INTERVAL_S = 30.0
"""Seconds between two progress lines of one stage when stderr is not a terminal."""

_NUMBER = re.compile(r"[<>=~±]?\s*[-+]?[\d.,]+\s*(%|[a-zA-Zµ/]{1,6})?|-|")


@dataclass(frozen=True, slots=True)
class Table:
    """A table of finished text; columns of numbers are aligned to the right. An alarm's title is red."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    alarm: bool = False


@dataclass(frozen=True, slots=True)
class CommandResult:
    """What a command answers.

    Attributes:
        command: Name of the command; the JSON document's schema is `grinf.<command>/1`.
        data: The answer as JSON-able values (paths, tuples and non-finite floats are converted).
        tables: The answer for a reader.
        messages: Lines for a reader, after the tables: files written, what to do next.
        exit_code: The verdict.
    """

    command: str
    data: Mapping[str, Any]
    tables: Sequence[Table] = field(default_factory=list[Table])
    messages: Sequence[str] = field(default_factory=list[str])
    exit_code: ExitCode = ExitCode.OK


class Console:
    """Where a command talks: knows the flags `--json` and `--quiet`, the terminal, and NO_COLOR.

    Args:
        as_json: Print the result as one JSON document instead of tables.
        quiet: Say nothing but the result and errors.
    """

    def __init__(self, *, as_json: bool = False, quiet: bool = False) -> None:
        self.as_json, self.quiet = as_json, quiet

    @cached_property
    def _stderr(self) -> "rich.console.Console":
        from rich.console import Console as RichConsole

        class Stderr(RichConsole):
            def on_broken_pipe(self) -> None:
                raise BrokenPipeError  # rich itself would shut stdout and exit

        return Stderr(stderr=True, highlight=False, soft_wrap=True, emoji=False)

    def info(self, text: str) -> None:
        """Say something that a reader may want to know; silent with `--quiet`."""
        if not self.quiet:
            self._say(text)

    def warn(self, text: str) -> None:
        """Say something that a reader should know; silent with `--quiet`."""
        if not self.quiet:
            self._say(text, "warning:", "yellow")

    def _say(self, text: str, lead: str = "", style: str = "") -> None:
        """Print on stderr; that nobody can read it any more is no reason to end a job."""
        try:
            if lead:
                self._stderr.print(lead, style=style, end=" ")
            self._stderr.print(text, markup=False)
        except OSError:
            silence(sys.stderr)

    @contextmanager
    def progress(self, timed: str = "") -> Generator[OnProgress]:
        """Show the progress of a job on stderr: a bar on a terminal, else a line now and then.

        Args:
            timed: The stage that tells how long it will take, where several run at once; empty: each does.

        Yields:
            The callback to give to the job.
        """
        if self.quiet or os.environ.get("GRINF_NO_PROGRESS"):
            yield lambda stage, done, total: None
        elif self._stderr.is_terminal:
            with _bars(self._stderr, timed) as on_progress:
                yield on_progress
        else:
            yield _plain_lines(self.info, timed)

    def emit(self, result: CommandResult) -> None:
        """Print a result on stdout."""
        if self.as_json:
            status = result.exit_code.name.lower()
            document = _document(result.command, status, result.exit_code)
            self._print_json(document | {"data": result.data, "messages": list(result.messages)})
            return
        for table in result.tables:
            _print_table(table)
        if not self.quiet or not result.tables:
            for line in result.messages:
                print(line)

    def fail(self, command: str, error: GrinfError, exit_code: ExitCode) -> None:
        """Report a failure: up to three lines on stderr, and with `--json` a document on stdout."""
        if self.as_json:
            told = {"code": _code(error), "message": error.what, "why": error.why, "hint": error.fix}
            self._print_json(_document(command, "error", exit_code) | {"error": told})
        self._say(error.what, "error:", "bold red")
        if error.why:
            self._say(f"  why: {error.why}")
        if error.fix:
            self._say(f"  fix: {error.fix}")

    def _print_json(self, document: Mapping[str, Any]) -> None:
        text = json.dumps(document, default=os.fspath)
        plain = json.loads(text, parse_constant=lambda name: None)  # JSON has no NaN and no infinities.
        is_utf8 = (sys.stdout.encoding or "").lower().startswith("utf")
        print(json.dumps(plain, indent=2, ensure_ascii=not is_utf8, allow_nan=False))


def silence(stream: TextIO) -> None:
    """Let a stream that takes no more end in nothing: its buffer would make Python fail once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _document(command: str, status: str, exit_code: ExitCode) -> dict[str, Any]:
    return {"schema": f"grinf.{command}/1", "status": status, "exit_code": int(exit_code)}


def _code(error: GrinfError) -> str:
    if isinstance(error, RowError):
        return error.code
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(error).__name__).lower()


def _print_table(table: Table) -> None:
    from rich import box
    from rich.console import Console as RichConsole
    from rich.table import Table as RichTable

    out = RichConsole(highlight=False, emoji=False)
    if not out.is_terminal:  # A file or a pipe has no right edge: never cut a long table.
        out = RichConsole(highlight=False, emoji=False, width=100_000)
    title = table.title.replace("[", r"\[") or None
    style = "bold red" if table.alarm else "table.title"
    drawn = RichTable(title=title, title_style=style, title_justify="left", box=box.SIMPLE_HEAD)
    for index, name in enumerate(table.columns):
        numeric = all(_NUMBER.fullmatch(row[index].strip()) for row in table.rows)
        drawn.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in table.rows:
        drawn.add_row(*(cell.replace("[", r"\[") for cell in row))
    out.print(drawn)


@contextmanager
def _bars(console: "rich.console.Console", timed: str) -> Generator[OnProgress]:
    """Draw one bar per stage; a new stage leaves the bars before it standing."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class TimeLeft(TimeRemainingColumn):
        def render(self, task: Task) -> Text:
            return super().render(task) if timed in ("", task.description) else Text("")

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeLeft())
    with Progress(*columns, console=console, refresh_per_second=4) as progress:
        tasks: dict[str, Task] = {}

        def on_progress(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:
                progress.add_task(stage, total=total)
                tasks[stage] = progress.tasks[-1]
            tasks[stage].total = total  # By `update` a total that is an estimate would forget the speed.
            progress.update(tasks[stage].id, completed=done)

        yield on_progress


def _plain_lines(say: Callable[[str], None], timed: str) -> OnProgress:
    """Say a line when a stage starts, every PLAIN_INTERVAL_S, and when it ends."""
    first: dict[str, tuple[float, int]] = {}
    said: dict[str, float] = {}

    def on_progress(stage: str, done: int, total: int | None) -> None:
        now = time.monotonic()
        since, before = first.setdefault(stage, (now, done))
        is_due = now - said.get(stage, -PLAIN_INTERVAL_S) >= PLAIN_INTERVAL_S
        if is_due or done == total:
            said[stage] = now
            share = f" / {total:,} ({done / total:.0%})" if total else ""
            left = ""
            if total and before < done < total and timed in ("", stage):
                seconds = (now - since) / (done - before) * (total - done)
                left = f", {timedelta(seconds=round(seconds))} left"
            say(f"{stage}: {done:,}{share}{left}")

    return on_progress
