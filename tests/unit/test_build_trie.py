"""`grinf build-trie` as a job: inputs of every kind, each fault by its name, and nothing half-written."""

import errno
import tracemalloc
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grinf.config.load import resolve
from grinf.config.settings import BuildTrieSettings
from grinf.errors import DataError, ExitCode, StorageError, UsageError
from grinf.jobs import item_files
from grinf.jobs.build_trie import default_output, run_build_trie
from grinf.jobs.catalogue import skewed_catalogue, uniform_catalogue
from grinf.jobs.trie_tools import export_trie, lookup_items, lookup_sids, verify_trie
from grinf.trie import Trie, store, view_file
from grinf.trie.manifest import TokenSource


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def save(name="items.parquet", **columns):
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), name)
    return name


def build(*items, **settings):
    report = run_build_trie(
        resolve(BuildTrieSettings, {"items": list(items or ["items.parquet"]), **settings}, None),
        lambda stage, done, total: None,
    )
    assert not list(Path().rglob("*.tmp-*"))
    return report


def built(*items, **settings) -> Trie:
    report = build(*items, **settings)
    assert report.trie is not None
    return report.trie


def refused(kind, *items, **settings):
    with pytest.raises(kind) as error:
        build(*items, **settings)
    assert not list(Path("tries").glob("*"))
    return str(error.value)


def catalogue(trie):
    """Items by SID."""
    sids = [
        tuple(code for code in sid if code >= 0) for sid in trie.sids(np.arange(trie.num_leaves)).tolist()
    ]
    ids, offsets = trie.items(np.arange(trie.num_leaves))
    flat = ids.to_pylist()
    return {sid: flat[a:b] for sid, (a, b) in zip(sids, pairwise(offsets), strict=True)}


SMALL = {"item_id": [10, 11, 12], "sid": [[1, 2, 3], [1, 2, 4], [0, 5, 6]]}


def test_a_plain_catalogue(tmp_path):
    save(**SMALL)
    report = build()
    assert report.status == "built"
    assert report.output == Path("tries/items.grtrie")
    assert report.trie is not None
    assert catalogue(report.trie) == {(0, 5, 6): [12], (1, 2, 3): [10], (1, 2, 4): [11]}
    assert report.trie.codebook_sizes == (2, 6, 7)
    assert report.trie.content_digest == Trie.open("tries/items.grtrie").content_digest
    assert [path.name for path in (tmp_path / "tries").iterdir()] == ["items.grtrie"]


def test_f11_fewer_candidates_than_beams_is_no_fault():
    trie = built(save(**SMALL))
    assert [trie.capacity(level, 900) for level in range(3)] == [2, 2, 3]


def test_f15_one_sid_in_two_spellings_is_one_node():
    trie = built(save(item_id=[1, 2, 3], sid=["03-9-1", "3-9-1", "3-09-1"]))
    assert catalogue(trie) == {(3, 9, 1): [1, 2, 3]}


def test_f40_a_null_sid_takes_its_own_id_with_it():
    name = save(item_id=[10, 11, 12], sid=[[1, 2, 3], None, [4, 5, 6]])
    said = refused(DataError, name)
    assert "1 of 3 rows cannot be used (SID is null: 1)" in said
    assert "items.parquet row 1 (item_id=11, sid=None): SID is null" in said
    trie = built(name, on_bad_row="drop")
    assert catalogue(trie) == {(1, 2, 3): [10], (4, 5, 6): [12]}
    assert trie.manifest.rows_dropped == {"SID is null": 1}
    assert trie.manifest.rows_read == 3


def test_f42_row_groups_are_read_in_pieces(monkeypatch):
    monkeypatch.setattr(item_files, "BATCH_ROWS", 7)
    ids, codes = uniform_catalogue(100)
    sid = pa.array(codes.tolist(), pa.large_list(pa.int32()))
    pq.write_table(pa.table({"item_id": ids, "sid": sid}), "items.parquet", row_group_size=100)
    assert built().num_leaves == 100


