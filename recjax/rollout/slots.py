"""Draws the completions of `sample` in a fixed number of slots: rows that end hand theirs to those that wait."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray

from recjax.models.decoder import Context, Decoder, logits
from recjax.models.logprobs import Sampling, last_hidden
from recjax.models.placement import on_host
from recjax.models.unrolling import unrolled_on_cpu, unrolled_params
from recjax.rollout.sampler import Completions, draw_tokens

ROUND = 16  # tokens that a row gets at most before the host looks again
SHORTEST, FEWEST = 64, 8  # smallest cache in tokens, and the fewest slots that fewer live rows are gathered into
MOST_UNROLLED = 32  # layers that are written out on the CPU

# Keys and values are [layers, rows, kv_heads, time, head_dim], or a tuple over layers without the first axis.
ROWS, TIME = -4, -2


class _Slots(NamedTuple):
    """What the slots hold, on the host: the completion (-1: free), its prompt's length, its tokens so far, the last."""

    rows: np.ndarray
    lengths: np.ndarray
    drawn: np.ndarray
    last: np.ndarray


class _Memory(NamedTuple):
    """Keys and values of the slots' prompts, and of all drawn tokens but the last.

    While every slot holds the row of its own number, `prompts` has a row a prompt, which the slots of its group read;
    from then on a row a slot.
    """

    prompts: tuple
    drawn: tuple


class _Round(NamedTuple):
    """State of a round after `time` tokens: `recent` has the keys and values of this round's tokens but the last."""

    time: Int[Array, ""]
    live: Bool[Array, " slots"]
    last: Int[Array, " slots"]
    recent: tuple
    tokens: Int[Array, "slots round"]
    logprobs: Float[Array, "slots round"]
    counts: Int[Array, " slots"]


