"""A run's sizes, memory, tokens and staleness before it starts, from shapes: it neither reads weights nor compiles."""

import contextlib
import dataclasses
import io
import itertools
import logging
import math
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table

from recjax.config import Config, MeshConfig, RegimeConfig, load_config
from recjax.errors import UserError
from recjax.experience.batch import sampled_shape
from recjax.experience.packing import is_packed, shape_for
from recjax.hub.policy import advise_on_dtype
from recjax.models.decoder import REMAT, abstract_params
from recjax.models.logprobs import completion_logprobs, packed_logprobs, positions_at_once
from recjax.models.placement import AnyMesh, bytes_on_device, laid_out_by_rules, row_shards
from recjax.models.trainable import adapted, combine, split_params
from recjax.planning import programs
from recjax.planning.programs import CAST, Model, batch_arrays, resident_arrays, sampled_from, to_compute_with
from recjax.planning.sampling import longest_in_slot, most_completions, sampling_of
from recjax.planning.seconds import NoEstimate, StepSeconds, device_speed, expected_seconds
from recjax.planning.targets import (
    ACCELERATORS,
    GIB,
    MEMORY_FRACTION,
    Devices,
    device_memory,
    larger_slices,
    named_devices,
)
from recjax.rollout.decoding import copies_into_blocks
from recjax.rollout.plan import capacities, key_value_bytes, power_of_two, score_bytes, state_bytes
from recjax.runs.prepare import warn_of_context
from recjax.runtime import hosts
from recjax.runtime.console import plain_console
from recjax.sources.setup import Setup
from recjax.store.database import MAKE
from recjax.tasks.problems import Task
from recjax.training.mesh import check_fits, make_mesh
from recjax.training.schedule import expected_staleness

logger = logging.getLogger(__name__)


class Item(NamedTuple):
    """An array in the memory of each device.

    phase: "always", or the phase of a step that needs the memory: "sample" or "update".
    name: content of the array.
    formula: its size on all devices together.
    bytes: its size on each device.
    """

    phase: str
    name: str
    formula: str
    bytes: int


class DryRun(NamedTuple):
    """Facts about a run before it starts; unknown ones are None or empty, and `notes` explain why.

    config: the run's, with the dtype that the devices have.
    devices: devices to plan for; None: one device that holds everything.
    missing: an error with its remedy for each part that the run needs to start: model, tokenizer, data or store.
    """

    config: Config
    devices: Devices | None
    model: Model | None
    task: Task | None
    prompt_tokens: int | None
    notes: list[str]
    missing: list[str]
    memory: Sequence[Item] = ()
    activations: Mapping[str, int] = MappingProxyType({})
    checkpoint_bytes: int | None = None
    staleness: Sequence[int] = ()
    mesh: AnyMesh | None = None
    step_seconds: StepSeconds | None = None

    def __str__(self) -> str:
        """What `python -m recjax.train --dry_run` prints."""
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            show_dry_run(self)
        return text.getvalue() + "".join(f"error: {message}\n" for message in self.missing)

    @property
    def table(self) -> pd.DataFrame:
        """A row for each array in the memory of each device: phase, name, formula and bytes."""
        return pd.DataFrame(self.memory, columns=[*Item._fields])

    @property
    def fits(self) -> bool:
        """False if the devices have too little memory; True without devices, or if the memory is unknown."""
        sizes = phase_bytes(self.memory)
        return not self.devices or not sizes or max(sizes.values()) <= self.devices.usable

    @property
    def starts(self) -> bool:
        """True if nothing is missing and the devices have enough memory."""
        return self.fits and not self.missing


def planned_run(
    config: Config, device: str | None = None, reward: Callable | Sequence[Callable] | None = None
) -> DryRun:
    """Resolves and measures a run on named devices.

    Args:
        reward: see `dry_run`.
        device: name of the devices, see `recjax.planning.targets.named_devices`; None: one of this machine's.
    Raises:
        UserError: an invalid config, or an unknown device.
    """
    devices = None
    if device:
        devices = named_devices(device)
        if devices.kind and config.model.dtype == "auto":
            dtype = "bfloat16" if devices.kind.has_bfloat16 else "float32"
            model = config.model.model_copy(update={"dtype": dtype})
            config = config.model_copy(update={"model": model})
    return dry_run(config, devices, reward)


