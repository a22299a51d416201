"""Time, memory and size of building tries, next to a numpy argsort of the same keys.

    python benchmarks/build_trie.py --items 1000000,10000000
    python benchmarks/build_trie.py --items 40000000 --memory-limit 2GiB

Synthetic catalogues of 3 x 8192 codes. A build is the whole way, from parquet to a verified file under its
final name, in a process of its own whose peak memory (mapped files included) is reported.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from grinf.config.load import resolve
from grinf.config.parse import parse_ints
from grinf.config.settings import BuildTrieSettings
from grinf.jobs.build_trie import run_build_trie
from grinf.jobs.catalogue import CODEBOOK, skewed_catalogue, uniform_catalogue

CATALOGUES = {"skewed": skewed_catalogue, "uniform": uniform_catalogue}
ROW_GROUP = 1_000_000


def write_catalogue(path: Path, kind: str, items: int) -> float:
    """Write a catalogue to parquet; return the seconds that numpy needs to argsort its keys."""
    ids, codes = CATALOGUES[kind](items)
    with pq.ParquetWriter(
        path, pa.schema([("item_id", pa.int64()), ("sid", pa.list_(pa.int32()))])
    ) as writer:
        for start in range(0, items, ROW_GROUP):
            piece = codes[start : start + ROW_GROUP]
            offsets = pa.array(np.arange(0, piece.size + 1, 3), pa.int32())
            sid = pa.ListArray.from_arrays(offsets, np.ascontiguousarray(piece).ravel())
            writer.write_table(pa.table({"item_id": ids[start : start + ROW_GROUP], "sid": sid}))
    keys = (codes[:, 0].astype(np.uint64) * CODEBOOK + codes[:, 1].astype(np.uint64)) * CODEBOOK
    keys += codes[:, 2].astype(np.uint64)
    del ids, codes
    started = time.perf_counter()
    np.argsort(keys)
    return time.perf_counter() - started


def build(path: Path, memory_limit: str | None) -> dict[str, object]:
    """Build one trie and measure it; runs in a process of its own."""
    given = {"items": [str(path)], "output": str(path.with_suffix(".grtrie")), "memory_limit": memory_limit}
    started = time.perf_counter()
    report = run_build_trie(resolve(BuildTrieSettings, given, None), lambda stage, done, total: None)
    seconds = time.perf_counter() - started
    assert report.trie is not None, "the output does not exist yet"
    items = report.trie.manifest.num_items
    return {
        "items": items,
        "sids": report.trie.num_leaves,
        "build_s": round(seconds, 2),
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        "gpu_bytes_per_item": round(report.trie.gpu_bytes / items, 2),
        "file_bytes_per_item": round(report.output.stat().st_size / items, 2),
        "content_digest": report.trie.content_digest,
    }


def main() -> None:
    """Measure every size and print a JSON line each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--items", default="1000000,10000000", help="sizes, separated by commas")
    parser.add_argument("--kind", choices=CATALOGUES, default="skewed")
    parser.add_argument("--memory-limit", help="as of grinf build-trie")
    parser.add_argument(
        "--folder", type=Path, help="where files go, instead of the system's temporary folder"
    )
    parser.add_argument("--build", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.build is not None:
        sys.stdout.write(json.dumps(build(given.build, given.memory_limit)))
        return
    for items in parse_ints(given.items):
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            path = Path(folder) / "items.parquet"
            argsort_s = write_catalogue(path, given.kind, items)
            command = [sys.executable, __file__, "--build", str(path)]
            command += ["--memory-limit", given.memory_limit] if given.memory_limit else []
            measured = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
            ratio = round(measured["build_s"] / argsort_s, 2)
            measured |= {"argsort_s": round(argsort_s, 2), "build_over_argsort": ratio}
            sys.stdout.write(json.dumps(measured) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
