"""The study of age and engine drift: its cells, what a second command makes, enumerated gradients, and its page."""

import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

from experiments.bandit.bandit import REWARDS
from experiments.claims.map import collect, drift_of, file_of, make, without_arguments
from experiments.claims.programs import seed_of
from experiments.drift import __main__ as study
from experiments.drift import bandit, page, plan, sums
from recjax.algorithms.presets import build_algorithm
from recjax.config import load_config
from recjax.logs.metrics import read_metrics
from recjax.runs.start import train
from tests.closeness import assert_close, assert_same_logprobs
from tests.experiments.test_claims_map import SMALL
from tests.marks import slow_except


def test_a_reward_that_the_programs_lack_is_refused():
    config = load_config(study.HERE.parent / "quickstart.yaml")
    with pytest.raises(ValueError, match="task.reward = 'recjax.tasks.rewards:number_match'.*last_number_match"):
        seed_of(config)


SCALES = dict.fromkeys(plan.CAUSES, 0.2)
SHORT = [*SMALL, "training.checkpoint_every=8"]


def planned_run(method, cause, *changes, setup="adamw", rate=4e-4, seed=1):
    """A run of the plan on a small task."""
    cell = plan.Cell(setup, method, cause, True)
    return plan.run_of("sums", cell, rate, seed, SCALES, [*SHORT, *changes])


def test_runs_of_one_method_share_a_program():
    causes = ("none", "age50", "fixed_noise20_wrong", "int4")
    runs = [planned_run("clip", cause, rate=rate) for cause in causes for rate in (1e-4, 2e-4)]
    assert len({without_arguments(run.config).model_dump_json() for run in runs}) == 1
    others = [planned_run("clip", "none", setup=setup) for setup in ("adamw", "sgd", "adamw_4_updates")]
    assert len({without_arguments(run.config).model_dump_json() for run in others}) == 3


def test_a_drift_that_programs_do_not_have_is_refused():
    run = planned_run("clip", "none", "rollout.drift={weights: int4, group: 8}")
    with pytest.raises(ValueError, match="rollout.drift.group = 8: programs have one scale for each output"):
        drift_of(run.config)


def test_a_second_command_makes_only_what_is_missing(tmp_path, monkeypatch):
    made = []

    def rows(method, scales):
        made.append(method)
        return [{"algorithm": method, "seed": "0", "reward": 0.5}]

    monkeypatch.setattr(bandit, "trained", rows)
    monkeypatch.setattr(bandit, "losses_of", lambda method: rows(method, {}))
    study.make_bandit(tmp_path, smoke=False)
    methods = [method for method in plan.METHODS if "setups" not in plan.METHODS[method]]
    assert made == [*methods, *bandit.ENUMERATED]
    study.make_bandit(tmp_path, smoke=False)
    assert len(made) == len(methods) + len(bandit.ENUMERATED)
    table = pd.read_parquet(tmp_path / "bandit.parquet")
    table[table["algorithm"] != "ipo"].to_parquet(tmp_path / "bandit.parquet")
    study.make_bandit(tmp_path, smoke=False)
    assert made[len(methods) + len(bandit.ENUMERATED) :] == ["ipo"]
    assert set(pd.read_parquet(tmp_path / "bandit.parquet")["algorithm"]) == set(methods)


def test_pilots_come_first_and_finished_runs_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = []
    monkeypatch.setattr(sums, "make_missing", lambda runs, path, workers, drifts: given.append(runs))
    # A cell of each setup, with and without pilots: a config takes 5 ms, and the plan has 5,000 of them.
    cells = {(cell.setup, cell.has_pilot): cell for cell in plan.cells_of("sums")}
    monkeypatch.setattr(plan, "cells_of", lambda task: [*cells.values()])
    pilots = plan.pilot_runs("sums", SCALES, SHORT)

    def finish(runs):
        for run in runs:
            file_of(run).parent.mkdir(parents=True, exist_ok=True)
            file_of(run).write_text('{"step": [0, 40], "evaluation/accuracy": [0.5, 0.6]}')

    finish(pilots[:2])
    sums.make_runs(tmp_path / "sums.parquet", SCALES, None, 1, SHORT)
    assert [run.name for run in given.pop()] == [run.name for run in pilots[2:]] and not given
    finish(pilots)
    sums.make_runs(tmp_path / "sums.parquet", SCALES, None, 1, SHORT)
    assert given[0] == [] and {run.settings["seed"] for run in given[1]} == {str(seed) for seed in range(8)}
    # Equal ends, so the lowest rate is the best one.
    lowest = {run.settings["rate"] for run in given[1] if run.settings["setup"] == "sgd"}
    assert lowest == {"0.03", "0.1"}


