"""Follows a store that grows during training: completions become groups when they have their rewards.

Another process, such as the server, writes the store. At any time it may append part files, replace parts to add
rewards, and delete old parts. This module keeps a cache of the parts; the queue records the completions that were
taken.
"""

import hashlib
import json
import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from recjax.config import Config
from recjax.experience import ledger, store
from recjax.experience.followed import Followed
from recjax.experience.group import Group
from recjax.experience.rows import group_of
from recjax.experience.store import Experience
from recjax.experience.stored import as_trained
from recjax.experience.tokenize import tokenized
from recjax.hub.policy import Policy
from recjax.models.sampling import Sampling

logger = logging.getLogger(__name__)

# Reasons why a completion cannot be trained on, independent of its reward.
UNUSABLE = ("no_tokens", "no_logprobs", "other_sampling", "too_long")


class Candidate(NamedTuple):
    """A group to train on: ids of its completions, and ids of completions still without a reward at its deadline."""

    ids: tuple[str, ...]
    unrewarded: tuple[str, ...]


class Found(NamedTuple):
    """Completions in a store that have not been taken.

    candidates: groups to train on, with the oldest weights first.
    unusable: ids of completions that cannot be trained on, with the reasons.
    unrewarded: ids of completions without a reward at their deadline that no candidate lists as unrewarded.
    without_reward: number of groups that consist only of `unrewarded` completions.
    late: ids of completions that got their reward only after they were given up at the deadline.
    waiting: number of waiting groups, their completions, and their completions without a reward.
    """

    candidates: list[Candidate]
    unusable: dict[str, str]
    unrewarded: tuple[str, ...]
    without_reward: int
    late: frozenset[str]
    waiting: tuple[int, int, int]


class _Waiting(NamedTuple):
    """A completion not taken yet: its tokenized rows, the key that it shares with its group, and its policy version
    (None if the version does not count updates of this run)."""

    rows: list[Experience]
    key: str
    version: int | None

    @property
    def has_reward(self) -> bool:
        return self.rows[0].reward is not None


class _Part(NamedTuple):
    """A part file after reading, with a stamp that changes when a writer replaces it, and the id of its first row.

    Attributes:
        completions: usable completions, by id, that were not taken when the part was read.
        ids: ids of all completions.
        rewarded: ids of completions with a reward.
        unusable: ids of completions that cannot be trained on, with the reasons.
    """

    stamp: tuple[int, int, int]
    first: str
    completions: dict[str, _Waiting]
    ids: frozenset[str]
    rewarded: frozenset[str]
    unusable: dict[str, str]


