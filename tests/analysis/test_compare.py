"""Numbers of runs, differences between them, and their intervals."""

import json

import numpy as np
import pandas as pd
import pytest

from experiments.claims.verdicts import fallen, mean_over_steps, paired_difference
from recjax.analysis.collect import COLUMNS
from recjax.analysis.compare import (
    ACCURACY,
    Comparison,
    differing_bases,
    differing_steps,
    final,
    held_out_metric,
    in_words,
    minus_line,
    pair_runs,
    paired_seeds,
    paired_values,
    plan_words,
    problem_differences,
    problems_verdict,
    resumed_changes,
    verdict,
)

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


def test_final_mean_and_fall_of_each_run(table):
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
    assert sorted(paired_values(final(table), "algorithm", "a", "b")) == pytest.approx(sorted(pairs))
    # Seed 0 has two pairs, and counts once.
    assert found.mean == pytest.approx(np.mean([np.mean([pairs[0], pairs[2]]), pairs[1]])) and found.count == 2
    on = paired_difference(final(table), "algorithm", "a", "b", regime=["on"])
    assert on.mean == pytest.approx(np.mean(pairs[:2])) and on.count == 2
    back = paired_difference(final(table), "algorithm", "b", "a", regime=["on"])
    assert back.mean == pytest.approx(-on.mean) and back.low == pytest.approx(-on.high, abs=1e-6)
    with pytest.raises(ValueError, match="1 seeds: too few"):
        paired_difference(final(table), "algorithm", "a", "b", regime=["off"])


def test_a_verdict_says_what_the_test_shows():
    higher = verdict("accuracy", np.array([0.1, 0.12, 0.14, 0.1, 0.11, 0.12]), "A", "B")
    assert higher == "B has higher accuracy than A: 0.115 (0.099 to 0.131, 6 seeds), p 0.031."
    assert verdict("accuracy", -np.full(6, 0.1), "A", "B").startswith("B has lower accuracy than A: -0.100")
    few = verdict("accuracy, mean of the last values,", np.array([0.1, 0.2, 0.3]), "A", "B")
    assert few == (
        "No verdict: B minus A in accuracy, mean of the last values: 0.200 (0.100 to 0.300, range of 3 seeds)."
        " A verdict needs 6 seeds."
    )
    none = verdict("accuracy", np.array([0.1, -0.1] * 4), "A", "B")
    assert none.startswith("No difference between A and B in accuracy is shown") and none.endswith("8 seeds), p 1.")
    single = verdict("accuracy", np.array([0.1]), "A", "B")
    assert single == "No verdict: B minus A in accuracy: 0.100, 1 seed. A verdict needs 6 seeds."


def test_problems_of_one_pair_speak_for_two_policies():
    differences = np.array([0.0, 0.5, 0.5, 1.0] * 8)
    words = problems_verdict("accuracy", differences, "A", "B")
    assert words.startswith(
        "B has higher accuracy than A: 0.500 (0.370 to 0.630), 32 problems. This holds for these two"
    )
    assert problems_verdict("accuracy", differences - 0.5, "A", "B").startswith("No difference between A and B")


def test_a_plan_follows_from_the_pilots_spread():
    words = plan_words(np.array([0.0, 0.1, 0.05, 0.1]), 0.05)
    assert words.startswith(
        "Plan: differences of 4 seeds have a standard deviation of 0.048; 10 seeds show a difference"
    )
    with pytest.raises(ValueError, match="plan: the runs have one seed in common"):
        plan_words(np.array([0.1]), 0.05)


def test_a_seed_counts_once_with_all_its_settings(table):
    values = paired_seeds(final(table), "algorithm", "a", "b")
    by_seed = {
        seed: np.mean(
            [np.mean(CURVES["a", regime, seed][-3:]) - np.mean(CURVES["b", regime, seed][-3:]) for regime in regimes]
        )
        for seed, regimes in (("0", ("on", "off")), ("1", ("on",)))
    }
    assert sorted(values) == pytest.approx(sorted(by_seed.values()))


def test_differences_from_a_line_compare_equal_steps_and_settings(table):
    minus = minus_line(table, "algorithm", "a", "evaluation/accuracy")
    found = table.assign(minus=minus).set_index(["algorithm", "regime", "seed", "step"])["minus"]
    for (algorithm, regime, seed), values in CURVES.items():
        for place, value in enumerate(values):
            expected = value - CURVES["a", regime, seed][place] if algorithm == "b" else np.nan
            np.testing.assert_allclose(found[algorithm, regime, seed, 10 * place], expected)
    assert in_words(paired_values(final(table), "algorithm", "b", "a", regime=["off"]).to_numpy()) == "0.200, 1 seed"


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


def test_runs_are_paired_by_seed_and_shared_settings(run):
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


def test_runs_without_an_evaluation_have_no_problems(run):
    pairs = [(run("a0", [(1, 0)]), run("b0", [(1, 1)])), (run("a1", [(1, 0)]), run("b1"))]
    (pairs[1][1] / "samples" / "after.jsonl").unlink()
    metric = "evaluation/accuracy"
    assert problem_differences(pairs, metric).tolist() == problem_differences(pairs[:1], metric).tolist() == [0.5]
    assert problem_differences(pairs[1:], metric).size == 0


def test_continued_runs_are_compared_at_their_latest_evaluation(run):
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


def test_pairs_with_two_initial_policies_are_named(tmp_path):
    for name, digest in {"a0": "x", "b0": "x", "a1": "x", "b1": "y", "a2": "x", "b2": None}.items():
        (tmp_path / name).mkdir()
        entry = {"weights": {"initial policy": digest}} if digest else {}  # {}: of an older version
        # A run trains the policy of its first start.
        (tmp_path / name / "environment.json").write_text(json.dumps([entry, {"weights": {"initial policy": "z"}}]))
    pairs = {f"seed {seed}": (tmp_path / f"a{seed}", tmp_path / f"b{seed}") for seed in range(3)}
    assert differing_bases(pairs) == ["initial policy of the pair seed 1 = x and y"]
    assert differing_bases({"": (tmp_path / "a1", tmp_path / "b0")}) == []


def test_few_differences_of_problems_are_counted_bars():
    def panel(problems):
        table = pd.DataFrame({"side": ["A", "B"], "seed": "0", "pair": "", "step": 10, ACCURACY: [0.5, 0.6]})
        comparison = Comparison("A", "B", ACCURACY, table, np.array([0.1]), np.array(problems), [], [], [])
        return comparison.figure().axes[2]

    counted = panel([0.0] * 5 + [1.0] * 2 + [-1.0])
    assert [text.get_text() for text in counted.get_xticklabels()] == ["-1", "0", "+1"]
    assert [text.get_text() for text in counted.texts] == ["1", "5", "2"]
    assert len({bar.get_facecolor() for bar in counted.patches}) == 3
    assert len(panel(np.linspace(-1, 1, 40)).patches) == 21