def test_f46_empty_shards_are_skipped_and_an_empty_catalogue_is_an_error():
    save("part/a.parquet", item_id=pa.array([], pa.int64()), sid=pa.array([], pa.list_(pa.int32())))
    save("part/b.parquet", item_id=pa.nulls(0), sid=pa.nulls(0))
    pq.ParquetWriter("part/c.parquet", pa.schema([("item_id", pa.int64()), ("sid", pa.string())])).close()
    assert "the catalogue is empty" in refused(DataError, "part")
    save("part/d.parquet", **SMALL)
    assert built("part").num_leaves == 3
    save("nulls.parquet", item_id=pa.array([1, 2]), sid=pa.nulls(2))
    assert "none is left" in refused_without_output("nulls.parquet", on_bad_row="drop")


def refused_without_output(*items, **settings):
    with pytest.raises(DataError) as error:
        build(*items, **settings)
    return str(error.value)


@pytest.mark.parametrize(
    ("bad", "value"),
    [([-1, 0, 0], "[-1, 0, 0]"), ([0, 8, 0], "[0, 8, 0]"), ([2**40, 0, 0], "[1099511627776, 0, 0]")],
)
def test_f49_codes_out_of_range_are_named(bad, value):
    name = save(item_id=[1, 2], sid=[[0, 1, 2], bad])
    said = refused(DataError, name, codebook_sizes="8,8,8")
    assert f"items.parquet row 1 (item_id=2, sid={value}): code is not in the codebook" in said
    assert built(name, codebook_sizes="8,8,8", on_bad_row="drop").num_leaves == 1


def test_f49_unsorted_input_is_sorted():
    assert list(catalogue(built(save(item_id=[1, 2, 3], sid=[[1, 2, 3], [0, 1, 1], [1, 2, 4]])))) == [
        (0, 1, 1),
        (1, 2, 3),
        (1, 2, 4),
    ]


def test_f51_items_of_a_sid_are_ordered_by_weight():
    sid = [[1, 2]] * 4
    name = save(item_id=[1, 2, 3, 4], sid=sid, count=[1.0, 9.0, float("nan"), 3.0])
    assert "row 2 (item_id=3, sid=[1, 2], count=nan): weight is null or NaN" in refused(
        DataError, name, weight_column="count"
    )
    trie = built(name, weight_column="count", on_bad_row="drop")
    assert catalogue(trie) == {(1, 2): [2, 4, 1]}
    ties = save("ties.parquet", item_id=["b", "a", "c"], sid=[[1, 2]] * 3, count=[5, 5, 7])
    assert catalogue(built(ties, weight_column="count")) == {(1, 2): ["c", "a", "b"]}


def test_f52_every_sid_leads_back_to_its_items():
    trie = built(save(**SMALL))
    assert trie.items(trie.leaf_of(np.array([[1, 2, 4]])))[0].to_pylist() == [11]
    assert trie.leaf_of_items([12, 10, 99]).tolist() == [0, 1, -1]


def test_mixed_depth_is_refused_with_a_histogram():
    name = save(item_id=[1, 2, 3], sid=[[3, 9, 1], [3, 9], [4, 0, 0]])
    said = refused(DataError, name)
    assert "2 codes: 1 rows, 3 codes: 2 rows" in said
    assert "row 1 (item_id=2, sid=[3, 9])" in said
    assert "--end-token" in said
    trie = built(name, end_token="</s>")
    assert catalogue(trie) == {(3, 9): [2], (3, 9, 1): [1], (4, 0, 0): [3]}
    assert trie.end_codes == (None, 10, 2)
    assert catalogue(built(name, on_bad_row="drop", output="b.grtrie")) == {(3, 9, 1): [1], (4, 0, 0): [3]}


def test_codebook_sizes_say_the_depth():
    name = save(item_id=[1, 2, 3], sid=[[3, 9], [3, 9], [4, 0, 0]])
    assert "SID has another number of codes: 2" in refused(DataError, name, codebook_sizes="10,10,10")
    trie = built(name, codebook_sizes="10,10,10", end_token="</s>")
    assert trie.levels == 3


