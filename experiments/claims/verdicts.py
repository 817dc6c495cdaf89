"""Tests the paper's claims C1 to C7 on the metrics of the grid.

Every claim is a list of checks, each a mean over seeds with Student's interval, against what the claim says of it. With
fewer seeds than a verdict needs, a check only says whether every seed agrees. The checks and the margins were written
down before the grid was run.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import scipy

from recjax.analysis.collect import differing_starts
from recjax.analysis.compare import evaluations_of, final, paired_seeds
from recjax.analysis.statistics import MIN_SEEDS, Estimate, estimate, holm, seed_means
from recjax.errors import UserError

MARGIN = 0.05  # accuracies closer than this are alike
KL_MARGIN = float(np.log(1.5))  # divergences within a factor of 1.5 are alike
OFF_POLICY = ("interval_20", "offset_10", "offline")
REGIMES = ("on_policy", *OFF_POLICY)
NARROW, WIDE = "rec_one_side_nois", "rec_one_side_nois_wide"


def check_starts(name: str, table: pd.DataFrame) -> None:
    """Refuses a table in which runs of one seed begin with different policies.

    Args:
        name: name of the table.
    Raises:
        ValueError: with the seed and the values; such runs are of several commits, machines or settings.
    """
    mixed = differing_starts(table)
    if mixed:
        raise UserError(
            "", f"{name}: runs of one seed begin with different policies ({mixed[0]}); make these runs again"
        )


def mean_over_steps(table: pd.DataFrame) -> pd.Series:
    """The mean of each run's evaluations after step 0, by its settings; higher for runs that learn sooner."""
    return evaluations_of(table[table["step"] > 0]).mean()


def fallen(table: pd.DataFrame) -> pd.Series:
    """The drop from each run's best evaluation to its last, by its settings; 0 for a run that ends at its best."""
    return evaluations_of(table).max() - final(table, last=1)


def paired_difference(values: pd.Series, axis: str, first: str, second: str, **where: Sequence[str]) -> Estimate:
    """`first` minus `second` on one axis, paired by all other settings; a seed counts once, with the mean of its pairs.

    Args:
        values: one number a run, by its settings.
        axis: the setting in which the two differ.
        where: the pairs' settings, as values by axis.
    Raises:
        ValueError: fewer than two seeds.
    """
    return estimate(paired_seeds(values, axis, first, second, **where))


class Check(NamedTuple):
    """One number of a claim: what it is, what the claim says of it, and what came out."""

    what: str
    expected: str  # higher | lower: than 0; alike: within the margin of 0; no_lower: than the margin below 0
    margin: float
    found: Estimate

    @property
    def claimed(self) -> str:
        """What the claim says of the number, in words."""
        if self.expected == "no_lower":
            return f"no lower than −{self.margin:.2g}"
        return f"within ±{self.margin:.2g}" if self.expected == "alike" else f"{self.expected} than 0"

    @property
    def outcome(self) -> str:
        """as claimed | contrary | undecided, by where the interval or the range of the seeds lies."""
        low, high = self.found.low, self.found.high
        if self.expected == "alike":
            inside, outside = -self.margin <= low and high <= self.margin, low > self.margin or high < -self.margin
        elif self.expected == "no_lower":
            inside, outside = low >= -self.margin, high < -self.margin
        else:
            sign = 1 if self.expected == "higher" else -1
            inside, outside = min(sign * low, sign * high) > 0, max(sign * low, sign * high) < 0
        if inside:
            return "as claimed"
        return "contrary" if outside else "undecided"

    @property
    def p_value(self) -> float:
        """The one-sided p-value of Student's t test of the claim; for `alike` the larger one of two such tests.

        It is below 0.025 if the 95 % interval is on the claimed side. It needs MIN_SEEDS seeds.
        """
        mean, low, high, count = self.found
        reach = (high - low) / 2
        if reach == 0:
            return 0.0 if self.outcome == "as claimed" else 1.0
        error = reach / scipy.stats.t.ppf(0.975, count - 1)
        above = scipy.stats.t.sf((mean + self.margin * (self.expected in ("alike", "no_lower"))) / error, count - 1)
        below = scipy.stats.t.cdf((mean - self.margin * (self.expected == "alike")) / error, count - 1)
        if self.expected == "alike":
            return float(max(above, below))
        return float(below if self.expected == "lower" else above)

    @property
    def shown(self) -> str:
        """The outcome in words; with too few seeds for a verdict, what each seed says."""
        if not self.found.is_range:
            return self.outcome
        if self.outcome == "undecided":
            return "differs by seed"
        return f"{self.outcome} in each of {self.found.count} seeds"


