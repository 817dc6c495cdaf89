"""What the samples of an evaluation come to: closed forms against enumerated subsets, intervals against their claim."""

import functools
import itertools
from collections import Counter

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recjax.analysis import compare
from recjax.analysis import samples as samples_module
from recjax.analysis.samples import majority_at_k, pass_at_k, results, sizes


@pytest.mark.parametrize("samples", [1, 2, 5, 7])
def test_pass_at_k_equals_enumerated_subsets(samples):
    for accurate, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        outcomes = [number < accurate for number in range(samples)]
        share = np.mean([any(chosen) for chosen in itertools.combinations(outcomes, k)])
        np.testing.assert_allclose(pass_at_k(accurate, samples, k), share, rtol=1e-15)


def test_pass_at_k_keeps_its_precision_where_factorials_overflow():
    # One accurate sample of n is among k with chance k / n.
    for samples, k in [(10_000, 1), (10_000, 77), (10_000, 9_999), (200, 100)]:
        np.testing.assert_allclose(pass_at_k(1, samples, k), k / samples, rtol=1e-15)
    assert pass_at_k(0, 10_000, 5_000) == 0 and pass_at_k(9_999, 10_000, 2) == 1


def enumerated_majority(votes, accurate, k):
    """The definition, subset by subset."""
    worth = {}
    for vote in votes:
        worth[vote] = np.mean([right for other, right in zip(votes, accurate, strict=True) if other == vote])
    values = []
    for subset in itertools.combinations(votes, k):
        counts = Counter(vote for vote in subset if vote is not None)
        winners = [vote for vote in counts if counts[vote] == max(counts.values())]
        values.append(np.mean([worth[vote] for vote in winners]) if winners else 0.0)
    return np.mean(values)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c", None]), st.booleans()), min_size=1, max_size=7))
def test_majority_at_k_is_the_mean_over_enumerated_subsets(drawn):
    votes, accurate = zip(*drawn, strict=True)
    expected = [enumerated_majority(votes, accurate, k) for k in range(1, len(votes) + 1)]
    np.testing.assert_allclose(majority_at_k(votes, accurate), expected, atol=1e-12)


@pytest.mark.parametrize(
    ("votes", "right", "expected", "reason"),
    [
        ("ab", "a", [1 / 2, 1 / 2], "a tie of two is half a win"),
        ("abc", "a", [1 / 3, 1 / 3, 1 / 3], "a tie of three is a third"),
        ("aab", "a", [2 / 3, 2 / 3, 1], "three of four pairs' halves: (1 + ½ + ½) / 3"),
        ("aabb", "a", [1 / 2, 1 / 2, 1 / 2, 1 / 2], "even sides stay even"),
        ("abbb", "a", [1 / 4, 1 / 4, 0, 0], "a minority that is right loses with more votes"),
        ("a...", "a", [1 / 4, 1 / 2, 3 / 4, 1], "completions without an answer do not outvote one with it"),
        ("....", "", [0, 0, 0, 0], "no vote at all is worth nothing"),
    ],
)
def test_majorities_checked_by_hand(votes, right, expected, reason):
    given_votes = [None if vote == "." else vote for vote in votes]
    found = majority_at_k(given_votes, [vote in right for vote in votes])
    np.testing.assert_allclose(found, expected, atol=1e-12, err_msg=reason)


