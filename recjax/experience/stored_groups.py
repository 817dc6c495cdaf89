"""The groups of a store as a sequence that reads each group on demand."""

import dataclasses
import functools
import hashlib
import itertools
import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import tokenizers
import transformers
import xxhash

from recjax import __version__, hosts
from recjax.cache import cache_folder
from recjax.console import progress_bar
from recjax.experience.group import Completion, Grade, Group
from recjax.experience.records import groups_of, signed_hash
from recjax.experience.store import GIVEN, VERSION, Store
from recjax.experience.tokenize import tokenized, tokenizer_name
from recjax.files import locked_file, size_and_digest, writing
from recjax.hub.chat_rendering import turn_end
from recjax.hub.policy import Policy
from recjax.models.sampling import Sampling
from recjax.tasks.problems import problem_text

SMALL = 1000  # completions in a store whose tokens are not kept in the cache
_TOGETHER = 32  # groups to read at a time when iterating over all
_TOKENIZE_TOGETHER = 4096  # completions to tokenize at a time

logger = logging.getLogger(__name__)

Change = Callable[[Group, np.ndarray], Group]  # a group, and the numbers of its completions → the changed group


class Index(NamedTuple):
    """Index of a store's groups, ordered by their first completions. All arrays but three are by completion.

    starts: start of each group in the other arrays, and the end of the last group.
    prompts: checksum of each group's prompt tokens.
    problems: checksum of each group's prompt and answer, see `problems.problem_text`.
    numbers: numbers of the completions, group by group.
    rewards: rewards; NaN: pending.
    prompt_lengths, completion_lengths: numbers of tokens; the longest prompt, and the tokens of all rows.
    row_lengths: number of tokens of the longest row with its prompt.
    is_plain: True for a single row that follows the group's prompt, and in which the policy chose every token.
    kinds: places in `origins`.
    origins: source, distribution (None: not known), and whether log-probs are known.
    """

    starts: np.ndarray
    prompts: np.ndarray
    problems: np.ndarray
    numbers: np.ndarray
    rewards: np.ndarray
    prompt_lengths: np.ndarray
    completion_lengths: np.ndarray
    row_lengths: np.ndarray
    is_plain: np.ndarray
    kinds: np.ndarray
    origins: list[tuple[str, Sampling | None, bool]]


@dataclasses.dataclass(frozen=True, eq=False)
class StoredGroups(Sequence[Group]):
    """A sequence of some or all groups of a store; holds only an index in memory and reads groups on demand.

    Attributes:
        store: the store.
        index: index of all groups in the store.
        places: places of the sequence's groups in the index, in order.
        changes: functions to apply to each group after reading it, in order.
        grader: grader of the rewards; None: every completion has reward 0.
    """

    store: Store
    index: Index = dataclasses.field()  # without `field`, the method of sequences would be its default
    places: np.ndarray
    changes: tuple[Change, ...] = ()
    grader: str | None = GIVEN

    def __len__(self) -> int:
        """The number of groups in the sequence."""
        return len(self.places)

    def __getitem__(self, place: int | np.integer | slice) -> "Group | StoredGroups":
        """Reads a group; for a slice, returns a shorter sequence without reading any group."""
        if isinstance(place, slice):
            return self.chosen(place)
        return self._read(self.places[[place]])[0]

    def __iter__(self) -> Iterator[Group]:
        """Iterates over all groups and reads them a few at a time."""
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
        index = self.index
        if grader is None:
            index = index._replace(rewards=np.zeros_like(index.rewards))
            return dataclasses.replace(self, index=index, grader=None)
        rewards = _by_number(index.numbers, *self.store.scan_rewards(grader))
        has_reward = ~np.isnan(rewards)
        counts = np.add.reduceat(has_reward, index.starts[:-1], dtype=np.int64)
        arrays = {name: value[has_reward] for name, value in index._asdict().items() if name not in _BY_GROUP}
        starts = np.concatenate([[0], np.cumsum(counts)])
        index = index._replace(**{**arrays, "starts": starts, "rewards": rewards[has_reward]})
        return dataclasses.replace(self, index=index, places=self.places[counts[self.places] > 0], grader=grader)

    # --- Properties of the unchanged groups, available without reading groups.

    @property
    def sizes(self) -> np.ndarray:
        """The number of completions in each group."""
        return np.diff(self.index.starts)[self.places]

    def contents(self, of_problems: bool) -> np.ndarray:
        """The checksum of each group's `content_of`."""
        return (self.index.problems if of_problems else self.index.prompts)[self.places]

    @functools.cached_property
    def members(self) -> np.ndarray:
        """The places of the completions in the index, group by group."""
        return _ranges(self.index.starts[self.places], self.sizes)

    def any_in(self, flags: np.ndarray) -> np.ndarray:
        """Marks the groups with at least one flagged completion of `members`."""
        return np.logical_or.reduceat(flags, np.cumsum(self.sizes) - self.sizes) if len(self) else np.zeros(0, bool)

    def _read(self, places: np.ndarray) -> list[Group]:
        starts = self.index.starts[places]
        sizes = self.index.starts[places + 1] - starts
        members = _ranges(starts, sizes)
        numbers = self.index.numbers[members]
        records = self.store.read(numbers, self.grader)
        rewards = self.index.rewards[members].tolist()
        for record, reward in zip(records, rewards, strict=True) if self.grader else ():
            if reward == reward and (record.completion.grade or Grade(None)).reward != reward:
                raise ValueError(
                    f"{self.store.name} is damaged: completion {record.number} has lost its reward {reward:g}; restore"
                    " the store from a backup"
                )
        groups = []
        start = 0
        for size in sizes.tolist():
            (group,) = groups_of(records[start : start + size])
            own = numbers[start : start + size]
            if self.grader is None:
                completions = tuple(one._replace(grade=Grade(0.0)) for one in group.completions)
                group = group._replace(completions=completions)
            for change in self.changes:
                group = change(group, own)
            groups.append(group)
            start += size
        return groups


