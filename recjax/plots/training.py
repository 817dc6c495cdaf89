"""The pictures of a run: accuracy, how far off-policy it was, and the sources of experience."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from recjax.plots.style import COLORS, LABELS, add_legend, few_ticks, new_figure, plain_ticks, save_figure

BLUE, ORANGE, GREEN, *_ = COLORS
Rows = list[dict[str, Any]]


def draw_training(rows: Rows, title: str, path: Path) -> None:
    """Accuracy, ratio, clipping, staleness, divergence and entropy over the steps of a run, as a PNG.

    Args:
        rows: metrics of each step.
    """
    figure = new_figure(8, 8, title)
    panels = figure.subplots(3, 2, sharex=True)
    (accuracy, ratio), (clip, staleness), (divergence, entropy) = panels
    trained = [row for row in rows if "loss" in row]
    evaluated = [row for row in rows if "evaluation/accuracy" in row]

    _draw_line(accuracy, trained, "accuracy", alpha=0.35, label="train batch (behavior policy)")
    _draw_line(accuracy, evaluated, "evaluation/accuracy", marker="o", lw=1.5, label="held-out problems")
    accuracy.set(ylabel="accuracy (share)", ylim=(0, 1.02))
    add_legend(accuracy, loc="lower right")
    _draw_ratio(ratio, trained)
    clip.margins(y=0.3)  # room for the legend
    _draw_smoothed(clip, trained, "clip_fraction/negative", color=ORANGE, label="advantage < 0")
    _draw_smoothed(clip, trained, "clip_fraction/positive", color=GREEN, label="advantage > 0")
    clip.set(ylabel=LABELS["clip_fraction/all"])
    add_legend(clip, loc="upper right")
    for axes, name in ((staleness, "staleness"), (divergence, "behavior_kl/k3"), (entropy, "entropy")):
        _draw_smoothed(axes, trained, name)
        axes.set(ylabel=LABELS[name])
    for axes in (clip, staleness, divergence, entropy):
        axes.set_ylim(0, None)
    for axes in figure.axes:
        few_ticks(axes.xaxis)
    for axes in panels[-1]:
        axes.set_xlabel("optimizer step")
    save_figure(figure, path)


def draw_experience(rows: Rows, title: str, path: Path) -> None:
    """Draws sources and age of experience: shares, staleness, ratio, effective sample size, as a PNG.

    Args:
        rows: metrics of each step.
    """
    figure = new_figure(8, 5.5, title)
    (ages, sources), (ratio, size) = figure.subplots(2, 2)
    trained = [row for row in rows if "loss" in row]
    _draw_ages(ages, trained)
    first = [row for row in trained if "source_rows" in row]  # of several updates, only the first has it
    batches = [row["source_rows"] for row in first]
    names = sorted({name for batch in batches for name in batch})
    shares = [[batch.get(name, 0) / sum(batch.values()) for batch in batches] for name in names]
    sources.stackplot(_series(first, "step"), shares, labels=names, colors=COLORS)
    sources.set(ylabel="rows of the batch (share)", ylim=(0, 1))
    add_legend(sources, loc="lower right", title="source", title_fontsize="small")
    _draw_ratio(ratio, trained)
    _draw_line(size, trained, "effective_sample_size")
    size.set(ylabel=LABELS["effective_sample_size"], ylim=(0, 1.02))
    for axes in figure.axes:
        few_ticks(axes.xaxis)
    for axes in (sources, ratio, size):
        axes.set_xlabel("optimizer step")
    save_figure(figure, path)


def _series(rows: Rows, name: str) -> list[float]:
    """A metric of every row; NaN in rows without it, such as the ratio without behavior log-probs."""
    return [row.get(name, math.nan) for row in rows]


def _draw_line(axes: Axes, rows: Rows, name: str, *, color: str = BLUE, lw: float = 1, **options) -> None:
    axes.plot(_series(rows, "step"), _series(rows, name), color=color, lw=lw, **options)


def _draw_smoothed(axes: Axes, rows: Rows, name: str, *, color: str = BLUE, **options) -> None:
    """For a long run, the mean over a fiftieth of the steps, with a band from the lowest to the highest value."""
    values = pd.Series(_series(rows, name), dtype=float)
    width = len(values) // 50
    if width < 2:
        _draw_line(axes, rows, name, color=color, **options)
        return
    around = values.rolling(width, center=True, min_periods=1)
    steps = _series(rows, "step")
    axes.fill_between(steps, around.min(), around.max(), color=color, alpha=0.2, lw=0)
    axes.plot(steps, around.mean(), color=color, lw=1.2, **options)


def _draw_ratio(axes: Axes, rows: Rows) -> None:
    low, high = _series(rows, "ratio/q01"), _series(rows, "ratio/q99")
    axes.set(ylabel="ratio π/μ of tokens", yscale="log")
    axes.fill_between(_series(rows, "step"), low, high, color=ORANGE, alpha=0.35, lw=0, label="1st to 99th percentile")
    _draw_line(axes, rows, "ratio/q50", color=ORANGE, lw=1.2, label="median")
    plain_ticks(axes.yaxis)
    add_legend(axes, loc="lower right")


def _draw_ages(axes: Axes, rows: Rows) -> None:
    """Staleness of the rows of all batches."""
    counts = Counter()
    for row in rows:
        counts.update({int(age): count for age, count in row["staleness_rows"].items()})
    if counts:
        width = -(-(max(counts) - min(counts) + 1) // 40)  # optimizer steps per bar
        shares = Counter()
        for age, count in counts.items():
            shares[age // width * width] += count / counts.total()
        align = "edge" if width > 1 else "center"
        axes.bar(list(shares), list(shares.values()), width=0.9 * width, align=align, color=BLUE)
        axes.set_xlim(min(counts) - width, max(counts) + 2 * width)
    axes.set(xlabel=LABELS["staleness"].replace("\n", " "), ylabel="rows with a known version (share)")
