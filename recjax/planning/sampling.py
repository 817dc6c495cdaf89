"""The programs that an engine compiles for a batch, from shapes: for the weights, the prompts and the tokens."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from recjax.config import Config
from recjax.models.decoder import Decoder
from recjax.models.placement import AnyMesh, bytes_on_device, laid_out_by_rules, mover
from recjax.models.trainable import combine
from recjax.models.unrolling import copies_layers
from recjax.rollout import decoding, keys_values
from recjax.rollout.plan import EnginePlan, abstract_weights, filled_up, grouped, plan_for, power_of_two
from recjax.rollout.programs import engine_programs


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
        return self.engine.is_batch and self.slots == self.engine.requests


def most_completions(config: Config) -> int:
    """The number of completions that the engine samples for a prompt, the larger of training's and evaluation's."""
    return max(config.rollout.group_size + config.rollout.oversample, config.evaluation.samples)


def longest_in_slot(config: Config, prompt_tokens: int) -> int:
    """Most tokens that follow a prompt in its slot: a completion's, or all other tokens of an agent's context."""
    longest = config.rollout.max_completion_tokens
    if config.task.agent is None:
        return longest
    assert config.rollout.max_context_tokens is not None
    return max(longest, config.rollout.max_context_tokens - prompt_tokens)


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
    requests = prompts * most_completions(config)
    group = most_completions(config)
    if config.task.agent:  # its requests arrive at any time, in programs of few sizes
        prompts = power_of_two(prompts)
        group = None
    with jax.sharding.use_abstract_mesh(sampling_mesh.abstract_mesh):
        plan = plan_for(
            decoder,
            requests,
            longest_in_slot(config, prompt_tokens),
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
    """Prompts and first tokens, the cache's last growth, its transfer to half the slots, and a round in all slots."""
    group_size = most_completions(config)
    calls = engine_programs(
        decoder,
        plan.engine,
        plan.mesh,
        weights,
        prompts=plan.prompts,
        group_size=group_size,
        sampling=config.rollout.sampling(),
        stop_ids=(0,),
        recording=config.recording(),
        longest=longest_in_slot(config, plan.engine.prefix_time),
    )
    prefill, first_tokens = calls[:2]
    last = {call.function: call for call in calls}  # a function's last call has its largest arrays
    decode = last[decoding.decode]
    prompts = decode.arguments[1].prompts
    waiting = 0
    if not plan.shares_prompts:
        # Prompts wait next to the memory of the slots, which have copies of them.
        filling = [call for call in calls if call.function is keys_values.put_started]
        waiting = bytes_on_device(filling[0].arguments[1])

    # One program, because the results of the first are there while the second runs.
    def prefilled(params: dict, prompts: Array, mask: Array, keys: Array) -> tuple:
        cache, scores = prefill.function(params, prompts, mask, **prefill.options)
        rows = jnp.asarray(np.arange(plan.slots) // group_size)
        return cache, first_tokens.function(scores, rows, keys, **first_tokens.options)

    params, tokens, mask, _ = prefill.arguments
    _, _, keys = first_tokens.arguments
    programs = [Executable(jax.jit(prefilled).trace(params, tokens, mask, keys), plan.mesh, 0)]
    if keys_values.resized in last:
        also_held = bytes_on_device((prompts, weights)) + waiting
        programs.append(Executable(last[keys_values.resized].trace(), plan.mesh, also_held))
    if keys_values.gather_slots in last:
        fewer = last[keys_values.gather_slots].trace()
        programs.append(Executable(fewer, plan.mesh, bytes_on_device(weights) + waiting))
    return [*programs, Executable(decode.trace(), plan.mesh, waiting)]
