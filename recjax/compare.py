"""Compares two runs, or two sets of runs, in one metric: a sentence with an interval and a test, and a figure.

    python -m recjax.compare A B [--metric evaluation/accuracy] [--output figures/compare.png]
    python -m recjax.compare A B --plan 0.05      # how many seeds would show a difference of 0.05

A and B are folders of a run, of several runs (a sweep's output), or of an evaluation by recjax.evaluate; or quoted
patterns, such as 'runs/clipping/reinforce__*'. Runs are paired by seed. If a side has several runs with one seed, they
are also paired by the settings that vary on both sides, and a seed counts once, with the mean of its pairs. A verdict
needs six seeds. One pair of runs alone is compared by its held-out problems, paired by question and answer, at the
latest evaluation of each run; a line says if the evaluations' steps differ.
"""

import glob
from pathlib import Path

import numpy as np
from absl import flags
from matplotlib.axes import Axes

from recjax.analysis.collect import check_metrics, metrics_of
from recjax.analysis.compare import (
    differing_bases,
    differing_steps,
    final,
    held_out_metric,
    in_words,
    minus_line,
    pair_runs,
    paired_seeds,
    problem_differences,
    resumed_changes,
)
from recjax.analysis.statistics import LEVEL, MIN_SEEDS, SEED, band, seeds_needed, sign_flip_p, student_interval
from recjax.errors import UserError
from recjax.plots.curves import draw_curves
from recjax.plots.style import COLORS, GREY, LABELS, save_figure
from recjax.runtime.console import command, start

FLAGS = flags.FLAGS


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
        raise UserError("--plan", "the runs have one seed in common", "a spread needs at least 2, and better 4")
    spread = float(np.std(differences, ddof=1))
    count = seeds_needed(spread, smallest)
    return (
        f"Plan: differences of {len(differences)} seeds have a standard deviation of {spread:.3f}; {count} seeds show a"
        f" difference of {smallest:g} with a probability of 80 %."
    )


@command
def main(argv: list[str]) -> None:
    """Compares, prints the sentences and the settings that differ, and draws the figure."""
    if len(argv) != 3 or argv[1] == argv[2]:
        raise UserError(problem="give two runs, sweeps or evaluations: python -m recjax.compare A B")
    first, second = argv[1:]
    pairs, changed = pair_runs(run_folders(first), run_folders(second))
    sides = []
    for label, pair in pairs.items():
        seed = label.partition(", ")[0]  # a label starts with the seed, unless the only pair has different seeds
        for side, folder in zip(argv[1:], pair, strict=True):
            sides.append(({"side": side, SEED: seed, "pair": label}, folder))
    table = metrics_of(sides)
    metric = FLAGS.metric or held_out_metric(table)
    check_metrics(table, [metric], "--metric")
    finals = final(table, metric)
    for settings, folder in sides:
        if tuple(settings.values()) not in finals.index:
            print(f"skipped: {folder} has no {metric} after step 0, so its pair is not compared")
    differences = paired_seeds(finals, "side", second, first)
    if not len(differences):
        raise UserError(f"--metric {metric!r}", "no pair of runs has values of it after step 0", "name another metric")
    problems = problem_differences(pairs.values(), metric) if len(pairs) == 1 else np.array([])
    words = LABELS.get(metric, metric).replace("\n", " ").replace(" (share)", "")
    if len(differences) > 1 or len(problems) < 2:
        print(verdict(f"{words}, mean of the last three values,", differences, first, second))
    if len(problems) > 1:
        print(problems_verdict(f"{words} at the latest evaluation", problems, first, second))
    if FLAGS.plan is not None:
        print(plan_words(differences, FLAGS.plan))
    differing_settings = list(changed)
    differing_settings += resumed_changes(pairs.values())
    differing_settings += differing_steps(pairs.values(), metric)
    differing_settings += differing_bases(pairs)
    for setting in differing_settings:
        print(f"differs: {setting}")

    def draw_problems(axes: Axes) -> None:
        axes.hist(problems, bins=21, color=GREY)
        axes.axvline(problems.mean(), color=COLORS[1])
        axes.set(xlabel=f"difference of a problem\nmean {problems.mean():+.3f}", ylabel="problems")

    difference = f"{metric} − {first}"
    output = Path(FLAGS.output)
    table = table.assign(panel="")
    table[difference] = minus_line(table, "side", first, metric)
    extra_panels = [draw_problems] if len(problems) > 1 else []
    figure = draw_curves(table, "side", "panel", [metric, difference], band=band, more=extra_panels)
    save_figure(figure, output)
    print(f"figure: {output}")


if __name__ == "__main__":
    flags.DEFINE_string(
        "metric",
        None,
        "Numeric metric of metrics.jsonl to compare; default: evaluation/accuracy, or evaluation/reward without any.",
    )
    flags.DEFINE_string("output", "figures/compare.png", "File of the figure.")
    flags.DEFINE_float("plan", None, "Difference to plan for: prints how many seeds show it, by these runs' spread.")
    start(main)