# Tables have a sign for each verdict, which docs/site/hooks.py tints, and a line that says what the signs mean.
SIGNS = {
    "holds": "✓",
    "holds alone": "(✓)",
    "does not hold here": "✗",
    "not visible at this scale": "○",
    "no difference": "≈",
    "seen in every seed": "▲",
    "contrary in every seed": "▼",
    "differs by seed": "◇",
}
LEVEL = 0.025  # largest one-sided p-value of a check that holds, after Holm's correction


def surviving(checks: Sequence[Check]) -> list[bool]:
    """Which checks hold after Holm's correction for all of them that have a verdict."""
    tested = [check for check in checks if not check.found.is_range]
    adjusted = iter(holm([check.p_value for check in tested]))
    return [not check.found.is_range and next(adjusted) <= LEVEL for check in checks]


def chance_text(checks: Sequence[Check], planned: int) -> str:
    """How many verdicts there are, hold, and would hold by chance; ranges have no verdicts.

    Args:
        checks: those that were made.
        planned: number of checks, made or not.
    """
    tested = [check for check in checks if not check.found.is_range]
    if not tested:
        return f"None of the {planned} checks has the {MIN_SEEDS} seeds that a verdict needs."
    holding = sum(check.outcome == "as claimed" for check in tested)
    return (
        f"{len(tested)} of {planned} checks have verdicts. {holding} are as claimed one by one, and"
        f" {sum(surviving(tested))} after Holm's correction. Without any effect, {LEVEL * len(tested):.1f} would be as"
        " claimed by chance."
    )


class Claim(NamedTuple):
    """A claim of the paper, its checks, and the algorithms that its figure shows."""

    text: str
    algorithms: tuple[str, ...]
    checks: list[Check]

    @property
    def verdict(self) -> str:
        """Holds where every check comes out as claimed; does not hold where one comes out contrary.

        If a check has fewer than MIN_SEEDS seeds, there is no verdict, and the words say whether every seed agrees.
        """
        outcomes = {check.outcome for check in self.checks}
        words = ["does not hold here", "holds", "not visible at this scale"]
        if any(check.found.is_range for check in self.checks):
            words = ["contrary in every seed", "seen in every seed", "differs by seed"]
        if "contrary" in outcomes:
            return words[0]
        return words[1] if outcomes == {"as claimed"} else words[2]


def legend(words: Iterable[str]) -> str:
    """What the signs of a table mean, of those verdicts that occur in it."""
    shown = set(words)
    return ", ".join(f"{sign} {verdict}" for verdict, sign in SIGNS.items() if verdict in shown) + "."


def compare(
    what: str, values: pd.Series, first: str, second: str, expected: str, regimes=REGIMES, margin: float = MARGIN
) -> Check:
    """`first` minus `second`, paired by seed and regime."""
    named = f"{what}: {first} − {second}, {regimes[0] if len(regimes) == 1 else 'all of ' + ', '.join(regimes)}"
    return Check(named, expected, margin, paired_difference(values, "algorithm", first, second, regime=regimes))


def gain(table: pd.DataFrame, algorithm: str, regimes: tuple[str, ...]) -> Check:
    """That an algorithm ends above its start."""
    ends = final(table)
    starts = table[table["step"] == 0].set_index(ends.index.names)["evaluation/accuracy"]
    of_runs = (ends - starts).xs(algorithm, level="algorithm")
    of_runs = of_runs[of_runs.index.get_level_values("regime").isin(regimes)]
    what = f"final accuracy − accuracy before training: {algorithm}, {', '.join(regimes)}"
    return Check(what, "higher", MARGIN, estimate(seed_means(of_runs).to_numpy()))


