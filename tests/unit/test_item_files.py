"""Catalogues as other projects write them: the same tries as from parquet, and every fault by its name."""

import io
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grinf.config.load import resolve
from grinf.config.settings import BuildTrieSettings
from grinf.errors import DataError, GrinfError, UsageError
from grinf.jobs import item_files, json_items
from grinf.jobs.build_trie import run_build_trie
from grinf.trie import Trie

SIDS = [[1, 2, 3], [1, 2, 3], [5, 6, 7], [5, 0, 0], [0, 6, 1]]
IDS = [0, 1, 2, 3, 4]
TOKENS = [[f"<{letter}_{code}>" for letter, code in zip("abc", sid, strict=True)] for sid in SIDS]
SIZES = {"codebook_sizes": "8,8,8"}


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def build(*items: str, **options: Any) -> Trie:
    given = {"items": list(items), "output": "out.grtrie", "overwrite": True, **options}
    report = run_build_trie(resolve(BuildTrieSettings, given, None), lambda *_: None)
    assert report.trie is not None
    assert not list(Path().rglob("*.tmp-*"))
    return report.trie


def refused(kind: type[GrinfError], *items: str, **options: Any) -> str:
    with pytest.raises(kind) as error:
        build(*items, **options)
    assert not Path("out.grtrie").exists()
    return str(error.value)


def save_json(name: str, value: Any) -> str:
    Path(name).write_text(json.dumps(value))
    return name


def save_lines(name: str, values: list[Any]) -> str:
    Path(name).write_text(
        "".join(f"{value if isinstance(value, str) else json.dumps(value)}\n" for value in values)
    )
    return name


def by_sid() -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for item, tokens in zip(IDS, TOKENS, strict=True):
        found.setdefault("".join(tokens), []).append(item)
    return found


def records(name: str = "sid", sids: list[Any] = SIDS) -> list[dict[str, Any]]:
    return [{"item_id": item, name: sid} for item, sid in zip(IDS, sids, strict=True)]


def token_ids() -> list[list[int]]:
    return [[100 + a, 200 + b, 300 + c] for a, b, c in SIDS]


def packed(sid: list[int]) -> int:
    return (sid[0] * 8 + sid[1]) * 8 + sid[2]


FORMS: dict[str, tuple[Any, dict[str, str]]] = {
    "items to tokens": ({str(item): tokens for item, tokens in zip(IDS, TOKENS, strict=True)}, {}),
    "items to codes": ({str(item): sid for item, sid in zip(IDS, SIDS, strict=True)}, {}),
    "items to texts": ({str(item): "".join(tokens) for item, tokens in zip(IDS, TOKENS, strict=True)}, {}),
    "items to numbers": (
        {str(item): packed(sid) for item, sid in zip(IDS, SIDS, strict=True)},
        {"sid_format": "packed:8x3", "item_column": "key"},
    ),
    "SIDs to items": (by_sid(), {}),
    "SIDs to objects": (
        {sid: [{"pid": item, "count": 1} for item in items] for sid, items in by_sid().items()},
        {},
    ),
    "codes to items": ({"-".join(map(str, SIDS[n])): [n] for n in (1, 2, 3, 4)} | {"1-2-3": [0, 1]}, {}),
    "numbers to items": (
        {"83": [0, 1], "375": [2], "320": [3], "49": [4]},
        {"sid_format": "packed:8x3"},
    ),
    "SIDs to one item": ({"1-2-3": 0, "5-6-7": 2, "5-0-0": 3, "0-6-1": 4}, {}),
    "an array of objects": (records(), {}),
}


@pytest.fixture
def expected() -> str:
    pq.write_table(pa.table({"item_id": IDS, "sid": SIDS}), "items.parquet")
    digest = build("items.parquet", **SIZES).content_digest
    Path("out.grtrie").unlink()
    return digest


@pytest.mark.parametrize("form", FORMS)
def test_json_gives_the_trie_of_parquet(expected, form):
    document, options = FORMS[form]
    trie = build(save_json("x.json", document), **SIZES, **options)
    if form == "SIDs to one item":
        assert sorted(trie.item_ids.to_pylist()) == [0, 2, 3, 4]
    else:
        assert trie.content_digest == expected
    assert trie.manifest.sources[0].path == "x.json"
    assert trie.manifest.rows_read == trie.manifest.num_items == trie.manifest.sources[0].rows


