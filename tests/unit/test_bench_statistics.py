import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grinf.jobs.bench import statistics as stats

P = st.sampled_from([0.5, 0.9, 0.95, 0.99, 0.999])


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=400), P, st.floats(0, 1e3))
def test_counting_misses_is_the_same_as_comparing_the_quantile(values, p, limit):
    values = np.array(values)
    fits = int((values > limit).sum()) <= stats.allowed_misses(p, len(values))
    assert fits == (stats.quantile(values, p) <= limit)


def test_quantile_is_a_value_of_the_sample_and_never_interpolates():
    values = np.arange(1.0, 101.0)
    assert stats.quantile(values, 0.99) == 100.0
    assert stats.quantile(values, 0.5) == 51.0
    assert stats.quantile(np.empty(0), 0.5) == 0.0


def test_autocorrelation_time_of_known_processes():
    rng = np.random.default_rng(0)
    noise = rng.standard_normal(20_000)
    assert stats.autocorrelation_time(noise) == pytest.approx(1.0, abs=0.15)
    ar = np.zeros(40_000)
    for i, step in enumerate(rng.standard_normal(40_000)):
        ar[i] = 0.8 * ar[i - 1] + step
    assert stats.autocorrelation_time(ar) == pytest.approx((1 + 0.8) / (1 - 0.8), rel=0.3)
    assert stats.autocorrelation_time(np.zeros(100)) == 1.0


@given(st.floats(50, 500), st.floats(8, 25), st.integers(0, 1000))
def test_logistic_root_finds_the_rate_of_a_logistic_law(root, slope, seed):
    rates = root * np.linspace(0.9, 1.1, 9)
    share = 1 / (1 + np.exp(-(np.log(0.01 / 0.99) + slope * np.log(rates / root))))
    found = stats.logistic_root(rates, share * 1e4, np.full(9, 1e4), 0.01)
    assert found == pytest.approx(root, rel=1e-3)


def test_logistic_root_needs_misses_that_increase():
    rates, n = np.array([90.0, 100.0, 110.0]), np.full(3, 1000.0)
    assert stats.logistic_root(rates, np.array([9.0, 5.0, 2.0]), n, 0.01) is None
    assert stats.logistic_root(rates, np.zeros(3), n, 0.01) is None


def test_isotonic_root_pools_violators_and_interpolates():
    rates = np.array([40.0, 10.0, 20.0, 30.0])
    assert stats.isotonic_root(rates, np.array([140.0, 50.0, 90.0, 70.0]), 100.0) == pytest.approx(100 / 3)
    assert stats.isotonic_root(rates, np.array([4.0, 1.0, 2.0, 3.0]), 100.0) is None
    assert stats.isotonic_root(rates, np.array([400.0, 101.0, 200.0, 300.0]), 100.0) is None


def test_rises_sees_a_trend_and_not_noise():
    assert stats.rises([10, 12, 14.1, 15.9, 18])
    assert not stats.rises([10, 14, 9, 15, 11])
    assert not stats.rises([18, 16, 14, 12, 10])
    assert not stats.rises([1, 2, 3, 4, float("inf")])


def test_paired_ratio_covers_the_truth_and_is_exact_for_equal_engines():
    rng = np.random.default_rng(1)
    drift = np.exp(np.cumsum(rng.normal(0, 0.04, 20)))
    a, b = 1.05 * drift * np.exp(rng.normal(0, 0.01, 20)), drift * np.exp(rng.normal(0, 0.01, 20))
    ratio, low, high = stats.paired_ratio(a, b)
    assert low < 1.05 < high
    assert ratio == pytest.approx(1.05, abs=0.01)
    assert stats.paired_ratio(b, b) == (1.0, 1.0, 1.0)
    assert stats.paired_ratio(a[:3], b[:3])[1:] == pytest.approx(sorted(a[:3] / b[:3])[::2])
