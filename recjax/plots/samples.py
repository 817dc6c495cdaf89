"""The picture of an evaluation: accuracy over the number of samples, accuracy by difficulty, completion lengths."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from recjax.plots.style import COLORS, GREY, add_legend, few_ticks, new_figure, save_figure


def draw_evaluation(rows: pd.DataFrame, numbers: dict[str, Any], title: str, path: Path) -> None:
    """Writes a PNG.

    Args:
        rows: one per completion, with `tokens` and `truncated`.
        numbers: the result of `recjax.analysis.samples.results` for these rows.
    """

    panels = []
    if any("pass@" in name for name in numbers["metrics"]):
        panels.append(_draw_more_samples)
    if numbers["difficulty"]:
        panels.append(_draw_difficulty)
    panels.append(_draw_lengths)
    figure = new_figure(4.6 * len(panels), 3.9, title)
    for axes, draw in zip(np.atleast_1d(figure.subplots(1, len(panels))), panels, strict=True):
        draw(axes, rows, numbers)
    save_figure(figure, path)


def _draw_difficulty(axes: Axes, rows: pd.DataFrame, numbers: dict[str, Any]) -> None:
    labels = list(numbers["difficulty"])
    values, reach = _error_bars(list(numbers["difficulty"].values()))
    axes.bar(range(len(labels)), values, yerr=reach, color=COLORS[0], alpha=0.75, capsize=3)
    axes.set(ylabel="accuracy (share)", ylim=(0, 1.02))
    rotation: dict[str, Any] = {}
    if max(map(len, labels)) > 8:
        rotation = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(range(len(labels)), labels, parse_math=False, **rotation)


def _error_bars(estimates: list[dict[str, Any]]) -> tuple[pd.Series, np.ndarray]:
    """Values, and their distances to the ends of their intervals."""
    table = pd.DataFrame(estimates).astype(float)
    reach = [table["value"] - table["low"], table["high"] - table["value"]]
    # A percentile interval may just miss the value itself; a single problem has no interval.
    return table["value"], np.maximum(np.nan_to_num(reach), 0)


def _draw_more_samples(axes: Axes, rows: pd.DataFrame, numbers: dict[str, Any]) -> None:
    sizes = []
    for kind, color in zip(("pass", "majority"), COLORS, strict=False):
        names = [name for name in numbers["metrics"] if f"{kind}@" in name]
        sizes = [int(name.partition("@")[2]) for name in names]
        values, reach = _error_bars([numbers["metrics"][name] for name in names])
        axes.errorbar(sizes, values, reach, color=color, marker="o", capsize=3, label=f"{kind}@k")
    axes.axhline(numbers["constant_answer"]["share"], color=GREY, ls=":", label="most common answer, always")
    axes.set(xlabel="k (samples a problem)", ylabel="share of problems", ylim=(0, 1.02), xscale="log")
    axes.set_xticks(sizes, list(map(str, sizes)))
    axes.set_xticks([], minor=True)
    add_legend(axes)


def _draw_lengths(axes: Axes, rows: pd.DataFrame, numbers: dict[str, Any]) -> None:
    low = rows["tokens"].min()
    high = rows["tokens"].max()
    width = 1 + (high - low) // 40
    bins = np.arange(low, high + width + 1, width) - 0.5  # Each bin covers `width` lengths.
    lengths = {}
    for name, is_part in (("ended", ~rows["truncated"]), ("ran into the limit", rows["truncated"])):
        if is_part.any():
            lengths[name] = rows["tokens"][is_part]
    axes.margins(y=0.25)  # The legend stands above the bars.
    axes.hist(
        list(lengths.values()),
        bins.tolist(),
        stacked=True,
        color=COLORS[: len(lengths)],
        alpha=0.75,
        label=list(lengths),
    )
    axes.set(xlabel="completion length (tokens)", ylabel="completions")
    few_ticks(axes.xaxis, 6)
    add_legend(axes)
