"""Clip masks: the table of bounds, inclusive as in the paper."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from recjax.algorithms import clipping

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
