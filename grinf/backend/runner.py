"""How a step is run: call it, or capture it once in a CUDA graph and replay it.

Rules for a step that can be captured: it reads and writes static buffers and pools only, keeps nothing it allocates,
never asks a tensor for a value (`.item()`, `.tolist()`, `bool(tensor)`), takes no shape from data, launches on the
current stream, and has every kernel compiled beforehand.
"""

from collections.abc import Callable, Hashable
from typing import Protocol


class Runner(Protocol):
    """Runs steps."""

    def run(self, key: Hashable, step: Callable[[], None]) -> None:
        """Run `step`; `key` names its bucket shape and nothing about its requests."""
        ...


class EagerRunner:
    """Calls every step."""

    def run(self, key: Hashable, step: Callable[[], None]) -> None:
        """Run `step` now."""
        del key
        step()
