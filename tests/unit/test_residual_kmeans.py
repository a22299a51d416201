"""Residual k-means: codes that follow the vectors, unique and balanced on demand."""

import numpy as np
import pytest

from grinf.errors import DataError
from grinf.jobs.residual_kmeans import MAX_LOAD, measure_sids, residual_kmeans


def _clusters(seed: int = 0) -> np.ndarray:
    """Vectors of 4 far groups, each of 4 near groups of 6."""
    rng = np.random.default_rng(seed)
    far, near = rng.normal(size=(4, 1, 1, 8)) * 20, rng.normal(size=(4, 4, 1, 8)) * 2
    return (far + near + rng.normal(size=(4, 4, 6, 8)) * 0.01).reshape(-1, 8).astype(np.float32)


def test_levels_go_from_coarse_to_fine():
    codes = residual_kmeans(_clusters(), 2, 4, seed=0).codes
    groups = codes[:, 0].reshape(4, 24)
    assert (groups == groups[:, :1]).all()
    assert len(set(groups[:, 0])) == 4


def test_centroids_of_a_sid_add_up_to_its_vector():
    vectors = _clusters()
    errors = []
    for levels in (1, 2, 3):
        made = residual_kmeans(vectors, levels, 8, seed=0)
        codebooks = zip(made.codebooks, made.codes.T, strict=True)
        rebuilt = vectors.mean(0) + sum(codebook[codes] for codebook, codes in codebooks)
        errors.append(float(((vectors - rebuilt) ** 2).sum()))
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 0.1 * errors[0]


def test_unique_gives_every_vector_its_own_sid():
    vectors = np.repeat(_clusters()[:24], 4, axis=0)  # Four times the same vector.
    shared, own = (residual_kmeans(vectors, 3, 16, seed=0, unique=unique).codes for unique in (False, True))
    assert len(np.unique(shared, axis=0)) <= 24
    assert len(np.unique(own, axis=0)) == 96
    assert (own[:, :2] == shared[:, :2]).all()


def test_unique_keeps_codes_that_do_not_collide():
    vectors = _clusters()
    shared, own = (residual_kmeans(vectors, 3, 16, seed=0, unique=unique).codes for unique in (False, True))
    _, which, count = np.unique(shared, axis=0, return_inverse=True, return_counts=True)
    prefix = np.unique(shared[:, :2], axis=0, return_inverse=True)[1]
    crowded = np.isin(prefix, prefix[count[which] > 1])
    assert (own[~crowded] == shared[~crowded]).all()


def test_unique_refuses_more_items_than_codes():
    with pytest.raises(DataError, match="5 items share all codes but the last, which has 4 values"):
        residual_kmeans(np.ones((5, 3), np.float32), 2, 4, seed=0, unique=True)


def test_balanced_limits_the_load_of_every_code():
    rng = np.random.default_rng(0)
    vectors = (rng.normal(size=(4000, 4)) * rng.pareto(1.5, size=(4000, 1))).astype(np.float32)
    free, even = (
        residual_kmeans(vectors, 2, 16, seed=0, balanced=balanced).codes for balanced in (False, True)
    )
    assert np.bincount(free[:, 0]).max() > 3000
    assert all(np.bincount(codes).max() <= MAX_LOAD * 250 for codes in even.T)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_fewer_vectors_than_codes(count):
    vectors = np.random.default_rng(0).normal(size=(count, 3)).astype(np.float32)
    made = residual_kmeans(vectors, 3, 8, seed=0, unique=True)
    assert made.codes.shape == (count, 3)
    assert made.codes.min() >= 0
    assert made.codes.max() < 8
    assert len(np.unique(made.codes, axis=0)) == count


def test_the_same_seed_gives_the_same_sids():
    first, again = (residual_kmeans(_clusters(), 3, 8, seed=5).codes for _ in range(2))
    assert (first == again).all()


def test_quality_counts_collisions():
    quality = measure_sids(np.array([[0, 0], [0, 1], [0, 1], [2, 1]]))
    assert (quality.items, quality.sids, quality.items_sharing, quality.max_items) == (4, 3, 2, 2)
    assert [(use.codes, use.max_items, use.nodes) for use in quality.levels] == [(2, 3, 2), (2, 3, 3)]
    assert quality.levels[0].effective_codes == pytest.approx(
        np.exp(-(0.75 * np.log(0.75) + 0.25 * np.log(0.25)))
    )
