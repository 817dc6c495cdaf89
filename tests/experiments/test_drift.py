"""The study of age and engine drift: its cells, what a second command makes, enumerated gradients, and its page."""

import itertools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import scipy
import yaml

from experiments.bandit.bandit import REWARDS
from experiments.claims.map import drift_of, file_of, make, without_arguments
from experiments.claims.programs import seed_of
from experiments.drift import __main__ as study
from experiments.drift import bandit, page
from recjax.algorithms.presets import build_algorithm
from recjax.analysis.sweeps import read_sweep
from recjax.config import load_config
from recjax.training.metrics import read_metrics
from recjax.training.start import train
from tests.closeness import assert_close, assert_same_logprobs
from tests.experiments.test_claims_map import SMALL
from tests.marks import slow_except

WRONG = "score_centering with wrong log-probs, which recjax refuses"


def sweep_of(name, **chosen):
    """A sweep file with one grid instead of its own, and its runs."""
    sweep = yaml.safe_load((study.HERE / f"{name}.yaml").read_text())
    first = {axis: [next(iter(names))] for axis, names in sweep["settings"].items()}
    return sweep | {"config": str(study.HERE / sweep["config"]), "grids": [first | chosen], "smoke": None}


def settings_of(name):
    """The settings of a sweep file, by axis."""
    return yaml.safe_load((study.HERE / f"{name}.yaml").read_text())["settings"]


@pytest.mark.parametrize("name", ["quickstart", "smollm2"])
def test_a_sweep_has_every_cell_that_a_config_allows(name):
    settings, found = settings_of(name), page.all_cells(name)
    for cell in itertools.product(*settings.values()):
        algorithm, _, engine, _ = cell
        is_refused = "center" in algorithm and engine.endswith("_wrong")
        assert (cell in found) != is_refused, WRONG
    if name == "quickstart":
        assert list(settings["algorithm"]) == list(page.NAMES) and list(settings["engine"]) == list(page.ENGINES)
        assert list(settings["age"]) == list(page.AGES) and list(settings["seed"]) == ["0", "1", "2"]
        assert list(bandit.ENGINES) == list(page.ENGINES) and [*map(str, bandit.TRAINED_AGES)] == list(page.AGES)


@pytest.mark.parametrize("name", ["quickstart", "smollm2"])
def test_each_axis_reaches_the_config(name, tmp_path):
    settings = settings_of(name)
    for chosen in ({axis: [*names]} for axis, names in settings.items()):
        (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(sweep_of(name, **chosen), sort_keys=False))
        for run in read_sweep(tmp_path / "sweep.yaml")[1]:
            config, place = run.config, run.settings
            assert config.algorithm.preset == place["algorithm"].removesuffix("_centered")
            assert config.regime.sync_interval == int(place["age"]) and config.seed == int(place["seed"])
            assert (config.rollout.recorded_top_k > 0) == ("center" in place["algorithm"])
            added = {"coefficient": 1.0} if place["algorithm"].endswith("_centered") else {}
            assert config.algorithm.score_centering == added
            drift = settings["engine"][place["engine"]].get("rollout.drift")
            assert (config.rollout.drift is None) == (drift is None)
            if drift is not None:
                wanted = {drift["weights"]: drift.get("scale", 1.0), "exact_logprobs": "logprobs" in drift}
                assert drift_of(config) == wanted | {"fixed": False}
                assert wanted["exact_logprobs"] == place["engine"].endswith("_wrong")


@pytest.mark.slow
def test_every_cell_is_a_valid_config():
    runs = read_sweep(study.HERE / "quickstart.yaml")[1]
    assert {tuple(run.settings.values()) for run in runs} == page.all_cells("quickstart")


def test_a_reward_that_the_programs_lack_is_refused():
    config = load_config(study.HERE.parent / "quickstart.yaml")
    with pytest.raises(ValueError, match="task.reward = 'recjax.tasks.rewards:number_match'.*last_number_match"):
        seed_of(config)


def test_runs_of_one_algorithm_share_a_program(tmp_path):
    chosen = {"age": ["1", "50"], "engine": ["exact", "noise_large_wrong"], "seed": ["0", "2"]}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(sweep_of("quickstart", **chosen), sort_keys=False))
    runs = read_sweep(tmp_path / "sweep.yaml")[1]
    assert len({without_arguments(run.config).model_dump_json() for run in runs}) == 1 < len(runs)


def test_a_drift_that_programs_do_not_have_is_refused(tmp_path):
    runs = read_sweep(study.HERE / "quickstart.yaml", True, ["rollout.drift={weights: int4, group: 8}"])[1]
    with pytest.raises(ValueError, match="rollout.drift.group = 8: programs have one scale for each output"):
        drift_of(runs[0].config)


