"""A run's two large programs, sampling and the update, compiled from shapes for devices that need not be here."""

import dataclasses
import math
import re
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array

from recjax.algorithms import presets
from recjax.algorithms.losses import Algorithm
from recjax.config import Config
from recjax.experience.records import Batch
from recjax.experience.rows import Shape
from recjax.hub.policy import attention_kernel
from recjax.models.logprobs import Sampling
from recjax.models.placement import ROWS, laid_out, param_shardings
from recjax.models.trainable import combine, in_compute_dtype
from recjax.planning.dry_run import Model, resolve
from recjax.planning.program_costs import Traffic, collectives, matmul_flops
from recjax.planning.topology import Target
from recjax.rollout import capacity, decoding
from recjax.training.mesh import check_fits, make_mesh
from recjax.training.packing import Packed, RowShape, shape_for
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
    decoder = model.decoder
    kernel = attention_kernel(config.model.attention, decoder.config, decoder.dtype, target.devices[0])
    model = model._replace(decoder=decoder.clone(attention=kernel))
    mesh = make_mesh(config.mesh, target.devices)
    check_fits(mesh, decoder.config)
    planned = Plan(config, target, mesh, model, prompt_tokens, _held(config, mesh, model))
    _turns(planned, "update")  # refuses a budget of tokens that is too small
    return planned


def _held(config: Config, mesh: Mesh, model: Model) -> dict[str, Any]:
    """What the loop keeps on the devices, as `recjax.planning.dry_run` lists it."""
    optimizer = make_optimizer(config.optimizer, config.training.steps)

    def placed(tree: Any) -> Any:
        shardings = param_shardings(mesh, tree)
        return jax.tree.map(lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree, shardings)

    def to_compute_with(tree: Any) -> Any:
        return placed(jax.eval_shape(lambda tree: in_compute_dtype(model.decoder, tree, copy=False), tree))

    copy = to_compute_with(model.trained)
    held = {
        "trained parameters": placed(model.trained),
        "optimiser's state": placed(jax.eval_shape(optimizer.init, model.trained)),
        "sampler's copy": copy,
        "frozen parameters": to_compute_with(model.frozen),
    }
    if (_algorithm(config).needs_reference or config.evaluation.initial_kl) and not config.regime.offline:
        held["trained parameters as they were at the start"] = copy
    return held


def given(plan: Plan, program: str) -> dict[str, Any]:
    """What of that is passed to a program; the rest lies beside it."""
    names = {"sample": ["sampler's copy"], "update": ["trained parameters", "optimiser's state"]}[program]
    if program == "update" and _algorithm(plan.config).needs_reference:
        # Offline they are the sampler's copy.
        start = "trained parameters as they were at the start"
        names.append(start if start in plan.held else "sampler's copy")
    return {name: plan.held[name] for name in (*names, "frozen parameters")}


def bytes_on_device(tree: Any) -> int:
    """Bytes that a tree of laid-out shapes takes on one device."""
    sizes = (
        jnp.dtype(leaf.dtype).itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape))
        for leaf in jax.tree.leaves(tree)
    )
    return sum(sizes)


def beside(plan: Plan, program: str) -> int:
    """Bytes of a device that are held while a program runs and are none of its arguments."""
    return bytes_on_device(plan.held) - bytes_on_device(given(plan, program))


def cache_bytes(plan: Plan) -> int:
    """Bytes of one device's keys and values while completions are sampled."""
    asked, rollout = _prompts(plan), plan.config.rollout
    with jax.set_mesh(plan.mesh):
        return capacity.cache_bytes(
            plan.model.decoder,
            prompts=asked,
            prompt_tokens=plan.prompt_tokens,
            rows=asked * _group(plan.config),
            completion_tokens=rollout.max_completion_tokens,
        )


