"""Selections: what is dropped, and that the seed decides which."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recjax.algorithms.weighting import drop_excess_negatives
from tests.algorithms.examples import GROUP_IDS, REWARDS, ROWS, members

drop = jax.jit(drop_excess_negatives)


def signs(rewards, group_ids, kept):
    """−1, 0 or 1 by a double loop: which side of its group's mean each kept row is on."""
    result = np.zeros(len(rewards), int)
    for i in np.flatnonzero(kept):
        group = [float(rewards[j]) for j in members(group_ids, kept, i)]
        difference = float(rewards[i]) - sum(group) / len(group)
        result[i] = 0 if abs(difference) < 1e-6 * (max(group) - min(group)) + 1e-12 else np.sign(difference)
    return result


class SelectionVariants(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True, with_device=True, with_pmap=True)
    def test_number_kept(self):
        kept = self.variant(drop_excess_negatives)(
            jnp.asarray(REWARDS), jnp.asarray(GROUP_IDS), jnp.ones(ROWS, bool), jax.random.key(0)
        )
        assert int(kept.sum()) == 12


@settings(max_examples=40, deadline=None)
@given(
    rewards=st.lists(st.sampled_from([0.0, 0.1, 0.2, 0.3, 1.0, 1.1, -0.1]), min_size=12, max_size=12),
    group_ids=st.lists(st.integers(-2, 2), min_size=12, max_size=12),
    kept=st.lists(st.booleans(), min_size=12, max_size=12),
    seed=st.integers(0, 1000),
)
def test_only_excess_negatives_are_dropped(rewards, group_ids, kept, seed):
    rewards, group_ids, kept = np.array(rewards, np.float32), np.array(group_ids, np.int32), np.array(kept)
    sign = signs(rewards, group_ids, kept)
    dirty = jnp.asarray(np.where(kept, rewards, np.nan).astype(np.float32))
    got = np.asarray(drop(dirty, jnp.asarray(group_ids), jnp.asarray(kept), jax.random.key(seed)))
    assert not (got & ~kept).any()
    assert (got[kept & (sign >= 0)]).all()
    for group in set(group_ids):
        rows = (group_ids == group) & kept
        negatives, positives = (rows & (sign < 0)).sum(), (rows & (sign >= 0)).sum()
        assert (got & rows & (sign < 0)).sum() == min(negatives, positives)


@pytest.mark.parametrize("reward", [0.0, 0.1, 1.1])
def test_equal_rewards_keep_everything(reward):
    kept = drop(jnp.full(7, reward), jnp.zeros(7, int), jnp.ones(7, bool), jax.random.key(0))
    assert kept.all()


def test_a_reward_at_the_mean_counts_as_positive():
    rewards = jnp.array([0.0, 0.0, 0.5, 0.5, 1.5])  # two below the mean and three not
    assert drop(rewards, jnp.zeros(5, int), jnp.ones(5, bool), jax.random.key(0)).all()


def test_rounding_makes_no_reward_negative():
    rewards = jnp.array([0.3, 0.7, 1.1])  # 0.7 − mean is −3e-8 in float32
    assert all(drop(rewards, jnp.zeros(3, int), jnp.ones(3, bool), jax.random.key(seed)).all() for seed in range(9))


def test_the_key_decides_and_every_negative_has_its_turn():
    rewards, group_ids, kept = jnp.array([1.0, 0, 0, 0, 0]), jnp.zeros(5, int), jnp.ones(5, bool)

    def draw(seed):
        return drop(rewards, group_ids, kept, jax.random.key(seed))

    chex.assert_trees_all_equal(draw(3), draw(3))
    counts = sum(np.asarray(draw(seed), int) for seed in range(400))
    assert counts[0] == 400
    assert (abs(counts[1:] - 100) < 40).all()  # 4.6 standard deviations of a fair draw


def test_groups_are_drawn_for_separately():
    rewards, group_ids = jnp.tile(jnp.array([1.0, 0, 0, 0]), 2), jnp.repeat(jnp.array([0, 1]), 4)
    draws = [drop(rewards, group_ids, jnp.ones(8, bool), jax.random.key(seed)) for seed in range(20)]
    assert any((draw[:4] != draw[4:]).any() for draw in draws)
