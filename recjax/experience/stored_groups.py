"""The groups of a store as a sequence of which only those that are asked for are read."""

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

_TOGETHER = 32  # groups that are read at one time where all are

Change = Callable[[Group, int], Group]  # a group, and the number of its first completion → what stands for the group


class Index(NamedTuple):
    """Where a store's groups are. Groups are numbered in the order of their first rows, completions group by group.

    rows: row numbers, group by group.
    row_starts: of each group in `rows`, and their end.
    heads: the first row of each completion.
    starts: of each group in `heads`, and their end.
    prompts: a checksum of each group's prompt tokens.
    """

    rows: np.ndarray
    row_starts: np.ndarray
    heads: np.ndarray
    starts: np.ndarray
    prompts: np.ndarray


class StoredGroups(Sequence[Group]):
    """Groups of a store, some or all, each of which is read when it is asked for; what is held is an index of numbers.

    Attributes:
        rows: of the store.
        index: of all its groups.
        numbers: of those groups that are in the sequence, in its order.
    """

    def __init__(self, rows: Rows, index: Index, numbers: np.ndarray, changes: Sequence[Change] = ()):
        """Reads nothing yet.

        Args:
            changes: what is done to a group that was read, one after the other.
        """
        self.rows, self.index, self.numbers, self._changes = rows, index, numbers, tuple(changes)

    def __len__(self) -> int:
        """How many groups there are."""
        return len(self.numbers)

    def __getitem__(self, place: int | np.integer | slice) -> "Group | StoredGroups":
        """A group, which is read now; or a part of the sequence, of which nothing is."""
        if isinstance(place, slice):
            return self.chosen(place)
        return self._read(self.numbers[[place]])[0]

    def __iter__(self) -> Iterator[Group]:
        """All groups, read by and by."""
        for start in range(0, len(self), _TOGETHER):
            yield from self._read(self.numbers[start : start + _TOGETHER])

    def chosen(self, which: np.ndarray | slice) -> "StoredGroups":
        """Some of the groups: those where an array of bools is True, or at the places of a slice."""
        return StoredGroups(self.rows, self.index, self.numbers[which], self._changes)

    def changed(self, change: Change) -> "StoredGroups":
        """The same groups with a further change; it alters or drops completions, and adds none."""
        return StoredGroups(self.rows, self.index, self.numbers, (*self._changes, change))

    # --- What is known of the groups, as they are in the store, without reading them whole.

    @property
    def sizes(self) -> np.ndarray:
        """Completions of each group."""
        return np.diff(self.index.starts)[self.numbers]

    @property
    def heads(self) -> np.ndarray:
        """The first row of each completion, group by group."""
        return self.index.heads[_ranges(self.index.starts[self.numbers], self.sizes)]

    @property
    def firsts(self) -> np.ndarray:
        """The first row of each group."""
        return self.index.rows[self.index.row_starts[self.numbers]]

    def any_in(self, flags: np.ndarray) -> np.ndarray:
        """For each group, whether any of its completions has its flag set."""
        return np.logical_or.reduceat(flags, np.cumsum(self.sizes) - self.sizes)

    def columns(self, names: Sequence[str]) -> Iterator[tuple]:
        """Values of the first row of each completion, group by group, read by and by."""
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
    """Completions by the tokens of their prompt, whatever group they are of; read when they are asked for.

    Those without a reward are left out.
    """

    def __init__(self, groups: StoredGroups):
        """Reads nothing yet."""
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
        """Whether there is a completion of a prompt."""
        return any(self._rewarded(prompt))

    def __iter__(self) -> Iterator[bytes]:
        """The prompts."""
        prompts = dict.fromkeys(group.prompt_tokens.tobytes() for group in self._groups)
        return filter(self.__contains__, prompts)

    def __len__(self) -> int:
        """How many prompts there are."""
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        """Whether there are any groups."""
        return len(self._groups) > 0

    def _rewarded(self, prompt: bytes) -> Iterator[list[Completion]]:
        """The completions with a reward of each group that has this prompt, which is read when its turn comes."""
        (checksum,) = checksums([prompt])
        begin, end = (np.searchsorted(self._prompts, checksum, side=side) for side in ("left", "right"))
        for place in self._order[begin:end]:
            group = self._groups[place]
            if group.prompt_tokens.tobytes() == prompt:
                yield [completion for completion in group.completions if completion.grade]


