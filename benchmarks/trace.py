"""Which CUDA runtime calls the host makes while the engine serves: graph launches, kernel launches, waits.

python benchmarks/trace.py --length 500 --beams 900
"""

import argparse
import json
import sys
from collections import Counter

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from grinf import Engine, EngineOptions, Request


def main() -> None:
    """Serve a few waves under the profiler and print the number of calls of each kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="bench_configs/models/qwen3-0.6b.json")
    parser.add_argument("--length", type=int, default=500)
    parser.add_argument("--beams", default="900")
    parser.add_argument("--count", type=int, default=32)
    args = parser.parse_args()
    beams = tuple(int(width) for width in args.beams.split("-"))
    options = EngineOptions(args.model, beams=beams, max_context=args.length)
    rng = np.random.default_rng(0)
    with Engine.load(options) as engine:
        prompts = rng.integers(0, engine.vocab_rows, (args.count, args.length), dtype=np.int32)
        list(engine.run(Request(i, prompt) for i, prompt in enumerate(prompts[:8])))
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            list(engine.run(Request(i, prompt) for i, prompt in enumerate(prompts)))
            torch.cuda.synchronize()
    calls = Counter(event.name for event in trace.events() if event.name.startswith("cuda"))
    busy = sum(event.device_time_total for event in trace.key_averages() if event.device_type.name == "CUDA")
    row = {
        "requests": args.count,
        "length": args.length,
        "beams": args.beams,
        "device_ms": round(busy / 1e3, 1),
    }
    sys.stdout.write(json.dumps(row | {"calls": dict(calls.most_common())}) + "\n")


if __name__ == "__main__":
    main()
