"""Optimizers by name: each makes optax's own update and resumes exactly."""

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

from recjax.config import OptimizerConfig
from recjax.training.update import make_optimizer
from tests.training.test_resume import resumes_with_real_weights

MATRIX = jnp.linspace(-1.0, 2.0, 32).reshape(2, 4, 4)
PARAMS = {"layers": {"query": {"kernel": MATRIX}, "attention_norm": {"scale": jnp.ones((2, 4))}}}


@pytest.mark.parametrize(
    ("options", "plain"), [({}, optax.sgd), ({"momentum": 0.9}, lambda rate: optax.sgd(rate, 0.9))], ids=str
)
def test_three_updates_of_sgd_are_optaxs_own(options, plain):
    optimizer = make_optimizer(OptimizerConfig(name="sgd", options=options))
    own, expected = PARAMS, PARAMS
    state, clip = optimizer.init(own), optax.clip_by_global_norm(0.5)
    expected_state = plain(0.0).init(expected)
    update = jax.jit(lambda gradient, state, rates: optimizer.update(gradient, state, PARAMS, **rates))
    for rate in (0.5, 0.25, 0.125):
        gradient = optax.tree.scale(1 + rate, own)
        updates, state = update(gradient, state, {"learning_rate": rate, "clip_norm": 0.5})
        clipped, _ = clip.update(optax.tree.scale(1 + rate, expected), optax.EmptyState())
        expected_updates, expected_state = plain(rate).update(clipped, expected_state, expected)
        own, expected = optax.apply_updates(own, updates), optax.apply_updates(expected, expected_updates)
        chex.assert_trees_all_close(own, expected, rtol=1e-6)
    assert optax.tree.get(state, "count") == 3


@pytest.mark.parametrize("options", ["{name: sgd}", "{name: sgd, options: {momentum: 0.9}}"])
def test_kill_and_resume_equals_straight_through(tiny, options):
    optimizer = [f"optimizer={options}", "optimizer.learning_rate=0.5", "optimizer.schedule=linear"]
    resumes_with_real_weights(tiny, [*optimizer, "regime.sync_interval=2"], [5])
