"""Executes batches with torch: owns every tensor, resolves nothing, decides nothing."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from grinf.backend.buckets import BucketTable, Shape
from grinf.backend.buffers import BatchBuffers, BatchRow
from grinf.backend.interface import Batch, Beams, Capacity
from grinf.backend.registry import Ops
from grinf.backend.runner import Runner
from grinf.backend.steps import BackendState, decode_forward, prefill_forward, select_beams
from grinf.backend.transfer import HostBeams
from grinf.state.request import BeamWidthPolicy, Request
from grinf.trie import Trie


@dataclass(frozen=True, slots=True)
class BackendParts:
    """What a backend is made of; decided in `backend.load`.

    Attributes:
        policy: Beam widths of requests that bring none of their own.
        score_k: K of `topk` scores; None: the scheduled width.
        description: For `describe`.
    """

    state: BackendState
    ops: Ops
    runner: Runner
    buckets: BucketTable
    capacity: Capacity
    policy: BeamWidthPolicy
    trie: Trie | None
    score_k: int | None
    description: dict[str, Any]


class TorchBackend:
    """One model on one device. The CPU and CUDA differ in the parts given here, not in code."""

    def __init__(self, parts: BackendParts) -> None:
        self.capacity = parts.capacity
        self._state, self._ops, self._runner, self._buckets = (
            parts.state,
            parts.ops,
            parts.runner,
            parts.buckets,
        )
        self._policy, self._trie, self._score_k = parts.policy, parts.trie, parts.score_k
        self._device = parts.state.path.token.device
        self._max_pages = -(-parts.capacity.max_context // parts.capacity.page_size)
        self._static: dict[Shape, BatchBuffers] = {}
        self._description = parts.description | self._capture()

    def prefill(self, batch: Batch) -> torch.cuda.Event | None:
        """Compute the prompts of a batch, and choose level 0."""
        for request in batch.requests:
            if request.live is not None and request.lease is not None:
                self._state.scoring.set_filter(request.lease.beam_slot, request.live)
        return self._run(batch, [request.input_ids for request in batch.requests])

    def decode(self, batch: Batch) -> torch.cuda.Event | None:
        """Feed the last chosen tokens of a batch, and choose the next level."""
        return self._run(batch)

    def widths(self, requests: Sequence[Request]) -> list[int]:
        """Live beams of each request after the last selection; waits for the device."""
        return self._state.path.width[self._slots(requests)].tolist()

    def collect(self, requests: Sequence[Request]) -> HostBeams:
        """Start the transfer of finished requests; their leases may be released at once."""
        path, slots = self._state.path, self._slots(requests)
        width = max(request.width for request in requests)
        found = path.trace(slots, width) if self._trie is None else path.node[slots, :width]
        mass = None if self._state.scoring.first_codes is None else path.mass[slots]
        return HostBeams(path.width[slots], path.cum[slots, :width], found, mass, self._trie)

    def no_beams(self) -> Beams:
        """The answer of a request that has none."""
        sids = np.empty((0, self.capacity.levels), np.int32)
        leaves = None if self._trie is None else np.empty(0, np.int64)
        return Beams(sids, np.empty(0, np.float32), leaves)

    def describe(self) -> dict[str, Any]:
        """Device, memory plan, resolved kernels and buckets, ready for JSON."""
        return self._description

    def close(self) -> None:
        """Free what the device holds."""
        self._static.clear()
        del self._state, self._runner

    def _run(self, batch: Batch, prompts: Sequence[Sequence[int]] = ()) -> torch.cuda.Event | None:
        shape = self._buckets.shape_of(batch)
        buf = self._static.get(shape)
        lengths = tuple(len(prompt) for prompt in prompts)
        if buf is None:
            buf = self._make_buffers(shape, max(len(r.lease.pages) for r in batch.requests if r.lease))
        rows = [self._row(request) for request in batch.requests]
        with torch.inference_mode():
            buf.fill(rows, prompts, self.capacity.page_size)
            return self._runner.run(shape, self._step(shape, buf, lengths))

    def _step(self, shape: Shape, buf: BatchBuffers, lengths: tuple[int, ...]) -> Callable[[], None]:
        """The work of one tick over the given buffers."""
        state, ops = self._state, self._ops

        def step() -> None:
            first_codes = None
            if shape.phase == "prefill":
                hidden, first_codes = prefill_forward(state, ops, buf, lengths), state.scoring.first_codes
            else:
                hidden = decode_forward(state, ops, buf, shape.width)
            columns, capacity = state.scoring.columns(shape.level), self._candidates(shape)
            select_beams(state, ops, buf, hidden, columns, capacity, first_codes)

        return step

    def _capture(self) -> dict[str, Any]:
        """Capture every bucket on padding alone; report time and memory."""
        started = time.perf_counter()
        free_before = torch.cuda.mem_get_info(self._device)[0] if self._device.type == "cuda" else 0
        with torch.inference_mode():
            for shape in self._buckets.shapes():
                buf = self._make_buffers(shape, self._max_pages)
                buf.fill([])
                self._runner.capture(shape, self._step(shape, buf, (shape.tokens,)))
                self._static[shape] = buf
        if not self._static:
            return {"graphs": 0}
        torch.cuda.synchronize(self._device)
        return {
            "graphs": len(self._static),
            "capture_s": round(time.perf_counter() - started, 2),
            "capture_bytes": free_before - torch.cuda.mem_get_info(self._device)[0],
            "batch_buckets": list(self._buckets.batches),
            "token_buckets": list(self._buckets.tokens),
            "width_buckets": list(self.capacity.width_buckets),
        }

    def _candidates(self, shape: Shape) -> int:
        """Candidates that one request can have in a step at most."""
        if self._trie is None:
            return 0
        levels = range(1, self._trie.levels) if shape.level is None else (shape.level,)
        return max(self._trie.capacity(level, shape.width) for level in levels)

    def _make_buffers(self, shape: Shape, pages: int) -> BatchBuffers:
        kv, path = self._state.context_kv, self._state.path
        scratch_row = kv.scratch_page * kv.page_size
        return BatchBuffers(
            shape.batch, pages, shape.next_width, path.scratch_slot, self._device, shape.tokens, scratch_row
        )

    def _row(self, request: Request) -> BatchRow:
        assert request.lease is not None
        policy = request.policy or self._policy
        level, last = request.level, request.level + 1 == self.capacity.levels
        scheduled = policy.width(level)
        width = min(scheduled, self.capacity.level_widths[level])
        if policy.margin is not None and level > 0:
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
            view=self._live_row(request),
        )

    def _live_row(self, request: Request) -> int:
        """Row of the live masks that a request sees."""
        assert request.lease is not None
        if request.live is None:
            return self._state.scoring.view_row(request.view)
        return self._state.scoring.filter_row(request.lease.beam_slot)

    def _slots(self, requests: Sequence[Request]) -> torch.Tensor:
        slots = [request.lease.beam_slot for request in requests if request.lease]
        on_gpu = self._device.type == "cuda"
        # From pinned memory the copy does not wait for the work that is already enqueued.
        return torch.tensor(slots, pin_memory=on_gpu).to(self._device, non_blocking=True)
