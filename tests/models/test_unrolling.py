"""How a decoder is made for training and for sampling on the CPU, and that this changes no number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recjax.models.decoder import Context, Decoder, DecoderConfig, init_params
from recjax.models.unrolling import made_for_sampling, unrolled_for_training

CONFIG = DecoderConfig(
    vocab_size=20, hidden_size=8, intermediate_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4
)


@pytest.mark.parametrize(
    ("layers", "dtype", "unrolled"),
    [(8, jnp.float32, True), (9, jnp.float32, False), (9, jnp.bfloat16, True), (33, jnp.bfloat16, False)],
)
def test_in_low_precision_a_trainer_writes_out_more_layers(layers, dtype, unrolled):
    config = DecoderConfig(20, 8, 16, layers, 2, 1, 4)
    assert unrolled_for_training(Decoder(config, dtype)).unrolled == unrolled


def test_a_sampler_keeps_in_float32_the_very_numbers_that_were_computed_in_bfloat16():
    decoder = Decoder(CONFIG, jnp.bfloat16)
    sampler = made_for_sampling(decoder)
    params, tokens = init_params(CONFIG, jax.random.key(0)), jnp.arange(6)[None]
    inputs = tokens, jnp.arange(6)[None], jnp.ones((1, 6), bool)
    hidden, (keys, values) = decoder.apply({"params": params}, *inputs)
    found, kept = sampler.apply({"params": params}, *inputs)
    np.testing.assert_array_equal(found, hidden)
    assert {x.dtype for x in kept} == {jnp.dtype(jnp.float32)} != {keys.dtype}
    jax.tree.map(np.testing.assert_array_equal, kept, (keys.astype(jnp.float32), values.astype(jnp.float32)))

    # What goes on from either differs by the rounding of one sum.
    last = jnp.full((1, 1), 7), jnp.full((1, 1), 6), jnp.ones((1, 1), bool)
    places = jnp.ones((1, 6), bool), jnp.arange(6)[None]
    one, _ = decoder.apply({"params": params}, *last, (Context(keys, values, *places),))
    other, _ = sampler.apply({"params": params}, *last, (Context(*kept, *places),))
    np.testing.assert_allclose(one.astype(jnp.float32), other.astype(jnp.float32), rtol=0.03, atol=0.03)
