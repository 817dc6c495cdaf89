"""The groups of a store as a sequence that reads each group on demand."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recjax.experience.group import Completion, Group
from recjax.experience.prepared import Rows, checksums
from recjax.experience.rows import group_of
from recjax.experience.store import to_rows

_TOGETHER = 32  # groups to read at a time when iterating over all

Change = Callable[[Group, int], Group]  # a group, and the number of its first completion → the changed group


class Index(NamedTuple):
    """Index of a store's groups. Groups are numbered by their first rows, and completions group by group.

    rows: row numbers, group by group.
    row_starts: start of each group in `rows`, and the end of the last group.
    heads: number of each completion's first row, group by group.
    starts: start of each group in `heads`, and the end of the last group.
    prompts: checksum of each group's prompt tokens.
    """

    rows: np.ndarray
    row_starts: np.ndarray
    heads: np.ndarray
    starts: np.ndarray
    prompts: np.ndarray


class StoredGroups(Sequence[Group]):
    """A sequence of some or all groups of a store; holds only an index in memory and reads groups on demand.

    Attributes:
        rows: rows of the store.
        index: index of all groups in the store.
        numbers: numbers of the groups in this sequence, in order.
    """

    def __init__(self, rows: Rows, index: Index, numbers: np.ndarray, changes: Sequence[Change] = ()):
        """Makes the sequence without reading any group.

        Args:
            changes: functions to apply to each group after reading it, in order.
        """
        self.rows, self.index, self.numbers, self._changes = rows, index, numbers, tuple(changes)

    def __len__(self) -> int:
        """The number of groups in the sequence."""
        return len(self.numbers)

    def __getitem__(self, place: int | np.integer | slice) -> "Group | StoredGroups":
        """Reads a group; for a slice, returns a shorter sequence without reading any group."""
        if isinstance(place, slice):
            return self.chosen(place)
        return self._read(self.numbers[[place]])[0]

    def __iter__(self) -> Iterator[Group]:
        """Iterates over all groups and reads them a few at a time."""
        for start in range(0, len(self), _TOGETHER):
            yield from self._read(self.numbers[start : start + _TOGETHER])

    def chosen(self, which: np.ndarray | slice) -> "StoredGroups":
        """Selects groups by a mask or a slice."""
        return StoredGroups(self.rows, self.index, self.numbers[which], self._changes)

    def changed(self, change: Change) -> "StoredGroups":
        """Adds a change to apply to every group; a change may alter or remove completions but not add any."""
        return StoredGroups(self.rows, self.index, self.numbers, (*self._changes, change))

    # --- Properties of the unchanged groups, available without reading whole groups.

    @property
    def sizes(self) -> np.ndarray:
        """The number of completions in each group."""
        return np.diff(self.index.starts)[self.numbers]

    @property
    def heads(self) -> np.ndarray:
        """The number of each completion's first row, group by group."""
        return self.index.heads[_ranges(self.index.starts[self.numbers], self.sizes)]

    @property
    def firsts(self) -> np.ndarray:
        """The number of each group's first row."""
        return self.index.rows[self.index.row_starts[self.numbers]]

    def any_in(self, flags: np.ndarray) -> np.ndarray:
        """Marks the groups with at least one flagged completion."""
        return np.logical_or.reduceat(flags, np.cumsum(self.sizes) - self.sizes)

    def columns(self, names: Sequence[str]) -> Iterator[tuple]:
        """Yields column values of each completion's first row, group by group; reads a few rows at a time."""
        rows, heads = self.rows.select(names), self.heads
        for start in range(0, len(heads), 32 * _TOGETHER):
            found = rows.at(heads[start : start + 32 * _TOGETHER])
            yield from zip(*(found[name].to_pylist() for name in names), strict=True)

    def _read(self, numbers: np.ndarray) -> list[Group]:
        counts = np.diff(self.index.row_starts)[numbers]
        places = self.index.rows[_ranges(self.index.row_starts[numbers], counts)]
        rows, groups = to_rows(self.rows.at(places)), []
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            own = list(itertools.islice(rows, count))
            group = group_of(own[0].group_id, own)
            for change in self._changes:
                group = change(group, int(self.index.starts[number]))
            groups.append(group)
        return groups


