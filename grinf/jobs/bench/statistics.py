"""The statistics that the benchmark rests on. Latencies are autocorrelated: nothing assumes independence."""

import math
from collections.abc import Sequence

import numpy as np

SUB_WINDOWS = 5
STUDENT_T_99 = 4.541
"""One-sided 99 % point of Student's t with SUB_WINDOWS - 2 degrees of freedom."""


def quantile(values: np.ndarray, p: float) -> float:
    """Quantile without interpolation: a value of the sample, never below the sample quantile; 0 if empty."""
    return float(np.quantile(values, p, method="higher")) if len(values) else 0.0


def allowed_misses(p: float, n: int) -> int:
    """Requests of `n` that may exceed the SLA while `quantile(values, p)` stays inside."""
    return max(0, n - 1 - math.ceil(p * (n - 1) - 1e-9))


def autocorrelation_time(values: np.ndarray) -> float:
    """Integrated autocorrelation time: how many requests are worth an independent one; 1 for white noise.

    The sum stops at the first pair of lags whose correlations add up to less than nothing.

    Source: initial positive sequence estimator (Geyer, 1992).
    """
    centred = values - values.mean() if len(values) else values
    if len(values) < 20 or not centred.any():
        return 1.0
    spectrum = np.fft.rfft(centred, 2 * len(centred))
    correlation = np.fft.irfft(np.abs(spectrum) ** 2)[1 : len(centred) // 4] / float(centred @ centred)
    pairs = correlation[: len(correlation) // 2 * 2].reshape(-1, 2).sum(axis=1)
    stop = int(np.argmax(pairs <= 0)) if (pairs <= 0).any() else len(pairs)
    return float(max(1.0, 1.0 + 2.0 * pairs[:stop].sum()))


def rises(windows: Sequence[float]) -> bool:
    """Whether SUB_WINDOWS successive values climb, at 99 % confidence (one-sided t-test of the slope)."""
    y = np.asarray(windows, np.float64)
    if not np.isfinite(y).all():
        return False
    x = np.arange(SUB_WINDOWS) - (SUB_WINDOWS - 1) / 2
    slope = float(x @ y / (x @ x))
    residual = y - y.mean() - slope * x
    return slope > STUDENT_T_99 * math.sqrt(float(residual @ residual / (x @ x)) / (SUB_WINDOWS - 2))


def logistic_root(rates: np.ndarray, misses: np.ndarray, totals: np.ndarray, share: float) -> float | None:
    """Rate at which the fitted share of misses is `share`; None where misses do not increase with the rate.

    Weighted logistic regression of misses on log(rate), by Newton's method.
    """
    centre, wanted = rates.mean(), math.log(share / (1 - share))
    x = np.stack([np.ones_like(rates), np.log(rates / centre)], axis=1)
    beta = np.array([wanted, 0.0])
    for _ in range(50):
        p = 1 / (1 + np.exp(-np.clip(x @ beta, -30, 30)))
        # A faint ridge keeps the step finite when every probe, or none, misses.
        hessian = x.T @ ((totals * p * (1 - p))[:, None] * x) + 1e-6 * np.eye(2)
        beta += np.clip(np.linalg.solve(hessian, x.T @ (misses - totals * p)), -5, 5)
    if beta[1] <= 1e-3 or not misses.any():
        return None
    return float(centre * math.exp(np.clip((wanted - beta[0]) / beta[1], -3, 3)))


def isotonic_root(rates: np.ndarray, values: np.ndarray, limit: float) -> float | None:
    """Rate at which the isotonic fit of `values` reaches `limit`, linear in between; None: it does not.

    Source: pool adjacent violators (Ayer et al., 1955).
    """
    order = np.argsort(rates)
    blocks: list[tuple[float, int]] = []
    for value in values[order]:
        blocks.append((float(value), 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (a, n), (b, m) = blocks[-2:]
            blocks[-2:] = [((a * n + b * m) / (n + m), n + m)]
    smooth = np.concatenate([np.full(n, value) for value, n in blocks])
    first = int(np.searchsorted(smooth, limit, side="right"))
    if first in (0, len(smooth)):
        return None
    return float(np.interp(limit, smooth[first - 1 : first + 1], rates[order][first - 1 : first + 1]))


def paired_ratio(a: np.ndarray, b: np.ndarray) -> tuple[float, float, float]:
    """Median of the pairwise ratios a / b and its 95 % interval, from 10,000 resamples of pairs.

    With fewer than 6 pairs the interval is the range of the ratios: too few for a bootstrap.
    """
    logs = np.log(a / b)
    picks = np.random.default_rng(0).integers(0, len(logs), (10_000, len(logs)))
    few = len(logs) < 6
    ends = (logs.min(), logs.max()) if few else np.quantile(np.median(logs[picks], axis=1), [0.025, 0.975])
    return math.exp(np.median(logs)), math.exp(ends[0]), math.exp(ends[1])
