"""The queue: groups go when whole or at the deadline, rewards when they are due, and nothing is lost uncounted."""

import itertools
import json
from collections import Counter
from concurrent.futures import Future

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recjax.config import Config, LateConfig, ReplayConfig, TaskConfig
from recjax.experience.group import Grade, Turn, is_whole
from recjax.experience.queue import (
    Arrival,
    Queue,
    Settings,
    Waiting,
    counts,
    deliver,
    from_plain,
    put,
    queued_versions,
    reward_delays,
    take,
    to_plain,
    wait_for_grades,
)
from recjax.experience.replay import Judge, judge_of
from tests.experience.groups import grades, ids, make_group, next_round, same_groups, ungraded


def settings_with(shortest=0, longest=0, deadline=None, offset=0, oldest_first=False):
    """Settings without replay."""
    late = LateConfig(shortest=shortest, longest=longest, deadline=deadline)
    return Settings(offset=offset, late=late, oldest_first=oldest_first)


def plain_and_back(queue):
    """The queue after a checkpoint."""
    rows, plain = to_plain(wait_for_grades(queue, all_of_them=True)[0])
    return from_plain(rows, json.loads(json.dumps(plain)))


def a_round(queue, step, how):
    """The queue after the rewards that are due in this round."""
    return deliver(queue, step, how)


SIZES = st.lists(st.lists(st.integers(1, 3), max_size=2), min_size=1, max_size=8)


@given(
    sizes=SIZES,
    deadline=st.none() | st.integers(1, 4),
    longest=st.integers(0, 6),
    offset=st.integers(0, 2),
    seed=st.integers(0, 99),
    reopen=st.integers(0, 9),
)
@settings(max_examples=60, deadline=None)
def test_every_completion_goes_once_or_is_counted(sizes, deadline, longest, offset, seed, reopen):
    queue, came, gone, how = Queue(), {}, {}, settings_with(0, longest, deadline, offset)
    for step in range(1, 24):
        if step == reopen:
            queue = plain_and_back(queue)
        queue = next_round(queue)
        groups = [
            make_group(10 * step + i, [1.0] * size) for i, size in enumerate(sizes[step - 1 : step] and sizes[step - 1])
        ]
        came |= {group.id: (step, group) for group in groups}
        given_ = [grade for group in groups for grade in grades(group)]
        queue = put(queue, Arrival(list(map(ungraded, groups)), given_, step), seed, how)
        queue = a_round(queue, step, how)
        queue, released = take(queue, len(queue.ready), step, seed, how)
        for group in released:
            since, whole = came[group.id]
            assert group.id not in gone and is_whole(group) and step >= since + offset
            waited = step - since - offset
            assert deadline is None or waited <= deadline
            assert ids(group) == ids(whole) or waited == deadline
            gone[group.id] = group
    assert not queue.waiting and queue.counts["batches"] == 23
    rows = sum(len(group.completions) for _, group in came.values())
    left = queue.counts
    assert rows == sum(len(group.completions) for group in gone.values()) + left["rows_without_reward"]
    assert len(came) == len(gone) + left["groups_without_reward"]
    # What did not go in time got its reward after all, and too late.
    assert left["rewards_too_late"] == left["rows_without_reward"]
    if deadline is None:
        assert left == Counter(used_up=len(gone), batches=23)


def test_complete_groups_become_ready_in_order_of_arrival():
    how, groups = settings_with(), [make_group(0, (0.0, 5.0)), make_group(1, (2.0,)), make_group(2, (3.0,))]
    due = ((1, 9), (3,), (3,))
    queue = Queue(1, waiting=tuple(Waiting(*one, 1) for one in zip(groups, due, strict=True)))
    for round_, expected in ((1, []), (3, ["group 1", "group 2"]), (9, ["group 0"])):
        queue, released = take(deliver(queue._replace(round=round_), 1, how), 0, 1, 0, how)
        assert [entry.group.id for entry in queue.ready] == expected and released == []
        assert all(same_groups(entry.group, groups[int(entry.group.id[-1])]) for entry in queue.ready)
        queue = queue._replace(ready=())
    assert not queue.waiting


