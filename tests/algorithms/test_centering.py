"""Score centering: the removed mean by loops, and the policy gradient's mean by exact enumeration of a vocabulary."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recjax.algorithms import losses, regularizers
from recjax.algorithms.presets import build_algorithm
from tests.algorithms.examples import QUICK

VOCAB = 12
WEIGHTS = {
    "plain": {},
    "importance": {"weight": {"name": "importance"}},
    "truncated": {"weight": {"name": "truncated", "cap": 1.1}},
    "banded": {"weight": {"name": "banded", "low": 0.8, "high": 1.2}},
    "one-side clip": {"weight": {"name": "importance"}, "clip": {"name": "one_side"}},
    "two-side clip": {"clip": {"name": "two_side"}},
    "DPPO": {"weight": {"name": "truncated", "cap": 20.0}, "clip": {"name": "probability_difference", "delta": 0.03}},
}


def distributions(top: int):
    """Logits of π, μ and the ids of the sampler's most likely tokens; the tokens outside of these have one ratio."""
    generator = np.random.default_rng(top)
    logits = generator.normal(size=VOCAB)
    policy = np.exp(logits) / np.exp(logits).sum()
    behavior = policy * np.exp(generator.normal(size=VOCAB) * 0.6)
    ids = np.argsort(-behavior)[:top]
    outside = np.setdiff1d(np.arange(VOCAB), ids)
    behavior[outside] = policy[outside] * 0.7
    behavior /= behavior.sum()
    return jnp.asarray(logits, jnp.float32), jnp.asarray(np.log(behavior), jnp.float32), ids


@functools.cache
def mean_gradients(name, top: int):
    """A program from (advantage, coefficient) to `mean_gradient` without centering and with that much of it."""
    plain, centered = (
        build_algorithm("reinforce", WEIGHTS[name] | {"score_centering": {"coefficient": coefficient}})
        for coefficient in (0.0, 1.0)
    )

    def both(advantage, coefficient):
        scaled = centered.with_options({"score_centering": {"coefficient": coefficient}})
        return [mean_gradient(algorithm, advantage, top) for algorithm in (plain, scaled)]

    return jax.jit(both, compiler_options=QUICK)


def mean_gradient(algorithm, advantage, top: int):
    """Σ_y μ(y) ∇loss(y) by the logits, over every token y of the vocabulary, with the same advantage for all."""
    logits, behavior, ids = distributions(top)
    mask = jnp.ones((VOCAB, 1), bool)
    rewards, groups = jnp.zeros(VOCAB), jnp.zeros(VOCAB, int)
    rows = losses.row_terms(algorithm, losses.BatchValues(rewards, groups, mask[:, 0], jax.random.key(0)))
    rows = rows._replace(advantages=jnp.full(VOCAB, advantage))
    repeated = jnp.broadcast_to(behavior[ids], (VOCAB, 1, top))

    def total(logits):
        policy = jax.nn.log_softmax(logits)
        scores = losses.TermScores(
            top_logprobs=jnp.broadcast_to(policy[ids], (VOCAB, 1, top)), behavior_top_logprobs=repeated
        )
        each = losses.token_loss(algorithm, policy[:, None], behavior[:, None], rows, mask, scores)
        return (jnp.exp(behavior) * each[:, 0]).sum()

    return jax.grad(total)(logits)


@pytest.mark.parametrize("top", [4, VOCAB])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("name", WEIGHTS)
def test_mean_gradient_under_the_sampler_is_removed(name, advantage, top):
    (bias, centered), (_, half) = (mean_gradients(name, top)(advantage, coefficient) for coefficient in (1.0, 0.5))
    np.testing.assert_allclose(centered, 0.0, atol=1e-6)
    # An exact importance weight is the only one without a bias.
    assert np.abs(bias).max() < 1e-6 if name == "importance" else np.abs(bias).max() > 5e-3
    np.testing.assert_allclose(half, bias / 2, atol=1e-6)


def test_klpo_regresses_log_ratios_whatever_the_reward_is():
    """Under μ, the mean gradient is β times the covariance of log ρ and ∇log π, so the reward's mean plays no role."""
    logits, behavior, _ = distributions(VOCAB)
    logits, mu = np.asarray(logits, float), np.exp(np.asarray(behavior, float))
    policy = np.exp(logits) / np.exp(logits).sum()
    log_ratio, scores = np.log(policy / mu), np.eye(VOCAB) - policy
    mean = sum(mu[y] * scores[y] for y in range(VOCAB))
    expected = sum(0.1 * mu[y] * log_ratio[y] * (scores[y] - mean) for y in range(VOCAB))
    program = jax.jit(lambda r: mean_gradient(build_algorithm("klpo", {}), r, VOCAB), compiler_options=QUICK)
    for reward in (0.0, 1.0):
        np.testing.assert_allclose(program(reward), expected, atol=1e-6)
    assert np.abs(expected).max() > 5e-3


