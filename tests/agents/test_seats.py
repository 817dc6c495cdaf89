"""Seats of agents: trajectories, groups, versions and rewards of their own; baselines of one seat; frozen weights."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

from recjax.agents import agents
from recjax.agents.agents import Agents
from recjax.algorithms.advantages import group_mean_advantages
from recjax.analysis.samples import results
from recjax.config import TaskConfig, load_config
from recjax.experience.batch import Shape, pad
from recjax.experience.group import group_staleness, with_grades
from recjax.experience.layout import score
from recjax.hub.policy import policy_alone
from recjax.models.sampling import Sampling
from recjax.rewards.pool import Grading
from recjax.rewards.reward import load_reward
from recjax.rollout.engine import Engine
from recjax.rollout.live import LiveEngine
from recjax.rollout.requests import Sampled
from recjax.runs.policies import OpenedPolicy
from recjax.runs.sampled_rows import sampled_rows
from recjax.runtime.clocks import PhaseSeconds
from recjax.sources.sampling import BatchSampler
from recjax.tasks.problems import Problem, Task
from recjax.tasks.prompts import encode_problems
from recjax.training.evaluation import evaluate_policy
from tests.closeness import assert_same_logprobs
from tests.tiny import params_of
from tests.training.counting import CountingLearner, Grades, Interrupted, count, prepared_batch
from tests.training.tiny_run import TINY, without_times

SUMS = [Problem("1+2=", "3"), Problem("33+4=", "37")]
GAMES = ("sometimes", None, "alone")  # what `duel` does
SEATS = [
    "task.agent=tests.agents.some_agents:duel",
    "task.seats={first: policy, second: 3, rule: 'tests.agents.some_agents:rule'}",
    "task.train_seats=[first, second]",
    "rollout.max_context_tokens=32",
]


@pytest.fixture
def make(tmp_path):
    (tmp_path / "tiny.yaml").write_text(TINY)
    return lambda *options: load_config(tmp_path / "tiny.yaml", [f"output={tmp_path / 'run'}", *options])


class Weights(Engine):
    """An engine whose tokens follow from the request's key, and whose log-probs are minus its version."""

    def __init__(self, *arguments, newer=None, **options):
        self.keys, self.newer = [], newer

    def replace_weights(self, params, version):
        self.params, self.version = params, version


class Front(LiveEngine):
    """Answers with two tokens at once."""

    engines = []

    def __init__(self, engine):
        super().__init__(engine)
        self.engine = engine
        self.engines.append(engine)

    async def sample(self, request):
        self.engine.keys.append(tuple(request.key.tolist()))
        tokens = np.random.default_rng(request.key).integers(3, 9, 2).astype(np.int32)
        version = np.full(2, self.engine.version, np.int32)
        return Sampled(tokens, np.float32(-version), version, True)


@pytest.fixture
def play(make, monkeypatch):
    """A function that samples groups with grades at one version or more; also the versions read, and the engines."""
    monkeypatch.setattr(agents, "Engine", Weights)
    monkeypatch.setattr(agents, "LiveEngine", Front)
    monkeypatch.setattr(Front, "engines", [])

    def played(*options, problems=SUMS, newer=None, versions=(7,)):
        config, read = make(*SEATS, *options), []
        policy = policy_alone(config, "0123456789+=!")
        prompts = encode_problems(problems, policy.tokenizer, None)
        with (
            Grading(config, load_reward(config.task.reward_name())) as grading,
            Agents(config, policy, lambda step: read.append(step) or {"of": step}) as opened,
        ):
            for version in versions:
                names = {"name": "b", "source": "policy", "version": version, "newer": newer}
                arguments = policy, {"of": version}, prompts, jax.random.key(0), 3, Sampling(), grading
                groups, grades = opened.sample_groups(*arguments, **names)
            return with_grades(groups, grades.result()), read, Front.engines

    return played


