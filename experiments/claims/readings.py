"""The map read in three ways, and the paper's claims under each.

A reading is the map's table without its axis of rates. Readings, checks and margins were written down before the map's
runs were looked at.
"""

from typing import NamedTuple

import numpy as np
import pandas as pd

from experiments.claims.staleness import EARLY
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
from recjax.analysis.collect import axes_of
from recjax.analysis.compare import final

STALE = ("interval_5", "interval_20", "interval_50", "offset_10")
OFF_POLICY = (*STALE, "offline")
REGIMES = ("on_policy", *OFF_POLICY)
WITHIN = 0.03  # accuracies this far below the best are as good
THRESHOLD = 0.4  # an effective sample size below it, early, predicts that the run ends below its start
# What a table's column is called. The edge is the highest rate at which on-policy REINFORCE is monotone.
READINGS = {"edge": "at {edge}", "best": "at each one's best rate", "area": "over all rates"}


def rates_of(table: pd.DataFrame) -> list[str]:
    """The table's rates, the slowest first."""
    return sorted(table["rate"].unique(), key=float)


def edge_rate(table: pd.DataFrame) -> str:
    """The highest rate up to which on-policy REINFORCE ends within MARGIN of its best evaluation, on average."""
    falls = fallen(table).xs(("reinforce", "on_policy"), level=("algorithm", "regime")).groupby("rate").mean()
    rates = rates_of(table)
    monotone = (falls[rates] <= MARGIN).cumprod().sum()
    return rates[max(int(monotone), 1) - 1]


def best_rates(ends: pd.Series) -> pd.Series:
    """Each run's rate where its algorithm ends best in its regime, by the other seeds; with one seed, by that one.

    Args:
        ends: an accuracy by algorithm, rate, regime and seed.
    """
    by_seed = ends.unstack("seed")
    if by_seed.shape[1] > 1:
        by_seed = by_seed.rsub(by_seed.sum(axis=1), axis=0)
    return by_seed.stack().groupby(["algorithm", "regime", "seed"]).idxmax().map(lambda place: place[1])


def read(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The table under each of READINGS, without the axis of rates."""
    index = ["algorithm", "regime", "seed"]
    chosen = best_rates(final(table).reorder_levels(["algorithm", "rate", "regime", "seed"]))
    best = table["rate"].to_numpy() == chosen.reindex(pd.MultiIndex.from_frame(table[index])).to_numpy()
    return {
        "edge": table[table["rate"] == edge_rate(table)].drop(columns="rate"),
        "best": table[best].drop(columns="rate"),
        "area": table.drop(columns="rate").groupby([*index, "step"], sort=False).mean().reset_index(),
    }


def claims(table: pd.DataFrame) -> dict[str, Claim]:
    """The claims on one reading. C4 is not among them: the map's rates are factors of two apart."""
    ends, means, falls, divergences = final(table), mean_over_steps(table), fallen(table), log_divergences(table)
    mean, last, fall = "mean accuracy over training", "final accuracy", "fall from the best evaluation to the last"
    return {
        "C1": Claim(
            "Dropping the importance weights changes next to nothing: REC-OneSide-NoIS ≈ -IS ≈ GRPO.",
            ("grpo", "rec_one_side_is", NARROW),
            [compare(mean, means, NARROW, other, "alike", REGIMES) for other in ("rec_one_side_is", "grpo")],
        ),
        "C2": Claim(
            "Without clipping, off-policy training collapses; with it, it does not.",
            ("reinforce", NARROW),
            [compare(last, ends, "reinforce", NARROW, "lower", OFF_POLICY), gain(table, NARROW, OFF_POLICY)],
        ),
        "C3": Claim(
            "The wide range (0.6, 2.0) learns faster; purely offline it is faster but less stable.",
            (NARROW, WIDE),
            [
                compare(mean, means, WIDE, NARROW, "higher", STALE),
                compare(mean, means, WIDE, NARROW, "higher", ("offline",)),
                compare(fall, falls, WIDE, NARROW, "higher", ("offline",)),
            ],
        ),
        "C5": Claim(
            "RED-Drop and RED-Weight beat GRPO on- and off-policy; RED-Weight at like KL.",
            ("grpo", "red_drop", "red_weight"),
            [
                *(
                    compare(mean, means, name, "grpo", "higher", regimes)
                    for name in ("red_drop", "red_weight")
                    for regimes in (("on_policy",), OFF_POLICY)
                ),
                compare("log KL(π ‖ π₀) at the end", divergences, "red_weight", "grpo", "alike", REGIMES, KL_MARGIN),
            ],
        ),
        "C6": Claim(
            "OPMD and AsymRE behave like REC: regularized REINFORCE.",
            ("reinforce", NARROW, "opmd", "asymre"),
            [
                compare(last, ends, name, other, expected, OFF_POLICY)
                for name in ("opmd", "asymre")
                for other, expected in (("reinforce", "higher"), (NARROW, "alike"))
            ],
        ),
        "C7": Claim(
            "Ring clipping sits between: faster than the narrow range, more stable than the wide one.",
            (NARROW, WIDE, "rec_ring_nois"),
            [
                compare(mean, means, "rec_ring_nois", NARROW, "higher", OFF_POLICY),
                compare(fall, falls, "rec_ring_nois", WIDE, "lower", OFF_POLICY),
            ],
        ),
    }


class Best(NamedTuple):
    """An algorithm's best rate in a regime, the accuracy there, and the span of rates within WITHIN of it."""

    rate: str
    accuracy: float  # mean over seeds
    lowest: float  # of the seeds
    highest: float
    slowest: str
    fastest: str


def best_of(ends: pd.Series, rates: list[str]) -> Best:
    """The best of one algorithm in one regime.

    Args:
        ends: final accuracies by rate and seed; of a rate there may be none yet.
    """
    values = ends.groupby("rate").mean().reindex(rates).to_numpy()
    place = first = last = int(np.nanargmax(values))
    good = values >= values[place] - WITHIN
    while first > 0 and good[first - 1]:
        first -= 1
    while last + 1 < len(rates) and good[last + 1]:
        last += 1
    seeds = ends.xs(rates[place], level="rate")
    return Best(rates[place], float(values[place]), seeds.min(), seeds.max(), rates[first], rates[last])


class Foretold(NamedTuple):
    """Runs by the prediction of the early effective sample size, and by their outcome."""

    hits: int
    false_alarms: int
    misses: int
    rightly_quiet: int


def forecasts(table: pd.DataFrame) -> pd.DataFrame:
    """Alarm and loss of each off-policy run, where the early effective sample size gives the alarm.

    The alarm is a mean below THRESHOLD in steps 1 to EARLY. A lost run ends below its start. On-policy runs,
    whose ratios are 1, are skipped.
    """
    runs, axes = table[table["regime"] != "on_policy"], axes_of(table)
    early = runs[(runs["step"] > 0) & (runs["step"] <= EARLY)].groupby(axes)["effective_sample_size"].mean()
    starts = runs[runs["step"] == 0].set_index(axes)["evaluation/accuracy"]
    lost = final(runs).reindex(early.index) < starts.reindex(early.index)
    return pd.DataFrame({"alarmed": early < THRESHOLD, "lost": lost})


def foretold(table: pd.DataFrame) -> Foretold:
    """How often the alarm of `forecasts` was right and wrong."""
    told = forecasts(table)
    cases = (told["alarmed"] & told["lost"], told["alarmed"] & ~told["lost"])
    quiet = (~told["alarmed"] & told["lost"], ~told["alarmed"] & ~told["lost"])
    return Foretold(*(int(case.sum()) for case in (*cases, *quiet)))