def groups_in(rows: Rows, store: str) -> StoredGroups:
    """All groups of a store, pending rows among them.

    Raises:
        ValueError: a group with two prompts, or a trajectory whose first row is not before the others.
    """
    number = rows.kinds("group_id")
    firsts = np.flatnonzero(np.diff(np.maximum.accumulate(number), prepend=-1))
    own = ~rows.each(is_missing, "trajectory")
    prompts = _prompts(rows, number, firsts, own, store)
    is_head = rows.each(_is_head, "trajectory", "id")
    order = np.argsort(number, kind="stable").astype(np.int32 if len(rows) < 2**31 else np.int64)
    heads = order if is_head.all() else order[is_head[order]]
    row_starts, starts = (_starts(number, len(firsts)) for number in (number, number[is_head]))
    index = Index(order, row_starts, heads, starts, prompts)
    groups = StoredGroups(rows, index, np.arange(len(firsts), dtype=np.int32))
    with_trajectories = np.zeros(len(firsts), bool)
    with_trajectories[number[own]] = True
    for _ in groups.chosen(with_trajectories):
        pass  # each is read, and refused if its rows are not in order
    return groups


def _prompts(rows: Rows, number: np.ndarray, firsts: np.ndarray, own: np.ndarray, store: str) -> np.ndarray:
    """A checksum of each group's prompt tokens, which all of its rows have.

    Args:
        number: of the group that each row is of.
        firsts: the first row of each group.
        own: whether a row's prompt is an agent's own context, and not the question.
    """
    found = rows.each(lambda tokens: checksums(_items(tokens)), "prompt_tokens")
    prompts = found[firsts]
    two = np.flatnonzero((found != prompts[number]) & ~own)
    if len(two):
        row, first = (rows.select(["id", "group_id"]).at(one[:1]).to_pylist()[0] for one in (two, firsts[number[two]]))
        raise ValueError(
            f"{store}: group {row['group_id']!r} has two prompts, those of rows {first['id']!r} and {row['id']!r};"
            " rewards are compared between answers to one question, so import them as groups of their own"
        )
    return prompts


# --- What `Rows.each` makes of a column.


def lengths(column: pa.ListArray) -> np.ndarray:
    """The number of items in each row."""
    return pc.list_value_length(column).to_numpy()


def is_missing(column: pa.Array) -> np.ndarray:
    """Which rows are null."""
    return pc.is_null(column).to_numpy(zero_copy_only=False)


def has_unsampled(mask: pa.ListArray) -> np.ndarray:
    """In which rows a token is not the policy's; each row has a token."""
    return ~np.logical_and.reduceat(mask.values.to_numpy(zero_copy_only=False), mask.offsets.to_numpy()[:-1])


def _is_head(trajectory: pa.StringArray, name: pa.StringArray) -> np.ndarray:
    """Whether each row is the first of its completion."""
    return pc.fill_null(pc.equal(trajectory, name), True).to_numpy(zero_copy_only=False)


def _items(column: pa.ListArray) -> Iterator[np.ndarray]:
    """The items of each row of a column of lists, none of which is null."""
    values = column.values.to_numpy(zero_copy_only=False)
    return itertools.starmap(lambda begin, end: values[begin:end], itertools.pairwise(column.offsets.to_pylist()))


def _starts(numbers: np.ndarray, count: int) -> np.ndarray:
    """Where each number begins in the sorted array of all, and the end of the last."""
    return np.concatenate([[0], np.cumsum(np.bincount(numbers, minlength=count))])


def _ranges(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The places from each start on, as many as its size, one range after the other."""
    total = int(sizes.sum())
    dtype = np.int32 if max(total, starts.max(initial=0)) < 2**31 else np.int64
    places = np.repeat((starts - (np.cumsum(sizes) - sizes)).astype(dtype), sizes)
    places += np.arange(total, dtype=dtype)
    return places
