"""The study of self-distillation: its data, its plan, and that RESULTS.md has the numbers of its table."""

import copy
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import scipy

from experiments.claims.verdicts import Check
from experiments.self_distillation import hinted, page
from recjax import algorithms
from recjax.algorithms.axes import ADDED_TERMS
from recjax.analysis.statistics import MIN_SEEDS, Estimate
from recjax.config import load_config
from recjax.config.schema import AlgorithmConfig
from recjax.runs.checkpoint import BASE
from tests.commands import ROOT

FOLDER = ROOT / "experiments/self_distillation"
TEACHER = {
    "model.teacher": None,
    "model.teacher_rate": 1.0,
    "task.teacher_template": None,
    "task.teacher_tokens": None,
    "algorithm.teacher_divergence": {},
}


@pytest.fixture(scope="module")
def content():
    return json.loads(page.RUNS.read_text(encoding="utf-8"))


def test_the_file_of_hints_is_what_its_program_writes():
    assert (FOLDER / "hinted.jsonl").read_text().splitlines() == hinted.lines()


def test_arms_differ_only_in_teacher_and_advantage(monkeypatch):
    monkeypatch.chdir(ROOT)
    both = load_config(FOLDER / "with_teacher.yaml")
    for run in page.planned_runs():
        rate = {"optimizer.learning_rate": float(run.settings["rate"])}
        start = {"seed": int(run.settings["seed"]), "output": run.config.output, **rate}
        assert both.base_seed is None  # each seed has its own base policy
        changes = {
            "rewards_and_teacher": {},
            "rewards_alone": TEACHER,
            "teacher_alone": {"algorithm.advantage": {"name": "none"}},
        }
        assert run.config == both.replace(**start, **changes[run.settings["arm"]])


def test_the_plan_has_enough_seeds_for_verdicts():
    made = {tuple(run.settings.values()) for run in page.planned_runs()}
    seeds, pilot = page.PLAN["seeds"], page.PLAN["pilot_seeds"]
    assert len(seeds) >= MIN_SEEDS and not set(seeds) & set(pilot)
    assert {(str(seed), page.PLAN["common_rate"], arm) for seed in seeds for arm in page.ARMS} <= made
    assert {(str(seed), rate, arm) for seed in pilot for rate in page.PLAN["rates"] for arm in page.ARMS} <= made


def test_without_advantages_the_rewards_have_no_gradient():
    """The arm with the teacher alone has no other term than the teacher's."""
    run = next(run for run in page.planned_runs() if run.settings["arm"] == "teacher_alone")
    algorithm = run.config.algorithm.build()
    assert algorithm.regularizer is None and algorithm.term is None
    assert [term for term in ADDED_TERMS if getattr(algorithm, term) is not None] == ["teacher_divergence"]
    policy_gradient = AlgorithmConfig(preset=run.config.algorithm.preset, advantage={"name": "none"}).build()
    logprobs = jnp.log(jnp.linspace(0.1, 0.9, 12).reshape(4, 3))
    mask = jnp.ones((4, 3), bool)
    rewards = jnp.array([1.0, 0.0, 0.0, 1.0])
    batch = algorithms.BatchValues(rewards, jnp.zeros(4, int), mask.any(-1), jax.random.key(0), completion_mask=mask)
    rows = algorithms.row_terms(policy_gradient, batch)

    def summed_loss(current):
        return algorithms.loss(policy_gradient, current, logprobs, rows, mask)[0]

    assert not np.any(jax.grad(summed_loss)(logprobs))


def test_results_are_those_of_the_runs(content):
    text = page.RESULTS.read_text(encoding="utf-8")
    remedy = "write it again: python -m experiments.self_distillation.page"
    assert page.with_section(text, page.section(content)) == text, remedy
    assert (FOLDER / "curves.png").is_file()


def test_final_accuracies_are_those_of_a_loop_over_runs(content):
    """The rows of seeds in RESULTS.md, computed from runs.json without the page's functions."""
    finals = {arm: [] for arm in page.ARMS}
    for seed, arm in itertools.product(page.PLAN["seeds"], page.ARMS):
        for record in content["runs"]:
            if (record["seed"], record["rate"], record["arm"]) == (str(seed), page.PLAN["common_rate"], arm):
                finals[arm].append(np.mean([row["sums"] for row in record["evaluations"][-3:]]))
    text = page.RESULTS.read_text(encoding="utf-8").split(page.HEADING)[1].split("\n## ")[0]
    seeds = min(map(len, finals.values()))
    assert seeds >= 1
    for arm, name in page.ARMS.items():
        assert f"| {name} | {' | '.join(f'{value:.3f}' for value in finals[arm][:seeds])} |" in text


def test_runs_of_other_settings_or_policies_are_refused(content):
    wrong = {
        "another config than with_teacher.yaml": lambda made: made["config"].update(seed=1),
        "arms.yaml has no such run": lambda made: made["runs"][0]["overrides"].append("seed=9"),
        "make the runs of this seed again": lambda made: made["runs"][0].update(base_policy="another"),
    }
    for words, change in wrong.items():
        changed = copy.deepcopy(content)
        change(changed)
        with pytest.raises(ValueError, match=words):
            page.section(changed)


BASE_ACCURACY = 0.2
GAINS = {"rewards_and_teacher": 0.3, "rewards_alone": 0.1, "teacher_alone": 0.3}  # of invented runs


