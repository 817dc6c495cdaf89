"""Draws groups of completions and stores the log-probability of every token under the distribution that drew it."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray

from recjax.models.decoder import Context, Decoder, logits
from recjax.models.logprobs import Sampling, last_hidden, logprobs_and_entropy, sampling_logits
from recjax.models.placement import ROWS, constrain


class Completions(NamedTuple):
    """A batch of drawn completions, `group_size` consecutive rows a prompt, right-padded.

    `mask` is True at tokens that the policy drew, the end-of-sequence token among them. `truncated` rows ran into the
    token limit before they ended.
    """

    tokens: Int[Array, "batch time"]
    mask: Bool[Array, "batch time"]
    logprobs: Float[Array, "batch time"]
    truncated: Bool[Array, " batch"]


class _Decoding(NamedTuple):
    """State of the decode loop: `time` tokens drawn so far; the cache holds the keys and values of all but the last."""

    time: Int[Array, ""]
    finished: Bool[Array, " batch"]
    cache: tuple[Array, Array]
    output: Completions


def draw_tokens(
    scores: Float[Array, "batch vocab"], sampling: Sampling, keys: Key[Array, " batch"]
) -> tuple[Int[Array, " batch"], Float[Array, " batch"]]:
    """One token a row with the row's own key, and its log-probability under the distribution that drew it."""
    scores = constrain(scores, ROWS)
    if sampling.temperature == 0:
        tokens = _in_two_steps(scores, jnp.max, lambda among, _: jnp.argmax(among, axis=-1))
    else:

        def drawn(among: Array, step: int) -> Array:
            return jax.vmap(jax.random.categorical)(jax.vmap(jax.random.fold_in, (0, None))(keys, step), among)

        tokens = _in_two_steps(sampling_logits(scores, sampling), jax.nn.logsumexp, drawn)
    return tokens, logprobs_and_entropy(scores, tokens, sampling)[0]


def _in_two_steps(scores: Float[Array, "batch vocab"], of_block: Callable, choose: Callable) -> Int[Array, " batch"]:
    """An index a row: first one of about √vocab blocks, by what `of_block` makes of its scores, then one inside it.

    The choice is that among all at once, ties included. Drawing takes 2 √vocab random numbers in place of vocab, and
    the index of the highest of many, which XLA is slow to find on the CPU, is never asked for.
    """
    batch, vocab = scores.shape
    length = math.isqrt(vocab - 1) + 1
    padding = -vocab % length
    blocks = jnp.pad(scores, ((0, 0), (0, padding)), constant_values=-jnp.inf).reshape(batch, -1, length)
    block = choose(of_block(blocks, axis=-1), 0)
    inside = choose(jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0], 1)
    return block * length + inside


@functools.partial(jax.jit, static_argnames=("decoder", "group_size", "max_tokens", "sampling", "stop_ids"))
def sample(
    decoder: Decoder,
    params: dict,
    prompts: Int[Array, "prompts prompt_time"],
    prompt_mask: Bool[Array, "prompts prompt_time"],
    key: PRNGKeyArray,
    *,
    group_size: int,
    max_tokens: int,
    sampling: Sampling,
    stop_ids: tuple[int, ...],
) -> Completions:
    """Draws `group_size` completions of each prompt.

    Prompts are run once; each group's completions attend to the one copy of their prompt's keys and values. The decode
    loop ends as soon as every row has. Row i at time t draws with fold_in(fold_in(key, i), t), so a row's noise depends
    on nothing but the key and its index.

    Args:
        prompts: right-padded prompt tokens, each row with at least one.
        key: a key not used before; the same key repeats the same completions.
        max_tokens: limit on a completion's length, end-of-sequence token included.
        sampling: the distribution; what is stored is the log-probability under it.
        stop_ids: tokens that end a completion; the one drawn is part of it.
    Reference: arXiv 2509.24203 §2 (behaviour policy μ).
    """
    batch = prompts.shape[0] * group_size
    config = decoder.config
    positions = jnp.broadcast_to(jnp.arange(prompts.shape[1]), prompts.shape)
    hidden, prompt_cache = decoder.apply({"params": params}, prompts, positions, prompt_mask)
    prompt_context = Context(*prompt_cache, prompt_mask, positions)
    first_scores = logits(config, params, last_hidden(hidden, prompt_mask))
    lengths = jnp.repeat(prompt_mask.sum(-1), group_size)
    cache_positions = lengths[:, None] + jnp.arange(max_tokens)
    row_keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(batch))

    def record(state: _Decoding, scores: Float[Array, "batch vocab"]) -> _Decoding:
        time, alive = state.time, ~state.finished
        keys = jax.vmap(jax.random.fold_in, (0, None))(row_keys, time)
        tokens, logprobs = draw_tokens(scores, sampling, keys)
        output = state.output._replace(
            tokens=state.output.tokens.at[:, time].set(jnp.where(alive, tokens, 0)),
            mask=state.output.mask.at[:, time].set(alive),
            logprobs=state.output.logprobs.at[:, time].set(jnp.where(alive, logprobs, 0.0)),
        )
        return _Decoding(time + 1, state.finished | jnp.isin(tokens, jnp.array(stop_ids)), state.cache, output)

    def unfinished(state: _Decoding) -> Bool[Array, ""]:
        return (state.time < max_tokens) & ~jnp.all(state.finished)

    def step(state: _Decoding) -> _Decoding:
        last = state.time - 1
        earlier = jnp.broadcast_to(jnp.arange(max_tokens) < last, (batch, max_tokens))
        hidden, new = decoder.apply(
            {"params": params},
            jax.lax.dynamic_slice_in_dim(state.output.tokens, last, 1, axis=1),
            (lengths + last)[:, None],
            jnp.ones((batch, 1), bool),
            (prompt_context, Context(*state.cache, earlier, cache_positions)),
        )
        here = (0, 0, 0, last, 0)
        cache = tuple(
            constrain(jax.lax.dynamic_update_slice(held, one, here), None, ROWS, "tensor")
            for held, one in zip(state.cache, new, strict=True)
        )
        return record(state._replace(cache=cache), logits(config, params, hidden[:, 0]))

    shape = (config.num_layers, batch, config.num_kv_heads, max_tokens, config.head_dim)
    empty = _Decoding(
        time=jnp.zeros((), jnp.int32),
        finished=jnp.zeros(batch, bool),
        cache=(jnp.zeros(shape, decoder.dtype), jnp.zeros(shape, decoder.dtype)),
        output=Completions(
            tokens=jnp.zeros((batch, max_tokens), jnp.int32),
            mask=jnp.zeros((batch, max_tokens), bool),
            logprobs=jnp.zeros((batch, max_tokens)),
            truncated=jnp.zeros(batch, bool),
        ),
    )
    first = record(empty, jnp.repeat(first_scores, group_size, axis=0))
    final = jax.lax.while_loop(unfinished, step, first)
    return final.output._replace(truncated=~final.finished)
