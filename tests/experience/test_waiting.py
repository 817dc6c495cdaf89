"""Late rewards: groups go when whole or at the deadline, and nothing is lost uncounted."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recjax.experience import store
from recjax.experience.feedback import Late
from recjax.experience.groups import Group
from recjax.experience.waiting import NOBODY, from_plain, release, reward_delays, rewarded, to_plain, wait
from tests.experience.rows import make_row, same

PENDING = dict(reward=None, reward_parts=None, accurate=None)


def pending_group(number: int, size: int) -> Group:
    return Group(f"g{number}", tuple(make_row(100 * number + i, **PENDING) for i in range(size)))


def ids(group: Group) -> list[str]:
    return [row.id for row in group.rows]


SIZES = st.lists(st.lists(st.integers(1, 3), max_size=2), min_size=1, max_size=8)


@given(
    sizes=SIZES,
    deadline=st.none() | st.integers(0, 4),
    longest=st.integers(0, 6),
    seed=st.integers(0, 99),
    reopen=st.integers(0, 9),
)
@settings(max_examples=60, deadline=None)
def test_every_row_goes_once_or_is_counted(sizes, deadline, longest, seed, reopen):
    waiting, arrivals, since, gone, came = NOBODY, {}, {}, {}, []
    for step in range(1, 20):
        if step == reopen:
            rows, plain = to_plain(waiting)
            rows = list(store.to_rows(store.to_table(rows))) if rows else []
            waiting = from_plain(rows, json.loads(json.dumps(plain)))
        for size in sizes[step - 1] if step <= len(sizes) else ():
            group = pending_group(len(came), size)
            came.append(group)
            waiting = wait(waiting, [group], step)
            since[group.id] = step
            for row, delay in zip(group.rows, reward_delays(size, 0, longest, len(came), seed), strict=True):
                arrivals.setdefault(step + int(delay), {})[row.id] = Late(1.0, None, None)
        waiting = rewarded(waiting, arrivals.pop(step, {}))
        waiting, released = release(waiting, step, deadline)
        for group in released:
            assert all(row.reward == 1.0 for row in group.rows)
            waited = step - since[group.id]
            assert deadline is None or waited <= deadline
            whole = len(group.rows) == len(came[int(group.id[1:])].rows)
            assert whole or waited == deadline
            gone[group.id] = group
    assert not waiting.groups
    rows = sum(len(group.rows) for group in came)
    assert rows == sum(len(group.rows) for group in gone.values()) + waiting.lost["rows_without_reward"]
    assert len(came) == len(gone) + waiting.lost["groups_without_reward"]
    # What did not go in time got its reward after all, and too late.
    assert waiting.lost["rewards_too_late"] == waiting.lost["rows_without_reward"]
    if deadline is None:
        assert waiting.lost == NOBODY.lost


def test_a_group_goes_when_whole_in_the_order_it_came():
    waiting = wait(wait(NOBODY, [pending_group(0, 2), pending_group(1, 1)], 1), [pending_group(2, 1)], 2)
    waiting = rewarded(waiting, {f"row {i}": Late(float(i), {"a": 1.0}, True) for i in (0, 100, 200)})
    waiting, released = release(waiting, 3, None)
    assert [group.id for group in released] == ["g1", "g2"]
    assert same(released[0].rows[0]._replace(**PENDING), pending_group(1, 1).rows[0])
    assert (released[0].rows[0].reward, released[0].rows[0].reward_parts) == (100.0, {"a": 1.0})
    waiting, released = release(rewarded(waiting, {"row 1": Late(1.0, None, None)}), 9, None)
    assert [ids(group) for group in released] == [["row 0", "row 1"]] and not waiting.groups


def test_at_the_deadline_a_group_goes_without_the_rows_that_wait():
    waiting = wait(NOBODY, [pending_group(0, 3), pending_group(1, 2)], 4)
    waiting = rewarded(waiting, {"row 1": Late(1.0, None, None)})
    assert release(waiting, 6, 3) == (waiting, [])
    waiting, released = release(waiting, 7, 3)
    assert [ids(group) for group in released] == [["row 1"]]
    assert waiting.lost == {"rows_without_reward": 4, "groups_without_reward": 1, "rewards_too_late": 0}


def test_two_rewards_for_a_row_are_refused():
    waiting = rewarded(wait(NOBODY, [pending_group(0, 2)], 1), {"row 0": Late(1.0, None, None)})
    assert rewarded(waiting, {"row 0": Late(1.0, None, None)}).lost == NOBODY.lost
    with pytest.raises(ValueError, match="row 'row 0' has another reward, 1.0"):
        rewarded(waiting, {"row 0": Late(0.0, None, None)})


def test_delays_follow_from_the_seed_and_span_both_ends():
    delays = reward_delays(1000, 2, 5, batch=3, seed=0)
    assert {*delays.tolist()} == {2, 3, 4, 5}
    assert np.array_equal(delays, reward_delays(1000, 2, 5, 3, 0))
    assert not np.array_equal(delays, reward_delays(1000, 2, 5, 4, 0))
    assert {*reward_delays(9, 10, 10, 1, 0).tolist()} == {10}
