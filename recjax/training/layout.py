"""Chooses the cheaper batch layout for the update: padded, with each prompt once for its group, or packed into rows."""

from recjax.config import Config
from recjax.experience.batch import Batch, Shape
from recjax.models.decoder_config import DecoderConfig
from recjax.models.placement import row_shards
from recjax.training.packing import Packed, pack, pack_trajectories, row_shape, shape_for
from recjax.training.update import Recipe

# Packing must save this share of an update's FLOPs, and this many FLOPs (about half a second on two CPU cores), to be
# worth a second compiled program.
LEAST_SHARE, LEAST_SAVED = 0.25, 1e11
# By default a packed micro-batch has LEAST_TOKENS tokens per device, since smaller matmuls are slow, or the size of the
# padded batch over MOST_MICRO_BATCHES if that is more, since mainly the last micro-batch has empty positions.
LEAST_TOKENS, MOST_MICRO_BATCHES = 2048, 32


def packed_batch(config: Config, recipe: Recipe, batch: Batch, micro_batches: int) -> Packed | None:
    """The batch in packed rows if `training.tokens_per_micro_batch` is set or packing is much less work, else None.

    Args:
        micro_batches: number of micro-batches of the padded batch; by default packed micro-batches are no larger.
    Raises:
        ValueError: a micro-batch is too small for the longest sequence, or for sequences that the algorithm relates.
    """
    algorithm, decoder, shards = recipe.algorithm, recipe.decoder, row_shards()
    share = decoder.attention != "splash"  # the splash kernel supports only segments
    if config.training.tokens_per_micro_batch:
        shape = shape_for(config, _shape(batch), shards)
    else:
        # By default, packed micro-batches are no larger than padded ones.
        longest, (positions, _, _) = _shape(batch).prompt_time + _shape(batch).time - 1, _padded(batch)
        wanted = max(LEAST_TOKENS * shards, longest * shards, positions // MOST_MICRO_BATCHES)
        budget = min(wanted, positions // micro_batches)
        ids = batch.trajectories
        several_rows = ids is not None and len(set(ids.tolist())) < len(ids)
        together = algorithm.compares_completions or (algorithm.relates_rows and several_rows)
        least = int(batch.completion_mask.sum())  # a lower bound on the work for the best possible packing
        if budget < longest * shards or together or not _saves(decoder.config, batch, least, least, least):
            return None
        shape = row_shape(budget, longest, multiple=shards, sequences=len(batch.completions))
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


def _padded(batch: Batch) -> tuple[int, int, int]:
    """Work for the padded batch: computed positions, attention pairs, and positions with vocabulary scores."""
    shape = _shape(batch)
    rows, asked, rest = shape.prompts * shape.group, shape.prompt_time, shape.time - 1
    return shape.positions, shape.prompts * asked**2 + rows * rest * (asked + rest), rows * shape.time


def _saves(config: DecoderConfig, batch: Batch, positions: int, pairs: int, scores: int) -> bool:
    """True if this work is so much less than the padded batch's that a second compiled program pays off."""
    padded = _flops(config, *_padded(batch))
    saved = padded - _flops(config, positions, pairs, scores)
    return saved > max(LEAST_SHARE * padded, LEAST_SAVED)


def _flops(config: DecoderConfig, positions: int, pairs: int, scores: int) -> int:
    """FLOPs of an update: per weight and position, two in the forward pass and four in the backward pass."""
    attention = 2 * config.num_layers * config.num_heads * config.head_dim * pairs
    head = config.hidden_size * config.vocab_size
    return 6 * (config.num_layers * config.layer_weights * positions + attention + head * scores)
