"""Metrics of several completions a problem: pass@k, majority@k, and means with intervals over problems."""

import functools
import math
import re
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any, cast

import numpy as np
import pandas as pd

from recjax.analysis.compare import interval
from recjax.analysis.statistics import wilson_interval

# Metrics whose values are from 0 to 1.
_SHARES = {"accuracy", "right_and_ended", "pass", "majority", "truncated"}
_FEW = 10  # with fewer right or wrong answers, a mean over problems is far from normal
QUANTILES = {"q10": 0.1, "median": 0.5, "q90": 0.9}


def pass_at_k(accurate: int, samples: int, k: int) -> float:
    """The chance that k of the samples, chosen without replacement, hold an accurate one: 1 − C(n−c, k) / C(n, k).

    It computes with integers up to the one division, so the result is exact to a float's precision for every n.

    Args:
        accurate: c, the number of accurate samples.
        samples: n.
        k: at most n.
    Reference: arXiv 2107.03374 §2.1.
    """
    ways = math.comb(samples, k)
    return (ways - math.comb(samples - accurate, k)) / ways


def majority_at_k(votes: Sequence[Hashable | None], accurate: Sequence[bool]) -> np.ndarray:
    """The value of the most frequent answer among k samples, for k = 1 … n: the mean over all C(n, k) subsets.

    An answer's value is the share of accurate completions among all completions with this answer: 0 or 1, unless
    accuracy depends on more than the answer. Tied answers share the win equally. Samples without an answer have no
    vote; a subset without a vote has value 0.

    Args:
        votes: each sample's answer; None: it gives none.
        accurate: whether each sample is right.
    """
    counts = Counter(vote for vote in votes if vote is not None)
    right = Counter(vote for vote, is_right in zip(votes, accurate, strict=True) if is_right)
    answers = tuple(sorted((count, right[vote] / count) for vote, count in counts.items()))
    return np.array(_majority(answers, len(votes) - counts.total()))


@functools.lru_cache(maxsize=4096)
def _majority(answers: tuple[tuple[int, float], ...], silent: int) -> tuple[float, ...]:
    """Sums over subsets by size and by the winner's votes.

    For a winner with `top` votes, ways[p, q] counts the choices of p samples so far in which no answer has more than
    `top` votes and q answers have exactly `top`; worth[p, q] sums the q answers' values over the choices.
    """
    total = sum(count for count, _ in answers) + silent
    worth_of_size = np.zeros(total + 1)
    for top in range(1, max((count for count, _ in answers), default=0) + 1):
        ways = np.zeros((total + 1, len(answers) + 1))
        ways[: silent + 1, 0] = [math.comb(silent, votes) for votes in range(silent + 1)]
        worth = np.zeros_like(ways)
        for count, value in answers:
            new_ways = np.zeros_like(ways)
            new_worth = np.zeros_like(ways)
            for votes in range(min(count, top) + 1):
                choices = math.comb(count, votes)
                tied = int(votes == top)
                target = (slice(votes, None), slice(tied, None))
                source = (slice(None, total + 1 - votes), slice(None, len(answers) + 1 - tied))
                new_ways[target] += choices * ways[source]
                new_worth[target] += choices * (worth[source] + tied * value * ways[source])
            ways = new_ways
            worth = new_worth
        worth_of_size += (worth[:, 1:] / np.arange(1, len(answers) + 1)).sum(-1)
    return tuple(float(worth_of_size[k] / math.comb(total, k)) for k in range(1, total + 1))


def sizes(samples: int) -> list[int]:
    """The reported values of k: powers of two up to the number of samples, and the number of samples."""
    return sorted({*(2**power for power in range(samples.bit_length())), samples})


