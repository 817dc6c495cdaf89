"""Replay: its limits hold whatever happens, nothing is lost uncounted, and a stored buffer goes on as it would have."""

import collections
import json

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from recjax.config import ReplayConfig
from recjax.experience import store
from recjax.experience.buffer import EMPTY, add, draw, from_plain, staleness, to_plain
from recjax.experience.groups import Group, reward_spread
from tests.experience.rows import make_row, same, text_row


def make_group(number: int, rewards=(0.0, 1.0), version: int | None = 0) -> Group:
    """A group of as many rows as there are rewards."""
    rows = [
        make_row(10 * number + i, group=number, reward=reward, policy_version=version)
        for i, reward in enumerate(rewards)
    ]
    return Group(f"group {number}", tuple(rows))


LIMITS = st.builds(
    ReplayConfig,
    capacity=st.integers(1, 6),
    max_staleness=st.none() | st.integers(0, 4),
    max_reuse=st.integers(1, 4),
    half_life=st.none() | st.floats(0.1, 10),
    priority=st.sampled_from(["none", "reward_spread", "absolute_advantage"]),
    keep_no_signal=st.booleans(),
)
# Each step: rewards and age of the groups that come, and how many are drawn.
COMING = st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=3), st.none() | st.integers(0, 6))
STEPS = st.lists(st.tuples(st.lists(COMING, max_size=4), st.integers(0, 4)), min_size=1, max_size=12)


def played(steps, limits, seed, reopen=()):
    """The buffer and the drawn groups after each step; at the steps in `reopen` it goes through its plain form."""
    buffer, number = EMPTY, 0
    for step, (coming, count) in enumerate(steps, start=1):
        if step in reopen:
            rows, plain = to_plain(buffer)
            rows = list(store.to_rows(store.to_table(rows))) if rows else []
            buffer = from_plain(rows, json.loads(json.dumps(plain)))
        groups = []
        for rewards, age in coming:
            version = None if age is None else max(step - 1 - age, 0)
            groups.append(make_group(number, [float(reward) for reward in rewards], version))
            number += 1
        buffer = add(buffer, groups, step, limits)
        buffer, drawn = draw(buffer, count, step, seed, limits)
        yield step, number, buffer, drawn


@given(steps=STEPS, limits=LIMITS, seed=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_limits_hold_and_every_group_is_accounted_for(steps, limits, seed):
    uses = collections.Counter()
    for step, came, buffer, drawn in played(steps, limits, seed):
        assert len(buffer.entries) <= limits.capacity
        assert len({group.id for group in drawn}) == len(drawn) <= steps[step - 1][1]
        uses.update(group.id for group in drawn)
        assert all(count <= limits.max_reuse for count in uses.values())
        for group in drawn:
            assert limits.max_staleness is None or staleness(group, step) <= limits.max_staleness
            assert limits.keep_no_signal or reward_spread(group) > 0
        for entry in buffer.entries:
            assert entry.used == uses[entry.group.id] < limits.max_reuse
        assert came == len(buffer.entries) + sum(buffer.left.values())


@given(steps=STEPS, limits=LIMITS, seed=st.integers(0, 9), reopen=st.sets(st.integers(1, 12)))
@settings(max_examples=30, deadline=None)
def test_stored_and_opened_anywhere_it_goes_on_as_it_would_have(steps, limits, seed, reopen):
    straight, resumed = (list(played(steps, limits, seed, where)) for where in ((), reopen))
    for (_, _, one, drawn), (_, _, other, drawn_again) in zip(straight, resumed, strict=True):
        assert one.left == other.left
        assert [entry[1:] for entry in one.entries] == [entry[1:] for entry in other.entries]
        assert [group.id for group in drawn] == [group.id for group in drawn_again]
        for ours, theirs in zip(drawn, drawn_again, strict=True):
            assert all(map(same, ours.rows, theirs.rows))


def drawn_often(limits, groups, step=1, times=400, count=1):
    """How often each group is drawn from the same buffer under different seeds."""
    buffer, found = EMPTY, collections.Counter()
    for number, group in enumerate(groups):
        buffer = add(buffer, [group], 1 + number, limits)
    for seed in range(times):
        found.update(group.id for group in draw(buffer, count, step, seed, limits)[1])
    return [found[group.id] / times for group in groups]


def test_groups_are_drawn_in_proportion():
    equal = [make_group(i) for i in range(4)]
    np.testing.assert_allclose(drawn_often(ReplayConfig(), equal), [1 / 4] * 4, atol=0.08)
    halved = drawn_often(ReplayConfig(half_life=1.0), equal, step=4)
    np.testing.assert_allclose(halved, np.array([1, 2, 4, 8]) / 15, atol=0.08)
    spread = [make_group(0, (0, 1, 1)), make_group(1, (0, 3, 3))]
    np.testing.assert_allclose(drawn_often(ReplayConfig(priority="reward_spread"), spread), [1 / 4, 3 / 4], atol=0.08)
    # |r − r̄| is 1/2 and 3/8 on average.
    advantage = [make_group(0, (0, 0, 1, 1)), make_group(1, (0, 0, 0, 1))]
    often = drawn_often(ReplayConfig(priority="absolute_advantage"), advantage)
    np.testing.assert_allclose(often, [4 / 7, 3 / 7], atol=0.08)


def test_groups_of_priority_zero_come_when_there_is_no_other():
    limits = ReplayConfig(priority="reward_spread", keep_no_signal=True)
    groups = [make_group(0, (1, 1)), make_group(1), make_group(2, (1, 1))]
    assert drawn_often(limits, groups, times=20) == [0, 1, 0]
    assert drawn_often(limits, groups, times=20, count=3) == [1, 1, 1]


def test_what_leaves_is_counted_by_reason():
    limits = ReplayConfig(capacity=2, max_staleness=3, max_reuse=1)
    buffer = add(EMPTY, [make_group(0, (1, 1)), make_group(1, version=0), make_group(2, version=4)], 5, limits)
    assert buffer.left == {"capacity": 0, "stale": 1, "used_up": 0, "no_signal": 1}
    buffer = add(buffer, [make_group(3, version=4), make_group(4, version=None)], 5, limits)
    assert buffer.left["capacity"] == 1 and [x.group.id for x in buffer.entries] == ["group 3", "group 4"]
    buffer, drawn = draw(buffer, 1, 5, 0, limits)
    assert buffer.left["used_up"] == len(drawn) == len(buffer.entries) == 1
    aged = add(EMPTY, [make_group(5, version=4)], 5, limits)
    assert [len(draw(aged, 1, step, 0, limits)[1]) for step in (5, 8, 9)] == [1, 1, 0]
    # Another model's rows do not grow old.
    kept = add(EMPTY, [make_group(4, version=None)], 5, limits)
    assert [group.id for group in draw(kept, 1, 99, 0, limits)[1]] == ["group 4"]
    assert draw(EMPTY, 3, 1, 0, limits) == (EMPTY, [])


def test_the_oldest_row_makes_a_group_stale():
    group = Group("g", (make_row(0, policy_version=7), make_row(1, policy_version=3), text_row(2)))
    assert staleness(group, 10) == 6
    assert staleness(Group("g", (text_row(2),)), 10) == 0
