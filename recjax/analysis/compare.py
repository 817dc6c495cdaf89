"""Summaries of runs in one number, and differences between paired runs."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

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
REWARD = "evaluation/reward"  # compared if no part of the reward is a verdict
RESAMPLES = 9999
# Files of a folder with the completions of evaluations. A continued run keeps the after.jsonl of the earlier end.
_EVALUATED = ("samples.parquet", "samples/after.jsonl", "samples/latest.jsonl")
_UNRELATED = {"output", "model", "weights"}  # settings of a folder that say where a policy is, and not how it was made


def evaluations_of(table: pd.DataFrame, metric: str = ACCURACY) -> SeriesGroupBy:
    """Values of an evaluated metric in the order of steps, grouped by run."""
    return table.dropna(subset=[metric]).sort_values("step", kind="stable").groupby(axes_of(table), sort=False)[metric]


def final(table: pd.DataFrame, metric: str = ACCURACY, last: int = 3) -> pd.Series:
    """The mean over the `last` evaluations of each run after step 0, by settings."""
    return evaluations_of(table[table["step"] > 0], metric).apply(lambda values: values.tail(last).mean())


def interval(values: np.ndarray, statistic: Callable, numbers: int, resamples: int = RESAMPLES) -> tuple[float, float]:
    """The ends of the 95 % interval of a statistic's percentile bootstrap.

    Args:
        numbers: count of numbers that the statistic reads in one resample.
    """
    # Resampled in parts, which keeps the memory bounded and changes no number.
    options = {"batch": max(1, 10_000_000 // numbers), "n_resamples": resamples, "rng": np.random.default_rng(0)}
    ends = scipy.stats.bootstrap((values,), statistic, method="percentile", **options).confidence_interval
    return float(ends.low), float(ends.high)


def in_words(differences: np.ndarray) -> str:
    """The mean of differences per seed, with interval and test from MIN_SEEDS seeds on, and their range below."""
    if len(differences) < 2:
        return f"{differences.mean():.3f}, 1 seed"
    mean_estimate = estimate(differences)
    test = "" if mean_estimate.is_range else f", p {sign_flip_p(differences):.2g}"
    return f"{mean_estimate.mean:.3f} ({mean_estimate.spread}){test}"


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
    by_kind = values.unstack(axis) if values.index.nlevels > 1 else values.to_frame().T
    by_kind = by_kind.reindex(columns=[first, second])
    return (by_kind[first] - by_kind[second]).dropna()


def minus_line(table: pd.DataFrame, axis: str, against: str, metric: str) -> np.ndarray:
    """A metric of each row minus the same step of the run with `against` on the axis and equal other settings.

    NaN without a run to compare, and for the base run.
    """
    other_axes = [*(name for name in axes_of(table) if name != axis), "step"]
    base = table.loc[table[axis] == against, [*other_axes, metric]]
    differences = table[metric].to_numpy() - table[other_axes].merge(base, how="left", on=other_axes)[metric].to_numpy()
    return np.where(table[axis] == against, np.nan, differences)


def pair_runs(first: Sequence[Path], second: Sequence[Path]) -> tuple[dict[str, tuple[Path, Path]], list[str]]:
    """Pairs the folders of two sides by seed and, if a side has several of one seed, by all settings that vary on both.

    One folder on each side is always a pair.

    Returns:
        Pairs by the settings that they share, the seed first, and the settings that differ between the sides, in words.
    Raises:
        UserError: no pairs, or a side has several runs with the same settings.
    """
    files = [[folder / "config.yaml" for folder in folders] for folders in (first, second)]
    read = [[read_yaml_file(path) if path.is_file() else {} for path in paths] for paths in files]
    flat = [[flatten_dict(content, sep=".").items() for content in contents] for contents in read]
    sides = [[{key: value for key, value in pairs if key not in _UNRELATED} for pairs in side] for side in flat]
    keys = sorted({key for side in sides for settings in side for key in settings})
    values = {key: [{str(settings.get(key)) for settings in side} for side in sides] for key in keys}
    varying = [key for key in keys if key != "seed" and min(map(len, values[key])) > 1]
    is_one_pair = max(map(len, sides)) == 1
    labels: list[list[str]] = []
    for shared in ([],) if is_one_pair else (["seed"], ["seed", *varying]):
        labels = [[", ".join(f"{key} {settings.get(key)}" for key in shared) for settings in side] for side in sides]
        if all(len({*names}) == len(names) for names in labels):
            break
    else:
        twice = next(name for names in labels for name in names if names.count(name) > 1)
        raise UserError(twice, "several runs of one side have these settings", "name folders that differ in the seed")
    second_by_label = dict(zip(labels[1], second, strict=True))
    pairs = {
        name: (folder, second_by_label[name])
        for name, folder in zip(labels[0], first, strict=True)
        if name in second_by_label
    }
    if not pairs:
        listed = " and ".join(names[0] for names in labels)
        raise UserError(
            problem=f"no runs of the two sides have equal {' and '.join(shared)} ({listed})", remedy="run equal seeds"
        )
    changed = [key for key in keys if key not in shared and [*map(len, values[key])] == [1, 1]]
    words = [
        f"{key} = {' and '.join(min(side_values) for side_values in values[key])}"
        for key in changed
        if len({*map(min, values[key])}) > 1
    ]
    return pairs, words


def held_out_metric(table: pd.DataFrame) -> str:
    """The metric that compares runs by default: held-out accuracy, or the held-out reward if no run has an accuracy."""
    has_values = {metric: metric in table and table[metric].notna().any() for metric in (ACCURACY, REWARD)}
    return REWARD if has_values[REWARD] and not has_values[ACCURACY] else ACCURACY


def differing_steps(pairs: Iterable[tuple[Path, Path]], metric: str) -> list[str]:
    """The latest steps with a value of a metric, in words, of the pairs of runs in which they differ; [] without any.

    An evaluation by `recjax.evaluate` has no steps.
    """
    steps = [
        [[row["step"] for row in read_metrics(folder / "metrics.jsonl") if metric in row] for folder in pair]
        for pair in pairs
    ]
    latest = [(max(ours), max(theirs)) for ours, theirs in steps if ours and theirs]
    sides = zip(*(pair for pair in latest if pair[0] != pair[1]), strict=True)
    words = [", ".join(map(str, sorted({*side}))) for side in sides]
    return [f"latest step with {metric} = {' and '.join(words)}"] if words else []


def resumed_changes(pairs: Iterable[tuple[Path, Path]]) -> list[str]:
    """Settings that the runs of a pair did not change alike when they resumed, with all their values, in words."""
    words = []
    for pair in pairs:
        earlier: list[dict[str, list[str]]] = [{}, {}]
        latest = []
        for folder, values in zip(pair, earlier, strict=True):
            config = folder / "config.yaml"
            latest.append(flatten_dict(read_yaml_file(config) if config.is_file() else {}, sep="."))
            for changed in filter(None, (entry.get("changed") for entry in starts(folder))):
                for key, before in re.findall(r"(\S+): (.+?) there, .+? now(?:; |$)", changed["settings"]):
                    values.setdefault(key, []).append(f"{before} until step {changed['after_step']}")
        for key in sorted({*earlier[0], *earlier[1]}):
            if earlier[0].get(key) != earlier[1].get(key):
                sides = zip(earlier, latest, strict=True)
                first, second = (", ".join([*values.get(key, ()), str(now.get(key))]) for values, now in sides)
                words.append(f"{key} = {first} and {second}")
    return list(dict.fromkeys(words))


def differing_bases(pairs: Mapping[str, tuple[Path, Path]]) -> list[str]:
    """Pairs of runs whose records name different initial policies, in words; [] without any.

    Args:
        pairs: folders by the settings that they share, as of `pair_runs`.
    """
    bases = {label: [base_policy(folder) for folder in pair] for label, pair in pairs.items()}
    return [
        f"initial policy of the pair {label or 'of runs'} = {first} and {second}"
        for label, (first, second) in bases.items()
        if None not in (first, second) and first != second
    ]


def problem_differences(pairs: Iterable[tuple[Path, Path]], metric: str) -> np.ndarray:
    """Differences B − A of each held-out problem in the latest evaluations, mean over the pairs that have it.

    A problem's number is the mean over its completions. Problems are the same if question and answer are; the result is
    empty without problems that both folders of a pair have, or without this metric of single completions.
    """
    kind, _, name = metric.partition("/")
    column = {"accuracy": "accurate", "completion_length": "tokens"}.get(name, name)

    def by_problem(folder: Path) -> pd.Series:
        tables = []
        for path in (folder / file for file in _EVALUATED if kind == "evaluation" and (folder / file).is_file()):
            try:
                is_parquet = path.suffix == ".parquet"
                tables.append(pd.read_parquet(path) if is_parquet else pd.read_json(path, lines=True, dtype=False))
            except (OSError, ValueError) as error:
                raise UserError(path, f"damaged ({error})", "evaluate again") from error
        rows = max(tables, key=lambda rows: rows["step"].max() if "step" in rows else -1, default=pd.DataFrame())
        if column not in rows:
            return pd.Series(dtype=float)
        names = rows.reindex(columns=["question", "answer", "seat"], fill_value="").astype(str)
        return rows[column].astype(float).groupby([names[name] for name in names]).mean()

    values = [[by_problem(folder) for folder in pair] for pair in pairs]
    # A run that stopped before its first evaluation has no problems.
    differences = [theirs - ours for ours, theirs in values if len(ours) and len(theirs)]
    return pd.concat(differences, axis=1).mean(axis=1).dropna().to_numpy() if differences else np.array([])
