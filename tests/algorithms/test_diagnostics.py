"""Diagnostics: values by hand, and what they are on-policy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recjax.algorithms import diagnostics
from recjax.algorithms.catalog import PAPER
from recjax.algorithms.presets import build_algorithm
from tests.algorithms.examples import first_of_each_set_of_axes, make_example, rows_of
from tests.marks import slow_except

MASK = jnp.array([[1, 1, 1], [1, 0, 0], [0, 0, 0]], bool)
LOG_RATIO = jnp.log(jnp.array([[1.0, 2.0, 0.5], [4.0, jnp.nan, jnp.nan], [jnp.nan] * 3]))
EXAMPLE = make_example()


def diagnosis(example, preset="grpo"):
    algorithm = build_algorithm(preset, {})
    x = jax.tree.map(jnp.asarray, example)
    arrays = x.logprobs, x.behavior_logprobs, x.entropy, x.completion_mask
    return diagnostics.diagnose(algorithm, rows_of(algorithm, example), *arrays)


def test_ratio_quantiles():
    got = diagnostics.ratio_quantiles(LOG_RATIO, MASK)
    np.testing.assert_allclose([got["q50"], got["max"]], [2**0.5, 4.0], rtol=1e-5)  # of 0.5, 1, 2, 4 by log-ratio
    assert 0.5 < got["q01"] < 0.55 and 3.8 < got["q99"] < 4


def test_clip_fraction_by_sign():
    clip_mask = jnp.array([[1, 0, 1], [0, 0, 0], [0, 0, 0]], bool)
    for sign, expected in ((1.0, (0.5, 1 / 3, 1.0)), (-1.0, (0.5, 1.0, 1 / 3))):
        got = diagnostics.clip_fraction(clip_mask, sign * jnp.array([1.0, -1.0, 1.0]), MASK)
        np.testing.assert_allclose([got["all"], got["positive"], got["negative"]], expected, rtol=1e-5)
    none = diagnostics.clip_fraction(clip_mask, jnp.zeros(3), MASK)
    assert (none["all"], none["positive"], none["negative"]) == (0.5, 0, 0)


@pytest.mark.parametrize(
    ("estimator", "of_token"),
    [("k1", lambda x: -x), ("k2", lambda x: x**2 / 2), ("k3", lambda x: np.exp(x) - x - 1)],
)
def test_behavior_kl(estimator, of_token):
    expected = np.mean([of_token(np.log(ratio)) for ratio in (1.0, 2.0, 0.5, 4.0)])
    np.testing.assert_allclose(diagnostics.behavior_kl(LOG_RATIO, MASK, estimator=estimator), expected, rtol=1e-5)


def test_k1_and_k3_average_to_the_behavior_kl():
    behavior, policy = np.array([0.3, 0.6, 0.1]), np.array([0.2, 0.3, 0.5])
    drawn = np.repeat(np.arange(3), [3, 6, 1])
    log_ratio = jnp.asarray(np.log(policy / behavior)[drawn][:, None], jnp.float32)
    for estimator in ("k1", "k3"):
        got = diagnostics.behavior_kl(log_ratio, jnp.ones((10, 1), bool), estimator=estimator)
        np.testing.assert_allclose(got, (behavior * np.log(behavior / policy)).sum(), rtol=1e-5)


def test_effective_sample_size():
    size = jax.jit(diagnostics.effective_sample_size)
    weights = np.array([1.0, 4.0])  # of completions: 1 · 2 · 0.5, and 4
    expected = weights.sum() ** 2 / (weights**2).sum() / 2
    np.testing.assert_allclose(size(LOG_RATIO, MASK), expected, rtol=1e-5)
    for shift in (1e4, -1e4):  # exp would overflow, or vanish; log-weights of 3e4 are rounded to 2e-3
        np.testing.assert_allclose(size(jnp.full((4, 3), shift), jnp.ones((4, 3), bool)), 1.0, rtol=1e-2)
    one_dominates = jnp.array([[500.0], [0.0], [0.0], [0.0]])
    np.testing.assert_allclose(size(one_dominates, jnp.ones((4, 1), bool)), 0.25)
    assert size(LOG_RATIO, jnp.zeros((3, 3), bool)) == 0


def test_staleness_counts_optimizer_steps():
    np.testing.assert_array_equal(diagnostics.staleness(21, jnp.array([20, 0, 10])), [0, 20, 10])


def test_token_average():
    assert diagnostics.token_average(jnp.array([[1.0, jnp.nan], [3.0, 5.0]]), jnp.array([[1, 0], [1, 1]], bool)) == 3
    assert diagnostics.token_average(jnp.ones((1, 2)), jnp.zeros((1, 2), bool)) == 0


@pytest.mark.parametrize("preset", slow_except(PAPER, *first_of_each_set_of_axes(tuple(PAPER))))
def test_diagnosis_on_policy(preset):
    got = diagnosis(EXAMPLE._replace(logprobs=EXAMPLE.behavior_logprobs), preset)
    assert all(value.shape == () and np.isfinite(value) for value in got.values())
    for name, value in got.items():
        if name.startswith("ratio/") or name == "effective_sample_size":
            np.testing.assert_allclose(value, 1, rtol=1e-5)
        if name.startswith(("behavior_kl/", "clip_fraction/")):
            assert value == 0


def test_diagnosis_off_policy_with_junk_in_padding():
    mask = EXAMPLE.completion_mask
    junk = {
        name: np.where(mask, getattr(EXAMPLE, name), np.float32(np.nan))
        for name in ("logprobs", "behavior_logprobs", "entropy")
    }
    got, dirty = diagnosis(EXAMPLE), diagnosis(EXAMPLE._replace(**junk))
    assert {k: float(v) for k, v in got.items()} == {k: float(v) for k, v in dirty.items()}
    assert got["clip_fraction/positive"] > 0 and got["clip_fraction/negative"] > 0
    assert got["ratio/q01"] < 1 < got["ratio/q99"] and got["behavior_kl/k3"] > 0
    assert 1 / 15 < got["effective_sample_size"] < 1 and got["kept_fraction"] == 1
    np.testing.assert_allclose(got["entropy"], EXAMPLE.entropy[mask].mean(), rtol=1e-5)


def test_diagnosis_counts_what_was_dropped_and_weighed():
    kept = np.asarray(rows_of(build_algorithm("red_drop", {}), EXAMPLE).kept).sum()
    np.testing.assert_allclose(diagnosis(EXAMPLE, "red_drop")["kept_fraction"], kept / 15, rtol=1e-6)
    weights = np.asarray(rows_of(build_algorithm("red_weight", {}), EXAMPLE).weights)
    got = diagnosis(EXAMPLE, "red_weight")
    np.testing.assert_allclose([got["weight/mean"], got["weight/max"]], [weights.sum() / 15, weights.max()], rtol=1e-5)


def test_weights_of_tokens_are_those_that_no_clip_drops():
    mask, ratio = EXAMPLE.completion_mask, np.exp(EXAMPLE.logprobs - EXAMPLE.behavior_logprobs)
    capped = diagnosis(EXAMPLE, "cispo")
    expected = np.minimum(ratio[mask], 5.0)
    np.testing.assert_allclose([capped["weight/mean"], capped["weight/max"]], [expected.mean(), expected.max()], 1e-5)
    clipped = diagnosis(EXAMPLE, "grpo")
    advantages = np.asarray(rows_of(build_algorithm("grpo", {}), EXAMPLE).advantages)[:, None]
    dropped = ((advantages > 0) & (ratio > 1.2)) | ((advantages < 0) & (ratio < 0.8))
    applied = ratio[mask & ~dropped]
    assert (mask & dropped).any()
    np.testing.assert_allclose([clipped["weight/mean"], clipped["weight/max"]], [applied.mean(), applied.max()], 1e-5)


@pytest.mark.parametrize("preset", ["grpo", "gspo", "tis", "opmd", "on_policy_distillation"])
def test_tokens_of_probability_zero_are_counted_by_policy(preset):
    algorithm, (row, other) = build_algorithm(preset, {}), np.flatnonzero(EXAMPLE.completion_mask.sum(-1) > 1)[:2]
    changed, without = {}, EXAMPLE.completion_mask.copy()
    places = {"logprobs": row, "behavior_logprobs": other} if algorithm.needs_behavior_logprobs else {"logprobs": row}
    for name, place in places.items():
        changed[name] = getattr(EXAMPLE, name).copy()
        changed[name][place, 0], without[place, 0] = -np.inf, False
    got = diagnosis(EXAMPLE._replace(**changed), preset)
    assert all(np.isfinite(value) for value in got.values())
    assert got["impossible_tokens/policy"] == 1
    assert got.get("impossible_tokens/behavior", 0) == len(places) - 1
    expected = diagnosis(EXAMPLE._replace(completion_mask=without), preset)
    for name in ("ratio/max", "behavior_kl/k1", "effective_sample_size", "clip_fraction/all"):
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-4)


def test_the_kl_is_not_cut_at_a_token():
    """One token at −30 among all."""
    mask, behavior = EXAMPLE.completion_mask, np.full_like(EXAMPLE.logprobs, -40.0)
    logprobs = behavior.copy()
    logprobs[tuple(np.argwhere(mask)[3])] -= 30.0
    got = diagnosis(EXAMPLE._replace(logprobs=logprobs, behavior_logprobs=behavior))
    expected = np.array([30.0, 450.0]) / mask.sum()
    np.testing.assert_allclose([got["behavior_kl/k1"], got["behavior_kl/k2"]], expected, rtol=1e-5)


def test_without_behavior_logprobs_nothing_is_said_of_the_ratio():
    algorithm = build_algorithm("reinforce", {})
    x = jax.tree.map(jnp.asarray, EXAMPLE)
    got = diagnostics.diagnose(algorithm, rows_of(algorithm, EXAMPLE), x.logprobs, None, x.entropy, x.completion_mask)
    assert "entropy" in got and not any(name.startswith(("ratio", "behavior_kl", "clip")) for name in got)
