"""What the study has to show: the plan's checks with intervals, figures, docs/claims/drift.md and README.md.

Methods, checks, margins, seeds and rates were written into plan.yaml before the runs were made.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from experiments.claims.markdown import markdown_table
from experiments.claims.verdicts import (
    SIGNS,
    Check,
    Claim,
    chance_text,
    check_starts,
    fallen,
    legend,
    mean_over_steps,
    surviving,
)
from experiments.drift import plan
from recjax.analysis.compare import final
from recjax.analysis.statistics import Estimate, estimate
from recjax.plots.style import COLORS, GREY, add_legend, few_ticks, finish, new_figure, plain_ticks

HERE = Path(__file__).parent
TASKS = {"bandit": "bandit", "sums": "sums", "smollm2": "SmolLM2"}
SETUPS = {
    "sgd": "SGD",
    "adamw": "AdamW",
    "adamw_4_updates": "AdamW, four updates of each batch",
}
NAMES = {
    "reinforce": "REINFORCE",
    "weight": "weight",
    "capped_weight": "weight ≤ 2",
    "clip": "clip",
    "clip_and_weight": "clip and weight",
    "clip_recomputed": "clip around recomputed π_old",
    "clip_recomputed_and_correction": "clip around recomputed π_old, weight ≤ 2",
    "deviation": "division by σ",
    "grpo": "GRPO",
    "centering": "centering",
    "centering_and_capped_weight": "centering, weight ≤ 2",
    "distance_mask": "IPO's mask",
    "centering_and_mask": "centering, IPO's mask",
    "ipo": "IPO",
    "ipo_without_mask": "IPO without mask",
    "opmd": "OPMD",
    "asymre": "AsymRE",
}
CAUSES = {
    "none": "none",
    "age5": "age 5",
    "age20": "age 20",
    "age50": "age 50",
    "age64": "age 64",
    "int8": "int8",
    "int4": "int4",
    "float8": "float8",
    "noise_1_percent": "fixed noise of 1 %",
    "noise_2_percent": "fixed noise of 2 %",
    "noise_5_percent": "fixed noise of 5 %",
    "fixed_noise_engine": "fixed noise of an engine's size",
    "fixed_noise5": "fixed noise with the pilot KL of age 5",
    "fixed_noise20": "fixed noise with the pilot KL of age 20",
    "fixed_noise50": "fixed noise with the pilot KL of age 50",
    "fresh_noise20": "new noise at each sync with the pilot KL of age 20",
    "fixed_noise20_wrong": "fixed noise with the pilot KL of age 20, wrong log-probs",
    "age20_and_fixed_noise20": "age 20 and fixed noise of that pilot KL",
}
SUMMARIZED = {  # setups of tasks and causes in the page's table
    ("bandit", "sgd"): ("age20", "age50", "fixed_noise20"),
    ("sums", "adamw"): ("age20", "age50", "fixed_noise_engine", "fixed_noise20"),
}
READINGS = {"best": "at each one's best rate", "common": "at the common rate"}
MEASURES = {"final": plan.PLAN["measured"][0], "mean": plan.PLAN["measured"][1]}
ARRIVED = {"bandit": 0.995, "sums": 0.95, "smollm2": 0.95}  # a cell's mean from which runs count as arrived
PUBLISHED = ("noise_1_percent", "noise_2_percent", "noise_5_percent", "age64")
PUBLISHED_LINES = {  # color and style; the same method with score centering has the same color
    "reinforce": (COLORS[0], "-"),
    "clip": (COLORS[1], "-"),
    "distance_mask": (COLORS[4], "-"),
    "capped_weight": (COLORS[2], "-"),
    "centering": (COLORS[0], "--"),
    "centering_and_mask": (COLORS[4], "--"),
    "centering_and_capped_weight": (COLORS[2], "--"),
}
PANELS = {"age": "old samples", "noise": "noisy engine", "noise_wrong": "noisy engine,\nwrong log-probs"}
COMPARED_KL = 0.05  # nats, near which the page's table compares the causes' gradients
NEGLIGIBLE = 0.005  # a difference whose whole interval is closer to 0 is none
SAME = "no difference"
NOT_RUN = "Not run.\n"
CELL = ["setup", "algorithm", "cause"]

Place = tuple[str, str, str, str]  # setup, first, second, cause
Found = dict[Place, Check | None]


class Runs(NamedTuple):
    """The runs of a task: one number each by plan.AXES, and the best rate of each cell that had a pilot.

    final: expected reward of the last policy, or accuracy as the mean of the last three evaluations.
    mean: mean over the run of expected reward or accuracy.
    """

    final: pd.Series
    mean: pd.Series
    best: dict[tuple[str, str, str], float]


def runs_of(task: str, table: pd.DataFrame) -> Runs:
    """The runs of a task's table."""
    if task == "bandit":
        rows = table.set_index(plan.AXES)
        return Runs(rows["reward"], rows["mean_reward"], plan.best_rates(rows["reward"]))
    ends = final(table).reorder_levels(plan.AXES)
    return Runs(ends, mean_over_steps(table).reorder_levels(plan.AXES), plan.best_rates(ends))


