"""The shape of a decoder, and options of families other than Llama."""

import dataclasses
import functools
import itertools
from typing import NamedTuple

import flax.linen as nn
import numpy as np

from recjax.models.rotary import RopeScaling, Rotary, scaled_frequencies


class Lora(NamedTuple):
    """Adapters of rank `rank` on the projections in `targets`: x W + (alpha / rank) x A B.

    Reference: arXiv 2106.09685 §4.1.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]


class DeltaNet(NamedTuple):
    """Layers with a gated delta net instead of attention, and the sizes of these layers.

    layers: for each layer, True for a delta net, False for attention; at least one layer has attention.
    key_heads, value_heads: numbers of heads; a key head serves value_heads / key_heads consecutive value heads.
    key_dim, value_dim: dimensions of a key head and of a value head.
    kernel: number of tokens that the causal convolution reads, the current token included.
    fused: checkpoints store the projections as two tensors, with the units of each key head next to one another.

    Reference: arXiv 2412.06464.
    """

    layers: tuple[bool, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    fused: bool = False

    @property
    def channels(self) -> int:
        """Units of queries, keys and values together, which the convolution reads."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


class Kind(NamedTuple):
    """What a layer has: a gated delta net instead of attention; one MLP instead of experts, if others have experts."""

    has_delta: bool = False
    is_dense: bool = False


class ExpertOptions(NamedTuple):
    """Experts in the layers, each an MLP of width `intermediate_size`.

    count, per_token: number of experts in a layer, and how many run for each token.
    renormalize: divide the router's probabilities of a token's experts by their sum.
    module: name of the MLP in checkpoints: "mlp", or "block_sparse_moe" with Mixtral's names of projections.
    shared_size: width of an MLP that runs for every token, times the sigmoid of a projection; 0: no such MLP.
    dense: for each layer, True for one MLP of width `dense_size` instead of experts; empty: every layer has experts.
    """

    count: int
    per_token: int
    renormalize: bool
    module: str = "mlp"
    shared_size: int = 0
    dense: tuple[bool, ...] = ()
    dense_size: int = 0


