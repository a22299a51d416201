"""Requests per second of the engine with all requests at hand: capacity, and where the time of a wave goes.

    python benchmarks/throughput.py --lengths 100,500,1000 --beams 900 --constrained --score vocab

Random weights of an architecture file; prompts are random tokens; every beam of the last level is returned.
"""

import argparse
import json
import sys
import time

import numpy as np

from grinf import Engine, EngineOptions, Request, Trie
from grinf.jobs.catalogue import skewed_catalogue
from grinf.trie import TokenMapping, trie_of

CODEBOOK = 8192
LEVELS = 3


def make_trie(items: int, vocab: int) -> Trie:
    """The skewed synthetic catalogue on the last tokens of the vocabulary."""
    ids, codes = skewed_catalogue(items)
    first = vocab - LEVELS * CODEBOOK
    bases = [first + level * CODEBOOK for level in range(LEVELS)]
    sizes = [CODEBOOK] * LEVELS
    return trie_of(codes, ids, codebook_sizes=sizes).with_tokens(TokenMapping.from_bases(bases, sizes))


def measure(engine: Engine, length: int, count: int, rng: np.random.Generator) -> dict[str, float]:
    """Serve `count` random prompts at once; return the rate, model rows per request, and beams."""
    prompts = rng.integers(0, engine.vocab_rows, (count, length), dtype=np.int32)
    requests = [Request(index, prompt) for index, prompt in enumerate(prompts)]
    started = time.perf_counter()
    returned = [result.beams_returned for result in engine.run(requests)]
    seconds = time.perf_counter() - started
    return {
        "requests_per_s": round(count / seconds, 1),
        "rows": round(sum(request.rows for request in requests) / count, 1),
        "beams_min": min(returned),
        "beams_max": max(returned),
    }


def latency(engine: Engine, length: int, count: int, rng: np.random.Generator) -> float:
    """Median milliseconds of one request at a time."""
    times = []
    for index in range(count):
        request = Request(index, rng.integers(0, engine.vocab_rows, length, dtype=np.int32))
        started = time.perf_counter()
        list(engine.run([request]))
        times.append(time.perf_counter() - started)
    return round(1e3 * float(np.median(times)), 2)


def main() -> None:
    """Measure every length for one configuration and print a JSON line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="bench_configs/models/qwen3-0.6b.json")
    parser.add_argument("--lengths", default="100,500,1000")
    parser.add_argument("--beams", default="900")
    parser.add_argument("--score", default="vocab")
    parser.add_argument("--score-margin", type=float)
    parser.add_argument("--constrained", action="store_true")
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--max-batch", type=int, default=8)
    parser.add_argument("--count", type=int, default=96)
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--vocab", type=int, default=151936)
    args = parser.parse_args()
    lengths = [int(length) for length in args.lengths.split(",")]
    trie = make_trie(args.items, args.vocab) if args.constrained else None
    options = EngineOptions(
        args.model,
        dtype="auto",
        beams=tuple(int(width) for width in args.beams.split("-")),
        score=args.score,
        score_margin=args.score_margin,
        max_batch=args.max_batch,
        max_context=max(lengths),
        max_batch_tokens=max(lengths) * args.max_batch,
        graphs=not args.no_graphs,
    )
    rng = np.random.default_rng(0)
    setting = {"beams": args.beams, "score": args.score, "constrained": args.constrained}
    setting |= {} if args.score_margin is None else {"score_margin": args.score_margin}
    with Engine.load(options, trie) as engine:
        say(engine.describe())
        for length in lengths:
            measure(engine, length, 2 * args.max_batch, rng)
            row = measure(engine, length, args.count, rng) | {"unloaded_ms": latency(engine, length, 9, rng)}
            say({"length": length} | setting | row)


def say(row: dict[str, object]) -> None:
    """Write one JSON line."""
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
