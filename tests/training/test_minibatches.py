"""Several updates of one batch: passes over it, minibatches of whole groups, and the proximal policy."""

import itertools
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from recjax.algorithms.losses import BatchValues, Scored, row_terms
from recjax.algorithms.presets import build_algorithm
from recjax.config import TrainingConfig
from recjax.experience.batch import minibatch_rows
from recjax.experience.layout import Layout, padding_waste, score_batch
from recjax.experience.packing import RowShape, pack
from recjax.models.decoder import Decoder
from recjax.models.sampling import Sampling
from recjax.runs.checkpoint import progress
from recjax.training import learner
from recjax.training.update import Recipe, TrainState, UpdateContext, update
from tests.closeness import assert_close, assert_same_change, assert_same_logprobs
from tests.marks import campaign, campaign_except, slow
from tests.training.counting import count
from tests.training.test_update import CONFIG, assert_same_step, initial, make_batch
from tests.training.tiny_run import train

GROUPS, SIZE = 4, 3
PASSES = TrainingConfig(updates_per_batch=2, minibatches=2)
RATE = 2.0  # so large that the second pass clips; one for all tests, which share its programs


OPTIMIZER = optax.sgd(RATE)


def recipe(preset):
    return Recipe(Decoder(CONFIG), build_algorithm(preset, {}), OPTIMIZER, Sampling(1.0), 1024)


def logprobs_of(params, batch):
    return score_batch(Layout(), Decoder(CONFIG), params, batch, Sampling(1.0), 1024)[0]


def off_policy_batch():
    """A batch whose behavior policy is near the initial policy, so that the clip drops some tokens and keeps others."""
    batch = make_batch(prompts=GROUPS, group=SIZE)
    noise = np.random.default_rng(1).normal(0, 0.15, batch.completions.shape)
    behavior = np.asarray(logprobs_of(initial(), batch)) + noise
    return batch._replace(behavior_logprobs=behavior.astype(np.float32))


def layout_of(batch, index, training=PASSES, packs=False):
    rows = minibatch_rows(batch, GROUPS, index, training, seed=0)
    if not packs:
        return Layout(1, None, rows, training.minibatches)
    mask = batch.completion_mask if rows is None else batch.completion_mask & rows[:, None]
    return Layout(
        1, pack(batch._replace(completion_mask=mask), RowShape(rows=4, tokens=16)), rows, training.minibatches
    )


def updated(preset, params, batch, layout, *, proximal=None):
    made = recipe(preset)
    state = TrainState(jax.tree.map(jnp.copy, params), made.optimizer.init(params))
    context = UpdateContext({}, jax.random.key(0), proximal_logprobs=proximal)
    state, metrics, _ = update(state, batch, layout, context, recipe=made)
    return state.params, metrics


# --- The reference: loops over passes, minibatches and tokens, with every formula as its paper has it.


def is_clipped(ratio, advantage):
    return (advantage > 0 and ratio > 1.2) or (advantage < 0 and ratio < 0.8)


def coefficient(preset, now, proximal, behavior, advantage):
    """The factor of ∇log π of a token, from log-probs of the three policies."""
    if preset == "grpo":
        ratio, correction = np.exp(now - behavior), 1.0
    elif preset == "tis":
        ratio, correction = np.exp(now - proximal), min(np.exp(proximal - behavior), 2.0)
    elif preset == "decoupled_ppo":
        ratio, correction = np.exp(now - proximal), np.exp(proximal - behavior)
    elif preset == "a3po":
        between = 0.5 * behavior + 0.5 * now
        ratio, correction = np.exp(now - between), np.exp(between - behavior)
    return 0.0 if is_clipped(ratio, advantage) else correction * ratio * advantage


@jax.jit
def weighted_gradient(params, batch, factors):
    return jax.grad(lambda at: jnp.sum(factors * logprobs_of(at, batch)))(params)


