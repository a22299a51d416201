"""How well cuBLAS fills the GPU with the matrix products of a decode step, by the number of requests in it.

    python -m benchmarks.gemm [--beams 900] [--batches 1,2,4,6,7,8,9,10,12,16]

M = requests x beams rows are cut into tiles; a last wave of tiles that does not fill the GPU costs as much
as a full one. A line for each library and batch: microseconds per request of each product of Qwen3-0.6B, all
28 layers and one lm_head together in milliseconds, and TFLOP/s.
"""

import argparse
import statistics

import torch
import torch.nn.functional as F

from benchmarks.throughput import say

LAYERS = 28
SHAPES = {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072)}
HEAD = (151936, 1024)


def product_us(rows: int, shape: tuple[int, int], sets: int = 6, replays: int = 9) -> float:
    """Median time of x @ w.T for x [rows, K], w [N, K]; several operand sets exceed the L2 cache."""
    like = {"device": "cuda", "dtype": torch.bfloat16}
    pairs = [(torch.randn(rows, shape[1], **like), torch.randn(shape, **like)) for _ in range(sets)]
    for x, w in pairs:
        F.linear(x, w)
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for x, w in pairs:
            F.linear(x, w)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / sets)
    return statistics.median(times)


def main() -> None:
    """Time every product for every batch, with both of cuBLAS's interfaces."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--beams", type=int, default=900)
    parser.add_argument("--batches", default="1,2,4,6,7,8,9,10,12,16")
    args = parser.parse_args()
    for library in ("cublas", "cublaslt"):
        torch.backends.cuda.preferred_blas_library(library)
        for batch in map(int, args.batches.split(",")):
            rows = batch * args.beams
            us = {name: product_us(rows, shape) for name, shape in SHAPES.items()}
            head = product_us(rows, HEAD, sets=1)
            total_us = LAYERS * sum(us.values()) + head
            flop = 2 * rows * (LAYERS * sum(n * k for n, k in SHAPES.values()) + HEAD[0] * HEAD[1])
            row = {"library": library, "batch": batch, "rows": rows}
            row |= {name: round(one / batch, 2) for name, one in [*us.items(), ("lm_head", head)]}
            say(
                row
                | {
                    "step_ms_per_request": round(total_us / batch / 1e3, 3),
                    "tflops": round(flop / total_us / 1e6, 1),
                }
            )


if __name__ == "__main__":
    main()
