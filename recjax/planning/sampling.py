"""The programs that an engine compiles for a batch, from shapes: transfer of weights, prompts, a round of tokens."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array

from recjax.config import Config
from recjax.models.decoder import Decoder
from recjax.models.placement import ROWS, bytes_on_device, laid_out, laid_out_by_rules, mover
from recjax.models.trainable import combine
from recjax.rollout import capacity, decoding, keys_values
from recjax.rollout.sampling_mesh import abstract_weights, grouped


class Executable(NamedTuple):
    """A traced program.

    Attributes:
        traced: the program, traced for the devices of the sampling mesh.
        times: number of runs in a step.
        turns: largest number of iterations of its loops whose end depends on the data.
        beside: bytes on each device that are neither arguments nor results nor arrays that the run always holds.
    """

    traced: jax.stages.Traced
    mesh: Mesh
    times: int
    turns: int
    beside: int


class SamplingPlan(NamedTuple):
    """The plan by which an engine samples a batch.

    Attributes:
        mesh: devices that sample.
        prompts, prompt_tokens: size of the batch's prompts, padded for the mesh.
        rows: completions in the batch.
        slots: completions that are sampled at the same time.
        moved: bytes on each device of a second copy of the weights; 0 if the sampler's copy is used directly.
    """

    mesh: Mesh
    prompts: int
    prompt_tokens: int
    rows: int
    slots: int
    moved: int


def most_completions(config: Config) -> int:
    """Number of completions of a prompt that are sampled together: the larger of training's and evaluation's."""
    return max(config.rollout.group_size, config.evaluation.samples)


def sampling_of(config: Config, decoder: Decoder, mesh: Mesh, prompt_tokens: int, free: int) -> SamplingPlan:
    """The plan for the larger of training's and evaluation's batches.

    Args:
        mesh: the run's mesh.
        free: bytes on each device that the run does not always hold.
    """
    weights, on = abstract_weights(decoder), grouped(decoder, mesh, free)
    here, there = (jax.tree.leaves(laid_out_by_rules(each, weights)) for each in (mesh, on))
    same = all(a.sharding.is_equivalent_to(b.sharding, a.ndim) for a, b in zip(here, there, strict=True))
    moved, asked, group = 0 if same else bytes_on_device(there), config.rollout.slots, most_completions(config)
    with jax.set_mesh(on):
        prompts = capacity.filled_up(config.rollout.prompts_per_step)
        rows = prompts * group
        most = rows if asked is None or asked >= config.rollout.prompts_per_step * group else asked
        if asked is None:
            sizes = {"prompts": prompts, "prompt_tokens": prompt_tokens, "rows": rows}
            longest = config.rollout.max_completion_tokens
            most = capacity.slots_that_fit(decoder, **sizes, completion_tokens=longest, free=free - moved)
        return SamplingPlan(on, prompts, prompt_tokens, rows, capacity.filled_up(most), moved)


def cache_bytes(config: Config, decoder: Decoder, plan: SamplingPlan) -> int:
    """Bytes of the key-value cache on one device, for completions of the largest length."""
    copies = plan.prompts + (0 if plan.slots == plan.rows else plan.slots)
    sizes = {"prompts": copies, "prompt_tokens": plan.prompt_tokens, "rows": plan.slots}
    with jax.set_mesh(plan.mesh):
        return capacity.key_value_bytes(decoder, **sizes, completion_tokens=config.rollout.max_completion_tokens)


def executables(config: Config, decoder: Decoder, plan: SamplingPlan, trained: dict, frozen: dict) -> list[Executable]:
    """The programs of a batch, starting with the transfer of the weights.

    Args:
        trained, frozen: the sampler's copy and the frozen parameters, sharded over the run's mesh.
    """
    weights, found, home = combine(trained, frozen), [], 0
    if plan.moved:
        # The weights move one array after another, from the run's mesh to the sampling mesh.
        placed, home = laid_out_by_rules(plan.mesh, weights), bytes_on_device(weights)
        there = home
        for leaf, wanted in zip(jax.tree.leaves(weights), jax.tree.leaves(placed), strict=True):
            if not leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim):
                sent = mover(wanted.sharding).trace(leaf)
                found.append(Executable(sent, leaf.sharding.mesh, 1, 1, there - bytes_on_device(leaf)))
                there += bytes_on_device(wanted)
        weights = placed
    with jax.set_mesh(plan.mesh):
        sampled = [_prefill(config, decoder, plan, weights), *_rounds(config, decoder, plan, weights)]
    return [*found, *(part._replace(beside=part.beside + home) for part in sampled)]


def _prefill(config: Config, decoder: Decoder, plan: SamplingPlan, weights: dict) -> Executable:
    """The program that runs the batch's prompts and samples every completion's first token."""
    shape, group, sampling = (plan.prompts, plan.prompt_tokens), plan.rows // plan.prompts, config.rollout.sampling()

    def begun(params: dict, prompts: Array, mask: Array, keys: Array) -> tuple:
        cache, scores = decoding.prefill(params, prompts, mask, decoder=decoder)
        of = jnp.arange(plan.rows) // group
        return cache, decoding.first_tokens(scores, of, keys, sampling=sampling, chunk=plan.slots)

    prompts, mask = (jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, bool))
    return Executable(jax.jit(begun).trace(weights, prompts, mask, _keys(plan.rows)), plan.mesh, 1, 1, 0)


def _rounds(config: Config, decoder: Decoder, plan: SamplingPlan, weights: dict) -> list[Executable]:
    """The last growth of the cache, its transfer to half the slots, and a round of tokens in all slots."""

    def cache(rows: int, time: int) -> tuple:
        shape = (decoder.config.num_layers, rows, decoder.config.num_kv_heads, time, decoder.config.head_dim)
        return (laid_out(plan.mesh, shape, decoder.dtype, None, ROWS, "tensor"),) * 2

    longest, shares = config.rollout.max_completion_tokens, plan.slots == plan.rows
    time, lengths = capacity.round_time(longest), capacity.cache_lengths(longest)
    prompts = cache(plan.prompts if shares else plan.slots, plan.prompt_tokens)
    waiting = 0 if shares else bytes_on_device(cache(plan.prompts, plan.prompt_tokens))
    later, found = [cache(plan.slots, length) for length in lengths], []
    if len(lengths) > 1:
        grown = keys_values.resized.trace(later[-2], time=lengths[-1])
        found.append(Executable(grown, plan.mesh, 1, 1, bytes_on_device((prompts, weights)) + waiting))
    sizes = capacity.slot_numbers(plan.slots)
    if len(sizes) > 1:
        kept = jax.ShapeDtypeStruct((sizes[-2],), jnp.int32)
        fewer = keys_values.gather_slots.trace(keys_values.Memory(prompts, later[-1]), kept, time=lengths[-1])
        found.append(Executable(fewer, plan.mesh, 1, 1, bytes_on_device(weights) + waiting))
    counts = jax.ShapeDtypeStruct((plan.slots,), jnp.int32)
    rows = decoding.SlotState(jax.ShapeDtypeStruct((plan.slots,), bool), *[counts] * 5, keys=_keys(plan.slots))
    decoded = decoding.decode.trace(
        weights,
        keys_values.Memory(prompts, later[-1]),
        rows,
        jax.ShapeDtypeStruct((), jnp.int32),
        decoder=decoder,
        sampling=config.rollout.sampling(),
        stop_ids=(0,),
        round_time=time,
    )
    rounds = -(-(longest - 1) // time) * -(-plan.rows // plan.slots)
    return [*found, Executable(decoded, plan.mesh, rounds, time, waiting)]


def _keys(rows: int) -> jax.ShapeDtypeStruct:
    return jax.eval_shape(lambda: jax.random.key_data(jax.random.split(jax.random.key(0), rows)))
