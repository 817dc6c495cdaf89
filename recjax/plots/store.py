"""The picture of an experience store: rewards, signal, group sizes, policy versions, lengths and log-probs."""

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
    names = dict.fromkeys(record.completion.source for record in records)
    return {name: [record for record in records if record.completion.source == name] for name in names}


def length(completion: Completion) -> int | None:
    """Number of tokens of a completion; None if unknown."""
    return sum(len(row.tokens) for row in completion.rows) if completion.rows else None


def has_logprobs(completion: Completion) -> bool:
    """True if the behavior log-probs of a completion are known."""
    return bool(completion.rows) and all(row.behavior_logprobs is not None for row in completion.rows)


def draw_store(records: Sequence[Record], title: str, path: Path) -> None:
    """Writes a PNG with bars stacked by source; bars about groups are not split."""
    sources = by_source(records)
    groups = groups_of(records)
    colors = [COLORS[index % len(COLORS)] for index in range(len(sources))]
    figure = new_figure(13, 6.5, title)
    (rewards, signal, sizes), (versions, lengths, known) = figure.subplots(2, 3)

    def per_source(value: Callable[[Completion], Any]) -> list[list]:
        return [[value(record.completion) for record in members] for members in sources.values()]

    def knowledge(completion: Completion) -> int:
        """A position on the last panel's axis."""
        return 0 if completion.grade is None else 2 if has_logprobs(completion) else 1

    def reward_of(completion: Completion) -> float | None:
        return None if completion.grade is None else completion.grade.reward

    spreads = [reward_spread(group) for group in groups if is_whole(group)]
    _histogram(rewards, "reward", per_source(reward_of), colors, whole=False)
    _histogram(signal, "highest − lowest reward of whole groups", [spreads], [GREY], whole=False)
    _histogram(sizes, "rows in a group", [[len(group.completions) for group in groups]], [GREY])
    _histogram(versions, "policy version (updates)", per_source(lambda completion: completion.policy_version), colors)
    _histogram(lengths, "completion tokens", per_source(length), colors)
    known.hist(per_source(knowledge), np.arange(4) - 0.5, stacked=True, color=colors, label=list(sources), rwidth=0.9)
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
    low = min(every)
    high = max(every)
    few = whole and high - low < 40
    bins = np.arange(low, high + 2) - 0.5 if few else np.linspace(min(low, 0), max(high, min(low, 0) + 1), 21)
    axes.hist(values, bins.tolist(), stacked=True, color=colors, rwidth=0.9)
