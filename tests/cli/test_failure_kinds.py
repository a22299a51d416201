"""Failures that other projects have reported, each as a small input and the outcome that is right here.

F15, F30, F31, F40, F42, F46 of a catalogue, F48, F49, F51 and F52 stand with what they are about, in
tests/unit: test_build_trie.py, test_trie_tokens.py and test_trie_store.py.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grinf import Engine, EngineOptions, Request
from grinf.config.settings import BuildTrieSettings
from grinf.errors import CapacityError, UsageError
from grinf.jobs import item_files
from grinf.jobs.bench.engines import load_catalog
from grinf.jobs.build_trie import run_build_trie
from grinf.jobs.recall import RecallReport, inputs
from grinf.jobs.recall.units import plan_units
from grinf.jobs.trie_views import delete_items, store_view
from grinf.model.decoder import Decoder
from grinf.trie import Trie, trie_of
from grinf.trie.tokens import TOKENIZER_FILES
from tests.cli.test_app import run
from tests.golden.oracle import Oracle
from tests.recall_world import (
    CODES,
    END,
    LEVELS,
    MAX_CONTEXT,
    SID_BEGIN,
    VOCABULARY,
    World,
    ignore,
    make_world,
    write,
)

Sid = tuple[int, ...]
PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("failures"))


@pytest.fixture(scope="module")
def hugging_face(world: World) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(world.model, dtype="float32").eval()


def build(folder: Path, sids: list[Sid], *, end: bool = False, ids: list[Any] | None = None) -> Path:
    """Build a catalogue of items 0, 1, ... on these SIDs."""
    items = write(folder / "items.parquet", {"item_id": ids or list(range(len(sids))), "sid": sids})
    tokens = {"token_base": "30,38,46", "codebook_sizes": "8,8,8"} | (
        {"end_token": str(VOCABULARY[END])} if end else {}
    )
    given = {
        "items": [str(items)],
        "output": str(folder / "t.grtrie"),
        "on_item_conflict": "all",
        "overwrite": True,
    }
    run_build_trie(BuildTrieSettings.model_validate(given | tokens), ignore)
    return folder / "t.grtrie"


def oracle(model: Any, sids: list[Sid], *, end: bool = False) -> Oracle:
    tokens = [[VOCABULARY[f"<{letter}_{code}>"] for code in range(CODES)] for letter in "abc"]
    return Oracle(model, sorted(set(sids)), tokens, VOCABULARY[END] if end else None)


def search(
    world: World, folder: Path, sids: list[Sid], columns: dict[str, Any] | None = None, **changes: Any
) -> list[dict[str, Any]]:
    """Search a catalogue of these SIDs with wide beams."""
    trie = str(build(folder, sids, end=any(len(sid) < LEVELS for sid in sids)))
    columns = {"input_ids": [PROMPT]} | (columns or {})
    world.recall(
        folder / "out.parquet", columns, **({"trie": trie, "beams": "60", "overwrite": "yes"} | changes)
    )
    return pq.read_table(folder / "out.parquet").to_pylist()


def found_sids(row: dict[str, Any]) -> set[Sid]:
    assert len(set(map(tuple, row["sid"]))) == len(row["sid"]), "no SID twice"
    return {tuple(sid) for sid in row["sid"]}


# Constraint logic


def test_f1_where_nothing_is_allowed_nothing_is_returned(world, tmp_path):
    [row] = search(world, tmp_path, [(1, 2, 3)], {"seen": [[0]]}, deny_column="seen")
    assert (row["status"], row["beams_returned"], row["sid"], row["item_id"]) == ("ok", 0, [], [])


@pytest.mark.parametrize("beams", ["1", "60"])
def test_f1_a_view_that_lets_nothing_through_is_no_open_door(world, tmp_path, beams):
    trie = build(tmp_path, [(1, 2, 3), (4, 5, 6), (4, 5, 7)])
    mine = [
        write(tmp_path / f"{name}.parquet", {"item_id": ids}) for name, ids in (("a", [1, 2]), ("b", [2, 1]))
    ]
    store_view(trie, "mine", mine[:1], None, overwrite=False)

    def answers(name: str, **changes: Any) -> list[dict[str, Any]]:
        columns = {"input_ids": [PROMPT, [9, 9]], "seen": [[0], [1]]}
        settings = {"trie": str(trie), "view": "mine", "beams": beams} | changes
        world.recall(tmp_path / name, columns, **settings)
        return pq.read_table(tmp_path / name).to_pylist()

    width = min(int(beams), 2)
    assert [row["beams_returned"] for row in answers("open.parquet")] == [width] * 2
    seen = answers("seen.parquet", deny_column="seen")
    assert [row["beams_returned"] for row in seen] == [width, 1]
    assert (found_sids(seen[1]), seen[1]["item_id"]) == ({(4, 5, 7)}, [2])
    delete_items(trie, mine[1:], None)
    for name, changes in (("gone.parquet", {}), ("both.parquet", {"deny_column": "seen"})):
        for row in answers(name, **changes):
            assert (row["status"], row["error"]) == ("ok", None)
            assert (row["beams_returned"], row["sid"], row["score"], row["item_id"]) == (0, [], [], [])


def test_f3_a_dead_node_gives_no_nan(world, tmp_path):
    sids = [(1, 2, 3), (1, 2, 4), (1, 5, 0), (6, 0, 0)]
    for score in ("children", "level", "topk:2"):
        [row] = search(world, tmp_path, sids, {"may": [[1]]}, allow_column="may", score=score)
        assert found_sids(row) == {(1, 2, 4)}
        assert np.isfinite(row["score"]).all()
        if score == "children":
            assert row["score"] == [0.0], "one legal child at each step: nothing to choose"


def test_f4_a_prefix_is_more_than_its_last_token(world, tmp_path):
    sids = [(1, 2, 3), (7, 2, 6)]
    [row] = search(world, tmp_path, sids)
    assert found_sids(row) == set(sids)


def test_f5_shared_tokens_do_not_mix_prefixes(world, tmp_path):
    sids = [(2, 6, 4), (3, 6, 7)]
    [row] = search(world, tmp_path, sids)
    assert found_sids(row) == set(sids)


def test_f6_a_level_is_no_free_choice(world, tmp_path):
    sids = [(0, 0, 0), (1, 1, 1)]
    [row] = search(world, tmp_path, sids)
    assert found_sids(row) == set(sids)


def test_f8_a_query_without_a_valid_item_stops_nobody(world, tmp_path):
    columns = {"input_ids": [PROMPT] * 3, "may": pa.array([None, [], [1]], pa.list_(pa.int64()))}
    rows = search(world, tmp_path, [(1, 2, 3), (4, 5, 6)], columns, allow_column="may")
    assert [row["status"] for row in rows] == ["ok"] * 3
    assert [row["item_id"] for row in rows][1:] == [[], [1]]
    assert rows[0]["beams_returned"] == 2


@pytest.mark.parametrize("damage", ["missing", "flipped"])
def test_f9_without_its_trie_nothing_is_served(world, tmp_path, damage):
    trie = tmp_path / "t.grtrie"
    whole = bytearray(world.trie.read_bytes())
    whole[-1] ^= damage == "flipped"
    if damage != "missing":
        trie.write_bytes(whole)
    write(tmp_path / "q.parquet", {"input_ids": [PROMPT]})
    (tmp_path / "model").mkdir()
    shutil.copy(
        world.model / "config.json", tmp_path / "model"
    )  # Weights would be missed, if they were read.
    words = ("recall", "--input", "q.parquet", "--trie", "t.grtrie", "--model", "model")
    told = run(*words, cwd=tmp_path)
    assert told.returncode == 3
    assert "t.grtrie" in told.stderr
    assert "Traceback" not in told.stderr
    assert not (tmp_path / "results").exists()


def test_f10_steps_past_the_depth_are_refused(world, tmp_path):
    with pytest.raises(UsageError, match="4"):
        search(world, tmp_path, [(1, 2, 3)], levels="4")


# Width, top-k, duplicates


def test_f11_three_items_under_900_beams_are_three_results(world, tmp_path):
    sids = [(1, 2, 3), (1, 2, 4), (5, 0, 0)]
    [row] = search(world, tmp_path, sids, beams="900")
    assert row["beams_returned"] == len(row["sid"]) == len(row["score"]) == 3
    assert found_sids(row) == set(sids)


def test_f13_later_levels_fill_the_beam_with_real_paths(world, tmp_path, hugging_face):
    sids = [(a, b, c) for a in (0, 5) for b in range(6) for c in range(2)]
    [row] = search(world, tmp_path, sids, beams="4")
    expected = oracle(hugging_face, sids).search(PROMPT, [4, 4, 4])
    assert row["beams_returned"] == 4
    assert [tuple(sid) for sid in row["sid"]] == [sid for sid, _ in expected]


def test_f14_a_checkpoints_sampling_changes_nothing(world, tmp_path, hugging_face):
    sids = [(a, b, a ^ b) for a in range(8) for b in range(8)]
    expected = oracle(hugging_face, sids).search(PROMPT, [7, 7, 7])
    trie, query = str(build(tmp_path, sids)), write(tmp_path / "q.parquet", {"input_ids": [PROMPT] * 3})
    asks = {"plain": {}, "sampled": {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "num_beams": 1}}
    for name, asked in asks.items():
        shutil.copytree(world.model, tmp_path / name)
        (tmp_path / name / "generation_config.json").write_text(json.dumps(asked))
        words = ("recall", "--model", name, "--trie", trie, "--input", query.name, "--beams", "7")
        told = run(*words, "--device", "cpu", "-o", f"{name}.parquet", cwd=tmp_path)
        assert told.returncode == 0, told.stderr
        logged = "generation_config.json asks for do_sample = True, temperature = 0.6, top_p = 0.95"
        assert (f"{logged}: recall takes no notice" in told.stderr) == bool(asked)
        for row in pq.read_table(tmp_path / f"{name}.parquet").to_pylist():
            assert len(found_sids(row)) == 7, "not one beam seven times"
            assert [tuple(sid) for sid in row["sid"]] == [sid for sid, _ in expected]
            np.testing.assert_allclose(row["score"], [score for _, score in expected], atol=2e-4)
    plain, sampled = (pq.read_table(tmp_path / f"{name}.parquet") for name in asks)
    assert plain.equals(sampled)


def test_f17_parents_are_right_where_degrees_differ(world, tmp_path, hugging_face):
    sids = [(0, 3, 1), *((4, code, 2) for code in range(5)), (6, 7, 0), (6, 7, 5)]
    rows = search(world, tmp_path, sids, {"input_ids": [PROMPT, [9, 9], [2, 7, 1, 8]]}, beams="3")
    for row, prompt in zip(rows, [PROMPT, [9, 9], [2, 7, 1, 8]], strict=True):
        expected = oracle(hugging_face, sids).search(prompt, [3, 3, 3])
        assert [tuple(sid) for sid in row["sid"]] == [sid for sid, _ in expected]
        np.testing.assert_allclose(row["score"], [score for _, score in expected], atol=2e-4)


def test_f20_ties_are_broken_by_rank_and_code_in_any_batch(world, tmp_path, hugging_face):
    import torch

    twin = type(hugging_face)(hugging_face.config)
    with torch.no_grad():
        for weight in twin.parameters():
            weight.zero_()
    twin.save_pretrained(tmp_path / "model")
    sids = [(a, b, 7 - b) for a in (5, 2, 0) for b in (3, 1, 6)]
    columns = {"input_ids": [[index, 1] for index in range(5)]}
    for max_batch in ("1", "4"):
        changes = {"model": str(tmp_path / "model"), "beams": "4", "max_batch": max_batch}
        rows = search(world, tmp_path, sids, columns, **changes)
        assert all(len(set(row["score"])) == 1 for row in rows)
        assert [row["sid"] for row in rows] == [[list(sid) for sid in sorted(sids)[:4]]] * 5


def test_f22_a_beam_that_memory_cannot_hold_is_refused_at_the_start(world, tmp_path, monkeypatch):
    monkeypatch.setattr("grinf.backend.load._free_bytes", lambda device: 1 << 20)
    sids = [(a, b, c) for a in range(8) for b in range(8) for c in range(8)]
    with pytest.raises(CapacityError, match=r"one request needs .* are planned for KV") as error:
        search(world, tmp_path, sids, beams="2000")
    assert "fewer beams" in error.value.fix


# Scores, numerics, determinism


def test_f24_length_is_neither_punished_nor_paid(world, tmp_path, hugging_face):
    sids = [(1, 2), (1, 3, 4), (6,), (6, 0, 0)]
    [row] = search(world, tmp_path, sids)
    expected = oracle(hugging_face, sids, end=True).search(PROMPT, [60] * 3)
    assert [tuple(sid) for sid in row["sid"]] == [sid for sid, _ in expected]
    np.testing.assert_allclose(row["score"], [score for _, score in expected], atol=2e-4)


def test_f25_batch_and_padding_change_no_answer(world, tmp_path):
    rng = np.random.default_rng(5)
    lengths = [1, MAX_CONTEXT, *rng.integers(2, MAX_CONTEXT, 15)]
    columns = {"input_ids": [rng.integers(0, 50, length).tolist() for length in lengths]}
    sids = [(a, b, a ^ b) for a in range(8) for b in range(8)]
    alone, together = (
        search(world, tmp_path, sids, columns, beams="9", max_batch=size) for size in ("1", "8")
    )
    assert len(alone) == 17
    for one, other in zip(alone, together, strict=True):
        assert found_sids(one) == found_sids(other)
        np.testing.assert_allclose(one["score"], other["score"], atol=1e-4)


def test_f27_half_precision_is_read_as_what_it_is(world, tmp_path):
    sids = [(a, b, a ^ b) for a in range(8) for b in range(8)]
    scores = {}
    for dtype in ("float32", "bfloat16", "float16"):
        [row] = search(world, tmp_path, sids, dtype=dtype, beams="64")
        assert found_sids(row) == set(sids)
        scores[dtype] = dict(zip(map(tuple, row["sid"]), row["score"], strict=True))
    for dtype, tolerance in (("bfloat16", 0.3), ("float16", 0.05)):
        gaps = [abs(scores[dtype][sid] - scores["float32"][sid]) for sid in sids]
        assert 0 < max(gaps) < tolerance


def test_f29_a_prompt_is_computed_once_for_all_beams(world, tmp_path, monkeypatch):
    rows: list[int] = []
    forward = Decoder.forward

    def counting(self, tokens, *args, **kwargs):
        rows.append(len(tokens))
        return forward(self, tokens, *args, **kwargs)

    monkeypatch.setattr(Decoder, "forward", counting)
    sids = [(a, b, c) for a in range(8) for b in range(8) for c in range(8)]
    trie = Trie.open(build(tmp_path, sids))
    prompt = [1] * MAX_CONTEXT
    with Engine.load(EngineOptions(str(world.model), beams=(900,), device="cpu"), trie) as engine:
        [result] = engine.run([Request(0, prompt)])
    assert result.beams_returned == 512
    assert sum(rows) == MAX_CONTEXT + 8 + 64, "the prompt once, and the beams of two levels"


# Tokens, prompts


def test_f32_f33_sids_are_never_read_from_text(world, tmp_path, monkeypatch):
    from transformers import PreTrainedTokenizerBase

    for name in ("decode", "batch_decode", "convert_tokens_to_string"):
        monkeypatch.setattr(PreTrainedTokenizerBase, name, lambda *_, **__: pytest.fail("text was decoded"))
    sids = [(1, 2, 3), (4, 5, 6)]
    trie = str(build(tmp_path, sids))
    world.recall(tmp_path / "o.parquet", {"prompt": ["w1 w2"]}, trie=trie, beams="9", suffix=SID_BEGIN)
    [row] = pq.read_table(tmp_path / "o.parquet").to_pylist()
    assert found_sids(row) == set(sids), "though the tokens of SIDs are special"


def test_f35_a_model_that_begins_no_sid_is_told(world, tmp_path, hugging_face):
    import torch

    def report(model: Path) -> RecallReport:
        columns = {"input_ids": [PROMPT]}
        return world.recall(tmp_path / "o.parquet", columns, model=str(model), overwrite="yes")

    for name, shift in (("text", -30.0), ("sids", 30.0)):
        twin = type(hugging_face)(hugging_face.config)
        with torch.no_grad():
            for weight in twin.parameters():
                weight.zero_()
            twin.model.norm.weight.fill_(1.0)
            twin.model.embed_tokens.weight.fill_(1.0)
            first = VOCABULARY["<a_0>"]
            twin.lm_head.weight[first : first + CODES] = shift / 32
        twin.save_pretrained(tmp_path / name)
    text, sids = (report(tmp_path / name) for name in ("text", "sids"))
    assert text.summary["sid_mass"] < 0.01
    assert any("do not belong together" in warning for warning in text.warnings)
    assert sids.summary["sid_mass"] > 0.99
    assert not any("do not belong together" in warning for warning in sids.warnings)


def test_f37_a_prompt_that_is_too_long_stays_in_its_place(world, tmp_path):
    columns = {"query_id": ["a", "b", "c"], "input_ids": [[1] * 10, [1] * 50_000, [2] * 10]}
    rows = search(world, tmp_path, [(1, 2, 3)], columns)
    assert [row["query_id"] for row in rows] == ["a", "b", "c"]
    assert [row["status"] for row in rows] == ["ok", "error", "ok"]
    assert rows[1]["error_code"] == "overlong"
    assert "the prompt has 50000 tokens" in rows[1]["error"]
    assert rows[0]["item_id"] == rows[2]["item_id"] == [0]


def test_f38_an_empty_prompt_is_told_unless_a_suffix_fills_it(world, tmp_path):
    columns = {"prompt": ["", None, "w1"]}
    plain = world.recall(tmp_path / "a.parquet", columns)
    filled = world.recall(tmp_path / "b.parquet", columns, suffix=SID_BEGIN)
    assert plain.errors == {"empty_input": 1, "null_input": 1}
    assert filled.errors == {"null_input": 1}
    ids = world.recall(tmp_path / "c.parquet", {"input_ids": pa.array([[], None, [1]], pa.list_(pa.int64()))})
    assert ids.errors == {"empty_input": 1, "null_input": 1}


# Data and files


def refuse_whole_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let parquet be read in pieces only; returns the rows of each piece."""
    pieces, iterate = [], pq.ParquetFile.iter_batches

    def counted(self: pq.ParquetFile, *args: Any, **kwargs: Any) -> Iterator[pa.RecordBatch]:
        for batch in iterate(self, *args, **kwargs):
            pieces.append(batch.num_rows)
            yield batch

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", counted)
    for name in ("read", "read_row_group", "read_row_groups"):
        monkeypatch.setattr(pq.ParquetFile, name, lambda *_, **__: pytest.fail("read as a whole"))
    return pieces


