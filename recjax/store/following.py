"""Follows a store that grows during training: completions become groups when they have their rewards.

Another process, such as the server, writes the store: it adds completions and rewards, and may delete old completions.
"""

import hashlib
import itertools
import json
import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from recjax.config import Config
from recjax.errors import UserError
from recjax.experience.queue import Arrival
from recjax.experience.records import Record
from recjax.hub.policy import Policy
from recjax.store.database import Unavailable, exists, store_name
from recjax.store.missing_logprobs import problem_with_sampling
from recjax.store.store import Last, Store
from recjax.store.stored import as_trained
from recjax.store.tokenize import tokenized

logger = logging.getLogger(__name__)

# Reasons why a completion cannot be trained on, independent of its reward.
UNUSABLE = ("no_tokens", "no_logprobs", "other_sampling", "too_long")


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
    """Reads a store as it grows, and takes each completion once.

    Attributes:
        name: name of the store.
        rewarded: number of groups with all their rewards that the latest poll found.
        waiting: number of waiting groups, of their completions, and of their completions without a reward.
    """

    def __init__(self, config: Config, policy: Policy, run: str, state: Mapping[str, Any] = {}):
        """Does not read the store, which need not exist yet.

        Args:
            run: id of this run; a server that follows the run writes it into the metadata of its completions.
            state: result of `state`, to continue from there.
        """
        assert config.experience is not None and config.experience.store is not None
        self.name = store_name(config.experience.store)
        self._experience = config.experience
        self.rewarded = 0
        self.waiting = (0, 0, 0)
        self._config = config
        self._policy = policy
        self._run = run
        self._resumed = state
        seconds = self._experience.deadline_seconds
        self._deadline = None if seconds is None else timedelta(seconds=seconds)
        self._store: Store | None = None
        self._read: Last | None = None  # how far the store has been read
        self._rows: tuple[str | None, str | None] = (state.get("row"), None)  # the last completion and reward read
        self._unavailable_since: float | None = None
        self._left: dict[int, _Waiting] = {}
        self._unrewarded: set[int] = {*state.get("unrewarded", ())}
        self._left_out: Counter[str] = Counter()  # since the last poll
        self._warned: set[str] = set()

    def state(self) -> dict[str, Any]:
        """The completions that were taken, as JSON data.

        store: identity of the store.
        read: number of the last completion that was read.
        row: identity of this completion, see `Store.identities`.
        left: first and last number of each range of completions up to it that were not taken.
        unrewarded: numbers of the completions that reached the deadline without a reward.
        """
        if self._read is None:
            return dict(self._resumed)
        ranges = itertools.groupby(enumerate(sorted(self._left)), key=lambda pair: pair[1] - pair[0])
        numbers = ([number for _, number in pairs] for _, pairs in ranges)
        ranges_left = [[numbers_of_range[0], numbers_of_range[-1]] for numbers_of_range in numbers]
        unrewarded = sorted(self._unrewarded)
        read = {"read": self._read.completion, "row": self._rows[0]}
        assert self._store is not None
        return {"store": self._store.id, **read, "left": ranges_left, "unrewarded": unrewarded}

    def poll(self, step: int, room: int) -> Arrival:
        """Takes groups that have all their rewards, the groups with the oldest weights first.

        Args:
            step: number of the next training step.
            room: number of groups, at most.
        Raises:
            UserError: the store is damaged, it is not the store that the run has followed, or its database cannot be
                reached for `experience.outage_seconds`.
        """
        try:
            self._refresh()
            if self._unavailable_since is not None:
                logger.warning("%s: the run can read it again", self.name)
            self._unavailable_since = None
        except UserError as error:
            now = time.monotonic()
            limit = self._experience.outage_seconds
            # If the run has never read the store, its URL may be wrong.
            may_wait = isinstance(error, Unavailable) and (self._store is not None or "store" in self._resumed)
            if may_wait and self._unavailable_since is None:
                self._unavailable_since = now
                logger.warning("%s; the run waits for it, up to %g seconds", error, limit)
            if not may_wait or (self._unavailable_since is not None and now - self._unavailable_since >= limit):
                raise UserError("experience.store", str(error), value=self.name) from error
        candidates = self._candidates()
        candidates.sort(key=lambda waiting: min(self._version(each, step) or 0 for each in waiting[0]))
        self.rewarded = len(candidates)
        arrived = []
        for chosen, over in candidates[:room]:
            self._give_up(over)
            for waiting in chosen:
                del self._left[waiting.record.number]
            # Completions that form a group may have other groups in the store, and other prompts.
            versions = [self._version(waiting, step) for waiting in chosen]
            rows = [waiting.record.completion for waiting in chosen]
            completions = map(as_trained, rows, itertools.repeat(self._config.task), versions)
            arrived.append(chosen[0].record.group._replace(completions=tuple(completions)))
        left_out = self._left_out
        self._left_out = Counter()
        return Arrival(arrived, left_out=left_out)

    def _candidates(self) -> list[tuple[list[_Waiting], list[_Waiting]]]:
        """The groups to train on: their completions, and completions that are given up if the group is taken.

        Gives up all other completions without a reward at their deadline.
        """
        groups: dict[str, list[_Waiting]] = {}
        for waiting in self._left.values():
            groups.setdefault(waiting.key, []).append(waiting)
        candidates = []
        waits = []
        size = self._config.rollout.group_size
        for members in groups.values():
            rewarded = [waiting for waiting in members if waiting.has_reward]
            pending = [waiting for waiting in members if not waiting.has_reward]
            over = list(filter(self._is_over, pending))
            if rewarded and self._experience.group_by == "group":
                # The completions without a reward wait with their group, and leave with it at the deadline.
                ready = [(rewarded, over)] if len(over) == len(pending) else []
                over = []
            else:
                parts = [rewarded[start : start + size] for start in range(0, len(rewarded), size)]
                ready = [
                    (members_of, [])
                    for members_of in parts
                    if len(members_of) == size or any(map(self._is_over, members_of))
                ]
            candidates += ready
            self._give_up(over)
            self._left_out["groups_without_reward"] += len(over) == len(members)
            gone = {waiting.record.number for members_of in (over, *itertools.chain(*ready)) for waiting in members_of}
            still = [waiting.has_reward for waiting in members if waiting.record.number not in gone]
            waits += [still] if still else []
        self.waiting = len(waits), sum(map(len, waits)), sum(has_reward.count(False) for has_reward in waits)
        return candidates

    def _give_up(self, completions: Iterable[_Waiting]) -> None:
        """Removes completions that have no reward at their deadline."""
        for waiting in completions:
            del self._left[waiting.record.number]
            self._unrewarded.add(waiting.record.number)
            self._left_out["rows_without_reward"] += 1

    def _is_over(self, one: _Waiting) -> bool:
        return self._deadline is not None and datetime.now(UTC) - one.record.time >= self._deadline

    def _version(self, one: _Waiting, step: int) -> int | None:
        """The policy version; None if it cannot measure staleness.

        A version ahead of the run is from a checkpoint that was damaged later; the run resumed from an earlier one.
        """
        return one.version if one.version is not None and one.version < step else None

    def _waiting(self, record: Record) -> _Waiting:
        completion = record.completion
        by = self._experience.group_by
        value = completion.metadata.get(by.removeprefix("metadata.")) if by.startswith("metadata.") else None
        key = record.group.id
        if by == "prompt":
            key = f"prompt {record.group.seat} {hashlib.sha256(completion.rows[0].prompt_tokens.tobytes()).hexdigest()}"
        elif value is not None:
            key = f"value {json.dumps(value, sort_keys=True)}"
        # Updates of another run cannot measure staleness; version 0 is assumed to be the initial policy of this run.
        is_known = completion.policy_version == 0 or completion.metadata.get("run") == self._run
        return _Waiting(record, key, completion.policy_version if is_known else None)

    # --- The store.

    def _check_growth(self, last: Last) -> None:
        """Raises an error unless the store has the rows that this run has read, and perhaps more."""
        assert self._store is not None
        before = self._read or Last(self._resumed.get("read", 0))
        ours = self._rows
        theirs = self._store.identities(before)
        have_deleted = last.completion > last.completions, last.reward > last.rewards
        is_lost = [
            ours_last is not None and (theirs_last != ours_last if theirs_last else not deleted)
            for ours_last, theirs_last, deleted in zip(ours, theirs, have_deleted, strict=True)
        ]
        if last.completion < before.completion or last.reward < before.reward or any(is_lost):
            raise UserError(
                problem=(
                    "has gone back to an earlier state: this run has read completions up to number"
                    f" {before.completion}, and the store, which now ends at number {last.completion}, has lost or"
                    " replaced some of them"
                ),
                remedy="restore the newest backup, or give another output, to train on the store as it is",
            )

    def _refresh(self) -> None:
        """Reads the rows that were added since the last call, or that were not taken if this is the first call."""
        if self._store is not None and self._store.is_replaced():
            self._store.close()
            self._store = None
        if self._store is None:
            url_or_file = self._experience.store
            assert url_or_file is not None
            if not exists(url_or_file):
                return
            # A server of databases may not have the tables yet.
            self._store = Store(url_or_file, create="://" in url_or_file, follows=True)
        if self._resumed.get("store", "") not in ("", self._store.id):
            raise UserError(
                problem="is another store than the one that this run has followed",
                remedy="restore that store, or give another output",
            )
        last = self._store.last()
        before = self._read
        self._check_growth(last)
        if last == before:
            return
        ranges = [(before.completion if before else self._resumed.get("read", 0), last.completion)]
        if before is None:
            ranges = [*((first - 1, end) for first, end in self._resumed.get("left", ())), *ranges]
        # Everything is read before anything changes, so that a database that fails in between can be read again.
        records = [record for after, end in ranges for record in self._store.records(after, end, grader=None)]
        rows = self._store.identities(last)
        if before:
            rewards = self._store.new_rewards(before.reward, last)
        else:
            matter = {record.number for record in records} | self._unrewarded
            self._store.check_indexes()
            rewards = self._store.rewards(sorted(matter))
        gone: set[int] = set()
        if before and last.completion - last.completions > before.completion - before.completions:  # some were deleted
            gone = self._left.keys() - self._store.numbers("number", list(self._left)).keys()
        self._left = {number: waiting for number, waiting in self._left.items() if number not in gone}
        self._read = last
        self._rows = rows
        for record in records:
            record, why, words = self._usable(record)
            if why is None:
                self._left[record.number] = self._waiting(record)
                continue
            self._left_out[why] += 1
            if why not in self._warned:
                self._warned.add(why)
                logger.warning("%s: skipped, like all later completions with this problem: %s", self.name, words)
        for number, (grade, _) in rewards.items():
            if number in self._unrewarded:
                self._unrewarded.remove(number)
                self._left_out["rewards_too_late"] += 1
            elif waiting := self._left.get(number):
                completions = (waiting.record.completion._replace(grade=grade),)
                group = waiting.record.group._replace(completions=completions)
                self._left[number] = waiting._replace(record=waiting.record._replace(group=group))

    def _usable(self, record: Record) -> tuple[Record, str | None, str]:
        """The completion with tokens, the reason why it is unusable (or None), and a message about it."""
        missing = self._experience.missing_logprobs
        rollout = self._config.rollout
        assert rollout.max_context_tokens is not None
        try:
            (record,) = tokenized([record], self._policy)
        except UserError as error:
            return record, "no_tokens", str(error)
        completion = record.completion
        name = f"row {completion.id!r} of source {completion.source!r}"
        longest = max(len(row.prompt_tokens) + len(row.tokens) for row in completion.rows)
        if longest > rollout.max_context_tokens:
            limit = f"rollout.max_context_tokens = {rollout.max_context_tokens}; raise the limit"
            return record, "too_long", f"{name} has {longest} tokens, more than {limit}"
        if missing == "unneeded":
            return record, None, ""
        if any(row.behavior_logprobs is None for row in completion.rows):
            remedy = "set experience.missing_logprobs to 'unneeded' or 'current'"
            why = "no_logprobs" if missing == "error" else None
            return record, why, f"{name} has no behavior log-probs; {remedy}"
        problem = problem_with_sampling(completion, rollout.sampling())
        return record, problem and "other_sampling", problem or ""