def test_majority_of_many_samples_is_finite_and_right():
    votes = [str(number // 2) for number in range(100)]  # fifty answers, two samples each
    np.testing.assert_allclose(majority_at_k(votes, [vote == "7" for vote in votes]), 1 / 50, rtol=1e-9)


def test_sizes_are_powers_of_two_and_all_samples():
    assert [sizes(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def table(accurate, difficulty=None, **columns):
    """Rows of an evaluation whose samples [problems, samples] are accurate as given."""
    accurate = np.asarray(accurate, bool)
    problems, samples = accurate.shape
    flat = accurate.reshape(-1)
    difficulty = [None] * problems if difficulty is None else difficulty
    rows = {
        "problem": np.repeat(np.arange(problems), samples),
        "answer": ["right"] * flat.size,
        "parsed": np.where(flat, "right", "wrong"),
        "difficulty": [label for label in difficulty for _ in range(samples)],
        "reward": flat.astype(float),
        "accurate": flat,
        "truncated": ~flat,
        "tokens": np.arange(flat.size) + 1,
    }
    return pd.DataFrame(rows | columns)


def test_metrics_without_verdicts_are_those_of_rewards():
    rows = table([[1, 1, 0, 0], [1, 0, 0, 0]], ["easy", "hard"])
    found = results(rows.assign(accurate=None))
    assert not [name for name in found["metrics"] if "@" in name or name in ("accuracy", "right_and_ended")]
    assert found["metrics"]["reward"]["value"] == 3 / 8 and found["difficulty"] == {}
    mixed = results(rows.assign(accurate=rows["accurate"].where(rows["problem"] == 1, None)))
    assert mixed == found, "an accuracy of some problems would be another number"


def test_metrics_of_a_small_table_checked_by_hand():
    found = results(table([[1, 1, 0, 0], [1, 0, 0, 0]], **{"reward/format": [0.5, -0.5] * 4}))
    values = {name: estimate["value"] for name, estimate in found["metrics"].items()}
    assert found["problems"] == 2 and found["samples"] == 4 and found["difficulty"] == {}
    assert values["accuracy"] == values["pass@1"] == values["majority@1"] == values["reward"] == 3 / 8
    np.testing.assert_allclose(values["pass@2"], (5 / 6 + 1 / 2) / 2)
    assert values["pass@4"] == 1 and values["majority@4"] == 1 / 4
    assert values["reward/format"] == 0 and values["truncated"] == 5 / 8
    assert values["completion_length"] == values["completion_length/median"] == 4.5
    np.testing.assert_allclose(values["completion_length/q90"], 7.3)
    for estimate in found["metrics"].values():
        assert estimate["low"] <= estimate["value"] <= estimate["high"]


def test_problems_with_different_numbers_of_completions_checked_by_hand():
    rows = table([[1, 1, 1, 1], [1, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 1]])
    rows = rows.drop(index=[3, 6, 7, *range(9, 12), 15]).assign(parsed="same")  # 3 of 3, 1 of 2, 0 of 1, 1 of 3
    found, even = results(rows, 6), results(table([[1, 1], [0, 1]]))
    values = {name: estimate["value"] for name, estimate in found["metrics"].items()}
    assert (found["problems"], found["samples"], found["unplayed"]) == (4, 3, 2)
    for name in ("accuracy", "pass@1", "majority@1", "reward", "right_and_ended"):
        np.testing.assert_allclose(values[name], (1 + 1 / 2 + 0 + 1 / 3) / 4, err_msg=name)
    np.testing.assert_allclose(values["pass@2"], (1 + 1 + 2 / 3) / 3)
    np.testing.assert_allclose(values["majority@2"], (1 + 1 / 2 + 1 / 3) / 3)
    assert values["pass@3"] == 1 and found["metrics"]["pass@3"]["problems"] == 2
    assert found["metrics"]["majority@2"]["problems"] == 3 and "problems" not in found["metrics"]["pass@1"]
    lengths = [1, 2, 3, 5, 6, 9, 13, 14, 15]
    assert values["completion_length/median"] == 6 and values["completion_length/q90"] == np.quantile(lengths, 0.9)
    np.testing.assert_allclose(values["completion_length"], np.mean([2, 5.5, 9, 14]))
    for estimate in found["metrics"].values():
        assert estimate["low"] <= estimate["value"] <= estimate["high"]
    assert even["unplayed"] == 0 and not any("problems" in estimate for estimate in even["metrics"].values())


def test_accuracy_by_difficulty_in_natural_order_with_counts():
    labels = ["level 10", "level 9", "level 9", None, "level 10", "level 2"]
    found = results(table([[1, 1], [1, 0], [0, 0], [1, 1], [1, 0], [0, 0]], labels))["difficulty"]
    assert [(label, each["value"], each["problems"]) for label, each in found.items()] == [
        ("level 2", 0.0, 1),
        ("level 9", 0.25, 2),
        ("level 10", 0.75, 2),
    ]
    assert found["level 2"]["low"] is None  # one problem tells nothing of others
    assert found["level 9"]["low"] < 0.25 < found["level 9"]["high"]


def test_the_best_constant_answer_is_counted_by_problem():
    rows = table([[1, 0], [1, 0], [0, 0]], answer=["1", "1", "7", "7", "1", "1"])
    assert results(rows)["constant_answer"] == {"answer": "1", "share": 2 / 3}


def test_a_single_problem_has_no_interval():
    found = results(table([[1, 0]], parsed=[None, "wrong"]))["metrics"]
    assert found["accuracy"] == {"value": 0.5, "low": None, "high": None}
    assert found["completion_length/median"]["low"] is None
    assert found["majority@2"]["value"] == 0


def test_equal_answers_leave_an_interval():
    found = results(table(np.ones((64, 1), bool)))["metrics"]["accuracy"]
    assert found["high"] == 1.0 and found["low"] == pytest.approx(1 - 1.96**2 / (64 + 1.96**2), abs=1e-4)


@pytest.mark.slow
def test_intervals_near_one_hold_the_truth(monkeypatch):
    monkeypatch.setattr(samples_module, "interval", functools.partial(compare.interval, resamples=199))
    generator = np.random.default_rng(0)
    # The means of Beta(50, 1/2), and of 1 − (1 − p)² under it.
    truths = {"accuracy": 100 / 101, "pass@2": 1 - 0.75 / (50.5 * 51.5)}
    covered = dict.fromkeys(truths, 0)
    for _ in range(40):
        found = results(table(generator.random((64, 2)) < generator.beta(50, 0.5, (64, 1))))["metrics"]
        for name, truth in truths.items():
            covered[name] += found[name]["low"] <= truth <= found[name]["high"]
    assert min(covered.values()) >= 36


@pytest.mark.slow
def test_intervals_hold_the_truth_about_95_times_in_100(monkeypatch):
    """Problems differ in how hard they are: resampling completions instead of problems would be far too sure."""
    monkeypatch.setattr(samples_module, "interval", functools.partial(compare.interval, resamples=999))
    samples, generator = 4, np.random.default_rng(0)
    covered = lengths_covered = 0
    for _ in range(100):
        hardness = generator.choice([0.1, 0.9], size=(60, 1))
        rows = table(generator.random((60, samples)) < hardness)
        rows["tokens"] = np.repeat(generator.integers(0, 100, 60), samples)
        found = results(rows)["metrics"]
        covered += found["accuracy"]["low"] <= 0.5 <= found["accuracy"]["high"]
        median = found["completion_length/median"]
        lengths_covered += median["low"] <= 49.5 <= median["high"]
    assert 0.88 <= covered / 100 <= 0.995
    assert 0.88 <= lengths_covered / 100 <= 0.995
