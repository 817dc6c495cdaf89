"""Experts: grouped products, padding, forms of the decoder, balance, and routing that the update replays."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.special import log_softmax

from recjax.algorithms.presets import build_algorithm
from recjax.config import LoraConfig
from recjax.experience.batch import Batch
from recjax.experience.layout import Layout, score_batch
from recjax.experience.packing import RowShape, pack
from recjax.hub.weights import load_pretrained
from recjax.models.decoder import Decoder
from recjax.models.decoder_config import DecoderConfig, ExpertOptions
from recjax.models.experts import EXPERTS, Experts, Load, apply_routed, balance_loss, load_metrics, load_of
from recjax.models.products import grouped_product
from recjax.models.sampling import Sampling
from recjax.models.trainable import adapted, flatten, in_compute_dtype, merged, unflatten
from recjax.rollout.collecting import row_keys
from recjax.rollout.engine import Engine
from recjax.training.update import Recipe, UpdateContext, first_state, update
from tests.closeness import assert_close, assert_same_logprobs
from tests.hub.test_families import random_model, torch_scores
from tests.rollout.padded import sample_completions
from tests.tiny import params_of

CONFIG = DecoderConfig(13, 32, 24, 2, 4, 2, 8, tie_embeddings=False, experts=ExpertOptions(6, 2, True))
PROMPTS, GROUP, TIME = 6, 8, 24


@pytest.mark.parametrize("sizes", [(3, 0, 17, 4), (0, 0, 0, 0), (24, 0, 0, 0), (0, 1, 8, 9)])
def test_grouped_products_and_gradients_equal_a_loop(sizes):
    random = np.random.default_rng(0)
    x, kernels, weights = (random.normal(size=shape).astype(np.float32) for shape in ((24, 5), (4, 5, 7), (24, 7)))
    ends = np.cumsum(sizes)
    expected, of_x, of_kernels = np.zeros((24, 7)), np.zeros(x.shape), np.zeros(kernels.shape)
    for group, (start, end) in enumerate(zip(ends - sizes, ends, strict=True)):
        expected[start:end] = x[start:end] @ kernels[group]
        of_x[start:end] = weights[start:end] @ kernels[group].T
        of_kernels[group] = x[start:end].T @ weights[start:end]

    @jax.jit
    def total(x, kernels):
        found = grouped_product(x, kernels, jnp.array(sizes))
        return (found * weights).sum(), found

    (_, found), gradients = jax.value_and_grad(total, (0, 1), has_aux=True)(x, kernels)
    assert_close(found, expected, 2e-5)
    assert_close(gradients[0], of_x, 2e-5)
    assert_close(gradients[1], of_kernels, 2e-5)


def test_accelerators_get_ragged_products_forward_and_backward():
    operands = jnp.ones((24, 5), jnp.bfloat16), jnp.ones((4, 5, 7)), jnp.array([3, 0, 17, 4])
    traced = jax.jit(jax.grad(lambda *each: grouped_product(*each).astype(jnp.float32).sum(), (0, 1))).trace(*operands)
    assert traced.lower(lowering_platforms=("tpu",)).as_text().count("chlo.ragged_dot") >= 2
    assert "ragged_dot" not in traced.lower(lowering_platforms=("cpu",)).as_text()


def hidden_of(decoder, params, mask, tokens):
    positions = np.maximum(np.cumsum(mask, -1) - 1, 0)
    return apply_routed(decoder, {"params": params}, tokens, jnp.asarray(positions), jnp.asarray(mask))


@pytest.mark.slow
def test_padding_reaches_no_expert_and_gives_no_gradient():
    params, tokens = params_of(CONFIG), np.random.default_rng(0).integers(0, 13, (2, 9))
    mask = np.arange(9) < np.array([[9], [5]])

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def total(params, tokens):
        (hidden, _), sown = hidden_of(Decoder(CONFIG), params, mask, tokens)
        return jnp.where(mask[..., None], hidden, 0).sum(), load_of(sown, 2)

    (first, load), gradient = total(params, tokens)
    (second, _), of_junk = total(params, np.where(mask, tokens, 7))
    assert first == second and load.tokens == mask.sum()
    np.testing.assert_array_equal(load.counts.sum(-1), 2 * mask.sum())
    np.testing.assert_allclose(load.probabilities.sum(-1), mask.sum(), rtol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, gradient, of_junk)


def test_balance_by_hand():
    # Two layers, two experts, ten tokens with one expert each.
    load = Load(jnp.array([[5.0, 5.0], [10.0, 0.0]]), jnp.array([[4.0, 6.0], [8.0, 2.0]]), jnp.array(10.0))
    assert balance_loss(load, 1) == pytest.approx(((0.5 * 0.4 + 0.5 * 0.6) * 2 + 1.0 * 0.8 * 2) / 2)
    assert load_metrics(load, 1)["expert_load_max"] == pytest.approx((1 + 2) / 2)


def layer_params(random, adapters=()):
    """Random parameters of the experts of CONFIG, with adapters of rank 2 on the projections in `adapters`."""
    shapes = {"router": (32, 6), "gate": (6, 32, 24), "up": (6, 32, 24), "down": (6, 24, 32)}
    factors = {f"{name}_lora_a": (*shapes[name][:2], 2) for name in adapters}
    factors |= {f"{name}_lora_b": (6, 2, shapes[name][2]) for name in adapters}
    return {name: {"kernel": random.normal(size=x).astype(np.float32) / 5} for name, x in (shapes | factors).items()}


def gated(gate, up):
    return jax.nn.silu(gate) * up


def test_adapters_of_experts_add_their_product_to_the_kernels():
    random = np.random.default_rng(0)
    config = adapted(CONFIG, LoraConfig(rank=2, alpha=3.0, targets=["query", "gate", "down"]))
    params, x, real = (
        layer_params(random, ("gate", "down")),
        random.normal(size=(9, 32)).astype(np.float32),
        np.ones(9, bool),
    )
    whole = flatten(merged(config, {"experts": params})["experts"])
    assert {path.split("/")[0] for path in whole} == {"router", "gate", "up", "down"}
    base = {name: params[name] for name in ("router", "gate", "up", "down")}
    adapted_layer, layer = (jax.jit(Experts(one, jnp.float32, gated).apply) for one in (config, CONFIG))
    found = adapted_layer({"params": params}, x, real, None)
    expected, plain = (layer({"params": one}, x, real, None) for one in (unflatten(whole), base))
    assert_close(found, expected, 2e-5)
    assert np.abs(found - plain).max() > 0.1
    assert adapted(CONFIG, LoraConfig()).lora.targets == ("query", "key", "value", "output")


class Replayed(NamedTuple):
    decoder: Decoder
    params: dict
    batch: Batch

    def log_ratios(self, params=None, packed=False, replay=True):
        """log π − log μ of the sampled tokens, and the log-probs."""
        layout = Layout(1, pack(self.batch, RowShape(12, 128))) if packed else Layout()
        decoder = self.decoder.clone(replays_routing=replay)
        logprobs = score_batch(layout, decoder, params or self.params, self.batch, Sampling(), 512)[0]
        mask = self.batch.completion_mask
        return np.asarray(logprobs - self.batch.behavior_logprobs)[mask], np.asarray(logprobs)[mask]


@pytest.fixture(scope="module")
def sampled():
    """Completions of a bfloat16 engine, with their experts, as the update's batch."""
    return completed(Decoder(CONFIG, jnp.bfloat16, replays_routing=True), params_of(CONFIG))


