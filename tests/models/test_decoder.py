"""The decoder against transformers' Llama, and its own promises: masks, contexts, rematerialization."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recjax.hub.weights import load_pretrained, tensor_names
from recjax.models.decoder import Context, Decoder, init_params, logits, rotary_of
from recjax.models.decoder_config import ACTIVATIONS, DecoderConfig
from recjax.models.layer import _gated
from recjax.models.rotary import RopeScaling, rotary_angles
from recjax.models.unrolling import params_for
from tests.closeness import assert_close
from tests.marks import campaign_except
from tests.tiny import params_of

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS = {
    "grouped, tied": {"tie_word_embeddings": True},
    "one key head a query head": {"num_key_value_heads": 4, "tie_word_embeddings": False},
    "one key head": {"num_key_value_heads": 1, "tie_word_embeddings": False, "num_hidden_layers": 3},
    "other theta and epsilon": {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}, "rms_norm_eps": 0.1},
    "wide heads": {"head_dim": 24, "tie_word_embeddings": False},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0}},
    "llama3": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1000.0} | LLAMA3, "head_dim": 16},
}
LENGTHS, TIME = (3, 9, 14), 14


def torch_model(folder, fields, save):
    """A random Llama, saved by transformers; norms and logits far from their initial values."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**(SIZES | fields), initializer_range=0.2)
    model = transformers.LlamaForCausalLM._from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.to(save.get("dtype", torch.float32)).save_pretrained(folder, max_shard_size=save.get("max_shard_size", "1GB"))
    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def batch(side):
    """Rows of several lengths, padded with random junk on one side; positions count real tokens from 0."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, SIZES["vocab_size"], (len(LENGTHS), TIME))
    mask = np.arange(TIME) < np.array(LENGTHS)[:, None]
    mask = mask if side == "right" else mask[:, ::-1].copy()
    positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
    return tokens, positions, mask


@functools.partial(jax.jit, static_argnums=0)
def applied(decoder, params, tokens, positions, mask, contexts=()):
    return decoder.apply({"params": params}, tokens, positions, mask, contexts)


@functools.partial(jax.jit, static_argnums=0)
def scores(config, params, tokens, positions, mask):
    return logits(config, params, applied(Decoder(config), params, tokens, positions, mask)[0])


# Tests index what these give, and each index of a JAX array would be a program of its own.
def run(*arguments):
    return jax.device_get(applied(*arguments))


def our_logits(*arguments):
    return jax.device_get(scores(*arguments))


def their_logits(model, tokens, positions, mask):
    import torch

    # At padding attention sees nothing and the output means nothing, so only real positions are compared.
    return model(
        input_ids=torch.tensor(tokens), position_ids=torch.tensor(positions), attention_mask=torch.tensor(mask).long()
    ).logits


def check_logits(folder, model, side="right"):
    tokens, positions, mask = batch(side)
    ours = our_logits(*load_pretrained(folder), tokens, positions, mask)
    theirs = their_logits(model, tokens, positions, mask).detach().numpy()
    assert theirs[mask].std() > 0.5, "logits too flat to tell models apart"
    assert_close(ours[mask], theirs[mask])


@pytest.mark.parametrize("side", campaign_except(["left", "right"], "left"))
@pytest.mark.parametrize("name", campaign_except(MODELS, "grouped, tied", slow=["wide heads", "llama3"]))
def test_logits_are_those_of_transformers(tmp_path, name, side):
    model = torch_model(tmp_path, MODELS[name], {})
    assert load_pretrained(tmp_path)[0].tie_embeddings == model.config.tie_word_embeddings
    check_logits(tmp_path, model, side)


@pytest.mark.parametrize("form", ["sharded", "float16", "bfloat16"])
def test_saved_forms(tmp_path, form):
    torch = pytest.importorskip("torch")
    save = {"max_shard_size": "10KB"} if form == "sharded" else {"dtype": getattr(torch, form)}
    model = torch_model(tmp_path, MODELS["one key head a query head"], save)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (form == "sharded")
    check_logits(tmp_path, model)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        pytest.param("other theta and epsilon", {"rope_theta": 60.0}, marks=pytest.mark.slow),
        pytest.param("linear", {"rope_scaling": None}, marks=pytest.mark.slow),
        ("llama3", {"rope_scaling": None}),
    ],
)
def test_rotary_settings_matter(tmp_path, name, change):
    torch_model(tmp_path, MODELS[name], {})
    config, params = load_pretrained(tmp_path)
    inputs = batch("right")
    changed = our_logits(dataclasses.replace(config, **change), params, *inputs)
    assert np.abs(changed - our_logits(config, params, *inputs))[inputs[2]].max() > 0.05


@pytest.mark.parametrize(
    ("name", "remat"), [pytest.param("grouped, tied", "none", marks=pytest.mark.campaign), ("wide heads", "full")]
)
def test_gradient_is_that_of_torch(tmp_path, name, remat):
    model = torch_model(tmp_path, MODELS[name], {})
    config, params = load_pretrained(tmp_path)
    tokens, positions, mask = batch("left")
    counted = mask[:, 1:] & mask[:, :-1]

    @jax.jit
    def summed_logprob(params):
        hidden, _ = applied(Decoder(config, remat=remat), params, tokens, positions, mask)
        logprobs = jax.nn.log_softmax(logits(config, params, hidden[:, :-1]), axis=-1)
        chosen = jnp.take_along_axis(logprobs, jnp.array(tokens)[:, 1:, None], axis=-1)[..., 0]
        return jnp.where(counted, chosen, 0.0).sum()

    import torch

    theirs = their_logits(model, tokens, positions, mask)[:, :-1].log_softmax(-1)
    chosen = theirs.gather(-1, torch.tensor(tokens)[:, 1:, None])[..., 0]
    value = (chosen * torch.tensor(counted)).sum()
    value.backward()
    ours, gradients = jax.device_get(jax.value_and_grad(summed_logprob)(params))
    np.testing.assert_allclose(ours, value.detach().numpy(), rtol=1e-5)
    expected = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    for path, names in tensor_names(config).items():
        gradient = functools.reduce(lambda tree, key: tree[key], path.split("/"), gradients)
        for layer, name in enumerate(names):
            part = gradient[layer] if path.startswith("layers/") else gradient
            part = part.T if path.endswith("/kernel") else part
            scale = np.abs(expected[name]).max()
            np.testing.assert_allclose(part / scale, expected[name] / scale, atol=1e-4, err_msg=name)


SMALL = DecoderConfig(17, 16, 24, 2, 4, 2, 8, rope_scaling=RopeScaling("linear", 2.0), tie_embeddings=False)


@functools.cache
def small_params():
    """Larger than initial weights, so that attention is far from uniform."""
    params = jax.device_get(params_of(SMALL, 1))
    return jax.tree_util.tree_map_with_path(lambda path, leaf: 2 * leaf if "kernel" in str(path) else leaf, params)


def small_batch(rows=4, time=10):
    tokens = np.random.default_rng(2).integers(0, SMALL.vocab_size, (rows, time))
    return tokens, np.broadcast_to(np.arange(time), (rows, time)), np.ones((rows, time), bool)


def changed(array, place, value):
    """A copy of an array with other values in a place."""
    array = np.array(array)
    array[place] = value
    return array


def test_no_token_sees_the_future_or_padding():
    tokens, positions, mask = small_batch()
    params = small_params()
    base = our_logits(SMALL, params, tokens, positions, mask)
    later = our_logits(SMALL, params, (tokens + (np.arange(10) == 6)) % SMALL.vocab_size, positions, mask)
    np.testing.assert_array_equal(later[:, :6], base[:, :6])
    assert (np.abs(later - base)[:, 6:].max(axis=(0, 2)) > 1e-3).all(), "every later position sees the change"

    mask[:, :3] = False
    padded = our_logits(SMALL, params, tokens, positions, mask)
    junk = our_logits(SMALL, params, changed(tokens, np.s_[:, :3], 5), positions, mask)
    np.testing.assert_array_equal(junk[:, 3:], padded[:, 3:])


def test_only_position_differences_matter():
    tokens, positions, mask = small_batch()
    base = our_logits(SMALL, small_params(), tokens, positions, mask)
    shifted = our_logits(SMALL, small_params(), tokens, positions + 7, mask)
    assert_close(shifted, base)
    stretched = our_logits(SMALL, small_params(), tokens, positions * 3, mask)
    assert np.abs(stretched - base).max() > 1e-2


@pytest.mark.parametrize(
    ("splits", "options"),
    [
        pytest.param((9,), {}, marks=pytest.mark.campaign),
        pytest.param((3, 7), {}, marks=pytest.mark.campaign),
        ((6, 9), {"windows": (None, 3), "rope_layers": (False, True)}),
    ],
)
def test_earlier_tokens_as_contexts_change_nothing(splits, options):
    tokens, positions, mask = small_batch()
    mask[1, :2] = mask[2, 9] = False
    params, decoder = small_params(), Decoder(dataclasses.replace(SMALL, **options))
    whole, cache = run(decoder, params, tokens, positions, mask)
    keys, values = cache.keys_values
    edges = (0, *splits, tokens.shape[1])
    contexts = ()
    for start, stop in itertools.pairwise(edges):
        part = slice(start, stop)
        hidden, cache = run(decoder, params, tokens[:, part], positions[:, part], mask[:, part], contexts)
        new = cache.keys_values
        real = mask[:, part]
        assert_close(hidden[real], whole[:, part][real])
        real = np.broadcast_to(real[None, :, None], new[0].shape[:-1])
        assert_close(new[0][real], keys[..., part, :][real])
        assert_close(new[1][real], values[..., part, :][real])
        contexts += (Context(*new, mask[:, part], positions[:, part]),)


def test_one_prompt_serves_its_whole_group():
    prompts, prompt_positions, prompt_mask = small_batch(rows=2, time=5)
    prompt_mask[0, :2] = False
    tokens, positions, mask = small_batch(rows=6, time=4)
    params, decoder = small_params(), Decoder(SMALL)
    _, shared = run(decoder, params, prompts, prompt_positions, prompt_mask)
    grouped, _ = run(
        decoder, params, tokens, positions + 5, mask, (Context(*shared.keys_values, prompt_mask, prompt_positions),)
    )

    def repeated(x, y):
        return np.concatenate([np.repeat(x, 3, axis=0), y], axis=1)

    inputs = [(prompts, tokens), (prompt_positions, positions + 5), (prompt_mask, mask)]
    whole, _ = run(decoder, params, *(repeated(x, y) for x, y in inputs))
    assert_close(grouped, whole[:, 5:])


def test_packed_sequences_do_not_see_each_other():
    tokens, positions, _ = small_batch(rows=2)
    ends = np.array([[4] * 4 + [10] * 6, [3] * 3 + [0] * 2 + [10] * 5])
    base = our_logits(SMALL, small_params(), tokens, positions, ends)
    for row, first in ((0, 4), (1, 5)):
        others = changed(tokens, (row, first - 2), (tokens[row, first - 2] + 1) % SMALL.vocab_size)
        found = our_logits(SMALL, small_params(), others, positions, ends)
        np.testing.assert_array_equal(found[row, first:], base[row, first:])
    others = changed(tokens, (0, 5), (tokens[0, 5] + 1) % SMALL.vocab_size)
    found = our_logits(SMALL, small_params(), others, positions, ends)
    assert (np.abs(found - base)[0, 5:].max(axis=-1) > 1e-3).all(), "its own sequence sees it"


@pytest.mark.slow
def test_packed_sequences_share_what_is_before_them():
    """A context of three tokens, then a tree of four sequences: a b, with c d and with c e f, and with g after b."""
    (row,), (positions,), (mask,) = small_batch(rows=1)
    context, (a, b, c, d, e, f, g) = row[:3], row[3:]
    tree, depths, ends = [a, b, c, d, c, e, f, g], [0, 1, 2, 3, 2, 3, 4, 2], [8, 8, 4, 4, 7, 7, 7, 8]
    decoder, params = Decoder(SMALL), small_params()
    _, before = run(decoder, params, context[None], positions[None, :3], mask[None, :3])
    before = (Context(*before.keys_values, mask[None, :3], positions[None, :3]),)
    arrays = (np.array(x)[None] for x in (tree, np.add(depths, 3), ends))
    packed, _ = run(decoder, params, *arrays, before)
    for places in ([0, 1, 2, 3], [0, 1, 4, 5, 6], [0, 1, 7]):
        alone = np.array([*context, *(tree[place] for place in places)])[None]
        hidden, _ = run(decoder, params, alone, np.arange(alone.size)[None], np.ones(alone.shape, bool))
        assert_close(packed[0, places], hidden[0, 3:], 2e-5)


@pytest.mark.parametrize(("options", "tolerance"), [({"remat": "full"}, 1e-5), ({"dtype": jnp.bfloat16}, 0.03)])
def test_how_it_runs_does_not_change_what_it_computes(options, tolerance):
    inputs = small_batch()
    base, _ = run(Decoder(SMALL), small_params(), *inputs)
    other, _ = run(Decoder(SMALL, **options), small_params(), *inputs)
    assert other.dtype == options.get("dtype", jnp.float32)
    assert np.abs(other.astype(np.float32) - base).mean() < tolerance * np.abs(base).mean()


def test_unknown_rope_scaling_is_named():
    config = dataclasses.replace(SMALL, rope_scaling=RopeScaling("dynamic", 2.0))
    with pytest.raises(ValueError, match="rope_scaling kind 'dynamic' is not known"):
        init_params(config, jax.random.key(0))


@pytest.mark.parametrize(
    ("activation", "dtype"), [("silu", jnp.float32), ("silu", jnp.bfloat16), ("gelu_tanh", jnp.float32)]
)
def test_gated_units_have_the_gradients_of_their_definition(activation, dtype):
    gate, up, weights = (4 * jax.random.normal(key, (5, 7)) for key in jax.random.split(jax.random.key(0), 3))
    gate = gate.at[0, :2].set(jnp.array([80.0, -80.0])).astype(dtype)
    up = up.astype(dtype)

    def weighed(gated):
        def total(gate, up):
            return (weights * gated(gate, up).astype(jnp.float32)).sum()

        return jax.grad(total, argnums=(0, 1))(gate.astype(jnp.float32), up.astype(jnp.float32))

    expected = weighed(lambda gate, up: ACTIVATIONS[activation](gate) * up)
    found = jax.grad(
        lambda gate, up: (weights * _gated(activation, gate, up).astype(jnp.float32)).sum(), argnums=(0, 1)
    )
    for one, other in zip(found(gate, up), expected, strict=True):
        assert one.dtype == dtype
        assert_close(one, other, 1e-5 if dtype == jnp.float32 else 2e-2)


def test_rotary_angles_are_computed_once_on_cpus():
    config = DecoderConfig(13, 16, 32, 3, 2, 1, 8)
    decoder = Decoder(config, unrolled=True)
    params = params_for(decoder, params_of(config))
    tokens = jnp.arange(10).reshape(2, 5)

    def total(params):
        hidden, _ = decoder.apply({"params": params}, tokens, jnp.arange(5) + tokens[:, :1], jnp.ones((2, 5), bool))
        return hidden.sum()

    compiled = jax.jit(jax.grad(total)).lower(params).compile().as_text()
    assert compiled.count(" cosine(") == compiled.count(" sine(") == 1
    angles = jax.jit(lambda positions: rotary_angles(positions, rotary_of(config)))(tokens)
    radians = tokens[..., None].astype(jnp.float32) * rotary_of(config).frequencies
    np.testing.assert_array_equal(angles.cos, jax.jit(jnp.cos)(radians))
    np.testing.assert_array_equal(angles.sin, jax.jit(jnp.sin)(radians))
