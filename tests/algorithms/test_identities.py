"""The paper's derivation, line by line, by gradients of a small softmax policy."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recjax.algorithms import losses
from recjax.algorithms.presets import build_algorithm

ROWS, TIME, VOCAB = 6, 3, 4
generator = np.random.default_rng(0)
LOGITS = jnp.asarray(generator.normal(size=(TIME, VOCAB)), jnp.float32)
TOKENS = generator.integers(0, VOCAB, (ROWS, TIME))  # drawn by nobody in particular
REWARDS = jnp.asarray(generator.normal(size=ROWS), jnp.float32)
MASK = jnp.arange(TIME) < jnp.array([3, 1, 2, 3, 2, 1])[:, None]
ONE_GROUP = jnp.zeros(ROWS, jnp.int32)
SUM = {"reduction": {"name": "sequence_mean_token_sum"}}
CLOSE = dict(rtol=1e-4, atol=1e-5)


def token_logprobs(logits):
    """log π of every token of every completion."""
    return jax.nn.log_softmax(logits)[jnp.arange(TIME), TOKENS]


def sequence_logprobs(logits):
    return jnp.where(MASK, token_logprobs(logits), 0).sum(-1)


@jax.jit
def policy_gradient(coefficients, logits=LOGITS):
    """Σ_i c_i ∇log π(y_i), the yardstick of every line."""
    return jax.grad(lambda x: (coefficients * sequence_logprobs(x)).sum())(logits)


def loss_gradient(preset, overrides, logits=LOGITS, anchor=LOGITS, weights=None):
    """Gradient of a preset's summed loss by the policy's logits, `anchor` as the behavior policy."""
    return gradient_of_algorithm(build_algorithm(preset, overrides), logits, anchor, weights)


@functools.partial(jax.jit, static_argnums=0)
def gradient_of_algorithm(algorithm, logits, anchor, weights):
    rows = losses.row_terms(algorithm, losses.BatchValues(REWARDS, ONE_GROUP, jnp.ones(ROWS, bool), jax.random.key(0)))
    rows = rows if weights is None else rows._replace(weights=weights)
    behavior = token_logprobs(anchor)
    return jax.grad(lambda x: losses.loss(algorithm, token_logprobs(x), behavior, rows, MASK)[0])(logits)


CENTRED = REWARDS - REWARDS.mean()
MOVED = LOGITS + jnp.asarray(generator.normal(size=(TIME, VOCAB)), jnp.float32)


def test_1_at_the_surrogates_optimum_all_completions_agree():
    rewards, anchor, tau = jnp.array([0.0, 0.8, 1.0]), jnp.array([0.3, 0.6, 0.1]), 0.4

    def surrogate(logits):
        logprobs = jax.nn.log_softmax(logits)
        return (jnp.exp(logprobs) * (rewards - tau * (logprobs - jnp.log(anchor)))).sum()

    optimum = jnp.log(anchor) + rewards / tau
    gradient, hessian = jax.jit(lambda x: (jax.grad(surrogate)(x), jax.hessian(surrogate)(x)))(optimum)
    chex.assert_trees_all_close(gradient, jnp.zeros(3), atol=1e-6)
    assert (np.linalg.eigvalsh(hessian) < 1e-6).all()
    agreement = rewards - tau * (jax.nn.log_softmax(optimum) - jnp.log(anchor))
    np.testing.assert_allclose(agreement, agreement[0], rtol=1e-5)


@pytest.mark.parametrize("tau", [0.3, 1.0, 2.5])
def test_2_and_3_consistency_gradient_is_reinforces(tau):
    got = loss_gradient("pairwise_consistency", {"objective": {"tau": tau}})
    chex.assert_trees_all_close(got, policy_gradient(-2 * tau / ROWS * CENTRED), **CLOSE)
    chex.assert_trees_all_close(got, 2 * tau / ROWS * loss_gradient("reinforce", SUM), **CLOSE)
    away = loss_gradient("pairwise_consistency", {"objective": {"tau": tau}}, logits=MOVED)
    assert not np.allclose(away, policy_gradient(-2 * tau / ROWS * CENTRED, MOVED), atol=1e-2)


@pytest.mark.parametrize("weights", [[0.5, 1, 2, 0.1, 1, 3], [1, 0, 1, 1, 0, 1]], ids=["any", "a kept set"])
def test_4_pair_weights(weights):
    weights = jnp.array(weights, jnp.float32)
    weighted_mean = (weights * REWARDS).sum() / weights.sum()
    got = loss_gradient("pairwise_consistency", {"objective": {"tau": 0.7}}, weights=weights)
    expected = policy_gradient(-2 * 0.7 * weights.sum() / ROWS**2 * weights * (REWARDS - weighted_mean))
    chex.assert_trees_all_close(got, expected, **CLOSE)


def test_4_red_drop_is_reinforce_with_binary_weights():
    algorithm = build_algorithm("red_drop", SUM)
    rewards = jnp.array([1.0, 0, 0, 0, 0, 0])

    @jax.jit
    def kept_and_gradient(logits):
        rows = losses.row_terms(
            algorithm, losses.BatchValues(rewards, ONE_GROUP, jnp.ones(ROWS, bool), jax.random.key(0))
        )
        return rows.kept, jax.grad(lambda x: losses.loss(algorithm, token_logprobs(x), None, rows, MASK)[0])(logits)

    kept, got = kept_and_gradient(LOGITS)
    weights = kept.astype(jnp.float32)
    assert weights.sum() == 2
    expected = policy_gradient(-weights * (rewards - (weights * rewards).sum() / weights.sum()))
    chex.assert_trees_all_close(got, expected, **CLOSE)


def test_4_red_weight_is_weighted_reinforce_and_imitation():
    weights = jnp.exp(CENTRED / 0.5)
    weighted_mean = (weights * REWARDS).sum() / weights.sum()
    got = loss_gradient("red_weight", {**SUM, "weight": {"temperature": 0.5}})
    reinforce = policy_gradient(-weights * (REWARDS - weighted_mean))
    imitation = policy_gradient(-(weighted_mean - REWARDS.mean()) * weights)
    chex.assert_trees_all_close(got, reinforce + imitation, **CLOSE)
    assert weighted_mean > REWARDS.mean()


def test_5_lowered_baseline_imitates_the_behavior_policy():
    beta = 0.3
    by_baseline = loss_gradient("reinforce", {**SUM, "advantage": {"name": "asymmetric", "beta": beta}})
    by_term = loss_gradient("asymre", {**SUM, "regularizer": {"beta": beta}})
    by_hand = policy_gradient(-(REWARDS - (REWARDS.mean() - beta)))
    chex.assert_trees_all_close(by_baseline, by_term, **CLOSE)
    chex.assert_trees_all_close(by_baseline, by_hand, **CLOSE)


def test_5_sampled_imitation_is_forward_kl():
    behavior, arms = jnp.array([0.3, 0.6, 0.1]), jnp.array([0, 0, 0, 1, 1, 1, 1, 1, 1, 2])
    logits = jnp.array([0.2, -0.5, 0.9])

    def forward_kl(x):
        return (behavior * (jnp.log(behavior) - jax.nn.log_softmax(x))).sum()

    def sampled(x):
        return -jax.nn.log_softmax(x)[arms].mean()

    got, expected = jax.jit(lambda x: (jax.grad(sampled)(x), jax.grad(forward_kl)(x)))(logits)
    chex.assert_trees_all_close(got, expected, **CLOSE)


def test_6_opmd_is_reinforce_and_squared_log_ratio():
    tau = 0.4

    def by_hand(logits):
        shift = sequence_logprobs(logits) - sequence_logprobs(LOGITS)
        return (-CENTRED * sequence_logprobs(logits) + tau / 2 * shift**2).sum()

    got = loss_gradient("opmd", {**SUM, "regularizer": {"tau": tau}}, logits=MOVED)
    chex.assert_trees_all_close(got, jax.jit(jax.grad(by_hand))(MOVED), **CLOSE)
    by_token = loss_gradient("opmd_token", {**SUM, "regularizer": {"tau": tau}}, logits=MOVED)
    assert not np.allclose(got, by_token, atol=1e-2)
