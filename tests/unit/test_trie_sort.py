"""Sorting beyond memory is sorting."""

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest

from grinf.trie import sort
from grinf.trie.items import item_order
from grinf.trie.sort import ExternalSort, Spool, stable_argsort


@pytest.mark.parametrize("bits", [0, 1, 20, 50, 63, 64])
@pytest.mark.parametrize("n", [0, 1, 2, 5000])
def test_stable_argsort_orders_values_of_any_width(n, bits):
    rng = np.random.default_rng(bits)
    values = rng.integers(0, 2**bits, n, dtype=np.uint64, endpoint=bits < 64)
    values = np.concatenate([values, values[: n // 2]])
    assert np.array_equal(stable_argsort(values), np.argsort(values, kind="stable"))


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("max_bytes", [1, 400, 10_000, 1 << 30])
def test_external_sort_is_stable_and_never_splits_a_key(tmp_path, monkeypatch, max_bytes, text):
    monkeypatch.setattr(sort, "BLOCK_ROWS", 7)
    rng = np.random.default_rng(0)
    keys = rng.integers(-20, 20, 500)
    ids = pa.array([f"é{key}" for key in keys], pa.large_string()) if text else pa.array(keys)
    rows = pa.record_batch({"id": ids, "row": pa.array(np.arange(500))})
    sorter = ExternalSort(tmp_path / "sort", "id", item_order, max_bytes)
    for start in range(0, 500, 30):
        sorter.add(rows.slice(start, 30))
    pieces = list(sorter.drain())
    found = [(row["id"], row["row"]) for piece in pieces for row in piece.to_pylist()]
    assert found == sorted(zip(ids.to_pylist(), range(500), strict=True))
    ends = [(piece["id"][0].as_py(), piece["id"][-1].as_py()) for piece in pieces]
    assert all(last < first for (_, last), (first, _) in pairwise(ends))
    assert list((tmp_path / "sort").iterdir()) == []


def test_sorting_nothing_gives_nothing(tmp_path):
    sorter = ExternalSort(tmp_path / "sort", "id", item_order, 100)
    sorter.add(pa.record_batch({"id": pa.array([], pa.int64())}))
    assert list(sorter.drain()) == []


def test_an_empty_spool_is_empty(tmp_path):
    assert list(Spool(tmp_path / "spool", 0).drain()) == []
