"""Bucket shapes: what is captured, and which captured shape a batch runs in."""

from dataclasses import fields

from hypothesis import given
from hypothesis import strategies as st

from grinf.backend.buckets import BucketTable, Shape, make_buckets, width_buckets
from grinf.backend.interface import Batch
from grinf.state.request import Request


def batch(phase: str, lengths: list[int], width: int, next_width: int, level: int | None) -> Batch:
    requests = tuple(Request(i, [0] * n) for i, n in enumerate(lengths))
    return Batch(phase, requests, width, next_width, level)  # type: ignore[arg-type]


def fixed(max_batch: int = 4, max_tokens: int = 1000) -> BucketTable:
    return make_buckets((900,) * 3, (900,), max_batch, max_tokens, mixed_levels=True, shrinking=False)


def test_a_fixed_width_needs_one_decode_shape_per_batch_size() -> None:
    shapes = list(fixed().shapes())
    assert {s for s in shapes if s.phase == "decode"} == {
        Shape("decode", b, 0, 900, 900, None) for b in (1, 2, 3, 4)
    }
    assert {s.tokens for s in shapes if s.phase == "prefill"} == {64, 128, 256, 512, 768, 1000}


def test_the_key_knows_nothing_about_requests() -> None:
    assert [f.name for f in fields(Shape)] == ["phase", "batch", "tokens", "width", "next_width", "level"]


def test_requests_of_any_length_share_a_shape() -> None:
    table = fixed()
    assert table.shape_of(batch("decode", [3, 700, 40], 900, 900, None)) == Shape(
        "decode", 3, 0, 900, 900, None
    )
    assert table.shape_of(batch("prefill", [100, 150], 1, 900, 0)) == Shape("prefill", 4, 256, 1, 900, 0)


def test_outside_the_buckets_a_batch_keeps_its_exact_shape() -> None:
    table = fixed()
    assert table.shape_of(batch("decode", [5] * 6, 900, 900, None)).batch == 6
    assert table.shape_of(batch("decode", [5], 901, 900, None)).width == 901
    assert table.shape_of(batch("prefill", [1001], 1, 900, 0)).tokens == 1001


def test_a_schedule_has_one_transition_a_step() -> None:
    table = make_buckets((20, 300, 900), (20, 300, 900), 2, 500, mixed_levels=True, shrinking=False)
    assert table.transitions == ((1, 20, 0), (20, 300, None), (300, 900, None))


def test_level_columns_make_a_shape_a_level() -> None:
    table = make_buckets((900,) * 3, (900,), 2, 500, mixed_levels=False, shrinking=False)
    assert table.transitions == ((1, 900, 0), (900, 900, 1), (900, 900, 2))


def test_a_margin_adds_a_ladder_below() -> None:
    widths = width_buckets((900, 900, 900), shrinking=True)
    assert widths == (16, 32, 64, 128, 256, 512, 900)
    table = make_buckets((900,) * 3, widths, 2, 500, mixed_levels=True, shrinking=True)
    assert (64, 64, None) in table.transitions
    assert all(next_width <= width or width == 1 for width, next_width, _ in table.transitions)


@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=6),
    tokens=st.integers(1, 3000),
    phase=st.sampled_from(["prefill", "decode"]),
)
def test_a_bucket_always_holds_its_batch(lengths: list[int], tokens: int, phase: str) -> None:
    table = fixed(max_batch=4, max_tokens=tokens)
    width, level = (1, 0) if phase == "prefill" else (900, None)
    shape = table.shape_of(batch(phase, lengths, width, 900, level))
    assert shape.batch >= len(lengths)
    assert phase == "decode" or shape.tokens >= sum(lengths)
