"""The presets of the field: their gradients from the formulas, however a batch is cut, padded and grouped."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recjax.algorithms.catalog import FIELD
from recjax.algorithms.presets import build_algorithm
from tests.algorithms.coefficients import COEFFICIENTS, gradient_by_hand
from tests.algorithms.examples import (
    QUICK,
    ROWS,
    Example,
    first_of_each_set_of_axes,
    loss_and_gradient,
    make_example,
    observed,
    rows_of,
)

EXAMPLE = make_example()
PARTS = 4
JUNK = Example(
    *(np.where(EXAMPLE.completion_mask, array, np.float32(np.nan)) for array in EXAMPLE[:2]),
    EXAMPLE.completion_mask,
    np.where(EXAMPLE.completion_mask.any(-1), EXAMPLE.rewards, np.float32(np.nan)),
    EXAMPLE.group_ids,
    *(np.where(EXAMPLE.completion_mask, array, np.float32(np.inf)) for array in EXAMPLE[5:]),
)
# What the gradients are compared on; all of one shape, so that all presets are compiled once.
EXAMPLES = {
    "uneven groups": EXAMPLE,
    "junk in padding": JUNK,
    "groups of one": EXAMPLE._replace(group_ids=np.arange(ROWS, dtype=np.int32)),
    "on-policy": EXAMPLE._replace(logprobs=EXAMPLE.behavior_logprobs),
    "nearly on-policy": make_example(1, spread=0.02),
    "other rows": make_example(2),
}


def cut(tree):
    return jax.tree.map(lambda x: jnp.asarray(x).reshape(PARTS, -1, *x.shape[1:]), tree)


@functools.cache
def algorithms():
    """By preset; each takes a moment to trace, and other workers' collection does without."""
    return {name: build_algorithm(name, {}) for name in FIELD}


# The quick set computes each preset once: the first of each set of axes in micro-batches, the others whole.
# Where the loss compares completions, a part would have to hold whole groups.
DIVISIBLE = [name for name, preset in FIELD.items() if "objective" not in preset.changes]
IN_PARTS = first_of_each_set_of_axes(tuple(DIVISIBLE))


def whole_gradient(name, example):
    """Gradient and count of the whole example."""
    algorithm = algorithms()[name]
    (_, count), (gradient, _) = loss_and_gradient(algorithm, example, rows_of(algorithm, example))
    return gradient, count


def gradient_in_parts(name, example):
    """Gradient and count of the example's micro-batches, one after another."""
    algorithm = algorithms()[name]
    parts = cut((example, rows_of(algorithm, example)))
    (_, counts), (gradients, _) = jax.lax.map(lambda part: loss_and_gradient(algorithm, *part), parts)
    return gradients.reshape(example.logprobs.shape), counts.sum()


def of_all_presets(in_parts):
    """example → preset → gradient and count, of the presets `in_parts` in parts; one program for all."""

    @functools.partial(jax.jit, compiler_options=QUICK)
    def program(example):
        return {name: (gradient_in_parts if name in in_parts else whole_gradient)(name, example) for name in FIELD}

    return {name: jax.tree.map(np.asarray, program(example)) for name, example in EXAMPLES.items()}


# Kept for as long as the process: a worker that comes back to this file does not compile again.
@functools.cache
def gradients():
    return of_all_presets(IN_PARTS)


@functools.cache
def other_gradients():
    """The whole where `gradients` are in parts, and the other way round."""
    return of_all_presets([name for name in DIVISIBLE if name not in IN_PARTS])


def test_every_preset_has_a_formula_here():
    assert COEFFICIENTS.keys() == FIELD.keys()


def assert_gradients_are_by_hand(found, name, example):
    clean = EXAMPLE if example == "junk in padding" else EXAMPLES[example]
    observations = np.asarray(observed(EXAMPLES[example]))
    assert observations.any() == (example != "junk in padding")
    expected, expected_count = gradient_by_hand(name, clean, observations)
    gradient, count = found[example][name]
    np.testing.assert_allclose(gradient, expected, rtol=2e-3, atol=2e-5)
    assert count == expected_count


@pytest.mark.parametrize("example", EXAMPLES)
@pytest.mark.parametrize("name", FIELD)
def test_gradient_from_the_formula(name, example):
    assert_gradients_are_by_hand(gradients(), name, example)


@pytest.mark.slow
@pytest.mark.parametrize("name", FIELD)
def test_gradients_with_micro_batches_equal_the_formulas(name):
    for example in EXAMPLES:
        assert_gradients_are_by_hand(other_gradients(), name, example)


@pytest.mark.slow
def test_devices_add_up():
    assert jax.local_device_count() >= PARTS
    rows = {name: rows_of(algorithms()[name], EXAMPLE) for name in DIVISIBLE}

    def on_device(example, rows):
        found = {name: loss_and_gradient(algorithms()[name], example, rows[name]) for name in DIVISIBLE}
        return {name: (jax.lax.psum(count, "devices"), gradient) for name, ((_, count), (gradient, _)) in found.items()}

    found = jax.pmap(on_device, axis_name="devices")(*cut((EXAMPLE, rows)))
    for name, (count, gradient) in found.items():
        whole, expected_count = gradients()["uneven groups"][name]
        np.testing.assert_allclose(np.asarray(gradient).reshape(whole.shape), whole, rtol=1e-4, atol=1e-6)
        assert (count == expected_count).all()
