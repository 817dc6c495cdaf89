"""The memory plan: arrays that a run holds, and additional memory of sampling and the update, with formulas in words.

It counts from shapes: it reads no weights and compiles nothing.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from recjax.config import Config
from recjax.experience.batch import Batch, Shape, pad, sampled_shape
from recjax.experience.stored import stored_per_batch
from recjax.hub.policy import teacher_decoder
from recjax.models.decoder import REMAT, Decoder, abstract_params
from recjax.models.logprobs import completion_logprobs, packed_logprobs
from recjax.models.trainable import combine, in_compute_dtype
from recjax.training.packing import shape_for
from recjax.training.schedule import outlives_updates
from recjax.training.update import make_optimizer

START = "trained parameters as they were at the start"
COPY = "sampler's copy"
CAST = "weights as they compute"
TEACHER = "teacher's parameters"


class Model(NamedTuple):
    """A decoder and the shapes of its trained and frozen parameters."""

    decoder: Decoder
    trained: dict
    frozen: dict


class Held(NamedTuple):
    """Arrays that stay on the devices all the time: their size in words, and their shapes."""

    formula: str
    tree: Any


class Item(NamedTuple):
    """Memory of all devices together: its content, the formula of its size, and its size in bytes.

    `phase` is "always", or the phase of a step that needs the memory: "sample" or "update".
    """

    phase: str
    name: str
    formula: str
    bytes: int


def count(params: dict) -> int:
    """Number of parameters in a tree."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def tree_bytes(tree: Any) -> int:
    """Size in bytes of all arrays of a tree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def held(config: Config, model: Model) -> dict[str, Held]:
    """Arrays that the loop keeps all the time, by name; offline, the sampler's copy holds the initial weights."""
    optimizer, size = make_optimizer(config.optimizer, config.training.steps), model.decoder.dtype.itemsize
    parts = {
        "trained parameters": Held("4 B × trained", model.trained),
        "optimizer's state": Held("Adam's two moments: 8 B × trained", jax.eval_shape(optimizer.init, model.trained)),
        "frozen parameters": Held(f"{size} B × frozen", to_compute_with(model.decoder, model.frozen)),
    }
    copy = Held(f"{size} B × trained", to_compute_with(model.decoder, model.trained))
    if reads_start := config.algorithm.build().needs_reference or config.evaluation.initial_kl:
        parts[START] = copy
    if _keeps_copy(config) and not (reads_start and config.regime.offline):
        parts[COPY] = copy
    if config.model.teacher:
        decoder = teacher_decoder(config)
        tree = to_compute_with(decoder, abstract_params(decoder.config))
        parts[TEACHER] = Held(f"{size} B × teacher", tree)
    return parts


def _keeps_copy(config: Config) -> bool:
    """Whether the sampler keeps its own copy of the weights during updates."""
    own = config.rollout.prompts_per_step - stored_per_batch(config)
    return own > 0 and not config.follows and outlives_updates(config.regime)


def sampled_from(config: Config, model: Model) -> tuple[str, dict]:
    """Name and shapes of the sampler's weights: a part of `held`, or the trained weights in the compute dtype."""
    parts = held(config, model)
    for name in (COPY, START) if config.regime.offline else (COPY,):
        if name in parts:
            return name, parts[name].tree
    name = "trained parameters" if model.decoder.dtype == jnp.float32 else CAST
    return name, to_compute_with(model.decoder, model.trained)


def to_compute_with(decoder: Decoder, params: dict) -> dict:
    """Shapes of parameters in the decoder's dtype."""
    return jax.eval_shape(lambda tree: in_compute_dtype(decoder, tree, copy=False), params)


def held_items(config: Config, model: Model) -> list[Item]:
    """The items of `held`, with their bytes."""
    items = [Item("always", name, part.formula, tree_bytes(part.tree)) for name, part in held(config, model).items()]
    return [item for item in items if item.bytes]


def sampling_items(config: Config, model: Model, prompt_tokens: int) -> list[Item]:
    """Memory of sampling, for the larger of training's and evaluation's batches."""
    decoder, rollout = model.decoder, config.rollout
    shape = decoder.config
    rows = rollout.prompts_per_step * most_completions(config)
    tokens = rollout.prompts_per_step * prompt_tokens + rows * rollout.max_completion_tokens
    per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * decoder.dtype.itemsize
    formula = (
        f"2 × {shape.num_layers} layers × {shape.num_kv_heads} heads × {shape.head_dim} × {decoder.dtype.itemsize} B"
        f" × ({rollout.prompts_per_step} × {prompt_tokens} + {rows} × {rollout.max_completion_tokens} tokens)"
    )
    scores = f"2 × {rows} rows × {shape.vocab_size} tokens × 4 B"
    name, weights = sampled_from(config, model)
    cast = [Item("sample", name, f"{decoder.dtype.itemsize} B × trained", tree_bytes(weights))] if name == CAST else []
    return [
        *cast,
        Item("sample", "keys and values", formula, per_token * tokens),
        Item("sample", "scores of the next token", scores, 2 * rows * shape.vocab_size * 4),
    ]


