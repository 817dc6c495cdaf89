"""The paper's counter-example: three arms, data from a fixed behavior policy that prefers the second best."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recjax.algorithms import losses
from recjax.algorithms.presets import build_algorithm

REWARDS = jnp.array([0.0, 0.8, 1.0])
BEHAVIOR = jnp.array([0.3, 0.6, 0.1])
ARMS = jnp.array([0, 0, 0, 1, 1, 1, 1, 1, 1, 2])  # each as often as the behavior policy draws it: sums are exact
BEHAVIOR_LOGPROBS = jnp.log(BEHAVIOR)[ARMS][:, None]
MASK = jnp.ones((10, 1), bool)


def gradient_of(preset, overrides):
    """The gradient of a preset's mean loss by the policy's logits, as a function of them."""
    algorithm = build_algorithm(preset, overrides)
    rows = jax.jit(losses.row_terms, static_argnums=0)(
        algorithm, losses.BatchValues(REWARDS[ARMS], jnp.zeros(10, jnp.int32), jnp.ones(10, bool), jax.random.key(0))
    )

    def mean_loss(logits):
        logprobs = jax.nn.log_softmax(logits)[ARMS][:, None]
        total, count = losses.loss(algorithm, logprobs, BEHAVIOR_LOGPROBS, rows, MASK)
        return total / count

    return jax.jit(jax.grad(mean_loss))


def final_policy(preset, overrides, rate=0.5, steps=4000):
    """Gradient descent from the behavior policy, on the same data for ever."""
    gradient = gradient_of(preset, overrides)
    start = jnp.log(BEHAVIOR)
    step = jax.jit(lambda logits: jax.lax.fori_loop(0, steps, lambda _, x: x - rate * gradient(x), logits))
    return np.asarray(jax.nn.softmax(step(start)))


@pytest.mark.parametrize("logits", [jnp.log(BEHAVIOR), jnp.zeros(3), jnp.array([3.0, -1.0, 0.5])])
def test_expected_gradient_of_reinforce_is_the_same_everywhere(logits):
    expected = jnp.array([-0.174, 0.132, 0.042])
    chex.assert_trees_all_close(-gradient_of("reinforce", {})(logits), expected, atol=1e-6)


def test_reinforce_loses_the_best_arm():
    policy = final_policy("reinforce", {})
    assert policy[1] > 0.999 and policy[2] < 1e-3


@pytest.mark.parametrize(
    "preset", ["rec_one_side_nois", "rec_one_side_is", "rec_two_side_nois", "rec_two_side_is", "rec_ring_nois"]
)
def test_clipping_stops_at_its_range(preset):
    # Both better arms stop at 1 + ε times their share, and the best one has risen.
    np.testing.assert_allclose(final_policy(preset, {}, rate=0.01), [0.16, 0.72, 0.12], atol=2e-3)


def test_a_wider_range_goes_farther():
    narrow, wide = (
        final_policy("rec_one_side_nois", {"clip": {"epsilon_low": low, "epsilon_high": high}}, rate=0.01)
        for low, high in ((0.2, 0.2), (0.6, 2.0))
    )
    assert wide @ np.asarray(REWARDS) > narrow @ np.asarray(REWARDS) + 0.05


def test_opmd_stops_where_its_pull_balances_the_gradient():
    tau = 0.5
    policy = final_policy("opmd", {"regularizer": {"tau": tau}})
    force = BEHAVIOR * (REWARDS - BEHAVIOR @ REWARDS - tau * jnp.log(policy / BEHAVIOR))
    chex.assert_trees_all_close(force, policy * force.sum(), atol=1e-4)
    assert policy[2] > 0.1


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_asymre_slows_or_stops_the_collapse(beta):
    logits = jnp.log(jnp.array([1e-3, 0.99, 9e-3]))  # on the way to the second arm
    plain, imitating = (
        -gradient_of(*x)(logits) for x in (("reinforce", {}), ("asymre", {"regularizer": {"beta": beta}}))
    )
    assert imitating[1] - imitating[2] < plain[1] - plain[2]
    if beta == 1.0:  # all of π_b (A + β) is positive: the fixed point is its share
        share = np.asarray(BEHAVIOR * (REWARDS - BEHAVIOR @ REWARDS + beta))
        np.testing.assert_allclose(
            final_policy("asymre", {"regularizer": {"beta": beta}}), share / share.sum(), atol=1e-3
        )


def test_red_weight_escapes_the_second_arm():
    logits = jnp.log(jnp.array([1e-3, 0.99, 9e-3]))
    assert jnp.argmax(-gradient_of("reinforce", {})(logits)) == 1
    assert jnp.argmax(-gradient_of("red_weight", {})(logits)) == 2
    assert final_policy("red_weight", {})[2] > 0.1


@pytest.mark.parametrize("tau", [0.1, 1.0])
def test_consistency_loss_finds_the_optimum_from_any_data(tau):
    policy = final_policy("pairwise_consistency", {"objective": {"tau": tau}}, rate=1.0 / tau**2, steps=20000)
    optimum = BEHAVIOR * jnp.exp(REWARDS / tau)
    np.testing.assert_allclose(policy, optimum / optimum.sum(), atol=1e-3)
    assert (np.argmax(policy) == 2) == (tau == 0.1)
