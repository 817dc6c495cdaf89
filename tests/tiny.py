"""What tests share so that few programs compile: parameters of any decoder, drawn without a program."""

import jax
import numpy as np

from recjax.models.decoder import abstract_params
from recjax.models.decoder_config import DecoderConfig


def params_of(config: DecoderConfig, seed: int = 0) -> dict:
    """Random float32 parameters distributed as those of `init_params`, whose program takes half a second to compile."""
    random = np.random.default_rng(seed)

    def drawn(path, leaf):
        name = path[-1].key
        if name == "scale":
            offset = 0.0 if path[-2].key == "delta_norm" else config.norm_offset
            return np.full(leaf.shape, 1.0 - offset, np.float32)
        if name == "bias":
            return np.zeros(leaf.shape, np.float32)
        inputs = leaf.shape[-1] if name == "embedding" else leaf.shape[-2]
        return (random.normal(size=leaf.shape) / np.sqrt(inputs)).astype(np.float32)

    return jax.device_put(jax.tree_util.tree_map_with_path(drawn, abstract_params(config)))
