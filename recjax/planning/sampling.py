"""The programs that an engine compiles for a batch, from shapes: for the weights, the prompts and the tokens."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from recjax.config import Config
from recjax.models.decoder import Decoder
from recjax.models.placement import ROWS, AnyMesh, bytes_on_device, laid_out, laid_out_by_rules, mover
from recjax.models.trainable import combine
from recjax.models.unrolling import copies_layers
from recjax.rollout import decoding, keys_values
from recjax.rollout.plan import EnginePlan, abstract_weights, filled_up, grouped, plan_for


class Executable(NamedTuple):
    """A traced program.

    Attributes:
        traced: the program, traced for the devices of its mesh.
        also_held: bytes on each device that are neither arguments nor results nor arrays that the run always holds.
    """

    traced: jax.stages.Traced
    mesh: AnyMesh
    also_held: int


class SamplingPlan(NamedTuple):
    """The plan by which an engine samples a batch.

    Attributes:
        mesh: devices that sample.
        engine: the engine's sizes for the batch.
        prompts: number of prompts, padded for the mesh.
        moved: bytes that a second copy of the weights takes on each device; 0 if the engine uses the sampler's copy.
        copied: bytes that unrolled layers take on each device; 0 if the engine does not copy them.
    """

    mesh: AnyMesh
    engine: EnginePlan
    prompts: int
    moved: int
    copied: int

    @property
    def slots(self) -> int:
        """Completions that are sampled at the same time."""
        return self.engine.slots[-1]

    @property
    def shares_prompts(self) -> bool:
        """True if each group reads a single copy of its prompt, as all completions have slots."""
        return self.slots == self.engine.requests


def most_completions(config: Config) -> int:
    """The number of completions that the engine samples for a prompt, the larger of training's and evaluation's."""
    return max(config.rollout.group_size, config.evaluation.samples)


def sampling_of(
    config: Config, decoder: Decoder, mesh: AnyMesh, prompt_tokens: int, free: int, platform: str
) -> SamplingPlan:
    """The engine plan for training and evaluation batches, sized for the larger ones.

    Args:
        mesh: the run's mesh.
        free: bytes on each device that the run does not always hold.
        platform: JAX's name of the devices' platform.
    """
    weights = abstract_weights(decoder)
    sampling_mesh = grouped(decoder, mesh, free)
    run_leaves = jax.tree.leaves(laid_out_by_rules(mesh, weights))
    sampling_leaves = jax.tree.leaves(laid_out_by_rules(sampling_mesh, weights))
    moved = 0
    for leaf, moved_leaf in zip(run_leaves, sampling_leaves, strict=True):
        if not leaf.sharding.is_equivalent_to(moved_leaf.sharding, leaf.ndim):
            moved = bytes_on_device(sampling_leaves)
            break
    copied = 0
    if copies_layers(decoder.config, platform):
        copied = bytes_on_device(laid_out_by_rules(sampling_mesh, {"layers": weights["layers"]}))
    prompts = config.rollout.prompts_per_step
    group = most_completions(config)
    with jax.sharding.use_abstract_mesh(sampling_mesh.abstract_mesh):
        plan = plan_for(
            decoder,
            prompts * group,
            config.rollout.max_completion_tokens,
            group,
            prefix_time=prompt_tokens,
            slots=config.rollout.slots,
            free=free - moved - copied,
        )
        return SamplingPlan(sampling_mesh, plan, filled_up(prompts), moved, copied)


def sampling_executables(
    config: Config, decoder: Decoder, plan: SamplingPlan, trained: dict, frozen: dict
) -> list[Executable]:
    """The programs that sample a batch, starting with the transfer of the weights.

    Args:
        trained, frozen: the sampler's copy and the frozen parameters, sharded over the run's mesh.
    """
    weights = combine(trained, frozen)
    programs = []
    run_copy = 0
    if plan.moved:
        # The weights move array by array, from the run's mesh to the sampling mesh.
        moved_weights = laid_out_by_rules(plan.mesh, weights)
        run_copy = bytes_on_device(weights)
        held = run_copy
        for leaf, moved_leaf in zip(jax.tree.leaves(weights), jax.tree.leaves(moved_weights), strict=True):
            if not leaf.sharding.is_equivalent_to(moved_leaf.sharding, leaf.ndim):
                move: Any = mover(moved_leaf.sharding)
                programs.append(Executable(move.trace(leaf), leaf.sharding.mesh, held - bytes_on_device(leaf)))
                held += bytes_on_device(moved_leaf)
        weights = moved_weights
    assert isinstance(plan.mesh, Mesh)
    with jax.set_mesh(plan.mesh):
        sampling = _sampling_programs(config, decoder, plan, weights)
    for program in sampling:
        programs.append(program._replace(also_held=program.also_held + run_copy + plan.copied))
    return programs


def _sampling_programs(config: Config, decoder: Decoder, plan: SamplingPlan, weights: dict) -> list[Executable]:
    """Prompts and first tokens, the cache's last growth, its transfer to half the slots, and a step in all slots."""
    prompt_time = plan.engine.prefix_time
    lengths = plan.engine.lengths
    prompt_index = np.arange(plan.slots) // most_completions(config)
    sampling = config.rollout.sampling()
    recording = config.rollout.recording()

    def prefilled(params: dict, prompts: Array, mask: Array, keys: Array) -> tuple:
        cache, scores = decoding.prefill(params, prompts, mask, decoder=decoder)
        first = decoding.first_tokens(scores, jnp.asarray(prompt_index), keys, sampling=sampling, recording=recording)
        return cache, first

    tokens = jax.ShapeDtypeStruct((plan.prompts, prompt_time), jnp.int32)
    mask = jax.ShapeDtypeStruct((plan.prompts, prompt_time), bool)
    prompt_cache, _ = jax.eval_shape(functools.partial(decoding.prefill, decoder=decoder), weights, tokens, mask)

    def resized(x: jax.ShapeDtypeStruct, rows: int, time: int) -> jax.ShapeDtypeStruct:
        shape = *x.shape[:-4], rows, x.shape[-3], time, x.shape[-1]
        return laid_out(plan.mesh, shape, x.dtype, None, ROWS, "tensor")

    def cache(rows: int, time: int) -> tuple:
        return jax.tree.map(lambda x: resized(x, rows, time), prompt_cache[:2])

    states = jax.tree.map(lambda x: resized(x, plan.slots, x.shape[-2]), prompt_cache[2:])
    programs = [Executable(jax.jit(prefilled).trace(weights, tokens, mask, _keys(plan.slots)), plan.mesh, 0)]
    if plan.shares_prompts:
        prompts = cache(plan.prompts, prompt_time)
        waiting = 0
    else:
        prompts = cache(plan.slots, prompt_time)
        waiting = bytes_on_device(cache(plan.prompts, prompt_time))
    longest = cache(plan.slots, lengths[-1])
    if len(lengths) > 1:
        grown = keys_values.resized.trace(cache(plan.slots, lengths[-2]), time=lengths[-1])
        programs.append(Executable(grown, plan.mesh, bytes_on_device((prompts, weights)) + waiting))
    if len(plan.engine.slots) > 1:
        kept = jax.ShapeDtypeStruct((plan.engine.slots[-2],), jnp.int32)
        memory = keys_values.Memory(prompts, longest, *states)
        fewer = keys_values.gather_slots.trace(memory, kept, time=lengths[-1])
        programs.append(Executable(fewer, plan.mesh, bytes_on_device(weights) + waiting))
    counts = jax.ShapeDtypeStruct((plan.slots,), jnp.int32)
    rows = decoding.SlotState(jax.ShapeDtypeStruct((plan.slots,), bool), *[counts] * 5, keys=_keys(plan.slots))
    decoded = decoding.decode.trace(
        weights,
        keys_values.Memory(prompts, longest, *states),
        rows,
        jax.ShapeDtypeStruct((), jnp.int32),
        decoder=decoder,
        options=decoding.RoundOptions(sampling, (0,), plan.engine.round_time, recording),
    )
    programs.append(Executable(decoded, plan.mesh, waiting))
    return programs


def _keys(rows: int) -> jax.ShapeDtypeStruct:
    return jax.eval_shape(lambda: jax.random.key_data(jax.random.split(jax.random.key(0), rows)))