def reference(preset, params, batch, rate, training):
    """The parameters after each update of a batch."""
    proximal, advantages, after = np.asarray(logprobs_of(params, batch)), np.zeros(len(batch.rewards)), []
    for group in range(GROUPS):
        own = batch.rewards[group * SIZE : (group + 1) * SIZE]
        for row in range(SIZE):
            advantages[group * SIZE + row] = (own[row] - own.mean()) / (own.std() + 1e-6)
    for index in range(training.updates):
        rows = minibatch_rows(batch, GROUPS, index, training, seed=0)
        now, factors, count = np.asarray(logprobs_of(params, batch)), np.zeros(batch.completions.shape, np.float32), 0
        for row in range(GROUPS * SIZE):
            for time in range(batch.completions.shape[1]):
                if batch.completion_mask[row, time] and (rows is None or rows[row]):
                    policies = now[row, time], proximal[row, time], batch.behavior_logprobs[row, time]
                    factors[row, time] = coefficient(preset, *policies, advantages[row])
                    count += 1
        gradient = weighted_gradient(params, batch, -factors / count)
        params = jax.tree.map(lambda x, g: x - rate * g, params, gradient)
        after.append(params)
    return after


@pytest.mark.parametrize("preset", campaign_except(["grpo", "tis", "decoupled_ppo", "a3po"], "decoupled_ppo"))
@pytest.mark.parametrize("packs", campaign_except([False, True], False, slow=[True]))
def test_batch_updates_equal_the_double_loop(preset, packs):
    batch = off_policy_batch()
    after = reference(preset, initial(), batch, RATE, PASSES)
    before = [initial(), *after[:-1]]
    proximal, clipped = logprobs_of(initial(), batch), []
    for index in range(PASSES.updates):
        layout = layout_of(batch, index, packs=packs)
        given = proximal if build_algorithm(preset, {}).needs_proximal else None
        # From the parameters of the reference: a step of this rate enlarges the rounding of the steps before it.
        params, metrics = updated(preset, before[index], batch, layout, proximal=given)
        assert_same_change(before[index], params, after[index])
        clipped.append(float(metrics["clip_fraction/all"]))
    assert 0 < max(clipped[2:]) < 1, "the second pass is far enough for some clips"
    drift = jax.tree.map(lambda x, y: float(jnp.abs(x - y).max()), after[-1], initial())
    assert max(jax.tree.leaves(drift)) > 0.05


# --- Relations.


@pytest.mark.slow
def test_first_pass_equals_a_single_update():
    batch = off_policy_batch()
    layout = layout_of(batch, 0)  # whose program the double loop has compiled
    once = updated("decoupled_ppo", initial(), batch, layout)
    first = updated("decoupled_ppo", initial(), batch, layout, proximal=logprobs_of(initial(), batch))
    assert_same_step(first, once)


@pytest.mark.slow
@pytest.mark.parametrize("preset", campaign_except(["grpo", "reinforce_pp", "red_drop"], "red_drop"))
def test_minibatch_gradients_add_up_to_that_of_the_batch(preset):
    """With advantages and drops of the whole batch; token means weigh each minibatch by its number of tokens."""
    batch = off_policy_batch()

    def gradient_and_tokens(layout):
        params, metrics = updated(preset, initial(), batch, layout)
        return jax.tree.map(lambda before, after: before - after, initial(), params), metrics

    kept = kept_tokens(preset, batch)
    whole, _of_whole = gradient_and_tokens(Layout())
    total, tokens, rows = jax.tree.map(jnp.zeros_like, whole), 0, np.zeros(len(batch.rewards), int)
    for index in range(PASSES.minibatches):
        layout = layout_of(batch, index)
        rows += layout.rows
        part, measured = gradient_and_tokens(layout)
        count = int(kept[layout.rows].sum())
        total = jax.tree.map(lambda x, y, n=count: x + n * y, total, part)
        tokens += count
        assert 0 < measured["kept_fraction"] <= 1
    assert (rows == 1).all() and tokens == kept.sum()
    assert_close(total, jax.tree.map(lambda x: x * tokens, whole), least=1e-2 * tokens)


