"""The engine's programs on the device: they run prompts, and start and continue completions."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from recjax.models.decoder import Context, Decoder, logits
from recjax.models.logprobs import Sampling, last_hidden
from recjax.models.placement import ROWS, constrain
from recjax.rollout.choosing import sample_tokens
from recjax.rollout.keys_values import (
    Memory,
    cache_rows,
    cache_time,
    empty,
    over_mesh,
    put_behind,
    put_round,
    read_slots,
)


class SlotState(NamedTuple):
    """The state of the slots.

    Attributes:
        live: True for slots that sample a token in this call.
        lengths, cached: numbers of tokens with keys and values in `prompts` and in `later`.
        last: latest sampled token.
        counts: tokens sampled so far; the next one is sampled with fold_in(key, count).
        limits: most tokens to sample.
        keys: key data.
    """

    live: Bool[Array, " slots"]
    lengths: Int[Array, " slots"]
    cached: Int[Array, " slots"]
    last: Int[Array, " slots"]
    counts: Int[Array, " slots"]
    limits: Int[Array, " slots"]
    keys: UInt32[Array, "slots words"]


class Decoded(NamedTuple):
    """State of a round after `time` tokens; each slot keeps the first `counts` of these tokens.

    `recent` holds the keys and values of this round's tokens except the last.
    """

    time: Int[Array, ""]
    live: Bool[Array, " slots"]
    last: Int[Array, " slots"]
    recent: tuple
    tokens: Int[Array, "slots round"]
    logprobs: Float[Array, "slots round"]
    counts: Int[Array, " slots"]


@functools.partial(jax.jit, static_argnames="decoder")
def prefill(
    params: dict, prompts: Int[Array, "prompts time"], mask: Bool[Array, "prompts time"], *, decoder: Decoder
) -> tuple[tuple, Float[Array, "prompts vocab"]]:
    """Keys and values of right-padded prompts, and the scores of the token after each prompt."""
    positions = jnp.broadcast_to(jnp.arange(prompts.shape[1]), prompts.shape)
    hidden, cache = decoder.apply({"params": params}, prompts, positions, mask)
    return over_mesh(cache), _scores(decoder, params, last_hidden(hidden, mask))


def _scores(decoder: Decoder, params: dict, hidden: Float[Array, "rows hidden"]) -> Float[Array, "rows vocab"]:
    """Scores of the next token, split like the head; otherwise the compiler would transfer the head for every token."""
    return constrain(logits(decoder.config, params, hidden), ROWS, "tensor")


@functools.partial(jax.jit, static_argnames=("sampling", "chunk"))
def first_tokens(
    scores: Float[Array, "prompts vocab"],
    of: Int[Array, " batch"],
    keys: UInt32[Array, "batch words"],
    *,
    sampling: Sampling,
    chunk: int,
) -> tuple[Int[Array, " batch"], Float[Array, " batch"]]:
    """The first token of each completion, and its log-probability.

    Args:
        of: index of each completion's prompt.
        chunk: most completions whose scores are in memory together.
    """
    count = len(of)

    def chosen(part: tuple[Array, Array]) -> tuple[Array, Array]:
        of, keys = part
        return sample_tokens(scores[of], sampling, _step_keys(keys, jnp.zeros_like(of)))

    if count <= chunk:
        return chosen((of, keys))
    parts = [jnp.pad(x, [(0, -count % chunk)] + [(0, 0)] * (x.ndim - 1)) for x in (of, keys)]
    found = jax.lax.map(chosen, tuple(x.reshape(-1, chunk, *x.shape[1:]) for x in parts))
    tokens, logprobs = (x.reshape(-1)[:count] for x in found)
    return tokens, logprobs


def _step_keys(keys: UInt32[Array, "rows words"], counts: Int[Array, " rows"]) -> Key[Array, " rows"]:
    return jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(keys), counts)


def _contexts(memory: Memory, lengths: Int[Array, " rows"], cached: Int[Array, " rows"]) -> tuple[Context, Context]:
    """The context of each row's next token: its prompt and later tokens. Rows that share a prompt have one length."""
    prompts, sharing = cache_rows(memory.prompts), len(lengths) // cache_rows(memory.prompts)
    places = jnp.broadcast_to(jnp.arange(cache_time(memory.prompts)), (prompts, cache_time(memory.prompts)))
    prompt = Context(*memory.prompts, places < lengths[::sharing, None], places)
    places = jnp.arange(cache_time(memory.later))
    return prompt, Context(*memory.later, places < cached[:, None], lengths[:, None] + places)


@functools.partial(jax.jit, static_argnames="decoder", donate_argnames="memory")
def extend(
    params: dict,
    memory: Memory,
    slots: Int[Array, " rows"],
    tokens: Int[Array, "rows time"],
    mask: Bool[Array, "rows time"],
    lengths: Int[Array, " rows"],
    cached: Int[Array, " rows"],
    *,
    decoder: Decoder,
) -> tuple[Memory, Float[Array, "rows vocab"]]:
    """Appends tokens to the contents of slots: stores their keys and values, and scores the token after them.

    Args:
        slots: indices of the slots; a slot that occurs twice has equal tokens both times.
        tokens: right-padded; `memory.later` has room for all of them, padding included.
        mask: True at real tokens.
        lengths, cached: values for these slots, see `SlotState`.
    """
    read = read_slots(memory, slots)
    positions = (lengths + cached)[:, None] + jnp.arange(tokens.shape[1])
    hidden, new = decoder.apply({"params": params}, tokens, positions, mask, _contexts(read, lengths, cached))

    later = over_mesh(put_behind(memory.later, new, cached, slots))
    return memory._replace(later=later), _scores(decoder, params, last_hidden(hidden, mask))