@pytest.mark.parametrize("kind", [pa.list_, pa.large_list])
def test_f43_nested_columns_are_read_in_pieces(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(item_files, "BATCH_ROWS", 7)
    sids = [(n % 7, n // 7 % 7, n // 49) for n in range(100)]
    texts = [[f"<{letter}_{code}>" for letter, code in zip("abc", sid, strict=True)] for sid in sids]
    column = pa.array(texts, kind(pa.large_string()))
    pq.write_table(
        pa.table({"item_id": range(100), "sid": column}), tmp_path / "i.parquet", row_group_size=100
    )
    given = {"items": [str(tmp_path / "i.parquet")], "output": str(tmp_path / "t.grtrie")}
    pieces = refuse_whole_reads(monkeypatch)
    trie = run_build_trie(BuildTrieSettings.model_validate(given), ignore).trie
    assert (sum(pieces), max(pieces)) == (100, 7)
    assert trie is not None
    rows, _ = trie.rows_of_items(list(range(100)))
    assert [tuple(sid) for sid in trie.sids(trie.leaf_of_rows(rows))] == sids


def test_f43_nested_queries_past_2_gib_are_read_in_pieces(tmp_path, monkeypatch):
    """In one piece Arrow refuses this row group, whose one text of 1 MiB stands on the disk but once."""
    rows, text = 2_100, "w" * (1 << 20)
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([text]))
    history = pa.ListArray.from_arrays(pa.array(range(rows + 1), pa.int32()), texts)
    table = pa.table({"input_ids": [[row] for row in range(rows)], "history": history})
    pq.write_table(table, tmp_path / "q.parquet", row_group_size=rows, store_schema=False)
    pieces = refuse_whole_reads(monkeypatch)
    queries = inputs.open_queries([tmp_path / "q.parquet"])
    reader = inputs.UnitReader(queries, ["input_ids", "history"])
    for unit in plan_units([queries.files[0].row_groups], 100):
        read = reader.read(unit)
        assert read["input_ids"].to_pylist() == [[unit.first_row + row] for row in range(100)]
        assert read["history"][99].as_py() == [text]
    assert (sum(pieces), max(pieces)) == (rows, 100)


def test_f44_texts_past_2_gib_have_offsets_that_reach_them():
    """The first id is 2.2 GB of zeros that nobody reads: pages of zeros take no memory."""
    trie = trie_of(np.array([[0, 0], [0, 1], [1, 0], [1, 1]]), ["a", "b", "c", "d"])
    text = np.zeros(2_200_000_000, np.uint8)
    text[-3:] = np.frombuffer(b"bcd", np.uint8)
    ends = np.array([0, *range(len(text) - 3, len(text) + 1)], np.int64)
    large = pa.LargeStringArray.from_buffers(4, pa.py_buffer(ends), pa.py_buffer(text))
    trie = replace(trie, item_ids=large)
    assert trie.leaf_of_items(["d", "c", "x"]).tolist() == [3, 2, -1]
    assert trie.items(np.array([3, 1]))[0].to_pylist() == ["d", "b"]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_f44_prompts_in_several_chunks_are_never_joined(world, tmp_path, monkeypatch, kind):
    """Arrow cuts a column of more than 2 GiB into chunks; here it cuts every two rows."""
    prompts = pa.array([f"w{n} w1" for n in range(9)], kind)
    columns = {"prompt": prompts, "note": prompts, "seen": [[100 + n] for n in range(9)]}
    world.recall(tmp_path / "whole.parquet", columns, deny_column="seen")
    monkeypatch.setattr(inputs, "BATCH_ROWS", 2)
    world.recall(tmp_path / "cut.parquet", columns, deny_column="seen")
    whole, cut = (pq.read_table(tmp_path / name) for name in ("whole.parquet", "cut.parquet"))
    assert cut.equals(whole)


def test_f46_empty_shards_and_row_groups_are_passed_over(world, tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    texts = pa.schema([("prompt", pa.string()), ("note", pa.string())])
    rows = [{"prompt": f"w{row} w1", "note": f"n{row}"} for row in range(7)]
    pq.ParquetWriter(folder / "a.parquet", texts).close()
    with pq.ParquetWriter(folder / "b.parquet", texts) as writer:
        for part in (rows[:2], [], rows[2:3], [], []):
            writer.write_table(pa.Table.from_pylist(part, texts))
    write(folder / "c.parquet", {"prompt": pa.nulls(0), "note": pa.nulls(0)})
    write(folder / "d.parquet", {"prompt": [row["prompt"] for row in rows[3:]], "note": pa.nulls(4)})
    write(folder / "e.parquet", {"prompt": pa.nulls(1), "note": ["n7"]})
    assert pq.read_metadata(folder / "a.parquet").num_row_groups == 0
    assert 0 in [pq.read_metadata(folder / "b.parquet").row_group(group).num_rows for group in range(5)]
    whole = write(tmp_path / "whole.parquet", {"prompt": [row["prompt"] for row in rows] + [None]})
    for name, given in (("shards", folder), ("whole", whole)):
        report = world.recall(tmp_path / f"{name}.out.parquet", input=str(given))
        assert (report.rows, report.errors) == (8, {"null_input": 1})
    shards, plain = (pq.read_table(tmp_path / f"{name}.out.parquet") for name in ("shards", "whole"))
    assert shards["row"].to_pylist() == list(range(8))
    assert shards["note"].to_pylist() == ["n0", "n1", "n2", None, None, None, None, "n7"]
    for name in ("sid", "item_id", "error_code"):
        assert shards[name].to_pylist() == plain[name].to_pylist()


def test_f46_an_input_of_empty_shards_is_refused(world, tmp_path):
    for number, columns in enumerate(({"prompt": pa.nulls(0)}, {"prompt": pa.array([], pa.string())})):
        write(tmp_path / f"{number}.parquet", columns)
    pq.ParquetWriter(tmp_path / "2.parquet", pa.schema([("prompt", pa.string())])).close()
    words = ("recall", "--model", str(world.model), "--trie", str(world.trie), "--input", ".", "-o", "out/")
    told = run(*words, cwd=tmp_path)
    assert told.returncode == 2
    assert "there are no queries in 0.parquet, 1.parquet, 2.parquet" in told.stderr
    assert "every file has 0 rows" in told.stderr
    assert "Traceback" not in told.stderr
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".parquet"]


def expected_metrics(found: list[Any], targets: set[Any], k: int) -> dict[str, float]:
    """Metrics of one query, from the definitions: both sides are sets."""
    first = list(dict.fromkeys(found))[:k]
    hits = [rank for rank, one in enumerate(first) if one in targets]
    ideal = sum(1 / np.log2(rank + 2) for rank in range(min(k, len(targets))))
    gain = sum(1 / np.log2(rank + 2) for rank in hits)
    return {f"recall@{k}": len(hits) / len(targets), f"hit@{k}": float(bool(hits)), f"ndcg@{k}": gain / ideal}


def test_f54_duplicates_on_either_side_count_once(world, tmp_path):
    """Item 0 is on two SIDs, so that it is among the answers twice; and it is a target twice."""
    sids = [(a, b, 3) for a in (1, 4, 6) for b in range(4)]
    trie = str(build(tmp_path, sids, ids=[0, *range(11)]))
    targets = [[0, 0], [0, 4, 0, 99, 99]]
    columns = {"input_ids": [PROMPT] * 2, "target": targets}
    changes = {"trie": trie, "truth_column": "target", "beams": "60"}
    metrics = world.recall(tmp_path / "o.parquet", columns, **changes).summary["metrics"]
    rows = pq.read_table(tmp_path / "o.parquet").to_pylist()
    assert [row["item_id"].count(0) for row in rows] == [2, 2]
    for k in (1, 10):
        each = [expected_metrics(row["item_id"], set(one), k) for row, one in zip(rows, targets, strict=True)]
        for name in each[0]:
            assert metrics["items"][name] == pytest.approx((each[0][name] + each[1][name]) / 2)
    assert 0 < metrics["items"]["recall@10"] <= (1 + 2 / 3) / 2
    assert metrics["target_in_catalogue"] == pytest.approx((1 + 2 / 3) / 2)


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.int64()),
        pa.large_list(pa.int32()),
        pa.list_(pa.int64(), 2),
        pa.list_view(pa.int16()),
        pa.list_(pa.dictionary(pa.int32(), pa.int64())),
    ],
    ids=str,
)
def test_f55_targets_are_a_set_whatever_list_they_are_in(world, tmp_path, kind):
    sids = [(a, b, a ^ b) for a in range(4) for b in range(3)]
    trie, targets = str(build(tmp_path, sids)), [[0, 1], [7, 7], [11, 3]]
    columns = {"input_ids": [PROMPT, [1], [2, 3]], "target": pa.array(targets, kind)}
    changes = {"trie": trie, "truth_column": "target", "beams": "60"}
    metrics = world.recall(tmp_path / "o.parquet", columns, **changes).summary["metrics"]
    rows = pq.read_table(tmp_path / "o.parquet").to_pylist()
    for k in (1, 10):
        each = [expected_metrics(row["item_id"], set(one), k) for row, one in zip(rows, targets, strict=True)]
        for name in each[0]:
            assert metrics["items"][name] == pytest.approx(np.mean([one[name] for one in each]))
    assert 0 < metrics["items"]["recall@10"] <= 1
    assert (metrics["n_eval"], metrics["target_in_catalogue"]) == (3, 1.0)


