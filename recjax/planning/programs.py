"""The large programs of a run as shapes, and how they compile for a device: sampling, scoring and the update.

Dry runs and compile checks read the same shapes. This file reads no weights.
"""

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from recjax.algorithms.options import require
from recjax.config import Config
from recjax.config.model import POLICY
from recjax.config.optimizers import ADAMW
from recjax.errors import UserError
from recjax.experience.batch import Batch, Shape, pad, sampled_shape, with_teacher_prompts, with_top_tokens
from recjax.experience.layout import Layout, score_batch
from recjax.experience.packing import Packed, RowShape, is_packed, shape_for
from recjax.hub.chat_rendering import set_template_kwargs
from recjax.hub.policy import Policy, advise_on_dtype, compute_dtype, kernel_options, scratch_config
from recjax.hub.tokenizers import character_tokenizer, load_tokenizer, model_folder
from recjax.hub.weights import read_config
from recjax.models.decoder import Decoder, abstract_params
from recjax.models.experts import routing_shapes
from recjax.models.logprobs import recorded_shapes
from recjax.models.placement import ROWS, bytes_on_device, laid_out, laid_out_by_rules, row_shards
from recjax.models.trainable import adapted, combine, in_compute_dtype, split_params
from recjax.planning.sampling import Executable, SamplingPlan, sampling_executables, sampling_of
from recjax.planning.targets import Target
from recjax.runs.other_models import check_teacher, teacher_decoder, teacher_shape
from recjax.runs.resolve import resolve_start
from recjax.tasks.loading import load_task
from recjax.tasks.problems import Task, characters
from recjax.tasks.prompts import prompts_of
from recjax.training.mesh import check_fits, make_mesh
from recjax.training.schedule import outlives_updates
from recjax.training.update import TrainState, UpdateContext, hyperparameters_of, make_optimizer, recipe_of, update

START = "trained parameters as they were at the start"
REFERENCE = "reference policy's parameters"
COPY = "sampler's copy"
CAST = "weights as they compute"
TEACHER = "teacher's parameters"
OLDER = "older weights of frozen seats"


class Model(NamedTuple):
    """A decoder and the shapes of trained and frozen parameters."""

    decoder: Decoder
    trained: dict
    frozen: dict


class Held(NamedTuple):
    """Arrays that stay on the devices all the time: their size in words, and their shapes."""

    formula: str
    tree: Any


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
    """A compiled program on one device.

    Attributes:
        temporaries: bytes besides the program's arguments; from the error's size for a program that the compiler
            refuses; None if the backend does not state them.
        seconds: time of tracing and compiling.
        refusal: the compiler's error if the program itself is too large for the device.
    """

    temporaries: int | None
    seconds: float
    refusal: str | None = None


class Resolved(NamedTuple):
    """A config's model and task, as far as their files are on this machine or can be downloaded.

    Attributes:
        model: None if a file is missing.
        task: None if a file is missing.
        prompt_tokens: tokens of the longest prompt; None: unknown.
        notes: values that only the run itself determines, in words.
        missing: an error for each missing file, without which the run cannot start.
    """

    model: Model | None
    task: Task | None
    prompt_tokens: int | None
    notes: list[str]
    missing: list[str]


def resolve_shapes(config: Config, reward: Callable | Sequence[Callable] | None = None) -> Resolved:
    """Finds the shapes of a run's model, its task and the length of its prompts; reads no weights.

    Args:
        reward: reward function that a program passed; None if `task.reward` names it.
    Raises:
        UserError: an invalid config.
    """
    config = resolve_start(config)
    notes = []
    missing = []
    model = None

    def load_or_report(load: Callable[[], Any]) -> Any:
        """The function's result; None if a download failed, which adds the error to `missing`."""
        try:
            return load()
        except UserError as error:
            # A failed download is an OSError within the UserError that names the remedy.
            if not isinstance(error.__cause__, OSError):
                raise
            missing.append(str(error))
            return None

    task = load_or_report(lambda: load_task(config, function=reward))
    reference = config.model.reference
    if reference and not Path(reference).exists():
        load_or_report(lambda: model_folder(reference, ("config.json",)))
    if config.task.keep:
        notes.append("number of problems to train on: task.keep measures pass rates when the run starts")
    # A decoder made from scratch has the task's characters as its vocabulary.
    if config.model.path or task:
        model = load_or_report(lambda: _model_shapes(config, task))
    prompt_tokens = config.rollout.max_prompt_tokens
    tokenizer = None
    if model and task:
        try:
            tokenizer = _tokenizer(config, task)
        except UserError as error:
            if prompt_tokens is None:
                missing.append(str(error))
            else:
                notes.append(f"whether all prompts fit rollout.max_prompt_tokens = {prompt_tokens} ({error})")
    if tokenizer:
        set_template_kwargs(tokenizer, config.model.chat_template_kwargs)
        assert model is not None
        train, held_out = prompts_of(config, Policy(model.decoder, tokenizer, ()), task)
        task = task._replace(train=train.problems, evaluation=held_out.problems)
        prompt_tokens = train.tokens.shape[1]
    return Resolved(model=model, task=task, prompt_tokens=prompt_tokens, notes=notes, missing=missing)


