"""How a decoder is made for training and for sampling on the CPU, and that this changes no number."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recjax.models.decoder import Context, Decoder
from recjax.models.decoder_config import DecoderConfig
from recjax.models.unrolling import made_for_sampling, unrolled_arrays, unrolled_for_training, unrolled_params
from recjax.rollout.keys_values import empty
from tests.closeness import assert_close
from tests.tiny import params_of

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


@pytest.mark.slow
def test_bfloat16_keys_and_values_are_exact_in_float32():
    sampler = made_for_sampling(Decoder(CONFIG, jnp.bfloat16))
    params, mask = params_of(CONFIG), jnp.ones((1, 6), bool)
    prompt, cache = sampler.apply({"params": params}, jnp.arange(6)[None], jnp.arange(6)[None], mask)
    keys, values = cache.keys_values
    assert keys.dtype == prompt.dtype == jnp.bfloat16 and sampler.cache_dtype == jnp.float32
    contexts = (
        Context(keys, values, mask, jnp.arange(6)[None]),
        Context(
            *empty(cache.keys_values, rows=1, time=2, dtype=sampler.cache_dtype),
            jnp.array([[True, False]]),
            jnp.array([[6, 7]]),
        ),
    )
    last = {"tokens": jnp.full((1, 1), 7), "positions": jnp.full((1, 1), 6), "mask": jnp.ones((1, 1), bool)}
    written, room = sampler.apply({"params": params}, **last, contexts=contexts, write_at=jnp.int32(0))
    alone, own = sampler.apply({"params": params}, **last, contexts=contexts[:1])
    for kept, computed in zip(room.keys_values, own.keys_values, strict=True):
        assert kept.dtype == jnp.float32
        np.testing.assert_array_equal(kept[..., :1, :], computed.astype(jnp.float32))
        assert (kept[..., 1:, :] == 0).all()
    # Attention over either differs by the rounding of sums.
    assert_close(written.astype(jnp.float32), alone.astype(jnp.float32), 0.03)


@pytest.fixture(params=[jnp.float32, jnp.bfloat16])
def params(request):
    return {"layers": {"weight": jax.random.normal(jax.random.key(1), (2, 32, 16), request.param)}}


def test_unrolled_arrays_are_views_on_one_device(params):
    stack, layers = params["layers"]["weight"], unrolled_arrays(CONFIG, params)
    chex.assert_trees_all_equal(layers, unrolled_params(CONFIG, params))
    start = stack.unsafe_buffer_pointer()
    starts = [layers[f"layer_{i}"]["weight"].unsafe_buffer_pointer() for i in (0, 1)]
    assert starts == [start, start + stack.nbytes // 2]


@pytest.mark.parametrize("held", [True, False])
def test_stacked_arrays_are_donated_once_the_layers_are_gone(held, params):
    stack = params.pop("layers")["weight"]
    layers = unrolled_arrays(CONFIG, {"layers": {"weight": stack}})
    start, last = stack.unsafe_buffer_pointer(), np.array(stack[1])
    if not held:
        del layers
    updated = jax.jit(lambda stack: stack + 1, donate_argnums=0)(stack)
    np.testing.assert_array_equal(updated[1], last + 1)
    if not held and stack.dtype == jnp.bfloat16 and jax.__version_info__ >= (0, 11):
        pytest.xfail("JAX 0.11 keeps NumPy's view of a bfloat16 array as long as the array, and copies what has a view")
    assert (updated.unsafe_buffer_pointer() == start) != held
    if held:
        np.testing.assert_array_equal(layers["layer_1"]["weight"], last)


def test_unrolled_arrays_keep_the_sharding_on_several_devices():
    mesh = jax.make_mesh((2,), ("tensor",))
    weight = jax.device_put(jnp.arange(48.0).reshape(2, 4, 6), jax.NamedSharding(mesh, jax.P(None, None, "tensor")))
    layers = unrolled_arrays(CONFIG, {"layers": {"weight": weight}})
    chex.assert_trees_all_equal(layers, unrolled_params(CONFIG, {"layers": {"weight": weight}}))
    placed = jax.NamedSharding(mesh, jax.P(None, "tensor"))
    assert all(layers[f"layer_{i}"]["weight"].sharding.is_equivalent_to(placed, 2) for i in (0, 1))
