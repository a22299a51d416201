"""How often `grinf bench --verify` fails a right engine, and how often it passes a wrong one.

    python -m benchmarks.verify_gate [--seeds 40] [--count 8]

On a CPU, with tiny models. A line for each kind of model, dtype and search: false alarms among right engines,
one for each seed (of weights and prompts); then, for a tenth of the seeds, how many with a fault were found.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from benchmarks.throughput import say
from grinf.backend.interface import EngineOptions
from grinf.jobs.bench.engines import OpenEngine, load_catalog
from grinf.jobs.bench.hf import load_hf_model
from grinf.jobs.bench.plan import shipped_model
from grinf.jobs.bench.verify import VerifyReport, verify
from grinf.ops import reference
from grinf.ops.contracts import Limits, PathView, Selection, TrieView
from grinf.runtime.engine import Engine
from grinf.state.request import RecallResult, Request
from grinf.trie import Trie

CATALOG = "synthetic:items=20k,codebook=256"
TINY = str(shipped_model("tiny"))
SELECT = reference.select_constrained
Change = Callable[[RecallResult, Trie], RecallResult]


def wrong_path(result: RecallResult, trie: Trie) -> RecallResult:
    """One beam is another legal SID of the catalogue, with the score of the right one."""
    rng = np.random.default_rng(result.request_id)
    free = np.setdiff1d(np.arange(trie.num_nodes[-1]), result.leaves)
    leaves = result.leaves.copy()
    leaves[rng.integers(len(leaves))] = rng.choice(free)
    return replace(result, leaves=leaves, sids=trie.sids(leaves))


def shifted(result: RecallResult, trie: Trie, share: float = 0.05) -> RecallResult:
    """All scores are off by a share of what lies between the best and the worst."""
    return replace(result, scores=result.scores - share * (result.scores[0] - result.scores[-1]))


def dropped_level(
    logits: Tensor, path: PathView, trie: TrieView, limits: Limits, score: str, log_z: Tensor | None
) -> Selection:
    """The log-probability of the first level is forgotten when the second is chosen."""
    cum = torch.where((limits.level == 1).any(), torch.zeros_like(path.cum), path.cum)
    return SELECT(logits, replace(path, cum=cum), trie, limits, score, log_z)


def mixed_ancestors(
    logits: Tensor, path: PathView, trie: TrieView, limits: Limits, score: str, log_z: Tensor | None
) -> Selection:
    """Two neighbours in a beam get each other's parent, and read each other's keys."""
    found = SELECT(logits, path, trie, limits, score, log_z)
    parent, middle = found.parent.clone(), found.parent.shape[1] // 2
    pair = [middle - 1, middle]
    swap = ((limits.level == 1) & (found.count > middle))[:, None]
    parent[:, pair] = torch.where(swap, parent[:, pair[::-1]], parent[:, pair])
    return replace(found, parent=parent)


def narrowed(
    logits: Tensor, path: PathView, trie: TrieView, limits: Limits, score: str, log_z: Tensor | None
) -> Selection:
    """Before the last level one beam in ninety is cut off, 890 of 900, and one at least."""
    width = limits.next_width
    fewer = (width - width.div(90).ceil()).clamp_min(1).to(width.dtype)
    limits = replace(limits, next_width=torch.where(limits.level == 2, width, fewer))
    return SELECT(logits, path, trie, limits, score, log_z)


def best_lost(
    logits: Tensor, path: PathView, trie: TrieView, limits: Limits, score: str, log_z: Tensor | None
) -> Selection:
    """The best beam of the first level gets the score of the worst."""
    found = SELECT(logits, path, trie, limits, score, log_z)
    first = limits.level == 0
    worst = found.score.gather(1, (found.count.long() - 1).clamp_min(0)[:, None])[:, 0]
    changed = found.score.clone()
    changed[:, 0] = torch.where(first, worst, changed[:, 0])
    return replace(found, score=changed)


ANSWERS: dict[str, Change] = {"wrong path": wrong_path, "scores shifted": shifted}
SELECTIONS = {
    "level dropped": dropped_level,
    "ancestors mixed": mixed_ancestors,
    "890 of 900": narrowed,
    "best one demoted": best_lost,
}


class Altered:
    """An engine whose answers are changed on the way out."""

    def __init__(self, engine: Any, change: Callable[[RecallResult], RecallResult]) -> None:
        self.engine, self.change = engine, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def step(self) -> list[RecallResult]:
        """As the engine."""
        return [self.change(result) for result in self.engine.step()]


@dataclass(frozen=True, slots=True)
class Setup:
    """A kind of engine."""

    beams: tuple[int, ...]
    dtype: str = "bfloat16"
    model: str = "tiny"
    score: str = "vocab"
    constrained: bool = True


SETUPS = [
    *[Setup((width,), dtype) for dtype in ("bfloat16", "float32") for width in (4, 16, 64, 300, 900)],
    *[Setup(beams) for beams in ((2, 16, 64), (4, 60, 300), (20, 300, 900))],
    *[Setup((64,), score=score) for score in ("level", "children", "topk")],
    Setup((64,), "float16"),
    Setup((64,), constrained=False),
    *[
        Setup(beams, model=model)
        for model in ("deeper", "peaked")
        for beams in ((64,), (300,), (8, 100, 300))
    ],
]


def models(folder: Path) -> dict[str, str]:
    """A tiny model, one with more layers, and one whose logits are as large as those of a trained one."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
    deeper = folder / "deeper.json"
    deeper.write_text(json.dumps(json.loads(Path(TINY).read_text()) | sizes))
    peaked = load_hf_model(EngineOptions(str(deeper), device="cpu", dtype="float32"), torch.device("cpu"))
    with torch.no_grad():
        peaked.model.embed_tokens.weight.mul_(10)
    peaked.save_pretrained(folder / "peaked")
    return {"tiny": TINY, "deeper": str(deeper), "peaked": str(folder / "peaked")}


