"""`grinf recall` with filters: every answer is that of a catalogue that was built without the other items."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grinf.config.settings import BuildTrieSettings
from grinf.errors import UsageError
from grinf.jobs.build_trie import run_build_trie
from grinf.jobs.recall import filters as filters_module
from grinf.jobs.recall.filters import Filters
from grinf.jobs.trie_views import delete_items, store_view
from grinf.trie import Trie, trie_of
from tests.cli.test_app import run
from tests.recall_world import CODES, END, LEVELS, World, ignore, make_world, write

IDS = pa.list_(pa.int64())


@dataclass(frozen=True)
class Catalogue:
    """Rows of (item, SID, weight); an item may be on several SIDs."""

    rows: list[tuple[int, tuple[int, ...], float]]
    has_short: bool

    def build(self, world: World, path: Path) -> Path:
        ids, sids, weights = zip(*self.rows, strict=True)
        items = write(path.with_suffix(".parquet"), {"item_id": ids, "sid": sids, "weight": weights})
        given = {"items": [str(items)], "output": str(path), "weight_column": "weight"}
        tokens = {
            "tokenizer": str(world.model),
            "token_template": "<{letter}_{code}>",
            "codebook_sizes": "8,8,8",
        }
        short = {"end_token": END} if self.has_short else {}
        merged = given | tokens | short | {"on_item_conflict": "all"}
        run_build_trie(BuildTrieSettings.model_validate(merged), ignore)
        return path

    def only(self, live: set[int]) -> "Catalogue":
        return replace(self, rows=[row for row in self.rows if row[0] in live])


def make_catalogue(rng: np.random.Generator, *, short: bool) -> Catalogue:
    """Some 40 rows on few SIDs, so that items share SIDs and prefixes; one SID has every level."""
    codes = rng.integers(0, 3, (40, LEVELS)).tolist()
    depth = rng.integers(1, LEVELS + 1, 40) if short else np.full(40, LEVELS)
    depth[0] = LEVELS
    ids = rng.integers(100, 135, 40).tolist()
    rows = zip(ids, codes, depth, rng.integers(0, 3, 40), strict=True)
    return Catalogue(
        [(item, tuple(sid[:levels]), float(weight)) for item, sid, levels, weight in rows], short
    )


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("filters"))


def rows_of(path: Path) -> list[dict[str, Any]]:
    return pq.read_table(path).to_pylist()


@dataclass(frozen=True)
class Search:
    """A catalogue with filters, and queries that have lists; `live` are the items that each query may see."""

    catalogue: Catalogue
    queries: dict[str, Any]
    changes: dict[str, Any]
    live: list[set[int]]


def draw_search(
    world: World, folder: Path, rng: np.random.Generator, filters: set[str], *, short: bool
) -> Search:
    """Make a catalogue and the filters that are named."""
    catalogue = make_catalogue(rng, short=short)
    trie = catalogue.build(world, folder / "whole.grtrie")
    ids = sorted({row[0] for row in catalogue.rows})

    def some(share: float) -> list[int]:
        return [item for item in ids if rng.random() < share]

    def save(items: list[int]) -> list[Path]:
        return [write(folder / "ids.parquet", {"item_id": pa.array(items, pa.int64())})]

    queries: dict[str, Any] = {"input_ids": [rng.integers(0, 50, 9).tolist() for _ in range(3)]}
    queries["target"] = [rng.choice(ids, 4, replace=False).tolist() for _ in range(3)]
    changes: dict[str, Any] = {"trie": str(trie)}
    everyone = set(ids)
    if "view" in filters:
        shown = some(0.6) or ids[:1]
        store_view(trie, "shown", save(shown), None, overwrite=False)
        changes["view"], everyone = "shown", everyone & set(shown)
    if "deleted" in filters:
        gone = some(0.3)
        delete_items(trie, save(gone), None)
        everyone -= set(gone)
    live = [everyone] * 3
    if "allow" in filters:
        allow = [some(0.4), None, some(0.1)]
        queries["may"], changes["allow_column"] = pa.array(allow, IDS), "may"
        live = [items if may is None else items & set(may) for items, may in zip(live, allow, strict=True)]
    if "deny" in filters:
        deny = [None, some(0.5), some(0.3)]
        queries["seen"], changes["deny_column"] = pa.array(deny, IDS), "seen"
        live = [items - set(seen or ()) for items, seen in zip(live, deny, strict=True)]
    return Search(catalogue, queries, changes, live)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**16),
    short=st.booleans(),
    names=st.sets(st.sampled_from(["view", "deleted", "allow", "deny"]), min_size=1),
    expand=st.sampled_from(["all", "top1"]),
    score=st.sampled_from(["vocab", "level", "children", "topk:3"]),
)
def test_a_filtered_job_equals_one_with_a_rebuilt_trie(
    world: World, seed: int, short: bool, names: set[str], expand: str, score: str
) -> None:
    common = {"beams": "4-5-6", "expand": expand, "score": score, "truth_column": "target"}
    with TemporaryDirectory() as name:
        folder = Path(name)
        search = draw_search(world, folder, np.random.default_rng(seed), names, short=short)
        report = world.recall(folder / "out.parquet", search.queries, **common, **search.changes)
        found = rows_of(folder / "out.parquet")
        for row, (one, live) in enumerate(zip(found, search.live, strict=True)):
            assert one["status"] == "ok"
            assert set(one["item_id"]) <= live
            if live:
                rebuilt = search.catalogue.only(live).build(world, folder / f"part{row}.grtrie")
                single = {key: search.queries[key][row : row + 1] for key in ("input_ids", "target")}
                world.recall(folder / f"out{row}.parquet", single, trie=str(rebuilt), **common)
                assert_same(one, *rows_of(folder / f"out{row}.parquet"))
            else:
                assert (one["beams_returned"], one["item_id"]) == (0, [])
    shares = [len(live & set(row["target"])) / 4 for row, live in zip(found, search.live, strict=True)]
    assert report.summary["metrics"]["target_in_catalogue"] == pytest.approx(np.mean(shares))
    if report.summary["metrics"]["items"]:
        hits = [bool(set(row["target"]) & set(row["item_id"][:1])) for row in found]
        assert report.summary["metrics"]["items"]["hit@1"] == pytest.approx(np.mean(hits))


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Compare answers that differ by rounding at most."""
    np.testing.assert_allclose(one["score"], other["score"], atol=2e-4)
    gaps = np.abs(np.diff(other["score"]))
    if gaps.size == 0 or gaps.min() > 1e-3:
        for column in ("sid", "item_id", "item_beam", "beams_returned"):
            assert one[column] == other[column], column


