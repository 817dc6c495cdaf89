"""A run's sizes, memory, tokens and staleness before it starts, from shapes: it neither reads weights nor compiles."""

import contextlib
import dataclasses
import itertools
import logging
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
from rich.console import Console
from rich.table import Table

from recjax.config import Config, MeshConfig, RegimeConfig, load_config
from recjax.errors import UserError
from recjax.experience.batch import sampled_shape
from recjax.experience.packing import is_packed, shape_for
from recjax.models.decoder import REMAT, abstract_params
from recjax.models.logprobs import completion_logprobs, packed_logprobs
from recjax.models.placement import AnyMesh, bytes_on_device, laid_out_by_rules, row_shards
from recjax.models.trainable import adapted, combine, split_params
from recjax.planning import programs
from recjax.planning.programs import CAST, Model, batch_arrays, resident_arrays, sampled_from, to_compute_with
from recjax.planning.sampling import most_completions, sampling_of
from recjax.planning.targets import (
    ACCELERATORS,
    GIB,
    MEMORY_FRACTION,
    Devices,
    device_memory,
    larger_slices,
    named_devices,
)
from recjax.rollout.plan import key_value_bytes, score_bytes, state_bytes
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
    """Memory of each device: its content, the formula of its size on all devices, and its size in bytes.

    `phase` is "always", or the phase of a step that needs the memory: "sample" or "update".
    """

    phase: str
    name: str
    formula: str
    bytes: int


class DryRun(NamedTuple):
    """Facts about a run before it starts; unknown ones are None or empty, and `notes` explain why.

    `missing` has an error with its remedy for each part that the run needs to start: model, tokenizer, data or store.
    """

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


