"""What the retriever is compared with, on the same queries: chance, popularity, nearest neighbour, BM25."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from grinf.jobs.demo.catalogue import Catalogue
from grinf.jobs.demo.queries import Query, normalise
from grinf.jobs.demo.report import CUTOFFS, SystemScore
from grinf.jobs.recall import metrics

CHUNK = 512


def measure_baselines(
    catalogue: Catalogue,
    train: Sequence[Query],
    test: Sequence[Query],
    items: np.ndarray,
    queries: np.ndarray,
) -> list[SystemScore]:
    """Judge every baseline by the test queries.

    Args:
        catalogue: What is searched.
        train: Queries with known targets; popularity counts them, and one kind of BM25 indexes them.
        test: Queries to answer.
        items, queries: Unit vectors of the catalogue and of the test queries, float32 [n, dim].
    """
    titles = [f"{item.title} {catalogue.parent_title(item)}" for item in catalogue.items]
    known = _with_queries(titles, train)
    return [
        SystemScore("chance", tuple(min(1.0, k / len(titles)) for k in CUTOFFS)),
        recall("popularity", np.tile(_popular(len(titles), train), (len(test), 1)), test),
        recall("nearest neighbour, same embeddings", _nearest(items, queries), test),
        recall("BM25 on titles", _bm25(titles, test), test),
        recall("BM25 on titles + training queries", _bm25(known, test), test),
    ]


def recall(system: str, answers: np.ndarray, test: Sequence[Query]) -> SystemScore:
    """Judge answers, int [queries, K] positions of items in rank order, as `grinf recall` does."""
    row = np.repeat(np.arange(len(test)), answers.shape[1])
    target_row = np.repeat(np.arange(len(test)), [len(query.targets) for query in test])
    target = np.concatenate([np.array(query.targets, np.int64) for query in test])
    ranked = metrics.rank_answers(row, answers.ravel().astype(np.int64), target_row, target)
    sums = metrics.ranking_sums(ranked, metrics.count_targets(target_row, target, len(test)), CUTOFFS)
    return SystemScore(system, tuple(sums[f"recall@{k}"] / len(test) for k in CUTOFFS))


def _popular(num_items: int, train: Sequence[Query]) -> np.ndarray:
    """The items that most training queries mean."""
    counts = np.bincount([target for query in train for target in query.targets], minlength=num_items)
    return np.argsort(-counts, kind="stable")[: max(CUTOFFS)]


def _nearest(items: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Exact search: what a two-tower model with a perfect index would return."""
    import torch

    count = min(max(CUTOFFS), len(items))
    parts = torch.from_numpy(queries).split(CHUNK)
    return torch.cat([(part @ torch.from_numpy(items).T).topk(count).indices for part in parts]).numpy()


def _bm25(documents: Sequence[str], test: Sequence[Query]) -> np.ndarray:
    import bm25s

    index: Any = bm25s.BM25()
    index.index([normalise(document).split() for document in documents], show_progress=False)
    words = [normalise(query.text).split() for query in test]
    return index.retrieve(
        words, k=min(max(CUTOFFS), len(documents)), return_as="documents", show_progress=False
    )


def _with_queries(titles: Sequence[str], train: Sequence[Query]) -> list[str]:
    documents = list(titles)
    for query in train:
        for target in query.targets:
            documents[target] += f" {query.text}"
    return documents
