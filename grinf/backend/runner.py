"""How a step is run: call it, or capture it once in a CUDA graph and replay it.

Rules for a step that can be captured: it reads and writes static buffers and pools only, keeps nothing it
allocates, never asks a tensor for a value (`.item()`, `.tolist()`, `bool(tensor)`), takes no shape from data,
launches on the current stream, and has every kernel compiled beforehand.
"""

from collections import deque
from collections.abc import Callable, Hashable
from typing import Protocol

import torch

_TICKS_AHEAD = 1
"""Steps in flight when one is enqueued: enough to hide the host, and an arrival waits for no more."""


class Runner(Protocol):
    """Runs steps."""

    def capture(self, key: Hashable, step: Callable[[], None]) -> None:
        """Prepare `step`, over static buffers, to be run under `key`."""
        ...

    def run(self, key: Hashable, step: Callable[[], None]) -> torch.cuda.Event | None:
        """Run `step`; `key` names its bucket shape and nothing about its requests.

        Returns:
            The end of the step on the device; None where the step is done.
        """
        ...


class EagerRunner:
    """Calls every step.

    Args:
        device: Where the steps run.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_async = device.type == "cuda"

    def capture(self, key: Hashable, step: Callable[[], None]) -> None:
        """Nothing to prepare."""

    def run(self, key: Hashable, step: Callable[[], None]) -> torch.cuda.Event | None:
        """Run `step` now."""
        del key
        step()
        return _mark() if self._is_async else None


class GraphRunner:
    """Replays the captured steps and calls the others, a little ahead of the GPU.

    All graphs share one memory pool: no two run at once, and a step keeps nothing that it allocates.
    """

    def __init__(self) -> None:
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._ticks: deque[torch.cuda.Event] = deque()

    def capture(self, key: Hashable, step: Callable[[], None]) -> None:
        """Run `step` once, which compiles its kernels, then capture it under `key`."""
        warm_up = torch.cuda.Stream()
        warm_up.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm_up):
            step()
        torch.cuda.current_stream().wait_stream(warm_up)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            step()
        self._graphs[key] = graph

    def run(self, key: Hashable, step: Callable[[], None]) -> torch.cuda.Event | None:
        """Replay `key`, or call `step` where nothing was captured under it."""
        # Marked only now, the end of a step includes the transfer of its results: they are ready then.
        self._ticks.append(_mark())
        while len(self._ticks) > _TICKS_AHEAD:
            self._ticks.popleft().synchronize()
        graph = self._graphs.get(key)
        if graph is None:
            step()
        else:
            graph.replay()
        return _mark()


def _mark() -> torch.cuda.Event:
    """Now, in the order of the device's work."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