def dry_run(config: Config, devices: Devices | None = None) -> DryRun:
    """Resolves and measures a run.

    Args:
        devices: devices that split the run by `mesh`; None: one device that holds everything.
    Raises:
        UserError: an invalid config.
    """
    result = DryRun(*programs.resolve_shapes(config))
    model = result.model
    prompt_tokens = result.prompt_tokens
    notes = result.notes
    if model:
        warn_of_context(config, prompt_tokens or 0)
        mesh = make_mesh(config.mesh, devices.count) if devices else make_mesh(MeshConfig(), 1)
        check_fits(mesh, model.decoder.config)
        usable = devices.usable if devices else None
        platform = devices.platform if devices else None
        memory, activations = memory_items(config, model, prompt_tokens, mesh, usable, tuple(REMAT), platform)
        if not prompt_tokens:
            notes.append("memory of sampling and of the update; set rollout.max_prompt_tokens")
        result = result._replace(
            memory=memory,
            activations=activations,
            mesh=mesh,
            checkpoint_bytes=checkpoint_bytes(config, model, prompt_tokens or 0),
        )
    experience = config.experience
    regime = config.regime
    staleness = []
    if regime.mode == "async":
        notes.append(f"staleness, at most regime.max_staleness = {regime.max_staleness}: the run measures it")
    if experience and (folder := experience.store or (experience.mix and experience.mix.store)):
        notes.append(f"sizes of the groups in {folder}; the sizes above are those of sampled groups")
        if not experience.follow and "://" not in folder and not Path(folder).expanduser().exists():
            result.missing.append(f"{folder}: is not an experience store (no such file); {MAKE}")
    if regime.mode == "sync" and experience and (experience.store or experience.late or experience.replay):
        notes.append("staleness, which depends on reward delays, the replay buffer and the store: the run measures it")
    elif regime.mode == "sync":
        staleness = [
            expected_staleness(step, regime, config.training.updates) for step in range(1, config.training.steps + 1)
        ]
    return result._replace(notes=notes, staleness=staleness)


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
        prompt_tokens: tokens of the longest prompt; None: not known, and only the arrays that always exist are listed.
        usable: bytes of each device, which limit the number of slots; None: every completion has a slot.
        platform: JAX's name of the devices' platform; None: that of this machine's devices.
    """
    items = resident_items(config, model, mesh)
    if not prompt_tokens:
        return items, {}
    free = None if usable is None else int(usable) - sum(item.bytes for item in items)
    update, activations = update_items(config, model, prompt_tokens, mesh, remats)
    platform = platform or jax.default_backend()
    return items + sampling_items(config, model, prompt_tokens, mesh, free, platform) + update, activations


def resident_items(config: Config, model: Model, mesh: AnyMesh) -> list[Item]:
    """Memory of the arrays that each device always holds."""
    arrays = resident_arrays(config, model)
    sizes = {name: bytes_on_device(laid_out_by_rules(mesh, held.tree)) for name, held in arrays.items()}
    return [Item("always", name, held.formula, sizes[name]) for name, held in arrays.items() if sizes[name]]


def sampling_items(
    config: Config, model: Model, prompt_tokens: int, mesh: AnyMesh, free: int | None, platform: str
) -> list[Item]:
    """Memory of sampling, for the larger of training's and evaluation's batches."""
    decoder = model.decoder
    shape = model.decoder.config
    prompts = config.rollout.prompts_per_step
    rows = prompts * most_completions(config)
    longest = config.rollout.max_completion_tokens
    size = jnp.dtype(decoder.dtype).itemsize
    name, weights = sampled_from(config, model)
    cast = bytes_on_device(laid_out_by_rules(mesh, weights)) if name == CAST else 0
    # Each version of frozen seats has an engine of its own.
    engines = 1 + config.task.most_older_versions(config.training.steps)
    free = None if free is None else (free - cast) // engines
    plan = None if free is None else sampling_of(config, decoder, mesh, prompt_tokens, free, platform)
    states = (plan.prompts + plan.slots) if plan else prompts + rows
    if plan:
        prompts = plan.prompts + (0 if plan.shares_prompts else plan.slots)
        rows = plan.slots
    formula = (
        f"2 × {shape.attention_layers} layers × {shape.num_kv_heads} heads × {shape.head_dim} × {size} B"
        f" × ({prompts} × {prompt_tokens} + {rows} × {longest} tokens)"
    )
    sizes = {"prompts": prompts, "prompt_tokens": prompt_tokens, "rows": rows, "completion_tokens": longest}
    recurrent = ""
    if net := shape.delta:
        state = f"{net.value_heads} × {net.key_dim} × {net.value_dim} × 4 B"
        window = (net.kernel - 1) * net.channels
        recurrent = f"{sum(net.layers)} layers × {states} rows × ({state} + {window} × {size} B)"
    scores = f"2 × {rows} rows × {shape.vocab_size} tokens × 4 B"
    each = "" if engines == 1 else f"{engines} × "
    with jax.sharding.use_abstract_mesh((plan.mesh if plan else mesh).abstract_mesh):
        items = [
            Item("sample", name, f"{size} B × trained", cast),
            Item("sample", "weights of the sampling mesh", f"{size} B × parameters", plan.moved if plan else 0),
            Item("sample", "unrolled layers", f"{each}{size} B × layers", engines * plan.copied if plan else 0),
            Item("sample", "keys and values", each + formula, engines * key_value_bytes(decoder, **sizes)),
            Item("sample", "states of delta nets", each + recurrent, engines * state_bytes(decoder, states)),
            Item("sample", "scores of the next token", scores, score_bytes(decoder, rows)),
        ]
    return [item for item in items if item.bytes]


def update_items(
    config: Config, model: Model, prompt_tokens: int, mesh: AnyMesh, remats: Sequence[str] = ()
) -> tuple[list[Item], dict[str, int]]:
    """Memory of the update, and the bytes of its activations for model.remat and every value in `remats`."""
    shape = programs.minibatch_shape(config, prompt_tokens)
    shards = row_shards(mesh)
    packed = is_packed(config, shape)
    if packed:
        rows, time = shape_for(config, shape, shards)
        rows = -(-rows // shards)
        tokens = rows * time
        contents = f"{rows} packed rows × {time} tokens"
        inputs: list[Any] = [jax.ShapeDtypeStruct((rows, time), jnp.int32)] * 4
    else:
        parts = config.micro_batches(shape.positions, shards) * shards
        shape = shape._replace(prompts=-(-shape.prompts // parts))
        batch = batch_arrays(shape)
        assert shape.group is not None
        rows = shape.prompts * shape.group
        tokens = rows * shape.time
        contents = f"{shape.prompts} prompts × {prompt_tokens} + {rows} completions × {shape.time} tokens"
        inputs = [batch.prompts, batch.prompt_mask, batch.completions, batch.completion_mask]
    chunk = min(config.model.logprob_chunk, tokens)
    vocabulary = model.decoder.config.vocab_size
    tensor = mesh.shape["tensor"]
    on_device = model
    whole = model.decoder.config
    split = vocabulary // tensor if vocabulary % tensor == 0 else vocabulary
    if tensor > 1 and whole.num_kv_heads % tensor == 0:  # a device has a share of heads and MLP units
        names = ("num_heads", "num_kv_heads", "intermediate_size")
        shape = dataclasses.replace(whole, **{name: getattr(whole, name) // tensor for name in names})
        on_device = Model(model.decoder.clone(config=shape), *split_params(abstract_params(shape), config.model))
    chosen = {config.model.remat, "none", *remats}
    logprobs_of = packed_logprobs if packed else completion_logprobs
    activations = {remat: _activations(config, on_device, inputs, remat, logprobs_of) for remat in chosen}
    layer = activations["none"] // model.decoder.config.num_layers
    activations = {remat: kept + (layer if remat != "none" else 0) for remat, kept in activations.items()}
    kept = "kept by jax.vjp" + ("" if config.model.remat == "none" else ", and one layer recomputed")
    gradients = bytes_on_device(laid_out_by_rules(mesh, model.trained))
    copies = 4 if config.algorithm.build().teacher_divergence is None else 8  # a teacher has scores too
    items = [
        Item("update", "gradients: their sum, a micro-batch's", "2 × 4 B × trained", 2 * gradients),
        Item("update", "activations", f"{kept}: {contents}", activations[config.model.remat]),
        Item("update", "chunk of vocabulary scores", f"{copies} × {chunk} × {split} × 4 B", 4 * copies * chunk * split),
    ]
    return items, {remat: activations[remat] for remat in remats}


def _activations(config: Config, model: Model, inputs: list[Any], remat: str, logprobs_of: Callable) -> int:
    """Bytes that a micro-batch's forward pass saves for the backward pass, without the parameters themselves.

    They are the residuals of jax.vjp as shapes. A compiler may save somewhat more or less.
    """
    decoder = model.decoder.clone(remat=remat)
    options = {"sampling": config.rollout.sampling(), "chunk": config.model.logprob_chunk}
    frozen = to_compute_with(decoder, model.frozen)

    def residuals(trained, frozen, *inputs):
        def logprobs(trained):
            scores = logprobs_of(decoder, combine(trained, frozen), *inputs, **options)
            return scores.logprobs, scores.entropy

        return jax.vjp(logprobs, trained)[1]

    kept = jax.tree.leaves(jax.eval_shape(residuals, model.trained, frozen, *inputs))
    weights = {(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves((model.trained, frozen))}
    return _bytes([leaf for leaf in kept if (leaf.shape, leaf.dtype) not in weights])


def checkpoint_bytes(config: Config, model: Model, prompt_tokens: int) -> int:
    """Bytes of a checkpoint: trained parameters, optimizer state, the sampler's copy, and batches sampled ahead."""
    parts = resident_arrays(config, model)
    shape = sampled_shape(config, prompt_tokens)
    # Token ids and masks of prompts and completions, and log-probs of completions.
    prompts = shape.prompts * (1 if shape.group is None else shape.prompt_time)
    batch = prompts * 5 + shape.rows * shape.time * 9
    saved = [parts[name].tree for name in ("trained parameters", "optimizer's state")]
    saved += [to_compute_with(model.decoder, model.trained)] if programs.keeps_copy(config) else []
    # Between two updates of a batch, it has the batch as well.
    return _bytes(saved) + (config.regime.sync_offset + (config.training.updates > 1)) * batch


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def compact(staleness: list[int]) -> str:
    """A schedule in a few words: "0–19" for values that rise by one, and counts for equal consecutive ranges."""
    rising = itertools.groupby(enumerate(staleness), key=lambda pair: pair[1] - pair[0])
    runs = [[value for _, value in pairs] for _, pairs in rising]
    words = []
    for run, equal in itertools.groupby(runs):
        times = len([*equal])
        words.append((f"{run[0]}–{run[-1]}" if len(run) > 1 else f"{run[0]}") + (f" ×{times}" if times > 1 else ""))
    return ", ".join(words)