def _model_shapes(config: Config, task: Task | None) -> Model:
    """The decoder and the shapes of its parameters.

    Args:
        task: task whose characters are the vocabulary of a decoder made from scratch.
    """
    if config.model.path:
        shape = read_config(model_folder(config.model.path, ("config.json",)))
    else:
        assert config.model.decoder is not None
        shape = scratch_config(config.model.decoder, len(_tokenizer(config, task)))
    if config.model.lora:
        shape = adapted(shape, config.model.lora)
    decoder = Decoder(
        shape,
        compute_dtype(config.model.dtype),
        config.model.remat,
        replays_routing=config.rollout.record_routing,
    )
    trained, frozen = split_params(abstract_params(shape), config.model)
    return Model(decoder, trained, frozen)


def _tokenizer(config: Config, task: Task | None) -> Any:
    """The model's tokenizer; a decoder made from scratch has a token for each character of the task or the config."""
    if config.model.path:
        return load_tokenizer(config.model.path, config.model.chat_date)
    assert config.model.decoder is not None
    known = config.model.decoder.characters
    if not known:
        assert task is not None
        known = characters([*task.train, *task.evaluation])
    return character_tokenizer(known)


def resident_arrays(config: Config, model: Model) -> dict[str, Held]:
    """Arrays that the loop keeps all the time, by name; offline, the sampler's copy holds the initial weights."""
    optimizer = make_optimizer(config.optimizer, config.model.average_rate)
    state_formula = "Adam's two moments: 8 B × trained"
    if config.optimizer.name != ADAMW or config.optimizer.options:
        state_formula = f"state of {config.optimizer.name}"
    if config.model.average_rate is not None:
        state_formula += "; the teacher's average: 4 B × trained"
    state = Held(state_formula, jax.eval_shape(optimizer.init, model.trained))
    size = jnp.dtype(model.decoder.dtype).itemsize
    parts = {
        "trained parameters": Held("4 B × trained", model.trained),
        "optimizer's state": state,
        "frozen parameters": Held(f"{size} B × frozen", to_compute_with(model.decoder, model.frozen)),
    }
    copy = Held(f"{size} B × trained", to_compute_with(model.decoder, model.trained))
    needs_reference = config.algorithm.build().needs_reference
    has_reference_model = bool(config.model.reference)
    # Without a reference model, the reference policy is the initial policy.
    reads_start = config.evaluation.initial_kl or (needs_reference and not has_reference_model)
    if reads_start:
        parts[START] = copy
    if needs_reference and has_reference_model:
        all_params = combine(model.trained, model.frozen)
        parts[REFERENCE] = Held(f"{size} B × (trained + frozen)", to_compute_with(model.decoder, all_params))
    # Offline, the sampler reads the START arrays if the run keeps them.
    samples_from_start = config.regime.offline and reads_start
    if keeps_copy(config) and not samples_from_start:
        parts[COPY] = copy
    older = config.task.most_older_versions(config.training.steps)
    if older:
        parts[OLDER] = Held(f"{older} × {copy.formula}", [copy.tree] * older)
    if config.model.teacher not in (None, POLICY):
        shape = teacher_shape(config)
        check_teacher(config, shape, model.decoder.config)
        parts[TEACHER] = Held(f"{size} B × teacher", to_compute_with(model.decoder, abstract_params(shape)))
    return parts


