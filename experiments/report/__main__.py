"""docs/report.md with its figure, and the README's section on what was found, from the committed tables.

    python -m experiments.report

It reads the tables of the claims, of the study of age and drift and, where its runs exist, of the leaderboard.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
from absl import app
from matplotlib.figure import Figure

from experiments.claims import page as claims_page
from experiments.claims.map_page import foretelling_text
from experiments.claims.markdown import markdown_table
from experiments.claims.verdicts import chance_text, claims
from experiments.drift import page as drift_page
from experiments.leaderboard import __main__ as leaderboard
from experiments.leaderboard import page as board_page
from experiments.leaderboard import plan as board_plan
from recjax.analysis.collect import read_runs
from recjax.analysis.compare import final
from recjax.analysis.statistics import MIN_SEEDS, estimate
from recjax.plots.style import COLORS, add_legend, finish, new_figure

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SECTION = re.compile(r"(<!-- Written by python -m experiments\.report -->\n).*?(<!-- end -->)", re.DOTALL)
METHODS = {  # lines of the figure
    "reinforce": COLORS[6],
    "clip": COLORS[0],
    "clip_and_weight": COLORS[5],
    "capped_weight": COLORS[2],
    "opmd": COLORS[1],
    "asymre": COLORS[4],
}
CAUSES = {
    "none": "fresh",
    "age20": "up to 19\nsteps old",
    "age50": "up to 49\nsteps old",
    "fixed_noise_engine": "engine\nnoise",
    "fixed_noise20": "large\nnoise",
}
VERDICTS = {  # of one claim, and of several
    "holds": ("holds", "hold"),
    "holds alone": ("holds without the correction for their number", "hold without the correction for their number"),
    "not visible at this scale": ("is not visible", "are not visible"),
    "does not hold here": ("does not hold", "do not hold"),
}
UNMEASURED = """\
- Late rewards, replay, asynchronous runs, stores, other models' data and several updates of each batch were not
  measured.
"""
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven")


def draw_methods(runs: drift_page.Runs) -> Figure:
    """Final accuracy with its interval for each of METHODS and CAUSES, each method at its best rate."""
    ends = drift_page.at_rates(runs.final, "sums", "best", runs).xs("adamw", level="setup")
    figure = new_figure(8.5, 3.8, "")
    axes = figure.subplots()
    for number, (method, color) in enumerate(METHODS.items()):
        shift = (number - (len(METHODS) - 1) / 2) * 0.12
        for place, cause in enumerate(CAUSES):
            found = estimate(ends.xs((method, cause), level=["algorithm", "cause"]).to_numpy())
            axes.vlines(place + shift, found.low, found.high, color=color, lw=2)
            label = drift_page.NAMES[method] if place == 0 else None
            axes.plot(place + shift, found.mean, "o", color=color, ms=5, label=label)
    axes.set_xticks(range(len(CAUSES)), list(CAUSES.values()))
    axes.set_ylabel("final held-out accuracy")
    axes.set_ylim(0, 1)
    add_legend(figure, *axes.get_legend_handles_labels(), loc="outside upper center", ncols=len(METHODS))
    return finish(figure)


def verdicts_of(checks: pd.DataFrame) -> dict[str, tuple[str, str]]:
    """Text and verdict of each claim, of the table of the claims' checks."""
    found = claims(checks.drop(columns="rate"))
    survivors = claims_page.surviving_claims(found)
    verdicts = {}
    for name, claim in found.items():
        verdict = claim.verdict
        if verdict == "holds" and name not in survivors:
            verdict = "holds alone"
        verdicts[name] = claim.text, verdict
    return verdicts


def count_text(verdicts: Sequence[str]) -> str:
    """How many claims have each verdict, in words."""
    words = []
    for verdict, (singular, plural) in VERDICTS.items():
        count = verdicts.count(verdict)
        if count:
            words.append(f"{NUMBERS[count]} {singular if count == 1 else plural}")
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def claims_parts(checks: pd.DataFrame) -> dict[str, str]:
    """What report and README say of the paper's claims.

    Args:
        checks: the table of the claims' checks.
    """
    verdicts = verdicts_of(checks)
    made = [check for claim in claims(checks.drop(columns="rate")).values() for check in claim.checks]
    rows = [[name, text, verdict] for name, (text, verdict) in verdicts.items()]
    return {
        "claims": markdown_table(["", "claim", "verdict"], rows),
        "claims_count": count_text([verdict for _, verdict in verdicts.values()]),
        "claims_chance": chance_text(made, len(made)),
        "claims_runs": str(len(final(checks))),
        "claims_seeds": str(checks["seed"].nunique()),
    }


def shown(names: Sequence[str]) -> str:
    """Up to four names, and the number of others.

    Examples:
        >>> shown(["grpo", "rloo"])
        '`grpo`, `rloo`'
        >>> shown(["grpo", "rloo", "opo", "gpg", "cispo"])
        '`grpo`, `rloo`, `opo`, `gpg` and 1 more'
    """
    named = ", ".join(f"`{name}`" for name in names[:4])
    return named if len(names) <= 4 else f"{named} and {len(names) - 4} more"


