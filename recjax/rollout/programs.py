"""The programs with which an engine samples a batch, from shapes: to plan their memory, or to compile them ahead."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from recjax.models.decoder import Decoder
from recjax.models.layer import Cache
from recjax.models.placement import ROWS, AnyMesh, Axes, laid_out, laid_out_by_rules
from recjax.models.sampling import NOTHING_RECORDED, Sampling, TokenRecord
from recjax.models.unrolling import unrolled_params
from recjax.rollout import decoding, keys_values
from recjax.rollout.decoding import RoundOptions, SlotState
from recjax.rollout.keys_values import Memory
from recjax.rollout.plan import EnginePlan, abstract_weights, capacities, first_enough, next_lower


class ProgramCall(NamedTuple):
    """A call of a jitted function with shapes in the place of arrays.

    Attributes:
        function: the jitted function.
        arguments: positional arguments; their shapes have the shardings that the engine's arrays have.
        options: static keyword arguments.
    """

    function: Any
    arguments: tuple
    options: dict[str, Any]

    def trace(self) -> jax.stages.Traced:
        """The traced program."""
        return self.function.trace(*self.arguments, **self.options)


def engine_programs(
    decoder: Decoder,
    plan: EnginePlan,
    mesh: AnyMesh,
    params: dict,
    *,
    prompts: int,
    group_size: int,
    sampling: Sampling,
    stop_ids: tuple[int, ...],
    recording: TokenRecord = NOTHING_RECORDED,
    longest: int = 0,
) -> list[ProgramCall]:
    """The programs of a batch of groups, in the order in which they first run.

    First come prefixes, first tokens and the slots' memory, then a round of tokens. For each longer cache, the growth
    of the cache and another round follow. The last program, if the batch may have fewer slots, keeps half the slots.

    Args:
        plan: the engine's sizes for the batch.
        mesh: the devices that sample.
        params: shapes of the parameters as the engine's programs take them, see `sampling_params`.
        prompts: number of prompts of the batch.
        group_size, sampling, stop_ids, recording: those of the batch.
        longest: most tokens that follow a prompt in its slot; only read for requests that arrive at any time.
    """
    recording = recording.under(sampling)
    prompt_rows = plan.rows(prompts)
    slots = first_enough(plan.slots, prompts * group_size)
    tokens = jax.ShapeDtypeStruct((prompt_rows, plan.prefix_time), jnp.int32)
    mask = jax.ShapeDtypeStruct(tokens.shape, bool)
    prefill_call = ProgramCall(decoding.prefill, (params, tokens, mask, None), {"decoder": decoder})
    calls = [prefill_call]
    prefill = functools.partial(decoding.prefill, decoder=decoder)
    cache, scores = jax.eval_shape(prefill, params, tokens, mask)
    cache = _slots_on_mesh(mesh, cache)
    scores = _on_mesh(mesh, scores, (ROWS, "tensor"))

    completions = min(plan.slots[-1], plan.rows(prompts * group_size))
    rows = jax.ShapeDtypeStruct((completions,), jnp.int32)
    first_options = {"sampling": sampling, "recording": recording}
    first_arguments = (scores, rows, _key_data(completions))
    calls.append(ProgramCall(decoding.first_tokens, first_arguments, first_options))

    shares_prompts = plan.is_batch and prompt_rows * group_size == slots
    creating, memory = _creation(mesh, decoder, plan, cache, slots=slots, shares_prompts=shares_prompts)
    calls += creating
    calls += _filling(cache, memory, slots=slots, shares_prompts=shares_prompts)

    integers = jax.ShapeDtypeStruct((slots,), jnp.int32)
    state = SlotState(
        live=jax.ShapeDtypeStruct((slots,), bool),
        lengths=integers,
        cached=integers,
        last=integers,
        counts=integers,
        limits=integers,
        keys=_key_data(slots),
    )
    enough = jax.ShapeDtypeStruct((), jnp.int32)
    options = RoundOptions(sampling, stop_ids, time=plan.round_time, recording=recording)
    round_options = {"decoder": decoder, "options": options}
    calls.append(ProgramCall(decoding.decode, (params, memory, state, enough), round_options))
    lengths = plan.lengths
    if not plan.is_batch:
        lengths = capacities(longest)
    for length in lengths:
        if length > keys_values.cache_time(memory.later):
            calls.append(ProgramCall(keys_values.resized, (memory.later,), {"time": length}))
            grow = functools.partial(keys_values.resized, time=length)
            longer = jax.eval_shape(grow, memory.later)
            memory = memory._replace(later=_slots_on_mesh(mesh, longer))
            calls.append(ProgramCall(decoding.decode, (params, memory, state, enough), round_options))
    fewer = next_lower(plan.slots, slots)
    if fewer and plan.is_batch:
        order = jax.ShapeDtypeStruct((fewer,), jnp.int32)
        time = keys_values.cache_time(memory.later)
        calls.append(ProgramCall(keys_values.gather_slots, (memory, order), {"time": time}))
    return calls


def first_round(calls: Sequence[ProgramCall]) -> list[ProgramCall]:
    """The calls of `engine_programs` up to a batch's first round of tokens.

    The later programs, for a longer cache or fewer slots, depend on the lengths of the completions.
    """
    functions = [call.function for call in calls]
    first = functions.index(decoding.decode)
    return list(calls[: first + 1])


def sampling_params(decoder: Decoder, mesh: AnyMesh) -> dict:
    """Shapes of all parameters as an engine's programs take them.

    Args:
        decoder: the decoder in its form for sampling; with unrolled layers, the mesh must be one device.
    """
    params = laid_out_by_rules(mesh, abstract_weights(decoder))
    if not decoder.unrolled:
        return params
    unroll = functools.partial(unrolled_params, decoder.config)
    unrolled = jax.eval_shape(unroll, params)
    if jax.default_backend() != "cpu":
        return jax.tree.map(functools.partial(_on_mesh, mesh), unrolled)
    # On a CPU the layers are views of the stacked arrays, which may lie on any device; other arrays are unchanged.
    sampled = {name: leaf for name, leaf in params.items() if name != "layers"}
    for name, layer in unrolled.items():
        if name not in params:
            sampled[name] = jax.tree.map(lambda leaf: leaf.update(sharding=None), layer)
    return sampled


def _creation(
    mesh: AnyMesh, decoder: Decoder, plan: EnginePlan, cache: Cache, *, slots: int, shares_prompts: bool
) -> tuple[list[ProgramCall], Memory]:
    """The programs that create the slots' memory, and its shapes."""
    calls = []

    def create(like: Any, **options: Any) -> Any:
        """Adds a call of `empty` to the programs; returns the shapes of its result."""
        calls.append(ProgramCall(keys_values.empty, (like,), options))
        shapes = jax.eval_shape(functools.partial(keys_values.empty, **options), like)
        return _slots_on_mesh(mesh, shapes)

    prompts = cache.keys_values
    if not shares_prompts:
        prompts = create(cache.keys_values, rows=slots, time=plan.prefix_time, dtype=decoder.cache_dtype)
    time = plan.cache_time(0, slots)
    later = create(cache.keys_values, rows=slots, time=time, dtype=decoder.cache_dtype)
    states = ()
    if cache.states:
        states = create(cache.states, rows=slots)
    return calls, Memory(prompts, later, states)


