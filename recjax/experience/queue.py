"""The one queue between the sampler and the update. Plain data and pure functions.

A group enters once, with or without its rewards, and leaves once. Time is in rounds. A round adds the batch that is
due and delivers the rewards that are due; then a step trains on what it takes. Once a run is under way, a round is a
step. Every regime is a setting: `sync_offset` and late rewards are delays of rewards, a deadline lets groups go without
some, replay is a number of uses with limits, and asynchronous sampling is an order.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from recjax.config import Config, ExperienceConfig, LateConfig, ReplayConfig
from recjax.experience import followed, replay
from recjax.experience.followed import Followed
from recjax.experience.group import (
    Grade,
    Group,
    completion_ids,
    graded,
    is_whole,
    oldest_version,
    without,
)
from recjax.experience.replay import Entry, Judge
from recjax.experience.rows import groups_of, rows_of
from recjax.experience.store import Experience

# Without replay a group is trained on once, in the order of arrival, whatever it teaches.
ONCE = ReplayConfig(capacity=sys.maxsize, max_reuse=1, keep_no_signal=True)

# Why completions and groups leave without being trained on, or before their last use.
LOST = ("rows_without_reward", "groups_without_reward", "rewards_too_late")
LEFT = ("capacity", "stale", "stale_tokens", "used_up", "no_signal", "no_signal_completions", "no_signal_tokens")


class Settings(NamedTuple):
    """What a config says of the way that groups take.

    offset: rounds that every reward comes later, the batches being sampled so much ahead.
    sampling_interval: rounds from one batch that the policy samples to the next.
    late: how much later than that rewards come.
    replay: whether groups are sampled from those that are ready, or taken in order.
    oldest_first: the order is that of the weights that sampled a group, not that of arrival.
    limits: of the groups that are ready; without replay those of a queue.
    judge: says which groups have a signal, and what a group's priority is of.
    """

    offset: int
    sampling_interval: int
    late: LateConfig
    replay: bool
    oldest_first: bool
    limits: ReplayConfig
    judge: Judge = Judge()


def settings_of(config: Config) -> Settings:
    """The settings that a config says; `judge` also depends on the weights of the reward."""
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
    """Grades that are still computed; `result` waits for them."""

    def result(self) -> Sequence[Grade]:
        """One grade a completion, in order."""


class Coming(NamedTuple):
    """Rewards on their way to the completions of a batch.

    ids: of the completions.
    rounds: in which each of them is delivered.
    grades: theirs.
    groups: the batch as it was sampled, until its grades are known.
    """

    ids: tuple[str, ...]
    rounds: tuple[int, ...]
    grades: Sequence[Grade] | ToCome
    groups: tuple[Group, ...] = ()


class Waiting(NamedTuple):
    """A group without all of its rewards, and the round from which its deadline counts."""

    group: Group
    since: int


class Queue(NamedTuple):
    """Where every group is that was sampled and may still be trained on.

    round: the one begun last.
    added: batches that have come.
    idle: rounds since a step was trained.
    coming: rewards on their way.
    early: groups sampled before their round, and in it not yet.
    waiting: groups without all of their rewards, in the order of arrival.
    ready: groups to train on.
    beside: groups of a store for the next step.
    left: how many left over the whole run, by reason.
    ungraded: completions delivered since the last step, by why they could not be graded.
    followed: what has come from a store that is followed.
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
    """The queue before the rounds of a step."""
    return queue._replace(ungraded={})


def begin_round(queue: Queue) -> Queue:
    """The queue in its next round, which the groups that were sampled early for it have reached."""
    waiting, added = (*queue.waiting, *queue.early), queue.added + bool(queue.early)
    return queue._replace(round=queue.round + 1, idle=queue.idle + 1, added=added, waiting=waiting, early=())


def is_sampling_round(round_: int, settings: Settings) -> bool:
    """Whether the policy samples a batch for a round."""
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
    """The queue with a batch, and with its rewards on their way.

    When each reward is delivered follows from (seed, number).

    Args:
        groups: the batch. Completions that have a grade, of others, keep it.
        grades: of all completions that have none, in order.
        number: of the batch, from 1.
        early: the batch is of the next round.
    """
    own = [group._replace(completions=tuple(one for one in group.completions if not one.grade)) for group in groups]
    ids, round_ = completion_ids(own), queue.round + early
    delays = reward_delays(len(ids), settings.late.shortest, settings.late.longest, number, seed) + settings.offset
    coming = Coming(ids, tuple((round_ + delays).tolist()), grades, tuple(own))
    # Batches that are sampled ahead begin to wait only when their time has come.
    waiting = tuple(Waiting(group, round_ + settings.offset) for group in groups)
    queue = queue._replace(coming=(*queue.coming, coming))
    if early:
        return queue._replace(early=waiting)
    return queue._replace(added=queue.added + 1, waiting=(*queue.waiting, *waiting))


def add_beside(queue: Queue, groups: Sequence[Group]) -> Queue:
    """The queue with whole groups of a store, which the next step takes."""
    return queue._replace(beside=tuple(groups))


def add_rewarded(queue: Queue, groups: Sequence[Group], step: int, settings: Settings) -> Queue:
    """The queue with whole groups, which are ready at once, within the limits.

    Args:
        step: that is trained next, from 1.
    """
    arrived = tuple(Waiting(group, queue.round) for group in groups)
    return _released(queue._replace(waiting=(*queue.waiting, *arrived)), step, settings)


def reward_delays(rows: int, shortest: int, longest: int, batch: int, seed: int) -> np.ndarray:
    """Rounds that the reward of each row of a batch comes late, sampled evenly from both ends and between.

    A pure function of its arguments.
    """
    return np.random.default_rng([seed, 6, batch]).integers(shortest, longest + 1, rows)


