"""Packs the sequences of a batch end to end into rows, to save the update from padding. On the host, in NumPy."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from recjax.config import Config
from recjax.experience.batch import Batch, Shape

TILE = 128  # accelerators compute attention in tiles of this many tokens
# By default a packed micro-batch has LEAST_TOKENS tokens per device, since smaller matmuls are slow, or the size of the
# padded batch over MOST_MICRO_BATCHES if that is more, since mainly the last micro-batch has empty positions.
LEAST_TOKENS, MOST_MICRO_BATCHES = 2048, 32


class RowShape(NamedTuple):
    """The shape of a packed micro-batch: `rows` rows of `tokens` tokens each."""

    rows: int
    tokens: int


class Packed(NamedTuple):
    """A batch in rows of equal length, as host arrays; a sequence is a prompt and one completion.

    Shapes: `first` [micro_batches, batch], `count` scalar, all other fields [micro_batches, rows, row_tokens].

    positions, targets: position of each token in its own sequence, and the token that follows it.
    segments: number of each token's stretch within its row, from 1; 0 at padding. A stretch is a whole sequence, a
        prefix that completions of a prompt share, or the own tokens of a completion, from the last prompt token on.
    prefixes: segment of the shared prefix, for own tokens of a completion; for other tokens their own segment. None if
        all stretches are whole sequences.
    first: position in the micro-batch, rows end to end, where the target is the completion's first token; -1 in other
        micro-batches, and for completions without tokens.
    count: number of micro-batches with sequences; further micro-batches keep shapes equal from batch to batch.
    """

    tokens: np.ndarray
    positions: np.ndarray
    segments: np.ndarray
    targets: np.ndarray
    prefixes: np.ndarray | None
    first: np.ndarray
    count: np.ndarray


class _Sequences(NamedTuple):
    """The sequence of each completion in a batch: a prefix, which sequences with equal prefixes share, and own tokens.

    tokens: whole sequences; all other fields are [batch]. prefix: number of the prefix. before: length of the prefix.
    own: number of own tokens without the last, which is only a target; 0 for completions without tokens.
    """

    tokens: list[np.ndarray]
    prefix: np.ndarray
    before: np.ndarray
    own: np.ndarray


def row_shape(
    budget: int, longest: int, together: int = 1, multiple: int = 1, sequences: int | None = None
) -> RowShape:
    """The largest number of rows that fits a budget of tokens, and the row length.

    Attention cost grows with the square of the row length, so rows are hardly longer than the longest sequence.

    Args:
        budget: tokens of a micro-batch, see `training.tokens_per_micro_batch`.
        longest: tokens of the longest possible sequence.
        together: number of sequences of that length that must fit one micro-batch.
        multiple: divisor of the number of rows, for devices that share rows equally.
        sequences: number of sequences in the batch, which needs no more rows; None: any number.
    Raises:
        ValueError: the budget is too small.
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
    return RowShape(rows if sequences is None else min(rows, -(-sequences // multiple) * multiple), tokens)


def shape_for(config: Config, shape: Shape, multiple: int = 1) -> RowShape:
    """The row shape for `training.tokens_per_micro_batch` or its default, and batches of the given shape.

    By default, micro-batches are no larger than without packing, but have room for the longest sequence.

    Args:
        multiple: see `row_shape`.
    Raises:
        ValueError: the budget is too small for the longest sequence, or for all completions of a prompt if the
            algorithm compares them.
    """
    algorithm, budget = config.algorithm.build(), config.training.tokens_per_micro_batch
    if budget is None:
        most = shape.positions // config.micro_batches(shape.positions, multiple)
        budget = min(max(LEAST_TOKENS * multiple, shape.positions // MOST_MICRO_BATCHES), most)
        return row_shape(max(budget, shape.longest * multiple), shape.longest, 1, multiple, shape.rows)
    together = shape.group or 1 if algorithm.compares_completions else 1
    return row_shape(budget, shape.longest, together, multiple, shape.rows)


def sequence_lengths(batch: Batch) -> np.ndarray:
    """Row tokens of each completion with its prompt, without the last token, which is only a target; 0 if empty."""
    prompts = batch.prompt_mask.sum(-1).repeat(len(batch.completions) // len(batch.prompts))
    completions = batch.real_tokens.sum(-1)
    return np.where(batch.completion_mask.any(-1), prompts + completions - 1, 0)


def pack(
    batch: Batch,
    shape: RowShape,
    together: Int[np.ndarray, " batch"] | None = None,
    share: bool = True,
    *,
    most: int | None = None,
    grow: bool = False,
) -> Packed:
    """Packs a batch; each sequence stays within one row of a micro-batch.

    Args:
        batch: rows grouped by prompt, equally many per prompt; they may have no tokens.
        shape: shape of the micro-batches, whose rows have room for any of the sequences.
        together: a number for each row of the batch; rows with equal numbers go into one micro-batch. None: any.
        share: whether sequences in a row share a common prefix; if not, each sequence repeats the prefix, as attention
            kernels that support only segments require.
        most: number of micro-batches, which doubles until all sequences fit; None: one row for each sequence.
        grow: double the number of rows in a micro-batch until it has room for all that goes together.
    Raises:
        ValueError: a micro-batch is too small for what goes together.
    """
    sequences, rows = _sequences(batch, share), np.arange(len(batch.completions))
    units = rows[:, None] if together is None else [rows[together == each] for each in np.unique(together)]
    for unit in units if together is not None else ():
        while _first_fit(sequences, [unit], shape, 1) is None:
            if not grow:
                lengths = np.sort(sequence_lengths(batch)[unit])[::-1]
                raise ValueError(
                    f"training.tokens_per_micro_batch: a micro-batch has room for {shape.rows} rows of {shape.tokens}"
                    f" tokens, but rows of {', '.join(map(str, lengths[lengths > 0]))} tokens belong to one"
                    f" {'trajectory' if together is batch.trajectories else 'group'}, which this algorithm reads"
                    " together; raise it"
                )
            shape = shape._replace(rows=2 * shape.rows)
    most = most or -(-len(rows) // shape.rows)
    while (places := _first_fit(sequences, units, shape, most)) is None:
        most *= 2
    return _laid_out(batch, sequences, shape, most, places, share)


def _sequences(batch: Batch, share: bool) -> _Sequences:
    """Splits sequences: a prefix ends before the token that predicts the first sampled one; empty without `share`."""
    lengths = sequence_lengths(batch)
    per_prompt = len(batch.completions) // len(batch.prompts)
    prompts = batch.prompt_mask.sum(-1).repeat(per_prompt)
    before = np.where((lengths > 0) & share, prompts - 1 + batch.completion_mask.argmax(-1), 0)
    of_prompts = [tokens[mask] for tokens, mask in zip(batch.prompts, batch.prompt_mask, strict=True)]
    own = [tokens[mask] for tokens, mask in zip(batch.completions, batch.real_tokens, strict=True)]
    tokens = [np.concatenate([of_prompts[index // per_prompt], each]) for index, each in enumerate(own)]
    numbers = {}
    prefix = [
        numbers.setdefault(own[:count].tobytes(), len(numbers)) for own, count in zip(tokens, before, strict=True)
    ]
    return _Sequences(tokens, np.array(prefix), before, lengths - before)


def _laid_out(
    batch: Batch, sequences: _Sequences, shape: RowShape, most: int, places: dict[int, int], share: bool
) -> Packed:
    """The packed batch, with each sequence in its row from `_first_fit`."""
    rows, first = np.zeros((5, most * shape.rows, shape.tokens), np.int32), np.full((most, len(sequences.own)), -1)
    used, stretches = np.zeros((2, most * shape.rows), int)
    prefixes: dict[tuple[int, int], int] = {}

    def write(row: int, tokens: np.ndarray, position: int, prefix: int | None) -> int:
        """Appends a stretch to a row and returns its segment number."""
        start, length = used[row], len(tokens) - 1
        stretches[row] += 1
        used[row] += length
        own = int(stretches[row])
        laid = tokens[:-1], position + np.arange(length), np.full(length, own), tokens[1:]
        rows[:, row, start : start + length] = *laid, np.full(length, own if prefix is None else prefix)
        return own

    for index, row in places.items():
        sequence, before = sequences.tokens[index], int(sequences.before[index])
        shared = row, int(sequences.prefix[index])
        if before and shared not in prefixes:
            prefixes[shared] = write(row, sequence[: before + 1], 0, None)
        # The last prompt token predicts the first completion token.
        asked = len(sequence) - batch.real_tokens[index].sum() - 1
        first[row // shape.rows, index] = row % shape.rows * shape.tokens + used[row] + asked - before
        write(row, sequence[before:], before, prefixes.get(shared))
    count = max((row // shape.rows + 1 for row in places.values()), default=0)
    packed = Packed(*rows.reshape(5, most, *shape), first.astype(np.int32), np.array(count, np.int32))
    return packed if share else packed._replace(prefixes=None)


def _first_fit(
    sequences: _Sequences, units: Sequence[np.ndarray] | np.ndarray, shape: RowShape, most: int
) -> dict[int, int] | None:
    """The row of each non-empty sequence, in packing order, by first-fit decreasing; None if they do not fit.

    Sequences with the same prefix are placed consecutively, in a row that already has the prefix if there is room.

    Args:
        units: groups of sequence indices; each group goes into one micro-batch.
        most: number of micro-batches.
    """
    free = np.full((most, shape.rows), shape.tokens)
    held = np.zeros((most, shape.rows, sequences.prefix.max(initial=0) + 1), bool)
    by_prefix = np.bincount(sequences.prefix, sequences.own)
    largest = [max(sequences.prefix[unit], key=by_prefix.__getitem__) for unit in units]
    sizes = [(-by_prefix[own], own, -sequences.own[unit].sum()) for own, unit in zip(largest, units, strict=True)]
    places: dict[int, int] = {}
    for number in sorted(range(len(units)), key=sizes.__getitem__):
        unit = [index for index in map(int, units[number]) if sequences.own[index]]
        unit.sort(key=lambda index: -sequences.own[index])
        if not unit:
            continue
        needed = _needed(sequences, unit[0], held)
        cheapest = np.where(free >= needed, needed, shape.tokens + 1).min(-1)
        for micro_batch in np.argsort(cheapest, kind="stable"):
            if cheapest[micro_batch] > shape.tokens:
                return None
            left = free[micro_batch].copy(), held[micro_batch].copy()
            rows = _rows_for(sequences, unit, *left)
            if rows is not None:
                break
        else:
            return None
        free[micro_batch], held[micro_batch] = left
        places.update((int(index), int(micro_batch * shape.rows + row)) for index, row in zip(unit, rows, strict=True))
    return places


def _needed(sequences: _Sequences, index: int, held: np.ndarray) -> np.ndarray:
    """Tokens that a sequence would take in each row; `held` marks the prefixes that each row already has."""
    return sequences.own[index] + np.where(held[..., sequences.prefix[index]], 0, sequences.before[index])


def _rows_for(sequences: _Sequences, unit: Sequence[int], free: np.ndarray, held: np.ndarray) -> list[int] | None:
    """The row where each sequence takes fewest tokens; updates `free` and `held`. None if a sequence does not fit."""
    rows = []
    for index in unit:
        needed = _needed(sequences, index, held)
        row = int(np.argmin(np.where(free >= needed, needed, np.iinfo(int).max)))
        if free[row] < needed[row]:
            return None
        free[row] -= needed[row]
        held[row, sequences.prefix[index]] = True
        rows.append(row)
    return rows
