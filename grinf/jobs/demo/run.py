"""The demo from start to end: make the files, then grinf's own commands on them, with a user's settings."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from grinf.config.load import resolve
from grinf.config.settings import BuildTrieSettings, DemoSettings, RecallSettings
from grinf.jobs.build_trie import run_build_trie
from grinf.jobs.demo.catalogue import Catalogue, find_tabular_list
from grinf.jobs.demo.files import DemoFiles
from grinf.jobs.demo.make import CHAPTER, FULL, DemoPlan, make
from grinf.jobs.demo.queries import Query
from grinf.jobs.demo.report import CUTOFFS, WIDTH_CUTOFFS, Answer, DemoReport, SystemScore, WidthScore
from grinf.jobs.demo.stages import Stages
from grinf.jobs.demo.tokenizer import SID_BEGIN, TOKEN_TEMPLATE
from grinf.jobs.extras import require
from grinf.jobs.recall import RecallReport, run_recall
from grinf.trie import Trie

BEAMS = "20-300-900"
"""The schedule that the demo recommends, and writes to grinf.toml."""
SCHEDULES = ("10", "100", "900", BEAMS)
MAX_FREE_QUERIES = 10
"""Queries that are searched without the trie: each gives many beams to judge, at a high price."""
SHOWN_QUERIES, SHOWN_TITLES = 5, 3


def run_demo(
    settings: DemoSettings, on_progress: Callable[[str, int, int | None], None], plan: DemoPlan | None = None
) -> DemoReport:
    """Make the demo's files in `settings.output`, write `grinf.toml`, and try the commands on them.

    Args:
        settings: Of the command.
        on_progress: Called with (stage, done, total).
        plan: Sizes; None: those of the settings.

    Raises:
        UsageError: A file of someone else is in the way.
        EnvironmentFault: The data, or a package of the extra `demo`, is not installed.
    """
    require("demo", "bm25s", "sklearn")
    tabular_list = find_tabular_list()
    plan = plan or (FULL if settings.full else CHAPTER)
    files = DemoFiles(settings)
    if earlier := files.claim():
        return earlier
    stages = Stages(on_progress)
    made = make(plan, tabular_list, files, settings.seed, stages)
    files.write_settings(TOKEN_TEMPLATE, SID_BEGIN, BEAMS)
    build = resolve(BuildTrieSettings, {"items": [str(files.items)], "overwrite": True})
    with stages("grinf build-trie"):
        run_build_trie(build, lambda stage, done, total: None)
    whole = _recall(files, stages, BEAMS, BEAMS, len(made.test))
    recall = _recall_at(whole)
    ours = SystemScore(f"grinf, beams {BEAMS}", tuple(recall[k] for k in CUTOFFS))
    num_compared = min(plan.max_compared, len(made.test))
    report = DemoReport(
        num_items=len(made.catalogue.items),
        num_train=len(made.train),
        num_test=len(made.test),
        num_compared=num_compared,
        num_parameters=made.num_parameters,
        steps=plan.steps,
        loss=made.loss,
        systems=(*made.baselines, ours),
        recall=recall,
        widths=tuple(_compare_widths(files, stages, whole, num_compared)),
        answers=tuple(_show_answers(files, made.catalogue, made.test)),
        seconds=stages.seconds,
        items=files.items,
        queries=files.queries,
        model=files.model,
        trie=files.trie,
    )
    files.keep(report)
    return report


def _recall(
    files: DemoFiles, stages: Stages, beams: str, name: str, limit: int, *, constrained: bool = True
) -> RecallReport:
    """`grinf recall --input demo/queries.parquet`, of the first `limit` test queries."""
    flags = {"input": [str(files.queries)], "output": str(files.answers(name)), "beams": beams}
    changes: dict[str, Any] = {"limit": limit, "constrained": constrained, "overwrite": True}
    if not constrained:
        changes["truth_column"] = None  # It names items, which only a trie knows.
    settings = resolve(RecallSettings, flags).model_copy(update=changes)
    label = f"grinf recall --beams {beams}" + ("" if constrained else " --no-constrained")
    with stages(label, limit) as advance:
        return run_recall(settings, lambda stage, done, total: advance(done) if stage == "queries" else None)


def _recall_at(report: RecallReport) -> dict[int, float]:
    """Recall on items at each K that the number of beams allows."""
    metrics = report.summary["metrics"]["items"]
    return {int(name[7:]): value for name, value in metrics.items() if name.startswith("recall@")}


def _compare_widths(files: DemoFiles, stages: Stages, whole: RecallReport, limit: int) -> list[WidthScore]:
    """Measure every schedule on the first `limit` test queries, and on fewer of them without the trie.

    `whole` is the search of all test queries by BEAMS; it is not repeated if `limit` is all of them.
    """
    scores: list[WidthScore] = []
    for beams in SCHEDULES:
        is_whole = beams == BEAMS and limit >= whole.rows
        report = whole if is_whole else _recall(files, stages, beams, f"first-{limit}-{beams}", limit)
        recall = tuple(_recall_at(report).get(k) for k in WIDTH_CUTOFFS)
        free = _recall(files, stages, beams, f"free-{beams}", min(limit, MAX_FREE_QUERIES), constrained=False)
        legal = _legal_share(free.output, files.trie)
        scores.append(WidthScore(beams, recall, legal, report.answered / report.seconds))
    return scores


def _legal_share(answers: Path, trie_file: Path) -> float:
    """Share of the SIDs of a search without a trie, given as token ids, that the catalogue has."""
    trie = Trie.open(trie_file)
    assert trie.token_ids is not None, "the demo's trie is built with a tokenizer"
    codes = trie.sids(np.arange(trie.num_leaves)).T
    tokens = [ids[code] for ids, code in zip(trie.token_ids, codes, strict=True)]
    legal = set(zip(*(ids.tolist() for ids in tokens), strict=True))
    found = pq.ParquetFile(answers).read(columns=["sid"])["sid"].combine_chunks().flatten().to_pylist()
    return sum(tuple(sid) in legal for sid in found) / len(found)


def _show_answers(files: DemoFiles, catalogue: Catalogue, test: Sequence[Query]) -> list[Answer]:
    """Read the first answers of the search by BEAMS, as titles."""
    shown = {item.code: f"{item.code} {item.title}" for item in catalogue.items}
    table = pq.ParquetFile(files.answers(BEAMS)).read(columns=["item_id"])
    answers: list[Answer] = []
    for query, codes in zip(test[:SHOWN_QUERIES], table["item_id"].to_pylist(), strict=False):
        wanted = tuple(shown[catalogue.items[target].code] for target in query.targets)
        best = tuple(shown[code] for code in codes[:SHOWN_TITLES])
        answers.append(Answer(query.text, wanted, best, tuple(title in wanted for title in best)))
    return answers
