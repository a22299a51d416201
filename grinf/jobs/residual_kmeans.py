"""Residual k-means: vectors to Semantic IDs, level by level from coarse to fine."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from grinf.errors import DataError

POINTS_PER_CENTROID = 64
"""Vectors that a centroid is learned from; more only cost time."""
MAX_LOAD = 1.5
"""Most vectors of a code in a balanced level, as a multiple of its fair share."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """SIDs of some vectors.

    Attributes:
        codes: int32 [n, levels].
        codebooks: Per level float32 [codes, dim]; a SID's centroids add up to about its vector less the mean.
    """

    codes: np.ndarray
    codebooks: tuple[np.ndarray, ...]


@dataclass(frozen=True, slots=True)
class LevelUse:
    """How a level's codes are used.

    Attributes:
        codes: Codes with items. effective_codes: equally busy codes that would tell as much, exp(entropy).
        max_items: Items of the busiest code.
        nodes: Distinct prefixes that end at this level.
    """

    codes: int
    effective_codes: float
    max_items: int
    nodes: int


@dataclass(frozen=True, slots=True)
class SidQuality:
    """How well SIDs tell items apart; `items_sharing` are those that are not alone with their SID."""

    items: int
    sids: int
    items_sharing: int
    max_items: int
    levels: tuple[LevelUse, ...]


def residual_kmeans(
    vectors: np.ndarray,
    levels: int,
    codebook_size: int,
    seed: int,
    *,
    balanced: bool = False,
    unique: bool = False,
    on_level: Callable[[int], None] = lambda done: None,
) -> Quantization:
    """Cluster the vectors, then what their centroids miss of them, and so on.

    Args:
        vectors: float32 [n, dim].
        levels: Codes per SID.
        codebook_size: Codes per level, K; fewer are used if there are fewer vectors.
        seed: Of the samples and the first centroids.
        balanced: Give no code of a level more than `MAX_LOAD` times its fair share.
        unique: Give every vector a SID of its own, by its last code.
        on_level: Called with the number of levels that are done.

    Raises:
        DataError: `unique`, but more than K vectors share all codes but the last.
    """
    from sklearn.metrics import pairwise_distances_argmin

    residual = vectors - vectors.mean(axis=0)
    prefix = np.zeros(len(vectors), np.int64)
    codes: list[np.ndarray] = []
    codebooks: list[np.ndarray] = []
    for level in range(levels):
        centroids = _learn_centroids(residual, codebook_size, seed + level)
        if unique and level == levels - 1:
            chosen = _assign_unique(residual, centroids, prefix)
        elif balanced:
            chosen = _assign_evenly(residual, centroids)
        else:
            chosen = pairwise_distances_argmin(residual, centroids)
        residual = residual - centroids[chosen]
        prefix = np.unique(prefix * codebook_size + chosen, return_inverse=True)[1]
        codes.append(chosen)
        codebooks.append(centroids)
        on_level(level + 1)
    return Quantization(np.stack(codes, axis=1).astype(np.int32), tuple(codebooks))


def measure_sids(codes: np.ndarray) -> SidQuality:
    """Count collisions and the use of codes; `codes` is int [n, levels]."""
    uses: list[LevelUse] = []
    prefix = np.zeros(len(codes), np.int64)
    for column in codes.T:
        load = np.bincount(column)
        share = load[load > 0] / len(codes)
        prefix = np.unique(prefix * len(load) + column, return_inverse=True)[1]
        effective = float(np.exp(-(share * np.log(share)).sum()))
        uses.append(LevelUse(len(share), effective, int(load.max()), int(prefix.max()) + 1))
    items_of = np.bincount(prefix)
    return SidQuality(
        len(codes), len(items_of), int(items_of[items_of > 1].sum()), int(items_of.max()), tuple(uses)
    )


def _learn_centroids(vectors: np.ndarray, codebook_size: int, seed: int) -> np.ndarray:
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    count = min(len(vectors), POINTS_PER_CENTROID * codebook_size)
    sample = vectors[np.random.default_rng(seed).choice(len(vectors), count, replace=False)]
    once: Any = 1  # The stubs of n_init know "auto" only.
    kmeans: Any = KMeans(min(codebook_size, count), n_init=once, max_iter=25, random_state=seed)
    with warnings.catch_warnings():
        # Fewer distinct vectors than codes: the spare codes repeat a centroid, and stay unused.
        warnings.simplefilter("ignore", ConvergenceWarning)
        return kmeans.fit(sample).cluster_centers_.astype(np.float32)


def _assign_evenly(vectors: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """Fill centroids to their capacity, nearest vectors first; the others turn to those with room left."""
    from sklearn.metrics import pairwise_distances_argmin_min

    room = np.full(len(centroids), math.ceil(MAX_LOAD * len(vectors) / len(centroids)))
    chosen = np.empty(len(vectors), np.int64)
    left = np.arange(len(vectors))
    while len(left):
        has_room = np.flatnonzero(room > 0)
        best, distance = pairwise_distances_argmin_min(vectors[left], centroids[has_room])
        order = np.lexsort((distance, best))
        left, best = left[order], has_room[best[order]]
        fits = np.arange(len(best)) - np.searchsorted(best, best) < room[best]
        chosen[left[fits]] = best[fits]
        room -= np.bincount(best[fits], minlength=len(room))
        left = left[~fits]
    return chosen


def _assign_unique(vectors: np.ndarray, centroids: np.ndarray, prefix: np.ndarray) -> np.ndarray:
    """Within each prefix, give every vector another code at the least total distance."""
    from scipy.optimize import linear_sum_assignment
    from scipy.spatial.distance import cdist

    chosen = np.empty(len(vectors), np.int64)
    order = np.argsort(prefix, kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(prefix[order])) + 1):
        if len(members) > len(centroids):
            raise DataError(
                f"{len(members):,} items share all codes but the last, which has {len(centroids):,} values",
                "it alone cannot tell them apart",
                "use more levels or a larger codebook, or let items share a SID",
            )
        distances = cdist(vectors[members], centroids, "sqeuclidean")
        chosen[members] = linear_sum_assignment(distances)[1]
    return chosen