def invented(seeds, rates=("1e-3",), gains=GAINS):
    """Evaluations of runs whose accuracy is the base policy's plus a gain, a hundredth more for odd seeds."""
    rows = [
        {"seed": str(seed), "rate": rate, "arm": arm, "step": step, page.SUMS: accuracy, page.HINTED: 0.9}
        for seed, rate, (arm, gain) in itertools.product(seeds, rates, gains.items())
        for step, accuracy in ((0, BASE_ACCURACY), (50, BASE_ACCURACY + gain + 0.01 * (seed % 2) * (gain == 0.3)))
    ]
    return pd.DataFrame(rows)


def cells(text):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"][2:]


COMMON = dict.fromkeys(page.ARMS, "1e-3")


def test_six_seeds_get_verdicts_by_students_t():
    rows = cells(page.checks_text(invented(page.PLAN["seeds"]), COMMON, with_gains=True))
    assert len(rows) == 9
    first = rows[0]
    assert first[0] == "final accuracy: teacher alone − rewards alone"
    reach = scipy.stats.t.ppf(0.975, 5) * np.std([0.2, 0.21] * 3, ddof=1) / np.sqrt(6)
    assert first[1:4] == ["+0.205", f"{0.205 - reach:+.3f} to {0.205 + reach:+.3f}", "6"]
    assert first[5] == "as claimed" and float(first[4]) < page.PLAN["level"]
    assert [row[5] for row in rows if row[0].endswith("rewards and teacher − teacher alone")] == ["undecided"] * 2


def test_a_check_without_holms_correction_holds_alone():
    clear, narrow = Estimate(0.2, 0.19, 0.21, 6), Estimate(0.2, 0.01, 0.39, 6)  # the narrow one has p = 0.021
    made = [Check("clear", "higher", 0.05, clear), Check("narrow", "higher", 0.05, narrow)]
    assert [row[5] for row in cells(page.checks_table(made))] == ["as claimed", "as claimed"]
    made.append(Check("another", "higher", 0.05, Estimate(0.0, -0.2, 0.2, 6)))
    rows = cells(page.checks_table(made))
    assert [row[5] for row in rows] == ["as claimed", "only before the correction", "undecided"]


def test_fewer_seeds_get_a_range_and_no_verdict():
    rows = cells(page.checks_text(invented([2, 3, 4]), COMMON, with_gains=True))
    assert rows[0][1:] == ["+0.203", "+0.200 to +0.210", "3", "–", "as claimed in each of 3 seeds"]
    assert all("seed" in row[5] for row in rows)
    assert "Seeds with runs of all arms: 1, too few" in page.checks_text(invented([2]), COMMON, with_gains=True)


def test_seeds_without_all_arms_are_not_compared():
    table = invented([2, 3, 4])
    lacking = table[(table["seed"] != "4") | (table["arm"] != "teacher_alone")]
    rows = cells(page.checks_text(lacking, COMMON, with_gains=True))
    assert {row[3] for row in rows} == {"2"}
    assert page.common_runs(lacking)["seed"].unique().tolist() == ["2", "3"]


def test_the_pilot_chooses_each_arms_best_rate():
    assert "has not been run" in page.pilot_text(invented([2, 3]))
    pilot = invented(page.PLAN["pilot_seeds"], page.PLAN["rates"])
    better = pilot["rate"].eq("2e-3") & pilot["arm"].eq("rewards_alone") & pilot["step"].gt(0)
    table = pd.concat([pilot.assign(**{page.SUMS: pilot[page.SUMS] + 0.1 * better}), invented([2, 3])])
    text = page.pilot_text(table)
    assert "rewards alone 2e-3" in text and "| rewards alone | 0.300, 0.300 | 0.300, 0.300 | 0.400, 0.400 |" in text
    assert "Seeds with runs of all arms: 0, too few" in text  # at 2e-3 only the pilot's seeds have runs


@pytest.fixture
def made(monkeypatch, tmp_path):
    """Folders of two finished runs, and a function that writes a run's environment."""
    runs = []
    for run in page.planned_runs()[:2]:
        folder = tmp_path / run.name
        folder.mkdir()
        rows = [{"step": step, "evaluation/accuracy/sums": 0.2, "evaluation/accuracy/hinted": 0.9} for step in (0, 50)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        runs.append(run._replace(config=run.config.replace(output=str(folder))))
    monkeypatch.setattr(page, "planned_runs", lambda: runs)
    monkeypatch.setattr(page, "is_finished", lambda config: True)

    def write(place, *sources, base="p"):
        fixed = {"recjax": "1", "packages": {}, "python": "3", "platform": "a", "commit": "c", "weights": {BASE: base}}
        entries = [{**fixed, "recjax_source": source} for source in sources]
        (tmp_path / runs[place].name / "environment.json").write_text(json.dumps(entries))

    return write


def test_collected_runs_keep_their_origin(made):
    made(0, "s", "s")
    made(1, "s")
    collected = page.collect()
    assert collected["versions"]["recjax_source"] == "s" and len(collected["runs"]) == 2
    assert collected["runs"][0]["base_policy"] == "p" and collected["runs"][0]["commit"] == "c"
    assert collected["runs"][1]["evaluations"][1] == {"step": 50, "sums": 0.2, "hinted": 0.9}


@pytest.mark.parametrize(
    ("first", "second", "base", "words"),
    [
        (("s", "t"), ("s",), "p", "was continued with other versions"),
        (("s",), ("t",), "p", "was made with other versions"),
        (("s",), ("s",), "q", "another run of the seed has p"),
    ],
)
def test_runs_of_several_generations_are_not_collected(made, first, second, base, words):
    made(0, *first)
    made(1, *second, base=base)
    with pytest.raises(ValueError, match=words):
        page.collect()
