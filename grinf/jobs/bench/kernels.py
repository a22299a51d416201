"""`grinf bench kernels`: every implementation of every op, checked against the reference, then timed."""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from grinf.backend.registry import OPS, PARTS, Site, default_registry
from grinf.config.parse import unknown
from grinf.jobs.bench.kernel_cases import PAGE, Case, Shape, make_case

GPU_SHAPES = tuple(
    Shape(b, 900, s, 16, 8, 128, 1024, 3072, 151_936) for b in (1, 4, 8) for s in (100, 500, 1000)
)
CPU_SHAPES = (Shape(2, 32, 64, 4, 2, 16, 64, 128, 1024),)
READ_CONTEXT = ("prefill_attention", "decode_attention", "context_attention")
"""Ops whose time depends on the context's length."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Largest difference to the reference, relative to the largest magnitude of the result."""
FLUSH_BYTES, FLUSHES = 256 << 20, 16
"""Written before each call that is timed: more than the L2 cache holds, and for so long that the host has
launched all of the call before the device begins it, else its events would time the host."""


@dataclass(frozen=True, slots=True)
class KernelResult:
    """One implementation at one shape; speeds are None where it is wrong or does not run here.

    Attributes:
        error: Largest difference to the reference, relative.
        ceiling: Share of what the machine can do: of its copy bandwidth or its matmul rate, whichever binds.
        note: Why it did not run, or that it is wrong.
    """

    op: str
    name: str
    shape: str
    error: float | None = None
    us: float | None = None
    gb_per_s: float | None = None
    tflop_per_s: float | None = None
    ceiling: float | None = None
    note: str = ""


def run_kernel_bench(
    op: str | None, on_progress: Callable[[str, int, int | None], None]
) -> list[KernelResult]:
    """Check and time the implementations of one op, or of all.

    Raises:
        UsageError: There is no such op.
    """
    ops = (*OPS, *PARTS)
    if op is not None and op not in ops:
        raise unknown("op", op, ops)
    cuda = torch.cuda.is_available()
    device, dtype = torch.device("cuda" if cuda else "cpu"), torch.bfloat16 if cuda else torch.float32
    shapes = GPU_SHAPES if cuda else CPU_SHAPES
    ceilings = _ceilings(device, dtype)
    chosen, results = [name for name in ops if op in (None, name)], list[KernelResult]()
    with torch.inference_mode():
        for done, name in enumerate(chosen):
            on_progress("ops", done, len(chosen))
            for shape in shapes:
                if name in READ_CONTEXT or shape.context in (500, CPU_SHAPES[0].context):
                    results += _op_results(name, shape, dtype, device, ceilings)
    on_progress("ops", len(chosen), len(chosen))
    return results


def _op_results(
    op: str, shape: Shape, dtype: torch.dtype, device: torch.device, ceilings: tuple[float, float]
) -> Iterator[KernelResult]:
    sm = None
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability()
        sm = 10 * major + minor
    group = shape.q_heads // shape.kv_heads
    site = Site(device.type, sm, str(dtype).removeprefix("torch."), shape.head_dim, group, PAGE)
    candidates = default_registry().candidates(op)
    (reference,) = (one for one in candidates if one.name == "torch")
    expected = _outcome(reference.load(site), make_case(op, shape, dtype, device))
    for implementation in candidates:
        result = KernelResult(op, implementation.name, str(shape))
        reason = implementation.needs.rejects(site)
        if reason is not None:
            yield replace(result, note=reason)
            continue
        call, case = implementation.load(site), make_case(op, shape, dtype, device)
        found, limit = _outcome(call, case), TOLERANCE[dtype]
        error = max(map(_error, found, expected)) if len(found) == len(expected) else math.inf
        if error <= limit:
            yield replace(result, error=error, **_speeds(call, case, device, ceilings))
        else:
            yield replace(result, error=error, note=f"WRONG: {error:.2g} off, {limit:g} allowed")


def _speeds(
    call: Callable[..., Any], case: Case, device: torch.device, ceilings: tuple[float, float]
) -> dict[str, float]:
    seconds = _seconds(lambda: call(*case.args), device.type == "cuda")
    bandwidth, rate = case.moved_bytes / seconds, case.flops / seconds
    share = max(bandwidth / ceilings[0], rate / ceilings[1])
    return {"us": 1e6 * seconds, "gb_per_s": bandwidth / 1e9, "tflop_per_s": rate / 1e12, "ceiling": share}


def _outcome(call: Callable[..., Any], case: Case) -> list[Tensor]:
    """Every tensor that a call returns or writes."""
    returned = call(*case.args)
    return [
        tensor.clone()
        for value in (returned, *(case.args[i] for i in case.written))
        for tensor in _tensors(value)
    ]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _tensors(part)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))


def _error(found: Tensor, expected: Tensor) -> float:
    """Largest relative difference; integers (parents, tokens, nodes) must be equal, nothing is NaN."""
    exact = not expected.is_floating_point()
    if exact or found.shape != expected.shape or found.isnan().any():  # No number is larger than NaN.
        return 0.0 if exact and torch.equal(found, expected) else math.inf
    found, expected = found.float(), expected.float()
    difference = torch.where(found == expected, 0.0, (found - expected).abs())  # inf - inf would be NaN
    finite = torch.where(torch.isfinite(expected), expected.abs(), 0.0)
    return float(difference.max() / finite.max().clamp_min(1e-6))


def _seconds(call: Callable[[], object], cuda: bool) -> float:
    """Median time of a call; on a GPU with a cold L2 cache, by events around the call alone."""
    wait = torch.cuda.synchronize if cuda else lambda: None
    call()
    wait()
    start = time.perf_counter()
    call()
    wait()
    repeats = max(3, min(20, round(0.5 / (time.perf_counter() - start))))
    if not cuda:
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return statistics.median(times)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)
    ]
    for start, end in events:
        for _ in range(FLUSHES):
            flush.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) / 1e3


def _ceilings(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Bytes/s of a large copy (read and write) and flop/s of a large matmul on this machine, measured now."""
    cuda = device.type == "cuda"
    count, size = (1 << 29, 8192) if cuda else (1 << 24, 512)
    source = torch.zeros(count, dtype=torch.uint8, device=device)
    target, square = torch.empty_like(source), torch.randn(size, size, device=device, dtype=dtype)
    copy, matmul = _seconds(lambda: target.copy_(source), cuda), _seconds(lambda: square @ square, cuda)
    return 2.0 * count / copy, 2.0 * size**3 / matmul
