"""The update: nothing but memory depends on micro-batches, padding or chunks."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from recjax.algorithms import losses
from recjax.algorithms.presets import build_algorithm
from recjax.config import OptimizerConfig
from recjax.experience.batch import Batch
from recjax.experience.layout import Layout
from recjax.experience.packing import RowShape, pack
from recjax.models.decoder import Decoder, logits
from recjax.models.decoder_config import DecoderConfig
from recjax.models.logprobs import Sampling, completion_logprobs
from recjax.training.update import (
    Recipe,
    TrainState,
    UpdateContext,
    hyperparameters_of,
    make_optimizer,
    recipe_of,
    update,
)
from tests.closeness import assert_close, assert_same_change, assert_same_logprobs
from tests.marks import campaign_except
from tests.tiny import params_of
from tests.training.tiny_run import train, without_times

CONFIG = DecoderConfig(11, 16, 32, 1, 2, 1, 8)
SGD = optax.sgd(1.0)


@functools.cache
def initial():
    """The decoder's parameters before the update."""
    return params_of(CONFIG)


def make_batch(seed=0, prompts=4, group=3, time=5):
    generator = np.random.default_rng(seed)
    rows = prompts * group
    lengths = generator.integers(1, time + 1, rows)
    return Batch(
        prompts=generator.integers(0, 11, (prompts, 4)).astype(np.int32),
        prompt_mask=np.arange(4) < generator.integers(1, 5, prompts)[:, None],
        completions=generator.integers(0, 11, (rows, time)).astype(np.int32),
        completion_mask=np.arange(time) < lengths[:, None],
        behavior_logprobs=generator.normal(-2.4, 0.5, (rows, time)).astype(np.float32),
        rewards=generator.integers(0, 3, rows).astype(np.float32),
        group_ids=np.repeat(np.arange(prompts, dtype=np.int32), group),
        policy_version=np.zeros(rows, np.int32),
        truncated=np.zeros(rows, bool),
        accurate=np.zeros(rows, bool),
        reward_parts={"accuracy": np.zeros(rows, np.float32)},
    )


def step(batch, preset="grpo", micro_batches=1, overrides=None, remat="none", chunk=1024, packed=None):
    algorithm = build_algorithm(preset, overrides or {})
    state = TrainState(jax.tree.map(jnp.copy, initial()), SGD.init(initial()))
    reference = jax.tree.map(lambda x: x * 1.1, initial()) if algorithm.needs_reference else None
    state, metrics, _ = update(
        state,
        batch,
        Layout(1, packed) if packed else Layout(micro_batches),
        UpdateContext({}, jax.random.key(0), reference_params=reference),
        recipe=Recipe(Decoder(CONFIG, remat=remat), algorithm, SGD, Sampling(0.9), chunk),
    )
    return state.params, metrics


def assert_same_step(found, expected, tolerance=1e-4):
    """Compares parameters and metrics after two updates of the initial parameters by SGD."""
    assert_same_change(initial(), found[0], expected[0], tolerance)
    # A loss is the mean of terms of about 1, which cancel.
    assert_close(found[1], expected[1], tolerance, least=0.1)


KL_AND_ENTROPY = {"reference_kl": {"coefficient": 0.1, "estimator": "k3"}, "entropy": {"coefficient": 0.01}}
# One of each kind (weights by ratio, a regularizer, weights by advantage, random drops, pairs of completions) and every
# reduction once; both terms that are added to a loss, where the kind and the reduction leave room for another fault.
CASES = {
    "grpo": {"reduction": {"name": "token_mean"}, **KL_AND_ENTROPY},
    "opmd": {"reduction": {"name": "sequence_mean_token_mean"}, **KL_AND_ENTROPY},
    "red_weight": {"reduction": {"name": "sequence_mean_token_sum"}},
    "red_drop": {"reduction": {"name": "fixed_length", "length": 5}},
    "pairwise_consistency": {},
    "p3o": {},
    "mis": {"correction": {"name": "sequence_banded"}, "mask": {"low": 0.5, "high": 2.0}},
}


def padded(batch):
    """The batch with more columns of prompts and completions, which hold junk."""
    junk = dict(constant_values=7)
    return batch._replace(
        prompts=np.pad(batch.prompts, ((0, 0), (0, 2)), **junk),
        prompt_mask=np.pad(batch.prompt_mask, ((0, 0), (0, 2))),
        completions=np.pad(batch.completions, ((0, 0), (0, 3)), **junk),
        completion_mask=np.pad(batch.completion_mask, ((0, 0), (0, 3))),
        behavior_logprobs=np.pad(batch.behavior_logprobs, ((0, 0), (0, 3)), constant_values=np.inf),
    )


