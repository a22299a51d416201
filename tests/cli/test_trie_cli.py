"""`grinf build-trie` and `grinf trie` in processes of their own: output, exit codes, files."""

import json
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    save(folder / "items.parquet", item_id=[10, 11, 12, 13], sid=[[1, 2, 3], [1, 2, 3], [5, 6, 7], [5, 0, 0]])
    save(folder / "bad.parquet", item_id=[10, 11], sid=[[1, 2], None])
    assert run(folder, "build-trie", "items.parquet").returncode == 0
    return folder


def save(path, **columns):
    pq.write_table(pa.table(columns), path)


def run(folder, *arguments):
    command = [sys.executable, "-m", "grinf", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)


def test_building_says_what_was_built_and_does_it_once(folder):
    again = run(folder, "build-trie", "items.parquet", "--json")
    told = json.loads(again.stdout)
    assert (again.returncode, told["data"]["result"]) == (0, "unchanged")
    assert told["data"]["trie"]["num_nodes"] == [2, 3, 3]
    assert told["data"]["trie"]["num_items"] == 4
    assert "nothing to do" in told["messages"][0]
    other = run(folder, "build-trie", "items.parquet", "--codebook-sizes", "8,8,8")
    assert other.returncode == 2
    assert "tries/items.grtrie exists" in other.stderr
    assert "--overwrite" in other.stderr


def test_bad_rows_are_named_and_no_file_is_left(folder):
    refused = run(folder, "build-trie", "bad.parquet")
    assert refused.returncode == 2
    assert "bad.parquet row 1 (item_id=11, sid=None): SID is null" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not (folder / "tries" / "bad.grtrie").exists()
    dropped = run(folder, "build-trie", "bad.parquet", "--on-bad-row", "drop", "-o", "dropped.grtrie")
    assert dropped.returncode == 0
    assert "rows left out: SID is null" in dropped.stdout
    assert "left out: bad.parquet row 1" in dropped.stderr


def test_a_dry_run_plans(folder):
    planned = run(folder, "build-trie", "items.parquet", "-o", "planned.grtrie", "--dry-run")
    assert "would write planned.grtrie from 4 rows of 1 files" in planned.stdout
    assert not (folder / "planned.grtrie").exists()


def test_info(folder):
    told = json.loads(run(folder, "trie", "info", "tries/items.grtrie", "--json").stdout)["data"]
    assert (told["shared_items"], told["max_items_per_sid"]) == (2, 2)
    assert told["sources"][0]["path"] == "items.parquet"
    assert "items that share a SID" in run(folder, "trie", "info", "tries/items.grtrie").stdout


def test_lookup(folder):
    found = run(folder, "trie", "lookup", "tries/items.grtrie", "--sid", "1-2-3", "--item", "12", "--json")
    assert json.loads(found.stdout)["data"]["found"] == [
        {"sid": [1, 2, 3], "item_ids": [10, 11]},
        {"sid": [5, 6, 7], "item_ids": [12]},
    ]
    absent = run(folder, "trie", "lookup", "tries/items.grtrie", "--sid", "9,9,9")
    assert absent.returncode == 0
    assert "not here" in absent.stdout
    assert run(folder, "trie", "lookup", "tries/items.grtrie").returncode == 2
    save(folder / "texts.parquet", item_id=["", "x"], sid=[[1, 2], [1, 3]])
    assert run(folder, "build-trie", "texts.parquet").returncode == 0
    empty = run(folder, "trie", "lookup", "tries/texts.grtrie", "--item", "")
    assert "1-2" in empty.stdout
    assert "not here" not in empty.stdout
    for trie in ("tries/texts.grtrie", "tries/items.grtrie"):
        refused = run(folder, "trie", "lookup", trie, "--item", os.fsdecode(b"\xff"))
        assert "is no item id\n  why: the item ids of the catalogue are" in refused.stderr
    for text in ("x", os.fsdecode(b"\xff")):
        refused = run(folder, "trie", "lookup", "tries/items.grtrie", "--sid", text)
        assert refused.returncode == 2
        assert "is no SID of 3 codes\n  fix: write it as 3-9-1" in refused.stderr


def test_what_writes_beside_a_trie_has_a_dry_run(folder):
    save(folder / "some.parquet", item_id=[10])
    (folder / "dry.grtrie").write_bytes((folder / "tries" / "items.grtrie").read_bytes())
    before = sorted(path.name for path in folder.iterdir())
    for arguments, said in (
        (["export", "dry.grtrie", "-o", "dry.parquet"], "would write dry.parquet"),
        (["view", "dry.grtrie", "--name", "v", "--items", "some.parquet"], "--dry-run wrote nothing"),
        (["delete", "dry.grtrie", "--items", "some.parquet"], "--dry-run wrote nothing"),
    ):
        planned = run(folder, "trie", *arguments, "--dry-run")
        assert planned.returncode == 0, planned.stderr
        assert said in planned.stdout
    assert sorted(path.name for path in folder.iterdir()) == before
    refused = run(folder, "trie", "export", "dry.grtrie", "-o", "some.parquet", "--overwrite", "--dry-run")
    assert refused.returncode == 2
    assert "`grinf trie export` did not write it" in refused.stderr