def wait_for_grades(queue: Queue, all_of_them: bool = False) -> tuple[Queue, list[list[Group]]]:
    """The queue with the grades of every batch of which a reward is due, and the batches that have grades since.

    Batches are waited for in order, so a batch behind one that is not due may have to wait as well.

    Args:
        all_of_them: also those of batches of which no reward is due, which leaves plain data.
    """
    due = [all_of_them or min(one.rounds, default=queue.round) <= queue.round for one in queue.coming]
    last = max((place for place, is_due in enumerate(due) if is_due), default=-1)
    coming, found = list(queue.coming), []
    for place, one in enumerate(coming[: last + 1]):
        if one.groups:
            grades = one.grades if isinstance(one.grades, Sequence) else one.grades.result()
            by_id = dict(zip(one.ids, grades, strict=True))
            found.append([graded(group, by_id) for group in one.groups])
            coming[place] = one._replace(grades=tuple(grades), groups=())
    return queue._replace(coming=tuple(coming)), found


def deliver(queue: Queue, step: int, settings: Settings) -> Queue:
    """The queue after the rewards of this round have been given to their groups and whole groups have become ready.

    A group is ready when it is whole, or `late.deadline` rounds after it began to wait: then without the completions
    that have no reward, and not at all if that is every one. Grades that are due have been waited for.

    Args:
        step: that is trained next, from 1.
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
    """The queue after rewards have reached their groups; those of completions that have left are counted."""
    here = {*completion_ids([one.group for one in queue.waiting])}
    none = {name for name, grade in now.items() if grade.reward is None}
    waiting = tuple(one._replace(group=without(graded(one.group, now), none)) for one in queue.waiting)
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
    """The queue with `kept` as what is ready, and the others of `of` counted under `reason`."""
    gone = {reason: len(of) - len(kept)}
    if reason == "stale" and gone[reason]:
        gone["stale_tokens"] = _tokens(of) - _tokens(kept)
    left = queue.left | {name: queue.left[name] + count for name, count in gone.items()}
    return queue._replace(ready=tuple(kept), left=left)


def _tokens(entries: Sequence[Entry]) -> int:
    """That were sampled."""
    return sum(completion.sampled_tokens for entry in entries for completion in entry.group.completions)


def take(queue: Queue, count: int, step: int, seed: int, settings: Settings) -> tuple[Queue, list[Group] | None]:
    """The groups to train on at `step`, those of a store behind them, and the queue without what has had its last use.

    Args:
        count: of groups that the policy sampled.
    Returns:
        None in place of the groups where there are not enough yet.
    """
    queue = _kept(queue, replay.fresh(queue.ready, step, settings.limits), queue.ready, "stale")
    ready = queue.ready
    if len(ready) < count:
        return queue, None
    if settings.replay:
        seen = [entry._replace(group=settings.judge.seen(entry.group)) for entry in ready]
        chosen = replay.sampled(seen, count, step, seed, settings.limits)
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
    """The policy versions of groups whose turn is still to come; in replay the ready ones have no turn."""
    groups = [one.group for one in queue.waiting]
    groups += [] if settings.replay else [entry.group for entry in queue.ready]
    return [version for group in groups if (version := oldest_version(group)) is not None]


def counts(queue: Queue) -> dict[str, int]:
    """What a run logs of its queue; what left adds up over the run. Groups that were used up are not lost."""
    return {
        "experience/drawn_batches": queue.added,
        "experience/waiting_groups": len(queue.waiting),
        "experience/ready_groups": len(queue.ready),
        **{f"experience/left_out/{reason}": queue.left[reason] for reason in (*LOST, *LEFT) if reason != "used_up"},
    }


def to_plain(queue: Queue) -> tuple[list[Experience], dict[str, Any]]:
    """A queue as one list of groups, their rows end to end, and as what JSON holds; `from_plain` makes it again.

    Args:
        queue: between two steps, its grades all waited for.
    """
    placed = [("early", one.group, [one.since]) for one in queue.early]
    placed += [("waiting", one.group, [one.since]) for one in queue.waiting]
    placed += [("ready", entry.group, [entry.added, entry.used]) for entry in queue.ready]
    rows = rows_of([group for _, group, _ in placed], None, datetime.fromtimestamp(0, UTC))
    coming = [[one.ids, one.rounds, one.grades] for one in queue.coming]
    plain = {"round": queue.round, "added": queue.added, "idle": queue.idle, "left": queue.left, "coming": coming}
    plain |= {"followed": followed.to_plain(queue.followed)} if any(queue.followed) else {}
    return rows, plain | {"groups": [[place, *numbers] for place, _, numbers in placed]}


def from_plain(rows: Sequence[Experience], plain: dict[str, Any]) -> Queue:
    """The queue that `to_plain` took apart."""
    held: dict[str, list] = {"early": [], "waiting": [], "ready": []}
    for group, (place, *numbers) in zip(groups_of(rows), plain["groups"], strict=True):
        held[place].append(Entry(group, *numbers) if place == "ready" else Waiting(group, *numbers))
    coming = [
        Coming(tuple(ids), tuple(rounds), tuple(Grade(*grade) for grade in grades))
        for ids, rounds, grades in plain["coming"]
    ]
    places = {place: tuple(entries) for place, entries in held.items()}
    return Queue(
        plain["round"],
        plain["added"],
        plain["idle"],
        tuple(coming),
        left=dict.fromkeys((*LOST, *LEFT), 0) | plain["left"],
        followed=followed.from_plain(plain.get("followed", {})),
        **places,
    )