def _filling(cache: Cache, memory: Memory, *, slots: int, shares_prompts: bool) -> list[ProgramCall]:
    """The programs that copy prompts and states into the slots' memory."""
    places = jax.ShapeDtypeStruct((3, slots), jnp.int32)
    count = jax.ShapeDtypeStruct((), jnp.int32)
    calls = []
    if not shares_prompts:
        arguments = (memory.prompts, cache.keys_values, places, count)
        calls.append(ProgramCall(keys_values.put_started, arguments, {}))
    if cache.states:
        arguments = (memory.states, cache.states, places, count)
        calls.append(ProgramCall(keys_values.put_started, arguments, {}))
    return calls


def _key_data(count: int) -> jax.ShapeDtypeStruct:
    """Shape of the key data of `count` completions."""
    return jax.eval_shape(lambda: jax.random.key_data(jax.random.split(jax.random.key(0), count)))


def _slots_on_mesh(mesh: AnyMesh, tree: Any) -> Any:
    """Shapes of keys, values and states with the sharding that the engine's programs give them."""
    return jax.tree.map(lambda leaf: _on_mesh(mesh, leaf, keys_values.mesh_axes(leaf.ndim)), tree)


def _on_mesh(mesh: AnyMesh, leaf: jax.ShapeDtypeStruct, axes: Sequence[Axes] = ()) -> jax.ShapeDtypeStruct:
    """The shape of a program's result, with its sharding."""
    if mesh.size > 1:
        return laid_out(mesh, leaf.shape, leaf.dtype, *axes)
    # On one device JAX names no axes in the shardings of results.
    return leaf.update(sharding=NamedSharding(mesh, PartitionSpec()))