def at_rates(values: pd.Series, task: str, reading: str, runs: Runs) -> pd.Series:
    """Numbers of the checks' seeds by setup, method, cause and seed, each cell at one rate.

    Args:
        reading: of READINGS.
    """
    rows = values.reset_index(name="value")
    rows = rows[rows["seed"].astype(int) < plan.FIRST_PILOT_SEED]
    setups = plan.PLAN["tasks"][task]["setups"]
    cells = [tuple(cell) for cell in rows[CELL].itertuples(index=False)]
    common = np.array([setups[cell[0]]["common_rate"] for cell in cells])
    wanted = common
    if reading == "best":
        wanted = np.array([runs.best.get(cell, rate) for cell, rate in zip(cells, common, strict=True)])
    chosen = rows[np.isclose(rows["rate"].astype(float), wanted)]
    return chosen.set_index([*CELL, "seed"])["value"]


def difference(values: pd.Series, place: Place) -> Estimate | None:
    """The difference of a check over the seeds that both sides have; None with fewer than two."""
    setup, first, second, cause = place
    other = (setup, first, plan.NONE) if second == "none" else (setup, second, cause)
    known = values.index.droplevel("seed").unique()
    if (setup, first, cause) not in known or other not in known:
        return None
    differences = (values.xs((setup, first, cause), level=CELL) - values.xs(other, level=CELL)).dropna()
    return estimate(differences.to_numpy()) if len(differences) > 1 else None


def checks(values: pd.Series, task: str) -> Found:
    """Every check of the plan in every setup and cause of a task, made or not.

    Args:
        values: see `at_rates`.
    """
    cells = {cell[:3] for cell in plan.cells_of(task)}
    found: Found = {}
    for check in plan.CHECKS:
        for setup in plan.PLAN["tasks"][task]["setups"]:
            for cause in plan.CAUSES:
                first, second = check["first"], check["second"]
                other = (setup, first, plan.NONE) if second == "none" else (setup, second, cause)
                if cause == plan.NONE or not {(setup, first, cause), other} <= cells:
                    continue
                place = (setup, first, second, cause)
                made = difference(values, place)
                what = f"{first} − {second}: {cause}"
                found[place] = made and Check(what, check["expected"], plan.PLAN["margin"], made)
    return found


def corrected(found: Found) -> set[Place]:
    """The checks that hold after Holm's correction for all checks of a task that have a verdict."""
    made = {place: check for place, check in found.items() if check is not None}
    return {place for place, holds in zip(made, surviving([*made.values()]), strict=True) if holds}


def chance(found: Found) -> str:
    """How many verdicts of a task there are, and how many would hold by chance."""
    return chance_text([check for check in found.values() if check is not None], len(found))


def is_same(made: Check) -> bool:
    """True if a check is about a direction and its whole interval or range is within NEGLIGIBLE."""
    return max(abs(made.found.low), abs(made.found.high)) < NEGLIGIBLE and made.expected in ("higher", "lower")


def verdict(made: Check | None, survives: bool = True) -> str:
    """A check's outcome as a verdict.

    Args:
        survives: False if the check does not hold after the correction for the number of verdicts.
    """
    if made is None:
        return "not run"
    if is_same(made):
        return f"{SAME} in any seed" if made.found.is_range else SAME
    words = Claim("", (), [made]).verdict
    return "holds alone" if words == "holds" and not survives else words


