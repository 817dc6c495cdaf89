"""Replay: its limits hold whatever happens, nothing is lost uncounted, and a stored queue goes on as it would have."""

import collections
import json

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from recjax.config import LateConfig, ReplayConfig
from recjax.experience.group import group_staleness, reward_spread
from recjax.experience.queue import (
    Arrival,
    Queue,
    Settings,
    deliver,
    from_plain,
    put,
    take,
    to_plain,
    wait_for_grades,
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
    priority=st.sampled_from(["none", "reward_spread", "absolute_advantage"]),
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
        groups_left = [queue.counts[reason] for reason in ("capacity", "stale", "used_up", "no_signal")]
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


def test_the_oldest_row_makes_a_group_stale():
    (group,) = groups_of([make_row(0, policy_version=7), make_row(1, policy_version=3), text_row(2)])
    assert group_staleness(group, 10) == 6
    assert group_staleness(text_row(2).group, 10) == 0
