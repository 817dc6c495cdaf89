"""One decoder for the Llama shape: RMSNorm, rotary positions, grouped-query attention, SwiGLU, tied or untied head."""

import dataclasses
import functools
import math
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int


class RopeScaling(NamedTuple):
    """How rotary frequencies are stretched for long contexts; `kind` is "linear" or "llama3"."""

    kind: str
    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_max_positions: int = 8192


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder; sizes in units (not bytes)."""

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


class Context(NamedTuple):
    """Keys and values of tokens that come before the ones being processed, for all layers.

    `rows` may be fewer than the batch: each context row then serves batch/rows consecutive rows, which is how one
    prompt is computed once and shared by all completions of its group.
    """

    keys: Float[Array, "layers rows kv_heads length head_dim"]
    values: Float[Array, "layers rows kv_heads length head_dim"]
    mask: Bool[Array, "rows length"]


def rotary_frequencies(config: DecoderConfig) -> np.ndarray:
    """Angular frequency of each pair of head dimensions, in radians per position.

    Reference: RoFormer (arXiv 2104.09864) §3.2; Llama 3.1's piecewise stretching for `llama3`.
    """
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    frequencies = config.rope_theta**-exponent
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies.astype(np.float32)
    stretched = frequencies / scaling.factor
    if scaling.kind == "linear":
        return stretched.astype(np.float32)
    if scaling.kind != "llama3":
        raise ValueError(f"rope_scaling kind {scaling.kind!r} is not known; use 'linear' or 'llama3'")
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    span = scaling.high_frequency_factor - scaling.low_frequency_factor
    keep = np.clip((turns - scaling.low_frequency_factor) / span, 0.0, 1.0)
    return (keep * frequencies + (1 - keep) * stretched).astype(np.float32)


def rotate(
    x: Float[Array, "batch heads time head_dim"], angles: Float[Array, "batch time half"]
) -> Float[Array, "batch heads time head_dim"]:
    """Turns each pair (x_i, x_{i + head_dim/2}) by its angle, in float32."""
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def attend(queries: Float[Array, "batch heads time head_dim"], segments: list) -> Array:
    """Attention of every query over the keys of all segments under one softmax.

    Args:
        queries: rotated queries.
        segments: (keys, values, mask) triples, keys and values [rows, kv_heads, length, head_dim] with rows dividing
            the batch, mask broadcastable to [rows, batch/rows, 1, 1, time, length] and True where attention may look.
    Returns:
        [batch * time, heads * head_dim].
    """
    batch, heads, time, head_dim = queries.shape
    kv_heads = segments[0][0].shape[1]

    def by_row(x, rows):
        return x.reshape(rows, batch // rows, kv_heads, heads // kv_heads, time, -1)

    scores = []
    for keys, _, mask in segments:
        score = jnp.einsum(
            "rnkgtd,rksd->rnkgts", by_row(queries, keys.shape[0]), keys, preferred_element_type=jnp.float32
        )
        score = jnp.where(mask, score * head_dim**-0.5, -1e30)
        scores.append(score.reshape(batch, heads, time, -1))
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1).astype(queries.dtype)

    mixed, start = jnp.zeros_like(queries), 0
    for keys, values, _ in segments:
        rows, length = keys.shape[0], keys.shape[2]
        part = by_row(weights[..., start : start + length], rows)
        mixed += jnp.einsum("rnkgts,rksd->rnkgtd", part, values).reshape(queries.shape)
        start += length
    return mixed.swapaxes(1, 2).reshape(batch * time, heads * head_dim)


class Block(nn.Module):
    """One transformer layer: attention and SwiGLU, each on a normalised input and added to the stream.

    The stream is [batch * time, hidden]: on CPU the gradients of plain matrix products take half the time of those of
    [batch, time, hidden] ones.
    """

    config: DecoderConfig
    dtype: DTypeLike

    @nn.compact
    def __call__(self, hidden, context_keys_values, angles, causal_mask, context_masks):
        config = self.config
        batch, time, _ = angles.shape
        dense = functools.partial(nn.Dense, use_bias=False, dtype=self.dtype)
        norm = functools.partial(nn.RMSNorm, epsilon=config.norm_epsilon, dtype=self.dtype)

        def heads_of(x, count):
            return x.reshape(batch, time, count, config.head_dim).swapaxes(1, 2)

        x = norm(name="attention_norm")(hidden)
        queries = heads_of(dense(config.num_heads * config.head_dim, name="query")(x), config.num_heads)
        keys = heads_of(dense(config.num_kv_heads * config.head_dim, name="key")(x), config.num_kv_heads)
        values = heads_of(dense(config.num_kv_heads * config.head_dim, name="value")(x), config.num_kv_heads)
        keys = rotate(keys, angles)
        segments = [(*pair, mask) for pair, mask in zip(context_keys_values, context_masks, strict=True)]
        mixed = attend(rotate(queries, angles), [*segments, (keys, values, causal_mask)])
        hidden += dense(config.hidden_size, name="output")(mixed)

        x = norm(name="mlp_norm")(hidden)
        gate = nn.silu(dense(config.intermediate_size, name="gate")(x))
        hidden += dense(config.hidden_size, name="down")(gate * dense(config.intermediate_size, name="up")(x))
        return hidden, (keys, values)


class Decoder(nn.Module):
    """Tokens to final hidden states and the layers' keys and values; the head is `logits`, applied in chunks.

    `remat` recomputes each layer in the backward pass, which trades time for memory.
    """

    config: DecoderConfig
    dtype: DTypeLike = jnp.float32
    remat: bool = False

    @nn.compact
    def __call__(
        self,
        tokens: Int[Array, "batch time"],
        positions: Int[Array, "batch time"],
        mask: Bool[Array, "batch time"],
        contexts: tuple[Context, ...] = (),
    ) -> tuple[Float[Array, "batch time hidden"], tuple[Array, Array]]:
        """Runs the layers.

        Args:
            tokens: token ids.
            positions: rotary positions, in tokens from the start of the sequence.
            mask: True where a token is real; padding is never attended to.
            contexts: earlier tokens that every row may attend to.
        Returns:
            Hidden states after the final norm, and (keys, values) of these tokens, each
            [layers, batch, kv_heads, time, head_dim].
        """
        config = self.config
        embed = nn.Embed(
            config.vocab_size,
            config.hidden_size,
            dtype=self.dtype,
            embedding_init=nn.initializers.normal(config.hidden_size**-0.5),
            name="embedding",
        )
        angles = positions[..., None].astype(jnp.float32) * rotary_frequencies(config)
        causal = jnp.tril(jnp.ones((tokens.shape[1], tokens.shape[1]), bool)) & mask[:, None, :]
        block = nn.remat(Block, prevent_cse=False) if self.remat else Block
        layers = nn.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(0, nn.broadcast, nn.broadcast, nn.broadcast),
            length=config.num_layers,
        )
        hidden, keys_values = layers(config, self.dtype, name="layers")(
            embed(tokens.reshape(-1)),
            tuple((context.keys, context.values) for context in contexts),
            angles,
            causal[:, None, None, None],
            tuple(context.mask[:, None, None, None, None, :] for context in contexts),
        )
        hidden = nn.RMSNorm(epsilon=config.norm_epsilon, dtype=self.dtype, name="norm")(hidden)
        return hidden.reshape(*tokens.shape, -1), keys_values


def logits(params: dict, hidden: Float[Array, "*batch hidden"]) -> Float[Array, "*batch vocab"]:
    """Scores of the next token, float32; callers pass few rows at a time, never a whole [batch, time]."""
    if "head" in params:
        scores = hidden @ params["head"]["kernel"].astype(hidden.dtype)
    else:
        scores = jnp.einsum("...e,ve->...v", hidden, params["embedding"]["embedding"].astype(hidden.dtype))
    return scores.astype(jnp.float32)


@functools.partial(jax.jit, static_argnames="config")
def init_params(config: DecoderConfig, key: Array) -> dict:
    """Fresh float32 parameters: a plain nested dict, each layer's arrays stacked on a leading axis."""
    token = jnp.zeros((1, 1), jnp.int32)
    params = Decoder(config).init(key, token, token, jnp.ones((1, 1), bool))["params"]
    if not config.tie_embeddings:
        initializer = nn.initializers.lecun_normal()
        shape = (config.hidden_size, config.vocab_size)
        params["head"] = {"kernel": initializer(jax.random.fold_in(key, 1), shape)}
    return params


def abstract_params(config: DecoderConfig) -> dict:
    """Shapes and dtypes of `init_params`, with nothing computed."""
    return jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
