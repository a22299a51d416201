"""What the control plane sees of execution: options, batches, capacities, backend. Torch-free."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from grinf.state.request import Request

if TYPE_CHECKING:
    import numpy as np

Phase = Literal["prefill", "decode"]

Mark = Any
"""The end of a step on an asynchronous device, opaque to the control plane; None: the step is done."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How to build an engine; the meaning of each field is that of the flag of the same name.

    Attributes:
        model: Checkpoint folder, or architecture file for seeded random weights.
        device: `auto`, `cpu` or `cuda:N`.
        dtype: `auto` (float32 on a CPU, the checkpoint's on a GPU), `float32`, `bfloat16` or `float16`.
        beams: Beams kept after each level; a single number holds for all levels.
        score_margin: Nats below the best at which beams are dropped; None: none is.
        min_beams: Beams that survive the margin at least.
        score: `vocab`, `level`, `children` or `topk`.
        score_k: K of `topk`; None: the scheduled width of each selection.
        levels: Tokens per SID; None: the trie's depth, or 3 without a trie.
        max_batch: Requests in flight.
        max_batch_tokens: Prompt tokens of one prefill.
        max_context: Longest prompt; None: what the model and the budget allow, up to 8,192.
        page_size: Tokens per ContextKV page; None: the device's default.
        memory_fraction: Share of the free memory that weights and pools may take.
        workspace_bytes: Most that the logits of one selection chunk may take.
        filters: Whether requests may bring live masks of their own; the views of a trie need no such room.
        sid_mass: Whether results say how much probability the codes of level 0 got; with a trie and score
            `vocab` only.
        graphs: Whether to capture CUDA graphs; ignored on a CPU.
        kernels: Op name -> implementation name, to override the resolved table.
        seed: Of random weights.
    """

    model: str
    device: str = "auto"
    dtype: str = "auto"
    beams: tuple[int, ...] = (900,)
    score_margin: float | None = None
    min_beams: int = 1
    score: str = "vocab"
    score_k: int | None = None
    levels: int | None = None
    max_batch: int = 8
    max_batch_tokens: int = 8192
    max_context: int | None = None
    page_size: int | None = None
    memory_fraction: float = 0.85
    workspace_bytes: int = 1 << 30
    filters: bool = False
    sid_mass: bool = False
    graphs: bool = True
    kernels: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests that run one step together, and the shape that they run in.

    Attributes:
        phase: `prefill` computes prompts, `decode` advances live beams by one token; both end with a
            selection.
        requests: At most the capacity's `max_batch`.
        width: Beams per request in the step, W; 1 in a prefill.
        next_width: Beams per request after the selection, K.
        level: SID level that the selection chooses where all requests agree on it and the columns depend on
            it; None where levels mix.
    """

    phase: Phase
    requests: tuple[Request, ...]
    width: int
    next_width: int
    level: int | None


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the backend can hold; decided once, at start.

    Attributes:
        num_pages, page_size, num_slots: For the ledger.
        max_context: Longest prompt, tokens.
        max_batch: Requests of one batch.
        max_batch_tokens: Prompt tokens of one prefill; a single longer prompt still runs, alone.
        max_width: Widest beam.
        vocab_rows: Valid token ids are below this.
        level_widths: Live candidates at each level at most; bounds every width before the device is asked.
        width_buckets: Ascending captured widths; empty: every width is its own bucket.
        mixed_levels: Whether one batch may hold requests at different levels.
        views: Names of the trie's views that a request may ask for.
        filter_words: Words of the live mask that a request may bring; 0: it may not.
    """

    num_pages: int
    page_size: int
    num_slots: int
    max_context: int
    max_batch: int
    max_batch_tokens: int
    max_width: int
    vocab_rows: int
    level_widths: tuple[int, ...]
    width_buckets: tuple[int, ...] = ()
    mixed_levels: bool = True
    views: tuple[str, ...] = ()
    filter_words: int = 0

    @property
    def levels(self) -> int:
        """Tokens per SID."""
        return len(self.level_widths)

    def bucket(self, width: int) -> int:
        """Smallest bucket that holds `width` beams; the width itself outside the buckets."""
        return next((bucket for bucket in self.width_buckets if bucket >= width), width)


@dataclass(frozen=True, slots=True)
class Beams:
    """Final beams of one request, on the host.

    Attributes:
        sids: int32 [n, levels]. scores: float32 [n]. leaves: int64 [n], or None without a trie.
        fault: Why the beams cannot be trusted (a model that computes NaN); empty: they can.
        sid_mass: Probability of all codes of level 0 together; None: it was not asked for.
    """

    sids: "np.ndarray"
    scores: "np.ndarray"
    leaves: "np.ndarray | None"
    fault: str = ""
    sid_mass: float | None = None


class Pending(Protocol):
    """Results on their way to the host."""

    def is_ready(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self) -> list[Beams]:
        """Block until the results are on the host."""
        ...

    def ages_ns(self, marks: Sequence[Mark]) -> list[int | None]:
        """How long before these results each mark was reached; None where the host knows it better."""
        ...


class ExecutionBackend(Protocol):
    """Runs batches. Work is enqueued in call order; only `widths` and `Pending.wait` wait for it."""

    @property
    def capacity(self) -> Capacity:
        """Sizes that the scheduler and the ledger must respect."""
        ...

    def prefill(self, batch: Batch) -> Mark:
        """Compute the prompts of a batch, and choose level 0."""
        ...

    def decode(self, batch: Batch) -> Mark:
        """Feed the last chosen tokens of a batch, and choose the next level."""
        ...

    def widths(self, requests: Sequence[Request]) -> list[int]:
        """Live beams of each request after the last selection; waits for the device."""
        ...

    def collect(self, requests: Sequence[Request]) -> Pending:
        """Start the transfer of finished requests; their leases may be released at once."""
        ...

    def no_beams(self) -> Beams:
        """The answer of a request that has none."""
        ...

    def describe(self) -> dict[str, Any]:
        """Device, memory plan, resolved kernels and buckets, ready for JSON."""
        ...

    def close(self) -> None:
        """Free what the device holds."""
        ...
