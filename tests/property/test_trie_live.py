"""What one query may see, made from its lists alone, against a pass over the whole catalogue."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grinf.trie import Trie, live, trie_of, views
from grinf.trie.live import LiveItems


def make(rng: np.random.Generator, *, short: bool) -> Trie:
    levels, rows, size = int(rng.integers(1 + short, 4)), int(rng.integers(1, 60)), int(rng.integers(1, 6))
    codes = rng.integers(0, size, (rows, levels))
    if short:
        codes[np.arange(levels)[None] >= rng.integers(1, levels + 1, rows)[:, None]] = -1
        codes[0] = rng.integers(0, size, levels)
    if rng.random() < 0.3:
        codes = np.unique(codes, axis=0)  # One item per SID: the file has no pointers to items.
    return trie_of(
        codes, np.arange(len(codes)), codebook_sizes=[size] * levels, end_token="</s>" if short else None
    )


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    short=st.booleans(),
    filters=st.sets(st.sampled_from(["view", "deleted", "allow", "deny"])),
    dense=st.sampled_from([0, 64]),
)
def test_a_querys_mask_equals_one_that_is_made_from_all_items(
    seed: int, short: bool, filters: set[str], dense: int
) -> None:
    rng = np.random.default_rng(seed)
    trie = make(rng, short=short)
    count = trie.manifest.num_items
    items = np.ones(count, bool)
    if "view" in filters:
        items = rng.random(count) < 0.6
        trie = trie.with_view("v", items)
    if "deleted" in filters:
        gone = rng.random(count) < 0.3
        trie = replace(trie, deleted=np.packbits(gone, bitorder="little"))
        items = items & ~gone
    lists = {name: rng.integers(0, count, rng.integers(0, count + 1)) for name in ("allow", "deny")}
    for name in filters & lists.keys():
        items = items & (np.isin(np.arange(count), lists[name]) == (name == "allow"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live, "DENSE_SHARE", dense)
        shown = LiveItems(trie, "v" if "view" in filters else None)
        query = shown.narrow(*(lists[name] if name in filters else None for name in ("allow", "deny")))
    expected = trie.mask_from_leaves(views.live_leaves(items, trie.item_ptr))
    np.testing.assert_array_equal(query.mask, expected)
    np.testing.assert_array_equal(query.keeps(np.arange(count)), items)


def test_two_views_may_share_a_prefix_and_no_item() -> None:
    trie = trie_of(np.array([[0, 0], [0, 1], [1, 0]]), [1, 2, 3])
    trie = trie.with_view("a", np.array([1, 0, 1])).with_view("b", np.array([0, 1, 1]))
    both = np.unpackbits(trie.live_mask("a", "b").view(np.uint8), bitorder="little")[:6]
    assert both.tolist() == [1, 0, 1, 0, 0, 1], "node 1 (code 0) is in both views, and no item below it is"


def test_counts_of_live_items_leave_out_empty_leaves() -> None:
    trie = trie_of(np.array([[0, 0], [0, 0], [0, 1], [1, 0]]), [1, 2, 3, 4])
    trie = trie.with_view("v", np.array([1, 1, 0, 1]))
    assert LiveItems(trie, None).items_of_leaves().tolist() == [2, 1, 1]
    assert LiveItems(trie, "v").items_of_leaves().tolist() == [2, 1]
