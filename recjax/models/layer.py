"""One layer of the decoder, on a stream of all tokens of all sections."""

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
from recjax.models.placement import ROWS, Axes, constrain, stream_axes
from recjax.models.products import PRODUCT, products
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
    activated = ACTIVATIONS[activation](gate.astype(jnp.float32))
    return (activated * up.astype(jnp.float32)).astype(gate.dtype)


class Projection(nn.Module):
    """The kernel and the bias of a projection; the bias is None without one."""

    inputs: int
    features: int
    has_bias: bool = False

    @nn.compact
    def __call__(self):
        kernel = self.param("kernel", nn.linear.default_kernel_init, (self.inputs, self.features))
        if not self.has_bias:
            return kernel, None
        return kernel, self.param("bias", nn.initializers.zeros, (self.features,))


class PerLayer(NamedTuple):
    """Options that differ between layers, for the scan over layers; None: equal in all layers.

    `experts` are recorded experts of each token of the stream, see `Experts`; None: no record.
    """

    rotary: Rotary | None
    windows: np.ndarray | Array | None
    experts: Array | None = None


class Section(NamedTuple):
    """Tokens that attend to the same sources: contexts, earlier sections, and themselves.

    `masks` and `distances` have one entry for each source. `turns` is the argument of `rotate`, or None if layers
    differ; `ids` is the argument of `attend`: masks of the parts, its own last.
    """

    positions: Array
    turns: tuple[Array, Array] | None
    masks: list[Array]
    distances: list[Array]
    ids: tuple[Array, ...]


