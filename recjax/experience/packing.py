"""Packs the sequences of a batch end to end into rows, to save the update from padding. On the host, in NumPy."""

import itertools
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, UInt8

from recjax.config import Config
from recjax.experience.batch import Batch, Shape

TILE = 128  # accelerators compute attention in tiles of this many tokens
# By default a packed micro-batch has LEAST_TOKENS tokens per device, since smaller matmuls are slow, or the size of the
# padded batch over MOST_MICRO_BATCHES if that is more, since mainly the last micro-batch has empty positions.
LEAST_TOKENS = 2048
MOST_MICRO_BATCHES = 32


class RowShape(NamedTuple):
    """The shape of a packed micro-batch: `rows` rows of `tokens` tokens each."""

    rows: int
    tokens: int


class Packed(NamedTuple):
    """A batch in rows of equal length, as host arrays; a sequence is a prompt and one completion.

    Sequences in a row run a common beginning once: a row is a tree, written depth first. A token follows, for each
    smaller position, the latest token of that position.

    Shapes: `places` [batch, time], `count` scalar, all other fields [micro_batches, rows, row_tokens].

    positions, targets: position of each token in its sequences, and the token that follows it there.
    ends: index in the row after the last token that follows this token in a sequence; 0 at padding.
    places: index of the token that predicts each completion token, with all rows of all micro-batches end to end; -1 at
        padding and for completions without tokens.
    count: number of micro-batches with sequences; further micro-batches keep shapes equal from batch to batch.
    """

    tokens: np.ndarray
    positions: np.ndarray
    targets: np.ndarray
    ends: np.ndarray
    places: np.ndarray
    count: np.ndarray


