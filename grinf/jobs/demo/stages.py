"""The demo's progress: which stage it is in, and how long each took."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager


class Stages:
    """Reports and times the stages of a long job.

    Args:
        on_progress: Called with (stage, done, total).

    Attributes:
        seconds: Wall time of each finished stage.
    """

    def __init__(self, on_progress: Callable[[str, int, int | None], None]) -> None:
        self._on_progress = on_progress
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str, total: int = 1) -> Generator[Callable[[int], None]]:
        """Run a stage; yields what to call with the part of `total` that is done, where there are parts."""
        started = time.perf_counter()
        self._on_progress(name, 0, total)
        yield lambda done: self._on_progress(name, done, total)
        if total == 1:
            self._on_progress(name, 1, 1)
        self.seconds[name] = time.perf_counter() - started
