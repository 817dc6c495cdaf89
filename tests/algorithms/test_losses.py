"""The one equation: gradients of each preset by hand, and what must not change a loss."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from recjax.algorithms import losses
from recjax.algorithms.catalog import PAPER
from recjax.algorithms.presets import build_algorithm
from tests.algorithms.examples import (
    QUICK,
    ROWS,
    WHOLE_GROUPS,
    Example,
    first_of_each_set_of_axes,
    group_mean_loop,
    loss_and_gradient,
    make_example,
    members,
    rows_of,
)
from tests.closeness import assert_close
from tests.marks import slow_except

EXAMPLE = make_example()
EXTRAS = {"reference_kl": {"coefficient": 0.2}, "entropy": {"coefficient": 0.05}}
CLOSE = dict(rtol=2e-4, atol=2e-5)
# The first preset of each set of axes, and those that the slow set tests, too.
SOME = slow_except(PAPER, *first_of_each_set_of_axes(tuple(PAPER)))
jitted = jax.jit(loss_and_gradient, static_argnums=0, compiler_options=QUICK)


@functools.cache
def plain(name):
    """The preset; building it traces it, so nothing is built when tests are collected."""
    return build_algorithm(name, {})


@functools.cache
def full(name):
    """The preset with a reference and entropy, except where it takes neither."""
    return build_algorithm(name, {} if name == "pairwise_consistency" else EXTRAS)


def clip_keeps(name, ratio, advantage):
    if name == "grpo" or "one_side" in name:
        return (advantage >= 0 and ratio <= 1.2) or (advantage <= 0 and ratio >= 0.8)
    inside = 0.8 <= ratio <= 1.2
    if "two_side" in name:
        return inside
    if "ring" in name:
        return inside or (advantage >= 0 and ratio <= 0.4) or (advantage <= 0 and ratio >= 3.0)
    return True


def gradient_by_hand(name, example: Example, kept):
    """d sum / d logprobs and the count, from the paper's table, by loops; the reduction is the token mean."""
    mask, ids = example.completion_mask, example.group_ids
    advantages = group_mean_loop(example.rewards, ids, kept)
    log_ratio = np.where(mask, example.logprobs.astype(float) - example.behavior_logprobs, 0)
    gradient = np.zeros(mask.shape)
    for i, t in np.argwhere(mask & kept[:, None]):
        advantage, ratio = advantages[i], np.exp(log_ratio[i, t])
        if name == "grpo":
            group = [float(example.rewards[j]) for j in members(ids, kept, i)]
            advantage /= np.std(group) + 1e-6
        weight = ratio if name == "grpo" or name.endswith("_is") else 1.0
        weight = np.exp(advantage) if name == "red_weight" else weight
        gradient[i, t] = -weight * advantage * clip_keeps(name, ratio, advantage)
        gradient[i, t] += {
            "asymre": -0.1,
            "opmd_token": 0.1 * log_ratio[i, t],
            "opmd": 0.1 * log_ratio[i].sum(),
        }.get(name, 0.0)
    return gradient, (mask & kept[:, None]).sum()


def with_junk(example: Example, junk) -> Example:
    """The example with five junk values where masked: in four token arrays, and in the rewards of empty rows."""
    mask = example.completion_mask
    logprobs, behavior, reference, entropy = (
        np.where(mask, array, np.float32(value))
        for array, value in zip((*example[:2], *example[5:]), junk[:4], strict=True)
    )
    rewards = np.where(mask.any(-1), example.rewards, np.float32(junk[4]))
    return Example(logprobs, behavior, mask, rewards, example.group_ids, reference, entropy)


