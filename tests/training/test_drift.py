"""A sampler that is wrong on purpose: its weights, the KL that an update measures, and one result for every sampler."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recjax.models.drift import drifted
from recjax.models.placement import params_on_host
from recjax.models.trainable import flatten
from recjax.rollout.requests import Weights
from recjax.runs.policies import initial_policy
from recjax.runs.prepare import prepare
from recjax.sources.generator import open_generator
from recjax.sources.sampling import BatchSampler
from recjax.training.evaluation import HeldOut
from recjax.training.learner import Learner
from tests.training.tiny_run import one_device, train, without_times


def some_params():
    generator = np.random.default_rng(0)
    shapes = {"up": {"kernel": (2, 8, 5)}, "router": {"kernel": (2, 8, 3)}, "norm": {"scale": (2, 8)}}
    make = lambda shape: jnp.asarray(generator.normal(size=shape), jnp.float32)  # noqa: E731
    return jax.tree.map(make, shapes | {"embedding": {"embedding": (7, 8)}}, is_leaf=lambda x: isinstance(x, tuple))


@pytest.mark.parametrize("kind", ["int8", "int4", "float8", "noise"])
def test_only_matrices_move_by_the_scale(kind):
    params = some_params()
    changed = {scale: flatten(drifted(params, jax.random.key(1), kind, scale)) for scale in (0.0, 0.5, 1.0)}
    for path, exact in flatten(params).items():
        np.testing.assert_array_equal(changed[0.0][path], exact)
        moved, half = (np.asarray(changed[scale][path] - exact) for scale in (1.0, 0.5))
        if path != "up/kernel":
            assert not moved.any()
            continue
        largest = np.abs(exact).max(axis=-2, keepdims=True)
        np.testing.assert_allclose(2 * half, moved, atol=1e-6 * largest.max())
        if kind in ("int8", "int4"):
            highest = {"int8": 127, "int4": 7}[kind]
            levels = np.asarray(changed[1.0][path]) / largest * highest
            np.testing.assert_allclose(levels, np.round(levels), atol=1e-3)
            assert (np.abs(moved) <= largest / highest / 2 + 1e-6).all()
        elif kind == "float8":
            assert (np.abs(moved) <= np.maximum(np.abs(exact) / 16, largest / 448 / 512) + 1e-6).all() and moved.any()
        else:
            relative = np.sqrt((moved**2).mean((-2, -1)) / (np.asarray(exact) ** 2).mean((-2, -1)))
            assert ((0.7 < relative) & (relative < 1.3)).all()
    again = flatten(drifted(params, jax.random.key(1), kind, 1.0))
    np.testing.assert_array_equal(again["up/kernel"], changed[1.0]["up/kernel"])
    other = flatten(drifted(params, jax.random.key(2), kind, 1.0))
    assert np.array_equal(other["up/kernel"], again["up/kernel"]) == (kind != "noise")


@pytest.mark.parametrize("group", [1, 3, 8, 100])
@pytest.mark.parametrize("kind", ["int4", "float8"])
def test_a_group_of_inputs_has_its_own_scale(kind, group):
    exact = some_params()["up"]["kernel"]
    found = np.asarray(drifted(some_params(), jax.random.key(1), kind, 1.0, group)["up"]["kernel"])
    for layer in range(2):
        for first in range(0, 8, group):
            part = {"up": {"kernel": exact[layer, first : first + group]}}
            alone = drifted(part, jax.random.key(1), kind, 1.0)["up"]["kernel"]
            np.testing.assert_array_equal(found[layer, first : first + group], alone)


def test_fixed_noise_is_that_of_every_version(tiny):
    def error(version, *options):
        config = tiny("run", "rollout.drift={weights: noise, scale: 0.5, fixed: true}", *options)
        sampler = BatchSampler(config, None, None, None, None)
        return np.asarray(sampler._drifted(Weights(some_params(), version)).params["up"]["kernel"])

    np.testing.assert_array_equal(error(1), error(7))
    assert not np.allclose(error(1), error(1, "seed=1"))


def test_sampler_weights_depend_on_seed_and_version(tiny):
    def kernel(version, *options):
        config = tiny("run", "rollout.drift={weights: noise, scale: 0.5}", *options)
        sampler = BatchSampler(config, None, None, None, None)
        return np.asarray(sampler._drifted(Weights(some_params(), version)).params["up"]["kernel"])

    first = kernel(1)
    np.testing.assert_array_equal(first, kernel(1))
    assert not np.allclose(first, kernel(2)) and not np.allclose(first, kernel(1, "seed=1"))
    weights = Weights(some_params(), 1)
    none = BatchSampler(tiny("run", "rollout.drift={weights: noise, scale: 0.0}"), None, None, None, None)
    assert none._drifted(weights) is weights


FEW = ["training.steps=2", "evaluation.every=0", "regime.sync_interval=2"]


@pytest.mark.slow
def test_measured_kl_follows_the_drift_scale(tiny):
    def rows(name, *options):
        return train(tiny(name, *FEW, *options))[1:]

    plain = rows("plain")
    assert without_times(rows("none", "rollout.drift={weights: noise, scale: 0.0}")) == without_times(plain)
    kl = [
        rows(f"{scale}", f"rollout.drift={{weights: noise, scale: {scale}}}")[0]["behavior_kl/k3"] for scale in SCALES
    ]
    # The KL of small noise grows with the square of its scale.
    assert abs(plain[0]["behavior_kl/k3"]) < 1e-6 < kl[0]
    assert all(2 < later / earlier < 8 for earlier, later in itertools.pairwise(kl)), kl
    wrong = "rollout.drift={weights: noise, scale: 0.08, logprobs: exact}"
    exact = rows("exact", wrong)
    assert abs(exact[0]["behavior_kl/k3"]) < 1e-6 < exact[1]["behavior_kl/k3"]
    assert rows("int8", "rollout.drift.weights=int8")[0]["behavior_kl/k3"] > 1e-8


SCALES = (0.02, 0.04, 0.08)


@pytest.mark.slow
@pytest.mark.parametrize("logprobs", ["sampled", "exact"])
def test_generators_and_the_trainer_sample_alike_from_changed_weights(tiny, logprobs):
    drift = f"rollout.drift={{weights: noise, scale: 0.3, logprobs: {logprobs}}}"
    config = tiny("run", drift)
    with one_device():
        setup, params = prepare(config, initial_policy)
        with setup.grading:
            Learner().begin(config, setup.policy, params, HeldOut(setup.held_out, setup.grading))
            exact = jax.tree.map(jnp.asarray, params_on_host(params))
            here, _ = setup.sampler.sample(exact, 3, 1)
            later, _ = setup.sampler.sample(exact, 4, 1)
            arguments = config, setup.policy, setup.train, setup.grading.reward, {}
            with open_generator(*arguments) as sample:
                there, _ = sample(params_on_host(params), 3, 1, lambda: None)
            plain = setup.sampler._replace(config=tiny("run"))
            undisturbed, _ = plain.sample(exact, 3, 1)
    texts = [[completion.text for group in groups for completion in group.completions] for groups in (here, there)]
    assert texts[0] == texts[1]
    for one, other in zip(columns(here), columns(there), strict=True):
        np.testing.assert_array_equal(one, other)
    # Other noise after each sync, and other tokens than those of the exact weights.
    assert not all(map(np.array_equal, columns(here), columns(later)))
    assert not all(map(np.array_equal, columns(here), columns(undisturbed)))


def columns(groups):
    """The log-probs of each completion."""
    return [completion.rows[0].behavior_logprobs for group in groups for completion in group.completions]