@contextmanager
def broken(select: Callable[..., Selection]) -> Iterator[None]:
    """Engines that are loaded meanwhile select by another function."""
    reference.select_constrained = select
    try:
        yield
    finally:
        reference.select_constrained = SELECT


def check(setup: Setup, model: str, seed: int, count: int, fault: str = "") -> VerifyReport:
    """Verify an engine, right or with a fault, on fresh weights and prompts."""
    trie = load_catalog(CATALOG, model) if setup.constrained else None
    options = EngineOptions(
        model, device="cpu", beams=setup.beams, dtype=setup.dtype, seed=seed, score=setup.score
    )
    with broken(SELECTIONS.get(fault, SELECT)):
        engine: Any = Engine.load(options, trie)
    if fault in ANSWERS:
        assert trie is not None
        engine = Altered(engine, partial(ANSWERS[fault], trie=trie))
    rng = np.random.default_rng(1000 + seed)
    group = [Request(i, rng.integers(0, 700, int(rng.integers(8, 40))).tolist()) for i in range(count)]
    (report,) = verify(OpenEngine(engine, 8, trie, options), [group])
    engine.close()
    return report


def main() -> None:
    """Print a line per setup."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--count", type=int, default=8, help="requests per check")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        known = models(Path(folder))
        for setup in SETUPS:
            run = partial(check, setup, known[setup.model], count=arguments.count)
            told = [fault for seed in range(arguments.seeds) for fault in run(seed).faults[:1]]
            line = asdict(setup) | {"checks": arguments.seeds, "false_alarms": len(told), "alarms": told[:2]}
            few = range(max(1, arguments.seeds // 10)) if setup.constrained else ()
            for fault in (*ANSWERS, *SELECTIONS) if few else ():
                found = [run(seed, fault=fault).status == "failed" for seed in few]
                line[fault] = f"{sum(found)}/{len(found)}"
            say(line)


if __name__ == "__main__":
    main()