@pytest.mark.parametrize(
    ("values", "options"),
    [
        (records(), {}),
        (records("codes", TOKENS), {}),
        (records("token_ids", token_ids()), {"token_base": "100,200,300"}),
        ([{"id": i, "sid_0": a, "sid_1": b, "sid_2": c} for i, (a, b, c) in enumerate(SIDS)], {}),
        (
            [{"iid": i, "tok": t} for i, t in enumerate(token_ids())],
            {"sid_column": "tok", "sid_format": "token-ids", "token_base": "100,200,300"},
        ),
    ],
)
def test_json_lines_give_the_trie_of_parquet(values, options, monkeypatch):
    pq.write_table(pa.table({"item_id": IDS, "sid": SIDS}), "items.parquet")
    tokens = {key: value for key, value in options.items() if key == "token_base"}
    whole = build("items.parquet", **SIZES, **tokens).content_digest
    monkeypatch.setattr(json_items, "BATCH_ROWS", 2)
    for name in ("x.jsonl", "x.ndjson", "x.json", "unnamed"):
        trie = build(save_lines(name, values), **SIZES, **options)
        assert (trie.content_digest, trie.manifest.rows_read) == (whole, 5)


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.int16, ">i4"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_an_array_gives_the_trie_of_parquet(expected, dtype, order, monkeypatch):
    monkeypatch.setattr(item_files, "BATCH_ROWS", 2)
    np.save("x.npy", np.array(SIDS, dtype, order=order))
    assert build("x.npy", **SIZES).content_digest == expected


def test_token_ids_of_parquet_too(expected):
    pq.write_table(pa.table({"item_id": IDS, "token_ids": token_ids()}), "t.parquet")
    trie = build("t.parquet", **SIZES, token_base="100,200,300")
    assert trie.sids(np.arange(trie.num_leaves)).tolist() == sorted(map(list, {tuple(sid) for sid in SIDS}))


def test_formats_can_be_mixed(expected):
    pq.write_table(pa.table({"pid": [0], "sid": SIDS[:1]}), "a.parquet")
    save_json("b.json", {"1": TOKENS[1], "2": TOKENS[2]})
    save_lines("c.jsonl", records()[3:])
    assert build("a.parquet", "b.json", "c.jsonl", **SIZES).content_digest == expected
    save_json("d.json", {"x": TOKENS[1]})
    said = refused_after_success(UsageError, "a.parquet", "d.json", **SIZES)
    assert "d.json: item column 'key' is large_string here and int64 before" in said


def refused_after_success(kind: type[GrinfError], *items: str, **options: Any) -> str:
    Path("out.grtrie").unlink(missing_ok=True)
    return refused(kind, *items, **options)


def test_weights_of_objects_order_the_items():
    document = {"1-2-3": [{"pid": 7, "count": 2}, {"pid": 9, "count": 5}], "1-2-4": [{"pid": 8, "count": 1}]}
    trie = build(save_json("x.json", document), weight_column="count")
    assert trie.items(np.array([0, 1]))[0].to_pylist() == [9, 7, 8]
    bad = {"1-2-3": [{"pid": 7, "count": "many"}, {"pid": 8, "count": True}, {"pid": 9}]}
    said = refused_after_success(DataError, save_json("bad.json", bad), weight_column="count")
    assert "weight is null or NaN: 3" in said
    assert "there is no" not in said
    assert "has no weights" in refused(UsageError, save_json("y.json", by_sid()), weight_column="count")


def test_ids_of_keys_are_numbers_only_if_all_are():
    assert build(save_json("a.json", {"7": SIDS[0], "-8": SIDS[1]})).manifest.id_type == "int64"
    for other in ("07", "1.0", "x", "9223372036854775808", "٣", "-0", ""):
        trie = build(save_json("b.json", {"7": SIDS[0], other: SIDS[1]}))
        assert sorted(trie.item_ids.to_pylist()) == sorted(["7", other])


@pytest.mark.parametrize(
    "document",
    [
        {"3-9-1": [[1, 2]]},
        {"a1b2": ["a1", "b2"]},
        {"1-2": [3, 4], "5-6": [7, 8]},
        {"<a_1><b_2>": ["<a_3>", "<b_4>"]},
        {"x": "y"},
        {"5": 6},
    ],
)
def test_names_that_may_be_both_have_to_be_told(document):
    said = refused(UsageError, save_json("x.json", document))
    assert "may be items or SIDs" in said
    assert "--item-column key --sid-column value" in said