def dry_run(
    config: Config, devices: Devices | None = None, reward: Callable | Sequence[Callable] | None = None
) -> DryRun:
    """Resolves and measures a run.

    Args:
        reward: reward function that a program passed; None if `task.reward` names it.
        devices: devices that split the run by `mesh`; None: one device that holds everything.
    Raises:
        UserError: an invalid config.
    """
    resolved = programs.resolve_shapes(config, reward)
    result = DryRun(
        config=config,
        devices=devices,
        model=resolved.model,
        task=resolved.task,
        prompt_tokens=resolved.prompt_tokens,
        notes=resolved.notes,
        missing=resolved.missing,
    )
    if result.model:
        result = _with_memory(result, config, result.model, devices)
    regime = config.regime
    if regime.mode == "async":
        result.notes.append(f"staleness, at most regime.max_staleness = {regime.max_staleness}: the run measures it")
    experience = config.experience
    if experience:
        folder = experience.store
        if not folder and experience.mix:
            folder = experience.mix.store
        if folder:
            result.notes.append(f"sizes of the groups in {folder}; the sizes above are those of sampled groups")
            if not experience.follow and "://" not in folder and not Path(folder).expanduser().exists():
                result.missing.append(f"{folder}: is not an experience store (no such file); {MAKE}")
    if regime.mode != "sync":
        return result
    if experience and (experience.store or experience.late or experience.replay):
        result.notes.append(
            "staleness, which depends on reward delays, the replay buffer and the store: the run measures it"
        )
        return result
    steps = range(1, config.training.steps + 1)
    return result._replace(staleness=[expected_staleness(step, regime, config.training.updates) for step in steps])


def _with_memory(result: DryRun, config: Config, model: Model, devices: Devices | None) -> DryRun:
    """Adds the mesh, and the memory of devices and checkpoints, to a dry run."""
    prompt_tokens = result.prompt_tokens
    warn_of_context(config, prompt_tokens or 0)
    if devices is None or devices.kind is None:
        advise_on_dtype(config.model.dtype)
    if devices:
        mesh = make_mesh(config.mesh, devices.count)
        usable = devices.usable
        platform = devices.platform
    else:
        mesh = make_mesh(MeshConfig(), 1)
        usable = None
        platform = None
    check_fits(mesh, model.decoder.config)
    memory, activations = memory_items(
        config,
        model,
        prompt_tokens,
        mesh,
        usable=usable,
        remats=tuple(REMAT),
        platform=platform,
    )
    step_seconds = None
    if prompt_tokens:
        try:
            device = device_speed(config, model, devices)
            slots = _slots(config, model, prompt_tokens, mesh, memory, devices)
            step_seconds = expected_seconds(config, model, prompt_tokens, device, slots)
        except NoEstimate as reason:
            result.notes.append(f"seconds of a step: {reason}")
    else:
        result.notes.append("memory of sampling and of the update; set rollout.max_prompt_tokens")
    return result._replace(
        memory=memory,
        activations=activations,
        mesh=mesh,
        checkpoint_bytes=checkpoint_bytes(config, model, prompt_tokens or 0),
        step_seconds=step_seconds,
    )


def _slots(
    config: Config, model: Model, prompt_tokens: int, mesh: AnyMesh, memory: Sequence[Item], devices: Devices | None
) -> int | None:
    """Number of completions that are sampled at the same time; None: all of a batch."""
    if devices is None:
        return config.rollout.slots
    free = int(devices.usable) - sum(item.bytes for item in memory if item.phase == "always")
    return sampling_of(config, model.decoder, mesh, prompt_tokens, free, devices.platform).slots