def test_f57_collapsed_sids_do_not_look_like_items_that_are_found(world, tmp_path):
    items = 5
    trie = str(build(tmp_path, [(1, 2, 3)] * items))
    columns = {"input_ids": [PROMPT] * items, "target": [[item] for item in range(items)]}
    report = world.recall(tmp_path / "o.parquet", columns, trie=trie, truth_column="target")
    metrics = report.summary["metrics"]
    assert metrics["sids"]["recall@1"] == 1.0
    assert metrics["items"]["recall@1"] == pytest.approx(1 / items)


@pytest.mark.parametrize("name", ["out.parquet", "out"])
def test_f58_the_last_rows_that_fill_no_unit_are_written(world, tmp_path, name):
    columns = {"input_ids": [[n % 50, n // 50] for n in range(101)]}
    world.recall(tmp_path / name, columns, beams="2", unit_rows="50")
    table = pq.read_table(tmp_path / name)
    assert table["row"].to_pylist() == list(range(101))
    assert set(table["status"].to_pylist()) == {"ok"}


def test_f59_another_catalogues_codes_are_told(world, tmp_path):
    sids = [(a, b, 0) for a in range(8) for b in range(8)]
    shuffled = [(b, a, 5) for a, b, _ in sids]
    trie = str(build(tmp_path, sids))
    columns = {"input_ids": [PROMPT] * 64, "target_sid": shuffled}
    report = world.recall(tmp_path / "o.parquet", columns, trie=trie, truth_column="target_sid")
    assert report.summary["metrics"]["target_in_catalogue"] == 0.0
    assert report.summary["metrics"]["sids"]["recall@1"] == 0.0
    assert 0 <= report.summary["sid_mass"] <= 1
    shutil.copytree(world.model, tmp_path / "other")
    config = tmp_path / "other" / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"edited": True}))
    changes = {"model": str(tmp_path / "other"), "truth_column": None}
    same = world.recall(tmp_path / "p.parquet", {"input_ids": [PROMPT]}, **changes).warnings
    assert not any("tokenizer" in warning for warning in same)
    whole = json.loads((tmp_path / "other" / "tokenizer.json").read_text())
    vocabulary, added = whole["model"]["vocab"], {token["content"]: token for token in whole["added_tokens"]}
    for one, other in (("<b_3>", "<b_4>"),):
        vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
        added[one]["id"], added[other]["id"] = added[other]["id"], added[one]["id"]
    whole["added_tokens"].sort(key=lambda token: token["id"])
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(whole))
    with pytest.raises(UsageError, match=r"'<b_3>' is token .* in the trie"):
        world.recall(tmp_path / "q.parquet", {"input_ids": [PROMPT]}, **changes)
    with pytest.raises(UsageError, match=r"'<b_3>' is token .* in the trie"):
        load_catalog(str(world.trie), str(tmp_path / "other"))
    for name in TOKENIZER_FILES:
        (tmp_path / "other" / name).unlink(missing_ok=True)
    warned = world.recall(tmp_path / "r.parquet", {"input_ids": [PROMPT]}, **changes).warnings
    assert any("the model has no tokenizer" in warning for warning in warned)
