"""A run's two large programs, sampling and the update, compiled from shapes for devices that may be absent."""

import dataclasses
import re
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from recjax.algorithms.options import require
from recjax.config import Config
from recjax.experience.batch import sampled_shape
from recjax.hub.policy import attention_kernel, teacher_decoder
from recjax.models.placement import ROWS, bytes_on_device, laid_out, laid_out_by_rules
from recjax.planning.dry_run import resolve
from recjax.planning.memory import START, TEACHER, Model, batch_arrays, held, sampled_from
from recjax.planning.program_costs import Traffic, collectives, matmul_flops
from recjax.planning.sampling import Executable, SamplingPlan, executables, sampling_of
from recjax.planning.topology import Target
from recjax.training.mesh import check_fits, make_mesh
from recjax.training.packing import Packed, RowShape, shape_for
from recjax.training.update import TrainState, recipe_of, update

PROGRAMS = ("sample", "update")


class Plan(NamedTuple):
    """A run as shapes on a mesh.

    Attributes:
        held: arrays that stay on the devices all the time, by name, as sharded shapes.
        sampler: the sampler's weights, by name: arrays of `held`, or copies made for a batch.
        sampling_plan: the plan by which the engine samples a batch.
    """

    config: Config
    target: Target
    mesh: Mesh
    model: Model
    prompt_tokens: int
    held: dict[str, Any]
    sampler: dict[str, Any]
    sampling_plan: SamplingPlan


class Program(NamedTuple):
    """A compiled program on one device; sizes in bytes.

    Attributes:
        needed: total memory with arguments; for a program that does not fit, the size in the compiler's error.
        temporaries: the part of `needed` that is neither argument nor result.
        flops: floating-point operations of its matmuls.
        refusal: the compiler's error if the program alone is too large for the device. Temporaries and collectives are
            then unknown.
    """

    needed: int
    temporaries: int
    flops: int
    collectives: dict[str, Traffic]
    seconds: float
    refusal: str | None = None


def plan(config: Config, target: Target) -> Plan:
    """Sharded shapes of a run on a target's devices; reads no weights.

    Raises:
        ValueError: an invalid config, a config with an agent or a followed store, or a mesh that does not divide the
            devices or the model.
    """
    if config.task.agent:
        remedy = "the programs of agents are not known ahead; remove it, and see what one turn needs"
        require(False, "task.agent", config.task.agent, remedy)
    remedy = "the programs of a run that follows a store are not known ahead; remove it, and see what a batch needs"
    require(not config.follows, "experience.follow", config.follows, remedy)
    if config.model.dtype == "auto" and target.devices[0].platform != "cpu":
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype="bfloat16"))
    known = resolve(config)
    if known.model is None or known.prompt_tokens is None:
        remedies = [] if known.prompt_tokens else ["set rollout.max_prompt_tokens"]
        raise ValueError("; ".join([*known.notes, *remedies]))
    decoder = known.model.decoder
    kernel = attention_kernel(config.model.attention, decoder.config, decoder.dtype, target.devices[0])
    model = known.model._replace(decoder=decoder.clone(attention=kernel))
    mesh = make_mesh(config.mesh, target.devices)
    check_fits(mesh, decoder.config)
    on_mesh = {name: laid_out_by_rules(mesh, part.tree) for name, part in held(config, model).items()}
    name, weights = sampled_from(config, model)
    sampler = {name: laid_out_by_rules(mesh, weights)}
    free = target.memory - bytes_on_device(on_mesh | sampler)
    sampling_plan = sampling_of(config, model.decoder, mesh, known.prompt_tokens, free)
    planned = Plan(config, target, mesh, model, known.prompt_tokens, on_mesh, sampler, sampling_plan)
    _turns(planned)  # raises an error if the token budget is too small
    return planned


def given(plan: Plan, program: str) -> dict[str, Any]:
    """The arguments of a program from `plan.held`; for sampling, also the weights of `plan.sampler`."""
    if program == "sample":
        return plan.sampler | {"frozen parameters": plan.held["frozen parameters"]}
    names = ["trained parameters", "optimizer's state"]
    names += [START] if plan.config.algorithm.build().needs_reference else []
    names += ["frozen parameters", *([TEACHER] if TEACHER in plan.held else [])]
    return {name: plan.held[name] for name in names}


def beside(plan: Plan, program: str) -> int:
    """Bytes that a device holds while a program runs, in addition to the program's arguments."""
    passed = given(plan, program)
    return bytes_on_device({name: tree for name, tree in plan.held.items() if name not in passed})