def test_no_command_replaces_its_input(folder):
    files = [folder / "items.parquet", folder / "tries" / "items.grtrie"]
    before = [file.read_bytes() for file in files]
    for arguments in (
        ["build-trie", "items.parquet", "-o", "items.parquet"],
        ["build-trie", "items.*", "-o", "tries/../items.parquet"],
        ["trie", "export", "tries/items.grtrie", "-o", "./tries/items.grtrie"],
    ):
        refused = run(folder, *arguments, "--overwrite")
        assert refused.returncode == 2
        assert "would replace the input" in refused.stderr
    assert [file.read_bytes() for file in files] == before


def test_export_can_be_built_again(folder):
    assert run(folder, "trie", "export", "tries/items.grtrie", "-o", "out.parquet").returncode == 0
    assert pq.read_table(folder / "out.parquet")["item_id"].to_pylist() == [[10, 11], [13], [12]]
    again = run(folder, "trie", "export", "tries/items.grtrie", "-o", "out.parquet")
    assert again.returncode == 0
    assert "out.parquet is up to date" in again.stdout


def test_verify_tells_a_damaged_trie_from_something_else(folder):
    sound = run(folder, "trie", "verify", "tries/items.grtrie")
    assert sound.returncode == 0
    assert "tries/items.grtrie is sound" in sound.stdout
    damaged = bytearray((folder / "tries" / "items.grtrie").read_bytes())
    damaged[-1] ^= 1
    (folder / "damaged.grtrie").write_bytes(damaged)
    found = run(folder, "trie", "verify", "damaged.grtrie")
    assert found.returncode == 4
    assert "damaged: L2.tok" in found.stdout
    for name, data in (("cut.grtrie", damaged[:50]), ("items.parquet", None), ("none.grtrie", None)):
        if data is not None:
            (folder / name).write_bytes(data)
        failed = run(folder, "trie", "verify", name)
        assert failed.returncode == 3
        assert "Traceback" not in failed.stderr
    assert run(folder, "trie", "info", "damaged.grtrie").returncode == 3


def test_views_and_deletions(folder):
    for name, items in (("allow", [10, 13, 99]), ("gone", [13]), ("nobody", [77])):
        save(folder / f"{name}.parquet", item_id=items)
    (folder / "v.grtrie").write_bytes((folder / "tries" / "items.grtrie").read_bytes())
    view = run(folder, "trie", "view", "v.grtrie", "--name", "fresh", "--items", "allow.parquet")
    assert view.returncode == 0
    assert "view 'fresh' of v.grtrie: 2 of 4 items" in view.stdout
    assert "1 of 3 item ids are not in the catalogue: 99" in view.stderr
    deleted = run(folder, "trie", "delete", "v.grtrie", "--items", "gone.parquet", "--json")
    told = json.loads(deleted.stdout)["data"]
    assert (told["status"], told["items"]) == ("deleted", 1)
    info = json.loads(run(folder, "trie", "info", "v.grtrie", "--json").stdout)["data"]
    assert (info["views"], info["deleted_items"]) == ({"fresh": 1}, 1)
    assert info["version"] == told["version"] != info["content_digest"]
    shown = run(folder, "trie", "info", "v.grtrie").stdout
    assert "view fresh" in shown
    assert "deleted items" in shown
    for arguments, said in (
        (
            ["delete", "v.grtrie", "--items", "nobody.parquet"],
            "none of the 1 item ids is in the catalogue: 77",
        ),
        (["view", "v.grtrie", "--name", "fresh", "--items", "gone.parquet"], "--overwrite"),
        (["view", "v.grtrie", "--name", "old", "--remove"], "it has: fresh"),
        (["view", "v.grtrie", "--name", "fresh"], "a view is stored or removed"),
    ):
        refused = run(folder, "trie", *arguments)
        assert refused.returncode == 2
        assert said in refused.stderr
        assert "Traceback" not in refused.stderr


def test_verify_finds_a_damaged_view(folder):
    save(folder / "one.parquet", item_id=[10])
    (folder / "w.grtrie").write_bytes((folder / "tries" / "items.grtrie").read_bytes())
    assert run(folder, "trie", "view", "w.grtrie", "--name", "v", "--items", "one.parquet").returncode == 0
    assert "view.v" in run(folder, "trie", "verify", "w.grtrie").stdout
    damaged = bytearray((folder / "w.grtrie.views").read_bytes())
    damaged[-1] ^= 1
    (folder / "w.grtrie.views").write_bytes(damaged)
    found = run(folder, "trie", "verify", "w.grtrie")
    assert (found.returncode, "damaged: view.v" in found.stdout) == (4, True)
    assert run(folder, "trie", "info", "w.grtrie").returncode == 3


def test_a_catalogue_in_json(folder):
    (folder / "X.index.json").write_text(json.dumps({"0": ["<a_1>", "<b_2>"], "1": ["<a_1>", "<b_3>"]}))
    built = run(folder, "build-trie", "X.index.json")
    assert built.returncode == 0, built.stderr
    assert "wrote tries/X.index.grtrie" in built.stdout
    found = run(folder, "trie", "lookup", "tries/X.index.grtrie", "--item", "1")
    assert "1-3" in found.stdout


@pytest.mark.parametrize("kind", ["skewed", "uniform"])
def test_the_benchmark_measures_a_build(folder, repository, kind):
    script = repository / "benchmarks" / "build_trie.py"
    command = [sys.executable, str(script), "--items", "2000", "--kind", kind, "--memory-limit", "64MiB"]
    measured = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=repository).stdout)
    assert (measured["items"], measured["build_s"] > 0) == (2000, True)
    assert measured["peak_memory_mib"] > 10