POLICY = np.array([0.2, 0.5, 0.3])
SAMPLER = np.array([0.4, 0.35, 0.25])
RECORDED = np.array([0.1, 0.6, 0.3])


def ascent(algorithm, arms, recorded, policy):
    """The ascent direction of a group, by a loop over its arms."""
    direction, mean_reward = np.zeros(3), np.mean([REWARDS[arm] for arm in arms])
    for arm in arms:
        advantage, ratio = REWARDS[arm] - mean_reward, policy[arm] / recorded[arm]
        coefficient = advantage
        if algorithm == "ipo":
            coefficient = advantage * ratio * (abs(policy[arm] - recorded[arm]) <= 0.3)
        if algorithm == "rec_one_side_nois":
            coefficient = advantage * (ratio <= 1.2 if advantage > 0 else ratio >= 0.8)
        if algorithm == "opmd":
            coefficient = advantage - 0.1 * np.log(ratio)
        direction += coefficient * (np.eye(3)[arm] - policy)
        if algorithm == "score_centering":
            for other in range(3):
                direction -= advantage * recorded[other] * (np.eye(3)[other] - policy)
    return direction / len(arms)


ENUMERATED = ["reinforce", "rec_one_side_nois", "score_centering", "ipo", "opmd"]


@pytest.mark.parametrize("algorithm", slow_except(ENUMERATED, "ipo"))
def test_enumerated_gradients_are_those_of_loops_over_all_groups(algorithm):
    directions, probabilities = [], []
    for arms in itertools.product(range(3), repeat=8):
        directions.append(ascent(algorithm, arms, RECORDED, POLICY))
        probabilities.append(np.prod([SAMPLER[arm] for arm in arms]))
    mean = sum(p * direction for p, direction in zip(probabilities, directions, strict=True))
    squares = [((direction - mean) ** 2).sum() for direction in directions]
    of = jax.jit(bandit.enumerated(build_algorithm(algorithm, {})))
    found = of(*(jnp.log(jnp.asarray(x, jnp.float32)) for x in (POLICY, SAMPLER, RECORDED)))
    assert_close(found.mean, mean, 2e-5)
    np.testing.assert_allclose(found.variance, np.dot(probabilities, squares), rtol=1e-4)


@pytest.mark.slow
def test_reinforce_loses_nothing_without_age_and_drift():
    rows = pd.DataFrame(bandit.losses_of("reinforce", ages=(1,), scales=(0.0,)))
    assert rows["kl"].abs().max() < 1e-5 and (rows["cosine"] > 1 - 1e-5).all()
    logits = jnp.log(jnp.asarray(POLICY, jnp.float32))
    found = jax.jit(bandit.enumerated(build_algorithm("reinforce", {})))(logits, logits, logits)
    assert_close(found.mean, 7 / 8 * POLICY * (REWARDS - POLICY @ REWARDS), 2e-5)


def test_the_sampler_drifts_as_a_matrix_does():
    logits, key = jnp.log(jnp.asarray(POLICY, jnp.float32)), jax.random.key(0)
    exact = np.asarray(jax.nn.log_softmax(logits))
    assert_same_logprobs(bandit.sampler(logits, key, {"int8": 0.0, "noise": 0.0}), exact)
    assert 1e-4 < np.abs(bandit.sampler(logits, key, {"int8": 1.0}) - exact).max() < 0.02
    moved = [np.abs(bandit.sampler(logits, key, {"noise": scale}) - exact).max() for scale in (0.1, 0.2)]
    assert 0.01 < moved[0] < moved[1]