@functools.partial(jax.jit, static_argnames=("decoder", "sampling", "stop_ids", "round_time"), donate_argnames="memory")
def decode(
    params: dict,
    memory: Memory,
    rows: SlotState,
    enough: Int[Array, ""],
    *,
    decoder: Decoder,
    sampling: Sampling,
    stop_ids: tuple[int, ...],
    round_time: int,
) -> tuple[Memory, Decoded]:
    """Samples up to `round_time` tokens for each live slot; stops early once at most `enough` slots are live.

    The round only reads the memory. It keeps the keys and values of new tokens in a buffer where all slots share one
    position, and at the end copies them to each slot's own position. Memory behind a slot's cached tokens has no
    meaning, so idle slots lose no tokens either, as long as they have room for a round.
    """
    options = {"decoder": decoder, "sampling": sampling, "stop_ids": stop_ids, "round_time": round_time}
    state = _round(params, memory.prompts, _contexts(memory, rows.lengths, rows.cached), rows, enough, **options)

    later = put_round(memory.later, state.recent, rows.cached)
    return memory._replace(later=later), state._replace(recent=())


@functools.partial(jax.jit, static_argnames=("decoder", "sampling", "stop_ids", "group_size", "round_time"))
def whole_batch(
    params: dict,
    prompts: Int[Array, "prompts prompt_time"],
    mask: Bool[Array, "prompts prompt_time"],
    keys: UInt32[Array, "batch words"],
    limits: Int[Array, " batch"],
    *,
    decoder: Decoder,
    sampling: Sampling,
    stop_ids: tuple[int, ...],
    group_size: int,
    round_time: int,
) -> tuple[Int[Array, "batch time"], Float[Array, "batch time"], Int[Array, " batch"]]:
    """Samples groups of completions that need only their first token and one round, in one program.

    Args:
        prompts: right-padded, one for each `group_size` consecutive completions.
    Returns:
        Tokens, their log-probabilities, and the number of tokens of each completion.
    """
    cache, scores = prefill(params, prompts, mask, decoder=decoder)
    of = jnp.arange(len(limits)) // group_size
    tokens, logprobs = first_tokens(scores, of, keys, sampling=sampling, chunk=len(limits))
    zeros, places = jnp.zeros_like(of), jnp.broadcast_to(jnp.arange(mask.shape[1]), mask.shape)
    live = ~jnp.isin(tokens, jnp.array(stop_ids, jnp.int32)) & (limits > 1)
    rows = SlotState(live, mask.sum(-1)[of], zeros, tokens, zeros + 1, limits, keys)
    options = {"decoder": decoder, "sampling": sampling, "stop_ids": stop_ids, "round_time": round_time}
    state = _round(params, cache, (Context(*cache, mask, places),), rows, jnp.zeros((), jnp.int32), **options)
    tokens = jnp.concatenate([tokens[:, None], state.tokens], axis=1)
    return tokens, jnp.concatenate([logprobs[:, None], state.logprobs], axis=1), 1 + state.counts


def _round(
    params: dict,
    like: tuple,
    contexts: tuple[Context, ...],
    rows: SlotState,
    enough: Int[Array, ""],
    *,
    decoder: Decoder,
    sampling: Sampling,
    stop_ids: tuple[int, ...],
    round_time: int,
) -> Decoded:
    """Samples the tokens of a round, which attend to `contexts` and to each other; `like` is any cache of the model."""
    slots, places, starts = len(rows.live), jnp.arange(round_time), rows.lengths + rows.cached
    turns = decoder.turns(starts[:, None] + places)

    def unfinished(state: Decoded) -> Bool[Array, ""]:
        return (state.time < round_time) & (state.live.sum() > enough)

    def step(state: Decoded) -> Decoded:
        time = state.time
        seen = jnp.broadcast_to(places <= time, (slots, round_time))
        turns_now = jax.tree.map(lambda turn: jax.lax.dynamic_slice_in_dim(turn, time, 1, axis=1), turns)
        hidden, kept = decoder.apply(
            {"params": params},
            state.last[:, None],
            (starts + time)[:, None],
            jnp.ones((slots, 1), bool),
            (*contexts, Context(*state.recent, seen, starts[:, None] + places)),
            place=time,
            turns=turns_now,
        )
        scores = _scores(decoder, params, hidden[:, 0])
        tokens, logprobs = sample_tokens(scores, sampling, _step_keys(rows.keys, rows.counts + time))
        ended = jnp.isin(tokens, jnp.array(stop_ids, jnp.int32)) | (rows.counts + time + 1 >= rows.limits)
        return Decoded(
            time + 1,
            state.live & ~ended,
            tokens,
            over_mesh(kept),
            state.tokens.at[:, time].set(tokens),
            state.logprobs.at[:, time].set(logprobs),
            state.counts + state.live,
        )

    start = Decoded(
        jnp.zeros((), jnp.int32),
        rows.live,
        rows.last,
        empty(like, rows=slots, time=round_time, dtype=decoder.cache_dtype),
        jnp.zeros((slots, round_time), jnp.int32),
        jnp.zeros((slots, round_time)),
        jnp.zeros(slots, jnp.int32),
    )
    return jax.lax.while_loop(unfinished, step, start)
