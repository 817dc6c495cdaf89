"""What a run would be, with nothing trained and no weights read: sizes, memory, tokens and staleness, from shapes."""

import itertools
import sys
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from recjax.config import Config, RegimeConfig
from recjax.config_loading import load_config
from recjax.experience.rows import Shape
from recjax.hub.policy import compute_dtype, scratch_config
from recjax.hub.tokenizers import character_tokenizer, load_tokenizer, model_folder
from recjax.hub.weights import read_config
from recjax.models.decoder import REMAT, Decoder, abstract_params
from recjax.models.logprobs import completion_logprobs, packed_logprobs
from recjax.models.trainable import adapted, combine, in_compute_dtype, split
from recjax.tasks.loading import load_task
from recjax.tasks.problems import Task
from recjax.tasks.prompts import encode_problems
from recjax.training.packing import shape_for
from recjax.training.schedule import expected_staleness
from recjax.training.setup import characters

GIB = 2**30


class Item(NamedTuple):
    """Some memory: what it holds, how that is counted, and how many bytes it is.

    `phase` is "always", or the part of a step that needs it: "sample" or "update".
    """

    phase: str
    name: str
    formula: str
    bytes: int


class Model(NamedTuple):
    """A decoder and its parameters as shapes: those that training changes, and those that it does not."""

    decoder: Decoder
    trained: dict
    frozen: dict


class Resolved(NamedTuple):
    """What a config is about, as far as it could be reached; `notes` say what could not."""

    model: Model | None
    task: Task | None
    prompt_tokens: int | None
    notes: list[str]


class DryRun(NamedTuple):
    """What is known of a run before it starts; None where something could not be reached, which `notes` then says."""

    model: Model | None
    task: Task | None
    prompt_tokens: int | None
    memory: list[Item]
    activations: dict[str, int]
    checkpoint_bytes: int | None
    staleness: list[int]
    notes: list[str]


def resolve(config: Config) -> Resolved:
    """The decoder's shapes, the task and the length of prompts.

    Raises:
        ValueError: a config that could not run. What the network would have to bring, and does not, is no error.
    """
    notes = []

    def reached(load: Callable):
        try:
            return load()
        except ValueError as error:
            # Whatever the network could not bring comes as an OSError, with the remedy around it.
            if not isinstance(error.__cause__, OSError):
                raise
            notes.append(str(error))
            return None

    task = reached(lambda: load_task(config))
    # A decoder made from scratch has a vocabulary of the task's own characters.
    model = reached(lambda: _model(config, task)) if config.model.path or task else None
    prompt_tokens = config.rollout.max_prompt_tokens
    if model and task and prompt_tokens is None:
        prompt_tokens = _longest_prompt(config, task, notes)
    return Resolved(model, task, prompt_tokens, notes)


def dry_run(config: Config) -> DryRun:
    """Resolves and measures a run.

    Raises:
        ValueError: as `resolve`.
    """
    model, task, prompt_tokens, notes = resolve(config)
    memory, activations = [], {}
    if model:
        memory = _held(config, model)
        if prompt_tokens:
            memory += _sampling(config, model.decoder, prompt_tokens)
            update, activations = _update(config, model, prompt_tokens)
            memory += update
        else:
            notes.append("memory of sampling and of the update left out: set rollout.max_prompt_tokens")
    staleness = [expected_staleness(step, config.regime) for step in range(1, config.training.steps + 1)]
    if config.regime.mode == "async":
        staleness = []
        notes.append(f"staleness, at most regime.max_staleness = {config.regime.max_staleness}: the run measures it")
    if experience := config.experience:
        if experience.store or experience.mix:
            folder = experience.store or experience.mix.store
            notes.append(f"sizes of the groups in {folder}; those above are of rollout's groups")
        if staleness and (experience.store or experience.late or experience.replay):
            staleness = []
            notes.append("staleness, which comes of the rewards' delays, the buffer and the store: the run measures it")
    checkpoint = _checkpoint_bytes(config, model, prompt_tokens or 0) if model else None
    return DryRun(model, task, prompt_tokens, memory, activations, checkpoint, staleness, notes)


def _model(config: Config, task: Task | None) -> Model:
    """The decoder from config.json, or from the task's characters."""
    if config.model.path:
        decoder_config = read_config(model_folder(config.model.path, ("config.json",)))
    else:
        alphabet = character_tokenizer(characters([*task.train, *task.evaluation]))
        decoder_config = scratch_config(config.model.decoder, len(alphabet))
    if config.model.lora:
        decoder_config = adapted(decoder_config, config.model.lora)
    decoder = Decoder(decoder_config, compute_dtype(config.model.dtype), config.model.remat)
    return Model(decoder, *split(abstract_params(decoder_config), config.model))