def most_completions(config: Config) -> int:
    """Number of completions of a prompt that are sampled together: the larger of training's and evaluation's."""
    return max(config.rollout.group_size, config.evaluation.samples)


def batch_arrays(shape: Shape, turns: int | None = None) -> Batch:
    """Shapes of a batch's arrays.

    Args:
        turns: largest number of turns of a trajectory, if the algorithm reads rewards of turns.
    """
    batch = pad([], shape)
    if turns is not None:
        rewards = np.zeros((len(batch.rewards), turns), np.float32)
        batch = batch._replace(turn_rewards=rewards, token_turns=np.zeros(batch.completions.shape, np.int32))
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), batch)


def update_items(config: Config, model: Model, prompt_tokens: int) -> tuple[list[Item], dict[str, int]]:
    """Memory of the update, and the bytes of its activations for every value of model.remat."""
    inputs, tokens, contents = _micro_batch(config, prompt_tokens)
    chunk, vocabulary = min(config.model.logprob_chunk, tokens), model.decoder.config.vocab_size
    activations = {remat: _activations(config, model, inputs, remat) for remat in REMAT}
    layer = activations["none"] // model.decoder.config.num_layers
    activations = {remat: kept + (layer if remat != "none" else 0) for remat, kept in activations.items()}
    kept = "kept by jax.vjp" + ("" if config.model.remat == "none" else ", and one layer recomputed")
    items = [
        Item("update", "gradients: their sum, a micro-batch's", "2 × 4 B × trained", 2 * tree_bytes(model.trained)),
        Item("update", "activations", f"{kept}: {contents}", activations[config.model.remat]),
        Item("update", "chunk of vocabulary scores", f"4 × {chunk} × {vocabulary} × 4 B", 16 * chunk * vocabulary),
    ]
    return items, activations


def _micro_batch(config: Config, prompt_tokens: int) -> tuple[list[jax.ShapeDtypeStruct], int, str]:
    """The function of a micro-batch's log-probs, the number of scored positions, and its description in words."""
    shape = sampled_shape(config, prompt_tokens)
    if config.training.tokens_per_micro_batch:
        rows, tokens = shape_for(config, shape)
        inputs = [jax.ShapeDtypeStruct((rows, tokens), jnp.int32)] * 5
        return inputs, rows * tokens, f"{rows} packed rows × {tokens} tokens"
    rows = config.rollout.group_size if config.task.agent else 1
    shape = shape._replace(prompts=config.rollout.prompts_per_step // config.micro_batches(shape.positions) * rows)
    batch, rows = batch_arrays(shape), shape.prompts * shape.group
    words = f"{shape.prompts} prompts × {prompt_tokens} + {rows} completions × {shape.time} tokens"
    return [batch.prompts, batch.prompt_mask, batch.completions, batch.completion_mask], rows * shape.time, words


def _activations(config: Config, model: Model, inputs: list[jax.ShapeDtypeStruct], remat: str) -> int:
    """Bytes that a micro-batch's forward pass saves for the backward pass, without the parameters themselves.

    They are the residuals of jax.vjp as shapes, without computation. A compiler may save somewhat more or less.
    """
    decoder = model.decoder.clone(remat=remat)
    logprobs_of = packed_logprobs if config.training.tokens_per_micro_batch else completion_logprobs
    options = {"sampling": config.rollout.sampling(), "chunk": config.model.logprob_chunk}
    frozen = to_compute_with(decoder, model.frozen)

    def residuals(trained, frozen, *inputs):
        def logprobs(trained):
            return logprobs_of(decoder, combine(trained, frozen), *inputs, **options)

        return jax.vjp(logprobs, trained)[1]

    kept = jax.tree.leaves(jax.eval_shape(residuals, model.trained, frozen, *inputs))
    weights = {(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves((model.trained, frozen))}
    return tree_bytes([leaf for leaf in kept if (leaf.shape, leaf.dtype) not in weights])


def checkpoint_bytes(config: Config, model: Model, prompt_tokens: int) -> int:
    """Bytes of a checkpoint: trained parameters, optimizer state, the sampler's copy, and batches sampled ahead."""
    parts, shape = held(config, model), sampled_shape(config, prompt_tokens)
    # Token ids and masks of prompts and completions, and log-probs of completions.
    batch = shape.prompts * (shape.prompt_time * 5 + shape.group * shape.time * 9)
    saved = [parts[name].tree for name in ("trained parameters", "optimizer's state")]
    saved += [to_compute_with(model.decoder, model.trained)] if _keeps_copy(config) else []
    return tree_bytes(saved) + config.regime.sync_offset * batch
