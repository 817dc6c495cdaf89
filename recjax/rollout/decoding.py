"""The engine's programs on the device: prompts run, completions begun and continued, and the memory of their slots."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from recjax.models.decoder import Context, Decoder, logits
from recjax.models.logprobs import Sampling, last_hidden
from recjax.models.placement import ROWS, constrain, row_shards
from recjax.rollout.choosing import sample_tokens

# Keys and values are [layers, rows, kv_heads, time, head_dim], or a tuple over layers without the first axis.
_ROW_AXIS, _TIME_AXIS = -4, -2


class Memory(NamedTuple):
    """Keys and values of the slots: of their prompts, and of all later tokens but the last.

    `prompts` has a row for each slot, or a row for each group of consecutive slots, which then all read it.
    """

    prompts: tuple
    later: tuple


class Rows(NamedTuple):
    """What the slots are at.

    Attributes:
        live: sample a token in this call.
        lengths, cached: tokens whose keys and values are in `prompts` and in `later`.
        last: the token sampled last.
        counts: tokens sampled so far; the next one is sampled with fold_in(key, count).
        limits: tokens that are sampled at most.
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
    """State of a round after `time` tokens, of which a slot has kept the first `counts`.

    `recent` has the keys and values of this round's tokens but the last.
    """

    time: Int[Array, ""]
    live: Bool[Array, " slots"]
    last: Int[Array, " slots"]
    recent: tuple
    tokens: Int[Array, "slots round"]
    logprobs: Float[Array, "slots round"]
    counts: Int[Array, " slots"]


def cache_rows(cache: tuple) -> int:
    """Rows of keys and values."""
    return jax.tree.leaves(cache)[0].shape[_ROW_AXIS]


def cache_time(cache: tuple) -> int:
    """Tokens that each row of keys and values has room for."""
    return jax.tree.leaves(cache)[0].shape[_TIME_AXIS]


@functools.partial(jax.jit, static_argnames="decoder")
def prefill(
    params: dict, prompts: Int[Array, "prompts time"], mask: Bool[Array, "prompts time"], *, decoder: Decoder
) -> tuple[tuple, Float[Array, "prompts vocab"]]:
    """Keys and values of prompts, right-padded, and the scores of the token after each."""
    positions = jnp.broadcast_to(jnp.arange(prompts.shape[1]), prompts.shape)
    hidden, cache = decoder.apply({"params": params}, prompts, positions, mask)
    return _laid_out(cache), _scores(decoder, params, last_hidden(hidden, mask))


