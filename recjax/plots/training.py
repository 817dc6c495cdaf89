"""The pictures of a run: reward and accuracy, how far off-policy it was, and the sources of experience."""

import math
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recjax.plots.style import (
    COLORS,
    GREY,
    LABELS,
    NEAR_1,
    NOTHING,
    add_legend,
    few_ticks,
    finish,
    new_figure,
    plain_ticks,
    save_figure,
    with_headroom,
    words_near_1,
)

BLUE, ORANGE, GREEN, *_ = COLORS
LEFT_OUT = "experience/left_out/"
Rows = list[dict[str, Any]]


class Panel(NamedTuple):
    """A panel over optimizer steps.

    name: the y label.
    lines: options of matplotlib for the line of each metric.
    limits: ends of the y axis; an end that is None follows the values.
    dull: the panel is skipped if all values equal this number, up to rounding; None: only if it has no values.
    is_smoothed: True draws means over several steps. A metric that rises and falls with the age of the samples has a
        line through every step: a mean over part of its period would be a curve that no step has.
    """

    name: str
    lines: dict[str, dict[str, Any]]
    limits: tuple[float | None, float | None] = (None, None)
    dull: int | None = None
    is_smoothed: bool = False


_HELD_OUT = {"color": BLUE, "marker": "o", "lw": 1.5, "label": "held-out problems"}
_TRAIN = {"color": ORANGE, "label": "train batches"}
_RATIO = Panel("ratio π/μ of tokens", {"ratio/q50": {"color": ORANGE, "label": "median"}})
_SIZE = Panel(LABELS["effective_sample_size"], {"effective_sample_size": {}}, (0, 1.02), 1)
_ACCURACY = Panel(
    "accuracy (share)", {"accuracy": _TRAIN, "evaluation/accuracy": _HELD_OUT}, (0, 1.02), is_smoothed=True
)
_TRAINING = (
    _ACCURACY,
    Panel("reward", {"reward": _TRAIN, "evaluation/reward": _HELD_OUT}, is_smoothed=True),
    _RATIO,
    _SIZE,
    Panel(
        LABELS["clip_fraction/all"],
        {
            "clip_fraction/negative": {"color": ORANGE, "label": "advantage < 0"},
            "clip_fraction/positive": {"color": GREEN, "label": "advantage > 0"},
        },
        (0, None),
        0,
    ),
    Panel(LABELS["staleness"], {"staleness": {}}, (0, None), 0),
    Panel(LABELS["behavior_kl/k3"], {"behavior_kl/k3": {}}, (0, None), 0),
    Panel(LABELS["entropy"], {"entropy": {}}, (0, None), 0, is_smoothed=True),
)


def draw_training(rows: Rows, title: str, path: Path, signs: Mapping[str, int] | None = None) -> None:
    """Writes the figure of `training_figure` as a PNG."""
    save_figure(training_figure(rows, title, signs), path)


def training_figure(rows: Rows, title: str, signs: Mapping[str, int] | None = None) -> Figure:
    """Draws reward, accuracy, ratio, sample size, clipping, staleness, divergence and entropy over steps.

    Panels without content are skipped; a line below the drawn panels says why. Rewards that are equal to the
    accuracies have no panel of their own.

    Args:
        rows: metrics of each step.
        signs: steps that a dotted line marks in all panels, by their words in the title.
    """
    signs = signs or {}
    panels = list(_TRAINING)
    differ_in_training = any(_differ(row, "reward", "accuracy") for row in rows)
    differ_in_evaluation = any(_differ(row, "evaluation/reward", "evaluation/accuracy") for row in rows)
    if not differ_in_training and not differ_in_evaluation:
        # One panel replaces those of accuracy and reward, the first two.
        panels = [_ACCURACY._replace(name="accuracy = reward\n(share)"), *_TRAINING[2:]]
    drawn, note = _with_content(panels, rows)
    marked = [f"from step {step} (dotted line): {words}" for words, step in signs.items()]
    figure, grid = _grid(len(drawn), "\n".join([title, *marked]))
    for panel, axes in zip(drawn, grid, strict=True):
        _draw_panel(axes, panel, rows)
        for step in signs.values():
            axes.axvline(step, color=GREY, ls=":", lw=1.5, label="_sign")
    smoothed = [panel.name.partition("\n")[0].partition(" (")[0] for panel in drawn if panel.is_smoothed]
    if smoothed and _window(rows) > 1:
        note.insert(0, f"{', '.join(smoothed)}: mean over {_window(rows)} steps; band: their lowest and highest value")
    return finish(_with_words(figure, ["optimizer step", *note]))


