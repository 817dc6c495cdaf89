"""Layers written out instead of scanned over, so that XLA on the CPU copies neither weights nor activations."""

import operator

import jax

from recjax.models.decoder import Decoder, DecoderConfig

# A sampler's layers are unrolled if there are no more than this, and if they have so many weights that copying them
# costs more than the larger program does.
MOST_WRITTEN_OUT, LEAST_WEIGHTS = 32, 2**18


def unrolled_on_cpu(decoder: Decoder, most: int) -> Decoder:
    """The decoder with its layers written out where that is faster: on the CPU.

    Args:
        most: layers; with more of them compiling takes longer than it is worth.
    """
    return decoder.clone(unrolled=jax.default_backend() == "cpu" and decoder.config.num_layers <= most)


def unrolled_for_sampling(decoder: Decoder) -> Decoder:
    """The decoder with its layers written out where that samples faster."""
    large = decoder.config.layer_weights >= LEAST_WEIGHTS
    return unrolled_on_cpu(decoder, MOST_WRITTEN_OUT) if large else decoder


def params_for(decoder: Decoder, params: dict) -> dict:
    """Parameters with stacked layers as the decoder takes them: the same, or unrolled."""
    return unrolled_params(decoder.config, params) if decoder.unrolled else params


def unrolled_params(config: DecoderConfig, params: dict) -> dict:
    """Parameters as an unrolled decoder takes them: each layer's arrays by themselves, under `layer_0` and so on."""
    layers = {f"layer_{i}": jax.tree.map(operator.itemgetter(i), params["layers"]) for i in range(config.num_layers)}
    return {name: value for name, value in params.items() if name != "layers"} | layers
