"""Advantages: against loops, and what must hold for any grouping."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from recjax.algorithms import advantages
from recjax.algorithms.axes import AXES
from recjax.algorithms.losses import BatchValues, Scored, row_terms
from recjax.algorithms.presets import build_algorithm
from tests.algorithms.examples import GROUP_IDS, REWARDS, ROWS, called, group_mean_loop, members
from tests.closeness import assert_close

KEPT = np.arange(ROWS) % 5 != 4
GROUP_FUNCTIONS = {
    "mean": advantages.group_mean_advantages,
    "normalized": advantages.group_normalized_advantages,
    "leave_one_out": advantages.leave_one_out_advantages,
    "asymmetric": advantages.asymmetric_advantages,
}


def loop(name, rewards, group_ids, kept):
    """Every advantage of the file by loops, with default options."""
    if name == "raw":
        return np.where(kept, rewards, 0.0)
    result = np.zeros(len(rewards))
    centered = group_mean_loop(rewards, group_ids, kept)
    for i in np.flatnonzero(kept):
        group = members(group_ids, kept, i)
        if len(group) == 1:
            continue
        others = [float(rewards[j]) for j in group if j != i]
        result[i] = {
            "mean": centered[i],
            "normalized": centered[i] / (np.std([float(rewards[j]) for j in group]) + 1e-6),
            "leave_one_out": float(rewards[i]) - sum(others) / len(others),
            "asymmetric": centered[i] + 0.1,
        }[name]
    return result


class AdvantageVariants(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True, with_device=True, with_pmap=True)
    @parameterized.named_parameters(*((name, name) for name in [*GROUP_FUNCTIONS, "raw"]))
    def test_loop(self, name):
        function = {**GROUP_FUNCTIONS, "raw": advantages.raw_reward_advantages}[name]
        got = self.variant(function)(jnp.asarray(REWARDS), jnp.asarray(GROUP_IDS), jnp.asarray(KEPT))
        assert_close(got, loop(name, REWARDS, GROUP_IDS, KEPT), 1e-5)


SINGLETONS = {"default": {}, "zero": {"singleton": "zero"}, "reward": {"singleton": "reward"}}


@functools.cache
def of_a_group_of_one():
    """Advantages of four rows by function and options, in one program; the first row is alone, the last is not kept."""
    rewards, group_ids, kept = np.float32([0.7, 0.2, 0.4, 5.0]), np.array([3, 1, 1, 3]), np.arange(4) < 3
    program = jax.jit(
        lambda *arrays: {
            (name, chosen): function(*arrays, **options)
            for name, function in GROUP_FUNCTIONS.items()
            for chosen, options in SINGLETONS.items()
        }
    )
    return jax.device_get(program(rewards, group_ids, kept))


@pytest.mark.parametrize("function", GROUP_FUNCTIONS)
@pytest.mark.parametrize(("chosen", "alone"), [("default", 0.0), ("zero", 0.0), ("reward", 0.7)])
def test_a_group_of_one_gets_what_was_chosen(function, chosen, alone):
    got = of_a_group_of_one()[function, chosen]
    assert got[0] == np.float32(alone) and got[3] == 0 and np.isfinite(got).all()


def test_values_to_check_by_hand():
    rewards, group_ids, kept = jnp.array([0.0, 1.0, 1.0, 2.0]), jnp.zeros(4, int), jnp.ones(4, bool)
    chex.assert_trees_all_close(jitted["mean"](rewards, group_ids, kept), jnp.array([-1.0, 0, 0, 1]))
    chex.assert_trees_all_close(jitted["leave_one_out"](rewards, group_ids, kept), jnp.array([-4 / 3, 0, 0, 4 / 3]))
    normalized = jitted["normalized"](rewards, group_ids, kept)
    chex.assert_trees_all_close(normalized, jnp.array([-(2**0.5), 0, 0, 2**0.5]), rtol=1e-5)


def test_standard_deviations_differ_as_the_paper_notes():
    rewards, group_ids, kept = jnp.arange(8.0), jnp.zeros(8, int), jnp.ones(8, bool)
    normalized = jax.jit(lambda *x: [advantages.group_normalized_advantages(*x, ddof=ddof) for ddof in (0, 1)])
    zero, one = map(np.asarray, normalized(rewards, group_ids, kept))
    chex.assert_trees_all_close(zero / one, np.full(8, (8 / 7) ** 0.5, np.float32), rtol=1e-5)  # 6.9%


@pytest.mark.parametrize("name", [*AXES["advantage"], "whitened rewards", "plain returns", "singletons"])
def test_the_baseline_tells_which_equal_rewards_teach(name):
    changes = {
        "whitened rewards": {"name": "batch_whitened", "baseline": "none"},
        "plain returns": {"name": "turn_returns", "baseline": "none"},
        "singletons": {"singleton": "reward"},
    }
    algorithm = build_algorithm("reinforce", {"advantage": changes.get(name, {"name": name})})
    mask, turns, rewards = jnp.ones((4, 1), bool), jnp.zeros((4, 1), int), jnp.array([1.0, 1.0, 3.0, 3.0])

    def teaches(group_ids):
        parts, weights = {"part": rewards}, {"part": jnp.ones(4)}
        batch = BatchValues(rewards, jnp.array(group_ids), mask[:, 0], jax.random.key(0), mask)
        batch = batch._replace(reward_parts=parts, part_weights=weights, turn_rewards=rewards[:, None])
        if algorithm.reads("scored_reference_kl"):
            zeros = jnp.zeros((4, 1))
            batch = batch._replace(scored=Scored(zeros, zeros, zeros, jnp.arange(4.0)[:, None]))
        return bool(np.any(row_terms(algorithm, batch._replace(token_turns=turns)).advantages))

    has_bonus = name == "solved_bonus"
    of_groups = {None: False, "group": name == "asymmetric" or has_bonus, "batch": True, "zero": True}
    assert teaches([0, 0, 1, 1]) == of_groups[algorithm.baseline], "equal in each group, and different between groups"
    alone = algorithm.baseline in ("batch", "zero") or algorithm.values_singletons or has_bonus
    assert teaches([0, 1, 2, 3]) == alone


# Those that subtract no mean, or more than the mean.
WITHOUT_MEAN = {"raw_reward", "asymmetric", "solved_bonus", "none"}
WHITENED = [
    {"baseline": x, "over": y, "ddof": z} for x in ("none", "group") for y in ("completions", "tokens") for z in (0, 1)
]
OPTIONS = {
    "batch_whitened": WHITENED,
    "part_normalized": [{}, {"over": "tokens", "ddof": 1}],
    "group_normalized": [{}, {"ddof": 1}],
    "turn_returns": [{}, {"discount": 0.9}],
}
MANY, TIME = 130, 3


def advantages_of_equals(reward, group_ids, kept, lengths, is_right, names=frozenset(AXES["advantage"])):
    """By function and options: advantages of a batch of equal rewards, whose last two parts cancel each other."""
    rewards, mask = jnp.full(MANY, reward), jnp.arange(TIME) < lengths[:, None]
    right = jnp.where(is_right, jnp.float32(0.3), 0)
    values = dict(
        rewards=rewards,
        group_ids=group_ids,
        kept=kept & mask.any(-1),
        lengths=lengths,
        completion_mask=mask,
        reward_parts={"whole": rewards, "right": right, "wrong": jnp.float32(0.3) - right},
        part_weights=dict.fromkeys(("whole", "right", "wrong"), jnp.ones(MANY)),
        turn_rewards=jnp.stack([0 * rewards, rewards], axis=1),
        token_turns=jnp.broadcast_to(jnp.arange(TIME) // 2, mask.shape),
        trajectories=None,
        scored_reference_kl=jnp.arange(MANY * TIME, dtype=float).reshape(MANY, TIME),
    )
    return {
        f"{name} {options}": called(AXES["advantage"][name], values, **options)
        for name in sorted(names - WITHOUT_MEAN)
        for options in OPTIONS.get(name, [{}])
    }


jitted_equals = jax.jit(advantages_of_equals)


@settings(max_examples=30, deadline=None)
@given(
    reward=st.floats(width=32, allow_nan=False, allow_infinity=False) | st.sampled_from([0.1, -0.9, 12.6, 100.1, 3e38]),
    groups=st.integers(1, MANY),
    seed=st.integers(0, 1000),
)
def test_equal_rewards_have_no_advantage_at_all(reward, groups, seed):
    random = np.random.default_rng(seed)
    ids, lengths = random.integers(0, groups, MANY), random.integers(0, TIME + 1, MANY)
    kept, is_right = random.random((2, MANY)) < random.random((2, 1))
    for name, got in jitted_equals(np.float32(reward), ids, kept, lengths, is_right).items():
        assert (np.asarray(got) == 0).all(), (name, np.abs(got).max())


@pytest.mark.slow
def test_equal_rewards_have_no_advantage_without_a_compiler():
    arguments = jnp.zeros(MANY, int), jnp.ones(MANY, bool), jnp.arange(MANY) % TIME + 1, jnp.arange(MANY) < 5
    names = frozenset({"group_normalized", "batch_mean", "batch_whitened", "part_normalized"})
    for name, got in advantages_of_equals(jnp.float32(-0.9), *arguments, names).items():
        assert (got == 0).all(), (name, got)


groups = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=3, max_size=3)
jitted = {name: jax.jit(function) for name, function in GROUP_FUNCTIONS.items()}


@settings(max_examples=25, deadline=None)
@given(
    rewards=st.lists(st.floats(-10, 10, width=32), min_size=9, max_size=9),
    choice=st.lists(st.integers(0, 2), min_size=9, max_size=9),
    ids=groups,
    kept=st.lists(st.booleans(), min_size=9, max_size=9),
    order=st.permutations(range(9)),
    junk=st.sampled_from([np.nan, np.inf, -np.inf, 1e30]),
)
def test_any_grouping(rewards, choice, ids, kept, order, junk):
    rewards, kept, order = np.array(rewards, np.float32), np.array(kept), np.array(order)
    group_ids = np.array(ids, np.int64).astype(np.int32)[np.array(choice)]
    for name, function in jitted.items():
        got = np.asarray(function(jnp.asarray(rewards), jnp.asarray(group_ids), jnp.asarray(kept)))
        assert np.isfinite(got).all() and (got[~kept] == 0).all()
        moved = function(jnp.asarray(rewards[order]), jnp.asarray(group_ids[order]), jnp.asarray(kept[order]))
        # A deviation of rounding size over epsilon = 1e-6 is no rounding error any more.
        tolerance = 0.5 if name == "normalized" else 1e-4
        chex.assert_trees_all_close(np.asarray(moved), got[order], atol=tolerance)
        dirty = np.where(kept, rewards, np.float32(junk))
        assert (np.asarray(function(jnp.asarray(dirty), jnp.asarray(group_ids), jnp.asarray(kept))) == got).all()
        if name != "normalized":
            chex.assert_trees_all_close(got, loop(name, rewards, group_ids, kept).astype(np.float32), atol=1e-4)


@pytest.mark.parametrize("function", GROUP_FUNCTIONS.values(), ids=GROUP_FUNCTIONS)
def test_a_group_without_kept_rows_divides_by_nothing(function):
    with jax.debug_nans(True):
        assert (function(jnp.ones(2), jnp.zeros(2, int), jnp.zeros(2, bool)) == 0).all()


def test_epsilon_must_be_above_zero():
    with pytest.raises(ValueError, match="epsilon = 0.0: must be above 0"):
        advantages.group_normalized_advantages(jnp.ones(1), jnp.zeros(1, int), jnp.ones(1, bool), epsilon=0.0)


@pytest.mark.parametrize("level", ["token", "completion"])
def test_log_ratio_penalty_by_loops(level):
    """Rows 0 and 2 are one completion; each token's drift is log ρ, or log ρ + KL(μ ‖ π) of this token or another."""
    generator = np.random.default_rng(0)
    new, old = (generator.uniform(0.1, 0.9, (3, 4)) for _ in range(2))
    mask, ids = np.arange(4) < np.array([[4], [1], [3]]), np.array([5, 7, 5])
    expected = np.zeros((3, 4))
    for i, t in np.argwhere(mask):
        places = [(i, t)] if level == "token" else [(j, u) for j, u in np.argwhere(mask) if ids[j] == ids[i]]
        for q, p in ((new[place], old[place]) for place in places):
            expected[i, t] += 0.3 * np.log(q / p)
            if level == "completion":
                expected[i, t] += 0.3 * (p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q)))
    arrays = [np.where(mask, np.log(x), np.nan).astype(np.float32) for x in (new, old)]
    penalty = functools.partial(advantages.log_ratio_penalty, coefficient=0.3, level=level)
    np.testing.assert_allclose(jax.jit(penalty)(*arrays, mask, ids), expected, rtol=1e-4, atol=1e-6)


def test_prefix_weights_fall_with_drift_by_loops():
    generator = np.random.default_rng(0)
    policy, teacher = (-generator.uniform(0.1, 3, (3, 5)) for _ in range(2))
    mask = np.arange(5) < np.array([[5], [0], [3]])
    expected = np.zeros((3, 5))
    for i, t in np.argwhere(mask):
        sizes = [abs(teacher[i, u] - policy[i, u]) for u in range(5) if mask[i, u]]
        expected[i, t] = 2 * (1 + 0.5 * (1 - sum(sizes[:t]) / sum(sizes))) * (teacher[i, t] - policy[i, t])
    arrays = [jnp.asarray(np.where(mask, x, np.nan), jnp.float32) for x in (policy, teacher)]
    found = advantages.teacher_advantages(*arrays, jnp.asarray(mask), coefficient=2.0, prefix_weight=0.5)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
