"""A run's two large programs, sampling and the update, compiled from shapes for devices that need not be here."""

import dataclasses
import math
import re
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from recjax.algorithms import presets
from recjax.algorithms.losses import Algorithm
from recjax.config import Config
from recjax.experience.records import Batch
from recjax.experience.rows import Shape
from recjax.models.logprobs import Sampling
from recjax.models.placement import ROWS, laid_out, param_shardings
from recjax.models.trainable import combine, in_compute_dtype
from recjax.rollout.sampler import sample
from recjax.training.dry_run import Model, resolve
from recjax.training.mesh import check_fits, make_mesh
from recjax.training.packing import Packed, RowShape, shape_for
from recjax.training.program_costs import Traffic, collectives, matmul_flops
from recjax.training.topology import Target
from recjax.training.update import TrainState, make_optimizer, update

PROGRAMS = ("sample", "update")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class Plan(NamedTuple):
    """A run as shapes laid out on a mesh: what is held all the time by name, and what else the programs are given."""

    config: Config
    target: Target
    mesh: Mesh
    model: Model
    prompt_tokens: int
    held: dict[str, Any]


class Program(NamedTuple):
    """A compiled program on one device; bytes.

    Attributes:
        needed: all that it takes, its arguments among it; as far as the compiler says where it does not fit.
        temporaries: what of that is neither argument nor result.
        flops: of its matrix products.
        refusal: the compiler's words where the program alone is too large for the device; then of temporaries and
            collectives nothing is known.
    """

    needed: int
    temporaries: int
    flops: int
    collectives: dict[str, Traffic]
    seconds: float
    refusal: str | None = None


# The parts of what is held that each program is given; the others lie beside it.
GIVEN = {
    "sample": ("sampler's copy", "frozen parameters to compute with"),
    "update": ("trained parameters", "optimiser's state", "frozen parameters to compute with"),
}


def plan(config: Config, target: Target) -> Plan:
    """Shapes and layout of a run on a target's devices; reads no weights.

    Raises:
        ValueError: a config that could not run, or a mesh that does not divide the devices or the model.
    """
    if config.model.dtype == "auto" and target.devices[0].platform != "cpu":
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype="bfloat16"))
    model, _, prompt_tokens, notes = resolve(config)
    if model is None or prompt_tokens is None:
        raise ValueError("; ".join([*notes, "" if prompt_tokens else "set rollout.max_prompt_tokens"]).strip("; "))
    mesh = make_mesh(config.mesh, target.devices)
    check_fits(mesh, model.decoder.config)
    planned = Plan(config, target, mesh, model, prompt_tokens, _held(config, mesh, model))
    _turns(planned, "update")  # refuses a budget of tokens that is too small
    return planned


def _held(config: Config, mesh: Mesh, model: Model) -> dict[str, Any]:
    """What the loop keeps on the devices, as `recjax.training.dry_run` lists it."""
    optimizer = make_optimizer(config.optimizer, config.training.steps)

    def placed(tree: Any) -> Any:
        shardings = param_shardings(mesh, tree)
        return jax.tree.map(lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree, shardings)

    def to_compute_with(tree: Any) -> Any:
        return jax.eval_shape(lambda tree: in_compute_dtype(model.decoder, tree, copy=False), tree)

    trained, copy = placed(model.trained), placed(to_compute_with(model.trained))
    # Where computing is in float32, what would be copies are the weights themselves.
    half = model.decoder.dtype.itemsize < 4
    held = {
        "trained parameters": trained,
        "optimiser's state": placed(jax.eval_shape(optimizer.init, model.trained)),
        "sampler's copy": copy,
        "weights as they were at the start": (trained, placed(model.frozen) if half else {}),
        "frozen parameters to compute with": placed(to_compute_with(model.frozen)),
    }
    return held | ({"sampler's copy, as at the start": copy} if half else {})


def bytes_on_device(tree: Any) -> int:
    """Bytes that a tree of laid-out shapes takes on one device."""
    sizes = (
        jnp.dtype(leaf.dtype).itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape))
        for leaf in jax.tree.leaves(tree)
    )
    return sum(sizes)


def beside(plan: Plan, program: str) -> dict[str, int]:
    """What lies on a device while a program runs and is none of its arguments: bytes by name."""
    given = set(GIVEN[program])
    sizes = {name: bytes_on_device(tree) for name, tree in plan.held.items() if name not in given}
    if program == "update" and _algorithm(plan.config).needs_reference:
        sizes["weights as they were at the start"] -= bytes_on_device(plan.held["weights as they were at the start"][0])
    return {name: size for name, size in sizes.items() if size}


def cache_bytes(plan: Plan) -> int:
    """Bytes of one device's keys and values while completions are drawn."""
    shape, rollout = plan.model.decoder.config, plan.config.rollout

    def cache(rows: int, tokens: int) -> jax.ShapeDtypeStruct:
        sizes = (shape.num_layers, rows, shape.num_kv_heads, tokens, shape.head_dim)
        return laid_out(plan.mesh, sizes, plan.model.decoder.dtype, None, ROWS, "tensor")

    prompts = cache(rollout.prompts_per_step, plan.prompt_tokens)
    drawn = cache(rollout.prompts_per_step * _group(plan.config), rollout.max_completion_tokens)
    return 2 * bytes_on_device([prompts, drawn])


def _group(config: Config) -> int:
    """Completions of a prompt drawn at once, the larger of training's and evaluation's."""
    return max(config.rollout.group_size, config.evaluation.samples)


