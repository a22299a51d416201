"""Where the GPU's time goes while the engine serves at capacity, and what the host asks of the CUDA runtime.

    python -m benchmarks.trace --lengths 100,500,1000 [--constrained] [--kernels swiglu=torch]

A JSON line for each length: milliseconds per request (wall, without the profiler), the GPU's busy time by
kind of kernel (profiler), the share of the wall time in which it is idle, and the number of runtime calls.
"""

import argparse
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.throughput import make_trie, say
from grinf import Engine, EngineOptions, Request

KINDS = {
    "prefill attention": r"grinf_prefill|flash|fmha|mha|sdpa",
    "matrix products": r"gemm|nvjet|cutlass|xmma|cublas",
    "decode attention": r"grinf_(decode|context|beam|merge)_",
    "selection": r"grinf_(lay_out|group|pick|rescan|finish|child|row_)|grinf_.*(column|select)",
    "norms, RoPE, SwiGLU": r"grinf_(add|qk|swiglu|rms)",
    "BeamPath": r"grinf_(extend|gather)",
    "copies": r"^Mem(cpy|set)",
}
"""Kind of kernel -> pattern of its name; the first that fits. All others are torch's small kernels."""


def kind_of(name: str) -> str:
    """Kind of a kernel."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "other")


def busy_us(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, -float("inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def main() -> None:
    """Serve random prompts with and without the profiler, and print what it saw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="bench_configs/models/qwen3-0.6b.json")
    parser.add_argument("--lengths", default="100,500,1000")
    parser.add_argument("--beams", default="900")
    parser.add_argument("--score", default="vocab")
    parser.add_argument("--constrained", action="store_true")
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--kernels", default="", help="implementations to use instead: op=name,op=name")
    args = parser.parse_args()
    lengths = [int(length) for length in args.lengths.split(",")]
    beams = tuple(int(width) for width in args.beams.split("-"))
    kernels = dict(choice.split("=") for choice in args.kernels.split(",") if choice)
    options = EngineOptions(
        args.model, beams=beams, score=args.score, max_context=max(lengths), kernels=kernels
    )
    trie = make_trie(1_000_000, 151936) if args.constrained else None
    setting = {"beams": args.beams, "score": args.score, "constrained": args.constrained}
    setting |= {"kernels": kernels}
    with Engine.load(options, trie) as engine:
        for length in lengths:
            say({"length": length, **setting, **measure(engine, length, args.count)})


def measure(engine: Engine, length: int, count: int) -> dict[str, object]:
    """Serve `count` prompts three times: to warm up, against the clock, and under the profiler."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, engine.vocab_rows, (count, length), dtype=np.int32)

    def serve() -> float:
        started = time.perf_counter()
        list(engine.run(Request(i, prompt) for i, prompt in enumerate(prompts)))
        torch.cuda.synchronize()
        return time.perf_counter() - started

    serve()
    wall_us = serve() * 1e6
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        serve()
    events = [event for event in trace.events() if event.device_type.name == "CUDA"]
    by_kind: defaultdict[str, float] = defaultdict(float)
    for event in events:
        by_kind[kind_of(event.name)] += event.time_range.elapsed_us()
    busy = busy_us((event.time_range.start, event.time_range.end) for event in events)
    other = Counter(event.name[:60] for event in events if kind_of(event.name) == "other")
    calls = Counter(event.name for event in trace.events() if event.name.startswith("cuda"))
    return {
        "wall_ms": round(wall_us / count / 1e3, 3),
        "busy_ms": round(busy / count / 1e3, 3),
        "idle": round(1 - busy / wall_us, 4),
        "us_by_kind": {
            kind: round(us / count, 1) for kind, us in sorted(by_kind.items(), key=lambda kv: -kv[1])
        },
        "other_kernels": dict(other.most_common(6)),
        "calls": dict(calls.most_common()),
    }


if __name__ == "__main__":
    main()
