"""One decoder for Llama and its relatives: RMSNorm, rotary positions, grouped-query attention, gated MLP."""

import dataclasses
import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from recjax.models.attention import attend, attention_mask, capped, pairs
from recjax.models.placement import ROWS, constrain, constrain_params, stream_axes
from recjax.models.products import all_but_kernel, dense_product, product
from recjax.models.rotary import RopeScaling, rotate, stretched


class Lora(NamedTuple):
    """Adapters of rank `rank` beside the projections named in `targets`: x W + (alpha / rank) x A B.

    Reference: arXiv 2106.09685 §4.1.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]


PROJECTIONS = ("query", "key", "value", "output", "gate", "up", "down")
PRODUCT = "product"  # the name of what projections give
# What the forward pass keeps of a layer, beside its input, where the backward pass computes the rest again.
REMAT = {
    "none": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.save_only_these_names(PRODUCT),
    "full": jax.checkpoint_policies.nothing_saveable,
}
ACTIVATIONS = {"silu": nn.silu, "gelu_tanh": functools.partial(nn.gelu, approximate=True)}


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder (sizes in units, not bytes), and what other families do that Llama does not.

    Attributes:
        qkv_bias: queries, keys and values have biases.
        qk_norm: RMSNorm on every head of queries and keys, before they are rotated.
        windows: for each layer, how many tokens a query looks back on, itself included, or None for all; empty: all.
        rope_layers: for each layer, whether it rotates queries and keys; empty: all do.
        local_rope_theta: rotary base of the layers with a window, which then take no scaling; None: as the others.
        activation: of the MLP's gate, a key of ACTIVATIONS.
        norm_offset: added to the stored scale of every norm.
        post_norms: the outputs of attention and MLP are normalised too, before they are added to the stream.
        scale_embeddings: embeddings are multiplied by sqrt(hidden_size).
        attention_scale: factor on the attention scores; None: head_dim ** -0.5.
        lora: adapters, for those who train nothing else.
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
        """Weights in the matrix products of a layer, adapters left out."""
        heads = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        return self.hidden_size * (heads + 3 * self.intermediate_size)


class Context(NamedTuple):
    """Keys and values of tokens that come before the ones being processed, for all layers.

    `rows` may be fewer than the batch: each context row then serves batch/rows consecutive rows, which is how one
    prompt is computed once and shared by all completions of its group. `mask` and `positions` are as the decoder's.
    An unrolled decoder takes keys and values as tuples of each layer's [rows, kv_heads, length, head_dim].
    """

    keys: Float[Array, "layers rows kv_heads length head_dim"] | tuple[Array, ...]
    values: Float[Array, "layers rows kv_heads length head_dim"] | tuple[Array, ...]
    mask: Bool[Array, "rows length"] | Int[Array, "rows length"]
    positions: Int[Array, "rows length"]


def rotary_frequencies(config: DecoderConfig) -> np.ndarray:
    """Angular frequency of each pair of head dimensions, in radians per position.

    Returns:
        [head_dim/2], or [layers, head_dim/2] where layers differ; frequency 0 leaves a layer unrotated.
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


class RMSNorm(nn.Module):
    """x / rms(x) · (scale + offset) over the last axis, computed in float32."""

    config: DecoderConfig
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x):
        offset = self.config.norm_offset
        scale = self.param("scale", nn.initializers.constant(1.0 - offset), x.shape[-1:])
        scale = scale + offset if offset else scale
        return _normalised(x, scale, self.config.norm_epsilon, self.dtype)


# Of what stands between two products the backward pass keeps the inputs alone: arrays of a layer's width cost more to
# write and read than these few operations on them.
_cheap = functools.partial(jax.checkpoint, prevent_cse=False)


@functools.partial(_cheap, static_argnums=(2, 3))
def _normalised(x: Array, scale: Array, epsilon: float, dtype: DTypeLike) -> Array:
    x = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return (x * (jax.lax.rsqrt(mean_square + epsilon) * scale)).astype(dtype)


@functools.partial(_cheap, static_argnums=0)
def _gated(activation: str, gate: Array, up: Array) -> Array:
    return ACTIVATIONS[activation](gate) * up


class PerLayer(NamedTuple):
    """What differs from layer to layer, scanned over; None where all layers are alike, which costs nothing."""

    frequencies: np.ndarray | Array | None
    windows: np.ndarray | Array | None


