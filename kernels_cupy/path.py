"""BeamPath on the device: append a selection, and read what the next forward feeds; see path.cu."""

from typing import Final

import torch
from torch import Tensor

from kernels_cupy.loader import Instance, Needs, ceil_div, i32, kernel, ptr
from kernels_cupy.selection import MAX_WIDTH, Beams

STEM: Final = "path"
NEEDS: Final = Needs(sm_min=80, dtypes=("bfloat16", "float16", "float32"))
EXTEND_THREADS: Final = 1024
GATHER_THREADS: Final = 256
EXTEND_ENTRY: Final = "grinf_extend_path"
GATHER_ENTRY: Final = "grinf_gather_path"
INSTANCES: Final = (Instance(STEM, EXTEND_ENTRY, (), default=True),)


def extend_path(
    slot: Tensor,
    level: Tensor,
    selection: Beams,
    token: Tensor,
    ancestor: Tensor,
    cum: Tensor,
    node: Tensor,
    width: Tensor,
) -> None:
    """See `grinf.ops.contracts.ExtendPath`.

    Raises:
        ValueError: More than 4,096 beams, or more than the pools hold.
    """
    batch, beams = selection.score.shape
    slots, levels, pool_width = token.shape
    if beams > min(MAX_WIDTH, pool_width):
        raise ValueError(f"{beams} beams: kernels are built for {MAX_WIDTH}, the pools hold {pool_width}")
    chosen = (selection.score, selection.parent, selection.token, selection.node, selection.count)
    args = (
        ptr(slot), ptr(level), *map(ptr, chosen), i32(beams), *map(ptr, (token, ancestor, cum, node, width)),
        i32(levels), i32(ancestor.shape[1]), i32(pool_width), i32(slots - 1),
    )  # fmt: skip
    kernel(STEM, EXTEND_ENTRY, {})((batch,), (EXTEND_THREADS,), args)


def gather_path(
    slot: Tensor, step: Tensor, token: Tensor, ancestor: Tensor, width: Tensor, beams: int
) -> tuple[Tensor, Tensor]:
    """Tokens that decode step `step` feeds, and the rows of every step on each beam's path.

    Args:
        slot, step: int32 [B].
        token, ancestor, width: Pools of BeamPath.
        beams: W, beams per request in the bucket.

    Returns:
        tokens: int32 [B, W]; 0 at and past a request's live width.
        ancestors: int32 [B, T, W]; the beam itself at and after the step; 0 at and past the live width.
    """
    batch = slot.shape[0]
    _, levels, pool_width = token.shape
    steps = ancestor.shape[1]
    tokens = torch.empty((batch, beams), dtype=torch.int32, device=slot.device)
    ancestors = torch.empty((batch, steps, beams), dtype=torch.int32, device=slot.device)
    args = (
        *map(ptr, (slot, step, token, ancestor, width)), i32(beams), i32(levels), i32(steps), i32(pool_width),
        ptr(tokens), ptr(ancestors),
    )  # fmt: skip
    kernel(STEM, GATHER_ENTRY, {})((ceil_div(beams, GATHER_THREADS), batch), (GATHER_THREADS,), args)
    return tokens, ancestors