def test_groups_leave_pending_completions_at_the_deadline():
    how, groups = settings_with(deadline=3), [make_group(0, (1.0, 2.0, 3.0)), make_group(1)]
    due = ((8, 5, 99), (99, 99))
    queue = Queue(6, waiting=tuple(Waiting(*one, 4) for one in zip(groups, due, strict=True)))
    waits = deliver(queue, 1, how)
    assert not waits.ready and counts(waits)["experience/waiting_groups"] == 2
    goes = plain_and_back(deliver(waits._replace(round=7), 1, how))
    assert [ids(entry.group) for entry in goes.ready] == [["row 1"]]
    assert counts(goes)["experience/waiting_groups"] == 0 and queued_versions(goes, how) == [0]
    assert goes.counts == Counter(rows_without_reward=4, groups_without_reward=1)
    assert deliver(goes, 1, how).counts == goes.counts
    later = deliver(goes._replace(round=8), 1, how)
    assert later.counts["rewards_too_late"] == 1 and len(later.waiting) == 2
    last = deliver(later._replace(round=99), 1, how)
    assert last.counts["rewards_too_late"] == 4 and not last.waiting and last.ready == goes.ready


def test_the_number_of_grades_must_match_ungraded_completions():
    whole = make_group(0, (0.0, 1.0, 2.0))
    first, *_ = whole.completions
    half = ungraded(whole)._replace(completions=(first, *ungraded(whole).completions[1:]))
    queue, batches = wait_for_grades(put(Queue(1), Arrival([half], grades(whole)[1:], 1), 0, settings_with()))
    assert same_groups(queue.waiting[0].group, whole) and [ids(group) for group in batches[0]] == [ids(whole)[1:]]
    for wrong in (grades(whole), grades(whole)[:1]):
        with pytest.raises(ValueError, match="argument"):
            wait_for_grades(put(Queue(1), Arrival([half], wrong, 1), 0, settings_with()))


def test_only_due_grades_are_awaited_in_order():
    how, groups = settings_with(shortest=2, longest=2), [make_group(0), make_group(1)]
    futures = [Future(), Future()]
    queue = put(Queue(1), Arrival([ungraded(groups[0])], futures[0], 1), 0, how)
    queue = next_round(a_round(queue, 1, how))  # nothing is due, so nothing is waited for
    queue = next_round(a_round(put(queue, Arrival([ungraded(groups[1])], futures[1], 2), 0, how), 1, how))
    futures[0].set_result(grades(groups[0]))
    queue, found = wait_for_grades(queue)
    assert len(found) == 1 and same_groups(found[0][0], groups[0])
    queue = deliver(queue, 1, how)
    assert [entry.group.id for entry in queue.ready] == ["group 0"] and len(queue.waiting) == 1
    futures[1].set_result(grades(groups[1]))
    queue, found = wait_for_grades(queue, all_of_them=True)
    assert len(found) == 1 and same_groups(found[0][0], groups[1]) and len(queue.waiting) == 1
    assert wait_for_grades(queue, all_of_them=True)[1] == []


def test_what_is_sampled_early_joins_in_its_round():
    how, group = settings_with(), make_group(0)
    queue = put(Queue(1), Arrival([ungraded(group)], grades(group), 1, early=True), 0, how)
    queue = plain_and_back(deliver(wait_for_grades(queue)[0], 1, how))
    assert [*counts(queue).values()][:3] == [0, 0, 0] and len(queue.waiting) == queue.counts["batches"] == 1
    queue = a_round(next_round(queue), 1, how)
    assert [*counts(queue).values()][:3] == [1, 0, 1] and not queue.waiting and queue.counts["batches"] == 1


def test_groups_of_graded_completions_wait_for_their_round_too():
    how, group = settings_with(), make_group(0)
    queue = a_round(put(Queue(1), Arrival([group], [], 1, early=True), 0, how), 1, how)
    assert not queue.ready and len(a_round(next_round(queue), 1, how).ready) == 1


