"""The picture of a run: what it learned and how far off-policy it was."""

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

matplotlib.use("Agg")

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#7f7f7f"  # told apart by colour-blind readers


def draw_training(rows: list[dict[str, float]], title: str, path: Path) -> None:
    """Accuracy, staleness and ratio, clipping, and entropy over the steps of a run, as a PNG.

    Args:
        rows: the run's metrics, step by step.
    """
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    figure.suptitle(title)
    (accuracy, ratio), (clip, length) = figure.subplots(2, 2, sharex=True)
    steps = [row["step"] for row in rows if "loss" in row]

    def series(name):
        return [row[name] for row in rows if "loss" in row]

    evaluated = [row for row in rows if "evaluation/accuracy" in row]
    accuracy.plot(steps, series("accuracy"), color=BLUE, alpha=0.35, lw=1, label="train batch (behaviour policy)")
    accuracy.plot(
        [row["step"] for row in evaluated],
        [row["evaluation/accuracy"] for row in evaluated],
        color=BLUE,
        marker="o",
        label="held-out problems",
    )
    accuracy.set(ylabel="accuracy (share)", ylim=(0, 1.02))
    accuracy.legend(loc="lower right", frameon=False)

    low, median, high = "ratio/q01", "ratio/q50", "ratio/q99"
    ratio.fill_between(steps, series(low), series(high), color=ORANGE, alpha=0.25, lw=0, label="1–99 %")
    ratio.plot(steps, series(median), color=ORANGE, lw=1.2, label="median")
    ratio.set(ylabel="ratio π / μ (per token)", yscale="log")
    ratio.legend(loc="upper left", frameon=False)
    stale = ratio.twinx()
    stale.plot(steps, series("staleness"), color=GREY, lw=0.8)
    stale.set_ylabel("staleness (optimiser steps)", color=GREY)

    clip.plot(steps, series("clip_fraction/positive"), color=GREEN, lw=1, label="advantage > 0")
    clip.plot(steps, series("clip_fraction/negative"), color=ORANGE, lw=1, label="advantage < 0")
    clip.set(ylabel="clipped tokens (share)", ylim=(0, None), xlabel="optimiser step")
    clip.legend(loc="upper left", frameon=False)

    length.plot(steps, series("entropy"), color=BLUE, lw=1)
    length.set(ylabel="entropy (nats per token)", xlabel="optimiser step", ylim=(0, None))
    for axes in (accuracy, ratio, clip, length):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)
