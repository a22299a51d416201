"""Decides after every unit whether a job goes on: signals, rejected queries, room on the disk."""

from collections.abc import Callable, Mapping
from typing import Any

from grinf.errors import RejectsError, StoppedError
from grinf.jobs.recall.output import Parts
from grinf.jobs.recall.plan import Plan
from grinf.jobs.recall.signals import EXIT_CODES, GOES_ON, Signals
from grinf.jobs.recall.space import check_space
from grinf.jobs.recall.units import Unit
from grinf.jobs.recall.worker import OnProgress

MIN_ROWS = 1000
"""Queries that are done before a share of rejected ones says something about the column."""


class Watch:
    """What an executor asks while it works: it announces each committed unit, and stops where this raises.

    Args:
        plan: The job.
        parts: Its committed units.
        signals: What was received.
        say: Tells the user something at once.

    Attributes:
        todo: Units that are not committed, in order.
    """

    def __init__(self, plan: Plan, parts: Parts, signals: Signals, say: Callable[[str], None]) -> None:
        self._plan, self._parts, self.say = plan, parts, say
        self.signals = signals
        self.todo: list[Unit] = []
        self._units = self._rows = self._rejected = 0
        self._is_halved = bool(parts.settled().get("is_halved"))
        self._has_space = self._has_told = False
        for unit in plan.units:
            if (facts := parts.read(unit)) is None:
                self.todo.append(unit)
            else:
                self._count(facts["counts"])

    def check(self) -> None:
        """Refuse to go on where too many queries were rejected.

        Raises:
            RejectsError: By `--abort-rejects`.
        """
        quota, rejected, rows = self._plan.settings.abort_rejects, self._rejected, self._rows
        has_seen_enough = rows >= MIN_ROWS or not quota.is_share
        has_more = self._units < len(self._plan.units)
        if has_more and has_seen_enough and quota.is_exceeded(rejected, rows):
            raise RejectsError(
                f"{rejected:,} of the first {rows:,} queries were rejected, --abort-rejects is {quota}",
                f"it is not the queries that are wrong, but column {self._plan.columns.input!r} or a setting",
                f"see {self._parts.rejects}; with a higher --abort-rejects {GOES_ON}",
            )

    def committed(self, unit: Unit) -> None:
        """Take note of a unit that was committed now.

        Raises:
            RejectsError: Too many queries were rejected.
            StorageError: The rest cannot fit on the disk.
        """
        self._count(self._parts.committed(unit)["counts"])
        settled = self._parts.settled()
        if settled.get("is_halved") and not self._is_halved:
            self._is_halved = True
            budget = f"{settled['max_batch']} queries, {settled['max_batch_tokens']} prompt tokens"
            self.say(f"memory ran out: from now on a batch is half as large, {budget}")
        self.check()
        if not self._has_space and self._rows >= max(unit.num_rows for unit in self._plan.units):
            self._has_space = True
            if warning := check_space(self._parts.output, self._plan.units):
                self.say(warning)

    def tell(self, on_progress: OnProgress) -> OnProgress:
        """Wrap a progress callback so that it also says, once, that a signal was received."""

        def told(stage: str, done: int, total: int | None) -> None:
            if self.signals.first is not None and not self._has_told:
                self._has_told = True
                self.say(f"{self.signals.first.name}: stopping after the running unit; again: stopping now")
            on_progress(stage, done, total)

        return told

    def stopped(self) -> StoppedError:
        """What to tell when a signal has ended the job."""
        assert self.signals.first is not None
        done, units = self._units, len(self._plan.units)
        what = f"stopped by {self.signals.first.name} at {done / units:.0%} ({done:,} of {units:,} units)"
        kept = f"{self._rows:,} answers are kept in {self._parts.output.partial}" if done else ""
        return StoppedError(EXIT_CODES[self.signals.first], what, kept, GOES_ON)

    def _count(self, counts: Mapping[str, Any]) -> None:
        self._units += 1
        self._rows += counts["rows"]
        self._rejected += counts["rows"] - counts["ok"]