def likely(behavior_logprobs):
    return behavior_logprobs > -2.5


def likely_at_anchor(anchor_logprobs, ratio):
    return (anchor_logprobs > -2.5) & (ratio > 0)


def test_a_mask_reads_the_anchor_of_centered_tokens():
    found = []
    for mask in (likely, likely_at_anchor):
        changes = WEIGHTS["truncated"] | {"mask": {"name": mask}, "score_centering": {"coefficient": 1.0}}
        gradient = functools.partial(mean_gradient, build_algorithm("reinforce", changes), top=4)
        found.append(jax.jit(gradient, compiler_options=QUICK)(1.0))
    assert np.abs(found[0]).max() > 1e-3
    np.testing.assert_allclose(found[1], found[0], atol=1e-7)


def test_unrecorded_tokens_keep_only_their_own_bias():
    logits, behavior, ids = distributions(4)
    policy = np.exp(np.asarray(logits, float))
    policy /= policy.sum()
    for top in (1, 2, 4):
        few = ids[:top]
        outside = np.setdiff1d(np.arange(VOCAB), few)
        mu = np.exp(np.asarray(behavior))
        alpha = (1 - mu[few].sum()) / (1 - policy[few].sum())
        # −Σ_{v∉H} (μ_v − α π_v) ∇log π_v, whose gradient by the logits is the unit vector less π.
        expected = -sum((mu[v] - alpha * policy[v]) * (np.eye(VOCAB)[v] - policy) for v in outside)
        found = mean_gradient_of(few)
        np.testing.assert_allclose(found, expected, atol=1e-6)


def mean_gradient_of(ids):
    """As `mean_gradient`, with fewer recorded tokens."""
    logits, behavior, _ = distributions(4)
    mask = jnp.ones((1, 1), bool)

    def total(logits):
        policy = jax.nn.log_softmax(logits)
        weights = jnp.ones((1, 1, len(ids) + 1))
        arrays = policy[None, None, ids], behavior[None, None, ids], weights, mask
        centered = regularizers.score_centering(*arrays, coefficient=1.0)
        return -(jnp.exp(behavior) * policy).sum() + centered.sum()

    return np.asarray(jax.jit(jax.grad(total), compiler_options=QUICK)(logits))


def test_value_and_gradient_by_loops():
    generator = np.random.default_rng(0)
    rows, time, count = 3, 4, 5
    policy, behavior = (generator.dirichlet(np.ones(count + 2), (rows, time)) for _ in range(2))
    weights = generator.normal(size=(rows, time, count + 1))
    mask = generator.random((rows, time)) < 0.8
    top, top_before = np.log(policy[..., :count]), np.log(behavior[..., :count])
    known = generator.random((rows, time, count)) < 0.8  # others were not recorded
    known[0, 0] = False
    mask[0, 0] = True
    top[1, 1, 0] = -np.inf  # impossible for the policy
    expected, slopes = np.zeros((rows, time)), np.zeros((rows, time, count))
    for i in range(rows):
        for t in range(time):
            inside = [v for v in range(count) if known[i, t, v]]
            rest = 1 - sum(behavior[i, t, v] for v in inside)
            alpha = rest / (1 - sum(np.exp(top[i, t, v]) for v in inside))
            for v in inside:
                if mask[i, t] and np.isfinite(top[i, t, v]):
                    center = behavior[i, t, v] * weights[i, t, v]
                    center -= alpha * weights[i, t, count] * np.exp(top[i, t, v])
                    expected[i, t] += 0.5 * center * top[i, t, v]
                    slopes[i, t, v] = 0.5 * center
    top, top_before = (np.where(known, x, np.nan).astype(np.float32) for x in (top, top_before))

    def value(top):
        arrays = top, jnp.asarray(top_before), jnp.asarray(weights, jnp.float32), jnp.asarray(mask)
        return regularizers.score_centering(*arrays, coefficient=0.5)

    np.testing.assert_allclose(value(jnp.asarray(top)), expected, rtol=1e-4, atol=1e-6)
    gradient = jax.jit(jax.grad(lambda top: value(top).sum()))(jnp.asarray(top))
    np.testing.assert_allclose(gradient, slopes, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("preset", "blocks", "axes"),
    [
        ("tis", {}, "anchor"),
        ("gspo", {}, "ratio"),
        ("bapo", {}, "clip"),
        ("m2po", {}, "mask"),
        ("topr", {}, "ratio"),
        ("p3o", {}, "weight"),
        ("opsm", {}, None),
        ("red_weight", {}, None),
    ],
)
def test_only_weights_that_every_token_has_can_be_centered(preset, blocks, axes):
    blocks = blocks | {"score_centering": {"coefficient": 1.0}}
    if axes is None:
        assert build_algorithm(preset, blocks).score_centering is not None
        return
    with pytest.raises(ValueError, match=f"score_centering.coefficient = 1.0: .* without another {axes}, or set"):
        build_algorithm(preset, blocks)
