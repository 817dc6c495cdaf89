"""The pictures of a run: reward and accuracy, how far off-policy it was, and the sources of experience."""

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recjax.plots.style import COLORS, LABELS, add_legend, few_ticks, new_figure, plain_ticks, save_figure

BLUE, ORANGE, GREEN, *_ = COLORS
NOTHING = 1e-6  # shares, ages and nats up to this are rounding errors
NEAR_1 = 1e-3  # a ratio nearer to 1 has no visible band
Rows = list[dict[str, Any]]


class Panel(NamedTuple):
    """A panel over optimizer steps.

    name: the y label.
    lines: options of matplotlib for the line of each metric.
    limits: ends of the y axis; None follows the values.
    dull: the panel is left out if no value is above this.
    """

    name: str
    lines: dict[str, dict[str, Any]]
    limits: tuple[float | None, float | None] = (None, None)
    dull: float = -math.inf


_HELD_OUT = {"color": BLUE, "marker": "o", "lw": 1.5, "label": "held-out problems"}
_TRAIN = {"color": ORANGE, "label": "train batches"}
_RATIO = Panel("ratio π/μ of tokens", {"ratio/q50": {"color": ORANGE, "label": "median"}})
_SIZE = Panel(LABELS["effective_sample_size"], {"effective_sample_size": {}}, (0, 1.02))
_TRAINING = (
    Panel("accuracy (share)", {"accuracy": _TRAIN, "evaluation/accuracy": _HELD_OUT}, (0, 1.02)),
    Panel("reward", {"reward": _TRAIN, "evaluation/reward": _HELD_OUT}),
    _RATIO,
    _SIZE,
    Panel(
        LABELS["clip_fraction/all"],
        {
            "clip_fraction/negative": {"color": ORANGE, "label": "advantage < 0"},
            "clip_fraction/positive": {"color": GREEN, "label": "advantage > 0"},
        },
        (0, None),
        NOTHING,
    ),
    Panel(LABELS["staleness"], {"staleness": {}}, (0, None), NOTHING),
    Panel(LABELS["behavior_kl/k3"], {"behavior_kl/k3": {}}, (0, None), NOTHING),
    Panel(LABELS["entropy"], {"entropy": {}}, (0, None)),
)


def draw_training(rows: Rows, title: str, path: Path) -> None:
    """Draws reward, accuracy, ratio, sample size, clipping, staleness, divergence and entropy over steps, as a PNG.

    Panels without content are left out; a line below the other panels names them.

    Args:
        rows: metrics of each step.
    """
    drawn = [panel for panel in _TRAINING if _has_content(panel, rows)]
    empty = [panel.name.partition("\n")[0] for panel in _TRAINING if panel not in drawn]
    figure, grid = _grid(len(drawn), title)
    for panel, axes in zip(drawn, grid, strict=True):
        _draw_panel(axes, panel, rows)
    note = f"\n0 or unknown in all steps: {', '.join(empty)}" if empty else ""
    figure.supxlabel(f"optimizer step{note}", fontsize="medium")
    save_figure(figure, path)


def draw_experience(rows: Rows, title: str, path: Path) -> None:
    """Draws sources and age of experience: shares, staleness, ratio, effective sample size, as a PNG.

    Panels without content are left out.

    Args:
        rows: metrics of each step.
    """
    batches = [row for row in rows if row.get("source_rows")]  # of several updates, only the first has it
    ages = Counter()
    for row in rows:
        ages.update({int(age): count for age, count in row.get("staleness_rows", {}).items()})
    panels = [panel for panel in (_RATIO, _SIZE) if _has_content(panel, rows)]
    figure, grid = _grid(len(panels) + bool(ages) + bool(batches), title)
    if ages:
        _draw_ages(next(grid), ages)
    if batches:
        axes = next(grid)
        counts = pd.DataFrame([row["source_rows"] for row in batches]).fillna(0).sort_index(axis=1)
        shares = counts.div(counts.sum(axis=1), axis=0)
        axes.stackplot(_series(batches, "step"), shares.to_numpy().T, labels=list(shares), colors=COLORS)
        axes.set(xlabel="optimizer step", ylabel="rows of the batch\n(share)", ylim=(0, 1))
        few_ticks(axes.xaxis)
        add_legend(axes, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0.5)
    for panel, axes in zip(panels, grid, strict=True):
        _draw_panel(axes, panel, rows)
        axes.set_xlabel("optimizer step")
    save_figure(figure, path)


