"""Whose files the demo touches, what it remembers, and what grinf.toml says."""

import contextlib
from pathlib import Path

import pytest

from grinf.config.load import resolve
from grinf.config.settings import BuildTrieSettings, DemoSettings, RecallSettings
from grinf.errors import EnvironmentFault, UsageError
from grinf.jobs.demo import catalogue, run_demo
from grinf.jobs.demo.files import DemoFiles, write_table
from grinf.jobs.demo.report import Answer, DemoReport, SystemScore, WidthScore


@pytest.fixture(autouse=True)
def folder(tmp_path):
    with contextlib.chdir(tmp_path):
        yield tmp_path


def report(files: DemoFiles) -> DemoReport:
    return DemoReport(
        num_items=2,
        num_train=1,
        num_test=1,
        num_compared=1,
        num_parameters=10,
        steps=1,
        loss=0.5,
        systems=(SystemScore("chance", (0.1, 0.2, 0.3)),),
        recall={1: 0.1, 900: 1.0},
        widths=(WidthScore("10", (0.1, 0.2, None, None), 0.5, 10.0),),
        answers=(Answer("q", ("A a",), ("A a", "B b"), (True, False)),),
        seconds={"train": 1.5},
        items=files.items,
        queries=files.queries,
        model=files.model,
        trie=files.trie,
    )


def finished(settings: DemoSettings) -> DemoReport:
    """Leave behind what a demo leaves."""
    files = DemoFiles(settings)
    assert files.claim() is None
    files.write_settings("<s_{letter}_{code}>", "<|sid_begin|>", "20-300-900")
    write_table(files.items, {"item_id": ["A"]})
    files.model.mkdir()
    files.trie.parent.mkdir()
    files.trie.touch()
    files.keep(report(files))
    return report(files)


def test_settings_that_the_commands_read(folder):
    DemoFiles(DemoSettings()).write_settings("<s_{letter}_{code}>", "<|sid_begin|>", "20-300-900")
    build = resolve(BuildTrieSettings, {"items": ["demo/items.parquet"]})
    assert (build.tokenizer, build.token_template) == (Path("demo/model"), "<s_{letter}_{code}>")
    recall = resolve(RecallSettings, {"input": ["demo/queries.parquet"]})
    assert (recall.model, recall.trie) == (Path("demo/model"), Path("tries/items.grtrie"))
    assert (recall.beams, recall.suffix) == ((20, 300, 900), ("<|sid_begin|>",))
    assert (recall.input_column, recall.truth_column) == ("prompt", "truth")


def test_a_path_with_quotes_is_still_a_setting(folder):
    DemoFiles(DemoSettings(output=folder / 'a "b" \\c')).write_settings("<{letter}{code}>", "<x>", "10")
    assert resolve(RecallSettings, {"input": ["q"]}).model == folder / 'a "b" \\c' / "model"


def test_a_finished_demo_is_shown_again(folder):
    made = finished(DemoSettings())
    again = DemoFiles(DemoSettings()).claim()
    assert again is not None
    assert not again.is_new
    assert (again.systems, again.recall, again.widths, again.answers, again.items) == (
        made.systems,
        made.recall,
        made.widths,
        made.answers,
        made.items,
    )


def test_overwrite_makes_it_again(folder):
    finished(DemoSettings())
    assert DemoFiles(DemoSettings(overwrite=True)).claim() is None
    assert DemoFiles(DemoSettings()).claim() is None  # Interrupted: it goes on with its own files.


def test_a_demo_that_has_lost_a_file_is_made_again(folder):
    finished(DemoSettings())
    DemoFiles(DemoSettings()).items.unlink()
    assert DemoFiles(DemoSettings()).claim() is None


@pytest.mark.parametrize("changes", [{"full": True}, {"seed": 1}])
def test_a_demo_of_other_settings_is_refused(folder, changes):
    finished(DemoSettings())
    with pytest.raises(UsageError, match="demo is a demo with other settings"):
        DemoFiles(DemoSettings(**changes)).claim()
    assert DemoFiles(DemoSettings(**changes, overwrite=True)).claim() is None


def test_a_users_settings_file_is_refused(folder):
    (folder / "grinf.toml").write_text('model = "mine"\n')
    with pytest.raises(UsageError, match=r"grinf.toml exists"):
        DemoFiles(DemoSettings()).claim()
    assert (folder / "grinf.toml").read_text() == 'model = "mine"\n'
    assert not (folder / "demo").exists()
    with pytest.raises(UsageError, match="move the file away"):
        DemoFiles(DemoSettings(overwrite=True)).claim()
    assert (folder / "grinf.toml").read_text() == 'model = "mine"\n'


def test_a_folder_of_someone_else_is_refused(folder):
    (folder / "demo").mkdir()
    (folder / "demo" / "notes.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(UsageError, match="demo exists"):
            DemoFiles(DemoSettings(overwrite=overwrite)).claim()


def test_a_file_in_the_place_of_the_folder_is_refused(folder):
    (folder / "demo").write_text("mine")
    with pytest.raises(UsageError, match="demo exists"):
        DemoFiles(DemoSettings()).claim()


def test_a_trie_of_someone_else_is_refused_before_the_training(folder):
    (folder / "tries").mkdir()
    (folder / "tries" / "items.grtrie").write_text("mine")
    with pytest.raises(UsageError, match=r"tries/items.grtrie exists"):
        DemoFiles(DemoSettings()).claim()
    assert not (folder / "demo").exists()


def test_nothing_is_written_when_the_data_is_not_installed(folder, monkeypatch):
    monkeypatch.setattr(catalogue, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentFault, match="the demo's data is not installed"):
        run_demo(DemoSettings(), lambda stage, done, total: None)
    assert list(folder.iterdir()) == []
