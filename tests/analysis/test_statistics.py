"""Intervals and tests over seeds: what they cover, simulated, and their values in cases that one computes by hand."""

import itertools

import numpy as np
import pandas as pd
import pytest
import scipy

from recjax.analysis import statistics
from recjax.analysis.statistics import band, estimate, holm, seed_means, seeds_needed, sign_flip_p, student_interval

EXPERIMENTS = 4000


def simulated(seeds, effect, rates=3):
    """Differences of many experiments, [experiments, seeds]: a seed's effect, and noise at each of some rates."""
    generator = np.random.default_rng(seeds)
    of_seeds = effect * generator.normal(size=(EXPERIMENTS, seeds, 1))
    return (of_seeds + generator.normal(size=(EXPERIMENTS, seeds, rates))).mean(-1)


def test_settings_of_a_seed_are_averaged_first():
    values = np.arange(6.0).reshape(3, 2) ** 2
    axes = pd.MultiIndex.from_product([[*"abc"], [1e-3, 1e-2]], names=["seed", "rate"])
    np.testing.assert_array_equal(seed_means(pd.Series(values.ravel(), axes)), values.mean(1))
    np.testing.assert_array_equal(seed_means(pd.Series(values[0], pd.Index([1e-3, 1e-2], name="rate"))), [0.5])


@pytest.mark.parametrize("effect", [0, 1, 3])
@pytest.mark.parametrize("seeds", [3, 6, 8, 16])
def test_the_interval_covers_95_percent(seeds, effect):
    covered = [low < 0 < high for low, high in map(student_interval, simulated(seeds, effect))]
    assert abs(np.mean(covered) - 0.95) < 0.0105  # three standard errors of a share of 4,000


@pytest.mark.parametrize("seeds", [6, 8])
def test_p_values_are_uniform_without_an_effect(seeds):
    p_values = np.array([sign_flip_p(each) for each in simulated(seeds, 1)[:2000]])
    for level in (0.05, 0.2, 0.5):
        # An exact test has as many possible p-values as there are pairs of flips.
        reachable = np.floor(level * 2 ** (seeds - 1)) / 2 ** (seeds - 1)
        assert abs(np.mean(p_values <= level) - reachable) < 0.034


def test_the_sign_flip_test_counts_all_flips():
    values = np.array([0.3, -0.1, 0.2, 0.4, 0.25])
    means = [abs(np.mean(values * signs)) for signs in itertools.product((-1, 1), repeat=5)]
    assert sign_flip_p(values) == pytest.approx(np.mean([mean >= values.mean() - 1e-12 for mean in means]))
    assert sign_flip_p(np.zeros(4)) == 1 and sign_flip_p(np.full(3, 0.1)) == 0.25
    assert 0 < sign_flip_p(np.full(40, 0.1)) < 0.001
    options = {"permutation_type": "samples", "n_resamples": np.inf}
    peer = scipy.stats.permutation_test((values,), np.mean, vectorized=True, **options).pvalue
    assert sign_flip_p(values) == pytest.approx(peer)


def test_an_estimate_of_few_seeds_is_a_range():
    few = estimate(np.array([0.1, 0.4, 0.2]))
    assert few == pytest.approx((0.7 / 3, 0.1, 0.4, 3)) and few.is_range
    assert few.spread == "0.100 to 0.400, range of 3 seeds"
    many = estimate(np.array([0.1, 0.4, 0.2, 0.3, 0.2, 0.3]))
    peer = scipy.stats.ttest_1samp([0.1, 0.4, 0.2, 0.3, 0.2, 0.3], 0).confidence_interval(0.95)
    assert not many.is_range and (many.low, many.high) == pytest.approx((peer.low, peer.high))
    with pytest.raises(ValueError, match="1 seeds: too few; a spread needs at least 2"):
        estimate(np.array([0.1]))


def test_holms_rejections_are_those_of_the_steps():
    generator = np.random.default_rng(0)
    for _ in range(50):
        p_values = generator.beta(0.3, 1, 6)
        adjusted = holm(p_values)
        rejected = set()
        for rank, index in enumerate(np.argsort(p_values)):
            if p_values[index] > 0.05 / (6 - rank):
                break
            rejected.add(index)
        assert rejected == {index for index, p_value in enumerate(adjusted) if p_value <= 0.05}
    assert holm([0.9, 0.8]) == [1.0, 1.0] and holm([]) == []


@pytest.mark.parametrize(("spread", "difference"), [(0.05, 0.05), (0.1, 0.08), (0.02, 0.05)])
def test_planned_seeds_show_the_difference(spread, difference):
    count = seeds_needed(spread, difference)
    generator = np.random.default_rng(count)
    values = difference + spread * generator.normal(size=(EXPERIMENTS, count))
    shown = np.mean([low > 0 or high < 0 for low, high in map(student_interval, values)])
    assert shown > 0.78 and (count == statistics.MIN_SEEDS or shown < 0.86)
    assert seeds_needed(0.0, difference) == statistics.MIN_SEEDS
    with pytest.raises(ValueError, match="difference = 0: no number of seeds shows it"):
        seeds_needed(spread, 0.0)


def test_a_band_is_the_estimate_of_each_step():
    generator = np.random.default_rng(0)
    values = pd.DataFrame(generator.normal(size=(7, 3)), columns=[0, 10, 20])
    values.loc[3:, 20] = np.nan
    low, high = band(values)
    for step in values:
        known = values[step].dropna().to_numpy()
        found = estimate(known)
        assert (low[step], high[step]) == pytest.approx((found.low, found.high))
    low, high = band(values[:1])
    np.testing.assert_array_equal(low, values.iloc[0])
    np.testing.assert_array_equal(high, values.iloc[0])