PROJECTIONS = ("query", "key", "value", "output", "gate", "up", "down")
DELTA_PROJECTIONS = ("delta_inputs", "delta_gate", "delta_rate", "delta_decay", "delta_output")
ACTIVATIONS = {"silu": nn.silu, "gelu_tanh": functools.partial(nn.gelu, approximate=True)}


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder, with sizes in units and not bytes, and options of families other than Llama.

    Attributes:
        qkv_bias: queries, keys and values have biases.
        qk_norm: RMSNorm on every head of queries and keys, before the rotation.
        joint_qk_norm: the RMSNorm is over all heads together; requires qk_norm.
        windows: for each layer, the number of tokens that a query attends to, itself included, or None for all tokens;
            empty: every layer attends to all tokens.
        rotary_dim: number of dimensions of each head, from the first, that the layers rotate; None: all.
        rope_layers: for each layer, whether it rotates queries and keys; empty: every layer does.
        local_rope_theta: rotary base of layers with a window, which then use no scaling; None: one base for all.
        activation: activation of the MLP's gate, a key of ACTIVATIONS.
        norm_offset: added to the stored scale of every norm.
        pre_norms: normalize the inputs of attention and MLP.
        post_norms: normalize the outputs of attention and MLP, before they are added to the stream.
        embedding_scale, residual_scale, logit_scale: factors on the embeddings, on the outputs of attention and MLP
            before they are added to the stream, and on the logits.
        attention_scale: factor on the attention scores; None: head_dim ** -0.5.
        lora: adapters; None: no adapters.
        attention_cap, logit_cap: bound c of attention scores and of logits, c · tanh(x / c); None: no bound.
        gated_attention: multiply the output of attention by sigmoid(gate), where `query` projects to each head's query
            and its gate.
        delta: layers with a gated delta net instead of attention; None: every layer has attention.
        fused_projections: checkpoints store query, key and value as one tensor, and gate and up as one.
        experts: experts in layers instead of one MLP; None: one MLP in every layer.
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
    joint_qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    rotary_dim: int | None = None
    rope_layers: tuple[bool, ...] = ()
    local_rope_theta: float | None = None
    activation: str = "silu"
    norm_offset: float = 0.0
    pre_norms: bool = True
    post_norms: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    attention_scale: float | None = None
    attention_cap: float | None = None
    logit_cap: float | None = None
    gated_attention: bool = False
    delta: DeltaNet | None = None
    fused_projections: bool = False
    experts: ExpertOptions | None = None
    lora: Lora | None = None

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kind of each layer."""
        deltas = dense = (False,) * self.num_layers
        if self.delta:
            deltas = self.delta.layers
        if self.experts and self.experts.dense:
            dense = self.experts.dense
        return tuple(itertools.starmap(Kind, zip(deltas, dense, strict=True)))

    @property
    def period(self) -> int:
        """Number of layers after which the kinds repeat, a divisor of `num_layers`; 1 if all layers have one kind."""
        kinds = self.kinds
        count = self.num_layers
        sizes = [size for size in range(1, count + 1) if count % size == 0]
        return next(size for size in sizes if kinds == kinds[:size] * (count // size))

    @property
    def attention_layers(self) -> int:
        """Number of layers with attention."""
        if self.delta is None:
            return self.num_layers
        return self.num_layers - sum(self.delta.layers)

    @property
    def layer_weights(self) -> int:
        """Number of weights in a layer's matmuls, without adapters; the mean if layers differ."""
        if self.experts is None:
            return self._layer_weights(1)
        return self._layer_weights(self.experts.count)

    @property
    def active_layer_weights(self) -> int:
        """Number of weights in a layer's matmuls that run for each token: `layer_weights` without idle experts."""
        if self.experts is None:
            return self._layer_weights(1)
        return self._layer_weights(self.experts.per_token)

    @property
    def idle_weights(self) -> int:
        """Number of weights of experts that do not run for a token, in all layers."""
        return self.num_layers * (self.layer_weights - self.active_layer_weights)

    def _layer_weights(self, experts: int) -> int:
        query_kernels = 2 + self.gated_attention  # query and output, and the query's gate
        heads = (query_kernels * self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        if self.delta:
            net = self.delta
            share = self.attention_layers / self.num_layers
            delta_heads = net.channels + 2 * net.value_heads * net.value_dim + 2 * net.value_heads
            heads = round(share * heads + (1 - share) * delta_heads)
        units = 3 * experts * self.intermediate_size
        if self.experts:
            options = self.experts
            shared = 3 * options.shared_size + (options.shared_size > 0)
            share = sum(options.dense) / self.num_layers
            units = (1 - share) * (options.count + shared + units) + share * 3 * options.dense_size
        return round(self.hidden_size * (heads + units))


def rotary_of(config: DecoderConfig) -> Rotary:
    """Frequencies and factor of the rotary positions: one pair if all layers share it, else one for each layer."""
    size = config.rotary_dim or config.head_dim
    frequencies = scaled_frequencies(config.rope_theta, size, config.rope_scaling).astype(np.float32)
    factor = None
    if config.rope_scaling is not None and config.rope_scaling.attention_factor not in (None, 1.0):
        factor = np.float32(config.rope_scaling.attention_factor)
    if not config.rope_layers and config.local_rope_theta is None:
        return Rotary(frequencies, factor)
    layers = np.tile(frequencies, (config.num_layers, 1))
    is_unscaled = np.zeros(config.num_layers, bool)
    if config.local_rope_theta is not None and config.windows:
        is_local = np.array([window is not None for window in config.windows])
        layers[is_local] = scaled_frequencies(config.local_rope_theta, size, None)
        is_unscaled |= is_local
    if config.rope_layers:
        is_fixed = ~np.array(config.rope_layers)
        layers[is_fixed] = 0.0
        is_unscaled |= is_fixed
    if factor is None:
        return Rotary(layers)
    return Rotary(layers, np.where(is_unscaled, np.float32(1.0), factor))
