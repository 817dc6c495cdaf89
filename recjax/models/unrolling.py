"""Layers written out instead of scanned, so that XLA on CPUs and GPUs copies neither weights nor activations."""

import operator

import jax
import jax.numpy as jnp
import numpy as np

from recjax.models.decoder import Decoder
from recjax.models.decoder_config import DecoderConfig

# Sampling unrolls the layers up to this number of layers, from the number of weights at which copying them costs more
# than the larger program.
MOST_WRITTEN_OUT = 32
LEAST_WEIGHTS = 2**18
# Training on a CPU unrolls up to this number of layers; compiling more takes longer than the speed-up is worth. In low
# precision the speed-up is larger, as scanned layers convert stacks of activations to float32 and back in each layer.
MOST_TRAINED = 8
MOST_TRAINED_LOW = 32


def unrolled_for_training(decoder: Decoder) -> Decoder:
    """The decoder, with unrolled layers if that trains faster: on a CPU, and on one GPU without recomputation.

    A scan copies each layer's weights out of a stack, and its activations and gradients into stacks. XLA would merge
    the recomputations of unrolled layers into the forward pass, which saves no memory.
    """
    one_gpu = jax.default_backend() == "gpu" and jax.device_count() == 1
    most = 0
    if _on_cpu():
        most = MOST_TRAINED if decoder.dtype == jnp.float32 else MOST_TRAINED_LOW
    elif one_gpu and decoder.remat == "none":
        most = MOST_WRITTEN_OUT
    return decoder.clone(unrolled=decoder.config.num_layers <= most)


def made_for_sampling(decoder: Decoder) -> Decoder:
    """The decoder in its fastest form for sampling: with unrolled layers on CPUs and GPUs, and a float32 cache on CPUs.

    XLA on the CPU converts a whole low-precision array to float32 and back for each write into it.
    """
    if _on_cpu():
        return decoder.clone(unrolled=_few_and_large(decoder.config), cache_dtype=jnp.dtype(jnp.float32))
    return decoder.clone(unrolled=copies_layers(decoder.config, jax.default_backend()))


def copies_layers(config: DecoderConfig, platform: str) -> bool:
    """True if sampling takes a second copy of the layers' weights: on a GPU, which unrolls them into new arrays."""
    return platform in ("gpu", "cuda") and _few_and_large(config)


def _few_and_large(config: DecoderConfig) -> bool:
    return config.num_layers <= MOST_WRITTEN_OUT and config.layer_weights >= LEAST_WEIGHTS


def _on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def params_for(decoder: Decoder, params: dict) -> dict:
    """Converts parameters, or some parameters, to the decoder's form; does not change unrolled parameters."""
    if decoder.unrolled and "layers" in params:
        return unrolled_params(decoder.config, params)
    return params


def unrolled_params(config: DecoderConfig, params: dict) -> dict:
    """Parameters of an unrolled decoder: each layer's arrays under `layer_0`, `layer_1`, …"""
    size = config.period
    layers = {}
    for number in range(config.num_layers):
        stacked = params["layers"]
        if size > 1:
            stacked = stacked.get(str(number % size), {})
        layers[f"layer_{number}"] = jax.tree.map(operator.itemgetter(number // size), stacked)
    return {name: value for name, value in params.items() if name != "layers"} | layers


def stacked_params(config: DecoderConfig, params: dict) -> dict:
    """The inverse of `unrolled_params`; does not change stacked parameters."""
    if "layer_0" not in params:
        return params
    size = config.period
    layers = [params[f"layer_{number}"] for number in range(config.num_layers)]
    stacks = [jax.tree.map(lambda *each: jnp.stack(each), *layers[kind::size]) for kind in range(size)]
    other_params = {name: value for name, value in params.items() if not name.startswith("layer_")}
    if size == 1:
        return other_params | {"layers": stacks[0]}
    return other_params | {"layers": {str(kind): stack for kind, stack in enumerate(stacks) if stack}}


def unrolled_arrays(config: DecoderConfig, params: dict) -> dict:
    """`unrolled_params` outside of jitted programs; on one CPU device, views of the stacked arrays.

    While a view exists, JAX copies `params` before it donates them.
    """
    if not _on_cpu() or any(len(stack.sharding.device_set) > 1 for stack in jax.tree.leaves(params["layers"])):
        return _unrolled(config, params)
    views = jax.tree.map(np.asarray, params["layers"])
    return jax.device_put(unrolled_params(config, params | {"layers": views}), may_alias=True)


_unrolled = jax.jit(unrolled_params, static_argnums=0)