def compiled(plan: Plan, program: str) -> Program:
    """One of PROGRAMS, traced, compiled and measured. Nothing runs."""
    started = time.perf_counter()
    turns = _turns(plan, program)
    with jax.set_mesh(plan.mesh):
        traced = _traced_sample(plan) if program == "sample" else _traced_update(plan)
        flops = matmul_flops(traced.jaxpr, unknown_trips=turns) // len(plan.target.devices)
        try:
            executable = traced.lower().compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            given = bytes_on_device([plan.held[name] for name in GIVEN[program] if name in plan.held])
            needed = max(_needed(str(error)), given)
            return Program(needed, 0, flops, {}, time.perf_counter() - started, str(error).splitlines()[0])
    memory = executable.memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    allocated = memory.argument_size_in_bytes + results + memory.temp_size_in_bytes
    return Program(
        needed=max(allocated, memory.peak_memory_in_bytes),
        temporaries=max(allocated, memory.peak_memory_in_bytes) - memory.argument_size_in_bytes - results,
        flops=flops,
        collectives=collectives(executable.as_text(), unknown_trips=turns),
        seconds=time.perf_counter() - started,
    )


def _needed(refusal: str) -> int:
    """The bytes that the compiler says a program too large for the device would take."""
    found = re.search(r"Used ([\d.]+)([KMGT])", refusal) or re.search(r"\(([\d.]+)([KMGT])\) exceeds", refusal)
    return int(float(found[1]) * _UNITS[found[2]]) if found else 0


def _traced_sample(plan: Plan) -> jax.stages.Traced:
    rollout, prompts = plan.config.rollout, (plan.config.rollout.prompts_per_step, plan.prompt_tokens)
    return sample.trace(
        plan.model.decoder,
        combine(plan.held["sampler's copy"], plan.held["frozen parameters to compute with"]),
        laid_out(plan.mesh, prompts, jnp.int32, ROWS),
        laid_out(plan.mesh, prompts, bool, ROWS),
        jax.eval_shape(lambda: jax.random.key(0)),
        group_size=_group(plan.config),
        max_tokens=rollout.max_completion_tokens,
        sampling=_sampling(plan.config),
        stop_ids=(0,),
    )


def _traced_update(plan: Plan) -> jax.stages.Traced:
    config, held = plan.config, plan.held
    reference = held["weights as they were at the start"][0] if _algorithm(config).needs_reference else None
    whole, packed = config.rollout.prompts_per_step, _packed(plan)
    return update.trace(
        TrainState(held["trained parameters"], held["optimiser's state"]),
        held["frozen parameters to compute with"],
        reference,
        _batch(plan),
        jax.eval_shape(lambda: jax.random.key(0)),
        packed,
        decoder=plan.model.decoder,
        algorithm=_algorithm(config),
        optimizer=make_optimizer(config.optimizer, config.training.steps),
        sampling=_sampling(config),
        chunk=config.model.logprob_chunk,
        micro_batches=None if packed else whole // (config.training.micro_batch_prompts or whole),
    )


def _batch(plan: Plan) -> Batch:
    rollout = plan.config.rollout
    prompts = (rollout.prompts_per_step, plan.prompt_tokens)
    rows = (rollout.prompts_per_step * rollout.group_size, rollout.max_completion_tokens)
    kinds = {name: (rows[:1], jnp.int32) for name in Batch._fields if name not in ("reward_parts", "failures")}
    kinds |= {"prompts": (prompts, jnp.int32), "prompt_mask": (prompts, bool), "completions": (rows, jnp.int32)}
    kinds |= {"completion_mask": (rows, bool), "behaviour_logprobs": (rows, jnp.float32)}
    kinds |= {"rewards": (rows[:1], jnp.float32), "truncated": (rows[:1], bool), "accurate": (rows[:1], bool)}
    return Batch(**{name: laid_out(plan.mesh, *kind, ROWS) for name, kind in kinds.items()}, reward_parts={})


def _packed(plan: Plan) -> Packed | None:
    """The batch in as many micro-batches of packed rows as there can be; None without a budget of tokens."""
    if plan.config.training.tokens_per_micro_batch is None:
        return None
    batch, shape = plan.config.rollout.prompts_per_step * plan.config.rollout.group_size, _packed_shape(plan)
    most = _turns(plan, "update")
    rows = laid_out(plan.mesh, (most, *shape), jnp.int32)
    return Packed(
        rows, rows, rows, rows, laid_out(plan.mesh, (most, batch), jnp.int32), laid_out(plan.mesh, (), jnp.int32)
    )


def _packed_shape(plan: Plan) -> RowShape:
    rollout = plan.config.rollout
    shape = Shape(rollout.prompts_per_step, rollout.group_size, plan.prompt_tokens, rollout.max_completion_tokens)
    return shape_for(plan.config, shape, plan.mesh.shape["data"] * plan.mesh.shape["fsdp"])


def _turns(plan: Plan, program: str) -> int:
    """How often the loop of a program runs at most whose end depends on the data: over tokens, over packed rows."""
    rollout = plan.config.rollout
    if program == "sample":
        return rollout.max_completion_tokens - 1
    if plan.config.training.tokens_per_micro_batch is None:
        return 1
    if _algorithm(plan.config).compares_completions:
        return rollout.prompts_per_step
    return -(-rollout.prompts_per_step * rollout.group_size // _packed_shape(plan).rows)


def _algorithm(config: Config) -> Algorithm:
    return presets.build_algorithm(config.algorithm.preset, config.algorithm.overrides())


def _sampling(config: Config) -> Sampling:
    return Sampling(config.rollout.temperature, config.rollout.top_k, config.rollout.top_p)