def draw_experience(rows: Rows, title: str, path: Path) -> None:
    """Draws age and sources of experience, left-out groups, ratio and effective sample size, as a PNG.

    Panels without content are skipped; a line below the drawn panels says why.

    Args:
        rows: metrics of each step.
    """
    batches = [row for row in rows if row.get("source_rows")]  # Only a batch's first update has this key.
    counts = pd.DataFrame([row["source_rows"] for row in batches]).fillna(0).sort_index(axis=1)
    ages = Counter()
    for row in rows:
        ages.update({int(age): count for age, count in row.get("staleness_rows", {}).items()})
    totals = pd.DataFrame(rows).filter(like=LEFT_OUT).max()
    # Completion and token counts of the same groups would hide the group counts.
    totals = totals[~totals.index.str.endswith(("_tokens", "signal_completions"))]
    if totals.any():
        totals = totals[totals > 0]
    left_out: dict[str, dict[str, dict[str, Any]]] = {"groups": {}, "rows": {}}  # lines of each unit, which has a panel
    for name, color in zip(totals.index, COLORS, strict=False):
        reason = name.removeprefix(LEFT_OUT)
        unit = "rows" if reason.startswith(("rows_", "rewards_")) else "groups"
        left_out[unit][name] = {"color": color, "label": reason.replace("_", " ")}
    panels = [
        Panel(f"{unit} left out\nso far", lines, (0, None), 0)
        for unit, lines in left_out.items()
        if lines or unit == "groups"
    ]
    drawn, note = _with_content([*panels, _RATIO, _SIZE], rows)
    has_ages_panel = len(ages) > 1
    has_sources_panel = len(counts.columns) > 1
    figure, grid = _grid(len(drawn) + has_ages_panel + has_sources_panel, title)
    if has_ages_panel:
        _draw_ages(next(grid), ages)
    else:
        note += [f"staleness in all steps: {age}" for age in ages]
    if has_sources_panel:
        _draw_sources(next(grid), _series(batches, "step"), counts)
    else:
        note += [f"source of all rows: {name}" for name in counts]
    for panel, axes in zip(drawn, grid, strict=True):
        _draw_panel(axes, panel, rows)
        axes.set_xlabel("optimizer step")
    save_figure(_with_words(figure, note), path)


def _differ(row: Mapping[str, Any], reward: str, accuracy: str) -> bool:
    """True if a step's reward and accuracy differ, or if it has only one of them."""
    if reward not in row and accuracy not in row:
        return False
    # A number that is missing counts as infinite.
    return abs(row.get(reward, math.inf) - row.get(accuracy, math.inf)) > NOTHING


def _with_content(panels: Sequence[Panel], rows: Rows) -> tuple[list[Panel], list[str]]:
    """Selects the panels with content, and names the skipped panels in lines of words."""
    drawn = []
    skipped = {"unknown": [], "0 in all steps": [], "1 in all steps": []}
    for panel in panels:
        values = []
        for row in rows:
            known = [row[name] for name in panel.lines if name in row]
            values.extend(value for value in known if math.isfinite(value))
        title = panel.name.partition("\n")[0]
        tolerance = NEAR_1 if panel.dull else NOTHING
        if not values:
            skipped["unknown"].append(title)
        elif panel.dull is None or any(abs(value - panel.dull) > tolerance for value in values):
            drawn.append(panel)
        else:
            skipped[f"{panel.dull} in all steps"].append(title)
    return drawn, [f"{reason}: {', '.join(names)}" for reason, names in skipped.items() if names]


def _grid(count: int, title: str) -> tuple[Figure, Iterator[Axes]]:
    """A figure with `count` panels, in two columns."""
    columns = 1 if count < 2 else 2
    height = max(1, math.ceil(count / columns))
    figure = new_figure(4.2 * columns, 0.8 + 2.2 * height, title)
    panels = (figure.add_subplot(height, columns, number) for number in range(1, count + 1))
    return figure, panels