def _longest_prompt(config: Config, task: Task, notes: list[str]) -> int | None:
    problems = [*task.train, *task.evaluation]
    try:
        tokenizer = (
            load_tokenizer(config.model.path) if config.model.path else character_tokenizer(characters(problems))
        )
    except ValueError as error:
        notes.append(f"length of prompts not known: {error}")
        return None
    return encode_problems(problems, tokenizer, None).tokens.shape[1]


def count(params: dict) -> int:
    """Numbers in a tree of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def _bytes(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _in_compute_dtype(decoder: Decoder, params: dict) -> dict:
    return jax.eval_shape(lambda tree: in_compute_dtype(decoder, tree, copy=False), params)


def _held(config: Config, model: Model) -> list[Item]:
    """What is there all the time; offline, the sampler's copy is the one of the weights at the start."""
    trained, size = _bytes(model.trained), model.decoder.dtype.itemsize
    copy, frozen = (_bytes(_in_compute_dtype(model.decoder, tree)) for tree in (model.trained, model.frozen))
    algorithm = config.algorithm.build()
    read_later = algorithm.needs_reference or config.evaluation.initial_kl
    items = [
        Item("always", "trained parameters", "4 B × trained", trained),
        Item("always", "Adam's two moments", "8 B × trained", 2 * trained),
        Item("always", "sampler's copy", f"{size} B × trained", copy),
        Item("always", "frozen parameters", f"{size} B × frozen", frozen),
    ]
    if read_later and not config.regime.offline:
        items.append(Item("always", "trained parameters as they were at the start", f"{size} B × trained", copy))
    return [item for item in items if item.bytes]


def _sampling(config: Config, decoder: Decoder, prompt_tokens: int) -> list[Item]:
    shape, rollout = decoder.config, config.rollout
    rows = rollout.prompts_per_step * max(rollout.group_size, config.evaluation.samples)
    tokens = rollout.prompts_per_step * prompt_tokens + rows * rollout.max_completion_tokens
    per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * decoder.dtype.itemsize
    formula = (
        f"2 × {shape.num_layers} layers × {shape.num_kv_heads} heads × {shape.head_dim} × {decoder.dtype.itemsize} B"
        f" × ({rollout.prompts_per_step} × {prompt_tokens} + {rows} × {rollout.max_completion_tokens} tokens)"
    )
    scores = f"2 × {rows} rows × {shape.vocab_size} tokens × 4 B"
    return [
        Item("sample", "keys and values", formula, per_token * tokens),
        Item("sample", "scores of the next token", scores, 2 * rows * shape.vocab_size * 4),
    ]


def _update(config: Config, model: Model, prompt_tokens: int) -> tuple[list[Item], dict[str, int]]:
    """Memory of the update, and its activations under every value of model.remat."""
    asked, tokens, of = _micro_batch(config, prompt_tokens)
    chunk, vocabulary = min(config.model.logprob_chunk, tokens), model.decoder.config.vocab_size
    activations = {remat: _activations(config, model, asked, remat) for remat in REMAT}
    for remat in REMAT:
        if remat != "none":
            activations[remat] += activations["none"] // model.decoder.config.num_layers
    what = "kept by jax.vjp" + ("" if config.model.remat == "none" else ", and one layer recomputed")
    trained = _bytes(model.trained)
    items = [
        Item("update", "gradients: their sum, a micro-batch's", "2 × 4 B × trained", 2 * trained),
        Item("update", "activations", f"{what}: {of}", activations[config.model.remat]),
        Item(
            "update",
            "chunk of vocabulary scores",
            f"4 × {chunk} × {vocabulary} × 4 B",
            16 * chunk * vocabulary,
        ),
    ]
    return items, activations


def _micro_batch(config: Config, prompt_tokens: int) -> tuple[list[jax.ShapeDtypeStruct], int, str]:
    """Arrays that log-probs of a micro-batch are taken of, at how many places, and what they hold, in words."""
    rollout, training = config.rollout, config.training
    time = rollout.max_completion_tokens
    if training.tokens_per_micro_batch:
        shape = shape_for(config, Shape(rollout.prompts_per_step, rollout.group_size, prompt_tokens, time))
        words = f"{shape.rows} packed rows × {shape.tokens} tokens"
        return [jax.ShapeDtypeStruct(shape, jnp.int32)] * 4, shape.rows * shape.tokens, words
    prompts = config.prompts_per_micro_batch()
    rows = prompts * rollout.group_size
    shapes = [(prompts, prompt_tokens), (rows, time)]
    asked = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes for dtype in (jnp.int32, bool)]
    return asked, rows * time, f"{prompts} prompts × {prompt_tokens} + {rows} completions × {time} tokens"