def test_an_item_on_several_sids():
    rows = {"item_id": [7, 7, 8, 7], "sid": [[2, 2], [1, 1], [1, 1], [1, 1]], "w": [5.0, 1.0, 0.0, 2.0]}
    name = save(**rows)
    assert "item 7: 1-1 and 2-2" in refused(DataError, name)
    assert catalogue(built(name, on_item_conflict="first")) == {(1, 1): [7, 8]}
    by_weight = built(name, on_item_conflict="first", weight_column="w", output="w.grtrie")
    assert catalogue(by_weight) == {(1, 1): [8], (2, 2): [7]}
    assert by_weight.manifest.rows_dropped == {
        "item and SID are there already": 1,
        "item has a better SID": 1,
    }
    both = built(name, on_item_conflict="all", output="all.grtrie")
    assert catalogue(both) == {(1, 1): [7, 8], (2, 2): [7]}
    assert both.manifest.items_on_several_sids == 1
    assert both.rows_of_items([7, 9, 8])[1].tolist() == [0, 2, 2, 3]


def test_columns_of_levels_offsets_and_packing():
    expected = {(1, 2, 3): [10], (1, 2, 4): [11], (0, 5, 6): [12]}
    sids = np.array(SMALL["sid"])
    columns = {f"codebook_lv{level + 1}": sids[:, level] for level in range(3)}
    assert catalogue(built(save("lv.parquet", item_id=[10, 11, 12], **columns))) == expected
    shifted = (sids + np.array([0, 8, 16])).tolist()
    offset = save("offset.parquet", item_id=[10, 11, 12], sid=shifted)
    assert catalogue(built(offset, offset_codes=True, codebook_sizes="8,8,8")) == expected
    packed = save("packed.parquet", item_id=[10, 11, 12], sid=sids @ [64, 8, 1])
    trie = built(packed, sid_format="packed:8x3")
    assert catalogue(trie) == expected
    assert trie.codebook_sizes == (8, 8, 8)
    assert "--offset-codes needs --codebook-sizes" in refused_usage(
        "offset.parquet", offset_codes=True, output="x"
    )


def refused_usage(*items, **settings):
    with pytest.raises(UsageError) as error:
        build(*items, **settings)
    return str(error.value)


@pytest.mark.parametrize(
    ("column", "said"),
    [
        ("itemid", "did you mean 'item_id'?"),
        ("nothing", "the columns are: item_id, sid"),
    ],
)
def test_missing_columns_are_named(column, said):
    assert said in refused(UsageError, save(**SMALL), item_column=column)


def test_columns_that_cannot_be_found_or_used():
    assert "no column looks like item ids" in refused(UsageError, save(x=[1], sid=[[1]]))
    assert "no column looks like SIDs" in refused(UsageError, save(item_id=[1], x=[[1]]))
    assert "is of type double" in refused(UsageError, save(item_id=[1.0], sid=[[1]]))
    assert "weights are numbers" in refused(UsageError, save(**SMALL, w=["a", "b", "c"]), weight_column="w")
    big = pa.array([2**63, 1, 2], pa.uint64())
    assert "does not fit in int64" in refused(UsageError, save(**(SMALL | {"item_id": big})))
    save("two/a.parquet", **SMALL)
    save("two/b.parquet", item_id=["x"], sid=[[1, 2, 3]])
    assert "is string here and int64 before" in refused(UsageError, "two")
    save("two/b.parquet", item_id=[1], other=[[1, 2, 3]])
    assert "two/b.parquet has no column 'sid'" in refused(UsageError, "two")


def test_null_ids_are_bad_rows():
    said = refused(DataError, save(item_id=[1, None], sid=[[1], [2]]))
    assert "row 1 (item_id=None, sid=[2]): item id is null" in said


