"""The engine's reference: all rows of a batch in one program, a token a turn, until the slowest has ended."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from recjax.models.decoder import Context, Decoder, logits
from recjax.models.logprobs import Sampling, last_hidden
from recjax.models.placement import ROWS, constrain
from recjax.rollout.decoding import sample_tokens, token_noise


class Completions(NamedTuple):
    """Sampled completions, `group_size` consecutive rows a prompt, right-padded."""

    tokens: Int[Array, "batch time"]
    mask: Bool[Array, "batch time"]
    logprobs: Float[Array, "batch time"]
    truncated: Bool[Array, " batch"]


class _Decoding(NamedTuple):
    """State of the loop: `time` tokens sampled so far; the cache holds the keys and values of all but the last."""

    time: Int[Array, ""]
    finished: Bool[Array, " batch"]
    cache: tuple[Array, Array]
    output: Completions


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
    """Samples `group_size` completions of each prompt.

    Prompts are run once; each group's completions attend to the one copy of their prompt's keys and values. The decode
    loop ends as soon as every row has. Row i at time t samples with fold_in(fold_in(key, i), t), so a row's noise
    depends on nothing but the key and its index.

    Args:
        prompts: right-padded prompt tokens, each row with at least one.
        key: a key not used before; the same key repeats the same completions.
        max_tokens: limit on a completion's length, end-of-sequence token included.
        sampling: the distribution; what is stored is the log-probability under it.
        stop_ids: tokens that end a completion; the one sampled is part of it.
    Reference: arXiv 2509.24203 §2 (behavior policy μ).
    """
    batch = prompts.shape[0] * group_size
    config = decoder.config
    positions = jnp.broadcast_to(jnp.arange(prompts.shape[1]), prompts.shape)
    hidden, prompt_cache = decoder.apply({"params": params}, prompts, positions, prompt_mask)
    prompt_context = Context(*prompt_cache.keys_values, prompt_mask, positions)
    first_scores = logits(config, params, last_hidden(hidden, prompt_mask))
    lengths = jnp.repeat(prompt_mask.sum(-1), group_size)
    cache_positions = lengths[:, None] + jnp.arange(max_tokens)
    row_keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(batch))

    def record(state: _Decoding, scores: Float[Array, "batch vocab"]) -> _Decoding:
        time, alive = state.time, ~state.finished
        keys = jax.vmap(jax.random.fold_in, (0, None))(row_keys, time)
        noise = token_noise(keys, scores.shape[-1], sampling)
        tokens, logprobs = sample_tokens(scores, sampling, noise)
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
            for held, one in zip(state.cache, new.keys_values, strict=True)
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
