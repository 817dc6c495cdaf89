"""The queue between the sources and the update: plain data and pure functions.

`put` adds groups with or without their rewards, `deliver` gives them the rewards that are due, and `take` takes groups
to train on. Time is measured in rounds. After the first rounds, every round is a step. Every regime is a setting of the
queue: `sync_offset` and late rewards delay rewards, a deadline releases groups with missing rewards, replay allows
several uses, and asynchronous sampling changes the order.
"""

import itertools
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from recjax.config import Config, ExperienceConfig, LateConfig, ReplayConfig
from recjax.experience import replay
from recjax.experience.group import Grade, Group, oldest_version, with_grades
from recjax.experience.replay import Entry, Judge
from recjax.experience.store import groups_from_bytes, groups_to_bytes
from recjax.tasks.problems import problem_key

# Without replay, every group is trained on once, in order of arrival, even if its rewards are all equal.
ONCE = ReplayConfig(capacity=sys.maxsize, max_reuse=1, keep_no_signal=True)

IDLE_ROUNDS = 100  # limit of batches for one step, in addition to those due to the config's delays

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
    newest: weight of a group in its problem's recent pass rate; None: no curriculum reads these rates.
    judge: decides which groups have a signal, and which completions and rewards count for a group's priority.
    idle_rounds: rounds without a step after which a run ends with an error, unless its source is endless.
    """

    offset: int
    sampling_interval: int
    late: LateConfig
    replay: bool
    oldest_first: bool
    limits: ReplayConfig
    newest: float | None = None
    judge: Judge = Judge()
    idle_rounds: float = math.inf


def settings_of(config: Config) -> Settings:
    """Builds the settings from a config, except for `judge`, which also depends on the reward weights."""
    experience, regime = config.experience or ExperienceConfig(), config.regime
    late, interval = experience.late or LateConfig(), experience.replay.draw_every if experience.replay else 1
    most = experience.refill.batches if experience.refill else IDLE_ROUNDS
    once = ONCE.model_copy(update={"keep_no_signal": experience.refill is None})
    limits = experience.replay or once
    if bounds := [limit for limit in (limits.max_staleness, regime.max_staleness) if limit is not None]:
        # A batch is taken at its first update, and its last one must be within the limit.
        limits = limits.model_copy(update={"max_staleness": min(bounds) - (config.training.updates - 1)})
    return Settings(
        offset=regime.sync_offset,
        sampling_interval=interval,
        late=late,
        replay=experience.replay is not None,
        oldest_first=regime.mode == "async" or experience.follow,
        limits=limits,
        newest=config.task.curriculum and config.task.curriculum.newest,
        idle_rounds=regime.sync_offset + late.longest + interval * most + (experience.refill is None),
    )


@runtime_checkable
class ToCome(Protocol):
    """Grades that are still being computed."""

    def result(self) -> Sequence[Grade]:
        """Waits for the grades; returns one per completion, in order."""


class Arrival(NamedTuple):
    """Groups that a source gives to the queue.

    groups: completions that already have a grade, such as stored ones, keep it.
    grades: grades of all completions without one, in order.
    number: number of the batch, from 1; 0: the groups are no batch that the policy samples.
    early: True if the batch belongs to the next round.
    left_out: number of groups or completions that the source removed, by reason.
    """

    groups: Sequence[Group]
    grades: Sequence[Grade] | ToCome = ()
    number: int = 0
    early: bool = False
    left_out: Mapping[str, int] = {}


class Waiting(NamedTuple):
    """A group with missing rewards.

    group: the group; a completion has its grade once it is computed, even if its reward arrives later.
    due: round in which the reward of each completion arrives, from 1; 0: the reward is there.
    round: round of the group's batch; None: the group has left at its deadline without these completions.
    grades: the grades of the whole batch; None once the completions have them.
    """

    group: Group
    due: tuple[int, ...]
    round: int | None
    grades: Sequence[Grade] | ToCome | None = None


class Queue(NamedTuple):
    """All sampled groups that may still be trained on.

    round: number of the current round.
    waiting: groups with missing rewards, in order of arrival; groups of the next round too, if they were sampled early.
    ready: groups to train on.
    counts: over the whole run, the number of groups, completions or tokens removed, by reason; of completions that
        could not be graded, by `ungraded/` and the reason; and of `batches` that the policy sampled.
    rates: recent pass rate of each problem that a curriculum has drawn, by `problem_key`; None: the newest group of the
        problem had no reward.
    """

    round: int = 0
    waiting: tuple[Waiting, ...] = ()
    ready: tuple[Entry, ...] = ()
    counts: Counter[str] = Counter()
    rates: Mapping[str, float | None] = {}


def put(queue: Queue, arrival: Arrival, seed: int, settings: Settings) -> Queue:
    """Adds groups and schedules the delivery of their rewards; the schedule depends only on (seed, batch number)."""
    groups, grades, number, early, left_out = arrival
    lacking, round_ = [[one.grade is None for one in group.completions] for group in groups], queue.round + early
    rows = sum(map(sum, lacking))
    delays = reward_delays(rows, settings.late.shortest, settings.late.longest, number, seed)
    rounds = iter((round_ + settings.offset + delays).tolist())
    arrived = [
        Waiting(group, tuple(next(rounds) if lacks else 0 for lacks in flags), round_, grades if rows else None)
        for group, flags in zip(groups, lacking, strict=True)
    ]
    counts = queue.counts + Counter(left_out) + Counter(batches=int(number > 0))
    return queue._replace(waiting=(*queue.waiting, *arrived), counts=counts)


def reward_delays(rows: int, shortest: int, longest: int, batch: int, seed: int) -> np.ndarray:
    """The delay of each row's reward in rounds, sampled uniformly from `shortest` to `longest`, both included.

    A pure function of its arguments.
    """
    return np.random.default_rng([seed, 6, batch]).integers(shortest, longest + 1, rows)


def wait_for_grades(queue: Queue, all_of_them: bool = False) -> tuple[Queue, list[list[Group]]]:
    """Waits for the grades of every batch with a reward that is due.

    Waits for batches in order, and so also for every batch before one that is due.

    Args:
        all_of_them: True to wait for all batches, so that the queue is plain data.
    Returns:
        The queue, and the newly graded batches without the completions that had a grade before.
    """
    pending = [one for one in queue.waiting if one.grades is not None]
    due = [all_of_them or any(0 < round_ <= queue.round for round_ in one.due) for one in pending]
    last = max(itertools.compress(range(len(due)), due), default=-1)
    wanted = {id(one.grades) for one in pending[: last + 1]}
    waiting, batches = [], []
    for batch, entries in itertools.groupby(queue.waiting, key=lambda one: id(one.grades)):
        entries = list(entries)
        if batch in wanted:
            grades = entries[0].grades
            grades = grades if isinstance(grades, Sequence) else grades.result()
            groups = with_grades([one.group for one in entries], grades)
            entries = [one._replace(group=group, grades=None) for one, group in zip(entries, groups, strict=True)]
            batches.append([_chosen(one.group, one.due) for one in entries])
        waiting += entries
    return queue._replace(waiting=tuple(waiting)), batches


def _chosen(group: Group, flags: Sequence[int | bool]) -> Group:
    return group._replace(completions=tuple(itertools.compress(group.completions, flags)))


def deliver(queue: Queue, step: int, settings: Settings) -> Queue:
    """Gives the rewards of this round to their groups and makes groups ready; call `wait_for_grades` before.

    A group becomes ready when all its rewards are there, or `late.deadline` rounds after it began to wait. At the
    deadline it loses the completions without rewards; a group without any rewards is removed.

    Args:
        step: number of the next training step, from 1.
    """
    kept, ready, counts, limits = [], list(queue.ready), Counter(queue.counts), settings.limits
    rates = dict(queue.rates)
    for entry in queue.waiting:
        one = _rewarded(entry, queue.round, counts)
        group, is_pending = one.group, any(one.due)
        if one.round is None:  # only the counts, and a curriculum, still need these completions
            kept += [one] if is_pending else []
            late = _chosen(entry.group, [0 < round_ <= queue.round for round_ in entry.due])
            if settings.newest is not None and rates.get(_key_of(late), 0.0) is None:
                rates[_key_of(late)] = _pass_rate(late)
            continue
        # Batches are sampled `offset` rounds ahead; their deadline must not count these rounds.
        waited = queue.round - one.round - settings.offset
        is_over = settings.late.deadline is not None and waited >= settings.late.deadline
        if one.round > queue.round or (is_pending and not is_over):
            kept.append(one)
            continue
        if is_pending:
            late = one._replace(group=_chosen(group, one.due), due=tuple(filter(None, one.due)), round=None)
            counts["rows_without_reward"] += len(late.due)
            kept.append(late)
            group = _chosen(group, [not round_ for round_ in one.due])
        if settings.newest is not None:
            before, rate = rates.get(_key_of(group)), _pass_rate(group)
            is_known = before is not None and rate is not None
            rates[_key_of(group)] = before + settings.newest * (rate - before) if is_known else rate
        if not group.completions:
            counts["groups_without_reward"] += 1
        elif limits.keep_no_signal or settings.judge.has_signal(group):
            ready.append(Entry(group, step, 0))
        else:
            counts["no_signal"] += 1
            counts["no_signal_completions"] += len(group.completions)
            counts["no_signal_tokens"] += sum(completion.sampled_tokens for completion in group.completions)
    queue = queue._replace(waiting=tuple(kept), counts=counts, rates=rates)
    fresh = _kept(queue, replay.fresh(ready, step, limits), ready, "stale")
    excess = max(len(fresh.ready) - limits.capacity, 0)
    return _kept(fresh, fresh.ready[excess:], fresh.ready, "capacity")


def _key_of(group: Group) -> str:
    return problem_key(group.prompt, group.answer)


def _pass_rate(group: Group) -> float | None:
    """The share of accurate completions among completions with a reward; None without a reward."""
    passed = [one.grade.accurate for one in group.completions if one.grade.reward is not None]
    return sum(passed) / len(passed) if passed else None


def _rewarded(one: Waiting, now: int, counts: Counter[str]) -> Waiting:
    """The group with the rewards that arrive until the round `now`; adds to the counts.

    Completions leave if their reward is None, or if the reward arrives after the group has left.
    """
    completions, due = [], []
    for completion, round_ in zip(one.group.completions, one.due, strict=True):
        if 0 < round_ <= now:
            round_ = 0
            if completion.grade.failure is not None:
                counts[f"ungraded/{completion.grade.failure}"] += 1
            if one.round is None or completion.grade.reward is None:
                counts["rewards_too_late" if one.round is None else "rows_without_reward"] += 1
                continue
        completions.append(completion)
        due.append(round_)
    return one._replace(group=one.group._replace(completions=tuple(completions)), due=tuple(due))


def _kept(queue: Queue, kept: Sequence[Entry], of: Sequence[Entry], reason: str) -> Queue:
    """Replaces the ready entries with `kept` and counts the entries that were only in `of` under `reason`."""
    gone = Counter({reason: len(of) - len(kept)})
    if reason == "stale":
        gone["stale_tokens"] = _tokens(of) - _tokens(kept)
    return queue._replace(ready=tuple(kept), counts=queue.counts + gone)


def _tokens(entries: Sequence[Entry]) -> int:
    """The number of sampled tokens."""
    return sum(completion.sampled_tokens for entry in entries for completion in entry.group.completions)


def take(queue: Queue, count: int, step: int, seed: int, settings: Settings) -> tuple[Queue, list[Group] | None]:
    """Takes the groups to train on at `step`, and removes groups after their last use.

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
    return _kept(queue, [entry for entry in used if entry.used < settings.limits.max_reuse], used, "used_up"), groups


