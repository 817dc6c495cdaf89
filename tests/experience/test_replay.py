"""Replay: its limits hold whatever happens, nothing is lost uncounted, and a stored queue goes on as it would have."""

import collections
import json

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from recjax.config import LateConfig, ReplayConfig
from recjax.experience.batch import Shape, pad
from recjax.experience.group import group_staleness, oldest_version, reward_spread
from recjax.experience.queue import (
    ONCE,
    Arrival,
    Queue,
    Settings,
    deliver,
    from_plain,
    put,
    take,
    to_plain,
    wait_for_grades,
    with_measures,
)
from recjax.experience.records import groups_of
from tests.experience.groups import make_group, next_round, same_groups
from tests.experience.rows import make_row, text_row

LIMITS = st.builds(
    ReplayConfig,
    capacity=st.integers(1, 6),
    max_staleness=st.none() | st.integers(0, 4),
    max_reuse=st.integers(1, 4),
    half_life=st.none() | st.floats(0.1, 10),
    priority=st.sampled_from(["none", "reward_spread", "absolute_advantage", "headroom"]),
    order=st.sampled_from(["sampled", "highest"]),
    max_drift=st.none() | st.just(0.5),
    keep_no_signal=st.booleans(),
)
# Each step: rewards and age of the groups that come, and how many are taken.
COMING = st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=3), st.none() | st.integers(0, 6))
STEPS = st.lists(st.tuples(st.lists(COMING, max_size=4), st.integers(0, 4)), min_size=1, max_size=12)


def replaying(limits):
    """Settings of replay alone."""
    return Settings(0, 1, LateConfig(), True, False, limits)


def arrived(queue, groups, step, limits):
    """The queue after a round in which groups came whole."""
    queue = put(next_round(queue), Arrival(groups, [], step), 0, replaying(limits))
    return deliver(wait_for_grades(queue)[0], step, replaying(limits))


def taken(queue, count, step, seed, limits):
    """The queue after `count` groups, or as many as there are, have been taken, and these."""
    ready = len(take(queue, 0, step, seed, replaying(limits))[0].ready)
    return take(queue, min(count, ready), step, seed, replaying(limits))


def played(steps, limits, seed, reopen=()):
    """The queue and the taken groups after each step; at the steps in `reopen` it goes through its plain form."""
    queue, number = Queue(), 0
    for step, (coming, count) in enumerate(steps, start=1):
        if step in reopen:
            rows, plain = to_plain(queue)
            queue = from_plain(rows, json.loads(json.dumps(plain)))
        groups = []
        for rewards, age in coming:
            version = None if age is None else max(step - 1 - age, 0)
            groups.append(make_group(number, [float(reward) for reward in rewards], version))
            number += 1
        queue = arrived(queue, groups, step, limits)
        queue, chosen = taken(queue, count, step, seed, limits)
        ready = [
            entry._replace(headroom=entry.used / 8, drift=1 / step) if entry.used else entry for entry in queue.ready
        ]
        queue = queue._replace(ready=tuple(ready))
        yield step, number, queue, chosen