def spread_text(found: Estimate | None) -> str:
    """Mean and interval, or range, of a difference."""
    if found is None:
        return "not run"
    return f"{found.mean:+.3f} ({found.low:+.3f} to {found.high:+.3f})".replace("-", "−")


def check_name(first: str, second: str) -> str:
    """The difference in words."""
    return f"{NAMES[first]} − {'without the cause' if second == 'none' else NAMES[second]}"


def claimed(check: Mapping[str, str]) -> str:
    """What a check says of its number."""
    return Check("", check["expected"], plan.PLAN["margin"], estimate(np.zeros(2))).claimed


def verdicts_table(found: Mapping[str, Found]) -> str:
    """A row a check, a column a cause of SUMMARIZED: mean difference and verdict.

    Args:
        found: the checks of each task that has runs.
    """
    columns = [
        (task, setup, cause) for (task, setup), causes in SUMMARIZED.items() if task in found for cause in causes
    ]
    surviving = {task: corrected(of_task) for task, of_task in found.items()}
    rows = []
    shown = []
    for check in plan.CHECKS:
        cells = []
        for task, setup, cause in columns:
            place = (setup, check["first"], check["second"], cause)
            made = found[task].get(place)
            is_planned = place in found[task]
            text = verdict(made, place in surviving[task]) if is_planned else "–"
            shown.append(text)
            if made:
                mean = f"{made.found.mean:+.3f}".replace("-", "−")
                text = f"{SIGNS.get(text, text)} {mean}"
            cells.append(text)
        if set(cells) != {"–"}:
            rows.append([check_name(check["first"], check["second"]), claimed(check), *cells])
    header = [f"{TASKS[task]}: {CAUSES[cause]}" for task, _, cause in columns]
    return f"{markdown_table(['difference', 'expected', *header], rows)}\n{legend(shown)}"


def checks_table(task: str, setup: str, found: Mapping[str, Found]) -> str:
    """A row for each check and cause of a setup: the difference under each reading and measure, seeds and verdict.

    Args:
        found: checks by "final best", "final common" and "mean best".
    """
    surviving = corrected(found["final best"])
    rows = []
    for place, made in found["final best"].items():
        if place[0] != setup or made is None:
            continue
        _, first, second, cause = place
        others = [found[name].get(place) for name in ("final common", "mean best")]
        spreads = [spread_text(other and other.found) for other in others]
        row = [check_name(first, second), CAUSES[cause], made.claimed, spread_text(made.found), *spreads]
        rows.append([*row, str(made.found.count), verdict(made, place in surviving)])
    if not rows:
        return NOT_RUN
    header = [
        "difference",
        "cause",
        "expected",
        "final, best rates",
        "final, common rate",
        "mean of the run, best rates",
    ]
    return markdown_table([*header, "seeds", "verdict"], rows)


def cells_table(task: str, setup: str, runs: Runs) -> str:
    """Every cell of a setup: mean over seeds at its best rate with the rate, and at the common one."""
    best = at_rates(runs.final, task, "best", runs)
    common = at_rates(runs.final, task, "common", runs).groupby(CELL).mean()
    means = best.groupby(CELL).mean()
    seeds = best.groupby(CELL).count()
    causes = [
        cause for cause in CAUSES if any(cell.cause == cause and cell.setup == setup for cell in plan.cells_of(task))
    ]
    rows = []
    for method in NAMES:
        texts = []
        for cause in causes:
            cell = (setup, method, cause)
            if cell not in means.index:
                texts.append("–")
                continue
            rate = f" at {runs.best[cell]:g}" if cell in runs.best else ""
            other = f"; {common[cell]:.3f}" if cell in common.index and rate else ""
            arrived = "*" if means[cell] >= ARRIVED[task] else ""
            texts.append(f"{means[cell]:.3f}{arrived}{rate}{other} ({seeds[cell]})")
        if set(texts) != {"–"}:
            rows.append([NAMES[method], *texts])
    return markdown_table(["", *(CAUSES[cause] for cause in causes)], rows) if rows else NOT_RUN


