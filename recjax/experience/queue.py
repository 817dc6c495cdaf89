"""The queue between the sampler and the update: plain data and pure functions.

A group enters once, with or without its rewards, and leaves once. Time is measured in rounds. Each round adds the batch
that is due and delivers the rewards that are due; then a step takes groups and trains on them. After the first rounds,
every round is a step. Every regime is a setting of the queue: `sync_offset` and late rewards delay rewards, a deadline
releases groups with missing rewards, replay allows several uses, and asynchronous sampling changes the order.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from recjax.config import Config, ExperienceConfig, LateConfig, ReplayConfig
from recjax.experience import replay
from recjax.experience.followed import Followed
from recjax.experience.group import (
    Grade,
    Group,
    add_grades,
    completion_ids,
    is_whole,
    oldest_version,
    without,
)
from recjax.experience.replay import Entry, Judge
from recjax.experience.store import groups_from_bytes, groups_to_bytes

# Without replay, every group is trained on once, in order of arrival, even if its rewards are all equal.
ONCE = ReplayConfig(capacity=sys.maxsize, max_reuse=1, keep_no_signal=True)

# Reasons for removing completions and groups before their first or last use.
LOST = ("rows_without_reward", "groups_without_reward", "rewards_too_late")
LEFT = ("capacity", "stale", "stale_tokens", "used_up", "no_signal", "no_signal_completions", "no_signal_tokens")


class Settings(NamedTuple):
    """The queue's settings.

    offset: rounds by which every reward is delayed, because batches are sampled this many rounds ahead.
    sampling_interval: rounds from one batch that the policy samples to the next.
    late: delays of rewards in addition to `offset`, and their deadline.
    replay: True to sample from the ready groups at random; False to take them in order.
    oldest_first: True to take groups with the oldest weights first; False to take them in order of arrival.
    limits: limits for ready groups; see `ONCE` for the limits without replay.
    judge: decides which groups have a signal, and which completions and rewards count for a group's priority.
    """

    offset: int
    sampling_interval: int
    late: LateConfig
    replay: bool
    oldest_first: bool
    limits: ReplayConfig
    judge: Judge = Judge()


def settings_of(config: Config) -> Settings:
    """Builds the settings from a config, except for `judge`, which also depends on the reward weights."""
    experience, regime = config.experience or ExperienceConfig(), config.regime
    once = ONCE.model_copy(update={"keep_no_signal": experience.refill is None})
    limits = experience.replay or once
    if bounds := [limit for limit in (limits.max_staleness, regime.max_staleness) if limit is not None]:
        limits = limits.model_copy(update={"max_staleness": min(bounds)})
    return Settings(
        offset=regime.sync_offset,
        sampling_interval=experience.replay.draw_every if experience.replay else 1,
        late=experience.late or LateConfig(),
        replay=experience.replay is not None,
        oldest_first=regime.mode == "async" or experience.follow,
        limits=limits,
    )


@runtime_checkable
class ToCome(Protocol):
    """Grades that are still being computed."""

    def result(self) -> Sequence[Grade]:
        """Waits for the grades; returns one per completion, in order."""


class Coming(NamedTuple):
    """Rewards of a batch that are not delivered yet.

    ids: ids of the completions.
    rounds: round in which each completion gets its reward.
    grades: grades of the completions.
    groups: the sampled batch; empty once the grades are known.
    """

    ids: tuple[str, ...]
    rounds: tuple[int, ...]
    grades: Sequence[Grade] | ToCome
    groups: tuple[Group, ...] = ()


class Waiting(NamedTuple):
    """A group with missing rewards, and the round from which its deadline counts."""

    group: Group
    since: int


class Queue(NamedTuple):
    """All sampled groups that may still be trained on.

    round: number of the current round.
    added: number of batches added so far.
    idle: rounds since the last training step.
    coming: rewards that are not delivered yet.
    early: groups sampled before their round, which has not begun yet.
    waiting: groups with missing rewards, in order of arrival.
    ready: groups to train on.
    beside: groups of a store for the next step.
    left: number of groups, completions or tokens removed over the whole run, by reason.
    ungraded: number of completions delivered since the last step that could not be graded, by reason.
    followed: record of the completions taken from a followed store.
    """

    round: int = 0
    added: int = 0
    idle: int = 0
    coming: tuple[Coming, ...] = ()
    early: tuple[Waiting, ...] = ()
    waiting: tuple[Waiting, ...] = ()
    ready: tuple[Entry, ...] = ()
    beside: tuple[Group, ...] = ()
    left: dict[str, int] = dict.fromkeys((*LOST, *LEFT), 0)
    ungraded: dict[str, int] = {}
    followed: Followed = Followed()


def begin_step(queue: Queue) -> Queue:
    """Resets the counts of the previous step; call it before the rounds of a step."""
    return queue._replace(ungraded={})


def begin_round(queue: Queue) -> Queue:
    """Begins the next round; the groups that were sampled early for this round start to wait."""
    waiting, added = (*queue.waiting, *queue.early), queue.added + bool(queue.early)
    return queue._replace(round=queue.round + 1, idle=queue.idle + 1, added=added, waiting=waiting, early=())


def is_sampling_round(round_: int, settings: Settings) -> bool:
    """True if the policy samples a batch for a round."""
    return (round_ - 1) % settings.sampling_interval == 0


def add(
    queue: Queue,
    groups: Sequence[Group],
    grades: Sequence[Grade] | ToCome,
    number: int,
    seed: int,
    settings: Settings,
    early: bool = False,
) -> Queue:
    """Adds a batch and schedules the delivery of its rewards; the schedule depends only on (seed, number).

    Args:
        groups: groups of the batch; completions that already have a grade, such as stored ones, keep it.
        grades: grades of all completions without one, in order.
        number: number of the batch, from 1.
        early: True if the batch belongs to the next round.
    """
    own = [group._replace(completions=tuple(one for one in group.completions if not one.grade)) for group in groups]
    ids, round_ = completion_ids(own), queue.round + early
    delays = reward_delays(len(ids), settings.late.shortest, settings.late.longest, number, seed) + settings.offset
    coming = Coming(ids, tuple((round_ + delays).tolist()), grades, tuple(own))
    # Batches are sampled `offset` rounds ahead; their deadline must not count these rounds.
    waiting = tuple(Waiting(group, round_ + settings.offset) for group in groups)
    queue = queue._replace(coming=(*queue.coming, coming))
    if early:
        return queue._replace(early=waiting)
    return queue._replace(added=queue.added + 1, waiting=(*queue.waiting, *waiting))


def add_beside(queue: Queue, groups: Sequence[Group]) -> Queue:
    """Adds whole groups of a store, which the next step takes."""
    return queue._replace(beside=tuple(groups))


def add_rewarded(queue: Queue, groups: Sequence[Group], step: int, settings: Settings) -> Queue:
    """Adds whole groups, which are ready at once if the limits allow them.

    Args:
        step: number of the next training step, from 1.
    """
    arrived = tuple(Waiting(group, queue.round) for group in groups)
    return _released(queue._replace(waiting=(*queue.waiting, *arrived)), step, settings)


def reward_delays(rows: int, shortest: int, longest: int, batch: int, seed: int) -> np.ndarray:
    """The delay of each row's reward in rounds, sampled uniformly from `shortest` to `longest`, both included.

    A pure function of its arguments.
    """
    return np.random.default_rng([seed, 6, batch]).integers(shortest, longest + 1, rows)


def wait_for_grades(queue: Queue, all_of_them: bool = False) -> tuple[Queue, list[list[Group]]]:
    """Waits for the grades of every batch with a reward that is due; returns the queue and the newly graded batches.

    Waits for batches in order, and so also for every batch before one that is due.

    Args:
        all_of_them: True to wait for all batches, so that the queue is plain data.
    """
    due = [all_of_them or min(one.rounds, default=queue.round) <= queue.round for one in queue.coming]
    last = max((place for place, is_due in enumerate(due) if is_due), default=-1)
    coming, found = list(queue.coming), []
    for place, one in enumerate(coming[: last + 1]):
        if one.groups:
            grades = one.grades if isinstance(one.grades, Sequence) else one.grades.result()
            by_id = dict(zip(one.ids, grades, strict=True))
            found.append([add_grades(group, by_id) for group in one.groups])
            coming[place] = one._replace(grades=tuple(grades), groups=())
    return queue._replace(coming=tuple(coming)), found


def deliver(queue: Queue, step: int, settings: Settings) -> Queue:
    """Gives the rewards of this round to their groups and makes groups ready; call `wait_for_grades` before.

    A group becomes ready when all its rewards are there, or `late.deadline` rounds after it began to wait. At the
    deadline it loses the completions without rewards; a group without any rewards is removed.

    Args:
        step: number of the next training step, from 1.
    """
    now, coming = {}, []
    for one in queue.coming:
        if one.groups:  # not graded yet
            coming.append(one)
            continue
        arrivals = list(zip(one.ids, one.rounds, one.grades, strict=True))
        now.update({name: grade for name, round_, grade in arrivals if round_ <= queue.round})
        if later := [arrival for arrival in arrivals if arrival[1] > queue.round]:
            coming.append(Coming(*zip(*later, strict=True)))
    return _released(_rewarded(queue._replace(coming=tuple(coming)), now), step, settings)


def _rewarded(queue: Queue, now: dict[str, Grade]) -> Queue:
    """Gives rewards to waiting groups; counts the rewards whose completions have already left the queue."""
    here = {*completion_ids([one.group for one in queue.waiting])}
    none = {name for name, grade in now.items() if grade.reward is None}
    waiting = tuple(one._replace(group=without(add_grades(one.group, now), none)) for one in queue.waiting)
    left = dict(queue.left)
    left["rows_without_reward"] += len(none & here)
    left["rewards_too_late"] += len(now.keys() - here)
    failures = [grade.failure for grade in now.values() if grade.failure is not None]
    ungraded = dict(Counter(queue.ungraded) + Counter(failures)) if failures else queue.ungraded
    return queue._replace(waiting=waiting, left=left, ungraded=ungraded)


def _released(queue: Queue, step: int, settings: Settings) -> Queue:
    kept, ready, left, limits = [], list(queue.ready), dict(queue.left), settings.limits
    for one in queue.waiting:
        group = one.group
        if not is_whole(group):
            if settings.late.deadline is None or queue.round - one.since < settings.late.deadline:
                kept.append(one)
                continue
            completions = tuple(completion for completion in group.completions if completion.grade)
            left["rows_without_reward"] += len(group.completions) - len(completions)
            group = group._replace(completions=completions)
        if not group.completions:
            left["groups_without_reward"] += 1
            continue
        if limits.keep_no_signal or settings.judge.has_signal(group):
            ready.append(Entry(group, step, 0))
        else:
            left["no_signal"] += 1
            left["no_signal_completions"] += len(group.completions)
            left["no_signal_tokens"] += sum(completion.sampled_tokens for completion in group.completions)
    fresh = _kept(queue._replace(waiting=tuple(kept), left=left), replay.fresh(ready, step, limits), ready, "stale")
    excess = max(len(fresh.ready) - limits.capacity, 0)
    return _kept(fresh, fresh.ready[excess:], fresh.ready, "capacity")


def _kept(queue: Queue, kept: Sequence[Entry], of: Sequence[Entry], reason: str) -> Queue:
    """Replaces the ready entries with `kept` and counts the entries that were only in `of` under `reason`."""
    gone = {reason: len(of) - len(kept)}
    if reason == "stale" and gone[reason]:
        gone["stale_tokens"] = _tokens(of) - _tokens(kept)
    left = queue.left | {name: queue.left[name] + count for name, count in gone.items()}
    return queue._replace(ready=tuple(kept), left=left)


def _tokens(entries: Sequence[Entry]) -> int:
    """The number of sampled tokens."""
    return sum(completion.sampled_tokens for entry in entries for completion in entry.group.completions)


def take(queue: Queue, count: int, step: int, seed: int, settings: Settings) -> tuple[Queue, list[Group] | None]:
    """Takes the groups to train on at `step`: sampled groups, then stored ones. Removes groups after their last use.

    Args:
        count: number of groups that the policy sampled.
    Returns:
        The queue, and the groups; None instead of the groups if fewer than `count` are ready.
    """
    queue = _kept(queue, replay.fresh(queue.ready, step, settings.limits), queue.ready, "stale")
    ready = queue.ready
    if len(ready) < count:
        return queue, None
    if settings.replay:
        seen = [entry._replace(group=settings.judge.seen(entry.group)) for entry in ready]
        chosen = replay.sample_entries(seen, count, step, seed, settings.limits)
    elif settings.oldest_first:
        chosen = sorted(range(len(ready)), key=lambda place: oldest_version(ready[place].group) or 0)[:count]
    else:
        chosen = range(count)
    groups = [ready[place].group for place in chosen]
    chosen = {*chosen}
    used = [entry._replace(used=entry.used + (place in chosen)) for place, entry in enumerate(ready)]
    queue = _kept(queue, [entry for entry in used if entry.used < settings.limits.max_reuse], used, "used_up")
    return queue._replace(idle=0, beside=()), [*groups, *queue.beside]


def queued_versions(queue: Queue, settings: Settings) -> list[int]:
    """The policy versions of groups that wait for training; excludes ready groups in replay, which have no order."""
    groups = [one.group for one in queue.waiting]
    groups += [] if settings.replay else [entry.group for entry in queue.ready]
    return [version for group in groups if (version := oldest_version(group)) is not None]


def counts(queue: Queue) -> dict[str, int]:
    """The queue's metrics; counts of removed groups are totals over the run and exclude groups that were used up."""
    return {
        "experience/drawn_batches": queue.added,
        "experience/waiting_groups": len(queue.waiting),
        "experience/ready_groups": len(queue.ready),
        **{f"experience/left_out/{reason}": queue.left[reason] for reason in (*LOST, *LEFT) if reason != "used_up"},
    }