def _activations(config: Config, model: Model, asked: list[jax.ShapeDtypeStruct], remat: str) -> int:
    """Bytes that the forward pass of a micro-batch keeps for the backward pass, parameters themselves left out.

    They are the residuals of jax.vjp, as shapes: nothing is computed. A compiler may keep some more or fewer.
    """
    decoder = model.decoder.clone(remat=remat)
    logprobs_of = packed_logprobs if config.training.tokens_per_micro_batch else completion_logprobs
    options = {
        "sampling": config.rollout.sampling(),
        "chunk": config.model.logprob_chunk,
    }
    frozen = _in_compute_dtype(decoder, model.frozen)

    def residuals(trained, frozen, *asked):
        def logprobs(trained):
            return logprobs_of(decoder, combine(trained, frozen), *asked, **options)

        return jax.vjp(logprobs, trained)[1]

    kept = jax.tree.leaves(jax.eval_shape(residuals, model.trained, frozen, *asked))
    weights = {(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves((model.trained, frozen))}
    return _bytes([leaf for leaf in kept if (leaf.shape, leaf.dtype) not in weights])


def _checkpoint_bytes(config: Config, model: Model, prompt_tokens: int) -> int:
    """One checkpoint: trained parameters, Adam's moments, the sampler's copy, and the batches drawn ahead."""
    rollout = config.rollout
    rows = rollout.prompts_per_step * rollout.group_size
    # Token ids and masks of prompts; those and log-probabilities of completions.
    batch = rollout.prompts_per_step * prompt_tokens * 5 + rows * rollout.max_completion_tokens * 9
    sampler = _bytes(_in_compute_dtype(model.decoder, model.trained))
    return 3 * _bytes(model.trained) + sampler + config.regime.sync_offset * batch


def compact(staleness: list[int]) -> str:
    """A schedule in few words: runs that rise by one as "0–19", equal runs next to each other counted."""
    runs = []
    for value in staleness:
        if runs and value == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], value)
        else:
            runs.append((value, value))
    words = []
    for (first, last), equal in itertools.groupby(runs):
        times = len(list(equal))
        words.append((f"{first}–{last}" if last > first else f"{first}") + (f" ×{times}" if times > 1 else ""))
    return ", ".join(words)


def first_steps(regime: RegimeConfig, steps: int) -> int:
    """How many steps show the whole pattern of a regime."""
    return min(2 * max(regime.sync_interval, regime.sync_offset) + 2, steps)


def print_dry_run(path: str, overrides: list[str]) -> int:
    """The exit status of a dry run: 0, or 2 for a config that could not run, with the reason on standard error."""
    try:
        config = load_config(path, overrides)
        show(config, dry_run(config))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def show(config: Config, result: DryRun) -> None:
    """Prints everything."""
    console = Console(soft_wrap=True, highlight=False)
    print_line = console.print
    resolved = config.algorithm.resolved()
    print_line(f"algorithm {config.algorithm.preset}")
    for axis, options in resolved.items():
        settings = ", ".join(f"{key} {value}" for key, value in options.items() if key != "name")
        print_line(f"  {axis}: {options.get('name', '')} {settings}".rstrip())
    if result.model:
        trained, frozen = count(result.model.trained), count(result.model.frozen)
        print_line(f"parameters {trained + frozen:,}, of which trained {trained:,}")
        why = f" (model.dtype auto on {jax.default_backend()})" if config.model.dtype == "auto" else ""
        print_line(f"compute in {result.model.decoder.dtype}{why}; weights are stored in float32")
    _show_memory(console, config, result)
    rollout, steps = config.rollout, config.training.steps
    rows = rollout.prompts_per_step * rollout.group_size
    prompts = f"{rollout.prompts_per_step * result.prompt_tokens:,}" if result.prompt_tokens else "an unknown number of"
    completions = rows * rollout.max_completion_tokens
    print_line(f"tokens a step: at most {prompts} of prompts, {completions:,} of completions; {rows} completions")
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


def _show_memory(console: Console, config: Config, result: DryRun) -> None:
    if not result.memory:
        return
    table = Table("when", "what", "GiB", "formula", title="memory, of all devices together")
    for item in result.memory:
        table.add_row(item.phase, item.name, f"{item.bytes / GIB:.3f}", item.formula)
    console.print(table)
    always = sum(item.bytes for item in result.memory if item.phase == "always")
    for phase in ("sample", "update"):
        parts = [item.bytes for item in result.memory if item.phase == phase]
        if parts:
            console.print(f"in all, {phase}: {(always + sum(parts)) / GIB:.2f} GiB")
    for remat, size in result.activations.items():
        if remat != config.model.remat:
            console.print(f"activations with model.remat={remat}: {size / GIB:.3f} GiB")
    checkpoints = config.training.keep_checkpoints
    size = result.checkpoint_bytes / GIB
    console.print(f"a checkpoint: {size:.2f} GiB on disk; {checkpoints} are kept, one more while it is written")
