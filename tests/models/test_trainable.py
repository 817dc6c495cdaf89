"""Adapters and frozen parameters: what they compute, what training leaves alone, what a copy for the sampler rounds."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recjax.config import LoraConfig, ModelConfig
from recjax.models.decoder import Decoder, logits
from recjax.models.decoder_config import PROJECTIONS, DecoderConfig
from recjax.models.trainable import (
    combine,
    flatten,
    in_compute_dtype,
    is_adapter,
    merged,
    split_params,
    unflatten,
    with_adapters,
)
from tests.closeness import assert_close
from tests.marks import slow
from tests.tiny import params_of

CONFIG = DecoderConfig(
    vocab_size=11,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    qkv_bias=True,
)
TOKENS = jax.random.randint(jax.random.key(1), (3, 5), 0, 11)
LORA = LoraConfig(rank=3, alpha=5.0, targets=list(PROJECTIONS))


@functools.cache
def initial():
    """The decoder's parameters without adapters."""
    return params_of(CONFIG)


@functools.partial(jax.jit, static_argnums=0)
def scores(decoder, params):
    positions = jnp.broadcast_to(jnp.arange(5), (3, 5))
    hidden, _ = decoder.apply({"params": params}, TOKENS, positions, jnp.ones((3, 5), bool))
    return logits(decoder.config, params, hidden)


def noisy_adapters(params):
    """Parameters whose adapters have values in B too."""
    random, leaves = np.random.default_rng(2), flatten(params)
    noise = {path: random.normal(0, 0.3, x.shape).astype(np.float32) for path, x in leaves.items() if is_adapter(path)}
    return unflatten(leaves | jax.device_put(noise))


@pytest.mark.slow
def test_fresh_adapters_change_nothing_and_have_their_rank():
    decoder, params = with_adapters(Decoder(CONFIG), initial(), LORA, jax.random.key(0))
    np.testing.assert_array_equal(scores(decoder, params), scores(Decoder(CONFIG), initial()))
    adapters = {path: leaf for path, leaf in flatten(params).items() if is_adapter(path)}
    assert len(adapters) == 14
    for path, leaf in adapters.items():
        assert 3 == leaf.shape[-1 if "_lora_a/" in path else -2]
        assert bool(leaf.any()) == ("_lora_a/" in path)


@pytest.mark.parametrize("targets", [*slow(["query"], ["down"]), list(PROJECTIONS)])
def test_merged_kernels_give_the_same_scores(targets):
    decoder, params = with_adapters(
        Decoder(CONFIG), initial(), LORA.model_copy(update={"targets": targets}), jax.random.key(0)
    )
    params = noisy_adapters(params)
    ours = scores(decoder, params)
    assert float(jnp.abs(ours - scores(Decoder(CONFIG), initial())).max()) > 1e-3
    assert_close(scores(Decoder(CONFIG), merged(decoder.config, params)), ours, 2e-5)
    chex.assert_trees_all_equal_shapes(merged(decoder.config, params), initial())


@pytest.mark.slow
def test_adapter_gradients_follow_from_kernel_gradients():
    decoder, params = with_adapters(Decoder(CONFIG), initial(), LORA, jax.random.key(0))
    params = noisy_adapters(params)
    trainable, frozen = split_params(params, ModelConfig(lora=LORA))

    def loss(scores):
        return jnp.sum(jnp.sin(scores))

    low = jax.grad(lambda part: loss(scores(decoder, combine(part, frozen))))(trainable)
    whole = jax.grad(lambda full: loss(scores(Decoder(CONFIG), full)))(merged(decoder.config, params))
    for name in PROJECTIONS:
        gradient = whole["layers"][name]["kernel"] * LORA.alpha / LORA.rank
        a, b = (params["layers"][f"{name}_lora_{side}"]["kernel"] for side in "ab")
        assert_close(low["layers"][f"{name}_lora_a"]["kernel"], gradient @ b.mT)
        assert_close(low["layers"][f"{name}_lora_b"]["kernel"], a.mT @ gradient)


def test_split_parts_share_nothing_and_combine_to_the_whole():
    for config in (ModelConfig(), ModelConfig(freeze=["embedding", "^layers/(query|key)/"]), ModelConfig(lora=LORA)):
        decoder, params = Decoder(CONFIG), initial()
        if config.lora:
            decoder, params = with_adapters(decoder, params, config.lora, jax.random.key(0))
        trainable, frozen = split_params(params, config)
        assert not flatten(trainable).keys() & flatten(frozen).keys()
        chex.assert_trees_all_equal(combine(trainable, frozen), params)
    assert set(flatten(split_params(initial(), ModelConfig(freeze=["embedding", "^layers/(query|key)/"]))[1])) == {
        "embedding/embedding",
        *(f"layers/{name}/{kind}" for name in ("query", "key") for kind in ("kernel", "bias")),
    }


@pytest.mark.parametrize(
    ("freeze", "message"),
    [
        (["embeding"], "'embeding' is in none of the paths embedding/embedding"),
        ([""], "nothing to"),
    ],
)
def test_freezing_what_is_not_there_or_everything_is_refused(freeze, message):
    with pytest.raises(ValueError, match=message):
        split_params(initial(), ModelConfig(freeze=freeze))


def test_a_compute_dtype_copy_is_the_same_policy():
    decoder = Decoder(CONFIG, jnp.bfloat16)
    random = np.random.default_rng(3)
    noise = jax.tree.map(lambda x: random.normal(0, 0.1, x.shape), jax.device_get(initial()))
    params = jax.device_put(jax.tree.map(lambda x, y: (np.asarray(x) + y).astype(np.float32), initial(), noise))
    copy = in_compute_dtype(decoder, params, copy=True)
    np.testing.assert_array_equal(scores(decoder, copy), scores(decoder, params))
    for path, leaf in flatten(copy).items():
        assert leaf.dtype == (jnp.float32 if path.endswith("/scale") else jnp.bfloat16)
    own = in_compute_dtype(Decoder(CONFIG), params, copy=True)
    addresses = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(params)}
    assert not addresses & {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(own)}
    shared = in_compute_dtype(Decoder(CONFIG), params, copy=False)
    assert addresses == {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(shared)}