def test_others_completions_keep_their_rewards():
    how, group, other = settings_with(offset=1), make_group(0), make_group(7, (9.0,))
    joined = ungraded(group)._replace(completions=(*ungraded(group).completions, *other.completions))
    queue = put(Queue(1), Arrival([joined], grades(group), 1), 0, how)
    assert queue.waiting[0].due == (2, 2, 0)
    queue = a_round(queue, 1, how)
    assert take(queue, 1, 1, 0, how) == (queue, None)
    queue, recorded = wait_for_grades(next_round(queue))
    assert [ids(one) for one in recorded[0]] == [ids(group)]  # without those of others
    queue, groups = take(deliver(queue, 1, how), 1, 1, 0, how)
    assert [[grade.reward for grade in grades(one)] for one in groups] == [[0.0, 1.0, 9.0]]


def test_ungraded_completions_are_counted_at_delivery():
    how, group = settings_with(), make_group(0, (0.0, 0.0, 0.0))
    failed = [Grade(0.0, None, False, failure) for failure in ("none", "timeout", "timeout")]
    queue = a_round(put(Queue(1), Arrival([ungraded(group)], failed, 1), 0, how), 1, how)
    assert queue.counts == {"ungraded/none": 1, "ungraded/timeout": 2, "batches": 1}


def test_completions_whose_reward_is_none_leave_and_are_counted():
    how, whole, empty = settings_with(), make_group(0, (1.0, 0.0, 2.0)), make_group(5, (1.0, 1.0))
    given = [Grade(1.0), Grade(None, None, False, "no_reward"), Grade(2.0), Grade(None), Grade(None)]
    queue = put(Queue(1), Arrival([ungraded(whole), ungraded(empty)], given, 1), 0, how)
    queue = plain_and_back(wait_for_grades(queue)[0])
    queue = deliver(queue, 1, how)
    assert [[grade.reward for grade in grades(entry.group)] for entry in queue.ready] == [[1.0, 2.0]]
    assert not queue.waiting
    expected = {"ungraded/no_reward": 1, "rows_without_reward": 3, "groups_without_reward": 1, "batches": 1}
    assert queue.counts == expected


def test_groups_with_the_oldest_weights_go_first():
    groups = [make_group(number, version=version) for number, version in enumerate((3, 1, None, 1))]
    for oldest_first, expected in ((False, [0, 1, 2]), (True, [2, 1, 3])):
        how = settings_with(oldest_first=oldest_first)
        queue = a_round(put(Queue(1), Arrival(groups, [], 1), 0, how), 1, how)
        queue, chosen = take(queue, 3, 1, 0, how)
        assert [group.id for group in chosen] == [f"group {number}" for number in expected]
        assert counts(queue)["experience/ready_groups"] == 1


def test_delays_follow_from_the_seed_and_span_both_ends():
    delays = reward_delays(1000, 2, 5, batch=3, seed=0)
    assert {*delays.tolist()} == {2, 3, 4, 5}
    assert np.array_equal(delays, reward_delays(1000, 2, 5, 3, 0))
    assert not np.array_equal(delays, reward_delays(1000, 2, 5, 4, 0))
    assert {*reward_delays(9, 10, 10, 1, 0).tolist()} == {10}


MASKED, PENALISED = TaskConfig(truncated="mask"), TaskConfig(truncated="penalize", truncated_reward=-0.5)
# The rewards of a group, which of its completions were cut, the task, and whether an update learns from the group.
SIGNALS = [
    ((0.0, 1.0, 1.0), (False, True, True), TaskConfig(), True),
    ((0.0, 1.0, 1.0), (False, True, True), MASKED, False),
    ((0.0, 0.0, 1.0), (False, False, True), MASKED, False),
    ((0.0, 1.0, 1.0), (False, False, True), MASKED, True),
    ((0.0, 1.0), (True, True), MASKED, False),
    ((0.0, 0.0, 0.0), (False, True, False), PENALISED, True),
    ((0.0, 1.0, 0.5), (True, True, True), PENALISED, False),
    ((-0.5, 1.0), (False, True), PENALISED, False),
]


def failed(group, which):
    """The group with some completions of agents that failed before their first reply."""
    completions = zip(group.completions, which, strict=True)
    return group._replace(completions=tuple(one._replace(rows=()) if fails else one for one, fails in completions))