@pytest.mark.slow
def test_fixed_noise_stays_and_new_noise_cancels():
    cells = [bandit.Cell(), bandit.Cell(noise=1.0, fixed=True), bandit.Cell(noise=1.0)]
    results = bandit.train(bandit.algorithm_of("reinforce"), cells, range(8), steps=200)
    exact, fixed, fresh = results.reward.mean(1)
    assert fixed < exact - 0.05 and fresh > exact - 0.01
    assert results.kl[0].max() < 1e-6 and results.kl[1:].min() > 1e-4
    slow = bandit.train(bandit.algorithm_of("reinforce"), [bandit.Cell(rate=0.1)], range(8), steps=200)
    assert slow.mean_reward.mean() < results.mean_reward[0].mean()


AXES = plan.AXES


def small_tables():
    """Six seeds and a pilot, in which age costs REINFORCE accuracy, and a clip helps against age alone."""
    rows = []
    places = itertools.product(
        ("reinforce", "clip"), ("none", "age20", "fixed_noise20"), ("0.0001", "0.0002"), ("100", *map(str, range(6)))
    )
    for method, cause, rate, seed in places:
        end = 0.9 - 0.3 * (cause == "age20") * (method == "reinforce") + 0.01 * (int(seed) % 10)
        end -= 0.1 * (rate == "0.0002")
        for step, accuracy in ((0, 0.4), (10, end)):
            place = dict(zip(AXES, ("adamw", method, cause, rate, seed), strict=True))
            rows.append({**place, "step": step, "evaluation/accuracy": accuracy, "behavior_kl/k3": 0.01})
    gradients = [
        {"algorithm": name, "cause": cause, "size": size, "kl": size / 10, "cosine": 1 - size, "noise": 1 + size}
        for name in bandit.ENUMERATED
        for cause in page.PANELS
        for size in (0.1, 0.5)
    ]
    return {"sums": pd.DataFrame(rows), "gradients": pd.DataFrame(gradients)}


def found_in(table, reading="best"):
    """The checks of a table of sums."""
    runs = page.runs_of("sums", table)
    return page.checks(page.at_rates(runs.final, "sums", reading, runs), "sums")


def test_checks_tell_the_causes_apart():
    found = found_in(small_tables()["sums"])
    clip, cost = found["adamw", "clip", "reinforce", "age20"], found["adamw", "reinforce", "none", "age20"]
    assert clip.found.mean == pytest.approx(0.3) and clip.found.count == 6
    assert page.verdict(clip) == page.verdict(cost) == "holds"
    assert page.verdict(found["adamw", "clip", "reinforce", "fixed_noise20"]) == "no difference"
    assert page.verdict(found["adamw", "weight", "reinforce", "age20"]) == "not run"
    few = small_tables()["sums"]
    few = few[few["seed"].astype(int).isin([0, 1, 100])]
    assert page.verdict(found_in(few)["adamw", "clip", "reinforce", "age20"]) == "seen in every seed"


def test_pilot_seeds_only_choose_the_rate():
    table = small_tables()["sums"]
    runs = page.runs_of("sums", table)
    assert set(runs.best.values()) == {1e-4}
    best = page.at_rates(runs.final, "sums", "best", runs)
    common = page.at_rates(runs.final, "sums", "common", runs)
    assert "100" not in best.index.get_level_values("seed")
    np.testing.assert_allclose(best - common, 0.1, atol=1e-6)


