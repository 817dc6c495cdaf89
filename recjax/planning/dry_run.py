"""A run's sizes, memory, tokens and staleness before it starts, from shapes: it neither reads weights nor compiles."""

import itertools
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

from recjax.config import Config, RegimeConfig, load_config
from recjax.console import plain_console
from recjax.experience.batch import sampled_shape
from recjax.experience.packing import shape_for
from recjax.models.decoder import REMAT
from recjax.models.logprobs import completion_logprobs, packed_logprobs
from recjax.models.trainable import combine
from recjax.planning import programs
from recjax.planning.programs import CAST, Model, batch_arrays, resident_arrays, sampled_from, to_compute_with
from recjax.planning.sampling import most_completions
from recjax.planning.targets import ACCELERATORS, GIB, accelerator
from recjax.rollout.plan import key_value_bytes, score_bytes
from recjax.tasks.problems import Task
from recjax.training.schedule import expected_staleness


class Item(NamedTuple):
    """Memory of all devices together: its content, the formula of its size, and its size in bytes.

    `phase` is "always", or the phase of a step that needs the memory: "sample" or "update".
    """

    phase: str
    name: str
    formula: str
    bytes: int


class DryRun(NamedTuple):
    """Facts about a run before it starts; unknown ones are None or empty, and `notes` explain why."""

    model: Model | None
    task: Task | None
    prompt_tokens: int | None
    notes: list[str]
    memory: Sequence[Item] = ()
    activations: Mapping[str, int] = MappingProxyType({})
    checkpoint_bytes: int | None = None
    staleness: Sequence[int] = ()


def dry_run(config: Config) -> DryRun:
    """Resolves and measures a run.

    Raises:
        ValueError: an invalid config. A file that cannot be downloaded gives a note and not an error.
    """
    result = DryRun(*programs.resolve_shapes(config))
    model, prompt_tokens, notes = result.model, result.prompt_tokens, result.notes
    if model:
        arrays = resident_arrays(config, model).items()
        memory = [Item("always", name, part.formula, size) for name, part in arrays if (size := _bytes(part.tree))]
        if prompt_tokens:
            update, activations = update_items(config, model, prompt_tokens)
            memory += sampling_items(config, model, prompt_tokens) + update
            result = result._replace(activations=activations)
        else:
            notes.append("memory of sampling and of the update; set rollout.max_prompt_tokens")
        result = result._replace(memory=memory, checkpoint_bytes=checkpoint_bytes(config, model, prompt_tokens or 0))
    experience, regime, staleness = config.experience, config.regime, []
    if regime.mode == "async":
        notes.append(f"staleness, at most regime.max_staleness = {regime.max_staleness}: the run measures it")
    if experience and (folder := experience.store or experience.mix and experience.mix.store):
        notes.append(f"sizes of the groups in {folder}; the sizes above are those of sampled groups")
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


def sampling_items(config: Config, model: Model, prompt_tokens: int) -> list[Item]:
    """Memory of sampling, for the larger of training's and evaluation's batches."""
    decoder, shape, prompts = model.decoder, model.decoder.config, config.rollout.prompts_per_step
    rows, longest, size = (
        prompts * most_completions(config),
        config.rollout.max_completion_tokens,
        decoder.dtype.itemsize,
    )
    formula = (
        f"2 × {shape.num_layers} layers × {shape.num_kv_heads} heads × {shape.head_dim} × {size} B"
        f" × ({prompts} × {prompt_tokens} + {rows} × {longest} tokens)"
    )
    sizes = {"prompts": prompts, "prompt_tokens": prompt_tokens, "rows": rows, "completion_tokens": longest}
    scores = f"2 × {rows} rows × {shape.vocab_size} tokens × 4 B"
    name, weights = sampled_from(config, model)
    return [
        *([Item("sample", name, f"{size} B × trained", _bytes(weights))] if name == CAST else []),
        Item("sample", "keys and values", formula, key_value_bytes(decoder, **sizes)),
        Item("sample", "scores of the next token", scores, score_bytes(decoder, rows)),
    ]