_BY_GROUP = ("starts", "prompts", "problems", "origins")


def content_of(group: Group, of_problems: bool) -> bytes:
    """The prompt's tokens, or prompt and answer of the problem, whose checksum `StoredGroups.contents` has."""
    return problem_text(group.prompt, group.answer).encode() if of_problems else group.prompt_tokens.tobytes()


class ByPrompt:
    """The rewarded completions of all groups with the same prompt, read on demand."""

    def __init__(self, groups: StoredGroups, of_problems: bool = False):
        """Sorts the groups by prompt without reading any group.

        Args:
            of_problems: True to compare prompt and answer of the problem, as agents make prompts of their own; False to
                compare the prompts' tokens.
        """
        self._of_problems = of_problems
        keys = groups.contents(of_problems)
        self._order = np.argsort(keys, kind="stable")
        self._groups, self._keys = groups, keys[self._order]

    def get(self, group: Group) -> list[Completion]:
        """The completions of all groups with the prompt of a group, and its seat; empty if no completion has them."""
        content = content_of(group, self._of_problems)
        of_problems = self._of_problems
        ends = (np.searchsorted(self._keys, signed_hash(content), side=side) for side in ("left", "right"))
        groups = self._groups.chosen(self._order[slice(*ends)])
        groups = [one for one in groups if content_of(one, of_problems) == content and one.seat == group.seat]
        return [one for other in groups for one in other.completions if one.grade]


def load_groups(place: str | Path, policy: Policy) -> StoredGroups:
    """All groups of a store with tokens of the policy's vocabulary, including pending completions.

    Raises:
        ValueError: a store that cannot be read or tokenized, a cache that cannot be written, or a group with two
            prompts.
    """
    store = Store(place)
    scanned = list(map(_index_arrays, store.scan()))
    name = tokenizer_name(policy.tokenizer)
    if not scanned:
        raise ValueError(f"{store.name} has no completions; add some with python -m recjax.import_experience")
    if any(part["tokenizers"] != {name} or part["largest"] >= policy.vocabulary or part["lacks"] for part in scanned):
        del scanned
        store.contents = _with_tokens(store, policy)
        scanned = list(map(_index_arrays, store.contents.scan()))
    columns = {key: np.concatenate([part[key] for part in scanned]) for key in ("group_id", *_ARRAYS)}
    origins: dict[tuple, int] = {}
    kinds = [
        np.array([origins.setdefault(origin, len(origins)) for origin in part["origins"]])[part["kinds"]]
        for part in scanned
    ]
    del scanned
    columns["kinds"] = np.concatenate(kinds).astype(np.int32)
    group, _ = pd.factorize(columns.pop("group_id"))  # numbers the groups in order of their first completions
    _, firsts = np.unique(group, return_index=True)
    prompts = columns.pop("prompt_key")
    problems = columns.pop("problem_key")
    if len(two := np.flatnonzero(prompts != prompts[firsts][group])):
        groups_of(store.read(columns["numbers"][[firsts[group[two[0]]], two[0]]]))  # raises an error that names them
    order = np.argsort(group, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(group, minlength=len(firsts)))])
    columns = {key: value[order] for key, value in columns.items()}
    rewards = _by_number(columns["numbers"], *store.scan_rewards())
    index = Index(starts, prompts[firsts], problems[firsts], rewards=rewards, origins=list(origins), **columns)
    return StoredGroups(store, index, np.arange(len(firsts), dtype=np.int32))


