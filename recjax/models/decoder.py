"""One decoder for Llama and its relatives: RMSNorm, rotary positions, attention or delta nets, gated MLP."""

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from recjax.models.attention import ATTENTION, CUDNN_FORWARD, capped, pairs, self_attention_mask
from recjax.models.decoder_config import DecoderConfig, rotary_of
from recjax.models.experts import NO_RECORD
from recjax.models.layer import (
    PRODUCT,
    Block,
    Cache,
    KeysValues,
    Period,
    PerLayer,
    RMSNorm,
    Section,
    cut,
    joined,
    run_layers,
)
from recjax.models.placement import constrain, constrain_params, hidden_axes
from recjax.models.products import product
from recjax.models.rotary import RotaryAngles, rotary_angles


def _is_cudnn_forward(primitive: Any, *_: Any, **__: Any) -> bool:
    """True for cuDNN's forward pass: its backward pass reads the outputs, and JAX gives them no checkpoint name."""
    return primitive.name.startswith(CUDNN_FORWARD)


# Activations that the forward pass saves in addition to a layer's input; the backward pass recomputes all others.
REMAT = {
    "none": jax.checkpoint_policies.everything_saveable,
    "attention": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.save_only_these_names(PRODUCT, ATTENTION), _is_cudnn_forward
    ),
    "dots": jax.checkpoint_policies.save_only_these_names(PRODUCT),
    "full": jax.checkpoint_policies.nothing_saveable,
}


class Context(NamedTuple):
    """Keys and values of earlier tokens, for all layers with attention.

    A context may have fewer rows than the batch: each context row then serves batch/rows consecutive rows, so that a
    prompt is run once for all completions of the group. `mask` is True at real tokens. An unrolled decoder takes keys
    and values as tuples of [rows, kv_heads, length, head_dim] arrays, one a layer. If there are several kinds of
    layers, a scanned decoder takes tuples over the layers of a period, of arrays of all periods. `states` has the
    states of layers with delta nets, in the same form; only the last context's states are read.
    """

    keys: Float[Array, "layers rows kv_heads length head_dim"] | tuple[Array, ...]
    values: Float[Array, "layers rows kv_heads length head_dim"] | tuple[Array, ...]
    mask: Bool[Array, "rows length"]
    positions: Int[Array, "rows length"]
    states: tuple = ()


class DecoderTokens(NamedTuple):
    """Token ids with their positions and mask, each [batch, time]; see `Decoder.__call__`."""

    ids: Array
    positions: Array
    mask: Array
    experts: Array | None = None


