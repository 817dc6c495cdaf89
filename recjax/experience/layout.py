"""The way the forward pass reads a batch: each prompt once for its rows, or all sequences packed into longer rows."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from recjax.algorithms.losses import Algorithm
from recjax.config import Config
from recjax.experience.batch import Batch, Shape
from recjax.experience.packing import LEAST_TOKENS, Packed, RowShape, is_packed, pack, row_shape, shape_for
from recjax.models.decoder import Decoder
from recjax.models.decoder_config import DecoderConfig
from recjax.models.experts import EXPERTS, Load
from recjax.models.logprobs import SAMPLED, Compared, completion_logprobs, packed_logprobs
from recjax.models.placement import ROWS, constrain, on_host, put_rows, row_shards
from recjax.models.sampling import TOP_IDS, Sampling

# Packing must save this share of an update's FLOPs, and this many FLOPs (about half a second on two CPU cores), to be
# worth a second compiled program.
LEAST_SHARE = 0.25
LEAST_SAVED = 1e11


class TokenScores(NamedTuple):
    """Scores of the tokens in a batch or micro-batch by forward passes; 0 or undefined where masked.

    logprobs: log-probs under the sampling distribution of the parameters.
    entropy: entropy of that distribution at each token, in nats.
    divergence: divergence from a teacher's distribution; None without a teacher.
    top_logprobs: log-probs of the recorded `top_ids` of each token; None if the batch has none.
    load: load of the experts; () if it was not asked for.
    """

    logprobs: Float[Array, "batch time"]
    entropy: Float[Array, "batch time"]
    divergence: Float[Array, "batch time"] | None = None
    top_logprobs: Float[Array, "batch time count"] | None = None
    load: Load | tuple[()] = ()


class Scorer(NamedTuple):
    """A decoder, and how it scores tokens; static under jit.

    sampling: distribution that sampled the tokens; log-probs refer to the same distribution.
    chunk: number of token positions whose vocabulary scores a device holds at once.
    """

    decoder: Decoder
    sampling: Sampling
    chunk: int


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["packed", "rows"], meta_fields=["parts", "minibatches", "doublings"]
)
@dataclasses.dataclass(frozen=True)
class Layout:
    """The micro-batches of a batch and the sequences that the decoder runs for them.

    parts: number of equal parts of the rows, each of whole prompts; 1 if packed. Static under jit.
    packed: micro-batches of packed rows. None: each part is a micro-batch, in which each prompt runs once for its rows.
    rows: mask of the rows in the update's minibatch, [batch], with whole groups; None: all rows.
    minibatches: number of minibatches of the batch. Static under jit.
    doublings: how often packed rows doubled their length, to have room for common beginnings. Static under jit.
    """

    parts: int = 1
    packed: Packed | None = None
    rows: Any = None
    minibatches: int = 1
    doublings: int = 0

    @property
    def count(self) -> int | Int[np.ndarray | Array, ""]:
        """Number of micro-batches."""
        return self.parts if self.packed is None else self.packed.count

    def within(self, mask: Bool[Array, "batch time"], index: Int[Array, ""]) -> Bool[Array, "batch time"]:
        """The tokens of a mask that are in a micro-batch of packed rows; of another micro-batch, all of them."""
        if self.packed is None:
            return mask
        return mask & (self.packed.places // self.packed.tokens[0].size == index)


def score_micro_batch(
    layout: Layout,
    scorer: Scorer,
    params: dict,
    part: Batch,
    index: Int[Array, ""],
    *,
    load: bool = False,
    compared: Compared | None = None,
) -> TokenScores:
    """Scores the tokens of a micro-batch.

    Args:
        params: all parameters, trained and frozen.
        part: rows of the micro-batch with number `index`; see `over_micro_batches`.
        load: add the load of the experts.
        compared: add the divergence from this teacher.
    """
    options = {"sampling": scorer.sampling, "chunk": scorer.chunk, "load": load, "compared": compared}
    if layout.packed is None:
        arrays = part.prompts, part.prompt_mask, part.completions, part.real_tokens
        recorded = part.recorded and part.recorded | {SAMPLED: part.completion_mask}
        values = completion_logprobs(scorer.decoder, params, *arrays, recorded, **options)
        return _token_scores(values, load, TOP_IDS in recorded)
    # The packed rows of all micro-batches are arrays of the batch, so each micro-batch cuts out its own.
    *packed_rows, places, _ = layout.packed
    packed_rows: Any = [constrain(x[index], ROWS) for x in packed_rows]
    places = jnp.where(part.completion_mask, places - index * packed_rows[0].size, 0)
    recorded = {}
    if part.recorded:
        shape = packed_rows[0].shape
        size = packed_rows[0].size
        predicting = jnp.where(part.completion_mask, places, size).reshape(-1)
        # The number of the token that each packed token predicts; -1 where it predicts no token of this micro-batch.
        predicted = jnp.full(size, -1).at[predicting].set(jnp.arange(predicting.size), mode="drop").reshape(shape)
        recorded = {name: x.reshape(predicting.size, *x.shape[2:])[predicted] for name, x in part.recorded.items()}
        recorded = jax.tree.map(lambda x: constrain(x, ROWS), recorded | {SAMPLED: predicted >= 0})
    tokens, positions, targets, ends = packed_rows
    values = packed_logprobs(scorer.decoder, params, tokens, positions, targets, ends, recorded, **options)
    scores = _token_scores(values, load, TOP_IDS in recorded)
    load_of_experts = scores.load
    scores = jax.tree.map(
        lambda x: jnp.where(
            part.completion_mask[(..., *[None] * (x.ndim - 2))], x.reshape(-1, *x.shape[2:])[places], 0.0
        ),
        scores._replace(load=()),
    )
    return scores._replace(load=load_of_experts)


def _token_scores(values: tuple[Any, ...], load: bool, has_top: bool) -> TokenScores:
    """Names the values of a forward pass, whose optional ones come in the order of `chunked_logprobs`."""
    logprobs, entropy, *optional = values[:-1] if load else values
    top_logprobs = optional.pop(0) if has_top else None
    divergence = optional.pop(0) if optional else None
    return TokenScores(logprobs, entropy, divergence, top_logprobs, values[-1] if load else ())


def over_micro_batches(
    layout: Layout,
    batch: Batch,
    rows: Any,
    sums: Any,
    of_micro_batch: Callable[..., tuple[Any, TokenScores]],
    compares: bool = False,
) -> tuple[Any, TokenScores]:
    """Runs a function on one micro-batch after the other.

    Args:
        rows: arrays with the batch's rows, such as advantages.
        sums: zeros, in the shape of the function's sums.
        of_micro_batch: function of a micro-batch's part of the batch, its part of `rows`, and its number. Returns sums
            and the scores of the part, without load. With packed rows, a part is the whole batch with a completion
            mask that keeps only the micro-batch's tokens; scores of all other tokens are 0. The log-probs
            of top tokens are skipped, because only the loss reads them.
        compares: True if the function's scores have a divergence.
    Returns:
        The total of the sums, and the scores of the whole batch, 0 for rows outside the minibatch.
    """
    prompts = len(batch.prompts)
    chosen = None
    if layout.rows is not None and layout.packed is None:
        count = prompts // layout.minibatches
        chosen = jnp.nonzero(layout.rows.reshape(prompts, -1)[:, 0], size=count)[0]

    def in_parts(x: Array) -> Array:
        if chosen is not None:
            x = x.reshape(prompts, -1, *x.shape[1:])[chosen].reshape(-1, *x.shape[1:])
        # Each part is spread over all devices.
        return constrain(x.reshape(layout.parts, x.shape[0] // layout.parts, *x.shape[1:]), None, ROWS)

    def of_batch(x: Array) -> Array:
        if chosen is not None:
            x = x.reshape(len(chosen), -1)
            x = jnp.zeros((prompts, x.shape[1]), x.dtype).at[chosen].set(x)
        return x.reshape(batch.completions.shape)

    parts = jax.tree.map(in_parts, (batch, rows))
    nothing = constrain(jnp.zeros(parts[0].completions.shape), None, ROWS)

    def add(index: Int[Array, ""], carry: tuple) -> tuple:
        sums, scores = carry
        number = index if layout.packed is None else 0
        micro_batch, its_rows = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, number, keepdims=False), parts)
        if layout.packed is not None:
            micro_batch = micro_batch._replace(completion_mask=layout.within(micro_batch.completion_mask, index))
        part_sums, part_scores = of_micro_batch(micro_batch, its_rows, index)
        part_scores = part_scores._replace(top_logprobs=None)

        # Added and not only written: each packed micro-batch has scores for some tokens of the same rows.
        def with_part(whole: Array, values: Array) -> Array:
            before = jax.lax.dynamic_index_in_dim(whole, number, keepdims=False)
            return jax.lax.dynamic_update_index_in_dim(whole, before + values, number, 0)

        return jax.tree.map(jnp.add, sums, part_sums), jax.tree.map(with_part, scores, part_scores)

    empty = TokenScores(nothing, nothing, nothing if compares else None)
    # A count that is not static serves any number of packed micro-batches with one program.
    sums, scores = jax.lax.fori_loop(0, layout.count, add, (sums, empty))
    return sums, jax.tree.map(of_batch, scores)


def batch_logprobs(
    layout: Layout, decoder: Decoder, params: dict, batch: Batch, sampling: Sampling, chunk: int
) -> TokenScores:
    """Scores the whole batch without gradients, with the memory of one micro-batch; see `score_micro_batch`."""
    scorer = Scorer(decoder, sampling, chunk)

    def of_micro_batch(part: Batch, _: None, index: Int[Array, ""]) -> tuple[tuple[()], TokenScores]:
        return (), score_micro_batch(layout, scorer, params, part, index)

    return over_micro_batches(layout, batch, None, (), of_micro_batch)[1]


score_batch = jax.jit(batch_logprobs, static_argnames=("decoder", "sampling", "chunk"))


def freely_routed(batch: Batch) -> Batch:
    """The batch without recorded experts, for a model that did not sample it, such as a reference or a teacher."""
    return batch._replace(recorded={name: values for name, values in batch.recorded.items() if name != EXPERTS})


def packed_layout(decoder: Decoder, batch: Batch, tokens: int | None = None) -> Layout:
    """The layout of a batch whose rows have prompts of their own, for an algorithm that relates no rows.

    Args:
        tokens: tokens of a micro-batch, at least as many as in the longest sequence; None: LEAST_TOKENS on each device.
    """
    shape = batch.shape
    shards = row_shards()
    tokens = max(tokens or LEAST_TOKENS * shards, shape.longest * shards)
    rows = row_shape(tokens, shape.longest, 1, shards, shape.rows)
    return Layout(1, pack(batch, rows, share=_shares_beginnings(decoder)))


def _shares_beginnings(decoder: Decoder) -> bool:
    """True if sequences in a row may share a beginning: neither the splash kernel nor delta nets support it."""
    return decoder.attention != "splash" and decoder.config.delta is None


def score(
    decoder: Decoder, params: dict, batch: Batch, sampling: Sampling, chunk: int, layout: Layout | None = None
) -> Float[np.ndarray, "batch time"]:
    """Log-probs of a batch's tokens under the parameters, on the host; undefined at padding.

    Args:
        params: all parameters of the decoder.
        sampling: the distribution that sampled the tokens.
        chunk: token positions whose logits exist at the same time.
        layout: None: packed if rows have prompts of their own.
    """
    if layout is None:
        layout = Layout() if batch.shape.group else packed_layout(decoder, batch)
    return on_host(score_batch(layout, decoder, params, put_rows(batch), sampling, chunk)[0])


def choose_layout(
    config: Config,
    algorithm: Algorithm,
    decoder: Decoder,
    batch: Batch,
    rows: Bool[np.ndarray, " batch"] | None = None,
    doublings: int | None = None,
    teacher: Decoder | None = None,
) -> Layout:
    """The layout of an update.

    recjax packs a batch if `training.tokens_per_micro_batch` is set, if packing is much less work, if groups are large,
    or if rows have prompts of their own.

    Args:
        rows: rows of the update's minibatch; see `minibatch_rows`.
        doublings: the value of the first layout, so that all updates are one compiled program; None: choose the
            value that is least work for this batch.
        teacher: decoder of the teacher, which reads the same rows; None without a teacher.
    Raises:
        UserError: a micro-batch is too small for the longest sequence, or for sequences that the algorithm relates.
    """
    shards = row_shards()
    budget = config.training.tokens_per_micro_batch
    minibatches = config.training.minibatches
    padded = batch.shape._replace(prompts=batch.shape.prompts // minibatches)
    if rows is not None:
        batch = batch._replace(completion_mask=batch.completion_mask & rows[:, None])
    parts = config.micro_batches(padded.positions, shards)
    in_parts = Layout(parts, None, rows, minibatches)
    compares = algorithm.compares_completions
    optional = not is_packed(config, padded)
    # Packing costs the host time, so a batch that cannot gain enough at best is not packed to find out.
    fewest = int(batch.completion_mask.sum())  # a lower bound on the work for the best possible packing
    too_small = padded.positions // parts < padded.longest * shards
    taught = batch.teacher_prompts is not None
    if optional and (compares or taught or too_small or not _saves(decoder.config, padded, fewest, fewest, fewest)):
        return in_parts
    # Sequences that the algorithm compares, or of one completion, must meet in one micro-batch.
    together = batch.group_ids if compares else batch.trajectories if algorithm.relates_rows else None
    share = _shares_beginnings(decoder) and (teacher is None or _shares_beginnings(teacher))
    most = padded.prompts if compares and padded.group is not None else None
    shapes = [shape_for(config, padded, shards)]
    # Longer rows have room for several sequences with a common beginning, at the price of more attention.
    while padded.group is None and shapes[-1].rows >= 2 * shards and 2 * shapes[-1].tokens <= LEAST_TOKENS:
        shapes.append(row_shape(shapes[-1].rows * shapes[-1].tokens, 2 * shapes[-1].tokens, multiple=shards))

    def packed_into(shape: RowShape) -> tuple[Packed, tuple[int, int, int]]:
        count = most or -(-padded.rows // shape.rows)
        packed = pack(batch, shape, together, share, most=count, grow=budget is None)
        positions = packed.count.item() * packed.tokens[0].size
        return packed, (positions, positions * shape.tokens, positions)

    if optional:
        packed, work = packed_into(shapes[0])
        return Layout(1, packed, rows, minibatches) if _saves(decoder.config, padded, *work) else in_parts
    # Chosen once: another length of the rows would compile another update.
    if doublings is None:
        flops = [_flops(decoder.config, *packed_into(shape)[1]) for shape in shapes]
        doublings = next(number for number, each in enumerate(flops) if each <= 1.1 * min(flops))
    packed, _ = packed_into(shapes[min(doublings, len(shapes) - 1)])
    return Layout(1, packed, rows, minibatches, doublings)


def _saves(config: DecoderConfig, shape: Shape, positions: int, pairs: int, scores: int) -> bool:
    """True if this work is so much less than without packing that a second compiled program pays off.

    Args:
        shape: shape of the rows without packing.
        positions: token positions that the decoder computes.
        pairs: attention pairs.
        scores: positions with vocabulary scores.
    """
    run = shape.time - 1
    rows = shape.rows
    pairs_padded = shape.prompts * shape.prompt_time**2 + rows * run * (shape.prompt_time + run)
    padded = _flops(config, shape.positions, pairs_padded, rows * shape.time)
    return padded - _flops(config, positions, pairs, scores) > max(LEAST_SHARE * padded, LEAST_SAVED)


def _flops(config: DecoderConfig, positions: int, pairs: int, scores: int) -> int:
    """FLOPs of an update: per weight and position, two in the forward pass and four in the backward pass."""
    attention = 2 * config.attention_layers * config.num_heads * config.head_dim * pairs
    head = config.hidden_size * config.vocab_size
    return 6 * (config.num_layers * config.active_layer_weights * positions + attention + head * scores)


def padding_waste(batch: Batch, layout: Layout, filled: int = 0) -> float:
    """The share of positions that the update computes without a token in them; a shared prompt counts once.

    Args:
        filled: number of padding prompts at the end of the batch; they do not count.
    """
    if layout.packed is not None:
        computed = layout.packed.ends[: layout.packed.count]
        return 1 - (computed > 0).mean().item() if computed.size else 0.0
    completions = np.maximum(batch.completion_mask.sum(-1) - 1, 0)
    prompts = batch.prompt_mask.sum(-1)
    if layout.rows is not None:
        completions = completions[layout.rows]
        prompts = prompts[layout.rows.reshape(len(prompts), -1)[:, 0]]
    computed = (batch.prompts.size + batch.completions[:, 1:].size) * (1 - filled / len(batch.prompts))
    filled_tokens = prompts.sum() + completions.sum() - filled / layout.minibatches
    return 1 - filled_tokens.item() * layout.minibatches / computed
