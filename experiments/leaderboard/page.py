"""The pages of plan.yaml's two studies: docs/leaderboard.md, and docs/claims/regimes.md with its verdicts."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from experiments.claims.markdown import markdown_table
from experiments.claims.verdicts import Check, Claim, chance_text, surviving
from experiments.leaderboard import plan
from recjax.algorithms.presets import PRESETS
from recjax.analysis.compare import final
from recjax.analysis.statistics import MIN_SEEDS, Estimate, estimate
from recjax.plots.style import COLORS, GREY, add_legend, finish, new_figure, save_figure

HERE = Path(__file__).parent
DOCS = HERE.parent.parent / "docs"
ERRORS = HERE / "errors.json"  # why the runs of a cell ended early, by "method__column"
TITLES = {name: column["title"] for name, column in plan.COLUMNS.items()}
BOARD_COLUMNS = plan.PLAN["leaderboard"]["columns"]
NOT_RUN = "not run"
NO_RUN = "No run yet.\n"
DEEPEST = 0.3  # shortfalls from a column's best above this have the darkest color
SUBJECTS = {  # the checks of the study of regimes as nouns
    ("reinforce", "fresh"): "the cost of the data to REINFORCE",
    ("rec_one_side_nois", "reinforce"): "the gain of the clip over REINFORCE",
    ("rec_one_side_is", "rec_one_side_nois"): "that a weight next to the clip changes little",
    ("grpo", "rec_one_side_is"): "that GRPO ends like the clip with a weight",
    ("opmd", "reinforce"): "the gain of OPMD over REINFORCE",
    ("red_weight", "reinforce"): "the gain of RED-Weight over REINFORCE",
}
AGE = "age50"  # the column with which paragraphs compare
VERDICTS = ("holds", "holds alone", "not visible at this scale", "does not hold here")  # in the paragraphs' order
OUTCOMES = {"as claimed": (COLORS[2], "as expected"), "contrary": (COLORS[1], "contrary"), "undecided": (GREY, "open")}

Place = tuple[str, str, str]  # first, second, column


class Board(NamedTuple):
    """The leaderboard's numbers, methods in order of their mean rank.

    means: final held-out accuracy, a row a method, a column a column of the board; NaN where it was not run.
    half_widths: half of the 95 % interval over seeds; NaN under MIN_SEEDS seeds.
    ties: True where the paired difference to the column's best method has an interval that contains 0.
    ranked: the columns of the mean ranks, see `ranked_columns`.
    ranks: mean over seeds of a method's rank, which is a mean over those of the ranked columns in which it ran.
    groups: number of the group, from 1; see `groups_of`.
    seeds: number of seeds of each cell.
    """

    means: pd.DataFrame
    half_widths: pd.DataFrame
    ties: pd.DataFrame
    ranked: list[str]
    ranks: dict[str, Estimate]
    groups: dict[str, int]
    seeds: pd.DataFrame


def ends_of(table: pd.DataFrame) -> pd.Series:
    """Final accuracy by method, column and seed, without pilot seeds; the mean of the last three evaluations."""
    ends = final(table).reorder_levels(plan.AXES)
    is_verdict = ends.index.get_level_values("seed").astype(int) != plan.PLAN["pilot_seed"]
    return ends[is_verdict].droplevel("rate")


def board_of(ends: pd.Series) -> Board:
    """The leaderboard.

    Args:
        ends: see `ends_of`.
    """
    planned = [str(seed) for seed in range(plan.PLAN["leaderboard"]["seeds"])]
    is_planned = ends.index.get_level_values("seed").isin(planned)
    ends = ends[is_planned & ends.index.get_level_values("column").isin(BOARD_COLUMNS)]
    by_seed = ends.unstack("seed").reindex(columns=planned)
    means = by_seed.mean(axis=1).unstack("column").reindex(columns=BOARD_COLUMNS)
    seeds = by_seed.count(axis=1).unstack("column").reindex(columns=BOARD_COLUMNS).fillna(0).astype(int)
    half_widths = by_seed.apply(_half_width, axis=1).unstack("column").reindex(columns=BOARD_COLUMNS)
    ties = pd.DataFrame(False, index=means.index, columns=means.columns)
    for column in means.columns:
        compared = means[column][seeds[column] >= MIN_SEEDS]
        if compared.empty:
            continue
        best = by_seed.loc[(compared.idxmax(), column)]
        for method in compared.index:
            differences = (best - by_seed.loc[(method, column)]).dropna().to_numpy()
            ties.loc[method, column] = len(differences) >= MIN_SEEDS and estimate(differences).low <= 0
    ranked = ranked_columns(means)
    is_ranked = ends.index.get_level_values("column").isin(ranked)
    places = ends[is_ranked].groupby(level=["column", "seed"]).rank(ascending=False)
    ranks = {method: _rank(places.xs(method, level="method")) for method in means.index}
    order = sorted(means.index, key=lambda method: ranks[method].mean)
    groups = groups_of(places, order)
    return Board(means.loc[order], half_widths.loc[order], ties.loc[order], ranked, ranks, groups, seeds.loc[order])


def ranked_columns(means: pd.DataFrame) -> list[str]:
    """The columns in which all methods ran that can: places among other numbers of methods would not be comparable.

    Without such a column, all columns.

    Args:
        means: a row a method, a column a column of the board; NaN where it was not run.
    """
    whole = []
    for column in means.columns:
        absent = means.index[means[column].isna()]
        if all(name in PRESETS and plan.refusal(plan.preset(name), column) for name in absent):
            whole.append(column)
    return whole or list(means.columns)


def _half_width(values: pd.Series) -> float:
    known = values.dropna().to_numpy()
    if len(known) < MIN_SEEDS:
        return np.nan
    found = estimate(known)
    return (found.high - found.low) / 2


def _rank(places: pd.Series) -> Estimate:
    """A method's mean rank with its interval over seeds, from its places by column and seed."""
    by_seed = places.groupby(level="seed").mean().to_numpy()
    if len(by_seed) < 2:
        return Estimate(by_seed[0], by_seed[0], by_seed[0], 1)
    return estimate(by_seed)