def test_each_seat_has_its_own_groups_and_rewards(play):
    groups, read, engines = play()
    assert [(group.prompt, group.seat) for group in groups] == [
        (problem.prompt, seat) for problem in SUMS for seat in ("first", "second")
    ]
    assert read == [6] and [(one.params, one.version) for one in engines] == [({"of": 7}, 7), ({"of": 6}, 6)]
    for first, second in zip(groups[::2], groups[1::2], strict=True):
        for one, other in zip(first.completions, second.completions, strict=True):
            assert (one.policy_version, other.policy_version) == (7, 6)
            assert (one.rows[0].behavior_logprobs == -7).all() and (other.rows[0].behavior_logprobs == -6).all()
            assert len(one.turns) == len(other.turns) == 1 and one.grade.reward_parts["won"] == one.grade.reward
            assert other.grade.reward == 0.25 - one.grade.reward and other.grade.turns == (0.25,)
        assert [group_staleness(group, 8) for group in (first, second)] == [0, 1]
    completions = [one for group in groups for one in group.completions]
    keys = list(itertools.chain(*(one.keys for one in engines)))
    assert len({one.id for one in completions}) == len(completions) == len({*keys}) == len(keys) == 12


def test_each_version_of_a_frozen_seat_is_read_once(play):
    _, read, engines = play(versions=(7, 8, 10, 11))
    assert read == [6, 9] and [one.version for one in engines] == [7, 6, 8, 6, 10, 9, 11, 9]
    assert all(one.params == {"of": one.version} for one in engines)


def test_newer_weights_never_play_a_frozen_seat(play):
    _, read, engines = play("task.seats.second=7", "training.checkpoint_every=7", newer=lambda: None)
    assert read == [] and [(one.version, one.newer is None) for one in engines] == [(7, False), (7, True)]


def test_frozen_seats_drift_as_their_version_did(make, monkeypatch):
    monkeypatch.setattr(agents, "Engine", Weights)
    monkeypatch.setattr(agents, "LiveEngine", Front)
    monkeypatch.setattr(Front, "engines", [])
    config = make(*SEATS, "rollout={drift: {weights: noise}, prompts_per_step: 4}")
    policy = policy_alone(config, "0123456789+=!")
    prompts = encode_problems(SUMS, policy.tokenizer, None)
    weights = {"up": {"kernel": jnp.eye(4)}}
    with (
        Grading(config, load_reward(config.task.reward_name())) as grading,
        Agents(config, policy, lambda step: weights) as opened,
    ):
        sampler = BatchSampler(config, policy, prompts, grading, PhaseSeconds(), opened)
        for version in (6, 7):
            sampler.sample(weights, version, 1)
    at_six, at_seven, frozen = Front.engines
    assert (at_six.version, at_seven.version, frozen.version) == (6, 7, 6)
    kernels = [np.asarray(one.params["up"]["kernel"]) for one in (at_six, at_seven, frozen)]
    assert (kernels[2] == kernels[0]).all() and (kernels[2] != kernels[1]).any() and (kernels[2] != np.eye(4)).any()


def test_failures_name_the_seat_and_unused_seats_leave_groups(play):
    does = ("no seat", "policy", "one number", "alone")
    groups, *_ = play(problems=[Problem("1+2=", "3", columns={"do": what}) for what in does])
    grades = [[one.grade for one in group.completions] for group in groups]
    assert [[grade.failure for grade in own] for own in grades[:6]] == [["raised"] * 3] * 4 + [["invalid"] * 3] * 2
    assert len(grades[6]) == 3 and grades[7] == []


def test_an_evaluation_has_completions_of_each_seat(play, make, caplog):
    """The second seat plays in some games of problem 0, in all of problem 1, and in none of problem 2."""
    config = make(*SEATS, "evaluation.samples=4", "rollout.prompts_per_step=2")
    problems = [Problem(f"{number}+2=", "3", columns={"do": what}) for number, what in enumerate(GAMES)]
    policy, task = policy_alone(config, "0123456789+=!"), Task([], problems, load_reward(config.task.reward_name()))
    prompts = encode_problems(problems, policy.tokenizer, None)
    opened = OpenedPolicy("duel", policy, {"of": 7}, 7, None, lambda step: {"of": step})
    rows, others = (sampled_rows(config, opened, prompts, task) for _ in range(2))
    pd.testing.assert_frame_equal(rows, others)
    sizes = rows.groupby("problem", sort=False).size()
    assert [*sizes.index] == [0, 1, 2, 3, 4] and [*sizes] == [4, (some := sizes[1]), 4, 4, 4] and 0 < some < 4
    assert (rows["seat"] == np.where(rows["problem"] % 2, "second", "first")).all()
    assert "pairs of a problem and a seat without completions, as the seat never played: 1" in caplog.text
    found = results(rows, 6)
    assert found["problems"] == 5 and found["unplayed"] == 1
    by_hand = rows.groupby("problem")["accurate"].mean().mean()
    assert found["metrics"]["accuracy"]["value"] == pytest.approx(by_hand) != pytest.approx(rows["accurate"].mean())
    with Grading(config, task.reward) as grading, Agents(config, policy, opened.older_params) as players:
        trained = evaluate_policy(config, policy, {"of": 0}, prompts, grading, 0, agents=players)
    assert trained.accuracy == pytest.approx(by_hand)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("no seat", r"policy.seat\('third'\): task.seats has first, second, rule; add third there"),
        ("policy", r"policy.complete: the agent has seats; call policy.seat\(name\).complete"),
        ("one number", "it returned 1.0; rewards are .* or None for each of the seats first, second"),
        ("one seat", "it returned {'second': 1.0}; rewards are .* or None for each of the seats first, second"),
        ("a fourth seat", "it returned {.*'fourth': 0.0}; rewards are .* or None for each of the seats first, second"),
    ],
)
def test_mistakes_with_seats_are_explained(play, what, words):
    with pytest.raises(ValueError, match=words):
        play(problems=[Problem("1+2=", "3", columns={"do": what})])


