"""The queue between the sources and the update: plain data and pure functions.

`put` adds groups with or without their rewards, `deliver` gives them the rewards that are due, and `take` takes groups
to train on. Whoever calls these three counts the rounds, in `Queue.round`. After the first rounds, every round is a
step. Every regime is a setting of the queue: `sync_offset` and late rewards delay rewards, a deadline releases groups
with missing rewards, replay allows several uses, and asynchronous sampling changes the order.
"""

import itertools
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float

from recjax.config import Config, ExperienceConfig, LateConfig, ReplayConfig
from recjax.experience import replay
from recjax.experience.batch import Batch
from recjax.experience.group import Grade, Group, group_staleness, oldest_version, with_grades
from recjax.experience.replay import Entry, Judge
from recjax.tasks.problems import problem_key

# Without replay, every group is trained on once, in order of arrival, even if its rewards are all equal.
ONCE = ReplayConfig(capacity=sys.maxsize, max_reuse=1, keep_no_signal=True)

# Limit of batches for one step, in addition to the batches of the config's delays.
IDLE_ROUNDS = 100

# Reasons for removing completions and groups before their first or last use.
LOST = ("rows_without_reward", "groups_without_reward", "rewards_too_late")
LEFT = (
    "capacity",
    "stale",
    "stale_tokens",
    "drift",
    "used_up",
    "no_signal",
    "no_signal_completions",
    "no_signal_tokens",
)


class Settings(NamedTuple):
    """The queue's settings; the defaults give each group once, in order of arrival.

    offset: rounds by which every reward is delayed, because batches are sampled this many rounds ahead.
    sampling_interval: rounds from one batch that the policy samples to the next.
    late: delays of rewards in addition to `offset`, and their deadline.
    replay: True to sample from the ready groups at random; False to take them in order.
    mean_staleness: limit of the mean staleness of the groups that a step takes.
    replaces: True to take new groups first, and to sample trained groups only in the places of missing new ones.
    oldest_first: True to take groups with the oldest weights first; False to take them in order of arrival.
    limits: limits for ready groups; see `ONCE` for the limits without replay.
    newest: weight of a group in its problem's recent pass rate; None: no curriculum reads these rates.
    judge: decides which groups have a signal, and which completions and rewards count for a group's priority.
    idle_rounds: rounds without a step after which a run ends with an error, unless its source is endless.
    """

    offset: int = 0
    sampling_interval: int = 1
    late: LateConfig = LateConfig()
    replay: bool = False
    oldest_first: bool = False
    limits: ReplayConfig = ONCE
    newest: float | None = None
    judge: Judge = Judge()
    idle_rounds: float = math.inf
    replaces: bool = False
    mean_staleness: float = math.inf


