"""Curves over optimizer steps: one row of panels per metric, one column per regime, one line per set of seeds."""

import textwrap
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from recjax.plots.style import (
    COLORS,
    GREY,
    LABELS,
    NOTHING,
    add_legend,
    few_ticks,
    finish,
    new_figure,
    plain_ticks,
    with_headroom,
    words_near_1,
)

STYLES = ("-", "--", ":")  # Each cycle through the colors has its own style.
LOGARITHMIC = {"ratio/q01", "ratio/q99", "gradient_norm"}
# A reward is here because it is often a share; it may have any range.
SHARES = {"accuracy", "reward", "evaluation/accuracy", "effective_sample_size"}


def draw_curves(
    table: pd.DataFrame,
    lines: str,
    columns: str,
    metrics: Sequence[str],
    *,
    band: Callable[[pd.DataFrame], tuple[pd.Series, pd.Series]],
    names: dict[str, str] | None = None,
    more: Sequence[Callable[[Axes], None]] = (),
) -> Figure:
    """Draws a grid of panels, one metric per row; a line is the mean over runs, and its band their spread.

    A single column's panels are laid out in rows of two.

    Args:
        table: rows as `collect` makes them.
        lines: the column of the table whose values are the lines, in the order they first appear.
        columns: the column whose values are the panels of a row.
        metrics: columns of the table; "METRIC − NAME" is a column of differences from the line NAME.
        band: function from a metric's values, a row per run and a column per step, to the ends of the band.
        names: labels in the figure for values of `lines` or `columns`; a value without a label keeps its own name.
        more: functions that each draw one more panel; only with a single column.
    """
    names = names or {}
    line_values = list(dict.fromkeys(table[lines]))
    column_values = list(dict.fromkeys(table[columns]))
    is_single = len(column_values) == 1
    count = len(metrics) + len(more)
    if is_single:
        height = -(-count // 2)
        width = min(2, count)
        title = names.get(column_values[0], column_values[0])
        shared_x = shared_y = False
    else:
        height = len(metrics)
        width = len(column_values)
        title = ""
        shared_x = "col"
        shared_y = "row"
    figure = new_figure(1.2 + 2.9 * width, 1.1 + 1.9 * height, title)
    panels = figure.subplots(height, width, sharex=shared_x, sharey=shared_y, squeeze=False)
    rows = panels
    if is_single:
        # The panels of the metrics, then those of `more`, in reading order; each metric has one.
        # Each metric's panel is a row of its own here; the panels of `more` follow in reading order.
        rows = panels.flat[: len(metrics)].reshape(-1, 1)
        for axes in panels.flat[count:]:
            axes.set_axis_off()
    for metric, row in zip(metrics, rows, strict=True):
        for column, axes in zip(column_values, row, strict=True):
            in_column = table[table[columns] == column].dropna(subset=[metric])
            for index, line in enumerate(line_values):
                runs = in_column[in_column[lines] == line]
                if len(runs):
                    _draw_curve(axes, runs, metric, index=index, label=names.get(line, line), band=band)
        for axes in row:  # Panels of a row share their limits, so all curves are drawn before.
            _scale(axes, metric)
        name, _, against = metric.partition(" − ")
        label = LABELS.get(name, name)
        if against:
            label += "\n" + textwrap.fill(f"minus {names.get(against, against)}", 22)
        row[0].set_ylabel(label.strip())
    if is_single:
        for axes in rows.flat:
            axes.set_xlabel("optimizer step")
        for axes, draw in zip(panels.flat[len(metrics) :], more, strict=False):
            draw(axes)
    else:
        for axes in panels[-1]:
            axes.set_xlabel("optimizer step")
        for column, axes in zip(column_values, panels[0], strict=True):
            axes.set_title(textwrap.fill(names.get(column, column), 32), fontsize="medium", parse_math=False)
    handles = {}
    for axes in panels.flat:
        for curve in axes.get_lines():
            if not curve.get_label().startswith("_"):
                handles[curve.get_label()] = curve
    legend_columns = max(2, min(5, width + 1))
    add_legend(figure, list(handles.values()), list(handles), loc="outside lower center", ncols=legend_columns)
    return finish(figure)


def _draw_curve(
    axes: Axes,
    runs: pd.DataFrame,
    metric: str,
    *,
    index: int,
    label: str,
    band: Callable[[pd.DataFrame], tuple[pd.Series, pd.Series]],
) -> None:
    """Draws the runs' mean with its band.

    Args:
        index: number of the line, which determines its color and style.
    """
    settings = list(runs.select_dtypes(exclude="number"))
    values = runs.pivot_table(metric, settings, "step")  # one row per run
    low, high = band(values)
    color = COLORS[index % len(COLORS)]
    style = STYLES[index // len(COLORS) % len(STYLES)]
    marker = ""
    if len(values.columns) == 1:
        marker = "o"
    axes.fill_between(values.columns, low, high, color=color, alpha=0.15, lw=0)
    axes.plot(values.columns, values.mean(), label=label, color=color, ls=style, lw=1.4, marker=marker)


def _scale(axes: Axes, metric: str) -> None:
    """Sets the y axis of a panel so that it shows all values."""
    siblings = axes.get_shared_y_axes().get_siblings(axes)
    limits = np.ravel([panel.dataLim.intervaly for panel in siblings])
    low = float(min(limits[np.isfinite(limits)], default=0.0))
    high = float(max(limits[np.isfinite(limits)], default=1.0))
    if metric == "evaluation/initial_kl" and low >= 0:
        # The metric starts at 0, and a collapse raises it a hundredfold.
        axes.set_yscale("symlog", linthresh=0.01)
        axes.set_ylim(0, None)
        axes.yaxis.set_minor_locator(NullLocator())
    elif metric.startswith("ratio/") and words_near_1(axes, low, high, ""):
        pass
    elif metric in LOGARITHMIC and low > 0:
        axes.set_yscale("log")
        plain_ticks(axes.yaxis)
    elif " − " in metric:
        axes.axhline(0, color=GREY, lw=0.8, label="_zero")
    elif low >= 0:
        axes.set_ylim(0, with_headroom(high))
        # An axis of rounding errors would look like a curve.
        largest = 1 if metric in SHARES else NOTHING
        if high <= largest:
            axes.set_ylim(0, 1.02)
    few_ticks(axes.xaxis, 4)
