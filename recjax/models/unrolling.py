"""Layers written out instead of scanned, so that XLA on the CPU copies neither weights nor activations."""

import operator

import jax
import jax.numpy as jnp
import numpy as np

from recjax.models.decoder import Decoder
from recjax.models.decoder_config import DecoderConfig

# Sampling unrolls the layers up to this number of layers, from the number of weights at which copying them costs more
# than the larger program.
MOST_WRITTEN_OUT, LEAST_WEIGHTS = 32, 2**18
# Training unrolls up to this number of layers; compiling more takes longer than the speed-up is worth. In low precision
# the speed-up is larger, as scanned layers convert stacks of activations to float32 and back in each layer.
MOST_TRAINED, MOST_TRAINED_LOW = 8, 32


def unrolled_for_training(decoder: Decoder) -> Decoder:
    """The decoder, with unrolled layers if that trains faster: on the CPU."""
    most = MOST_TRAINED if decoder.dtype == jnp.float32 else MOST_TRAINED_LOW
    return decoder.clone(unrolled=_on_cpu() and decoder.config.num_layers <= most)


def made_for_sampling(decoder: Decoder) -> Decoder:
    """The decoder in its fastest form for sampling: on the CPU with unrolled layers and a float32 cache.

    XLA on the CPU converts a whole low-precision array to float32 and back for each write into it.
    """
    if not _on_cpu():
        return decoder
    few = decoder.config.num_layers <= MOST_WRITTEN_OUT
    return decoder.clone(
        unrolled=few and decoder.config.layer_weights >= LEAST_WEIGHTS, cache_dtype=jnp.dtype(jnp.float32)
    )


def _on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def params_for(decoder: Decoder, params: dict) -> dict:
    """Converts parameters with stacked layers to the decoder's form: stacked, or unrolled."""
    return unrolled_params(decoder.config, params) if decoder.unrolled else params


def unrolled_params(config: DecoderConfig, params: dict) -> dict:
    """Parameters of an unrolled decoder: each layer's arrays under `layer_0`, `layer_1`, …"""
    layers, size = {}, config.period
    for number in range(config.num_layers):
        stacked = params["layers"] if size == 1 else params["layers"][str(number % size)]
        layers[f"layer_{number}"] = jax.tree.map(operator.itemgetter(number // size), stacked)
    return {name: value for name, value in params.items() if name != "layers"} | layers


def unrolled_arrays(config: DecoderConfig, params: dict) -> dict:
    """`unrolled_params` outside of jitted programs; on one CPU device, views of the stacked arrays.

    While a view exists, JAX copies `params` before it donates them.
    """
    if any(len(stack.sharding.device_set) > 1 for stack in jax.tree.leaves(params["layers"])):
        return _unrolled(config, params)
    views = jax.tree.map(np.asarray, params["layers"])
    return jax.device_put(unrolled_params(config, params | {"layers": views}), may_alias=True)


_unrolled = jax.jit(unrolled_params, static_argnums=0)
