"""Curves over optimiser steps: a row of panels a metric, a column a regime, a line with its band a set of seeds."""

from collections.abc import Sequence

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

matplotlib.use("Agg")

# Okabe and Ito's colours, told apart by colour-blind readers; a second round is dashed, a third dotted.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", ":")
LABELS = {
    "reward": "reward of\nthe train batch",
    "accuracy": "accuracy of\nthe train batch (share)",
    "completion_length": "completion length\n(tokens)",
    "staleness": "staleness\n(optimiser steps)",
    "entropy": "entropy of π\n(nats per token)",
    "gradient_norm": "gradient norm",
    "clip_fraction/all": "clipped tokens\n(share)",
    "ratio/q01": "ratio π/μ,\n1st percentile",
    "ratio/q99": "ratio π/μ,\n99th percentile",
    "behaviour_kl/k3": "KL(μ ‖ π)\n(nats per token)",
    "effective_sample_size": "effective sample size\n(share)",
    "evaluation/accuracy": "held-out accuracy\n(share)",
    "evaluation/initial_kl": "KL(π ‖ π₀)\n(nats per token)",
}
LOGARITHMIC = {"ratio/q01", "ratio/q99", "gradient_norm"}
SHARES = {"accuracy", "reward", "evaluation/accuracy", "effective_sample_size"}


def draw_curves(
    table: pd.DataFrame,
    lines: str,
    columns: str,
    metrics: Sequence[str],
    *,
    names: dict[str, str] | None = None,
    title: str = "",
) -> Figure:
    """A grid of panels, a metric a row; each line is the mean over runs, its band their lowest and highest.

    Where there is one column only, its panels are laid out in rows of up to four.

    Args:
        table: rows as `collect` makes them.
        lines: the column of the table whose values are the lines, in the order they first appear.
        columns: the column whose values are the panels of a row.
        metrics: which of collect's COLUMNS.
        names: what to call a value of `lines` or `columns` in the figure; others go by their own name.
    """
    names = names or {}
    drawn, across = list(dict.fromkeys(table[lines])), list(dict.fromkeys(table[columns]))
    single = len(across) == 1
    height, width = (-(-len(metrics) // 4), min(4, len(metrics))) if single else (len(metrics), len(across))
    figure = Figure(figsize=(1.2 + 2.9 * width, 1.1 + 1.9 * height), layout="constrained")
    panels = figure.subplots(height, width, sharex="col", sharey=False if single else "row", squeeze=False)
    for axes in panels.flat[len(metrics) * len(across) :]:
        axes.set_axis_off()
    for row, metric in enumerate(metrics):
        of_metric = panels.flat[row : row + 1] if single else panels[row]
        for place, axes in zip(across, of_metric, strict=True):
            for index, line in enumerate(drawn):
                chosen = table[(table[lines] == line) & (table[columns] == place)]
                _draw_band(axes, chosen, metric, index, names.get(line, line))
        for axes in of_metric:  # once all are drawn: panels of a row share their limits
            _finish(axes, metric)
        of_metric[0].set_ylabel(LABELS.get(metric, metric))
    for column, axes in enumerate(panels[0]):
        if not single:
            axes.set_title(names.get(across[column], across[column]), fontsize=10)
        panels[-1, column].set_xlabel("optimiser step")
    figure.suptitle(title or (names.get(across[0], across[0]) if single else ""))
    handles = {
        label: line for axes in panels.flat for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    columns_of_legend = max(2, min(5, width + 1))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns_of_legend, frameon=False)
    return figure


def _draw_band(axes: Axes, runs: pd.DataFrame, metric: str, index: int, label: str) -> None:
    values = runs[["step", metric]].dropna().groupby("step")[metric].agg(["mean", "min", "max"])
    if values.empty:
        return
    colour, style = COLOURS[index % len(COLOURS)], STYLES[index // len(COLOURS) % len(STYLES)]
    axes.fill_between(values.index, values["min"], values["max"], color=colour, alpha=0.15, lw=0)
    axes.plot(values.index, values["mean"], color=colour, ls=style, lw=1.4, label=label)


def plain_ticks(axis: Axis) -> None:
    """Few ticks, as plain decimals, for a logarithmic axis of whatever span."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,), numticks=6))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def _finish(axes: Axes, metric: str) -> None:
    if metric == "evaluation/initial_kl":
        axes.set_yscale("symlog", linthresh=0.01)  # starts at 0, and a collapse takes it up a hundredfold
        axes.set_ylim(0, None)
        axes.yaxis.set_minor_locator(NullLocator())
    elif metric in LOGARITHMIC:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        if high < 2.2 * low:
            axes.set_ylim(low / 1.5, high * 1.5)
        plain_ticks(axes.yaxis)
    else:
        axes.set_ylim(0, 1.02 if metric in SHARES else None)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
