"""The engine of a runner: every engine of a job makes the same batches, whenever and wherever it is loaded.

What the first one derives from its device (requests at a time, dtype, kernels; on a CPU the threads, by whose
number sums are split) is written down beside the units, and those after it take it from there: so a unit's
batches depend on the unit, never on the memory or the cores that happen to be free. When memory runs out all
the same, the token budget and the requests at a time are halved, once and for the rest of the job; where that
is not enough, the queries of the unit are answered one by one.
"""

import gc
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from grinf.errors import CapacityError, RowError
from grinf.jobs.recall.output import Parts
from grinf.jobs.recall.plan import Plan
from grinf.runtime.engine import Engine
from grinf.state.request import RecallResult, Request

Settled = dict[str, Any]
"""Of every engine: `max_batch`, `max_batch_tokens`, `dtype`, `kernels`, `threads`; and `is_halved`."""

_NO_ROOM = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""What torch says in a plain RuntimeError where memory ran out."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: the device's, or this process's."""
    is_plain = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return is_plain or any(sign in str(error) for sign in _NO_ROOM)


class Engines:
    """Loads the engine that a job has settled on.

    Args:
        plan: The job.
        parts: Where it is written down.
    """

    def __init__(self, plan: Plan, parts: Parts) -> None:
        self._plan, self._parts = plan, parts
        self._engine: Engine | None = None
        self._loaded: Settled = {}
        self._is_alone = False

    @property
    def budget(self) -> tuple[int, int]:
        """Requests at a time, and prompt tokens of one prefill."""
        return self._loaded["max_batch"], self._loaded["max_batch_tokens"]

    def describe(self) -> dict[str, str]:
        """The budget, for the metadata of files."""
        return {"max_batch": str(self.budget[0]), "max_batch_tokens": str(self.budget[1])}

    def load(self) -> Engine:
        """The engine to answer with; loaded again if another one was settled on meanwhile.

        Raises:
            CapacityError: It does not fit into memory, or not as it did when the job began.
            GrinfError: As `Engine.load`.
        """
        settled = self._parts.settled()
        if settled and self._is_alone:
            settled |= {"max_batch": 1}
        if self._engine is None or settled != self._loaded:
            self.close()
            self._engine = self._load(settled)
        return self._engine

    def run(self, requests: Iterable[Request]) -> Iterator[RecallResult]:
        """Serve requests, as `Engine.run`; one by one where a unit did not fit."""
        if not self._is_alone:
            yield from self.load().run(requests)
            return
        for request in requests:
            yield from self._run_alone(request)

    def lighten(self) -> None:
        """Make room after memory ran out: take half the budget, or if that was done, one query at a time.

        Raises:
            CapacityError: Queries are answered one at a time already.
        """
        if self._is_alone:
            raise CapacityError("memory ran out beside the engine", fix="give the job more memory")
        settled = self._parts.settled()
        is_known = settled == self._loaded
        self.close()
        if is_known and settled["is_halved"]:
            self._is_alone = True
        elif is_known:  # Otherwise another process has halved it meanwhile.
            halves = {name: max(1, settled[name] // 2) for name in ("max_batch", "max_batch_tokens")}
            self._parts.settle(settled | halves | {"is_halved": True}, replace_it=True)

    def unit_is_done(self) -> None:
        """Answer the next unit as the job has settled it."""
        if self._is_alone:
            self.close()
        self._is_alone = False

    def close(self) -> None:
        """Free what the engine holds."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _run_alone(self, request: Request) -> list[RecallResult]:
        try:
            return list(self.load().run([request]))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        self.close()
        what = f"memory ran out for its prompt of {request.context_len} tokens alone"
        error = RowError("oom", what, fix="shorten it, or use fewer beams")
        none = np.empty((0, self._plan.levels), np.int32), np.empty(0, np.float32), None
        return [RecallResult(request.request_id, *none, request.timeline, error)]

    def _load(self, settled: Settled) -> Engine:
        options = replace(self._plan.options, sid_mass=True)
        taken = {name: value for name, value in settled.items() if name not in ("is_halved", "threads")}
        if "threads" in settled:
            torch.set_num_threads(settled["threads"])
        try:
            engine = Engine.load(replace(options, **taken), self._plan.trie)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            what, fix = "the engine does not fit into memory", "use a smaller --max-batch or --max-context"
            raise CapacityError(what, str(error).splitlines()[0], fix) from error
        derived = _derive(engine, options.max_batch_tokens) | taken
        self._loaded = settled or self._parts.settle(derived | {"is_halved": False})
        room = engine.describe()["memory"]["num_slots"]
        if room < self._loaded["max_batch"]:
            engine.close()
            what = f"there is memory for {room} queries at a time, the job needs {self._loaded['max_batch']}"
            why = "it began with more, and other batches would give other answers"
            raise CapacityError(what, why, f"free memory, or start again: --overwrite --max-batch {room}")
        if settled or self._loaded == derived | {"is_halved": False}:
            return engine
        engine.close()  # Another process has settled on something else.
        return self._load(self._loaded)


def _derive(engine: Engine, max_batch_tokens: int) -> Settled:
    running = engine.describe()
    threads = {"threads": torch.get_num_threads()} if running["device"] == "cpu" else {}
    return {
        "max_batch": engine.max_batch,
        "max_batch_tokens": max_batch_tokens,
        "dtype": running["dtype"],
        "kernels": running["kernels"],
        **threads,
    }
