"""Compares two runs, or two sets of runs, in one metric: a sentence with an interval and a test, and a figure.

    python -m recjax.compare A B [--metric evaluation/accuracy] [--output figures/compare.png]

A and B are folders of a run, of several runs (a sweep's output), or of an evaluation by recjax.evaluate; or quoted
patterns, such as 'runs/clipping/reinforce__*'. Runs are paired by seed. If a side has several runs with one seed, they
are also paired by the settings that vary on both sides. Held-out problems are paired by question and answer, at the
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
    paired_values,
    problem_differences,
    resumed_changes,
    sign_flip_p,
)
from recjax.console import command, start
from recjax.plots.curves import draw_curves
from recjax.plots.style import COLORS, GREY, LABELS, save_figure

FLAGS = flags.FLAGS
SIGNIFICANT = 0.05  # highest p-value of a difference


def folders_of(source: str) -> list[Path]:
    """The run or evaluation folders that a path or a pattern names, themselves or as folders in it.

    Raises:
        ValueError: the source has no such folder.
    """

    def has_numbers(folder: Path) -> bool:
        return any((folder / name).is_file() for name in ("metrics.jsonl", "samples.parquet"))

    named = [Path(path) for path in ([source] if Path(source).is_dir() else sorted(glob.glob(source)))]
    inner = [[path] if has_numbers(path) else sorted(filter(has_numbers, path.glob("*"))) for path in named]
    if not (folders := [folder for group in inner for folder in group]):
        raise ValueError(f"{source!r}: no run or evaluation there; name folders with metrics.jsonl or samples.parquet")
    return folders


def verdict(metric: str, differences: np.ndarray, noun: str, first: str, second: str) -> str:
    """A sentence about differences of `second` from `first`: their mean, interval, test, and conclusion.

    Args:
        metric: the metric in words.
        differences: paired differences.
        noun: plural noun for the things that are paired.
    """
    numbers = in_words(differences, noun)
    if len(differences) < 2:
        return f"{second} minus {first} in {metric.rstrip(',')}: {numbers}, which has no interval and no test."
    if sign_flip_p(differences) <= SIGNIFICANT:
        return f"{second} has {'higher' if differences.mean() > 0 else 'lower'} {metric} than {first}: {numbers}."
    smallest_p = 2.0 ** (1 - len(differences))
    too_few = (
        f" {len(differences)} {noun} cannot give a p below {smallest_p:.2g}, and 6 can."
        if smallest_p > SIGNIFICANT
        else ""
    )
    return f"No difference between {first} and {second} in {metric} is shown: {numbers}.{too_few}"


@command
def main(argv: list[str]) -> None:
    """Compares, prints the sentences and the settings that differ, and draws the figure."""
    if len(argv) != 3 or argv[1] == argv[2]:
        raise ValueError("give two runs, sweeps or evaluations: python -m recjax.compare A B")
    first, second = argv[1:]
    pairs, changed = pair_runs(folders_of(first), folders_of(second))
    sides = [
        ({"side": side, "pair": label}, folder)
        for label, pair in pairs.items()
        for side, folder in zip(argv[1:], pair, strict=True)
    ]
    table = metrics_of(sides)
    metric = FLAGS.metric or held_out_metric(table)
    check_metrics(table, [metric], "--metric")
    finals = final(table, metric)
    for settings, folder in sides:
        if tuple(settings.values()) not in finals.index:
            print(f"skipped: {folder} has no {metric} after step 0, so its pair is not compared")
    differences = paired_values(finals, "side", second, first)
    if not len(differences):
        raise ValueError(f"--metric {metric!r}: no pair of runs has values of it after step 0; name another metric")
    problems = problem_differences(pairs.values(), metric)
    words = LABELS.get(metric, metric).replace("\n", " ").replace(" (share)", "")
    metric_words = f"{words}, mean of the last three values,"
    if len(differences) > 1 or len(problems) < 2:
        print(verdict(metric_words, differences, "pairs of runs", first, second))
    if len(problems) > 1:
        metric_words = f"{words} at the latest evaluation"
        print(
            verdict(metric_words, problems, "problems", first, second),
            "This holds for these runs; other seeds may differ.",
        )
    differences_in_words = [
        *changed,
        *resumed_changes(pairs.values()),
        *differing_steps(pairs.values(), metric),
        *differing_bases(pairs),
    ]
    for setting in differences_in_words:
        print(f"differs: {setting}")

    def draw_problems(axes: Axes) -> None:
        axes.hist(problems, bins=21, color=GREY)
        axes.axvline(problems.mean(), color=COLORS[1])
        axes.set(xlabel=f"difference of a problem\nmean {problems.mean():+.3f}", ylabel="problems")

    difference = f"{metric} − {first}"
    output = Path(FLAGS.output)
    table = table.assign(panel="", **{difference: minus_line(table, "side", first, metric)})
    extra_panels = [draw_problems] if len(problems) > 1 else []
    save_figure(draw_curves(table, "side", "panel", [metric, difference], more=extra_panels), output)
    print(f"figure: {output}")


if __name__ == "__main__":
    flags.DEFINE_string(
        "metric",
        None,
        "Numeric metric of metrics.jsonl to compare; default: evaluation/accuracy, or evaluation/reward without any.",
    )
    flags.DEFINE_string("output", "figures/compare.png", "File of the figure.")
    start(main)
