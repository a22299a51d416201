"""Views and deletions: stored beside a trie, bound to its catalogue, whole or not there."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grinf.config.load import resolve
from grinf.config.settings import BuildTrieSettings
from grinf.errors import DataError, StorageError, TrieFileError, UsageError
from grinf.jobs.build_trie import run_build_trie
from grinf.jobs.trie_tools import export_trie, lookup_items, lookup_sids, verify_trie
from grinf.jobs.trie_views import delete_items, remove_view, store_view
from grinf.trie import Trie, publish, view_file

TRIE = Path("tries/items.grtrie")
VIEWS = Path("tries/items.grtrie.views")


def save(name: str, **columns) -> Path:
    pq.write_table(pa.table(columns), name)
    return Path(name)


def build(**settings) -> Trie:
    given = {"items": ["items.parquet"], **settings}
    report = run_build_trie(resolve(BuildTrieSettings, given, None), lambda *_: None)
    assert report.trie is not None
    return report.trie


@pytest.fixture(autouse=True)
def catalogue(tmp_path, monkeypatch):
    """Items 10 and 11 share a SID, 12 and 13 have one each."""
    monkeypatch.chdir(tmp_path)
    save("items.parquet", item_id=[10, 11, 12, 13], sid=[[1, 2, 3], [1, 2, 3], [5, 6, 7], [5, 0, 0]])
    build()


def ids(*items) -> list[Path]:
    return [save(f"{'-'.join(map(str, items))}.parquet", item_id=pa.array(items, pa.int64()))]


def live(*views: str) -> list[int]:
    trie = Trie.open(TRIE)
    return sorted(trie.item_ids.filter(pa.array(trie.live_items(views))).to_pylist())


def test_a_view_is_stored_and_the_trie_is_not_touched():
    before = TRIE.stat()
    report = store_view(TRIE, "fresh", ids(10, 13, 99), None, overwrite=False)
    assert (report.status, report.items, report.given, report.unknown) == ("stored", 2, 3, 1)
    assert report.examples == [99]
    assert (TRIE.stat().st_ino, TRIE.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert live("fresh") == [10, 13]
    assert live() == [10, 11, 12, 13]
    assert Trie.open(TRIE).version == Trie.open(TRIE).content_digest == report.version
    assert sorted(path.name for path in TRIE.parent.iterdir()) == ["items.grtrie", "items.grtrie.views"]


def test_a_view_is_replaced_only_if_that_is_said():
    store_view(TRIE, "v", ids(10), None, overwrite=False)
    assert store_view(TRIE, "v", ids(10), None, overwrite=False).status == "unchanged"
    with pytest.raises(UsageError, match=r"the view 'v' of .* exists"):
        store_view(TRIE, "v", ids(11), None, overwrite=False)
    assert store_view(TRIE, "v", ids(11), None, overwrite=True).status == "stored"
    store_view(TRIE, "w", ids(12), None, overwrite=False)
    assert (live("v"), live("w")) == ([11], [12])
    remove_view(TRIE, "v")
    with pytest.raises(UsageError, match="no view 'v'\nit has: w"):
        remove_view(TRIE, "v")
    remove_view(TRIE, "w")
    assert not VIEWS.exists()


def test_deletions_add_up_and_name_a_version():
    whole = Trie.open(TRIE).version
    first = delete_items(TRIE, ids(10), None)
    assert (first.status, first.items, first.version != whole) == ("deleted", 1, True)
    assert delete_items(TRIE, ids(10), None).status == "unchanged"
    second = delete_items(TRIE, ids(10, 12, 99), None)
    assert (second.status, second.items, second.unknown) == ("deleted", 2, 1)
    assert len({whole, first.version, second.version}) == 3
    trie = Trie.open(TRIE)
    assert trie.version == second.version == f"{trie.content_digest}-{view_file.digest(trie.deleted)}"
    assert live() == [11, 13]
    assert delete_items(TRIE, ids(), None).status == "unchanged", "an empty list deletes nothing"


def test_everywhere_a_deleted_item_is_gone():
    store_view(TRIE, "v", ids(10, 12), None, overwrite=False)
    delete_items(TRIE, ids(10, 13), None)
    trie = Trie.open(TRIE)
    assert live("v") == [12]
    items, offsets = trie.items(np.arange(3))
    assert (items.to_pylist(), offsets.tolist()) == ([11, 12], [0, 1, 1, 2])
    assert [found.item_ids for found in lookup_sids(trie, ["1-2-3", "5-0-0"])] == [[11], []]
    assert [found.sid for found in lookup_items(trie, ["10", "12"])] == [[], [5, 6, 7]]
    assert trie.leaf_of_items([10]).tolist() == [0], "a history may name it still"
    assert export_trie(TRIE, Path("out.parquet"), overwrite=False, on_progress=lambda *_: None) == 2
    assert pq.read_table("out.parquet").to_pylist() == [
        {"sid": [1, 2, 3], "item_id": [11]},
        {"sid": [5, 6, 7], "item_id": [12]},
    ]
    delete_items(TRIE, ids(11), None)
    with pytest.raises(UsageError, match="another version"):
        export_trie(TRIE, Path("out.parquet"), overwrite=False, on_progress=lambda *_: None)
    assert export_trie(TRIE, Path("out.parquet"), overwrite=True, on_progress=lambda *_: None) == 1


def test_a_build_brings_everything_back():
    store_view(TRIE, "v", ids(10), None, overwrite=False)
    delete_items(TRIE, ids(12), None)
    assert build().version != Trie.open(TRIE).content_digest, "the same inputs: nothing was built"
    assert build(overwrite=True).version == Trie.open(TRIE).content_digest
    assert not VIEWS.exists()
    assert live() == [10, 11, 12, 13]


def test_views_of_another_catalogue_do_not_hold():
    store_view(TRIE, "v", ids(10), None, overwrite=False)
    delete_items(TRIE, ids(10), None)
    stale = VIEWS.read_bytes()
    save("items.parquet", item_id=[10, 20], sid=[[1, 2, 3], [4, 4, 4]])
    build(overwrite=True)
    VIEWS.write_bytes(stale)  # As after a kill between the two steps of a build.
    assert live() == [10, 20]
    assert Trie.open(TRIE).views == {}
    store_view(TRIE, "w", ids(20), None, overwrite=False)
    assert (live("w"), live()) == ([20], [10, 20])


def test_a_reader_keeps_the_trie_that_it_opened():
    old = Trie.open(TRIE)
    save("items.parquet", item_id=list(range(5000)), sid=[[n // 256, n % 256, n % 7] for n in range(5000)])
    new = build(overwrite=True)
    assert new.content_digest != old.content_digest
    assert old.items(np.arange(3))[0].to_pylist() == [10, 11, 13, 12]
    assert old.sids(np.arange(3)).tolist() == [[1, 2, 3], [5, 0, 0], [5, 6, 7]]
    assert Trie.open(TRIE).num_leaves == 5000


def test_every_flipped_bit_and_truncation_is_found():
    store_view(TRIE, "v", ids(10), None, overwrite=False)
    delete_items(TRIE, ids(12), None)
    assert all(check.is_sound for check in verify_trie(TRIE))
    assert {"view.v", "deleted"} < {check.name for check in verify_trie(TRIE)}
    whole = VIEWS.read_bytes()
    for at in range(len(whole)):
        VIEWS.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
        with pytest.raises(TrieFileError, match=r"the views .* (damaged|cannot be read)"):
            Trie.open(TRIE)
    VIEWS.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert [check.name for check in verify_trie(TRIE) if not check.is_sound] == ["view.v"]
    for length in range(0, len(whole), 7):
        VIEWS.write_bytes(whole[:length])
        with pytest.raises(TrieFileError):
            Trie.open(TRIE)


@pytest.mark.parametrize("junk", [b"PAR1" * 40, b"{}", (2**62).to_bytes(8, "little") + b"{}"])
def test_another_file_in_the_place_of_the_views_is_refused(junk):
    VIEWS.write_bytes(junk)
    with pytest.raises(TrieFileError, match=r"remove tries/items\.grtrie\.views"):
        Trie.open(TRIE)
    with pytest.raises(TrieFileError):
        delete_items(TRIE, ids(10), None)
    assert VIEWS.read_bytes() == junk


@pytest.mark.parametrize("name", ["", "a/b", "a b", "ü?", "a\n"])
def test_names_of_views(name):
    with pytest.raises(UsageError, match="is no name of a view"):
        store_view(TRIE, name, ids(10), None, overwrite=False)


def test_lists_that_cannot_be_meant_are_refused():
    with pytest.raises(DataError, match="none of the 2 item ids is in the catalogue: 98, 99"):
        delete_items(TRIE, ids(98, 99), None)
    with pytest.raises(DataError, match="the view would be empty"):
        store_view(TRIE, "v", ids(), None, overwrite=False)
    with pytest.raises(DataError, match="the trie has int64 ids"):
        delete_items(TRIE, [save("text.parquet", item_id=["10"])], None)
    with pytest.raises(UsageError, match="no column looks like item ids"):
        delete_items(TRIE, [save("two.parquet", a=[10], b=[10])], None)
    with pytest.raises(UsageError, match="has no column 'c'"):
        delete_items(TRIE, [Path("two.parquet")], "c")
    with pytest.raises(TrieFileError, match="there is no trie"):
        delete_items(Path("none.grtrie"), ids(10), None)
    assert not VIEWS.exists()
    assert delete_items(TRIE, [Path("two.parquet")], "b").items == 1
    assert delete_items(TRIE, [save("one.parquet", gone=pa.array([11, None]))], None).items == 2


def test_a_disk_that_is_full_leaves_the_old_file(monkeypatch):
    delete_items(TRIE, ids(10), None)
    before = VIEWS.read_bytes()

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(publish, "publish", refuse)
    with pytest.raises(StorageError, match=r"cannot write tries/items\.grtrie\.views"):
        delete_items(TRIE, ids(11), None)
    assert VIEWS.read_bytes() == before
    assert sorted(path.name for path in TRIE.parent.iterdir()) == ["items.grtrie", "items.grtrie.views"]


KILLED = """
import os, signal, sys
from pathlib import Path
from grinf.jobs.trie_views import delete_items
from grinf.trie import publish
def die(temporary, path):
    temporary.write_bytes(temporary.read_bytes()[:20])
    os.kill(os.getpid(), signal.SIGKILL)
