"""The groups of a store as a sequence that reads each group on demand."""

import dataclasses
import hashlib
import itertools
import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import tokenizers
import transformers

from recjax import __version__
from recjax.errors import UserError
from recjax.experience.group import Completion, Grade, Group
from recjax.experience.records import Record, groups_of, signed_hash
from recjax.hub.chat_rendering import turn_end
from recjax.hub.policy import Policy
from recjax.runtime import hosts
from recjax.runtime.cache import cache_folder
from recjax.runtime.console import progress_bar
from recjax.runtime.files import locked_file, size_and_digest, writing
from recjax.store.database import RESTORE
from recjax.store.store import GIVEN, VERSION, Last, Store
from recjax.store.tokenize import tokenized, tokenizer_name
from recjax.tasks.problems import problem_text

SMALL = 1000  # completions in a store whose tokens are not kept in the cache
_TOGETHER = 32  # groups to read at a time when iterating over all
_TOKENIZE_TOGETHER = 4096  # completions to tokenize at a time

logger = logging.getLogger(__name__)

# A function from a group and the numbers of its completions to the changed group.
Change = Callable[[Group, np.ndarray], Group]


@dataclasses.dataclass(frozen=True, eq=False)
class StoredGroups(Sequence[Group]):
    """A sequence of some or all groups of a store. It has a few numbers of each group, and reads groups on demand.

    Attributes:
        store: the store.
        last: extent of the store; the sequence has no later completions.
        table: columns of all groups in the store, see `Store.groups`.
        rewards: columns of the rewards of all groups, see `Store.group_rewards`; None: every completion has reward 0.
        places: places of the sequence's groups in the table, in order.
        changes: functions to apply to each group after reading it, in order.
        grader: grader of the rewards.
        are_graded: True if the sequence has only completions with a reward.
    """

    store: Store
    last: Last
    table: np.ndarray
    rewards: np.ndarray | None
    places: np.ndarray
    changes: tuple[Change, ...] = ()
    grader: str = GIVEN
    are_graded: bool = False

    def __len__(self) -> int:
        """The number of groups in the sequence."""
        return len(self.places)

    @overload
    def __getitem__(self, place: int | np.integer) -> Group: ...

    @overload
    def __getitem__(self, place: slice) -> "StoredGroups": ...

    def __getitem__(self, place: int | np.integer | slice) -> "Group | StoredGroups":
        """Reads a group; for a slice, returns a shorter sequence without reading any group."""
        if isinstance(place, slice):
            return self.chosen(place)
        one: Any = [place]
        return self._read(self.places[one])[0][0]

    def __iter__(self) -> Iterator[Group]:
        """Iterates over all groups and reads them a few at a time."""
        return (group for group, _ in self.numbered())

    def numbered(self) -> Iterator[tuple[Group, np.ndarray]]:
        """Iterates over all groups, each with the numbers of its completions."""
        for start in range(0, len(self), _TOGETHER):
            yield from self._read(self.places[start : start + _TOGETHER])

    def chosen(self, which: np.ndarray | slice) -> "StoredGroups":
        """Selects groups by a mask, a slice, or places in any order."""
        return dataclasses.replace(self, places=self.places[which])

    def changed(self, change: Change) -> "StoredGroups":
        """Adds a change to apply to every group; a change may alter completions but not add or remove any."""
        return dataclasses.replace(self, changes=(*self.changes, change))

    def graded(self, grader: str | None) -> "StoredGroups":
        """The sequence with the rewards of a grader, without completions to which the grader gave no reward.

        Args:
            grader: name in the store; None: reward 0 for every completion.
        """
        if grader is None:
            return dataclasses.replace(self, rewards=None)
        rewards = self.rewards_of(grader)
        places = self.places[rewards["rewarded"][self.places] > 0]
        return dataclasses.replace(self, rewards=rewards, places=places, grader=grader, are_graded=True)

    def rewards_of(self, grader: str) -> np.ndarray:
        """The columns of a grader's rewards for all groups of the table, see `Store.group_rewards`."""
        rewards = self.store.group_rewards(self.last, grader)
        if not np.array_equal(rewards["first"], self.table["first"]):
            raise UserError(self.store.name, "completions were deleted while it was read", "run the same command again")
        return rewards

    # --- Properties of the unchanged groups, available without reading groups.

    @property
    def sizes(self) -> np.ndarray:
        """The number of completions in each group."""
        if self.are_graded:
            return self.rewarded
        return self.table["size"][self.places]

    @property
    def rewarded(self) -> np.ndarray:
        """The number of completions with a reward in each group."""
        if self.rewards is None:
            return self.table["size"][self.places]
        return self.rewards["rewarded"][self.places]

    def contents(self, by_problem: bool) -> np.ndarray:
        """The checksum of each group's `content_of`."""
        column = "problem" if by_problem else "prompt"
        return self.table[column][self.places]

    def _read(self, places: np.ndarray) -> list[tuple[Group, np.ndarray]]:
        """Reads groups by their places in the table; returns each with the numbers of its completions."""
        groups = []
        firsts = self.table["first"][places]
        grader = None if self.rewards is None else self.grader
        members = self.store.read_groups(firsts, self.last, grader)
        for place, records in zip(places.tolist(), members, strict=True):
            if len(records) != self.table["size"][place]:
                first = self.table["first"][place]
                raise UserError(
                    self.store.contents.name, f"completions of the group of number {first} are gone", RESTORE
                )
            rewarded = [record for record in records if _has_reward(record)]
            if self.rewards is not None and len(rewarded) < self.rewards["rewarded"][place]:
                raise UserError(
                    self.store.name,
                    f"is damaged: a completion of group {records[0].group.id!r} has lost its reward",
                    RESTORE,
                )
            if self.are_graded:
                records = rewarded
            (group,) = groups_of(records)
            if self.rewards is None:
                completions = tuple(completion._replace(grade=Grade(0.0)) for completion in group.completions)
                group = group._replace(completions=completions)
            numbers = np.array([record.number for record in records])
            for change in self.changes:
                group = change(group, numbers)
            groups.append((group, numbers))
        return groups