def broken_text(task: str, table: pd.DataFrame, runs: Runs) -> str:
    """How many runs of the checks arrived, and how many ended below their best evaluation by more than the margin."""
    best = at_rates(runs.final, task, "best", runs)
    arrived = int((best >= ARRIVED[task]).sum())
    text = f"{arrived} of {len(best)} runs at their best rates end at {ARRIVED[task]} or above"
    if "step" not in table:
        return f"{text}."
    falls = at_rates(fallen(table).reorder_levels(plan.AXES), task, "best", runs)
    broken = int((falls > plan.PLAN["margin"]).sum())
    return f"{text}, and {broken} end more than {plan.PLAN['margin']} below their best evaluation."


def draw_differences(task: str, setup: str, found: Found) -> Figure:
    """Differences with intervals: a row a check, a panel a cause of SUMMARIZED."""
    causes = SUMMARIZED[task, setup]
    made = [
        check
        for check in plan.CHECKS
        if any((setup, check["first"], check["second"], cause) in found for cause in causes)
    ]
    figure = new_figure(2.6 + 2.2 * len(causes), 1.2 + 0.3 * len(made), "")
    panels = figure.subplots(1, len(causes), sharey=True, squeeze=False)[0]
    heights = np.arange(len(made))[::-1]
    for axes, cause in zip(panels, causes, strict=True):
        axes.axvline(0, color=GREY, lw=0.8)
        for height, check in zip(heights, made, strict=True):
            at = found.get((setup, check["first"], check["second"], cause))
            if at is None:
                continue
            color = {"as claimed": COLORS[2], "contrary": COLORS[1]}.get(at.outcome, GREY)
            axes.plot([at.found.low, at.found.high], [height, height], color=color, lw=2)
            axes.plot(at.found.mean, height, "o", color=color, ms=4)
        axes.set_title(CAUSES[cause].replace(" with the", "\nwith the").replace(" of an", "\nof an"), fontsize=9)
        axes.set_yticks(heights, [check_name(check["first"], check["second"]) for check in made], fontsize=8)
        few_ticks(axes.xaxis, 4, whole=False)
    colors = {"as claimed": COLORS[2], "contrary": COLORS[1], "open": GREY}
    handles = [Patch(color=color) for color in colors.values()]
    add_legend(figure, handles, list(colors), loc="outside upper center", ncols=3)
    figure.supxlabel(f"difference in {MEASURES['final'] if task != 'bandit' else 'final expected reward'}", fontsize=9)
    return finish(figure)


