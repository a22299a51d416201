"""What a step reads its batch from: one flat buffer, so that one copy to the device updates it all.

Nothing about a request is baked into a step: a captured graph reads slots, lengths, steps and widths from
here.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from grinf.ops.contracts import Limits

_SCALARS = ("slot", "context_len", "step", "level", "next_width", "score_k", "min_width", "view", "margin")


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One request of a batch in integers, as the host knows it.

    Attributes:
        slot: Beam slot. context_len: Prompt tokens. pages: ContextKV pages in order.
        level: SID level that the coming selection chooses; the decode step is level - 1.
        next_width, score_k, margin, min_width: See `grinf.ops.contracts.Limits`.
        view: Row of the trie's live masks.
    """

    slot: int
    context_len: int
    pages: Sequence[int]
    level: int
    next_width: int
    score_k: int
    margin: float
    min_width: int
    view: int


class BatchBuffers:
    """Int32 metadata of `batch` requests, and of `tokens` prompt tokens in a prefill.

    Attributes:
        slot, context_len, step, view: int32 [B].
        page_table: int32 [B, P].
        limits: Of the selection, with bucket width `next_width`.
        tokens, positions, rows: int32 [N], prefill only: token ids, their positions, their ContextKV rows.
        cu_seqlens: int32 [B + 1], last_rows: int32 [B], prefill only.
    """

    def __init__(
        self,
        batch: int,
        pages: int,
        next_width: int,
        scratch_slot: int,
        device: torch.device,
        tokens: int = 0,
        scratch_row: int = 0,
    ) -> None:
        self.batch, self.pages, self.num_tokens = batch, pages, tokens
        self._scratch_slot, self._scratch_row = scratch_slot, scratch_row
        sizes = dict.fromkeys(_SCALARS, batch) | {
            "page_table": batch * pages,
            "tokens": tokens,
            "positions": tokens,
            "rows": tokens,
            "cu_seqlens": batch + 1,
            "last_rows": batch,
        }
        self._sizes = sizes
        on_gpu = device.type == "cuda"
        total = sum(sizes.values())
        # A copy to a GPU reads its host buffer later: the ring outlasts every copy that can be in flight.
        self._ring = deque(
            torch.zeros(total, dtype=torch.int32, pin_memory=on_gpu) for _ in range(4 if on_gpu else 1)
        )
        self._device = torch.zeros(total, dtype=torch.int32, device=device) if on_gpu else self._ring[0]
        parts = dict(zip(sizes, self._device.split(list(sizes.values())), strict=True))
        self.slot, self.context_len, self.step, self.view = (
            parts[name] for name in ("slot", "context_len", "step", "view")
        )
        self.page_table = parts["page_table"].view(batch, pages)
        self.tokens, self.positions, self.rows = (parts[name] for name in ("tokens", "positions", "rows"))
        self.cu_seqlens, self.last_rows = parts["cu_seqlens"], parts["last_rows"]
        self.limits = Limits(
            level=parts["level"],
            next_width=parts["next_width"],
            score_k=parts["score_k"],
            margin=parts["margin"].view(torch.float32),
            min_width=parts["min_width"],
            width=next_width,
        )

    def fill(
        self, rows: Sequence[BatchRow], prompts: Sequence[Sequence[int]] = (), page_size: int = 0
    ) -> None:
        """Write a batch and copy it to the device: the only host-to-device copy of a step.

        Args:
            rows: The requests; the rest of the bucket becomes padding on the scratch slot, of width 0.
            prompts: Their tokens, in a prefill; padding tokens are token 0 and their keys go to the scratch
                page.
            page_size: Tokens per ContextKV page, in a prefill.
        """
        self._ring.rotate(1)
        stage = self._stage()
        level = rows[0].level if rows else 0
        padding = BatchRow(self._scratch_slot, 0, (), level, 0, 0, math.inf, 0, 0)
        padded = [*rows, *[padding] * (self.batch - len(rows))]
        for name in ("slot", "context_len", "level", "next_width", "score_k", "min_width", "view"):
            stage[name][:] = [getattr(row, name) for row in padded]
        np.maximum(stage["level"] - 1, 0, out=stage["step"])
        stage["margin"].view(np.float32)[:] = [row.margin for row in padded]
        table = stage["page_table"].reshape(self.batch, self.pages)
        table[:] = 0
        for row, entry in zip(rows, table, strict=False):
            entry[: len(row.pages)] = row.pages
        if prompts:
            self._fill_prompts(stage, table, prompts, page_size)
        else:
            stage["rows"][:] = self._scratch_row
        if self._device is not self._ring[0]:
            self._device.copy_(self._ring[0], non_blocking=True)

    def _stage(self) -> dict[str, np.ndarray]:
        flat = self._ring[0].numpy()
        ends = np.cumsum(list(self._sizes.values()))
        return dict(zip(self._sizes, np.split(flat, ends[:-1]), strict=True))

    def _fill_prompts(
        self,
        stage: dict[str, np.ndarray],
        table: np.ndarray,
        prompts: Sequence[Sequence[int]],
        page_size: int,
    ) -> None:
        """Lay the prompts end to end; the last ContextKV page that exists is the scratch page."""
        lengths = np.zeros(self.batch, np.int64)
        lengths[: len(prompts)] = [len(prompt) for prompt in prompts]
        ends = lengths.cumsum()
        for index, prompt in enumerate(prompts):
            span = slice(int(ends[index] - lengths[index]), int(ends[index]))
            position = np.arange(lengths[index])
            stage["tokens"][span] = np.asarray(prompt)
            stage["positions"][span] = position
            stage["rows"][span] = table[index, position // page_size] * page_size + position % page_size
        used = int(ends[-1])
        stage["tokens"][used:] = 0
        stage["positions"][used:] = 0
        stage["rows"][used:] = self._scratch_row
        stage["cu_seqlens"][0] = 0
        stage["cu_seqlens"][1:] = ends
        stage["last_rows"][:] = np.maximum(ends - 1, 0)