@given(steps=STEPS, limits=LIMITS, seed=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_limits_hold_and_every_group_is_accounted_for(steps, limits, seed):
    uses = collections.Counter()
    for step, came, queue, chosen in played(steps, limits, seed):
        assert len(queue.ready) <= limits.capacity
        assert len({group.id for group in chosen}) == len(chosen) <= steps[step - 1][1]
        uses.update(group.id for group in chosen)
        assert all(count <= limits.max_reuse for count in uses.values())
        for group in chosen:
            assert limits.max_staleness is None or group_staleness(group, step) <= limits.max_staleness
            assert limits.keep_no_signal or reward_spread(group) > 0
        for entry in queue.ready:
            assert entry.used == uses[entry.group.id] < limits.max_reuse
        groups_left = [queue.counts[reason] for reason in ("capacity", "stale", "drift", "used_up", "no_signal")]
        assert came == len(queue.ready) + sum(groups_left)


@given(steps=STEPS, limits=LIMITS, seed=st.integers(0, 9), reopen=st.sets(st.integers(1, 12)))
@settings(max_examples=30, deadline=None)
def test_a_reopened_queue_continues_as_without_interruption(steps, limits, seed, reopen):
    straight, resumed = (list(played(steps, limits, seed, where)) for where in ((), reopen))
    for (_, _, one, chosen), (_, _, other, chosen_again) in zip(straight, resumed, strict=True):
        assert one.counts == other.counts
        assert [entry[1:] for entry in one.ready] == [entry[1:] for entry in other.ready]
        assert [group.id for group in chosen] == [group.id for group in chosen_again]
        assert all(map(same_groups, chosen, chosen_again))


def test_replayed_groups_replace_only_groups_without_a_signal(monkeypatch):
    limits = ReplayConfig(max_reuse=3)
    plain = replaying
    replacing = lambda limits: plain(limits)._replace(replaces=True)  # noqa: E731
    monkeypatch.setattr(f"{__name__}.replaying", replacing)
    right, equal = [0.0, 1.0], [1.0, 1.0]
    queue = arrived(Queue(), [make_group(0, right), make_group(1, right), make_group(2, equal)], 1, limits)
    assert take(queue, 3, 1, 0, replacing(limits))[1] is None, "a buffer with too few groups: another batch is needed"
    queue = arrived(queue, [make_group(3, right)], 1, limits)
    queue, first = taken(queue, 3, 1, 0, limits)
    assert names(first) == names([make_group(0), make_group(1), make_group(3)])
    queue = arrived(queue, [make_group(4, right), make_group(5, equal), make_group(6, right)], 2, limits)
    found = set()
    for seed in range(20):
        _, second = taken(queue, 3, 2, seed, limits)
        assert names(second) >= names([make_group(4), make_group(6)]), "new groups come first"
        found |= names(second)
    assert found == names([make_group(i) for i in (0, 1, 3, 4, 6)]), "any trained group may take the place"


def names(groups):
    return {group.id for group in groups}


def taken_often(limits, groups, step=1, times=400, count=1):
    """How often each group is taken from the same queue under different seeds."""
    queue, found = Queue(), collections.Counter()
    for number, group in enumerate(groups):
        queue = arrived(queue, [group], 1 + number, limits)
    for seed in range(times):
        found.update(group.id for group in taken(queue, count, step, seed, limits)[1])
    return [found[group.id] / times for group in groups]


def test_groups_are_taken_in_proportion():
    equal = [make_group(i) for i in range(4)]
    np.testing.assert_allclose(taken_often(ReplayConfig(), equal), [1 / 4] * 4, atol=0.08)
    halved = taken_often(ReplayConfig(half_life=1.0), equal, step=4)
    np.testing.assert_allclose(halved, np.array([1, 2, 4, 8]) / 15, atol=0.08)
    spread = [make_group(0, (0, 1, 1)), make_group(1, (0, 3, 3))]
    np.testing.assert_allclose(taken_often(ReplayConfig(priority="reward_spread"), spread), [1 / 4, 3 / 4], atol=0.08)
    # |r − r̄| is 1/2 and 3/8 on average.
    advantage = [make_group(0, (0, 0, 1, 1)), make_group(1, (0, 0, 0, 1))]
    often = taken_often(ReplayConfig(priority="absolute_advantage"), advantage)
    np.testing.assert_allclose(often, [4 / 7, 3 / 7], atol=0.08)


def test_groups_with_priority_zero_come_last():
    limits = ReplayConfig(priority="reward_spread", keep_no_signal=True)
    groups = [make_group(0, (1, 1)), make_group(1), make_group(2, (1, 1))]
    assert taken_often(limits, groups, times=20) == [0, 1, 0]
    assert taken_often(limits, groups, times=20, count=3) == [1, 1, 1]


def test_what_leaves_is_counted_by_reason():
    limits = ReplayConfig(capacity=2, max_staleness=3, max_reuse=1)
    queue = arrived(Queue(), [make_group(0, (1, 1)), make_group(1, version=0), make_group(2, version=4)], 5, limits)
    left = {reason: count for reason, count in queue.counts.items() if count and reason != "batches"}
    assert left == {"stale": 1, "stale_tokens": 6, "no_signal": 1, "no_signal_completions": 2, "no_signal_tokens": 6}
    queue = arrived(queue, [make_group(3, version=4), make_group(4, version=None)], 5, limits)
    assert queue.counts["capacity"] == 1 and [x.group.id for x in queue.ready] == ["group 3", "group 4"]
    queue, chosen = taken(queue, 1, 5, 0, limits)
    assert queue.counts["used_up"] == len(chosen) == len(queue.ready) == 1
    aged = arrived(Queue(), [make_group(5, version=4)], 5, limits)
    assert [len(taken(aged, 1, step, 0, limits)[1]) for step in (5, 8, 9)] == [1, 1, 0]
    # Another model's rows do not grow old.
    kept = arrived(Queue(), [make_group(4, version=None)], 5, limits)
    assert [group.id for group in taken(kept, 1, 99, 0, limits)[1]] == ["group 4"]
    assert take(Queue(), 3, 1, 0, replaying(limits)) == (Queue(), None)


def batch_of(groups):
    """A padded batch of groups of two completions."""
    return pad(groups, Shape(len(groups) + 1, 2, 8, 8))


def test_updates_measure_headroom_and_drift_by_loops():
    groups = [make_group(number) for number in range(3)]
    queue = arrived(Queue(), groups, 1, ReplayConfig())
    queue, chosen = taken(queue, 3, 1, 0, ReplayConfig())
    batch = batch_of(chosen)
    generator = np.random.default_rng(0)
    logprobs = -generator.uniform(0.1, 3, batch.completions.shape).astype(np.float32)
    advantages = np.sign(batch.rewards - 0.5)[:, None] * (np.arange(8) != 1)
    in_minibatch = batch.group_ids != 1
    queue = with_measures(queue, chosen, batch, logprobs, advantages, in_minibatch)
    for entry in queue.ready:
        number = [group.id for group in chosen].index(entry.group.id)
        gains, squares = [], []
        for row, time in np.argwhere(batch.completion_mask):
            if batch.group_ids[row] == number:
                probability = np.exp(float(logprobs[row, time]))
                if advantages[row, time]:
                    gains.append(1 - probability if advantages[row, time] > 0 else probability)
                squares.append((float(logprobs[row, time]) - float(batch.behavior_logprobs[row, time])) ** 2)
        if number == 1:
            assert entry.headroom is None and entry.drift is None, "another minibatch"
        else:
            np.testing.assert_allclose([entry.headroom, entry.drift], [np.mean(gains), np.mean(squares)], rtol=1e-6)
    again = with_measures(queue, chosen, batch, logprobs, 0 * advantages)
    assert [entry.headroom for entry in again.ready] == [0.0] * 3, "groups that teach nothing"
    assert None not in [entry.drift for entry in again.ready]


def with_logprob(group, logprob):
    """The group with one log-prob for all tokens; None: unknown."""
    completions = []
    for completion in group.completions:
        logprobs = None if logprob is None else np.full(len(completion.rows[0].tokens), logprob, np.float32)
        completions.append(completion._replace(rows=(completion.rows[0]._replace(behavior_logprobs=logprobs),)))
    return group._replace(completions=tuple(completions))


def test_the_highest_headroom_comes_first():
    # A group of one right and two wrong answers of probability p has headroom ((1 − p) + 2p) / 3.
    rewards = (1, 0, 0)
    groups = [with_logprob(make_group(i, rewards), p and np.log(p)) for i, p in enumerate((0.2, 0.8, None, 0.5))]
    limits = ReplayConfig(priority="headroom", order="highest")
    queue = Queue()
    for step, group in enumerate(groups, start=1):
        queue = arrived(queue, [group], step, limits)
    taken_in_order = [taken(queue, count, 4, 0, limits)[1] for count in (1, 2, 3)]
    assert [names(chosen) for chosen in taken_in_order] == [
        names([groups[i] for i in k]) for k in ([2], [2, 1], [2, 1, 3])
    ]
    ready = [entry._replace(headroom=0.9) if entry.group.id == groups[0].id else entry for entry in queue.ready]
    assert names(taken(queue._replace(ready=tuple(ready)), 2, 4, 0, limits)[1]) == names([groups[2], groups[0]])
    sampled = taken_often(ReplayConfig(priority="headroom"), [groups[0], groups[1]])
    np.testing.assert_allclose(sampled, np.array([1.2, 1.8]) / 3, atol=0.08)


def test_groups_beyond_the_drift_limit_leave():
    limits = ReplayConfig(max_drift=1e-2)
    queue = arrived(Queue(), [make_group(i) for i in range(3)], 1, limits)
    ready = [entry._replace(drift=value) for entry, value in zip(queue.ready, (0.02, 0.01, None), strict=True)]
    queue, chosen = taken(queue._replace(ready=tuple(ready)), 2, 2, 0, limits)
    assert names(chosen) == names([make_group(1), make_group(2)]) and queue.counts["drift"] == 1


@given(
    ages=st.lists(st.none() | st.integers(0, 6), min_size=1, max_size=8),
    count=st.integers(1, 4),
    limit=st.integers(0, 4),
    kind=st.sampled_from(["replay", "oldest first", "in order"]),
)
@settings(max_examples=60, deadline=None)
def test_a_batch_keeps_the_limit_of_its_mean_staleness(ages, count, limit, kind):
    step = 9
    groups = [make_group(i, version=None if age is None else step - 1 - age) for i, age in enumerate(ages)]
    limits = ReplayConfig(max_reuse=2) if kind == "replay" else ONCE
    of_kind = Settings(0, 1, LateConfig(), kind == "replay", kind == "oldest first", limits, mean_staleness=limit)
    queue = arrived(Queue(), groups, step, limits)
    after, chosen = take(queue, count, step, 0, of_kind)
    freshest = sorted(age for age in ages if age is not None)[: max(count - ages.count(None), 0)]
    if len(ages) < count or (freshest and np.mean(freshest) > limit and ages.count(None) < count):
        assert chosen is None and after.ready == queue.ready
        return
    if chosen is None:  # foreign groups make the mean of fewer groups, which a replacement may not reach
        assert None in ages
        return
    own = [group_staleness(group, step) for group in chosen if oldest_version(group) is not None]
    assert len(chosen) == count and (not own or np.mean(own) <= limit)
    left = len(groups) - len(after.ready) - sum(after.counts[reason] for reason in ("used_up", "stale"))
    assert left == 0 and (kind != "replay" or not after.counts["stale"])


def test_older_groups_give_way_to_newer_ones():
    groups = [make_group(i, version=version) for i, version in enumerate((2, 4, 8, 8))]
    settings_ = Settings(0, 1, LateConfig(), False, True, ONCE, mean_staleness=2)
    queue = arrived(Queue(), groups, 9, ONCE)
    queue, chosen = take(queue, 2, 9, 0, settings_)
    assert names(chosen) == names([groups[1], groups[2]]), "ages 4 and 0"
    assert queue.counts["stale"] == 1 and [entry.group.id for entry in queue.ready] == [groups[3].id]


def test_the_oldest_row_makes_a_group_stale():
    (group,) = groups_of([make_row(0, policy_version=7), make_row(1, policy_version=3), text_row(2)])
    assert group_staleness(group, 10) == 6
    assert group_staleness(text_row(2).group, 10) == 0
