"""The pages of plan.yaml's two studies: docs/leaderboard.md, and docs/claims/regimes.md with its verdicts."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.claims.markdown import markdown_table
from experiments.claims.verdicts import Check, Claim, chance_text, surviving
from experiments.leaderboard import plan
from recjax.analysis.compare import final
from recjax.analysis.statistics import MIN_SEEDS, Estimate, estimate
from recjax.plots.style import COLORS, finish, new_figure, save_figure

HERE = Path(__file__).parent
DOCS = HERE.parent.parent / "docs"
TITLES = {name: column["title"] for name, column in plan.COLUMNS.items()}
BOARD_COLUMNS = plan.PLAN["leaderboard"]["columns"]
NOT_RUN = "not run"

Place = tuple[str, str, str]  # first, second, column


class Board(NamedTuple):
    """The leaderboard's numbers, methods in order of their mean rank.

    means: final held-out accuracy, a row a method, a column a column of the board; NaN where it was not run.
    half_widths: half of the 95 % interval over seeds; NaN under MIN_SEEDS seeds.
    ties: True where the paired difference to the column's best method has an interval that contains 0.
    mean_rank: mean over the columns in which a method ran of its rank there.
    seeds: number of seeds of each cell.
    """

    means: pd.DataFrame
    half_widths: pd.DataFrame
    ties: pd.DataFrame
    mean_rank: pd.Series
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
    ends = ends[ends.index.get_level_values("column").isin(BOARD_COLUMNS)]
    by_seed = ends.unstack("seed")
    planned = [str(seed) for seed in range(plan.PLAN["leaderboard"]["seeds"])]
    by_seed = by_seed.reindex(columns=planned)
    means = by_seed.mean(axis=1).unstack("column").reindex(columns=BOARD_COLUMNS)
    seeds = by_seed.count(axis=1).unstack("column").reindex(columns=BOARD_COLUMNS).fillna(0).astype(int)
    half_widths = by_seed.apply(_half_width, axis=1).unstack("column").reindex(columns=BOARD_COLUMNS)
    ties = pd.DataFrame(False, index=means.index, columns=means.columns)
    for column in means.columns:
        if means[column].isna().all():
            continue
        best = by_seed.loc[(means[column].idxmax(), column)]
        for method in means.index[means[column].notna()]:
            differences = (best - by_seed.loc[(method, column)]).dropna().to_numpy()
            ties.loc[method, column] = len(differences) < MIN_SEEDS or estimate(differences).low <= 0
    mean_rank = means.rank(ascending=False).mean(axis=1)
    order = mean_rank.sort_values(kind="stable").index
    return Board(means.loc[order], half_widths.loc[order], ties.loc[order], mean_rank.loc[order], seeds.loc[order])


def _half_width(values: pd.Series) -> float:
    known = values.dropna().to_numpy()
    if len(known) < MIN_SEEDS:
        return np.nan
    found = estimate(known)
    return (found.high - found.low) / 2


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
        rows.append([str(number), f"`{method}`", f"{board.mean_rank[method]:.1f}", *cells])
    return markdown_table(["", "preset", "mean rank", *(TITLES[column] for column in BOARD_COLUMNS)], rows)


def board_text(table: pd.DataFrame) -> str:
    """The board of a table as text for a terminal."""
    return board_table(board_of(ends_of(table)))


def draw_board(board: Board) -> Figure:
    """Final accuracies as colors, methods in order of their mean rank, so that groups stand out."""
    count = len(board.means)
    figure = new_figure(8, 1.5 + 0.2 * count, "")
    axes = figure.subplots()
    image = axes.imshow(board.means.to_numpy(), aspect="auto", cmap="viridis")
    axes.set_xticks(range(len(BOARD_COLUMNS)), [TITLES[column] for column in BOARD_COLUMNS], rotation=20, ha="right")
    axes.set_yticks(range(count), list(board.means.index), fontsize=8)
    middle = np.nanmean([image.norm.vmin, image.norm.vmax])
    for row, method in enumerate(board.means.index):
        for place, column in enumerate(BOARD_COLUMNS):
            mean = board.means.loc[method, column]
            if not np.isnan(mean):
                color = "white" if mean < middle else "black"
                axes.text(place, row, f"{mean:.2f}", ha="center", va="center", fontsize=7, color=color)
    figure.colorbar(image, ax=axes, label="final held-out accuracy", shrink=0.5)
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


def verdicts_table(found: Mapping[Place, Check | None]) -> str:
    """A row a column of the study, a column a check: mean difference, interval and verdict."""
    study = plan.PLAN["regimes"]
    made = {place: check for place, check in found.items() if check is not None}
    holds = dict(zip(made, surviving([*made.values()]), strict=True))
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
            words = Claim("", (), [check]).verdict
            if words == "holds" and not holds[(*pair, column)]:
                words = "holds alone"
            numbers = f"{check.found.mean:+.3f} ({check.found.low:+.3f} to {check.found.high:+.3f})"
            cells.append(f"{numbers.replace('-', '−')}, {words}")
        rows.append([TITLES[column], *cells])
    return markdown_table(["data", *(check_name(*pair) for pair in pairs)], rows)


def draw_regimes(found: Mapping[Place, Check | None]) -> Figure:
    """The difference of each check with its interval, a row a regime."""
    study = plan.PLAN["regimes"]
    columns = [column for column in study["columns"] if column != plan.FRESH]
    figure = new_figure(11, 4.2, "")
    panels = figure.subplots(1, len(study["checks"]), sharey=True)
    for axes, check in zip(panels, study["checks"], strict=True):
        axes.axvline(0, color="black", lw=0.8)
        for place, column in enumerate(columns):
            made = found[check["first"], check["second"], column]
            if made is not None:
                axes.hlines(place, made.found.low, made.found.high, color=COLORS[0], lw=2)
                axes.plot(made.found.mean, place, "o", color=COLORS[0], ms=4)
        name = "fresh samples" if check["second"] == plan.FRESH else check["second"]
        axes.set_title(f"{check['first']}\n− {name}", fontsize=8)
    panels[0].set_yticks(range(len(columns)), [TITLES[column] for column in columns], fontsize=8)
    panels[0].invert_yaxis()
    figure.supxlabel("difference in final held-out accuracy", fontsize=9)
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


def write_pages(table: pd.DataFrame) -> None:
    """Both pages with their figures, from their templates here."""
    parts = {}
    for study in plan.STUDIES:
        parts[f"{study}_made"] = str(made_runs(study, table) if len(table) else 0)
        parts[f"{study}_planned"] = str(planned_runs(study))
    left_out = plan.PLAN["leaderboard"]["left_out"]
    parts["left_out"] = "; ".join(f"`{name}`: {why}" for name, why in left_out.items())
    parts |= {
        "board": "No run yet.\n",
        "board_figure": "",
        "verdicts": "No run yet.\n",
        "verdicts_figure": "",
        "chance": "",
    }
    if len(table):
        ends = ends_of(table)
        board = board_of(ends)
        parts["board"] = board_table(board)
        save_figure(draw_board(board), DOCS / "leaderboard.png")
        parts["board_figure"] = "![Final accuracy of each preset in each column](leaderboard.png)\n"
        found = checks_of(ends)
        if any(found.values()):
            parts["verdicts"] = verdicts_table(found)
            parts["chance"] = chance_text([check for check in found.values() if check], len(found))
            save_figure(draw_regimes(found), DOCS / "claims" / "regimes.png")
            parts["verdicts_figure"] = "![Differences with intervals in each regime](regimes.png)\n"
    for template, page in (("board.md", DOCS / "leaderboard.md"), ("regimes.md", DOCS / "claims" / "regimes.md")):
        text = (HERE / template).read_text(encoding="utf-8")
        for key, value in parts.items():
            text = text.replace(f"{{{{{key}}}}}", value)
        page.write_text(text, encoding="utf-8")
