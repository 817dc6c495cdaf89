"""A policy that is its own teacher, with another prompt: loss and gradient of an update, its average, whole runs."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from recjax.algorithms.presets import build_algorithm, free_options
from recjax.config import load_config
from recjax.experience.layout import Layout
from recjax.experience.packing import RowShape, pack
from recjax.models.decoder import Decoder, logits
from recjax.models.sampling import Sampling
from recjax.planning.programs import resident_arrays, resolve_shapes
from recjax.training.update import Averaged, Recipe, TrainState, UpdateContext, parameter_average, recipe_of, update
from tests.closeness import assert_close
from tests.tiny import params_of
from tests.training.test_update import CONFIG, SGD, initial, make_batch
from tests.training.tiny_run import TINY, train, without_times

TEMPERATURE, RATE, COEFFICIENT, CAP = 0.9, 0.25, 0.7, 1.5
ROOM = 6
TWO = Layout(2)
OPTIMIZER = optax.chain(SGD, parameter_average(RATE))


def recipe():
    divergence = {"coefficient": COEFFICIENT, "kind": "reverse_kl", "weight": "truncated", "cap": CAP}
    changes = {"advantage": {"name": "none"}, "teacher_divergence": divergence, "distillation": {"coefficient": 0.3}}
    algorithm = build_algorithm("reinforce", changes)
    return Recipe(Decoder(CONFIG), algorithm, OPTIMIZER, Sampling(TEMPERATURE), 7, Decoder(CONFIG))


@functools.cache
def average():
    """Weights that differ from the policy's."""
    noise = params_of(CONFIG, 5)
    return jax.device_put(jax.tree.map(lambda x, y: np.asarray(x) + np.asarray(y), initial(), noise))


def taught_batch():
    """A batch whose rows have prompts of a teacher of different lengths, and every fourth row none; junk elsewhere."""
    batch = make_batch()
    rows = len(batch.rewards)
    generator = np.random.default_rng(1)
    lengths = generator.integers(1, ROOM + 1, rows)
    lengths[::4] = 0
    prompts = generator.integers(0, 11, (rows, ROOM)).astype(np.int32)
    return batch._replace(teacher_prompts=prompts, teacher_prompt_mask=np.arange(ROOM) < lengths[:, None])


def step(batch, params=None, teacher=None, layout=TWO):
    """New parameters, average and metrics of an update of `params`, with a teacher of the weights `teacher`."""
    params, teacher = (jax.tree.map(jnp.copy, initial() if tree is None else tree) for tree in (params, teacher))
    state = TrainState(params, (SGD.init(params), Averaged(teacher)))
    state, metrics, _ = update(state, batch, layout, UpdateContext({}, jax.random.key(0)), recipe=recipe())
    return state.params, state.optimizer_state[1].average, metrics


@functools.cache
def _scores():
    def scores(params, tokens):
        positions = jnp.arange(tokens.shape[1])[None]
        hidden, _ = Decoder(CONFIG).apply({"params": params}, tokens, positions, positions >= 0)
        return jax.nn.log_softmax(logits(CONFIG, params, hidden[0]) / TEMPERATURE)

    return jax.jit(scores)


def log_distributions(params, prompt, completion):
    """log π of every token at each place of a completion, computed from this sequence alone."""
    tokens = np.zeros((1, 12), np.int32)
    tokens[0, : len(prompt) + len(completion)] = [*prompt, *completion]
    return np.asarray(_scores()(params, tokens), np.float64)[len(prompt) - 1 : len(prompt) + len(completion) - 1]


