"""The pairwise loss against its double loop over pairs."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recjax.algorithms.reduce import pairwise_consistency_loss
from tests.algorithms.examples import GROUP_IDS, REWARDS, ROWS, WHOLE_GROUPS
from tests.marks import slow

KEPT = np.arange(ROWS) % 5 != 4
generator = np.random.default_rng(0)
POLICY, ANCHOR = generator.normal(-20, 1, (2, ROWS)).astype(np.float32)
WEIGHTS = generator.uniform(0.2, 2, ROWS).astype(np.float32)
WEIGHTS[2] = 0.0


def pair_loop(policy, tau):
    """(sum, count, gradient by the policy's log-probabilities) by a loop over groups and pairs."""
    agreement = REWARDS - tau * (policy.astype(float) - ANCHOR)
    total, gradient, groups = 0.0, np.zeros(ROWS), set(GROUP_IDS[KEPT])
    for group in groups:
        rows = [i for i in range(ROWS) if KEPT[i] and GROUP_IDS[i] == group]
        for i in rows:
            for j in rows:
                difference = agreement[i] - agreement[j]
                scale = float(WEIGHTS[i]) * float(WEIGHTS[j]) / len(rows) ** 2
                total += scale * difference**2 * (i < j)
                gradient[i] -= 2 * tau * scale * difference
    return total, len(groups), gradient


def inputs(junk=0.0):
    arrays = (np.where(KEPT, x, np.float32(junk)) for x in (POLICY, ANCHOR, REWARDS, WEIGHTS))
    return (*map(jnp.asarray, arrays), jnp.asarray(GROUP_IDS), jnp.asarray(KEPT))


value_and_gradient = jax.jit(jax.value_and_grad(pairwise_consistency_loss, has_aux=True))


class PairwiseVariants(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True, with_device=True, with_pmap=True)
    def test_loop(self):
        def everything(policy, *others):
            def total(x):
                return pairwise_consistency_loss(x, *others, tau=0.7)

            return total(policy), jax.grad(lambda x: total(x)[0])(policy)

        (total, count), gradient = self.variant(everything)(*inputs())
        expected = pair_loop(POLICY, 0.7)
        np.testing.assert_allclose([total, count], expected[:2], rtol=1e-4)
        np.testing.assert_allclose(gradient, expected[2], rtol=1e-4, atol=1e-6)


def test_rows_not_kept_are_not_read():
    chex.assert_trees_all_equal(value_and_gradient(*inputs()), value_and_gradient(*inputs(np.nan)))
    chex.assert_trees_all_equal(value_and_gradient(*inputs()), value_and_gradient(*inputs(np.inf)))


@pytest.mark.parametrize("size", [33, *slow(7)])
@pytest.mark.parametrize("reward", [0.1, -0.9, 100.1])
def test_equal_rewards_have_no_gradient_at_the_anchor(size, reward):
    policy = jnp.linspace(-30, -1, size)
    arrays = policy, policy, jnp.full(size, reward), jnp.ones(size), jnp.zeros(size, int), jnp.ones(size, bool)
    (total, _), gradient = value_and_gradient(*arrays)
    assert total == 0 and (gradient == 0).all()


def test_only_the_policy_is_differentiated():
    loss = jax.grad(lambda *x: pairwise_consistency_loss(*x, *inputs()[4:])[0], argnums=(1, 2, 3))
    gradients = jax.jit(loss)(*inputs()[:4])
    chex.assert_trees_all_equal(gradients, (jnp.zeros(ROWS),) * 3)


def test_whole_groups_in_any_micro_batch_add_up():
    arrays = [np.asarray(x) for x in inputs()]
    parts = [value_and_gradient(*(x[part] for x in arrays))[0] for part in WHOLE_GROUPS.reshape(4, 4)]
    summed = np.sum(parts, axis=0)
    chex.assert_trees_all_close(tuple(summed), value_and_gradient(*inputs())[0], rtol=1e-5)


def test_a_group_of_one_counts_and_costs_nothing():
    one = jnp.ones(1)
    got, _ = value_and_gradient(one, 0 * one, 3 * one, one, jnp.zeros(1, int), jnp.ones(1, bool))
    chex.assert_trees_all_equal(got, (jnp.float32(0), jnp.float32(1)))


def test_tau_must_be_above_zero():
    with pytest.raises(ValueError, match="tau = 0.0: must be above 0"):
        pairwise_consistency_loss(*inputs(), tau=0.0)
