"""`grinf recall` from parquet to parquet against exhaustive scoring, in float32."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grinf.errors import DataError, RowError, UsageError
from tests import recall_world
from tests.recall_world import (
    LEVELS,
    MAX_CONTEXT,
    SID_BEGIN,
    VOCABULARY,
    World,
    draw_prompts,
    ids_of,
    make_world,
    write,
)

SHAPES = ("row", "query_id", "status", "beams_returned", "sid", "score", "item_id", "item_score", "item_beam")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("recall"))


@pytest.fixture(scope="module")
def short_world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("short"), short=True)


def random_prompts(count: int, seed: int = 0) -> list[list[int]]:
    return draw_prompts(np.random.default_rng(seed), count)


def assert_row(
    world: World, row: dict, prompt: list[int], widths: list[int], top_k: int | None = None
) -> None:
    """Compare an output row with an exhaustive search."""
    expected = world.oracle.search(prompt, widths)[:top_k]
    assert row["status"] == "ok"
    assert (row["error"], row["error_code"]) == (None, None)
    assert row["beams_returned"] == len(row["sid"]) == len(expected)
    np.testing.assert_allclose(row["score"], [score for _, score in expected], atol=2e-4)
    assert [tuple(sid) for sid in row["sid"]] == [sid for sid, _ in expected]
    items = [(item, beam) for beam, (sid, _) in enumerate(expected) for item in world.items_of(sid)]
    assert list(zip(row["item_id"], row["item_beam"], strict=True)) == items
    assert row["item_score"] == [row["score"][beam] for beam in row["item_beam"]]


def test_rows_equal_an_exhaustive_search(world: World, tmp_path: Path) -> None:
    prompts = random_prompts(9)
    ids = [f"q{i}" for i in range(9)]
    columns = {
        "query_id": ids,
        "input_ids": prompts,
        "score": np.arange(9.0),
        "day": pa.array(range(9), pa.int8()),
    }
    report = world.recall(tmp_path / "out.parquet", columns, beams="4-9-7")
    table = pq.read_table(tmp_path / "out.parquet")
    carried = ("input_score", "day")
    assert table.column_names == [*SHAPES[:2], *carried, *SHAPES[2:], "error_code", "error"]
    assert str(table.schema.field("sid").type) == "list<element: list<element: int32>>"
    types = {
        name: str(table.schema.field(name).type) for name in ("row", "beams_returned", "query_id", "day")
    }
    assert types == {"row": "int64", "beams_returned": "int32", "query_id": "string", "day": "int8"}
    assert table["row"].to_pylist() == list(range(9))
    assert table["query_id"].to_pylist() == ids
    assert table["input_score"].to_pylist() == list(range(9))
    for row, prompt in zip(table.to_pylist(), prompts, strict=True):
        assert_row(world, row, prompt, [4, 9, 7])
    assert (report.status, report.rows, report.summary["ok"]) == ("done", 9, 9)
    assert report.summary["fill_rate"] == 1.0


def test_metadata_say_what_was_searched(world: World, tmp_path: Path) -> None:
    report = world.recall(tmp_path / "out.parquet", {"input_ids": [[1, 2]]}, beams="4-9-7", score="children")
    metadata = pq.read_schema(tmp_path / "out.parquet").metadata
    text = {key.decode(): value.decode() for key, value in metadata.items() if key.startswith(b"grinf.")}
    assert text["grinf.beams"] == "4-9-7"
    assert text["grinf.score"] == "children"
    assert text["grinf.dtype"] == "float32"
    assert text["grinf.model"] == str(world.model)
    assert text["grinf.version"] == "0.1.0"
    assert "decode_attention" in json.loads(text["grinf.kernels"])
    assert report.search["trie_digest"] == text["grinf.trie_digest"]
    assert len(text["grinf.trie_digest"]) == 32


def test_short_sids_come_without_padding(short_world: World, tmp_path: Path) -> None:
    prompts = random_prompts(4, seed=1)
    short_world.recall(tmp_path / "out.parquet", {"input_ids": prompts}, beams="60")
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert {len(sid) for row in rows for sid in row["sid"]} == {1, 2, 3}
    for row, prompt in zip(rows, prompts, strict=True):
        assert_row(short_world, row, prompt, [60] * LEVELS)


def test_fewer_candidates_than_beams_is_no_error(world: World, tmp_path: Path) -> None:
    report = world.recall(tmp_path / "out.parquet", {"input_ids": [[3]]}, beams="900")
    (row,) = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert row["beams_returned"] == len(set(world.sids))
    assert sorted(row["item_id"]) == list(range(100, 160))
    assert report.errors == {}


def test_top_k_counts_sids_and_expand_takes_the_first_item(world: World, tmp_path: Path) -> None:
    columns = {"input_ids": random_prompts(3)}
    world.recall(tmp_path / "all.parquet", columns, beams="60", top_k="5")
    world.recall(tmp_path / "one.parquet", columns, beams="60", top_k="5", expand="top1")
    every, first = (pq.read_table(tmp_path / name).to_pylist() for name in ("all.parquet", "one.parquet"))
    for row, one, prompt in zip(every, first, columns["input_ids"], strict=True):
        assert_row(world, row, prompt, [60] * LEVELS, top_k=5)
        assert one["sid"] == row["sid"]
        assert one["item_id"] == [world.items_of(tuple(sid))[0] for sid in row["sid"]]
        assert one["item_beam"] == list(range(5))


def test_a_free_search_needs_no_trie(world: World, tmp_path: Path) -> None:
    report = world.recall(
        tmp_path / "out.parquet", {"input_ids": [[1, 2, 3]]}, trie=None, constrained="no", levels="2"
    )
    (row,) = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert [len(sid) for sid in row["sid"]] == [2] * 6
    assert row["item_id"] == []
    assert row["query_id"] == 0
    assert report.search["trie_digest"] == ""


# Inputs: each form gives the answers of the token ids that it stands for.

HISTORY = [[(0, 101), (5, 130)], [(7, 103)], []]


def answers_of(world: World, path: Path, columns: dict, **changes) -> list[tuple]:
    world.recall(path, columns, **changes)
    rows = pq.read_table(path).to_pylist()
    assert [row["error"] for row in rows] == [None] * len(rows)
    return [(row["sid"], np.round(row["score"], 3).tolist()) for row in rows]


def sid_tokens(world: World, item: int) -> list[int]:
    return [
        VOCABULARY[f"<{letter}_{code}>"] for letter, code in zip("abc", world.sids[item - 100], strict=True)
    ]


def forms(world: World) -> dict[str, tuple[dict, dict, list[list[int]]]]:
    """Columns and settings of every input form, and the token ids that they mean."""
    sid = [VOCABULARY[SID_BEGIN]]
    suffix = {"suffix": SID_BEGIN}
    chat = [{"role": "w3", "content": "w4 w5"}, {"role": "w6", "content": ""}]
    text = [{"type": "text", "text": "w4"}, {"type": "text", "text": " w5"}]
    parts = [{"role": "w3", "content": text}, {"role": "w6", "content": []}]
    chat_ids = ids_of("w3 w4 w5 w6 w1 w2")
    items = [[101, 130], [103]]
    item_ids = [sid_tokens(world, 101) + sid_tokens(world, 130), sid_tokens(world, 103)]
    codes = [[list(world.sids[item - 100]) for item in row] for row in items]
    texts = [["".join(f"<{x}_{c}>" for x, c in zip("abc", sid, strict=True)) for sid in row] for row in codes]
    around = {"template": "w8 {history} w9 <sid>"}
    apart = {"template": "{history: w7 }<sid>"}
    separated = [item_ids[0][:3] + ids_of("w7") + item_ids[0][3:] + sid, item_ids[1] + sid]
    return {
        "ids and suffix": ({"input_ids": [[1, 2], [3]]}, suffix, [[1, 2, *sid], [3, *sid]]),
        "text": ({"prompt": ["w1 w2", "w3"]}, {}, [[1, 2], [3]]),
        "query": ({"query": pa.array(["w1", "w3"], pa.large_string())}, {}, [[1], [3]]),
        "categories": ({"query": pa.array(["w1", "w3", "w1"]).dictionary_encode()}, {}, [[1], [3], [1]]),
        "template": ({"prompt": ["w1", ""]}, {"template": "w8 {prompt} <sid>"}, [[8, 1, *sid], [8, *sid]]),
        "suffix": ({"prompt": ["w1", ""]}, suffix, [[1, *sid], sid]),
        "suffix once": ({"prompt": ["w1"]}, {"template": "{query}<sid>", **suffix}, [[1, *sid]]),
        "text as chat": (
            {"prompt": ["w4 w5"]},
            {"template": "chat"},
            [[VOCABULARY["<unk>"], *ids_of("w4 w5 w1 w2")]],
        ),
        "messages": ({"messages": [chat]}, suffix, [chat_ids + sid]),
        "messages of parts": ({"messages": [parts]}, {}, [chat_ids]),
        "messages as JSON": ({"messages": [json.dumps(chat), json.dumps(parts)]}, {}, [chat_ids] * 2),
        "named column": ({"text": ["w1"], "prompt": ["w2"]}, {"input_column": "text"}, [[1]]),
        "history of items": ({"history": items}, {}, item_ids),
        "history of codes": ({"history": codes}, suffix, [ids + sid for ids in item_ids]),
        "history of texts": ({"history": texts}, around, [[8, *ids, 9, *sid] for ids in item_ids]),
        "history apart": ({"hist_items": items}, {"input_column": "hist_items", **apart}, separated),
        "empty history": ({"history": pa.array([[]], pa.list_(pa.int64()))}, suffix, [sid]),
    }


@pytest.mark.parametrize("form", list(forms(World(Path(), [(0, 0, 0)] * 60, False))))
def test_every_input_form_means_its_token_ids(world: World, tmp_path: Path, form: str) -> None:
    columns, settings, ids = forms(world)[form]
    plain = answers_of(world, tmp_path / "ids.parquet", {"input_ids": ids})
    assert answers_of(world, tmp_path / "form.parquet", columns, **settings) == plain


# Rows that cannot be served.


def test_bad_rows_are_error_rows_in_their_place(world: World, tmp_path: Path) -> None:
    prompts = [[1, 2], None, [3], [], [1] * 50_000, [4, None], [5, 200], [6, -1], [7]]
    columns = {"qid": list("abcdefghi"), "input_ids": pa.array(prompts, pa.list_(pa.int64()))}
    report = world.recall(tmp_path / "out.parquet", columns)
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    codes = [None, "null_input", None, "empty_input", "overlong", "bad_token", "bad_token", "bad_token", None]
    assert [row["error_code"] for row in rows] == codes
    assert [row["status"] for row in rows] == ["ok" if code is None else "error" for code in codes]
    assert [row["row"] for row in rows] == list(range(9))
    assert rows[4]["error"].startswith(
        f"row 4 (query_id='e'), column 'input_ids': the prompt has 50000 tokens, the limit is {MAX_CONTEXT}"
    )
    assert "token id 200 is outside" in rows[6]["error"]
    for row, prompt in zip(rows, prompts, strict=True):
        if row["status"] == "ok":
            assert_row(world, row, prompt, [6] * LEVELS)
        else:
            assert row["sid"] == row["score"] == row["item_id"] == row["item_beam"] == []
    assert report.errors == {"null_input": 1, "empty_input": 1, "overlong": 1, "bad_token": 3}
    assert len(report.summary["examples"]) == 5


@pytest.mark.parametrize(
    ("column", "values", "codes"),
    [
        ("prompt", ["w1", None, "", "w2 " * 99], [None, "null_input", "empty_input", "overlong"]),
        ("messages", ["[", "7", '[{"role": "w1"}]', '["w1"]', "[]"], ["bad_type"] * 4 + ["bad_messages"]),
        ("messages", ['[{"role": "nobody", "content": "w1"}]', None], ["bad_messages", "null_input"]),
        ("messages", [r'[{"role": "w1", "content": "\ud800"}]'], ["bad_type"]),
        ("history", [[100, 99], [100], [None, 100], None], ["unknown_item", None, "bad_type", "null_input"]),
        ("history", [[[0, 0, 8]], [[0, 0]], [[0, 0, 0, 0]], [[0, -1, 0]]], ["unknown_item"] * 4),
    ],
)
def test_bad_values_of_every_form(
    world: World, tmp_path: Path, column: str, values: list, codes: list
) -> None:
    world.recall(tmp_path / "out.parquet", {column: values})
    table = pq.read_table(tmp_path / "out.parquet")
    assert table["error_code"].to_pylist() == codes


def test_text_that_is_not_unicode(world: World, tmp_path: Path) -> None:
    offsets, text = pa.py_buffer(np.array([0, 2, 4], np.int32)), pa.py_buffer(b"w1\xff\xfe")
    broken = pa.Array.from_buffers(pa.string(), 2, [None, offsets, text])
    world.recall(tmp_path / "out.parquet", {"prompt": broken})
    assert pq.read_table(tmp_path / "out.parquet")["error_code"].to_pylist() == [None, "bad_type"]


def test_on_error_fail_stops_at_the_first_bad_row(world: World, tmp_path: Path) -> None:
    with pytest.raises(RowError, match="row 1, column 'input_ids': the input is null"):
        world.recall(tmp_path / "out.parquet", {"input_ids": [[1], None]}, on_error="fail")
    assert not (tmp_path / "out.parquet").exists()


# Files, units, and the output.


def test_many_files_and_units_keep_every_row_in_order(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "queries"
    folder.mkdir()
    prompts = random_prompts(23)
    write(folder / "a.parquet", {"input_ids": prompts[:11], "extra": list(range(11))}, row_group_size=5)
    write(folder / "b.parquet", {"input_ids": pa.nulls(0)})
    write(folder / "c.parquet", {"extra": pa.nulls(12), "input_ids": prompts[11:]})
    write(folder / "_ignored.parquet", {"input_ids": [[1]]})
    for name, pattern in (("file.parquet", folder), ("dataset", folder / "*.parquet")):
        inputs = [str(pattern)] if pattern == folder else [str(folder / f"{x}.parquet") for x in "abc"]
        report = world.recall(tmp_path / name, input=inputs, unit_rows="4")
        table = pq.read_table(tmp_path / name)
        assert table["row"].to_pylist() == list(range(23))
        assert table["extra"].to_pylist() == [*range(11), *[None] * 12]
        for row, prompt in zip(table.to_pylist(), prompts, strict=True):
            assert_row(world, row, prompt, [6] * LEVELS)
        assert report.units == 3 + 3 + 3 - 1 - 1 + 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dataset", "file.parquet", "queries"]
    assert (tmp_path / "dataset" / "unit-000002.parquet").exists()


def test_a_unit_is_not_answered_twice(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = {"input_ids": random_prompts(10), "truth": [[100 + i] for i in range(10)]}
    output, changes = tmp_path / "out.parquet", {"truth_column": "truth", "unit_rows": "4"}
    whole = world.recall(tmp_path / "whole.parquet", columns, beams="60", **changes)
    calls = []

    def interrupt(stage: str, done: int, total: int | None) -> None:
        calls.append(done)
        if stage == "queries" and done == 9:
            raise KeyboardInterrupt

    monkeypatch.setattr(recall_world, "ignore", interrupt)
    with pytest.raises(KeyboardInterrupt):
        world.recall(output, columns, beams="60", **changes)
    assert not output.exists()
    committed = sorted(path.name for path in (tmp_path / "out.parquet.partial").glob("unit-*"))
    assert committed == ["unit-000000.parquet", "unit-000001.parquet"]
    with pytest.raises(UsageError, match=r"unfinished job .* is of other inputs or settings"):
        world.recall(output, columns, beams="61", **changes)
    monkeypatch.undo()
    report = world.recall(output, input=str(tmp_path / "queries.parquet"), beams="60", **changes)
    assert (report.units, report.units_kept, report.answered) == (3, 2, 2)
    assert pq.read_table(output).equals(pq.read_table(tmp_path / "whole.parquet"))
    assert report.summary == whole.summary
    assert not (tmp_path / "out.parquet.partial").exists()


def test_a_finished_output_is_left_alone(world: World, tmp_path: Path) -> None:
    columns = {"input_ids": [[1], None]}
    for name in ("out.parquet", "dataset"):
        output = tmp_path / name
        first = world.recall(output, columns)
        stamp = output.stat().st_mtime_ns
        again = world.recall(output, input=str(tmp_path / "queries.parquet"))
        assert (again.status, again.summary) == ("unchanged", first.summary)
        assert output.stat().st_mtime_ns == stamp
        with pytest.raises(UsageError, match="other inputs or settings") as refused:
            world.recall(output, input=str(tmp_path / "queries.parquet"), beams="5")
        assert "beams was 6, is 5" in refused.value.why
        with pytest.raises(UsageError, match="other inputs or settings"):
            world.recall(output, {"input_ids": [[2], None]})
        third = world.recall(output, {"input_ids": [[2], None]}, overwrite="yes")
        assert third.status == "done"
        assert pq.read_table(output).num_rows == 2
    names = ["dataset", "out.parquet", "out.rejects.parquet", "queries.parquet"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_an_output_of_someone_else_is_never_replaced(world: World, tmp_path: Path) -> None:
    mine = write(tmp_path / "mine.parquet", {"x": [1]})
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("dear")
    for output in (mine, tmp_path / "folder"):
        with pytest.raises(UsageError, match="exists"):
            world.recall(output, {"input_ids": [[1]]}, overwrite="yes")
    queries = write(tmp_path / "queries.parquet", {"input_ids": [[1]]})
    for output in (queries, tmp_path, tmp_path.parent):
        with pytest.raises(UsageError, match="would replace the input"):
            world.recall(output, input=str(queries), overwrite="yes")
    assert pq.read_table(mine)["x"].to_pylist() == [1]


def test_a_second_job_on_the_same_output_is_refused(world: World, tmp_path: Path) -> None:
    def start_another(stage: str, done: int, total: int | None) -> None:
        with pytest.raises(UsageError, match="in use"):
            recall_world.run_recall(settings, recall_world.ignore)

    queries = write(tmp_path / "queries.parquet", {"input_ids": [[1]]})
    settings = world.settings(input=str(queries), output=str(tmp_path / "out"))
    assert recall_world.run_recall(settings, start_another).status == "done"


def test_limit_and_dry_run(world: World, tmp_path: Path) -> None:
    columns = {"input_ids": random_prompts(5)}
    planned = world.recall(tmp_path / "out.parquet", columns, limit="2", dry_run="yes")
    assert (planned.status, planned.rows) == ("planned", 2)
    assert [path.name for path in tmp_path.iterdir()] == ["queries.parquet"]
    world.recall(tmp_path / "out.parquet", columns, limit="2")
    assert pq.read_table(tmp_path / "out.parquet").num_rows == 2


# Truth.


def test_metrics_of_items_and_sids(world: World, tmp_path: Path) -> None:
    prompts = random_prompts(6)
    truth = [[100, 110], [105, 105], [7], None, [], [120]]
    columns = {"input_ids": [*prompts[:5], None], "truth": truth}
    report = world.recall(tmp_path / "out.parquet", columns, truth_column="truth", beams="60")
    metrics = report.summary["metrics"]
    assert (metrics["n_eval"], metrics["n_no_truth"], metrics["n_error"]) == (3, 2, 1)
    assert metrics["target_in_catalogue"] == pytest.approx(2 / 3)
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    for k in (1, 10, 50):
        item_hits = [
            len(set(row["item_id"][:k]) & set(found)) for row, found in zip(rows[:3], truth, strict=False)
        ]
        assert metrics["items"][f"recall@{k}"] == pytest.approx((item_hits[0] / 2 + item_hits[1]) / 3)
        sids = [{world.sids[item - 100] for item in found if item >= 100} for found in truth[:3]]
        sid_hits = [
            len({tuple(s) for s in row["sid"][:k]} & want) for row, want in zip(rows, sids, strict=False)
        ]
        expected = (sid_hits[0] / len(sids[0]) + sid_hits[1]) / 3
        if k in (1, 10):
            assert metrics["sids"][f"recall@{k}"] == pytest.approx(expected)
    assert metrics["items"]["recall@50"] <= metrics["target_in_catalogue"]
    assert any("K = 50" in warning for warning in report.warnings)
    named = {"truth": pa.array([[list(world.sids[0])], None], pa.list_(pa.list_(pa.int32())))}
    by_sid = world.recall(
        tmp_path / "sid.parquet", {"input_ids": prompts[:2], **named}, truth_column="truth", beams="60"
    )
    assert by_sid.summary["metrics"]["items"] == {}
    assert by_sid.summary["metrics"]["sids"]["hit@10"] in (0, 1)
    assert by_sid.summary["metrics"]["n_no_truth"] == 1


def test_a_collapsed_tokenizer_scores_on_sids_only(tmp_path: Path) -> None:
    """All items share one SID: every SID is right, an item is right by chance only."""
    world = make_world(tmp_path)
    items = write(tmp_path / "one.parquet", {"item_id": np.arange(20), "sid": [[1, 2, 3]] * 20})
    build = {"items": [str(items)], "output": str(tmp_path / "one.grtrie"), "codebook_sizes": "8,8,8"}
    tokens = {"tokenizer": str(world.model), "token_template": "<{letter}_{code}>"}
    recall_world.run_build_trie(
        recall_world.BuildTrieSettings.model_validate(build | tokens), recall_world.ignore
    )
    columns = {"input_ids": [[1]] * 20, "truth": np.arange(20)}
    report = world.recall(
        tmp_path / "out.parquet", columns, trie=str(tmp_path / "one.grtrie"), truth_column="truth"
    )
    assert report.summary["metrics"]["sids"]["recall@1"] == 1.0
    assert report.summary["metrics"]["items"]["recall@1"] == pytest.approx(1 / 20)
    assert report.summary["metrics"]["items"]["recall@10"] == pytest.approx(1 / 2)


@pytest.mark.parametrize("unit_rows", ["1", "3"])
def test_texts_that_name_nothing_end_no_job(world: World, tmp_path: Path, unit_rows: str) -> None:
    some = "-".join(map(str, world.sids[0]))
    columns = {"history": [["gone"], [some], [some]], "truth": [[some], ["gone"], [some]]}
    changes = {"truth_column": "truth", "unit_rows": unit_rows}
    report = world.recall(tmp_path / "out.parquet", columns, **changes)
    metrics = report.summary["metrics"]
    assert (report.rejected, metrics["n_eval"], metrics["n_error"]) == (1, 2, 1)
    assert metrics["target_in_catalogue"] == 0.5


ENCODED = [pa.string_view(), pa.dictionary(pa.int8(), pa.string())]
LISTS = [pa.list_, pa.large_list, lambda value: pa.list_(value, 1)]


@pytest.mark.parametrize(
    "type_", [make(value) for make in LISTS for value in ENCODED] + [pa.list_view(value) for value in ENCODED]
)
def test_encodings_in_lists_change_nothing(tmp_path: Path, world: World, type_: pa.DataType) -> None:
    ids = [f"item {index}" for index in range(len(world.sids))]
    items = write(tmp_path / "items.parquet", {"item_id": ids, "sid": world.sids})
    build = {"items": [str(items)], "output": str(tmp_path / "t.grtrie"), "codebook_sizes": "8,8,8"}
    tokens = {"tokenizer": str(world.model), "token_template": "<{letter}_{code}>"}
    recall_world.run_build_trie(
        recall_world.BuildTrieSettings.model_validate(build | tokens), recall_world.ignore
    )
    some = pa.array([[ids[0]], None, [ids[2]]], type_)
    columns, is_view = {"history": [[ids[3]]] * 3, "truth": some}, "view<" in str(type_)
    columns |= {} if is_view else {"history": pa.array([[ids[3]]] * 3, type_), "allow": some}
    changes = {"trie": str(tmp_path / "t.grtrie"), "truth_column": "truth"}
    report = world.recall(
        tmp_path / "out.parquet", columns, **changes | ({} if is_view else {"allow_column": "allow"})
    )
    assert (report.rejected, report.summary["metrics"]["target_in_catalogue"]) == (0, 1.0)
    if not is_view:
        assert report.summary["metrics"]["items"]["recall@1"] == 1.0


# Refusals before any work.


@pytest.mark.parametrize(
    ("columns", "changes", "message"),
    [
        ({"promt": ["w1"]}, {}, "no column is named input_ids, messages, prompt"),
        ({"promt": ["w1"]}, {"input_column": "prompt"}, "did you mean 'promt'"),
        ({"prompt": [1, 2]}, {}, "column 'prompt' holds int64, which is no text"),
        ({"input_ids": [[1.5]]}, {}, "holds list<.*>, which is no input_ids"),
        ({"prompt": ["w1"], "truth": [1]}, {"truth_column": "thruth"}, "did you mean 'truth'"),
        ({"prompt": ["w1"], "truth": [1.5]}, {"truth_column": "truth"}, "ids of the catalogue are int64"),
        ({"prompt": ["w1"]}, {"suffix": "w1w2"}, "--suffix w1w2 is not one token"),
        ({"prompt": ["w1"]}, {"template": "w1"}, "it has 0 places for the prompt"),
        ({"input_ids": [[1]]}, {"template": "{prompt}"}, "does not fit a column of input_ids"),
        ({"history": [[1]]}, {"template": "chat"}, "does not fit a column of history"),
        ({"history": [[1]]}, {"trie": None, "constrained": "no"}, "a history needs a trie"),
        ({"prompt": ["w1"]}, {"allow_column": "prompt"}, "column 'prompt' holds string"),
        ({"prompt": pa.array([], pa.string())}, {}, "there are no queries"),
        ({"prompt": ["w1"]}, {"beams": "5-5"}, "names 2 widths, a SID has 3 levels"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    world: World, tmp_path: Path, columns: dict, changes: dict, message: str
) -> None:
    with pytest.raises((UsageError, DataError), match=message):
        world.recall(tmp_path / "out.parquet", columns, **changes)
    assert [path.name for path in tmp_path.iterdir()] == ["queries.parquet"]


def test_files_that_are_damaged_or_contradict_each_other(world: World, tmp_path: Path) -> None:
    good = write(tmp_path / "a.parquet", {"prompt": ["w1"] * 100, "x": [1] * 100})
    data = bytearray(good.read_bytes())
    (tmp_path / "cut.parquet").write_bytes(data[:-9])
    other = write(tmp_path / "b.parquet", {"prompt": ["w1"], "x": ["text"]})
    without = write(tmp_path / "c.parquet", {"query": ["w1"]})
    cases = {
        "cut.parquet": ([tmp_path / "cut.parquet"], "is not readable as parquet"),
        "types": ([good, other], "do not fit those of"),
        "missing": ([good, without], "c.parquet: unknown column 'prompt'"),
        "none": ([tmp_path / "none*.parquet"], "no parquet file"),
    }
    for files, message in cases.values():
        with pytest.raises((UsageError, DataError), match=message):
            world.recall(tmp_path / "out.parquet", input=[str(path) for path in files])
    data[10:60] = bytes(50)
    (tmp_path / "flipped.parquet").write_bytes(data)
    with pytest.raises(DataError, match="cannot be read at row 0 of row group 0"):
        world.recall(tmp_path / "out.parquet", input=str(tmp_path / "flipped.parquet"))
    assert not (tmp_path / "out.parquet").exists()
