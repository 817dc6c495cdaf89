"""Reductions: values by hand, and junk where masked."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from recjax.algorithms import reduce

PER_TOKEN = np.array([[1.0, 2.0, np.nan], [4.0, np.inf, -np.inf], [np.nan, np.nan, np.nan]], np.float32)
MASK = np.array([[1, 1, 0], [1, 0, 0], [0, 0, 0]], bool)
CASES = {
    "token_mean": (reduce.token_mean, 7.0, 3.0),
    "sequence_mean_token_mean": (reduce.sequence_mean_token_mean, 1.5 + 4.0, 2.0),
    "sequence_mean_token_sum": (reduce.sequence_mean_token_sum, 7.0, 2.0),
    "fixed_length": (functools.partial(reduce.fixed_length, length=5), 7.0 / 5, 2.0),
}


class ReduceVariants(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True, with_device=True, with_pmap=True)
    @parameterized.named_parameters(*((name, *case) for name, case in CASES.items()))
    def test_sum_and_count(self, function, total, count):
        got = self.variant(lambda x, mask: function(x, mask))(jnp.asarray(PER_TOKEN), jnp.asarray(MASK))
        chex.assert_trees_all_close(got, (jnp.float32(total), jnp.float32(count)), rtol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_gradient_is_zero_where_masked_and_finite_elsewhere(name):
    gradient = jax.grad(lambda x: CASES[name][0](x, jnp.asarray(MASK))[0])(jnp.asarray(PER_TOKEN))
    assert ((gradient != 0) == MASK).all() and jnp.isfinite(gradient).all()


@pytest.mark.parametrize("name", CASES)
def test_an_empty_batch_has_sum_and_count_zero(name):
    empty = CASES[name][0](jnp.full((2, 3), jnp.nan), jnp.zeros((2, 3), bool))
    chex.assert_trees_all_equal(empty, (jnp.float32(0), jnp.float32(0)))


def test_sums_and_counts_of_micro_batches_add_up():
    generator = np.random.default_rng(0)
    x = jnp.asarray(generator.normal(size=(4, 5)), jnp.float32)
    mask = jnp.arange(5) < jnp.array([5, 1, 2, 4])[:, None]
    for function, _, _ in CASES.values():
        parts = [function(x[i : i + 2], mask[i : i + 2]) for i in (0, 2)]
        chex.assert_trees_all_close(jax.tree.map(lambda a, b: a + b, *parts), function(x, mask), rtol=1e-5)


def test_length_must_be_positive():
    with pytest.raises(ValueError, match="length = 0: must be 1 or more"):
        reduce.fixed_length(jnp.ones((1, 1)), jnp.ones((1, 1), bool), length=0)
