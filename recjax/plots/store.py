"""The picture of an experience store: rewards, signal, group sizes, policy versions, lengths and log-probs."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from recjax.experience.group import Completion, is_whole, reward_spread
from recjax.experience.records import Record, groups_of
from recjax.plots.style import COLORS, GREY, add_legend, few_ticks, new_figure, save_figure


def by_source(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The completions of each source; sources are in the order of their first completions."""
    sources: dict[str, list[Record]] = {}
    for record in records:
        sources.setdefault(record.completion.source, []).append(record)
    return sources


def length(completion: Completion) -> int | None:
    """Number of tokens of a completion; None if unknown."""
    if not completion.rows:
        return None
    return sum(len(row.tokens) for row in completion.rows)


def has_logprobs(completion: Completion) -> bool:
    """True if the behavior log-probs of a completion are known."""
    if not completion.rows:
        return False
    return all(row.behavior_logprobs is not None for row in completion.rows)


def draw_store(records: Sequence[Record], title: str, path: Path) -> None:
    """Writes a PNG with bars stacked by source; bars about groups are not split."""
    sources = by_source(records)
    groups = groups_of(records)
    colors = [COLORS[index % len(COLORS)] for index in range(len(sources))]
    figure = new_figure(13, 6.5, title)
    (rewards, signal, sizes), (versions, lengths, known) = figure.subplots(2, 3)

    def per_source(value: Callable[[Completion], Any]) -> list[list]:
        values = []
        for members in sources.values():
            values.append([value(record.completion) for record in members])
        return values

    _histogram(rewards, "reward", per_source(_reward), colors, whole=False)
    spreads = [reward_spread(group) for group in groups if is_whole(group)]
    _histogram(signal, "highest − lowest reward of whole groups", [spreads], [GREY], whole=False)
    group_sizes = [len(group.completions) for group in groups]
    _histogram(sizes, "rows in a group", [group_sizes], [GREY])
    _histogram(versions, "policy version (updates)", per_source(lambda completion: completion.policy_version), colors)
    _histogram(lengths, "completion tokens", per_source(length), colors)
    known.hist(per_source(_knowledge), np.arange(4) - 0.5, stacked=True, color=colors, label=list(sources), rwidth=0.9)
    known.set_xticks([0, 1, 2], ["reward pending", "no behavior\nlog-probs", "log-probs\nand reward"])
    for axes in figure.axes:
        axes.set_ylabel("groups" if axes in (signal, sizes) else "rows")
        few_ticks(axes.yaxis)
    add_legend(figure, loc="outside lower center", ncols=min(len(sources), 6))
    save_figure(figure, path)


def _reward(completion: Completion) -> float | None:
    if completion.grade is None:
        return None
    return completion.grade.reward


def _knowledge(completion: Completion) -> int:
    """A completion's position on the axis of the last panel."""
    if completion.grade is None:
        return 0
    if has_logprobs(completion):
        return 2
    return 1


def _histogram(axes: Axes, name: str, values: list[list], colors: list[str], whole: bool = True) -> None:
    """Draws stacked bars.

    Args:
        values: one list per color; None is skipped.
        whole: values are whole numbers.
    """
    stacks = []
    for color_values in values:
        stacks.append([value for value in color_values if value is not None])
    all_values = list(itertools.chain.from_iterable(stacks))
    axes.set_xlabel(name)
    few_ticks(axes.xaxis, whole=whole)
    if not all_values:
        axes.text(0.5, 0.5, "none", ha="center", va="center", transform=axes.transAxes)
        return
    low = min(all_values)
    high = max(all_values)
    if whole and high - low < 40:
        bins = np.arange(low, high + 2) - 0.5
    else:
        start = min(low, 0)
        bins = np.linspace(start, max(high, start + 1), 21)
    axes.hist(stacks, bins.tolist(), stacked=True, color=colors, rwidth=0.9)
