"""What the map has to show: heat maps, each algorithm's best rates, and the claims under three readings."""

import re
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.claims.markdown import markdown_table
from experiments.claims.readings import (
    OFF_POLICY,
    READINGS,
    REGIMES,
    STALE,
    THRESHOLD,
    best_of,
    claims,
    edge_rate,
    forecasts,
    foretold,
    rates_of,
    read,
)
from experiments.claims.staleness import EARLY
from experiments.claims.verdicts import MARGIN, Claim, fallen
from recjax.analysis.collect import axes_of
from recjax.analysis.compare import final
from recjax.plots.style import new_figure

SHORT = {
    "on_policy": "on-policy",
    "interval_5": "m = 5",
    "interval_20": "m = 20",
    "interval_50": "m = 50",
    "offset_10": "n = 10",
    "offline": "offline",
}
NO_VERDICTS = "Ranges need a second seed, and verdicts need six.\n"


def draw_map(table: pd.DataFrame, names: dict[str, str]) -> Figure:
    """Final accuracies: a panel an algorithm, rates across, regimes down; an arrow marks cells that fell by MARGIN."""
    cells = ["algorithm", "regime", "rate"]
    return draw_cells(
        final(table).groupby(cells).mean(),
        fallen(table).groupby(cells).mean(),
        {algorithm: names[algorithm] for algorithm in dict.fromkeys(table["algorithm"])},
        Side({rate: rate for rate in rates_of(table)}, "learning rate"),
        Side({regime: SHORT[regime] for regime in REGIMES}),
    )


class Side(NamedTuple):
    """A side of the panels: the settings with their names in the figure, and a label."""

    names: dict[str, str]
    label: str = ""


