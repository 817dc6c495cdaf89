"""Sequences of a batch laid end to end in rows, so that the update spends nothing on padding. On the host, in NumPy."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from recjax.config import Config
from recjax.experience.batch import Batch, Shape
from recjax.models.placement import row_shards

TILE = 128  # accelerators' attention works on so many tokens at a time


class RowShape(NamedTuple):
    """A micro-batch of packed sequences: this many rows of this many tokens."""

    rows: int
    tokens: int


class Packed(NamedTuple):
    """A batch's sequences, a prompt and one completion each, in rows of equal length; host arrays.

    Shapes: tokens, positions, segments and targets [micro_batches, rows, row_tokens]; first [micro_batches, batch].

    positions count from the start of the token's own sequence; segments number the sequences of a row from 1 and are 0
    at padding; targets are the tokens that come next. first is the place of each completion in its micro-batch, rows
    end to end: where the target is its first token. It is -1 in micro-batches that the completion is not in, and in all
    for completions without tokens. The first `count` micro-batches hold everything; the others make shapes equal from
    batch to batch.
    """

    tokens: np.ndarray
    positions: np.ndarray
    segments: np.ndarray
    targets: np.ndarray
    first: np.ndarray
    count: np.ndarray


def row_shape(budget: int, longest: int, together: int = 1, multiple: int = 1) -> RowShape:
    """The most rows that a budget of tokens has room for, and their length.

    Attention costs the square of a row's length, so rows are hardly longer than the longest sequence.

    Args:
        budget: tokens of a micro-batch, `training.tokens_per_micro_batch`.
        longest: tokens of the longest sequence that there can be.
        together: sequences, each that long, that must fit one micro-batch.
        multiple: of the number of rows, for devices that share them equally.
    Raises:
        ValueError: a budget too small.
    """
    rows = budget // longest // multiple * multiple
    tokens = budget // max(rows, 1)
    if tokens // TILE * TILE >= longest:
        tokens = tokens // TILE * TILE
    if rows * (tokens // longest) < together:
        least = longest * -(-together // multiple) * multiple
        room = f"{together} of the longest sequences, {longest} tokens each" if together > 1 else f"{longest} tokens"
        sharing = f" on each of {multiple} devices" if multiple > 1 else ""
        raise ValueError(
            f"training.tokens_per_micro_batch = {budget}: a micro-batch must have room for {room}{sharing}; raise it to"
            f" {least} or more, or lower rollout.max_prompt_tokens or rollout.max_completion_tokens"
        )
    return RowShape(rows, tokens)


def shape_for(config: Config, shape: Shape, multiple: int = 1) -> RowShape:
    """The rows of `training.tokens_per_micro_batch` for batches of a shape.

    Args:
        multiple: as for `row_shape`.
    Raises:
        ValueError: a budget too small for the longest sequence, or for a prompt's completions where the algorithm
            compares them.
    """
    algorithm = config.algorithm.build()
    together = shape.group if algorithm.compares_completions else 1
    longest, sequences = shape.prompt_time + shape.time - 1, shape.prompts * shape.group
    rows, tokens = row_shape(config.training.tokens_per_micro_batch, longest, together, multiple)
    # No batch needs more rows than it has sequences.
    return RowShape(min(rows, -(-sequences // multiple) * multiple), tokens)


def packed_batch(config: Config, batch: Batch) -> Packed | None:
    """The batch as `training.tokens_per_micro_batch` says; None where it says nothing."""
    if config.training.tokens_per_micro_batch is None:
        return None
    algorithm = config.algorithm.build()
    prompts, completions = batch.prompts.shape, batch.completions.shape
    shape = Shape(prompts[0], completions[0] // prompts[0], prompts[1], completions[1])
    packed_shape = shape_for(config, shape, row_shards())
    if batch.trajectories is not None:
        return pack_trajectories(batch, packed_shape, algorithm.relates_rows)
    return pack(batch, packed_shape, algorithm.compares_completions)


def sequence_lengths(batch: Batch) -> np.ndarray:
    """Tokens that each completion takes with its prompt; 0 without a completion. The last is a target alone."""
    prompts = batch.prompt_mask.sum(-1).repeat(len(batch.completions) // len(batch.prompts))
    completions = batch.real_tokens.sum(-1)
    return np.where(batch.completion_mask.any(-1), prompts + completions - 1, 0)


def pack(batch: Batch, shape: RowShape, whole_prompts: bool = False) -> Packed:
    """Lays out a batch; no sequence is in more than one row.

    Args:
        batch: completions without gaps, grouped by prompt, the same number for each; they may have no token.
        shape: of the micro-batches, which holds any of the sequences.
        whole_prompts: all completions of a prompt go into one micro-batch, which a pairwise objective asks for.
    """
    per_prompt, lengths = len(batch.completions) // len(batch.prompts), sequence_lengths(batch)
    units = np.arange(len(lengths)).reshape(-1, per_prompt if whole_prompts else 1)
    most = len(batch.prompts) if whole_prompts else -(-len(lengths) // shape.rows)
    return _laid_out(batch, shape, most, _first_fit(lengths, units, shape, most))


def pack_trajectories(batch: Batch, shape: RowShape, together: bool) -> Packed:
    """Lays out a batch of trajectories; where there is too little room the number of micro-batches doubles.

    Args:
        together: all rows of a trajectory go into one micro-batch.
    Raises:
        ValueError: a micro-batch is too small for those of one.
    """
    lengths, rows = sequence_lengths(batch), np.arange(len(batch.completions))
    units = [rows[batch.trajectories == one] for one in np.unique(batch.trajectories)] if together else rows[:, None]
    for unit in units if together else ():
        alone = np.sort(lengths[unit])[::-1]
        if _rows_for(np.full(shape.rows, shape.tokens), alone[alone > 0]) is None:
            raise ValueError(
                f"training.tokens_per_micro_batch has room for {shape.rows} rows of {shape.tokens} tokens, and a"
                f" trajectory has rows of {', '.join(map(str, alone))}, which this algorithm reads together; raise it"
            )
    most = -(-len(lengths) // shape.rows)
    while (places := _first_fit(lengths, units, shape, most)) is None:
        most *= 2
    return _laid_out(batch, shape, most, places)


def _laid_out(batch: Batch, shape: RowShape, most: int, places: dict[int, tuple[int, int, int]]) -> Packed:
    """The sequences at their places; see `_first_fit`."""
    count, per_prompt = len(batch.completions), len(batch.completions) // len(batch.prompts)
    rows = np.zeros((4, most * shape.rows, shape.tokens), np.int32)
    first = np.full((most, count), -1, np.int32)
    for index, (row, start, number) in places.items():
        prompt = index // per_prompt
        asked = batch.prompts[prompt][batch.prompt_mask[prompt]]
        sequence = np.concatenate([asked, batch.completions[index][batch.real_tokens[index]]])
        laid = (sequence[:-1], np.arange(len(sequence) - 1), np.full(len(sequence) - 1, number), sequence[1:])
        rows[:, row, start : start + len(sequence) - 1] = laid
        micro_batch, row = divmod(row, shape.rows)
        first[micro_batch, index] = row * shape.tokens + start + len(asked) - 1
    count = max((row // shape.rows + 1 for row, _, _ in places.values()), default=0)
    return Packed(*rows.reshape(4, most, *shape), first, np.array(count, np.int32))


def _first_fit(
    lengths: np.ndarray, units: Sequence[np.ndarray] | np.ndarray, shape: RowShape, most: int
) -> dict[int, tuple[int, int, int]] | None:
    """First-fit decreasing: row, start in it and number in it of each sequence with tokens; None without room.

    Args:
        units: sequences that go into one micro-batch each.
        most: micro-batches.
    """
    free, held = np.full((most, shape.rows), shape.tokens), np.zeros((most, shape.rows), int)
    places = {}
    for number in np.argsort([-lengths[unit].sum() for unit in units], kind="stable"):
        unit = units[number]
        unit = sorted(unit[lengths[unit] > 0], key=lambda index: -lengths[index])
        if not unit:
            continue
        rows, enough = None, (free.sum(-1) >= lengths[unit].sum()) & (free.max(-1) >= lengths[unit].max())
        for micro_batch in np.flatnonzero(enough):
            rows = _rows_for(free[micro_batch].copy(), lengths[unit])
            if rows is not None:
                break
        if rows is None:
            return None
        for index, row in zip(unit, rows, strict=True):
            held[micro_batch, row] += 1
            start = shape.tokens - free[micro_batch, row]
            places[int(index)] = int(micro_batch * shape.rows + row), int(start), int(held[micro_batch, row])
            free[micro_batch, row] -= lengths[index]
    return places


def _rows_for(free: np.ndarray, lengths: np.ndarray) -> list[int] | None:
    """The first row with room for each sequence in turn; None where one finds none."""
    rows = []
    for length in lengths:
        rows.append(int(np.argmax(free >= length)))
        free[rows[-1]] -= length
    return rows if (free >= 0).all() else None


def padding_waste(batch: Batch, packed: Packed | None, filled: int = 0) -> float:
    """The share of token positions that the update computes and that hold no token; a shared prompt counts once.

    Args:
        filled: prompts of the batch, the last ones, that only fill it up; they are left out.
    """
    if packed is not None:
        computed = int(packed.count) * packed.segments[0].size
        return 1 - sequence_lengths(batch).sum().item() / computed if computed else 0.0
    completions = np.maximum(batch.completion_mask.sum(-1) - 1, 0).sum()
    if batch.trajectories is not None:
        return 1 - sequence_lengths(batch).sum().item() / batch.completions.size
    computed = (batch.prompts.size + batch.completions[:, 1:].size) * (1 - filled / len(batch.prompts))
    return 1 - (batch.prompt_mask.sum() - filled + completions).item() / computed