def first_steps(regime: RegimeConfig, steps: int, updates: int = 1) -> int:
    """Number of steps that show the whole pattern of a regime.

    Args:
        updates: steps on each batch.
    """
    return min((2 * max(regime.sync_interval, regime.sync_offset) + 2) * updates, steps)


def print_dry_run(path: str, overrides: list[str], device: str | None = None) -> int:
    """Prints a dry run and returns its exit status.

    The status is 0 if the run can start, 1 if a part is missing or the given devices are too small, and 2 for an
    invalid config. Errors are on standard error.

    Args:
        device: name of devices to plan for, for `recjax.planning.targets.named_devices`; None: one of this machine's.
    """
    try:
        config = load_config(path, overrides)
        devices = named_devices(device) if device else None
        if devices and devices.kind and config.model.dtype == "auto":
            dtype = "bfloat16" if devices.kind.has_bfloat16 else "float32"
            config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
        result = dry_run(config, devices)
        show_dry_run(config, result)
        fits = _show_devices(config, result, devices) if phase_bytes(result.memory) else True
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for message in result.missing:
        print(f"error: {message}", file=sys.stderr)
    if result.missing or not fits:
        return 1
    command = shlex.join(["python", "-m", "recjax.train", "--config", path, *overrides])
    print(f"to run it{' there' if device else ''}: {command}")
    return 0


