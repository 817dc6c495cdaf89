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
from recjax.models.layer import PRODUCT, Block, Period, PerLayer, RMSNorm, Section, cut, joined, run_layers
from recjax.models.placement import constrain, constrain_params, stream_axes
from recjax.models.products import product
from recjax.models.rotary import turns_of


def _is_of_cudnn(primitive: Any, *_: Any, **__: Any) -> bool:
    """True for cuDNN's forward pass: its backward pass reads the outputs, and JAX gives them no checkpoint name."""
    return primitive.name.startswith(CUDNN_FORWARD)


# Activations that the forward pass saves in addition to a layer's input; the backward pass recomputes all others.
REMAT = {
    "none": jax.checkpoint_policies.everything_saveable,
    "attention": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.save_only_these_names(PRODUCT, ATTENTION), _is_of_cudnn
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


class Tokens(NamedTuple):
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
        turns: tuple[Float[Array, "batch time half"], Float[Array, "batch time half"]] | None = None,
        experts: Int[Array, "batch time layers per_token"] | None = None,
    ) -> tuple[Float[Array, "batch time hidden"], tuple]:
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
            turns: `turns(positions)`, if the caller has it; None: compute it here.
            experts: experts of each token; `NO_RECORD` where the router chooses; None: the router chooses everywhere.
        Returns:
            Hidden states after the final norm, and (keys, values) of these tokens, each
            [layers, batch, kv_heads, time, head_dim], or in the form of a context's; with `write_at`, the keys and
            values of the last context. If layers have delta nets, also the states after these tokens: (keys, values,
            states).
        """
        (hidden,), keys_values = self.run((Tokens(tokens, positions, mask, experts),), contexts, write_at, turns)
        return hidden, keys_values

    def turns(
        self, positions: Int[Array, "batch time"]
    ) -> tuple[Float[Array, "batch time half"], Float[Array, "batch time half"]] | None:
        """Cosine and sine of the rotary angles; None if layers have different frequencies.

        Sampling loops compute them before the loop, as XLA would otherwise compute them in every layer.
        """
        rotary = rotary_of(self.config)
        return turns_of(positions, rotary) if rotary.frequencies.ndim == 1 else None

    def run_groups(
        self, prompts: Tokens, completions: Tokens
    ) -> tuple[Float[Array, "prompts prompt_time hidden"], Float[Array, "batch time hidden"]]:
        """Hidden states of prompts and of their completions, in one pass that runs each prompt once.

        Args:
            completions: batch/prompts consecutive rows for each prompt.
        """
        (of_prompts, of_completions), _ = self.run((prompts, completions))
        return of_prompts, of_completions

    @nn.compact
    def run(
        self,
        parts: tuple[Tokens, ...],
        contexts: tuple[Context, ...] = (),
        write_at: Int[Array, ""] | None = None,
        turns: tuple[Array, Array] | None = None,
    ) -> tuple[list[Float[Array, "batch time hidden"]], tuple]:
        """Runs the layers on several parts; each part also attends to all earlier parts.

        Args:
            parts: the number of rows of each part is a multiple of the number of rows of every earlier part.
            contexts, write_at, turns: see `__call__`; the last two require a single part.
        Returns:
            Hidden states of each part; keys and values of the last part, as `__call__` returns them.
        """
        embedded = self._embedded(parts)
        sections = self._sections(parts, contexts, write_at is not None, turns)
        hidden, keys_values = self._run_layers(embedded, contexts, self._per_layer(parts), sections, write_at)
        hidden = RMSNorm(self.config, self.dtype, name="norm")(hidden)
        return cut(hidden, [tokens.ids.shape for tokens in parts]), keys_values

    def _embedded(self, parts: tuple[Tokens, ...]) -> Array:
        """The stream of the parts' embeddings, [all tokens, hidden]."""
        config = self.config
        shapes = [tokens.ids.shape for tokens in parts]
        embed = nn.Embed(
            config.vocab_size,
            config.hidden_size,
            dtype=self.dtype,
            embedding_init=nn.initializers.normal(config.hidden_size**-0.5),
            name="embedding",
        )
        rows, units = stream_axes(sum(time for _, time in shapes))
        # Rows split along "fsdp" need whole embedding vectors; a lookup in a split table replicates all rows first.
        table = constrain(embed.embedding.astype(self.dtype), "tensor", units)
        ids = joined([tokens.ids.reshape(-1) for tokens in parts], shapes)
        embedded = constrain(jnp.take(table, ids, axis=0), rows, units)
        if config.embedding_scale != 1.0:
            embedded *= jnp.asarray(config.embedding_scale, self.dtype)
        return embedded

    def _sections(
        self,
        parts: tuple[Tokens, ...],
        contexts: tuple[Context, ...],
        is_in_context: bool,
        turns: tuple[Array, Array] | None,
    ) -> list[Section]:
        """The parts as layers read them, each with a mask for every source that it attends to.

        Args:
            is_in_context: True if the last context already includes the tokens of the only part.
        """
        sources = [(context.mask, context.positions) for context in contexts]
        sections = []
        ids = ()
        for tokens in parts:
            ids += (tokens.mask,)
            if not is_in_context:
                sources.append((tokens.mask, tokens.positions))
            masks = [mask[:, None, None, None, None, :] for mask, _ in sources]
            if not is_in_context:  # the last source is the part itself
                masks[-1] = self_attention_mask(tokens.mask)
            distances = []
            if self.config.windows:
                distances = [jnp.subtract(*pairs(tokens.positions, positions)) for _, positions in sources]
            section_turns = self.turns(tokens.positions) if turns is None else turns
            sections.append(Section(tokens.positions, section_turns, masks, distances, ids))
        return sections

    def _per_layer(self, parts: tuple[Tokens, ...]) -> PerLayer:
        """The options that differ between layers."""
        config = self.config
        rotary = rotary_of(config)
        windows = None
        if config.windows:
            windows = np.array([window or np.iinfo(np.int32).max for window in config.windows], np.int32)
        experts = None
        if any(tokens.experts is not None for tokens in parts):
            assert config.experts is not None
            of_token = config.num_layers, config.experts.per_token
            recorded = [
                jnp.full((*tokens.ids.shape, *of_token), NO_RECORD) if tokens.experts is None else tokens.experts
                for tokens in parts
            ]
            shapes = [tokens.ids.shape for tokens in parts]
            experts = joined([choices.reshape(-1, *of_token) for choices in recorded], shapes).swapaxes(0, 1)
        return PerLayer(None if rotary.frequencies.ndim == 1 else rotary, windows, experts)

    def _run_layers(
        self,
        embedded: Array,
        contexts: tuple[Context, ...],
        per_layer: PerLayer,
        sections: list[Section],
        write_at: Int[Array, ""] | None,
    ) -> tuple[Array, tuple]:
        """The stream after all layers, and keys and values in the form of a context's: written out, or as a scan."""
        config = self.config
        shared = config, self.dtype, self.attention, self.joined_projections
        block = Block
        if self.remat != "none":
            block = nn.remat(Block, prevent_cse=False, policy=REMAT[self.remat])
        keys_values = tuple((context.keys, context.values) for context in contexts)
        states = contexts[-1].states if contexts else ()
        if self.unrolled:
            layers = [block(*shared, *kind, name=f"layer_{number}") for number, kind in enumerate(config.kinds)]
            options = [
                jax.tree.map(lambda option, number=number: option[number], per_layer)
                for number in range(config.num_layers)
            ]
            return run_layers(layers, embedded, (keys_values, states), options, sections, write_at)
        is_uniform = config.period == 1
        if not is_uniform:  # options of each period's layers
            per_layer = jax.tree.map(lambda x: x.reshape(-1, config.period, *x.shape[1:]), per_layer)
        layers: Any = nn.scan(
            block if is_uniform else Period,
            variable_axes={"params": 0, "routing": 0},
            split_rngs={"params": True},
            in_axes=(0, 0, *(nn.broadcast,) * 2),
            length=config.num_layers // config.period,
        )
        scanned = layers(*shared, *([] if is_uniform else [block]), name="layers")
        return scanned(embedded, keys_values if is_uniform else (keys_values, states), per_layer, sections, write_at)


def logits(config: DecoderConfig, params: dict, hidden: Float[Array, "*batch hidden"]) -> Float[Array, "*batch vocab"]:
    """Logits of the next token in float32; callers pass a few rows, never a whole [batch, time]."""
    subscripts = "re,ev->rv" if "head" in params else "re,ve->rv"
    weights = params["head"]["kernel"] if "head" in params else params["embedding"]["embedding"]
    rows = hidden.reshape(-1, hidden.shape[-1])
    scores = product(subscripts, rows, weights, jnp.float32)
    scores = scores.reshape(*hidden.shape[:-1], -1)
    return capped(scores if config.logit_scale == 1.0 else scores * config.logit_scale, config.logit_cap)


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