def _with_words(figure: Figure, note: Sequence[str]) -> Figure:
    """The figure with lines of words below its panels."""
    characters = int(12 * figure.get_figwidth())
    text = "\n".join(textwrap.fill(line, characters) for line in note)
    figure.supxlabel(text, fontsize="medium", parse_math=False)
    return figure


def _draw_panel(axes: Axes, panel: Panel, rows: Rows) -> None:
    """Draws the values, or their means over `_window` steps with bands from the lowest to the highest value."""
    if panel is _RATIO:
        _draw_band(axes, [row for row in rows if "ratio/q01" in row and "ratio/q99" in row])
    for name, options in panel.lines.items():
        known = [row for row in rows if name in row]
        if not known:
            continue
        steps = _series(known, "step")
        values = pd.Series(_series(known, name), dtype=float)
        window = values.rolling(_window(known) if panel.is_smoothed else 1, 1, center=True)
        style: dict[str, Any] = {"color": BLUE, "lw": 1.2, "marker": ""}
        if len(known) == 1:
            style["marker"] = "o"
        style |= options
        axes.fill_between(steps, window.min(), window.max(), color=style["color"], alpha=0.2, lw=0)
        axes.plot(steps, window.mean(), **style)
    last = max(1, rows[-1]["step"])
    low, high = panel.limits
    if low == 0 and high is None:
        high = with_headroom(axes.dataLim.y1)
    axes.set(ylabel=panel.name, xlim=(-0.03 * last, 1.03 * last), ylim=(low, high))
    few_ticks(axes.xaxis)
    if axes.get_legend_handles_labels()[0]:
        add_legend(axes, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0.5)


def _window(rows: Rows) -> int:
    """Steps of a smoothed value: a fiftieth of all."""
    return max(1, len(rows) // 50)


def _draw_sources(axes: Axes, steps: Sequence[float], counts: pd.DataFrame) -> None:
    """Draws each source's share of each batch, as wide as the steps up to the next batch."""
    shares = counts.div(counts.sum(axis=1), axis=0).to_numpy()
    width = 1
    if len(steps) > 1:
        width = steps[-1] - steps[-2]
    edges = np.array([*steps, steps[-1] + width]) - 0.5
    heights = np.vstack([shares, shares[-1]]).T
    axes.stackplot(edges, heights, labels=list(map(str, counts)), colors=COLORS, step="post", lw=0)
    axes.set(
        xlabel="optimizer step",
        ylabel="rows of the batch\n(share)",
        xlim=(edges[0] - 0.5, edges[-1] + 0.5),
        ylim=(0, 1),
    )
    few_ticks(axes.xaxis)
    add_legend(axes, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0.5)


def _series(rows: Rows, name: str) -> list[float]:
    return [row[name] for row in rows]


def _draw_band(axes: Axes, rows: Rows) -> None:
    """Draws the 1st to 99th percentile of the ratio; writes it in words if it is near 1 in all steps."""
    if not rows:
        return
    low = _series(rows, "ratio/q01")
    high = _series(rows, "ratio/q99")
    if words_near_1(axes, min(low), max(high), "1st to 99th percentile:\n"):
        return
    band = {"color": ORANGE, "alpha": 0.35, "lw": 0, "label": "1st to 99th percentile"}
    axes.fill_between(_series(rows, "step"), low, high, **band)
    axes.set_yscale("log")
    plain_ticks(axes.yaxis)


def _draw_ages(axes: Axes, counts: Counter) -> None:
    """Draws the staleness of all batches' rows."""
    width = math.ceil((max(counts) - min(counts) + 1) / 40)  # A bar covers `width` optimizer steps.
    shares: Any = Counter()
    for age, count in counts.items():
        shares[age // width * width] += count / counts.total()
    align = "edge" if width > 1 else "center"
    axes.bar(list(shares), list(shares.values()), width=0.9 * width, align=align, color=BLUE)
    axes.set_xlim(min(counts) - 0.6, max(counts) + width - 0.4)
    axes.set(xlabel=LABELS["staleness"].replace("\n", " "), ylabel="rows with a known\nversion (share)")
    few_ticks(axes.xaxis)
