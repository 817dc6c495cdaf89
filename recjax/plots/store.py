"""The picture of an experience store: rewards, signal, group sizes, policy versions, lengths and log-probs."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from recjax.experience.group import is_whole, reward_spread
from recjax.experience.rows import groups_of
from recjax.experience.store import Experience
from recjax.plots.style import COLORS, GREY, add_legend, few_ticks, new_figure, save_figure


def by_source(rows: Sequence[Experience]) -> dict[str, list[Experience]]:
    """The rows of each source; sources are in the order of their first rows."""
    names = dict.fromkeys(row.source for row in rows)
    return {name: [row for row in rows if row.source == name] for name in names}


def length(row: Experience) -> int | None:
    """Number of tokens of a completion; None if unknown."""
    return None if row.completion_tokens is None else len(row.completion_tokens)


def draw_store(rows: Sequence[Experience], title: str, path: Path) -> None:
    """Writes a PNG with bars stacked by source; bars about groups are not split."""
    sources, groups = by_source(rows), groups_of(rows)
    colors = [COLORS[place % len(COLORS)] for place in range(len(sources))]
    figure = new_figure(13, 6.5, title)
    (rewards, signal, sizes), (versions, lengths, known) = figure.subplots(2, 3)

    def per_source(value: Callable[[Experience], Any]) -> list[list]:
        return [[value(row) for row in members] for members in sources.values()]

    def what_is_known(row: Experience) -> int:
        """A place on the last panel's axis."""
        return 0 if row.reward is None else 1 if row.behavior_logprobs is None else 2

    spreads = [reward_spread(group) for group in groups if is_whole(group)]
    _histogram(rewards, "reward", per_source(lambda row: row.reward), colors, whole=False)
    _histogram(signal, "highest − lowest reward of whole groups", [spreads], [GREY], whole=False)
    _histogram(sizes, "rows in a group", [[len(group.completions) for group in groups]], [GREY])
    _histogram(versions, "policy version (updates)", per_source(lambda row: row.policy_version), colors)
    _histogram(lengths, "completion tokens", per_source(length), colors)
    known.hist(
        per_source(what_is_known), np.arange(4) - 0.5, stacked=True, color=colors, label=list(sources), rwidth=0.9
    )
    known.set_xticks([0, 1, 2], ["reward pending", "no behavior\nlog-probs", "log-probs\nand reward"])
    for axes in figure.axes:
        axes.set_ylabel("groups" if axes in (signal, sizes) else "rows")
        few_ticks(axes.yaxis)
    add_legend(figure, loc="outside lower center", ncols=min(len(sources), 6))
    save_figure(figure, path)


def _histogram(axes: Axes, name: str, values: list[list], colors: list[str], whole: bool = True) -> None:
    """Stacked bars, a list of values for each color; None is skipped. `whole`: values are whole numbers."""
    values = [[value for value in each if value is not None] for each in values]
    every = [value for each in values for value in each]
    axes.set_xlabel(name)
    few_ticks(axes.xaxis, whole=whole)
    if not every:
        axes.text(0.5, 0.5, "none", ha="center", va="center", transform=axes.transAxes)
        return
    low, high = min(every), max(every)
    few = whole and high - low < 40
    bins = np.arange(low, high + 2) - 0.5 if few else np.linspace(min(low, 0), max(high, min(low, 0) + 1), 21)
    axes.hist(values, bins, stacked=True, color=colors, rwidth=0.9)
