"""Where outputs may be, and that they appear whole or not at all."""

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from grinf.config.settings import BenchSettings, BuildTrieSettings, DemoSettings, MakeSidsSettings
from grinf.errors import EnvironmentFault, StorageError, TrieFileError, UsageError
from grinf.jobs.bench.run_dir import RunDir
from grinf.jobs.bench.sweep import run_bench
from grinf.jobs.build_trie import run_build_trie
from grinf.jobs.demo.files import DemoFiles
from grinf.jobs.make_sids import run_make_sids
from grinf.jobs.outputs import existing, exists, place, refuse_inputs, writing
from grinf.jobs.parquet_files import find_files
from grinf.jobs.trie_tools import export_trie, verify_trie
from grinf.jobs.trie_views import delete_items
from grinf.model.config import read_config
from grinf.trie import Trie
from grinf.trie.publish import replacing
from grinf.trie.tokens import load_tokenizer


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/a.parquet").write_text("a")
    Path("link").symlink_to("data")


@pytest.mark.parametrize(
    "place", ["data/a.parquet", "link/a.parquet", "./data/../link/a.parquet", "data", "link", "."]
)
def test_what_holds_an_input_is_refused_by_any_path(place):
    for given in ("data/a.parquet", "link/a.parquet"):
        with pytest.raises(UsageError, match=r"--output .* would replace the input .*/data/a.parquet"):
            refuse_inputs([Path(place)], [Path(given)], flag="--output")
        with pytest.raises(UsageError, match="would replace the input"):
            refuse_inputs([Path("new"), Path(place)], [Path(given)])


@pytest.mark.parametrize(
    ("place", "is_read"),
    [
        ("data/new.parquet", True),
        ("link/deep/new.pq", True),
        ("data/new.grtrie", False),
        ("data/_new/new.parquet", False),
        ("data/.new.parquet", False),
        ("new.parquet", False),
        ("data2/new.parquet", False),
    ],
)
def test_what_the_next_run_would_read_is_refused(place, is_read):
    if not is_read:
        refuse_inputs([Path(place)], [Path("data/a.parquet")], [Path("data")])
        return
    with pytest.raises(UsageError, match="would read it as an input the next time"):
        refuse_inputs([Path(place)], [Path("data/a.parquet")], [Path("data")])


def test_an_output_is_ours_or_in_the_way():
    assert existing(Path("new"), Path.read_text, "grinf x") is None
    assert existing(Path("data/a.parquet"), Path.read_text, "grinf x") == "a"
    with pytest.raises(UsageError, match="`grinf x` did not write it\nmove it away") as error:
        existing(Path("data/a.parquet"), lambda path: None, "grinf x")
    assert "--overwrite" not in str(error.value)
    for folder in ("data", "."):
        with pytest.raises(UsageError, match="is a folder") as error:
            existing(Path(folder), Path.read_text, "grinf x")
        assert "--overwrite" not in str(error.value)
    assert "--overwrite" in str(exists(Path("new")))


def test_a_file_appears_whole_or_not_at_all():
    path = Path("new/deep/file")
    with replacing(path) as temporary:
        temporary.write_text("one")
        assert not path.exists()
    with pytest.raises(UnicodeEncodeError), replacing(path) as temporary:
        temporary.write_text("two \ud800", encoding="utf-8")
    assert path.read_text() == "one"
    assert [other.name for other in path.parent.iterdir()] == ["file"]


def test_what_the_file_system_refuses_is_told():
    with pytest.raises(StorageError, match="cannot write new"), writing(Path("new")):
        Path("data/a.parquet/new").write_text("x")


# Places where nothing can be, and links.

IMPOSSIBLE = {
    "file.txt/out.parquet": "file.txt is no folder",
    "file.txt/deep/out.parquet": "file.txt is no folder",
    "n" * 300 + ".parquet": "a name is too long",
    "n" * 244 + ".parquet": "a name is too long",
    "new/" + "n" * 300 + "/out.parquet": "a name is too long",
    "/".join(["n" * 200] * 25) + "/out.parquet": "a name is too long",
    "loop": "the links lead in a circle",
    "loop/out.parquet": "loop is no folder",
    "lost/out.parquet": "lost is no folder",
}


def ignore(*_):
    pass


def build(output):
    settings = {"items": ["items.parquet"], "output": str(output), "overwrite": True}
    return run_build_trie(BuildTrieSettings.model_validate(settings), ignore)


def make_sids(output):
    settings = {"embeddings": ["items.parquet"], "output": str(output), "codebook_size": 2, "overwrite": True}
    return run_make_sids(MakeSidsSettings.model_validate(settings), ignore)


def export(output):
    export_trie(Path("t.grtrie"), Path(output), overwrite=True, on_progress=ignore)


def bench(output):
    spec = "sim:base=9ms,per_req=4.5ms,max_batch=16"
    settings = {"sla": "100ms", "engine": spec, "preset": "smoke", "input_len": "100", "output": str(output)}
    run_bench(BenchSettings.model_validate(settings), ignore)


