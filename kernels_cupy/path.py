"""BeamPath on the device: append a selection; see path.cu."""

from typing import Final

from torch import Tensor

from kernels_cupy.loader import Instance, Needs, i32, kernel, ptr
from kernels_cupy.selection import MAX_WIDTH, Beams

STEM: Final = "path"
NEEDS: Final = Needs(sm_min=80, dtypes=("bfloat16", "float16", "float32"))
EXTEND_THREADS: Final = 1024
EXTEND_ENTRY: Final = "grinf_extend_path"
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
