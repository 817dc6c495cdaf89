"""Added terms: by loops, their gradients, and junk where masked."""

import functools
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from recjax.algorithms import regularizers
from recjax.algorithms.reading import call
from tests.algorithms.examples import make_example

EXAMPLE = make_example()
MASK = EXAMPLE.completion_mask
LOG_RATIO = np.where(MASK, EXAMPLE.logprobs - EXAMPLE.behavior_logprobs, 0).astype(np.float64)
LENGTHS = np.maximum(MASK.sum(-1, keepdims=True), 1)
ROW = LOG_RATIO.sum(-1, keepdims=True)
# name → value of each token, derivative of the batch's sum by the token's log-probability
CASES = {
    "log_likelihood_bonus": (-0.1 * EXAMPLE.logprobs, np.full(MASK.shape, -0.1)),
    "squared_log_ratio_per_token": (0.05 * LOG_RATIO**2, 0.1 * LOG_RATIO),
    "squared_log_ratio_per_completion": (0.05 * ROW**2 / LENGTHS, np.broadcast_to(0.1 * ROW, MASK.shape)),
}


def junk(array, value=np.nan):
    return jnp.asarray(np.where(MASK, array, np.float32(value)))


class RegularizerVariants(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True, with_device=True, with_pmap=True)
    @parameterized.named_parameters(*((name, name) for name in CASES))
    def test_value_and_gradient(self, name):
        function = getattr(regularizers, name)

        def value_and_gradient(logprobs, behavior, mask):
            def value(x):
                values = {"logprobs": x, "behavior_logprobs": behavior, "completion_mask": mask}
                return call(function, SimpleNamespace(**values))

            return value(logprobs), jax.grad(lambda x: value(x).sum())(logprobs)

        inputs = junk(EXAMPLE.logprobs), junk(EXAMPLE.behavior_logprobs, np.inf), jnp.asarray(MASK)
        got = self.variant(value_and_gradient)(*inputs)
        expected = tuple(np.where(MASK, x, 0).astype(np.float32) for x in CASES[name])
        chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        ("k1", lambda d: -d, lambda d: np.ones_like(d)),
        ("k2", lambda d: d**2 / 2, lambda d: -d),
        ("k3", lambda d: np.exp(d) - d - 1, lambda d: 1 - np.exp(d)),
    ],
)
def test_reference_kl_and_the_gradients_that_its_docstring_states(estimator, value, gradient):
    difference = np.where(MASK, EXAMPLE.reference_logprobs - EXAMPLE.logprobs, 0).astype(np.float64)

    def penalty(logprobs):
        reference = junk(EXAMPLE.reference_logprobs, -np.inf)
        options = {"coefficient": 0.5, "estimator": estimator}
        return regularizers.reference_kl_penalty(logprobs, reference, jnp.asarray(MASK), **options)

    got, derivative = penalty(junk(EXAMPLE.logprobs)), jax.grad(lambda x: penalty(x).sum())(junk(EXAMPLE.logprobs))
    close = dict(rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got, np.where(MASK, 0.5 * value(difference), 0), **close)
    np.testing.assert_allclose(derivative, np.where(MASK, 0.5 * gradient(difference), 0), **close)


def test_average_gradients_of_the_kl_estimators_on_policy():
    logits, reference = jnp.array([0.3, -1.0, 0.7]), jax.nn.log_softmax(jnp.array([1.0, 0.2, -0.4]))
    policy = jax.nn.softmax(logits)

    def sampled(x, estimator):
        logprobs = jax.nn.log_softmax(x)
        return (policy * regularizers.reference_kl(logprobs[None], reference[None], estimator=estimator)[0]).sum()

    def reverse(x):
        logprobs = jax.nn.log_softmax(x)
        return (jnp.exp(logprobs) * (logprobs - reference)).sum()

    def forward(x):
        return (jnp.exp(reference) * (reference - jax.nn.log_softmax(x))).sum()

    chex.assert_trees_all_close(jax.grad(sampled)(logits, "k1"), jnp.zeros(3), atol=1e-6)
    chex.assert_trees_all_close(jax.grad(sampled)(logits, "k2"), jax.grad(reverse)(logits), atol=1e-6)
    chex.assert_trees_all_close(jax.grad(sampled)(logits, "k3"), jax.grad(forward)(logits), atol=1e-6)
    for estimator in ("k1", "k3"):
        np.testing.assert_allclose(sampled(logits, estimator), reverse(logits), rtol=1e-5)


def test_k3_is_finite_for_a_token_that_the_policy_has_given_up():
    far = jnp.full((1, 1), -1e4)
    value, gradient = jax.value_and_grad(
        lambda x: regularizers.reference_kl(x, jnp.zeros((1, 1)), estimator="k3").sum()
    )(far)
    assert jnp.isfinite(value) and jnp.isfinite(gradient).all()


def test_entropy_bonus():
    got = regularizers.entropy_bonus(junk(EXAMPLE.entropy), jnp.asarray(MASK), coefficient=0.3)
    np.testing.assert_allclose(got, np.where(MASK, 0.3 * EXAMPLE.entropy, 0), rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("log_likelihood_bonus", "beta"),
        ("squared_log_ratio_per_token", "tau"),
        ("squared_log_ratio_per_completion", "tau"),
        ("reference_kl_penalty", "coefficient"),
        ("unbiased_reference_kl_penalty", "coefficient"),
    ],
)
def test_negative_strengths_are_refused(name, option):
    with pytest.raises(ValueError, match=f"{option} = -0.1: must be 0 or more"):
        function = functools.partial(getattr(regularizers, name), **{option: -0.1})
        names = ("logprobs", "behavior_logprobs", "reference_logprobs")
        values = dict.fromkeys(names, jnp.ones((1, 1))) | {"completion_mask": jnp.ones((1, 1), bool)}
        call(function, SimpleNamespace(**values))


def test_a_negative_entropy_coefficient_is_refused():
    with pytest.raises(ValueError, match="coefficient = -0.1: must be 0 or more"):
        regularizers.entropy_bonus(jnp.ones((1, 1)), jnp.ones((1, 1), bool), coefficient=-0.1)