def queued_versions(queue: Queue, settings: Settings) -> list[int]:
    """The policy versions of groups that wait for training; excludes ready groups in replay, which have no order."""
    groups = [one.group for one in queue.waiting if one.round is not None]
    groups += [] if settings.replay else [entry.group for entry in queue.ready]
    return [version for group in groups if (version := oldest_version(group)) is not None]


def counts(queue: Queue) -> dict[str, int]:
    """The queue's metrics; counts of removed groups are totals over the run and exclude groups that were used up."""
    rounds = [one.round for one in queue.waiting if one.round is not None]
    return {
        "experience/drawn_batches": queue.counts["batches"] - any(round_ > queue.round for round_ in rounds),
        "experience/waiting_groups": sum(round_ <= queue.round for round_ in rounds),
        "experience/ready_groups": len(queue.ready),
        **{f"experience/left_out/{reason}": queue.counts[reason] for reason in (*LOST, *LEFT) if reason != "used_up"},
    }


def to_plain(queue: Queue) -> tuple[bytes, dict[str, Any]]:
    """Converts a queue to the bytes of all its groups, and JSON data; `from_plain` is the inverse.

    Args:
        queue: queue between two steps, after waiting for all grades.
    """
    plain = {
        "waiting": [[one.due, one.round] for one in queue.waiting],
        "ready": [[entry.added, entry.used] for entry in queue.ready],
    }
    return groups_to_bytes([one.group for one in (*queue.waiting, *queue.ready)]), queue._asdict() | plain


def from_plain(groups: bytes, plain: dict[str, Any]) -> Queue:
    """Converts the bytes and JSON data of `to_plain` back to a queue.

    Raises:
        ValueError: the bytes are damaged.
    """
    numbers, count = [*plain["waiting"], *plain["ready"]], len(plain["waiting"])
    held = list(zip(groups_from_bytes(groups), numbers, strict=True))
    waiting = tuple(Waiting(group, tuple(due), round_) for group, (due, round_) in held[:count])
    ready = tuple(Entry(group, *uses) for group, uses in held[count:])
    return Queue(plain["round"], waiting, ready, Counter(plain["counts"]), plain.get("rates", {}))