def _grid(count: int, title: str) -> tuple[Figure, Iterator[Axes]]:
    """A figure with this many panels, in two columns."""
    columns = 1 if count < 2 else 2
    height = -(-count // columns)
    figure = new_figure(4.2 * columns, 0.8 + 2.2 * height, title)
    return figure, (figure.add_subplot(height, columns, number) for number in range(1, count + 1))


def _has_content(panel: Panel, rows: Rows) -> bool:
    return any(row[name] > panel.dull for row in rows for name in panel.lines if name in row)


def _draw_panel(axes: Axes, panel: Panel, rows: Rows) -> None:
    """Lines are means over a fiftieth of the steps, with bands from the lowest to the highest value."""
    if panel is _RATIO:
        _draw_band(axes, [row for row in rows if "ratio/q01" in row and "ratio/q99" in row])
    for name, options in panel.lines.items():
        known = [row for row in rows if name in row]
        steps = _series(known, "step")
        around = pd.Series(_series(known, name), dtype=float).rolling(max(1, len(known) // 50), 1, center=True)
        look = {"color": BLUE, "lw": 1.2, "marker": "o" if len(known) == 1 else ""} | options
        axes.fill_between(steps, around.min(), around.max(), color=look["color"], alpha=0.2, lw=0)
        axes.plot(steps, around.mean(), **look)
    last = max(1, rows[-1]["step"])
    axes.set(ylabel=panel.name, xlim=(-0.03 * last, 1.03 * last), ylim=panel.limits)
    few_ticks(axes.xaxis)
    if len(axes.get_legend_handles_labels()[0]) > 1:
        add_legend(axes, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0.5)


def _series(rows: Rows, name: str) -> list[float]:
    return [row[name] for row in rows]


def _draw_band(axes: Axes, rows: Rows) -> None:
    """The 1st to 99th percentile of the ratio; only in words where it is 1."""
    low = _series(rows, "ratio/q01")
    high = _series(rows, "ratio/q99")
    if not rows:
        return
    if 1 - NEAR_1 < min(low) and max(high) < 1 + NEAR_1:
        text = f"1st to 99th percentile:\n{min(low):.6f} to {max(high):.6f}"
        axes.text(0.5, 0.75, text, ha="center", va="center", transform=axes.transAxes)
        axes.set_ylim(0.9, 1.1)
        return
    band = {"color": ORANGE, "alpha": 0.35, "lw": 0, "label": "1st to 99th percentile"}
    axes.fill_between(_series(rows, "step"), low, high, **band)
    axes.set_yscale("log")
    plain_ticks(axes.yaxis)


def _draw_ages(axes: Axes, counts: Counter) -> None:
    """Staleness of the rows of all batches."""
    width = -(-(max(counts) - min(counts) + 1) // 40)  # optimizer steps per bar
    shares = Counter()
    for age, count in counts.items():
        shares[age // width * width] += count / counts.total()
    align = "edge" if width > 1 else "center"
    axes.bar(list(shares), list(shares.values()), width=0.9 * width, align=align, color=BLUE)
    axes.set_xlim(min(counts) - width, max(counts) + 2 * width)
    axes.set(xlabel=LABELS["staleness"].replace("\n", " "), ylabel="rows with a known\nversion (share)")
    few_ticks(axes.xaxis)