def test_a_second_command_makes_only_what_is_missing(tmp_path, monkeypatch):
    made = []

    def rows(preset, **options):
        made.append(preset)
        return [{"seed": "0", "reward": 0.5}]

    monkeypatch.setattr(bandit, "trained", rows)
    monkeypatch.setattr(bandit, "losses_of", rows)
    study.make_bandit(tmp_path, smoke=False)
    assert made == 2 * list(page.NAMES)
    study.make_bandit(tmp_path, smoke=False)
    assert len(made) == 2 * len(page.NAMES)
    table = pd.read_parquet(tmp_path / "bandit.parquet")
    table[table["algorithm"] != "ipo"].to_parquet(tmp_path / "bandit.parquet")
    study.make_bandit(tmp_path, smoke=False)
    assert made[2 * len(page.NAMES) :] == ["ipo"]
    assert set(pd.read_parquet(tmp_path / "bandit.parquet")["algorithm"]) == set(page.NAMES)


def test_finished_runs_are_not_made_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = read_sweep(study.HERE / "quickstart.yaml", smoke=True)[1]
    for run in runs[:2]:
        file_of(run).parent.mkdir(parents=True, exist_ok=True)
        file_of(run).write_text('{"step": [0, 10], "evaluation/accuracy": [0.5, 0.6]}')
    given = []
    monkeypatch.setattr(study, "make_missing", lambda runs, path, workers, drifts: given.append(runs))
    study.make_quickstart(tmp_path, smoke=True, most=None, workers=1)
    assert [run.name for run in given[0]] == [run.name for run in runs[2:]]
    study.write_table(study.collect(runs, tmp_path / "quickstart.parquet"), tmp_path / "quickstart.parquet")
    shutil.rmtree(file_of(runs[0]).parent)
    study.make_quickstart(tmp_path, smoke=True, most=1, workers=1)
    assert [run.name for run in given[1]] == [runs[2].name]


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
    assert_same_logprobs(bandit.sampler(logits, key, 0.0, 0.0), exact)
    assert 1e-4 < np.abs(bandit.sampler(logits, key, 1.0, 0.0) - exact).max() < 0.02
    moved = [np.abs(bandit.sampler(logits, key, 0.0, scale) - exact).max() for scale in (0.1, 0.2)]
    assert 0.01 < moved[0] < moved[1]


def small_tables():
    """Two seeds of some cells, in which age costs REINFORCE accuracy, and a clip helps only against age."""
    rows = []
    for algorithm, age, engine, seed in itertools.product(
        ("reinforce", "rec_one_side_nois"), ("1", "20"), ("exact", "noise_large"), ("0", "1")
    ):
        end = 0.9 - 0.3 * (age == "20") * (algorithm == "reinforce") + 0.01 * int(seed)
        for step, accuracy in ((0, 0.4), (10, end)):
            place = {"algorithm": algorithm, "age": age, "engine": engine, "seed": seed}
            rows.append({**place, "step": step, "evaluation/accuracy": accuracy, "behavior_kl/k3": 0.01})
    gradients = [
        {"algorithm": name, "cause": cause, "size": size, "kl": size / 10, "cosine": 1 - size, "noise": 1 + size}
        for name in page.NAMES
        for cause in page.PANELS
        for size in (0.1, 0.5)
    ]
    return {"quickstart": pd.DataFrame(rows), "gradients": pd.DataFrame(gradients)}


def test_checks_tell_the_causes_apart():
    found = page.checks(page.ends_of(small_tables()["quickstart"]))
    assert page.verdict(found["harm"]["age20"]) == page.verdict(found["clip"]["age20"]) == "seen in every seed"
    assert found["clip"]["age20"].found.mean == pytest.approx(0.3) and found["clip"]["age20"].found.count == 2
    same = page.verdict(found["harm"]["noise"]), page.verdict(found["clip"]["noise"])
    assert same == ("no difference in any seed",) * 2 and page.verdict(found["clip"]["age50"]) == "not run"
    assert page.verdict(found["weight"]["noise"]) == page.verdict(found["clip"]["wrong"]) == "not run"
    assert found["centering"] == dict.fromkeys(page.CAUSES)


