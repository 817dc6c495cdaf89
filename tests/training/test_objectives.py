"""What an update reads of the whole batch: nothing depends on how the batch is cut, packed or spread over devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recjax.algorithms.presets import build_algorithm
from recjax.errors import UserError
from recjax.experience.layout import Layout, score_batch
from recjax.experience.packing import RowShape, pack
from recjax.hub.export import export_model, write_base
from recjax.hub.tokenizers import character_tokenizer
from recjax.models.decoder import Decoder, logits
from recjax.models.decoder_config import DecoderConfig
from recjax.models.sampling import Sampling
from recjax.rewards.pool import overlong_penalty
from recjax.runs.prepare import prepare
from recjax.store.store import Store
from recjax.training.update import Recipe, TrainState, UpdateContext, update
from tests.closeness import assert_same_change
from tests.tiny import params_of
from tests.training.counting import count, graded_batch
from tests.training.test_update import CONFIG, SGD, assert_same_step, initial, make_batch
from tests.training.tiny_run import train

TEACHER = DecoderConfig(11, 8, 16, 1, 2, 1, 4)
# A mask and bounds of the whole batch, parts of the reward, rows of another model, and a teacher, all at once.
OVERRIDES = {
    "advantage": {"name": "part_normalized"},
    "anchor": {"name": "proximal"},
    "clip": {"name": "balanced", "positive_share": 0.6},
    "mask": {"name": "second_moment", "tau": 0.1},
    "weight": {"name": "expert_shaped"},
    "correction": {"name": "truncated", "cap": 1.5},
    "distillation": {"coefficient": 0.3},
    "teacher_divergence": {"coefficient": 0.2, "kind": "jsd", "beta": 0.3, "top_k": 5},
}


@functools.cache
def teacher_params():
    return params_of(TEACHER, 7)


def full_batch():
    batch = make_batch()
    rows = len(batch.rewards)
    parts = {"first": batch.rewards, "second": np.arange(rows, dtype=np.float32) % 5}
    weights = {"first": np.ones(rows, np.float32), "second": np.full(rows, 0.3, np.float32)}
    version = np.where(np.arange(rows) % 3 == 0, -1, 0).astype(np.int32)
    return batch._replace(reward_parts=parts, part_weights=weights, policy_version=version)


def recipe():
    algorithm = build_algorithm("reinforce", OVERRIDES)
    return Recipe(Decoder(CONFIG), algorithm, SGD, Sampling(0.9), 1024, Decoder(TEACHER))


def step(batch, layout):
    state = TrainState(jax.tree.map(jnp.copy, initial()), SGD.init(initial()))
    arguments = state, batch, layout, UpdateContext({}, jax.random.key(0), teacher_params=teacher_params())
    state, metrics, _ = update(*arguments, recipe=recipe())
    return state.params, metrics


@pytest.mark.slow
def test_micro_batches_packing_and_devices_change_nothing():
    batch = full_batch()
    whole = step(batch, Layout(2))
    assert_same_step(step(batch, Layout(1, pack(batch, RowShape(2, 12)))), whole)
    assert jax.local_device_count() >= 4

    def on_device(state, share):
        arguments = state, share, Layout(), UpdateContext({}, jax.random.key(0), teacher_params=teacher_params())
        state, metrics, _ = update(*arguments, recipe=recipe(), axis_name="devices")
        return state.params, metrics

    state = TrainState(initial(), SGD.init(initial()))
    shares = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), batch)
    spread = jax.pmap(on_device, axis_name="devices", in_axes=(None, 0), out_axes=None)(state, shares)
    assert_same_step(spread, whole)
    assert whole[1]["teacher_divergence"] > 1e-3
    assert 0 < whole[1]["clip_fraction/all"] < 1 and whole[1]["gradient_norm"] > 0


@pytest.mark.slow
def test_advantages_read_the_exact_divergence_from_the_reference():
    """Advantages from loops over rows and tokens, with both policies' whole distributions, in every layout."""
    batch, reference = make_batch(), jax.tree.map(lambda x: x * 1.5, initial())
    size = len(batch.rewards) // len(batch.prompts)
    drift = np.zeros(len(batch.rewards))
    for row, (completion, mask) in enumerate(zip(batch.completions, batch.completion_mask, strict=True)):
        prompt = batch.prompts[row // size][batch.prompt_mask[row // size]]
        tokens = jnp.concatenate([prompt, completion[mask]])[None]
        both = []
        for params in (initial(), reference):
            hidden, _ = Decoder(CONFIG).apply(
                {"params": params}, tokens, jnp.arange(tokens.size)[None], jnp.ones(tokens.shape, bool)
            )
            both.append(np.asarray(jax.nn.log_softmax(logits(CONFIG, params, hidden[0]) / 0.9), float))
        policy, other = (x[len(prompt) - 1 : -1] for x in both)
        drift[row] = (np.exp(policy) * (policy - other)).sum(-1).mean()
    expected = np.zeros(len(drift))
    for row in range(len(drift)):
        group = slice(row // size * size, row // size * size + size)
        centered = batch.rewards[group] - batch.rewards[group].mean()
        if centered.any():
            own = batch.rewards[row] - batch.rewards[group].mean()
            expected[row] = own / np.abs(centered).max() - 10 * (drift[row] - drift[group].mean())
    given = batch._replace(rewards=expected.astype(np.float32))

    def stepped(algorithm, batch, layout, reference):
        made = Recipe(Decoder(CONFIG), algorithm, SGD, Sampling(0.9), 7)
        state = TrainState(jax.tree.map(jnp.copy, initial()), SGD.init(initial()))
        context = UpdateContext({}, jax.random.key(0), reference_params=reference)
        return update(state, batch, layout, context, recipe=made)[0].params

    plain = build_algorithm("reinforce", {"advantage": {"name": "raw_reward"}})
    moved = stepped(plain, given, Layout(1), None)
    algorithm = build_algorithm("zcpo", {"advantage": {"beta": 10.0}})
    for layout in (Layout(1), Layout(2), Layout(1, pack(batch, RowShape(2, 12)))):
        assert_same_change(initial(), stepped(algorithm, batch, layout, reference), moved)
    assert np.ptp(drift) > 1e-3


@pytest.mark.campaign
def test_observations_count_once_however_a_batch_is_cut():
    """The mean of −log π over the tokens between an agent's turns, by hand; packed into one micro-batch and several."""
    batch = make_batch()
    time, rows = batch.completions.shape[1], len(batch.rewards)
    real, first = batch.completion_mask, np.arange(time) == 1
    sampled = real & ~(first & (real.sum(-1, keepdims=True) > 2))
    own = np.repeat(np.arange(len(batch.prompts)), rows // len(batch.prompts))
    batch = batch._replace(
        prompts=batch.prompts[own], prompt_mask=batch.prompt_mask[own], completion_mask=sampled, token_mask=real
    )
    observed = real & ~sampled & sampled.any(-1, keepdims=True)
    assert observed.sum() > 4
    algorithm = build_algorithm("reinforce", {"advantage": {"name": "none"}, "observations": {"coefficient": 0.3}})
    made = Recipe(Decoder(CONFIG), algorithm, SGD, Sampling(0.9), 1024)

    def by_hand(params):
        whole = batch._replace(completion_mask=real)
        logprobs = score_batch(Layout(), Decoder(CONFIG), params, whole, Sampling(0.9), 1024).logprobs
        return -0.3 * jnp.where(observed, logprobs, 0).sum() / observed.sum()

    expected, gradient = jax.value_and_grad(by_hand)(initial())
    updated = jax.tree.map(jnp.subtract, initial(), gradient)
    for layout in (Layout(), Layout(2), Layout(1, pack(batch, RowShape(2, 12)))):
        state = TrainState(jax.tree.map(jnp.copy, initial()), SGD.init(initial()))
        state, metrics, _ = update(state, batch, layout, UpdateContext({}, jax.random.key(0)), recipe=made)
        np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-4)
        np.testing.assert_allclose(metrics["observation_cross_entropy"], expected / 0.3, rtol=1e-4)
        assert_same_change(initial(), state.params, updated)


@pytest.mark.slow
def test_scoring_runs_only_where_something_reads_it():
    def forward_passes(preset):
        algorithm = build_algorithm(preset, {})
        state = TrainState(initial(), SGD.init(initial()))
        made = Recipe(Decoder(CONFIG), algorithm, SGD, Sampling(0.9), 1024)
        traced = update.trace(state, make_batch(), Layout(), UpdateContext({}, jax.random.key(0)), recipe=made)
        return str(traced.jaxpr).count(" = log ")

    plain = forward_passes("grpo")
    assert plain == forward_passes("gspo") == forward_passes("dppo_tv") < forward_passes("m2po")


def make_teacher(folder, characters):
    """A model folder whose tokenizer has these characters."""
    tokenizer = character_tokenizer(characters)
    config = DecoderConfig(len(tokenizer), 8, 16, 1, 2, 1, 4)
    base = folder / "base"
    base.mkdir(parents=True)
    write_base(base, config, tokenizer, (tokenizer.eos_token_id,))
    export_model(str(folder / "model"), config, params_of(config, 3), base, "float32")
    return str(folder / "model")


@pytest.mark.slow
def test_a_run_with_a_teacher_comes_nearer_to_it(tiny, tmp_path):
    run, _ = prepare(tiny("alphabet"))
    characters = "".join(sorted(set("".join(map(str, run.policy.tokenizer.get_vocab()))) & set("0123456789+=")))
    teacher = make_teacher(tmp_path / "teacher", characters)
    options = ["algorithm.preset=on_policy_distillation", f"model.teacher={teacher}", "training.steps=40"]
    rows = train(tiny("run", *options, "training.checkpoint_every=40", "evaluation.every=0"))[1:]
    assert rows[0]["teacher_kl"] > 0.01
    assert np.mean([row["teacher_kl"] for row in rows[-4:]]) < 0.6 * np.mean([row["teacher_kl"] for row in rows[:4]])
    options = [
        "algorithm.preset=logit_distillation",
        *options[1:],
        "training.checkpoint_every=40",
        "evaluation.every=0",
    ]
    rows = train(tiny("logits", *options))[1:]
    assert rows[0]["teacher_divergence"] > 0.01 and rows[-1]["teacher_divergence"] < 0.3 * rows[0]["teacher_divergence"]
    # A run is a teacher too: here its own start, from which the distance is 0.
    options = ["algorithm.preset=logit_distillation", f"model.teacher={tmp_path / 'logits'}", "training.steps=1"]
    start = [
        f"model.run={tmp_path / 'logits'}",
        "model.decoder=null",
        "training.checkpoint_every=1",
        "evaluation.every=0",
    ]
    assert abs(train(tiny("again", *options, *start))[1]["teacher_divergence"]) < 1e-5
    other = make_teacher(tmp_path / "other", characters + "?")
    with pytest.raises(ValueError, match="its tokenizer differs from the policy's in .* entries"):
        train(tiny("refused", *options[:1], f"model.teacher={other}"))


@pytest.mark.slow
def test_a_run_normalizes_the_parts_of_its_reward(tiny):
    options = ["training.steps=2", "algorithm.preset=gdpo", "task.reward=tests.training.test_objectives:two_parts"]
    rows = train(tiny("run", *options, "task.reward_weights={letters: -0.5}"))[1:]
    assert all(abs(row["advantage/mean_square"] - 1) < 1e-3 for row in rows)  # whitened over the batch


@pytest.mark.parametrize("options", [["regime.sync_interval=3"], ["regime.sync_offset=2"]])
def test_a_run_goes_on_behind_groups_without_any_reward(tiny, options):
    rows = count(
        tiny("run", *options, "task.reward=tests.training.test_objectives:none_for_a_group"), sample=graded_batch
    )[1:]
    assert len(rows) == 7 and sum(row["grading/no_reward"] for row in rows) >= 7 * 4


def test_a_record_has_completions_without_any_reward(tiny):
    config = tiny("run", "experience.record=true", "task.reward=tests.training.test_objectives:none_for_a_group")
    count(config, sample=graded_batch)
    with Store(config.record_file) as store:
        grades = [record.completion.grade for record in store.records()]
    known = [grade for grade in grades if grade is not None]
    assert 0 < len(known) < len(grades)
    assert all(grade.reward_parts["length"] > 0 for grade in known)


def none_for_a_group(prompts, completions, answers) -> list[float | None]:
    """No reward for the first prompt's completions."""
    return [
        None if prompt == prompts[0] else float(len(text)) for prompt, text in zip(prompts, completions, strict=True)
    ]


def two_parts(prompts, completions, answers) -> dict[str, list[float]]:
    """Digits and other characters of each completion."""
    digits = [sum(character.isdigit() for character in text) / 3 for text in completions]
    letters = [sum(not character.isdigit() for character in text) / 3 for text in completions]
    return {"digits": digits, "letters": letters}


def by_parity(prompts, completions, answers) -> list[float]:
    """The share of digits where the sum is even; the same for all where it is odd."""
    digits = [sum(character.isdigit() for character in text) / 3 for text in completions]
    return [share if int(answer) % 2 == 0 else 0.5 for share, answer in zip(digits, answers, strict=True)]


def alike(prompts, completions, answers) -> list[float]:
    """The same reward for all."""
    return [1.0 for _ in completions]


def test_groups_without_signal_are_replaced_and_counted(tiny):
    parity = "task.reward=tests.training.test_objectives:by_parity"
    rows = count(tiny("run", parity, "experience.refill={batches: 20}", "training.steps=4"), sample=graded_batch)[1:]
    assert len(rows) == 4
    last, shared = rows[-1], {name: [row[f"experience/left_out/{name}"] for row in rows] for name in ("no_signal",)}
    assert last["experience/drawn_batches"] > 4 and shared["no_signal"] == sorted(shared["no_signal"])
    left = last["experience/left_out/no_signal"]
    assert left > 0 and last["experience/left_out/no_signal_completions"] == 4 * left
    assert 4 * left <= last["experience/left_out/no_signal_tokens"] <= 4 * 3 * left
    kept = last["experience/drawn_batches"] * 4 - left
    assert kept == 4 * 4 + last["experience/ready_groups"] and 0 <= last["experience/ready_groups"] < 4


def test_refill_has_a_limit(tiny):
    never = "task.reward=tests.training.test_objectives:alike"
    with pytest.raises(
        UserError,
        match="step 1: 3 batches were sampled, .*left_out/no_signal 12.*; choose problems.*; relax experience.refill$",
    ):
        count(tiny("run", never, "experience.refill={batches: 3}"), sample=graded_batch)


def test_long_completions_are_penalized_softly(tiny):
    np.testing.assert_allclose(overlong_penalty(np.array([1, 6, 7, 8, 10]), 10, 4), [0, 0, -0.25, -0.5, -1])
    options = ["training.steps=2", "task.overlong_tokens=2", "task.reward_weights={overlong: 0.5}"]
    for row in count(tiny("run", *options), sample=graded_batch)[1:]:
        assert -1 <= row["reward/overlong"] < 0
        np.testing.assert_allclose(row["reward"], row["reward/score"] + 0.5 * row["reward/overlong"], rtol=1e-5)
