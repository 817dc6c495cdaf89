"""The shape of a decoder, and options of families other than Llama."""

import dataclasses
import functools
from typing import NamedTuple

import flax.linen as nn
import numpy as np

from recjax.models.rotary import RopeScaling, stretched


class Lora(NamedTuple):
    """Adapters of rank `rank` on the projections in `targets`: x W + (alpha / rank) x A B.

    Reference: arXiv 2106.09685 §4.1.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]


PROJECTIONS = ("query", "key", "value", "output", "gate", "up", "down")
ACTIVATIONS = {"silu": nn.silu, "gelu_tanh": functools.partial(nn.gelu, approximate=True)}


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder, with sizes in units and not bytes, and options of families other than Llama.

    Attributes:
        qkv_bias: queries, keys and values have biases.
        qk_norm: RMSNorm on every head of queries and keys, before the rotation.
        windows: for each layer, the number of tokens that a query attends to, itself included, or None for all tokens;
            empty: every layer attends to all tokens.
        rope_layers: for each layer, whether it rotates queries and keys; empty: every layer does.
        local_rope_theta: rotary base of layers with a window, which then use no scaling; None: one base for all.
        activation: activation of the MLP's gate, a key of ACTIVATIONS.
        norm_offset: added to the stored scale of every norm.
        post_norms: normalize the outputs of attention and MLP, before they are added to the stream.
        scale_embeddings: multiply embeddings by sqrt(hidden_size).
        attention_scale: factor on the attention scores; None: head_dim ** -0.5.
        lora: adapters; None: no adapters.
        attention_cap, logit_cap: bound c of attention scores and of logits, c · tanh(x / c); None: no bound.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_epsilon: float = 1e-5
    tie_embeddings: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    rope_layers: tuple[bool, ...] = ()
    local_rope_theta: float | None = None
    activation: str = "silu"
    norm_offset: float = 0.0
    post_norms: bool = False
    scale_embeddings: bool = False
    attention_scale: float | None = None
    attention_cap: float | None = None
    logit_cap: float | None = None
    lora: Lora | None = None

    @property
    def layer_weights(self) -> int:
        """Number of weights in a layer's matmuls, without adapters."""
        heads = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        return self.hidden_size * (heads + 3 * self.intermediate_size)


def rotary_frequencies(config: DecoderConfig) -> np.ndarray:
    """Angular frequency of each pair of head dimensions, in radians per position.

    Returns:
        [head_dim/2], or [layers, head_dim/2] if layers differ; a layer with frequency 0 does not rotate.
    Reference: RoFormer (arXiv 2104.09864) §3.2.
    """
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    usual = stretched(config.rope_theta**-exponent, config.rope_scaling).astype(np.float32)
    if not config.rope_layers and config.local_rope_theta is None:
        return usual
    layers = np.tile(usual, (config.num_layers, 1))
    if config.local_rope_theta is not None:
        layers[[window is not None for window in config.windows]] = config.local_rope_theta**-exponent
    if config.rope_layers:
        layers[[not rotated for rotated in config.rope_layers]] = 0.0
    return layers