def cut(group, which):
    """The group with some completions that ran into the token limit."""
    completions = zip(group.completions, which, strict=True)
    return group._replace(completions=tuple(one._replace(truncated=truncated) for one, truncated in completions))


def test_agents_without_a_reply_give_no_signal():
    group = failed(make_group(0, (1.0, 1.0, -1.0)), (False, False, True))
    for task in (TaskConfig(), MASKED, PENALISED):
        assert not Judge(task).has_signal(group) and len(Judge(task).seen(group).completions) == 2
    assert Judge().has_signal(make_group(0, (1.0, 1.0, -1.0)))


@pytest.mark.parametrize(("rewards", "truncated", "task", "signal"), SIGNALS)
@pytest.mark.parametrize("replays", [False, True], ids=["refill", "replay"])
def test_the_signal_reads_rewards_as_the_update_does(rewards, truncated, task, signal, replays):
    group = cut(make_group(0, rewards), truncated)
    limits = ReplayConfig(capacity=9, max_reuse=1, keep_no_signal=False)
    how = settings_with()._replace(limits=limits, replay=replays, judge=Judge(task))
    queue = put(Queue(1), Arrival([ungraded(group)], grades(group), 1), 0, how)
    queue = a_round(queue, 1, how)
    assert (len(queue.ready), queue.counts["no_signal"]) == ((1, 0) if signal else (0, 1))
    if signal:  # what is trained on, kept in a record and graded again is the group as it was sampled
        assert same_groups(queue.ready[0].group, group)


def test_priorities_read_rewards_as_the_update_does():
    wide, narrow, which = make_group(0, (0.0, 1.0, 0.0)), make_group(1, (0.4, 0.5)), (False, True, False)
    cases = [(cut, TaskConfig(), [0, 1]), (cut, MASKED, [1]), (failed, TaskConfig(), [1])]
    for (change, task, first), priority in itertools.product(cases, ("reward_spread", "absolute_advantage")):
        groups, limits = [change(wide, which), narrow], ReplayConfig(capacity=9, max_reuse=9, keep_no_signal=True)
        limits = limits.model_copy(update={"priority": priority})
        how = settings_with()._replace(limits=limits, replay=True, judge=Judge(task))
        arrival = Arrival(list(map(ungraded, groups)), grades(groups[0]) + grades(groups[1]), 1)
        queue = a_round(put(Queue(1), arrival, 0, how), 1, how)
        taken = {int(take(queue, 1, 1, seed, how)[1][0].id[-1]) for seed in range(40)}
        assert taken == set(first)


def test_priorities_read_the_parts_and_turns_that_advantages_read():
    def graded(*given):
        group = make_group(0, (1.0,) * len(given))
        pairs = zip(group.completions, given, strict=True)
        return group._replace(completions=tuple(one._replace(grade=grade) for one, grade in pairs))

    parts = [{"a": 1.0, "b": 0.0, "c": 0.0}, {"a": 0.0, "b": 1.0, "c": 0.0}, {"a": 0.5, "b": 0.0, "c": 0.5}]
    by_part = graded(*(Grade(1.0, part) for part in parts))
    judge = Judge(part_weights={})
    # The sums of the normalized parts are −0.19, −0.52 and 0.71.
    np.testing.assert_allclose(judge.absolute_advantage(by_part), np.sqrt(2) / 3, rtol=1e-5)
    assert judge.reward_spread(by_part) == 1.0 and Judge(part_weights={"a": 0, "b": 0}).reward_spread(by_part) == 0.5
    assert Judge().absolute_advantage(by_part) == Judge().reward_spread(by_part) == 0.0
    two = (Turn(0, 1), Turn(0, 3))
    by_turn = graded(Grade(1.0, turns=(1.0, 0.0)), Grade(1.0, turns=(0.0, 1.0)))
    by_turn = by_turn._replace(completions=tuple(one._replace(turns=two) for one in by_turn.completions))
    # The returns are 1 and 1 from the first turn on, and 0 and 1 from the second.
    assert Judge(discount=1.0).absolute_advantage(by_turn) == 0.25 and Judge(discount=1.0).reward_spread(by_turn) == 1
    nothing = failed(by_part, (True, True, True))
    assert [judge.absolute_advantage(nothing), judge.reward_spread(nothing), Judge().absolute_advantage(nothing)] == [
        0
    ] * 3