@pytest.mark.parametrize("preset", campaign_except(CASES, "grpo", slow=["pairwise_consistency", "mis"]))
def test_micro_batches_and_padding_change_nothing(preset):
    batch = make_batch()
    one, four = step(batch, preset, 1, CASES[preset]), step(padded(batch), preset, 4, CASES[preset])
    assert_same_step(four, one)


@pytest.mark.slow
@pytest.mark.parametrize("remat", campaign_except(["attention", "dots", "full"], "full", "attention"))
def test_remat_and_chunks_change_nothing(remat):
    batch = make_batch()
    assert_same_step(step(batch, remat=remat, chunk=7), step(batch))


def test_order_of_groups_changes_nothing():
    batch = make_batch()
    order = np.array([2, 0, 3, 1])
    rows = (order[:, None] * 3 + np.arange(3)).reshape(-1)
    moved = jax.tree.map(lambda x: x[order] if len(x) == 4 else x[rows], batch)
    one, other = (step(each, overrides=CASES["grpo"]) for each in (batch, moved))  # a program that others compile
    assert_same_step(other, one)


@pytest.mark.slow
def test_equal_rewards_move_nothing():
    batch = make_batch()
    params, metrics = step(batch._replace(rewards=np.ones_like(batch.rewards)))
    chex.assert_trees_all_equal(params, initial())
    assert metrics["gradient_norm"] == 0


ALIKE = {
    "grpo": {},
    "opmd": CASES["opmd"],
    "red_drop": CASES["red_drop"],
    "pairwise_consistency": {},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    campaign_except(itertools.product(ALIKE, (False, True)), ("red_drop", True)),
    ids=lambda case: f"{case[0]}{', packed' * case[1]}",
)
def test_step_without_data_keeps_parameters_and_optimizer_state(case):
    preset, packs = case
    batch, algorithm = make_batch(), build_algorithm(preset, ALIKE[preset])
    optimizer = make_optimizer(OptimizerConfig())
    reference = jax.tree.map(lambda x: x * 1.1, initial()) if algorithm.needs_reference else None

    def after(state, batch):
        recipe = Recipe(Decoder(CONFIG), algorithm, optimizer, Sampling(0.9), 1024)
        layout = Layout(1, pack(batch, RowShape(rows=4, tokens=16))) if packs else Layout(2)
        rates = {"optimizer": {"learning_rate": 0.1, "clip_norm": 1.0, "weight_decay": 0.5}}
        context = UpdateContext({}, jax.random.key(0), reference_params=reference, hyperparameters=rates)
        return update(jax.tree.map(jnp.copy, state), batch, layout, context, recipe=recipe)[:2]

    moved, _ = after(TrainState(initial(), optimizer.init(initial())), batch)
    empty = batch._replace(completion_mask=np.zeros_like(batch.completion_mask))
    still, metrics = after(moved, empty)
    chex.assert_trees_all_equal(still, moved)
    assert metrics["update_norm"] == metrics["gradient_norm"] == metrics["loss"] == 0
    one = np.arange(len(batch.rewards)) < 3
    again, metrics = after(moved, batch._replace(completion_mask=batch.completion_mask & one[:, None]))
    assert metrics["update_norm"] > 0 and optax.tree.get_all_with_path(again.optimizer_state, "count")[0][1] == 2


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (OptimizerConfig(learning_rate=1.0), [1, 1, 1, 1, 1]),
        (OptimizerConfig(learning_rate=1.0, warmup_steps=4), [0.25, 0.5, 0.75, 1, 1]),
        (OptimizerConfig(learning_rate=1.0, schedule="linear"), [1, 0.8, 0.6, 0.4, 0.2]),
        (OptimizerConfig(learning_rate=1.0, schedule="cosine"), [(1 + np.cos(np.pi * i / 5)) / 2 for i in range(5)]),
        (OptimizerConfig(learning_rate=1.0, schedule="linear", warmup_steps=1), [1, 1, 0.75, 0.5, 0.25]),
    ],
)
def test_learning_rate_of_each_update(config, expected):
    schedule = config.build_schedule(5)
    np.testing.assert_allclose([schedule(i) for i in range(5)], expected, rtol=1e-5)


def test_the_gradient_is_clipped_to_its_norm_before_adam():
    optimizer = make_optimizer(OptimizerConfig(epsilon=1.0))
    gradient = jnp.array([30.0, 40.0])
    rates = {"learning_rate": 1.0, "clip_norm": 0.5}
    updates, _ = optimizer.update(gradient, optimizer.init(jnp.zeros(2)), jnp.zeros(2), **rates)
    clipped = np.array([0.3, 0.4])
    np.testing.assert_allclose(updates, -clipped / (clipped + 1.0), rtol=1e-5)