def count(params: dict) -> int:
    """Number of parameters in a tree."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def memory_items(
    config: Config,
    model: Model,
    prompt_tokens: int | None,
    mesh: AnyMesh,
    usable: float | None = None,
    remats: Sequence[str] = (),
    platform: str | None = None,
) -> tuple[list[Item], dict[str, int]]:
    """Memory of each device, and the bytes of an update's activations for every value of model.remat in `remats`.

    Args:
        prompt_tokens: tokens of the longest prompt; None: unknown, and the result has only the arrays that always
            exist.
        usable: bytes of each device, which limit the number of slots; None: every completion has a slot.
        platform: JAX's name of the devices' platform; None: this machine's.
    """
    items = resident_items(config, model, mesh)
    if not prompt_tokens:
        return items, {}
    free = None
    if usable is not None:
        free = int(usable) - sum(item.bytes for item in items)
    platform = platform or jax.default_backend()
    update, activations = update_items(config, model, prompt_tokens, mesh, remats)
    items += sampling_items(config, model, prompt_tokens, mesh, free=free, platform=platform)
    items += update
    return items, activations


def resident_items(config: Config, model: Model, mesh: AnyMesh) -> list[Item]:
    """Memory of the arrays that each device always holds."""
    items = []
    for name, held in resident_arrays(config, model).items():
        size = bytes_on_device(laid_out_by_rules(mesh, held.tree))
        if size:
            items.append(Item("always", name, held.formula, size))
    return items


def sampling_items(
    config: Config, model: Model, prompt_tokens: int, mesh: AnyMesh, free: int | None, platform: str
) -> list[Item]:
    """Memory of sampling, for the larger of training's and evaluation's batches.

    Args:
        free: bytes on each device that the run does not always hold; None: every completion has a slot.
    """
    decoder = model.decoder
    shape = decoder.config
    size = jnp.dtype(decoder.dtype).itemsize
    name, weights = sampled_from(config, model)
    cast = bytes_on_device(laid_out_by_rules(mesh, weights)) if name == CAST else 0
    items = [Item("sample", name, f"{size} B × trained", cast)]
    # Each version of frozen seats has an engine of its own.
    engines = 1 + config.task.most_older_versions(config.training.steps)
    each = "" if engines == 1 else f"{engines} × "
    if free is None:
        sampling_mesh = mesh
        prompts = config.rollout.prompts_per_step
        rows = prompts * most_completions(config)
        states = prompts + rows
        if config.task.agent:
            rows = power_of_two(rows)
            states = power_of_two(prompts) + rows
            prompts = states  # each slot has a copy of its prompt
    else:
        plan = sampling_of(config, decoder, mesh, prompt_tokens, free=(free - cast) // engines, platform=platform)
        sampling_mesh = plan.mesh
        rows = plan.slots
        states = plan.prompts + plan.slots
        prompts = plan.prompts if plan.shares_prompts else states
        items += [
            Item("sample", "weights of the sampling mesh", f"{size} B × parameters", plan.moved),
            Item("sample", "unrolled layers", f"{each}{size} B × layers", engines * plan.copied),
        ]
    longest = longest_in_slot(config, prompt_tokens)
    if config.task.agent:
        longest = capacities(longest)[-1]
    sizes = {"prompts": prompts, "prompt_tokens": prompt_tokens, "rows": rows, "completion_tokens": longest}
    with jax.sharding.use_abstract_mesh(sampling_mesh.abstract_mesh):
        key_value_size = engines * key_value_bytes(decoder, **sizes)
        state_size = engines * state_bytes(decoder, states)
        score_size = score_bytes(decoder, rows)
        later = key_value_bytes(decoder, **(sizes | {"prompts": 0}))
    formula = (
        f"{each}2 × {shape.attention_layers} layers × {shape.num_kv_heads} heads × {shape.head_dim} × {size} B"
        f" × ({prompts} × {prompt_tokens} + {rows} × {longest} tokens)"
    )
    items.append(Item("sample", "keys and values", formula, key_value_size))
    if copies_into_blocks(platform, later // size):
        items.append(Item("sample", "a round's copy in blocks", "keys and values of completions", later))
    if shape.delta:
        net = shape.delta
        state = f"{net.value_heads} × {net.key_dim} × {net.value_dim} × 4 B"
        window = f"{(net.kernel - 1) * net.channels} × {size} B"
        formula = f"{each}{sum(net.layers)} layers × {states} rows × ({state} + {window})"
        items.append(Item("sample", "states of delta nets", formula, state_size))
    formula = f"2 × {rows} rows × {shape.vocab_size} tokens × 4 B"
    items.append(Item("sample", "scores of the next token", formula, score_size))
    return [item for item in items if item.bytes]


class _MicroBatch(NamedTuple):
    """A device's share of a micro-batch.

    inputs: shapes of the arrays that the forward pass reads.
    tokens: number of tokens that it scores.
    contents: the sizes in words.
    logprobs: function that computes the tokens' log-probs.
    """

    inputs: list[Any]
    tokens: int
    contents: str
    logprobs: Callable


def update_items(
    config: Config, model: Model, prompt_tokens: int, mesh: AnyMesh, remats: Sequence[str] = ()
) -> tuple[list[Item], dict[str, int]]:
    """Memory of the update, and the bytes of its activations for model.remat and every value in `remats`."""
    micro_batch = _micro_batch(config, prompt_tokens, row_shards(mesh))
    tensor = mesh.shape["tensor"]
    device_model = _device_model(config, model, tensor)
    activations = {}
    for remat in {config.model.remat, "none", *remats}:
        activations[remat] = _activations(config, device_model, micro_batch, remat)
    layer = activations["none"] // model.decoder.config.num_layers
    for remat in activations:
        if remat != "none":  # the backward pass also computes one layer again
            activations[remat] += layer
    kept = "kept by jax.vjp"
    if config.model.remat != "none":
        kept += ", and one layer recomputed"
    gradients = bytes_on_device(laid_out_by_rules(mesh, model.trained))
    chunk = min(positions_at_once(model.decoder.config, config.model.logprob_chunk), micro_batch.tokens)
    vocabulary = model.decoder.config.vocab_size
    if vocabulary % tensor == 0:
        vocabulary //= tensor
    copies = 4
    algorithm = config.algorithm.build()
    # The scores of a teacher, or of the reference in the scoring pass, need the same memory again.
    if algorithm.teacher_divergence is not None or algorithm.reads("scored_reference_kl"):
        copies = 8
    items = [
        Item("update", "gradients: their sum, a micro-batch's", "2 × 4 B × trained", 2 * gradients),
        Item("update", "activations", f"{kept}: {micro_batch.contents}", activations[config.model.remat]),
        Item(
            "update",
            "chunk of vocabulary scores",
            f"{copies} × {chunk} × {vocabulary} × 4 B",
            4 * copies * chunk * vocabulary,
        ),
    ]
    return items, {remat: activations[remat] for remat in remats}


def _micro_batch(config: Config, prompt_tokens: int, shards: int) -> _MicroBatch:
    """The share of a micro-batch for one of `shards` devices."""
    shape = programs.minibatch_shape(config, prompt_tokens)
    if is_packed(config, shape):
        rows, time = shape_for(config, shape, shards)
        rows = math.ceil(rows / shards)
        return _MicroBatch(
            inputs=[jax.ShapeDtypeStruct((rows, time), jnp.int32)] * 4,
            tokens=rows * time,
            contents=f"{rows} packed rows × {time} tokens",
            logprobs=packed_logprobs,
        )
    parts = config.micro_batches(shape.positions, shards) * shards
    shape = shape._replace(prompts=math.ceil(shape.prompts / parts))
    batch = batch_arrays(shape)
    assert shape.group is not None
    rows = shape.prompts * shape.group
    return _MicroBatch(
        inputs=[batch.prompts, batch.prompt_mask, batch.completions, batch.completion_mask],
        tokens=rows * shape.time,
        contents=f"{shape.prompts} prompts × {prompt_tokens} + {rows} completions × {shape.time} tokens",
        logprobs=completion_logprobs,
    )


def _device_model(config: Config, model: Model, tensor: int) -> Model:
    """The model with one device's share of heads and MLP units, on a mesh whose axis `tensor` has this size."""
    complete = model.decoder.config
    if tensor == 1 or complete.num_kv_heads % tensor:
        return model
    shape = dataclasses.replace(
        complete,
        num_heads=complete.num_heads // tensor,
        num_kv_heads=complete.num_kv_heads // tensor,
        intermediate_size=complete.intermediate_size // tensor,
    )
    return Model(model.decoder.clone(config=shape), *split_params(abstract_params(shape), config.model))


