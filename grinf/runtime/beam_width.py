"""How many beams a request keeps after each level: fixed, scheduled, or shrinking by score margin."""

import itertools
from dataclasses import dataclass

from grinf.errors import UsageError


@dataclass(frozen=True, slots=True)
class ScheduledWidth:
    """One width per level; a fixed width is a schedule that repeats one number.

    Attributes:
        widths: Beams to keep after each level.
        margin: None: every beam within the width lives on.
        min_width: Meaningless without a margin.
    """

    widths: tuple[int, ...]
    margin: float | None = None
    min_width: int = 1

    def width(self, level: int) -> int:
        """Beams to keep after the selection of `level`, before clamping to the live candidates."""
        return self.widths[level]


@dataclass(frozen=True, slots=True)
class ScoreMarginWidth(ScheduledWidth):
    """Drops the beams that lie more than `margin` nats below the best; widths can only shrink."""


def make_policy(
    beams: tuple[int, ...], levels: int, margin: float | None = None, min_width: int = 1
) -> ScheduledWidth:
    """Build the policy that `--beams`, `--score-margin` and `--min-beams` describe.

    Args:
        beams: One width per level, or a single one for all levels.
        levels: Tokens per SID.
        margin: Nats; None for no margin.
        min_width: Beams that survive the margin at least.

    Raises:
        UsageError: A width below 1, a schedule of the wrong length, or a growing schedule with a margin.
    """
    shown = "-".join(map(str, beams))
    if not beams or min(beams) < 1:
        raise UsageError(f"--beams {shown or '(empty)'}: every width must be at least 1")
    if len(beams) not in (1, levels):
        raise UsageError(
            f"--beams {shown} names {len(beams)} widths, a SID has {levels} levels",
            fix=f"give one width for all levels, or {levels} of them such as {'-'.join(['300'] * levels)}",
        )
    widths = beams * levels if len(beams) == 1 else beams
    if margin is None:
        return ScheduledWidth(widths)
    if not margin >= 0:
        raise UsageError(
            f"--score-margin {margin} is not a distance", fix="give nats, such as --score-margin 8"
        )
    if min_width < 1:
        raise UsageError(f"--min-beams {min_width}: at least one beam must survive")
    if any(later > earlier for earlier, later in itertools.pairwise(widths)):
        raise UsageError(
            f"--beams {shown} grows, which --score-margin {margin} cannot honour",
            "the next width is at most what the margin kept",
            "use a fixed or shrinking schedule with --score-margin",
        )
    return ScoreMarginWidth(widths, margin, min_width)
