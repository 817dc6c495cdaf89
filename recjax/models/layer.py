"""One layer of the decoder, on the hidden states of all tokens of all sections.

A section is a part of the tokens that attends to the same sources, for example the prompts or the completions. Between
attentions, layers run on the tokens of all sections at once; `cut` and `joined` convert between the two forms:

    sections                          hidden states [tokens, hidden], row after row of the first section
    prompts      [2 rows, 3 tokens]   p p p  a a  a a      first prompt, its two completions
    completions  [4 rows, 2 tokens]   q q q  b b  b b      second prompt, its two completions
"""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from recjax.models.attention import attend
from recjax.models.decoder_config import ACTIVATIONS, DecoderConfig
from recjax.models.delta import DeltaState, causal_convolution, delta_rule
from recjax.models.experts import Experts
from recjax.models.placement import ROWS, Axes, constrain, hidden_axes
from recjax.models.products import PRODUCT, products
from recjax.models.rotary import Rotary, RotaryAngles, rotary_angles, rotate


class KeysValues(NamedTuple):
    """Keys and values of tokens, each [rows, kv_heads, time, head_dim].

    For several layers, each has a first axis for layers or is a tuple over layers, see `Context`.
    """

    keys: Array | tuple[Array, ...]
    values: Array | tuple[Array, ...]


class Cache(NamedTuple):
    """Arrays that all layers keep of tokens, for later tokens.

    keys_values: keys and values of layers with attention.
    states: the `DeltaState` of each layer with a delta net; empty for a model without delta nets.
    """

    keys_values: KeysValues
    states: tuple = ()


class RMSNorm(nn.Module):
    """x / rms(x) · (scale + offset) over the last axis, computed in float32."""

    config: DecoderConfig
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Array) -> Array:
        offset = self.config.norm_offset
        scale = self.param("scale", nn.initializers.constant(1.0 - offset), x.shape[-1:])
        if offset:
            scale = scale + offset
        return _normalized(x, scale, self.config.norm_epsilon, self.dtype)


# The backward pass saves only the inputs of the operations between two matmuls: writing and reading arrays of a layer's
# width costs more than recomputing these few operations.
_cheap = functools.partial(jax.checkpoint, prevent_cse=False)


@functools.partial(_cheap, static_argnums=(2, 3))
def _normalized(x: Array, scale: Array, epsilon: float, dtype: DTypeLike) -> Array:
    x = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return (x * (jax.lax.rsqrt(mean_square + epsilon) * scale)).astype(dtype)


def _gated(activation: str, gate: Array, up: Array) -> Array:
    if activation == "silu":
        return _silu_gated(gate, up)
    return _gated_by(activation, gate, up)


@functools.partial(_cheap, static_argnums=0)
def _gated_by(activation: str, gate: Array, up: Array) -> Array:
    activated = ACTIVATIONS[activation](gate.astype(jnp.float32))
    return (activated * up.astype(jnp.float32)).astype(gate.dtype)


@jax.custom_vjp
def _silu_gated(gate: Array, up: Array) -> Array:
    """silu(gate) · up, with silu(x) = x σ(x)."""
    x = gate.astype(jnp.float32)
    return (nn.silu(x) * up.astype(jnp.float32)).astype(gate.dtype)


