"""The picture of a run: what it learned and how far off-policy it was."""

import math
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

matplotlib.use("Agg")

BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"  # told apart by colour-blind readers


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

    ratio.fill_between(
        steps, series("ratio/q01"), series("ratio/q99"), color=ORANGE, alpha=0.35, lw=0, label="1st to 99th percentile"
    )
    ratio.plot(steps, series("ratio/q50"), color=ORANGE, lw=1.2, label="median")
    ratio.set(ylabel="ratio π / μ of tokens", yscale="log")
    ratio.legend(loc="lower right", frameon=False)

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
    for axes in panels.flat:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in panels[1]:
        axes.set_xlabel("optimiser step")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)
