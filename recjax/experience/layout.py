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
from recjax.models.experts import EXPERTS
from recjax.models.logprobs import SAMPLED, Compared, TokenScores, completion_logprobs, packed_logprobs
from recjax.models.placement import ROWS, constrain, on_host, put_rows, row_shards
from recjax.models.sampling import Sampling

# Packing must save this share of an update's FLOPs, and this many FLOPs (about half a second on two CPU cores), to be
# worth a second compiled program.
LEAST_SHARE = 0.25
LEAST_SAVED = 1e11
# `choose_layout` takes the shortest rows whose FLOPs are at most this factor times the least.
_CLOSE_TO_LEAST = 1.1


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
    doublings: how often packed rows doubled their length, for sequences with common beginnings. Static under jit.
    """

    parts: int = 1
    packed: Packed | None = None
    rows: Any = None
    minibatches: int = 1
    doublings: int = 0

    @property
    def count(self) -> int | Int[np.ndarray | Array, ""]:
        """Number of micro-batches."""
        if self.packed is None:
            return self.parts
        return self.packed.count

    def within(self, mask: Bool[Array, "batch time"], index: Int[Array, ""]) -> Bool[Array, "batch time"]:
        """The mask's tokens in a micro-batch of packed rows; without packed rows, all tokens of the mask."""
        if self.packed is None:
            return mask
        size = self.packed.tokens[0].size  # token positions of one micro-batch
        micro_batches = self.packed.places // size
        return mask & (micro_batches == index)


def score_micro_batch(
    layout: Layout,
    scorer: Scorer,
    params: dict,
    part: Batch,
    index: Int[Array, ""],
    *,
    compared: Compared | None = None,
) -> TokenScores:
    """Scores the tokens of a micro-batch.

    Args:
        params: all parameters, trained and frozen.
        part: rows of the micro-batch with number `index`; see `over_micro_batches`.
        compared: add the divergence from this teacher.
    """
    if layout.packed is None:
        recorded = part.recorded
        if recorded:
            recorded = recorded | {SAMPLED: part.completion_mask}
        return completion_logprobs(
            scorer.decoder,
            params,
            part.prompts,
            part.prompt_mask,
            completions=part.completions,
            completion_mask=part.real_tokens,
            recorded=recorded,
            sampling=scorer.sampling,
            chunk=scorer.chunk,
            compared=compared,
        )

    # The packed rows of all micro-batches are arrays of the batch, so each micro-batch cuts out its own.
    def own(rows: Array) -> Int[Array, "rows row_tokens"]:
        return constrain(rows[index], ROWS)

    tokens = own(layout.packed.tokens)
    positions = own(layout.packed.positions)
    targets = own(layout.packed.targets)
    ends = own(layout.packed.ends)
    # Indices in this micro-batch, with its rows end to end.
    places = jnp.where(part.completion_mask, layout.packed.places - index * tokens.size, 0)
    recorded = {}
    if part.recorded:
        # Tokens of other micro-batches get an index after the last one, which `drop` ignores.
        predicting = jnp.where(part.completion_mask, places, tokens.size).reshape(-1)
        # The inverse of `places`: the number of the completion token that each packed token predicts; -1 where it
        # predicts no token of this micro-batch.
        predicted = jnp.full(tokens.size, -1).at[predicting].set(jnp.arange(predicting.size), mode="drop")
        predicted = predicted.reshape(tokens.shape)
        for name, values in part.recorded.items():
            token_values = values.reshape(predicting.size, *values.shape[2:])
            recorded[name] = token_values[predicted]
        recorded[SAMPLED] = predicted >= 0
        recorded = jax.tree.map(lambda x: constrain(x, ROWS), recorded)
    scores = packed_logprobs(
        scorer.decoder,
        params,
        tokens,
        positions,
        targets=targets,
        ends=ends,
        recorded=recorded,
        sampling=scorer.sampling,
        chunk=scorer.chunk,
        compared=compared,
    )

    def at_completions(values: Array) -> Array:
        """Values at packed tokens as values of the completion tokens that they predict, 0 at other tokens."""
        mask = jnp.expand_dims(part.completion_mask, range(2, values.ndim))
        packed_values = values.reshape(-1, *values.shape[2:])
        return jnp.where(mask, packed_values[places], 0.0)

    # The load is a total over tokens and has no value for each token.
    token_scores = jax.tree.map(at_completions, scores._replace(load=None))
    return token_scores._replace(load=scores.load)


