"""One layer of the decoder, on a stream of all tokens of all parts."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array

from recjax.models.attention import attend
from recjax.models.decoder_config import ACTIVATIONS, DecoderConfig
from recjax.models.delta import DeltaState, causal_convolution, delta_rule
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
    """One layer: attention or a gated delta net, and a gated MLP, each on a normalized input and added to the stream.

    The stream is [all tokens, hidden] for any number of parts: matmuls with more rows are faster, and on a CPU the
    gradients of 2-D matmuls take half the time of gradients of [batch, time, hidden] matmuls.

    A layer with attention takes keys and values of all contexts and returns those of the last source. A layer with a
    delta net takes a `DeltaState`, or None at the beginning of all rows, and returns the state after the last part.
    """

    config: DecoderConfig
    dtype: DTypeLike
    attention: str
    has_delta: bool = False

    @nn.compact
    def __call__(self, hidden, earlier, layer, parts, place):
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

        def heads_of(x, name, normed=False):
            heads = -1, x.shape[-1] // config.head_dim, config.head_dim
            x = x if normed and config.joint_qk_norm else x.reshape(heads)
            x = norm(name=f"{name}_norm")(x).reshape(heads) if normed else x
            return [constrain(part.swapaxes(1, 2), ROWS, "tensor") for part in cut(x, shapes)]

        def add_to_stream(hidden, mixed, name):
            mixed = norm(name=name)(mixed) if config.post_norms else mixed
            return hidden + (mixed if config.residual_scale == 1.0 else mixed * config.residual_scale)

        def attention(x):
            of_queries, of_keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
            if config.gated_attention:
                both = dense(x, 2 * of_queries, "query", config.qkv_bias).reshape(
                    -1, config.num_heads, 2, config.head_dim
                )
                query, gate = (both[:, :, which].reshape(-1, of_queries) for which in (0, 1))
            else:
                query = dense(x, of_queries, "query", config.qkv_bias)
            queries = heads_of(query, "query", config.qk_norm)
            keys = heads_of(dense(x, of_keys, "key", config.qkv_bias), "key", config.qk_norm)
            values = heads_of(dense(x, of_keys, "value", config.qkv_bias), "value")
            places, mixed = list(earlier), []
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
                alone["is_sampling"] = place is not None
                mixed.append(attend(rotate(query, turns), segments, scale, config.attention_cap, **alone))
            mixed = joined(mixed, shapes)
            if config.gated_attention:
                mixed = (mixed * nn.sigmoid(gate.astype(jnp.float32))).astype(self.dtype)
            return dense(constrain(mixed, rows, "tensor"), config.hidden_size, "output"), places[-1]

        def delta_net(x):
            net, state, mixed = config.delta, earlier, []
            of_keys, of_values = net.key_heads * net.key_dim, net.value_heads * net.value_dim
            inputs, gate = dense(x, net.channels, "delta_inputs"), dense(x, of_values, "delta_gate")
            kernel = self.param("delta_kernel", nn.initializers.lecun_normal(-1, 0), (net.channels, 1, net.kernel))

            def log_of_uniform(key: Array, shape: tuple[int, ...]) -> Array:
                return jnp.log(jax.random.uniform(key, shape, minval=0.01, maxval=16.0))

            speed = jnp.exp(self.param("delta_log_speed", log_of_uniform, (net.value_heads,)))
            bias = self.param("delta_bias", nn.initializers.ones, (net.value_heads,))
            rate = nn.sigmoid(dense(x, net.value_heads, "delta_rate").astype(jnp.float32))
            decay = -speed * nn.softplus(dense(x, net.value_heads, "delta_decay").astype(jnp.float32) + bias)
            for part, *each in zip(parts, *(cut(y, shapes) for y in (inputs, rate, decay)), strict=True):
                (batch, time), real = part.positions.shape, part.ids > 0
                if state is None:
                    recurrent = jnp.zeros((batch, net.value_heads, net.key_dim, net.value_dim))
                    state = DeltaState(recurrent, jnp.zeros((batch, 1, net.kernel - 1, net.channels), self.dtype))
                recurrent, window = (jnp.repeat(x, batch // len(x), axis=0) for x in state)
                its_inputs, *steps = each
                convolved, window = causal_convolution(
                    its_inputs, window, kernel.astype(self.dtype), part.positions, real
                )
                pieces = jnp.split(convolved, (of_keys, 2 * of_keys), axis=-1)
                heads = [
                    constrain(piece.reshape(batch, time, count, -1), ROWS, None, "tensor")
                    for piece, count in zip(pieces, (net.key_heads, net.key_heads, net.value_heads), strict=True)
                ]
                steps = [jnp.where(real[..., None], step, 0.0) for step in steps]  # padding leaves the state as it is
                found, recurrent = delta_rule(*heads, *steps, (part.positions == 0) & real, recurrent)
                state = DeltaState(recurrent, window)
                mixed.append(found.reshape(batch * time, net.value_heads, net.value_dim))
            plain = dataclasses.replace(config, norm_offset=0.0)
            mixed = RMSNorm(plain, jnp.float32, name="delta_norm")(joined(mixed, shapes))
            mixed = mixed.reshape(-1, of_values) * nn.silu(gate.astype(jnp.float32))
            return dense(constrain(mixed.astype(self.dtype), rows, "tensor"), config.hidden_size, "delta_output"), state

        x = constrain(norm(name="attention_norm")(hidden) if config.pre_norms else hidden, rows, units)
        mixed, kept = delta_net(x) if self.has_delta else attention(x)
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
        return constrain(hidden, rows, units), kept


class Period(nn.Module):
    """The layers after which the kinds of layers repeat, for the scan over repetitions; see `run_layers`."""

    config: DecoderConfig
    dtype: DTypeLike
    attention: str
    block: type[Block]

    @nn.compact
    def __call__(self, hidden, earlier, options, parts, place):
        kinds, shared = self.config.delta.layers[: self.config.period], (self.config, self.dtype, self.attention)
        layers = [self.block(*shared, kind, name=str(number)) for number, kind in enumerate(kinds)]
        return run_layers(layers, hidden, earlier, [options] * len(layers), parts, place)


def run_layers(
    layers: Sequence[Block], hidden: Array, earlier: tuple, options: Sequence[PerLayer], parts: list[Part], place: Any
) -> tuple[Array, tuple]:
    """Runs layers one after the other.

    Args:
        earlier: (keys, values) of each context, tuples over the layers with attention; and the states of the layers
            with delta nets, empty at the beginning of all rows.
        options: options of each layer.
    Returns:
        The stream, and tuples over layers: keys and values, and states if there are any.
    """
    (keys_values, states), new, kept = earlier, [], []
    for layer, option in zip(layers, options, strict=True):
        if layer.has_delta:
            hidden, state = layer(hidden, states[len(kept)] if states else None, option, parts, None)
            kept.append(state)
        else:
            own = [(keys[len(new)], values[len(new)]) for keys, values in keys_values]
            hidden, pair = layer(hidden, own, option, parts, place)
            new.append(pair)
    return hidden, (*zip(*new, strict=True), *([tuple(kept)] if kept else []))


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
