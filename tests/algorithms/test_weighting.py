"""Weights: by hand, and the temperature that bisection finds."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recjax.algorithms import token_weighting, weighting
from recjax.algorithms.ratios import bounded_exp

KEPT = np.array([True, True, True, False])
ADVANTAGES = np.array([-2.0, -0.5, 1.0, np.nan], np.float32)  # Σ A < 0 < max A: a root exists


def imbalance(advantages, temperature):
    """f(τ) = Σ A exp(A/τ) by a loop in float64."""
    return sum(a * np.exp(a / temperature) for a in np.asarray(advantages, np.float64))


class WeightVariants(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True, with_device=True, with_pmap=True)
    def test_rows(self):
        expected = [np.exp(-2), np.exp(-0.5), np.e, 0]
        got = self.variant(weighting.exp_advantage_weights)(jnp.asarray(ADVANTAGES), jnp.asarray(KEPT))
        chex.assert_trees_all_close(got, jnp.array(expected, jnp.float32), rtol=1e-5)

    @chex.variants(with_jit=True, without_jit=True, with_device=True, with_pmap=True)
    def test_bisection_finds_the_root_and_weighs_by_it(self):
        def both(advantages, kept):
            options = {"floor": 0.8, "ceiling": 100.0}
            return (
                weighting.bisected_temperature(advantages, kept, **options),
                weighting.bisected_exp_advantage_weights(advantages, kept, **options),
            )

        temperature, weights = self.variant(both)(jnp.asarray(ADVANTAGES), jnp.asarray(KEPT))
        assert 0.8 < temperature < 100
        assert imbalance(ADVANTAGES[:3], temperature * 0.999) > 0 > imbalance(ADVANTAGES[:3], temperature * 1.001)
        chex.assert_trees_all_close(weights[:3], jnp.exp(ADVANTAGES[:3] / temperature), rtol=1e-5)
        assert abs((weights[:3] * ADVANTAGES[:3]).sum()) < 1e-4 and weights[3] == 0


@pytest.mark.parametrize(
    ("advantages", "expected"),
    [
        ([0.5, -2.0], 2.5 / np.log(4)),  # 0.5 exp(0.5/τ) = 2 exp(−2/τ)
        ([150.0, -300.0], 450 / np.log(2)),  # exp(150/0.8) overflows float32
        ([1.0, -1.0], 1000.0),  # group-centered: f > 0 at every τ
        ([0.1, 0.2, -0.3], 1000.0),
        ([2.0, -1.0], 1000.0),  # Σ A > 0
        ([1.0, -1.001], 1000.0),  # the root is above the ceiling
        ([0.1, -1.0], 0.8),  # the root, 0.48, is below the floor
        ([-1.0, -2.0], 0.8),  # no A above 0: f < 0 at every τ
        ([0.0, 0.0], 0.8),
    ],
)
def test_the_root_or_the_nearer_end(advantages, expected):
    kept = jnp.ones(len(advantages), bool)
    with jax.debug_infs(True):
        got = weighting.bisected_temperature(jnp.array(advantages), kept, floor=0.8, ceiling=1000.0)
    chex.assert_trees_all_close(got, jnp.float32(expected), rtol=1e-4)


def test_group_centered_noise_does_not_move_the_answer():
    advantages = jax.random.normal(jax.random.key(0), (64, 8))
    advantages = (advantages - advantages.mean(-1, keepdims=True)).reshape(-1)
    assert weighting.bisected_temperature(advantages, jnp.ones(512, bool), floor=0.8, ceiling=100.0) == 100


def test_nothing_kept_gives_no_weight():
    weights = weighting.bisected_exp_advantage_weights(jnp.full(3, jnp.nan), jnp.zeros(3, bool))
    chex.assert_trees_all_equal(weights, jnp.zeros(3))


def test_weights_stay_finite_for_any_advantage():
    weights = weighting.exp_advantage_weights(jnp.array([1e30, -1e30, 50.0]), jnp.ones(3, bool), temperature=0.01)
    assert jnp.isfinite(weights).all() and jnp.isfinite(weights.sum() ** 2)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_token_weights_at_any_distance(advantage):
    """From the bounded ratio in float64: no weight cuts one part of its formula and not another."""
    distance = np.arange(-40, 80.5, 0.5)
    bounded, up = np.exp(np.clip(distance, -20, 20)), advantage > 0
    ratio = bounded_exp(jnp.asarray(distance, jnp.float32))[None]
    tau, power, decay = (1.0, 2, 3) if up else (1.05, 3, 2)
    gate = 1 / (1 + np.exp(-tau * (bounded - 1)))
    closing = np.exp(-np.logaddexp(0, tau * (bounded - 1)))
    expected = {
        "inverse": np.minimum(1 / bounded if up else bounded, 3),
        "soft": 4 * gate * closing * bounded,
        "peaked": np.exp(power * np.log(bounded) + decay * (1 - bounded)),
        "tapered": np.ones_like(bounded) if up else np.minimum(bounded, 1),
    }

    @jax.jit
    def weights(*given):
        return {name: getattr(token_weighting, f"{name}_weights")(*given) for name in expected}

    for name, got in weights(ratio, jnp.array([advantage])).items():
        np.testing.assert_allclose(got[0], expected[name], rtol=2e-4, atol=1e-30, err_msg=name)


def test_token_weights():
    ratio = jnp.array([[0.5, 2.0]])
    chex.assert_trees_all_equal(token_weighting.importance_weights(ratio), ratio)
    assert (jax.grad(lambda x: token_weighting.importance_weights(x).sum())(ratio) == 0).all()


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (weighting.exp_advantage_weights, {"temperature": 0.0}, "temperature = 0.0: must be above 0"),
        (weighting.bisected_exp_advantage_weights, {"floor": 0.0}, "floor = 0.0: must be above 0"),
        (weighting.bisected_exp_advantage_weights, {"ceiling": 0.5}, "ceiling = 0.5: must be at least floor = 0.8"),
    ],
)
def test_invalid_ranges_are_refused(function, options, message):
    with pytest.raises(ValueError, match=message):
        function(jnp.ones(1), jnp.ones(1, bool), **options)
