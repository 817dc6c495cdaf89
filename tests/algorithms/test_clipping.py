"""Clip masks: the table of bounds, inclusive as in the paper; masks by entropy, by loops."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from recjax.algorithms import clipping, masks

# Bounds that float32 holds exactly: 0.75, 1.5, and outside 0.25 and 3.
INNER = {"epsilon_low": 0.25, "epsilon_high": 0.5}
OUTER = {**INNER, "outer_low": 0.75, "outer_high": 2.0}
RATIOS = np.array([0.1, 0.25, 0.26, 0.74, 0.75, 1.0, 1.5, 1.51, 2.99, 3.0, 9.0], np.float32)
ADVANTAGES = np.array([2.0, -2.0, 0.0], np.float32)
ALL, NONE = "11111111111", "00000000000"
TABLE = {
    #             A > 0          A < 0          A = 0
    "one_side_mask": ("11111110000", "00001111111", ALL),
    "two_side_mask": ("00001110000", "00001110000", "00001110000"),
    "ring_mask": ("11001110000", "00001110011", "11001110011"),
}
OPTIONS = {"one_side_mask": INNER, "two_side_mask": INNER, "ring_mask": OUTER}


class ClipVariants(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True, with_device=True, with_pmap=True)
    @parameterized.named_parameters(*((name, name) for name in TABLE))
    def test_table_of_bounds(self, name):
        function = getattr(clipping, name)

        def masks(ratio, advantages):
            return function(ratio, advantages, **OPTIONS[name])

        got = np.asarray(self.variant(masks)(jnp.tile(RATIOS, (3, 1)), jnp.asarray(ADVANTAGES)))
        assert tuple("".join(str(int(x)) for x in row) for row in got) == TABLE[name]


def test_defaults_are_the_papers():
    ratio, positive, negative = jnp.array([[0.39, 0.5, 0.79, 0.81, 1.19, 1.21, 2.9, 3.1]]), jnp.ones(1), -jnp.ones(1)
    assert clipping.one_side_mask(ratio, positive).sum() == 5
    assert clipping.one_side_mask(ratio, negative).sum() == 5
    assert clipping.two_side_mask(ratio, positive).sum() == 2
    assert (clipping.ring_mask(ratio, positive)[0] == jnp.array([1, 0, 0, 1, 1, 0, 0, 0], bool)).all()
    assert (clipping.ring_mask(ratio, negative)[0] == jnp.array([0, 0, 0, 1, 1, 0, 0, 1], bool)).all()


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (clipping.one_side_mask, {"epsilon_low": -0.1}, "epsilon_low = -0.1: must be 0 or more"),
        (clipping.one_side_mask, {"epsilon_high": float("nan")}, "epsilon_high = nan: must be 0 or more"),
        (clipping.two_side_mask, {"epsilon_high": -0.1}, "epsilon_high = -0.1: must be 0 or more"),
        (clipping.ring_mask, {"epsilon_low": -0.1}, "epsilon_low = -0.1: must be 0 or more"),
        (clipping.ring_mask, {"outer_low": 0.1}, "outer_low = 0.1: must be at least epsilon_low = 0.2"),
        (clipping.ring_mask, {"outer_high": 0.1}, "outer_high = 0.1: must be at least epsilon_high = 0.2"),
    ],
)
def test_invalid_ranges_are_refused(function, options, message):
    with pytest.raises(ValueError, match=message):
        function(jnp.ones((1, 1)), jnp.ones(1), **options)


def test_masks_that_read_entropy_by_loops():
    generator = np.random.default_rng(0)
    mask = np.arange(6) < np.array([[6], [4], [5]])
    logprobs, entropy = -generator.uniform(0.1, 3, (3, 6)), generator.uniform(0.1, 2, (3, 6))
    log_ratio, advantages = 0.4 * generator.normal(size=(3, 6)), np.array([1.0, -1.0, -0.5])
    tokens = [tuple(place) for place in np.argwhere(mask)]
    changes = [np.exp(logprobs[place]) * (entropy[place] + logprobs[place]) for place in tokens]
    near, kept = np.zeros((3, 6), bool), np.zeros((3, 6), bool)
    for place, change in zip(tokens, changes, strict=True):
        near[place] = log_ratio[place] ** 2 / (entropy[place] + 0.01) <= 0.1
        kept[place] = advantages[place[0]] >= 0 or change - np.mean(changes) >= -0.5 * np.std(changes)
    arrays = [jnp.asarray(np.where(mask, x, 0), jnp.float32) for x in (log_ratio, logprobs, entropy)]
    mask = jnp.asarray(mask)
    found = masks.entropy_scaled_mask(arrays[0], arrays[2], mask, tau=0.1, epsilon=0.01)
    np.testing.assert_array_equal(np.asarray(found) & mask, near)
    found = masks.entropy_change_mask(arrays[1], arrays[2], jnp.asarray(advantages, jnp.float32), mask, deviations=0.5)
    np.testing.assert_array_equal(np.asarray(found) & mask, kept)
    assert 0 < near.sum() < mask.sum() and 0 < kept[1:].sum() < mask[1:].sum()