class Block(nn.Module):
    """One transformer layer: attention and a gated MLP, each on a normalised input and added to the stream.

    The stream is [batch * time, hidden]: on CPU the gradients of plain matrix products take half the time of those of
    [batch, time, hidden] ones.
    """

    config: DecoderConfig
    dtype: DTypeLike
    attention: str

    @nn.compact
    def __call__(self, hidden, context_keys_values, layer, angles, masks, distances, ids, place):
        config = self.config
        batch, time, _ = angles.shape
        norm = functools.partial(RMSNorm, config, self.dtype)
        linear = functools.partial(nn.Dense, dtype=self.dtype, dot_general=dense_product, promote_dtype=all_but_kernel)
        rows, units = stream_axes(time)

        def dense(x, features, name, use_bias=False):
            y = checkpoint_name(linear(features, use_bias=use_bias, name=name)(x), PRODUCT)
            if config.lora is None or name not in config.lora.targets:
                return y
            low = linear(config.lora.rank, use_bias=False, name=f"{name}_lora_a")(x)
            added = linear(features, use_bias=False, name=f"{name}_lora_b")(low)
            return y + added * (config.lora.alpha / config.lora.rank)

        if layer.frequencies is not None:
            angles = angles * layer.frequencies
        if layer.windows is not None:
            masks = [mask & (distance < layer.windows) for mask, distance in zip(masks, distances, strict=True)]

        def heads_of(x, count, name):
            x = dense(x, count * config.head_dim, name, config.qkv_bias)
            return constrain(x.reshape(batch, time, count, config.head_dim).swapaxes(1, 2), ROWS, "tensor")

        x = constrain(norm(name="attention_norm")(hidden), rows, units)
        queries = heads_of(x, config.num_heads, "query")
        keys = heads_of(x, config.num_kv_heads, "key")
        values = heads_of(x, config.num_kv_heads, "value")
        if config.qk_norm:
            queries, keys = norm(name="query_norm")(queries), norm(name="key_norm")(keys)
        keys = rotate(keys, angles)
        own = keys, values
        if place is not None:
            *context_keys_values, held = context_keys_values
            own = tuple(
                jax.lax.dynamic_update_slice_in_dim(x, new.astype(x.dtype), place, 2)
                for x, new in zip(held, own, strict=True)
            )
        segments = [(*pair, mask) for pair, mask in zip([*context_keys_values, own], masks, strict=True)]
        scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        # The mask of a layer with a window is made of more than ids.
        alone = {"ids": ids if layer.windows is None else None, "kernel": self.attention}
        mixed = attend(rotate(queries, angles), segments, scale, config.attention_cap, **alone)
        mixed = dense(constrain(mixed, rows, "tensor"), config.hidden_size, "output")
        hidden += norm(name="attention_post_norm")(mixed) if config.post_norms else mixed

        x = constrain(norm(name="mlp_norm")(hidden), rows, units)
        gate, up = (dense(x, config.intermediate_size, name) for name in ("gate", "up"))
        gated = constrain(_gated(config.activation, gate, up), rows, "tensor")
        mixed = dense(gated, config.hidden_size, "down")
        hidden += norm(name="mlp_post_norm")(mixed) if config.post_norms else mixed
        return constrain(hidden, rows, units), own


