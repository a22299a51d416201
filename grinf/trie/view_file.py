"""The file NAME.grtrie.views beside a trie: named views and deleted items, a bit per item row.

It is apart from the trie because it changes often and the trie is large: a change writes a few megabytes and
maps nothing anew. It names the catalogue by its content digest. For another catalogue, such as one that was
built from newer items under the same name, it does not hold and is not read: what a build says, counts.
"""

import fcntl
import json
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from grinf.errors import TrieFileError
from grinf.trie import store
from grinf.trie.publish import follow, replacing

FORMAT_VERSION = 1
DELETED = "deleted"
VIEW = "view."


@dataclass(frozen=True, slots=True)
class StoredViews:
    """What the file holds; bits are uint8 [ceil(item rows / 8)], bit i % 8 of byte i // 8.

    Attributes:
        trie_digest: Content digest of the catalogue that it is of.
        views: Bits of the items that each view lets through.
        deleted: Bits of the items that are gone; None: none is.
    """

    trie_digest: str
    views: Mapping[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])
    deleted: np.ndarray | None = None

    @property
    def tensors(self) -> dict[str, np.ndarray]:
        """Every array, by its name in the file."""
        named = {f"{VIEW}{name}": bits for name, bits in sorted(self.views.items())}
        return named if self.deleted is None else named | {DELETED: self.deleted}

    def is_equal(self, other: "StoredViews") -> bool:
        """Whether another one holds the same."""
        ours, theirs = self.tensors, other.tensors
        return ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)


def path_of(trie: Path) -> Path:
    """The file beside a trie, the one that a link leads to."""
    trie = follow(trie)
    return trie.parent / f"{trie.name}.views"  # A folder such as `.` has no name to change.


def is_in_the_way(trie: Path) -> bool:
    """Whether there is another file in the place of the one beside a trie."""
    path = path_of(trie)
    return path.is_dir() or (path.exists() and not store.is_ours(path, "grinf.views"))


def digest(bits: np.ndarray) -> str:
    """Digest of the items that bits mean."""
    return xxhash.xxh3_128(np.ascontiguousarray(bits).data).hexdigest()


def read(trie: Path) -> StoredViews | None:
    """Read the file beside a trie; None: there is none.

    Raises:
        TrieFileError: Damaged, or of another format version.
    """
    stored, damaged = inspect(trie)
    if damaged:
        raise _refused(path_of(trie), f"wrong digest: {', '.join(damaged)}")
    return stored


def inspect(trie: Path) -> tuple[StoredViews | None, list[str]]:
    """Read the file beside a trie, and name the arrays in it that are not what its header says.

    Raises:
        TrieFileError: So damaged that nothing can be told, or of another format version.
    """
    path = path_of(trie)
    try:
        with safe_open(str(path), framework="numpy") as container:
            metadata: Mapping[str, str] = container.metadata() or {}
            tensors = {name: container.get_tensor(name) for name in sorted(container.keys())}
    except FileNotFoundError:
        return None, []
    except (SafetensorError, OSError, UnicodeDecodeError) as error:
        raise _refused(path, str(error)) from error
    if (version := metadata.get("grinf.views_format")) != str(FORMAT_VERSION):
        why = f"it has format version {version}, this grinf reads version {FORMAT_VERSION}"
        raise _refused(path, why, "cannot be read")
    header = metadata.get("grinf.views", "")
    if xxhash.xxh3_128(header.encode()).hexdigest() != metadata.get("grinf.views_digest"):
        raise _refused(path, "the header does not have its digest")
    facts: dict[str, Any] = json.loads(header)
    if tensors.keys() != facts["digests"].keys():
        raise _refused(path, "its header names other views")
    views = {name.removeprefix(VIEW): bits for name, bits in tensors.items() if name.startswith(VIEW)}
    damaged = [name for name, bits in tensors.items() if digest(bits) != facts["digests"][name]]
    return StoredViews(facts["trie_digest"], views, tensors.get(DELETED)), damaged


def write(trie: Path, stored: StoredViews) -> None:
    """Replace the file beside a trie, atomically and durably; if it holds nothing, remove it."""
    path, tensors = path_of(trie), stored.tensors
    if not tensors:
        path.unlink(missing_ok=True)
        return
    digests = {name: digest(bits) for name, bits in tensors.items()}
    header = json.dumps({"trie_digest": stored.trie_digest, "digests": digests}, sort_keys=True)
    metadata = {
        "grinf.views_format": str(FORMAT_VERSION),
        "grinf.views": header,
        "grinf.views_digest": xxhash.xxh3_128(header.encode()).hexdigest(),
    }
    with replacing(path) as temporary:
        temporary.write_bytes(save(tensors, metadata))


@contextmanager
def locked(trie: Path) -> Generator[None]:
    """Let one process at a time change what lies beside the tries of a folder."""
    folder = os.open(follow(trie).parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _refused(path: Path, why: str, what: str = "are damaged") -> TrieFileError:
    fix = f"remove {path}, then store the views and delete the items again"
    return TrieFileError(f"the views {path} {what}", why, fix)
