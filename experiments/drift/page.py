"""What the study has to show: checks with intervals or ranges, two figures, and docs/claims/drift.md.

Checks and margins were written down before the grids were run, except the outcome `SAME`.
"""

import itertools
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.claims.map_page import Side, draw_cells
from experiments.claims.markdown import markdown_table
from experiments.claims.verdicts import MARGIN, NARROW, Check, Claim, check_starts, fallen, paired_difference
from recjax.analysis.compare import final
from recjax.analysis.statistics import estimate, holm, seed_means
from recjax.config.yaml_values import read_yaml_file
from recjax.errors import UserError
from recjax.plots.style import COLORS, add_legend, finish, new_figure, plain_ticks

HERE = Path(__file__).parent
NAMES = {
    "reinforce": "REINFORCE",
    "grpo": "GRPO",
    "rec_one_side_nois": "REC-OneSide-NoIS",
    "tis": "TIS",
    "score_centering": "Score centering",
    "rec_one_side_nois_centered": "REC-OneSide-NoIS, centered",
    "ipo": "IPO",
    "opmd": "OPMD",
}
AGES = ("1", "5", "20", "50")
ENGINES = {
    "exact": "exact",
    "int8": "int8",
    "int8_wrong": "int8, wrong log-probs",
    "noise_small": "small noise",
    "noise_small_wrong": "small noise, wrong log-probs",
    "noise_large": "large noise",
    "noise_large_wrong": "large noise, wrong log-probs",
}
LINES = {  # color and style; an algorithm with score centering has the color of the one without it
    "reinforce": (COLORS[0], "-"),
    "grpo": (COLORS[3], "-"),
    "rec_one_side_nois": (COLORS[1], "-"),
    "tis": (COLORS[2], "-"),
    "score_centering": (COLORS[5], ":"),
    "rec_one_side_nois_centered": (COLORS[1], "--"),
    "ipo": (COLORS[4], "-"),
    "opmd": (COLORS[6], "-"),
}
PLAIN = "reinforce"
BANDIT_SEEDS = 8
NEGLIGIBLE = 0.005  # a difference whose whole interval is closer to 0 is none
SAME = "no difference"
BASE = ("1", "exact")  # age and engine without drift
ONE_SIDED = 0.025  # largest p-value of a check that holds, after Holm's correction


class Cause(NamedTuple):
    """Cells whose samples drift by one cause: its name, ages and engines."""

    name: str
    ages: tuple[str, ...]
    engines: tuple[str, ...]


CAUSES = {
    "age20": Cause("age 20", ("20",), ("exact",)),
    "age50": Cause("age 50", ("50",), ("exact",)),
    "int8": Cause("int8", ("1",), ("int8",)),
    "noise": Cause("large noise", ("1",), ("noise_large",)),
    "wrong": Cause("large noise, wrong log-probs", ("1",), ("noise_large_wrong",)),
    "both20": Cause("age 20 and large noise", ("20",), ("noise_large",)),
    "both50": Cause("age 50 and large noise", ("50",), ("noise_large",)),
}


class Question(NamedTuple):
    """A check that every cause gets: `first` minus `second` in its cells; `second` None: `first` without drift."""

    text: str
    first: str
    second: str | None
    expected: str


QUESTIONS = {
    "harm": Question("Drift costs REINFORCE accuracy.", PLAIN, None, "lower"),
    "clip": Question("A clip helps.", NARROW, PLAIN, "higher"),
    "weight": Question("IPO (a weight and a mask) does no harm.", "ipo", PLAIN, "no_lower"),
    "weight_and_clip": Question(
        "GRPO (the clip, a weight, division by σ) loses nothing to the clip.", "grpo", NARROW, "no_lower"
    ),
    "capped": Question(
        "TIS (a capped weight, division by σ, no clip) helps as much as the clip.", "tis", NARROW, "no_lower"
    ),
    "centering": Question("Score centering helps.", "score_centering", PLAIN, "higher"),
    "centering_and_clip": Question(
        "Score centering helps next to a clip.", "rec_one_side_nois_centered", NARROW, "higher"
    ),
    "centering_or_clip": Question("Score centering helps as much as a clip.", "score_centering", NARROW, "no_lower"),
    "pull": Question("A pull to the sampler helps.", "opmd", PLAIN, "higher"),
}


Found = dict[str, dict[str, Check | None]]  # the checks of a task, by question and cause