def _activations(config: Config, model: Model, micro_batch: _MicroBatch, remat: str) -> int:
    """Bytes that a micro-batch's forward pass saves for the backward pass, without the parameters themselves.

    They are the residuals of jax.vjp as shapes. A compiler may save somewhat more or less.
    """
    decoder = model.decoder.clone(remat=remat)
    options = {"sampling": config.rollout.sampling(), "chunk": config.model.logprob_chunk}
    frozen = to_compute_with(decoder, model.frozen)

    def residuals(trained, frozen, *inputs):
        def logprobs(trained):
            scores = micro_batch.logprobs(decoder, combine(trained, frozen), *inputs, **options)
            return scores.logprobs, scores.entropy

        return jax.vjp(logprobs, trained)[1]

    kept = jax.tree.leaves(jax.eval_shape(residuals, model.trained, frozen, *micro_batch.inputs))
    weights = {(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves((model.trained, frozen))}
    return _bytes([leaf for leaf in kept if (leaf.shape, leaf.dtype) not in weights])


def checkpoint_bytes(config: Config, model: Model, prompt_tokens: int) -> int:
    """Bytes of a checkpoint: trained parameters, optimizer state, the sampler's copy, and batches sampled ahead."""
    arrays = resident_arrays(config, model)
    saved = [arrays["trained parameters"].tree, arrays["optimizer's state"].tree]
    if programs.keeps_copy(config):
        saved.append(to_compute_with(model.decoder, model.trained))
    shape = sampled_shape(config, prompt_tokens)
    prompt_time = shape.prompt_time
    if shape.group is None:
        prompt_time = 1
    # A prompt's token has an int32 id and a bool mask; a completion's token also has a float32 log-prob.
    batch = shape.prompts * prompt_time * 5 + shape.rows * shape.time * 9
    batches = config.regime.sync_offset
    if config.training.updates > 1:  # a checkpoint between two updates also holds the batch
        batches += 1
    return _bytes(saved) + batches * batch


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def compact(staleness: list[int]) -> str:
    """A schedule in a few words: "0–19" for values that rise by one, and counts for equal consecutive ranges."""
    ranges: list[list[int]] = []
    for value in staleness:
        if ranges and value == ranges[-1][-1] + 1:
            ranges[-1].append(value)
        else:
            ranges.append([value])
    words = []
    for values, equal_ranges in itertools.groupby(ranges):
        text = f"{values[0]}"
        if len(values) > 1:
            text += f"–{values[-1]}"
        times = len(list(equal_ranges))
        if times > 1:
            text += f" ×{times}"
        words.append(text)
    return ", ".join(words)


def first_steps(regime: RegimeConfig, steps: int, updates: int = 1) -> int:
    """Number of steps that show a regime's complete pattern.

    Args:
        updates: steps on each batch.
    """
    return min((2 * max(regime.sync_interval, regime.sync_offset) + 2) * updates, steps)


def print_dry_run(path: str, overrides: list[str], device: str | None = None) -> int:
    """Prints a dry run and returns its exit status.

    The status is 0 if the run can start, 1 if a part is missing or the given devices are too small, and 2 for an
    invalid config. Errors are on standard error.

    Args:
        device: name of the devices to plan for, see `recjax.planning.targets.named_devices`; None: one of this
            machine's.
    """
    try:
        result = planned_run(load_config(path, overrides), device)
        show_dry_run(result)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for message in result.missing:
        print(f"error: {message}", file=sys.stderr)
    if not result.starts:
        return 1
    command = shlex.join(["python", "-m", "recjax.train", "--config", path, *overrides])
    print(f"to run it{' there' if device else ''}: {command}")
    return 0


def warn_of_memory(setup: Setup) -> None:
    """Logs a warning if a run's estimated memory exceeds that of a device in the current mesh."""
    config = setup.config
    decoder = setup.policy.decoder
    available = device_memory()
    model = Model(decoder, *split_params(abstract_params(decoder.config), config.model))
    prompt_tokens = setup.train.tokens.shape[1]
    mesh = jax.sharding.get_mesh()
    try:
        items, _ = memory_items(config, model, prompt_tokens, mesh, available)
    except Exception:  # an accelerator's kernel may refuse to be traced alone, and an estimate must not stop a run
        logger.debug("no estimate of the run's memory", exc_info=True)
        return
    phases = phase_bytes(items)
    phase = max(phases, key=lambda name: phases[name])
    if phases[phase] <= available or not hosts.is_first():
        return
    changes = [change for change, _ in smaller(config, prompt_tokens, mesh, {phase})]
    logger.warning(
        "the %s phase needs about %.2f GiB of each device, which has %.2f GiB; if it runs out of memory, set %s;"
        " --dry_run shows the parts",
        phase,
        phases[phase] / GIB,
        available / GIB,
        ", or ".join(changes),
    )


def smaller(
    config: Config, prompt_tokens: int | None, mesh: AnyMesh, too_large: Iterable[str] = ("sample", "update")
) -> list[tuple[str, str]]:
    """Overrides of the config with which phases need less memory, and their cost, the cheapest first."""
    sizes = mesh.shape
    changes = []
    if sizes["data"] > 1:
        change = f"mesh.data=1 mesh.fsdp={sizes['data'] * sizes['fsdp']}"
        changes.append((change, "devices exchange weights more often"))
    if set(too_large) != {"sample"}:
        changes += _smaller_updates(config, prompt_tokens, row_shards(mesh))
    tokens = config.rollout.max_completion_tokens // 2
    if tokens:
        changes.append((f"rollout.max_completion_tokens={tokens}", "shorter completions are another experiment"))
    if not (config.model.lora or config.model.adapter or config.model.freeze):
        changes.append(("model.lora.rank=16", "training adapters is another experiment"))
    return changes


def _smaller_updates(config: Config, prompt_tokens: int | None, shards: int) -> list[tuple[str, str]]:
    """Overrides of the config with which the update needs less memory, and their cost, the cheapest first."""
    costs = {
        "attention": "recomputes all but projections and attention",
        "dots": "recomputes all but projections",
        "full": "recomputes every layer",
    }
    remats = list(REMAT)
    cheaper_remats = remats[remats.index(config.model.remat) + 1 :]
    changes = [(f"model.remat={name}", f"the backward pass {costs[name]}") for name in cheaper_remats]
    cost = "more micro-batches, and devices exchange weights for each"
    budget = config.training.tokens_per_micro_batch
    if budget:
        changes.append((f"training.tokens_per_micro_batch={budget // 2}", cost))
        return changes
    prompts = config.rollout.prompts_per_step // config.training.minibatches
    assert prompt_tokens is not None
    micro_batches = config.micro_batches(programs.minibatch_shape(config, prompt_tokens).positions, shards)
    for size in range(prompts // micro_batches - 1, 0, -1):
        if prompts % size == 0 and size % shards == 0:
            changes.append((f"training.micro_batch_prompts={size}", cost))
            break
    return changes


def phase_bytes(memory: Sequence[Item]) -> dict[str, int]:
    """Bytes that each phase needs, with the arrays that devices always hold."""
    totals = Counter()
    for item in memory:
        totals[item.phase] += item.bytes
    always = totals.pop("always", 0)
    return {phase: always + size for phase, size in totals.items()}


def _show_devices(result: DryRun) -> None:
    """Prints whether the devices have enough memory; without devices, the accelerators that have it."""
    config = result.config
    needed = max(phase_bytes(result.memory).values())
    if result.devices:
        _show_fit(config, result, result.devices, needed)
    else:
        large_enough = [name for name, device in ACCELERATORS.items() if needed <= device.usable_bytes]
        too_small = [name for name in ACCELERATORS if name not in large_enough]
        line = f"one device is enough: {', '.join(large_enough) or 'none'}"
        if too_small:
            line += f"; too small: {', '.join(too_small)}"
        print(line)
        if config.model.dtype == "auto" and jax.default_backend() == "cpu":
            print("planned in float32, the default on this CPU; --device NAME plans for another device")
    print("this plan is computed from shapes; python -m recjax.compile_check compiles the programs for a device")


def _show_fit(config: Config, result: DryRun, devices: Devices, needed: int) -> None:
    """Prints whether the devices have enough memory, and ways to need less of it."""
    kind = devices.kind
    can_run = needed <= devices.usable
    line = "it fits" if can_run else "it does not fit"
    if devices.count == 1:
        line += f" one {devices.name}:"
    else:
        line += f" {devices.name}, on each of {devices.count} devices:"
    line += f" {needed / GIB:.2f} GiB of the {devices.usable / GIB:.1f} that JAX takes"
    if kind and kind.gpu:
        line += f" of {kind.gigabytes:g} GB"
    print(line)
    if can_run:
        return
    _show_smaller(config, result, devices, needed)
    if kind and kind.gpu and needed <= 0.95 * kind.gigabytes * 1e9:
        print(f"JAX takes more of a GPU with the environment variable {MEMORY_FRACTION}=0.95")


def _show_smaller(config: Config, result: DryRun, devices: Devices, needed: int) -> None:
    """Prints overrides of the config that save at least 1 % of the memory, with the memory that the run then needs."""
    assert result.mesh is not None
    assert result.model is not None
    for change, cost in smaller(config, result.prompt_tokens, result.mesh):
        try:
            size = _changed_bytes(config, change, result.model, result.prompt_tokens, devices)
        except UserError:  # other keys of this config exclude the change
            continue
        if size < 0.99 * needed:
            verdict = ", which fits" if size <= devices.usable else ""
            print(f"needs less memory: {change}: {size / GIB:.2f} GiB{verdict} ({cost})")
    larger = larger_slices(devices.name if ":" in devices.name else f"{devices.name}:1")
    if larger:
        print(f"the next larger topology is {larger[0]}; mesh.fsdp=-1 splits weights and optimizer state over it")


def _changed_bytes(config: Config, change: str, model: Model, prompt_tokens: int | None, devices: Devices) -> int:
    """Bytes on each device that the run needs with overrides such as "model.remat=full".

    Raises:
        UserError: other keys of the config exclude the overrides.
    """
    overrides = dict(override.split("=") for override in change.split())
    changed = config.replace(**overrides)
    shape = model.decoder.config
    if changed.model.lora and not config.model.lora:
        shape = adapted(shape, changed.model.lora)
    changed_model = Model(model.decoder.clone(config=shape), *split_params(abstract_params(shape), changed.model))
    mesh = make_mesh(changed.mesh, devices.count)
    memory, _ = memory_items(
        changed, changed_model, prompt_tokens, mesh, usable=devices.usable, platform=devices.platform
    )
    return max(phase_bytes(memory).values())


def show_memory(console: Console, memory: Sequence[Item], mesh: AnyMesh) -> None:
    """Prints the memory of each device by phase and array, and the sum of each phase."""
    title = "memory, of all devices together"
    if mesh.size > 1:
        title = f"memory of each of {mesh.size} devices: {axes(mesh)}"
    table = Table("when", "what", "GiB", "formula", title=title)
    for item in memory:
        table.add_row(item.phase, item.name, f"{item.bytes / GIB:.3f}", item.formula)
    console.print(table)
    for phase, size in phase_bytes(memory).items():
        console.print(f"in all, {phase}: {size / GIB:.2f} GiB")


def axes(mesh: AnyMesh) -> str:
    """The axes of a mesh with their sizes, in words."""
    return " × ".join(f"{axis} {size}" for axis, size in mesh.shape.items())


def show_dry_run(result: DryRun) -> None:
    """Prints a dry run."""
    config = result.config
    console = plain_console(soft_wrap=True, highlight=False)
    print_line = console.print
    print_line(f"algorithm {config.algorithm.preset}")
    for axis, options in config.algorithm.resolved().items():
        settings = ", ".join(f"{key} {value}" for key, value in options.items() if key != "name")
        print_line(f"  {axis}: {options.get('name', '')} {settings}".rstrip())
    if result.model:
        _show_model(console, config, result.model)
    if result.memory:
        assert result.mesh is not None and result.checkpoint_bytes is not None
        show_memory(console, result.memory, result.mesh)
        for remat, size in result.activations.items():
            if remat != config.model.remat:
                print_line(f"activations with model.remat={remat}: {size / GIB:.3f} GiB")
        size = result.checkpoint_bytes / GIB
        kept = config.training.keep_checkpoints
        print_line(f"a checkpoint: {size:.2f} GiB on disk; {kept} are kept, plus one during writing")
    rollout = config.rollout
    updates = config.training.updates
    prompt_tokens = "an unknown number"
    if result.prompt_tokens:
        prompt_tokens = f"{rollout.prompts_per_step * result.prompt_tokens:,}"
    rows = rollout.prompts_per_step * (rollout.group_size + rollout.oversample)
    batch = "step" if updates == 1 else f"batch of {updates} steps"
    print_line(
        f"tokens a {batch}, at most: {prompt_tokens} of prompts,"
        f" {rows * rollout.max_completion_tokens:,} of {rows} completions"
    )
    steps = config.training.steps
    if result.step_seconds:
        _show_seconds(console, config, result.step_seconds)
    if result.staleness:
        shown = result.staleness[: first_steps(config.regime, steps, updates)]
        mean = np.mean(result.staleness)
        highest = max(result.staleness)
        print_line(f"staleness of steps 1 to {len(shown)}: {compact(list(shown))}")
        print_line(f"staleness of all {steps} steps: mean {mean:.2f}, highest {highest}")
    if result.task:
        problems = len(result.task.train)
        seats = len(config.task.trained_seats)
        problems_per_step = rollout.prompts_per_step / seats / updates
        print_line(
            f"{problems:,} problems to train on, {len(result.task.evaluation):,} held out;"
            f" {problems / problems_per_step:.1f} steps an epoch,"
            f" {steps * problems_per_step / problems:.2f} epochs in {steps} steps"
        )
    for note in result.notes:
        print_line(f"not known: {note}")
    if phase_bytes(result.memory):
        _show_devices(result)


def _show_seconds(console: Console, config: Config, found: StepSeconds) -> None:
    """Prints the expected seconds of a step, and what they do and do not contain."""
    tokens = config.rollout.max_completion_tokens
    print_line = console.print
    print_line(f"a step takes {found} if all completions have {tokens:,} tokens: {found.device}")
    hours = config.training.steps * found.expected / 3600
    print_line(f"all {config.training.steps:,} steps: about {hours:.2g} hours, without evaluations and checkpoints")
    if found.unmeasured:
        print_line(f"the range is of measured steps, which have no {', no '.join(found.unmeasured)}")


def _show_model(console: Console, config: Config, model: Model) -> None:
    """Prints the number of parameters, and the dtypes."""
    shape = model.decoder.config
    trained = count(model.trained)
    parameters = trained + count(model.frozen)
    console.print(f"parameters {parameters:,}, of which trained {trained:,}")
    if shape.experts:
        console.print(
            f"parameters active for each token {parameters - shape.idle_weights:,}:"
            f" {shape.experts.per_token} of {shape.experts.count} experts in each layer"
        )
    reason = ""
    if config.model.dtype == "auto":
        reason = f" (model.dtype auto on {jax.default_backend()})"
    console.print(f"compute in {model.decoder.dtype}{reason}; weights are stored in float32")