def test_every_bad_row_is_counted_and_a_few_are_shown():
    said = refused(DataError, save(item_id=list(range(9)), sid=[None] * 8 + [[1]]))
    assert "8 of 9 rows" in said
    assert said.count("items.parquet row ") == 5
    assert "and 3 more" in said


def test_files_folders_and_patterns():
    save("data/dt=1/a.parquet", **SMALL)
    save("data/dt=2/b.parquet", item_id=[20], sid=[[9, 9, 9]])
    save("data/_temporary/c.parquet", item_id=[30], sid=[[8, 8, 8]])
    for number, items in enumerate(
        (["data"], ["data/*"], ["data/**/[ab].parquet"], ["data", "data/dt=1/a.parquet"])
    ):
        assert built(*items, output=f"{number}.grtrie").num_leaves == (5 if items == ["data/*"] else 4)
    assert "no parquet file at dada" in refused_usage("dada")
    assert "did you mean data?" in refused_usage("dada")
    Path("empty").mkdir()
    assert "a folder must hold" in refused_usage("empty")
    Path("no.parquet").write_bytes(b"PAR1 not really")
    assert "no.parquet is not readable as parquet" in refused_without_output("no.parquet")
    assert default_output(Path("data/*.parquet")) == Path("tries/data.grtrie")


def test_a_damaged_file_is_named(monkeypatch):
    name = save(item_id=list(range(1000)), sid=[[n, n + 1] for n in range(1000)])
    data = bytearray(Path(name).read_bytes())
    data[4:60] = bytes(56)
    Path(name).write_bytes(data)
    assert "items.parquet cannot be read past row 0" in refused(DataError, name)


def test_the_same_build_is_not_done_again():
    first = build(save(**SMALL))
    changed = first.output.stat().st_mtime_ns
    assert build().status == "unchanged"
    save("copy/other.parquet", **SMALL)
    assert build("copy/other.parquet", output=str(first.output), memory_limit="64MiB").status == "unchanged"
    assert first.output.stat().st_mtime_ns == changed
    assert "other inputs or settings" in refused_usage("items.parquet", codebook_sizes="9,9,9")
    save(item_id=[1], sid=[[1, 1, 1]])
    assert "other inputs or settings" in refused_usage("items.parquet")
    assert built(overwrite=True).num_leaves == 1


def test_an_output_that_is_no_trie_is_not_replaced_unasked():
    save(**SMALL)
    Path("x").write_text("precious")
    for overwrite in (False, True):
        said = refused_usage("items.parquet", output="x", overwrite=overwrite)
        assert "x exists\n`grinf build-trie` did not write it\nmove it away" in said
        assert Path("x").read_text() == "precious"
    Path("folder").mkdir()
    said = refused_usage("items.parquet", output="folder", overwrite=True)
    assert "folder is a folder" in said
    assert "--overwrite" not in said


def test_a_damaged_trie_is_replaced_when_asked():
    path = build(save(**SMALL)).output
    for damaged in (path.read_bytes()[:-1], path.read_bytes()[:80]):
        path.write_bytes(damaged)
        assert "--overwrite" in refused_usage("items.parquet")
        assert built(overwrite=True).num_leaves == 3


def test_views_of_someone_else_are_not_removed():
    save(**SMALL)
    Path("t.grtrie.views").write_text("mine")
    said = refused_usage("items.parquet", output="t.grtrie", overwrite=True)
    assert "t.grtrie.views is in the way" in said
    assert Path("t.grtrie.views").read_text() == "mine"
    save("x.grtrie.views", **SMALL)
    said = refused_usage("x.grtrie.views", output="x.grtrie")
    assert "would replace the input" in said


@pytest.mark.parametrize(
    "place", ["items.parquet", "./x/../items.parquet", "link.parquet", "tries/../items.parquet"]
)
@pytest.mark.parametrize("given", ["items.parquet", "link.parquet", ".", "*.parquet"])
def test_an_input_is_never_the_output(place, given):
    save(**SMALL)
    Path("x").mkdir()
    Path("tries").mkdir()
    Path("link.parquet").symlink_to("items.parquet")
    before = Path("items.parquet").read_bytes()
    assert "would replace the input" in refused_usage(given, output=place, overwrite=True)
    assert Path("items.parquet").read_bytes() == before
    assert Path("link.parquet").is_symlink()


