"""The trie against brute force: walk, lookups, bounds, filters, and equal bytes for equal catalogues."""

import random
from itertools import pairwise, product
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from grinf.trie import Trie, trie_of
from grinf.trie.build import ItemRows, Layout, RowStore, build_trie
from grinf.trie.csr import group_sizes

SETTINGS = settings(deadline=None, max_examples=30)

Row = tuple[tuple[int, ...], int, float]


@st.composite
def catalogues(draw, *, short=False):
    """Rows of (SID, item, weight); the SIDs have up to three levels of up to six codes."""
    levels, size = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    depth = st.integers(1, levels) if short else st.just(levels)
    sid = depth.flatmap(lambda n: st.tuples(*[st.integers(0, size - 1)] * n))
    items = draw(st.lists(st.integers(-50, 50), min_size=1, max_size=40, unique=True))
    return [(draw(sid), item, float(draw(st.integers(0, 3)))) for item in items]


def pad(sids, levels):
    return np.array([[*sid, *[-1] * (levels - len(sid))] for sid in sids], np.int32)


def make(rows: list[Row], **options) -> Trie:
    sids, items, weights = zip(*rows, strict=True)
    return trie_of(pad(sids, max(map(len, sids))), items, weights=np.array(weights), **options)


def walk(trie: Trie) -> list[tuple[int, ...]]:
    """Every SID by the pointers alone, in leaf order."""

    def below(level, node):
        if level == trie.levels:
            return [()]
        first, end = (0, trie.num_nodes[0]) if level == 0 else trie.child_ptr[level - 1][node : node + 2]
        return [(int(trie.codes[level][n]), *rest) for n in range(first, end) for rest in below(level + 1, n)]

    return below(0, 0)


def ranked(rows):
    """Item lists by SID, as the contract orders them."""
    by_sid: dict[tuple[int, ...], list[int]] = {}
    for sid, item, _ in sorted(rows, key=lambda row: (-row[2], row[1])):
        by_sid.setdefault(sid, []).append(item)
    return by_sid


@SETTINGS
@given(catalogues())
def test_walk_finds_exactly_the_sids_in_order(rows):
    trie = make(rows)
    assert walk(trie) == sorted({sid for sid, _, _ in rows})
    assert [tuple(sid) for sid in trie.sids(np.arange(trie.num_leaves)).tolist()] == walk(trie)


@SETTINGS
@given(catalogues(short=True))
def test_short_sids_end_in_end_codes(rows):
    trie = make(rows, end_token="</s>")
    levels = trie.levels
    padded = {(*sid, *(trie.end_codes[level] for level in range(len(sid), levels))) for sid, _, _ in rows}
    assert walk(trie) == sorted(padded)
    assert {tuple(c for c in sid if c >= 0) for sid in trie.sids(np.arange(trie.num_leaves)).tolist()} == {
        sid for sid, _, _ in rows
    }
    assert trie.end_codes == (None, *trie.codebook_sizes[1:])


@SETTINGS
@given(catalogues(short=True), st.booleans())
def test_items_of_a_leaf_are_in_rank_order_and_lead_back_to_it(rows, text):
    named = [(sid, f"é{item}" if text else item, weight) for sid, item, weight in rows]
    trie = make(named, end_token="</s>")
    for sid, items in ranked(named).items():
        leaf = trie.leaf_of(pad([sid], trie.levels))
        ids, offsets = trie.items(leaf)
        assert ids.to_pylist() == items
        assert offsets.tolist() == [0, len(items)]
        assert set(trie.leaf_of_items(items).tolist()) == set(leaf.tolist())


@SETTINGS
@given(catalogues())
def test_lookups_of_what_is_not_there_give_minus_one(rows):
    trie = make(rows)
    known = {sid for sid, _, _ in rows}
    sizes = [range(-1, size + 2) for size in trie.codebook_sizes]
    every = list(product(*sizes))
    leaves = trie.leaf_of(np.array(every))
    assert {sid for sid, leaf in zip(every, leaves, strict=True) if leaf >= 0} == known
    assert trie.leaf_of_items([1000, -1000]).tolist() == [-1, -1]
    assert trie.leaf_of_items([]).tolist() == []


@SETTINGS
@given(catalogues(short=True), st.integers(1, 45))
def test_capacity_is_the_sum_of_the_largest_degrees(rows, width):
    trie = make(rows, end_token="</s>")
    assert trie.capacity(0, width) == trie.num_nodes[0]
    for level in range(1, trie.levels):
        degrees = np.sort(np.diff(trie.child_ptr[level - 1].astype(int)))[::-1]
        assert trie.capacity(level, width) == min(trie.num_nodes[level], degrees[:width].sum())