def kept_tokens(preset, batch):
    """The number of tokens that the algorithm keeps in each row."""
    algorithm = build_algorithm(preset, {})

    @jax.jit
    def kept(rewards, groups, mask):
        return row_terms(
            algorithm, BatchValues(rewards, groups, mask.any(-1), jax.random.key(0), completion_mask=mask)
        ).kept

    rows = kept(batch.rewards, batch.group_ids, batch.completion_mask)
    return np.where(rows, batch.completion_mask.sum(-1), 0)


SCORED = ["m2po", "bapo", "clip_cov", "high_entropy", "p3o"]


@pytest.mark.parametrize("preset", campaign_except(["dapo", "pairwise_consistency", *SCORED], "high_entropy"))
@pytest.mark.parametrize("packs", campaign_except([False, True], False))
@pytest.mark.slow
def test_minibatch_equals_a_batch_of_its_groups(preset, packs):
    batch = off_policy_batch()
    layout = layout_of(batch, 1, packs=packs)
    alone = batch._replace(completion_mask=batch.completion_mask & layout.rows[:, None])
    found, expected = (updated(preset, initial(), *each) for each in ((batch, layout), (alone, Layout())))
    assert_same_step(found, expected)
    assert padding_waste(batch, layout) < 1


@pytest.mark.slow
def test_proximal_logprobs_are_given_and_others_recomputed():
    batch = off_policy_batch()
    algorithm = build_algorithm("tis", {"mask": {"name": "second_moment"}})
    rewards, groups, mask, behavior = map(
        jnp.asarray, (batch.rewards, batch.group_ids, batch.completion_mask, batch.behavior_logprobs)
    )
    now, proximal = behavior + 0.5 * jnp.sign(behavior + 2.4), behavior - 1.0

    @jax.jit
    def terms_and_mask(now, proximal):
        scored = Scored(now, jnp.zeros_like(now), behavior)
        arrays = {"completion_mask": mask, "scored": scored, "proximal_logprobs": proximal}
        rows = row_terms(algorithm, BatchValues(rewards, groups, mask.any(-1), jax.random.key(0), **arrays))
        return rows, algorithm.mask.bound()(jnp.where(mask, now - behavior, 0.0), mask)

    rows, expected = terms_and_mask(now, proximal)
    np.testing.assert_array_equal(rows.proximal_logprobs, jnp.where(mask, proximal, 0.0))
    np.testing.assert_array_equal(rows.mask, expected)

    def forward_passes(overrides, proximal):
        made = recipe("tis")._replace(algorithm=build_algorithm("tis", overrides))
        state = TrainState(initial(), made.optimizer.init(initial()))
        context = UpdateContext({}, jax.random.key(0), proximal_logprobs=proximal)
        return str(update.trace(state, batch, Layout(), context, recipe=made).jaxpr).count(" = log ")

    assert forward_passes({}, proximal) < forward_passes({}, None)
    masked = {"mask": {"name": "second_moment"}}
    assert forward_passes(masked, proximal) == forward_passes(masked, None) == forward_passes({}, None)


@pytest.mark.campaign
def test_minibatches_under_pmap_have_their_share_of_every_device():
    batch = make_batch(prompts=8, group=SIZE)
    rows = np.tile(np.repeat([True, False], SIZE), 4)  # the first of two prompts on each of four devices
    expected = updated("reinforce_pp", initial(), batch, Layout(1, None, rows, 2))
    state = TrainState(initial(), OPTIMIZER.init(initial()))

    def on_device(state, share, rows):
        layout = Layout(1, None, rows, 2)
        options = {"recipe": recipe("reinforce_pp"), "axis_name": "devices"}
        state, metrics, _ = update(state, share, layout, UpdateContext({}, jax.random.key(0)), **options)
        return state.params, metrics

    shares, rows = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), (batch, rows))
    found = jax.pmap(on_device, axis_name="devices", in_axes=(None, 0, 0), out_axes=None)(state, shares, rows)
    assert_same_step(found, expected)