def settings_of(config: Config) -> Settings:
    """Builds the settings from a config, except for `judge`, which also depends on the reward weights."""
    regime = config.regime
    experience = config.experience
    if experience is None:
        experience = ExperienceConfig()
    late = experience.late
    if late is None:
        late = LateConfig()
    # With `refill`, further batches take the place of groups without a signal, so these leave the queue.
    limits = ONCE.model_copy(update={"keep_no_signal": experience.refill is None})
    interval = 1
    if experience.replay is not None:
        limits = experience.replay
        interval = experience.replay.draw_every
    bounds = [limit for limit in (limits.max_staleness, regime.max_staleness) if limit is not None]
    if bounds:
        # A batch is taken at its first update, and its last one must be within the limit.
        limits = limits.model_copy(update={"max_staleness": min(bounds) - (config.training.updates - 1)})
    mean_staleness = math.inf
    if regime.max_mean_staleness is not None:
        mean_staleness = regime.max_mean_staleness - (config.training.updates - 1)
    longest_delay = regime.sync_offset + late.longest
    if experience.refill is None:
        idle_rounds = longest_delay + interval * IDLE_ROUNDS + 1
    else:
        idle_rounds = longest_delay + interval * experience.refill.batches
    newest = None
    if config.task.curriculum is not None:
        newest = config.task.curriculum.newest
    return Settings(
        offset=regime.sync_offset,
        sampling_interval=interval,
        late=late,
        replay=experience.replay is not None,
        oldest_first=regime.mode == "async" or experience.follow,
        limits=limits,
        newest=newest,
        idle_rounds=idle_rounds,
        replaces=experience.replay is not None and experience.refill is not None,
        mean_staleness=mean_staleness,
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
    number: number of the batch, from 1; 0: the policy did not sample the groups as a batch.
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
    due: round in which the reward of each completion arrives, from 1; 0: the reward has arrived.
    round: round of the group's batch; None: see `has_left`.
    grades: the grades of all groups of the batch; None once the completions have them.
    """

    group: Group
    due: tuple[int, ...]
    round: int | None
    grades: Sequence[Grade] | ToCome | None = None

    @property
    def has_left(self) -> bool:
        """True for late completions after the deadline, at which their group left without them."""
        return self.round is None

    @property
    def is_pending(self) -> bool:
        """True if a reward is still to arrive."""
        return any(self.due)


class Queue(NamedTuple):
    """All sampled groups that may still be trained on.

    round: number of the current round.
    waiting: groups with missing rewards, in order of arrival; groups of the next round too, if they were sampled early.
    ready: groups to train on.
    counts: totals over the run: groups, completions or tokens removed, by reason; completions that could not be graded,
        by `ungraded/` and the reason; and `batches` that the policy sampled.
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
    arrival_round = queue.round + arrival.early
    ungraded = 0
    for group in arrival.groups:
        ungraded += sum(completion.grade is None for completion in group.completions)
    late = settings.late
    delays = reward_delays(ungraded, late.shortest, late.longest, arrival.number, seed)
    reward_rounds = iter((arrival_round + settings.offset + delays).tolist())
    grades = None
    if ungraded:
        grades = arrival.grades
    waiting = list(queue.waiting)
    for group in arrival.groups:
        due = []
        for completion in group.completions:
            if completion.grade is None:
                due.append(next(reward_rounds))
            else:
                due.append(0)  # completions that arrive with their grade, such as stored ones, have their reward
        waiting.append(Waiting(group, tuple(due), arrival_round, grades))
    sampled_batches = int(arrival.number > 0)
    counts = queue.counts + Counter(arrival.left_out) + Counter(batches=sampled_batches)
    return queue._replace(waiting=tuple(waiting), counts=counts)


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
    # All groups of a batch hold the same object of grades, so the object's identity stands for the batch.
    ungraded = []  # the batch of each entry without grades
    needed = 0  # number of such entries up to the last one with a reward that is due
    for entry in queue.waiting:
        if entry.grades is None:
            continue
        ungraded.append(id(entry.grades))
        is_due = any(0 < round_ <= queue.round for round_ in entry.due)
        if is_due or all_of_them:
            needed = len(ungraded)
    needed_batches = set(ungraded[:needed])

    waiting = []
    graded_batches = []
    # Entries whose grades are None form batches too, which `needed_batches` does not contain.
    for batch, batch_entries in itertools.groupby(queue.waiting, key=lambda entry: id(entry.grades)):
        entries = list(batch_entries)
        if batch in needed_batches:
            grades = entries[0].grades
            assert grades is not None
            if not isinstance(grades, Sequence):
                grades = grades.result()
            groups = with_grades([entry.group for entry in entries], grades)
            entries = [entry._replace(group=group, grades=None) for entry, group in zip(entries, groups, strict=True)]
            # Completions that had a grade before have 0 in `due`.
            graded_batches.append([_select(entry.group, entry.due) for entry in entries])
        waiting += entries
    return queue._replace(waiting=tuple(waiting)), graded_batches


def _select(group: Group, flags: Sequence[int | bool]) -> Group:
    """The group with only the completions whose flag is not 0."""
    return group._replace(completions=tuple(itertools.compress(group.completions, flags)))


def deliver(queue: Queue, step: int, settings: Settings) -> Queue:
    """Gives the rewards of this round to their groups, after a wait for grades that are due, and makes groups ready.

    A group becomes ready when it has all its rewards, or `late.deadline` rounds after it started to wait. At the
    deadline it loses the completions without rewards; a group without any rewards is removed.

    Args:
        step: number of the next training step, from 1.
    """
    queue, _ = wait_for_grades(queue)
    still_waiting = []
    ready = list(queue.ready)
    counts = Counter(queue.counts)
    rates = dict(queue.rates)
    for entry in queue.waiting:
        rewarded = _rewarded(entry, queue.round, counts)
        if entry.has_left:
            # The late rewards are only counted, and read by a curriculum.
            if rewarded.is_pending:
                still_waiting.append(rewarded)
            if settings.newest is not None:
                arrived = _select(entry.group, [0 < round_ <= queue.round for round_ in entry.due])
                _set_unknown_rate(rates, arrived)
        elif _waits(rewarded, queue.round, settings):
            still_waiting.append(rewarded)
        else:
            group = rewarded.group
            if rewarded.is_pending:
                # At the deadline the group splits: graded completions are trained on, the others wait to be counted.
                group, late = _split(rewarded)
                counts["rows_without_reward"] += len(late.due)
                still_waiting.append(late)
            if settings.newest is not None:
                _update_rate(rates, group, settings.newest)
            if not group.completions:
                counts["groups_without_reward"] += 1
            elif settings.limits.keep_no_signal or settings.judge.has_signal(group):
                ready.append(Entry(group, step, 0))
            else:
                counts["no_signal"] += 1
                counts["no_signal_completions"] += len(group.completions)
                counts["no_signal_tokens"] += sum(completion.sampled_tokens for completion in group.completions)
    queue = queue._replace(waiting=tuple(still_waiting), counts=counts, rates=rates)
    queue = _with_ready(queue, replay.fresh(ready, step, settings.limits), ready, "stale")
    # Beyond the capacity, the groups that became ready first leave.
    excess = max(len(queue.ready) - settings.limits.capacity, 0)
    return _with_ready(queue, queue.ready[excess:], queue.ready, "capacity")


def _waits(entry: Waiting, now: int, settings: Settings) -> bool:
    """True if a group is not ready: its round has not begun, or rewards are missing before its deadline."""
    assert entry.round is not None
    if entry.round > now:
        return True
    if not entry.is_pending:
        return False
    if settings.late.deadline is None:
        return True
    # Batches are sampled `offset` rounds ahead; their deadline must not count these rounds.
    waited = now - entry.round - settings.offset
    return waited < settings.late.deadline


def _split(entry: Waiting) -> tuple[Group, Waiting]:
    """Splits a group at its deadline into its graded completions, and an entry for its late completions."""
    graded = _select(entry.group, [round_ == 0 for round_ in entry.due])
    pending_due = tuple(round_ for round_ in entry.due if round_ > 0)
    late = entry._replace(group=_select(entry.group, entry.due), due=pending_due, round=None)
    return graded, late


def _set_unknown_rate(rates: dict[str, float | None], late: Group) -> None:
    """Sets the pass rate of a problem from late completions, but only if the deadline has left the rate unknown."""
    key = _key_of(late)
    if key in rates and rates[key] is None:
        rates[key] = _pass_rate(late)


def _update_rate(rates: dict[str, float | None], group: Group, newest: float) -> None:
    """Moves the pass rate of a problem toward a new group's rate, which has the weight `newest`."""
    key = _key_of(group)
    rate = _pass_rate(group)
    before = rates.get(key)
    # A group without a reward makes the rate unknown: a curriculum avoids problems that nobody can grade.
    if before is not None and rate is not None:
        rate = before + newest * (rate - before)
    rates[key] = rate


def _key_of(group: Group) -> str:
    return problem_key(group.prompt, group.answer)


def _pass_rate(group: Group) -> float | None:
    """The share of accurate completions among completions with a reward and a verdict; None without any."""
    grades = [completion.known_grade for completion in group.completions]
    accurate = [grade.accurate for grade in grades if grade.reward is not None and grade.accurate is not None]
    if not accurate:
        return None
    return sum(accurate) / len(accurate)


def _rewarded(entry: Waiting, now: int, counts: Counter[str]) -> Waiting:
    """Gives a group the rewards that arrive until the round `now`, and counts completions that leave.

    Completions leave if their reward is None, or if the reward arrives after the group has left.
    """
    completions = []
    due = []
    for completion, round_ in zip(entry.group.completions, entry.due, strict=True):
        arrives = 0 < round_ <= now
        if arrives:
            grade = completion.known_grade
            if grade.failure is not None:
                counts[f"ungraded/{grade.failure}"] += 1
            if entry.has_left:
                counts["rewards_too_late"] += 1
                continue
            if grade.reward is None:
                counts["rows_without_reward"] += 1
                continue
            round_ = 0
        completions.append(completion)
        due.append(round_)
    return entry._replace(group=entry.group._replace(completions=tuple(completions)), due=tuple(due))


def _with_ready(queue: Queue, kept: Sequence[Entry], before: Sequence[Entry], reason: str) -> Queue:
    """Makes `kept` the ready entries, and counts the entries that were only in `before` under `reason`."""
    gone = Counter({reason: len(before) - len(kept)})
    if reason == "stale" and len(kept) < len(before):
        # To count tokens takes time, so only removed entries cause it.
        gone["stale_tokens"] = _tokens(before) - _tokens(kept)
    return queue._replace(ready=tuple(kept), counts=queue.counts + gone)


def _tokens(entries: Sequence[Entry]) -> int:
    """The number of sampled tokens."""
    tokens = 0
    for entry in entries:
        tokens += sum(completion.sampled_tokens for completion in entry.group.completions)
    return tokens


def take(queue: Queue, count: int, step: int, seed: int, settings: Settings) -> tuple[Queue, list[Group] | None]:
    """Takes the groups to train on at `step`, and removes groups after their last use.

    Returns:
        The queue, and the groups; None instead of the groups if fewer than `count` are ready.
    """
    # Groups may have aged since they became ready: other groups were trained on first.
    queue = _with_ready(queue, replay.fresh(queue.ready, step, settings.limits), queue.ready, "stale")
    queue = _with_ready(queue, replay.near(queue.ready, settings.limits), queue.ready, "drift")
    ready = queue.ready
    if len(ready) < count:
        return queue, None
    order = _order(ready, count, step, seed, settings)
    taken = _within_mean(ready, order, count, step, settings.mean_staleness)
    if taken is None:
        return queue, None
    passed_over = set()
    if settings.replay:
        taken = sorted(taken)
    elif taken:
        # Older groups would be too old in later batches as well.
        passed_over = set(order[: order.index(taken[-1])]).difference(taken)
    groups = [ready[index].group for index in taken]
    used = list(ready)
    for index in taken:
        used[index] = used[index]._replace(used=used[index].used + 1)
    current = [entry for index, entry in enumerate(used) if index not in passed_over]
    queue = _with_ready(queue, current, used, "stale")
    remaining = [entry for entry in current if entry.used < settings.limits.max_reuse]
    return _with_ready(queue, remaining, current, "used_up"), groups


def _order(ready: Sequence[Entry], count: int, step: int, seed: int, settings: Settings) -> list[int]:
    """The indices of the ready entries, in the order in which a step would take them."""
    if settings.replay:
        new = []
        if settings.replaces:
            new = [index for index, entry in enumerate(ready) if not entry.used][:count]
        others = [index for index in range(len(ready)) if index not in new]
        entries = [ready[index] for index in others]
        order = replay.order_entries(entries, step=step, seed=seed, limits=settings.limits, judge=settings.judge)
        return new + [others[index] for index in order]
    if settings.oldest_first:
        # Generators finish batches in any order. Groups of other models have no version and count as version 0.
        versions = []
        for entry in ready:
            version = oldest_version(entry.group)
            if version is None:
                version = 0
            versions.append(version)
        return sorted(range(len(ready)), key=versions.__getitem__)
    return list(range(len(ready)))


def _within_mean(ready: Sequence[Entry], order: Sequence[int], count: int, step: int, limit: float) -> list[int] | None:
    """The first `count` indices, in which later groups replace the stalest ones until the mean staleness is allowed.

    Groups of other models have no staleness and do not count.

    Returns:
        None if no replacement meets the limit.
    """
    taken = list(order[:count])
    if math.isinf(limit):
        return taken
    ages = [group_staleness(entry.group, step) for entry in ready]
    own = {index for index, entry in enumerate(ready) if oldest_version(entry.group) is not None}
    following = list(order[count:])
    while own.intersection(taken) and np.mean([ages[index] for index in taken if index in own]) > limit:
        if not following:
            return None
        taken.remove(max(taken, key=ages.__getitem__))
        taken.append(following.pop(0))
    return taken


def with_measures(
    queue: Queue,
    groups: Sequence[Group],
    batch: Batch,
    logprobs: Float[np.ndarray, "batch time"],
    advantages: Float[np.ndarray, "batch #time"],
    rows: Bool[np.ndarray, " batch"] | None = None,
) -> Queue:
    """The queue with headroom and drift of the groups that an update has trained on.

    Args:
        groups: groups of the batch.
        batch: the groups, as the update read them.
        logprobs: log π before the update.
        advantages: advantages of the update.
        rows: rows of the update's minibatch; None: all.
    """
    mask = batch.completion_mask
    if rows is not None:
        mask = mask & rows[:, None]
    assert batch.behavior_logprobs is not None  # the config refuses to measure without them
    advantages = np.broadcast_to(advantages, mask.shape)
    numbers = {_ids(group): number for number, group in enumerate(groups)}
    ready = []
    for entry in queue.ready:
        tokens = mask & (batch.group_ids == numbers.get(_ids(entry.group), -1))[:, None]
        if tokens.any():
            headroom = replay.headroom(logprobs[tokens], advantages[tokens])
            entry = entry._replace(headroom=headroom, drift=replay.drift(logprobs, batch.behavior_logprobs, tokens))
        ready.append(entry)
    return queue._replace(ready=tuple(ready))


def _ids(group: Group) -> tuple[str, ...]:
    """Ids of the completions, which tell groups apart also after a resume: a followed store may repeat groups' ids."""
    return tuple(completion.id for completion in group.completions)


def replaced(queue: Queue, before: Sequence[Group], after: Sequence[Group]) -> Queue:
    """The queue with a new form of groups that `take` returned, such as with log-probs, for their later uses.

    Args:
        before: the groups that `take` returned.
        after: the new form of each.
    """
    # Groups of a followed store may have equal ids, so their identity tells them apart.
    new = {id(group): new_group for group, new_group in zip(before, after, strict=True)}
    ready = tuple(entry._replace(group=new.get(id(entry.group), entry.group)) for entry in queue.ready)
    return queue._replace(ready=ready)


def queued_versions(queue: Queue, settings: Settings) -> list[int]:
    """The policy versions of groups that wait for training; excludes ready groups in replay, which have no order."""
    # A group that has left at its deadline is in training already; only its late completions still wait.
    groups = [entry.group for entry in queue.waiting if not entry.has_left]
    if not settings.replay:
        groups += [entry.group for entry in queue.ready]
    versions = [oldest_version(group) for group in groups]
    return [version for version in versions if version is not None]


def counts(queue: Queue) -> dict[str, int]:
    """The queue's metrics; counts of removed groups are totals over the run and exclude groups that were used up."""
    rounds = [entry.round for entry in queue.waiting if entry.round is not None]
    # A batch that was sampled early counts in its own round.
    early_batches = int(any(round_ > queue.round for round_ in rounds))
    metrics = {
        "experience/drawn_batches": queue.counts["batches"] - early_batches,
        "experience/waiting_groups": sum(round_ <= queue.round for round_ in rounds),
        "experience/ready_groups": len(queue.ready),
    }
    for reason in LOST + LEFT:
        if reason != "used_up":
            metrics[f"experience/left_out/{reason}"] = queue.counts[reason]
    return metrics


def to_plain(queue: Queue) -> tuple[list[Group], dict[str, Any]]:
    """Splits a queue into its groups and JSON data; `from_plain` is the inverse.

    Args:
        queue: queue between two steps, after waiting for all grades.
    """
    groups = [entry.group for entry in queue.waiting]
    groups += [entry.group for entry in queue.ready]
    plain = queue._asdict()
    plain["waiting"] = [[entry.due, entry.round] for entry in queue.waiting]
    plain["ready"] = [list(entry[1:]) for entry in queue.ready]
    return groups, plain


def from_plain(groups: Sequence[Group], plain: dict[str, Any]) -> Queue:
    """Joins the groups and the JSON data of `to_plain` to a queue."""
    count = len(plain["waiting"])
    waiting = []
    for group, (due, round_) in zip(groups[:count], plain["waiting"], strict=True):
        waiting.append(Waiting(group, tuple(due), round_))
    ready = []
    for group, values in zip(groups[count:], plain["ready"], strict=True):
        ready.append(Entry(group, *values))
    return Queue(
        round=plain["round"],
        waiting=tuple(waiting),
        ready=tuple(ready),
        counts=Counter(plain["counts"]),
        rates=plain.get("rates", {}),
    )
