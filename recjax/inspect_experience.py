"""Says what is in an experience store: numbers, a picture, and a few random samples.

    python -m recjax.inspect_experience STORE [--figure FILE.png] [--samples N] [--seed S]

A group carries signal when its rewards differ: group-relative algorithms learn nothing from any other.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from absl import app, flags
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.table import Column, Table

from recjax.console import configure_logging
from recjax.experience.groups import groups_of, is_whole, reward_spread
from recjax.experience.store import Experience, read

matplotlib.use("Agg")
FLAGS = flags.FLAGS
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#F0E442", "#56B4E9", "#E69F00", "#000000"]
GREY = "#777777"


def length(row: Experience) -> int | None:
    """Tokens of a completion; None where they are not known."""
    return None if row.completion_tokens is None else len(row.completion_tokens)


def summary(rows: Sequence[Experience]) -> dict[str, str]:
    """What there is to say of rows, by name; a group is taken as the rows that are among them."""
    groups, scored = groups_of(rows), [row.reward for row in rows if row.reward is not None]
    sizes = [len(group.rows) for group in groups]
    whole = [group for group in groups if is_whole(group)]
    accurate = [row.accurate for row in rows if row.accurate is not None]
    versions = [row.policy_version for row in rows if row.policy_version is not None]
    lengths = [tokens for row in rows if (tokens := length(row)) is not None]
    return {
        "rows": str(len(rows)),
        "groups": str(len(groups)),
        "group size": _span(sizes),
        "pending rows": str(len(rows) - len(scored)),
        "groups with a pending row": str(len(groups) - len(whole)),
        "whole groups with signal": f"{sum(reward_spread(group) > 0 for group in whole)} of {len(whole)}",
        "groups of several sources": str(sum(len({row.source for row in group.rows}) > 1 for group in groups)),
        "reward": f"{np.mean(scored):.3f} ({min(scored):g} to {max(scored):g})" if scored else "none yet",
        "accurate": f"{np.mean(accurate):.3f}" if accurate else "not known",
        "policy versions": _span(versions) if versions else "none",
        "rows of other models": str(len(rows) - len(versions)),
        "with behaviour log-probs": str(sum(row.behaviour_logprobs is not None for row in rows)),
        "tokenised": str(len(lengths)),
        "completion tokens": f"{np.mean(lengths):.1f} ({_span(lengths)})" if lengths else "not known",
        "truncated": f"{np.mean([row.truncated for row in rows]):.3f}",
    }


def _span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def by_source(rows: Sequence[Experience]) -> dict[str, list[Experience]]:
    """The rows of each source, in the order of the sources' first rows."""
    sources: dict[str, list[Experience]] = {}
    for row in rows:
        sources.setdefault(row.source, []).append(row)
    return sources


def draw_figure(rows: Sequence[Experience], title: str, path: Path) -> None:
    """Rewards, signal, group sizes, policy versions, lengths and log-probs, by source, as a PNG."""
    sources, groups = by_source(rows), groups_of(rows)
    colours = [COLOURS[place % len(COLOURS)] for place in range(len(sources))]
    figure = Figure(figsize=(13, 6.5), layout="constrained")
    figure.suptitle(title)
    (rewards, signal, sizes), (versions, lengths, known) = figure.subplots(2, 3)

    def histogram(axes, values, label, whole, bars):
        """Stacked bars of one list of values for each of `bars`, their colours; values that are None are left out."""
        values = [[value for value in each if value is not None] for each in values]
        every = [value for each in values for value in each]
        if every:
            low, high = min(every), max(every)
            few = whole and high - low < 40
            bins = np.arange(low, high + 2) - 0.5 if few else np.linspace(min(low, 0), max(high, min(low, 0) + 1), 21)
            axes.hist(values, bins, stacked=True, color=bars, rwidth=0.9)
        else:
            axes.text(0.5, 0.5, "none", ha="center", va="center", transform=axes.transAxes)
        axes.set(xlabel=label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=whole))

    def per_source(value):
        return [[value(row) for row in members] for members in sources.values()]

    spreads, group_sizes = (
        [reward_spread(group) for group in groups if is_whole(group)],
        [len(each.rows) for each in groups],
    )
    histogram(rewards, per_source(lambda row: row.reward), "reward", False, colours)
    histogram(signal, [spreads], "highest − lowest reward of whole groups", False, [GREY])
    histogram(sizes, [group_sizes], "rows in a group", True, [GREY])
    histogram(versions, per_source(lambda row: row.policy_version), "policy version (updates)", True, colours)
    histogram(lengths, per_source(length), "completion tokens", True, colours)
    logprobs = per_source(
        lambda row: 0 if row.reward is None else 1 if row.behaviour_logprobs is None else 2  # places of the ticks
    )
    known.hist(logprobs, np.arange(4) - 0.5, stacked=True, color=colours, label=list(sources), rwidth=0.9)
    known.set_xticks([0, 1, 2], ["reward pending", "no behaviour\nlog-probs", "log-probs\nand reward"])
    for axes in (rewards, versions, lengths, known):
        axes.set(ylabel="rows")
    for axes in (signal, sizes):
        axes.set(ylabel="groups")
    for axes in figure.axes:
        axes.grid(alpha=0.3, axis="y")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=min(len(sources), 6), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def sampled(rows: Sequence[Experience], count: int, seed: int) -> list[Experience]:
    """`count` rows at random, or all if there are no more, in the store's order."""
    places = np.random.default_rng(seed).choice(len(rows), min(count, len(rows)), replace=False)
    return [rows[place] for place in sorted(places)]


def show(rows: Sequence[Experience], samples: Sequence[Experience], console: Console) -> None:
    """Prints numbers of all rows and of each source, and the samples."""
    sources = by_source(rows)
    columns = {"all": summary(rows)} | (
        {name: summary(each) for name, each in sources.items()} if len(sources) > 1 else {}
    )
    table = Table(Column("", no_wrap=True), *columns)
    for name in columns["all"]:
        table.add_row(name, *(column[name] for column in columns.values()))
    console.print(table)
    for row in samples:
        asked = row.prompt if row.messages is None else " / ".join(turn["content"] for turn in row.messages)
        reward = "pending" if row.reward is None else f"{row.reward:g}"
        console.print(f"{row.source} · {row.id} · reward {reward}", style="bold", markup=False, highlight=False)
        for text in (asked, row.completion):
            console.print(f"  {text[:400]!r}{'…' if len(text) > 400 else ''}", markup=False, highlight=False)


def main(argv: list[str]) -> None:
    """Reads the store and shows it."""
    configure_logging()
    try:
        if len(argv) != 2:
            raise ValueError("give one store: python -m recjax.inspect_experience STORE")
        rows = read(argv[1])
    except ValueError as error:
        sys.exit(f"error: {error}")
    show(rows, sampled(rows, FLAGS.samples, FLAGS.seed), Console())
    draw_figure(rows, f"{argv[1]}: {len(rows)} rows", Path(FLAGS.figure))
    print(f"figure: {FLAGS.figure}")


if __name__ == "__main__":
    # Not at the top: flags are global, and whoever imports this module has their own.
    flags.DEFINE_string("figure", "figures/experience.png", "Where the picture goes.")
    flags.DEFINE_integer("samples", 5, "Random rows to show.", lower_bound=0)
    flags.DEFINE_integer("seed", 0, "Of the random rows.")
    sys.modules["__main__"].__doc__ = __doc__
    app.run(main)