def test_parts_and_turns_signal_if_algorithms_read_them():
    parts = [Grade(1.0, {"right": 1.0, "form": 0.0}), Grade(1.0, {"right": 0.0, "form": 1.0})]
    group = make_group(0, (1.0, 1.0))
    by_part = group._replace(
        completions=tuple(one._replace(grade=grade) for one, grade in zip(group.completions, parts, strict=True))
    )
    assert not Judge().has_signal(by_part) and Judge(part_weights={}).has_signal(by_part)
    assert Judge(part_weights={"right": 0.0}).has_signal(by_part)
    assert not Judge(part_weights={"right": 0.0, "form": 0.0}).has_signal(by_part)
    assert not Judge(MASKED, part_weights={}).has_signal(cut(by_part, (False, True)))
    assert not Judge(part_weights={}).has_signal(failed(by_part, (False, True)))

    def with_turns(*each):
        pairs = zip(group.completions, each, strict=True)
        made = (one._replace(turns=turns, grade=one.grade._replace(turns=given)) for one, (turns, given) in pairs)
        return group._replace(completions=tuple(made))

    two = (Turn(0, 1), Turn(0, 3))
    by_turn = with_turns((two, (1.0, 0.0)), (two, (0.0, 1.0)))
    assert not Judge().has_signal(by_turn) and Judge(discount=1.0).has_signal(by_turn)
    # A reward at the last turn only, after two turns and after one: the same without a discount.
    late = with_turns((two, ()), ((), ()))
    assert not Judge(discount=1.0).has_signal(late) and Judge(discount=0.9).has_signal(late)


@pytest.mark.parametrize(
    ("options", "equal", "zero", "alone"),
    [
        ({"preset": "grpo"}, False, False, False),
        ({"preset": "pairwise_consistency"}, False, False, False),
        ({"preset": "reinforce", "advantage": {"singleton": "reward"}}, False, False, True),
        ({"preset": "reinforce_pp"}, True, True, True),
        ({"preset": "flash_reinforce"}, True, True, True),
        ({"preset": "reinforce", "advantage": {"name": "raw_reward"}}, True, False, True),
        ({"preset": "logit_distillation"}, True, True, True),
        ({"preset": "sdpo"}, False, False, False),
        ({"preset": "reinforce", "advantage": {"name": "tests.algorithms.mine:above_median"}}, True, True, True),
    ],
)
def test_the_algorithm_says_what_teaches(options, equal, zero, alone):
    taught = {"teacher": "policy", "teacher_rate": 0.5}
    # The template of sdpo names {better}, which groups of equal rewards lack.
    task = {"arithmetic": {}, "teacher_template": "{better}{prompt}", "teacher_tokens": 64}
    blocks = {"sdpo": {"model": {"decoder": {}, **taught}, "task": task}}
    blocks["logit_distillation"] = {"model": {"decoder": {}, "teacher": "another"}}
    plain = {"model": {"decoder": {}}, "task": {"arithmetic": {}}}
    config = Config(output="unused", algorithm=options, **(plain | blocks.get(options["preset"], {})))
    judge = judge_of(config, {})
    assert judge.has_signal(make_group(0, (0.0, 1.0)))
    found = [judge.has_signal(make_group(0, rewards)) for rewards in ((1.0, 1.0), (0.0, 0.0), (1.0,))]
    assert found == [equal, zero, alone]
    assert not judge.has_signal(failed(make_group(0, (1.0,)), (True,))), "nothing to train on"


def test_imitated_completions_of_others_are_a_signal():
    group = make_group(0, (1.0, 1.0))
    other = group._replace(completions=(group.completions[0]._replace(policy_version=None), group.completions[1]))
    config = Config(output="x", model={"decoder": {}}, task={"arithmetic": {}}, algorithm={"preset": "chord"})
    assert [judge_of(config, {}).has_signal(each) for each in (group, other)] == [False, True]
    assert not Judge().has_signal(other)