def check(ends: pd.Series, question: Question, cause: Cause) -> Check | None:
    """The number of a question in a cause's cells, paired by engine and seed; None with fewer than two seeds.

    Args:
        ends: final accuracy or reward by algorithm, age, engine and seed.
    """
    what = f"{question.first} − {question.second or f'{question.first} without drift'}: {cause.name}"
    where = {"age": cause.ages, "engine": cause.engines}
    try:
        if question.second is None:
            found = estimate(seed_means(lost_by_drift(ends, question.first, cause)).to_numpy())
        else:
            found = paired_difference(ends, "algorithm", question.first, question.second, **where)
    except UserError:
        return None
    return Check(what, question.expected, MARGIN, found)


def lost_by_drift(ends: pd.Series, algorithm: str, cause: Cause) -> pd.Series:
    """A cause's cells minus the cell without drift, of one algorithm, paired by seed; by cell and seed."""
    by_cell = ends.xs(algorithm, level="algorithm").unstack("seed")
    if BASE not in by_cell.index:
        return pd.Series(dtype=float)
    cells = [cell for cell in by_cell.index if cell[0] in cause.ages and cell[1] in cause.engines]
    return (by_cell.loc[cells] - by_cell.loc[BASE]).stack().dropna()


def checks(ends: pd.Series) -> Found:
    """The check of every question and cause, by their names."""
    return {
        name: {cause: check(ends, question, cells) for cause, cells in CAUSES.items()}
        for name, question in QUESTIONS.items()
    }


def is_same(made: Check) -> bool:
    """True if a check is about a direction and its whole interval or range is within NEGLIGIBLE."""
    return max(abs(made.found.low), abs(made.found.high)) < NEGLIGIBLE and made.expected in ("higher", "lower")


def corrected(found: Found) -> set[tuple[str, str]]:
    """The questions and causes whose checks hold after Holm's correction for all verdicts of a task."""
    made = {
        (question, cause): check
        for question, by_cause in found.items()
        for cause, check in by_cause.items()
        if check is not None and not check.found.is_range
    }
    adjusted = holm([check.p_value for check in made.values()])
    return {place for place, p_value in zip(made, adjusted, strict=True) if p_value <= ONE_SIDED}


def chance_text(found: Found) -> str:
    """How many verdicts of a task there are, hold, and would hold by chance; ranges have no verdicts."""
    made = [check for by_cause in found.values() for check in by_cause.values() if check is not None]
    tested = [check for check in made if not check.found.is_range]
    if not tested:
        return "Too few seeds for verdicts.\n"
    holding = sum(check.outcome == "as claimed" for check in tested)
    by_chance = ONE_SIDED * len(tested)
    return (
        f"{len(tested)} checks have verdicts. {holding} are as claimed one by one, and {len(corrected(found))} after"
        f" Holm's correction. Without any effect, {by_chance:.1f} would be as claimed by chance.\n"
    )


def verdict(made: Check | None, survives: bool = True) -> str:
    """A check's outcome as the verdict of a claim.

    Args:
        survives: False if the check does not hold after the correction for the number of verdicts.
    """
    if made is None:
        return "not run"
    if is_same(made):
        return f"{SAME} in any seed" if made.found.is_range else SAME
    words = Claim("", (), [made]).verdict
    return "holds alone" if words == "holds" and not survives else words


def cell_text(made: Check | None) -> str:
    """Mean, spread, number of seeds and outcome of a check."""
    if made is None:
        return "not run"
    mean, low, high, count = made.found
    return f"{mean:+.3f} ({low:+.3f} to {high:+.3f}), {count}: {SAME if is_same(made) else made.shown}"


def checks_table(found: Found) -> str:
    """A row a question, a column a cause."""
    rows = []
    for name, question in QUESTIONS.items():
        cells = (cell_text(found[name][cause]) for cause in CAUSES)
        rows.append([question.text, f"{name_of(question)}: {claimed(question)}", *cells])
    return markdown_table(["", "number, as claimed if", *(cause.name for cause in CAUSES.values())], rows)


def name_of(question: Question) -> str:
    """The difference in words."""
    second = NAMES[question.second] if question.second else "without drift"
    return f"{NAMES[question.first]} − {second}"


def claimed(question: Question) -> str:
    """What a question says of its number."""
    return Check("", question.expected, MARGIN, estimate(np.zeros(2))).claimed


def cells_table(ends: pd.Series) -> str:
    """Every cell that was run: mean over seeds, and number of seeds. Rows without a run are left out."""
    by_cell = ends.groupby(["engine", "age", "algorithm"])
    means, counts = by_cell.mean(), by_cell.count()
    rows = []
    for engine, shown in ENGINES.items():
        for age in AGES:
            cells = [(engine, age, algorithm) for algorithm in NAMES]
            if any(cell in means.index for cell in cells):
                texts = (f"{means[cell]:.3f} ({counts[cell]})" if cell in means.index else "–" for cell in cells)
                rows.append([shown, age, *texts])
    return markdown_table(["engine", "age", *NAMES.values()], rows)


