"""A run's sizes, memory, tokens and staleness before it starts: computed from shapes, with no weights read."""

import dataclasses
import itertools
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import jax
import numpy as np
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from recjax.config import Config, RegimeConfig
from recjax.config_loading import load_config
from recjax.console import plain_console
from recjax.hub.policy import compute_dtype, scratch_config
from recjax.hub.tokenizers import character_tokenizer, load_tokenizer, model_folder
from recjax.hub.weights import read_config
from recjax.models.decoder import Decoder, abstract_params
from recjax.models.trainable import adapted, split
from recjax.planning.devices import accelerator, fitting
from recjax.planning.memory import Item, Model, checkpoint_bytes, count, held_items, sampling_items, update_items
from recjax.planning.topology import GIB
from recjax.tasks.loading import load_task
from recjax.tasks.problems import Task
from recjax.tasks.prompts import encode_problems
from recjax.training.run import characters
from recjax.training.schedule import expected_staleness


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


def resolve(config: Config) -> DryRun:
    """The decoder's shapes, the task and the length of prompts, without memory or staleness.

    Raises:
        ValueError: an invalid config. A file that cannot be downloaded gives a note and not an error.
    """
    notes = []

    def reached(load: Callable):
        try:
            return load()
        except ValueError as error:
            # A failed download is an OSError within the ValueError that names the remedy.
            if not isinstance(error.__cause__, OSError):
                raise
            notes.append(str(error))
            return None

    task = reached(lambda: load_task(config))
    # A decoder made from scratch has the task's characters as its vocabulary.
    model = reached(lambda: _model(config, task)) if config.model.path or task else None
    prompt_tokens = config.rollout.max_prompt_tokens
    if model and task and prompt_tokens is None:
        try:
            tokenizer = _tokenizer(config, task)
        except ValueError as error:
            notes.append(f"length of prompts not known: {error}")
        else:
            problems, vocabulary = [*task.train, *task.evaluation], model.decoder.config.vocab_size
            prompt_tokens = encode_problems(problems, tokenizer, None, vocabulary).tokens.shape[1]
    return DryRun(model, task, prompt_tokens, notes)


def dry_run(config: Config) -> DryRun:
    """Resolves and measures a run.

    Raises:
        ValueError: as `resolve`.
    """
    result = resolve(config)
    model, prompt_tokens, notes = result.model, result.prompt_tokens, [*result.notes]
    if model:
        memory = held_items(config, model)
        if prompt_tokens:
            update, activations = update_items(config, model, prompt_tokens)
            memory += sampling_items(config, model, prompt_tokens) + update
            result = result._replace(activations=activations)
        else:
            notes.append("memory of sampling and of the update left out: set rollout.max_prompt_tokens")
        result = result._replace(memory=memory, checkpoint_bytes=checkpoint_bytes(config, model, prompt_tokens or 0))
    experience, regime, staleness = config.experience, config.regime, []
    if regime.mode == "async":
        notes.append(f"staleness, at most regime.max_staleness = {regime.max_staleness}: the run measures it")
    if experience and (folder := experience.store or experience.mix and experience.mix.store):
        notes.append(f"sizes of the groups in {folder}; those above are of rollout's groups")
    if regime.mode == "sync" and experience and (experience.store or experience.late or experience.replay):
        notes.append("staleness, which comes of the rewards' delays, the buffer and the store: the run measures it")
    elif regime.mode == "sync":
        staleness = [expected_staleness(step, regime) for step in range(1, config.training.steps + 1)]
    return result._replace(notes=notes, staleness=staleness)


def _model(config: Config, task: Task | None) -> Model:
    """The decoder's shapes from config.json, or from the task's characters."""
    if config.model.path:
        decoder_config = read_config(model_folder(config.model.path, ("config.json",)))
    else:
        decoder_config = scratch_config(config.model.decoder, len(_tokenizer(config, task)))
    if config.model.lora:
        decoder_config = adapted(decoder_config, config.model.lora)
    decoder = Decoder(decoder_config, compute_dtype(config.model.dtype), config.model.remat)
    return Model(decoder, *split(abstract_params(decoder_config), config.model))


def _tokenizer(config: Config, task: Task) -> PreTrainedTokenizerBase:
    if config.model.path:
        return load_tokenizer(config.model.path, config.model.chat_date)
    return character_tokenizer(characters([*task.train, *task.evaluation]))