def test_weights_that_cannot_be_read_are_named(play, monkeypatch):
    def read(step):
        if step == 6:
            raise FileNotFoundError
        return {"of": step}

    monkeypatch.setattr(TaskConfig, "older_versions", lambda *_: {5, 6})
    monkeypatch.setattr(Agents, "__enter__", lambda self: setattr(self, "older_params", read) or self)
    words = r"task.seats = .*: the checkpoint of step 6 cannot be read \(FileNotFoundError\); restore it"
    with pytest.raises(ValueError, match=words):
        play()
    monkeypatch.setattr(Agents, "__enter__", lambda self: setattr(self, "older_params", None) or self)
    with pytest.raises(AssertionError):
        play()


@pytest.mark.slow
def test_frozen_seats_have_the_logprobs_of_their_weights(make):
    """The ratio of their tokens is π/μ, with the frozen weights as μ."""
    config = make(*SEATS)
    policy = policy_alone(config, "0123456789+=!")
    now, older = (params_of(policy.decoder.config, seed) for seed in (0, 1))
    prompts = encode_problems(SUMS, policy.tokenizer, None)
    with Grading(config, load_reward(config.task.reward_name())) as grading, Agents(config, policy) as opened:
        opened.older_params = {6: older}.get
        names = {"name": "b", "source": "policy", "version": 7}
        arguments = policy, now, prompts, jax.random.key(0), 3, Sampling(), grading
        groups, pending = opened.sample_groups(*arguments, **names)
        batch = pad(with_grades(groups, pending.result()), Shape(16, None, 31, 31))
    mask, is_older = batch.completion_mask, batch.policy_version == 6
    scored = [score(policy.decoder, params, batch, Sampling(), 64) for params in (now, older)]
    for rows, own, other in ((~is_older, *scored), (is_older, *reversed(scored))):
        chosen = mask & rows[:, None]
        assert chosen.any()
        assert_same_logprobs(own[chosen], batch.behavior_logprobs[chosen])
        assert abs(other - batch.behavior_logprobs)[chosen].max() > 0.01


# --- Baselines.

jitted_advantages = jax.jit(group_mean_advantages)


def expectations(stale):
    """In a zero-sum game of a move and an answer: Σ A ∇ log π over all pairs of games, by seat and baseline.

    Both seats play move 1 with some probability; who moves first wins 3 for two moves 1, and loses 1 otherwise. The
    gradient is that of the logit of move 1 under π, and the expectation is over games that μ has played.

    Returns:
        Expected advantages and gradients {baseline: (advantages, gradients)} by seat, and (1 − 1/K) Cov_μ(r, ∇ log π),
        the gradient of the group's pairwise loss.
    """
    mu = np.array([0.6, 0.3])
    pi = np.array([0.4, 0.5]) if stale else mu
    games = list(itertools.product((0, 1), repeat=2))
    chances = np.array([np.prod(np.where(game, mu, 1 - mu)) for game in games])
    rewards = np.array([[-1.0, 1.0], [-1.0, 1.0], [-1.0, 1.0], [3.0, -3.0]])
    gradients = np.array(games) - pi
    found = {name: np.zeros((2, 2)) for name in ("seat", "shared")}
    for pair in itertools.product(range(4), repeat=2):
        values = rewards[[*pair]].T.ravel()  # the first seat's two games, then the second seat's
        for name, ids in {"seat": [0, 0, 1, 1], "shared": [0] * 4}.items():
            advantages = np.asarray(jitted_advantages(values.astype(np.float32), np.array(ids), np.ones(4, bool)))
            of_seats, weight = advantages.reshape(2, 2), chances[[*pair]].prod()
            found[name] += weight * np.stack([of_seats.mean(1), (of_seats * gradients[[*pair]].T).mean(1)])
    covariance = chances @ (rewards * gradients) - (chances @ rewards) * (chances @ gradients)
    return found, chances @ rewards, chances @ gradients, covariance / 2