def queries_of(count: int, **columns: Any) -> dict[str, Any]:
    return {"input_ids": [[index, 3] for index in range(count)], **columns}


def test_null_is_no_list_and_an_empty_one_allows_nothing(world: World, tmp_path: Path) -> None:
    lists = pa.array([None, [], [104, None, 9999], [104]], IDS)
    report = world.recall(tmp_path / "out.parquet", queries_of(4, may=lists), beams="60", allow_column="may")
    rows = rows_of(tmp_path / "out.parquet")
    assert [row["status"] for row in rows] == ["ok"] * 4
    assert rows[0]["beams_returned"] == len(set(world.sids))
    assert (rows[1]["beams_returned"], rows[1]["sid"], rows[1]["item_id"]) == (0, [], [])
    assert rows[2]["item_id"] == rows[3]["item_id"] == [104]
    assert report.summary["unknown_items"] == 1
    assert "may" not in rows[0], "lists are for the search, and not carried along"


def test_a_single_id_and_a_column_of_nulls(world: World, tmp_path: Path) -> None:
    columns = queries_of(3, seen=pa.array([104, None, 105], pa.int32()), may=pa.nulls(3))
    world.recall(tmp_path / "out.parquet", columns, beams="60", deny_column="seen", allow_column="may")
    missing = [set(range(100, 160)) - set(row["item_id"]) for row in rows_of(tmp_path / "out.parquet")]
    assert missing == [{104}, set(), {105}]


def test_a_sid_lives_while_one_of_its_items_does(world: World, tmp_path: Path) -> None:
    first, second = world.items_of(world.sids[3])
    columns = queries_of(2, seen=[[first], [first, second]])
    world.recall(tmp_path / "all.parquet", columns, beams="60", deny_column="seen")
    world.recall(tmp_path / "top.parquet", columns, beams="60", deny_column="seen", expand="top1")
    for name in ("all.parquet", "top.parquet"):
        one, none = rows_of(tmp_path / name)
        beam = one["sid"].index(list(world.sids[3]))
        assert [i for i, b in zip(one["item_id"], one["item_beam"], strict=True) if b == beam] == [second]
        assert list(world.sids[3]) not in none["sid"]