class Decoder(nn.Module):
    """Tokens to final hidden states and the layers' keys and values; the head is `logits`, applied in chunks.

    `remat`, a key of REMAT, trades time of the backward pass for memory. `unrolled` writes the layers out instead of
    scanning over them: parameters are `recjax.models.unrolling.unrolled_params`, keys and values are tuples over
    layers. `attention` is one of recjax.models.attention.KERNELS. `cache_dtype`: of the room that a sampler makes
    for the keys and values of what it samples; None: `dtype`.
    """

    config: DecoderConfig
    dtype: DTypeLike = jnp.float32
    remat: str = "none"
    unrolled: bool = False
    attention: str = "plain"
    cache_dtype: DTypeLike | None = None

    @nn.compact
    def __call__(
        self,
        tokens: Int[Array, "batch time"],
        positions: Int[Array, "batch time"],
        mask: Bool[Array, "batch time"] | Int[Array, "batch time"],
        contexts: tuple[Context, ...] = (),
        place: Int[Array, ""] | None = None,
        prefixes: Int[Array, "batch time"] | None = None,
    ) -> tuple[Float[Array, "batch time hidden"], tuple]:
        """Runs the layers.

        Args:
            tokens: token ids.
            positions: in tokens from the start of the token's own sequence; they rotate, and they measure windows.
            mask: True where a token is real; padding is never attended to. For several sequences packed into a row:
                integer ids, 0 at padding, and a token attends to tokens of its own id alone.
            contexts: earlier tokens that every row may attend to.
            place: where keys and values of these tokens are written in the last context, whose mask and positions are
                as they are after that: a loop that reads what it has just written needs no copy. None: nowhere.
            prefixes: where `mask` is of ids, another id that each token attends to as well, of a prompt that several
                sequences of its row go on from. None: none has one.
        Returns:
            Hidden states after the final norm, and (keys, values) of these tokens, each
            [layers, batch, kv_heads, time, head_dim], or a tuple over layers where `unrolled`; with `place`, those of
            the last context.
        """
        config = self.config
        embed = nn.Embed(
            config.vocab_size,
            config.hidden_size,
            dtype=self.dtype,
            embedding_init=nn.initializers.normal(config.hidden_size**-0.5),
            name="embedding",
        )
        rows, units = stream_axes(tokens.shape[1])
        # Rows that are split along "fsdp" need whole vectors; looked up in parts, they would first lie everywhere.
        table = constrain(embed.embedding.astype(self.dtype), "tensor", units)
        embedded = constrain(jnp.take(table, tokens.reshape(-1), axis=0), rows, units)
        if config.scale_embeddings:
            embedded *= jnp.asarray(config.hidden_size**0.5, self.dtype)

        frequencies, angles = rotary_frequencies(config), positions[..., None].astype(jnp.float32)
        if frequencies.ndim == 1:
            frequencies, angles = None, angles * frequencies
        sources = [(context.mask, context.positions) for context in contexts]
        if place is None:
            sources.append((mask, positions))
        masks = [attention_mask(mask, theirs) for theirs, _ in sources]
        if place is None:
            if prefixes is not None:
                masks[-1] |= attention_mask(prefixes, mask)
            masks[-1] &= jnp.tril(jnp.ones((tokens.shape[1], tokens.shape[1]), bool))
        windows, distances = None, []
        if config.windows:
            windows = np.array([window or np.iinfo(np.int32).max for window in config.windows], np.int32)
            distances = [jnp.subtract(*pairs(positions, theirs)) for _, theirs in sources]

        block = Block
        if self.remat != "none":
            block = nn.remat(Block, prevent_cse=False, policy=REMAT[self.remat])
        ids = mask if prefixes is None else None
        keys_values = tuple((context.keys, context.values) for context in contexts)
        per_layer = PerLayer(frequencies, windows)
        if self.unrolled:
            hidden, new = embedded, []
            for layer in range(config.num_layers):
                own = [(keys[layer], values[layer]) for keys, values in keys_values]
                options = PerLayer(*(None if option is None else option[layer] for option in per_layer))
                one = block(config, self.dtype, self.attention, name=f"layer_{layer}")
                hidden, pair = one(hidden, own, options, angles, masks, distances, ids, place)
                new.append(pair)
            keys_values = tuple(zip(*new, strict=True))
        else:
            layers = nn.scan(
                block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=(0, 0, *(nn.broadcast,) * 5),
                length=config.num_layers,
            )
            scanned = layers(config, self.dtype, self.attention, name="layers")
            hidden, keys_values = scanned(embedded, keys_values, per_layer, angles, masks, distances, ids, place)
        hidden = RMSNorm(config, self.dtype, name="norm")(hidden)
        return hidden.reshape(*tokens.shape, -1), keys_values


def logits(config: DecoderConfig, params: dict, hidden: Float[Array, "*batch hidden"]) -> Float[Array, "*batch vocab"]:
    """Scores of the next token, float32; callers pass few rows at a time, never a whole [batch, time]."""
    subscripts = "re,ev->rv" if "head" in params else "re,ve->rv"
    weights = params["head"]["kernel"] if "head" in params else params["embedding"]["embedding"]
    rows = hidden.reshape(-1, hidden.shape[-1])
    scores = product(subscripts, rows, weights, jnp.float32)
    return capped(scores.reshape(*hidden.shape[:-1], -1), config.logit_cap)


@functools.partial(jax.jit, static_argnames="config")
def init_params(config: DecoderConfig, key: Array) -> dict:
    """Fresh float32 parameters: a plain nested dict, each layer's arrays stacked on a leading axis."""
    token = jnp.zeros((1, 1), jnp.int32)
    params = Decoder(config).init(key, token, token, jnp.ones((1, 1), bool))["params"]
    if not config.tie_embeddings:
        initializer = nn.initializers.lecun_normal()
        shape = (config.hidden_size, config.vocab_size)
        params["head"] = {"kernel": initializer(jax.random.fold_in(key, 1), shape)}
    return constrain_params(params)


def abstract_params(config: DecoderConfig) -> dict:
    """Shapes and dtypes of `init_params`, with nothing computed."""
    return jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
