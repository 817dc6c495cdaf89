"""Summaries of runs in one number, and differences between paired runs."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy  # loads scipy.stats, which takes a second, at its first use
from flax.traverse_util import flatten_dict
from pandas.api.typing import SeriesGroupBy

from recjax.analysis.collect import axes_of
from recjax.analysis.statistics import estimate, seed_means, sign_flip_p
from recjax.config.yaml_values import read_yaml_file
from recjax.errors import UserError
from recjax.logs.metrics import read_metrics
from recjax.runs.stored_runs import base_policy, starts

ACCURACY = "evaluation/accuracy"
REWARD = "evaluation/reward"  # Runs are compared by reward if no part of it is a verdict.
RESAMPLES = 9999
# Files with the completions of evaluations. A continued run keeps the after.jsonl of its earlier end.
_EVALUATED = ("samples.parquet", "samples/after.jsonl", "samples/latest.jsonl")
_UNRELATED = {"output", "model", "weights"}  # These settings locate a policy and do not change it.


def evaluations_of(table: pd.DataFrame, metric: str = ACCURACY) -> SeriesGroupBy:
    """Values of an evaluated metric in the order of steps, grouped by run."""
    evaluated = table.dropna(subset=[metric]).sort_values("step", kind="stable")
    return evaluated.groupby(axes_of(table), sort=False)[metric]


def final(table: pd.DataFrame, metric: str = ACCURACY, last: int = 3) -> pd.Series:
    """The mean over the `last` evaluations of each run after step 0, by settings."""
    return evaluations_of(table[table["step"] > 0], metric).apply(lambda values: values.tail(last).mean())


def interval(values: np.ndarray, statistic: Callable, numbers: int, resamples: int = RESAMPLES) -> tuple[float, float]:
    """The ends of the 95 % interval of a statistic's percentile bootstrap.

    Args:
        numbers: count of numbers that the statistic reads in one resample, which bounds the memory.
    """
    # `batch` resamples are computed together. It changes no result.
    result = scipy.stats.bootstrap(
        (values,),
        statistic,
        method="percentile",
        batch=max(1, 10_000_000 // numbers),
        n_resamples=resamples,
        rng=np.random.default_rng(0),
    )
    ends = result.confidence_interval
    return float(ends.low), float(ends.high)


def in_words(differences: np.ndarray) -> str:
    """The mean of differences per seed, with interval and test from MIN_SEEDS seeds on, and their range below."""
    if len(differences) < 2:
        return f"{differences.mean():.3f}, 1 seed"
    mean_estimate = estimate(differences)
    words = f"{mean_estimate.mean:.3f} ({mean_estimate.spread})"
    if not mean_estimate.is_range:
        words += f", p {sign_flip_p(differences):.2g}"
    return words


def paired_seeds(values: pd.Series, axis: str, first: str, second: str, **where: Sequence[str]) -> np.ndarray:
    """`first` minus `second` on one axis, one number per seed: its mean over the other settings of the pairs.

    Args:
        values: one value per run, by its settings.
        where: the pairs' settings, as values by axis.
    """
    return seed_means(paired_values(values, axis, first, second, **where)).to_numpy()


def paired_values(values: pd.Series, axis: str, first: str, second: str, **where: Sequence[str]) -> pd.Series:
    """`first` minus `second` on one axis, for every pair of runs whose other settings are equal, by these settings.

    Args:
        values: one number a run, by its settings.
        where: the pairs' settings, as values by axis.
    """
    for name, allowed in where.items():
        values = values[values.index.get_level_values(name).isin(allowed)]
    if values.index.nlevels > 1:
        by_value = values.unstack(axis)
    else:
        by_value = values.to_frame().T
    # A side without runs becomes a column of NaN.
    by_value = by_value.reindex(columns=[first, second])
    return (by_value[first] - by_value[second]).dropna()


def minus_line(table: pd.DataFrame, axis: str, against: str, metric: str) -> np.ndarray:
    """A metric of each row minus the same step of the run with `against` on the axis and equal other settings.

    NaN if no such run has the step, and for the base run.
    """
    keys = [name for name in axes_of(table) if name != axis]
    keys.append("step")
    is_base = table[axis] == against
    base = table.loc[is_base, [*keys, metric]]
    base_values = table[keys].merge(base, how="left", on=keys)[metric].to_numpy()
    differences = table[metric].to_numpy() - base_values
    return np.where(is_base, np.nan, differences)


def pair_runs(first: Sequence[Path], second: Sequence[Path]) -> tuple[dict[str, tuple[Path, Path]], list[str]]:
    """Pairs the folders of two sides by seed and, if a side has several of one seed, by all settings that vary on both.

    One folder on each side is always a pair.

    Returns:
        Pairs by the settings that they share, the seed first, and the settings that differ between the sides, in words.
    Raises:
        UserError: no pairs, or a side has several runs with the same settings.
    """
    first_settings = _settings_table(first)
    second_settings = _settings_table(second)
    keys = sorted(map(str, {"seed", *first_settings, *second_settings}))
    first_settings = first_settings.reindex(columns=keys, fill_value="None")
    second_settings = second_settings.reindex(columns=keys, fill_value="None")
    first_counts = first_settings.nunique().to_dict()
    second_counts = second_settings.nunique().to_dict()
    if len(first) == len(second) == 1:
        shared = []
    else:
        shared = ["seed"]
        if first_settings.duplicated(shared).any() or second_settings.duplicated(shared).any():
            shared += [key for key in keys if key != "seed" and first_counts[key] > 1 and second_counts[key] > 1]
        for settings in (first_settings, second_settings):
            repeated = settings[settings.duplicated(shared, keep=False)]
            if len(repeated):
                problem = "several runs of one side have these settings"
                raise UserError(_labels(repeated, shared)[0], problem, "name folders that differ in the seed")
    first_labels = _labels(first_settings, shared)
    second_labels = _labels(second_settings, shared)
    second_by_label = dict(zip(second_labels, second, strict=True))
    pairs = {}
    for label, folder in zip(first_labels, first, strict=True):
        if label in second_by_label:
            pairs[label] = (folder, second_by_label[label])
    if not pairs:
        examples = f"{first_labels[0]} and {second_labels[0]}"
        raise UserError(
            problem=f"no runs of the two sides have equal {' and '.join(shared)} ({examples})", remedy="run equal seeds"
        )
    changes = []
    for key in keys:
        is_constant = first_counts[key] == second_counts[key] == 1
        if key in shared or not is_constant:
            continue
        first_value = first_settings[key].iloc[0]
        second_value = second_settings[key].iloc[0]
        if first_value != second_value:
            changes.append(f"{key} = {first_value} and {second_value}")
    return pairs, changes


def _settings_table(folders: Sequence[Path]) -> pd.DataFrame:
    """The settings of runs as texts: a row per folder, a column per key; "None" where a run has no such key."""
    rows = []
    for folder in folders:
        settings = _read_settings(folder)
        rows.append({key: str(value) for key, value in settings.items() if key not in _UNRELATED})
    return pd.DataFrame(rows, index=range(len(rows))).fillna("None")


def _read_settings(folder: Path) -> dict[str, Any]:
    """A run's config with keys such as optimizer.learning_rate; empty if the folder has no config."""
    path = folder / "config.yaml"
    if not path.is_file():
        return {}
    return flatten_dict(read_yaml_file(path), sep=".")