def demo(output):
    DemoFiles(DemoSettings.model_validate({"output": str(output)}))


WRITERS = {"build-trie": build, "make-sids": make_sids, "trie export": export, "bench": bench, "demo": demo}


@pytest.fixture
def catalogue():
    vectors = pa.array(list(np.eye(4, dtype=np.float32)))
    columns = {"item_id": [1, 2, 3, 4], "sid": ["1-2", "1-3", "2-0", "2-1"], "embedding": vectors}
    pq.write_table(pa.table(columns), "items.parquet")
    build("t.grtrie")
    Path("file.txt").write_text("mine")
    Path("loop").symlink_to("loop2")
    Path("loop2").symlink_to("loop")
    Path("lost").symlink_to("nowhere")


@pytest.mark.parametrize("writer", list(WRITERS))
@pytest.mark.parametrize("path", list(IMPOSSIBLE))
def test_a_place_where_nothing_can_be_is_refused_by_every_command(catalogue, writer, path):
    before = sorted(os.listdir())
    if writer == "bench" and len(path) == 252:
        return  # A folder of results, which stays as it is named.
    with pytest.raises(UsageError, match=r"^-o .* cannot be written") as told:
        WRITERS[writer](path)
    assert told.value.exit_code == 2
    assert path.partition("/")[0] in told.value.what
    expected = IMPOSSIBLE[path] if writer != "bench" or path != "loop" else "loop is no folder"
    assert expected in told.value.why
    assert told.value.fix == "choose another -o"
    assert sorted(os.listdir()) == before


def test_the_views_of_a_trie_with_a_long_name_have_no_place(catalogue):
    path = Path("t" * 240 + ".grtrie").with_suffix("")
    os.rename("t.grtrie", path)
    with pytest.raises(UsageError, match="a name is too long"):
        delete_items(path, [Path("items.parquet")], None)


@pytest.mark.parametrize("path", [".", "/"])
def test_a_folder_without_a_name_is_no_trie(catalogue, path):
    for use in (Trie.open, verify_trie, lambda trie: delete_items(trie, [Path("items.parquet")], None)):
        with pytest.raises(TrieFileError, match="there is no trie"):
            use(Path(path))
    with pytest.raises(UsageError, match=r"^-o [./] would replace the input"):
        build(path)


@pytest.mark.parametrize("path", ["n" * 300, "new/" + "n" * 300 + "/x", "file.txt/x", "loop"])
def test_an_input_that_cannot_be_there_is_told(catalogue, path):
    for read in (Trie.open, read_config, load_tokenizer, RunDir.open):
        with pytest.raises(EnvironmentFault):
            read(Path(path))
    with pytest.raises(UsageError, match="no parquet file at") as told:
        find_files([Path(path)])
    assert f"did you mean {path}?" not in str(told.value)


def test_a_path_with_a_zero_byte_is_refused():
    with pytest.raises(ValidationError, match="is no path"):
        BuildTrieSettings.model_validate({"items": ["a\0b"]})


def test_an_ordinary_place_is_itself():
    for path in ("new", "new/deep/file", "./data/new", "data/../new", "data/a.parquet", "/", "."):
        assert place(Path(path)) == Path(path)
    Path("to").symlink_to("data/a.parquet")
    Path("ahead").symlink_to("data/deep/new.parquet")
    assert place(Path("to")) == Path("data/a.parquet").absolute()
    assert place(Path("ahead")) == Path("data/deep/new.parquet").absolute()


@pytest.mark.parametrize("writer", ["build-trie", "make-sids", "trie export"])
def test_a_link_is_followed_and_stays(catalogue, writer):
    for target in ("far/one", "far/one", "deep/new/two"):  # Where nothing is, and where something is.
        Path("here").unlink(missing_ok=True)
        Path("here").symlink_to(target)
        WRITERS[writer](Path("here"))
        assert os.readlink("here") == target
        assert Path(target).is_file()
        assert not Path(target).is_symlink()
        assert os.listdir(Path(target).parent) == [Path(target).name]


def test_what_is_deleted_through_a_link_is_deleted(catalogue):
    Path("there").mkdir()
    Path("there/link.grtrie").symlink_to("../t.grtrie")
    gone = pq.read_table("items.parquet").slice(0, 1)
    pq.write_table(gone, "gone.parquet")
    delete_items(Path("there/link.grtrie"), [Path("gone.parquet")], None)
    assert os.listdir("there") == ["link.grtrie"]
    for path in ("t.grtrie", "there/link.grtrie"):
        assert Trie.open(Path(path)).live_items([]).tolist() == [False, True, True, True]
    build("there/link.grtrie")
    assert Path("there/link.grtrie").is_symlink()
    assert Trie.open(Path("t.grtrie")).live_items([]).all()