publish.publish = die
delete_items(Path("tries/items.grtrie"), [Path("11.parquet")], None)
"""


def test_a_dry_run_says_it_all_and_writes_nothing():
    report = store_view(TRIE, "v", ids(10, 99), None, overwrite=False, dry_run=True)
    assert (report.status, report.items, report.unknown) == ("planned", 1, 1)
    report = delete_items(TRIE, ids(11, 12), None, dry_run=True)
    assert (report.status, report.items) == ("planned", 2)
    assert not VIEWS.exists()
    store_view(TRIE, "v", ids(10), None, overwrite=False)
    before = VIEWS.read_bytes()
    assert remove_view(TRIE, "v", dry_run=True).status == "planned"
    assert store_view(TRIE, "v", ids(10), None, overwrite=False, dry_run=True).status == "unchanged"
    with pytest.raises(UsageError, match="exists"):
        store_view(TRIE, "v", ids(11), None, overwrite=False, dry_run=True)
    assert VIEWS.read_bytes() == before


def test_ids_that_cannot_be_read_are_named():
    texts = pa.array([b"a", b"\xff\xfe"]).cast(pa.string(), safe=False)
    with pytest.raises(DataError, match=r"t.parquet row 1 .*the item id is not UTF-8"):
        delete_items(TRIE, [save("t.parquet", item_id=texts)], None)
    two = pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["item_id", "item_id"])
    pq.write_table(two, "two-names.parquet")
    with pytest.raises(DataError, match="columns of the same name"):
        delete_items(TRIE, [Path("two-names.parquet")], None)


def test_a_kill_midway_leaves_the_old_file_whole():
    delete_items(TRIE, ids(10), None)
    ids(11)
    killed = subprocess.run(
        [sys.executable, "-c", KILLED], env={**os.environ, "PYTHONPATH": ROOT}, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    assert live() == [11, 12, 13]
    assert delete_items(TRIE, ids(11), None).items == 2


ROOT = str(Path(__file__).parents[2])
DELETE = """
import sys
from pathlib import Path
from grinf.jobs.trie_views import delete_items
delete_items(Path("tries/items.grtrie"), [Path(sys.argv[1])], None)
"""


def test_two_processes_lose_nothing():
    with view_file.locked(TRIE):
        commands = [[sys.executable, "-c", DELETE, str(ids(item)[0])] for item in (10, 12, 13)]
        environment = {**os.environ, "PYTHONPATH": ROOT}
        running = [subprocess.Popen(command, env=environment) for command in commands]
        time.sleep(0.5)
        assert live() == [10, 11, 12, 13], "they wait"
    assert [process.wait(timeout=60) for process in running] == [0, 0, 0]
    assert live() == [11]
