"""Packs the sequences of a batch end to end into rows, to save the update from padding. On the host, in NumPy."""

import bisect
import itertools
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, UInt8

from recjax.config import Config
from recjax.config.schema import MICRO_BATCH_TOKENS
from recjax.errors import UserError
from recjax.experience.batch import Batch, Shape

TILE = 128  # accelerators compute attention in tiles of this many tokens
# By default a packed micro-batch has LEAST_TOKENS tokens per device, since smaller matmuls are slow, or the size of the
# padded batch over MOST_MICRO_BATCHES if that is more, since mainly the last micro-batch has empty positions.
LEAST_TOKENS = 2048
MOST_MICRO_BATCHES = 32
# By default, larger groups are packed: padded, the smallest micro-batch is a prompt with its group, and attention over
# whole completions keeps memory that grows with the square of their length for each.
LARGEST_GROUP = 4 * MICRO_BATCH_TOKENS
WINDOW = 32  # tokens that are compared at once
MOST_CLUSTERED = 256  # sequences of a cluster; all pairs are compared


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

    tokens: Any
    positions: Any
    targets: Any
    ends: Any
    places: Any
    count: Any


class _Sequences(NamedTuple):
    """The sequence of each completion in a batch.

    tokens: whole sequences, end to end in the order of the batch.
    starts: start of each sequence in `tokens`, [batch].
    lengths: tokens to run: all but the last, which is only a target; 0 for completions without tokens; [batch].
    ranks: rank of each sequence in the order of their tokens, in which sequences that begin alike are neighbors;
        [batch].
    shared: by rank, the number of tokens that a sequence shares with its predecessor. The last common token is not
        shared, because different tokens may follow it.
    bounds: see `_cluster_bounds`.
    """

    tokens: Int[np.ndarray, " tokens"]
    starts: Int[np.ndarray, " batch"]
    lengths: Int[np.ndarray, " batch"]
    ranks: Int[np.ndarray, " batch"]
    shared: Int[np.ndarray, " batch"]
    bounds: list[int]


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
        UserError: the budget is too small.
    """
    rows = budget // longest // multiple * multiple
    tokens = budget // max(rows, 1)
    in_tiles = tokens // TILE * TILE
    if in_tiles >= longest:
        tokens = in_tiles
    if rows * (tokens // longest) < together:
        enough = longest * -(-together // multiple) * multiple
        room = f"{longest} tokens"
        if together > 1:
            room = f"{together} of the longest sequences, {longest} tokens each"
        sharing = ""
        if multiple > 1:
            sharing = f" on each of {multiple} devices"
        raise UserError(
            "training.tokens_per_micro_batch",
            f"a micro-batch must have room for {room}{sharing}",
            f"raise it to {enough} or more, or lower rollout.max_prompt_tokens or rollout.max_completion_tokens",
            value=budget,
        )
    if sequences is not None:
        rows = min(rows, -(-sequences // multiple) * multiple)
    return RowShape(rows, tokens)


def is_packed(config: Config, shape: Shape) -> bool:
    """True if every batch of a shape is packed; other batches are packed only if that is much less work.

    Args:
        shape: shape of an update's rows.
    """
    if config.training.tokens_per_micro_batch is not None or config.has_trajectories or shape.group is None:
        return True
    if config.training.micro_batch_prompts:
        return False
    # Packed, sequences that an algorithm compares would need a micro-batch as large as without packing.
    if config.algorithm.build().compares_completions:
        return False
    # A teacher's prompts differ within a group, so their tokens have other places in packed rows.
    if config.task.teacher_template is not None:
        return False
    return shape.positions // shape.prompts > LARGEST_GROUP


def shape_for(config: Config, shape: Shape, multiple: int = 1) -> RowShape:
    """The row shape for `training.tokens_per_micro_batch` or its default, and batches of the given shape.

    By default, micro-batches are no larger than without packing, and those of large groups no larger than
    `MICRO_BATCH_TOKENS` on each device, but they have room for the longest sequence.

    Args:
        multiple: see `row_shape`.
    Raises:
        UserError: the budget is too small for the longest sequence, or for all completions of a prompt if the
            algorithm compares them.
    """
    algorithm = config.algorithm.build()
    budget = config.training.tokens_per_micro_batch
    if budget is None:
        most = shape.positions // config.micro_batches(shape.positions, multiple)
        if is_packed(config, shape) and shape.group is not None:
            most = MICRO_BATCH_TOKENS * multiple
        budget = max(LEAST_TOKENS * multiple, shape.positions // MOST_MICRO_BATCHES)
        budget = min(budget, most)
        budget = max(budget, shape.longest * multiple)
        return row_shape(budget, shape.longest, together=1, multiple=multiple, sequences=shape.rows)
    together = 1
    if algorithm.compares_completions and shape.group is not None:
        together = shape.group
    return row_shape(budget, shape.longest, together=together, multiple=multiple, sequences=shape.rows)


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
        UserError: a micro-batch is too small for what goes together.
    """
    sequences = _sequences(batch, share)
    units = _units(sequences.lengths, batch.group_ids, together)
    if together is not None:
        unit_name = "group"
        if together is batch.trajectories:
            unit_name = "trajectory"
        shape = _shape_for_units(sequences, units, shape, grow, unit_name)
    if most is None:
        most = -(-len(batch.completions) // shape.rows)
    row_numbers = _first_fit(sequences, units, shape, most)
    while row_numbers is None:
        most *= 2
        row_numbers = _first_fit(sequences, units, shape, most)
    return _laid_out(batch, sequences, shape, most, row_numbers)


def _shape_for_units(
    sequences: _Sequences, units: list[list[int]], shape: RowShape, grow: bool, unit_name: str
) -> RowShape:
    """The shape, with its rows doubled until each unit fits one micro-batch.

    Args:
        grow: whether the rows may double.
        unit_name: word for a unit in the error.
    Raises:
        UserError: a unit does not fit.
    """
    lengths = sequences.lengths
    for unit in units:
        # Each row has space for some of the longest sequences, so most units fit without a look at their sequences.
        while shape.rows * (shape.tokens // lengths[unit[0]]) < len(unit):
            if _first_fit(sequences, [unit], shape, 1) is not None:
                break
            if not grow:
                unit_lengths = ", ".join(str(lengths[index]) for index in unit)
                raise UserError(
                    "training.tokens_per_micro_batch",
                    f"a micro-batch has room for {shape.rows} rows of {shape.tokens} tokens, but rows of"
                    f" {unit_lengths} tokens belong to one {unit_name}, which this algorithm reads together",
                    "raise it",
                )
            shape = shape._replace(rows=2 * shape.rows)
    return shape


def _units(lengths: np.ndarray, groups: np.ndarray, together: np.ndarray | None) -> list[list[int]]:
    """Sequences that go into one micro-batch, longest first, in the order in which they are placed.

    The largest groups come first, and in a group the longest sequences; sequences with a common prompt are adjacent.
    """
    order = np.argsort(-lengths, kind="stable")[: np.count_nonzero(lengths)]  # sequences with tokens, longest first
    unit_ids = np.arange(len(lengths))
    if together is not None:
        unit_ids = np.asarray(together)
    # `firsts` has the index in `order` of each unit's longest sequence, and `unit_of` the unit of each sequence.
    _, firsts, unit_of, counts = np.unique(unit_ids[order], return_index=True, return_inverse=True, return_counts=True)
    unit_groups = groups[order[firsts]]
    unit_tokens = np.bincount(unit_of, lengths[order])
    group_tokens = np.bincount(groups, lengths)[unit_groups]
    # The last key counts most: the group's tokens, the group, the unit's tokens, the unit's longest sequence.
    unit_order = np.lexsort((firsts, -unit_tokens, unit_groups, -group_tokens))
    by_unit = order[np.argsort(unit_of, kind="stable")].tolist()
    ends = counts.cumsum()
    starts = ends - counts
    units = []
    for unit in unit_order.tolist():
        units.append(by_unit[starts[unit] : ends[unit]])
    return units


def _sequences(batch: Batch, share: bool) -> _Sequences:
    """The sequences of a batch; without `share` they share no tokens."""
    count = len(batch.completions)
    per_prompt = count // len(batch.prompts)
    prompt_masks = batch.prompt_mask.repeat(per_prompt, axis=0)
    prompts = batch.prompts.repeat(per_prompt, axis=0)
    real = np.concatenate([prompt_masks, batch.real_tokens], axis=1)
    tokens = np.concatenate([prompts, batch.completions], axis=1)[real]
    sizes = real.sum(-1)
    ends = sizes.cumsum()
    starts = ends - sizes
    # Bytes of big-endian numbers compare like the numbers.
    all_bytes = tokens.astype(">i4").tobytes()
    keys = [all_bytes[4 * start : 4 * end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
    order = np.array(sorted(range(count), key=keys.__getitem__), int)
    shared = np.zeros(count, int)
    if share:
        common = _common(tokens, starts[order], sizes[order])
        if batch.recorded:
            _end_at_other_records(common, batch, order)
        shared[1:] = np.maximum(common - 1, 0)
    ranks = np.empty(count, int)
    ranks[order] = np.arange(count)
    # Mostly, a cluster is a group, whose sequences have a prompt of their own in common.
    largest_group = int(np.bincount(batch.group_ids).max())
    bounds = _cluster_bounds(shared, min(largest_group, MOST_CLUSTERED))
    return _Sequences(
        tokens=tokens,
        starts=starts,
        lengths=sequence_lengths(batch),
        ranks=ranks,
        shared=shared,
        bounds=bounds,
    )


def _common(tokens: np.ndarray, starts: np.ndarray, sizes: np.ndarray) -> Int[np.ndarray, " pairs"]:
    """The number of first tokens that each sequence but the first has in common with the sequence before."""
    shorter = np.minimum(sizes[1:], sizes[:-1])
    common = np.zeros(len(shorter), int)
    pairs = np.flatnonzero(shorter)  # pairs that are still equal up to `common`
    # Most pairs differ after a few tokens, so few are compared to their ends.
    while len(pairs):
        offsets = common[pairs, None] + np.arange(WINDOW)
        inside = offsets < shorter[pairs, None]
        windows = tokens[np.where(inside, starts[1:][pairs, None] + offsets, 0)]
        windows_before = tokens[np.where(inside, starts[:-1][pairs, None] + offsets, 0)]
        differs = ~inside | (windows != windows_before)
        equal = np.where(differs.any(-1), differs.argmax(-1), WINDOW)
        common[pairs] += equal
        pairs = pairs[equal == WINDOW]
    return common


def _end_at_other_records(common: np.ndarray, batch: Batch, order: np.ndarray) -> None:
    """Reduces common tokens of neighbors in `order` to those whose recorded arrays are equal too."""
    prompts = batch.prompt_mask.sum(-1).repeat(len(batch.completions) // len(batch.prompts))

    def records(row: int) -> UInt8[np.ndarray, "tokens bytes"]:
        """The recorded arrays of each token of a sequence as bytes, 0 for tokens that the policy did not sample."""
        byte_arrays = []
        for values in batch.recorded.values():
            row_values = np.ascontiguousarray(values[row])
            byte_arrays.append(row_values.view(np.uint8).reshape(len(row_values), -1))
        columns = np.concatenate(byte_arrays, axis=1)
        columns[~batch.completion_mask[row]] = 0
        return np.pad(columns[batch.real_tokens[row]], ((prompts[row], 0), (0, 0)))

    # Prompts have no records, so pairs that differ in their prompts need no look.
    shorter_prompts = np.minimum(prompts[order[1:]], prompts[order[:-1]])
    for pair in np.flatnonzero(common > shorter_prompts):
        first = records(order[pair])[: common[pair]]
        second = records(order[pair + 1])[: common[pair]]
        differs = (first != second).any(-1)
        if differs.any():
            common[pair] = differs.argmax()


class _Rows:
    """The rows of all micro-batches, end to end, while sequences are placed.

    Sequences of a cluster share equally many tokens with any sequence outside it, so these numbers are computed once
    for all of them.
    """

    def __init__(self, sequences: _Sequences, shape: RowShape, micro_batches: int):
        """Creates empty micro-batches."""
        self._lengths = sequences.lengths.tolist()
        self._ranks = sequences.ranks.tolist()
        self._shared = sequences.shared
        self._tokens = shape.tokens
        self._bounds = sequences.bounds
        self._row_at = np.full(len(self._ranks), -1)  # by rank
        self.used = 0  # number of rows up to the last one with a sequence
        # All sequences share this number of tokens; only neighbors between two such places share more.
        self._common = int(self._shared[1:].min(initial=shape.tokens))
        self._cuts = np.flatnonzero(self._shared <= self._common).tolist()
        self._cuts.append(len(self._ranks))
        # Free tokens of each row, also as a list, from which Python reads single numbers sooner.
        self._free = np.full(micro_batches * shape.rows, shape.tokens, np.int32)
        self._free_list = self._free.tolist()
        # The current cluster: tokens that it shares with sequences outside it in each row; the longest sequence that
        # fits a row if it shares these tokens; tokens that two members share; the row of each placed member.
        self._shares = np.zeros_like(self._free)
        self._room = self._free.copy()
        self._cluster = range(0)
        self._pairs: list[list[int]] = []
        self._members: dict[int, int] = {}

    @property
    def row_of(self) -> Int[np.ndarray, " batch"]:
        """The row of each sequence of the batch; -1 without one."""
        return self._row_at[self._ranks]

    def needed(self, index: int, rows: slice) -> Int[np.ndarray, " rows"]:
        """Tokens that a sequence takes in each row; more than a row has if it has no room."""
        pairs = self._look_at(index)
        shares = self._shares[rows].copy()
        for member, row in self._members.items():
            if rows.start <= row < rows.stop:
                shares[row - rows.start] = max(shares[row - rows.start], pairs[member])
        tokens = self._lengths[index] - shares
        return np.where(tokens <= self._free[rows], tokens, self._tokens + 1)

    def place(self, index: int, rows: slice) -> bool:
        """Places a sequence in the first row where it takes the fewest tokens; False if no row has room."""
        pairs = self._look_at(index)
        length = self._lengths[index]
        free = self._free_list
        most_shared = -1
        best = -1
        for member, row in self._members.items():
            share = pairs[member]
            if length <= free[row] + share and rows.start <= row < rows.stop:
                if share > most_shared or (share == most_shared and row < best):
                    most_shared = share
                    best = row
        # With its own members, a cluster shares more than with any other sequence.
        if best < 0:
            enough = np.flatnonzero(self._room[rows] >= length)
            if not len(enough):
                return False
            best = rows.start + int(enough[self._shares[rows][enough].argmax()])
            most_shared = int(self._shares[best])
        free[best] -= length - most_shared
        self._free[best] = free[best]
        self._room[best] = free[best] + self._shares[best]
        rank = self._ranks[index]
        self._row_at[rank] = best
        self._members[rank - self._cluster.start] = best
        self.used = max(self.used, best + 1)
        return True

    def place_all(self, indices: list[int], rows: slice) -> bool:
        """Places sequences in these rows; False and no change if the rows have no room."""
        before = self._free[rows].copy()
        used = self.used
        for count, index in enumerate(indices):
            if not self.place(index, rows):
                self._row_at[[self._ranks[placed] for placed in indices[:count]]] = -1
                self._free[rows] = before
                self._free_list[rows] = before.tolist()
                self._shares[rows] = 0
                self._room[rows] = before
                self.used = used
                self._cluster = range(0)
                return False
        return True

    def _look_at(self, index: int) -> list[int]:
        """Makes the cluster of a sequence the current one; returns the tokens shared with each of its members."""
        rank = self._ranks[index]
        if rank not in self._cluster:
            number = bisect.bisect_right(self._bounds, rank)
            self._cluster = range(self._bounds[number - 1], self._bounds[number])
            self._enter(self._cluster.start, self._cluster.stop)
        return self._pairs[rank - self._cluster.start]

    def _enter(self, first: int, end: int) -> None:
        """Computes the tokens that a cluster shares with each row, and those that its members share."""
        rows = slice(0, self.used + 1)
        self._shares[rows] = np.where(self._free[rows] < self._tokens, self._common, 0)
        number = bisect.bisect_right(self._cuts, first)
        earliest = self._cuts[number - 1]
        latest = self._cuts[number]
        # Neighbors before the cluster, from the nearest on, then those after it.
        self._add_shares(self._shared[first:earliest:-1], self._row_at[earliest:first][::-1])
        self._add_shares(self._shared[end:latest], self._row_at[end:latest])
        self._room[rows] = self._free[rows] + self._shares[rows]
        self._members = {}
        self._pairs = [[0]]
        if end - first > 1:
            row_at = self._row_at[first:end].tolist()
            self._members = {member: row for member, row in enumerate(row_at) if row >= 0}
            # Two members share the lowest number of tokens that any neighbors from the one to the other share.
            members = np.arange(end - first)
            is_later = members > members[:, None]
            pairs = np.minimum.accumulate(np.where(is_later, self._shared[first:end], self._tokens), axis=1)
            self._pairs = np.where(is_later, pairs, pairs.T).tolist()

    def _add_shares(self, shared: np.ndarray, row_at: np.ndarray) -> None:
        """Raises the shares of rows with neighbors of the cluster; `shared` is between one neighbor and the next."""
        is_placed = row_at >= 0
        if is_placed.any():
            np.maximum.at(self._shares, row_at[is_placed], np.minimum.accumulate(shared)[is_placed])


def _cluster_bounds(shared: Int[np.ndarray, " batch"], most: int) -> list[int]:
    """The first ranks of clusters and the number of ranks.

    A cluster has at most `most` sequences, which share more with each other than with any other sequence, or a single
    sequence.
    """
    clusters = []
    waiting = [(0, len(shared))]
    while waiting:
        first, end = waiting.pop()
        if end - first <= most:
            clusters.append(first)
            continue
        inner = shared[first + 1 : end]
        cuts = (np.flatnonzero(inner == inner.min()) + first + 1).tolist()
        waiting += itertools.pairwise([first, *cuts, end])
    clusters.sort()
    clusters.append(len(shared))
    return clusters


def _first_fit(sequences: _Sequences, units: list[list[int]], shape: RowShape, micro_batches: int) -> np.ndarray | None:
    """Row number of each sequence, counted over all micro-batches; None if the sequences do not fit.

    Each sequence goes where it takes the fewest tokens, so preferably next to sequences that begin alike.

    Args:
        micro_batches: number of micro-batches.
    """
    rows = _Rows(sequences, shape, micro_batches)
    for unit in units:
        # All rows after the first empty one are empty too, and sequences go into the first of equal rows.
        if len(unit) == 1:
            if not rows.place(unit[0], slice(0, rows.used + 1)):
                return None
            continue
        started = -(-rows.used // shape.rows)
        tried = min(started + 1, micro_batches)
        needed = rows.needed(unit[0], slice(0, tried * shape.rows)).reshape(tried, -1)
        for micro_batch in np.argsort(needed.min(-1), kind="stable"):
            first_row = micro_batch * shape.rows
            if rows.place_all(unit, slice(first_row, first_row + shape.rows)):
                break
        else:
            return None
    return rows.row_of


def _spans(starts: np.ndarray, counts: np.ndarray) -> Int[np.ndarray, " total"]:
    """The numbers from each start on, as many as its count, end to end."""
    ends = counts.cumsum()
    return np.arange(counts.sum()) + np.repeat(starts - ends + counts, counts)


def _lowest(values: np.ndarray, firsts: np.ndarray, lasts: np.ndarray) -> np.ndarray:
    """The minimum of the values from each first index to its last."""
    # A sparse table: minima of 1, 2, 4, … values from each index on. Two of them cover any range.
    minima = [values]
    while 2 ** len(minima) <= len(values):
        half = 2 ** (len(minima) - 1)
        minima.append(np.minimum(minima[-1][:-half], minima[-1][half:]))
    _, exponents = np.frexp(lasts - firsts + 1)
    levels = exponents - 1  # log2 of the range's size, rounded down
    lowest = np.empty(len(firsts), values.dtype)
    for level in np.unique(levels):
        chosen = levels == level
        from_first = minima[level][firsts[chosen]]
        to_last = minima[level][lasts[chosen] - 2**level + 1]
        lowest[chosen] = np.minimum(from_first, to_last)
    return lowest


def _laid_out(
    batch: Batch, sequences: _Sequences, shape: RowShape, micro_batches: int, row_numbers: np.ndarray
) -> Packed:
    """The packed batch, with each sequence in its row from `_first_fit`."""
    tokens, positions, targets, ends = np.zeros((4, micro_batches * shape.rows * shape.tokens), np.int32)
    places = np.full(batch.completions.shape, -1, np.int32)

    # The arrays below have an element for each placed sequence: row by row, and by rank within a row.
    placed = np.flatnonzero(row_numbers >= 0)
    placed = placed[np.lexsort((sequences.ranks[placed], row_numbers[placed]))]
    rows = row_numbers[placed]
    ranks = sequences.ranks[placed]
    lengths = sequences.lengths[placed]
    is_first = np.diff(rows, prepend=-1) > 0  # True for the first sequence of a row
    firsts = np.flatnonzero(is_first)
    counts = np.diff(firsts, append=len(rows))  # sequences of each row

    # Two sequences share the lowest number of tokens that any neighbors from the one to the other share.
    next_rank = np.roll(ranks, 1) + 1  # the rank after that of the row's previous sequence
    first_ranks = np.where(is_first, ranks, next_rank)
    shared = np.where(is_first, 0, _lowest(sequences.shared, first_ranks, ranks))
    added = lengths - shared
    # The index of a sequence's first added token, with all rows end to end.
    starts = added.cumsum() - added
    starts += np.repeat(rows[firsts] * shape.tokens - starts[firsts], counts)
    indices = _spans(starts, added)
    sources = _spans(sequences.starts[placed] + shared, added)
    tokens[indices] = sequences.tokens[sources]
    positions[indices] = _spans(shared, added)
    targets[indices] = sequences.tokens[sources + 1]

    # Walks through all rows together: the first sequence of each row, then the second of each, and so on. The path of a
    # row has the index of each token of its latest sequence; `paths` has the paths of all rows, end to end.
    longest = lengths.max(initial=0)
    paths = np.zeros(len(firsts) * longest, int)
    path_starts = np.repeat(np.arange(len(firsts)), counts) * longest
    completion_lengths = batch.real_tokens.sum(-1)
    completion_starts = completion_lengths.cumsum() - completion_lengths
    completion_tokens = np.flatnonzero(batch.real_tokens)  # indices in `places`, with all completions end to end
    number_in_row = np.arange(len(rows)) - np.repeat(firsts, counts)  # number of the sequence in its row, from 0
    by_number = np.argsort(number_in_row, kind="stable")
    for now in np.split(by_number, np.bincount(number_in_row).cumsum()[:-1]):
        if not is_first[now].all():
            # No later sequence of the row has the tokens of the previous sequence after the shared ones.
            dropped = lengths[now - 1] - shared[now]
            dropped_tokens = paths[_spans(path_starts[now] + shared[now], dropped)]
            ends[dropped_tokens] = np.repeat(starts[now] % shape.tokens, dropped)
        paths[_spans(path_starts[now] + shared[now], added[now])] = _spans(starts[now], added[now])
        # The last tokens of a path predict the tokens of its completion.
        count = completion_lengths[placed[now]]
        predicting = paths[_spans(path_starts[now] + lengths[now] - count, count)]
        predicted = completion_tokens[_spans(completion_starts[placed[now]], count)]
        places.reshape(-1)[predicted] = predicting
    # The tokens of a row's last sequence end where the row's tokens end.
    lasts = firsts + counts - 1
    row_ends = (starts[lasts] + added[lasts] - 1) % shape.tokens + 1
    ends[paths[_spans(path_starts[lasts], lengths[lasts])]] = np.repeat(row_ends, lengths[lasts])

    size = micro_batches, shape.rows, shape.tokens
    used_micro_batches = row_numbers.max(initial=-1) // shape.rows + 1
    return Packed(
        tokens=tokens.reshape(size),
        positions=positions.reshape(size),
        targets=targets.reshape(size),
        ends=ends.reshape(size),
        places=places,
        count=np.array(used_micro_batches, np.int32),
    )
