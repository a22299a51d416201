"""Time the selection and element-wise kernels: microseconds per request and step, and bytes moved per second.

    python -m benchmarks.selection [--profile]

Every figure is the median of replays of a CUDA graph, at the shapes of Qwen3-0.6B with 900 beams. The
element-wise ops rotate among input sets that together exceed the L2 cache. --profile adds each kernel's time.
"""

import argparse
import math
import sys
from functools import partial

import torch
from torch import Tensor

from benchmarks.timing import Call, graph_us
from kernels_cupy import elementwise, path
from kernels_cupy.constrained_topk import select_constrained
from kernels_cupy.selection import Beams, Limits, Path, Trie
from kernels_cupy.vocab_topk import row_logsumexp, select_unconstrained

BEAMS, VOCAB, CODES, HIDDEN, FEATURES, HEADS, HEAD_DIM = 900, 151936, 8192, 1024, 3072, (16, 8), 128
BASE = 100000  # first column of the codes


def kernel_times(call: Call) -> str:
    """Device time of each kernel of a call, in microseconds, in launch order."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(10):
            call()
        torch.cuda.synchronize()
    rows = [e for e in profile.key_averages() if e.key.startswith("grinf_")]
    return "  ".join(f"{e.key.removeprefix('grinf_')} {e.device_time_total / e.count:.1f}" for e in rows)


def limits(batch: int, level: int, next_width: int = BEAMS, score_k: int = BEAMS) -> Limits:
    """The same limits for every request, no margin."""

    def column(value: float, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.full((batch,), value, dtype=dtype, device="cuda")

    margin = column(math.inf, torch.float32)
    return Limits(column(level), column(next_width), column(score_k), margin, column(1), next_width)


def live_path(batch: int, width: int, node: Tensor) -> Path:
    """`width` live beams a request, with falling scores."""
    cum = -torch.rand(batch + 1, max(width, BEAMS), device="cuda").cumsum(1) / 100
    nodes = torch.zeros(batch + 1, cum.shape[1], dtype=torch.int32, device="cuda")
    nodes[:, :width] = node
    widths = torch.full((batch + 1,), width, dtype=torch.int32, device="cuda")
    return Path(torch.arange(batch, dtype=torch.int32, device="cuda"), cum, nodes, widths, width)


def skewed_trie(items: int, seed: int = 3) -> tuple[list[Tensor], list[Tensor]]:
    """Degrees and codes by level of a catalogue whose first two levels are heavy-tailed."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def tail(alpha: float) -> Tensor:
        uniform = torch.rand(items, generator=generator, device="cuda", dtype=torch.float64)
        return (((1 - uniform) ** (-1 / alpha) - 1) * 300).clamp_max(CODES - 1).long()

    first = tail(1.1)
    second = (tail(1.3) + first * 37) % CODES
    third = torch.randint(0, CODES, (items,), generator=generator, device="cuda")
    keys = torch.unique((first * CODES + second) * CODES + third)
    degrees, codes = [], [keys % CODES]
    for _ in range(2):
        keys, degree = torch.unique_consecutive(keys // CODES, return_counts=True)
        degrees.insert(0, degree)
        codes.insert(0, keys % CODES)
    return [torch.tensor([len(codes[0])], device="cuda"), *degrees], codes


def as_trie(degrees: list[Tensor], codes: list[Tensor], capacity: int) -> Trie:
    """The arrays of a trie from its degrees and codes by level."""
    first_child = torch.cat(
        [torch.ones(1, dtype=torch.long, device="cuda"), 1 + torch.cat(degrees).cumsum(0)]
    ).int()
    code = torch.cat([torch.zeros(1, dtype=torch.long, device="cuda"), *codes]).to(torch.int16)
    column = (BASE + torch.arange(CODES + 1, device="cuda")).expand(len(codes), -1).contiguous().int()
    end = torch.full((len(codes),), -1, dtype=torch.int32, device="cuda")
    return Trie(first_child, code, column, column, end, None, None, capacity)


def constrained_cases() -> list[tuple[str, Trie, int, Tensor]]:
    """Name, trie, level, and the nodes that the beams hold."""
    degrees, codes = skewed_trie(1_000_000)
    start = 1
    found = [
        (
            "1 M skewed, level 0",
            as_trie(degrees, codes, len(codes[0])),
            0,
            torch.zeros(1, device="cuda").int(),
        )
    ]
    for level in (1, 2):
        degree = degrees[level]
        for kind, order in (
            ("widest", degree.argsort(descending=True)),
            ("random", torch.randperm(len(degree), device="cuda")),
        ):
            nodes = order[:BEAMS]
            name = f"1 M skewed, level {level}, {kind} parents: {int(degree[nodes].sum())} candidates"
            capacity = int(degree.sort(descending=True).values[:BEAMS].sum())
            found.append((name, as_trie(degrees, codes, capacity), level, (start + nodes).int()))
        start += len(degree)
    for degree in (2000, 8192):
        degrees = [torch.tensor([BEAMS], device="cuda"), torch.full((BEAMS,), degree, device="cuda")]
        codes = [torch.arange(BEAMS, device="cuda"), torch.arange(BEAMS * degree, device="cuda") % degree]
        name = f"{BEAMS} x {degree} = {BEAMS * degree} candidates"
        found.append(
            (name, as_trie(degrees, codes, BEAMS * degree), 1, 1 + torch.arange(BEAMS, device="cuda").int())
        )
    return found


def time_constrained(logits: Tensor, log_z: Tensor, profile: bool) -> None:
    """Print the constrained search, in microseconds per request and step."""
    batch = len(logits)
    for name, trie, level, nodes in constrained_cases():
        width = len(nodes)
        where, some, z = (
            live_path(batch, width, nodes),
            logits[:, :width].contiguous(),
            log_z[:, :width].contiguous(),
        )
        for score in ("given", "children", "topk"):
            given = z if score == "given" else None
            call = partial(select_constrained, some, where, trie, limits(batch, level), score, given)
            show(f"constrained {score}, B={batch}, {name}", graph_us([call]) / batch, call, profile)


def time_free(logits: Tensor, profile: bool) -> None:
    """Print the free search and the row normaliser."""
    batch = len(logits)
    root = torch.zeros(1, device="cuda").int()
    for score, k, width in (
        ("vocab", 0, BEAMS),
        ("topk", 50, BEAMS),
        ("topk", BEAMS, BEAMS),
        ("vocab", 0, 1),
    ):
        where, some = live_path(batch, width, root), logits[:, :width].contiguous()
        call = partial(select_unconstrained, some, where, limits(batch, 0, score_k=k), score, None)
        show(f"free {score}:{k}, B={batch}, {width} beams", graph_us([call]) / batch, call, profile)
    rows = logits.flatten(0, 1)
    for some in (rows, rows[:, :CODES].contiguous()):
        us = graph_us([partial(row_logsumexp, some)])
        show_bytes(f"row_logsumexp, {len(some)} x {some.shape[1]}", us, some.nbytes)


def time_elementwise(rows: int = 8 * BEAMS, sets: int = 6) -> None:
    """Print the element-wise ops and BeamPath."""
    like = {"device": "cuda", "dtype": torch.bfloat16}
    heads = HEADS[0] + 2 * HEADS[1]
    weight, norm = torch.rand(HIDDEN, **like), torch.rand(HEAD_DIM, **like)
    pairs = torch.randn(sets, 2, rows, HIDDEN, **like)
    us = graph_us([partial(elementwise.add_rms_norm, x, residual, weight, 1e-6) for x, residual in pairs])
    show_bytes(f"add_rms_norm, {rows} x {HIDDEN}", us, 2 * pairs[0].nbytes)
    gate_ups = torch.randn(sets, rows, 2 * FEATURES, **like)
    us = graph_us([partial(elementwise.swiglu, gate_up) for gate_up in gate_ups])
    show_bytes(f"swiglu, {rows} x {FEATURES}", us, gate_ups[0].nbytes * 3 // 2)
    qkvs = torch.randn(sets, rows, heads, HEAD_DIM, **like)
    cos_sin, positions = (
        torch.rand(2000, HEAD_DIM, device="cuda"),
        torch.randint(0, 2000, (rows,), device="cuda").int(),
    )
    pools, where = (
        torch.empty(2, 2 * rows, HEADS[1], HEAD_DIM, **like),
        torch.randperm(2 * rows, device="cuda")[:rows],
    )
    rest = (norm, norm, 1e-6, cos_sin, positions, *pools, where, False)
    us = graph_us([partial(elementwise.qk_norm_rope_write, qkv, *rest) for qkv in qkvs])
    show_bytes(f"qk_norm_rope_write, {rows} x {heads} x {HEAD_DIM}", us, 2 * qkvs[0].nbytes)


def time_path(batch: int = 8, levels: int = 3) -> None:
    """Print the kernel of BeamPath."""
    token, ancestor, node = (
        torch.zeros(batch + 1, n, BEAMS, device="cuda").int() for n in (levels, levels - 1, 1)
    )
    cum, width = (
        torch.zeros(batch + 1, BEAMS, device="cuda"),
        torch.full((batch + 1,), BEAMS, device="cuda").int(),
    )
    slot, level = (
        torch.arange(batch, device="cuda").int(),
        torch.full((batch,), levels - 1, device="cuda").int(),
    )
    chosen = Beams(cum[:batch], *(node[:batch, 0] for _ in range(3)), width[:batch])
    us = graph_us([partial(path.extend_path, slot, level, chosen, token, ancestor, cum, node[:, 0], width)])
    say(f"extend_path, {batch} x {BEAMS}: {us:.1f} us")


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def show(name: str, us: float, call: Call, profile: bool) -> None:
    """Print one search."""
    kernels = f"  [{kernel_times(call)}]" if profile else ""
    say(f"{name}: {us:.1f} us per request and step{kernels}")


def show_bytes(name: str, us: float, moved: int) -> None:
    """Print one memory-bound op."""
    say(f"{name}: {us:.1f} us, {moved / us / 1e3:.0f} GB/s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profile", action="store_true", help="add the device time of each kernel")
    arguments = parser.parse_args()
    with torch.inference_mode():
        time_elementwise()
        time_path()
        for size in (1, 8):
            rows = torch.randn(size, BEAMS, VOCAB, device="cuda", dtype=torch.bfloat16).mul_(3)
            time_free(rows, arguments.profile)
            time_constrained(rows, row_logsumexp(rows.flatten(0, 1)).view(size, BEAMS), arguments.profile)