def draw_published(runs: Runs) -> Figure:
    """Final accuracy by fixed noise, and with old samples, on the axes of a published figure of score centering."""
    ends = at_rates(runs.final, "sums", "common", runs)
    figure = new_figure(8.5, 3.6, "")
    noise, age = figure.subplots(1, 2, sharey=True, width_ratios=[2, 1])
    sizes = {"none": 0, "noise_1_percent": 1, "noise_2_percent": 2, "noise_5_percent": 5}
    for place, (method, (color, style)) in enumerate(PUBLISHED_LINES.items()):
        of_method = ends.xs(("adamw", method), level=["setup", "algorithm"])
        by_cause = {
            cause: estimate(of_method.xs(cause, level="cause").to_numpy())
            for cause in (*sizes, "age64")
            if of_method.index.get_level_values("cause").tolist().count(cause) > 1
        }
        shift = (place - len(PUBLISHED_LINES) / 2) * 0.04
        known = [cause for cause in sizes if cause in by_cause]
        at = [sizes[cause] + shift for cause in known]
        means = [by_cause[cause].mean for cause in known]
        noise.plot(at, means, color=color, ls=style, marker="o", ms=3, label=NAMES[method])
        noise.vlines(at, [by_cause[c].low for c in known], [by_cause[c].high for c in known], color=color, lw=0.8)
        if "age64" in by_cause:
            found = by_cause["age64"]
            age.plot(place, found.mean, "o", color=color, mfc="white" if style == "--" else color)
            age.vlines(place, found.low, found.high, color=color, lw=1.2)
    noise.set_xlabel("noise fixed for the run, % of each matrix", fontsize=9)
    noise.set_ylabel("final held-out accuracy", fontsize=9)
    age.set_xlabel("samples up to 63 steps old", fontsize=9)
    age.set_xticks([])
    add_legend(figure, *noise.get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return finish(figure)


def draw_gradients(gradients: pd.DataFrame) -> Figure:
    """Direction and noise of each method's gradient over KL(μ ‖ π), a column a cause."""
    figure = new_figure(9, 6, "")
    panels = figure.subplots(2, len(PANELS), sharex=True, sharey="row")
    labels = {"cosine": "cosine to the\npolicy gradient", "noise": "noise of a batch\n(relative to the mean)"}
    methods = list(dict.fromkeys(gradients["algorithm"]))
    for column, (cause, title) in enumerate(PANELS.items()):
        of_cause = gradients[(gradients["cause"] == cause) & (gradients["kl"] > 1e-7)]
        panels[0, column].set_title(title, fontsize=10)
        for row, name in enumerate(labels):
            axes = panels[row, column]
            for number, method in enumerate(methods):
                own = of_cause[of_cause["algorithm"] == method].sort_values("kl")
                style = "-" if number < len(COLORS) else "--"
                line = {"color": COLORS[number % len(COLORS)], "ls": style, "marker": "o", "ms": 3, "lw": 1.5}
                axes.plot(own["kl"], own[name], label=NAMES[method], **line)
            axes.set_xscale("log")
            if column == 0:
                axes.set_ylabel(labels[name])
            if row == 1:
                axes.set_xlabel("KL(μ ‖ π), nats")
    for axes in panels[1]:
        axes.set_yscale("log")
    plain_ticks(panels[1, 0].yaxis)
    add_legend(figure, *panels[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=5)
    return finish(figure)


def gradients_table(gradients: pd.DataFrame) -> str:
    """Cosine and noise of each method at the size of each cause whose KL(μ ‖ π) is nearest to COMPARED_KL."""
    methods = list(dict.fromkeys(gradients["algorithm"]))
    rows = []
    for cause, title in PANELS.items():
        of_cause = gradients[gradients["cause"] == cause]
        sizes = of_cause.groupby("size")["kl"].first()
        size = (np.log(sizes) - np.log(COMPARED_KL)).abs().idxmin()
        at_size = of_cause[of_cause["size"] == size].set_index("algorithm")
        cells = [f"{at_size['cosine'][name]:.3f}; {at_size['noise'][name]:.2f}" for name in methods]
        rows.append([title.replace("\n", " "), f"{size:g}", f"{sizes[size]:.3f}", *cells])
    return markdown_table(["cause", "age or scale", "KL", *(NAMES[name] for name in methods)], rows)


def measured_kl(table: pd.DataFrame) -> str:
    """KL(μ ‖ π) of REINFORCE's runs with each cause at the common rate of AdamW, as an update measures it."""
    common = plan.PLAN["tasks"]["sums"]["setups"]["adamw"]["common_rate"]
    plain = table[(table["algorithm"] == "reinforce") & (table["setup"] == "adamw") & (table["step"] > 0)]
    plain = plain[np.isclose(plain["rate"].astype(float), common)]
    medians = plain.groupby(["cause", "seed"])["behavior_kl/k3"].median().groupby("cause").mean()
    rows = [[CAUSES[cause], f"{medians[cause]:.4f}"] for cause in CAUSES if cause in medians.index]
    return markdown_table(["cause", "KL(μ ‖ π), nats per token"], rows)


def read_tables(folder: Path) -> dict[str, pd.DataFrame]:
    """The tables that are in a folder, by name: gradients, and those of TASKS."""
    paths = {name: folder / f"{name}.parquet" for name in ("gradients", *TASKS)}
    return {name: pd.read_parquet(path) for name, path in paths.items() if path.exists()}


def fill_in(text: str, runs: Mapping[str, Runs], found: Mapping[str, Mapping[str, Found]]) -> str:
    """The text with numbers: `{{TASK SETUP FIRST SECOND CAUSE}}` of a check, `{{TASK SETUP METHOD CAUSE}}` of a cell.

    `{{TASK SETUP FIRST SECOND CAUSE common}}` is the check at the common rate.
    """

    def check_text(place: re.Match) -> str:
        task, *where, reading = place.groups()
        made = found.get(task, {}).get(f"final {(reading or 'best').strip()}", {}).get(tuple(where))
        return spread_text(made and made.found)

    def cell_text(place: re.Match) -> str:
        task, *where = place.groups()
        if task not in runs:
            return "not run"
        means = at_rates(runs[task].final, task, "best", runs[task]).groupby(CELL).mean()
        return f"{means[tuple(where)]:.3f}" if tuple(where) in means.index else "not run"

    tasks, setups = "|".join(TASKS), "|".join(SETUPS)
    causes, methods = "|".join(CAUSES), "|".join(NAMES)
    pair = rf"({methods}) ({methods}|none) ({causes})( common)?"
    text = re.sub(rf"\{{\{{({tasks}) ({setups}) {pair}\}}\}}", check_text, text)
    return re.sub(rf"\{{\{{({tasks}) ({setups}) ({methods}) ({causes})\}}\}}", cell_text, text)


def planned_runs(task: str, runs: Runs | None) -> int:
    """Number of runs that the plan has of a task: pilots and checks; of a task without pilots only the checks."""
    planned = plan.PLAN["tasks"][task]
    best = runs.best if runs is not None else {}
    total = 0
    for cell in plan.cells_of(task):
        if task == "bandit":
            total += len(planned["setups"][cell.setup]["rates"]) * (planned["seeds"] + planned["pilot_seeds"])
            continue
        rates = plan.rates_of(task, cell, best) if cell.has_pilot else [None]
        pilots = planned["pilot_seeds"] * len(planned["setups"][cell.setup]["rates"]) if cell.has_pilot else 0
        total += len(rates) * planned["seeds"] + pilots
    return total


def write_page(tables: dict[str, pd.DataFrame], docs: Path, notes: Path) -> None:
    """drift.md with its figures in the folder of docs, and README.md with all cells in that of notes."""
    for task in TASKS:
        if task in tables and "step" in tables[task]:
            check_starts(task, tables[task])
    pictures = docs / "drift"
    pictures.mkdir(parents=True, exist_ok=True)
    runs = {task: runs_of(task, tables[task]) for task in TASKS if task in tables}
    found: dict[str, dict[str, Found]] = {}
    for task, of_task in runs.items():
        found[task] = {
            f"{measure} {reading}": checks(at_rates(getattr(of_task, measure), task, reading, of_task), task)
            for measure in MEASURES
            for reading in READINGS
        }
    parts = {"gradients": NOT_RUN, "sums_kl": NOT_RUN, "figures": "", "published": ""}
    parts["verdicts"] = verdicts_table({task: of_task["final best"] for task, of_task in found.items()})
    if "gradients" in tables:
        draw_gradients(tables["gradients"]).savefig(pictures / "gradients.png", dpi=100)
        parts["gradients"] = gradients_table(tables["gradients"])
    if "sums" in tables:
        parts["sums_kl"] = measured_kl(tables["sums"])
    for task, setup in SUMMARIZED:
        if task in found and any(found[task]["final best"].values()):
            draw_differences(task, setup, found[task]["final best"]).savefig(pictures / f"{task}.png", dpi=100)
            parts["figures"] += f"![{TASKS[task]}: differences with intervals by cause](drift/{task}.png)\n\n"
    if "sums" in runs and set(PUBLISHED) <= set(tables["sums"]["cause"]):
        draw_published(runs["sums"]).savefig(pictures / "published.png", dpi=100)
        parts["published"] = "![Final accuracy by fixed noise and with old samples](drift/published.png)\n"
    for task in TASKS:
        of_task = found.get(task, {})
        parts[f"{task}_chance"] = chance(of_task["final best"]) if of_task else ""
        counts = [check.found.count for check in of_task["final best"].values() if check] if of_task else [0]
        parts[f"{task}_seeds"] = " to ".join(map(str, dict.fromkeys([min(counts, default=0), max(counts, default=0)])))
        parts[f"{task}_runs"] = str(len(runs[task].final) if task in runs else 0)
        parts[f"{task}_all"] = str(planned_runs(task, runs.get(task)))
        parts[f"{task}_broken"] = broken_text(task, tables[task], runs[task]) if task in runs else ""
        for setup in plan.PLAN["tasks"][task]["setups"]:
            parts[f"{task}_{setup}_checks"] = checks_table(task, setup, of_task) if of_task else NOT_RUN
            parts[f"{task}_{setup}_cells"] = cells_table(task, setup, runs[task]) if task in runs else NOT_RUN
    for template, page in (("page.md", docs / "drift.md"), ("notes.md", notes / "README.md")):
        text = (HERE / template).read_text(encoding="utf-8")
        for key, value in parts.items():
            text = text.replace(f"{{{{{key}}}}}", value)
        page.write_text(fill_in(text, runs, found), encoding="utf-8")
