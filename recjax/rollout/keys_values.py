"""Keys, values and states of the engine's slots: allocates, resizes and fills them; each device has its own slots."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from recjax.models.layer import KeysValues
from recjax.models.placement import ROWS, Axes, constrain, over_rows

# Keys and values are [layers, rows, kv_heads, time, head_dim], or a tuple over layers without the first axis. States of
# delta nets have their rows on the same axis, and no time.
_ROW_AXIS = -4
_TIME_AXIS = -2


class Memory(NamedTuple):
    """The contents of the slots on the device.

    prompts: keys and values of the prompts: a row for each slot, or for each group of consecutive slots, which then all
        read that row.
    later: keys and values of all tokens after the prompts except the last, a row for each slot.
    states: states of delta nets after all these tokens, a row for each slot; empty for models without delta nets.
    """

    prompts: KeysValues
    later: KeysValues
    states: tuple = ()


def cache_rows(keys_values: KeysValues) -> int:
    """Number of rows of keys and values."""
    return jax.tree.leaves(keys_values)[0].shape[_ROW_AXIS]


def cache_time(keys_values: KeysValues) -> int:
    """Capacity of each row of keys and values, in tokens."""
    return jax.tree.leaves(keys_values)[0].shape[_TIME_AXIS]


def over_mesh(cache: Any) -> Any:
    """Constrains keys, values and states to the mesh: rows split like rows of a batch, heads along "tensor"."""

    return jax.tree.map(lambda x: constrain(x, *mesh_axes(x.ndim)), cache)


def mesh_axes(ndim: int) -> list[Axes]:
    """The mesh axes of the dimensions of keys, values and states."""
    axes: list[Axes] = [None] * (ndim + _ROW_AXIS)
    axes += [ROWS, "tensor"]
    return axes


@functools.partial(jax.jit, static_argnames=("rows", "time", "dtype"))
def empty(like: Any, *, rows: int, time: int | None = None, dtype: DTypeLike | None = None) -> Any:
    """Zeros for keys and values of `time` tokens in each of `rows` rows, or for states of `rows` rows.

    Args:
        like: keys and values, or states, of any numbers of rows and tokens.
        time: None for states, which have no tokens.
        dtype: None: the dtype of `like`.
    """

    def zeros(x: Array) -> Array:
        shape = list(x.shape)
        shape[_ROW_AXIS] = rows
        if time is not None:
            shape[_TIME_AXIS] = time
        if dtype is None:
            return jnp.zeros(shape, x.dtype)
        return jnp.zeros(shape, dtype)

    return over_mesh(jax.tree.map(zeros, like))


@functools.partial(jax.jit, static_argnames="time")
def resized(keys_values: KeysValues, *, time: int) -> KeysValues:
    """Keys and values with a capacity of `time` tokens; of more tokens, only the first."""

    def fitted(x: Array) -> Array:
        x = jax.lax.slice_in_dim(x, 0, min(time, x.shape[_TIME_AXIS]), axis=x.ndim + _TIME_AXIS)
        padding = [(0, 0)] * x.ndim
        padding[_TIME_AXIS] = (0, time - x.shape[_TIME_AXIS])
        return jnp.pad(x, padding)

    return over_mesh(jax.tree.map(fitted, keys_values))


@functools.partial(jax.jit, static_argnames="time")
def gather_slots(memory: Memory, order: Int[Array, " slots"], *, time: int) -> Memory:
    """Memory of the slots in `order`, each with its own copy of its prompt and a capacity of `time` later tokens.

    Args:
        order: indices of slots; each device's part contains only its own slots.
    """
    read = _where_rows_lie(read_slots, memory, order)
    return read._replace(later=resized(read.later, time=time))


def read_slots(memory: Memory, slots: Int[Array, " rows"]) -> Memory:
    """Memory of some slots, each with a copy of its prompt; indices count from the first slot on this device."""
    count = cache_rows(memory.later)
    sharing = count // cache_rows(memory.prompts)
    slots = slots % count
    prompt_rows = slots // sharing

    def rows_of(cache: Any, rows: Array) -> Any:
        return over_mesh(jax.tree.map(lambda x: jnp.take(x, rows, axis=_ROW_AXIS), cache))

    return Memory(
        prompts=rows_of(memory.prompts, prompt_rows),
        later=rows_of(memory.later, slots),
        states=rows_of(memory.states, slots),
    )


def _where_rows_lie(function: Callable, *arguments: Any) -> Any:
    """Runs `function(*arguments)` on each device with its own slots; arguments are caches and columns of all slots."""
    return over_rows(lambda _, *own: function(*own), (), *arguments, axis=lambda x: max(x.ndim + _ROW_AXIS, 0))


def put_behind(cache: Any, new: Any, places: Int[Array, "3 rows"], count: Int[Array, ""] | int) -> Any:
    """Copies rows of keys and values into slots, each after the slot's tokens, in place.

    A CPU copies row after row. A GPU needs one kernel for each array, as a kernel for each row takes longer to start.

    Args:
        places: columns (slot, row of `new`, number of the slot's tokens), of which the first `count` are used. States
            replace the slot's, with 0 as the number of tokens.
    """

    def in_turn(cache: Any, new: Any, places: Array, count: Array) -> Any:
        def put(index: Array, cache: Any) -> Any:
            slot, row, tokens = places[:, index]

            def copied(old: Array, new: Array) -> Array:
                new_row = jax.lax.dynamic_slice_in_dim(new, row, 1, axis=new.ndim + _ROW_AXIS)
                start = [0] * old.ndim
                start[_ROW_AXIS] = slot
                start[_TIME_AXIS] = tokens
                return jax.lax.dynamic_update_slice(old, new_row.astype(old.dtype), start)

            return jax.tree.map(copied, cache, new)

        return jax.lax.fori_loop(0, count, put, cache)

    def together(cache: Any, new: Any, places: Array, count: Array) -> Any:
        slots, rows, tokens = places

        def copied(old: Array, new: Array) -> Array:
            # An index beyond the slots is dropped.
            used = jnp.where(jnp.arange(len(slots)) < count, slots, old.shape[_ROW_AXIS])
            times = tokens[:, None] + jnp.arange(new.shape[_TIME_AXIS])
            new_rows = jnp.take(new, rows, axis=_ROW_AXIS)
            ordered = jnp.moveaxis(new_rows, (_ROW_AXIS, _TIME_AXIS), (0, 1))
            return old.at[..., used[:, None], :, times, :].set(ordered.astype(old.dtype), mode="drop")

        return jax.tree.map(copied, cache, new)

    return jax.lax.platform_dependent(cache, new, places, jnp.int32(count), cuda=together, default=in_turn)


@functools.partial(jax.jit, donate_argnames="cache")
def put_started(cache: Any, new: Any, places: Int[Array, "3 slots"], count: Int[Array, ""]) -> Any:
    """Copies the tokens of started completions into slots, see `put_behind`."""
    return over_mesh(put_behind(cache, new, places, count))


def put_round(later: KeysValues, recent: KeysValues, cached: Int[Array, " slots"]) -> KeysValues:
    """Copies a row of `recent` into each slot after its cached tokens, see `put_behind`."""

    def put(later: KeysValues, recent: KeysValues, cached: Array) -> KeysValues:
        order = jnp.arange(len(cached))
        return put_behind(later, recent, jnp.stack([order, order, cached]), len(cached))

    if jax.tree.leaves(later)[0].ndim > -_ROW_AXIS:
        put = functools.partial(jax.lax.platform_dependent, tpu=_merged, default=put)
    return over_mesh(_where_rows_lie(put, later, recent, cached))


def _merged(later: KeysValues, new: KeysValues, cached: Int[Array, " slots"]) -> KeysValues:
    """The TPU version of `put_behind` for stacked layers: reads and writes one complete layer after the other.

    After a round, a TPU's compiler (libtpu of JAX 0.10.2) fails on `put_behind`. For a scatter it changes the cache's
    layout, which takes as much memory again.
    """
    rounds = cache_time(new)
    places = jnp.arange(cache_time(later)) - cached[:, None]
    inside = ((places >= 0) & (places < rounds))[:, None, :, None]
    chosen = jax.nn.one_hot(places, rounds, dtype=jax.tree.leaves(new)[0].dtype)

    def merged(layer: Array, later: KeysValues) -> KeysValues:
        def with_new(old: Array, new: Array) -> Array:
            after_cached = jnp.einsum("stn,sknd->sktd", chosen, new[layer])
            return old.at[layer].set(jnp.where(inside, after_cached, old[layer]))

        return jax.tree.map(with_new, later, new)

    return jax.lax.fori_loop(0, len(jax.tree.leaves(later)[0]), merged, later)