def _prompts(plan: Plan, parts: int = 1) -> int:
    """Number of prompts of a batch, padded so that each micro-batch has equally many on every device."""
    multiple = parts * plan.mesh.shape["data"] * plan.mesh.shape["fsdp"]
    return -(-plan.config.rollout.prompts_per_step // multiple) * multiple


def micro_batches_of(plan: Plan) -> int:
    """Number of micro-batches of an update without packing."""
    positions = sampled_shape(plan.config, plan.prompt_tokens).positions
    return plan.config.micro_batches(positions, plan.mesh.shape["data"] * plan.mesh.shape["fsdp"])


def compiled(plan: Plan, program: str) -> Program:
    """Traces, compiles and measures one of PROGRAMS, without running it."""
    started, taken = time.perf_counter(), bytes_on_device(given(plan, program))
    parts = _sampling(plan) if program == "sample" else [_update(plan)]
    peaks, flops, traffic = [], 0, {}
    for part in parts:
        flops += part.times * matmul_flops(part.traced.jaxpr, unknown_trips=part.turns) // len(plan.target.devices)
        try:
            with jax.set_mesh(part.mesh):
                executable = part.traced.lower().compile(compiler_options=dict(plan.target.options))
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            needed = max(_needed(str(error)) + part.beside, taken)
            return Program(needed, 0, flops, {}, time.perf_counter() - started, str(error).splitlines()[0])
        peaks.append(part.beside + _peak(executable, plan.target))
        for kind, sent in collectives(executable.as_text(), unknown_trips=part.turns).items():
            counted = traffic.get(kind, Traffic(0, 0))
            traffic[kind] = Traffic(*(a + part.times * b for a, b in zip(counted, sent, strict=True)))
    return Program(max(peaks), max(peaks) - taken, flops, traffic, time.perf_counter() - started)


def _peak(executable: jax.stages.Compiled, target: Target) -> int:
    """Bytes that a program takes on a device, with its arguments and results."""
    memory = executable.memory_analysis()
    lasting = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    if target.devices[0].platform == "tpu":
        # On a TPU, the sum of temporaries exceeds the largest part that exists at the same time.
        return memory.peak_memory_in_bytes
    return max(memory.peak_memory_in_bytes, lasting + memory.temp_size_in_bytes)


def _needed(refusal: str) -> int:
    """The number of bytes in the compiler's error about a program that is too large."""
    found = re.search(r"Used ([\d.]+)([KMGT])", refusal) or re.search(r"\(([\d.]+)([KMGT])\) exceeds", refusal)
    return int(float(found[1]) * 1024 ** ("KMGT".index(found[2]) + 1)) if found else 0


def _sampling(plan: Plan) -> list[Executable]:
    """The engine's programs."""
    return executables(plan.config, plan.model.decoder, plan.sampling_plan, *given(plan, "sample").values())


def _update(plan: Plan) -> Executable:
    with jax.set_mesh(plan.mesh):
        return Executable(_traced_update(plan), plan.mesh, 1, _turns(plan), 0)


def _traced_update(plan: Plan) -> jax.stages.Traced:
    config, arguments = plan.config, given(plan, "update")
    teacher = arguments.pop(TEACHER, None)
    params, optimizer_state, *reference, frozen = arguments.values()
    packed, micro_batches = _packed(plan), micro_batches_of(plan)
    shape = sampled_shape(config, plan.prompt_tokens)._replace(prompts=_prompts(plan, micro_batches))
    of_turns = config.algorithm.build().reads("turn_rewards", "token_turns")
    arrays = batch_arrays(shape, config.task.agent_turns if of_turns else None)
    return update.trace(
        TrainState(params, optimizer_state),
        frozen,
        reference[0] if reference else None,
        jax.tree.map(lambda array: laid_out(plan.mesh, array.shape, array.dtype, ROWS), arrays),
        jax.eval_shape(lambda: jax.random.key(0)),
        packed,
        teacher,
        recipe=recipe_of(config, plan.model.decoder, teacher and teacher_decoder(config))._replace(
            decoder=plan.model.decoder
        ),
        micro_batches=None if packed else micro_batches,
    )


def _packed(plan: Plan) -> Packed | None:
    """The batch in the largest possible number of micro-batches of packed rows; None without a token budget."""
    if plan.config.training.tokens_per_micro_batch is None:
        return None
    batch, most = _prompts(plan) * plan.config.rollout.group_size, _turns(plan)
    shapes = [(most, *_packed_shape(plan))] * 5 + [(most, batch), ()]
    packed = Packed(*(laid_out(plan.mesh, shape, jnp.int32) for shape in shapes))
    return packed._replace(prefixes=None) if plan.model.decoder.attention == "splash" else packed


def _packed_shape(plan: Plan) -> RowShape:
    shape = sampled_shape(plan.config, plan.prompt_tokens)
    return shape_for(plan.config, shape, plan.mesh.shape["data"] * plan.mesh.shape["fsdp"])


def _turns(plan: Plan) -> int:
    """Largest number of iterations of the update's loop over packed rows."""
    rollout = plan.config.rollout
    if plan.config.training.tokens_per_micro_batch is None:
        return 1
    if plan.config.algorithm.build().compares_completions:
        return _prompts(plan)
    return -(-_prompts(plan) * rollout.group_size // _packed_shape(plan).rows)
