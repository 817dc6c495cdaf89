"""Summaries of runs in one number, with bootstrap intervals."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pandas as pd
from pandas.api.typing import SeriesGroupBy
from scipy.stats import bootstrap

from recjax.analysis.collect import axes_of

ACCURACY = "evaluation/accuracy"


def evaluations_of(table: pd.DataFrame, metric: str = ACCURACY) -> SeriesGroupBy:
    """Values of an evaluated metric in the order of steps, grouped by run."""
    return table.dropna(subset=[metric]).sort_values("step", kind="stable").groupby(axes_of(table), sort=False)[metric]


def final(table: pd.DataFrame, metric: str = ACCURACY, last: int = 3) -> pd.Series:
    """The mean of each run's `last` evaluations after step 0, by its settings."""
    return evaluations_of(table[table["step"] > 0], metric).apply(lambda values: values.tail(last).mean())


class Estimate(NamedTuple):
    """A mean over runs, pairs of runs or problems, its 95 % percentile bootstrap interval, and the number of values."""

    mean: float
    low: float
    high: float
    count: int


def estimate(values: np.ndarray) -> Estimate:
    """The mean of values and its interval; with three values the interval is about as wide as their range.

    Raises:
        ValueError: fewer than two values.
    """
    if len(values) < 2:
        raise ValueError(f"{len(values)} runs or pairs of runs: too few; an interval needs at least 2")
    if np.ptp(values) == 0:
        return Estimate(float(values[0]), float(values[0]), float(values[0]), len(values))
    return Estimate(float(np.mean(values)), *interval(values, np.mean, len(values)), len(values))


def interval(values: np.ndarray, statistic: Callable, numbers: int, resamples: int = 9999) -> tuple[float, float]:
    """The ends of the 95 % interval of a statistic's percentile bootstrap.

    Args:
        numbers: count of numbers that the statistic reads in one resample.
    """
    # Resampled in parts, which keeps the memory bounded and changes no number.
    options = {"batch": max(1, 10_000_000 // numbers), "n_resamples": resamples, "rng": np.random.default_rng(0)}
    found = bootstrap((values,), statistic, method="percentile", **options).confidence_interval
    return float(found.low), float(found.high)
