"""One decoder for Llama and its relatives: RMSNorm, rotary positions, grouped-query attention, gated MLP."""

import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from recjax.models.attention import attention_mask, capped, pairs
from recjax.models.decoder_config import DecoderConfig, rotary_frequencies
from recjax.models.layer import PRODUCT, Block, Part, PerLayer, RMSNorm, cut, joined
from recjax.models.placement import constrain, constrain_params, stream_axes
from recjax.models.products import product
from recjax.models.rotary import turns_of

# What the forward pass keeps of a layer, beside its input, where the backward pass computes the rest again.
REMAT = {
    "none": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.save_only_these_names(PRODUCT),
    "full": jax.checkpoint_policies.nothing_saveable,
}


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


class Tokens(NamedTuple):
    """Token ids, and what attention has to know of them; [batch, time] each, the last two as the decoder takes them."""

    ids: Array
    positions: Array
    mask: Array


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

    def __call__(
        self,
        tokens: Int[Array, "batch time"],
        positions: Int[Array, "batch time"],
        mask: Bool[Array, "batch time"] | Int[Array, "batch time"],
        contexts: tuple[Context, ...] = (),
        place: Int[Array, ""] | None = None,
        prefixes: Int[Array, "batch time"] | None = None,
        turns: tuple[Float[Array, "batch time half"], Float[Array, "batch time half"]] | None = None,
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
            turns: as `turns` gives them of these positions, if it is at hand. None: they are computed here.
        Returns:
            Hidden states after the final norm, and (keys, values) of these tokens, each
            [layers, batch, kv_heads, time, head_dim], or a tuple over layers where `unrolled`; with `place`, those of
            the last context.
        """
        (hidden,), keys_values = self.run((Tokens(tokens, positions, mask),), contexts, place, prefixes, turns)
        return hidden, keys_values

    def turns(
        self, positions: Int[Array, "batch time"]
    ) -> tuple[Float[Array, "batch time half"], Float[Array, "batch time half"]] | None:
        """Cosine and sine of the angles at positions; None where they differ from layer to layer.

        A loop over tokens has them computed before it begins: inside, the compiler would have every layer do that.
        """
        frequencies = rotary_frequencies(self.config)
        return turns_of(positions, frequencies) if frequencies.ndim == 1 else None

    def of_groups(
        self, prompts: Tokens, completions: Tokens
    ) -> tuple[Float[Array, "prompts prompt_time hidden"], Float[Array, "batch time hidden"]]:
        """Hidden states of prompts and of the completions that go on from them, in one pass: a prompt is run once.

        Args:
            completions: batch/prompts of each prompt, one prompt's after the other's.
        """
        (of_prompts, of_completions), _ = self.run((prompts, completions))
        return of_prompts, of_completions

    @nn.compact
    def run(
        self,
        parts: tuple[Tokens, ...],
        contexts: tuple[Context, ...] = (),
        place: Int[Array, ""] | None = None,
        prefixes: Int[Array, "batch time"] | None = None,
        turns: tuple[Array, Array] | None = None,
    ) -> tuple[list[Float[Array, "batch time hidden"]], tuple]:
        """Runs the layers on parts, each of which also attends to those before it, whose rows it has a multiple of.

        Args:
            contexts, place, prefixes, turns: as above; the last three with a single part.
        Returns:
            Hidden states of each part; keys and values, as above, of the last one.
        """
        config = self.config
        shapes = [part.ids.shape for part in parts]
        embed = nn.Embed(
            config.vocab_size,
            config.hidden_size,
            dtype=self.dtype,
            embedding_init=nn.initializers.normal(config.hidden_size**-0.5),
            name="embedding",
        )
        rows, units = stream_axes(sum(time for _, time in shapes))
        # Rows that are split along "fsdp" need whole vectors; looked up in parts, they would first lie everywhere.
        table = constrain(embed.embedding.astype(self.dtype), "tensor", units)
        ids = joined([part.ids.reshape(-1) for part in parts], shapes)
        embedded = constrain(jnp.take(table, ids, axis=0), rows, units)
        if config.scale_embeddings:
            embedded *= jnp.asarray(config.hidden_size**0.5, self.dtype)

        frequencies, windows = rotary_frequencies(config), None
        if config.windows:
            windows = np.array([window or np.iinfo(np.int32).max for window in config.windows], np.int32)
        sources, looking = [(context.mask, context.positions) for context in contexts], []
        for part in parts:
            if place is None:
                sources.append((part.mask, part.positions))
            its_turns = self.turns(part.positions) if turns is None else turns
            looking.append(_looking(part, its_turns, sources, place is None, prefixes, windows is not None))
        per_layer = PerLayer(None if frequencies.ndim == 1 else frequencies, windows)

        block = Block
        if self.remat != "none":
            block = nn.remat(Block, prevent_cse=False, policy=REMAT[self.remat])
        keys_values = tuple((context.keys, context.values) for context in contexts)
        if self.unrolled:
            hidden, new = embedded, []
            for layer in range(config.num_layers):
                own = [(keys[layer], values[layer]) for keys, values in keys_values]
                options = PerLayer(*(None if option is None else option[layer] for option in per_layer))
                one = block(config, self.dtype, self.attention, name=f"layer_{layer}")
                hidden, pair = one(hidden, own, options, looking, place)
                new.append(pair)
            keys_values = tuple(zip(*new, strict=True))
        else:
            layers = nn.scan(
                block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=(0, 0, *(nn.broadcast,) * 2),
                length=config.num_layers,
            )
            scanned = layers(config, self.dtype, self.attention, name="layers")
            hidden, keys_values = scanned(embedded, keys_values, per_layer, looking, place)
        return cut(RMSNorm(config, self.dtype, name="norm")(hidden), shapes), keys_values


def _looking(
    part: Tokens, turns: tuple | None, sources: list, own: bool, prefixes: Array | None, windowed: bool
) -> Part:
    """Where the tokens of a part look.

    Args:
        turns: of all layers; None: they differ.
        sources: masks and positions of the places; of the part's `own` tokens last, or not.
        windowed: layers have windows.
    """
    masks = [attention_mask(part.mask, theirs) for theirs, _ in sources]
    if own:
        if prefixes is not None:
            masks[-1] |= attention_mask(prefixes, part.mask)
        masks[-1] &= jnp.tril(jnp.ones((part.ids.shape[1],) * 2, bool))
    distances = [jnp.subtract(*pairs(part.positions, theirs)) for _, theirs in sources] if windowed else []
    return Part(part.positions, turns, masks, distances, part.mask if prefixes is None else None)


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