def keeps_copy(config: Config) -> bool:
    """True if the sampler keeps its own copy of the weights during updates."""
    return config.samples_training_data and outlives_updates(config.regime)


def sampled_from(config: Config, model: Model) -> tuple[str, dict]:
    """Name and shapes of the sampler's weights: a part of `resident_arrays`, or a cast of the trained ones."""
    parts = resident_arrays(config, model)
    if COPY in parts:
        return COPY, parts[COPY].tree
    if config.regime.offline and START in parts:
        return START, parts[START].tree
    cast = to_compute_with(model.decoder, model.trained)
    if model.decoder.dtype == jnp.float32:
        return "trained parameters", cast
    return CAST, cast


def to_compute_with(decoder: Decoder, params: dict) -> dict:
    """Shapes of parameters in the decoder's dtype."""
    return jax.eval_shape(lambda tree: in_compute_dtype(decoder, tree, copy=False), params)


def batch_arrays(shape: Shape, turns: int | None = None, recorded: Mapping[str, jax.ShapeDtypeStruct] = {}) -> Batch:
    """Shapes of a batch's arrays.

    Args:
        turns: largest number of turns of a trajectory, if the algorithm reads rewards of turns.
        recorded: shapes of recorded arrays, [1, …] for one token.
    """
    batch = pad([], shape)
    size = batch.completions.shape
    for name, array in recorded.items():
        batch.recorded[name] = np.zeros(size + array.shape[1:], array.dtype)
    if turns is not None:
        rewards = np.zeros((len(batch.rewards), turns), np.float32)
        batch = batch._replace(turn_rewards=rewards, token_turns=np.zeros(batch.completions.shape, np.int32))
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), batch)


def plan(config: Config, target: Target) -> Plan:
    """Sharded shapes of a run on a target's devices.

    Raises:
        UserError: an invalid config, a config with an agent or a followed store, or a mesh that does not divide the
            devices or the model.
    """
    remedy = "cannot be compiled before the run starts; remove it to check a run of single turns"
    require(not config.task.agent, "task.agent", config.task.agent, remedy)
    require(not config.follows, "experience.follow", config.follows, remedy)
    if config.model.dtype == "auto" and target.devices[0].platform != "cpu":
        config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "bfloat16"})})
    if target.devices[0].platform == "cpu":
        advise_on_dtype(config.model.dtype)
    model, _, prompt_tokens, _, missing = resolve_shapes(config)
    if not prompt_tokens:
        missing.append("set rollout.max_prompt_tokens")
    if model is None or prompt_tokens is None:
        raise UserError(problem="; ".join(missing))
    decoder = model.decoder
    options = kernel_options(config.model, decoder.config, jnp.dtype(decoder.dtype), target.devices[0])
    model = model._replace(decoder=decoder.clone(**options))
    mesh = make_mesh(config.mesh, target.devices)
    check_fits(mesh, decoder.config)
    on_mesh = {}
    for held_name, held in resident_arrays(config, model).items():
        on_mesh[held_name] = laid_out_by_rules(mesh, held.tree)
    sampler_name, weights = sampled_from(config, model)
    sampler = {sampler_name: laid_out_by_rules(mesh, weights)}
    free = target.memory - bytes_on_device(on_mesh | sampler)
    platform = target.devices[0].platform
    sampling_plan = sampling_of(config, model.decoder, mesh, prompt_tokens, free=free, platform=platform)
    planned = Plan(
        config=config,
        target=target,
        mesh=mesh,
        model=model,
        prompt_tokens=prompt_tokens,
        held=on_mesh,
        sampler=sampler,
        sampling_plan=sampling_plan,
    )
    most_iterations(planned)  # raises an error if the token budget is too small
    return planned


def programs_of(config: Config) -> tuple[str, ...]:
    """The large programs of a run, in order.

    Only runs with several updates of a batch score it before the first one, if the algorithm reads the proximal policy.
    """
    if config.training.updates > 1 and config.algorithm.build().needs_proximal:
        return "sample", "score", "update"
    return "sample", "update"