class LossVariants(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True, with_device=True, with_pmap=True)
    @parameterized.named_parameters(*((name, name) for name in PAPER if name != "pairwise_consistency"))
    def test_gradient_by_hand(self, name):
        function = self.variant(lambda *x: loss_and_gradient(plain(name), Example(*x)))
        (_, count), (gradient, _) = function(*map(jnp.asarray, EXAMPLE))
        kept = np.asarray(rows_of(plain(name), EXAMPLE).kept)
        expected, expected_count = gradient_by_hand(name, EXAMPLE, kept)
        np.testing.assert_allclose(gradient, expected, **CLOSE)
        assert int(count) == expected_count and (kept.sum() < ROWS - 1) == (name == "red_drop")

    @chex.variants(with_jit=True, without_jit=True, with_device=True, with_pmap=True)
    def test_pairwise_is_its_loss_on_sequences(self):
        algorithm = plain("pairwise_consistency")
        function = self.variant(lambda *x: loss_and_gradient(algorithm, Example(*x)))
        (_, count), (gradient, _) = function(*map(jnp.asarray, EXAMPLE))
        mask = EXAMPLE.completion_mask
        kept = mask.any(-1)
        shift = np.where(mask, EXAMPLE.logprobs.astype(float) - EXAMPLE.behavior_logprobs, 0).sum(-1)
        centered = group_mean_loop(EXAMPLE.rewards - shift, EXAMPLE.group_ids, kept)
        sizes = np.array([max(len(members(EXAMPLE.group_ids, kept, i)), 1) for i in range(ROWS)])
        np.testing.assert_allclose(gradient, np.where(mask, -2 * (centered / sizes)[:, None], 0), **CLOSE)
        assert count == 6


@pytest.mark.parametrize("name", SOME)
@settings(max_examples=8, deadline=None)
@given(junk=st.lists(st.sampled_from([np.nan, np.inf, -np.inf, 1e38, -1e38]), min_size=5, max_size=5))
def test_padding_junk_changes_nothing(name, junk):
    mask = EXAMPLE.completion_mask
    value, gradient = jitted(full(name), EXAMPLE)
    messy_value, messy_gradient = jitted(full(name), with_junk(EXAMPLE, junk))
    chex.assert_trees_all_equal((messy_value, messy_gradient), (value, gradient))
    assert all((np.asarray(x)[~mask] == 0).all() for x in gradient)


@pytest.mark.parametrize("name", ["grpo", "opmd", "pairwise_consistency"])
def test_columns_and_rows_of_padding_change_nothing(name):
    wider = Example(*(np.pad(x, ((0, 3), (0, 2))[: x.ndim]) for x in EXAMPLE))
    value, gradient = jitted(full(name), with_junk(wider, [np.nan] * 5))
    expected_value, expected_gradient = jitted(full(name), EXAMPLE)
    assert_close(value, expected_value, 1e-5, least=1.0)
    chex.assert_trees_all_close(jax.tree.map(lambda x: x[:ROWS, :4], gradient), expected_gradient, **CLOSE)


@pytest.mark.parametrize("name", [name for name in PAPER if name != "red_drop"])  # whose draw is by position
@settings(max_examples=5, deadline=None)
@given(order=st.permutations(range(ROWS)), renaming=st.permutations([-5, 0, 3, 2**31 - 1, -(2**31), 8]))
def test_order_of_rows_and_names_of_groups_change_nothing(name, order, renaming):
    order = np.array(order)
    new_names = dict(zip(sorted(set(EXAMPLE.group_ids.tolist())), renaming, strict=True))
    group_ids = np.array([new_names[int(i)] for i in EXAMPLE.group_ids], np.int32)
    moved = Example(*(array[order] for array in EXAMPLE._replace(group_ids=group_ids)))
    value, gradient = jitted(full(name), EXAMPLE)
    moved_value, moved_gradient = jitted(full(name), moved)
    chex.assert_trees_all_close(moved_value, value, **CLOSE)
    chex.assert_trees_all_close(moved_gradient, jax.tree.map(lambda x: x[order], gradient), **CLOSE)


