"""What a search costs and how near it comes: simulated servers whose true rate is known, on a virtual clock.

    python -m benchmarks.search_cost [--preset quick] [--seeds 20]

A line for each server: requests and virtual seconds of a point, by stage; how far the claims are from the
truth, and the share of them that are more than 2 % above it.
"""

import argparse
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

from benchmarks.throughput import say
from grinf.config.load import resolve
from grinf.config.settings import BenchSettings
from grinf.jobs.bench.engines import sim_server
from grinf.jobs.bench.likely import served_ms
from grinf.jobs.bench.sim import BatchServer
from grinf.jobs.bench.sweep import run_bench

SERVERS = [
    ("base=9ms,per_req=4.5ms,max_batch=16", 100),
    ("base=9ms,per_req=4.5ms,max_batch=16", 40),
    ("base=3ms,per_req=4.5ms,max_batch=8", 100),
    ("base=3ms,per_req=7ms,max_batch=8", 100),
    ("base=100us,per_req=10ms,max_batch=1", 100),
    ("base=50ms,per_req=1ms,max_batch=64", 200),
]
"""Servers, and the p99 in ms that they are held to."""
ARRIVALS = 200_000


def true_rate(server: BatchServer, limit_ms: float) -> float:
    """Rate at which 1 % of the requests of a long run exceed the limit."""
    gaps, most = np.random.default_rng(12345).exponential(size=ARRIVALS), server.max_batch
    base_ms, each_ms = server.base_ns / 1e6, server.per_request_ns / 1e6
    high = 1e3 * most / (base_ms + most * each_ms)
    low = high / 100
    while high / low > 1.004:
        rate = (low * high) ** 0.5
        missed = int((served_ms(np.cumsum(gaps) / rate * 1e3, base_ms, each_ms, most) > limit_ms).sum())
        low, high = (rate, high) if missed <= 0.01 * ARRIVALS else (low, rate)
    return low


def main() -> None:
    """Print a line per server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="quick")
    parser.add_argument("--seeds", type=int, default=20)
    arguments = parser.parse_args()
    for server, limit_ms in SERVERS:
        truth, errors = true_rate(sim_server(f"sim:{server}"), limit_ms), list[float]()
        requests, seconds = Counter[str](), Counter[str]()
        for seed in range(arguments.seeds):
            with tempfile.TemporaryDirectory() as folder:
                flags = {
                    "engine": f"sim:{server}",
                    "preset": arguments.preset,
                    "input_len": "100",
                    "beams": "1",
                }
                flags |= {"sla": f"{limit_ms}ms", "seed": str(seed), "output": str(Path(folder))}
                report = run_bench(resolve(BenchSettings, flags), lambda *_: None)
                assert report.run is not None
                assert report.summary is not None
                for probe in (probe for probes in report.summary.probes.values() for probe in probes):
                    table = report.run.read_table(probe.record.file)
                    requests[probe.record.stage] += len(table) / arguments.seeds
                    seconds[probe.record.stage] += table["t_done_ns"].to_numpy().max() / 1e9 / arguments.seeds
                rate = report.summary.rows[0]["max_rate"]
                errors += [100 * (rate / truth - 1)] if rate else []
        line = {"server": server, "limit_ms": limit_ms, "truth": round(truth, 1), "claims": len(errors)}
        line |= {"error_pct": round(float(np.mean(errors)), 2), "sd_pct": round(float(np.std(errors)), 2)}
        line |= {"most_pct": round(max(errors), 1), "above_2_pct": float(np.mean(np.array(errors) > 2))}
        line |= {"requests": round(requests.total()), "seconds": round(seconds.total(), 1)}
        say(line | {"by_stage_s": {stage: round(value, 1) for stage, value in seconds.items()}})


if __name__ == "__main__":
    main()