def completed(decoder, params):
    """Completions of an engine, with their experts, as the update's batch."""
    random = np.random.default_rng(0)
    prompts, mask = random.integers(0, 13, (PROMPTS, 5)), np.arange(5) < random.integers(1, 6, (PROMPTS, 1))
    engine = Engine(decoder, (12,), slots=None, prefix_time=5)
    engine.replace_weights(in_compute_dtype(decoder, params, copy=True), 0)
    keys = row_keys(jax.random.key(1), PROMPTS * GROUP)
    completions = sample_completions(engine, prompts, mask, keys, GROUP, TIME, Sampling())
    real = np.arange(TIME) < np.array([len(one.tokens) for one in completions])[:, None]

    def filled(values, fill=0):
        whole = np.full((*real.shape, *values[0].shape[1:]), fill, values[0].dtype)
        whole[real] = np.concatenate(values)
        return whole

    rows = PROMPTS * GROUP
    batch = Batch(
        prompts=prompts.astype(np.int32),
        prompt_mask=mask,
        completions=filled([one.tokens for one in completions]),
        completion_mask=real,
        behavior_logprobs=filled([one.logprobs for one in completions]),
        rewards=np.zeros(rows, np.float32),
        group_ids=np.repeat(np.arange(PROMPTS, dtype=np.int32), GROUP),
        policy_version=np.zeros(rows, np.int32),
        truncated=np.zeros(rows, bool),
        accurate=np.zeros(rows, bool),
        reward_parts={},
        recorded={EXPERTS: filled([one.recorded[EXPERTS] for one in completions], -1)},
    )
    return Replayed(decoder, params, batch)


