"""Device time of causal attention within packed prompts: ours, torch's FlashAttention, and cuDNN's.

    python -m benchmarks.prefill_attention

Heads as in Qwen3-0.6B. cuDNN takes prompts of one length only, as a dense batch. Every figure is the median
of replays of a CUDA graph over several input sets.
"""

import sys
from functools import partial

import torch
from torch import Tensor

from benchmarks.timing import graph_us
from grinf.backend.cuda import prefill_on_hopper
from grinf.backend.library import flash_prefill_attention

HEADS, HEAD_DIM, SETS = (16, 8, 8), 128, 8
SHAPES = ((8, 100), (8, 500), (8, 1000), (1, 1000), (2, 4000), (4, 250))
SCALE = HEAD_DIM**-0.5


def dense(q: Tensor, k: Tensor, v: Tensor, borders: Tensor, lengths: tuple[int, ...], scale: float) -> None:
    """The same by cuDNN, for prompts of one length."""
    del borders
    q, k, v = (rows.unflatten(0, (len(lengths), -1)).transpose(1, 2) for rows in (q, k, v))
    torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, False, 0.0, True, False, scale=scale)


def main() -> None:
    """Print one line a shape."""
    for batch, length in SHAPES:
        rows = batch * length
        sets = [
            torch.randn(rows, sum(HEADS), HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in range(SETS)
        ]
        borders = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * length
        us = [
            graph_us([partial(f, *x.split(HEADS, 1), borders, (length,) * batch, SCALE) for x in sets])
            for f in (prefill_on_hopper, flash_prefill_attention, dense)
        ]
        tflops = 2 * rows * length * HEADS[0] * HEAD_DIM / us[0] * 1e-6
        sys.stdout.write(
            f"B={batch} L={length}: ours {us[0]:.1f} flash {us[1]:.1f} cudnn dense {us[2]:.1f} us; "
            f"ours {tflops:.0f} TFLOP/s\n"
        )


if __name__ == "__main__":
    main()
