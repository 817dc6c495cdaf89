"""Sequences of a batch laid end to end in rows, so that the update spends nothing on padding. On the host, in NumPy."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from recjax.config import Config
from recjax.experience.batch import Batch, Shape

TILE = 128  # accelerators' attention works on so many tokens at a time


class RowShape(NamedTuple):
    """A micro-batch of packed sequences: this many rows of this many tokens."""

    rows: int
    tokens: int


class Packed(NamedTuple):
    """A batch's sequences, a prompt and one completion each, in rows of equal length; host arrays.

    Shapes: tokens, positions, segments, targets and prefixes [micro_batches, rows, row_tokens]; first
    [micro_batches, batch].

    positions count from the start of the token's own sequence; segments number the stretches of a row from 1 and are 0
    at padding; targets are the tokens that come next. A stretch is a whole sequence, or what completions of a prompt
    share, or what one of them has for itself, which then begins with the prompt's last token: prefixes are the
    segments that such tokens look back on, and their own elsewhere; None where all stretches are whole sequences.
    first is the place of each completion in its micro-batch, rows end to end: where the target is its first token. It
    is -1 in micro-batches that the completion is not in, and in all for completions without tokens. The first `count`
    micro-batches hold everything; the others make shapes equal from batch to batch.
    """

    tokens: np.ndarray
    positions: np.ndarray
    segments: np.ndarray
    targets: np.ndarray
    prefixes: np.ndarray | None
    first: np.ndarray
    count: np.ndarray


class _Sequences(NamedTuple):
    """What each completion of a batch takes of a row: a prefix, which those with the same one share, and its own rest.

    tokens: of the whole sequences. The others are [batch]. prefix: the number of the prefix; before: how many tokens it
    has; own: the other tokens, less the last, which is a target alone; 0 for completions without tokens.
    """

    tokens: list[np.ndarray]
    prefix: np.ndarray
    before: np.ndarray
    own: np.ndarray


def row_shape(
    budget: int, longest: int, together: int = 1, multiple: int = 1, sequences: int | None = None
) -> RowShape:
    """The most rows that a budget of tokens has room for, and their length.

    Attention costs the square of a row's length, so rows are hardly longer than the longest sequence.

    Args:
        budget: tokens of a micro-batch, `training.tokens_per_micro_batch`.
        longest: tokens of the longest sequence that there can be.
        together: sequences, each that long, that must fit one micro-batch.
        multiple: of the number of rows, for devices that share them equally.
        sequences: of the batch, which needs no more rows than that; None: any number.
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
    return RowShape(rows if sequences is None else min(rows, -(-sequences // multiple) * multiple), tokens)


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
    return row_shape(config.training.tokens_per_micro_batch, longest, together, multiple, sequences)


def sequence_lengths(batch: Batch) -> np.ndarray:
    """Tokens that each completion takes with its prompt; 0 without a completion. The last is a target alone."""
    prompts = batch.prompt_mask.sum(-1).repeat(len(batch.completions) // len(batch.prompts))
    completions = batch.real_tokens.sum(-1)
    return np.where(batch.completion_mask.any(-1), prompts + completions - 1, 0)


def pack(batch: Batch, shape: RowShape, whole_prompts: bool = False, share: bool = True) -> Packed:
    """Lays out a batch; no sequence is in more than one row.

    Args:
        batch: completions without gaps, grouped by prompt, the same number for each; they may have no token.
        shape: of the micro-batches, which holds any of the sequences.
        whole_prompts: all completions of a prompt go into one micro-batch, which a pairwise objective asks for.
        share: what sequences of a row begin with alike is in the row once; else once for each of them, which
            attention kernels want that know nothing but segments.
    """
    per_prompt, sequences = len(batch.completions) // len(batch.prompts), _sequences(batch, share)
    units = np.arange(len(batch.completions)).reshape(-1, per_prompt if whole_prompts else 1)
    most = len(batch.prompts) if whole_prompts else -(-len(batch.completions) // shape.rows)
    return _laid_out(batch, sequences, shape, most, _first_fit(sequences, units, shape, most), share)


def pack_trajectories(batch: Batch, shape: RowShape, together: bool, share: bool = True) -> Packed:
    """Lays out a batch of trajectories; where there is too little room the number of micro-batches doubles.

    Args:
        together: all rows of a trajectory go into one micro-batch.
        share: as for `pack`.
    Raises:
        ValueError: a micro-batch is too small for those of one.
    """
    sequences, rows = _sequences(batch, share), np.arange(len(batch.completions))
    units = [rows[batch.trajectories == one] for one in np.unique(batch.trajectories)] if together else rows[:, None]
    for unit in units if together else ():
        if _first_fit(sequences, [unit], shape, 1) is None:
            alone = np.sort(sequence_lengths(batch)[unit])[::-1]
            raise ValueError(
                f"training.tokens_per_micro_batch has room for {shape.rows} rows of {shape.tokens} tokens, and a"
                f" trajectory has rows of {', '.join(map(str, alone))}, which this algorithm reads together; raise it"
            )
    most = -(-len(rows) // shape.rows)
    while (places := _first_fit(sequences, units, shape, most)) is None:
        most *= 2
    return _laid_out(batch, sequences, shape, most, places, share)


def _sequence(batch: Batch, index: int) -> np.ndarray:
    """The tokens of a prompt and one of its completions."""
    prompt = index * len(batch.prompts) // len(batch.completions)
    asked = batch.prompts[prompt][batch.prompt_mask[prompt]]
    return np.concatenate([asked, batch.completions[index][batch.real_tokens[index]]])


def _sequences(batch: Batch, share: bool) -> _Sequences:
    """Prefixes are all tokens before the one that foretells the first sampled one; without `share`, none."""
    lengths = sequence_lengths(batch)
    prompts = batch.prompt_mask.sum(-1).repeat(len(batch.completions) // len(batch.prompts))
    before = np.where((lengths > 0) & share, prompts - 1 + batch.completion_mask.argmax(-1), 0)
    tokens, numbers = [_sequence(batch, index) for index in range(len(lengths))], {}
    prefix = [
        numbers.setdefault(own[:count].tobytes(), len(numbers)) for own, count in zip(tokens, before, strict=True)
    ]
    return _Sequences(tokens, np.array(prefix), before, lengths - before)


def _laid_out(
    batch: Batch, sequences: _Sequences, shape: RowShape, most: int, places: dict[int, int], share: bool
) -> Packed:
    """The sequences in their rows; see `_first_fit`."""
    rows, first = np.zeros((5, most * shape.rows, shape.tokens), np.int32), np.full((most, len(sequences.own)), -1)
    used, stretches = np.zeros((2, most * shape.rows), int)
    prefixes: dict[tuple[int, int], int] = {}

    def write(row: int, tokens: np.ndarray, position: int, prefix: int | None) -> int:
        """A stretch behind those that the row has; the number that it gets."""
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
        # The completion's first token is foretold by the prompt's last.
        asked = len(sequence) - batch.real_tokens[index].sum() - 1
        first[row // shape.rows, index] = row % shape.rows * shape.tokens + used[row] + asked - before
        write(row, sequence[before:], before, prefixes.get(shared))
    count = max((row // shape.rows + 1 for row in places.values()), default=0)
    packed = Packed(*rows.reshape(5, most, *shape), first.astype(np.int32), np.array(count, np.int32))
    return packed if share else packed._replace(prefixes=None)


def _first_fit(
    sequences: _Sequences, units: Sequence[np.ndarray] | np.ndarray, shape: RowShape, most: int
) -> dict[int, int] | None:
    """The row of each sequence with tokens, in the order they are laid in, by first-fit decreasing; None without room.

    Sequences of a prefix come one after the other, and go where it already is, if there is room.

    Args:
        units: sequences that go into one micro-batch each.
        most: micro-batches.
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
    """Tokens that a sequence takes of each row, whose prefixes are in `held`."""
    return sequences.own[index] + np.where(held[..., sequences.prefix[index]], 0, sequences.before[index])


def _rows_for(sequences: _Sequences, unit: Sequence[int], free: np.ndarray, held: np.ndarray) -> list[int] | None:
    """The row where each sequence takes least, written into `free` and `held`; None where one finds none."""
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


def padding_waste(batch: Batch, packed: Packed | None, filled: int = 0) -> float:
    """The share of token positions that the update computes and that hold no token; a shared prompt counts once.

    Args:
        filled: prompts of the batch, the last ones, that only fill it up; they are left out.
    """
    if packed is not None:
        computed = packed.segments[: packed.count]
        return 1 - (computed > 0).mean().item() if computed.size else 0.0
    completions = np.maximum(batch.completion_mask.sum(-1) - 1, 0).sum()
    if batch.trajectories is not None:
        return 1 - sequence_lengths(batch).sum().item() / batch.completions.size
    computed = (batch.prompts.size + batch.completions[:, 1:].size) * (1 - filled / len(batch.prompts))
    return 1 - (batch.prompt_mask.sum() - filled + completions).item() / computed
