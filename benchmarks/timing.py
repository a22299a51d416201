"""Device time of calls, without what the host takes to launch them."""

import statistics
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]


def graph_us(calls: Sequence[Call], replays: int = 20) -> float:
    """Median microseconds of one of `calls`, captured together in one graph; a lone call is repeated."""
    calls = list(calls) * (10 if len(calls) == 1 else 1)
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times)
