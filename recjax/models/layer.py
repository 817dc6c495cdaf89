"""One layer of the decoder, on a stream of all tokens of all parts."""

import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array

from recjax.models.attention import attend
from recjax.models.decoder_config import ACTIVATIONS, DecoderConfig
from recjax.models.experts import Experts
from recjax.models.placement import ROWS, constrain, stream_axes
from recjax.models.products import PRODUCT, all_but_kernel, dense_product
from recjax.models.rotary import Rotary, rotate, turns_of


class RMSNorm(nn.Module):
    """x / rms(x) · (scale + offset) over the last axis, computed in float32."""

    config: DecoderConfig
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x):
        offset = self.config.norm_offset
        scale = self.param("scale", nn.initializers.constant(1.0 - offset), x.shape[-1:])
        scale = scale + offset if offset else scale
        return _normalized(x, scale, self.config.norm_epsilon, self.dtype)


# The backward pass saves only the inputs of the operations between two matmuls: writing and reading arrays of a layer's
# width costs more than recomputing these few operations.
_cheap = functools.partial(jax.checkpoint, prevent_cse=False)


@functools.partial(_cheap, static_argnums=(2, 3))
def _normalized(x: Array, scale: Array, epsilon: float, dtype: DTypeLike) -> Array:
    x = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return (x * (jax.lax.rsqrt(mean_square + epsilon) * scale)).astype(dtype)


@functools.partial(_cheap, static_argnums=0)
def _gated(activation: str, gate: Array, up: Array) -> Array:
    gate, up, dtype = gate.astype(jnp.float32), up.astype(jnp.float32), gate.dtype
    return (ACTIVATIONS[activation](gate) * up).astype(dtype)


class PerLayer(NamedTuple):
    """Options that differ between layers, for the scan over layers; None: equal in all layers.

    `experts` are recorded experts of each token of the stream, see `Experts`; None: nothing is recorded.
    """

    rotary: Rotary | None
    windows: np.ndarray | Array | None
    experts: Array | None = None


class Part(NamedTuple):
    """Tokens that attend to the same sources: contexts, earlier parts, and themselves.

    `masks` and `distances` have one entry for each source. `turns` is the argument of `rotate`, or None if layers
    differ; `ids` is the argument of `attend`.
    """

    positions: Array
    turns: tuple[Array, Array] | None
    masks: list[Array]
    distances: list[Array]
    ids: Array | None


class Block(nn.Module):
    """One transformer layer: attention and a gated MLP, each on a normalized input and added to the stream.

    The stream is [all tokens, hidden] for any number of parts: matmuls with more rows are faster, and on a CPU the
    gradients of 2-D matmuls take half the time of gradients of [batch, time, hidden] matmuls.
    """

    config: DecoderConfig
    dtype: DTypeLike
    attention: str

    @nn.compact
    def __call__(self, hidden, context_keys_values, layer, parts, place):
        config = self.config
        shapes = [part.positions.shape for part in parts]
        norm = functools.partial(RMSNorm, config, self.dtype)
        linear = functools.partial(nn.Dense, dtype=self.dtype, dot_general=dense_product, promote_dtype=all_but_kernel)
        rows, units = stream_axes(sum(time for _, time in shapes))

        def dense(x, features, name, use_bias=False):
            y = checkpoint_name(linear(features, use_bias=use_bias, name=name)(x), PRODUCT)
            if config.lora is None or name not in config.lora.targets:
                return y
            low = linear(config.lora.rank, use_bias=False, name=f"{name}_lora_a")(x)
            added = linear(features, use_bias=False, name=f"{name}_lora_b")(low)
            return y + added * (config.lora.alpha / config.lora.rank)

        def heads_of(x, count, name, normed=False):
            x, heads = dense(x, count * config.head_dim, name, config.qkv_bias), (-1, count, config.head_dim)
            x = x if normed and config.joint_qk_norm else x.reshape(heads)
            x = norm(name=f"{name}_norm")(x).reshape(heads) if normed else x
            return [constrain(part.swapaxes(1, 2), ROWS, "tensor") for part in cut(x, shapes)]

        def add_to_stream(hidden, mixed, name):
            mixed = norm(name=name)(mixed) if config.post_norms else mixed
            return hidden + (mixed if config.residual_scale == 1.0 else mixed * config.residual_scale)

        x = constrain(norm(name="attention_norm")(hidden) if config.pre_norms else hidden, rows, units)
        queries = heads_of(x, config.num_heads, "query", config.qk_norm)
        keys = heads_of(x, config.num_kv_heads, "key", config.qk_norm)
        values = heads_of(x, config.num_kv_heads, "value")
        places, mixed = list(context_keys_values), []
        for part, query, key, value in zip(parts, queries, keys, values, strict=True):
            turns = part.turns if layer.rotary is None else turns_of(part.positions, layer.rotary)
            own = rotate(key, turns), value
            if place is not None:
                own = tuple(
                    jax.lax.dynamic_update_slice_in_dim(old, x.astype(old.dtype), place, 2)
                    for old, x in zip(places.pop(), own, strict=True)
                )
            places.append(own)
            masks = part.masks
            if layer.windows is not None:
                near = [distance < layer.windows for distance in part.distances]
                masks = [mask & is_near for mask, is_near in zip(masks, near, strict=True)]
            segments = [(*pair, mask) for pair, mask in zip(places, masks, strict=True)]
            scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
            # In a layer with a window, ids do not suffice to determine the mask.
            alone = {"ids": part.ids if layer.windows is None else None, "kernel": self.attention}
            mixed.append(attend(rotate(query, turns), segments, scale, config.attention_cap, **alone))
        mixed = dense(constrain(joined(mixed, shapes), rows, "tensor"), config.hidden_size, "output")
        hidden = add_to_stream(hidden, mixed, "attention_post_norm")

        x = constrain(norm(name="mlp_norm")(hidden) if config.pre_norms else hidden, rows, units)
        if config.experts is None:
            gate, up = (dense(x, config.intermediate_size, name) for name in ("gate", "up"))
            gated = constrain(_gated(config.activation, gate, up), rows, "tensor")
            mixed = dense(gated, config.hidden_size, "down")
        else:
            real = joined([part.ids.reshape(-1) > 0 for part in parts], shapes)
            run_experts = Experts(config, self.dtype, functools.partial(_gated, config.activation), name="experts")
            mixed = run_experts(x, real, layer.experts)
        hidden = add_to_stream(hidden, mixed, "mlp_post_norm")
        return constrain(hidden, rows, units), places[-1]


def cut(x: Array, shapes: list[tuple[int, int]]) -> list[Array]:
    """The parts of a stream, each [batch, time, ...]; a device holds whole rows of the first part."""
    rows = shapes[0][0]
    sizes = [batch * time // rows for batch, time in shapes]
    pieces = jax.lax.split(x.reshape(rows, sum(sizes), *x.shape[1:]), sizes, axis=1)
    return [piece.reshape(*shape, *x.shape[1:]) for piece, shape in zip(pieces, shapes, strict=True)]


def joined(parts: list[Array], shapes: list[tuple[int, int]]) -> Array:
    """The stream of parts that are [batch * time, ...] each; the inverse of `cut`."""
    rows, kept = shapes[0][0], parts[0].shape[1:]
    pieces = [part.reshape(rows, -1, *kept) for part in parts]
    return jnp.concatenate(pieces, axis=1).reshape(-1, *kept)