@pytest.mark.slow
def test_the_engine_records_experts_after_the_first_token(sampled):
    recorded, mask = sampled.batch.recorded[EXPERTS], sampled.batch.completion_mask
    assert recorded.dtype == np.int8 and recorded.shape[2:] == (2, 2)
    assert (recorded[:, 0] == -1).all() and (recorded[:, 1:][~mask[:, 1:]] == -1).all()
    known = recorded[:, 1:][mask[:, 1:]]
    assert known.min() >= 0 and known.max() < 6 and (known[..., 0] != known[..., 1]).all()


@pytest.mark.slow
def test_replay_removes_the_ratios_of_routing_that_differs(sampled):
    """bfloat16 rounds differently in packed rows; a token that then takes another expert has another probability."""
    worst = {replay: np.abs(sampled.log_ratios(packed=True, replay=replay)[0]).max() for replay in (False, True)}
    print(f"largest |log π − log μ|: {worst[False]:.3f} without replay, {worst[True]:.3f} with replay")
    assert worst[True] < 0.05 < 0.1 < worst[False]


@pytest.mark.slow
def test_all_layouts_replay_the_same_experts_under_newer_weights(sampled):
    """In float32, where rounding changes no expert, with weights from which the routing of the sampler differs."""
    params = jax.tree.map(lambda x: x + 0.02 * jax.random.normal(jax.random.key(x.size), x.shape), sampled.params)
    exact = sampled._replace(decoder=sampled.decoder.clone(dtype=jnp.float32))
    replayed, fresh = (exact.log_ratios(params, replay=replay)[1] for replay in (True, False))
    assert np.abs(replayed - fresh).max() > 0.05, "the weights change no expert"
    for form in ({"unrolled": True}, {"remat": "full"}, {"remat": "dots"}, {"remat": "attention"}):
        one = exact._replace(decoder=exact.decoder.clone(**form))
        assert_same_logprobs(one.log_ratios(params, packed=True)[1], replayed)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_references_and_teachers_choose_their_own_experts(sampled, packed):
    moved = jax.tree.map(lambda x: x + 0.02 * jax.random.normal(jax.random.key(x.size), x.shape), sampled.params)
    exact = sampled._replace(decoder=sampled.decoder.clone(dtype=jnp.float32))
    layout = Layout(1, pack(sampled.batch, RowShape(12, 128))) if packed else Layout()
    (_, own), (_, forced) = (exact.log_ratios(moved, replay=replay) for replay in (False, True))
    policy = exact.log_ratios()[1]

    def k3(anchor):
        return np.mean(np.expm1(anchor - policy) - (anchor - policy))

    changes = {"advantage": {"name": "none"}, "distillation": {"coefficient": 1.0}}
    algorithm = build_algorithm("reinforce", {**changes, "reference_kl": {"coefficient": 1.0, "estimator": "k3"}})
    recipe = Recipe(exact.decoder, algorithm, optax.sgd(0.0), Sampling(), 512, exact.decoder)
    context = UpdateContext({}, jax.random.key(0), reference_params=moved, teacher_params=moved)
    state = first_state(recipe.optimizer, jax.tree.map(jnp.copy, sampled.params))
    _, metrics, _ = update(state, sampled.batch, layout, context, recipe=recipe)
    assert abs(k3(own) - k3(forced)) > 0.01 * k3(own), "the weights change no expert"
    # The loss is −Σ A log π, which has the value of the KL to the teacher times log π, and the k3.
    np.testing.assert_allclose(metrics["teacher_kl"], np.mean(policy - own), rtol=1e-3)
    expected = k3(own) - np.mean((own - policy) * policy)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-3)


@pytest.mark.slow
def test_layers_without_experts_record_none_in_all_forms():
    """The first of two layers has one MLP and no window; the second has experts and an MLP for every token."""
    options = ExpertOptions(6, 2, True, shared_size=10, dense=(True, False), dense_size=20)
    config = dataclasses.replace(CONFIG, experts=options, windows=(None, 4))
    assert config.period == 2 and config.layer_weights == 32 * (96 + (60 + 6 + 31 + 18 * 24) / 2)
    old = completed(Decoder(config, replays_routing=True), params_of(config))
    recorded, mask = old.batch.recorded[EXPERTS], old.batch.completion_mask
    assert (recorded[:, :, 0] == -1).all() and (recorded[:, 1:, 1][mask[:, 1:]] >= 0).all()
    assert np.abs(old.log_ratios()[0]).max() < 1e-4
    params = jax.tree.map(lambda x: x + 0.02 * jax.random.normal(jax.random.key(x.size), x.shape), old.params)
    replayed, fresh = (old.log_ratios(params, replay=replay)[1] for replay in (True, False))
    assert np.abs(replayed - fresh).max() > 0.05, "the weights change no expert"
    for form in ({"unrolled": True}, {"remat": "full"}):
        one = old._replace(decoder=old.decoder.clone(**form))
        for packed in (False, True):
            np.testing.assert_allclose(one.log_ratios(params, packed)[1], replayed, atol=1e-5)