@pytest.mark.parametrize(
    ("document", "ids"),
    [
        ({"<a_1><b_2><c_3>": [7, 8]}, [7, 8]),
        ({"<a_1> <b_2>": ["7", "8"], "<a_1><b_3>": ["9"]}, ["7", "8", "9"]),
        ({"1-2": ["<a_1>", "<b_2>"]}, ["1-2"]),
    ],
)
def test_where_both_may_be_sids_the_tokens_are(document, ids):
    trie = build(save_json("x.json", document))
    assert sorted(trie.item_ids.to_pylist()) == ids
    assert trie.codebook_sizes[:2] == ((2, 3) if len(ids) < 3 else (2, 4))


def test_what_is_told_about_names_holds():
    name = save_json("x.json", {"1-2": [3, 4], "5-6": [7, 8]})
    items = build(name, item_column="value", sid_column="key")
    assert items.items(np.arange(2))[0].to_pylist() == [3, 4, 7, 8]
    sids = build(name, item_column="key", sid_column="value")
    assert sids.items(np.arange(2))[0].to_pylist() == ["1-2", "5-6"]


BAD_VALUES: list[tuple[Any, str]] = [
    (None, "SID is null"),
    ([], "SID has no codes"),
    ([1, None, 3], "SID has a null code"),
    ([1, 2.0, 3], "SID is not in the expected format"),
    ([1, float("nan"), 3], "SID is not in the expected format"),
    ([1, True, 3], "SID is not in the expected format"),
    ([1, "2", 3], "SID is not in the expected format"),
    ([1, [2], 3], "SID is not in the expected format"),
    ([1, {"a": 2}, 3], "SID is not in the expected format"),
    ({"a": 1}, "SID is not in the expected format"),
    (7, "SID is not in the expected format"),
    ("1-2-3", "SID is not in the expected format"),
    ([1, 2**70, 3], "code is not in the codebook"),
    ([1, -2, 3], "code is not in the codebook"),
    ([1, 2, 99], "code is not in the codebook"),
    ([1, 2], "SID has another number of codes"),
    ([1] * 20, "SID has more than 16 codes"),
]


@pytest.mark.parametrize(("value", "reason"), BAD_VALUES)
def test_bad_values_are_named(value, reason):
    name = save_json("x.json", {"10": SIDS[0], "11": value, "12": SIDS[2]})
    said = refused(DataError, name, **SIZES)
    assert f"1 of 3 rows cannot be used ({reason}: 1)" in said
    assert "x.json key '11'" in said
    trie = build(name, **SIZES, on_bad_row="drop")
    assert sorted(trie.item_ids.to_pylist()) == [10, 12]
    lines = save_lines("x.jsonl", [{"item_id": n, "sid": sid} for n, sid in ((1, SIDS[0]), (2, value))])
    assert f"x.jsonl line 2 (item=2{'' if value is None else ', sid='}" in refused_after_success(
        DataError, lines, **SIZES
    )


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"item_id": 2, "sid": [1, 2', "it is no JSON object, or has a name twice"),
        ("[1, 2]", "it is no JSON object, or has a name twice"),
        ('{"item_id": 2, "item_id": 3, "sid": [1, 2, 3]}', "it is no JSON object, or has a name twice"),
        ("[" * 100_000, "it is no JSON object, or has a name twice"),
        ('{"item_id": ' + "9" * 5000 + "}", "it is no JSON object, or has a name twice"),
        ('{"sid": [1, 2, 3]}', "item id is null"),
        ('{"item_id": 1.5, "sid": [1, 2, 3]}', "item id is no text or int64, or not of the type"),
        ('{"item_id": "2", "sid": [1, 2, 3]}', "item id is no text or int64, or not of the type"),
        ('{"item_id": 9223372036854775808, "sid": [1, 2, 3]}', "item id is no text or int64"),
        ('{"item_id": {"x": 1}, "sid": [1, 2, 3]}', "item id is no text or int64"),
        ('{"item_id": NaN, "sid": [1, 2, 3]}', "item id is no text or int64"),
    ],
)
def test_bad_lines_are_named_by_their_number(line, reason):
    name = save_lines("x.jsonl", [records()[0], "", line, records()[2]])
    said = refused(DataError, name)
    assert f"({reason}" in said
    assert "x.jsonl line 3" in said
    assert "1 of 3 rows" in said
    assert build(name, on_bad_row="drop").manifest.num_items == 2


def test_a_bad_item_id_does_not_hide_another_spelling():
    rows = [{"item_id": 1, "sid": "1-2-3"}, {"item_id": 2, "sid": "1-2-4"}, {"item_id": 1.5, "sid": "1,2,5"}]
    said = refused(UsageError, save_lines("x.jsonl", rows), on_bad_row="drop")
    assert "spells SIDs in two ways: '1-2-3' and '1,2,5'" in said