# --- The division of a batch.


@pytest.mark.parametrize("padding", [0, 2])
def test_each_pass_shuffles_all_groups(padding):
    training = TrainingConfig(updates_per_batch=3, minibatches=2)
    batch, groups = make_batch(prompts=6 + padding), 6
    orders = []
    for number, pass_ in itertools.product(range(2), range(3)):
        first = (number * 3 + pass_) * 2
        masks = [minibatch_rows(batch, groups, first + index, training, seed=5) for index in range(2)]
        assert (masks[0] ^ masks[1]).all() and masks[0].sum() == masks[1].sum()
        for mask in masks:
            by_group = Counter(batch.group_ids[mask].tolist())
            assert {*by_group.values()} == {3} and sum(group < 6 for group in by_group) == 3
        np.testing.assert_array_equal(masks[0], minibatch_rows(batch, groups, first, training, seed=5))
        orders.append(masks[0].tobytes())
    assert len({*orders}) > 2
    assert minibatch_rows(batch, groups, 0, TrainingConfig(updates_per_batch=3), seed=5) is None


# --- The loop.


@pytest.mark.parametrize("preset", [*slow("decoupled_ppo"), *campaign("grpo")])
def test_run_updates_each_batch_as_configured(tiny, monkeypatch, preset):
    seen, recipes, original = [], [], learner.update

    def watched(state, batch, layout, context, *, recipe):
        params = jax.tree.map(np.array, state.params)
        seen.append((params, batch, jax.random.key_data(context.key).tolist(), layout.rows, context.proximal_logprobs))
        recipes.append(recipe)
        return original(state, batch, layout, context, recipe=recipe)

    monkeypatch.setattr(learner, "update", watched)
    options = ["training.updates_per_batch=2", "training.minibatches=2", f"algorithm.preset={preset}"]
    config = tiny("run", *options, "evaluation.every=0", "training.steps=6", "regime.sync_offset=1")
    rows = train(config)[1:]
    assert [row["staleness"] for row in rows] == [0, 1, 2, 3, 4, 5]
    of_queue = [any(name.startswith("grading/") for name in row) for row in rows]
    assert of_queue == [True, False, False, False, True, False], "once for each batch"
    for first, steps in ((0, 4), (4, 2)):
        own = seen[first : first + steps]
        params, batch, key, *_ = own[0]
        for _, other, other_key, chosen, proximal in own:
            np.testing.assert_array_equal(other.completions, batch.completions)
            assert other_key == key and chosen.sum() == 8
            assert (proximal is not None) == (preset == "decoupled_ppo")
            if proximal is not None:
                made = recipes[first]
                expected = score_batch(Layout(), made.decoder, params, batch, made.sampling, made.chunk)[0]
                assert_same_logprobs(proximal, expected)
        for a, b in zip(own[::2], own[1::2], strict=True):
            assert (a[3] ^ b[3]).all()
    assert seen[0][2] != seen[4][2]
    tokens = sum(round(rows[step]["completion_length"] * 16) for step in (0, 4))
    assert progress(Path(config.output) / "checkpoints", 6)["totals"]["tokens"] == tokens, "each batch counts once"


def test_replayed_batch_keeps_its_staleness_limit(tiny):
    options = ["training.updates_per_batch=2", "training.minibatches=2", "training.steps=40"]
    options += ["training.checkpoint_every=40", "evaluation.every=0"]
    replay = "experience.replay={max_staleness: 9, max_reuse: 4, draw_every: 2, keep_no_signal: true}"
    ages = [int(age) for row in count(tiny("run", *options, replay))[1:] for age in row["staleness_rows"]]
    assert max(ages) == 7 and min(ages) == 0
    less = count(tiny("less", *options, replay.replace("9", "4")))[1:]
    assert max(int(age) for row in less for age in row["staleness_rows"]) == 3
