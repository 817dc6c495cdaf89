"""Summaries of runs in one number, and differences between two kinds of runs."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import bootstrap

from recjax.analysis.collect import axes_of

ACCURACY = "evaluation/accuracy"


def _evaluations(table: pd.DataFrame, metric: str):
    """Values of an evaluated metric in the order of steps, grouped by run."""
    return table.dropna(subset=[metric]).sort_values("step", kind="stable").groupby(axes_of(table), sort=False)[metric]


def final(table: pd.DataFrame, metric: str = ACCURACY, last: int = 3) -> pd.Series:
    """The mean of each run's `last` evaluations after step 0, by its settings."""
    return _evaluations(table[table["step"] > 0], metric).apply(lambda values: values.tail(last).mean())


def mean_over_steps(table: pd.DataFrame) -> pd.Series:
    """The mean of each run's evaluations after step 0, by its settings; higher for runs that learn sooner."""
    return _evaluations(table[table["step"] > 0], ACCURACY).mean()


def fallen(table: pd.DataFrame) -> pd.Series:
    """The drop from each run's best evaluation to its last, by its settings; 0 for a run that ends at its best."""
    return _evaluations(table, ACCURACY).max() - final(table, last=1)


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


def paired_difference(values: pd.Series, axis: str, first: str, second: str, **where: Sequence[str]) -> Estimate:
    """`first` minus `second` on one axis, paired by all other settings.

    Args:
        values: one number a run, by its settings.
        axis: the setting in which the two differ.
        where: the pairs' settings, as values by axis.
    Raises:
        ValueError: fewer than two pairs.
    """
    for name, allowed in where.items():
        values = values[values.index.get_level_values(name).isin(allowed)]
    by_kind = values.unstack(axis).reindex(columns=[first, second])
    return estimate((by_kind[first] - by_kind[second]).dropna().to_numpy())