@pytest.mark.parametrize("name", slow_except(PAPER, "grpo", "pairwise_consistency"))
def test_micro_batches_and_devices_add_exactly(name):
    assert jax.local_device_count() >= 4
    example = Example(*(array[WHOLE_GROUPS] for array in EXAMPLE))
    rows = rows_of(full(name), example)
    value, gradient = jitted(full(name), example)

    def four(x):
        return jnp.asarray(x).reshape(4, 4, *x.shape[1:])

    def on_device(part, part_rows):
        sums, part_gradient = loss_and_gradient(full(name), part, part_rows)
        return jax.lax.psum(sums, "devices"), part_gradient

    parts = jax.tree.map(four, (example, rows))
    sums, gradients = jax.pmap(on_device, axis_name="devices")(*parts)
    for device in range(4):
        chex.assert_trees_all_close(jax.tree.map(lambda x, device=device: x[device], sums), value, rtol=1e-5)
    chex.assert_trees_all_close(jax.tree.map(lambda x: x.reshape(ROWS, 4), gradients), gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "opmd", "red_drop", "pairwise_consistency"])
def test_vmap_over_batches_equals_a_loop(name):
    examples = [make_example(seed) for seed in (1, 2)]
    stacked = jax.tree.map(lambda *x: jnp.stack([jnp.asarray(y) for y in x]), *examples)
    got = jax.jit(jax.vmap(lambda x: loss_and_gradient(full(name), x)))(stacked)
    for i, example in enumerate(examples):
        expected = jitted(full(name), example)
        chex.assert_trees_all_close(jax.tree.map(lambda x, i=i: x[i], got), expected, **CLOSE)


@pytest.mark.parametrize("name", PAPER)
@pytest.mark.parametrize("log_ratio", [1e4, -1e4])
def test_extreme_ratios_stay_finite(name, log_ratio):
    example = EXAMPLE._replace(logprobs=(EXAMPLE.behavior_logprobs + log_ratio).astype(np.float32))
    chex.assert_tree_all_finite(jitted(full(name), example))


@pytest.mark.parametrize("name", PAPER)
def test_groups_of_one_move_nothing_but_what_regularizes(name):
    example = EXAMPLE._replace(group_ids=np.arange(ROWS, dtype=np.int32))
    (value, _), (gradient, _) = jitted(full(name), example)
    assert jnp.isfinite(value)
    expected = jitted(full("reinforce"), example)[1][0]  # the KL alone
    if name == "pairwise_consistency":
        expected = jnp.zeros_like(expected)
    assert np.allclose(gradient, expected) == (name not in ("asymre", "opmd", "opmd_token"))


def test_one_side_with_importance_weights_is_ppo_clipping():
    algorithm = plain("rec_one_side_is")
    rows = rows_of(algorithm, EXAMPLE)
    mask, behavior = EXAMPLE.completion_mask, EXAMPLE.behavior_logprobs

    def ppo(logprobs):
        ratio = jnp.exp(jnp.where(mask, logprobs - behavior, 0.0))
        advantages = rows.advantages[:, None]
        return -jnp.where(mask, jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages), 0).sum()

    _, (gradient, _) = loss_and_gradient(algorithm, EXAMPLE)
    chex.assert_trees_all_close(gradient, jax.grad(ppo)(jnp.asarray(EXAMPLE.logprobs)), rtol=1e-5)
    assert 0 < (np.asarray(gradient) == 0)[mask].sum() < mask.sum()


@pytest.mark.parametrize("name", SOME)
def test_only_the_policy_and_its_entropy_are_differentiated(name):
    x, rows = jax.tree.map(jnp.asarray, EXAMPLE), rows_of(full(name), EXAMPLE)

    def total(behavior, reference, advantages, weights):
        constants = rows._replace(advantages=advantages, weights=weights)
        scores = losses.TermScores(reference, x.entropy)
        return losses.loss(full(name), x.logprobs, behavior, constants, x.completion_mask, scores)[0]

    constants = x.behavior_logprobs, x.reference_logprobs, rows.advantages, rows.weights
    gradients = jax.grad(total, argnums=(0, 1, 2, 3))(*constants)
    chex.assert_trees_all_equal(gradients, jax.tree.map(jnp.zeros_like, gradients))


def test_reference_kl_is_added_and_entropy_taken_off():
    (less, _), (more, _) = (jitted(build("grpo"), EXAMPLE)[0] for build in (plain, full))
    difference = EXAMPLE.reference_logprobs.astype(float) - EXAMPLE.logprobs
    terms = 0.2 * (np.exp(difference) - difference - 1) - 0.05 * EXAMPLE.entropy
    np.testing.assert_allclose(more - less, terms[EXAMPLE.completion_mask].sum(), rtol=1e-4)


