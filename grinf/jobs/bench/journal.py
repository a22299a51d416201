"""What the journal of a run says, checked and by point."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from grinf.config.parse import Sla, parse_sla
from grinf.errors import UsageError
from grinf.jobs.bench.point import Point
from grinf.jobs.bench.probe import ProbeRecord
from grinf.jobs.bench.run_dir import JOURNAL, RunDir, damaged
from grinf.jobs.bench.search import PRESETS
from grinf.jobs.bench.verify import VerifyReport


@dataclass(frozen=True, slots=True)
class Terms:
    """What a journal begins with, and what holds for the whole run."""

    preset: str
    rival: str
    config_hash: str
    arrival: Literal["poisson", "closed"]
    started_utc: str
    sla: list[str]
    points: list[Point]
    devices: Annotated[int, Field(strict=True, ge=1)] = 1


TERMS, RECORD, REPORT = TypeAdapter(Terms), TypeAdapter(ProbeRecord), TypeAdapter(VerifyReport)


@dataclass(frozen=True, slots=True)
class Journal:
    """A run so far.

    Attributes:
        header: What holds for the whole run, as it was written.
        slas: Statistics and limits.
        points: What is measured, in order.
        records: Finished probes by point, in order.
        said: The last event of a kind about a point: `start`, `verify`, `preset` or `done`.
    """

    header: dict[str, Any]
    slas: list[Sla]
    points: list[Point]
    records: dict[str, list[ProbeRecord]]
    said: dict[tuple[str, str], dict[str, Any]]

    @property
    def keys(self) -> set[str]:
        """Points that may have events: those of the run, and those of a rival engine."""
        rival = self.header["rival"]
        return {side.key for point in self.points for side in (point, point.of(rival) if rival else point)}

    def preset_of(self, point: str) -> str:
        """Preset that a point was measured with."""
        return self.said.get(("preset", point), self.header)["preset"]


def read_journal(run: RunDir) -> Journal:
    """Read a run's journal.

    Raises:
        EnvironmentFault: A line is missing, damaged, or not of this run.
    """
    lines = run.events()
    place, header = next(lines, (f"{run.path / JOURNAL}, line 1", {}))
    with reading(place):
        if header.get("event") != "run":
            raise ValueError("a journal begins with the terms of its run")
        terms = TERMS.validate_python(header)
        if not terms.points or not terms.sla or terms.preset not in PRESETS:
            raise ValueError("it names no point, no SLA or no preset")
        journal = Journal(header, [parse_sla(text) for text in terms.sla], terms.points, {}, {})
        known = journal.keys
    for line, event in lines:
        with reading(line):
            if event["point"] not in known:
                raise ValueError(f"this run has no point {event['point']}")
            _note(journal, event)
    return journal


@contextmanager
def reading(place: str) -> Generator[None]:
    """Tell whatever does not fit there as damage of that place."""
    try:
        yield
    except KeyError as error:
        raise damaged(place, f"it lacks {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise damaged(place, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except (AttributeError, TypeError, ValueError, UsageError) as error:
        raise damaged(place, str(error)) from error


def _note(journal: Journal, event: dict[str, Any]) -> None:
    match event["event"]:
        case "probe":
            record = RECORD.validate_python({key: value for key, value in event.items() if key != "event"})
            journal.records.setdefault(record.point, []).append(record)
        case "start" | "verify" | "preset" | "done":
            if event["event"] == "preset" and event["preset"] not in PRESETS:
                raise ValueError(f"{event['preset']!r} is no preset")
            if event["event"] == "verify" and event["status"] != REPORT.validate_python(event).status:
                raise ValueError(f"{event['status']!r} is not what its faults say")
            journal.said[event["event"], event["point"]] = event
        case other:
            raise ValueError(f"{other!r} is no event of a run")
