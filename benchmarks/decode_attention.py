"""Device time of the fused decode attention at the sizes of Qwen3-0.6B.

    python -m benchmarks.decode_attention [--batch 1 8] [--context 100 500 1000 4000] [--width 900] [--step 1]

A CUDA graph runs the kernel over several input sets, together larger than the L2 cache; the median of its
replays is divided by the number of sets. Random data: zeros would let the card clock higher.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import fields

import torch

from benchmarks.timing import graph_us
from kernels_cupy.decode_attention_sm90 import decode_attention
from tests.gpu.attention_cases import Case, Inputs, make_inputs

SETS_BYTES = 400 << 20


def device_us(case: Case) -> float:
    """Median microseconds of one call of this shape."""
    call_bytes = 5 * len(case.live) * case.beams * case.q_heads * case.head_dim * 2
    sets = [make_inputs(case, seed) for seed in range(max(2, min(16, SETS_BYTES // call_bytes)))]
    return graph_us([_call(inputs) for inputs in sets])


def _call(inputs: Inputs) -> Callable[[], None]:
    arguments = [getattr(inputs, field.name) for field in fields(Inputs)]
    out = torch.empty_like(inputs.q, memory_format=torch.contiguous_format)
    return lambda: decode_attention(*arguments, out)


def tflops(case: Case, us: float) -> float:
    """Context part only: multiply-adds of Q K and P V, two operations each."""
    return 4 * sum(case.lengths) * case.beams * case.q_heads * case.head_dim / us * 1e-6


def main() -> None:
    """Print one line a shape."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, nargs="+", default=[100, 500, 1000, 4000])
    parser.add_argument("--width", type=int, default=900)
    parser.add_argument("--step", type=int, default=1)
    parser.add_argument("--page-size", type=int, default=64)
    args = parser.parse_args()
    for batch in args.batch:
        for length in args.context:
            case = Case(
                live=(args.width,) * batch,
                lengths=(length,) * batch,
                steps=(args.step,) * batch,
                beams=args.width,
                decode_steps=args.step + 1,
                q_heads=16,
                kv_heads=8,
                page_size=args.page_size,
            )
            us = device_us(case)
            shape = f"B {batch}  context {length:5}  width {args.width}"
            sys.stdout.write(f"{shape}  {us:7.1f} us  {tflops(case, us):4.0f} TFLOP/s\n")


if __name__ == "__main__":
    main()
