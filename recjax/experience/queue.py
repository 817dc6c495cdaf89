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
    replaces: True to take new groups first, and to sample trained groups only in the places of missing new ones.
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
    replaces: bool = False


def settings_of(config: Config) -> Settings:
    """Builds the settings from a config, except for `judge`, which also depends on the reward weights."""
    experience = config.experience or ExperienceConfig()
    regime = config.regime
    late = experience.late or LateConfig()
    interval = experience.replay.draw_every if experience.replay else 1
    most = experience.refill.batches if experience.refill else IDLE_ROUNDS
    # With `refill`, further batches take the place of groups without a signal, so these leave the queue.
    once = ONCE.model_copy(update={"keep_no_signal": experience.refill is None})
    limits = experience.replay or once
    bounds = [limit for limit in (limits.max_staleness, regime.max_staleness) if limit is not None]
    if bounds:
        # A batch is taken at its first update, and its last one must be within the limit.
        limits = limits.model_copy(update={"max_staleness": min(bounds) - (config.training.updates - 1)})
    return Settings(
        offset=regime.sync_offset,
        sampling_interval=interval,
        late=late,
        replay=experience.replay is not None,
        oldest_first=regime.mode == "async" or experience.follow,
        limits=limits,
        newest=None if config.task.curriculum is None else config.task.curriculum.newest,
        idle_rounds=regime.sync_offset + late.longest + interval * most + (experience.refill is None),
        replaces=experience.replay is not None and experience.refill is not None,
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
    round_ = queue.round + early
    lacking = [[completion.grade is None for completion in group.completions] for group in groups]
    count = sum(map(sum, lacking))
    delays = reward_delays(count, settings.late.shortest, settings.late.longest, number, seed)
    # Completions that arrive with their grade, such as stored ones, are due at once: round 0.
    rounds = iter((round_ + settings.offset + delays).tolist())
    arrived = [
        Waiting(group, tuple(next(rounds) if lacks else 0 for lacks in flags), round_, grades if count else None)
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
    pending = [entry for entry in queue.waiting if entry.grades is not None]
    is_due = [all_of_them or any(0 < round_ <= queue.round for round_ in entry.due) for entry in pending]
    last = max(itertools.compress(range(len(is_due)), is_due), default=-1)
    # All groups of a batch hold the same object of grades, so its identity stands for the batch.
    wanted = {id(entry.grades) for entry in pending[: last + 1]}
    waiting = []
    batches = []
    for batch, entries in itertools.groupby(queue.waiting, key=lambda entry: id(entry.grades)):
        entries = list(entries)
        if batch in wanted:
            grades = entries[0].grades
            assert grades is not None
            grades = grades if isinstance(grades, Sequence) else grades.result()
            groups = with_grades([entry.group for entry in entries], grades)
            entries = [entry._replace(group=group, grades=None) for entry, group in zip(entries, groups, strict=True)]
            batches.append([_chosen(entry.group, entry.due) for entry in entries])
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
    limits = settings.limits
    still_waiting = []
    ready = list(queue.ready)
    counts = Counter(queue.counts)
    rates = dict(queue.rates)
    for entry in queue.waiting:
        rewarded = _rewarded(entry, queue.round, counts)
        is_pending = any(rewarded.due)
        if rewarded.round is None:
            # The group has left at its deadline; its late rewards are only counted and read by a curriculum.
            if is_pending:
                still_waiting.append(rewarded)
            late = _chosen(entry.group, [0 < round_ <= queue.round for round_ in entry.due])
            # They set a rate only where the deadline has left it unknown.
            if settings.newest is not None and rates.get(_key_of(late), 0.0) is None:
                rates[_key_of(late)] = _pass_rate(late)
            continue
        # Batches are sampled `offset` rounds ahead; their deadline must not count these rounds.
        waited = queue.round - rewarded.round - settings.offset
        is_over = settings.late.deadline is not None and waited >= settings.late.deadline
        if rewarded.round > queue.round or (is_pending and not is_over):
            still_waiting.append(rewarded)
            continue
        group = rewarded.group
        if is_pending:
            # At the deadline the group splits: graded completions are trained on, the others wait to be counted.
            pending_due = tuple(filter(None, rewarded.due))
            late = rewarded._replace(group=_chosen(group, rewarded.due), due=pending_due, round=None)
            counts["rows_without_reward"] += len(late.due)
            still_waiting.append(late)
            group = _chosen(group, [not round_ for round_ in rewarded.due])
        if settings.newest is not None:
            rate = _pass_rate(group)
            before = rates.get(_key_of(group))
            # A group without a reward makes the rate unknown: a curriculum avoids problems that nobody can grade.
            if before is not None and rate is not None:
                rate = before + settings.newest * (rate - before)
            rates[_key_of(group)] = rate
        if not group.completions:
            counts["groups_without_reward"] += 1
        elif limits.keep_no_signal or settings.judge.has_signal(group):
            ready.append(Entry(group, step, 0))
        else:
            counts["no_signal"] += 1
            counts["no_signal_completions"] += len(group.completions)
            counts["no_signal_tokens"] += sum(completion.sampled_tokens for completion in group.completions)
    queue = queue._replace(waiting=tuple(still_waiting), counts=counts, rates=rates)
    fresh = _with_ready(queue, replay.fresh(ready, step, limits), ready, "stale")
    # Beyond the capacity, the groups that became ready first leave.
    excess = max(len(fresh.ready) - limits.capacity, 0)
    return _with_ready(fresh, fresh.ready[excess:], fresh.ready, "capacity")


def _key_of(group: Group) -> str:
    return problem_key(group.prompt, group.answer)


def _pass_rate(group: Group) -> float | None:
    """The share of accurate completions among completions with a reward and a verdict; None without any."""
    grades = [completion.known_grade for completion in group.completions]
    accurate = [grade.accurate for grade in grades if grade.reward is not None and grade.accurate is not None]
    return sum(accurate) / len(accurate) if accurate else None


def _rewarded(entry: Waiting, now: int, counts: Counter[str]) -> Waiting:
    """The group with the rewards that arrive until the round `now`; adds to the counts.

    Completions leave if their reward is None, or if the reward arrives after the group has left.
    """
    completions = []
    due = []
    for completion, round_ in zip(entry.group.completions, entry.due, strict=True):
        if 0 < round_ <= now:
            round_ = 0
            if completion.known_grade.failure is not None:
                counts[f"ungraded/{completion.known_grade.failure}"] += 1
            if entry.round is None or completion.known_grade.reward is None:
                counts["rewards_too_late" if entry.round is None else "rows_without_reward"] += 1
                continue
        completions.append(completion)
        due.append(round_)
    return entry._replace(group=entry.group._replace(completions=tuple(completions)), due=tuple(due))


def _with_ready(queue: Queue, kept: Sequence[Entry], before: Sequence[Entry], reason: str) -> Queue:
    """Makes `kept` the ready entries, and counts the entries that were only in `before` under `reason`."""
    gone = Counter({reason: len(before) - len(kept)})
    if reason == "stale" and len(kept) < len(before):  # otherwise no tokens need to be counted
        gone["stale_tokens"] = _tokens(before) - _tokens(kept)
    return queue._replace(ready=tuple(kept), counts=queue.counts + gone)


def _tokens(entries: Sequence[Entry]) -> int:
    """The number of sampled tokens."""
    return sum(completion.sampled_tokens for entry in entries for completion in entry.group.completions)


def take(queue: Queue, count: int, step: int, seed: int, settings: Settings) -> tuple[Queue, list[Group] | None]:
    """Takes the groups to train on at `step`, and removes groups after their last use.

    Returns:
        The queue, and the groups; None instead of the groups if fewer than `count` are ready.
    """
    # Groups may have aged since they became ready: other groups were trained on first.
    queue = _with_ready(queue, replay.fresh(queue.ready, step, settings.limits), queue.ready, "stale")
    ready = queue.ready
    if len(ready) < count:
        return queue, None
    if settings.replay:
        chosen = [index for index, entry in enumerate(ready) if settings.replaces and not entry.used][:count]
        others = [index for index in range(len(ready)) if index not in chosen]
        sampled = replay.sample_entries(
            [ready[index] for index in others], count - len(chosen), step, seed, settings.limits, settings.judge
        )
        chosen = sorted([*chosen, *(others[index] for index in sampled)])
    elif settings.oldest_first:
        # Generators finish batches in any order; groups of other models have no version and go first.
        chosen = sorted(range(len(ready)), key=lambda index: oldest_version(ready[index].group) or 0)[:count]
    else:
        chosen = range(count)
    groups = [ready[index].group for index in chosen]
    chosen = {*chosen}
    used = [entry._replace(used=entry.used + (index in chosen)) for index, entry in enumerate(ready)]
    remaining = [entry for entry in used if entry.used < settings.limits.max_reuse]
    return _with_ready(queue, remaining, used, "used_up"), groups


def replaced(queue: Queue, before: Sequence[Group], after: Sequence[Group]) -> Queue:
    """The queue with groups that `take` gave in another form, such as with log-probs, for their later uses.

    Args:
        before: the groups that `take` gave.
        after: the new form of each.
    """
    # By identity: groups of a followed store may have equal ids.
    new = {id(group): other for group, other in zip(before, after, strict=True)}
    ready = tuple(entry._replace(group=new.get(id(entry.group), entry.group)) for entry in queue.ready)
    return queue._replace(ready=ready)


def queued_versions(queue: Queue, settings: Settings) -> list[int]:
    """The policy versions of groups that wait for training; excludes ready groups in replay, which have no order."""
    # A group that has left at its deadline is in training already; only its late completions still wait.
    groups = [entry.group for entry in queue.waiting if entry.round is not None]
    groups += [] if settings.replay else [entry.group for entry in queue.ready]
    return [version for group in groups if (version := oldest_version(group)) is not None]


def counts(queue: Queue) -> dict[str, int]:
    """The queue's metrics; counts of removed groups are totals over the run and exclude groups that were used up."""
    rounds = [entry.round for entry in queue.waiting if entry.round is not None]
    return {
        # A batch that was sampled early counts in its own round.
        "experience/drawn_batches": queue.counts["batches"] - any(round_ > queue.round for round_ in rounds),
        "experience/waiting_groups": sum(round_ <= queue.round for round_ in rounds),
        "experience/ready_groups": len(queue.ready),
        **{f"experience/left_out/{reason}": queue.counts[reason] for reason in (*LOST, *LEFT) if reason != "used_up"},
    }


def to_plain(queue: Queue) -> tuple[list[Group], dict[str, Any]]:
    """Splits a queue into its groups and JSON data; `from_plain` is the inverse.

    Args:
        queue: queue between two steps, after waiting for all grades.
    """
    plain = {
        "waiting": [[entry.due, entry.round] for entry in queue.waiting],
        "ready": [[entry.added, entry.used] for entry in queue.ready],
    }
    return [entry.group for entry in (*queue.waiting, *queue.ready)], queue._asdict() | plain


def from_plain(groups: Sequence[Group], plain: dict[str, Any]) -> Queue:
    """Joins the groups and the JSON data of `to_plain` to a queue."""
    numbers = [*plain["waiting"], *plain["ready"]]
    entries = list(zip(groups, numbers, strict=True))
    count = len(plain["waiting"])
    waiting = tuple(Waiting(group, tuple(due), round_) for group, (due, round_) in entries[:count])
    ready = tuple(Entry(group, *uses) for group, uses in entries[count:])
    return Queue(plain["round"], waiting, ready, Counter(plain["counts"]), plain.get("rates", {}))