def log_divergences(table: pd.DataFrame) -> pd.Series:
    """The logarithm of KL(π ‖ π₀) at the end of each run."""
    return np.log(final(table, "evaluation/initial_kl").clip(lower=1e-6))


def claims(table: pd.DataFrame) -> dict[str, Claim]:
    """The claims with their checks, of a table as `recjax.analysis.collect` makes it; in the regimes that it has."""
    ends, means, falls, divergences = final(table), mean_over_steps(table), fallen(table), log_divergences(table)
    known = set(table["regime"])
    every = tuple(regime for regime in REGIMES if regime in known)
    stale = tuple(regime for regime in OFF_POLICY if regime in known)

    def each(what: str, values: pd.Series, first: str, second: str, expected: str, regimes=every):
        return [compare(what, values, first, second, expected, (regime,)) for regime in regimes]

    mean, last, fall = "mean accuracy over training", "final accuracy", "fall from the best evaluation to the last"
    return {
        "C1": Claim(
            "Dropping the importance weights changes next to nothing: REC-OneSide-NoIS ≈ -IS ≈ GRPO in every regime.",
            ("grpo", "rec_one_side_is", NARROW),
            [
                *each(mean, means, NARROW, "rec_one_side_is", "alike"),
                *each(mean, means, NARROW, "grpo", "alike"),
            ],
        ),
        "C2": Claim(
            "Without clipping, off-policy training collapses; with it, it does not.",
            ("reinforce", NARROW),
            [
                *each(last, ends, "reinforce", NARROW, "lower", stale),
                *(gain(table, NARROW, (regime,)) for regime in stale),
            ],
        ),
        "C3": Claim(
            "The wide range (0.6, 2.0) learns faster, on- and off-policy; purely offline it is faster but less stable.",
            (NARROW, WIDE),
            [
                *each(mean, means, WIDE, NARROW, "higher"),
                compare(fall, falls, WIDE, NARROW, "higher", ("offline",)),
            ],
        ),
        "C4": Claim(
            "That is not just a larger learning rate: (0.2, 0.2) with 5× the rate does not match the wide range.",
            ("grpo", "grpo_5x_rate", WIDE),
            each(last, ends, "grpo_5x_rate", WIDE, "lower"),
        ),
        "C5": Claim(
            "RED-Drop and RED-Weight beat GRPO on- and off-policy; RED-Weight at like KL.",
            ("grpo", "red_drop", "red_weight"),
            [
                *each(mean, means, "red_drop", "grpo", "higher", ("on_policy", "interval_20")),
                *each(mean, means, "red_weight", "grpo", "higher", ("on_policy", "interval_20")),
                compare("log KL(π ‖ π₀) at the end", divergences, "red_weight", "grpo", "alike", every, KL_MARGIN),
            ],
        ),
        "C6": Claim(
            "OPMD and AsymRE behave like REC: regularized REINFORCE.",
            ("reinforce", NARROW, "opmd", "asymre"),
            [
                *(
                    check
                    for name in ("opmd", "asymre")
                    for check in (
                        *each(last, ends, name, "reinforce", "higher", stale),
                        compare(last, ends, name, NARROW, "alike", stale),
                    )
                ),
            ],
        ),
        "C7": Claim(
            "Ring clipping sits between: faster than the narrow range, more stable than the wide one.",
            (NARROW, WIDE, "rec_ring_nois"),
            [
                compare(mean, means, "rec_ring_nois", NARROW, "higher", every),
                compare(fall, falls, "rec_ring_nois", WIDE, "lower", every),
            ],
        ),
    }


def as_json(found: dict[str, Claim]) -> dict:
    """Claim → text, verdict, and for each check its statistic, spread, number of seeds and outcome; four decimals."""
    return {
        name: {
            "claim": claim.text,
            "verdict": claim.verdict,
            "checks": [
                {
                    "statistic": check.what,
                    "expected": check.expected if check.expected != "alike" else f"within ±{check.margin:.3g}",
                    "mean": round(check.found.mean, 4),
                    "interval": [round(check.found.low, 4), round(check.found.high, 4)],
                    "seeds": check.found.count,
                    "outcome": check.shown,
                }
                for check in claim.checks
            ],
        }
        for name, claim in found.items()
    }