KL = "algorithm.reference_kl.coefficient=0.1"
ARGUMENTS = ["optimizer.learning_rate=0.5", "optimizer.schedule=cosine", "optimizer.clip_norm=.inf", "training.steps=9"]
ARGUMENTS += ["optimizer.warmup_steps=2", "algorithm.clip.epsilon_high=0.5", "algorithm.reference_kl.coefficient=0.2"]
IN_THE_PROGRAM = ["optimizer.weight_decay=0.1", "optimizer.beta2=0.99", "algorithm.clip={name: two_side}"]
IN_THE_PROGRAM += ["algorithm.entropy.coefficient=0.1", "algorithm.reference_kl.coefficient=0.0", "rollout.top_p=0.9"]


@pytest.mark.slow
def test_runs_that_differ_in_numbers_share_a_program(tiny):
    def program(*overrides):
        config = tiny("run", KL, *overrides)
        return recipe_of(config, Decoder(CONFIG)), jax.tree.structure(hyperparameters_of(config, 0.1))

    assert [name for name in ARGUMENTS if program(name) != program()] == []
    assert [name for name in IN_THE_PROGRAM if program(name) == program()] == []


@pytest.mark.slow
def test_a_second_rate_compiles_no_second_update(tiny):
    rows = [train(tiny("first", KL, "training.steps=2"))]
    compiled = update._cache_size()
    rows += [train(tiny(name, KL, "training.steps=2", name)) for name in ARGUMENTS if "steps" not in name]
    assert update._cache_size() == compiled
    assert all(row[2]["loss"] != rows[0][2]["loss"] for row in rows[1:2])


@pytest.mark.slow
def test_top_tokens_center_scores_in_every_layout():
    generator, batch, decoder = np.random.default_rng(4), make_batch(), Decoder(CONFIG)
    behavior = np.log(generator.dirichlet(np.ones(11), batch.completions.shape))
    ids = np.argsort(-behavior, axis=-1)[..., :3].astype(np.int32)
    top = np.take_along_axis(behavior, ids, axis=-1).astype(np.float32)
    ids[1], top[1] = -1, np.nan  # a row of another sampler, without a record
    recorded = {"top_ids": ids, "top_logprobs": top, "other": generator.random(ids.shape)}
    batch = batch._replace(recorded=recorded)
    algorithm = build_algorithm("reinforce", {"score_centering": {"coefficient": 1.0}})

    def total(params):
        given = jax.tree.map(jnp.asarray, batch)
        prompts = jnp.repeat(given.prompts, 3, 0), jnp.repeat(given.prompt_mask, 3, 0)
        arrays = *prompts, given.completions, given.completion_mask
        # The log-probs of a top token are those of a completion with this token in the place of the sampled one.
        options = {"sampling": Sampling(0.9), "chunk": 64}
        logprobs = completion_logprobs(decoder, params, *arrays, **options).logprobs
        columns = []
        for rank in range(3):
            changed = []
            for time in range(5):
                tokens = given.completions.at[:, time].set(jnp.maximum(ids[:, time, rank], 0))
                arrays = *prompts, tokens, given.completion_mask
                changed.append(completion_logprobs(decoder, params, *arrays, **options).logprobs[:, time])
            columns.append(jnp.stack(changed, axis=-1))
        scores = losses.TermScores(top_logprobs=jnp.stack(columns, axis=-1), behavior_top_logprobs=jnp.asarray(top))
        compared = given.rewards, given.group_ids, given.completion_mask.any(-1)
        rows = losses.row_terms(algorithm, losses.BatchValues(*compared, jax.random.key(0)))
        value, count = losses.loss(algorithm, logprobs, given.behavior_logprobs, rows, given.completion_mask, scores)
        return value / count

    loss, gradient = jax.value_and_grad(total)(initial())
    moved = jax.tree.map(jnp.subtract, initial(), gradient)
    for layout in (Layout(1), Layout(2), Layout(1, pack(batch, RowShape(4, 16)))):
        state = TrainState(jax.tree.map(jnp.copy, initial()), SGD.init(initial()))
        recipe = Recipe(decoder, algorithm, SGD, Sampling(0.9), 7)
        state, metrics, _ = update(state, batch, layout, UpdateContext({}, jax.random.key(0)), recipe=recipe)
        assert_same_change(initial(), state.params, moved)
        assert_close(metrics["loss"], loss, least=0.1)
        known = np.delete(batch.completion_mask, 1, axis=0)
        share = known.sum() / batch.completion_mask.sum()
        np.testing.assert_allclose(metrics["score_centering/recorded"], share, rtol=1e-6)
        together = np.delete(np.exp(top).sum(-1), 1, axis=0)[known].mean()
        np.testing.assert_allclose(metrics["score_centering/top_probability"], together, rtol=1e-5)