def _labels(settings: pd.DataFrame, keys: Sequence[str]) -> list[str]:
    """Names each run by its settings of some keys, for example "seed 0, rate 1"."""
    labels = []
    for run in settings.to_dict("records"):
        labels.append(", ".join(f"{key} {run[key]}" for key in keys))
    return labels


def held_out_metric(table: pd.DataFrame) -> str:
    """The metric that compares runs by default: held-out accuracy, or the held-out reward if no run has an accuracy."""
    has_accuracy = ACCURACY in table and table[ACCURACY].notna().any()
    has_reward = REWARD in table and table[REWARD].notna().any()
    if has_reward and not has_accuracy:
        return REWARD
    return ACCURACY


def differing_steps(pairs: Iterable[tuple[Path, Path]], metric: str) -> list[str]:
    """The latest steps with a value of a metric, in words, of the pairs of runs in which they differ; [] without any.

    An evaluation by `recjax.evaluate` has no steps.
    """
    first_steps = set()
    second_steps = set()
    for first_folder, second_folder in pairs:
        first_latest = _latest_step(first_folder, metric)
        second_latest = _latest_step(second_folder, metric)
        if first_latest is not None and second_latest is not None and first_latest != second_latest:
            first_steps.add(first_latest)
            second_steps.add(second_latest)
    if not first_steps:
        return []
    first_words = ", ".join(map(str, sorted(first_steps)))
    second_words = ", ".join(map(str, sorted(second_steps)))
    return [f"latest step with {metric} = {first_words} and {second_words}"]


