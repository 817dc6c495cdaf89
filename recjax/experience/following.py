"""Follows a store that grows during training: completions become groups when they have their rewards.

Another process, such as the server, writes the store: it adds completions and rewards, and may delete old completions.
`Followed` records the completions that were taken; checkpoints save it so that none is taken twice.
"""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from recjax.config import Config
from recjax.experience.group import Grade, Group
from recjax.experience.queue import Arrival
from recjax.experience.store import Last, Record, Store, exists, store_name
from recjax.experience.stored import as_trained
from recjax.experience.tokenize import tokenized
from recjax.hub.policy import Policy
from recjax.models.sampling import Sampling

logger = logging.getLogger(__name__)

# Reasons why a completion cannot be trained on, independent of its reward.
UNUSABLE = ("no_tokens", "no_logprobs", "other_sampling", "too_long")


class Followed(NamedTuple):
    """The completions taken from a store, by their numbers.

    ranges: first number and end of each range of taken completions, in ascending order.
    unrewarded: numbers of completions that reached the deadline without a reward.
    store: identity of the store; empty before the first completion.
    """

    ranges: tuple[tuple[int, int], ...] = ()
    unrewarded: frozenset[int] = frozenset()
    store: str = ""

    def with_taken(self, numbers: Iterable[int], unrewarded: Iterable[int] = ()) -> "Followed":
        """Adds completions that were taken, and the numbers among them that have no reward.

        Examples:
            >>> Followed().with_taken([1, 2, 5]).with_taken([3, 6]).ranges
            ((1, 4), (5, 7))
        """
        ranges: list[tuple[int, int]] = []
        for start, end in sorted([*self.ranges, *((number, number + 1) for number in numbers)]):
            if ranges and start <= ranges[-1][1]:
                ranges[-1] = ranges[-1][0], max(end, ranges[-1][1])
            else:
                ranges.append((start, end))
        return self._replace(ranges=tuple(ranges), unrewarded=self.unrewarded | {*unrewarded})

    def gaps(self, last: int) -> Iterator[tuple[int, int]]:
        """Yields the ranges up to the number `last` that were not taken: the number before each, and its last number.

        Examples:
            >>> list(Followed(((1, 4), (5, 7))).gaps(9))
            [(3, 4), (6, 9)]
        """
        before = 0
        for start, end in self.ranges:
            if start - 1 > before:
                yield before, start - 1
            before = end - 1
        if last > before:
            yield before, last

    def to_json(self) -> dict[str, Any]:
        """Converts the record to JSON data; `from_json` is the inverse."""
        return self._replace(unrewarded=sorted(self.unrewarded))._asdict()

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> "Followed":
        """Converts the JSON data of `to_json` back."""
        ranges, unrewarded = map(tuple, plain.get("ranges", ())), frozenset(plain.get("unrewarded", ()))
        return cls(tuple(ranges), unrewarded, plain.get("store", ""))


class Candidate(NamedTuple):
    """A group to train on: numbers of its completions, and of completions without a reward at its deadline."""

    numbers: tuple[int, ...]
    unrewarded: tuple[int, ...]


class Found(NamedTuple):
    """Completions in a store that have not been taken.

    candidates: groups to train on, with the oldest weights first.
    unusable: numbers of completions that cannot be trained on, with the reasons.
    unrewarded: numbers of completions without a reward at their deadline that no candidate lists as unrewarded.
    without_reward: number of groups that consist only of `unrewarded` completions.
    late: numbers of completions that got their reward only after they were given up at the deadline.
    waiting: number of waiting groups, their completions, and their completions without a reward.
    """

    candidates: list[Candidate]
    unusable: dict[int, str]
    unrewarded: tuple[int, ...]
    without_reward: int
    late: frozenset[int]
    waiting: tuple[int, int, int]


class _Waiting(NamedTuple):
    """A completion not taken yet, with tokens: the key that it shares with its group, and its policy version (None if
    the version does not count updates of this run)."""

    record: Record
    key: str
    version: int | None

    @property
    def has_reward(self) -> bool:
        return self.record.completion.grade is not None