def compact(staleness: list[int]) -> str:
    """A schedule in a few words: "0–19" for values that rise by one, and counts for equal consecutive ranges."""
    rising = itertools.groupby(enumerate(staleness), key=lambda pair: pair[1] - pair[0])
    runs = [[value for _, value in pairs] for _, pairs in rising]
    words = []
    for run, equal in itertools.groupby(runs):
        times = len([*equal])
        words.append((f"{run[0]}–{run[-1]}" if len(run) > 1 else f"{run[0]}") + (f" ×{times}" if times > 1 else ""))
    return ", ".join(words)


def first_steps(regime: RegimeConfig, steps: int) -> int:
    """Number of steps that show the whole pattern of a regime."""
    return min(2 * max(regime.sync_interval, regime.sync_offset) + 2, steps)


def print_dry_run(path: str, overrides: list[str], device: str | None = None) -> int:
    """Prints a dry run and returns its exit status: 0, or 2 for an invalid config, with the reason on standard error.

    Args:
        device: name in ACCELERATORS, to plan for instead of this machine.
    """
    try:
        config = load_config(path, overrides)
        if device and config.model.dtype == "auto":
            dtype = "bfloat16" if accelerator(device).has_bfloat16 else "float32"
            config = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype=dtype))
        result = dry_run(config)
        show(config, result)
        if phases := _in_phases(result.memory):
            _show_devices(config, max(phases.values()), device)
        print("to run it there:", shlex.join(["python", "-m", "recjax.train", "--config", path, *overrides]))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def show(config: Config, result: DryRun) -> None:
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
    _show_memory(console, config, result)
    rows = rollout.prompts_per_step * rollout.group_size
    prompts = f"{rollout.prompts_per_step * result.prompt_tokens:,}" if result.prompt_tokens else "an unknown number"
    completions = f"{rows * rollout.max_completion_tokens:,} of {rows} completions"
    print_line(f"tokens a step, at most: {prompts} of prompts, {completions}")
    if result.staleness:
        shown = result.staleness[: first_steps(config.regime, steps)]
        mean, highest = np.mean(result.staleness), max(result.staleness)
        print_line(f"staleness of steps 1 to {len(shown)}: {compact(shown)}")
        print_line(f"staleness of all {steps} steps: mean {mean:.2f}, highest {highest}")
    if result.task:
        problems = len(result.task.train)
        print_line(
            f"{problems:,} problems to train on, {len(result.task.evaluation):,} held out;"
            f" {problems / rollout.prompts_per_step:.1f} steps an epoch,"
            f" {steps * rollout.prompts_per_step / problems:.2f} epochs in {steps} steps"
        )
    for note in result.notes:
        print_line(f"not known: {note}")


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
        fits, rest = map(", ".join, fitting(needed))
        print(f"one device is enough: {fits or 'none'}" + (f"; too small: {rest}" if rest else ""))
        if config.model.dtype == "auto" and jax.default_backend() == "cpu":
            print("planned in float32, as model.dtype=auto is on this CPU; --device NAME plans for another device")
    print("this plan comes from shapes; python -m recjax.compile_check asks a TPU's compiler")


def _in_phases(memory: Sequence[Item]) -> dict[str, int]:
    """Total bytes, by phase."""
    always = sum(item.bytes for item in memory if item.phase == "always")
    parts = {phase: [item.bytes for item in memory if item.phase == phase] for phase in ("sample", "update")}
    return {phase: always + sum(sizes) for phase, sizes in parts.items() if sizes}


def _show_memory(console: Console, config: Config, result: DryRun) -> None:
    if not result.memory:
        return
    table = Table("when", "what", "GiB", "formula", title="memory, of all devices together")
    for item in result.memory:
        table.add_row(item.phase, item.name, f"{item.bytes / GIB:.3f}", item.formula)
    console.print(table)
    for phase, size in _in_phases(result.memory).items():
        console.print(f"in all, {phase}: {size / GIB:.2f} GiB")
    for remat, size in result.activations.items():
        if remat != config.model.remat:
            console.print(f"activations with model.remat={remat}: {size / GIB:.3f} GiB")
    size, kept = result.checkpoint_bytes / GIB, config.training.keep_checkpoints
    console.print(f"a checkpoint: {size:.2f} GiB on disk; {kept} are kept, one more while it is written")