def test_an_output_is_not_put_where_the_next_run_reads_it():
    save("data/items.parquet", **SMALL)
    said = refused_usage("data", output="data/new/out.parquet")
    assert "would read it as an input the next time" in said
    assert built("data", output="data/items.grtrie").num_leaves == 3
    assert built("data", output="data/_new/out.parquet").num_leaves == 3


def test_a_dry_run_writes_nothing():
    report = build(save(**SMALL), dry_run=True)
    assert report.status == "planned"
    assert report.trie is None
    assert report.sources[0].rows == 3
    assert not Path("tries").exists()
    save(item_id=[1, 2], sid=[[1], None])
    assert "SID is null" in refused(DataError, dry_run=True)
    save(item_id=[1, 2], sid=[[1], [1, 2]])
    assert "different numbers of codes" in refused(DataError, dry_run=True)
    save(**SMALL)
    assert "does not fit SIDs of 3 levels" in refused(UsageError, dry_run=True, token_base="1,2")
    assert [path.name for path in Path().iterdir()] == ["items.parquet"]


def test_a_full_disk_leaves_nothing_behind(monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store, "write_container", full)
    save(**SMALL)
    with pytest.raises(StorageError, match=r"cannot write tries/items.grtrie") as error:
        build()
    assert error.value.exit_code == ExitCode.IO
    assert not list(Path("tries").iterdir())


def test_tokens_by_base():
    name = save(item_id=[1, 2], sid=[[3, 9, 1], [3, 9]])
    trie = built(name, token_base="100,200,300", end_token="7")
    assert trie.token_ids is not None
    assert [ids.tolist()[-1] for ids in trie.token_ids] == [103, 7, 7]
    assert trie.manifest.tokens == TokenSource(bases=(100, 200, 300))
    assert "has no known token id" in refused_usage(
        name, token_base="100,200,300", end_token="</s>", output="x"
    )


def not_utf8():
    """Three texts, of which the middle one is no text."""
    offsets = pa.py_buffer(np.array([0, 5, 7, 12], np.int32))
    return pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"1-2-3\xff\xfe1-2-4")])


@pytest.mark.parametrize("column", ["item_id", "sid", "sids"])
def test_texts_that_are_not_utf8_are_bad_rows(column):
    texts = not_utf8()
    if column == "sids":
        texts = pa.ListArray.from_arrays([0, 1, 2, 3], texts)
    table = {"item_id": [10, 11, 12], "sid": SMALL["sid"]}
    table |= {"item_id" if column == "item_id" else "sid": texts}
    said = refused(DataError, save(**table))
    assert "items.parquet row 1" in said
    assert "text is not UTF-8" in said
    assert r"\xff\xfe" in said
    assert built(on_bad_row="drop").manifest.rows_dropped == {"text is not UTF-8": 1}
    encoded = pa.DictionaryArray.from_arrays([0, 1, 2], not_utf8())
    said = refused_without_output(save("e.parquet", item_id=[1, 2, 3], sid=encoded))
    assert "e.parquet cannot be read past row 0" in said


def test_weights_may_be_texts_of_numbers_and_only_the_bad_one_is_blamed():
    offsets = pa.py_buffer(np.array([0, 1, 3, 4], np.int32))
    weights = pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"1\xff\xfe2")])
    save(**SMALL, w=weights)
    assert "row 1" in refused(DataError, weight_column="w")
    assert built(weight_column="w", on_bad_row="drop").manifest.num_items == 2


def test_columns_of_one_name_are_refused():
    sid = pa.array(SMALL["sid"])
    pq.write_table(
        pa.Table.from_arrays([pa.array([1, 2, 3]), sid, sid], ["item_id", "sid", "sid"]), "d.parquet"
    )
    assert "d.parquet has columns of the same name\nitem_id, sid, sid" in refused_without_output("d.parquet")