def test_verdicts_hold_after_the_correction_for_their_number():
    generator = np.random.default_rng(0)
    places = [*itertools.product(("reinforce", *page.QUESTIONS), ("1", "20"), ("exact",), map(str, range(8)))]
    rows = pd.DataFrame(places, columns=["algorithm", "age", "engine", "seed"])
    names = {"harm": "reinforce", "clip": "rec_one_side_nois", "weight": "ipo", "weight_and_clip": "grpo"}
    rows["algorithm"] = rows["algorithm"].replace(names | {"capped": "tis", "pull": "opmd"})
    rows = rows.drop_duplicates(["algorithm", "age", "seed"])
    ends = rows.assign(reward=generator.normal(0, 0.1, len(rows)))
    is_clip = (ends["algorithm"] == "rec_one_side_nois") & (ends["age"] == "20")
    ends.loc[is_clip, "reward"] += 1.0
    found = page.checks(ends.set_index(["algorithm", "age", "engine", "seed"])["reward"])
    surviving = {(name, cause) for name, cause in page.corrected(found) if page.QUESTIONS[name].expected == "higher"}
    assert surviving == {("clip", "age20")}
    clip = found["clip"]["age20"]
    assert (page.verdict(clip), page.verdict(clip, survives=False)) == ("holds", "holds alone")
    old = ends[ends["age"] == "20"].pivot(index="seed", columns="algorithm", values="reward")
    differences = (old["rec_one_side_nois"] - old["reinforce"]).to_numpy()
    peer = scipy.stats.ttest_1samp(differences, 0, alternative="greater").pvalue
    assert clip.p_value == pytest.approx(peer, rel=1e-6)
    not_lower = found["weight"]["age20"]
    differences = (old["ipo"] - old["reinforce"]).to_numpy()
    peer = scipy.stats.ttest_1samp(differences, -page.MARGIN, alternative="greater").pvalue
    assert not_lower.p_value == pytest.approx(peer, rel=1e-6)
    assert " after Holm's correction. Without any effect" in page.chance_text(found)


def test_the_page_renders_from_a_small_table(tmp_path):
    page.write_page(small_tables(), tmp_path, tmp_path)
    texts = [(tmp_path / name).read_text(encoding="utf-8") for name in ("drift.md", "README.md")]
    assert not any("{{" in text for text in texts)
    assert "| A clip helps. | seen in every seed | not run | no difference in any seed | not run |" in texts[0]
    assert "Not run." in texts[1] and "| exact | 20 | 0.605 (2) | – |" in texts[1]
    assert "+0.300 (+0.300 to +0.300), 2: as claimed in each of 2 seeds" in texts[1]
    assert {path.name for path in (tmp_path / "drift").iterdir()} == {"quickstart.png", "gradients.png"}


def test_runs_of_several_base_policies_make_no_page(tmp_path):
    tables = small_tables()
    runs = tables["quickstart"]
    is_other = (runs["step"] == 0) & (runs["age"] == "20") & (runs["seed"] == "1")
    runs.loc[is_other, "evaluation/accuracy"] = 0.5
    with pytest.raises(ValueError, match="quickstart: runs of one seed begin with different policies .seed 1: .* 0.4"):
        page.write_page(tables, tmp_path, tmp_path)


@pytest.mark.campaign
def test_the_committed_page_is_that_of_the_committed_tables(tmp_path):
    page.write_page(page.read_tables(study.HERE), tmp_path, tmp_path)
    assert (tmp_path / "drift.md").read_text() == (study.DOCS / "drift.md").read_text()
    assert (tmp_path / "README.md").read_text() == (study.HERE / "README.md").read_text()


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("algorithm", "engine", "drift"),
    [
        ("score_centering", "noise_large", None),
        ("rec_one_side_nois_centered", "int8", None),
        ("ipo", "noise_large_wrong", None),
        ("tis", "noise_small", None),
        ("reinforce", "exact", "{weights: noise, scale: 0.2, fixed: true}"),
        ("tis", "exact", "{weights: int4}"),
    ],
)
def test_runs_with_drift_are_the_trainers(algorithm, engine, drift, tmp_path, monkeypatch):
    monkeypatch.setenv("RECJAX_CACHE", str(tmp_path / "cache"))
    chosen = {"algorithm": [algorithm], "age": ["5"], "engine": [engine], "seed": ["1"]}
    sweep = sweep_of("quickstart", **chosen) | {"output": str(tmp_path)}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(sweep, sort_keys=False))
    changes = [] if drift is None else [f"rollout.drift={drift}"]
    (run,) = read_sweep(tmp_path / "sweep.yaml", extra=[*SMALL, "training.checkpoint_every=8", *changes])[1]
    make([run], drifts=True)
    ours = study.collect([run], tmp_path / "quickstart.parquet").set_index("step")
    train(run.config)
    theirs = pd.DataFrame(read_metrics(tmp_path / run.name / "metrics.jsonl")).set_index("step")
    np.testing.assert_allclose(ours["evaluation/accuracy"], theirs["evaluation/accuracy"].loc[[0, 4, 8]], atol=1e-4)
    for name in ("reward", "ratio/q99", "gradient_norm", "behavior_kl/k3"):
        means = [theirs[name].loc[first : first + 3].mean() for first in (1, 5)]  # the sync is at step 6
        np.testing.assert_allclose(ours[name].loc[[4, 8]], means, rtol=5e-3, atol=1e-6)
    assert (ours["behavior_kl/k3"].loc[[4, 8]] > 1e-7).all()
