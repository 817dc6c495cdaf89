"""The staleness at which each algorithm fails, and the early metrics that predict it."""

import numpy as np
import pandas as pd
import scipy
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recjax.analysis.collect import axes_of
from recjax.analysis.compare import final, paired_seeds
from recjax.analysis.statistics import Estimate, estimate
from recjax.plots.curves import STYLES
from recjax.plots.style import COLORS, LABELS, add_legend, finish, new_figure, plain_ticks

INTERVALS = {"on_policy": 1, "interval_5": 5, "interval_20": 20, "interval_50": 50, "interval_100": 100}
EARLY = 50  # optimizer steps whose diagnostics are held against the end of the run
PREDICTORS = ("effective_sample_size", "ratio/q99", "ratio/q01", "behavior_kl/k3", "entropy")
BASE = "reinforce"
KEPT = 0.5  # an algorithm survives an interval if it keeps this share of its own on-policy gain


def accuracy_by_interval(table: pd.DataFrame) -> pd.DataFrame:
    """Final accuracy, mean over seeds: a row an algorithm, a column a sync_interval; and the start in column 0."""
    ends = final(table).groupby(["algorithm", "regime"], sort=False).mean().unstack("regime")
    ends = ends[list(INTERVALS)].rename(columns=INTERVALS).dropna()
    ends = ends.loc[[name for name in dict.fromkeys(table["algorithm"]) if name in ends.index]]
    start = table[table["step"] == 0]["evaluation/accuracy"].mean()
    ends.insert(0, 0, start)
    return ends


def survived(ends: pd.DataFrame) -> pd.Series:
    """The largest interval m up to which every one tried keeps half of the algorithm's own on-policy gain; 0: none."""
    needed = ends[0] + KEPT * (ends[1] - ends[0])
    kept = ends.drop(columns=0).ge(needed, axis=0)
    return kept.cumprod(axis=1).mul(kept.columns).max(axis=1).astype(int)


def foretelling(table: pd.DataFrame) -> pd.DataFrame:
    """Early diagnostics of every run with stale data, next to its final gain in accuracy."""
    off_policy = table[table["regime"].isin([name for name in INTERVALS if name != "on_policy"])]
    axes = axes_of(table)
    early = off_policy[(off_policy["step"] > 0) & (off_policy["step"] <= EARLY)]
    start = off_policy[off_policy["step"] == 0].set_index(axes)["evaluation/accuracy"]
    return early.groupby(axes, sort=False)[list(PREDICTORS)].mean().assign(gain=final(off_policy) - start)


def losing_share(runs: pd.DataFrame, low: float, high: float) -> tuple[int, int]:
    """Of the runs whose early effective sample size is in [low, high): how many lost accuracy, and their number."""
    chosen = runs[(runs["effective_sample_size"] >= low) & (runs["effective_sample_size"] < high)]
    return int((chosen["gain"] < 0).sum()), len(chosen)


def rank_correlations(runs: pd.DataFrame) -> pd.Series:
    """Spearman's correlation of each early diagnostic with the gain."""
    return pd.Series({name: float(scipy.stats.spearmanr(runs[name], runs["gain"]).statistic) for name in PREDICTORS})


def leads(table: pd.DataFrame) -> dict[str, dict[int, Estimate]]:
    """Final accuracy minus REINFORCE's with the same seed and sync_interval, of each algorithm by sync_interval.

    A single seed has no spread.
    """
    ends = final(table)
    found = {}
    for algorithm in accuracy_by_interval(table).index:
        if algorithm == BASE:
            continue
        found[algorithm] = {}
        for regime, interval in INTERVALS.items():
            differences = paired_seeds(ends, "algorithm", algorithm, BASE, regime=[regime])
            if len(differences) > 1:
                found[algorithm][interval] = estimate(differences)
            else:
                mean = float(differences.mean())
                found[algorithm][interval] = Estimate(mean, mean, mean, 1)
    return found


def draw_leads(axes: Axes, found: dict[str, dict[int, Estimate]], names: dict[str, str]) -> None:
    """A line an algorithm: means with their spread, next to each other so that equal lines do not hide each other."""
    places = np.arange(len(INTERVALS))
    width = 0.6 / len(found)
    for index, (algorithm, estimates) in enumerate(found.items()):
        at = places + (index - (len(found) - 1) / 2) * width
        line = {"color": COLORS[index % len(COLORS)], "ls": STYLES[index // len(COLORS)], "marker": "o", "ms": 4}
        means = [each.mean for each in estimates.values()]
        axes.plot(at, means, label=names.get(algorithm, algorithm), lw=1.2, **line)
        lows = [each.low for each in estimates.values()]
        highs = [each.high for each in estimates.values()]
        axes.vlines(at, lows, highs, color=line["color"], lw=0.8)
    axes.axhline(0, color="grey", lw=0.8)
    axes.set_xticks(places, [str(interval) for interval in INTERVALS.values()])
    axes.set_xlabel("sync_interval m (optimizer steps)")
    axes.set_ylabel(f"final held-out accuracy\nminus {names.get(BASE, BASE)}'s (share)")


def draw_staleness(table: pd.DataFrame, names: dict[str, str]) -> Figure:
    """Each algorithm's lead over REINFORCE by sync_interval; and gain over each early diagnostic, a dot a run."""
    runs, correlations = foretelling(table), rank_correlations(foretelling(table))
    figure = new_figure(7, 13, "")
    panels = figure.subplot_mosaic("AA;BC;DE;FG", height_ratios=[5, 3, 3, 3])
    draw_leads(panels["A"], leads(table), names)
    add_legend(figure, *panels["A"].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    for place, name in zip("BCDEF", PREDICTORS, strict=True):
        axes = panels[place]
        for shade, regime in enumerate(name for name in INTERVALS if name != "on_policy"):
            chosen = runs[runs.index.get_level_values("regime") == regime]
            axes.scatter(chosen[name], chosen["gain"], s=12, color=COLORS[shade], label=f"m = {INTERVALS[regime]}")
        axes.axhline(0, color="grey", lw=0.8)
        axes.set(xlabel=LABELS[name].replace("\n", " "), title=f"rank correlation {correlations[name]:+.2f}")
        axes.set_ylabel("accuracy gained by the end" if place in "BDF" else "")
        if name.startswith(("ratio", "behavior")):
            axes.set_xscale("log")
            plain_ticks(axes.xaxis)
    title = f"diagnostics: mean over steps 1–{EARLY}\na dot is a run with"
    panels["G"].legend(*panels["F"].get_legend_handles_labels(), loc="center", frameon=False, title=title)
    panels["G"].axis("off")
    return finish(figure)