def draw_map(ends: pd.Series, table: pd.DataFrame) -> Figure:
    """Where runs end by age and engine, a panel an algorithm."""
    cells = ["algorithm", "engine", "age"]
    means = ends.groupby(cells).mean()
    falls = fallen(table).groupby(cells).mean() if "step" in table else 0.0 * means
    names = {name: shown for name, shown in NAMES.items() if name in means.index}
    ages = Side({age: age for age in AGES}, "age: sync_interval in optimizer steps")
    options = {} if "step" in table else {"measured": "Expected reward", "lowest": 0.6}
    return draw_cells(means, falls, names, ages, Side(ENGINES), **options)


PANELS = {
    "age": "old samples",
    "noise": "noisy engine",
    "noise_wrong": "noisy engine,\nwrong log-probs",
}


def draw_gradients(gradients: pd.DataFrame) -> Figure:
    """Direction and noise of each algorithm's gradient over KL(μ ‖ π), a column a cause."""
    figure = new_figure(9, 6, "")
    panels = figure.subplots(2, len(PANELS), sharex=True, sharey="row")
    labels = {"cosine": "cosine to the\npolicy gradient", "noise": "noise of a batch\n(relative to the mean)"}
    for column, (cause, title) in enumerate(PANELS.items()):
        of_cause = gradients[(gradients["cause"] == cause) & (gradients["kl"] > 1e-7)]
        panels[0, column].set_title(title, fontsize=10)
        for row, name in enumerate(labels):
            axes = panels[row, column]
            for algorithm, (color, style) in LINES.items():
                own = of_cause[of_cause["algorithm"] == algorithm].sort_values("kl")
                line = {"color": color, "ls": style, "marker": "o", "ms": 3, "lw": 1.5}
                axes.plot(own["kl"], own[name], label=NAMES[algorithm], **line)
            axes.set_xscale("log")
            if column == 0:
                axes.set_ylabel(labels[name])
            if row == 1:
                axes.set_xlabel("KL(μ ‖ π), nats")
    for axes in panels[1]:
        axes.set_yscale("log")
    plain_ticks(panels[1, 0].yaxis)
    add_legend(figure, *panels[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return finish(figure)


TASKS = {"bandit": "bandit", "quickstart": "sums", "smollm2": "SmolLM2"}
SUMMARIZED = ("age20", "age50", "noise", "wrong")  # causes in the table of verdicts
COMPARED_KL = 0.05  # nats, near which the page's table compares the causes' gradients
NOT_RUN = "Not run.\n"
TOO_FEW = "Too few runs for a check.\n"


def read_tables(folder: Path) -> dict[str, pd.DataFrame]:
    """The tables that are in a folder, by name: gradients, and those of TASKS."""
    paths = {name: folder / f"{name}.parquet" for name in ("gradients", *TASKS)}
    return {name: pd.read_parquet(path) for name, path in paths.items() if path.exists()}


def ends_of(table: pd.DataFrame) -> pd.Series:
    """The number of each run that the checks compare, by algorithm, age, engine and seed.

    It is the last policy's expected reward on the bandit, and elsewhere the final accuracy.
    """
    if "step" in table:
        return final(table)
    return table.set_index(["algorithm", "age", "engine", "seed"])["reward"]


def all_cells(name: str) -> set[tuple[str, ...]]:
    """The cells of a task, run or not: of every grid of its sweep file, or of the bandit."""
    if name == "bandit":
        seeds = [str(seed) for seed in range(BANDIT_SEEDS)]
        return set(itertools.product(NAMES, AGES, ENGINES, seeds))
    sweep = read_yaml_file(HERE / f"{name}.yaml")
    cells = set()
    for grid in sweep["grids"]:
        axes = [[*sweep["settings"][axis]] if chosen == "all" else chosen for axis, chosen in grid.items()]
        cells |= set(itertools.product(*axes))
    return cells


def has_checks(found: Found) -> bool:
    """True if a task has enough runs for at least one check."""
    return any(made is not None for by_cause in found.values() for made in by_cause.values())


def verdicts_table(found: dict[str, Found]) -> str:
    """A row a question: the verdict of each cause on each task.

    Args:
        found: the checks of each task that has runs.
    """
    rows = []
    surviving = {task: corrected(of_task) for task, of_task in found.items()}
    for name, question in QUESTIONS.items():
        verdicts = [
            verdict(of_task[name][cause], (name, cause) in surviving[task])
            for task, of_task in found.items()
            for cause in SUMMARIZED
        ]
        rows.append([question.text, *verdicts])
    header = [f"{TASKS[task]}: {CAUSES[cause].name}" for task in found for cause in SUMMARIZED]
    return markdown_table(["", *header], rows)


def gradients_table(gradients: pd.DataFrame) -> str:
    """Cosine and noise of each algorithm at the size of each cause whose KL(μ ‖ π) is nearest to COMPARED_KL."""
    rows = []
    for cause, title in PANELS.items():
        of_cause = gradients[gradients["cause"] == cause]
        sizes = of_cause.groupby("size")["kl"].first()
        size = (np.log(sizes) - np.log(COMPARED_KL)).abs().idxmin()
        at_size = of_cause[of_cause["size"] == size].set_index("algorithm")
        cells = [f"{at_size['cosine'][name]:.3f}; {at_size['noise'][name]:.2f}" for name in NAMES]
        rows.append([title.replace("\n", " "), f"{size:g}", f"{sizes[size]:.3f}", *cells])
    return markdown_table(["cause", "age or scale", "KL", *NAMES.values()], rows)


def measured_kl(table: pd.DataFrame) -> str:
    """KL(μ ‖ π) of REINFORCE's runs in each cell, as an update measures it."""
    rows = []
    plain = table[(table["algorithm"] == PLAIN) & (table["step"] > 0)]
    means = plain.groupby(["engine", "age"])["behavior_kl/k3"].mean()
    for engine, shown in ENGINES.items():
        rows.append([shown, *(f"{means[engine, age]:.4f}" if (engine, age) in means.index else "–" for age in AGES)])
    return markdown_table(["engine", *(f"age {age}" for age in AGES)], rows)


def fill_in(text: str, ends: dict[str, pd.Series], found: dict[str, Found]) -> str:
    """The text with numbers: `{{TASK QUESTION CAUSE}}` of a check, `{{TASK ALGORITHM AGE ENGINE}}` of a cell."""

    def check_text(place: re.Match) -> str:
        task, question, cause = place.groups()
        made = found[task][question][cause] if task in found else None
        return (
            "not run" if made is None else f"{made.found.mean:+.3f} ({made.found.low:+.3f} to {made.found.high:+.3f})"
        )

    def cell(place: re.Match) -> str:
        task, *where = place.groups()
        cells = ends[task].groupby(["algorithm", "age", "engine"]).mean() if task in ends else {}
        return f"{cells[tuple(where)]:.3f}" if tuple(where) in cells else "not run"

    tasks = "|".join(TASKS)
    text = re.sub(rf"\{{\{{({tasks}) ({'|'.join(QUESTIONS)}) ({'|'.join(CAUSES)})\}}\}}", check_text, text)
    return re.sub(rf"\{{\{{({tasks}) (\w+) (\d+) (\w+)\}}\}}", cell, text)


def write_page(tables: dict[str, pd.DataFrame], docs: Path, notes: Path) -> None:
    """drift.md with its figures in the folder of docs, and README.md with all cells in that of notes."""
    for task in TASKS:
        if task in tables and "step" in tables[task]:
            check_starts(task, tables[task])
    pictures = docs / "drift"
    pictures.mkdir(parents=True, exist_ok=True)
    ends = {task: ends_of(tables[task]) for task in TASKS if task in tables}
    found = {task: checks(of_task) for task, of_task in ends.items()}
    compared = {task: of_task for task, of_task in found.items() if has_checks(of_task)}
    parts = {"verdicts": verdicts_table(compared), "gradients": NOT_RUN, "quickstart_kl": NOT_RUN}
    if "gradients" in tables:
        draw_gradients(tables["gradients"]).savefig(pictures / "gradients.png", dpi=100)
        parts["gradients"] = gradients_table(tables["gradients"])
    if "quickstart" in tables:
        parts["quickstart_kl"] = measured_kl(tables["quickstart"])
    parts["maps"] = ""
    for task in ("bandit", "quickstart"):
        if task in ends and ends[task].index.get_level_values("algorithm").nunique() > 1:
            draw_map(ends[task], tables[task]).savefig(pictures / f"{task}.png", dpi=100)
            parts["maps"] += f"![{TASKS[task]}: results by age and engine for each algorithm](drift/{task}.png)\n\n"
    for task in TASKS:
        parts[f"{task}_checks"] = checks_table(found[task]) if task in compared else TOO_FEW
        parts[f"{task}_chance"] = chance_text(found[task]) if task in compared else ""
        parts[f"{task}_cells"] = cells_table(ends[task]) if task in ends else NOT_RUN
        parts[f"{task}_runs"] = str(len(ends.get(task, ())))
        parts[f"{task}_all"] = str(len(all_cells(task)))
    for template, page in (("page.md", docs / "drift.md"), ("notes.md", notes / "README.md")):
        text = (HERE / template).read_text(encoding="utf-8")
        for key, value in parts.items():
            text = text.replace(f"{{{{{key}}}}}", value)
        page.write_text(fill_in(text, ends, found), encoding="utf-8")
