"""A simulated engine to benchmark, and its true answer, worked out without the benchmark's own code."""

import itertools
from pathlib import Path

import numpy as np

from grinf.config.parse import parse_sla
from grinf.jobs.bench.claim import conclude
from grinf.jobs.bench.clock import VirtualClock
from grinf.jobs.bench.load import ClosedLoop
from grinf.jobs.bench.point import Point
from grinf.jobs.bench.prober import Prober
from grinf.jobs.bench.run_dir import RunDir
from grinf.jobs.bench.search import PRESETS, Search
from grinf.jobs.bench.sim import BatchServer, SimEngine

POINT = Point("sim", 100, (900,), "", "vocab")
SERVER = BatchServer()
TABLES = {}


class MemoryRun(RunDir):
    """A run that is kept in memory: the search needs no disk."""

    def write_table(self, name, table):
        TABLES[name] = table

    def read_table(self, name):
        return TABLES[name]

    def append(self, event, **fields):
        pass


def find(sla="100ms", *, seed=0, preset="standard", server=SERVER, engine=None, open_loop=True):
    """Search a simulated engine; returns (claim, probes)."""
    clock = engine.clock if engine else VirtualClock()
    engine = engine or SimEngine(server, clock)
    probes, slas = [], [parse_sla(text) for text in sla.split(",")]
    run = MemoryRun(Path("memory"))
    prober = Prober(
        point=POINT,
        engine=engine,
        clock=clock,
        run_dir=run,
        slas=slas,
        seed=seed,
        earlier=iter(()),
        deadline_ns=float("inf"),
        finish=lambda result: None,
        on_probe=probes.append,
    )
    Search(prober.run, slas, engine.server.max_batch, lambda capacity: PRESETS[preset], open_loop).find()
    claim = conclude(probes, slas, finished=True, open_loop=open_loop, preset=preset)
    return claim, probes


def latencies_ms(rate, unit_gaps, server=SERVER):
    """End-to-end milliseconds of Poisson requests at a batch server, by its definition."""
    arrival = np.cumsum(unit_gaps) / rate * 1e3
    base, each = server.base_ns / 1e6, server.per_request_ns / 1e6
    out, served, now = np.empty(len(arrival)), 0, 0.0
    while served < len(arrival):
        now = max(now, arrival[served])
        end = min(served + server.max_batch, int(np.searchsorted(arrival, now, side="right")))
        now += base + each * (end - served)
        out[served:end] = now - arrival[served:end]
        served = end
    return out


def true_max_rate(limit_ms=100.0, share=0.01, n=250_000):
    """Rate at which `share` of the requests of a long run exceed the limit."""
    gaps = np.random.default_rng(12345).exponential(size=n)
    low, high = 110.0, 160.0
    while high / low > 1.004:
        middle = (low * high) ** 0.5
        missed = np.mean(latencies_ms(middle, gaps) > limit_ms)
        low, high = (middle, high) if missed <= share else (low, middle)
    return low


def true_rate_of(stat, limit_ms):
    """Rate at which a statistic of long runs, or the median of maxima of 2,000 requests, is the limit."""
    of = {"avg": np.mean, "p50": np.median, "p95": lambda ms: np.quantile(ms, 0.95)}
    of["max"] = lambda ms: np.median(ms.reshape(-1, 2000).max(axis=1))
    gaps = np.random.default_rng(54321).exponential(size=60_000)
    low, high = 40.0, 197.0
    while high / low > 1.005:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if of[stat](latencies_ms(middle, gaps)) <= limit_ms else (low, middle)
    return low


def closed(n=200, concurrency=4, **bounds):
    """A closed loop without bounds in time, unless given."""
    return ClosedLoop(concurrency, n, **{"min_ns": 0, "max_ns": 1 << 60, **bounds})


def constant(rate, n):
    """Scheduled nanoseconds at even distances."""
    return np.array([round(i * 1e9 / rate) for i in itertools.islice(itertools.count(1), n)], np.int64)
