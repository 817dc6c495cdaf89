"""Keys, values and states of the engine's slots: allocates, resizes and fills them; each device has its own slots."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from recjax.models.placement import ROWS, constrain, over_rows

# Keys and values are [layers, rows, kv_heads, time, head_dim], or a tuple over layers without the first axis. States of
# delta nets have their rows on the same axis, and no time.
_ROW_AXIS = -4
_TIME_AXIS = -2


class Memory(NamedTuple):
    """Keys and values of the slots: those for their prompts, and those for all later tokens except the last.

    `prompts` has a row for each slot, or a row for each group of consecutive slots, which then all read that row.
    `states` are those of delta nets after all these tokens, a row for each slot; empty for models without delta nets.
    """

    prompts: tuple
    later: tuple
    states: tuple = ()


def cache_rows(cache: tuple) -> int:
    """Number of rows of keys and values."""
    return jax.tree.leaves(cache)[0].shape[_ROW_AXIS]


def cache_time(cache: tuple) -> int:
    """Tokens that each row of keys and values has room for."""
    return jax.tree.leaves(cache)[0].shape[_TIME_AXIS]


def over_mesh(cache: tuple) -> tuple:
    """Constrains keys, values and states to the mesh: rows split like rows of a batch, heads along "tensor"."""
    return jax.tree.map(lambda x: constrain(x, *(None,) * (x.ndim + _ROW_AXIS), ROWS, "tensor"), cache)


@functools.partial(jax.jit, static_argnames=("rows", "time", "dtype"))
def empty(like: tuple, *, rows: int, time: int | None = None, dtype: DTypeLike | None = None) -> tuple:
    """Room for keys and values of `time` tokens in each of `rows` rows; in the dtype of `like` if `dtype` is None.

    Args:
        time: None for states, which have no tokens.
    """

    def shape(x: Array) -> tuple[int, ...]:
        return *x.shape[:_ROW_AXIS], rows, x.shape[-3], x.shape[_TIME_AXIS] if time is None else time, x.shape[-1]

    shapes = jax.tree.map(shape, like)
    return over_mesh(jax.tree.map(lambda x, shape: jnp.zeros(shape, dtype or x.dtype), like, shapes))


@functools.partial(jax.jit, static_argnames="time")
def resized(cache: tuple, *, time: int) -> tuple:
    """The cache with room for `time` tokens; a longer cache keeps its first tokens."""

    def fitted(x: Array) -> Array:
        x = jax.lax.slice_in_dim(x, 0, min(time, x.shape[_TIME_AXIS]), axis=x.ndim + _TIME_AXIS)
        padding = [(0, 0)] * x.ndim
        padding[_TIME_AXIS] = (0, time - x.shape[_TIME_AXIS])
        return jnp.pad(x, padding)

    return over_mesh(jax.tree.map(fitted, cache))


@functools.partial(jax.jit, static_argnames="time")
def gather_slots(memory: Memory, order: Int[Array, " slots"], *, time: int) -> Memory:
    """Memory of the slots in `order`, each with its own copy of its prompt and room for `time` later tokens.

    Args:
        order: indices of slots; each device's part contains only its own slots.
    """
    read = _where_rows_lie(read_slots, memory, order)
    return read._replace(later=resized(read.later, time=time))


def read_slots(memory: Memory, slots: Int[Array, " rows"]) -> Memory:
    """Memory of some slots, each with a copy of its prompt; indices count from the first slot on this device."""
    count = cache_rows(memory.later)
    sharing = cache_rows(memory.later) // cache_rows(memory.prompts)
    slots = slots % count
    parts = (
        jax.tree.map(lambda x, rows=rows: jnp.take(x, rows, axis=_ROW_AXIS), cache)
        for cache, rows in zip(memory, (slots // sharing, slots, slots), strict=True)
    )
    return Memory(*map(over_mesh, parts))


def _where_rows_lie(function: Callable, *arguments: Any) -> Any:
    """Runs `function(*arguments)` on each device with its own slots; arguments are caches and columns of all slots."""
    return over_rows(lambda _, *own: function(*own), (), *arguments, axis=lambda x: max(x.ndim + _ROW_AXIS, 0))


def put_behind(cache: tuple, new: tuple, places: Int[Array, "3 rows"], count: Int[Array, ""] | int) -> tuple:
    """Copies rows of keys and values into slots, each behind the slot's tokens, in place.

    A CPU copies row after row. A GPU needs one kernel for each array, as a kernel for each row takes longer to start.

    Args:
        places: columns (slot, row of `new`, number of the slot's tokens), of which the first `count` are used. States
            replace the slot's, with 0 as the number of tokens.
    """

    def in_turn(cache: tuple, new: tuple, places: Array, count: Array) -> tuple:
        def put(index: Array, cache: tuple) -> tuple:
            slot, row, tokens = places[:, index]

            def copied(mine: Array, theirs: Array) -> Array:
                new_row = jax.lax.dynamic_slice_in_dim(theirs, row, 1, axis=theirs.ndim + _ROW_AXIS)
                start = [0] * mine.ndim
                start[_ROW_AXIS] = slot
                start[_TIME_AXIS] = tokens
                return jax.lax.dynamic_update_slice(mine, new_row.astype(mine.dtype), start)

            return jax.tree.map(copied, cache, new)

        return jax.lax.fori_loop(0, count, put, cache)

    def together(cache: tuple, new: tuple, places: Array, count: Array) -> tuple:
        slots, rows, tokens = places

        def copied(mine: Array, theirs: Array) -> Array:
            used = jnp.where(jnp.arange(len(slots)) < count, slots, mine.shape[_ROW_AXIS])
            times = tokens[:, None] + jnp.arange(theirs.shape[_TIME_AXIS])
            ordered = jnp.moveaxis(jnp.take(theirs, rows, axis=_ROW_AXIS), (_ROW_AXIS, _TIME_AXIS), (0, 1))
            return mine.at[..., used[:, None], :, times, :].set(ordered.astype(mine.dtype), mode="drop")

        return jax.tree.map(copied, cache, new)

    return jax.lax.platform_dependent(cache, new, places, jnp.int32(count), cuda=together, default=in_turn)


@functools.partial(jax.jit, donate_argnames="cache")
def put_started(cache: tuple, new: tuple, places: Int[Array, "3 slots"], count: Int[Array, ""]) -> tuple:
    """Copies the tokens of started completions into slots, see `put_behind`."""
    return over_mesh(put_behind(cache, new, places, count))


def put_round(later: tuple, recent: tuple, cached: Int[Array, " slots"]) -> tuple:
    """Copies a row of `recent` into each slot behind its cached tokens, see `put_behind`."""

    def put(later: tuple, recent: tuple, cached: Array) -> tuple:
        order = jnp.arange(len(cached))
        return put_behind(later, recent, jnp.stack([order, order, cached]), len(cached))

    if jax.tree.leaves(later)[0].ndim > -_ROW_AXIS:
        put = functools.partial(jax.lax.platform_dependent, tpu=_merged, default=put)
    return over_mesh(_where_rows_lie(put, later, recent, cached))


def _merged(later: tuple, new: tuple, cached: Int[Array, " slots"]) -> tuple:
    """The TPU version of `put_behind` for stacked layers: reads and writes each whole layer in turn.

    After a round, a TPU's compiler (libtpu of JAX 0.10.2) fails on `put_behind`. For a scatter it changes the cache's
    layout, which takes as much memory again.
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
