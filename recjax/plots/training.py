"""The pictures of a run: what it learned, how far off-policy it was, and whose experience it learned from."""

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

matplotlib.use("Agg")

COLOURS = BLUE, ORANGE, GREEN, *_ = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"  # Okabe and Ito's


def draw_training(rows: list[dict[str, float]], title: str, path: Path) -> None:
    """Accuracy, ratio, clipping, staleness, divergence and entropy over the steps of a run, as a PNG.

    Args:
        rows: the run's metrics, step by step.
    """
    figure = Figure(figsize=(13, 6.5), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(2, 3, sharex=True)
    (accuracy, ratio, clip), (staleness, divergence, entropy) = panels
    trained = [row for row in rows if "loss" in row]
    evaluated = [row for row in rows if "evaluation/accuracy" in row]
    steps = [row["step"] for row in trained]

    def series(name):
        # Without behaviour log-probs there is no ratio, and without policy versions no staleness.
        return [row.get(name, math.nan) for row in trained]

    accuracy.plot(steps, series("accuracy"), color=BLUE, alpha=0.35, lw=1, label="train batch (behaviour policy)")
    held_out = [row["evaluation/accuracy"] for row in evaluated]
    accuracy.plot([row["step"] for row in evaluated], held_out, color=BLUE, marker="o", label="held-out problems")
    accuracy.set(ylabel="accuracy (share)", ylim=(0, 1.02))
    accuracy.legend(loc="lower right", frameon=False)

    _draw_ratio(ratio, steps, series)
    clip.plot(steps, series("clip_fraction/negative"), color=ORANGE, lw=0.8, label="advantage < 0")
    clip.plot(steps, series("clip_fraction/positive"), color=GREEN, lw=0.8, label="advantage > 0")
    clip.set(ylabel="clipped tokens (share)", ylim=(0, None))
    clip.legend(loc="upper right", frameon=False)

    staleness.plot(steps, series("staleness"), color=BLUE, lw=1)
    staleness.set(ylabel="staleness (optimiser steps)", ylim=(0, None))
    divergence.plot(steps, series("behaviour_kl/k3"), color=BLUE, lw=1)
    divergence.set(ylabel="KL(μ ‖ π) (nats per token, k3)", ylim=(0, None))
    entropy.plot(steps, series("entropy"), color=BLUE, lw=1)
    entropy.set(ylabel="entropy of π (nats per token)", ylim=(0, None))
    for axes in panels[1]:
        axes.set_xlabel("optimiser step")
    _save(figure, path)


def draw_experience(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Who wrote what a run learned from and how old it was: shares, staleness, ratio, effective sample size, as a PNG.

    Args:
        rows: the run's metrics, step by step.
    """
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    figure.suptitle(title)
    (ages, sources), (ratio, size) = figure.subplots(2, 2)
    trained = [row for row in rows if "loss" in row]
    steps = [row["step"] for row in trained]

    counts = Counter()
    for row in trained:
        counts.update({int(age): count for age, count in row["staleness_rows"].items()})
    if counts:
        width = -(-(max(counts) - min(counts) + 1) // 40)  # optimiser steps a bar
        shares = Counter()
        for age, count in counts.items():
            shares[age // width * width] += count / counts.total()
        ages.bar(list(shares), list(shares.values()), width=0.9 * width, align="edge" if width > 1 else "center")
        ages.set_xlim(min(counts) - width, max(counts) + 2 * width)
    ages.set(xlabel="staleness (optimiser steps)", ylabel="rows with a known version (share)")

    names = sorted({name for row in trained for name in row["source_rows"]})
    batches = [row["source_rows"] for row in trained]
    shares = [[batch.get(name, 0) / sum(batch.values()) for batch in batches] for name in names]
    sources.stackplot(steps, shares, labels=names, colors=COLOURS)
    sources.set(ylabel="rows of the batch (share)", ylim=(0, 1), xlabel="optimiser step")
    sources.legend(loc="lower right", title="source")

    def series(name):
        return [row.get(name, math.nan) for row in trained]

    _draw_ratio(ratio, steps, series)
    size.plot(steps, series("effective_sample_size"), color=BLUE, lw=1)
    size.set(ylabel="effective sample size (share)", ylim=(0, 1.02), xlabel="optimiser step")
    ratio.set(xlabel="optimiser step")
    _save(figure, path)


def _draw_ratio(axes: Axes, steps: list[int], series: Callable[[str], list[float]]) -> None:
    axes.fill_between(
        steps, series("ratio/q01"), series("ratio/q99"), color=ORANGE, alpha=0.35, lw=0, label="1st to 99th percentile"
    )
    axes.plot(steps, series("ratio/q50"), color=ORANGE, lw=1.2, label="median")
    axes.set(ylabel="ratio π / μ of tokens", yscale="log")
    axes.legend(loc="lower right", frameon=False)


def _save(figure: Figure, path: Path) -> None:
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)
