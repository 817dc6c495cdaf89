"""Follows a store that grows during training: completions become groups when they have their rewards.

Another process, such as the server, writes the store: it adds completions and rewards, and may delete old completions.
"""

import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from recjax.config import Config
from recjax.errors import UserError
from recjax.experience.group import Grade
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
    """A completion with tokens that the run has not taken yet.

    key: name that all completions of its group have.
    version: policy version; None if it does not count updates of this run.
    """

    record: Record
    key: str
    version: int | None

    @property
    def has_reward(self) -> bool:
        return self.record.completion.grade is not None


class _Candidate(NamedTuple):
    """A group to train on: its completions, and late completions that the run gives up if it takes the group."""

    completions: list[_Waiting]
    late: list[_Waiting]


class _Problem(NamedTuple):
    """One of the reasons in `UNUSABLE`, and a message about the completion that has this problem."""

    reason: str
    message: str


class Follower:
    """Reads a store as it grows, and takes each completion once.

    Attributes:
        name: name of the store.
        rewarded: number of groups with all their rewards that the latest poll found.
        waiting: number of waiting groups, of their completions, and of the completions without a reward among them.
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
        # The extent up to which the run has read the store, and the identities of the last completion and reward there.
        self._read: Last | None = None
        self._rows: tuple[str | None, str | None] = (state.get("row"), None)
        self._unavailable_since: float | None = None
        self._left: dict[int, _Waiting] = {}
        self._unrewarded: set[int] = set(state.get("unrewarded", ()))
        self._left_out: Counter[str] = Counter()  # The counts start again at each poll.
        self._warned: set[str] = set()

    def state(self) -> dict[str, Any]:
        """The completions that the run has taken, as JSON data.

        store: identity of the store.
        read: number of the last completion that the run has read.
        row: identity of this completion, see `Store.identities`.
        left: first and last number of each range of completions up to it that the run has not taken.
        unrewarded: numbers of the completions that reached the deadline without a reward.
        """
        if self._read is None:
            return dict(self._resumed)
        ranges: list[list[int]] = []
        for number in sorted(self._left):
            if ranges and ranges[-1][1] == number - 1:
                ranges[-1][1] = number
            else:
                ranges.append([number, number])
        assert self._store is not None
        return {
            "store": self._store.id,
            "read": self._read.completion,
            "row": self._rows[0],
            "left": ranges,
            "unrewarded": sorted(self._unrewarded),
        }

    def poll(self, step: int, room: int) -> Arrival:
        """Takes groups that have all their rewards, the groups with the oldest weights first.

        Args:
            step: number of the next training step.
            room: largest number of groups to take.
        Raises:
            UserError: the store is damaged, it is not the store that the run has followed, or its database cannot be
                reached for `experience.outage_seconds`.
        """
        self._refresh_or_wait()
        candidates = self._candidates()
        # The oldest version is the lowest; completions of other models have none, and count as version 0.
        candidates.sort(key=lambda group: min(self._version(waiting, step) or 0 for waiting in group.completions))
        self.rewarded = len(candidates)
        arrived = []
        for candidate in candidates[:room]:
            self._give_up(candidate.late)
            completions = []
            for waiting in candidate.completions:
                del self._left[waiting.record.number]
                version = self._version(waiting, step)
                completions.append(as_trained(waiting.record.completion, self._config.task, version))
            # Completions that form a group may have other groups in the store, and other prompts.
            group = candidate.completions[0].record.group
            arrived.append(group._replace(completions=tuple(completions)))
        left_out = self._left_out
        self._left_out = Counter()
        return Arrival(arrived, left_out=left_out)

    def _refresh_or_wait(self) -> None:
        """Reads new rows; if the database cannot be reached, returns without them for `experience.outage_seconds`."""
        try:
            self._refresh()
        except UserError as error:
            limit = self._experience.outage_seconds
            # If the run has never read the store, its URL may be wrong.
            has_read = self._store is not None or "store" in self._resumed
            may_wait = isinstance(error, Unavailable) and has_read
            if may_wait:
                now = time.monotonic()
                if self._unavailable_since is None:
                    self._unavailable_since = now
                    logger.warning("%s; the run waits for it, up to %g seconds", error, limit)
                if now - self._unavailable_since < limit:
                    return
            raise UserError("experience.store", str(error), value=self.name) from error
        if self._unavailable_since is not None:
            logger.warning("%s: the run can read it again", self.name)
        self._unavailable_since = None

    def _candidates(self) -> list[_Candidate]:
        """The groups to train on. Gives up all other completions without a reward at their deadline."""
        groups: dict[str, list[_Waiting]] = {}
        for waiting in self._left.values():
            groups.setdefault(waiting.key, []).append(waiting)
        candidates = []
        still_waiting = []
        for members in groups.values():
            ready, given_up = self._ready(members)
            candidates += ready
            self._give_up(given_up)
            if len(given_up) == len(members):
                self._left_out["groups_without_reward"] += 1
            gone = {waiting.record.number for waiting in given_up}
            for candidate in ready:
                gone.update(waiting.record.number for waiting in candidate.completions + candidate.late)
            remaining = [waiting for waiting in members if waiting.record.number not in gone]
            if remaining:
                still_waiting.append(remaining)
        completions = 0
        unrewarded = 0
        for members in still_waiting:
            completions += len(members)
            unrewarded += sum(not waiting.has_reward for waiting in members)
        self.waiting = len(still_waiting), completions, unrewarded
        return candidates

    def _ready(self, members: Sequence[_Waiting]) -> tuple[list[_Candidate], list[_Waiting]]:
        """The groups that completions with one key form, and the completions that the run gives up."""
        rewarded = [waiting for waiting in members if waiting.has_reward]
        unrewarded = [waiting for waiting in members if not waiting.has_reward]
        late = [waiting for waiting in unrewarded if self._is_late(waiting)]
        if rewarded and self._experience.group_by == "group":
            # The completions without a reward wait with their group, and leave with it at the deadline.
            if len(late) < len(unrewarded):
                return [], []
            return [_Candidate(rewarded, late)], []
        candidates = []
        size = self._config.rollout.group_size
        for start in range(0, len(rewarded), size):
            part = rewarded[start : start + size]
            if len(part) == size or any(self._is_late(waiting) for waiting in part):
                candidates.append(_Candidate(part, late=[]))
        return candidates, late

    def _give_up(self, completions: Iterable[_Waiting]) -> None:
        """Removes completions that have no reward at their deadline."""
        for waiting in completions:
            del self._left[waiting.record.number]
            self._unrewarded.add(waiting.record.number)
            self._left_out["rows_without_reward"] += 1

    def _is_late(self, waiting: _Waiting) -> bool:
        """True if a completion has waited until its deadline."""
        return self._deadline is not None and datetime.now(UTC) - waiting.record.time >= self._deadline

    def _version(self, waiting: _Waiting, step: int) -> int | None:
        """The policy version; None if it cannot measure staleness.

        A version ahead of the run is from a checkpoint that was damaged later; the run resumed from an earlier one.
        """
        if waiting.version is None or waiting.version >= step:
            return None
        return waiting.version

    def _waiting(self, record: Record) -> _Waiting:
        completion = record.completion
        group_by = self._experience.group_by
        key = record.group.id
        if group_by == "prompt":
            digest = hashlib.sha256(completion.rows[0].prompt_tokens.tobytes()).hexdigest()
            key = f"prompt {record.group.seat} {digest}"
        elif group_by.startswith("metadata."):
            value = completion.metadata.get(group_by.removeprefix("metadata."))
            if value is not None:
                key = f"value {json.dumps(value, sort_keys=True)}"
        # Versions count a run's own updates, so only this run's versions measure staleness. Version 0 is assumed to be
        # the initial policy of this run.
        is_known = completion.policy_version == 0 or completion.metadata.get("run") == self._run
        version = completion.policy_version if is_known else None
        return _Waiting(record, key, version)

    # --- The store.

    def _check_growth(self, last: Last) -> None:
        """Raises an error unless the store has the rows that this run has read, and perhaps more."""
        assert self._store is not None
        before = self._read or Last(self._resumed.get("read", 0))
        completion, reward = self._rows
        stored_completion, stored_reward = self._store.identities(before)
        is_shorter = last.completion < before.completion or last.reward < before.reward
        is_lost = _is_lost(completion, stored_completion, may_be_deleted=last.completion > last.completions)
        is_reward_lost = _is_lost(reward, stored_reward, may_be_deleted=last.reward > last.rewards)
        if is_shorter or is_lost or is_reward_lost:
            raise UserError(
                problem=(
                    "has gone back to an earlier state: this run has read completions up to number"
                    f" {before.completion}, and the store, which now ends at number {last.completion}, has lost or"
                    " replaced some of them"
                ),
                remedy="restore the newest backup, or give another output, to train on the store as it is",
            )

    def _refresh(self) -> None:
        """Reads the rows that are new since the last call; the first call also reads rows that were not taken."""
        if self._store is not None and self._store.is_replaced():
            self._store.close()
            self._store = None
        if self._store is None:
            url_or_file = self._experience.store
            assert url_or_file is not None
            if not exists(url_or_file):
                return
            # A database server may not have the tables yet.
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

        # The run reads all rows before it changes its own state, so that it can read them again after an error.
        if before is None:
            ranges = [(first - 1, end) for first, end in self._resumed.get("left", ())]
            ranges.append((self._resumed.get("read", 0), last.completion))
        else:
            ranges = [(before.completion, last.completion)]
        records = []
        for after, end in ranges:
            records += self._store.records(after, end, grader=None)
        rows = self._store.identities(last)
        gone: set[int] = set()
        if before is None:
            self._store.check_indexes()
            numbers = {record.number for record in records} | self._unrewarded
            rewards = self._store.rewards(sorted(numbers))
        else:
            rewards = self._store.new_rewards(before.reward, last)
            deleted_before = before.completion - before.completions
            deleted = last.completion - last.completions
            if deleted > deleted_before:
                gone = self._left.keys() - self._store.numbers("number", list(self._left)).keys()

        self._left = {number: waiting for number, waiting in self._left.items() if number not in gone}
        self._read = last
        self._rows = rows
        for record in records:
            self._add(record)
        for number, (grade, _) in rewards.items():
            self._add_reward(number, grade)

    def _add(self, record: Record) -> None:
        """Adds a completion to those that wait, or counts it as unusable."""
        record, problem = self._usable(record)
        if problem is None:
            self._left[record.number] = self._waiting(record)
            return
        self._left_out[problem.reason] += 1
        if problem.reason not in self._warned:
            self._warned.add(problem.reason)
            logger.warning("%s: skipped, like all later completions with this problem: %s", self.name, problem.message)

    def _add_reward(self, number: int, grade: Grade) -> None:
        """Gives a reward to its completion, or counts it as too late."""
        if number in self._unrewarded:
            self._unrewarded.remove(number)
            self._left_out["rewards_too_late"] += 1
        elif number in self._left:
            waiting = self._left[number]
            completion = waiting.record.completion._replace(grade=grade)
            group = waiting.record.group._replace(completions=(completion,))
            self._left[number] = waiting._replace(record=waiting.record._replace(group=group))

    def _usable(self, record: Record) -> tuple[Record, _Problem | None]:
        """The completion with tokens, and the reason why the run cannot train on it, or None."""
        missing = self._experience.missing_logprobs
        rollout = self._config.rollout
        assert rollout.max_context_tokens is not None
        try:
            (record,) = tokenized([record], self._policy)
        except UserError as error:
            return record, _Problem("no_tokens", str(error))
        completion = record.completion
        name = f"row {completion.id!r} of source {completion.source!r}"
        longest = max(len(row.prompt_tokens) + len(row.tokens) for row in completion.rows)
        if longest > rollout.max_context_tokens:
            limit = f"rollout.max_context_tokens = {rollout.max_context_tokens}; raise the limit"
            return record, _Problem("too_long", f"{name} has {longest} tokens, more than {limit}")
        if missing == "unneeded":
            return record, None
        if any(row.behavior_logprobs is None for row in completion.rows):
            if missing != "error":
                return record, None
            remedy = "set experience.missing_logprobs to 'unneeded' or 'current'"
            return record, _Problem("no_logprobs", f"{name} has no behavior log-probs; {remedy}")
        problem = problem_with_sampling(completion, rollout.sampling())
        if problem is not None:
            return record, _Problem("other_sampling", problem)
        return record, None


def _is_lost(read: str | None, stored: str | None, may_be_deleted: bool) -> bool:
    """True if the store lost or replaced a row.

    Args:
        read: identity of the row when the run read it; None if it read no row.
        stored: identity of the row with the same number now; None if there is no such row.
        may_be_deleted: True if somebody has deleted rows on purpose.
    """
    if read is None:
        return False
    if stored is None:
        return not may_be_deleted
    return stored != read
