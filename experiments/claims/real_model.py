"""What SmolLM2's runs have to show: the choice of the rate, where each algorithm ends, and the claims with intervals.

Checks and margins were written down before any run but REINFORCE's at the three slowest rates was made.
"""

import pandas as pd
from matplotlib.axes import Axes

from experiments.claims.map_page import NO_VERDICTS, in_words
from experiments.claims.markdown import markdown_table
from experiments.claims.readings import rates_of
from experiments.claims.verdicts import (
    KL_MARGIN,
    MARGIN,
    NARROW,
    WIDE,
    Claim,
    compare,
    fallen,
    gain,
    log_divergences,
    mean_over_steps,
)
from recjax.analysis.compare import final
from recjax.errors import UserError
from recjax.plots.style import COLORS

REGIME = ("interval_20",)
EARLY = 20  # steps until weights reach the sampler for the first time


def claims(table: pd.DataFrame) -> dict[str, Claim]:
    """The claims that runs in one regime can test, each once all its algorithms have two seeds."""
    ends, means, divergences = final(table), mean_over_steps(table), log_divergences(table)
    mean, last = "mean accuracy over training", "final accuracy"

    def check(what, values, first, second, expected, margin=MARGIN):
        return compare(what, values, first, second, expected, REGIME, margin)

    tested = {
        "C1": (
            "Dropping the importance weights changes next to nothing.",
            ("grpo", NARROW),
            lambda: [check(mean, means, NARROW, "grpo", "alike")],
        ),
        "C2": (
            "Without clipping, off-policy training collapses; with it, it does not.",
            ("reinforce", NARROW),
            lambda: [check(last, ends, "reinforce", NARROW, "lower"), gain(table, NARROW, REGIME)],
        ),
        "C3": (
            "The wide range (0.6, 2.0) learns faster.",
            (NARROW, WIDE),
            lambda: [check(mean, means, WIDE, NARROW, "higher")],
        ),
        "C5": (
            "RED-Drop and RED-Weight beat GRPO; RED-Weight at like KL.",
            ("grpo", "red_drop", "red_weight"),
            lambda: [
                check(mean, means, "red_drop", "grpo", "higher"),
                check(mean, means, "red_weight", "grpo", "higher"),
                check("log KL(π ‖ π₀) at the end", divergences, "red_weight", "grpo", "alike", KL_MARGIN),
            ],
        ),
        "C6": (
            "OPMD behaves like REC: regularized REINFORCE.",
            ("reinforce", NARROW, "opmd"),
            lambda: [check(last, ends, "opmd", "reinforce", "higher"), check(last, ends, "opmd", NARROW, "alike")],
        ),
    }
    seeds = table.groupby("algorithm")["seed"].nunique()
    return {
        name: Claim(text, algorithms, checks())
        for name, (text, algorithms, checks) in tested.items()
        if seeds.reindex(algorithms, fill_value=0).min() >= 2
    }


def chosen_rate(table: pd.DataFrame) -> str:
    """The rate of the runs of more than REINFORCE."""
    rates = table.loc[table["algorithm"] != "reinforce", "rate"].unique()
    if len(rates) != 1:
        raise UserError("", f"the algorithms' runs are at {len(rates)} rates, not at one: {', '.join(rates)}")
    return rates[0]


def main_runs(table: pd.DataFrame) -> pd.DataFrame:
    """The runs at the chosen rate, without their column of rates."""
    return table[table["rate"] == chosen_rate(table)].drop(columns="rate")


def parts(table: pd.DataFrame, names: dict[str, str], of: str) -> dict[str, str]:
    """What the page says of SmolLM2's runs on a task, by the names of its places, which begin with `of`."""
    main = main_runs(table)
    verdicts, numbers = claims_text(claims(main), names)
    return {
        of: _algorithms_table(main, names),
        f"{of}_rate": chosen_rate(table),
        f"{of}_runs": str(len(final(table))),
        f"{of}_verdicts": verdicts,
        f"{of}_numbers": numbers,
    }