class Decoder(nn.Module):
    """Maps tokens to final hidden states and to the layers' keys and values; `logits` applies the head in chunks.

    Attributes:
        remat: a key of REMAT; trades time of the backward pass for memory.
        unrolled: write the layers out instead of scanning over them. Parameters are then
            `recjax.models.unrolling.unrolled_params`, and keys and values are tuples over layers.
        attention: one of recjax.models.attention.KERNELS.
        joined_projections: see `joins` of recjax.models.products.products.
        cache_dtype: dtype of a sampler's key-value cache; None: `dtype`.
        replays_routing: sampling records the experts of each token, and scoring uses recorded experts.
    """

    config: DecoderConfig
    dtype: DTypeLike = jnp.float32
    remat: str = "none"
    unrolled: bool = False
    attention: str = "plain"
    cache_dtype: DTypeLike | None = None
    replays_routing: bool = False
    joined_projections: bool = False

    if TYPE_CHECKING:  # flax makes modules hashable

        def __hash__(self) -> int: ...

    def __call__(
        self,
        tokens: Int[Array, "batch time"],
        positions: Int[Array, "batch time"],
        mask: Bool[Array, "batch time"] | Int[Array, "batch time"],
        contexts: tuple[Context, ...] = (),
        write_at: Int[Array, ""] | None = None,
        angles: RotaryAngles | None = None,
        experts: Int[Array, "batch time layers per_token"] | None = None,
    ) -> tuple[Float[Array, "batch time hidden"], Cache]:
        """Runs the layers.

        Args:
            tokens: token ids.
            positions: number of tokens before each token in its own sequence; rotary embeddings and windows use them.
            mask: True at real tokens; no token attends to padding. For several sequences packed into a row: integers,
                for each token the index after the last token that attends to it; 0 at padding.
            contexts: earlier tokens that every row may attend to.
            write_at: index in the last context at which the keys and values of these tokens are written; the context's
                mask and positions already include them. A sampling loop so updates its cache without a copy. None: do
                not write.
            angles: `rotary_angles(positions)`, if the caller has them; None: compute them here.
            experts: experts of each token; `NO_RECORD` where the router chooses; None: the router chooses everywhere.
        Returns:
            Hidden states after the final norm, and the cache of these tokens: keys and values, each
            [layers, batch, kv_heads, time, head_dim], or in the form of a context's; with `write_at`, the keys and
            values of the last context. States of delta nets are those after these tokens.
        """
        part = DecoderTokens(tokens, positions, mask, experts)
        (hidden,), cache = self.run((part,), contexts, write_at, angles)
        return hidden, cache

    def rotary_angles(self, positions: Int[Array, "batch time"]) -> RotaryAngles | None:
        """Rotary angles of tokens at these positions; None if layers have different frequencies.

        Sampling loops compute them before the loop, as XLA would otherwise compute them in every layer.
        """
        rotary = rotary_of(self.config)
        if rotary.frequencies.ndim > 1:
            return None
        return rotary_angles(positions, rotary)

    def run_groups(
        self, prompts: DecoderTokens, completions: DecoderTokens
    ) -> tuple[Float[Array, "prompts prompt_time hidden"], Float[Array, "batch time hidden"]]:
        """Hidden states of prompts and of their completions, in one pass that runs each prompt once.

        Args:
            completions: batch/prompts consecutive rows for each prompt.
        """
        (prompt_hidden, completion_hidden), _ = self.run((prompts, completions))
        return prompt_hidden, completion_hidden

    @nn.compact
    def run(
        self,
        parts: tuple[DecoderTokens, ...],
        contexts: tuple[Context, ...] = (),
        write_at: Int[Array, ""] | None = None,
        angles: RotaryAngles | None = None,
    ) -> tuple[list[Float[Array, "batch time hidden"]], Cache]:
        """Runs the layers on several parts; each part also attends to all earlier parts.

        Layers run on the tokens of all parts at once, see `recjax.models.layer`; each part is a section there.

        Args:
            parts: the number of rows of each part is a multiple of the number of rows of every earlier part.
            contexts, write_at, angles: see `__call__`; the last two require a single part.
        Returns:
            Hidden states of each part; the cache of the last part, as `__call__` returns it.
        """
        embedded = self._embedded(parts)
        sections = self._sections(parts, contexts, write_at is not None, angles)
        hidden, cache = self._run_layers(embedded, contexts, self._per_layer(parts), sections, write_at)
        hidden = RMSNorm(self.config, self.dtype, name="norm")(hidden)
        return cut(hidden, [tokens.ids.shape for tokens in parts]), cache

    def _embedded(self, parts: tuple[DecoderTokens, ...]) -> Float[Array, "tokens hidden"]:
        """The embeddings of all parts' tokens."""
        config = self.config
        shapes = [tokens.ids.shape for tokens in parts]
        embed = nn.Embed(
            config.vocab_size,
            config.hidden_size,
            dtype=self.dtype,
            embedding_init=nn.initializers.normal(config.hidden_size**-0.5),
            name="embedding",
        )
        rows, units = hidden_axes(sum(time for _, time in shapes))
        # Rows split along "fsdp" need all units of their embeddings; a lookup in a split table replicates all rows.
        table = constrain(embed.embedding.astype(self.dtype), "tensor", units)
        ids = joined([tokens.ids.reshape(-1) for tokens in parts], shapes)
        embedded = constrain(jnp.take(table, ids, axis=0), rows, units)
        if config.embedding_scale != 1.0:
            embedded *= jnp.asarray(config.embedding_scale, self.dtype)
        return embedded

    def _sections(
        self,
        parts: tuple[DecoderTokens, ...],
        contexts: tuple[Context, ...],
        is_in_context: bool,
        angles: RotaryAngles | None,
    ) -> list[Section]:
        """The parts as layers read them, each with a mask for every source that it attends to.

        Args:
            is_in_context: True if the last context already includes the tokens of the only part.
        """
        source_masks = [context.mask for context in contexts]
        source_positions = [context.positions for context in contexts]
        sections = []
        ids = ()
        for tokens in parts:
            ids += (tokens.mask,)
            if not is_in_context:
                source_masks.append(tokens.mask)
                source_positions.append(tokens.positions)
            masks = [mask[:, None, None, None, None, :] for mask in source_masks]
            if not is_in_context:  # the last source is the part itself
                masks[-1] = self_attention_mask(tokens.mask)
            distances = []
            if self.config.windows:
                distances = [jnp.subtract(*pairs(tokens.positions, positions)) for positions in source_positions]
            part_angles = angles
            if angles is None:
                part_angles = self.rotary_angles(tokens.positions)
            sections.append(Section(tokens.positions, part_angles, masks, distances, ids))
        return sections

    def _per_layer(self, parts: tuple[DecoderTokens, ...]) -> PerLayer:
        """The options that differ between layers."""
        config = self.config
        rotary = rotary_of(config)
        if rotary.frequencies.ndim == 1:
            rotary = None
        windows = None
        if config.windows:
            no_window = np.iinfo(np.int32).max
            windows = np.array([window if window else no_window for window in config.windows], np.int32)
        if all(tokens.experts is None for tokens in parts):
            return PerLayer(rotary, windows)
        assert config.experts is not None
        choices = config.num_layers, config.experts.per_token
        recorded = []
        for tokens in parts:
            experts = tokens.experts
            if experts is None:
                experts = jnp.full(tokens.ids.shape + choices, NO_RECORD)
            recorded.append(experts.reshape(-1, *choices))
        experts = joined(recorded, [tokens.ids.shape for tokens in parts])
        return PerLayer(rotary, windows, experts.swapaxes(0, 1))

    def _run_layers(
        self,
        embedded: Float[Array, "tokens hidden"],
        contexts: tuple[Context, ...],
        per_layer: PerLayer,
        sections: list[Section],
        write_at: Int[Array, ""] | None,
    ) -> tuple[Float[Array, "tokens hidden"], Cache]:
        """The hidden states after all layers, and the cache in the form of a context's: written out, or as a scan."""
        config = self.config
        block = Block
        if self.remat != "none":
            block = nn.remat(Block, prevent_cse=False, policy=REMAT[self.remat])
        keys_values = tuple(KeysValues(context.keys, context.values) for context in contexts)
        states = ()
        if contexts:
            states = contexts[-1].states
        if self.unrolled:
            layers = []
            for number, kind in enumerate(config.kinds):
                layer = block(
                    config,
                    self.dtype,
                    self.attention,
                    self.joined_projections,
                    has_delta=kind.has_delta,
                    is_dense=kind.is_dense,
                    name=f"layer_{number}",
                )
                layers.append(layer)
            return run_layers(
                layers, embedded, keys_values, states, options=per_layer, sections=sections, write_at=write_at
            )
        in_a_scan: Any = functools.partial(
            nn.scan,
            variable_axes={"params": 0, "routing": 0},
            split_rngs={"params": True},
            in_axes=(0, 0, nn.broadcast, nn.broadcast),
            length=config.num_layers // config.period,
        )
        if config.period == 1:
            layers = in_a_scan(block)(config, self.dtype, self.attention, self.joined_projections, name="layers")
            hidden, new_keys_values = layers(embedded, keys_values, per_layer, sections, write_at)
            return hidden, Cache(new_keys_values)
        options_by_period = jax.tree.map(lambda x: x.reshape(-1, config.period, *x.shape[1:]), per_layer)
        layers = in_a_scan(Period)(config, self.dtype, self.attention, self.joined_projections, block, name="layers")
        return layers(embedded, (keys_values, states), options_by_period, sections, write_at)