def warn_of_memory(setup: Setup) -> None:
    """Logs a warning if the estimated memory of a run exceeds that of a device of the mesh in context."""
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
    phase = max(phases, key=phases.__getitem__)
    if phases[phase] > available and hosts.is_first():
        logger.warning(
            "the %s phase needs about %.2f GiB of each device, which has %.2f GiB; if it runs out of memory, set %s;"
            " --dry_run shows the parts",
            phase,
            phases[phase] / GIB,
            available / GIB,
            ", or ".join(change for change, _ in smaller(config, prompt_tokens, mesh, {phase})),
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
    if {*too_large} - {"sample"}:
        costs = {
            "attention": "recomputes all but projections and attention",
            "dots": "recomputes all but projections",
            "full": "recomputes every layer",
        }
        later = list(REMAT)[list(REMAT).index(config.model.remat) + 1 :]
        changes += [(f"model.remat={name}", f"the backward pass {costs[name]}") for name in later]
        prompts = config.rollout.prompts_per_step // config.training.minibatches
        budget = config.training.tokens_per_micro_batch
        shards = row_shards(mesh)
        assert prompt_tokens is not None
        micro_batches = config.micro_batches(programs.minibatch_shape(config, prompt_tokens).positions, shards)
        fewer = range(prompts // micro_batches - 1, 0, -1)
        even = [f"micro_batch_prompts={size}" for size in fewer if prompts % size == 0 and size % shards == 0]
        for change in [f"tokens_per_micro_batch={budget // 2}"] if budget else even[:1]:
            changes.append((f"training.{change}", "more micro-batches, and devices exchange weights for each"))
    if tokens := config.rollout.max_completion_tokens // 2:
        changes.append((f"rollout.max_completion_tokens={tokens}", "shorter completions are another experiment"))
    if not (config.model.lora or config.model.adapter or config.model.freeze):
        changes.append(("model.lora.rank=16", "training adapters is another experiment"))
    return changes


def phase_bytes(memory: Sequence[Item]) -> dict[str, int]:
    """Bytes of each phase, with the arrays that are always held."""
    totals = Counter()
    for item in memory:
        totals[item.phase] += item.bytes
    always = totals.pop("always", 0)
    return {phase: always + size for phase, size in totals.items()}


def _show_devices(config: Config, result: DryRun, devices: Devices | None) -> bool:
    """Prints whether the devices have enough memory; without devices, the accelerators that have it.

    Returns:
        False if the given devices are too small.
    """
    needed = max(phase_bytes(result.memory).values())
    can_run = True
    if devices:
        kind = devices.kind
        usable = devices.usable / GIB
        can_run = needed <= devices.usable
        fits = "fits" if can_run else "does not fit"
        each = f"one {devices.name}" if devices.count == 1 else f"{devices.name}, on each of {devices.count} devices"
        has = " that JAX takes" + (f" of {kind.gigabytes:g} GB" if kind and kind.gpu else "")
        print(f"it {fits} {each}: {needed / GIB:.2f} GiB of the {usable:.1f}{has}")
        if not can_run:
            _show_smaller(config, result, devices, needed)
        if not can_run and kind and kind.gpu and needed <= 0.95 * kind.gigabytes * 1e9:
            print(f"JAX takes more of a GPU with the environment variable {MEMORY_FRACTION}=0.95")
    else:
        fits = [name for name, device in ACCELERATORS.items() if needed <= device.usable_bytes]
        smaller = ", ".join(name for name in ACCELERATORS if name not in fits)
        print(f"one device is enough: {', '.join(fits) or 'none'}" + (f"; too small: {smaller}" if smaller else ""))
        if config.model.dtype == "auto" and jax.default_backend() == "cpu":
            print("planned in float32, the default on this CPU; --device NAME plans for another device")
    print("this plan is computed from shapes; python -m recjax.compile_check compiles the programs for a device")
    return can_run


def _show_smaller(config: Config, result: DryRun, devices: Devices, needed: int) -> None:
    """Prints overrides of the config that save at least 1 % of the memory, with the memory that the run then needs."""

    def memory_with(change: str) -> int:
        changed = config.replace(**dict(value.split("=") for value in change.split()))
        assert result.model is not None
        decoder = result.model.decoder
        shape = decoder.config
        if changed.model.lora and not config.model.lora:
            shape = adapted(shape, changed.model.lora)
        model = Model(decoder.clone(config=shape), *split_params(abstract_params(shape), changed.model))
        mesh = make_mesh(changed.mesh, devices.count)
        memory, _ = memory_items(changed, model, result.prompt_tokens, mesh, devices.usable, (), devices.platform)
        return max(phase_bytes(memory).values())

    assert result.mesh is not None
    for change, cost in smaller(config, result.prompt_tokens, result.mesh):
        with contextlib.suppress(UserError):  # a change that other keys of this config exclude
            size = memory_with(change)
            verdict = ", which fits" if size <= devices.usable else ""
            if size < 0.99 * needed:
                print(f"needs less memory: {change}: {size / GIB:.2f} GiB{verdict} ({cost})")
    if larger := larger_slices(devices.name if ":" in devices.name else f"{devices.name}:1"):
        print(f"the next larger topology is {larger[0]}; mesh.fsdp=-1 splits weights and optimizer state over it")


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


def show_dry_run(config: Config, result: DryRun) -> None:
    """Prints a dry run."""
    console = plain_console(soft_wrap=True, highlight=False)
    print_line = console.print
    rollout = config.rollout
    steps = config.training.steps
    print_line(f"algorithm {config.algorithm.preset}")
    for axis, options in config.algorithm.resolved().items():
        settings = ", ".join(f"{key} {value}" for key, value in options.items() if key != "name")
        print_line(f"  {axis}: {options.get('name', '')} {settings}".rstrip())
    if result.model:
        trained = count(result.model.trained)
        frozen = count(result.model.frozen)
        print_line(f"parameters {trained + frozen:,}, of which trained {trained:,}")
        if experts := (shape := result.model.decoder.config).experts:
            each = f"{experts.per_token} of {experts.count} experts in each layer"
            print_line(f"parameters active for each token {trained + frozen - shape.idle_weights:,}: {each}")
        why = f" (model.dtype auto on {jax.default_backend()})" if config.model.dtype == "auto" else ""
        print_line(f"compute in {result.model.decoder.dtype}{why}; weights are stored in float32")
    if result.memory:
        assert result.mesh is not None and result.checkpoint_bytes is not None
        show_memory(console, result.memory, result.mesh)
        for remat, size in result.activations.items():
            if remat != config.model.remat:
                print_line(f"activations with model.remat={remat}: {size / GIB:.3f} GiB")
        size = result.checkpoint_bytes / GIB
        kept = config.training.keep_checkpoints
        print_line(f"a checkpoint: {size:.2f} GiB on disk; {kept} are kept, plus one during writing")
    rows = rollout.prompts_per_step * rollout.group_size
    prompts = f"{rollout.prompts_per_step * result.prompt_tokens:,}" if result.prompt_tokens else "an unknown number"
    completions = f"{rows * rollout.max_completion_tokens:,} of {rows} completions"
    updates = config.training.updates
    of = "step" if updates == 1 else f"batch of {updates} steps"
    print_line(f"tokens a {of}, at most: {prompts} of prompts, {completions}")
    if result.staleness:
        shown = result.staleness[: first_steps(config.regime, steps, updates)]
        mean = np.mean(result.staleness)
        highest = max(result.staleness)
        print_line(f"staleness of steps 1 to {len(shown)}: {compact(list(shown))}")
        print_line(f"staleness of all {steps} steps: mean {mean:.2f}, highest {highest}")
    if result.task:
        problems = len(result.task.train)
        seats = len(config.task.trained_seats)
        taken = rollout.prompts_per_step / seats / updates
        print_line(
            f"{problems:,} problems to train on, {len(result.task.evaluation):,} held out;"
            f" {problems / taken:.1f} steps an epoch, {steps * taken / problems:.2f} epochs in {steps} steps"
        )
    for note in result.notes:
        print_line(f"not known: {note}")
