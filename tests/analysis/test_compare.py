"""Numbers of runs, differences between them, and their intervals."""

import itertools
import json

import numpy as np
import pandas as pd
import pytest

from experiments.claims.verdicts import fallen, mean_over_steps, paired_difference
from recjax.analysis.collect import COLUMNS
from recjax.analysis.compare import (
    differing_steps,
    estimate,
    final,
    held_out_metric,
    in_words,
    minus_line,
    pair_runs,
    paired_values,
    problem_differences,
    resumed_changes,
    sign_flip_p,
)
from recjax.compare import verdict

CURVES = {  # held-out accuracy at steps 0, 10, …, 40
    ("a", "on", "0"): [0.4, 0.5, 0.6, 0.9, 0.6],
    ("a", "on", "1"): [0.4, 0.6, 0.6, 0.6, 0.9],
    ("a", "off", "0"): [0.4, 0.1, 0.1, 0.1, 0.1],
    ("b", "on", "0"): [0.4, 0.4, 0.4, 0.4, 0.4],
    ("b", "on", "1"): [0.4, 0.5, 0.5, 0.5, 0.5],
    ("b", "off", "0"): [0.4, 0.3, 0.3, 0.3, 0.3],
}


@pytest.fixture
def table():
    rows = []
    for (algorithm, regime, seed), values in CURVES.items():
        for step in range(0, 41, 5):
            settings = {"algorithm": algorithm, "regime": regime, "seed": seed, "step": step}
            accuracy = values[step // 10] if step % 10 == 0 else np.nan
            rows.append(settings | dict.fromkeys(COLUMNS, 0.0) | {"evaluation/accuracy": accuracy})
    return pd.DataFrame(rows).sample(frac=1.0, random_state=0)  # their order is nothing to rely on


def test_the_end_the_whole_and_the_fall_of_each_run(table):
    for settings, values in CURVES.items():
        assert final(table)[settings] == pytest.approx(np.mean(values[-3:]))
        assert mean_over_steps(table)[settings] == pytest.approx(np.mean(values[1:]))
        assert fallen(table)[settings] == pytest.approx(max(values) - values[-1])


def test_differences_are_paired_by_all_other_settings(table):
    found = paired_difference(final(table), "algorithm", "a", "b")
    pairs = [
        np.mean(CURVES["a", *rest][-3:]) - np.mean(CURVES["b", *rest][-3:])
        for rest in [("on", "0"), ("on", "1"), ("off", "0")]
    ]
    assert found.mean == pytest.approx(np.mean(pairs)) and found.count == 3
    on = paired_difference(final(table), "algorithm", "a", "b", regime=["on"])
    assert on.mean == pytest.approx(np.mean(pairs[:2])) and on.count == 2
    back = paired_difference(final(table), "algorithm", "b", "a", regime=["on"])
    assert back.mean == pytest.approx(-on.mean) and back.low == pytest.approx(-on.high, abs=1e-6)
    with pytest.raises(ValueError, match="1 runs or pairs"):
        paired_difference(final(table), "algorithm", "a", "b", regime=["off"])


def test_the_interval_is_that_of_every_resample():
    values = np.array([0.1, 0.4, 0.2])
    means = sorted(np.mean(values[list(places)]) for places in itertools.product(range(3), repeat=3))
    found = estimate(values)
    assert found.mean == pytest.approx(values.mean())
    assert found.low == pytest.approx(np.quantile(means, 0.025, method="lower"), abs=1e-6)
    assert found.high == pytest.approx(np.quantile(means, 0.975, method="higher"), abs=1e-6)
    assert estimate(np.array([0.3, 0.3])) == (0.3, 0.3, 0.3, 2)


def test_the_interval_covers_the_mean_as_often_as_it_says():
    generator = np.random.default_rng(0)
    found = [estimate(generator.normal(size=40)) for _ in range(60)]
    assert 50 <= sum(low < 0 < high for _, low, high, _ in found) <= 60


def test_the_sign_flip_test_counts_all_flips():
    values = np.array([0.3, -0.1, 0.2, 0.4, 0.25])
    means = [abs(np.mean(values * signs)) for signs in itertools.product((-1, 1), repeat=5)]
    assert sign_flip_p(values) == pytest.approx(np.mean([mean >= values.mean() - 1e-12 for mean in means]))
    assert sign_flip_p(np.zeros(4)) == 1 and sign_flip_p(np.full(3, 0.1)) == 0.25
    assert sign_flip_p(np.full(40, 0.1)) < 0.001


def test_a_verdict_says_what_the_test_shows():
    higher = verdict("accuracy", np.array([0.1, 0.12, 0.14, 0.1, 0.11, 0.12]), "pairs", "A", "B")
    assert higher == "B has higher accuracy than A: 0.115 (0.105 to 0.127), p 0.031, 6 pairs."
    assert verdict("accuracy", -np.full(6, 0.1), "pairs", "A", "B").startswith("B has lower accuracy than A: -0.100")
    few = verdict("accuracy", np.array([0.1, 0.2, 0.3]), "pairs", "A", "B")
    assert few.startswith("No difference between A and B in accuracy is shown: 0.200") and few.endswith(
        "3 pairs cannot give a p below 0.25, and 6 can."
    )
    none = verdict("accuracy", np.array([0.1, -0.1] * 4), "pairs", "A", "B")
    assert none.startswith("No difference") and none.endswith("p 1, 8 pairs.")
    single = verdict("accuracy, mean of the last values,", np.array([0.1]), "pairs", "A", "B")
    words = "B minus A in accuracy, mean of the last values: 0.100, 1 pair, which has no interval and no test."
    assert single == words


def test_differences_from_a_line_are_those_of_the_same_step_seed_and_regime(table):
    minus = minus_line(table, "algorithm", "a", "evaluation/accuracy")
    found = table.assign(minus=minus).set_index(["algorithm", "regime", "seed", "step"])["minus"]
    for (algorithm, regime, seed), values in CURVES.items():
        for place, value in enumerate(values):
            expected = value - CURVES["a", regime, seed][place] if algorithm == "b" else np.nan
            np.testing.assert_allclose(found[algorithm, regime, seed, 10 * place], expected)
    assert in_words(paired_values(final(table), "algorithm", "b", "a", regime=["off"])) == "0.200, 1 pair"


@pytest.fixture
def run(tmp_path):
    """A function that makes the folder of a run from its settings, and its correct answers by problem."""

    def make(name, right=(), file="after", step=None, seat=None, **settings):
        folder = tmp_path / name
        (folder / "samples").mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(json.dumps({"output": name, **settings}))
        known = {name: value for name, value in (("step", step), ("seat", seat)) if value is not None}
        rows = [
            {"question": f"{problem}+1=", "answer": str(problem + 1), "accurate": bool(value), **known}
            for problem, values in enumerate(right)
            for value in values
        ]
        (folder / "samples" / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder

    return make


def test_runs_are_paired_by_seed_and_then_by_what_varies_on_both_sides(run):
    first = [run(f"a{seed}", seed=seed, optimizer={"learning_rate": 1e-3}) for seed in range(3)]
    second = [run(f"b{seed}", seed=seed, optimizer={"learning_rate": 1e-2}) for seed in range(1, 4)]
    pairs, changed = pair_runs(first, second)
    assert pairs == {"seed 1": (first[1], second[0]), "seed 2": (first[2], second[1])}
    assert changed == ["optimizer.learning_rate = 0.001 and 0.01"]
    pairs, changed = pair_runs(first[:1], second[:1])
    assert [*pairs.values()] == [(first[0], second[0])] and "seed = 0 and 1" in changed
    more = [run(f"{name}_{rate}", seed=0, algorithm=name, rate=rate) for name in "ab" for rate in (1, 2)]
    pairs, changed = pair_runs(more[:2], more[2:])
    assert [*pairs] == ["seed 0, rate 1", "seed 0, rate 2"] and changed == ["algorithm = a and b"]
    with pytest.raises(ValueError, match="seed 0: several runs of one side have these settings"):
        pair_runs(more, first)
    with pytest.raises(ValueError, match="no runs of the two sides have equal seed .*seed 0 and seed 3"):
        pair_runs(first[:1], [second[2], second[1]])


def test_problems_are_paired_by_question_and_answer(run):
    first = [run("a0", [(1, 1), (1, 0), (0, 0)]), run("a1", [(0, 1), (1, 1), (0, 0)])]
    second = [run("b0", [(1, 1), (1, 1), (0, 1)]), run("b1", [(1, 1), (1, 1)])]
    metric = "evaluation/accuracy"
    np.testing.assert_allclose(problem_differences(zip(first, second, strict=True), metric), [0.25, 0.25, 0.5])
    np.testing.assert_allclose(problem_differences([(first[0], second[0])], metric), [0, 0.5, 0.5])
    assert problem_differences([(first[0], second[0])], "reward").size == 0
    assert problem_differences([(first[0], second[0])], "evaluation/reward").size == 0


def test_a_run_without_an_evaluation_has_no_problems_and_leaves_the_other_pairs(run):
    pairs = [(run("a0", [(1, 0)]), run("b0", [(1, 1)])), (run("a1", [(1, 0)]), run("b1"))]
    (pairs[1][1] / "samples" / "after.jsonl").unlink()
    metric = "evaluation/accuracy"
    assert problem_differences(pairs, metric).tolist() == problem_differences(pairs[:1], metric).tolist() == [0.5]
    assert problem_differences(pairs[1:], metric).size == 0


def test_a_run_that_goes_on_after_its_end_is_compared_at_its_latest_evaluation(run):
    metric, other = "evaluation/accuracy", run("b", [(1, 1)], step=8)
    ended = run("a", [(1, 1)], step=4)
    assert problem_differences([(ended, other)], metric) == [0]
    assert run("a", [(0, 0)], "latest", step=6) == ended
    assert problem_differences([(ended, other)], metric) == [1]
    run("a", [(0, 1)], step=8)
    assert problem_differences([(ended, other)], metric) == [0.5]
    without_steps = run("c", [(0, 0)])  # of a version that wrote no steps
    run("c", [(1, 1)], "latest")
    assert problem_differences([(without_steps, other)], metric) == [1]


def test_steps_that_differ_are_named(tmp_path):
    steps = {"a0": [0, 2, 4], "a1": [0, 2], "b0": [0, 4], "b1": [0, 4, 8], "evaluation": []}
    for name, evaluated in steps.items():
        (tmp_path / name).mkdir()
        rows = [{"step": step, "reward": 1.0, "evaluation/accuracy": 0.5} for step in evaluated]
        lines = [json.dumps(row) + "\n" for row in [*rows, {"step": 9, "reward": 1.0}]]
        (tmp_path / name / "metrics.jsonl").write_text("".join(lines))
    metric, pair = "evaluation/accuracy", (tmp_path / "a0", tmp_path / "b0")
    more = [pair, (tmp_path / "a1", tmp_path / "b1")]
    assert differing_steps([pair], metric) == differing_steps(more, "reward") == []
    assert differing_steps(more, metric) == [f"latest step with {metric} = 2 and 8"]
    assert differing_steps([(tmp_path / "a0", tmp_path / "evaluation")], metric) == []


def test_runs_without_accuracy_are_compared_by_reward(table):
    rewarded = table.assign(**{"evaluation/reward": table["evaluation/accuracy"]})
    assert held_out_metric(table) == held_out_metric(rewarded) == "evaluation/accuracy"
    assert held_out_metric(rewarded.assign(**{"evaluation/accuracy": np.nan})) == "evaluation/reward"
    assert held_out_metric(table[["step"]]) == "evaluation/accuracy", "which the message then names"


def test_settings_that_a_run_resumed_with_are_differences(tmp_path):
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for folder, rate in zip(folders, (0.0005, 0.0005, 0.001), strict=True):
        folder.mkdir()
        (folder / "config.yaml").write_text(f"optimizer: {{learning_rate: {rate}, beta1: 0.5}}")
    texts = [
        "optimizer.learning_rate: 0.002 there, 0.001 now",
        "optimizer.beta1: 0.9 there, 0.5 now; optimizer.learning_rate: 0.001 there, 0.0005 now",
    ]
    changes = [{"after_step": step, "settings": text} for step, text in zip((20, 40), texts, strict=True)]
    starts = [{"started": "now"}, *({"changed": change} for change in changes)]
    for folder in folders[::2]:
        (folder / "environment.json").write_text(json.dumps(starts))
    first, second, third = folders
    assert resumed_changes([(first, second)]) == [
        "optimizer.beta1 = 0.9 until step 40, 0.5 and 0.5",
        "optimizer.learning_rate = 0.002 until step 20, 0.001 until step 40, 0.0005 and 0.0005",
    ]
    assert resumed_changes([(first, third), (second, second)]) == []


def test_the_seats_of_a_problem_are_compared_apart(run):
    first = [run("a", [(1, 1)], seat="x"), run("a", [(0,)], "latest", seat="y")][0]
    rows = [(first / "samples" / f"{name}.jsonl").read_text() for name in ("after", "latest")]
    (first / "samples" / "after.jsonl").write_text("".join(rows))
    second = run("b", [(0, 0)], seat="x")
    assert problem_differences([(first, second)], "evaluation/accuracy").tolist() == [-1]