@pytest.mark.slow
def test_updates_measure_the_load_of_routed_layers():
    options = ExpertOptions(6, 2, True, dense=(True, False, False), dense_size=20)
    config = dataclasses.replace(CONFIG, num_layers=3, experts=options)
    decoder = Decoder(config, replays_routing=True)
    sampled = completed(decoder, params_of(config))
    recipe = Recipe(decoder, build_algorithm("reinforce", {}), optax.sgd(0.0), Sampling(), 512, expert_balance=0.1)
    context = UpdateContext({}, jax.random.key(0))
    loads = []
    for micro_batches in (1, 2):
        state = first_state(recipe.optimizer, jax.tree.map(jnp.copy, sampled.params))
        _, metrics, _ = update(state, sampled.batch, Layout(micro_batches), context, recipe=recipe)
        loads.append(float(metrics["expert_load_max"]))
    assert loads[0] == pytest.approx(loads[1], rel=1e-5) and 1 < loads[0] < 6


@pytest.mark.campaign
@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe", "qwen2_moe"])
def test_recorded_experts_give_the_logprobs_of_transformers(family, tmp_path):
    """Older weights sample and route; newer weights score. In transformers, a hook forces each router's choice."""
    torch = pytest.importorskip("torch")
    model = random_model(family, tmp_path / "older")
    config, params = load_pretrained(tmp_path / "older")
    old = completed(Decoder(config, replays_routing=True), params)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.manual_seed(1))
    model.save_pretrained(tmp_path / "newer")
    newer, forced = load_pretrained(tmp_path / "newer")[1], {}

    def forcing(layer):
        def hook(router, inputs, output):
            probabilities = (inputs[0].reshape(-1, config.hidden_size) @ router.weight.T).softmax(-1)
            chosen = torch.where(forced[layer] < 0, output[2], forced[layer])
            weights = probabilities.gather(-1, chosen)
            return output[0], weights / weights.sum(-1, keepdim=True) if router.norm_topk_prob else weights, chosen

        return hook

    for layer, block in enumerate(model.model.layers):
        if hasattr(block.mlp, "gate"):
            block.mlp.gate.register_forward_hook(forcing(layer))
    expected, batch = [], old.batch
    for row, (tokens, mask) in enumerate(zip(batch.completions, batch.completion_mask, strict=True)):
        prompt = batch.prompts[row // GROUP][batch.prompt_mask[row // GROUP]]
        sequence, recorded = np.concatenate([prompt, tokens[mask]]), batch.recorded[EXPERTS][row][mask]
        # The pass at a token chooses the experts that the next token's record holds.
        of_passes = np.full((len(sequence), *recorded.shape[1:]), -1)
        of_passes[len(prompt) : -1] = recorded[1:]
        forced |= {layer: torch.tensor(of_passes[:, layer]) for layer in range(config.num_layers)}
        scores = torch_scores(model, sequence)[0, len(prompt) - 1 : -1]
        expected.append(log_softmax(scores, -1)[np.arange(mask.sum()), tokens[mask]])
    expected = np.concatenate(expected)
    for packed in (False, True):
        assert_same_logprobs(old.log_ratios(newer, packed)[1], expected, 1e-4)
    assert np.abs(old.log_ratios(newer, replay=False)[1] - expected).max() > 0.05, "the weights change no expert"
    assert np.abs(old.log_ratios(newer)[0]).max() > 0.05, "the weights are the sampler's"


def test_replayed_experts_have_the_probabilities_of_the_current_router():
    random = np.random.default_rng(0)
    x, recorded = random.normal(size=(5, 32)).astype(np.float32), np.array([[0, 3], [5, 1], [-1, -1], [2, 4], [4, 2]])
    params = layer_params(random)
    kernels = {name: value["kernel"].astype(float) for name, value in params.items()}
    expected = np.zeros((5, 32))
    for row, token in enumerate(x.astype(float)):
        scores = np.exp(token @ kernels["router"])
        chosen = np.argsort(-scores)[:2] if recorded[row, 0] < 0 else recorded[row]
        for expert in chosen:
            gate, up = (token @ kernels[name][expert] for name in ("gate", "up"))
            share = scores[expert] / scores[chosen].sum()
            expected[row] += share * (gate / (1 + np.exp(-gate)) * up) @ kernels["down"][expert]
    layer = Experts(CONFIG, jnp.float32, gated)
    found = jax.jit(layer.apply)({"params": params}, x, np.ones(5, bool), recorded)
    assert_close(found, expected)
