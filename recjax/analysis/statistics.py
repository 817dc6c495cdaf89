"""Intervals and tests for numbers of runs, with the seed as the unit.

A seed changes base policy, problems, order and sampling, so runs of one seed are not independent. Factors that an
experimenter fixes, such as a learning rate or the age of samples, are reported one by one, or averaged within a seed
before anything else (`seed_means`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import scipy  # loads scipy.stats, which takes a second, at its first use
from jaxtyping import Float

from recjax.errors import UserError

LEVEL = 0.05  # highest p-value of a difference
MIN_SEEDS = 6  # Fewer seeds give no verdict: a sign-flip test of five differences has no p-value below 0.06
SEED = "seed"  # name of the axis
_POWER = 0.8  # probability with which a planned experiment shows the difference that it was planned for
_MOST_SEEDS = 10_000
_EXACT_SEEDS = 13  # most differences whose sign flips are all counted
_RESAMPLES = 9999


class Estimate(NamedTuple):
    """A mean over seeds with its spread.

    mean: mean of the values.
    low, high: 95 % interval of the mean from MIN_SEEDS values on; of fewer values, the lowest and the highest.
    count: number of values.
    """

    mean: float
    low: float
    high: float
    count: int

    @property
    def is_range(self) -> bool:
        """True if `low` and `high` are only the range of a few values, which gives no verdict."""
        return self.count < MIN_SEEDS

    @property
    def spread(self) -> str:
        """The spread in words, for example "0.1 to 0.2, range of 3 seeds"."""
        words = f"range of {self.count} seeds" if self.is_range else f"{self.count} seeds"
        return f"{self.low:.3f} to {self.high:.3f}, {words}"


def estimate(values: Float[np.ndarray, " seeds"]) -> Estimate:
    """The mean of one value per seed, with its 95 % interval; with the range for fewer than MIN_SEEDS values.

    Raises:
        UserError: fewer than two values.
    """
    if len(values) < MIN_SEEDS:
        _require_two(values)
        return Estimate(float(np.mean(values)), float(np.min(values)), float(np.max(values)), len(values))
    return Estimate(float(np.mean(values)), *student_interval(values), len(values))


def student_interval(values: Float[np.ndarray, " seeds"]) -> tuple[float, float]:
    """The ends of Student's 95 % interval of a mean: mean ± t · s / √n, with n − 1 degrees of freedom.

    It covers the mean of normal values with 95 % for every n; a percentile bootstrap of three values covers 75 %.

    Raises:
        UserError: fewer than two values.

    Reference: Student, The Probable Error of a Mean, Biometrika 6 (1908).

    Examples:
        >>> [round(end, 3) for end in student_interval(np.array([0.1, 0.2, 0.3]))]
        [-0.048, 0.448]
    """
    _require_two(values)
    error = np.std(values, ddof=1) / np.sqrt(len(values))
    reach = scipy.stats.t.ppf(1 - LEVEL / 2, len(values) - 1) * error
    return float(np.mean(values) - reach), float(np.mean(values) + reach)


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """The ends of Wilson's 95 % interval of a mean of values from 0 to 1.

    Near 0 and 1 a bootstrap is too narrow: it is a point where all values are equal. Values between 0 and 1 vary less
    than zeros and ones with their mean, so the interval covers at least as often.

    Args:
        share: mean of the values.
        count: number of values.
    Reference: Wilson, Probable inference, the law of succession, and statistical inference, JASA 22 (1927).

    Examples:
        >>> [round(end, 3) for end in wilson_interval(1.0, 64)]
        [0.943, 1.0]
    """
    spread = scipy.stats.norm.ppf(1 - LEVEL / 2) ** 2 / count
    center = (share + spread / 2) / (1 + spread)
    reach = np.sqrt(spread * share * (1 - share) + spread**2 / 4) / (1 + spread)
    return max(float(center - reach), 0.0), min(float(center + reach), 1.0)


def sign_flip_p(differences: Float[np.ndarray, " seeds"]) -> float:
    """The p-value of the two-sided test that paired differences are symmetric around 0, by flips of their signs.

    All 2ⁿ flips are counted for up to 13 differences; for more differences, 9,999 random flips.

    Reference: Fisher, The Design of Experiments (1935), section 21.

    Examples:
        >>> sign_flip_p(np.full(6, 0.1))
        0.03125
    """
    if len(differences) <= _EXACT_SEEDS:
        signs = 1 - 2 * ((np.arange(2 ** len(differences))[:, None] >> np.arange(len(differences))) & 1)
    else:
        signs = np.random.default_rng(0).choice((-1, 1), (_RESAMPLES, len(differences)))
        signs = np.vstack([np.ones(len(differences)), signs])  # The observed flip counts as well.
    sums = np.abs(signs @ differences)
    observed = np.abs(np.sum(differences))
    # Equal sums with a different order of addition differ in the last digits.
    return float(np.mean(sums >= observed - 1e-12 * np.abs(differences).sum()))


def holm(p_values: Sequence[float] | np.ndarray) -> list[float]:
    """Holm's adjusted p-values: rejecting those up to α errs in any of the true hypotheses with probability ≤ α.

    The p-value of rank i, from 0 of n, becomes the maximum of (n − j) · p_j over the ranks j ≤ i, at most 1.

    Reference: Holm, A Simple Sequentially Rejective Multiple Test Procedure, Scandinavian Journal of Statistics (1979).

    Examples:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    order = np.argsort(p_values, kind="stable")
    adjusted = np.empty(len(p_values))
    largest = 0.0
    for rank, index in enumerate(order):
        largest = max(largest, (len(p_values) - rank) * p_values[index])
        adjusted[index] = min(largest, 1.0)
    return adjusted.tolist()


