"""The file NAME.grtrie: one safetensors container, with the manifest and a digest of everything in it.

Tensors are written to parts, hashed as they grow, and then joined, so that a catalogue never has to fit in
memory. A file gets its final name only when it is whole and has been read back.
"""

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from safetensors import SafetensorError, safe_open

from grinf.errors import CapacityError, TrieFileError
from grinf.trie.manifest import FORMAT_VERSION, Manifest

DTYPES = {"U8": "|u1", "U16": "<u2", "U32": "<u4", "U64": "<u8", "I32": "<i4", "I64": "<i8", "F64": "<f8"}
ALIGNMENT = 64
REBUILD = "build the trie again with `grinf build-trie`"


@dataclass(frozen=True, slots=True)
class Part:
    """A finished tensor, one dimension, in a file of its own."""

    name: str
    dtype: np.dtype
    length: int
    digest: str
    path: Path


class PartWriter:
    """Writes one tensor in pieces."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype) -> None:
        self._name, self._dtype, self._path = name, dtype, folder / name
        self._file = self._path.open("wb")
        self._digest = xxhash.xxh3_128()
        self._length = 0

    def append(self, values: np.ndarray) -> None:
        """Add values at the end.

        Raises:
            CapacityError: A value that the tensor's dtype cannot hold.
        """
        data = np.ascontiguousarray(narrow(values, self._dtype)).data
        self._digest.update(data)
        self._file.write(data)
        self._length += len(values)

    def close(self) -> Part:
        """End the tensor."""
        self._file.close()
        return Part(self._name, self._dtype, self._length, self._digest.hexdigest(), self._path)


def write_part(folder: Path, name: str, values: np.ndarray) -> Part:
    """Write a tensor that is at hand."""
    writer = PartWriter(folder, name, values.dtype)
    writer.append(values)
    return writer.close()


def narrow(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Convert to another integer type, never wrapping around.

    Raises:
        CapacityError: A value does not fit.
    """
    if values.dtype != dtype and len(values):
        limits = np.iinfo(dtype)
        if int(values.max()) > limits.max or int(values.min()) < limits.min:
            raise CapacityError(
                f"{values.max():,} does not fit in {dtype.name}", "its tensor was planned small"
            )
    return values.astype(dtype, copy=False)


def pointer_dtype(largest: int) -> np.dtype:
    """Smallest dtype for numbers up to `largest`."""
    return np.dtype("<u4" if largest < 2**32 else "<u8")


def code_dtype(limit: int) -> np.dtype:
    """Smallest dtype for codes below `limit`."""
    return np.dtype("<u2" if limit <= 2**16 else "<u4")


def content_digest(tensors: Iterable[tuple[str, np.dtype, int, str]]) -> str:
    """Digest of a set of tensors, given by name, dtype, length and digest; their order does not matter."""
    rows = sorted((name, dtype.str, length, digest) for name, dtype, length, digest in tensors)
    return xxhash.xxh3_128(json.dumps(rows).encode()).hexdigest()


def write_container(path: Path, parts: Sequence[Part], manifest: Manifest) -> None:
    """Join parts into one file."""
    described = manifest.to_json()
    metadata = {
        "grinf.format": str(FORMAT_VERSION),
        "grinf.manifest": described,
        "grinf.manifest_digest": xxhash.xxh3_128(described.encode()).hexdigest(),
    }
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, object] = {"__metadata__": metadata}
    end = 0
    # The widest first, which keeps every tensor aligned.
    in_file = sorted(parts, key=lambda part: (-part.dtype.itemsize, part.name))
    for part in in_file:
        start, end = end, end + part.length * part.dtype.itemsize
        tensor = {"dtype": names[part.dtype.str], "shape": [part.length], "data_offsets": [start, end]}
        header[part.name] = tensor
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for part in in_file:
            with part.path.open("rb") as source:
                shutil.copyfileobj(source, out, 1 << 22)
            part.path.unlink()


def read(path: Path, *, verify: bool) -> tuple[Manifest, dict[str, np.ndarray]]:
    """Map the tensors of a trie file.

    Raises:
        TrieFileError: Missing, damaged, not a trie, or of another format version.
    """
    manifest = read_manifest(path)
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))  # Checked by safetensors, which cannot map numpy arrays.
    del header["__metadata__"]
    is_known = all(tensor["dtype"] in DTYPES for tensor in header.values())
    if header.keys() != manifest.digests.keys() or not is_known:
        raise TrieFileError(f"the trie {path} is damaged", "tensors and manifest do not agree", REBUILD)
    data = np.asarray(np.memmap(path, np.uint8, "r", offset=8 + header_bytes))
    arrays = {
        name: data[slice(*tensor["data_offsets"])].view(DTYPES[tensor["dtype"]])
        for name, tensor in sorted(header.items())
    }
    if verify and (damaged := damaged_tensors(manifest, arrays)):
        raise TrieFileError(f"the trie {path} is damaged", f"wrong digest: {', '.join(damaged)}", REBUILD)
    return manifest, arrays


def is_ours(path: Path, mark: str = "grinf.format") -> bool:
    """Whether a file, whole or damaged, begins as a container of ours, whose notes begin with a mark."""
    start = f'{{"__metadata__":{{"{mark}'.encode()
    with path.open("rb") as file:
        return file.read(8 + len(start))[8:] == start


def read_manifest(path: Path) -> Manifest:
    """Read and check the header of a trie file.

    Raises:
        TrieFileError: Missing, truncated, damaged, not a trie, or of another format version.
    """
    if not os.path.isfile(path):
        raise TrieFileError(f"there is no trie {path}", fix="make one with `grinf build-trie ITEMS.parquet`")
    try:
        with safe_open(str(path), framework="numpy") as container:
            metadata: Mapping[str, str] = container.metadata() or {}
    except (SafetensorError, OSError, UnicodeDecodeError) as error:
        raise TrieFileError(f"{path} is not a whole trie file", str(error), REBUILD) from error
    version = metadata.get("grinf.format")
    if version is None:
        raise TrieFileError(f"{path} is not a trie", "it is a safetensors file of another kind", REBUILD)
    if version != str(FORMAT_VERSION):
        why = f"it has format version {version}, this grinf reads version {FORMAT_VERSION}"
        raise TrieFileError(f"the trie {path} cannot be read", why, REBUILD)
    described = metadata.get("grinf.manifest", "")
    if xxhash.xxh3_128(described.encode()).hexdigest() != metadata.get("grinf.manifest_digest"):
        raise TrieFileError(f"the trie {path} is damaged", "the manifest does not have its digest", REBUILD)
    try:
        return Manifest.from_json(described)
    except ValueError as error:
        raise TrieFileError(f"the manifest of {path} is of another kind", "", REBUILD) from error


def damaged_tensors(manifest: Manifest, arrays: Mapping[str, np.ndarray]) -> list[str]:
    """Names of tensors that are not what the manifest says, byte for byte; or the header, if that is."""
    digests = {name: xxhash.xxh3_128(array.data).hexdigest() for name, array in arrays.items()}
    damaged = [name for name, digest in digests.items() if digest != manifest.digests[name]]
    content = content_digest((name, array.dtype, len(array), digests[name]) for name, array in arrays.items())
    return damaged if damaged or content == manifest.content_digest else ["header"]