class ByPrompt(Mapping[bytes, list[Completion]]):
    """Mapping from prompt tokens to the completions of all groups with this prompt, read on demand.

    Excludes completions without a reward.
    """

    def __init__(self, groups: StoredGroups):
        """Sorts the groups by prompt without reading any group."""
        prompts = groups.index.prompts[groups.numbers]
        self._order = np.argsort(prompts, kind="stable")
        self._groups, self._prompts = groups, prompts[self._order]

    def __getitem__(self, prompt: bytes) -> list[Completion]:
        """The completions of a prompt."""
        found = list(itertools.chain.from_iterable(self._rewarded(prompt)))
        if not found:
            raise KeyError(prompt)
        return found

    def __contains__(self, prompt: object) -> bool:
        """True if the prompt has a completion."""
        return any(self._rewarded(prompt))

    def __iter__(self) -> Iterator[bytes]:
        """The prompts."""
        prompts = dict.fromkeys(group.prompt_tokens.tobytes() for group in self._groups)
        return filter(self.__contains__, prompts)

    def __len__(self) -> int:
        """The number of prompts."""
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        """True if there are any groups."""
        return len(self._groups) > 0

    def _rewarded(self, prompt: bytes) -> Iterator[list[Completion]]:
        """Yields the rewarded completions of each group with this prompt; reads one group at a time."""
        (checksum,) = checksums([prompt])
        begin, end = (np.searchsorted(self._prompts, checksum, side=side) for side in ("left", "right"))
        for place in self._order[begin:end]:
            group = self._groups[place]
            if group.prompt_tokens.tobytes() == prompt:
                yield [completion for completion in group.completions if completion.grade]


def groups_in(rows: Rows, store: str) -> StoredGroups:
    """All groups of a store, including pending rows.

    Raises:
        ValueError: a group with two prompts, or a trajectory whose first row does not come first.
    """
    number = rows.kinds("group_id")
    firsts = np.flatnonzero(np.diff(np.maximum.accumulate(number), prepend=-1))
    own = ~rows.each(is_missing, "trajectory")
    prompts = _prompts(rows, number, firsts, own, store)

    def is_first_row(trajectory: pa.StringArray, name: pa.StringArray) -> np.ndarray:
        return pc.fill_null(pc.equal(trajectory, name), True).to_numpy(zero_copy_only=False)

    is_head = rows.each(is_first_row, "trajectory", "id")
    order = np.argsort(number, kind="stable").astype(np.int32 if len(rows) < 2**31 else np.int64)
    heads = order if is_head.all() else order[is_head[order]]
    counts = (np.bincount(numbers, minlength=len(firsts)) for numbers in (number, number[is_head]))
    row_starts, starts = (np.concatenate([[0], np.cumsum(count)]) for count in counts)
    index = Index(order, row_starts, heads, starts, prompts)
    groups = StoredGroups(rows, index, np.arange(len(firsts), dtype=np.int32))
    with_trajectories = np.zeros(len(firsts), bool)
    with_trajectories[number[own]] = True
    for _ in groups.chosen(with_trajectories):
        pass  # reading a trajectory raises an error if its rows are not in order
    return groups


def _prompts(rows: Rows, number: np.ndarray, firsts: np.ndarray, own: np.ndarray, store: str) -> np.ndarray:
    """The checksum of each group's prompt tokens; raises an error if the rows of a group have different prompts.

    Args:
        number: group number of each row.
        firsts: number of each group's first row.
        own: mask of rows whose prompt is an agent's own context and not the group's prompt.
    """

    def of_tokens(column: pa.ListArray) -> np.ndarray:
        values, offsets = column.values.to_numpy(zero_copy_only=False), column.offsets.to_pylist()
        return checksums(values[begin:end] for begin, end in itertools.pairwise(offsets))

    found = rows.each(of_tokens, "prompt_tokens")
    prompts = found[firsts]
    two = np.flatnonzero((found != prompts[number]) & ~own)
    if len(two):
        row, first = (rows.select(["id", "group_id"]).at(one[:1]).to_pylist()[0] for one in (two, firsts[number[two]]))
        raise ValueError(
            f"{store}: group {row['group_id']!r}: rows {first['id']!r} and {row['id']!r} have different prompts, and"
            " all completions in a group must answer the same prompt; import the rows as separate groups"
        )
    return prompts


# --- Functions of columns for `Rows.each`.


def lengths(column: pa.ListArray) -> np.ndarray:
    """The number of items in each row."""
    return pc.list_value_length(column).to_numpy()


def is_missing(column: pa.Array) -> np.ndarray:
    """Marks the rows that are null."""
    return pc.is_null(column).to_numpy(zero_copy_only=False)


def has_unsampled(mask: pa.ListArray) -> np.ndarray:
    """Marks the rows with a token that the policy did not choose; every row needs at least one token."""
    return ~np.logical_and.reduceat(mask.values.to_numpy(zero_copy_only=False), mask.offsets.to_numpy()[:-1])


def _ranges(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Concatenates the ranges that begin at `starts` and have lengths `sizes`."""
    total = int(sizes.sum())
    dtype = np.int32 if max(total, starts.max(initial=0)) < 2**31 else np.int64
    places = np.repeat((starts - (np.cumsum(sizes) - sizes)).astype(dtype), sizes)
    places += np.arange(total, dtype=dtype)
    return places
