"""The trie file: what is read back, and every way in which a file can be wrong."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from grinf.errors import CapacityError, TrieFileError
from grinf.trie import Trie
from grinf.trie.build import ItemRows, Layout, Provenance, RowStore, build_trie
from grinf.trie.store import code_dtype, narrow, pointer_dtype, read_manifest


@pytest.fixture
def path(tmp_path) -> Path:
    import pyarrow as pa

    folder = tmp_path / "work"
    folder.mkdir()
    rows = RowStore(folder)
    codes = np.array([[0, 1, 2], [0, 1, 2], [3, 0, 0], [3, 2, -1]], np.int32)
    rows.add(ItemRows(codes, pa.array([7, 8, 9, 10]), np.array([1.0, 2.0, 0.0, 5.0])))
    built = build_trie(rows, Layout((4, 3, 3), "</s>"), folder, provenance=Provenance(rows_read=4))
    return built.rename(tmp_path / "a.grtrie")


def test_a_file_reads_back(path):
    trie = Trie.open(path)
    assert trie.codebook_sizes == (4, 3, 3)
    assert trie.num_nodes == (2, 3, 3)
    assert trie.sids(np.arange(3)).tolist() == [[0, 1, 2], [3, 0, 0], [3, 2, -1]]
    assert trie.items(np.array([0, 2]))[0].to_pylist() == [8, 7, 10]
    assert trie.item_weights is not None
    assert trie.item_weights.tolist() == [2.0, 1.0, 0.0, 5.0]
    assert trie.manifest.rows_read == 4
    assert not trie.codes[0].flags.writeable


def test_it_is_a_safetensors_file(path):
    with safe_open(str(path), framework="numpy") as container:
        assert container.get_tensor("L0.tok").tolist() == [0, 3]
        assert container.get_tensor("L0.tok").dtype == np.uint16
        assert json.loads(container.metadata()["grinf.manifest"])["num_items"] == 4
    header = int.from_bytes(path.read_bytes()[:8], "little")
    assert (header + 8) % 64 == 0


def test_every_flipped_bit_is_found(path):
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
        with pytest.raises(TrieFileError):
            Trie.open(path)
    path.write_bytes(whole)
    assert Trie.open(path).num_leaves == 3


def test_every_truncation_is_found(path):
    whole = path.read_bytes()
    for length in [*range(0, len(whole), 13), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(TrieFileError):
            Trie.open(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(TrieFileError):
        Trie.open(path)


@pytest.mark.parametrize("start", [b"PAR1" * 40, b"\xff" * 400, (2**62).to_bytes(8, "little") + b"{}", b"{}"])
def test_files_of_another_kind_are_no_trie(path, start):
    path.write_bytes(start)
    with pytest.raises(TrieFileError, match="not a whole trie file"):
        Trie.open(path)


def test_another_safetensors_file_is_no_trie(path):
    save_file({"weight": np.zeros(3)}, path)
    with pytest.raises(TrieFileError, match="is not a trie"):
        Trie.open(path)


def test_another_format_version_is_named(path):
    save_file({"weight": np.zeros(3)}, path, metadata={"grinf.format": "2"})
    with pytest.raises(TrieFileError, match="it has format version 2, this grinf reads version 1"):
        Trie.open(path)


def test_a_missing_file_says_how_to_make_one(tmp_path):
    with pytest.raises(TrieFileError, match="grinf build-trie"):
        Trie.open(tmp_path / "none.grtrie")
    with pytest.raises(TrieFileError, match="there is no trie"):
        Trie.open(tmp_path)


def test_a_damaged_tensor_is_named_and_passes_unverified(path):
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(whole)
    with pytest.raises(TrieFileError, match=r"wrong digest: L\d.tok"):
        Trie.open(path)
    assert Trie.open(path, verify=False).num_leaves == 3
    assert read_manifest(path).num_items == 4


def test_f48_widths_follow_the_counts_and_casts_are_checked():
    assert pointer_dtype(2**32 - 1) == np.uint32
    assert pointer_dtype(2**32) == np.uint64
    assert code_dtype(65_536) == np.uint16
    assert code_dtype(65_537) == np.uint32
    assert narrow(np.array([0, 255]), np.dtype("u1")).tolist() == [0, 255]
    with pytest.raises(CapacityError, match="300 does not fit in uint8"):
        narrow(np.arange(301), np.dtype("u1"))
    with pytest.raises(CapacityError):
        narrow(np.array([-1]), np.dtype("<u4"))