@SETTINGS
@given(catalogues())
def test_global_numbers_agree_with_the_levels(rows):
    trie = make(rows)
    first, codes = trie.first_child(), trie.node_codes()

    def below(node, level):
        if level == trie.levels:
            return [((), node)]
        children = range(first[node], first[node + 1])
        return [((int(codes[n]), *sid), leaf) for n in children for sid, leaf in below(n, level + 1)]

    found = below(0, 0)
    assert [sid for sid, _ in found] == walk(trie)
    assert [leaf - trie.leaf_offset for _, leaf in found] == list(range(trie.num_leaves))
    assert len(first) == sum(trie.num_nodes[:-1]) + 2
    assert len(codes) == sum(trie.num_nodes) + 1


@SETTINGS
@given(catalogues(), st.randoms(use_true_random=False))
def test_a_view_is_the_trie_of_its_items(rows, rng: random.Random):
    trie = make(rows)
    one, other = ({item for _, item, _ in rows if rng.random() < 0.6} for _ in "ab")
    for name, items in (("one", one), ("other", other)):
        live = np.zeros(trie.manifest.num_items, bool)
        live[trie.rows_of_items(sorted(items))[0]] = True
        trie = trie.with_view(name, live)
    words = trie.live_mask("one", "other")
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: trie.level_offset[-1]].astype(bool)
    kept = {sid for sid, item, _ in rows if item in one & other}
    prefixes = [walk_prefixes(trie, level) for level in range(trie.levels)]
    expected = [bool(kept)] + [any(sid[: len(p)] == p for sid in kept) for level in prefixes for p in level]
    assert bits.tolist() == expected
    assert len(words) == -(-trie.level_offset[-1] // 32)


def walk_prefixes(trie, level):
    """Prefix of each node of a level."""
    return sorted({sid[: level + 1] for sid in walk(trie)})


def write(rows: list[Row], cuts: list[int], memory_limit: int, folder: Path, text: bool) -> Trie:
    """Build with the rows in pieces; a small limit makes many runs."""
    store, bounds = RowStore(folder, memory_limit), [0, *sorted(cuts), len(rows)]
    for start, end in pairwise(bounds):
        if piece := rows[start:end]:
            ids = [f"i{item}" if text else item for _, item, _ in piece]
            kind = pa.large_string() if text else pa.int64()
            weights = np.array([weight for _, _, weight in piece])
            store.add(ItemRows(pad([sid for sid, _, _ in piece], 3), pa.array(ids, kind), weights))
    layout = Layout((7, 7, 7), "</s>")
    return Trie.open(build_trie(store, layout, folder, memory_limit=memory_limit, on_conflict="first"))


@SETTINGS
@given(catalogues(short=True), st.randoms(use_true_random=False), st.booleans(), st.booleans())
def test_any_order_split_and_memory_limit_give_equal_bytes(rows, rng: random.Random, text, repeats):
    rows = rows + rng.choices(rows, k=5) * repeats + [(rows[0][0], rows[-1][1], 0.0)] * repeats
    digests = set()
    for memory_limit in (1, 3000, 1 << 30):
        rng.shuffle(rows)
        cuts = [rng.randrange(len(rows) + 1) for _ in range(3)]
        with TemporaryDirectory() as folder:
            trie = write(rows, cuts, memory_limit, Path(folder), text)
            digests.add((trie.content_digest, *sorted(trie.manifest.digests.items())))
    assert len(digests) == 1


@SETTINGS
@given(catalogues(short=True))
def test_a_file_holds_what_was_built(rows):
    built = make(rows, end_token="</s>")
    with TemporaryDirectory() as folder:
        trie = write(rows, [], 1 << 30, Path(folder), text=False)
        assert trie.item_weights is not None
        assert {
            tuple(c for c in sid if c >= 0) for sid in trie.sids(np.arange(trie.num_leaves)).tolist()
        } == {sid for sid, _, _ in rows}
        assert trie.item_ids.to_pylist() == built.item_ids.to_pylist()


@given(st.lists(st.integers(1, 9), min_size=1))
def test_group_sizes_count_every_group(sizes):
    ptr = np.append(0, np.cumsum(sizes)).astype(np.uint32)
    assert group_sizes(ptr).tolist() == np.bincount(sizes).tolist()