def _scores(decoder: Decoder, params: dict, hidden: Float[Array, "rows hidden"]) -> Float[Array, "rows vocab"]:
    """Scores of the next token, split as the head is: left to the compiler, the head would be sent for every token."""
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
    """Every completion's first token and its log-probability.

    Args:
        of: each completion's prompt.
        chunk: completions whose scores exist at one time.
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


def _laid_out(cache: tuple) -> tuple:
    """The cache over the mesh: rows as those of a batch, heads along "tensor"."""
    return jax.tree.map(lambda x: constrain(x, *(None,) * (x.ndim + _ROW_AXIS), ROWS, "tensor"), cache)


@functools.partial(jax.jit, static_argnames=("rows", "time"))
def empty(like: tuple, *, rows: int, time: int) -> tuple:
    """Room for the keys and values of `time` tokens in each of `rows` rows."""
    shapes = jax.tree.map(lambda x: (*x.shape[:_ROW_AXIS], rows, x.shape[-3], time, x.shape[-1]), like)
    return _laid_out(jax.tree.map(lambda x, shape: jnp.zeros(shape, x.dtype), like, shapes))


@functools.partial(jax.jit, static_argnames="time")
def resized(cache: tuple, *, time: int) -> tuple:
    """The cache with room for `time` tokens; of a longer one the first are kept."""

    def fitted(x: Array) -> Array:
        x = jax.lax.slice_in_dim(x, 0, min(time, x.shape[_TIME_AXIS]), axis=x.ndim + _TIME_AXIS)
        padding = [(0, 0)] * x.ndim
        padding[_TIME_AXIS] = (0, time - x.shape[_TIME_AXIS])
        return jnp.pad(x, padding)

    return _laid_out(jax.tree.map(fitted, cache))


@functools.partial(jax.jit, static_argnames="time")
def gathered(memory: Memory, order: Int[Array, " slots"], *, time: int) -> Memory:
    """The memory of the slots that `order` names, each with a copy of its prompt and room for `time` later tokens.

    Args:
        order: each device's part names slots of its own.
    """
    read = _where_rows_lie(_read, memory, order)
    return read._replace(later=resized(read.later, time=time))


def _read(memory: Memory, slots: Int[Array, " rows"]) -> Memory:
    """What some slots hold, with a copy of its prompt for each; they are counted from the first on this device."""
    count, sharing = cache_rows(memory.later), cache_rows(memory.later) // cache_rows(memory.prompts)
    slots = slots % count
    prompts, later = (
        jax.tree.map(lambda x, rows=rows: jnp.take(x, rows, axis=_ROW_AXIS), cache)
        for cache, rows in zip(memory, (slots // sharing, slots), strict=True)
    )
    return Memory(_laid_out(prompts), _laid_out(later))


@functools.partial(jax.jit, donate_argnames="memory")
def put_prompts(memory: Memory, cache: tuple, places: Int[Array, "2 slots"], count: Int[Array, ""]) -> Memory:
    """Copies prompts into slots: the first `count` columns of `places` are (slot, row of `cache`)."""

    def copied(index: Array, prompts: tuple) -> tuple:
        slot, prompt = places[:, index]

        def put(mine: Array, theirs: Array) -> Array:
            one = jax.lax.dynamic_slice_in_dim(theirs, prompt, 1, axis=theirs.ndim + _ROW_AXIS)
            return jax.lax.dynamic_update_slice_in_dim(mine, one, slot, axis=mine.ndim + _ROW_AXIS)

        return jax.tree.map(put, prompts, cache)

    return memory._replace(prompts=_laid_out(jax.lax.fori_loop(0, count, copied, memory.prompts)))


def _contexts(memory: Memory, lengths: Int[Array, " rows"], cached: Int[Array, " rows"]) -> tuple[Context, Context]:
    """What the rows' next tokens attend to; rows that share a prompt have one length."""
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
    """Runs tokens that follow what slots hold, puts their keys and values behind it, and scores the token after them.

    Args:
        slots: which ones; one that is named twice has the same tokens both times.
        tokens: right-padded; `memory.later` has room for all of them, padding included.
        mask: True at real tokens.
        lengths, cached: of these slots, as in `Rows`.
    """
    read = _read(memory, slots)
    positions = (lengths + cached)[:, None] + jnp.arange(tokens.shape[1])
    hidden, new = decoder.apply({"params": params}, tokens, positions, mask, _contexts(read, lengths, cached))

    later = _laid_out(_put_behind(memory.later, new, cached, slots))
    return memory._replace(later=later), _scores(decoder, params, last_hidden(hidden, mask))


def _put_behind(
    later: tuple, new: tuple, cached: Int[Array, " rows"], slots: Int[Array, " rows"] | None = None
) -> tuple:
    """Copies rows of keys and values into slots, each behind what it has cached: row after row, in place.

    Args:
        slots: of the rows; None: one row for each slot, in order.
    """

    def put(row: Array, later: tuple) -> tuple:
        def copied(mine: Array, theirs: Array) -> Array:
            one = jax.lax.dynamic_slice_in_dim(theirs, row, 1, axis=theirs.ndim + _ROW_AXIS)
            start = [0] * mine.ndim
            start[_ROW_AXIS], start[_TIME_AXIS] = row if slots is None else slots[row], cached[row]
            return jax.lax.dynamic_update_slice(mine, one, start)

        return jax.tree.map(copied, later, new)

    return jax.lax.fori_loop(0, len(cached), put, later)


def _merged_behind(later: tuple, new: tuple, cached: Int[Array, " slots"]) -> tuple:
    """As `_put_behind` with a row for each slot, of stacked layers one by one: all of a layer is read and written.

    A TPU's compiler lays an array out anew, in as much memory again, where rows are written at places of their own.
    """
    rounds = cache_time(new)
    places = jnp.arange(cache_time(later)) - cached[:, None]
    inside = ((places >= 0) & (places < rounds))[:, None, :, None]
    chosen = jax.nn.one_hot(places, rounds, dtype=jax.tree.leaves(new)[0].dtype)

    def merged(layer: Array, later: tuple) -> tuple:
        def of(mine: Array, theirs: Array) -> Array:
            behind = jnp.einsum("stn,sknd->sktd", chosen, theirs[layer])
            return mine.at[layer].set(jnp.where(inside, behind, mine[layer]))

        return jax.tree.map(of, later, new)

    return jax.lax.fori_loop(0, len(jax.tree.leaves(later)[0]), merged, later)


def _where_rows_lie(function: Callable, *arguments: Any) -> tuple:
    """`function(*arguments)`, caches and columns of all slots, on each device with the slots that it has."""
    shards = row_shards()
    if shards == 1 or len(arguments[-1]) % shards:
        return function(*arguments)

    def spec(x: Array) -> PartitionSpec:
        return PartitionSpec(*(None,) * max(x.ndim + _ROW_AXIS, 0), ROWS)

    specs = jax.tree.map(spec, arguments)
    on_each = jax.shard_map(function, in_specs=specs, out_specs=specs[0], axis_names={*ROWS}, check_vma=False)
    return on_each(*arguments)


