"""Executes batches with torch: owns every tensor, resolves nothing, decides nothing."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grinf.backend.buffers import BatchBuffers, BatchRow
from grinf.backend.interface import Batch, Beams, Capacity
from grinf.backend.registry import Ops
from grinf.backend.runner import Runner
from grinf.backend.steps import BackendState, decode_forward, prefill_forward, select_beams
from grinf.backend.transfer import HostBeams
from grinf.state.request import BeamWidthPolicy, Request
from grinf.trie import Trie


class TorchBackend:
    """One model on one device. The CPU and CUDA differ in the parts given here, not in code."""

    def __init__(
        self,
        state: BackendState,
        ops: Ops,
        runner: Runner,
        capacity: Capacity,
        policy: BeamWidthPolicy,
        trie: Trie | None,
        score_k: int | None,
        description: dict[str, Any],
    ) -> None:
        self.capacity = capacity
        self._state, self._ops, self._runner = state, ops, runner
        self._policy, self._trie, self._score_k = policy, trie, score_k
        self._description = description
        self._device = state.path.token.device
        self._scratch_row = state.context_kv.scratch_page * state.context_kv.page_size

    def prefill(self, batch: Batch) -> None:
        """Compute the prompts of a batch, and choose level 0."""
        lengths = tuple(request.context_len for request in batch.requests)
        buf = self._buffers(batch, tokens=sum(lengths))
        page_size = self.capacity.page_size
        buf.fill(self._rows(batch), [request.input_ids for request in batch.requests], page_size)

        def step() -> None:
            hidden = prefill_forward(self._state, self._ops, buf, lengths)
            self._select(batch, buf, hidden)

        self._run(("prefill", buf.batch, buf.num_tokens, batch.next_width, batch.level), step)

    def decode(self, batch: Batch) -> None:
        """Feed the last chosen tokens of a batch, and choose the next level."""
        buf = self._buffers(batch)
        buf.fill(self._rows(batch))

        def step() -> None:
            hidden = decode_forward(self._state, self._ops, buf, batch.width)
            self._select(batch, buf, hidden)

        self._run(("decode", buf.batch, batch.width, batch.next_width, batch.level), step)

    def widths(self, requests: Sequence[Request]) -> list[int]:
        """Live beams of each request after the last selection; waits for the device."""
        return self._state.path.width[self._slots(requests)].tolist()

    def collect(self, requests: Sequence[Request]) -> HostBeams:
        """Start the transfer of finished requests; their leases may be released at once."""
        path, slots = self._state.path, self._slots(requests)
        width = max(request.width for request in requests)
        if self._trie is None:
            found = path.trace(slots, width)
        else:
            found = path.node[slots, :width]
        return HostBeams(path.width[slots], path.cum[slots, :width], found, self._trie)

    def describe(self) -> dict[str, Any]:
        """Device, memory plan, resolved kernels and buckets, ready for JSON."""
        return self._description

    def close(self) -> None:
        """Free what the device holds."""
        del self._state

    def _run(self, key: tuple[Any, ...], step: Any) -> None:
        with torch.inference_mode():
            self._runner.run(key, step)

    def _select(self, batch: Batch, buf: BatchBuffers, hidden: Tensor) -> None:
        columns = self._state.scoring.columns(batch.level)
        select_beams(self._state, self._ops, buf, hidden, columns, self._capacity(batch))

    def _capacity(self, batch: Batch) -> int:
        """Candidates that one request of the batch can have at most."""
        if self._trie is None:
            return 0
        levels = range(1, self._trie.levels) if batch.level is None else (batch.level,)
        return max(self._trie.capacity(level, batch.width) for level in levels)

    def _buffers(self, batch: Batch, tokens: int = 0) -> BatchBuffers:
        pages = max(len(request.lease.pages) for request in batch.requests if request.lease)
        scratch_slot = self._state.path.scratch_slot
        return BatchBuffers(
            len(batch.requests), pages, batch.next_width, scratch_slot, self._device, tokens, self._scratch_row
        )

    def _rows(self, batch: Batch) -> list[BatchRow]:
        return [self._row(request) for request in batch.requests]

    def _row(self, request: Request) -> BatchRow:
        assert request.lease is not None
        policy = request.policy or self._policy
        level, last = request.level, request.level + 1 == self.capacity.levels
        scheduled = policy.width(level)
        width = min(scheduled, self.capacity.level_widths[level])
        shrinking = policy.margin is not None
        if shrinking and level > 0:
            width = min(width, request.width)
        return BatchRow(
            slot=request.lease.beam_slot,
            context_len=request.context_len,
            pages=request.lease.pages,
            level=level,
            next_width=width,
            score_k=self._score_k or scheduled,
            margin=float("inf") if policy.margin is None or last else policy.margin,
            min_width=policy.min_width,
            view=0,
        )

    def _slots(self, requests: Sequence[Request]) -> Tensor:
        slots = [request.lease.beam_slot for request in requests if request.lease]
        return torch.tensor(slots, device=self._device)