def groups_of(places: pd.Series, order: Sequence[str]) -> dict[str, int]:
    """The number of each method's group, from 1.

    The best method begins the first group. A method begins a new one if its mean rank is visibly worse than that of
    its group's first: the interval of the difference, paired by seed in the columns of both, is above 0.

    Args:
        places: rank by method, column and seed.
        order: methods from the best mean rank to the worst.
    """
    groups: dict[str, int] = {}
    number = 0
    first = None
    for method in order:
        own = places.xs(method, level="method")
        if first is not None:
            behind = (own - first).dropna().groupby(level="seed").mean().to_numpy()
        if first is None or (len(behind) >= MIN_SEEDS and estimate(behind).low > 0):
            number += 1
            first = own
        groups[method] = number
    return groups


def board_table(board: Board) -> str:
    """The board in Markdown: rank, method, one column each; bold where a method ties with the column's best."""
    rows = []
    for number, method in enumerate(board.means.index, 1):
        cells = []
        for column in BOARD_COLUMNS:
            mean = board.means.loc[method, column]
            if np.isnan(mean):
                cells.append("–")
                continue
            width = board.half_widths.loc[method, column]
            text = f"{mean:.3f}"
            if np.isnan(width):
                text += f" ({board.seeds.loc[method, column]} seeds)"
            else:
                text += f" ± {width:.3f}"
            cells.append(f"**{text}**" if board.ties.loc[method, column] else text)
        rank = board.ranks[method]
        rank_text = f"{rank.mean:.1f} ({rank.low:.1f} to {rank.high:.1f})"
        rows.append([str(number), f"`{method}`", str(board.groups[method]), rank_text, *cells])
    return markdown_table(["", "preset", "group", "mean rank", *(TITLES[column] for column in BOARD_COLUMNS)], rows)


def board_text(table: pd.DataFrame) -> str:
    """The board of a table as text for a terminal."""
    return board_table(board_of(ends_of(table)))