@pytest.mark.parametrize("code", [10**8, 2**31 - 2])
def test_a_stray_code_takes_no_memory(code):
    name = save(item_id=[1, 2], sid=[[1, 2], [1, code]])
    tracemalloc.start()
    try:
        for options in ({}, {"token_base": "1,2"}, {"dry_run": True}, {"codebook_sizes": f"2,{code + 1}"}):
            said = refused(DataError, name, **options)
            assert f"level 1 has codes up to {code:,}" in said
            assert "--codebook-sizes" in said
        assert f"row 1 (item_id=2, sid=[1, {code}])" in refused(DataError, name, codebook_sizes="4,4")
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()


def test_bases_are_checked_before_anything_is_made_of_them():
    name = save(item_id=[1, 2], sid=[[1, 2], [1, 3_000_000]])
    tracemalloc.start()
    try:
        with pytest.raises(UsageError, match="leaves the range of token ids"):
            build(name, token_base=f"0,{2**31 - 5}")
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("sizes", ["4,4", "4,4,4,4"])
def test_sizes_of_another_number_of_levels_are_the_flags_fault(sizes):
    save(item_id=[1, 2], sid=[[1, 2, 3], [0, 0, 0]])
    for bad in ("error", "drop"):
        said = refused(UsageError, codebook_sizes=sizes, on_bad_row=bad)
        assert f"--codebook-sizes {sizes} is for SIDs of {len(sizes.split(','))} codes, they have 3" in said


def test_settings_that_no_row_can_fit_are_refused():
    save(**SMALL)
    assert "--codebook-sizes 0,4,5: a level has no codes" in refused(UsageError, codebook_sizes="0,4,5")
    said = refused(UsageError, memory_limit="1KiB")
    assert "--memory-limit is 1,024 bytes" in said
    assert "64MiB" in said
    save(item_id=[1], sid=[[1.0, 2.0]])
    assert "cast the codes to integers" in refused(UsageError)


def test_one_level_in_one_column():
    trie = built(save(item_id=[1, 2], sid_0=[7, 5]))
    assert catalogue(trie) == {(5,): [2], (7,): [1]}


@pytest.mark.parametrize("order", [1, -1])
def test_two_spellings_are_refused_in_any_order_and_split(order):
    texts = [f"{n}-1-2" for n in range(1500)] + [f"{n},1,2" for n in range(1500, 2400)]
    ids = list(range(2400))
    save("one.parquet", item_id=ids[::order], sid=texts[::order])
    save("two/a.parquet", item_id=ids[:1500], sid=texts[:1500])
    save("two/b.parquet", item_id=ids[1500:], sid=texts[1500:])
    for name in ("one.parquet", "two"):
        said = refused(UsageError, name, on_bad_row="drop")
        assert "spells SIDs in two ways" in said
    trie = built("one.parquet", on_bad_row="drop", sid_format=r"regex:(\d+)-(\d+)-(\d+)")
    assert trie.num_leaves == 1500


ROW = st.tuples(
    st.one_of(st.integers(0, 30), st.none()),
    st.sampled_from(["1-2-3", "01-2-3", "1-2", "5", "4-4-4", "junk", "", "1--2", "0-0-0", None]),
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ROW, min_size=1, max_size=30), st.randoms(use_true_random=False), st.integers(0, 30))
def test_neither_order_nor_split_decides_what_is_dropped(rows, rng, cut):
    def outcome(*parts):
        names = []
        for number, part in enumerate(part for part in parts if part):
            ids, sids = zip(*part, strict=True)
            columns = {"item_id": pa.array(ids, pa.int64()), "sid": pa.array(sids, pa.string())}
            names.append(save(f"part-{number}.parquet", **columns))
        options = {"on_bad_row": "drop", "on_item_conflict": "first", "overwrite": True}
        try:
            trie = built(*names, **options)
        except (UsageError, DataError) as error:
            return type(error), error.what if isinstance(error, DataError) else ""
        return trie.content_digest, trie.manifest.rows_dropped

    expected = outcome(rows)
    rng.shuffle(rows)
    assert outcome(rows[:cut], rows[cut:]) == expected


