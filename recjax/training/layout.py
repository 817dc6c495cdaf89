"""How an update runs a batch: padded, each prompt once for its group, or packed into rows, by what is less work."""

from recjax.config import Config
from recjax.experience.batch import Batch, Shape
from recjax.models.decoder_config import DecoderConfig
from recjax.models.placement import row_shards
from recjax.training.packing import Packed, RowShape, pack, pack_trajectories, row_shape, shape_for
from recjax.training.update import Recipe

# Of an update's FLOPs, and of all: with less to save, it is not worth a second program. About half a second of two CPU
# cores.
LEAST_SHARE, LEAST_SAVED = 0.25, 1e11
# Unasked, packed micro-batches have this many tokens on each device, as products of fewer rows are slow, or this share
# of the padded batch, as most of what packing leaves empty is in the last one.
LEAST_TOKENS, MOST_MICRO_BATCHES = 2048, 32


def packed_batch(config: Config, recipe: Recipe, batch: Batch, micro_batches: int) -> Packed | None:
    """The batch packed as `training.tokens_per_micro_batch` says; without that, if it is much less work; else None.

    Args:
        micro_batches: of the batch as it is padded; packed ones that were not asked for are no larger.
    Raises:
        ValueError: too few tokens for the longest sequence, or for those that the algorithm reads together.
    """
    algorithm, decoder, shards = recipe.algorithm, recipe.decoder, row_shards()
    share = decoder.attention != "splash"  # that kernel knows segments alone
    if config.training.tokens_per_micro_batch:
        shape = shape_for(config, _shape(batch), shards)
    else:
        shape = _shape_unasked(batch, micro_batches, shards)
        together = algorithm.compares_completions or (algorithm.relates_rows and _has_long_trajectories(batch))
        if shape is None or together or not _saves(decoder.config, batch, *_at_least(batch)):
            return None
    if batch.trajectories is not None:
        packed = pack_trajectories(batch, shape, algorithm.relates_rows, share)
    else:
        packed = pack(batch, shape, algorithm.compares_completions, share)
    if config.training.tokens_per_micro_batch:
        return packed
    positions = int(packed.count) * shape.rows * shape.tokens
    return packed if _saves(decoder.config, batch, positions, positions * shape.tokens, positions) else None


def _shape(batch: Batch) -> Shape:
    prompts, (rows, time) = batch.prompts.shape, batch.completions.shape
    return Shape(prompts[0], rows // prompts[0], prompts[1], time)


def _shape_unasked(batch: Batch, micro_batches: int, shards: int) -> RowShape | None:
    """Rows of packed micro-batches, none larger than the padded ones; None where those are too small."""
    shape = _shape(batch)
    longest, (positions, _, _) = shape.prompt_time + shape.time - 1, _padded(batch)
    wanted = max(LEAST_TOKENS * shards, longest * shards, positions // MOST_MICRO_BATCHES)
    budget = min(wanted, positions // micro_batches)
    if budget < longest * shards:
        return None
    return row_shape(budget, longest, multiple=shards, sequences=shape.prompts * shape.group)


def _has_long_trajectories(batch: Batch) -> bool:
    """Whether a trajectory has several rows."""
    return batch.trajectories is not None and len(set(batch.trajectories.tolist())) < len(batch.trajectories)


def _padded(batch: Batch) -> tuple[int, int, int]:
    """Of the padded batch: positions that run, pairs of them in attention, and positions whose scores are computed."""
    shape = _shape(batch)
    rows, asked, rest = shape.prompts * shape.group, shape.prompt_time, shape.time - 1
    return shape.positions, shape.prompts * asked**2 + rows * rest * (asked + rest), rows * shape.time


def _at_least(batch: Batch) -> tuple[int, int, int]:
    """The same of the best possible packing, or less."""
    sampled = int(batch.completion_mask.sum())
    return sampled, sampled, sampled


def _saves(config: DecoderConfig, batch: Batch, positions: int, pairs: int, scores: int) -> bool:
    """Whether that is so much less work than the padded batch that it is worth a program of its own."""
    padded = _flops(config, *_padded(batch))
    saved = padded - _flops(config, positions, pairs, scores)
    return saved > max(LEAST_SHARE * padded, LEAST_SAVED)


def _flops(config: DecoderConfig, positions: int, pairs: int, scores: int) -> int:
    """Of an update: two for each weight that a position passes, and four more backwards."""
    attention = 2 * config.num_layers * config.num_heads * config.head_dim * pairs
    head = config.hidden_size * config.vocab_size
    return 6 * (config.num_layers * config.layer_weights * positions + attention + head * scores)
