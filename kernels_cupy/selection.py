"""What both searches share on the host: what they read and return, named as in `grinf.ops.contracts`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from kernels_cupy.loader import ceil_div, ptr

MAX_WIDTH: Final = 4096
SELECT_THREADS: Final = 1024
SCAN_THREADS: Final = 128
RESCAN_LEAVES: Final = 4  # leaf groups that a block of a rescan looks at

Shapes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


class Path(NamedTuple):
    """The fields of `contracts.PathView`."""

    slot: Tensor
    cum: Tensor
    node: Tensor
    width: Tensor
    rows: int


class Trie(NamedTuple):
    """The fields of `contracts.TrieView`."""

    first_child: Tensor
    code: Tensor
    column: Tensor | None
    token: Tensor
    end_code: Tensor
    live: Tensor | None
    view: Tensor | None
    capacity: int


class Limits(NamedTuple):
    """The fields of `contracts.Limits`."""

    level: Tensor
    next_width: Tensor
    score_k: Tensor
    margin: Tensor
    min_width: Tensor
    width: int


@dataclass(frozen=True, slots=True)
class Beams:
    """The fields of `contracts.Selection`."""

    score: Tensor
    parent: Tensor
    token: Tensor
    node: Tensor
    count: Tensor

    def pointers(self) -> tuple[int, ...]:
        """Addresses in the order of the fields."""
        return tuple(map(ptr, (self.score, self.parent, self.token, self.node, self.count)))


def allocate(shapes: Shapes, device: torch.device) -> dict[str, Tensor]:
    """Take from torch what lives for one call."""
    return {name: torch.empty(shape, dtype=dtype, device=device) for name, (dtype, shape) in shapes.items()}


def pointers(work: Mapping[str, Tensor], *names: str) -> tuple[int, ...]:
    """Addresses of some tensors of a workspace."""
    return tuple(ptr(work[name]) for name in names)


def num_bytes(shapes: Shapes) -> int:
    """Bytes of a workspace."""
    return sum(dtype.itemsize * math.prod(shape) for dtype, shape in shapes.values())


def new_beams(batch: int, width: int, device: torch.device) -> Beams:
    """Take a selection's outputs from torch; the kernels write every element."""
    parent, token, node = torch.empty((3, batch, width), dtype=torch.int32, device=device)
    score = torch.empty((batch, width), dtype=torch.float32, device=device)
    return Beams(score, parent, token, node, torch.empty(batch, dtype=torch.int32, device=device))


def max_picked(width: int) -> int:
    """Leaf groups that are looked at again at most: `width` would do, a few more mostly save a selection."""
    return 2 * width


def finish_blocks(batch: int) -> int:
    """Blocks that order one request's survivors: together about as many as a large card has processors."""
    return ceil_div(128, batch)


def check_widths(logits: Tensor, path: Path, limits: Limits) -> None:
    """Refuse what the kernels were not built for.

    Raises:
        ValueError: Logits that are strided or not [B, W, V], or a width above 4,096.
    """
    if logits.dim() != 3 or not logits.is_contiguous() or logits.shape[1] != path.rows:
        raise ValueError(f"logits must be contiguous [B, {path.rows}, V], not {tuple(logits.shape)}")
    if max(path.rows, limits.width) > MAX_WIDTH or limits.width < 1:
        raise ValueError(
            f"widths {path.rows} -> {limits.width}: kernels are built for 1 to {MAX_WIDTH} beams"
        )
