"""Layers written out instead of scanned over, so that XLA on the CPU copies neither weights nor activations."""

import operator

import jax
import jax.numpy as jnp
import numpy as np

from recjax.models.decoder import Decoder
from recjax.models.decoder_config import DecoderConfig

# A sampler's layers are unrolled if there are no more than this, and if they have so many weights that copying them
# costs more than the larger program does.
MOST_WRITTEN_OUT, LEAST_WEIGHTS = 32, 2**18
# A trainer's are if there are no more than this; with more, compiling takes longer than it is worth. It is worth
# more in low precision: of scanned layers, the stacks of activations are converted to float32 and back for each layer.
MOST_TRAINED, MOST_TRAINED_LOW = 8, 32


def unrolled_for_training(decoder: Decoder) -> Decoder:
    """The decoder with its layers written out where that trains faster: on the CPU."""
    most = MOST_TRAINED if decoder.dtype == jnp.float32 else MOST_TRAINED_LOW
    return decoder.clone(unrolled=_on_cpu() and decoder.config.num_layers <= most)


def made_for_sampling(decoder: Decoder) -> Decoder:
    """The decoder as it samples fastest: on the CPU with its layers written out, and what it writes to in float32.

    XLA on the CPU converts all of an array of lower precision to float32 and back for each write into it.
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
    """Parameters with stacked layers as the decoder takes them: the same, or unrolled."""
    return unrolled_params(decoder.config, params) if decoder.unrolled else params


def unrolled_params(config: DecoderConfig, params: dict) -> dict:
    """Parameters as an unrolled decoder takes them: each layer's arrays by themselves, under `layer_0` and so on."""
    layers = {f"layer_{i}": jax.tree.map(operator.itemgetter(i), params["layers"]) for i in range(config.num_layers)}
    return {name: value for name, value in params.items() if name != "layers"} | layers


def unrolled_arrays(config: DecoderConfig, params: dict) -> dict:
    """As `unrolled_params`, outside of programs; on one CPU device each layer's arrays lie where the stacked ones do.

    While they are held, JAX makes copies of `params` where these are donated.
    """
    if any(len(stack.sharding.device_set) > 1 for stack in jax.tree.leaves(params["layers"])):
        return _unrolled(config, params)
    views = jax.tree.map(np.asarray, params["layers"])
    return jax.device_put(unrolled_params(config, params | {"layers": views}), may_alias=True)


_unrolled = jax.jit(unrolled_params, static_argnums=0)