def draw_cells(
    means: pd.Series,
    falls: pd.Series,
    names: dict[str, str],
    across: Side,
    down: Side,
    measured: str = "",
    lowest: float = 0.0,
) -> Figure:
    """Numbers of runs up to 1: a panel an algorithm, a cell a mean; an arrow marks cells that fell by MARGIN.

    Args:
        means, falls: by algorithm, and settings of `down` and `across`.
        names: the algorithms, in their order, with their names in the figure.
        measured: name of the numbers; "": final accuracy.
        lowest: number with the darkest color.
    """
    algorithms = list(names)
    columns = 1 if len(algorithms) <= 4 else 2
    rows = -(-len(algorithms) // columns)
    height = 0.7 + rows * (0.46 + 0.29 * len(down.names))
    title = measured or "Final accuracy (↓: ends below its best evaluation)"
    figure = new_figure(1.8 + 4.4 * columns, height, title)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes, algorithm in zip(panels.flat, algorithms, strict=False):
        grid, fell = (
            of.loc[algorithm].unstack().reindex([*down.names], columns=[*across.names]).to_numpy()
            for of in (means, falls)
        )
        image = axes.imshow(grid, vmin=lowest, vmax=1, cmap="viridis", aspect="auto")
        for (row, column), value in np.ndenumerate(grid):
            text = "–" if np.isnan(value) else f"{value:.2f}".removeprefix("0")
            text += "↓" if fell[row, column] > MARGIN else ""
            is_light = np.isnan(value) or value > lowest + 0.6 * (1 - lowest)
            axes.text(column, row, text, ha="center", va="center", fontsize=9, color="black" if is_light else "white")
        axes.set_title(names[algorithm], fontsize=10)
        axes.set_xticks(range(len(across.names)), across.names.values(), fontsize=9)
        axes.set_yticks(range(len(down.names)), down.names.values(), fontsize=9)
    for axes in panels.flat[len(algorithms) :]:
        axes.set_visible(False)
    figure.supxlabel(across.label, fontsize=10)
    figure.colorbar(image, ax=panels, label=measured or "held-out accuracy (share)", shrink=0.6)
    return figure


def best_rows(table: pd.DataFrame, names: dict[str, str]) -> list[list[str]]:
    """Of each algorithm and regime the best rate, the accuracy there, and the span of rates that are as good."""
    ends, rates, rows = final(table), rates_of(table), []
    for algorithm in dict.fromkeys(table["algorithm"]):
        row = [names[algorithm]]
        for regime in REGIMES:
            of_regime = ends[ends.index.get_level_values("regime") == regime]
            if algorithm not in of_regime.index.get_level_values("algorithm"):
                row.append("–")
                continue
            best = best_of(of_regime.xs(algorithm, level="algorithm"), rates)
            span = "" if best.slowest == best.fastest else f" ({best.slowest} to {best.fastest})"
            row.append(f"{best.accuracy:.3f} ({best.lowest:.3f}–{best.highest:.3f}) at {best.rate}{span}")
        rows.append(row)
    return rows


def parts(table: pd.DataFrame, names: dict[str, str]) -> dict[str, str]:
    """What the page says of the map, by the names of its places."""
    best = markdown_table(["", *(SHORT[regime] for regime in REGIMES)], best_rows(table, names))
    verdicts, numbers = readings_text(table, names)
    return {
        "map_best": best,
        "map_verdicts": verdicts,
        "map_numbers": numbers,
        "map_foretelling": foretelling_text(table),
        "map_missed": missed_text(table),
        "map_edge": edge_rate(table),
        "map_runs": str(len(final(table))),
        "map_seeds": str(table["seed"].nunique()),
    }


def readings_text(table: pd.DataFrame, names: dict[str, str]) -> tuple[str, str]:
    """The claims' verdicts under the three readings, and their numbers; with one seed there are none."""
    if table["seed"].nunique() < 2:
        return NO_VERDICTS, ""
    found = {reading: claims(of_reading) for reading, of_reading in read(table).items()}
    verdicts = [
        [name, claim.text, *(found[reading][name].verdict for reading in READINGS)]
        for name, claim in found["edge"].items()
    ]
    shown = [heading.format(edge=edge_rate(table)) for heading in READINGS.values()]
    numbers = markdown_table(["", "number", "as claimed if", *shown], check_rows(found, names))
    return markdown_table(["", "claim", *shown], verdicts), numbers


def check_rows(found: dict[str, dict[str, Claim]], names: dict[str, str]) -> list[list[str]]:
    """Every number of every claim: what it is, and its mean, interval and outcome under each reading.

    Args:
        found: claims by reading.
    """
    rows = []
    for name in found["edge"]:
        for number, check in enumerate(found["edge"][name].checks):
            row = [name, in_words(check.what, names), check.claimed]
            for reading in READINGS:
                own = found[reading][name].checks[number]
                row.append(f"{own.found.mean:+.3f} ({own.found.low:+.3f} to {own.found.high:+.3f}): {own.shown}")
            rows.append(row)
    return rows


def in_words(what: str, names: dict[str, str]) -> str:
    """A number's description with algorithms and regimes as the page calls them."""
    for regimes, shown in ((REGIMES, "all regimes"), (OFF_POLICY, "off-policy"), (STALE, "m = 5, 20, 50, n = 10")):
        what = what.replace(", ".join(regimes), shown)
    known = names | SHORT
    return re.sub(r"\w+", lambda word: known.get(word[0], word[0]), what.replace("all of ", ""))


def foretelling_text(table: pd.DataFrame) -> str:
    """A sentence on the predictions of the early effective sample size."""
    told = foretold(table)
    return (
        f"{told.hits + told.misses} of {sum(told)} off-policy runs ended below their start. An effective sample size "
        f"below {THRESHOLD} in the first 50 steps predicted {told.hits} and missed {told.misses}. It raised "
        f"{told.false_alarms} false alarms. It raised no alarm for the remaining {told.rightly_quiet} runs."
    )


def missed_text(table: pd.DataFrame) -> str:
    """A sentence on the lost runs without an alarm of the early effective sample size."""
    told = forecasts(table)
    missed = told[told["lost"] & ~told["alarmed"]].reset_index()
    fastest = missed["rate"] == rates_of(table)[-1]
    like_on_policy = fastest & (missed["regime"] == "interval_5")
    unclipped = ~fastest & missed["algorithm"].isin(["reinforce", "red_drop"])
    lowest = table[table["step"] > EARLY].groupby(axes_of(table))["effective_sample_size"].min()
    later = lowest.reindex(pd.MultiIndex.from_frame(missed.loc[unclipped, axes_of(table)])) < THRESHOLD
    return (
        f"The alarm has {len(missed)} misses. {like_on_policy.sum()} are at {rates_of(table)[-1]} with m = 5. There "
        "every algorithm falls on-policy too, so stale data is not the cause. "
        f"{unclipped.sum()} are runs of REINFORCE and RED-Drop at lower rates; the sample size of {later.sum()} runs "
        f"falls below {THRESHOLD} after step {EARLY}."
    )
