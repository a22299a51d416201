"""How certain a metric is: a Poisson bootstrap over the queries, whose sums add up like those of the metric.

In every replicate a query counts Poisson(1) times. How often depends on the number of its row and on the
replicate alone: however the rows are cut into units, and whichever run answers them, the interval is the
same.
"""

import base64
import math

import numpy as np

REPLICATES = 500
LEVEL = 0.95

_MOST = 12
"""A query counts at most so many times; more has a probability of 6e-11."""


def draw_weights(first_row: int, num_rows: int) -> np.ndarray:
    """How often each of some queries counts in each replicate, uint8 [rows, REPLICATES]."""
    row = np.arange(first_row, first_row + num_rows, dtype=np.uint64)[:, None]
    uniform = _mix(_mix(row) + np.arange(1, REPLICATES + 1, dtype=np.uint64)) >> np.uint64(11)
    below = np.cumsum([1 / math.factorial(count) for count in range(_MOST)]) / math.e
    return np.searchsorted((below * 2.0**53).astype(np.uint64), uniform, side="right").astype(np.uint8)


def resample(weights: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Sum the values of some queries in every replicate, float64 [REPLICATES]."""
    # Not by a matrix product, whose order of summation goes by the number of threads.
    return np.einsum("rb,r->b", weights, values)


def interval(sums: np.ndarray, counts: np.ndarray) -> list[float] | None:
    """Ends of the interval of a mean, to six places; None: no query was judged.

    Args:
        sums: float64 [REPLICATES], of the values.
        counts: float64 [REPLICATES], of the queries.
    """
    is_used = counts > 0
    if not is_used.any():
        return None
    means, tail = sums[is_used] / counts[is_used], (1 - LEVEL) / 2
    return np.quantile(means, [tail, 1 - tail]).round(6).tolist()


def spell_sums(sums: np.ndarray) -> str:
    """Write sums as text for the metadata of a file."""
    return base64.b64encode(sums.astype("<f8").tobytes()).decode()


def read_sums(text: str) -> np.ndarray:
    """Read what `spell_sums` wrote."""
    return np.frombuffer(base64.b64decode(text), "<f8")


def _mix(number: np.ndarray) -> np.ndarray:
    """Scramble 64-bit numbers (the finaliser of splitmix64)."""
    number = number + np.uint64(0x9E3779B97F4A7C15)
    number = (number ^ (number >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    number = (number ^ (number >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return number ^ (number >> np.uint64(31))