def sample_in_slots(
    decoder: Decoder,
    params: dict,
    prompts: Int[np.ndarray, "prompts prompt_time"],
    prompt_mask: Bool[np.ndarray, "prompts prompt_time"],
    key: PRNGKeyArray,
    *,
    slots: int,
    group_size: int,
    max_tokens: int,
    sampling: Sampling,
    stop_ids: tuple[int, ...],
) -> Completions:
    """The completions of `sample`, host arrays, with at most `slots` of them decoded at a time.

    Row i at time t draws with fold_in(fold_in(key, i), t), so where and when a row is decoded changes nothing. Rounds
    of decoding end when enough rows have; then waiting rows come in, or, where none waits, the live ones are gathered
    into half as many slots. The cache has the smallest of few lengths that the oldest live row leaves room in. Prompts
    are run once. As long as there are slots for all rows a group reads one copy of its prompt's keys and values;
    otherwise each slot holds a copy.

    Args:
        slots: rows decoded at one time; memory and the time of a decoding step follow it.
        (others): as those of `sample`.
    """
    decoder = unrolled_on_cpu(decoder, MOST_UNROLLED)
    if decoder.unrolled:
        params = _unrolled(decoder.config, params)
    options = {"decoder": decoder, "sampling": sampling}
    cache, *first = _prefill(params, prompts, prompt_mask, key, group_size=group_size, **options)
    batch = len(prompts) * group_size
    tokens, logprobs = np.zeros((batch, max_tokens), np.int32), np.zeros((batch, max_tokens), np.float32)
    tokens[:, 0], logprobs[:, 0] = on_host(first)
    counts = np.ones(batch, np.int32)
    waiting = np.flatnonzero(~np.isin(tokens[:, 0], stop_ids)) if max_tokens > 1 else np.zeros(0, int)

    sizes, lengths = _sizes(min(slots, batch)), _lengths(max_tokens)
    size = _at_least(sizes, len(waiting))
    held = _Slots(np.full(size, -1, np.int32), *(np.ones(size, np.int32) for _ in range(3)))
    room = _zeros(cache, size=size, length=lengths[0])
    if size == batch:
        memory = _Memory(cache, room)
        held.lengths[:], held.last[:] = np.repeat(prompt_mask.sum(-1), group_size), tokens[:, 0]
        held.rows[waiting], waiting = waiting, waiting[:0]
    else:
        prompt_time = jax.tree.leaves(cache)[0].shape[TIME]
        memory = _Memory(_zeros(cache, size=size, length=prompt_time), room)
    while len(waiting) or (held.rows >= 0).any():
        held, memory = _fitted(held, memory, len(waiting), sizes, lengths)

        # --- Waiting rows into free slots.
        free = np.flatnonzero(held.rows < 0)[: len(waiting)]
        coming, waiting = waiting[: len(free)], waiting[len(free) :]
        if len(coming):
            of = coming // group_size
            held.rows[free], held.lengths[free] = coming, prompt_mask.sum(-1)[of]
            held.drawn[free], held.last[free] = 1, tokens[coming, 0]
            places = np.zeros((2, len(held.rows)), np.int32)
            places[:, : len(free)] = free, of
            memory = _admit(memory, cache, places, len(free))

        # --- A round: until a good part of the slots is free, or where none waits, until fewer slots do.
        size = len(held.rows)
        fewer = max((candidate for candidate in sizes if candidate < size), default=0)
        enough = -(-size // 8) if len(waiting) else size - fewer
        memory, state = _decode(params, memory, held, key, enough, max_tokens=max_tokens, stop_ids=stop_ids, **options)
        state = on_host(state)
        slot, time = np.nonzero((held.rows >= 0)[:, None] & (np.arange(ROUND) < state.counts[:, None]))
        places = held.rows[slot], held.drawn[slot] + time
        tokens[places], logprobs[places] = state.tokens[slot, time], state.logprobs[slot, time]
        np.add.at(counts, held.rows[slot], 1)
        rows, drawn = np.where(state.live, held.rows, -1), held.drawn + state.counts
        held = held._replace(rows=rows, drawn=drawn, last=state.last.copy())
    ended = np.isin(tokens[np.arange(batch), counts - 1], stop_ids)
    return Completions(tokens, np.arange(max_tokens) < counts[:, None], logprobs, ~ended)


def _fitted(
    held: _Slots, memory: _Memory, waiting: int, sizes: list[int], lengths: list[int]
) -> tuple[_Slots, _Memory]:
    """As many slots as there are rows for, and a cache with room for a round."""
    live = np.flatnonzero(held.rows >= 0)
    size = _at_least(sizes, len(live) + waiting)
    length = _at_least(lengths, int(held.drawn[live].max(initial=1)) - 1 + ROUND)
    if (size, length) == (len(held.rows), jax.tree.leaves(memory.drawn)[0].shape[TIME]):
        return held, memory
    if size == len(held.rows):
        return held, memory._replace(drawn=_resized(memory.drawn, length=length))
    order = np.concatenate([live, np.flatnonzero(held.rows < 0)])[:size]
    return _Slots(*(column[order] for column in held)), _gather(memory, order, length=length)


def _sizes(slots: int) -> list[int]:
    """Numbers of slots that are ever used, rising: `slots`, its half, and so on, down to `FEWEST`."""
    sizes = [slots]
    while (half := -(-sizes[0] // 2)) >= FEWEST:
        sizes.insert(0, half)
    return sizes


def _lengths(max_tokens: int) -> list[int]:
    """Lengths in tokens that the cache ever has, rising: doubling, up to what the longest completion needs."""
    lengths, longest = [SHORTEST], max_tokens + ROUND
    while lengths[-1] < longest:
        lengths.append(2 * lengths[-1])
    return [*lengths[:-1], longest]


def _at_least(sizes: Sequence[int], needed: int) -> int:
    return next((size for size in sizes if size >= needed), sizes[-1])


_unrolled = jax.jit(unrolled_params, static_argnums=0)


@functools.partial(jax.jit, static_argnames=("decoder", "group_size", "sampling"))
def _prefill(
    params: dict, prompts: Array, prompt_mask: Array, key: PRNGKeyArray, *, decoder, group_size, sampling
) -> tuple[tuple, Int[Array, " batch"], Float[Array, " batch"]]:
    """Keys and values of all prompts; every completion's first token and its log-probability."""
    positions = jnp.broadcast_to(jnp.arange(prompts.shape[1]), prompts.shape)
    hidden, cache = decoder.apply({"params": params}, prompts, positions, prompt_mask)
    scores = logits(decoder.config, params, last_hidden(hidden, prompt_mask))
    rows = jnp.arange(len(prompts) * group_size).reshape(-1, group_size)

    # One prompt at a time: the scores of all rows never exist at once.
    def first_of(inputs):
        own, rows = inputs
        return draw_tokens(jnp.broadcast_to(own, (group_size, len(own))), sampling, _keys(key, rows, 0 * rows))

    tokens, logprobs = jax.lax.map(first_of, (scores, rows))
    return cache, tokens.reshape(-1), logprobs.reshape(-1)


def _keys(key: PRNGKeyArray, rows: Int[Array, " slots"], times: Int[Array, " slots"]) -> Key[Array, " slots"]:
    fold = jax.vmap(jax.random.fold_in)
    return fold(jax.vmap(jax.random.fold_in, (None, 0))(key, rows), times)


@functools.partial(jax.jit, static_argnames=("size", "length"))
def _zeros(prompt_cache: tuple, *, size: int, length: int) -> tuple:
    """Room for `length` tokens' keys and values in each of `size` rows."""
    shapes = jax.tree.map(lambda x: (*x.shape[:ROWS], size, x.shape[ROWS + 1], length, x.shape[-1]), prompt_cache)
    return jax.tree.map(lambda x, shape: jnp.zeros(shape, x.dtype), prompt_cache, shapes)


@functools.partial(jax.jit, static_argnames="length")
def _resized(cache: tuple, *, length: int) -> tuple:
    """The cache with room for `length` tokens."""

    def resized(x: Array) -> Array:
        x = jax.lax.slice_in_dim(x, 0, min(length, x.shape[TIME]), axis=x.ndim + TIME)
        padding = [(0, 0)] * x.ndim
        padding[TIME] = (0, length - x.shape[TIME])
        return jnp.pad(x, padding)

    return jax.tree.map(resized, cache)


@functools.partial(jax.jit, static_argnames="length")
def _gather(memory: _Memory, order: Int[Array, " slots"], *, length: int) -> _Memory:
    """The memory of the slots named by `order`, each with its own copy of its prompt, with a cache of that length."""
    prompts, drawn = (jax.tree.leaves(kind)[0].shape[ROWS] for kind in memory)
    of_prompts, of_drawn = (
        jax.tree.map(lambda x, rows=rows: jnp.take(x, rows, axis=ROWS), kind)
        for kind, rows in zip(memory, (order // (drawn // prompts), order), strict=True)
    )
    return _Memory(of_prompts, _resized(of_drawn, length=length))


@functools.partial(jax.jit, donate_argnames="memory")
def _admit(memory: _Memory, prompt_cache: tuple, places: Int[Array, "2 slots"], count: Int[Array, ""]) -> _Memory:
    """Copies prompts into slots: the first `count` columns of `places` are (slot, prompt)."""

    def copied(index: Array, prompts: tuple) -> tuple:
        slot, prompt = places[:, index]

        def put(mine: Array, theirs: Array) -> Array:
            one = jax.lax.dynamic_slice_in_dim(theirs, prompt, 1, axis=theirs.ndim + ROWS)
            return jax.lax.dynamic_update_slice_in_dim(mine, one, slot, axis=mine.ndim + ROWS)

        return jax.tree.map(put, prompts, prompt_cache)

    return memory._replace(prompts=jax.lax.fori_loop(0, count, copied, memory.prompts))


@functools.partial(jax.jit, static_argnames=("decoder", "sampling", "max_tokens", "stop_ids"), donate_argnames="memory")
def _decode(
    params: dict, memory: _Memory, held: _Slots, key: PRNGKeyArray, enough, *, decoder, sampling, max_tokens, stop_ids
) -> tuple[_Memory, _Round]:
    """Up to `ROUND` tokens for each live slot; fewer once `enough` slots are free.

    The cache is only read while the round lasts: its tokens' keys and values are held apart, all rows' at one place,
    and put there at the end, each row's at its own.
    """
    rows, lengths, drawn, last = held
    size, cached = len(rows), drawn - 1
    prompts, _, prompt_time, _ = jax.tree.leaves(memory.prompts)[0].shape[ROWS:]
    places = jnp.broadcast_to(jnp.arange(prompt_time), (prompts, prompt_time))
    prompt = Context(*memory.prompts, places < lengths[:: size // prompts, None], places)
    places = jnp.arange(jax.tree.leaves(memory.drawn)[0].shape[TIME])
    earlier = Context(*memory.drawn, places < cached[:, None], lengths[:, None] + places)

    def unfinished(state: _Round) -> Bool[Array, ""]:
        return (state.time < ROUND) & ((~state.live).sum() < enough)

    def step(state: _Round) -> _Round:
        time, places = state.time, jnp.arange(ROUND)
        recent = Context(
            *state.recent,
            jnp.broadcast_to(places <= time, (size, ROUND)),
            (lengths + cached)[:, None] + places,
        )
        hidden, kept = decoder.apply(
            {"params": params},
            state.last[:, None],
            (lengths + cached + time)[:, None],
            jnp.ones((size, 1), bool),
            (prompt, earlier, recent),
            place=time,
        )
        scores = logits(decoder.config, params, hidden[:, 0])
        tokens, logprobs = draw_tokens(scores, sampling, _keys(key, rows, drawn + time))
        ended = jnp.isin(tokens, jnp.array(stop_ids, jnp.int32)) | (drawn + time + 1 == max_tokens)

        return _Round(
            time + 1,
            state.live & ~ended,
            tokens,
            kept,
            state.tokens.at[:, time].set(tokens),
            state.logprobs.at[:, time].set(logprobs),
            state.counts + state.live,
        )

    def blank(x: Array) -> Array:
        return jnp.zeros((*x.shape[:TIME], ROUND, x.shape[-1]), x.dtype)

    start = _Round(
        jnp.zeros((), jnp.int32),
        rows >= 0,
        last,
        jax.tree.map(blank, memory.drawn),
        jnp.zeros((size, ROUND), jnp.int32),
        jnp.zeros((size, ROUND)),
        jnp.zeros(size, jnp.int32),
    )
    state = jax.lax.while_loop(unfinished, step, start)

    def merged(cache: Array, recent: Array) -> Array:
        row, time = cache.ndim + ROWS, cache.ndim - 1 + TIME
        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=time)
        return jax.vmap(put, (row, row, 0), row)(cache, recent, cached)

    return memory._replace(drawn=jax.tree.map(merged, memory.drawn, state.recent)), state._replace(recent=())