def _silu_gated_backward(kept: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    """The gradients of gate and up are σ (1 + x (1 − σ)) · up and x σ, times the output's.

    σ is written as a tanh. As a quotient, XLA would take the forward pass's and keep its arrays in memory until here.
    """
    x, up = (array.astype(jnp.float32) for array in kept)
    gradient = gradient.astype(jnp.float32)
    sigmoid = 0.5 + 0.5 * jnp.tanh(0.5 * x)
    of_gate = gradient * up * (sigmoid * (1.0 + x * (1.0 - sigmoid)))
    of_up = gradient * (x * sigmoid)
    return of_gate.astype(kept[0].dtype), of_up.astype(kept[1].dtype)


_silu_gated.defvjp(lambda gate, up: (_silu_gated(gate, up), (gate, up)), _silu_gated_backward)


class Projection(nn.Module):
    """The kernel of a projection, and its bias or None."""

    inputs: int
    features: int
    has_bias: bool = False

    @nn.compact
    def __call__(self) -> tuple[Float[Array, "inputs features"], Float[Array, " features"] | None]:
        kernel = self.param("kernel", nn.linear.default_kernel_init, (self.inputs, self.features))
        if not self.has_bias:
            return kernel, None
        return kernel, self.param("bias", nn.initializers.zeros, (self.features,))


class PerLayer(NamedTuple):
    """Options that differ between layers, for the scan over layers; None: equal in all layers.

    `experts` are recorded experts of each token, see `Experts`; None: no record.
    """

    rotary: Rotary | None
    windows: np.ndarray | Array | None
    experts: Array | None = None


class Section(NamedTuple):
    """Tokens that attend to the same sources: contexts, earlier sections, and themselves.

    angles: rotary angles of the tokens; None if layers differ.
    masks: for each source, True where these tokens attend to it, [rows, batch/rows, 1, 1, time, length].
    distances: for each source, positions between query and key, in the same shape; empty without windows.
    ids: masks of the sections up to this one, for `attend`.
    """

    positions: Int[Array, "batch time"]
    angles: RotaryAngles | None
    masks: list[Array]
    distances: list[Array]
    ids: tuple[Array, ...]


class Block(nn.Module):
    """One layer: attention or a gated delta net, and a gated MLP. Each reads normalized hidden states and adds to them.

    Hidden states are [all tokens, hidden] for any number of sections: matmuls with more rows are faster, and on a CPU
    the gradients of 2-D matmuls take half the time of gradients of [batch, time, hidden] matmuls.

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
    def __call__(
        self,
        hidden: Float[Array, "tokens hidden"],
        earlier: Any,
        layer: PerLayer,
        sections: list[Section],
        write_at: Int[Array, ""] | None,
    ) -> tuple[Float[Array, "tokens hidden"], KeysValues | DeltaState]:
        rows, units = _hidden_axes(sections)

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

    def _norm(self, x: Array, name: str) -> Array:
        return RMSNorm(self.config, self.dtype, name=name)(x)

    def _input(self, hidden: Float[Array, "tokens hidden"], name: str) -> Float[Array, "tokens hidden"]:
        """The hidden states as attention and MLP read them."""
        if not self.config.pre_norms:
            return hidden
        return self._norm(hidden, name)

    def _added(
        self, hidden: Float[Array, "tokens hidden"], mixed: Float[Array, "tokens hidden"], name: str
    ) -> Float[Array, "tokens hidden"]:
        """The hidden states with an output added."""
        if self.config.post_norms:
            mixed = self._norm(mixed, name)
        if self.config.residual_scale != 1.0:
            mixed = mixed * self.config.residual_scale
        return hidden + mixed

    def _dense(self, x: Float[Array, "tokens inputs"], name: str, features: int) -> Float[Array, "tokens units"]:
        """One of `_projections`, without bias."""
        return self._projections(x, {name: features})[0]

    def _projections(
        self, x: Float[Array, "tokens inputs"], features: dict[str, int], has_bias: bool = False
    ) -> list[Float[Array, "tokens ..."]]:
        """Projections of one input to several numbers of features, by name; each with its adapter if it has one."""
        x = x.astype(self.dtype)
        lora = self.config.lora
        kernels = []
        biases = []
        for name, count in features.items():
            kernel, bias = Projection(x.shape[-1], count, has_bias, name=name)()
            kernels.append(kernel)
            biases.append(bias)
        outputs = []
        projected = products(x, kernels, self.joined_projections)
        for name, bias, y in zip(features, biases, projected, strict=True):
            if bias is not None:
                y = y + bias.astype(self.dtype)
            y = checkpoint_name(y, PRODUCT)
            if lora is not None and name in lora.targets:
                kernel_a, _ = Projection(x.shape[-1], lora.rank, name=f"{name}_lora_a")()
                kernel_b, _ = Projection(lora.rank, features[name], name=f"{name}_lora_b")()
                (low,) = products(x, [kernel_a])
                (added,) = products(low, [kernel_b])
                y = y + added * (lora.alpha / lora.rank)
            outputs.append(y)
        return outputs

    # --- Attention.

    def _attention(
        self,
        x: Float[Array, "tokens hidden"],
        contexts: Sequence[KeysValues],
        layer: PerLayer,
        sections: list[Section],
        write_at: Int[Array, ""] | None,
    ) -> tuple[Float[Array, "tokens hidden"], KeysValues]:
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
            query = query_and_gate[:, :, 0].reshape(-1, query_units)
            gate = query_and_gate[:, :, 1].reshape(-1, query_units)
        queries = self._heads(query, sections, "query_norm")
        keys = self._heads(key, sections, "key_norm")
        values = self._heads(value, sections, None)

        sources = list(contexts)
        outputs = []
        for section, query, key, value in zip(sections, queries, keys, values, strict=True):
            angles = section.angles
            if layer.rotary is not None:
                angles = rotary_angles(section.positions, layer.rotary)
            assert angles is not None
            own = KeysValues(rotate(key, angles), value)
            if write_at is not None:  # the last context has a place for these tokens
                own = jax.tree.map(functools.partial(_written, index=write_at), sources.pop(), own)
            sources.append(own)
            output = self._attended(
                query, angles, sources, section, window=layer.windows, is_sampling=write_at is not None
            )
            outputs.append(output)
        mixed = joined(outputs, _shapes(sections))
        if config.gated_attention:
            assert gate is not None
            mixed = (mixed * nn.sigmoid(gate.astype(jnp.float32))).astype(self.dtype)
        rows, _ = _hidden_axes(sections)
        return self._dense(constrain(mixed, rows, "tensor"), "output", config.hidden_size), sources[-1]

    def _heads(
        self, x: Float[Array, "tokens units"], sections: list[Section], norm_name: str | None
    ) -> list[Float[Array, "batch heads time head_dim"]]:
        """Queries, keys or values of each section by head.

        Args:
            norm_name: name of their norm, if the model has one; None: no norm.
        """
        config = self.config
        by_head = -1, x.shape[-1] // config.head_dim, config.head_dim
        if norm_name is None or not config.qk_norm:
            x = x.reshape(by_head)
        elif config.joint_qk_norm:
            x = self._norm(x, norm_name).reshape(by_head)
        else:
            x = self._norm(x.reshape(by_head), norm_name)
        return [constrain(heads.swapaxes(1, 2), ROWS, "tensor") for heads in cut(x, _shapes(sections))]

    def _attended(
        self,
        query: Float[Array, "batch heads time head_dim"],
        angles: RotaryAngles,
        sources: list[KeysValues],
        section: Section,
        *,
        window: Array | np.ndarray | np.integer | None,
        is_sampling: bool,
    ) -> Float[Array, "tokens units"]:
        """Attention of a section's queries, which this rotates, over the sources' keys and values."""
        config = self.config
        masks = section.masks
        if window is not None:
            are_near = [distance < window for distance in section.distances]
            masks = [mask & is_near for mask, is_near in zip(masks, are_near, strict=True)]
        scale = config.attention_scale
        if scale is None:
            scale = config.head_dim**-0.5
        return attend(
            rotate(query, angles),
            [(source.keys, source.values, mask) for source, mask in zip(sources, masks, strict=True)],
            scale,
            config.attention_cap,
            # In a layer with a window, ids do not suffice to determine the mask.
            ids=section.ids if window is None else None,
            kernel=self.attention,
            is_sampling=is_sampling,
        )

    # --- Delta net.

    def _delta_net(
        self, x: Float[Array, "tokens hidden"], state: DeltaState | None, sections: list[Section]
    ) -> tuple[Float[Array, "tokens hidden"], DeltaState]:
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
        inputs = cut(inputs, shapes)
        rates = cut(rate, shapes)
        decays = cut(decay, shapes)
        outputs = []
        for number, section in enumerate(sections):
            output, state = self._recurred(
                section, inputs[number], rate=rates[number], decay=decays[number], kernel=kernel, state=state
            )
            outputs.append(output)
        plain = dataclasses.replace(self.config, norm_offset=0.0)
        mixed = RMSNorm(plain, jnp.float32, name="delta_norm")(joined(outputs, shapes))
        mixed = mixed.reshape(gate.shape) * nn.silu(gate.astype(jnp.float32))
        rows, _ = _hidden_axes(sections)
        mixed = constrain(mixed.astype(self.dtype), rows, "tensor")
        assert state is not None
        return self._dense(mixed, "delta_output", self.config.hidden_size), state

    def _recurred(
        self,
        section: Section,
        inputs: Float[Array, "batch time channels"],
        *,
        rate: Float[Array, "batch time value_heads"],
        decay: Float[Array, "batch time value_heads"],
        kernel: Float[Array, "channels 1 size"],
        state: DeltaState | None,
    ) -> tuple[Float[Array, "tokens value_heads value_dim"], DeltaState]:
        """The recurrence over a section: its outputs, and the state after it."""
        net = self.config.delta
        assert net is not None
        batch, time = section.positions.shape
        real = section.ids[-1] > 0
        if state is None:
            recurrent = jnp.zeros((batch, net.value_heads, net.key_dim, net.value_dim))
            state = DeltaState(recurrent, jnp.zeros((batch, 1, net.kernel - 1, net.channels), self.dtype))
        # The completions of a prompt all start from the state after the prompt.
        recurrent, window = (jnp.repeat(x, batch // len(x), axis=0) for x in state)
        convolved, window = causal_convolution(inputs, window, kernel.astype(self.dtype), section.positions, real)
        key_units = net.key_heads * net.key_dim
        query, key, value = jnp.split(convolved, (key_units, 2 * key_units), axis=-1)

        def by_head(x: Array, heads: int) -> Float[Array, "batch time heads units"]:
            return constrain(x.reshape(batch, time, heads, -1), ROWS, None, "tensor")

        queries = by_head(query, net.key_heads)
        keys = by_head(key, net.key_heads)
        values = by_head(value, net.value_heads)
        # Padding does not change the state.
        rate = jnp.where(real[..., None], rate, 0.0)
        decay = jnp.where(real[..., None], decay, 0.0)
        starts = (section.positions == 0) & real
        output, recurrent = delta_rule(queries, keys, values, rates=rate, decays=decay, starts=starts, state=recurrent)
        return output.reshape(batch * time, net.value_heads, net.value_dim), DeltaState(recurrent, window)

    # --- MLP.

    def _mlp(
        self,
        x: Float[Array, "tokens hidden"],
        recorded_experts: Int[Array, "tokens per_token"] | None,
        sections: list[Section],
    ) -> Float[Array, "tokens hidden"]:
        """The output of the MLP; in a layer with experts, of the experts and of the MLP that all tokens share."""
        config = self.config
        rows, _ = _hidden_axes(sections)

        def mlp(size: int, prefix: str = "") -> Float[Array, "tokens hidden"]:
            gate, up = self._projections(x, {f"{prefix}gate": size, f"{prefix}up": size})
            gated = constrain(_gated(config.activation, gate, up), rows, "tensor")
            return self._dense(gated, f"{prefix}down", config.hidden_size)

        options = config.experts
        if options is None:
            return mlp(config.intermediate_size)
        if self.is_dense:
            return mlp(options.dense_size)
        real = joined([section.ids[-1].reshape(-1) > 0 for section in sections], _shapes(sections))
        run_experts = Experts(config, self.dtype, functools.partial(_gated, config.activation), name="experts")
        mixed = run_experts(x, real, recorded_experts)
        if not options.shared_size:
            return mixed
        share = nn.sigmoid(self._dense(x, "shared_router", 1))
        return mixed + share * mlp(options.shared_size, "shared_")


def _written(cache: Array, new: Array, index: Int[Array, ""]) -> Array:
    """Keys or values of a context, with those of new tokens written at an index of its time axis."""
    return jax.lax.dynamic_update_slice_in_dim(cache, new.astype(cache.dtype), index, 2)


def _shapes(sections: Sequence[Section]) -> list[tuple[int, ...]]:
    return [section.positions.shape for section in sections]


def _hidden_axes(sections: Sequence[Section]) -> tuple[Axes, Axes]:
    """The mesh axes of the hidden states' rows and units."""
    return hidden_axes(sum(time for _, time in _shapes(sections)))


class Period(nn.Module):
    """The layers after which the kinds of layers repeat, for the scan over repetitions; see `run_layers`."""

    config: DecoderConfig
    dtype: DTypeLike
    attention: str
    joined_projections: bool
    block: type[Block]

    @nn.compact
    def __call__(
        self,
        hidden: Float[Array, "tokens hidden"],
        earlier: tuple,
        options: PerLayer,
        sections: list[Section],
        write_at: Int[Array, ""] | None,
    ) -> tuple[Float[Array, "tokens hidden"], Cache]:
        contexts, states = earlier
        layers = []
        for number, kind in enumerate(self.config.kinds[: self.config.period]):
            layers.append(
                self.block(
                    self.config,
                    self.dtype,
                    self.attention,
                    self.joined_projections,
                    has_delta=kind.has_delta,
                    is_dense=kind.is_dense,
                    name=str(number),
                )
            )
        return run_layers(layers, hidden, contexts, states, options=options, sections=sections, write_at=write_at)


def run_layers(
    layers: Sequence[Block],
    hidden: Float[Array, "tokens hidden"],
    contexts: Sequence[KeysValues],
    states: tuple[DeltaState, ...],
    *,
    options: PerLayer,
    sections: list[Section],
    write_at: Int[Array, ""] | None,
) -> tuple[Float[Array, "tokens hidden"], Cache]:
    """Runs layers in order.

    Args:
        contexts: keys and values of each context, tuples over the layers with attention.
        states: the states of the layers with delta nets; empty at the beginning of all rows.
        options: options of all layers, each with a first axis for layers.
    Returns:
        The hidden states, and the layers' cache as tuples over layers.
    """
    per_layer = [jax.tree.map(operator.itemgetter(number), options) for number in range(len(layers))]
    kept_pairs = []
    kept_states = []
    for layer, layer_options in zip(layers, per_layer, strict=True):
        if layer.has_delta:
            state = None
            if states:
                state = states[len(kept_states)]
            hidden, state = layer(hidden, state, layer_options, sections, None)
            kept_states.append(state)
        else:
            place = len(kept_pairs)
            layer_contexts = [KeysValues(context.keys[place], context.values[place]) for context in contexts]
            hidden, pair = layer(hidden, layer_contexts, layer_options, sections, write_at)
            kept_pairs.append(pair)
    keys = tuple(pair.keys for pair in kept_pairs)
    values = tuple(pair.values for pair in kept_pairs)
    return hidden, Cache(KeysValues(keys, values), tuple(kept_states))


def cut(x: Array, shapes: list[tuple[int, ...]]) -> list[Array]:
    """The sections of [tokens, ...] arrays, each [batch, time, ...]; a device holds whole rows of the first section."""
    rows = shapes[0][0]
    trailing = x.shape[1:]
    sizes = [batch * time // rows for batch, time in shapes]
    pieces = jax.lax.split(x.reshape(rows, sum(sizes), *trailing), sizes, axis=1)
    return [piece.reshape(*shape, *trailing) for piece, shape in zip(pieces, shapes, strict=True)]


def joined(arrays: list[Array], shapes: list[tuple[int, ...]]) -> Array:
    """The [tokens, ...] array of sections that are [batch * time, ...] each; the inverse of `cut`."""
    rows = shapes[0][0]
    trailing = arrays[0].shape[1:]
    pieces = [array.reshape(rows, -1, *trailing) for array in arrays]
    return jnp.concatenate(pieces, axis=1).reshape(-1, *trailing)
