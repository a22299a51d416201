"""Constrained search: exact top-K over the children of the live beams; see constrained_topk.cu."""

from itertools import product
from typing import Any, Final

import torch
from torch import Tensor

from kernels_cupy.loader import Instance, Needs, ceil_div, dtype_name, i32, kernel, ptr
from kernels_cupy.selection import (
    RESCAN_LEAVES,
    SCAN_THREADS,
    SELECT_THREADS,
    Beams,
    Limits,
    Path,
    Shapes,
    Trie,
    allocate,
    check_widths,
    finish_blocks,
    max_picked,
    new_beams,
    pointers,
)

STEM: Final = "constrained_topk"
NEEDS: Final = Needs(sm_min=80, dtypes=("bfloat16", "float16", "float32"))
LEAF: Final = 32  # slots of a leaf group
FAN: Final = 8  # leaf groups of a group
GROUP: Final = LEAF * FAN
BLOCK_GROUPS: Final = SCAN_THREADS // 32
SPAN_GROUPS: Final = 4  # groups of a span, whose first parent is remembered
STAGED_BYTES: Final = 4 * 8192  # shared memory for the keys of one beam's children
SCORES: Final = ("given", "children", "topk")
INSTANCES: Final = tuple(
    Instance(
        STEM,
        "grinf_group_children",
        (("DTYPE", dtype), ("CODE_BITS", bits), ("ROW_THREADS", threads)),
        default=(dtype, bits) == ("BF16", 16),
    )
    for dtype, bits, threads in product(("BF16", "FP16", "FP32"), (16, 32), (128, 1024))
)


def max_groups(capacity: int) -> int:
    """Groups of slots that a request can have."""
    return max(1, ceil_div(capacity, GROUP))


