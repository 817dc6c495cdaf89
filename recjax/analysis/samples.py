"""Metrics of several completions per problem: pass@k, majority@k, and means with intervals over problems."""

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
_FEW = 10  # With fewer right or wrong answers, a mean over problems is far from normal
QUANTILES = {"q10": 0.1, "median": 0.5, "q90": 0.9}


def pass_at_k(accurate: int, samples: int, k: int) -> float:
    """Chance that k samples, drawn without replacement, contain an accurate one: 1 − C(n−c, k) / C(n, k).

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
    """Mean value of the most frequent answer over all C(n, k) subsets of k samples, for k = 1 … n.

    An answer's value is the share of accurate completions among all completions with this answer: 0 or 1, unless
    accuracy depends on more than the answer. Tied answers share the win equally. Samples without an answer have no
    vote; a subset without a vote has value 0.

    Args:
        votes: each sample's answer, or None if it gives none.
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
        rows: one per completion: problem, answer, parsed, difficulty, reward, reward/…, accurate (None: no verdict),
            truncated, tokens; the rows of a problem are consecutive.
        groups: number of problems, including problems without completions, which `unplayed` counts; None if all have
            completions.
    """
    is_right = rows["accurate"].eq(True)
    has_verdicts = bool(rows["accurate"].notna().all())
    rows = rows.assign(accurate=is_right, right_and_ended=is_right & ~rows["truncated"].astype(bool))
    counts = np.array([len(answers) for answers in _by_problem(rows, "answer")])
    problems = len(counts)
    values = {}
    if has_verdicts:
        values |= _verdict_values(rows, counts)
    values["reward"] = _known_means(rows, "reward")
    for column in rows.columns:
        # In a mixture, the rewards of different tasks have different parts.
        if column.startswith("reward/") and rows[column].notna().any():
            values[column] = _known_means(rows, column)
    values["truncated"] = _known_means(rows, "truncated")
    values["completion_length"] = _known_means(rows, "tokens")
    metrics = {}
    for name, numbers in values.items():
        kind = name.partition("@")[0]
        metrics[name] = _with_interval(numbers, kind in _SHARES)
        if "@" in name and len(numbers) < problems:
            metrics[name]["problems"] = len(numbers)
    metrics |= _length_quantiles(rows, counts)

    difficulty = {}
    if has_verdicts:
        labels = np.array([labels[0] for labels in _by_problem(rows, "difficulty")], object)
        for label in sorted({label for label in labels if not pd.isna(label)}, key=_natural_order):
            numbers = values["accuracy"][labels == label]
            difficulty[label] = _with_interval(numbers, is_share=True) | {"problems": len(numbers)}
    answers = Counter(answers[0] for answers in _by_problem(rows, "answer"))
    constant, count = answers.most_common(1)[0]
    return {
        "problems": problems,
        "samples": int(counts.max()),
        "unplayed": (groups or problems) - problems,
        "metrics": metrics,
        "difficulty": difficulty,
        "constant_answer": {"answer": constant, "share": count / problems},
    }


def _by_problem(rows: pd.DataFrame, column: str) -> list[np.ndarray]:
    """A column's values, one array per problem."""
    problem_starts = np.flatnonzero(np.diff(rows["problem"])) + 1
    return np.split(rows[column].to_numpy(), problem_starts)


def _known_means(rows: pd.DataFrame, column: str) -> np.ndarray:
    """Each problem's mean over its completions with a value; problems without such a completion are excluded."""
    means = []
    for values in _by_problem(rows, column):
        values = np.asarray(values, np.float64)
        known = values[~np.isnan(values)]
        if len(known):
            means.append(known.mean())
    return np.array(means or [np.nan])


def _verdict_values(rows: pd.DataFrame, counts: np.ndarray) -> dict[str, np.ndarray]:
    """The metrics of right answers, with one number per problem; pass@k and majority@k need k completions.

    Args:
        counts: each problem's number of completions.
    """
    right = []
    majority = []
    for parsed, accurate in zip(_by_problem(rows, "parsed"), _by_problem(rows, "accurate"), strict=True):
        votes = np.where(pd.isna(parsed), cast(Any, None), parsed)
        right.append(int(accurate.sum()))
        majority.append(majority_at_k(votes.tolist(), accurate.tolist()))
    pass_values = {}
    majority_values = {}
    for k in sizes(int(counts.max())):
        indices = np.flatnonzero(counts >= k)
        pass_values[f"pass@{k}"] = np.array([pass_at_k(right[i], int(counts[i]), k) for i in indices])
        majority_values[f"majority@{k}"] = np.array([majority[i][k - 1] for i in indices])
    means = {"accuracy": _known_means(rows, "accurate"), "right_and_ended": _known_means(rows, "right_and_ended")}
    return means | pass_values | majority_values


def _length_quantiles(rows: pd.DataFrame, counts: np.ndarray) -> dict[str, dict[str, float | None]]:
    """Quantiles of the completions' lengths, with intervals from resampled problems.

    Args:
        counts: each problem's number of completions.
    """
    problems = len(counts)
    samples = int(counts.max())
    lengths = np.full((problems, samples), np.nan)
    lengths[np.arange(samples) < counts[:, None]] = rows["tokens"]
    # np.nanquantile is slower.
    quantile = np.quantile if lengths.size == len(rows) else np.nanquantile

    def resampled_quantile(indices: np.ndarray, axis: int = -1, *, share: float) -> np.ndarray:
        return quantile(lengths[indices].reshape(*indices.shape[:-1], -1), share, axis=-1)

    quantiles = {}
    for name, share in QUANTILES.items():
        low = None
        high = None
        if problems > 1:
            statistic = functools.partial(resampled_quantile, share=share)
            low, high = interval(np.arange(problems), statistic, lengths.size, resamples=999)
        value = float(np.quantile(rows["tokens"], share))
        quantiles[f"completion_length/{name}"] = {"value": value, "low": low, "high": high}
    return quantiles


def _natural_order(label: str) -> list[int | str]:
    """A key that sorts "Level 10" after "Level 9"."""
    fields: list[int | str] = []
    for field in re.split(r"(\d+)", label):
        fields.append(int(field) if field.isdecimal() else field)
    return fields


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