def _latest_step(folder: Path, metric: str) -> int | None:
    """The last step of a run with a value of a metric, or None if it has none."""
    rows = read_metrics(folder / "metrics.jsonl")
    return max((row["step"] for row in rows if metric in row), default=None)


def resumed_changes(pairs: Iterable[tuple[Path, Path]]) -> list[str]:
    """Settings that the runs of a pair did not change alike when they resumed, with all their values, in words."""
    words = []
    for first_folder, second_folder in pairs:
        first_earlier = _earlier_values(first_folder)
        second_earlier = _earlier_values(second_folder)
        first_latest = _read_settings(first_folder)
        second_latest = _read_settings(second_folder)
        for key in sorted({*first_earlier, *second_earlier}):
            if first_earlier.get(key) != second_earlier.get(key):
                first_values = [*first_earlier.get(key, ()), str(first_latest.get(key))]
                second_values = [*second_earlier.get(key, ()), str(second_latest.get(key))]
                words.append(f"{key} = {', '.join(first_values)} and {', '.join(second_values)}")
    return list(dict.fromkeys(words))


def _earlier_values(folder: Path) -> dict[str, list[str]]:
    """The values that a run's settings had before it resumed with new ones, each with its last step, in words."""
    values: dict[str, list[str]] = {}
    for entry in starts(folder):
        changed = entry.get("changed")
        if changed:
            # The record's text is "KEY: BEFORE there, AFTER now; KEY: …".
            for key, before in re.findall(r"(\S+): (.+?) there, .+? now(?:; |$)", changed["settings"]):
                values.setdefault(key, []).append(f"{before} until step {changed['after_step']}")
    return values


def differing_bases(pairs: Mapping[str, tuple[Path, Path]]) -> list[str]:
    """Pairs of runs whose records name different initial policies, in words; [] without any.

    Args:
        pairs: folders by the settings that they share, as `pair_runs` returns them.
    """
    words = []
    for label, (first_folder, second_folder) in pairs.items():
        first = base_policy(first_folder)
        second = base_policy(second_folder)
        if first is not None and second is not None and first != second:
            words.append(f"initial policy of the pair {label or 'of runs'} = {first} and {second}")
    return words


def problem_differences(pairs: Iterable[tuple[Path, Path]], metric: str) -> np.ndarray:
    """Differences B − A of each held-out problem in the latest evaluations, mean over the pairs that have it.

    A problem's number is the mean over its completions. Problems are the same if question and answer are; the result is
    empty without problems that both folders of a pair have, or without this metric of single completions.
    """
    differences = []
    for first_folder, second_folder in pairs:
        first_values = _problem_values(first_folder, metric)
        second_values = _problem_values(second_folder, metric)
        # A run that stopped before its first evaluation has no problems.
        if len(first_values) and len(second_values):
            differences.append(second_values - first_values)
    if not differences:
        return np.array([])
    return pd.concat(differences, axis=1).mean(axis=1).dropna().to_numpy()


def _problem_values(folder: Path, metric: str) -> pd.Series:
    """The metric of each held-out problem in a folder's latest evaluation, by question, answer and seat."""
    kind, _, name = metric.partition("/")
    column = {"accuracy": "accurate", "completion_length": "tokens"}.get(name, name)
    latest_rows = pd.DataFrame()
    latest_step = -np.inf
    if kind == "evaluation":
        for file in _EVALUATED:
            rows = _read_completions(folder / file)
            if rows is None:
                continue
            step = -1  # Versions that wrote no steps wrote one evaluation.
            if "step" in rows:
                step = rows["step"].max()
            if step > latest_step:
                latest_rows = rows
                latest_step = step
    if column not in latest_rows:
        return pd.Series(dtype=float)
    names = latest_rows.reindex(columns=["question", "answer", "seat"], fill_value="").astype(str)
    values = latest_rows[column].astype(float)
    return values.groupby([names["question"], names["answer"], names["seat"]]).mean()


def _read_completions(path: Path) -> pd.DataFrame | None:
    """The completions in a file of an evaluation, one a row; None if there is no such file."""
    if not path.is_file():
        return None
    try:
        if path.suffix == ".parquet":
            return pd.read_parquet(path)
        return pd.read_json(path, lines=True, dtype=False)
    except (OSError, ValueError) as error:
        raise UserError(path, f"damaged ({error})", "evaluate again") from error