@pytest.mark.parametrize("stale", [False, True])
def test_a_baseline_shared_by_zero_sum_seats_is_biased(stale):
    """It is always 0, so that advantages are the rewards: those of the seat that is worse off are negative on average.

    On data of other weights this adds V_seat · E_μ[∇ log π] to the gradient: imitation of the seat that is better off,
    and the opposite for the other seat.
    """
    found, values, scores, expected = expectations(stale)
    assert abs(values).min() > 0.25
    np.testing.assert_allclose(found["seat"][0], 0, atol=1e-6)
    np.testing.assert_allclose(found["shared"][0], values, atol=1e-6)
    np.testing.assert_allclose(found["seat"][1], expected, atol=1e-6)
    excess = found["shared"][1] - 2 * expected  # without a baseline, the factor 1 − 1/K of a group of two is gone
    np.testing.assert_allclose(excess, values * scores, atol=1e-6)
    assert (abs(excess).min() > 0.02) == stale


def test_the_baseline_of_a_batch_is_of_one_seat(play):
    groups, *_ = play()
    batch = pad(groups, Shape(16, None, 31, 31))
    kept = batch.completion_mask.any(-1)
    advantages = jitted_advantages(batch.rewards, batch.group_ids, kept)
    advantages = np.asarray(advantages)[kept]
    of_games = batch.rewards[kept].reshape(2, 2, 3)  # problems, seats, games
    np.testing.assert_allclose(advantages.reshape(2, 2, 3), of_games - of_games.mean(-1, keepdims=True), atol=1e-6)
    assert abs(of_games.mean(-1)).max() > 0.1


# --- Runs without a model: frozen weights are read from checkpoints, also after a resume.


def duels(seen):
    """A function that samples batches as `prepared_batch`, with the weights of each seat, whose values it keeps."""

    def sample(run, weights, version, number):
        groups, grades = [], []
        for place, seat in enumerate(run.config.task.trained_seats):
            at = run.config.task.seat_version(seat, version)
            played = weights if at == version else run.agents.older_params(at)
            seen.append((version, at, int(np.asarray(played["checksum"])[0])))
            own, their = prepared_batch(run, played, at, number)
            groups += own[place::2]
            grades += [grade for group in range(place, 4, 2) for grade in their.result()[4 * group : 4 * group + 4]]
        return groups, Grades(grades)

    return sample


def test_frozen_weights_come_from_checkpoints_also_after_a_resume(make, tmp_path, monkeypatch):
    monkeypatch.setattr("recjax.runs.policies.put_params", lambda params: params)  # a checksum has no mesh axes
    options = [*SEATS, "training.keep_checkpoints=1"]
    seen, again = [], []
    straight = count(make(*options), sample=duels(seen))
    weights = {version: value for version, at, value in seen if at == version}
    assert [(version, at) for version, at, _ in seen[1::2]] == [(version, version // 3 * 3) for version in range(7)]
    assert all(value == weights[at] for _, at, value in seen)
    assert {int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.isdecimal()} == {6, 7}
    assert straight[5]["staleness_rows"] == {"0": 8, "1": 8}

    def kill():
        raise KeyboardInterrupt

    other = f"output={tmp_path / 'other'}"
    with pytest.raises(KeyboardInterrupt):
        count(make(*options, other), Interrupted(6, kill), duels([]))
    resumed = count(make(*options, other), CountingLearner(), duels(again))
    assert again == seen[-2 * 4 :]
    for ours, theirs in zip(without_times(resumed), without_times(straight), strict=True):
        assert ours["step"] == theirs["step"] and ours.get("loss") == theirs.get("loss")