class Follower:
    """Reads a store as it grows.

    Attributes:
        folder: folder of the store.
        waited_seconds: seconds spent waiting for the groups of the last step.
        last: completions found for the last step.
    """

    def __init__(self, config: Config, policy: Policy, run: str):
        """Reads no files; the store need not exist yet.

        Args:
            run: id of this run; a server that follows the run writes it into the metadata of its rows.
        """
        experience = config.experience
        self.folder = Path(experience.store)
        self._config, self._policy, self._run = config, policy, run
        self._deadline = experience.deadline_seconds and timedelta(seconds=experience.deadline_seconds)
        self._parts: dict[Path, _Part] = {}
        self._left: dict[str, _Waiting] = {}
        self._failed: dict[Path | None, tuple[int, ...] | str] = {}
        self._warned: set[str] = set()
        self.waited_seconds: float = 0.0
        self.last: Found | None = None

    def found(self, followed: Followed, step: int) -> Found:
        """Reads the current store and finds the completions that have not been taken.

        Args:
            step: number of the next training step.
        Raises:
            ValueError: the store is damaged.
        """
        self._refresh(followed)
        left, late, unusable = {}, set(), {}
        for part in self._parts.values():
            late |= followed.unrewarded & part.rewarded
            left |= {name: one for name, one in part.completions.items() if not followed.has(part.first, name)}
            unusable |= {name: why for name, why in part.unusable.items() if not followed.has(part.first, name)}
        self._left, groups = left, {}
        for name, one in left.items():
            groups.setdefault(one.key, []).append(name)
        candidates, unrewarded, without_reward, waiting = [], [], 0, [0, 0, 0]
        for names in groups.values():
            ready, given_up, still = self._divided({name: left[name] for name in names})
            candidates += ready
            unrewarded, without_reward = unrewarded + given_up, without_reward + (len(given_up) == len(names))
            pending = sum(not left[name].has_reward for name in still)
            waiting = [waiting[0] + bool(still), waiting[1] + len(still), waiting[2] + pending]
        candidates.sort(key=lambda one: min(self._version(left[name], step) or 0 for name in one.ids))
        return Found(candidates, unusable, tuple(unrewarded), without_reward, frozenset(late), tuple(waiting))

    def compacted(self, followed: Followed) -> Followed:
        """Makes the record of taken completions smaller and removes taken completions from the cache."""
        followed = followed.compacted({part.first: part.ids for part in self._parts.values()})
        for path, part in self._parts.items():
            kept = {name: one for name, one in part.completions.items() if not followed.has(part.first, name)}
            self._parts[path] = part._replace(completions=kept)
            if part.first in followed.parts:
                self._parts[path] = part._replace(completions={}, ids=frozenset(), unusable={})
        return followed

    def group(self, candidate: Candidate, step: int) -> Group:
        """Makes the group of a candidate from the latest call of `found`.

        Args:
            step: number of the next training step.
        """
        success, chosen = self._config.task.success, [self._left[name] for name in candidate.ids]
        group = group_of(chosen[0].rows[0].group_id, [row for one in chosen for row in one.rows])
        versions = [self._version(one, step) for one in chosen]
        completions = map(as_trained, group.completions, [success] * len(chosen), versions)
        return group._replace(completions=tuple(completions))

    # --- Groups.

    def _divided(self, completions: dict[str, _Waiting]) -> tuple[list[Candidate], list[str], list[str]]:
        """Divides completions with the same key into groups to train on, ids given up at their deadline without a
        group, and waiting ids."""
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
        return self._deadline is not None and datetime.now(UTC) - one.rows[0].time >= self._deadline

    def _version(self, one: _Waiting, step: int) -> int | None:
        """The policy version; None if it cannot measure staleness.

        A version ahead of the run is from a checkpoint that was damaged later; the run resumed from an earlier one.
        """
        return one.version if one.version is not None and one.version < step else None

    def _waiting(self, rows: list[Experience]) -> _Waiting:
        row, by = rows[0], self._config.experience.group_by
        said = json.loads(row.metadata) if row.metadata else {}
        value, key = said.get(by.removeprefix("metadata.")) if by.startswith("metadata.") else None, row.group_id
        if by == "prompt":
            key = f"prompt {hashlib.sha256(row.prompt_tokens.tobytes()).hexdigest()}"
        elif value is not None:
            key = f"value {json.dumps(value, sort_keys=True)}"
        # Updates of another run cannot measure staleness; version 0 is assumed to be this run's initial policy.
        is_known = row.policy_version == 0 or said.get("run") == self._run
        return _Waiting(rows, key, row.policy_version if is_known else None)

    # --- Parts.

    def _refresh(self, followed: Followed) -> None:
        """Reads new and changed parts. An unreadable part raises an error only at the second attempt, because a writer
        may have replaced or deleted it during the first."""
        try:
            ledger.check_none_lost(self.folder)
            self._failed.pop(None, None)
        except ValueError as error:
            if self._failed.get(None) == str(error):
                raise
            self._failed[None] = str(error)
        parts = {}
        for path in store.part_files(self.folder):
            before = self._parts.get(path)
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            stamp = status.st_ino, status.st_mtime_ns, status.st_size
            if before is None or before.stamp != stamp:
                try:
                    before = self._read(path, stamp, followed)
                except (ValueError, OSError) as error:
                    if self._failed.get(path) == stamp:
                        raise ValueError(f"experience.store = {str(self.folder)!r}: {error}") from error
                    self._failed[path] = stamp
            if before is not None:
                parts[path] = before
        self._parts = parts

    def _read(self, path: Path, stamp: tuple[int, int, int], followed: Followed) -> _Part:
        rows = list(store.to_rows(store.read_part(path)))
        completions: dict[str, list[Experience]] = {}
        for row in rows:
            completions.setdefault(row.trajectory or row.id, []).append(row)
        first, rewarded = rows[0].id, {name for name, own in completions.items() if own[0].reward is not None}
        usable, unusable = {}, {}
        for name, own in completions.items():
            if followed.has(first, name):
                continue
            own, why, words = self._usable(own)
            if why is None:
                usable[name] = self._waiting(own)
                continue
            unusable[name] = why
            if why not in self._warned:
                self._warned.add(why)
                logger.warning("%s: skipped, like all later completions with this problem: %s", self.folder, words)
        return _Part(stamp, first, usable, frozenset(completions), frozenset(rewarded), unusable)

    def _usable(self, rows: list[Experience]) -> tuple[list[Experience], str | None, str]:
        """The tokenized rows of a completion, the reason why they are unusable (or None), and a message about it."""
        first, missing, rollout = rows[0], self._config.experience.missing_logprobs, self._config.rollout
        try:
            rows = tokenized(rows, self._policy)
        except ValueError as error:
            return rows, "no_tokens", str(error)
        place = f"row {first.id!r} of source {first.source!r}"
        longest = max(len(row.prompt_tokens) + len(row.completion_tokens) for row in rows)
        if longest > rollout.max_context_tokens:
            limit = f"rollout.max_context_tokens = {rollout.max_context_tokens}; raise the limit"
            return rows, "too_long", f"{place} has {longest} tokens, more than {limit}"
        if missing == "unneeded":
            return rows, None, ""
        if any(row.behavior_logprobs is None for row in rows):
            remedy = "set experience.missing_logprobs to 'unneeded' or 'current'"
            why = "no_logprobs" if missing == "error" else None
            return rows, why, f"{place} has no behavior log-probs; {remedy}"
        if first.sampling != rollout.sampling():
            found = first.sampling or ("unknown",) * len(Sampling._fields)
            was, takes = (", ".join(map(str, sampling)) for sampling in (found, rollout.sampling()))
            words = f"{place} was sampled with {', '.join(Sampling._fields)} = {was}, and rollout has {takes}"
            return rows, "other_sampling", f"{words}: its log-probs belong to another distribution"
        return rows, None, ""