def loop(batch, params, teacher):
    """Loss, mean divergence and mean log π − log π_teacher, by a double loop over rows and tokens."""
    group = len(batch.rewards) // len(batch.prompts)
    loss, divergences, distances, count = 0.0, [], [], 0
    for row in range(len(batch.rewards)):
        prompt = batch.prompts[row // group][batch.prompt_mask[row // group]]
        completion = batch.completions[row][batch.completion_mask[row]]
        count += len(completion)
        privileged = batch.teacher_prompts[row][batch.teacher_prompt_mask[row]]
        if not len(privileged):
            continue
        ours, theirs = log_distributions(params, prompt, completion), log_distributions(teacher, privileged, completion)
        for place, token in enumerate(completion):
            divergence = sum(np.exp(q) * (q - p) for q, p in zip(ours[place], theirs[place], strict=True))
            weight = min(np.exp(ours[place][token] - batch.behavior_logprobs[row, place]), CAP)
            distance = ours[place][token] - theirs[place][token]
            divergences.append(divergence)
            distances.append(distance)
            loss += COEFFICIENT * weight * divergence + 0.3 * distance * ours[place][token]
    return loss / count, np.mean(divergences), np.mean(distances), len(divergences) / count


def test_update_equals_a_loop_over_sequences():
    batch = taught_batch()
    _, _, metrics = step(batch, teacher=average())
    loss, divergence, distance, share = loop(batch, initial(), average())
    assert_close(metrics["loss"], loss, least=0.1)
    np.testing.assert_allclose(metrics["teacher_divergence"], divergence, rtol=1e-4)
    np.testing.assert_allclose(metrics["teacher_kl"], distance, rtol=1e-4)
    np.testing.assert_allclose(metrics["taught_fraction"], share, rtol=1e-5)
    assert 0.5 < share < 0.9 and divergence > 0.1
    # Junk behind the teacher's prompts, and the prompts of rows without a teacher, change nothing.
    junk = np.where(batch.teacher_prompt_mask, batch.teacher_prompts, 3)
    chex.assert_trees_all_equal(step(batch._replace(teacher_prompts=junk), teacher=average())[2], metrics)


def test_teacher_equal_to_the_policy_changes_nothing():
    batch = make_batch()
    group = len(batch.rewards) // len(batch.prompts)
    own = np.zeros((2, len(batch.rewards), ROOM), np.int32)
    own[:, :, :4] = np.repeat([batch.prompts, batch.prompt_mask], group, axis=1)
    params, _teacher, metrics = step(batch._replace(teacher_prompts=own[0], teacher_prompt_mask=own[1] > 0))
    # Of a teacher with other weights, they are about 1.
    for name in ("loss", "teacher_divergence", "teacher_kl", "update_norm"):
        assert abs(metrics[name]) < 1e-5, name
    chex.assert_trees_all_close(params, initial(), atol=1e-5)
    assert metrics["taught_fraction"] == 1
    # Without any teacher, an update has no gradient either.
    _, _, metrics = step(taught_batch()._replace(teacher_prompt_mask=np.zeros((len(batch.rewards), ROOM), bool)))
    assert metrics["update_norm"] == metrics["loss"] == metrics["taught_fraction"] == metrics["teacher_divergence"] == 0


def test_teacher_gets_no_gradient_and_follows_the_average():
    batch = taught_batch()
    params, teacher, _ = step(batch, teacher=average())
    moved = optax.incremental_update(params, average(), RATE)
    assert_close(teacher, moved, 1e-5)
    empty = batch._replace(completion_mask=np.zeros_like(batch.completion_mask))
    chex.assert_trees_all_equal(step(empty, teacher=average())[:2], (initial(), average()))

    # Only divergences of full distributions have a loss whose slope is the update; the ratio is a constant in them.
    def slope(params):
        ours, weights = zip(*(own(params, row) for row in range(len(batch.rewards))), strict=True)
        return ours, weights

    group = len(batch.rewards) // len(batch.prompts)

    def own(params, row):
        prompt = batch.prompts[row // group][batch.prompt_mask[row // group]]
        completion = batch.completions[row][batch.completion_mask[row]]
        distributions = log_distributions(params, prompt, completion)
        sampled = distributions[np.arange(len(completion)), completion]
        return distributions, sampled

    generator, start = np.random.default_rng(3), jax.device_get(initial())
    direction = jax.tree.map(lambda x: generator.normal(size=x.shape).astype(np.float32), start)
    size = 2e-3
    (above, sampled_above), (below, sampled_below), (_here, sampled) = (
        slope(jax.tree.map(lambda x, d, sign=sign: x + np.float32(sign * size) * d, start, direction))
        for sign in (1, -1, 0)
    )
    expected = 0.0
    for row in range(len(batch.rewards)):
        privileged = batch.teacher_prompts[row][batch.teacher_prompt_mask[row]]
        if not len(privileged):
            continue
        completion = batch.completions[row][batch.completion_mask[row]]
        theirs = log_distributions(average(), privileged, completion)
        behavior = batch.behavior_logprobs[row][batch.completion_mask[row]]
        weights = np.minimum(np.exp(sampled[row] - behavior), CAP)
        kl = [(np.exp(q) * (q - theirs)).sum(-1) for q in (above[row], below[row])]
        distance = theirs[np.arange(len(completion)), completion] - sampled[row]
        expected += (COEFFICIENT * weights * (kl[0] - kl[1])).sum()
        expected -= (0.3 * distance * (sampled_above[row] - sampled_below[row])).sum()
    expected /= 2 * size * batch.completion_mask.sum()
    made = sum(jax.tree.leaves(jax.tree.map(lambda new, old, d: ((old - new) * d).sum(), params, initial(), direction)))
    np.testing.assert_allclose(made, expected, rtol=2e-2)
    assert abs(expected) > 0.05


def test_packed_rows_are_refused():
    batch = taught_batch()
    with pytest.raises(ValueError, match="teacher_prompts: packed rows hold only the policy's prompts"):
        step(batch, layout=Layout(1, pack(batch, RowShape(2, 12))))


@pytest.fixture
def taught(tmp_path):
    """A function from overrides to the config of a tiny run that is its own teacher."""
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    options = ["model.teacher=policy", "task.teacher_template={answer}={prompt}", "task.teacher_tokens=8"]
    options += ["algorithm.teacher_divergence.coefficient=0.5"]
    return lambda name, *overrides: load_config(path, [f"output={tmp_path / name}", *options, *overrides])


def test_keys_reach_the_update_and_the_plan_of_memory(taught):
    config = taught("run", "model.teacher_rate=0.3")
    current = config.replace(**{"model.teacher_rate": 1.0})
    made = recipe_of(config, Decoder(CONFIG))
    assert made.teacher == made.decoder and config.model.average_rate == 0.3 and current.model.average_rate is None
    assert recipe_of(current.replace(**{"model.teacher": "other"}), Decoder(CONFIG)).teacher is None
    model = resolve_shapes(config)[0]
    averaged, plain = (resident_arrays(each, model)["optimizer's state"] for each in (config, current))
    assert optax.tree.get(averaged.tree, "average") == model.trained and "average" in averaged.formula
    assert optax.tree.get(plain.tree, "average") is None and "average" not in plain.formula
    weighted = config.replace(**{"algorithm.teacher_divergence.weight": "truncated"}).algorithm.build()
    assert weighted.needs_behavior_logprobs and not build_algorithm("logit_distillation", {}).needs_behavior_logprobs
    assert build_algorithm("sdpo", {}).needs_behavior_logprobs
    # Of 100 tokens, as the authors' code chooses them.
    assert build_algorithm("sdpo", {}).teacher_divergence.option("support") == "student"
    assert free_options(weighted)[1]["teacher_divergence"]["cap"] == 2.0


@pytest.mark.slow
def test_a_run_reads_its_template_and_its_average(taught):
    few = ["training.steps=3", "evaluation.every=0", "regime.sync_interval=2", "algorithm.preset=sdpo"]
    rows = {
        name: train(taught(name, *few, *options))[1:]
        for name, options in {
            "equal": ["task.teacher_template={prompt}"],
            "answer": [],
            "average": ["model.teacher_rate=0.1"],
            "first": ["model.teacher_rate=0.0"],
        }.items()
    }
    assert abs(rows["equal"][0]["teacher_divergence"]) < 1e-6 and rows["equal"][0]["gradient_norm"] < 1e-6
    of_second = [rows[name][2]["teacher_divergence"] for name in ("answer", "average", "first")]
    assert min(of_second) > 1e-5 and len({round(value, 7) for value in of_second}) == 3
    # The first step has one teacher, whatever its average will be.
    assert len({rows[name][0]["teacher_divergence"] for name in ("answer", "average", "first")}) == 1
    assert without_times(rows["average"]) != without_times(rows["first"])