def to_plain(queue: Queue) -> tuple[bytes, dict[str, Any]]:
    """Converts a queue to the bytes of all its groups, and JSON data; `from_plain` is the inverse.

    Args:
        queue: queue between two steps, after waiting for all grades.
    """
    placed = [("early", one.group, [one.since]) for one in queue.early]
    placed += [("waiting", one.group, [one.since]) for one in queue.waiting]
    placed += [("ready", entry.group, [entry.added, entry.used]) for entry in queue.ready]
    coming = [[one.ids, one.rounds, one.grades] for one in queue.coming]
    plain = {"round": queue.round, "added": queue.added, "idle": queue.idle, "left": queue.left, "coming": coming}
    plain |= {"followed": queue.followed.to_json()} if any(queue.followed) else {}
    groups = groups_to_bytes([group for _, group, _ in placed])
    return groups, plain | {"groups": [[place, *numbers] for place, _, numbers in placed]}


def from_plain(groups: bytes, plain: dict[str, Any]) -> Queue:
    """Converts the bytes and JSON data of `to_plain` back to a queue.

    Raises:
        ValueError: the bytes are damaged.
    """
    held: dict[str, list] = {"early": [], "waiting": [], "ready": []}
    for group, (place, *numbers) in zip(groups_from_bytes(groups), plain["groups"], strict=True):
        held[place].append(Entry(group, *numbers) if place == "ready" else Waiting(group, *numbers))
    coming = [
        Coming(tuple(ids), tuple(rounds), tuple(map(Grade.from_json, grades)))
        for ids, rounds, grades in plain["coming"]
    ]
    places = {place: tuple(entries) for place, entries in held.items()}
    return Queue(
        plain["round"],
        plain["added"],
        plain["idle"],
        tuple(coming),
        left=dict.fromkeys((*LOST, *LEFT), 0) | plain["left"],
        followed=Followed.from_json(plain.get("followed", {})),
        **places,
    )