class Follower:
    """Reads a store as it grows.

    Attributes:
        name: name of the store.
        taken: the completions that were taken.
    """

    def __init__(self, config: Config, policy: Policy, run: str):
        """Reads nothing; the store need not exist yet.

        Args:
            run: id of this run; a server that follows the run writes it into the metadata of its completions.
        """
        self.name, self.taken = store_name(config.experience.store), Followed()
        self._config, self._policy, self._run = config, policy, run
        seconds = config.experience.deadline_seconds
        self._deadline = seconds and timedelta(seconds=seconds)
        self._store: Store | None = None
        self._read = Last()  # how far the store has been read
        self._left: dict[int, _Waiting] = {}
        self._unusable: dict[int, str] = {}
        self._late: set[int] = set()
        self._warned: set[str] = set()

    def found(self, step: int) -> Found:
        """Reads new rows of the store and finds the completions that have not been taken.

        Args:
            step: number of the next training step.
        Raises:
            ValueError: the store is damaged, or it is not the store that the run has followed.
        """
        try:
            self._refresh()
        except ValueError as error:
            raise ValueError(f"experience.store = {self.name!r}: {error}") from error
        groups: dict[str, list[int]] = {}
        for number, one in self._left.items():
            groups.setdefault(one.key, []).append(number)
        candidates, unrewarded, without_reward, waiting = [], [], 0, [0, 0, 0]
        for numbers in groups.values():
            ready, given_up, still = self._divided({number: self._left[number] for number in numbers})
            candidates += ready
            unrewarded, without_reward = unrewarded + given_up, without_reward + (len(given_up) == len(numbers))
            pending = sum(not self._left[number].has_reward for number in still)
            waiting = [waiting[0] + bool(still), waiting[1] + len(still), waiting[2] + pending]
        candidates.sort(key=lambda one: min(self._version(self._left[number], step) or 0 for number in one.numbers))
        late = frozenset(self._late)
        return Found(candidates, dict(self._unusable), tuple(unrewarded), without_reward, late, tuple(waiting))

    def take(self, found: Found, room: int, step: int) -> Arrival:
        """Takes groups, and all completions that no group will ever have.

        Args:
            found: result of the latest call of `found`.
            room: number of groups, at most.
            step: number of the next training step.
        """
        chosen = found.candidates[:room]
        groups = [self._group(one, step) for one in chosen]
        unrewarded = [*found.unrewarded, *(number for one in chosen for number in one.unrewarded)]
        left_out = Counter(found.unusable.values())
        left_out["rows_without_reward"], left_out["rewards_too_late"] = len(unrewarded), len(found.late)
        left_out["groups_without_reward"] = found.without_reward
        numbers = {*found.unusable, *unrewarded, *(number for one in chosen for number in one.numbers)}
        taken = self.taken.with_taken(numbers, unrewarded)
        self.taken = taken._replace(
            unrewarded=taken.unrewarded - found.late, store=self._store.id if self._store else ""
        )
        self._left = {number: one for number, one in self._left.items() if number not in numbers}
        self._unusable, self._late = {}, set()
        return Arrival(groups, left_out=left_out)

    def _group(self, candidate: Candidate, step: int) -> Group:
        """Makes the group of a candidate."""
        chosen = [self._left[number] for number in candidate.numbers]
        # Completions that form a group may have other groups in the store, and other prompts.
        first, success = chosen[0].record.group, self._config.task.success
        completions = (as_trained(one.record.completion, success, self._version(one, step)) for one in chosen)
        return first._replace(completions=tuple(completions))

    # --- Groups.

    def _divided(self, completions: dict[int, _Waiting]) -> tuple[list[Candidate], list[int], list[int]]:
        """Divides completions with the same key into groups to train on, completions given up at their deadline
        without a group, and waiting completions."""
        rewarded = [name for name, one in completions.items() if one.has_reward]
        pending = [name for name, one in completions.items() if not one.has_reward]
        over = [name for name in pending if self._is_over(completions[name])]
        if self._config.experience.group_by == "group":
            if rewarded and len(over) == len(pending):
                return [Candidate(tuple(rewarded), tuple(over))], [], []
            if rewarded:
                return [], [], [*rewarded, *pending]
        size, ready = self._config.rollout.group_size, []
        while len(rewarded) >= size:
            ready.append(Candidate(tuple(rewarded[:size]), ()))
            rewarded = rewarded[size:]
        if any(self._is_over(completions[name]) for name in rewarded):
            ready.append(Candidate(tuple(rewarded), ()))
            rewarded = []
        return ready, over, [*rewarded, *(name for name in pending if name not in over)]

    def _is_over(self, one: _Waiting) -> bool:
        return self._deadline is not None and datetime.now(UTC) - one.record.time >= self._deadline

    def _version(self, one: _Waiting, step: int) -> int | None:
        """The policy version; None if it cannot measure staleness.

        A version ahead of the run is from a checkpoint that was damaged later; the run resumed from an earlier one.
        """
        return one.version if one.version is not None and one.version < step else None

    def _waiting(self, record: Record) -> _Waiting:
        one, by = record.completion, self._config.experience.group_by
        value = one.metadata.get(by.removeprefix("metadata.")) if by.startswith("metadata.") else None
        key = record.group.id
        if by == "prompt":
            key = f"prompt {hashlib.sha256(one.rows[0].prompt_tokens.tobytes()).hexdigest()}"
        elif value is not None:
            key = f"value {json.dumps(value, sort_keys=True)}"
        # Updates of another run cannot measure staleness; version 0 is assumed to be this run's initial policy.
        is_known = one.policy_version == 0 or one.metadata.get("run") == self._run
        return _Waiting(record, key, one.policy_version if is_known else None)

    # --- The store.

    def _refresh(self) -> None:
        """Reads the rows that were added since the last call, or that nobody has taken if this is the first call."""
        if self._store is None:
            if not exists(self._config.experience.store):
                return
            # A server of databases may not have the tables yet.
            self._store = Store(self._config.experience.store, create="://" in self._config.experience.store)
        if self.taken.store not in ("", self._store.id):
            raise ValueError(
                "is another store than the one that this run has followed; restore that store, or give another output"
            )
        last, before = self._store.last(), self._read
        if last == before:
            return
        is_first = before == Last()
        for after, end in self.taken.gaps(last.completion) if is_first else [(before.completion, last.completion)]:
            for record in self._store.records(after, end, grader=None):
                record, why, words = self._usable(record)
                if why is None:
                    self._left[record.number] = self._waiting(record)
                    continue
                self._unusable[record.number] = why
                if why not in self._warned:
                    self._warned.add(why)
                    logger.warning("%s: skipped, like all later completions with this problem: %s", self.name, words)
        for number, (grade, _) in self._new_rewards(before, last).items():
            if number in self.taken.unrewarded:
                self._late.add(number)
            elif one := self._left.get(number):
                completions = (one.record.completion._replace(grade=grade),)
                group = one.record.group._replace(completions=completions)
                self._left[number] = one._replace(record=one.record._replace(group=group))
        if last.completion - last.completions > before.completion - before.completions:  # some were deleted
            here = self._store.numbers("number", list(self._left))
            self._left = {number: one for number, one in self._left.items() if number in here}
        self._read = last

    def _new_rewards(self, before: Last, last: Last) -> dict[int, tuple[Grade, str | None]]:
        """Rewards that were added since the last call, or all of completions that matter if this is the first call."""
        if before != Last():
            return self._store.new_rewards(before.reward, last)
        graded = [
            one for one in self._store.scan_rewards()[0].tolist() if one in self._left or one in self.taken.unrewarded
        ]
        rewards = self._store.rewards(graded)
        if len(rewards) != len(graded):
            raise ValueError(f"is damaged: {len(graded) - len(rewards)} rewards are lost; restore it from a backup")
        return rewards

    def _usable(self, record: Record) -> tuple[Record, str | None, str]:
        """The completion with tokens, the reason why it is unusable (or None), and a message about it."""
        missing, rollout = self._config.experience.missing_logprobs, self._config.rollout
        try:
            (record,) = tokenized([record], self._policy)
        except ValueError as error:
            return record, "no_tokens", str(error)
        one = record.completion
        place = f"row {one.id!r} of source {one.source!r}"
        longest = max(len(row.prompt_tokens) + len(row.tokens) for row in one.rows)
        if longest > rollout.max_context_tokens:
            limit = f"rollout.max_context_tokens = {rollout.max_context_tokens}; raise the limit"
            return record, "too_long", f"{place} has {longest} tokens, more than {limit}"
        if missing == "unneeded":
            return record, None, ""
        if any(row.behavior_logprobs is None for row in one.rows):
            remedy = "set experience.missing_logprobs to 'unneeded' or 'current'"
            why = "no_logprobs" if missing == "error" else None
            return record, why, f"{place} has no behavior log-probs; {remedy}"
        if one.sampling != rollout.sampling():
            found = one.sampling or ("unknown",) * len(Sampling._fields)
            was, takes = (", ".join(map(str, sampling)) for sampling in (found, rollout.sampling()))
            words = f"{place} was sampled with {', '.join(Sampling._fields)} = {was}, and rollout has {takes}"
            return record, "other_sampling", f"{words}: its log-probs belong to another distribution"
        return record, None, ""