def rates_table(table: pd.DataFrame, methods: Sequence[str]) -> str:
    """A row a method: the option that makes its row, and the rate of its seeds in each column."""
    rows_of_seeds = table[table["seed"] != str(plan.PLAN["pilot_seed"])]
    rates = rows_of_seeds.groupby(["method", "column"])["rate"].first()
    rows = []
    for method in methods:
        chosen = [rates.get((method, column)) for column in BOARD_COLUMNS]
        cells = ["–" if rate is None else f"{float(rate):g}" for rate in chosen]
        rows.append([f"`--preset {method}`", *cells])
    return markdown_table(["option", *(TITLES[column] for column in BOARD_COLUMNS)], rows)


def gaps_text(board: Board, errors: Mapping[str, str]) -> str:
    """Why methods of the board have no number in a column, a line a reason.

    Args:
        errors: see ERRORS.
    """
    columns: dict[tuple[str, str], list[str]] = {}
    for method in board.means.index:
        for column in BOARD_COLUMNS:
            if not np.isnan(board.means.loc[method, column]):
                continue
            refusal = plan.refusal(plan.preset(method), column)
            reason = refusal or errors.get(f"{method}__{column}", NOT_RUN)
            columns.setdefault((method, reason), []).append(TITLES[column])
    lines = [f"- `{method}`, {', '.join(names)}: {reason}" for (method, reason), names in columns.items()]
    return "\n".join(lines) + "\n" if lines else "Every preset of the board ran in every column.\n"


def draw_board(board: Board) -> Figure:
    """Mean ranks with intervals, and shortfalls from each column's best as colors; lines end groups."""
    count = len(board.means)
    figure = new_figure(max(6.0, 1.8 + 0.17 * count), 5.4, "")
    upper, lower = figure.subplots(2, sharex=True, height_ratios=[1.2, 1])
    places = np.arange(count)
    found = [board.ranks[method] for method in board.means.index]
    upper.vlines(places, [rank.low for rank in found], [rank.high for rank in found], color=COLORS[0], lw=2)
    upper.plot(places, [rank.mean for rank in found], "o", color=COLORS[0], ms=4)
    upper.set_ylabel("mean rank, 1 is best", fontsize=9)
    upper.invert_yaxis()
    finish(figure)
    shortfalls = (board.means.max() - board.means).T.to_numpy()
    image = lower.imshow(shortfalls, aspect="auto", cmap="viridis_r", vmin=0, vmax=DEEPEST)
    rows, columns = np.nonzero(board.ties.T.to_numpy())
    lower.plot(columns, rows, ".", color="black", ms=3)
    lower.grid(False)
    lower.set_yticks(range(len(BOARD_COLUMNS)), [TITLES[column] for column in BOARD_COLUMNS], fontsize=8)
    lower.set_xticks(places, list(board.means.index), rotation=90, fontsize=7)
    numbers = [board.groups[method] for method in board.means.index]
    for place in places[1:]:
        if numbers[place] != numbers[place - 1]:
            upper.axvline(place - 0.5, color="black", lw=0.8)
            lower.axvline(place - 0.5, color="white", lw=1.5)
    bar = figure.colorbar(image, ax=lower, extend="max", pad=0.01)
    bar.set_label("accuracy below\nthe column's best", fontsize=8)
    return figure


def checks_of(ends: pd.Series) -> dict[Place, Check | None]:
    """Every check of the study of regimes in every column, made or not."""
    study = plan.PLAN["regimes"]
    found: dict[Place, Check | None] = {}
    for check in study["checks"]:
        for column in study["columns"]:
            if column == plan.FRESH:
                continue
            first, second = check["first"], check["second"]
            compared = (first, plan.FRESH) if second == plan.FRESH else (second, column)
            made = _difference(ends, (first, column), compared)
            what = f"{first} − {second}: {column}"
            found[first, second, column] = made and Check(what, check["expected"], study["margin"], made)
    return found


def _difference(ends: pd.Series, first: tuple[str, str], second: tuple[str, str]) -> Estimate | None:
    """The difference of two cells over the seeds that both have; None with fewer than two."""
    known = ends.index.droplevel("seed").unique()
    if first not in known or second not in known:
        return None
    differences = (ends.xs(first, level=["method", "column"]) - ends.xs(second, level=["method", "column"])).dropna()
    return estimate(differences.to_numpy()) if len(differences) > 1 else None


