"""How durations, beams, ranges, counts, sizes and scores are spelled, in flags, variables and files alike."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fractions import Fraction
from typing import TypeVar

from grinf.errors import UsageError

T = TypeVar("T")

_NUMBER = r"(?:[0-9]{1,20}(?:\.[0-9]{1,9})?|\.[0-9]{1,9})"
_NS = {
    "ns": 1,
    "us": 10**3,
    "µs": 10**3,  # MICRO SIGN
    "μs": 10**3,  # GREEK SMALL LETTER MU
    "ms": 10**6,
    "s": 10**9,
    "m": 60 * 10**9,
    "min": 60 * 10**9,
    "h": 3600 * 10**9,
}
_DURATION_PART = re.compile(rf"({_NUMBER})\s*({'|'.join(sorted(_NS, key=len, reverse=True))})\s*")
_COUNT_UNITS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9}
_BYTE_UNITS = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}

STATISTICS = ("avg", "p50", "p90", "p95", "p99", "p99.9", "max")
SCORE_MODES = ("vocab", "level", "children", "topk")
MAX_RANGE = 1000
"""Values that one range may stand for."""


@dataclass(frozen=True, slots=True)
class Sla:
    """A latency promise: the statistic `stat` of end-to-end latency stays within `limit_ns` nanoseconds."""

    stat: str
    limit_ns: int

    def __str__(self) -> str:
        return f"{self.stat}:{format_duration(self.limit_ns)}"


@dataclass(frozen=True, slots=True)
class Score:
    """How log-probabilities are normalised; `k` is K of `topk:K`, None for the scheduled width."""

    mode: str
    k: int | None = None

    def __str__(self) -> str:
        return self.mode if self.k is None else f"{self.mode}:{self.k}"


@dataclass(frozen=True, slots=True)
class Quota:
    """How many of some rows: `most` of them, or with `is_share` that many per hundred."""

    most: float
    is_share: bool

    def __str__(self) -> str:
        return f"{self.most:g}%" if self.is_share else f"{self.most:.0f}"

    def is_exceeded(self, number: int, of: int) -> bool:
        """Whether `number` of `of` rows is more."""
        return 100 * number > self.most * of if self.is_share else number > self.most


def parse_duration_ns(text: str) -> int:
    """Read `100ms`, `1.5s`, `1m30s` as nanoseconds; a bare number is refused, since it could mean anything.

    Raises:
        UsageError: No unit, an unknown unit, or a part finer than a nanosecond.
    """
    given = text.strip()
    if re.fullmatch(_NUMBER, given):
        raise UsageError(f"{text!r} has no unit", "a duration needs one", f"write {given}ms or {given}s")
    if not re.fullmatch(f"(?:{_DURATION_PART.pattern})+", given):
        raise UsageError(f"{text!r} is not a duration", fix="write 100ms, 1.5s, 1m30s or 2h")
    total = sum(Fraction(number) * _NS[unit] for number, unit in _DURATION_PART.findall(given))
    return _whole(total, text, "a duration counts whole nanoseconds")


def format_duration(ns: int) -> str:
    """Spell nanoseconds in the largest unit that divides them: 100000000 is `100ms`."""
    unit = next(unit for unit in ("h", "m", "s", "ms", "us", "ns") if ns % _NS[unit] == 0)
    return f"{ns // _NS[unit]}{unit}" if ns else "0s"


def parse_sla(text: str) -> Sla:
    """Read `100ms` (of p99) or `STAT:100ms`.

    Raises:
        UsageError: An unknown statistic, or a limit that is no duration or zero.
    """
    stat, colon, limit = text.strip().rpartition(":")
    stat = stat if colon else "p99"
    if stat not in STATISTICS:
        raise unknown("statistic", stat, STATISTICS)
    limit_ns = parse_duration_ns(limit)
    if limit_ns == 0:
        raise UsageError(f"{text!r} allows no time at all", fix="write a limit such as p99:100ms")
    return Sla(stat, limit_ns)


def parse_slas(text: str) -> tuple[Sla, ...]:
    """Read promises separated by commas; all of them must hold."""
    return tuple(parse_sla(part) for part in parse_names(text))


def parse_beams(text: str) -> tuple[int, ...]:
    """Read a beam schedule: `900` (every level), `20-300-900`, `20/300/900`, or quoted `20->300->900`.

    Raises:
        UsageError: Not a schedule of widths of at least 1.
    """
    given = text.strip()
    if given.endswith("-"):
        why = "the shell reads the '>' of 20->300->900 as a redirect to a file"
        raise UsageError(f"beams {text!r} end in '-'", why, "write 20-300-900, or quote '20->300->900'")
    separator = next((mark for mark in ("->", "/", "-") if mark in given), None)
    widths = given.split(separator) if separator else [given]
    if not all(re.fullmatch("[0-9]{1,9}", width.strip()) for width in widths):
        raise UsageError(
            f"{text!r} is not a beam schedule", fix="write 900, or one width a level: 20-300-900"
        )
    if any(int(width) == 0 for width in widths):
        raise UsageError(f"beams {text!r} keep no beam at a level", fix="each width is at least 1")
    return tuple(int(width) for width in widths)


def format_beams(beams: Sequence[int]) -> str:
    """Spell a beam schedule: `20-300-900`."""
    return "-".join(map(str, beams))


def parse_beams_list(text: str) -> tuple[tuple[int, ...], ...]:
    """Read schedules separated by commas; one that is repeated counts once."""
    return tuple(dict.fromkeys(parse_beams(part) for part in parse_names(text)))


def parse_range(text: str) -> tuple[int, ...]:
    """Read numbers and ranges separated by commas; `100:1000:100` includes both ends.

    Raises:
        UsageError: Not a number of at least 1, a range without a step or that goes down, or too many values.
    """
    values = [value for part in parse_names(text) for value in _range(part)]
    return tuple(dict.fromkeys(values))


def _range(part: str) -> range:
    numbers = [parse_count(number) for number in part.split(":")]
    if len(numbers) == 2 or len(numbers) > 3:
        raise UsageError(f"{part!r} is not a range", "a range has three numbers", "write start:stop:step")
    start, stop, step = numbers if len(numbers) == 3 else (numbers[0], numbers[0], 1)
    if start < 1 or stop < start or step < 1:
        raise UsageError(
            f"{part!r} holds no values", "it must start at 1 or more and go up", "write 100:1000:100"
        )
    if (stop - start) // step >= MAX_RANGE:
        raise UsageError(f"{part!r} stands for more than {MAX_RANGE} values", fix="take a larger step")
    return range(start, stop + 1, step)


def parse_count(text: str) -> int:
    """Read a count: `1000`, `10k`, `1.5M`, `10_000`.

    Raises:
        UsageError: Not a whole number.
    """
    return _scaled(text, _COUNT_UNITS, "a count", "write 1000, 10k or 1M")


def parse_bytes(text: str) -> int:
    """Read a size in bytes: `8GiB` (1024-based), `8GB` (1000-based), `512MiB`.

    Raises:
        UsageError: No unit or an unknown one.
    """
    return _scaled(text, _BYTE_UNITS, "a size", "write 8GiB, 512MiB or 8GB")


def parse_quota(text: str) -> Quota:
    """Read a number of rows, `10`, or a share of them, `0.5%`.

    Raises:
        UsageError: Neither, or more than all rows.
    """
    given = text.strip()
    if not given.endswith("%"):
        return Quota(parse_count(given), False)
    share = parse_float(given[:-1])
    if not 0 <= share <= 100:
        raise UsageError(f"{text!r} is no share of the rows", fix="write 0% to 100%")
    return Quota(share, True)


def _scaled(text: str, units: Mapping[str, int], what: str, fix: str) -> int:
    match = re.fullmatch(rf"({_NUMBER})\s*([a-zA-Z]*)", text.strip().replace("_", ""))
    if match is None or match[2] not in units:
        raise UsageError(f"{text!r} is not {what}", fix=fix)
    return _whole(Fraction(match[1]) * units[match[2]], text, f"{what} is a whole number")


def _whole(value: Fraction | int, text: str, why: str) -> int:
    if value.denominator != 1:
        raise UsageError(f"{text!r} is not whole", why)
    return int(value)


def parse_float(text: str) -> float:
    """Read a finite number.

    Raises:
        UsageError: Not a finite number.
    """
    if not re.fullmatch(rf"[-+]?{_NUMBER}(?:[eE][-+]?[0-9]{{1,2}})?", text.strip()):
        raise UsageError(f"{text!r} is not a number", fix="write 0.9 or 2.5")
    return float(text)


def parse_bool(text: str) -> bool:
    """Read `true` or `false`, also as yes/no, on/off, 1/0.

    Raises:
        UsageError: None of these.
    """
    word = text.strip().lower()
    if word not in ("true", "yes", "on", "1", "false", "no", "off", "0"):
        raise UsageError(f"{text!r} is neither true nor false", fix="write true or false")
    return word in ("true", "yes", "on", "1")


def parse_names(text: str) -> tuple[str, ...]:
    """Read names separated by commas.

    Raises:
        UsageError: An empty name.
    """
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise UsageError(f"{text!r} has an empty element", fix="separate the elements by single commas")
    return names


def parse_ints(text: str) -> tuple[int, ...]:
    """Read counts separated by commas."""
    return tuple(parse_count(part) for part in parse_names(text))


def parse_score(text: str) -> Score:
    """Read a score mode: `vocab`, `level`, `children`, `topk` or `topk:50`.

    Raises:
        UsageError: An unknown mode, or a K that is no count of at least 1.
    """
    mode, colon, k = text.strip().partition(":")
    if mode not in SCORE_MODES:
        raise unknown("score mode", mode, SCORE_MODES)
    if not colon:
        return Score(mode)
    if mode != "topk":
        raise UsageError(f"score mode {text!r} takes no number", fix=f"write {mode}, or topk:50")
    if parse_count(k) < 1:
        raise UsageError(f"{text!r} leaves no candidate", fix="K is at least 1")
    return Score(mode, parse_count(k))


def parse_scores(text: str) -> tuple[Score, ...]:
    """Read score modes separated by commas; one that is repeated counts once."""
    return tuple(dict.fromkeys(parse_score(part) for part in parse_names(text)))


def parse_device(text: str) -> str:
    """Check devices: `auto`, `cpu`, `cuda`, or GPUs as `1`, `cuda:1`, `0,1`; given as `cuda:0,cuda:1`.

    Raises:
        UsageError: None of these.
    """
    given = ",".join(map(str.strip, text.split(",")))
    if not re.fullmatch(r"auto|cuda|cpu(,cpu)*|(cuda:)?[0-9]{1,3}(,(cuda:)?[0-9]{1,3})*", given):
        fix = "write auto, cpu, a GPU as cuda:0, or several as 0,1"
        raise UsageError(f"{text!r} is not a device", fix=fix)
    return re.sub(r"(?<![0-9:])[0-9]+", lambda number: f"cuda:{int(number[0])}", given)


def parse_fields(text: str, fields: Mapping[str, Callable[[str], T]]) -> dict[str, T]:
    """Read `name=value,name=value`, each value by the parser of its name.

    Raises:
        UsageError: A part without `=`, an unknown name (the nearest is named), a name that comes twice, or a
            value its parser refuses.
    """
    found: dict[str, T] = {}
    for part in parse_names(text):
        name, equals, value = part.partition("=")
        if not equals:
            raise UsageError(f"{part!r} has no value", fix=f"write {part}=VALUE")
        if name not in fields:
            raise unknown("name", name, fields)
        if name in found:
            raise UsageError(f"{text!r} has {name!r} twice", fix="leave one out")
        found[name] = fields[name](value)
    return found


def unknown(kind: str, given: str, known: "Sequence[str] | Mapping[str, object]") -> UsageError:
    """Make the error for a word that is not one of the known ones: names the nearest, or lists a few."""
    near = get_close_matches(given, known, n=1)
    listed = "known: " + ", ".join(known) if len(known) <= 12 else ""
    fix = f"did you mean {near[0]!r}?" if near else listed
    return UsageError(f"unknown {kind} {given!r}", fix=fix)