def scan_blocks(batch: int, capacity: int) -> int:
    """Blocks that scan one request's groups.

    They stride over the groups that the request really has, so that a large capacity starts no idle blocks by
    the thousand; 4,096 blocks in all fill a card several times, 256 a request keep any one of them fast.
    """
    return min(ceil_div(max_groups(capacity), BLOCK_GROUPS), max(256, 4096 // batch))


def row_threads(rows: int) -> int:
    """Threads that normalise one beam: a few beams have many children, and many beams have few."""
    return 1024 if rows <= 32 else 128


def workspace(batch: int, rows: int, width: int, capacity: int) -> Shapes:
    """Dtype and shape of every intermediate, named as in constrained_topk.cu; `rows` beams yield `width`."""
    groups = max_groups(capacity)
    picked = min(max_picked(width), groups * FAN)
    return {
        "offset": (torch.int32, (batch, rows + 1)),
        "first": (torch.int32, (batch, rows)),
        "cum": (torch.float32, (batch, rows)),
        "span_parent": (torch.int32, (batch, ceil_div(groups, SPAN_GROUPS) + 1)),
        "total": (torch.int32, (batch,)),
        "log_z": (torch.float32, (batch, rows)),
        "cut": (torch.int64, (batch, rows)),
        "group_key": (torch.int32, (batch, groups)),
        "leaf_key": (torch.int32, (batch, groups, FAN)),
        "second_key": (torch.int32, (batch, groups, FAN)),
        "picked": (torch.int32, (batch, picked)),
        "num_picked": (torch.int32, (batch,)),
        "floor_key": (torch.int32, (batch,)),
        "survivors": (torch.int64, (batch, picked, LEAF)),
        "num_survivors": (torch.int32, (batch,)),
    }


def select_constrained(
    logits: Tensor, path: Path, trie: Trie, limits: Limits, score: str, log_z: Tensor | None
) -> Beams:
    """See `grinf.ops.contracts.SelectConstrained`.

    Raises:
        ValueError: Shapes or widths that the kernels were not built for, or scores without a normaliser.
    """
    beams, _ = select_and_normalise(logits, path, trie, limits, score, log_z)
    return beams


def select_and_normalise(
    logits: Tensor, path: Path, trie: Trie, limits: Limits, score: str, log_z: Tensor | None
) -> tuple[Beams, Tensor]:
    """As `select_constrained`, and the normalisers float32 [B, W] that the scores were made with."""
    check_widths(logits, path, limits)
    if score not in SCORES or (score == "given") != (log_z is not None):
        raise ValueError(f"score {score!r} with log_z {'given' if log_z is not None else 'missing'}")
    if trie.capacity >= 2**31 - GROUP:
        raise ValueError(f"{trie.capacity} candidates do not fit into 32-bit slots")
    search = _Search(logits, path, trie, limits)
    search.lay_out()
    if log_z is None:
        log_z = search.normalise(score)
    search.group(log_z, score)
    search.pick()
    search.rescan(log_z, score)
    return search.finish(), log_z


class _Search:
    """The launches of one call: what they share, and each in turn."""

    def __init__(self, logits: Tensor, path: Path, trie: Trie, limits: Limits) -> None:
        self.path, self.trie, self.limits = path, trie, limits
        self.batch, self.rows, columns = logits.shape
        self.groups = max_groups(trie.capacity)
        self.max_picked = min(max_picked(limits.width), self.groups * FAN)
        self.work = allocate(workspace(self.batch, self.rows, limits.width, trie.capacity), logits.device)
        self.defines = {
            "DTYPE": dtype_name(logits.dtype),
            "CODE_BITS": 8 * trie.code.element_size(),
            "ROW_THREADS": row_threads(self.rows),
        }
        words = 0 if trie.live is None else trie.live.shape[-1]
        work = self.work
        self.children = (
            ptr(logits), *pointers(work, "offset", "first", "span_parent", "total"),
            ptr(trie.code), ptr(trie.column), ptr(trie.live), ptr(trie.view), ptr(limits.level),
            i32(self.rows), i32(columns), i32(trie.token.shape[1]), i32(words), i32(self.groups),
        )  # fmt: skip

    def lay_out(self) -> None:
        path, trie, work = self.path, self.trie, self.work
        self._launch(
            "grinf_lay_out_children", (self.batch,), SELECT_THREADS,
            ptr(path.slot), ptr(path.cum), ptr(path.node), ptr(path.width), i32(path.cum.shape[1]),
            ptr(self.limits.level), ptr(trie.first_child), ptr(trie.code), ptr(trie.end_code),
            i32(self.rows), i32(self.groups),
            *pointers(work, "offset", "first", "cum", "span_parent", "total", "num_survivors"),
        )  # fmt: skip

    def normalise(self, score: str) -> Tensor:
        score_k = ptr(self.limits.score_k) if score == "topk" else 0
        log_z = self.work["log_z"]
        self._launch(
            "grinf_child_normaliser", (self.rows, self.batch), row_threads(self.rows),
            *self.children, ptr(self.path.slot), ptr(self.path.width), score_k, ptr(log_z), self._cut(score),
            smem_bytes=STAGED_BYTES if score == "topk" else 0,
        )  # fmt: skip
        return log_z

    def group(self, log_z: Tensor, score: str) -> None:
        work = self.work
        self._launch(
            "grinf_group_children", (scan_blocks(self.batch, self.trie.capacity), self.batch), SCAN_THREADS,
            *self.children, ptr(log_z), self._cut(score),
            *pointers(work, "cum", "group_key", "leaf_key", "second_key"),
        )  # fmt: skip

    def pick(self) -> None:
        work, limits = self.work, self.limits
        self._launch(
            "grinf_pick_groups", (self.batch,), SELECT_THREADS,
            *pointers(work, "total", "group_key", "leaf_key", "second_key"), i32(self.groups),
            ptr(limits.next_width), i32(self.max_picked),
            *pointers(work, "picked", "num_picked", "floor_key"),
        )  # fmt: skip

    def rescan(self, log_z: Tensor, score: str) -> None:
        work = self.work
        self._launch(
            "grinf_rescan_children", (ceil_div(self.max_picked, RESCAN_LEAVES), self.batch), SCAN_THREADS,
            *self.children, ptr(log_z), self._cut(score),
            *pointers(work, "cum", "picked", "num_picked", "floor_key"), i32(self.max_picked),
            *pointers(work, "survivors", "num_survivors"),
        )  # fmt: skip

    def finish(self) -> Beams:
        work, limits = self.work, self.limits
        out = new_beams(self.batch, limits.width, self.trie.code.device)
        self._launch(
            "grinf_finish_selection", (finish_blocks(self.batch), self.batch), SELECT_THREADS,
            *self.children, *pointers(work, "survivors", "num_survivors"),
            ptr(limits.next_width), ptr(limits.margin), ptr(limits.min_width), ptr(self.trie.token),
            i32(limits.width), i32(self.max_picked), *out.pointers(),
        )  # fmt: skip
        return out

    def _cut(self, score: str) -> int:
        return ptr(self.work["cut"]) if score == "topk" else 0

    def _launch(
        self, entry: str, grid: tuple[int, ...], threads: int, *args: Any, smem_bytes: int = 0
    ) -> None:
        kernel(STEM, entry, self.defines, smem_bytes)(grid, (threads,), args)
