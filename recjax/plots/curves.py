"""Curves over optimizer steps: a row of panels for each metric, a column for each regime, a line for a set of seeds."""

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
    words_near_1,
)

STYLES = ("-", "--", ":")  # for the first, second and third cycle through the colors
LOGARITHMIC = {"ratio/q01", "ratio/q99", "gradient_norm"}
SHARES = {"accuracy", "reward", "evaluation/accuracy", "effective_sample_size"}  # a reward may have any range


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
    """A grid of panels, a metric a row; each line is the mean over runs, its band the spread of the runs.

    A single column's panels are laid out in rows of two.

    Args:
        table: rows as `collect` makes them.
        lines: the column of the table whose values are the lines, in the order they first appear.
        columns: the column whose values are the panels of a row.
        metrics: columns of the table; "METRIC − NAME" is a column of differences from the line NAME.
        band: function from a metric's values, a row per run and a column per step, to the ends of the band.
        names: labels in the figure for values of `lines` or `columns`; a value without a label keeps its own name.
        more: functions that each draw another panel; only with a single column.
    """
    names = names or {}
    compared = list(dict.fromkeys(table[lines]))
    across = list(dict.fromkeys(table[columns]))
    single = len(across) == 1
    count = len(metrics) + len(more)
    height, width = (-(-count // 2), min(2, count)) if single else (len(metrics), len(across))
    figure = new_figure(1.2 + 2.9 * width, 1.1 + 1.9 * height, names.get(across[0], across[0]) if single else "")
    panels = figure.subplots(height, width, sharex=not single and "col", sharey=not single and "row", squeeze=False)
    for axes in panels.flat[count * len(across) :]:
        axes.set_axis_off()
    for row, metric in enumerate(metrics):
        of_metric = panels.flat[row : row + 1] if single else panels[row]
        for column, axes in zip(across, of_metric, strict=True):
            for index, line in enumerate(compared):
                chosen = table[(table[lines] == line) & (table[columns] == column)].dropna(subset=[metric])
                if chosen.empty:
                    continue
                values = chosen.pivot_table(metric, [*chosen.select_dtypes(exclude="number")], "step")  # a row a run
                low, high = band(values)
                color = COLORS[index % len(COLORS)]
                style = STYLES[index // len(COLORS) % len(STYLES)]
                axes.fill_between(values.columns, low, high, color=color, alpha=0.15, lw=0)
                form = {"color": color, "ls": style, "lw": 1.4, "marker": "o" if len(values.columns) == 1 else ""}
                axes.plot(values.columns, values.mean(), label=names.get(line, line), **form)
        for axes in of_metric:  # after drawing all curves, because panels of a row share their limits
            _scale(axes, metric)
        name, _, against = metric.partition(" − ")
        minus = textwrap.fill(f"minus {names.get(against, against)}", 22) if against else ""
        of_metric[0].set_ylabel(f"{LABELS.get(name, name)}\n{minus}".strip())
    for axes in panels.flat[: len(metrics)] if single else panels[-1]:
        axes.set_xlabel("optimizer step")
    for column, axes in () if single else zip(across, panels[0], strict=True):
        axes.set_title(textwrap.fill(names.get(column, column), 32), fontsize="medium", parse_math=False)
    for axes, draw in zip(panels.flat[len(metrics) * len(across) :], more, strict=False):
        draw(axes)
    curves = [line for axes in panels.flat for line in axes.get_lines() if line.get_label()[0] != "_"]
    handles = {line.get_label(): line for line in curves}
    add_legend(figure, [*handles.values()], [*handles], loc="outside lower center", ncols=max(2, min(5, width + 1)))
    return finish(figure)


def _scale(axes: Axes, metric: str) -> None:
    """The axes of a panel, which no value leaves."""
    limits = np.ravel([panel.dataLim.intervaly for panel in axes.get_shared_y_axes().get_siblings(axes)])
    low = float(min(limits[np.isfinite(limits)], default=0.0))
    high = float(max(limits[np.isfinite(limits)], default=1.0))
    if metric == "evaluation/initial_kl" and low >= 0:
        axes.set_yscale("symlog", linthresh=0.01)  # the metric starts at 0, and a collapse raises it a hundredfold
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
        # An axis of rounding errors would look like a curve.
        axes.set_ylim(0, 1.02 if high <= (1 if metric in SHARES else NOTHING) else None)
    few_ticks(axes.xaxis, 4)