def logits(config: DecoderConfig, params: dict, hidden: Float[Array, "*batch hidden"]) -> Float[Array, "*batch vocab"]:
    """Logits of the next token in float32; callers pass a few rows, never a complete [batch, time]."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    if "head" in params:
        scores = product("re,ev->rv", rows, params["head"]["kernel"], jnp.float32)
    else:
        scores = product("re,ve->rv", rows, params["embedding"]["embedding"], jnp.float32)
    scores = scores.reshape(*hidden.shape[:-1], -1)
    if config.logit_scale != 1.0:
        scores *= config.logit_scale
    return capped(scores, config.logit_cap)


@functools.partial(jax.jit, static_argnames="config")
def init_params(config: DecoderConfig, key: Array) -> dict:
    """Random float32 parameters: a plain nested dict, with the layers' arrays stacked on a leading axis."""
    token = jnp.zeros((1, 1), jnp.int32)
    params = Decoder(config).init(key, token, token, jnp.ones((1, 1), bool))["params"]
    if not config.tie_embeddings:
        initializer = nn.initializers.lecun_normal()
        shape = (config.hidden_size, config.vocab_size)
        params["head"] = {"kernel": initializer(jax.random.fold_in(key, 1), shape)}
    return constrain_params(params)


def abstract_params(config: DecoderConfig) -> dict:
    """Shapes and dtypes of `init_params`, without computing anything."""
    return jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