class Block(nn.Module):
    """One layer: attention or a gated delta net, and a gated MLP, each on a normalized input and added to the stream.

    The stream is [all tokens, hidden] for any number of sections: matmuls with more rows are faster, and on a CPU the
    gradients of 2-D matmuls take half the time of gradients of [batch, time, hidden] matmuls.

    A layer with attention takes keys and values of all contexts and returns the last source's keys and values. A layer
    with a delta net takes a `DeltaState`, or None at the beginning of all rows, and returns the state after the last
    section.
    """

    config: DecoderConfig
    dtype: DTypeLike
    attention: str
    joined_projections: bool
    has_delta: bool = False
    is_dense: bool = False

    @nn.compact
    def __call__(self, hidden, earlier, layer, sections, write_at):
        rows, units = _stream_axes_of(sections)

        x = constrain(self._input(hidden, "attention_norm"), rows, units)
        if self.has_delta:
            mixed, kept = self._delta_net(x, earlier, sections)
        else:
            mixed, kept = self._attention(x, earlier, layer, sections, write_at)
        hidden = self._added(hidden, mixed, "attention_post_norm")

        x = constrain(self._input(hidden, "mlp_norm"), rows, units)
        mixed = self._mlp(x, layer.experts, sections)
        hidden = self._added(hidden, mixed, "mlp_post_norm")
        return constrain(hidden, rows, units), kept

    def _norm(self, x, name):
        return RMSNorm(self.config, self.dtype, name=name)(x)

    def _input(self, hidden, name):
        """The stream as attention and MLP read it."""
        return self._norm(hidden, name) if self.config.pre_norms else hidden

    def _added(self, hidden, mixed, name):
        """The stream with an output added."""
        mixed = self._norm(mixed, name) if self.config.post_norms else mixed
        scale = self.config.residual_scale
        return hidden + (mixed if scale == 1.0 else mixed * scale)

    def _dense(self, x, name, features):
        """One of `_projections`, without bias."""
        return self._projections(x, {name: features})[0]

    def _projections(self, x, features, use_bias=False):
        """Projections of one input to several numbers of features, by name; each with its adapter if it has one."""
        x = x.astype(self.dtype)
        lora = self.config.lora
        weights = {name: Projection(x.shape[-1], count, use_bias, name=name)() for name, count in features.items()}
        outputs = products(x, [kernel for kernel, _ in weights.values()], self.joined_projections)
        for number, (name, (_, bias)) in enumerate(weights.items()):
            y = outputs[number]
            y = checkpoint_name(y if bias is None else y + bias.astype(self.dtype), PRODUCT)
            if lora is not None and name in lora.targets:
                into, _ = Projection(x.shape[-1], lora.rank, name=f"{name}_lora_a")()
                out_of, _ = Projection(lora.rank, features[name], name=f"{name}_lora_b")()
                (low,) = products(x, [into])
                (added,) = products(low, [out_of])
                y = y + added * (lora.alpha / lora.rank)
            outputs[number] = y
        return outputs

    # --- Attention.

    def _attention(self, x, earlier, layer, sections, write_at):
        """The output of attention, and the keys and values of the last source."""
        config = self.config
        query_units = config.num_heads * config.head_dim
        key_units = config.num_kv_heads * config.head_dim
        features = {
            "query": (1 + config.gated_attention) * query_units,
            "key": key_units,
            "value": key_units,
        }
        query, key, value = self._projections(x, features, config.qkv_bias)
        gate = None
        if config.gated_attention:
            query_and_gate = query.reshape(-1, config.num_heads, 2, config.head_dim)
            query, gate = (query_and_gate[:, :, half].reshape(-1, query_units) for half in (0, 1))
        queries = self._heads(query, sections, "query_norm" if config.qk_norm else None)
        keys = self._heads(key, sections, "key_norm" if config.qk_norm else None)
        values = self._heads(value, sections, None)

        sources = list(earlier)
        outputs = []
        for section, query, key, value in zip(sections, queries, keys, values, strict=True):
            turns = section.turns if layer.rotary is None else turns_of(section.positions, layer.rotary)
            keys_values = rotate(key, turns), value
            if write_at is not None:
                keys_values = tuple(
                    jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), write_at, 2)
                    for old, new in zip(sources.pop(), keys_values, strict=True)
                )
            sources.append(keys_values)
            outputs.append(self._attended(query, turns, sources, section, layer.windows, write_at is not None))
        mixed = joined(outputs, _shapes(sections))
        if config.gated_attention:
            assert gate is not None
            mixed = (mixed * nn.sigmoid(gate.astype(jnp.float32))).astype(self.dtype)
        rows, _ = _stream_axes_of(sections)
        return self._dense(constrain(mixed, rows, "tensor"), "output", config.hidden_size), sources[-1]

    def _heads(self, x, sections, norm_name):
        """Queries, keys or values of each section by head, [batch, heads, time, head_dim]; with the norm of a name."""
        by_head = -1, x.shape[-1] // self.config.head_dim, self.config.head_dim
        if norm_name is None:
            x = x.reshape(by_head)
        else:
            x = x if self.config.joint_qk_norm else x.reshape(by_head)
            x = self._norm(x, norm_name).reshape(by_head)
        return [constrain(heads.swapaxes(1, 2), ROWS, "tensor") for heads in cut(x, _shapes(sections))]

    def _attended(self, query, turns, sources, section, windows, is_sampling):
        """Attention of a section's queries over the sources' keys and values."""
        config = self.config
        masks = section.masks
        if windows is not None:
            are_near = [distance < windows for distance in section.distances]
            masks = [mask & is_near for mask, is_near in zip(masks, are_near, strict=True)]
        segments = [(*keys_values, mask) for keys_values, mask in zip(sources, masks, strict=True)]
        return attend(
            rotate(query, turns),
            segments,
            config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale,
            config.attention_cap,
            # In a layer with a window, ids do not suffice to determine the mask.
            ids=section.ids if windows is None else None,
            kernel=self.attention,
            is_sampling=is_sampling,
        )

    # --- Delta net.

    def _delta_net(self, x, state, sections):
        """The output of the delta net, and the state after the last section."""
        net = self.config.delta
        assert net is not None
        shapes = _shapes(sections)
        features = {
            "delta_inputs": net.channels,
            "delta_gate": net.value_heads * net.value_dim,
            "delta_rate": net.value_heads,
            "delta_decay": net.value_heads,
        }
        inputs, gate, rate, decay = self._projections(x, features)
        kernel = self.param("delta_kernel", nn.initializers.lecun_normal(-1, 0), (net.channels, 1, net.kernel))

        def log_of_uniform(key: Array, shape: tuple[int, ...]) -> Array:
            return jnp.log(jax.random.uniform(key, shape, minval=0.01, maxval=16.0))

        speed = jnp.exp(self.param("delta_log_speed", log_of_uniform, (net.value_heads,)))
        bias = self.param("delta_bias", nn.initializers.ones, (net.value_heads,))
        rate = nn.sigmoid(rate.astype(jnp.float32))
        decay = -speed * nn.softplus(decay.astype(jnp.float32) + bias)
        outputs = []
        pieces = (cut(inputs, shapes), cut(rate, shapes), cut(decay, shapes))
        for section, section_inputs, section_rate, section_decay in zip(sections, *pieces, strict=True):
            output, state = self._recurred(section, section_inputs, section_rate, section_decay, kernel, state)
            outputs.append(output)
        plain = dataclasses.replace(self.config, norm_offset=0.0)
        mixed = RMSNorm(plain, jnp.float32, name="delta_norm")(joined(outputs, shapes))
        mixed = mixed.reshape(gate.shape) * nn.silu(gate.astype(jnp.float32))
        rows, _ = _stream_axes_of(sections)
        mixed = constrain(mixed.astype(self.dtype), rows, "tensor")
        return self._dense(mixed, "delta_output", self.config.hidden_size), state

    def _recurred(self, section, inputs, rate, decay, kernel, state):
        """The recurrence over a section: outputs [batch * time, value_heads, value_dim], and the state after it."""
        net = self.config.delta
        assert net is not None
        batch, time = section.positions.shape
        real = section.ids[-1] > 0
        if state is None:
            recurrent = jnp.zeros((batch, net.value_heads, net.key_dim, net.value_dim))
            state = DeltaState(recurrent, jnp.zeros((batch, 1, net.kernel - 1, net.channels), self.dtype))
        recurrent, window = (jnp.repeat(x, batch // len(x), axis=0) for x in state)
        convolved, window = causal_convolution(inputs, window, kernel.astype(self.dtype), section.positions, real)
        key_units = net.key_heads * net.key_dim
        pieces = jnp.split(convolved, (key_units, 2 * key_units), axis=-1)
        heads = [
            constrain(piece.reshape(batch, time, count, -1), ROWS, None, "tensor")
            for piece, count in zip(pieces, (net.key_heads, net.key_heads, net.value_heads), strict=True)
        ]
        # Padding does not change the state.
        rate, decay = (jnp.where(real[..., None], step, 0.0) for step in (rate, decay))
        queries, keys, values = heads
        output, recurrent = delta_rule(queries, keys, values, rate, decay, (section.positions == 0) & real, recurrent)
        return output.reshape(batch * time, net.value_heads, net.value_dim), DeltaState(recurrent, window)

    # --- MLP.

    def _mlp(self, x, recorded_experts, sections):
        """The output of the MLP, or of the experts in its place, and of the MLP that all tokens share."""
        config = self.config
        rows, _ = _stream_axes_of(sections)

        def mlp(size, prefix=""):
            gate, up = self._projections(x, {f"{prefix}gate": size, f"{prefix}up": size})
            gated = constrain(_gated(config.activation, gate, up), rows, "tensor")
            return self._dense(gated, f"{prefix}down", config.hidden_size)

        options = config.experts
        if options is None or self.is_dense:
            return mlp(config.intermediate_size if options is None else options.dense_size)
        real = joined([section.ids[-1].reshape(-1) > 0 for section in sections], _shapes(sections))
        run_experts = Experts(config, self.dtype, functools.partial(_gated, config.activation), name="experts")
        mixed = run_experts(x, real, recorded_experts)
        if not options.shared_size:
            return mixed
        share = nn.sigmoid(self._dense(x, "shared_router", 1))
        return mixed + share * mlp(options.shared_size, "shared_")


def _shapes(sections: Sequence[Section]) -> list[tuple[int, ...]]:
    return [section.positions.shape for section in sections]


def _stream_axes_of(sections: Sequence[Section]) -> tuple[Axes, Axes]:
    """The mesh axes of the stream's rows and units."""
    return stream_axes(sum(time for _, time in _shapes(sections)))


class Period(nn.Module):
    """The layers after which the kinds of layers repeat, for the scan over repetitions; see `run_layers`."""

    config: DecoderConfig
    dtype: DTypeLike
    attention: str
    joined_projections: bool
    block: type[Block]

    @nn.compact
    def __call__(self, hidden, earlier, options, sections, write_at):
        shared = self.config, self.dtype, self.attention, self.joined_projections
        kinds = self.config.kinds[: self.config.period]
        layers = [self.block(*shared, *kind, name=str(number)) for number, kind in enumerate(kinds)]
        each = [jax.tree.map(lambda option, number=number: option[number], options) for number in range(len(kinds))]
        return run_layers(layers, hidden, earlier, each, sections, write_at)


def run_layers(
    layers: Sequence[Block],
    hidden: Array,
    earlier: tuple,
    options: Sequence[PerLayer],
    sections: list[Section],
    write_at: Any,
) -> tuple[Array, tuple]:
    """Runs layers in order.

    Args:
        earlier: (keys, values) of each context, tuples over the layers with attention; and the states of the layers
            with delta nets, empty at the beginning of all rows.
        options: options of each layer.
    Returns:
        The stream, and tuples over layers: keys and values, and states if there are any.
    """
    contexts, states = earlier
    new_pairs = []
    new_states = []
    for layer, option in zip(layers, options, strict=True):
        if layer.has_delta:
            state = states[len(new_states)] if states else None
            hidden, state = layer(hidden, state, option, sections, None)
            new_states.append(state)
        else:
            pairs = [(keys[len(new_pairs)], values[len(new_pairs)]) for keys, values in contexts]
            hidden, pair = layer(hidden, pairs, option, sections, write_at)
            new_pairs.append(pair)
    return hidden, (*zip(*new_pairs, strict=True), *([tuple(new_states)] if new_states else []))


def cut(x: Array, shapes: list[tuple[int, ...]]) -> list[Array]:
    """The sections of a stream, each [batch, time, ...]; a device holds whole rows of the first section."""
    rows = shapes[0][0]
    sizes = [batch * time // rows for batch, time in shapes]
    pieces = jax.lax.split(x.reshape(rows, sum(sizes), *x.shape[1:]), sizes, axis=1)
    return [piece.reshape(*shape, *x.shape[1:]) for piece, shape in zip(pieces, shapes, strict=True)]


def joined(arrays: list[Array], shapes: list[tuple[int, ...]]) -> Array:
    """The stream of sections that are [batch * time, ...] each; the inverse of `cut`."""
    rows = shapes[0][0]
    trailing = arrays[0].shape[1:]
    pieces = [array.reshape(rows, -1, *trailing) for array in arrays]
    return jnp.concatenate(pieces, axis=1).reshape(-1, *trailing)