def test_verdicts_hold_after_the_correction_for_their_number():
    generator = np.random.default_rng(0)
    cells = [cell for cell in plan.cells_of("sums") if cell.setup == "adamw" and cell.has_pilot]
    rows = [
        ("adamw", cell.algorithm, cell.cause, "0.0002", str(seed), step, end)
        for cell in cells
        for seed in range(8)
        for step, end in ((0, 0.5), (10, 0.5 + generator.normal(0, 0.05) + 0.3 * (cell.algorithm == "opmd")))
    ]
    found = found_in(pd.DataFrame(rows, columns=[*AXES, "step", "evaluation/accuracy"]), "common")
    surviving = {place for place in page.corrected(found) if found[place].expected == "higher"}
    assert {place[1] for place in surviving} == {"opmd"} and len(surviving) > 2
    made = found["adamw", "opmd", "reinforce", "age20"]
    assert (page.verdict(made), page.verdict(made, survives=False)) == ("holds", "holds alone")
    assert " after Holm's correction. Without any effect" in page.chance(found)


def test_the_page_renders_from_a_small_table(tmp_path):
    page.write_page(small_tables(), tmp_path, tmp_path)
    texts = [(tmp_path / name).read_text(encoding="utf-8") for name in ("drift.md", "README.md")]
    assert not any("{{" in text for text in texts)
    assert "| clip − REINFORCE | higher than 0 | ✓ +0.300 | not run | not run | ≈ +0.000 |" in texts[0]
    assert "| clip − REINFORCE | age 20 | higher than 0 | +0.300 (+0.300 to +0.300) |" in texts[1]
    assert {path.name for path in (tmp_path / "drift").iterdir()} == {"sums.png", "gradients.png"}


def test_runs_of_several_base_policies_make_no_page(tmp_path):
    tables = small_tables()
    runs = tables["sums"]
    is_other = (runs["step"] == 0) & (runs["cause"] == "age20") & (runs["seed"] == "1")
    runs.loc[is_other, "evaluation/accuracy"] = 0.5
    with pytest.raises(ValueError, match="sums: runs of one seed begin with different policies .seed 1: .* 0.4"):
        page.write_page(tables, tmp_path, tmp_path)


@pytest.mark.campaign
def test_the_committed_page_is_that_of_the_committed_tables(tmp_path):
    page.write_page(page.read_tables(study.HERE), tmp_path, tmp_path)
    assert (tmp_path / "drift.md").read_text() == (study.DOCS / "drift.md").read_text()
    assert (tmp_path / "README.md").read_text() == (study.HERE / "README.md").read_text()


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("method", "cause", "setup"),
    [
        ("centering", "fixed_noise20", "adamw"),
        ("centering_and_mask", "int8", "adamw"),
        ("ipo", "fixed_noise20_wrong", "adamw"),
        ("capped_weight", "fresh_noise20", "adamw"),
        ("capped_weight", "int4", "adamw"),
        ("reinforce", "fixed_noise20", "sgd"),
        ("clip", "fresh_noise20", "adamw_4_updates"),
        ("clip_recomputed_and_correction", "fixed_noise20", "adamw_4_updates"),
    ],
)
def test_runs_with_drift_are_the_trainers(method, cause, setup, tmp_path, monkeypatch):
    monkeypatch.setenv("RECJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    updates = 4 if setup == "adamw_4_updates" else 1
    age = 2 if updates == 4 else 5
    rate = 0.3 if setup == "sgd" else 4e-4
    run = planned_run(method, cause, f"regime.sync_interval={age}", "training.steps=16", setup=setup, rate=rate)
    config = run.config
    make([run], drifts=True)
    ours = collect([run], tmp_path / "sums.parquet").set_index("step")
    train(config)
    theirs = pd.DataFrame(read_metrics(Path(config.output) / "metrics.jsonl")).set_index("step")
    ends = [0, 4, 8, 12, 16]
    np.testing.assert_allclose(ours["evaluation/accuracy"], theirs["evaluation/accuracy"].loc[ends], atol=1e-4)
    for name in ("reward", "ratio/q99", "gradient_norm", "behavior_kl/k3"):
        means = [theirs[name].loc[end - 3 : end].mean() for end in ends[1:]]
        np.testing.assert_allclose(ours[name].loc[ends[1:]], means, rtol=5e-3, atol=1e-6)
    assert (ours["behavior_kl/k3"].loc[ends[1:]] > 1e-7).all()