def over_micro_batches(
    layout: Layout,
    batch: Batch,
    rows: Any,
    sums: Any,
    run_micro_batch: Callable[..., tuple[Any, TokenScores]],
    compares: bool = False,
) -> tuple[Any, TokenScores]:
    """Runs a function on one micro-batch after the other.

    Args:
        rows: arrays with the batch's rows, such as advantages.
        sums: zeros, in the shape of the function's sums.
        run_micro_batch: function of a micro-batch's part of the batch, its part of `rows`, and its number. Returns sums
            and the scores of the part. With packed rows, a part is the whole batch with a completion mask that keeps
            only the micro-batch's tokens; scores of all other tokens are 0.
        compares: True if the function's scores have a divergence.
    Returns:
        The total of the sums, and the scores of the whole batch, 0 for rows outside the minibatch. The log-probs of top
        tokens and the load are absent, because only the function reads them.
    """
    prompts = len(batch.prompts)
    chosen = None
    if layout.rows is not None and layout.packed is None:
        # A minibatch has whole groups, so the first row of a prompt tells for all its rows.
        is_chosen = layout.rows.reshape(prompts, -1)[:, 0]
        (chosen,) = jnp.nonzero(is_chosen, size=prompts // layout.minibatches)

    def in_parts(x: Array) -> Array:
        if chosen is not None:
            x = x.reshape(prompts, -1, *x.shape[1:])[chosen].reshape(-1, *x.shape[1:])
        # Each part is spread over all devices.
        return constrain(x.reshape(layout.parts, x.shape[0] // layout.parts, *x.shape[1:]), None, ROWS)

    def in_batch(x: Array) -> Array:
        if chosen is not None:
            x = x.reshape(len(chosen), -1)
            x = jnp.zeros((prompts, x.shape[1]), x.dtype).at[chosen].set(x)
        return x.reshape(batch.completions.shape)

    parts = jax.tree.map(in_parts, (batch, rows))
    nothing = constrain(jnp.zeros(parts[0].completions.shape), None, ROWS)

    def add(index: Int[Array, ""], carry: tuple) -> tuple:
        sums, scores = carry
        number = 0  # packed micro-batches all read the only part, which is the whole batch
        if layout.packed is None:
            number = index
        micro_batch, its_rows = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, number, keepdims=False), parts)
        if layout.packed is not None:
            micro_batch = micro_batch._replace(completion_mask=layout.within(micro_batch.completion_mask, index))
        part_sums, part_scores = run_micro_batch(micro_batch, its_rows, index)
        part_scores = part_scores._replace(top_logprobs=None, load=None)

        # Added and not only written: each packed micro-batch has scores for some tokens of the same rows.
        def with_part(total: Array, values: Array) -> Array:
            before = jax.lax.dynamic_index_in_dim(total, number, keepdims=False)
            return jax.lax.dynamic_update_index_in_dim(total, before + values, number, 0)

        return jax.tree.map(jnp.add, sums, part_sums), jax.tree.map(with_part, scores, part_scores)

    empty = TokenScores(nothing, nothing)
    if compares:
        empty = empty._replace(divergence=nothing)
    # A count that is not static serves any number of packed micro-batches with one program.
    sums, scores = jax.lax.fori_loop(0, layout.count, add, (sums, empty))
    return sums, jax.tree.map(in_batch, scores)


def batch_logprobs(
    layout: Layout,
    decoder: Decoder,
    params: dict,
    batch: Batch,
    sampling: Sampling,
    chunk: int,
    compared: Compared | None = None,
) -> TokenScores:
    """Scores the whole batch without gradients, with the memory of one micro-batch; see `score_micro_batch`."""
    scorer = Scorer(decoder, sampling, chunk)

    def run_micro_batch(part: Batch, _: None, index: Int[Array, ""]) -> tuple[tuple[()], TokenScores]:
        return (), score_micro_batch(layout, scorer, params, part, index, compared=compared)

    _, scores = over_micro_batches(layout, batch, None, (), run_micro_batch, compares=compared is not None)
    return scores


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
    if tokens is None:
        tokens = LEAST_TOKENS * shards
    tokens = max(tokens, shape.longest * shards)
    micro_batch = row_shape(tokens, shape.longest, multiple=shards, sequences=shape.rows)
    return Layout(packed=pack(batch, micro_batch, share=_shares_beginnings(decoder)))


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
        if batch.shape.group is None:
            layout = packed_layout(decoder, batch)
        else:
            layout = Layout()
    scores = score_batch(layout, decoder, params, put_rows(batch), sampling=sampling, chunk=chunk)
    return on_host(scores.logprobs)


def choose_layout(
    config: Config,
    algorithm: Algorithm,
    decoder: Decoder,
    batch: Batch,
    rows: Bool[np.ndarray, " batch"] | None = None,
    doublings: int | None = None,
    teacher: Decoder | None = None,
) -> Layout:
    """The layout of an update: padded, or packed.

    `is_packed` is True if `training.tokens_per_micro_batch` is set, if groups are large, or if rows have prompts of
    their own. It decides first, then the batch:

    | is_packed | batch | layout |
    |---|---|---|
    | False | cannot be packed, or even the best packing saves too little | padded |
    | False | any other | packed if this packing saves enough, otherwise padded |
    | True | the first (`doublings` is None) | packed into rows of the length with the least work |
    | True | later ones | packed into rows of the first layout's length, so that updates are one compiled program |

    Args:
        rows: rows of the update's minibatch; see `minibatch_rows`.
        doublings: the value of the first layout; None: choose the value that is least work for this batch.
        teacher: decoder of the teacher, which reads the same rows; None without a teacher.
    Raises:
        UserError: a micro-batch is too small for the longest sequence, or for sequences that the algorithm relates.
    """
    shards = row_shards()
    minibatches = config.training.minibatches
    shape = batch.shape._replace(prompts=batch.shape.prompts // minibatches)
    if rows is not None:
        batch = batch._replace(completion_mask=batch.completion_mask & rows[:, None])
    parts = config.micro_batches(shape.positions, shards)
    padded = Layout(parts=parts, rows=rows, minibatches=minibatches)
    always_packs = is_packed(config, shape)
    if not always_packs and not _may_save(algorithm, decoder.config, batch, shape, padded.parts):
        return padded

    # Sequences that the algorithm compares, or of one completion, must meet in one micro-batch.
    together = None
    if algorithm.compares_completions:
        together = batch.group_ids
    elif algorithm.relates_rows:
        together = batch.trajectories
    shares_beginnings = _shares_beginnings(decoder) and (teacher is None or _shares_beginnings(teacher))
    may_grow = config.training.tokens_per_micro_batch is None

    def packed_into(micro_batch: RowShape) -> Packed:
        micro_batches = -(-shape.rows // micro_batch.rows)  # enough if each sequence has a row of its own
        if algorithm.compares_completions and shape.group is not None:
            micro_batches = shape.prompts
        return pack(batch, micro_batch, together, shares_beginnings, most=micro_batches, grow=may_grow)

    row_shapes = [shape_for(config, shape, shards)]  # by the number of doublings
    if not always_packs:
        packed = packed_into(row_shapes[0])
        if not _saves(decoder.config, shape, _packed_work(packed)):
            return padded
        return Layout(packed=packed, rows=rows, minibatches=minibatches)
    if shape.group is None:
        # Longer rows have space for several sequences with a common beginning, at the price of more attention.
        longest = row_shapes[0]
        while longest.rows >= 2 * shards and 2 * longest.tokens <= LEAST_TOKENS:
            budget = longest.rows * longest.tokens
            longest = row_shape(budget, 2 * longest.tokens, multiple=shards)
            row_shapes.append(longest)
    if doublings is None:
        flops = [_flops(decoder.config, _packed_work(packed_into(each))) for each in row_shapes]
        enough = _CLOSE_TO_LEAST * min(flops)
        doublings = next(number for number, each in enumerate(flops) if each <= enough)
    # A later batch may allow fewer doublings than the first one.
    packed = packed_into(row_shapes[min(doublings, len(row_shapes) - 1)])
    return Layout(packed=packed, rows=rows, minibatches=minibatches, doublings=doublings)


class _Work(NamedTuple):
    """The parts of an update that take time.

    positions: token positions that the decoder computes.
    pairs: pairs of tokens that attention computes.
    scores: positions with vocabulary scores.
    """

    positions: int
    pairs: int
    scores: int


def _packed_work(packed: Packed) -> _Work:
    """The work of an update with packed rows, each of which attends to all its tokens."""
    positions = packed.count.item() * packed.tokens[0].size
    row_tokens = packed.tokens.shape[-1]
    return _Work(positions=positions, pairs=positions * row_tokens, scores=positions)


def _may_save(algorithm: Algorithm, config: DecoderConfig, batch: Batch, shape: Shape, parts: int) -> bool:
    """True if a batch can be packed and its best possible packing would save enough.

    Packing costs the host time, so a batch that cannot gain enough at best is not packed to find out.
    """
    if algorithm.compares_completions or batch.teacher_prompts is not None:
        return False
    if shape.positions // parts < shape.longest * row_shards():  # a micro-batch has no space for the longest sequence
        return False
    tokens = int(batch.completion_mask.sum())  # a lower bound on positions, pairs and scores
    return _saves(config, shape, _Work(tokens, tokens, tokens))


def _saves(config: DecoderConfig, shape: Shape, work: _Work) -> bool:
    """True if this work is so much less than without packing that a second compiled program pays off.

    Args:
        shape: shape of the rows without packing.
    """
    completion_time = shape.time - 1  # the last token is only a target
    prompt_pairs = shape.prompts * shape.prompt_time**2
    completion_pairs = shape.rows * completion_time * (shape.prompt_time + completion_time)
    padded_work = _Work(
        positions=shape.positions, pairs=prompt_pairs + completion_pairs, scores=shape.rows * shape.time
    )
    padded = _flops(config, padded_work)
    return padded - _flops(config, work) > max(LEAST_SHARE * padded, LEAST_SAVED)


def _flops(config: DecoderConfig, work: _Work) -> int:
    """FLOPs of an update: per weight and position, two in the forward pass and four in the backward pass."""
    layers = config.num_layers * config.active_layer_weights * work.positions
    attention = 2 * config.attention_layers * config.num_heads * config.head_dim * work.pairs
    head = config.hidden_size * config.vocab_size * work.scores
    return 6 * (layers + attention + head)


def padding_waste(batch: Batch, layout: Layout, filled: int = 0) -> float:
    """The share of positions that the update computes without a token in them; a shared prompt counts once.

    Args:
        filled: number of padding prompts at the end of the batch; they do not count.
    """
    if layout.packed is not None:
        computed = layout.packed.ends[: layout.packed.count]
        if not computed.size:
            return 0.0
        return 1 - (computed > 0).mean().item()
    completions = np.maximum(batch.completion_mask.sum(-1) - 1, 0)
    prompts = batch.prompt_mask.sum(-1)
    if layout.rows is not None:
        completions = completions[layout.rows]
        prompts = prompts[layout.rows.reshape(len(prompts), -1)[:, 0]]
    # All positions of the batch without its padding prompts; each minibatch computes an equal share.
    computed = (batch.prompts.size + batch.completions[:, 1:].size) * (1 - filled / len(batch.prompts))
    # A padding prompt has one token, and a minibatch has its share of the padding prompts.
    tokens = prompts.sum() + completions.sum() - filled / layout.minibatches
    return 1 - tokens.item() * layout.minibatches / computed
