"""`grinf make-sids`: vectors in, SIDs out that `grinf build-trie` reads; what is refused, and not redone."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grinf.config.settings import BuildTrieSettings, MakeSidsSettings
from grinf.errors import DataError, UsageError
from grinf.jobs.build_trie import run_build_trie
from grinf.jobs.make_sids import MakeSidsReport, run_make_sids

VECTORS = np.random.default_rng(0).normal(size=(60, 5)).astype(np.float32)


def save(path: Path, vectors: object = VECTORS, **columns: object) -> Path:
    vectors = list(vectors) if isinstance(vectors, np.ndarray) else vectors
    given = {"item_id": [f"item-{n}" for n in range(len(vectors))], "embedding": vectors} | columns
    pq.write_table(pa.table(given), path)
    return path


def make(*paths: Path, **changes: object) -> MakeSidsReport:
    settings = MakeSidsSettings(
        embeddings=paths, output=paths[0].with_suffix(".out.parquet"), codebook_size=8
    )
    return run_make_sids(settings.model_copy(update=changes), lambda stage, done, total: None)


def test_sids_stand_beside_the_other_columns_and_build_a_trie(tmp_path):
    report = make(save(tmp_path / "items.parquet", weight=list(range(60))), unique=True)
    table = pq.ParquetFile(report.output).read()
    assert table.column_names == ["item_id", "weight", "sid"]
    assert len({tuple(sid) for sid in table["sid"].to_pylist()}) == 60
    assert (report.num_items, report.dim, report.quality.sids, report.quality.items_sharing) == (60, 5, 60, 0)
    built = run_build_trie(
        BuildTrieSettings(items=(report.output,), output=tmp_path / "t.grtrie"),
        lambda stage, done, total: None,
    )
    assert built.trie.manifest.num_items == 60


def test_files_are_read_as_one_catalogue(tmp_path):
    ids = [f"item-{n}" for n in range(60)]
    first = save(tmp_path / "a.parquet", VECTORS[:30], item_id=ids[:30])
    second = save(tmp_path / "b.parquet", VECTORS[30:], item_id=ids[30:])
    apart, whole = make(first, second), make(save(tmp_path / "c.parquet"))
    sids = [pq.ParquetFile(report.output).read()["sid"].to_pylist() for report in (apart, whole)]
    assert sids[0] == sids[1]


@pytest.mark.parametrize(
    ("kind", "scale"),
    [
        (pa.list_(pa.float64()), 1),
        (pa.large_list(pa.float16()), 1),
        (pa.list_(pa.float32(), 5), 1),
        (pa.list_(pa.int64()), 2**26),
    ],
)
def test_every_kind_of_list_is_read(tmp_path, kind, scale):
    vectors = pa.array(
        [(vector * scale).astype(kind.value_type.to_pandas_dtype()) for vector in VECTORS], kind
    )
    assert make(save(tmp_path / "items.parquet", vectors)).dim == 5


def test_an_output_of_the_same_inputs_and_settings_is_kept(tmp_path):
    path = save(tmp_path / "items.parquet")
    assert make(path).status == "made"
    assert make(path).status == "unchanged"
    with pytest.raises(UsageError, match=r"items.out.parquet exists"):
        make(path, seed=1)
    assert make(path, seed=1, overwrite=True).status == "made"
    save(path, VECTORS + 1)
    with pytest.raises(UsageError, match="other inputs or settings"):
        make(path, seed=1)


def test_a_file_of_someone_else_is_refused(tmp_path):
    path = save(tmp_path / "items.parquet")
    output = path.with_suffix(".out.parquet")
    output.write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(UsageError, match="`grinf make-sids` did not write it\nmove it away"):
            make(path, overwrite=overwrite)
    assert output.read_text() == "mine"
    (folder := tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match="is a folder"):
        make(path, output=folder, overwrite=True)


@pytest.mark.parametrize("given", ["items.parquet", "link.parquet", "."])
def test_an_input_is_never_the_output(tmp_path, given):
    path = save(tmp_path / "items.parquet")
    before = path.read_bytes()
    (tmp_path / "link.parquet").symlink_to(path)
    for output in (path, tmp_path / "x" / ".." / "items.parquet", tmp_path / "link.parquet"):
        with pytest.raises(UsageError, match="would replace the input"):
            make(tmp_path / given, output=output, overwrite=True)
    assert path.read_bytes() == before
    with pytest.raises(UsageError, match="would read it as an input the next time"):
        make(tmp_path, output=tmp_path / "sub" / "new.parquet")


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([None, *range(59)], r"row 0: the item id None cannot be used\nitem id is null"),
        ([None] * 60, "row 0: the item id None"),
        (np.arange(60.0), "item column 'item_id' is of type double"),
        (
            pa.array([bytes(15) + bytes([n]) for n in range(60)], pa.uuid()),
            "is of type extension<arrow.uuid>",
        ),
        (np.arange(60, dtype=np.uint64) + 2**63, "does not fit in int64"),
        (pa.array(["x", *map(str, range(58)), "x"]).dictionary_encode(), "item id 'x' is in 2 rows"),
    ],
)
def test_ids_that_no_trie_can_have_are_refused_before_the_work(tmp_path, ids, said):
    with pytest.raises((DataError, UsageError), match=said):
        make(save(tmp_path / "items.parquet", item_id=ids))
    with pytest.raises(UsageError, match="--levels 17 is too many\nSIDs have up to 16 codes"):
        make(save(tmp_path / "items.parquet"), levels=17)
    first, second = save(tmp_path / "a.parquet", VECTORS[:30]), save(tmp_path / "b.parquet", VECTORS[30:])
    with pytest.raises(DataError, match="item id 'item-0' is in 2 rows"):
        make(first, second)


def test_ids_that_are_no_text_and_columns_of_one_name_are_refused(tmp_path):
    ids = pa.array([b"a", b"\xff\xfe", *[b"c"] * 58]).cast(pa.string(), safe=False)
    with pytest.raises(DataError, match=r"items.parquet row 1 .*the item id is not UTF-8"):
        make(save(tmp_path / "items.parquet", item_id=ids))
    vectors = pa.array(list(VECTORS))
    table = pa.Table.from_arrays(
        [pa.array(range(60)), vectors, vectors], ["item_id", "embedding", "embedding"]
    )
    pq.write_table(table, tmp_path / "two.parquet")
    with pytest.raises(DataError, match=r"two.parquet has columns of the same name"):
        make(tmp_path / "two.parquet")


def test_a_dry_run_writes_nothing(tmp_path):
    report = make(save(tmp_path / "items.parquet"), dry_run=True)
    assert (report.status, report.num_items) == ("planned", 60)
    assert not report.output.exists()
    with pytest.raises(DataError, match="row 1: the vector None"):
        make(save(tmp_path / "items.parquet", [[1.0], None]), dry_run=True)


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        ([[1.0, 2.0], [1.0, 1e300]], r"row 1: the vector \[1.0, 1e\+300\] .*\n.*overflows float32"),
        ([[1.0, 2.0], None], r"row 1: the vector None cannot be used\nit is null"),
        ([None, [1.0, 2.0]], r"row 0: the vector None cannot be used\nit is null"),
        ([[1.0, 2.0], [1.0]], r"row 1: the vector \[1.0\]"),
        ([[1.0, 2.0], [1.0, float("nan")]], r"row 1: the vector \[1.0, nan\] .*\n.*NaN or infinite"),
        ([[1.0, 2.0], [1.0, None]], r"row 1: the vector \[1.0, None\]"),
        ([[]], r"row 0: the vector \[\]"),
        ([], "has no rows"),
    ],
)
def test_a_bad_vector_is_named(tmp_path, vectors, message):
    with pytest.raises(DataError, match=message):
        make(save(tmp_path / "items.parquet", pa.array(vectors, pa.list_(pa.float64()))))
    assert [path.name for path in tmp_path.iterdir()] == ["items.parquet"]


def test_columns_that_are_missing_are_named(tmp_path):
    path = save(tmp_path / "items.parquet")
    with pytest.raises(UsageError, match="did you mean 'embedding'"):
        make(path, embedding_column="embeding")
    other = tmp_path / "other.parquet"
    pq.write_table(pa.table({"item_id": ["a"]}), other)
    with pytest.raises(UsageError, match=r"other.parquet has no column 'embedding'"):
        make(path, other)
    with pytest.raises(UsageError, match="vectors are lists of numbers"):
        make(path, embedding_column="item_id")


def test_the_command(tmp_path):
    save(tmp_path / "vectors.parquet")
    command = [sys.executable, "-m", "grinf", "make-sids", "vectors.parquet", "--levels", "2"]
    command += ["--codebook-size", "4"]
    made = subprocess.run([*command, "--json"], capture_output=True, text=True, cwd=tmp_path, check=False)
    told = json.loads(made.stdout)
    assert (made.returncode, told["data"]["output"]) == (0, "vectors.sids.parquet")
    assert told["data"]["quality"]["items"] == 60
    assert 1 < told["data"]["quality"]["sids"] <= 16
    refused = subprocess.run(
        [*command, "--unique"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert refused.returncode == 2
    assert "vectors.sids.parquet exists" in refused.stderr
    forced = subprocess.run(
        [*command, "--unique", "--overwrite"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert forced.returncode == 2
    assert "share all codes but the last, which has 4 values" in forced.stderr
    again = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert "up to date" in again.stdout