def test_half_a_character_is_no_text():
    Path("x.json").write_text(
        '{"a\\ud800": ["<a_1>", "<b_2>"], "b": ["<a_1>", "<b_\\ud800>"], "é": ["<a_0>", "<b_0>"]}'
    )
    said = refused(DataError, "x.json")
    assert "2 of 3 rows cannot be used" in said
    assert build("x.json", on_bad_row="drop").item_ids.to_pylist() == ["é"]


MIXED = {
    "item ids": [{"item_id": "x", "sid": [1, 2, 3]}, *records()],
    "SIDs": [{"item_id": 7, "sid": "1-2-3"}, {"item_id": 8, "sid": [None]}, *records()],
    "names": [{"id": 5, "sid": [4, 4, 4]}, {"item_id": 6}, *records()],
}


@pytest.mark.parametrize("mixed", MIXED)
def test_the_order_of_json_decides_nothing(expected, mixed):
    for values in (MIXED[mixed], MIXED[mixed][::-1]):
        for name in (save_lines("x.jsonl", values), save_json("x.json", values)):
            assert build(name, **SIZES, on_bad_row="drop").content_digest == expected


def test_the_order_of_names_decides_nothing():
    document = {"1-2-3": [{"id": 1}], "1-2-4": [{"item_id": 2, "id": 9}]}
    for pairs in (document.items(), reversed(document.items())):
        trie = build(save_json("x.json", dict(pairs)), on_bad_row="drop")
        assert trie.item_ids.to_pylist() == [2]


def test_a_name_twice_keeps_both_rows():
    Path("x.json").write_text('{"7": [1, 2, 3], "8": [0, 0, 0], "7": [4, 5, 6]}')
    assert "1 items have more than one SID" in refused(DataError, "x.json")
    assert build("x.json", on_item_conflict="all").manifest.num_items == 3
    Path("y.json").write_text('{"1-2-3": [7], "1-2-3": [8]}')
    assert build("y.json").items(np.array([0]))[0].to_pylist() == [7, 8]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "no items|not readable"),
        (b"{}", "holds no items"),
        (b"[]", "holds no items"),
        (b"[1, 2]", "there is no JSON object in it"),
        (b"[[1], [2]]", "there is no JSON object in it"),
        (b"3", "holds no items"),
        (b"null", "holds no items"),
        (b"\x1f\x8b\x08\x00", "is compressed\\nit begins with the bytes of gzip"),
        (b'{"1": [1, 2', "not readable as JSON"),
        (b'{"1": [1, 2]}}', "not readable as JSON"),
        (b'{"1": "\xff"}', "not readable as JSON"),
        (b'{"a":' * 100_000, "not readable as JSON"),
        (b'{"1": ' + b"9" * 5000 + b"}", "not readable as JSON"),
    ],
)
def test_json_that_is_no_catalogue_is_refused(text, said):
    Path("x.json").write_bytes(text)
    with pytest.raises((DataError, UsageError), match=said):
        build("x.json")


def test_a_byte_order_mark_is_no_fault():
    Path("x.json").write_bytes(b"\xef\xbb\xbf" + json.dumps({"1": [1, 2, 3]}).encode())
    assert build("x.json").num_leaves == 1


def test_json_that_does_not_fit_is_refused_by_its_size(monkeypatch):
    name = save_json("x.json", FORMS["items to tokens"][0])
    Path(name).write_text(Path(name).read_text() + " " * (5 << 20))
    said = refused(DataError, name, memory_limit="64MiB")
    assert "JSON is read whole, which takes 16 times its size, and 4,194,304 bytes fit" in said
    monkeypatch.setattr(json_items, "MAX_LINE_BYTES", 100)
    lines = save_lines("x.jsonl", [records()[0], {"item_id": 5, "sid": SIDS[0], "text": "x" * 100}])
    assert "line 2 of x.jsonl has more than 100 bytes" in refused(DataError, lines)


def test_names_of_lines_are_looked_for_as_columns_are():
    lines = save_lines("x.jsonl", [{"a": 1, "b": [1, 2, 3]}])
    assert "x.jsonl: no column looks like item ids" in refused(UsageError, lines)
    assert build(lines, item_column="a", sid_column="b").num_leaves == 1
    said = refused_after_success(UsageError, save_lines("t.jsonl", records("token_ids", token_ids())))
    assert "token ids need --token-base" in said