_ARRAYS = {  # arrays of an index and their columns in the store
    "numbers": ("number", np.int64),
    "prompt_key": ("prompt_key", np.int64),
    "problem_key": ("problem_key", np.int64),
    "prompt_lengths": ("prompt_length", np.int32),
    "completion_lengths": ("completion_length", np.int32),
    "row_lengths": ("row_length", np.int32),
    "is_plain": ("is_plain", bool),
}


def _index_arrays(columns: Mapping[str, Sequence]) -> dict:
    """The arrays of an index from some rows of a store, and what else decides about their use."""
    arrays = {key: np.array(columns[name], dtype) for key, (name, dtype) in _ARRAYS.items()}
    origins: dict[tuple, int] = {}
    found = zip(columns["source"], *(columns[name] for name in Sampling._fields), columns["has_logprobs"], strict=True)
    kinds = np.array([origins.setdefault(origin, len(origins)) for origin in found], np.int32)
    ids = dict.fromkeys(columns["group_id"])
    hashes = {name: xxhash.xxh3_64_intdigest(name.encode()) for name in ids}
    return {
        "group_id": np.fromiter(map(hashes.__getitem__, columns["group_id"]), np.uint64, len(kinds)),
        **arrays,
        "kinds": kinds,
        "origins": [
            (source, None if None in sampling else Sampling(*sampling), bool(has_logprobs))
            for source, *sampling, has_logprobs in origins
        ],
        "tokenizers": set(columns["tokenizer"]),
        "largest": max(columns["largest_token"]),
        "lacks": not (arrays["completion_lengths"].all() and arrays["prompt_lengths"].all()),
    }


def _by_number(numbers: np.ndarray, graded: np.ndarray, rewards: np.ndarray) -> np.ndarray:
    """The rewards of completions; NaN for none."""
    if not len(graded):
        return np.full(len(numbers), np.nan)
    places = np.minimum(np.searchsorted(graded, numbers), len(graded) - 1)
    return np.where(graded[places] == numbers, rewards[places], np.nan)


def _with_tokens(store: Store, policy: Policy) -> Store:
    """A copy of the store with tokens of the policy's vocabulary; the copy of a large store stays in the cache."""
    last = store.last()
    if last.completions <= SMALL:
        copy = Store(None, create=True)
        _tokenize_into(copy, store, policy)
        return copy
    with tempfile.TemporaryDirectory() as folder:
        policy.tokenizer.save_pretrained(folder)
        files = {path.name: size_and_digest(path) for path in sorted(Path(folder).iterdir())}
    versions = [__version__, VERSION, transformers.__version__, tokenizers.__version__]
    # Everything that determines how texts are tokenized, and how many completions were deleted.
    made_by = [files, policy.stop_ids[:1], turn_end(policy.tokenizer), policy.vocabulary, versions]
    made_of = [store.id, last.completion - last.completions, made_by]
    path = cache_folder("experience") / f"{hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:32]}.db"
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    # If several processes open the same store, one makes the copy and the rest wait.
    with locked_file(Path(f"{path}.lock")):
        try:
            return _tokenize_into(Store(path, create=True), store, policy)
        except ValueError as error:
            if "is damaged" not in str(error) or str(path) not in str(error):
                raise
            logger.warning("the cached copy of a store: %s; recjax makes it again", error)
            for file in path.parent.glob(f"{path.name}*"):
                if file.suffix != ".lock":
                    file.unlink()
            return _tokenize_into(Store(path, create=True), store, policy)


def _tokenize_into(copy: Store, store: Store, policy: Policy) -> Store:
    """Adds the completions that a copy lacks to it, with tokens; returns the copy."""
    done = copy.last().completion
    last = store.last().completion
    if done and (done > last or copy.read([done], None)[0].completion.id != store.read([done], None)[0].completion.id):
        raise ValueError(f"{copy.name} is damaged: the store has gone back to an earlier state since the copy was made")
    left = store.records(done, last, grader=None)
    shown = hosts.is_first() and last - done > SMALL
    with progress_bar("tokenizing", last - done, unit="row", shown=shown) as bar:
        while part := list(itertools.islice(left, _TOKENIZE_TOGETHER)):
            copy.append(tokenized(part, policy), numbers=[record.number for record in part])
            bar.update(len(part))
    return copy


def _ranges(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Concatenates the ranges that begin at `starts` and have lengths `sizes`."""
    total = int(sizes.sum())
    dtype = np.int32 if max(total, starts.max(initial=0)) < 2**31 else np.int64
    places = np.repeat((starts - (np.cumsum(sizes) - sizes)).astype(dtype), sizes)
    places += np.arange(total, dtype=dtype)
    return places
