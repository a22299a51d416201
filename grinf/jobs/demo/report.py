"""What the demo found out, as values; they are kept in the demo's folder, so that they can be shown again."""

from dataclasses import dataclass
from pathlib import Path

CUTOFFS = (1, 10, 100)
WIDTH_CUTOFFS = (1, 10, 100, 900)


@dataclass(frozen=True, slots=True)
class SystemScore:
    """A system and its recall at each K of `CUTOFFS`, on all test queries."""

    system: str
    recall: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class WidthScore:
    """What a beam schedule finds, and what it costs.

    Attributes:
        beams: As `--beams` spells it.
        recall: At each K of `WIDTH_CUTOFFS`; None for more items than it returns.
        legal_share: Share of beams that are items, when the search runs without the trie.
        queries_per_s: With the trie, on this machine.
    """

    beams: str
    recall: tuple[float | None, ...]
    legal_share: float
    queries_per_s: float


@dataclass(frozen=True, slots=True)
class Answer:
    """A test query, the items that it means, and the best that were found; `found` says which are right."""

    query: str
    wanted: tuple[str, ...]
    titles: tuple[str, ...]
    found: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class DemoReport:
    """The whole demo.

    Attributes:
        num_compared: Test queries that `widths` were measured on.
        loss: At the end of the training, nats per SID token.
        recall: Of `grinf recall` on all test queries, at each K.
        seconds: Wall time of each stage.
        is_new: Whether it was made now, not by an earlier run with the same settings.
    """

    num_items: int
    num_train: int
    num_test: int
    num_compared: int
    num_parameters: int
    steps: int
    loss: float
    systems: tuple[SystemScore, ...]
    recall: dict[int, float]
    widths: tuple[WidthScore, ...]
    answers: tuple[Answer, ...]
    seconds: dict[str, float]
    items: Path
    queries: Path
    model: Path
    trie: Path
    cutoffs: tuple[int, ...] = CUTOFFS
    width_cutoffs: tuple[int, ...] = WIDTH_CUTOFFS
    is_new: bool = True