def check_name(first: str, second: str) -> str:
    """A check in words."""
    if second == plan.FRESH:
        return f"`{first}` − `{first}` with fresh samples"
    return f"`{first}` − `{second}`"


def verdicts_of(found: Mapping[Place, Check | None]) -> dict[Place, str]:
    """The verdict of each check that was made, with Holm's correction for all of them."""
    made = {place: check for place, check in found.items() if check is not None}
    words = {}
    for (place, check), survives in zip(made.items(), surviving([*made.values()]), strict=True):
        words[place] = Claim("", (), [check]).verdict
        if words[place] == "holds" and not survives:
            words[place] = "holds alone"
    return words


def verdicts_table(found: Mapping[Place, Check | None]) -> str:
    """A row a column of the study, a column a check: mean difference, interval and verdict."""
    study = plan.PLAN["regimes"]
    verdicts = verdicts_of(found)
    pairs = [(check["first"], check["second"]) for check in study["checks"]]
    rows = []
    for column in study["columns"]:
        if column == plan.FRESH:
            continue
        cells = []
        for pair in pairs:
            check = found[(*pair, column)]
            if check is None:
                cells.append(NOT_RUN)
                continue
            numbers = f"{check.found.mean:+.3f} ({check.found.low:+.3f} to {check.found.high:+.3f})"
            cells.append(f"{numbers.replace('-', '−')}, {verdicts[(*pair, column)]}")
        rows.append([TITLES[column], *cells])
    return markdown_table(["data", *(check_name(*pair) for pair in pairs)], rows)


def summary() -> str:
    """What the study of regimes found, in words that its template has."""
    template = (HERE / "regimes.md").read_text(encoding="utf-8")
    return template.partition("## What was found")[2].partition("{{paragraphs}}")[0].strip()


def paragraphs(found: Mapping[Place, Check | None]) -> str:
    """A paragraph for each regime: what holds, what does not, and how many verdicts are those of AGE."""
    study = plan.PLAN["regimes"]
    verdicts = verdicts_of(found)
    pairs = [(check["first"], check["second"]) for check in study["checks"]]
    texts = []
    for column in study["columns"]:
        by_verdict: dict[str, list[str]] = {}
        agreeing = 0
        compared = 0
        for pair in pairs:
            check = found.get((*pair, column))
            if check is None:
                continue
            words = verdicts[(*pair, column)]
            number = f"{check.found.mean:+.3f}".replace("-", "−")
            by_verdict.setdefault(words, []).append(f"{SUBJECTS[pair]} ({number})")
            aged = verdicts.get((*pair, AGE))
            if aged is not None:
                compared += 1
                agreeing += words.removesuffix(" alone") == aged.removesuffix(" alone")
        if not by_verdict:
            continue
        title = TITLES[column]
        words_made = [words for words in VERDICTS if words in by_verdict]
        words_made += [words for words in by_verdict if words not in VERDICTS]  # of too few seeds
        sentences = [f"{words.capitalize()}: {', '.join(by_verdict[words])}." for words in words_made]
        if compared and column != AGE:
            sentences.append(f"{agreeing} of {compared} verdicts are those of {TITLES[AGE]}.")
        texts.append(f"**{title[0].upper()}{title[1:]}.** {' '.join(sentences)}\n")
    return "\n".join(texts)