def test_string_ids(world: World, tmp_path: Path) -> None:
    items = write(tmp_path / "items.parquet", {"item_id": [f"i{n}" for n in range(60)], "sid": world.sids})
    given = {"items": [str(items)], "output": str(tmp_path / "s.grtrie"), "token_base": "30,38,46"}
    run_build_trie(BuildTrieSettings.model_validate(given | {"codebook_sizes": "8,8,8"}), ignore)
    columns = queries_of(2, seen=[["i1", "i2"], ["nobody"]], may=[None, ["i1", "i7", "i1"]])
    changes = {"trie": str(tmp_path / "s.grtrie"), "allow_column": "may", "deny_column": "seen"}
    report = world.recall(tmp_path / "out.parquet", columns, beams="60", **changes)
    first, second = rows_of(tmp_path / "out.parquet")
    assert {f"i{n}" for n in range(60)} - set(first["item_id"]) == {"i1", "i2"}
    assert set(second["item_id"]) == {"i1", "i7"}
    assert report.summary["unknown_items"] == 1
    with pytest.raises(UsageError, match=r"column 'seen' holds list<element: int64>\nthe item ids .* string"):
        world.recall(
            tmp_path / "x.parquet", queries_of(1, seen=[[1]]), deny_column="seen", trie=changes["trie"]
        )


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (pa.array([["a"]]), "column 'seen' holds list<element: string>"),
        (pa.array([[1.0]]), "column 'seen' holds list<element: double>"),
        (pa.array([[2**63]], pa.list_(pa.uint64())), "column 'seen' holds list<element: uint64>"),
        (pa.array([True]), "column 'seen' holds bool"),
        (pa.array([[[1]]]), "the item ids of the catalogue are int64"),
    ],
)
def test_lists_of_another_type_are_refused_before_any_work(
    world: World, tmp_path: Path, column: pa.Array, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grinf.runtime.engine.Engine.load", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(UsageError) as error:
        world.recall(tmp_path / "out.parquet", queries_of(1, seen=column), deny_column="seen")
    assert said in str(error.value)
    with pytest.raises(UsageError, match="'sen'"):
        world.recall(tmp_path / "out.parquet", queries_of(1, seen=column), deny_column="sen")


def test_an_unknown_view_is_refused_with_the_names_that_exist(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grinf.runtime.engine.Engine.load", lambda *_: pytest.fail("a model was loaded"))
    trie = tmp_path / "t.grtrie"
    trie.write_bytes(world.trie.read_bytes())
    with pytest.raises(UsageError, match="no view 'old'\nit has: none"):
        world.recall(tmp_path / "out.parquet", queries_of(1), view="old", trie=str(trie))
    store_view(trie, "new", [write(tmp_path / "i.parquet", {"item_id": [100]})], None, overwrite=False)
    with pytest.raises(UsageError, match="no view 'old'\nit has: new"):
        world.recall(tmp_path / "out.parquet", queries_of(1), view="old", trie=str(trie))


def test_results_record_view_and_version_and_are_not_taken_for_each_other(
    world: World, tmp_path: Path
) -> None:
    trie, out = tmp_path / "t.grtrie", tmp_path / "out.parquet"
    trie.write_bytes(world.trie.read_bytes())
    items = write(tmp_path / "i.parquet", {"item_id": [101, 102]})

    def search(**changes: Any) -> dict[str, str]:
        world.recall(out, queries_of(1), trie=str(trie), **changes)
        metadata = pq.read_schema(out).metadata or {}
        return {key: metadata[f"grinf.{key}".encode()].decode() for key in names}

    names = ("trie_digest", "trie_version", "view", "view_digest")
    plain = search()
    assert plain["trie_version"] == plain["trie_digest"] == Trie.open(trie).content_digest
    assert (plain["view"], plain["view_digest"]) == ("", "")
    store_view(trie, "v", [items], None, overwrite=False)
    assert search() == plain, "a view that is not used is none of its business"
    with pytest.raises(UsageError, match="is of other inputs or settings"):
        search(view="v")
    seen = search(view="v", overwrite="yes")
    assert (seen["view"], seen["trie_version"]) == ("v", plain["trie_version"])
    store_view(trie, "v", [write(items, {"item_id": [101]})], None, overwrite=True)
    with pytest.raises(UsageError, match="items of the view was"):
        search(view="v")
    assert search(view="v", overwrite="yes")["view_digest"] != seen["view_digest"]
    search(overwrite="yes")
    delete_items(trie, [items], None)
    with pytest.raises(UsageError, match="catalogue was"):
        search()
    gone = search(overwrite="yes")
    assert gone["trie_version"].startswith(gone["trie_digest"] + "-")
    assert gone["trie_digest"] == plain["trie_digest"]


def test_metrics_of_a_view_smaller_than_k(world: World, tmp_path: Path) -> None:
    trie = tmp_path / "t.grtrie"
    trie.write_bytes(world.trie.read_bytes())
    items = write(tmp_path / "i.parquet", {"item_id": [120, 121]})
    store_view(trie, "v", [items], None, overwrite=False)
    columns = queries_of(2, target=[[120, 100], [100]])
    changes = {"view": "v", "trie": str(trie), "truth_column": "target"}
    report = world.recall(tmp_path / "out.parquet", columns, **changes)
    metrics = report.summary["metrics"]
    assert [name for name in metrics["items"] if name.startswith("recall@")] == ["recall@1"]
    assert metrics["target_in_catalogue"] == 0.25
    assert metrics["n_eval"] == 2


def test_a_job_does_not_make_all_masks_at_once(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, most = [0], [0]
    request, finish = filters_module.UnitFilters.request, filters_module.UnitFilters.finish

    def count_up(self: Any, *args: Any) -> Any:
        made[0] += 1
        most[0] = max(most[0], made[0])
        return request(self, *args)

    def count_down(self: Any, *args: Any) -> Any:
        made[0] -= 1
        return finish(self, *args)

    monkeypatch.setattr(filters_module.UnitFilters, "request", count_up)
    monkeypatch.setattr(filters_module.UnitFilters, "finish", count_down)
    columns = queries_of(48, seen=[[100 + row] for row in range(48)])
    columns["input_ids"] = [[1, 2]] * 48
    world.recall(tmp_path / "out.parquet", columns, deny_column="seen", max_batch="2")
    assert made == [0]
    assert most[0] <= 8
    rows = rows_of(tmp_path / "out.parquet")
    assert all(100 + row not in found["item_id"] for row, found in enumerate(rows))


def test_equal_lists_are_looked_up_once_and_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    trie = trie_of(np.arange(3000).reshape(1000, 3) % 11, range(1000), codebook_sizes=[CODES + 3] * 3)
    filters = Filters(trie, None, None, pa.field("seen", IDS))
    first = filters.narrow(None, pa.array([1, 2, 3]))
    assert filters.narrow(None, pa.array([0, 1, 2, 3]).slice(1)) is first
    assert filters.narrow(pa.array([1, 2, 3]), None) is not first
    assert filters.narrow(pa.array([], pa.int64()), None)[0].allowed is not None
    monkeypatch.setattr(filters_module, "CACHE_BYTES", 4 * first[0].num_bytes)
    for item in range(50):
        filters.narrow(None, pa.array([item]))
    assert len(filters._cache) < 10
    assert filters.narrow(None, pa.array([1, 2, 3])) is not first


def test_the_command(world: World, tmp_path: Path) -> None:
    (tmp_path / "t.grtrie").write_bytes(world.trie.read_bytes())
    store_view(
        tmp_path / "t.grtrie",
        "v",
        [write(tmp_path / "i.parquet", {"item_id": [101, 104, 107]})],
        None,
        overwrite=False,
    )
    lists = {"may": pa.array([[101, 104], None], IDS), "seen": pa.array([None, [104, 9]], IDS)}
    write(tmp_path / "q.parquet", queries_of(2, **lists))
    words = ["recall", "--input", "q.parquet", "--trie", "t.grtrie", "--json"]
    words += ["--model", str(world.model), "--beams", "9", "-o", "o.parquet", "--device", "cpu"]
    words += ["--view", "v", "--allow-column", "may", "--deny-column", "seen"]
    done = run(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [sorted(row["item_id"]) for row in rows_of(tmp_path / "o.parquet")] == [[101, 104], [101, 107]]
    assert "1 ids of allow and deny lists are not in the catalogue" in done.stderr
    told = json.loads(done.stdout)["data"]
    assert (told["unknown_items"], told["search"]["view"]) == (1, "v")