def seed_means(values: pd.Series) -> pd.Series:
    """One value per seed: the mean over all other settings of a seed.

    Args:
        values: one value per run, by its settings; settings without an axis `seed` are all of one seed.
    """
    if SEED not in values.index.names:
        return pd.Series([values.mean()])
    return values.groupby(level=SEED, sort=False).mean()


def seeds_needed(spread: float, difference: float, power: float = _POWER) -> int:
    """Number of seeds with which a two-sided paired t test at LEVEL shows a difference with the given probability.

    Args:
        spread: standard deviation of the paired differences over seeds, for example of a pilot.
        difference: true mean difference to show; only its size matters.
        power: probability of showing it.
    Raises:
        UserError: the difference is 0, or needs more than 10,000 seeds.

    Reference: Cohen, Statistical Power Analysis for the Behavioral Sciences (1988), section 2.3.

    Examples:
        >>> seeds_needed(spread=0.05, difference=0.05)
        10
    """
    if difference == 0:
        raise UserError("difference = 0", "no number of seeds shows it", "give the smallest difference that matters")
    if spread == 0:
        return MIN_SEEDS
    for count in range(MIN_SEEDS, _MOST_SEEDS + 1):
        shift = abs(difference) / spread * np.sqrt(count)
        critical = scipy.stats.t.ppf(1 - LEVEL / 2, count - 1)
        reached = scipy.stats.nct.sf(critical, count - 1, shift) + scipy.stats.nct.cdf(-critical, count - 1, shift)
        if reached >= power:
            return count
    raise UserError(
        problem=f"a difference of {difference:g} with a spread of {spread:g} needs more than {_MOST_SEEDS} seeds",
        remedy="choose a larger difference",
    )


def band(values: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """The ends of a curve's band at each step, see `Estimate`; equal to the mean for a single run.

    Args:
        values: a row per run, a column per step; NaN where a run has no value.
    """
    counts = values.notna().sum()
    reach = scipy.stats.t.ppf(1 - LEVEL / 2, np.maximum(counts - 1, 1)) * values.std() / np.sqrt(counts)
    is_range = counts < MIN_SEEDS
    low = (values.mean() - reach).where(~is_range, values.min())
    high = (values.mean() + reach).where(~is_range, values.max())
    return low, high


def _require_two(values: Float[np.ndarray, " seeds"]) -> None:
    if len(values) < 2:
        raise UserError(f"{len(values)} seeds", "too few", "a spread needs at least 2")