def test_sids_wider_than_one_word_of_64_bits():
    rng = np.random.default_rng(0)
    sids = np.unique(rng.integers(0, 2**13, (300, 6)), axis=0)
    sids[:100, :5] = sids[0, :5]
    sids = rng.permutation(np.unique(sids, axis=0))
    trie = built(save(item_id=np.arange(len(sids)), sid=sids.tolist()), codebook_sizes=",".join(["8192"] * 6))
    assert trie.sids(np.arange(trie.num_leaves)).tolist() == sorted(sids.tolist())
    assert np.array_equal(trie.sids(trie.leaf_of_items(np.arange(len(sids)))), sids)


def test_a_code_beyond_sixteen_bits():
    trie = built(save(item_id=[1, 2], sid=[[70_000, 1], [5, 0]]))
    assert trie.codes[0].dtype == np.uint32
    assert trie.node_codes().dtype == np.uint32
    assert trie.sids(np.arange(2)).tolist() == [[5, 0], [70_000, 1]]


def test_tools_on_a_trie():
    save(item_id=["b", "a", "c"], sid=["3-9", "3-9", "1"], w=[1, 2, 3])
    path = build(end_token="</s>", weight_column="w").output
    trie = Trie.open(path)
    assert [found.item_ids for found in lookup_sids(trie, ["3-9", "<a_1>", "4"])] == [["a", "b"], ["c"], []]
    assert [found.sid for found in lookup_items(trie, ["b", "z"])] == [[3, 9], []]
    with pytest.raises(UsageError, match="is no SID of 2 codes"):
        lookup_sids(trie, ["1-2-3"])
    assert export_trie(path, Path("out.parquet"), overwrite=False, on_progress=lambda *_: None) == 2
    assert pq.read_table("out.parquet").to_pylist() == [
        {"sid": [1], "item_id": ["c"], "weight": [3.0]},
        {"sid": [3, 9], "item_id": ["a", "b"], "weight": [2.0, 1.0]},
    ]
    assert export_trie(path, Path("out.parquet"), overwrite=False, on_progress=lambda *_: None) is None
    assert export_trie(path, Path("out.parquet"), overwrite=True, on_progress=lambda *_: None) == 2
    for other in (path, view_file.path_of(path), Path("items.parquet"), Path("tries")):
        before = other.read_bytes() if other.is_file() else b""
        with pytest.raises(UsageError):
            export_trie(path, other, overwrite=True, on_progress=lambda *_: None)
        assert not before or other.read_bytes() == before
    dry = {"overwrite": False, "on_progress": lambda *_: None, "dry_run": True}
    assert export_trie(path, Path("new.parquet"), **dry) == 0
    assert not Path("new.parquet").exists()
    assert all(check.is_sound for check in verify_trie(path))
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    assert [check.name for check in verify_trie(path) if not check.is_sound] == ["item.utf8"]


def test_integer_items_are_looked_up_by_number():
    trie = built(save(**SMALL))
    assert lookup_items(trie, ["12"])[0].sid == [0, 5, 6]
    for text in ("x", str(2**70), "", "1_2", "+12", " 12", "012", "\u0661\u0662"):
        with pytest.raises(UsageError, match="is no item id"):
            lookup_items(trie, [text])


def test_the_synthetic_catalogues_are_the_same_everywhere():
    ids, codes = skewed_catalogue(5)
    assert ids.dtype == np.int64
    assert codes.dtype == np.int32
    assert ids.tolist() == [2, 4, 1, 3, 0]
    assert codes.tolist()[0] == [31, 1212, 3703]
    assert uniform_catalogue(1000)[1].max() < 8192
