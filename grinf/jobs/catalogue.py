"""Synthetic catalogues for benchmarks and size targets, the same on every machine."""

import numpy as np

CODEBOOK = 8192


def skewed_catalogue(n: int, seed: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """A catalogue with popular prefixes: codes of the first two levels are heavy-tailed and not independent.

    Returns:
        Item ids int64 [n], a permutation of 0..n-1, and codes int32 [n, 3] in 0..8191.
    """
    rng = np.random.default_rng(seed)
    first = _heavy_tailed(rng, 1.1, n)
    second = (_heavy_tailed(rng, 1.3, n) + first * 37) % CODEBOOK
    third = rng.integers(0, CODEBOOK, n, dtype=np.int32)
    return rng.permutation(n).astype(np.int64), np.stack([first, second, third], axis=1).astype(np.int32)


def uniform_catalogue(n: int, seed: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """A catalogue of uniform random SIDs, the hardest to compress; shapes as `skewed_catalogue`."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, CODEBOOK, (n, 3), dtype=np.int32)
    return rng.permutation(n).astype(np.int64), codes


def _heavy_tailed(rng: np.random.Generator, alpha: float, n: int) -> np.ndarray:
    # Cut before the cast: among tens of millions of draws, one may be beyond int32.
    return np.minimum(rng.pareto(alpha, n) * 300, CODEBOOK - 1).astype(np.int32)
