"""The demo's trial: grinf's own commands on the files that it made, with the settings of a user."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from grinf.config.load import resolve
from grinf.config.settings import BuildTrieSettings, RecallSettings
from grinf.jobs.build_trie import run_build_trie
from grinf.jobs.demo.catalogue import Catalogue
from grinf.jobs.demo.files import DemoFiles
from grinf.jobs.demo.queries import Query
from grinf.jobs.demo.report import CUTOFFS, WIDTH_CUTOFFS, Answer, SystemScore, WidthScore
from grinf.jobs.demo.stages import Stages
from grinf.jobs.recall import RecallReport, run_recall
from grinf.trie import Trie

BEAMS = "20-300-900"
"""The schedule that the demo recommends, and writes to grinf.toml."""
SCHEDULES = ("10", "100", "900", BEAMS)
MAX_FREE_QUERIES = 10
"""Queries that are searched without the trie: each gives many beams to judge, at a high price."""
SHOWN_QUERIES, SHOWN_TITLES = 5, 3


def build_trie(files: DemoFiles, stages: Stages) -> None:
    """`grinf build-trie demo/items.parquet`."""
    with stages("grinf build-trie"):
        run_build_trie(resolve(BuildTrieSettings, {"items": [str(files.items)], "overwrite": True}), _silent)


def search(files: DemoFiles, stages: Stages) -> RecallReport:
    """`grinf recall --input demo/queries.parquet`: all test queries."""
    return _recall(files, stages, BEAMS, BEAMS)


def score(report: RecallReport) -> SystemScore:
    """Recall of the retriever, to stand beside the baselines."""
    return SystemScore(f"grinf, beams {BEAMS}", tuple(recall_at(report)[k] for k in CUTOFFS))


def compare_widths(files: DemoFiles, stages: Stages, whole: RecallReport, limit: int) -> list[WidthScore]:
    """Measure every schedule on the first `limit` test queries, and on fewer of them without the trie.

    Args:
        files, stages: Of the demo.
        whole: What `search` returned; it is not repeated if `limit` is all queries.
        limit: Queries.
    """
    scores: list[WidthScore] = []
    for beams in SCHEDULES:
        is_whole = beams == BEAMS and limit >= whole.rows
        report = whole if is_whole else _recall(files, stages, beams, f"first-{limit}-{beams}", limit)
        recall = tuple(recall_at(report).get(k) for k in WIDTH_CUTOFFS)
        free = _recall(files, stages, beams, f"free-{beams}", min(limit, MAX_FREE_QUERIES), constrained=False)
        legal = _legal_share(free.output, files.trie)
        scores.append(WidthScore(beams, recall, legal, report.answered / report.seconds))
    return scores


def show_answers(files: DemoFiles, catalogue: Catalogue, test: Sequence[Query]) -> list[Answer]:
    """Read the first answers of `search`, as titles."""
    titles = {item.code: item.title for item in catalogue.items}
    table = pq.ParquetFile(files.answers(BEAMS)).read(columns=["item_id"])
    answers: list[Answer] = []
    for query, codes in zip(test[:SHOWN_QUERIES], table["item_id"].to_pylist(), strict=False):
        best: list[str] = codes[:SHOWN_TITLES]
        wanted = [catalogue.items[target] for target in query.targets]
        found = tuple(code in {item.code for item in wanted} for code in best)
        shown = tuple(f"{code} {titles[code]}" for code in best)
        answers.append(
            Answer(query.text, tuple(f"{item.code} {item.title}" for item in wanted), shown, found)
        )
    return answers


def _recall(
    files: DemoFiles,
    stages: Stages,
    beams: str,
    name: str,
    limit: int | None = None,
    *,
    constrained: bool = True,
) -> RecallReport:
    flags: dict[str, Any] = {
        "input": [str(files.queries)],
        "output": str(files.answers(name)),
        "beams": beams,
    }
    settings = resolve(RecallSettings, flags | {"overwrite": True})
    changes = {"limit": limit, "constrained": constrained}
    if not constrained:
        changes["truth_column"] = None  # It names items, which only a trie knows.
    settings = settings.model_copy(update=changes)
    label = f"grinf recall --beams {beams}" + ("" if constrained else " --no-constrained")
    with stages(label, limit or _num_rows(files.queries)) as advance:
        return run_recall(settings, lambda stage, done, total: advance(done) if stage == "queries" else None)


def _legal_share(answers: Path, trie_file: Path) -> float:
    """Share of the SIDs of a search without a trie, given as token ids, that the catalogue has."""
    trie = Trie.open(trie_file)
    assert trie.token_ids is not None, "the demo's trie is built with a tokenizer"
    flat = pq.ParquetFile(answers).read(columns=["sid"])["sid"].combine_chunks().flatten().flatten()
    tokens = flat.to_numpy().reshape(-1, trie.levels)
    codes = np.full(tokens.shape, -1, np.int32)
    for level, ids in enumerate(trie.token_ids):
        code_of = np.full(1 + max(int(ids.max()), int(tokens.max(initial=0))), -1, np.int32)
        code_of[ids[ids >= 0]] = np.flatnonzero(ids >= 0)
        codes[:, level] = code_of[tokens[:, level]]
    whole = (codes >= 0).all(axis=1)
    return float((trie.leaf_of(codes[whole]) >= 0).sum() / len(codes))


def recall_at(report: RecallReport) -> dict[int, float]:
    """Recall on items at each K that the number of beams allows."""
    metrics = report.summary["metrics"]["items"]
    return {int(name[7:]): value for name, value in metrics.items() if name.startswith("recall@")}


def _num_rows(path: Path) -> int:
    return pq.ParquetFile(path).metadata.num_rows


def _silent(stage: str, done: int, total: int | None) -> None:
    """Progress of a command that takes no time."""