def test_token_ids_are_checked_against_their_level():
    rows = [*records("token_ids", token_ids()), {"item_id": 9, "token_ids": [200, 201, 301]}]
    rows += [{"item_id": 10, "token_ids": [101, 50, 300]}, {"item_id": 11, "token_ids": [101, 201]}]
    name = save_lines("x.jsonl", rows)
    said = refused(DataError, name, token_base="100,200,300")
    assert (
        "3 of 8 rows cannot be used (SID has another number of codes: 1, code is not in the codebook: 2)"
        in said
    )
    assert build(name, token_base="100,200,300", on_bad_row="drop").manifest.num_items == 5


def test_token_ids_may_end_with_the_token_that_ends_a_sid():
    rows = [{"item_id": 1, "token_ids": [101, 999]}, {"item_id": 2, "token_ids": [101, 201, 300, 999]}]
    name = save_lines("x.jsonl", [*rows, {"item_id": 3, "token_ids": [100, 200]}])
    trie = build(name, token_base="100,200,300", end_token="999")
    assert trie.sids(trie.leaf_of_items([1, 2, 3])).tolist() == [[1, -1, -1], [1, 1, 0], [0, 0, -1]]


def test_minus_one_ends_a_row_of_an_array():
    np.save("x.npy", np.array([[1, 2, 3], [1, -1, -1], [1, 2, -1]]))
    assert "SIDs have different numbers of codes" in refused(DataError, "x.npy")
    trie = build("x.npy", end_token="7", token_base="10,20,30")
    assert trie.sids(trie.leaf_of_items([0, 1, 2])).tolist() == [[1, 2, 3], [1, -1, -1], [1, 2, -1]]
    np.save("y.npy", np.array([[1, -1, 3], [1, -7, 3], [-1, -1, -1], [1, 2, 3]]))
    said = refused_after_success(DataError, "y.npy")
    assert "y.npy row 0 ([1, -1, 3]): SID has a null code" in said
    assert "y.npy row 1 ([1, -7, 3]): code is not in the codebook" in said
    assert "y.npy row 2 ([-1, -1, -1]): SID is null" in said


class Bomb:
    def __reduce__(self):
        return Path.touch, (Path("executed"),)


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.array([[Bomb()]], object), "is not readable as an array"),
        (np.zeros((3, 3)), "holds float64 of shape"),
        (np.zeros((3, 3), bool), "holds bool of shape"),
        (np.zeros(9, int), "of shape (9,)"),
        (np.zeros((2, 2, 2), int), "of shape (2, 2, 2)"),
        (np.array(5), "of shape ()"),
        (np.zeros((3, 0), int), "0 codes per SID"),
        (np.zeros((3, 1000), np.int8), "1,000 codes per SID; 16 are possible"),
        (np.zeros((0, 3), int), "the catalogue is empty"),
        (np.array([["a"]]), "holds <U1 of shape"),
        (np.zeros((2, 2), [("a", int)]), "is not readable|holds"),
    ],
)
def test_arrays_of_another_kind_are_refused_and_never_executed(array, said):
    np.save("x.npy", array, allow_pickle=True)
    text = refused(DataError, "x.npy")
    assert any(part in text for part in said.split("|"))
    assert not Path("executed").exists()


def test_large_unsigned_numbers_are_no_codes():
    np.save("x.npy", np.array([[1, 2], [2**64 - 1, 2], [2**63, 1]], np.uint64))
    assert "2 of 3 rows cannot be used (code is not in the codebook: 2)" in refused(DataError, "x.npy")


def test_a_pickle_and_other_files_are_no_catalogue():
    Path("x.npy").write_bytes(pickle.dumps(Bomb()))
    assert "is not readable as an array" in refused(DataError, "x.npy")
    Path("x.pt").write_bytes(pickle.dumps(Bomb()))
    assert "is no catalogue that can be read\ngive it as parquet, JSON" in refused(DataError, "x.pt")
    assert not Path("executed").exists()


def npy_bytes() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array(SIDS))
    return buffer.getvalue()


WHOLE = {
    "x.json": json.dumps(FORMS["SIDs to objects"][0]).encode(),
    "y.json": json.dumps(FORMS["items to tokens"][0]).encode(),
    "x.jsonl": "".join(json.dumps(record) + "\n" for record in records()).encode(),
    "x.npy": npy_bytes(),
}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(WHOLE)), st.data())
def test_whatever_happens_to_a_file_is_told_by_name(name, data):
    damaged = bytearray(WHOLE[name])
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    Path(name).write_bytes(damaged[: data.draw(st.integers(0, len(damaged)))])
    try:
        report = run_build_trie(
            resolve(BuildTrieSettings, {"items": [name], "dry_run": True}, None), lambda *_: None
        )
        assert report.status == "planned"
        build(name, on_bad_row="drop", on_item_conflict="all")
    except (DataError, UsageError):
        return
