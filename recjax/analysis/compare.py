"""Summaries of runs in one number, differences between paired runs, and what they say in words and a figure."""

import glob
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import scipy  # loads scipy.stats, which takes a second, at its first use
from flax.traverse_util import flatten_dict
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas.api.typing import SeriesGroupBy

from recjax.analysis.collect import axes_of, check_metrics, metrics_of
from recjax.analysis.statistics import (
    LEVEL,
    MIN_SEEDS,
    SEED,
    band,
    estimate,
    seed_means,
    seeds_needed,
    sign_flip_p,
    student_interval,
)
from recjax.config.yaml_values import read_yaml_file
from recjax.errors import UserError
from recjax.logs.metrics import read_metrics
from recjax.plots.curves import draw_curves
from recjax.plots.style import COLORS, GREY, LABELS
from recjax.runs.stored_runs import base_policy, earlier_values

ACCURACY = "evaluation/accuracy"
REWARD = "evaluation/reward"  # Runs are compared by reward if no part of it is a verdict.
RESAMPLES = 9999
_MOST_BARS = 9  # More differences than these are a histogram: with one completion a problem, there are three.
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
        first_earlier = earlier_values(first_folder)
        second_earlier = earlier_values(second_folder)
        first_latest = _read_settings(first_folder)
        second_latest = _read_settings(second_folder)
        for key in sorted({*first_earlier, *second_earlier}):
            if first_earlier.get(key) != second_earlier.get(key):
                first_values = [*first_earlier.get(key, ()), str(first_latest.get(key))]
                second_values = [*second_earlier.get(key, ()), str(second_latest.get(key))]
                words.append(f"{key} = {', '.join(first_values)} and {', '.join(second_values)}")
    return list(dict.fromkeys(words))


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


# --- Two runs, or two sets of runs, compared.


def run_folders(source: str) -> list[Path]:
    """The run or evaluation folders that a path or a pattern names, themselves or as folders in it.

    Raises:
        UserError: the source has no such folder.
    """

    def has_numbers(folder: Path) -> bool:
        return (folder / "metrics.jsonl").is_file() or (folder / "samples.parquet").is_file()

    if Path(source).is_dir():
        named = [Path(source)]
    else:
        named = [Path(path) for path in sorted(glob.glob(source))]
    folders: list[Path] = []
    for path in named:
        if has_numbers(path):
            folders.append(path)
        else:
            folders += sorted(inner for inner in path.glob("*") if has_numbers(inner))
    if not folders:
        raise UserError(
            f"{source!r}", "no run or evaluation there", "name folders with metrics.jsonl or samples.parquet"
        )
    return folders


def verdict(metric: str, differences: np.ndarray, first: str, second: str) -> str:
    """A sentence about differences of `second` from `first`: their mean, spread, test, and conclusion.

    Args:
        metric: the metric in words.
        differences: paired differences, one per seed.
    """
    numbers = in_words(differences)
    if len(differences) < MIN_SEEDS:
        difference = f"{second} minus {first} in {metric.rstrip(',')}"
        return f"No verdict: {difference}: {numbers}. A verdict needs {MIN_SEEDS} seeds."
    if sign_flip_p(differences) <= LEVEL:
        direction = "higher" if differences.mean() > 0 else "lower"
        return f"{second} has {direction} {metric} than {first}: {numbers}."
    return f"No difference between {first} and {second} in {metric} is shown: {numbers}."


def problems_verdict(metric: str, differences: np.ndarray, first: str, second: str) -> str:
    """A sentence about differences of single problems between two runs: their mean, Student's interval and conclusion.

    Args:
        metric: the metric in words.
        differences: paired differences, one per held-out problem.
    """
    low, high = student_interval(differences)
    numbers = f"{differences.mean():.3f} ({low:.3f} to {high:.3f}), {len(differences)} problems"
    if low > 0:
        relation = f"{second} has higher {metric} than {first}"
    elif high < 0:
        relation = f"{second} has lower {metric} than {first}"
    else:
        relation = f"No difference between {first} and {second} in {metric} is shown"
    return f"{relation}: {numbers}. This holds for these two policies; other seeds may differ."


def plan_words(differences: np.ndarray, smallest: float) -> str:
    """How many seeds show a difference of this size, by the spread of a pilot's differences.

    Raises:
        UserError: the pilot has one seed, or the difference needs too many seeds.
    """
    if len(differences) < 2:
        raise UserError("plan", "the runs have one seed in common", "a spread needs at least 2, and better 4")
    spread = float(np.std(differences, ddof=1))
    count = seeds_needed(spread, smallest)
    return (
        f"Plan: differences of {len(differences)} seeds have a standard deviation of {spread:.3f}; {count} seeds show a"
        f" difference of {smallest:g} with a probability of 80 %."
    )