def _prompts(plan: Plan, parts: int = 1) -> int:
    """Prompts of a batch, filled up so that every device has as many in each part."""
    multiple = parts * plan.mesh.shape["data"] * plan.mesh.shape["fsdp"]
    return -(-plan.config.rollout.prompts_per_step // multiple) * multiple


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
            needed = max(_needed(str(error)), bytes_on_device(given(plan, program)))
            return Program(needed, 0, flops, {}, time.perf_counter() - started, str(error).splitlines()[0])
    memory = executable.memory_analysis()
    lasting = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    needed = memory.peak_memory_in_bytes
    if plan.target.devices[0].platform != "tpu":
        # Elsewhere that leaves temporaries out. A TPU's temporaries are more than it holds of them at any one time.
        needed = max(needed, lasting + memory.temp_size_in_bytes)
    return Program(
        needed=needed,
        temporaries=needed - lasting,
        flops=flops,
        collectives=collectives(executable.as_text(), unknown_trips=turns),
        seconds=time.perf_counter() - started,
    )


def _needed(refusal: str) -> int:
    """The bytes that the compiler says a program too large for the device would take."""
    found = re.search(r"Used ([\d.]+)([KMGT])", refusal) or re.search(r"\(([\d.]+)([KMGT])\) exceeds", refusal)
    return int(float(found[1]) * _UNITS[found[2]]) if found else 0


def _traced_sample(plan: Plan) -> jax.stages.Traced:
    """The engine's prefill and as many of its rounds as the longest completion takes, all completions in slots."""
    held, prompts, group_size = plan.held, (_prompts(plan), plan.prompt_tokens), _group(plan.config)
    longest, decoder = plan.config.rollout.max_completion_tokens, plan.model.decoder
    options = {"sampling": _sampling(plan.config), "round_time": capacity.round_time(longest), "stop_ids": (0,)}
    batch, rounds = prompts[0] * group_size, -(-(longest - 1) // options["round_time"])

    def sampled(params: dict, prompts: Array, mask: Array, keys: Array) -> decoding.Rows:
        cache, scores = decoding.prefill(params, prompts, mask, decoder=decoder)
        of, zeros = jnp.arange(batch) // group_size, jnp.zeros(batch, jnp.int32)
        tokens, _ = decoding.first_tokens(scores, of, keys, sampling=options["sampling"], chunk=batch)
        later = decoding.empty(cache, rows=batch, time=longest - 1 + options["round_time"])
        rows = decoding.Rows(tokens > 0, mask.sum(-1)[of], zeros, tokens, zeros + 1, zeros + longest, keys)

        def one_round(_: Array, carried: tuple) -> tuple:
            memory, rows = carried
            memory, state = decoding.decode(params, memory, rows, jnp.int32(0), decoder=decoder, **options)
            counts = rows.counts + state.counts
            cached = rows.cached + state.counts
            return memory, rows._replace(live=state.live, cached=cached, last=state.last, counts=counts)

        return jax.lax.fori_loop(0, rounds, one_round, (decoding.Memory(cache, later), rows))[1]

    return jax.jit(sampled).trace(
        combine(held["sampler's copy"], held["frozen parameters"]),
        laid_out(plan.mesh, prompts, jnp.int32, ROWS),
        laid_out(plan.mesh, prompts, bool, ROWS),
        jax.eval_shape(lambda: jax.random.key_data(jax.random.split(jax.random.key(0), batch))),
    )


def _traced_update(plan: Plan) -> jax.stages.Traced:
    config, (params, optimizer_state, *reference, frozen) = plan.config, given(plan, "update").values()
    packed, micro_batches = _packed(plan), _micro_batches(config)
    return update.trace(
        TrainState(params, optimizer_state),
        frozen,
        reference[0] if reference else None,
        _batch(plan, _prompts(plan, micro_batches)),
        jax.eval_shape(lambda: jax.random.key(0)),
        packed,
        decoder=plan.model.decoder,
        algorithm=_algorithm(config),
        optimizer=make_optimizer(config.optimizer, config.training.steps),
        sampling=_sampling(config),
        chunk=config.model.logprob_chunk,
        micro_batches=None if packed else micro_batches,
    )


def _micro_batches(config: Config) -> int:
    return config.rollout.prompts_per_step // (config.training.micro_batch_prompts or config.rollout.prompts_per_step)


def _batch(plan: Plan, asked: int) -> Batch:
    """A batch of so many prompts, laid out."""
    prompts = (asked, plan.prompt_tokens)
    rows = (asked * plan.config.rollout.group_size, plan.config.rollout.max_completion_tokens)
    kinds = {name: (rows[:1], jnp.int32) for name in Batch._fields if name not in ("reward_parts", "failures")}
    kinds |= {"prompts": (prompts, jnp.int32), "prompt_mask": (prompts, bool), "completions": (rows, jnp.int32)}
    kinds |= {"completion_mask": (rows, bool), "behaviour_logprobs": (rows, jnp.float32)}
    kinds |= {"rewards": (rows[:1], jnp.float32), "truncated": (rows[:1], bool), "accurate": (rows[:1], bool)}
    return Batch(**{name: laid_out(plan.mesh, *kind, ROWS) for name, kind in kinds.items()}, reward_parts={})


def _packed(plan: Plan) -> Packed | None:
    """The batch in as many micro-batches of packed rows as there can be; None without a budget of tokens."""
    if plan.config.training.tokens_per_micro_batch is None:
        return None
    batch, shape = _prompts(plan) * plan.config.rollout.group_size, _packed_shape(plan)
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
        return capacity.round_time(rollout.max_completion_tokens)
    if plan.config.training.tokens_per_micro_batch is None:
        return 1
    if _algorithm(plan.config).compares_completions:
        return _prompts(plan)
    return -(-_prompts(plan) * rollout.group_size // _packed_shape(plan).rows)


def _algorithm(config: Config) -> Algorithm:
    return presets.build_algorithm(config.algorithm.preset, config.algorithm.overrides())


def _sampling(config: Config) -> Sampling:
    return Sampling(config.rollout.temperature, config.rollout.top_k, config.rollout.top_p)
