"""Advantages of turns: against loops, and in the loss with rows of a trajectory apart."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from recjax.algorithms import losses
from recjax.algorithms.advantages import group_mean_advantages
from recjax.algorithms.batch_advantages import turn_return_advantages
from recjax.algorithms.presets import build_algorithm
from tests.closeness import assert_close

TURNS, TIME = 5, 7
# Eleven rows of seven trajectories in three groups; the sixth trajectory is not kept, and the last row fills up.
TRAJECTORIES = np.array([0, 1, 2, 0, 4, 5, 5, 7, 8, 8, 10], np.int32)
GROUP_IDS = np.array([9, 9, 9, 9, -2, -2, -2, -2, 3, 3, 77], np.int32)
FIRST = np.array([True, True, True, False, True, True, False, False, True, False, False])
COUNTS = {0: 4, 1: 1, 2: 3, 4: 5, 5: 2, 7: 2, 8: 3}


def made(seed=0, last_alone=False):
    """Turn rewards, the turns of tokens, and the mask, of random trajectories."""
    generator = np.random.default_rng(seed)
    rewards = np.full((len(FIRST), TURNS), np.nan, np.float32)
    turns = generator.integers(0, TURNS, (len(FIRST), TIME)).astype(np.int32)
    for one, count in COUNTS.items():
        given = generator.normal(size=count) * (np.arange(count) == count - 1 if last_alone else 1)
        rewards[one == TRAJECTORIES, :count] = given
        turns[one == TRAJECTORIES] %= count
    mask = (generator.random(turns.shape) < 0.7) & (np.arange(len(FIRST)) < 10)[:, None]
    mask[:10, 0] = True
    return rewards, np.where(mask, turns, -1).astype(np.int32), mask


def loop(rewards, turns, mask, discount, baseline, kept=FIRST):
    """The advantages by loops over trajectories, turns and tokens, in float64."""

    def worth(one, turn):
        turn = min(turn, COUNTS[one] - 1)
        return sum(discount ** (k - turn) * float(rewards[one, k]) for k in range(turn, COUNTS[one]))

    found = np.zeros(mask.shape)
    for row, time in zip(*np.nonzero(mask), strict=True):
        one = int(TRAJECTORIES[row])
        if not kept[one]:
            continue
        group = [other for other in COUNTS if GROUP_IDS[other] == GROUP_IDS[one] and kept[other]]
        mean = np.mean([worth(other, int(turns[row, time])) for other in group]) if baseline == "group" else 0.0
        found[row, time] = worth(one, int(turns[row, time])) - mean
    return found


class TurnVariants(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True, with_device=True, with_pmap=True)
    @parameterized.product(discount=(1.0, 0.6), baseline=("group", "none"))
    def test_loop(self, discount, baseline):
        rewards, turns, mask = made()

        def function(*arrays):
            return turn_return_advantages(*arrays, discount=discount, baseline=baseline)

        arrays = map(jnp.asarray, (rewards, turns, GROUP_IDS, FIRST, mask, TRAJECTORIES))
        got = self.variant(function)(*arrays)
        assert_close(got, loop(rewards, turns, mask, discount, baseline), 1e-5)


def test_final_rewards_without_discount_give_group_means():
    rewards, turns, mask = made(last_alone=True)
    arrays = map(jnp.asarray, (rewards, turns, GROUP_IDS, FIRST, mask, TRAJECTORIES))
    whole = np.nansum(rewards, axis=-1)
    expected = np.asarray(jax.jit(group_mean_advantages)(whole, GROUP_IDS, FIRST))[TRAJECTORIES]
    got = jax.jit(turn_return_advantages)(*arrays)
    # Two sums of the rewards: of the trajectory, and of the turns from each on.
    assert_close(got, np.where(mask, expected[:, None], 0.0), 1e-5)


def test_equal_rewards_have_no_advantage_at_all():
    rewards = jnp.full((3, 2), 0.1)
    found = jax.jit(functools.partial(turn_return_advantages, discount=0.9))(
        rewards, jnp.zeros((3, 4), int), jnp.zeros(3, int), jnp.ones(3, bool), jnp.ones((3, 4), bool)
    )
    assert (found == 0).all()


@pytest.mark.parametrize("weight", ["none", "exp_advantage"])
def test_further_rows_have_their_own_turns_values(weight):
    changes = {"advantage": {"name": "turn_returns", "discount": 0.6}, "weight": {"name": weight}}
    algorithm = build_algorithm("reinforce", changes)
    rewards, turns, mask = made()
    rows = jax.jit(losses.row_terms, static_argnums=0)(
        algorithm,
        losses.BatchValues(
            jnp.asarray(np.nansum(rewards, axis=-1)),
            jnp.asarray(GROUP_IDS),
            jnp.asarray(mask.any(-1)),
            jax.random.key(0),
            completion_mask=jnp.asarray(mask),
            trajectories=jnp.asarray(TRAJECTORIES),
            turn_rewards=jnp.asarray(rewards),
            token_turns=jnp.asarray(turns),
        ),
    )
    expected = loop(rewards, turns, mask, 0.6, "group", kept=FIRST | (TRAJECTORIES == 7))
    assert_close(rows.advantages, expected, 1e-5)
    weights = np.exp(expected) * mask if weight == "exp_advantage" else mask
    found = np.asarray(rows.weights).reshape(11, -1)
    np.testing.assert_allclose(np.broadcast_to(found, mask.shape) * mask, weights, rtol=1e-4)


@pytest.mark.parametrize("discount", [0.0, 1.1])
def test_a_discount_out_of_range_is_refused(discount):
    with pytest.raises(ValueError, match=r"advantage.discount = .*: must be above 0 and at most 1"):
        build_algorithm("reinforce", {"advantage": {"name": "turn_returns", "discount": discount}})