def arguments_of(plan: Plan, program: str) -> dict[str, Any]:
    """The arguments of a program from `plan.held`; for sampling, also the weights of `plan.sampler`."""
    if program == "sample":
        return plan.sampler | {"frozen parameters": plan.held["frozen parameters"]}
    if program == "score":
        return {name: plan.held[name] for name in ("trained parameters", "frozen parameters")}
    names = ["trained parameters", "optimizer's state"]
    if plan.config.algorithm.build().needs_reference:
        names.append(REFERENCE if plan.config.model.reference else START)
    names.append("frozen parameters")
    if TEACHER in plan.held:
        names.append(TEACHER)
    return {name: plan.held[name] for name in names}


def executables_of(plan: Plan, program: str) -> list[Executable]:
    """The executables of one of `programs_of`, traced for the plan's devices."""
    if program == "sample":
        weights = arguments_of(plan, program).values()
        return sampling_executables(plan.config, plan.model.decoder, plan.sampling_plan, *weights)
    with jax.set_mesh(plan.mesh):
        if program == "score":
            traced = traced_score(plan)
        else:
            traced = traced_update(plan)
    return [Executable(traced, plan.mesh, 0)]


def compile_executable(plan: Plan, executable: Executable) -> jax.stages.Compiled:
    """Compiles an executable for the plan's devices, without running it."""
    assert isinstance(executable.mesh, Mesh)
    with jax.set_mesh(executable.mesh):
        return executable.traced.lower().compile(compiler_options=dict(plan.target.options))


def compiled(plan: Plan, program: str) -> Program:
    """Traces, compiles and measures one of `programs_of`."""
    started = time.perf_counter()
    arguments = bytes_on_device(arguments_of(plan, program))
    peaks = []
    for executable in executables_of(plan, program):
        try:
            memory = compile_executable(plan, executable).memory_analysis()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            temporaries = max(needed_by(str(error)) + executable.also_held - arguments, 0)
            return Program(temporaries, time.perf_counter() - started, str(error).splitlines()[0])
        if memory is None:
            return Program(None, time.perf_counter() - started)
        peak = memory.peak_memory_in_bytes
        if plan.target.devices[0].platform != "tpu":
            # On a TPU, the sum of temporaries exceeds the largest part that exists at the same time.
            lasting = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
            sum_of_parts = lasting + memory.temp_size_in_bytes
            peak = max(peak, sum_of_parts)
        peaks.append(executable.also_held + peak)
    return Program(max(peaks) - arguments, time.perf_counter() - started)


def needed_by(refusal: str) -> int:
    """The number of bytes in the compiler's error about a program that is too large; 0 if the error names none."""
    for pattern in (r"Used ([\d.]+)([KMGT])", r"\(([\d.]+)([KMGT])\) exceeds"):
        size = re.search(pattern, refusal)
        if size:
            number, unit = size.groups()
            return int(float(number) * 1024 ** ("KMGT".index(unit) + 1))
    return 0


def traced_score(plan: Plan) -> jax.stages.Traced:
    """The scoring of a minibatch under the proximal policy, traced for the plan's devices."""
    config = plan.config
    batch, layout = batch_and_layout(plan)
    trained, frozen = arguments_of(plan, "score").values()
    return score_batch.trace(
        layout,
        plan.model.decoder,
        combine(trained, frozen),
        batch,
        sampling=config.rollout.sampling(),
        chunk=config.model.logprob_chunk,
    )