def _evaluated(table: pd.DataFrame) -> tuple[list[int], pd.DataFrame]:
    rows = table.dropna(subset="evaluation/accuracy")
    return sorted(rows["step"].unique()), rows


def rates_table(table: pd.DataFrame) -> str:
    """REINFORCE's held-out accuracy by rate and step, of seed 0."""
    table = table[(table["algorithm"] == "reinforce") & (table["seed"] == "0")]
    steps, evaluated = _evaluated(table)
    falls = fallen(table).groupby("rate").mean()
    rows = []
    for rate in rates_of(table):
        of_rate = evaluated[evaluated["rate"] == rate].set_index("step")
        values = [f"{value:.3f}" for value in of_rate["evaluation/accuracy"].reindex(steps)]
        divergence = of_rate["evaluation/initial_kl"].iloc[-1]
        rows.append([rate, *values, f"{falls[rate]:.3f}", f"{divergence:.2f}"])
    return markdown_table(["REINFORCE", *(f"step {step}" for step in steps), "fall", "KL(π ‖ π₀)"], rows)


def _algorithms_table(table: pd.DataFrame, names: dict[str, str]) -> str:
    """Means over seeds of each evaluation; of the final accuracy also the lowest and the highest seed."""
    steps, evaluated = _evaluated(table)
    ends, rows = final(table), []
    for algorithm in dict.fromkeys(table["algorithm"]):
        own, of_steps = (rows_of[rows_of["algorithm"] == algorithm] for rows_of in (table, evaluated))
        means = of_steps.groupby("step")[["evaluation/accuracy", "evaluation/initial_kl"]].mean()
        end = ends.xs(algorithm, level="algorithm")
        sample_size = own.loc[own["step"].between(1, EARLY), "effective_sample_size"].mean()
        rows.append(
            [
                names[algorithm],
                *(f"{value:.3f}" for value in means["evaluation/accuracy"].reindex(steps)),
                f"{end.mean():.3f} ({end.min():.3f}–{end.max():.3f})",
                f"{means['evaluation/initial_kl'].iloc[-1]:.2f}",
                f"{sample_size:.2f}",
                str(len(end)),
            ]
        )
    header = ["held-out accuracy", *(f"step {step}" for step in steps)]
    return markdown_table([*header, "final accuracy", "KL(π ‖ π₀) at the end", "early sample size", "seeds"], rows)


def claims_text(found: dict[str, Claim], names: dict[str, str]) -> tuple[str, str]:
    """The verdicts, and the numbers that they follow from."""
    if not found:
        return NO_VERDICTS, ""
    verdicts = markdown_table(
        ["", "claim", "verdict"], [[name, claim.text, claim.verdict] for name, claim in found.items()]
    )
    rows = []
    for name, claim in found.items():
        for check in claim.checks:
            mean, low, high, count = check.found
            value = f"{mean:+.3f} ({low:+.3f} to {high:+.3f}), {count} seeds: {check.shown}"
            rows.append([name, in_words(check.what, names), check.claimed, value])
    return verdicts, markdown_table(["", "number", "as claimed if", "mean (range of the seeds)"], rows)


def draw_bands(axes: Axes, lines: dict[str, pd.DataFrame]) -> None:
    """Held-out accuracy over steps: the mean over seeds, the band from the lowest to the highest, and its name."""
    ends = []
    for color, (name, table) in zip(COLORS, lines.items(), strict=False):
        values = table.groupby("step")["evaluation/accuracy"].agg(["mean", "min", "max"]).dropna()
        axes.fill_between(values.index, values["min"], values["max"], color=color, alpha=0.18, lw=0)
        axes.plot(values.index, values["mean"], color=color, lw=2)
        ends.append((values["mean"].iloc[-1], name, color, values.index[-1]))
    low, high = axes.get_ylim()
    place = -1.0
    for end, name, color, step in sorted(ends):
        place = max(end, place + 0.06 * (high - low))
        axes.annotate(name, (step, place), (6, 0), textcoords="offset points", color=color, va="center")
    axes.set_xlabel("optimizer step")
    axes.set_xlim(0, ends[0][-1])