class _Sequences(NamedTuple):
    """The sequence of each completion in a batch.

    tokens: whole sequences; all other fields are [batch].
    lengths: tokens to run: all but the last, which is only a target; 0 for completions without tokens.
    ranks: rank of each sequence in the order of their tokens, in which sequences that begin alike are neighbors.
    shared: by rank, the number of tokens that a sequence shares with its predecessor. The last common token is not
        shared, because different tokens may follow it.
    """

    tokens: list[np.ndarray]
    lengths: np.ndarray
    ranks: np.ndarray
    shared: np.ndarray

    def shared_with(self, index: int) -> Int[np.ndarray, " batch"]:
        """The number of tokens that each sequence shares with a given one."""
        rank = self.ranks[index]
        before = np.minimum.accumulate(self.shared[rank:0:-1])[::-1]
        after = np.minimum.accumulate(self.shared[rank + 1 :])
        return np.concatenate([before, self.lengths[[index]], after])[self.ranks]


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
    algorithm = config.algorithm.build()
    budget = config.training.tokens_per_micro_batch
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
        share: whether sequences in a row share their common beginning; if not, each sequence has its own copy, as the
            splash kernel and delta nets require.
        most: number of micro-batches, which doubles until all sequences fit; None: one row for each sequence.
        grow: double the number of rows in a micro-batch until it has room for all that goes together.
    Raises:
        ValueError: a micro-batch is too small for what goes together.
    """
    sequences = _sequences(batch, share)
    members = {}
    lengths = sequences.lengths
    groups = batch.group_ids
    for row in sorted(np.flatnonzero(lengths).tolist(), key=lambda row: -lengths[row]):
        members.setdefault(row if together is None else int(together[row]), []).append(row)
    # The largest groups come first, and in a group the longest sequences; sequences with a common prompt are adjacent.
    sizes = np.bincount(groups, lengths)[groups]
    units = sorted(members.values(), key=lambda unit: (-sizes[unit[0]], groups[unit[0]], -lengths[unit].sum()))
    for unit in units if together is not None else ():
        while _first_fit(sequences, [unit], shape, 1) is None:
            if not grow:
                raise ValueError(
                    f"training.tokens_per_micro_batch: a micro-batch has room for {shape.rows} rows of {shape.tokens}"
                    f" tokens, but rows of {', '.join(str(lengths[index]) for index in unit)} tokens belong"
                    f" to one {'trajectory' if together is batch.trajectories else 'group'}, which this algorithm reads"
                    " together; raise it"
                )
            shape = shape._replace(rows=2 * shape.rows)
    most = most or -(-len(batch.completions) // shape.rows)
    while (row_of := _first_fit(sequences, units, shape, most)) is None:
        most *= 2
    return _laid_out(batch, sequences, shape, most, row_of)


def _sequences(batch: Batch, share: bool) -> _Sequences:
    """The sequences of a batch; without `share` they share no tokens."""
    per_prompt = len(batch.completions) // len(batch.prompts)
    rows = range(len(batch.completions))
    prompts = [tokens[mask] for tokens, mask in zip(batch.prompts, batch.prompt_mask, strict=True)]
    completions = [tokens[mask] for tokens, mask in zip(batch.completions, batch.real_tokens, strict=True)]
    tokens = [np.concatenate([prompts[row // per_prompt], completions[row]]) for row in rows]
    order = sorted(rows, key=lambda row: tokens[row].astype(">i4").tobytes())
    shared = np.zeros(len(rows), int)

    def records(row: int) -> UInt8[np.ndarray, "tokens bytes"]:
        """The recorded arrays of each token of a sequence as bytes, 0 for tokens that the policy did not sample."""
        arrays = [np.ascontiguousarray(values[row]) for values in batch.recorded.values()]
        columns = np.concatenate([values.view(np.uint8).reshape(len(values), -1) for values in arrays], axis=1)
        columns[~batch.completion_mask[row]] = 0
        return np.pad(columns[batch.real_tokens[row]], ((len(prompts[row // per_prompt]), 0), (0, 0)))

    for rank, (row, other) in enumerate(itertools.pairwise(order), 1) if share else ():
        most = min(len(tokens[row]), len(tokens[other]))
        common = np.equal(*(tokens[each][:most] for each in (row, other)))
        if batch.recorded:
            common &= np.equal(*(records(each)[:most] for each in (row, other))).all(-1)
        shared[rank] = max((len(common) if common.all() else common.argmin()) - 1, 0)
    return _Sequences(tokens, sequence_lengths(batch), np.argsort(order), shared)


def _first_fit(sequences: _Sequences, units: list[list[int]], shape: RowShape, most: int) -> np.ndarray | None:
    """The row of each sequence, with the rows of all micro-batches end to end; None if the sequences do not fit.

    Each sequence goes where it takes the fewest tokens, so preferably next to sequences that begin alike.

    Args:
        most: number of micro-batches.
    """
    free = np.full(most * shape.rows, shape.tokens)
    row_of = np.full(len(sequences.lengths), -1)

    def needed(index: int) -> np.ndarray:
        """Tokens that a sequence takes in each row; more than a row has if it has no room."""
        placed = np.flatnonzero(row_of >= 0)
        shared = np.zeros(len(free), int)
        np.maximum.at(shared, row_of[placed], sequences.shared_with(index)[placed])
        tokens = sequences.lengths[index] - shared
        return np.where(tokens <= free, tokens, shape.tokens + 1)

    def fits(unit: list[int], rows: slice) -> bool:
        """Places a unit in a micro-batch, as far as there is room."""
        for index in unit:
            tokens = needed(index)[rows]
            row = int(tokens.argmin())
            if tokens[row] > shape.tokens:
                return False
            row_of[index] = rows.start + row
            free[rows.start + row] -= tokens[row]
        return True

    for unit in units:
        least = needed(unit[0]).reshape(most, -1).min(-1)
        for micro_batch in np.argsort(least, kind="stable"):
            before = free.copy(), row_of.copy()
            rows = slice(micro_batch * shape.rows, (micro_batch + 1) * shape.rows)
            if fits(unit, rows):
                break
            free[:], row_of[:] = before
        else:
            return None
    return row_of


def _laid_out(batch: Batch, sequences: _Sequences, shape: RowShape, most: int, row_of: np.ndarray) -> Packed:
    """The packed batch, with each sequence in its row from `_first_fit`."""
    tokens, positions, targets, ends = np.zeros((4, most * shape.rows, shape.tokens), np.int32)
    places = np.full(batch.completions.shape, -1, np.int32)
    of_completions = batch.real_tokens
    order = np.argsort(sequences.ranks)
    for row in np.unique(row_of[row_of >= 0]):
        # path: where the row runs the tokens of the latest sequence
        used = 0
        path = np.zeros(0, int)
        rank = -1
        for index in order[row_of[order] == row]:
            shared = sequences.shared[rank + 1 : sequences.ranks[index] + 1].min() if used else 0
            ends[row, path[shared:]] = used
            own = np.arange(shared, sequences.lengths[index])
            path = np.concatenate([path[:shared], used + own - shared])
            sequence = sequences.tokens[index]
            used = used + len(own)
            rank = sequences.ranks[index]
            for array, values in ((tokens, sequence[own]), (positions, own), (targets, sequence[own + 1])):
                array[row, path[own]] = values
            completion = of_completions[index]
            places[index, completion] = row * shape.tokens + path[len(path) - completion.sum() :]
        ends[row, path] = used
    count = np.array(row_of.max(initial=-1) // shape.rows + 1, np.int32)
    return Packed(*(x.reshape(most, *shape) for x in (tokens, positions, targets, ends)), places, count)