def board_parts(table: pd.DataFrame | None) -> dict[str, str]:
    """What report and README say of the leaderboard and of the study of regimes; nothing without their runs.

    Args:
        table: the leaderboard's runs; None without any.
    """
    parts = {
        "regimes": "",
        "leaderboard": "",
        "readme_leaderboard": "",
        "unmeasured": UNMEASURED,
    }
    if table is None:
        return parts
    ends = board_page.ends_of(table)
    found = board_page.checks_of(ends)
    made = [check for check in found.values() if check is not None]
    if made:
        picture = "![Differences with intervals in each regime](claims/regimes.png)"
        parts["regimes"] = (
            "### Other regimes\n\n"
            f"Six algorithms in six other regimes, and in both ages ([verdicts](claims/regimes.md)).\n\n{picture}\n\n"
            f"{board_page.summary()}\n\n{chance_text(made, len(found))}\n\n"
        )
        parts["unmeasured"] = ""
    board = board_page.board_of(ends)
    if len(board.means):
        groups = pd.Series(board.groups).groupby(board.groups).groups
        best = [f"`{board.means[column].idxmax()}` ({board_page.TITLES[column]})" for column in board.ranked]
        rows = len(board_plan.methods_of("leaderboard"))
        counts = f"{board_page.made_runs('leaderboard', table)} of {board_page.planned_runs('leaderboard')} runs"
        picture = "![Mean ranks of presets with intervals, and accuracies by column]"
        said = (
            f"A row for each preset, in seven columns of data: {len(board.means)} of {rows} rows, {counts}."
            f" The first of {len(groups)} groups has {shown(list(groups[1]))},"
            f" the last {shown(list(groups[len(groups)]))};"
            " mean ranks within a group do not differ visibly from that of its first."
            f" Highest in the columns that all ran: {', '.join(best)}."
        )
        parts["leaderboard"] = (
            f"### Leaderboard\n\n{said} The [leaderboard](leaderboard.md) has all numbers, and takes your own loss.\n\n"
            f"{picture}(leaderboard.png)\n\n"
        )
        parts["readme_leaderboard"] = (
            f"\n{picture}(docs/leaderboard.png)\n\n{said}\n"
            "The [leaderboard](docs/leaderboard.md) takes your own loss, too.\n"
        )
    return parts


def drift_parts(runs: drift_page.Runs, found: drift_page.Found) -> dict[str, str]:
    """What report and README say of the study of age and drift on sums."""
    counts = [check.found.count for check in found.values() if check is not None and check.found.count >= MIN_SEEDS]
    return {
        "sums_seeds": " to ".join(map(str, dict.fromkeys([min(counts), max(counts)]))),
        "sums_chance": drift_page.chance(found),
        "sums_made": str(len(runs.final)),
        "sums_planned": str(drift_page.planned_runs("sums", runs)),
    }


def filled(template: str, parts: Mapping[str, str], runs: drift_page.Runs, found: drift_page.Found) -> str:
    """A template of this folder with its numbers.

    `{{size sums SETUP FIRST SECOND CAUSE}}` is the mean difference of a check without its sign.
    """
    text = (HERE / template).read_text(encoding="utf-8")
    for key, value in parts.items():
        text = text.replace(f"{{{{{key}}}}}", value)

    def size(place: re.Match) -> str:
        return f"{abs(found[tuple(place[1].split())].found.mean):.2f}"

    text = re.sub(r"\{\{size sums ([^}]+)\}\}", size, text)
    return drift_page.fill_in(text, {"sums": runs}, {"sums": {"final best": found}})


def write_report(board: pd.DataFrame | None, root: Path) -> None:
    """docs/report.md and its figure below a folder, and the section of the README there.

    Args:
        board: the leaderboard's runs; None without any.
    """
    sums = pd.read_parquet(drift_page.HERE / "sums.parquet")
    runs = drift_page.runs_of("sums", sums)
    found = drift_page.checks(drift_page.at_rates(runs.final, "sums", "best", runs), "sums")
    grid = read_runs(claims_page.TABLES["map"])
    checks = claims_page.whole_seeds(pd.read_parquet(claims_page.CHECKS))["checks"]
    parts = {
        **claims_parts(checks),
        **drift_parts(runs, found),
        **board_parts(board),
        "map_runs": str(len(final(grid))),
        "map_foretelling": foretelling_text(grid),
    }
    docs = root / "docs"
    docs.mkdir(exist_ok=True)
    draw_methods(runs).savefig(docs / "report.png", dpi=110)
    (docs / "report.md").write_text(filled("page.md", parts, runs, found), encoding="utf-8")
    parts["leaderboard"] = parts["readme_leaderboard"]
    section = filled("readme.md", parts, runs, found).rstrip() + "\n"
    readme = (root / "README.md").read_text(encoding="utf-8")
    replaced, count = SECTION.subn(lambda match: f"{match[1]}\n{section}\n{match[2]}", readme)
    assert count == 1, "README.md has no section that experiments.report writes"
    (root / "README.md").write_text(replaced, encoding="utf-8")


def main(_: list[str]) -> None:
    """Writes report and section."""
    board = pd.read_parquet(leaderboard.TABLE) if leaderboard.TABLE.exists() else None
    write_report(board, ROOT)


if __name__ == "__main__":
    app.run(main)
