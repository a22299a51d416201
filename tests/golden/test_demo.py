"""The demo end to end at a small budget: real data, a model that has learned, files that commands take."""

import contextlib
import shutil
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from grinf.config.load import resolve
from grinf.config.settings import BenchSettings, BuildTrieSettings, DemoSettings, RecallSettings
from grinf.errors import UsageError
from grinf.jobs.build_trie import run_build_trie
from grinf.jobs.demo import run_demo
from grinf.jobs.demo.catalogue import find_tabular_list
from grinf.jobs.demo.files import DemoFiles
from grinf.jobs.demo.make import make
from grinf.jobs.demo.stages import Stages
from grinf.jobs.recall import run_recall
from grinf.trie import Trie

pytest_plugins = ["tests.demo_fixture"]
pytestmark = pytest.mark.slow


def silent(stage, done, total):
    pass


def test_the_retriever_has_learned(small_demo):
    systems = {score.system.partition(",")[0]: score.recall for score in small_demo.report.systems}
    chance, ours = systems["chance"], systems["grinf"]
    assert chance == (1 / 401, 10 / 401, 100 / 401)
    assert ours[0] > 0.15
    assert ours[1] > 0.4 > 2 * systems["popularity"][1]
    assert systems["BM25 on titles + training queries"][1] > systems["BM25 on titles"][1] > 0.3
    assert systems["nearest neighbour"][1] > 0.3


def test_the_trie_is_what_makes_beams_legal(small_demo):
    legal = [score.legal_share for score in small_demo.report.widths]
    assert all(0 <= share < 0.9 for share in legal)
    assert max(legal) > 0.02
    assert [score.beams for score in small_demo.report.widths] == ["10", "100", "900", "20-300-900"]
    narrow, wide = small_demo.report.widths[0], small_demo.report.widths[2]
    assert narrow.recall[2:] == (None, None)
    assert wide.recall[2] == 1.0 or wide.recall[2] >= narrow.recall[1]


def test_items_have_unique_sids_and_codes_have_one_token(small_demo):
    items = pq.ParquetFile(small_demo.folder / small_demo.report.items).read()
    sids = {tuple(sid) for sid in items["sid"].to_pylist()}
    assert len(sids) == items.num_rows == small_demo.report.num_items == 401
    tokenizer = AutoTokenizer.from_pretrained(small_demo.model)
    tokens = [f"<s_{letter}_{code}>" for letter in "abc" for code in range(256)]
    ids = [tokenizer.encode(token, add_special_tokens=False) for token in tokens]
    assert all(len(one) == 1 for one in ids)
    assert [one[0] for one in ids] == list(range(len(tokenizer) - 768, len(tokenizer)))


def test_the_checkpoint_is_a_hugging_face_qwen3(small_demo):
    model = AutoModelForCausalLM.from_pretrained(small_demo.model)
    assert (model.config.model_type, model.config.head_dim) == ("qwen3", 64)
    assert model.num_parameters() == small_demo.report.num_parameters


def test_the_commands_run_with_no_further_flag(small_demo, tmp_path):
    with contextlib.chdir(small_demo.folder):
        again = run_build_trie(resolve(BuildTrieSettings, {"items": ["demo/items.parquet"]}), silent)
        assert again.status == "unchanged"
        flags = {"input": ["demo/queries.parquet"], "limit": "10", "output": str(tmp_path / "out.parquet")}
        settings = resolve(RecallSettings, flags)
        assert settings.beams == (20, 300, 900)
        report = run_recall(settings, silent)
        bench = resolve(BenchSettings, {"sla": ["100ms"]})
    assert report.summary["metrics"]["n_eval"] == report.summary["ok"] == 10
    assert (str(bench.model), str(bench.trie), bench.beams) == (
        "demo/model",
        "tries/items.grtrie",
        ((20, 300, 900),),
    )


def test_test_queries_are_in_the_catalogue(small_demo):
    queries = pq.ParquetFile(small_demo.queries).read()
    codes = [code for truth in queries["truth"].to_pylist() for code in truth]
    assert queries.num_rows == small_demo.report.num_test == 93
    assert (Trie.open(small_demo.trie).leaf_of_items(codes) >= 0).all()


def test_answers_are_titles_of_the_catalogue(small_demo):
    items = pq.ParquetFile(small_demo.folder / small_demo.report.items).read().to_pylist()
    titles = {f"{item['item_id']} {item['title']}" for item in items}
    answers = small_demo.report.answers
    assert len(answers) == 5
    assert {title for answer in answers for title in (*answer.titles, *answer.wanted)} <= titles
    assert all(answer.found == tuple(title in answer.wanted for title in answer.titles) for answer in answers)


def test_a_second_run_shows_the_first_report(small_demo):
    with contextlib.chdir(small_demo.folder):
        again = run_demo(DemoSettings(), silent, small_demo.plan)
    assert again == replace(small_demo.report, is_new=False)


def test_two_runs_make_the_same_files(small_demo, tmp_path):
    plan = replace(small_demo.plan, steps=3)
    for name in ("a", "b"):
        files = DemoFiles(DemoSettings(output=tmp_path / name))
        make(plan, find_tabular_list(), files, seed=7, stages=Stages(silent))
    for file in ("items.parquet", "queries.parquet", "model/model.safetensors", "model/tokenizer.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_a_demo_of_other_settings_is_refused(small_demo, tmp_path):
    shutil.copytree(small_demo.folder, tmp_path, dirs_exist_ok=True)
    with contextlib.chdir(tmp_path), pytest.raises(UsageError, match="demo is a demo with other settings"):
        run_demo(DemoSettings(seed=1), silent, small_demo.plan)