@functools.partial(jax.jit, static_argnames=("decoder", "sampling", "stop_ids", "round_time"), donate_argnames="memory")
def decode(
    params: dict,
    memory: Memory,
    rows: Rows,
    enough: Int[Array, ""],
    *,
    decoder: Decoder,
    sampling: Sampling,
    stop_ids: tuple[int, ...],
    round_time: int,
) -> tuple[Memory, Decoded]:
    """Up to `round_time` tokens for each live slot, fewer once no more than `enough` are live.

    The memory is only read while the round lasts: its tokens' keys and values are held apart, all slots' at one place,
    and put there at the end, each slot's at its own. Behind what it has cached a slot's memory means nothing, so that
    slots that are not live lose nothing either, as long as there is room for a round.
    """
    options = {"decoder": decoder, "sampling": sampling, "stop_ids": stop_ids, "round_time": round_time}
    state = _round(params, memory.prompts, _contexts(memory, rows.lengths, rows.cached), rows, enough, **options)

    put = _put_behind
    if not decoder.unrolled:
        put = functools.partial(jax.lax.platform_dependent, tpu=_merged_behind, default=_put_behind)
    later = _laid_out(_where_rows_lie(put, memory.later, state.recent, rows.cached))
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
    """Groups of completions that need no more than their first token and one round, in one program.

    Args:
        prompts: right-padded; each is that of `group_size` consecutive completions.
    Returns:
        Tokens, their log-probabilities, and how many of them each completion has.
    """
    cache, scores = prefill(params, prompts, mask, decoder=decoder)
    of = jnp.arange(len(limits)) // group_size
    tokens, logprobs = first_tokens(scores, of, keys, sampling=sampling, chunk=len(limits))
    zeros, places = jnp.zeros_like(of), jnp.broadcast_to(jnp.arange(mask.shape[1]), mask.shape)
    live = ~jnp.isin(tokens, jnp.array(stop_ids, jnp.int32)) & (limits > 1)
    rows = Rows(live, mask.sum(-1)[of], zeros, tokens, zeros + 1, limits, keys)
    options = {"decoder": decoder, "sampling": sampling, "stop_ids": stop_ids, "round_time": round_time}
    state = _round(params, cache, (Context(*cache, mask, places),), rows, jnp.zeros((), jnp.int32), **options)
    tokens = jnp.concatenate([tokens[:, None], state.tokens], axis=1)
    return tokens, jnp.concatenate([logprobs[:, None], state.logprobs], axis=1), 1 + state.counts


def _round(
    params: dict,
    like: tuple,
    contexts: tuple[Context, ...],
    rows: Rows,
    enough: Int[Array, ""],
    *,
    decoder: Decoder,
    sampling: Sampling,
    stop_ids: tuple[int, ...],
    round_time: int,
) -> Decoded:
    """The tokens of a round, over what they attend to beside each other; `like` is any cache."""
    slots, places, starts = len(rows.live), jnp.arange(round_time), rows.lengths + rows.cached

    def unfinished(state: Decoded) -> Bool[Array, ""]:
        return (state.time < round_time) & (state.live.sum() > enough)

    def step(state: Decoded) -> Decoded:
        time = state.time
        seen = jnp.broadcast_to(places <= time, (slots, round_time))
        hidden, kept = decoder.apply(
            {"params": params},
            state.last[:, None],
            (starts + time)[:, None],
            jnp.ones((slots, 1), bool),
            (*contexts, Context(*state.recent, seen, starts[:, None] + places)),
            place=time,
        )
        scores = _scores(decoder, params, hidden[:, 0])
        tokens, logprobs = sample_tokens(scores, sampling, _step_keys(rows.keys, rows.counts + time))
        ended = jnp.isin(tokens, jnp.array(stop_ids, jnp.int32)) | (rows.counts + time + 1 >= rows.limits)
        return Decoded(
            time + 1,
            state.live & ~ended,
            tokens,
            _laid_out(kept),
            state.tokens.at[:, time].set(tokens),
            state.logprobs.at[:, time].set(logprobs),
            state.counts + state.live,
        )

    start = Decoded(
        jnp.zeros((), jnp.int32),
        rows.live,
        rows.last,
        empty(like, rows=slots, time=round_time),
        jnp.zeros((slots, round_time), jnp.int32),
        jnp.zeros((slots, round_time)),
        jnp.zeros(slots, jnp.int32),
    )
    return jax.lax.while_loop(unfinished, step, start)