def _has_reward(record: Record) -> bool:
    grade = record.completion.grade
    return grade is not None and grade.reward is not None


def content_of(group: Group, by_problem: bool) -> bytes:
    """The bytes by which groups are compared; `StoredGroups.contents` has their checksum.

    Args:
        by_problem: True for prompt and answer of the problem, as agents make prompts of their own; False for the
            prompt's tokens.
    """
    if by_problem:
        return problem_text(group.prompt, group.answer).encode()
    return group.prompt_tokens.tobytes()


class ByPrompt:
    """The rewarded completions of all groups with the same prompt, read on demand."""

    def __init__(self, groups: StoredGroups, by_problem: bool = False):
        """Sorts the groups by prompt without reading any group.

        Args:
            by_problem: see `content_of`.
        """
        self._by_problem = by_problem
        keys = groups.contents(by_problem)
        self._groups = groups
        self._order = np.argsort(keys, kind="stable")
        self._keys = keys[self._order]

    def get(self, group: Group) -> list[Completion]:
        """The completions of all groups with the prompt of a group, and its seat; empty if no completion has them."""
        content = content_of(group, self._by_problem)
        key = signed_hash(content)
        start = np.searchsorted(self._keys, key, side="left")
        end = np.searchsorted(self._keys, key, side="right")
        completions = []
        for other in self._groups.chosen(self._order[start:end]):
            # Different contents may have the same checksum.
            if content_of(other, self._by_problem) == content and other.seat == group.seat:
                completions += [completion for completion in other.completions if completion.grade is not None]
        return completions


def load_groups(place: str | Path, policy: Policy) -> StoredGroups:
    """All groups of a store with tokens of the policy's vocabulary, including pending completions.

    Raises:
        UserError: a store that cannot be read or tokenized, a cache that cannot be written, or a group with two
            prompts.
    """
    store = Store(place)
    name = tokenizer_name(policy.tokenizer)
    last = store.last()
    if not last.completions:
        raise UserError(store.name, "has no completions", "add some with python -m recjax.import_experience")
    table, has_tokens = store.groups(last, name, policy.vocabulary)
    if not has_tokens:
        store.contents = _with_tokens(store, policy, last)
        table, _ = store.contents.groups(last, name, policy.vocabulary)
    groups = StoredGroups(store, last, table, None, np.arange(len(table), dtype=np.int32))
    groups = dataclasses.replace(groups, rewards=groups.rewards_of(GIVEN))
    for _ in groups.chosen(table["prompt"] != table["other_prompt"]):
        pass  # To read a group with two prompts raises an error that names its completions.
    return groups


def _with_tokens(store: Store, policy: Policy, last: Last) -> Store:
    """A copy of the store with tokens of the policy's vocabulary; the copy of a large store stays in the cache."""
    if last.completions <= SMALL:
        copy = Store(None, create=True)
        _tokenize_into(copy, store, policy, last)
        return copy
    with tempfile.TemporaryDirectory() as folder:
        policy.tokenizer.save_pretrained(folder)
        files = {path.name: size_and_digest(path) for path in sorted(Path(folder).iterdir())}
    versions = [__version__, VERSION, transformers.__version__, tokenizers.__version__]
    # Everything that determines how texts are tokenized, and how many completions were deleted.
    made_by = [files, policy.stop_ids[:1], turn_end(policy.tokenizer), policy.vocabulary, versions]
    content = json.dumps([store.id, last.completion - last.completions, made_by])
    digest = hashlib.sha256(content.encode()).hexdigest()[:32]
    path = cache_folder("experience") / f"{digest}.db"
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    # If several processes open the same store, one makes the copy and the others wait.
    with locked_file(Path(f"{path}.lock")):
        try:
            return _tokenize_into(Store(path, create=True), store, policy, last)
        except UserError as error:
            is_damaged_copy = "is damaged" in str(error) and str(path) in str(error)
            if not is_damaged_copy:
                raise
            logger.warning("the cached copy of a store: %s; recjax makes it again", error)
            for file in path.parent.glob(f"{path.name}*"):
                if file.suffix != ".lock":
                    file.unlink()
            return _tokenize_into(Store(path, create=True), store, policy, last)


def _tokenize_into(copy: Store, store: Store, policy: Policy, last: Last) -> Store:
    """Adds the completions with later numbers to a copy, with tokens; returns the copy."""
    done = copy.last().completion
    end = last.completion
    is_ahead = done > end
    if done and not is_ahead:
        is_ahead = _id_of(copy, done) != _id_of(store, done)
    if is_ahead:
        raise UserError(copy.name, "is damaged: the store has gone back to an earlier state since the copy was made")
    untokenized = store.records(done, end, grader=None)
    shown = hosts.is_first() and end - done > SMALL
    with progress_bar("tokenizing", end - done, unit="row", shown=shown) as bar:
        while records := list(itertools.islice(untokenized, _TOKENIZE_TOGETHER)):
            copy.append(tokenized(records, policy), numbers=[record.number for record in records])
            bar.update(len(records))
    return copy


def _id_of(store: Store, number: int) -> str:
    """The id of the completion with a number."""
    (record,) = store.read([number], None)
    return record.completion.id