def update_items(config: Config, model: Model, prompt_tokens: int) -> tuple[list[Item], dict[str, int]]:
    """Memory of the update, and the bytes of its activations for every value of model.remat."""
    shape = programs.minibatch_shape(config, prompt_tokens)
    if programs.is_packed(config):
        rows, time = shape_for(config, shape)
        tokens, contents = rows * time, f"{rows} packed rows × {time} tokens"
        inputs = [jax.ShapeDtypeStruct((rows, time), jnp.int32)] * 4
    else:
        shape = shape._replace(prompts=shape.prompts // config.micro_batches(shape.positions))
        batch, rows = batch_arrays(shape), shape.prompts * shape.group
        tokens = rows * shape.time
        contents = f"{shape.prompts} prompts × {prompt_tokens} + {rows} completions × {shape.time} tokens"
        inputs = [batch.prompts, batch.prompt_mask, batch.completions, batch.completion_mask]
    chunk, vocabulary = min(config.model.logprob_chunk, tokens), model.decoder.config.vocab_size
    activations = {remat: _activations(config, model, inputs, remat) for remat in REMAT}
    layer = activations["none"] // model.decoder.config.num_layers
    activations = {remat: kept + (layer if remat != "none" else 0) for remat, kept in activations.items()}
    kept = "kept by jax.vjp" + ("" if config.model.remat == "none" else ", and one layer recomputed")
    items = [
        Item("update", "gradients: their sum, a micro-batch's", "2 × 4 B × trained", 2 * _bytes(model.trained)),
        Item("update", "activations", f"{kept}: {contents}", activations[config.model.remat]),
        Item("update", "chunk of vocabulary scores", f"4 × {chunk} × {vocabulary} × 4 B", 16 * chunk * vocabulary),
    ]
    return items, activations


def _activations(config: Config, model: Model, inputs: list[jax.ShapeDtypeStruct], remat: str) -> int:
    """Bytes that a micro-batch's forward pass saves for the backward pass, without the parameters themselves.

    They are the residuals of jax.vjp as shapes. A compiler may save somewhat more or less.
    """
    decoder = model.decoder.clone(remat=remat)
    logprobs_of = packed_logprobs if programs.is_packed(config) else completion_logprobs
    options = {"sampling": config.rollout.sampling(), "chunk": config.model.logprob_chunk}
    frozen = to_compute_with(decoder, model.frozen)

    def residuals(trained, frozen, *inputs):
        def logprobs(trained):
            return logprobs_of(decoder, combine(trained, frozen), *inputs, **options)

        return jax.vjp(logprobs, trained)[1]

    kept = jax.tree.leaves(jax.eval_shape(residuals, model.trained, frozen, *inputs))
    weights = {(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves((model.trained, frozen))}
    return _bytes([leaf for leaf in kept if (leaf.shape, leaf.dtype) not in weights])


def checkpoint_bytes(config: Config, model: Model, prompt_tokens: int) -> int:
    """Bytes of a checkpoint: trained parameters, optimizer state, the sampler's copy, and batches sampled ahead."""
    parts, shape = resident_arrays(config, model), sampled_shape(config, prompt_tokens)
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
    """Prints a dry run and returns its exit status: 0, or 2 for an invalid config, with the reason on standard error.

    Args:
        device: name in ACCELERATORS, to plan for instead of this machine.
    """
    try:
        config = load_config(path, overrides)
        if device and config.model.dtype == "auto":
            dtype = "bfloat16" if accelerator(device).has_bfloat16 else "float32"
            config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
        result = dry_run(config)
        show_dry_run(config, result)
        if phases := _in_phases(result.memory):
            _show_devices(config, max(phases.values()), device)
        print("to run it there:", shlex.join(["python", "-m", "recjax.train", "--config", path, *overrides]))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _in_phases(memory: Sequence[Item]) -> dict[str, int]:
    """Total bytes, by phase."""
    totals = Counter()
    for item in memory:
        totals[item.phase] += item.bytes
    always = totals.pop("always", 0)
    return {phase: always + size for phase, size in totals.items()}


def _show_devices(config: Config, needed: int, device: str | None) -> None:
    """Prints the single devices with enough memory; a mesh of several devices splits some of it."""
    if device:
        one = accelerator(device)
        fits = "fits" if needed <= one.usable_bytes else "does not fit"
        print(
            f"it {fits} one {device}: {needed / GIB:.2f} GiB of the {one.usable_bytes / GIB:.1f} that JAX takes of"
            f" {one.gigabytes:g} GB; {one.bandwidth:g} GB/s, {one.teraflops:g} TFLOP/s"
        )
    else:
        fits = [name for name, device in ACCELERATORS.items() if needed <= device.usable_bytes]
        smaller = ", ".join(name for name in ACCELERATORS if name not in fits)
        print(f"one device is enough: {', '.join(fits) or 'none'}" + (f"; too small: {smaller}" if smaller else ""))
        if config.model.dtype == "auto" and jax.default_backend() == "cpu":
            print("planned in float32, the default on this CPU; --device NAME plans for another device")
    print("this plan is computed from shapes; python -m recjax.compile_check compiles the programs for a device")


def show_dry_run(config: Config, result: DryRun) -> None:
    """Prints a dry run."""
    console = plain_console(soft_wrap=True, highlight=False)
    print_line, rollout, steps = console.print, config.rollout, config.training.steps
    print_line(f"algorithm {config.algorithm.preset}")
    for axis, options in config.algorithm.resolved().items():
        settings = ", ".join(f"{key} {value}" for key, value in options.items() if key != "name")
        print_line(f"  {axis}: {options.get('name', '')} {settings}".rstrip())
    if result.model:
        trained, frozen = count(result.model.trained), count(result.model.frozen)
        print_line(f"parameters {trained + frozen:,}, of which trained {trained:,}")
        why = f" (model.dtype auto on {jax.default_backend()})" if config.model.dtype == "auto" else ""
        print_line(f"compute in {result.model.decoder.dtype}{why}; weights are stored in float32")
    if result.memory:
        table = Table("when", "what", "GiB", "formula", title="memory, of all devices together")
        for item in result.memory:
            table.add_row(item.phase, item.name, f"{item.bytes / GIB:.3f}", item.formula)
        print_line(table)
        for phase, size in _in_phases(result.memory).items():
            print_line(f"in all, {phase}: {size / GIB:.2f} GiB")
        for remat, size in result.activations.items():
            if remat != config.model.remat:
                print_line(f"activations with model.remat={remat}: {size / GIB:.3f} GiB")
        size, kept = result.checkpoint_bytes / GIB, config.training.keep_checkpoints
        print_line(f"a checkpoint: {size:.2f} GiB on disk; {kept} are kept, plus one during writing")
    rows = rollout.prompts_per_step * rollout.group_size
    prompts = f"{rollout.prompts_per_step * result.prompt_tokens:,}" if result.prompt_tokens else "an unknown number"
    completions = f"{rows * rollout.max_completion_tokens:,} of {rows} completions"
    updates = config.training.updates
    of = "step" if updates == 1 else f"batch of {updates} steps"
    print_line(f"tokens a {of}, at most: {prompts} of prompts, {completions}")
    if result.staleness:
        shown = result.staleness[: first_steps(config.regime, steps, updates)]
        mean, highest = np.mean(result.staleness), max(result.staleness)
        print_line(f"staleness of steps 1 to {len(shown)}: {compact(shown)}")
        print_line(f"staleness of all {steps} steps: mean {mean:.2f}, highest {highest}")
    if result.task:
        problems, taken = len(result.task.train), rollout.prompts_per_step / updates
        print_line(
            f"{problems:,} problems to train on, {len(result.task.evaluation):,} held out;"
            f" {problems / taken:.1f} steps an epoch, {steps * taken / problems:.2f} epochs in {steps} steps"
        )
    for note in result.notes:
        print_line(f"not known: {note}")