def test_dropped_rows_leave_sum_and_count():
    algorithm = plain("red_drop")
    rows = rows_of(algorithm, EXAMPLE)
    kept = np.asarray(rows.kept)
    assert kept.sum() < EXAMPLE.completion_mask.any(-1).sum()
    smaller = Example(*(array[kept] for array in EXAMPLE))
    (total, count), _ = jitted(plain("reinforce"), smaller)
    assert_close(jitted(algorithm, EXAMPLE, rows)[0], (total, count), 1e-5, least=1.0)


def test_row_mean_reductions_count_rows_that_are_kept():
    for reduction in ("sequence_mean_token_mean", "sequence_mean_token_sum"):
        algorithm = build_algorithm("red_drop", {"reduction": {"name": reduction}})
        rows = rows_of(algorithm, EXAMPLE)
        assert loss_and_gradient(algorithm, EXAMPLE)[0][1] == rows.kept.sum()


def test_nothing_kept_is_zero_over_zero_counts():
    example = EXAMPLE._replace(completion_mask=np.zeros_like(EXAMPLE.completion_mask))
    for algorithm in map(plain, PAPER):
        value, gradient = loss_and_gradient(algorithm, example)
        chex.assert_trees_all_equal((value, gradient), jax.tree.map(jnp.zeros_like, (value, gradient)))


def test_needs_say_which_inputs_change_the_loss():
    needs = {name for name in PAPER if plain(name).needs_behavior_logprobs}
    assert needs == set(PAPER) - {"reinforce", "asymre", "red_drop", "red_weight"}
    moved = EXAMPLE._replace(behavior_logprobs=EXAMPLE.behavior_logprobs + np.float32(0.7))
    for name in PAPER:
        same = np.array_equal(*(jitted(full(name), x)[1][0] for x in (EXAMPLE, moved)))
        assert same == (name not in needs), name
        assert not plain(name).needs_reference
    assert full("grpo").needs_reference


@pytest.mark.parametrize(
    ("preset", "overrides", "missing"),
    [
        ("grpo", {}, "behavior_logprobs"),
        ("opmd", {}, "behavior_logprobs"),
        ("pairwise_consistency", {}, "behavior_logprobs"),
        ("reinforce", {"weight": {"name": "importance"}}, "behavior_logprobs"),
        ("reinforce", {"reference_kl": {"coefficient": 0.1}}, "reference_logprobs"),
        ("reinforce", {"entropy": {"coefficient": 0.1}}, "entropy"),
    ],
)
def test_a_missing_input_is_named(preset, overrides, missing):
    algorithm = build_algorithm(preset, overrides)
    mask, logprobs = jnp.asarray(EXAMPLE.completion_mask), jnp.asarray(EXAMPLE.logprobs)
    inputs = {"behavior_logprobs": logprobs, "reference_logprobs": logprobs, "entropy": logprobs, missing: None}
    with pytest.raises(ValueError, match=f"{missing} = None"):
        losses.loss(
            algorithm,
            logprobs,
            inputs["behavior_logprobs"],
            rows_of(algorithm, EXAMPLE),
            mask,
            losses.TermScores(inputs["reference_logprobs"], inputs["entropy"]),
        )


def test_behavior_logprobs_may_be_absent_where_nothing_reads_them():
    for name in ("reinforce", "asymre", "red_drop", "red_weight"):
        algorithm, rows = plain(name), rows_of(plain(name), EXAMPLE)
        logprobs, mask = jnp.asarray(EXAMPLE.logprobs), jnp.asarray(EXAMPLE.completion_mask)
        (expected, _), _ = loss_and_gradient(algorithm, EXAMPLE)
        for absent in (None, jnp.full(mask.shape, jnp.nan)):
            total, _ = losses.loss(algorithm, logprobs, absent, rows, mask)
            assert_close(total, expected, 1e-5, least=1.0)