class Comparison(NamedTuple):
    """Two runs, or two sets of runs, compared in one metric; `print` shows the sentences.

    first, second: what was compared, as it was given.
    metric: name of the compared metric.
    table: a row for each run and step, with all metrics; `side` is the first or the second, `pair` names the pair.
    differences: the second minus the first, one for each seed, of the mean of the last three values.
    problems: the second minus the first, one for each held-out problem, if there is one pair of runs.
    sentences: the verdicts.
    skipped, differs: runs without values, and settings other than the compared ones that differ, in words.
    """

    first: str
    second: str
    metric: str
    table: pd.DataFrame
    differences: np.ndarray
    problems: np.ndarray
    sentences: list[str]
    skipped: list[str]
    differs: list[str]

    def __str__(self) -> str:
        """The sentences, and the settings that differ."""
        return "\n".join([*self.skipped, *self.sentences, *(f"differs: {setting}" for setting in self.differs)])

    def plan(self, smallest: float) -> str:
        """How many seeds show a difference of this size, by the spread of these runs, as a sentence.

        Raises:
            UserError: the runs have one seed in common, or the difference needs too many seeds.
        """
        return plan_words(self.differences, smallest)

    def figure(self) -> Figure:
        """The metric and the difference over steps, and the differences of single problems."""
        difference = f"{self.metric} − {self.first}"
        table = self.table.assign(panel="")
        table[difference] = minus_line(table, "side", self.first, self.metric)
        extra_panels = []
        if len(self.problems) > 1:
            extra_panels.append(self._draw_problems)
        return draw_curves(table, "side", "panel", [self.metric, difference], band=band, more=extra_panels)

    def _draw_problems(self, axes: Axes) -> None:
        """How many problems have a lower, an equal and a higher value on the second side; few values are bars."""
        values, counts = np.unique(self.problems.round(6), return_counts=True)
        colors = np.select([values < 0, values > 0], [COLORS[1], COLORS[2]], GREY)
        if len(values) <= _MOST_BARS:
            places = np.arange(len(values))
            bars = axes.bar(places, counts, color=colors, width=0.8)
            axes.bar_label(bars)
            axes.set_xticks(places, [f"{value:+.3g}" if value else "0" for value in values])
            axes.margins(y=0.15)
        else:
            axes.hist(self.problems, bins=21, color=GREY)
            axes.axvline(self.problems.mean(), color=COLORS[1])
        axes.set(xlabel=f"difference of a problem\nmean {self.problems.mean():+.3f}", ylabel="problems")


def compare_runs(first: str | Path, second: str | Path, metric: str | None = None) -> Comparison:
    """Compares two runs, two sets of runs, or two evaluations, paired by seed; see `python -m recjax.compare --help`.

    Args:
        first, second: folder of a run, of several runs, or of an evaluation; or a pattern of such folders.
        metric: numeric metric of metrics.jsonl; None: evaluation/accuracy, or evaluation/reward without any.
    Raises:
        UserError: a side has no runs, no runs pair, or none of them has values of the metric.
    """
    names = (str(first), str(second))
    if names[0] == names[1]:
        raise UserError(names[0], "is given twice", "name two runs, or two sets of runs")
    return compare_folders(names, run_folders(names[0]), run_folders(names[1]), metric)


def compare_folders(
    names: tuple[str, str], first: Sequence[Path], second: Sequence[Path], metric: str | None = None
) -> Comparison:
    """Compares two sets of run or evaluation folders under two names; see `compare_runs`.

    Raises:
        UserError: no runs pair, or none of them has values of the metric.
    """
    pairs, changed = pair_runs(first, second)
    sides = []
    for label, pair in pairs.items():
        seed = label.partition(", ")[0]  # a label starts with the seed, unless the only pair has different seeds
        for side, folder in zip(names, pair, strict=True):
            sides.append(({"side": side, SEED: seed, "pair": label}, folder))
    table = metrics_of(sides)
    if metric is None:
        metric = held_out_metric(table)
    check_metrics(table, [metric], "metric")
    finals = final(table, metric)
    skipped = []
    for settings, folder in sides:
        if tuple(settings.values()) not in finals.index:
            skipped.append(f"skipped: {folder} has no {metric} after step 0, so its pair is not compared")
    differences = paired_seeds(finals, "side", names[1], names[0])
    if not len(differences):
        raise UserError(f"metric {metric!r}", "no pair of runs has values of it after step 0", "name another metric")
    problems = np.array([])
    if len(pairs) == 1:
        problems = problem_differences(pairs.values(), metric)
    words = LABELS.get(metric, metric).replace("\n", " ").replace(" (share)", "")
    sentences = []
    if len(differences) > 1 or len(problems) < 2:
        sentences.append(verdict(f"{words}, mean of the last three values,", differences, *names))
    if len(problems) > 1:
        sentences.append(problems_verdict(f"{words} at the latest evaluation", problems, *names))
    differs = list(changed)
    differs += resumed_changes(pairs.values())
    differs += differing_steps(pairs.values(), metric)
    differs += differing_bases(pairs)
    return Comparison(
        first=names[0],
        second=names[1],
        metric=metric,
        table=table,
        differences=differences,
        problems=problems,
        sentences=sentences,
        skipped=skipped,
        differs=differs,
    )