def results(rows: pd.DataFrame, groups: int | None = None) -> dict[str, Any]:
    """All numbers of an evaluation, each with its 95 % interval.

    A metric is the mean of a number over problems; length quantiles are over all completions. With `task.seats`, each
    pair of a problem and a seat counts as a problem, with the completions in which the seat played. pass@k and
    majority@k are means over the problems with at least k completions; if some have fewer, `problems` has their number.
    Intervals are percentile bootstraps over problems, Wilson's for shares near 0 or 1, and None for a single problem.
    If a completion has no verdict, metrics of right answers are missing.

    Args:
        rows: one a completion: problem, answer, parsed, difficulty, reward, reward/…, accurate (None: no verdict),
            truncated, tokens; the rows of a problem are consecutive.
        groups: number of problems, including those without completions, which `unplayed` counts; None: all have some.
    """
    has_verdicts = bool(rows["accurate"].notna().all())
    is_right = rows["accurate"].eq(True)
    rows = rows.assign(accurate=is_right, right_and_ended=is_right & ~rows["truncated"].astype(bool))
    starts = np.flatnonzero(np.diff(rows["problem"])) + 1

    def as_floats(values: np.ndarray) -> np.ndarray:
        return np.asarray(values, np.float64)

    def by_problem(column: str) -> list[np.ndarray]:
        return np.split(rows[column].to_numpy(), starts)

    def known_means(column: str) -> np.ndarray:
        """Each problem's mean over its completions with a reward; problems without such a completion are excluded."""
        known = [values[~np.isnan(values)] for values in map(as_floats, by_problem(column))]
        return np.array([values.mean() for values in known if len(values)] or [np.nan])

    def quantile_of(places: np.ndarray, axis: int = -1, *, share: float) -> np.ndarray:
        quantile = np.quantile if lengths.size == len(rows) else np.nanquantile
        return quantile(lengths[places].reshape(*places.shape[:-1], -1), share, axis=-1)

    accurate = by_problem("accurate")
    counts = np.array([len(each) for each in accurate])
    problems = len(counts)
    samples = int(counts.max())
    lengths = np.full((problems, samples), np.nan)
    lengths[np.arange(samples) < counts[:, None]] = rows["tokens"]
    votes = [np.where(pd.isna(parsed), cast(Any, None), parsed).tolist() for parsed in by_problem("parsed")]
    majority = [majority_at_k(*row) for row in zip(votes, map(np.ndarray.tolist, accurate), strict=True)]
    right = [int(each.sum()) for each in accurate]
    # In a mixture, the rewards of different tasks have different parts.
    parts = [column for column in rows.columns if column.startswith("reward/") and rows[column].notna().any()]
    problems_by_k = {k: np.flatnonzero(counts >= k) for k in sizes(samples)}
    values = {
        "accuracy": known_means("accurate"),
        "right_and_ended": known_means("right_and_ended"),
        **{
            f"pass@{k}": np.array([pass_at_k(right[i], int(counts[i]), k) for i in indices])
            for k, indices in problems_by_k.items()
        },
        **{f"majority@{k}": np.array([majority[i][k - 1] for i in indices]) for k, indices in problems_by_k.items()},
        **{column: known_means(column) for column in ("reward", *parts)},
        "truncated": known_means("truncated"),
        "completion_length": known_means("tokens"),
    }
    if not has_verdicts:
        of_answers = re.compile(r"accuracy|right_and_ended|(pass|majority)@\d+")
        values = {name: numbers for name, numbers in values.items() if not of_answers.fullmatch(name)}
    metrics = {name: _with_interval(numbers, name.partition("@")[0] in _SHARES) for name, numbers in values.items()}
    for name, numbers in values.items():
        if "@" in name and len(numbers) < problems:
            metrics[name]["problems"] = len(numbers)
    for name, share in QUANTILES.items():  # over all completions, with problems resampled whole
        value = np.quantile(rows["tokens"], share)
        low = None
        high = None
        if problems > 1:
            statistic = functools.partial(quantile_of, share=share)
            low, high = interval(np.arange(problems), statistic, lengths.size, resamples=999)
        metrics[f"completion_length/{name}"] = {"value": float(value), "low": low, "high": high}

    difficulty = np.array([labels[0] for labels in by_problem("difficulty")], object)
    # "Level 10" comes after "Level 9".
    labels = {label for label in difficulty if not pd.isna(label)}
    labels = sorted(labels, key=lambda label: [int(x) if x.isdecimal() else x for x in re.split(r"(\d+)", label)])
    parts = {label: values["accuracy"][difficulty == label] for label in labels} if has_verdicts else {}
    constant, count = Counter(answers[0] for answers in by_problem("answer")).most_common(1)[0]
    return {
        "problems": problems,
        "samples": samples,
        "unplayed": (groups or problems) - problems,
        "metrics": metrics,
        "difficulty": {label: _with_interval(each, True) | {"problems": len(each)} for label, each in parts.items()},
        "constant_answer": {"answer": constant, "share": count / problems},
    }


def _with_interval(values: np.ndarray, is_share: bool) -> dict[str, float | None]:
    """The mean over problems and its 95 % interval; None for one problem.

    Args:
        is_share: True if values are from 0 to 1.
    """
    mean = float(values.mean())
    low = None
    high = None
    if len(values) > 1:
        is_near_bound = is_share and min(values.sum(), (1 - values).sum()) < _FEW
        if is_near_bound or (is_share and np.ptp(values) == 0):
            low, high = wilson_interval(mean, len(values))
        else:
            low, high = interval(values.astype(np.float64), np.mean, len(values))
    return {"value": mean, "low": low, "high": high}