def draw_regimes(found: Mapping[Place, Check | None]) -> Figure:
    """The difference of each check with its interval, a row a regime; the ages stand on gray."""
    study = plan.PLAN["regimes"]
    columns = [column for column in study["columns"] if column != plan.FRESH]
    ages = [place for place, column in enumerate(columns) if column.startswith("age")]
    figure = new_figure(11, 4.6, "")
    panels = figure.subplots(1, len(study["checks"]), sharey=True)
    for axes, check in zip(panels, study["checks"], strict=True):
        axes.axvline(0, color="black", lw=0.8)
        if ages:
            axes.axhspan(ages[0] - 0.5, ages[-1] + 0.5, color="#EEEEEE", zorder=0)
        if check["expected"] == "alike":
            for edge in (-study["margin"], study["margin"]):
                axes.axvline(edge, color="black", lw=0.8, ls=":")
        for place, column in enumerate(columns):
            made = found[check["first"], check["second"], column]
            if made is None:
                continue
            color, _ = OUTCOMES[made.outcome]
            axes.hlines(place, made.found.low, made.found.high, color=color, lw=2)
            axes.plot(made.found.mean, place, "o", color=color, ms=4)
        name = "fresh samples" if check["second"] == plan.FRESH else check["second"]
        axes.set_title(f"{check['first']}\n− {name}", fontsize=8)
    panels[0].set_yticks(range(len(columns)), [TITLES[column] for column in columns], fontsize=8)
    panels[0].set_ylim(len(columns) - 0.5, -0.5)
    figure.supxlabel("difference in final held-out accuracy; dotted lines: margin of ‘alike’", fontsize=9)
    entries = [Patch(color=color, label=label) for color, label in OUTCOMES.values()]
    add_legend(figure, handles=entries, loc="outside upper center", ncols=len(entries))
    return finish(figure)


def planned_runs(study: str) -> int:
    """Number of runs that a study plans, pilots among them."""
    planned = plan.PLAN[study]
    cells = plan.cells_of(plan.methods_of(study), planned["columns"])
    return len(cells) * (len(plan.PLAN["rates"]) + planned["seeds"])


def made_runs(study: str, table: pd.DataFrame) -> int:
    """Number of a study's runs that are in a table."""
    planned = plan.PLAN[study]
    methods = [method.name for method in plan.methods_of(study)]
    rows = table[table["method"].isin(methods) & table["column"].isin(planned["columns"])]
    seeds = [str(seed) for seed in (plan.PLAN["pilot_seed"], *range(planned["seeds"]))]
    return len(rows[rows["seed"].isin(seeds)].drop_duplicates(plan.AXES))


def read_errors() -> dict[str, str]:
    """The committed errors; see ERRORS."""
    return json.loads(ERRORS.read_text(encoding="utf-8")) if ERRORS.exists() else {}


def write_pages(table: pd.DataFrame) -> None:
    """Both pages with their figures, from their templates here."""
    parts = {}
    for study in plan.STUDIES:
        parts[f"{study}_made"] = str(made_runs(study, table) if len(table) else 0)
        parts[f"{study}_planned"] = str(planned_runs(study))
    left_out = plan.PLAN["leaderboard"]["left_out"]
    parts["left_out"] = "; ".join(f"`{name}`: {why}" for name, why in left_out.items())
    parts |= dict.fromkeys(("board", "verdicts"), NO_RUN)
    parts |= dict.fromkeys(("board_figure", "ranked", "rates", "gaps", "verdicts_figure", "paragraphs", "chance"), "")
    if len(table):
        ends = ends_of(table)
        board = board_of(ends)
        parts["board"] = board_table(board)
        parts["ranked"] = ", ".join(TITLES[column] for column in board.ranked)
        parts["rates"] = rates_table(table, list(board.means.index))
        parts["gaps"] = gaps_text(board, read_errors())
        figure = draw_board(board)
        figure.savefig(DOCS / "leaderboard.png", dpi=110)
        parts["board_figure"] = "![Mean ranks with intervals, and accuracies by column](leaderboard.png)\n"
        found = checks_of(ends)
        if any(found.values()):
            parts["verdicts"] = verdicts_table(found)
            parts["paragraphs"] = paragraphs(found)
            parts["chance"] = chance_text([check for check in found.values() if check], len(found))
            save_figure(draw_regimes(found), DOCS / "claims" / "regimes.png")
            parts["verdicts_figure"] = "![Differences with intervals in each regime](regimes.png)\n"
    for template, page in (("board.md", DOCS / "leaderboard.md"), ("regimes.md", DOCS / "claims" / "regimes.md")):
        text = (HERE / template).read_text(encoding="utf-8")
        for key, value in parts.items():
            text = text.replace(f"{{{{{key}}}}}", value)
        page.write_text(text, encoding="utf-8")