@pytest.mark.slow
def test_unread_top_tokens_change_no_update(tiny):
    plain = train(tiny("plain", "training.steps=4"))
    recorded = train(tiny("recorded", "training.steps=4", "rollout.recorded_top_k=5"))
    assert without_times(recorded) == without_times(plain)
    stale = "training.steps=4", "regime.sync_interval=4"
    centered = train(tiny("centered", *stale, "rollout.recorded_top_k=5", *CENTERED))
    assert [row["score_centering/recorded"] for row in centered[1:]] == [1.0] * 4
    assert all(0 < row["score_centering/top_probability"] < 1 for row in centered[1:])
    uncentered = train(tiny("uncentered", *stale))
    assert abs(centered[-1]["loss"] - uncentered[-1]["loss"]) > 1e-4
    # The first update is on-policy, where the mean is 0.
    assert abs(centered[1]["loss"] - uncentered[1]["loss"]) < 1e-6


CENTERED = ["algorithm.score_centering={coefficient: 1.0}"]


@pytest.mark.slow
def test_centering_reads_the_recorded_sets_of_cuts(tiny):
    """A set of top_k = 4 has at most twice as many tokens, so eight recorded tokens are the same."""
    cut = "training.steps=3", "regime.sync_interval=3", "rollout.top_k=4", *CENTERED
    by_sets = train(tiny("sets", *cut))
    by_tokens = train(tiny("tokens", *cut, "rollout.recorded_top_k=8"))
    for row, other in zip(by_sets[1:], by_tokens[1:], strict=True):
        for name in ("loss", "gradient_norm", "entropy"):
            np.testing.assert_allclose(row[name], other[name], rtol=1e-4, atol=1e-6, err_msg=name)
        assert row["score_centering/recorded"] == 1.0
        np.testing.assert_allclose(row["score_centering/top_probability"], 1.0, rtol=1e-6)
    bare = train(tiny("bare", *cut[:3], "algorithm.score_centering={}"))
    assert abs(by_sets[-1]["loss"] - bare[-1]["loss"]) > 1e-4


@pytest.mark.slow
def test_recorded_sets_act_alike_in_every_layout():
    generator, batch, decoder = np.random.default_rng(3), make_batch(), Decoder(CONFIG)
    kept = generator.random((*batch.completions.shape, 11)) < 0.4
    np.put_along_axis(kept, batch.completions[..., None], True, -1)
    kept[1] = False  # a row of another sampler, without sets
    ids = np.where(kept, np.arange(11), -1)
    batch = batch._replace(recorded={"kept_ids": ids.astype(np.int32), "other": generator.random(ids.shape)})

    def total(params):
        logprobs = jnp.zeros(batch.completions.shape)
        for row, (completion, mask) in enumerate(zip(batch.completions, batch.completion_mask, strict=True)):
            prompt = batch.prompts[row // 3][batch.prompt_mask[row // 3]]
            tokens = jnp.concatenate([prompt, completion[mask]])[None]
            positions, real = jnp.arange(tokens.size)[None], jnp.ones(tokens.shape, bool)
            hidden, _ = decoder.apply({"params": params}, tokens, positions, real)
            scores = logits(CONFIG, params, hidden[0]) / 0.9
            for time in range(mask.sum()):
                possible = np.flatnonzero(kept[row, time]) if row != 1 else np.arange(11)
                at = scores[len(prompt) - 1 + time]
                value = at[completion[time]] - jax.nn.logsumexp(at[possible])
                logprobs = logprobs.at[row, time].set(value)
        algorithm, given = build_algorithm("grpo", {}), jax.tree.map(jnp.asarray, batch)
        compared = given.rewards, given.group_ids, given.completion_mask.any(-1)
        rows = losses.row_terms(algorithm, losses.BatchValues(*compared, jax.random.key(0)))
        value, count = losses.loss(algorithm, logprobs, given.behavior_logprobs, rows, given.completion_mask)
        return value / count, logprobs

    gradient, expected = jax.grad(total, has_aux=True)(initial())
    moved = jax.tree.map(jnp.subtract, initial(), gradient)
    for layout in (Layout(1), Layout(2), Layout(1, pack(batch, RowShape(4, 16)))):
        state = TrainState(jax.tree.map(jnp.copy, initial()), SGD.init(initial()))
        recipe = Recipe(decoder, build_algorithm("grpo", {}), SGD, Sampling(0.9), 7)
        state, _, learned = update(state, batch, layout, UpdateContext({}, jax.random.key(0)), recipe=recipe)
        mask = batch.completion_mask
        assert_same_logprobs(learned.logprobs[mask], np.asarray(expected)[mask])
        assert_same_change(initial(), state.params, moved)
