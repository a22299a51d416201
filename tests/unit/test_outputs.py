"""Where outputs may be, and that they appear whole or not at all."""

from pathlib import Path

import pytest

from grinf.errors import StorageError, UsageError
from grinf.jobs.outputs import existing, exists, refuse_inputs, writing
from grinf.trie.publish import replacing


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
