"""The request: the unit of admission, memory and scheduling. Knows no tensor and no file."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np

    from grinf.errors import RowError


class BeamWidthPolicy(Protocol):
    """How many beams a request keeps after each level; implemented in `grinf.runtime.beam_width`."""

    @property
    def margin(self) -> float | None:
        """Nats below the best beam at which a beam is dropped; None: no beam is dropped."""
        ...

    @property
    def min_width(self) -> int:
        """Beams that survive the margin at least."""
        ...

    def width(self, level: int) -> int:
        """Beams to keep after the selection of `level`, before clamping to the live candidates."""
        ...


class RequestStatus(StrEnum):
    """Life of a request."""

    NEW = "new"
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Lease:
    """What a running request holds: ContextKV pages in order, and one row of BeamKV and BeamPath."""

    pages: tuple[int, ...]
    beam_slot: int


@dataclass(slots=True)
class Timeline:
    """When a request got where, in nanoseconds (`time.perf_counter_ns`); 0 where not reached.

    Attributes:
        prefilled_ns, step_ns: End of the prefill and of each decode step on the device, once the request is
            done; before that, when the host had enqueued them.
        done_ns: When the results were on the host.
    """

    submitted_ns: int = 0
    admitted_ns: int = 0
    prefilled_ns: int = 0
    step_ns: list[int] = field(default_factory=list)
    done_ns: int = 0


@dataclass(slots=True, eq=False)
class Request:
    """One query, served once, and its progress. Callers set the first five fields, the Scheduler the rest."""

    request_id: int
    input_ids: Sequence[int]
    policy: BeamWidthPolicy | None = None
    """None: the engine's default policy."""
    view: str | None = None
    """Name of the trie view that this request may see; None: every live item."""
    live: "np.ndarray | None" = None
    """A filter of this request alone, instead of a view: uint32 words from `Trie.mask_from_leaves`."""

    status: RequestStatus = RequestStatus.NEW
    level: int = 0
    """SID levels chosen so far; 0 means that the prompt is not computed yet."""
    width: int = 1
    """Live beams, as an upper bound that the host knows without asking the device."""
    rows: int = 0
    """Model rows computed so far: the prompt once, then the width of each decode step."""
    lease: Lease | None = None
    timeline: Timeline = field(default_factory=Timeline)
    marks: list[object] = field(default_factory=list)
    """What the backend gave for each of its steps."""

    @property
    def context_len(self) -> int:
        """Prompt tokens."""
        return len(self.input_ids)


@dataclass(frozen=True, slots=True)
class RecallResult:
    """What a request returns; beams in order (score descending, then the order of DESIGN §4.4).

    Attributes:
        request_id: The id that the caller gave.
        sids: int32 [n, levels]. Codes with a trie (-1 pads a SID shorter than the trie's depth), token ids
            without.
        scores: float32 [n], natural-log probability summed over the levels.
        leaves: int64 [n], row of each SID in the trie's item index; None without a trie.
        timeline: Host times of the request.
        error: Why the request has no answer; then the arrays are empty.
        sid_mass: Probability of all codes of level 0 together; None: it was not asked for.
    """

    request_id: int
    sids: "np.ndarray"
    scores: "np.ndarray"
    leaves: "np.ndarray | None"
    timeline: Timeline
    error: "RowError | None" = None
    sid_mass: float | None = None

    @property
    def beams_returned(self) -> int:
        """Number of beams in the answer."""
        return len(self.scores)
