"""Ledger, memory plan and beam width policies: integers in, integers out."""

import pytest

from grinf.errors import CapacityError, UsageError
from grinf.runtime.beam_width import ScheduledWidth, ScoreMarginWidth, make_policy
from grinf.state.ledger import Ledger
from grinf.state.memory import KVShape, plan_memory


def test_a_lease_is_granted_whole_or_not_at_all() -> None:
    ledger = Ledger(num_pages=5, page_size=16, num_slots=2)
    first = ledger.lease(33)
    assert first is not None
    assert len(first.pages) == 3
    assert ledger.lease(48) is None
    assert (ledger.free_pages, ledger.free_slots) == (2, 1)
    second = ledger.lease(32)
    assert second is not None
    assert not set(first.pages) & set(second.pages)
    assert first.beam_slot != second.beam_slot
    assert ledger.lease(1) is None
    ledger.release(first)
    ledger.release(second)
    assert (ledger.free_pages, ledger.free_slots) == (5, 2)


def test_a_prompt_beyond_the_pool_fails_with_the_numbers() -> None:
    with pytest.raises(CapacityError, match="81 tokens needs 6 pages, the pool has 5"):
        Ledger(num_pages=5, page_size=16, num_slots=2).lease(81)


def test_qwen3_bytes_per_token() -> None:
    assert KVShape(28, 8, 128, 2).bytes_per_token == 112 * 1024


def test_plan_fills_the_budget_and_not_more() -> None:
    shape = KVShape(num_layers=28, num_kv_heads=8, head_dim=128, dtype_bytes=2)
    plan = plan_memory(shape, 8 << 30, 64, max_context=1000, num_steps=2, max_width=900, max_slots=64)
    assert plan.context_bytes + plan.beam_bytes <= 8 << 30
    assert plan.num_pages == plan.num_slots * 16
    one_more = (plan.context_bytes + plan.beam_bytes) * (plan.num_slots + 1) / plan.num_slots
    assert one_more > 8 << 30


def test_a_budget_too_small_names_the_need() -> None:
    shape = KVShape(28, 8, 128, 2)
    with pytest.raises(CapacityError, match=r"one request needs .* MiB, 102\.4 MiB are planned"):
        plan_memory(shape, (1 << 30) // 10, 64, max_context=1000, num_steps=2, max_width=900, max_slots=8)


def test_one_width_holds_for_all_levels() -> None:
    assert make_policy((900,), 3) == ScheduledWidth((900, 900, 900))
    assert [make_policy((20, 300, 900), 3).width(level) for level in range(3)] == [20, 300, 900]


def test_a_margin_takes_any_schedule_that_does_not_grow() -> None:
    assert make_policy((900, 300, 300), 3, margin=4.0, min_width=10) == ScoreMarginWidth(
        (900, 300, 300), 4.0, 10
    )


@pytest.mark.parametrize(
    ("beams", "margin", "min_width", "said"),
    [
        ((), None, 1, "at least 1"),
        ((0,), None, 1, "at least 1"),
        ((20, 300), None, 1, "names 2 widths, a SID has 3 levels"),
        ((20, 300, 900), 4.0, 1, "grows"),
        ((900,), -1.0, 1, "not a distance"),
        ((900,), float("nan"), 1, "not a distance"),
        ((900,), 1.0, 0, "at least one beam"),
    ],
)
def test_impossible_policies_are_refused(
    beams: tuple, margin: float | None, min_width: int, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        make_policy(beams, 3, margin, min_width)