def batch_and_layout(plan: Plan) -> tuple[Batch, Layout]:
    """Sharded shapes of a batch and its layout; packed rows are in the largest possible number of micro-batches."""
    config = plan.config
    minibatches = config.training.minibatches
    parts = micro_batches_of(plan)
    shape = sampled_shape(config, plan.prompt_tokens)._replace(prompts=padded_prompts(plan, parts) * minibatches)
    algorithm = config.algorithm.build()
    turns = None
    if algorithm.reads("turn_rewards", "token_turns"):
        turns = config.task.agent_turns
    vocabulary = plan.model.decoder.config.vocab_size
    sampling = config.rollout.sampling()
    recorded = recorded_shapes(vocabulary, sampling, config.recording()) | routing_shapes(plan.model.decoder)
    arrays = batch_arrays(shape, turns, recorded)
    top_tokens = 0
    if algorithm.score_centering:
        top_tokens = config.known_tokens
    arrays = with_top_tokens(arrays, top_tokens)
    if config.task.teacher_template:
        assert config.task.teacher_tokens is not None
        arrays = with_teacher_prompts(arrays, rows=(), prompts=(), room=config.task.teacher_tokens)
    batch = jax.tree.map(lambda array: laid_out(plan.mesh, array.shape, array.dtype, ROWS), arrays)
    minibatch_rows = None
    if minibatches > 1:
        minibatch_rows = laid_out(plan.mesh, (shape.rows,), bool)
    if not _is_packed(plan):
        return batch, Layout(parts, packed=None, rows=minibatch_rows, minibatches=minibatches)
    row_shape = _packed_shape(plan)
    packed_rows = laid_out(plan.mesh, (most_iterations(plan), row_shape.rows, row_shape.tokens), jnp.int32)
    packed = Packed(
        tokens=packed_rows,
        positions=packed_rows,
        targets=packed_rows,
        ends=packed_rows,
        places=laid_out(plan.mesh, (shape.rows, shape.time), jnp.int32),
        count=laid_out(plan.mesh, (), jnp.int32),
    )
    return batch, Layout(parts=1, packed=packed, rows=minibatch_rows, minibatches=minibatches)


def traced_update(plan: Plan) -> jax.stages.Traced:
    """The update, traced for the plan's devices."""
    config = plan.config
    decoder = plan.model.decoder
    arguments = arguments_of(plan, "update")
    batch, layout = batch_and_layout(plan)
    proximal: Any = None
    if "score" in programs_of(config):
        proximal = laid_out(plan.mesh, batch.completions.shape, jnp.float32, ROWS)
    teacher = None
    if TEACHER in arguments:
        teacher = teacher_decoder(config, plan.target.devices[0])
    context = UpdateContext(
        arguments["frozen parameters"],
        jax.eval_shape(lambda: jax.random.key(0)),
        reference_params=arguments.get(REFERENCE, arguments.get(START)),
        teacher_params=arguments.get(TEACHER),
        proximal_logprobs=proximal,
        hyperparameters=hyperparameters_of(config, jax.ShapeDtypeStruct((), jnp.float32)),
    )
    state = TrainState(arguments["trained parameters"], arguments["optimizer's state"])
    recipe = recipe_of(config, decoder, teacher)._replace(decoder=decoder)
    return update.trace(state, batch, layout, context, recipe=recipe)


def padded_prompts(plan: Plan, parts: int = 1) -> int:
    """Number of prompts of a minibatch, padded so that each micro-batch has equally many on every device."""
    multiple = parts * row_shards(plan.mesh)
    prompts = minibatch_shape(plan.config, plan.prompt_tokens).prompts
    return math.ceil(prompts / multiple) * multiple


def minibatch_shape(config: Config, prompt_tokens: int) -> Shape:
    """The shape of the sampled rows that one update trains on.

    Args:
        prompt_tokens: number of tokens in the longest prompt.
    """
    shape = sampled_shape(config, prompt_tokens)
    return shape._replace(prompts=shape.prompts // config.training.minibatches)


def micro_batches_of(plan: Plan) -> int:
    """Number of micro-batches of an update without packing."""
    positions = minibatch_shape(plan.config, plan.prompt_tokens).positions
    return plan.config.micro_batches(positions, row_shards(plan.mesh))


def _packed_shape(plan: Plan) -> RowShape:
    shape = minibatch_shape(plan.config, plan.prompt_tokens)
    return shape_for(plan.config, shape, row_shards(plan.mesh))


def most_iterations(plan: Plan) -> int:
    """Largest number of iterations of the update's loop over packed rows."""
    shape = minibatch_shape(plan.config, plan.prompt_tokens)._replace(prompts=padded_prompts(plan))
    if not _is_packed(plan):
        return 1
    if plan.config.algorithm.build().compares_completions and shape.group is not None:
        return shape.prompts
    return math.ceil(shape.rows / _packed_shape(plan).rows)


def _is_packed(plan: Plan) -> bool:
    return is_packed(plan.config, minibatch_shape(plan.config, plan.prompt_tokens))
