"""Which shapes are captured, and which captured shape a batch runs in. Integers only: knows no tensor.

A shape says nothing about a request: not its id, its prompt length, its step nor its slot.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from grinf.backend.interface import Batch, Phase

_SMALL_TOKENS = (64, 128)
_TOKEN_STEP = 256
_WIDTH_LADDER = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of one step; also the key of its graph.

    Attributes:
        batch: Requests, padding included.
        tokens: Prompt tokens, padding included; 0 in a decode.
        width, next_width: W and K.
        level: Level that is chosen, where the logits' columns depend on it; else None.
    """

    phase: Phase
    batch: int
    tokens: int
    width: int
    next_width: int
    level: int | None


@dataclass(frozen=True, slots=True)
class BucketTable:
    """The captured shapes; an empty table captures nothing, and every batch runs in its exact shape.

    Attributes:
        batches: Ascending batch sizes.
        tokens: Ascending prompt token counts of a prefill; a prefill always runs in the largest batch bucket.
        transitions: (width, next width, level) of the prefill (width 1) and of every decode step.
    """

    batches: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    transitions: tuple[tuple[int, int, int | None], ...] = ()

    def shapes(self) -> Iterator[Shape]:
        """Every captured shape, the largest first, so that smaller ones reuse its memory."""
        for width, next_width, level in self.transitions:
            if width == 1 and level == 0:
                for tokens in reversed(self.tokens):
                    yield Shape("prefill", self.batches[-1], tokens, 1, next_width, 0)
            else:
                for batch in reversed(self.batches):
                    yield Shape("decode", batch, 0, width, next_width, level)

    def shape_of(self, batch: Batch) -> Shape:
        """The captured shape that holds a batch, or the batch's exact shape."""
        count = len(batch.requests)
        tokens = sum(request.context_len for request in batch.requests) if batch.phase == "prefill" else 0
        exact = Shape(batch.phase, count, tokens, batch.width, batch.next_width, batch.level)
        if (batch.width, batch.next_width, batch.level) not in self.transitions:
            return exact
        batch_bucket = _smallest(self.batches, count)
        if batch.phase == "decode":
            return exact if batch_bucket is None else Shape("decode", batch_bucket, 0, *_transition(batch))
        token_bucket = _smallest(self.tokens, tokens)
        if batch_bucket is None or token_bucket is None:
            return exact
        return Shape("prefill", self.batches[-1], token_bucket, *_transition(batch))


def _transition(batch: Batch) -> tuple[int, int, int | None]:
    return batch.width, batch.next_width, batch.level


def _smallest(buckets: Sequence[int], needed: int) -> int | None:
    return next((bucket for bucket in buckets if bucket >= needed), None)


def width_buckets(bounds: Sequence[int], *, shrinking: bool) -> tuple[int, ...]:
    """Widths to capture: those of the schedule, and a ladder below them where a margin can shrink a beam."""
    ladder = [width for width in _WIDTH_LADDER if width < max(bounds)] if shrinking else []
    return tuple(sorted({*bounds, *ladder}))


def make_buckets(
    bounds: Sequence[int],
    widths: Sequence[int],
    max_batch: int,
    max_tokens: int,
    *,
    mixed_levels: bool,
    shrinking: bool,
) -> BucketTable:
    """Decide the captured shapes.

    Args:
        bounds: Beams that can be alive after each level.
        widths: Width buckets, as `width_buckets` gives them.
        max_batch: Requests of one batch.
        max_tokens: Prompt tokens of one prefill; 0: prefills are not captured.
        mixed_levels: Whether requests at different levels share a batch.
        shrinking: Whether a margin can shrink the beams.
    """

    def bucket(width: int) -> int:
        return _smallest(widths, width) or width

    transitions: dict[tuple[int, int, int | None], None] = {(1, bucket(bounds[0]), 0): None}
    for level in range(1, len(bounds)):
        starts = (
            [w for w in widths if w <= bucket(bounds[level - 1])]
            if shrinking
            else [bucket(bounds[level - 1])]
        )
        for start in starts:
            most = min(bounds[level], start) if shrinking else bounds[level]
            transitions[start, bucket(most), None if mixed_levels else level] = None
    steps = range(_TOKEN_STEP, max_tokens + _TOKEN_STEP, _TOKEN_STEP)
    tokens = _up_to((*_SMALL_TOKENS, *steps), max_tokens) if max_tokens else ()
    return BucketTable(tuple(range(1, max_batch + 1)), tokens, tuple(transitions))


def _up_to(buckets: Iterable[int], most: int) -> tuple[int, ...]:
    return tuple(sorted({min(bucket, most) for bucket in buckets}))
