"""A store that grows: which of its completions are groups to train on, when, and that none is taken twice."""

import json
import sqlite3
from collections import Counter
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from recjax.config import load_config
from recjax.experience import store
from recjax.experience.following import Followed, Follower
from recjax.experience.queue import Arrival
from recjax.experience.tokenize import tokenizer_name
from recjax.hub.policy import Policy
from recjax.hub.tokenizers import character_tokenizer
from tests.experience.groups import ids
from tests.experience.rows import append, make_row
from tests.experience.test_feedback import give_rewards
from tests.training.tiny_run import TINY

TOKENIZER = character_tokenizer("0123456789")
POLICY, NAME = Policy(None, TOKENIZER, (TOKENIZER.eos_token_id,)), tokenizer_name(TOKENIZER)


@pytest.fixture
def following(tmp_path):
    """A function from overrides to a reader of the store in `live`."""
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    always = [f"experience.store={tmp_path / 'live'}", "experience.follow=true", "rollout.max_context_tokens=12"]

    def reader(*overrides):
        options = [*always, "rollout.temperature=0.9", "rollout.group_size=2", *overrides]
        return Follower(load_config(path, options), POLICY, "this run")

    return reader


def row(number, group=0, **changes):
    plain = {"tokenizer": NAME, "time": datetime.now(UTC), "reward_parts": None, "accurate": None}
    return make_row(number, group, **plain | changes)


def names(found):
    """The completions of the groups by their places in the store, from 0 as in their ids."""
    return [[number - 1 for number in one.numbers] for one in found.candidates]


def test_groups_are_taken_when_they_are_whole_each_once(tmp_path, following):
    reader, live = following(), tmp_path / "live"
    assert reader.found(1).candidates == []  # there is no folder yet
    assert reader.take(reader.found(1), 9, 1) == Arrival([], left_out=Counter()) and reader.taken == Followed()
    append(live, [row(0), row(1), row(2, 1, reward=None), row(3, 1)])
    found = reader.found(1)
    assert names(found) == [[0, 1]] and found.waiting == (1, 2, 1)
    (group,) = reader.take(found, 9, 1).groups
    assert ids(group) == ["row 0", "row 1"] and reader.found(1).candidates == []
    give_rewards(live, [{"id": "row 2", "reward": 1.0}])
    append(live, [row(4, 2)])
    found = reader.found(1)
    assert names(found) == [[2, 3], [4]]
    assert len(reader.take(found, 1, 1).groups) == 1 and reader.taken == Followed(
        ((1, 5),), frozenset(), reader._store.id
    )
    taken = Followed.from_json(json.loads(json.dumps(reader.taken.to_json())))
    assert taken == reader.taken
    # The same process, and another one that goes on from there.
    other = following()
    other.taken = taken
    for again in (reader, other):
        assert names(again.found(1)) == [[4]]
    again.take(again.found(1), 1, 1)
    append(live, [row(6, 3)])
    assert names(again.found(1)) == [[5]]
    wrong = following()
    wrong.taken = taken._replace(store="another")
    with pytest.raises(ValueError, match="another store than the one that this run has followed"):
        wrong.found(1)


def test_groups_of_equal_prompts_or_values_have_the_size_of_the_config(tmp_path, following):
    rows = [
        row(
            number,
            number,
            metadata={"task": number % 2} if number < 4 else {},
            prompt_tokens=np.array([1, 2 + number % 3], np.int32),
        )
        for number in range(6)
    ]
    append(tmp_path / "live", rows)
    by_prompt = following("experience.group_by=prompt").found(1)
    assert names(by_prompt) == [[0, 3], [1, 4], [2, 5]]
    by_task = following("experience.group_by=metadata.task").found(1)
    assert names(by_task) == [[0, 2], [1, 3]]
    assert by_task.waiting == (2, 2, 0)  # those without the key are by themselves, and too few


def test_a_session_is_one_completion_of_all_its_rows(tmp_path, following):
    first = row(0).completion.rows[0]
    rows = first, first._replace(mask=np.array([True, False, True]))
    append(tmp_path / "live", [row(0, metadata={"run": "this run"}, policy_version=3, rows=rows)])
    reader = following()
    (candidate,) = reader.found(4).candidates
    (completion,) = reader._group(candidate, 4).completions
    assert len(completion.rows) == 2 and completion.sampled_tokens == 5 and completion.policy_version == 3


def test_at_its_deadline_a_group_goes_without_some_and_what_comes_later_is_counted(tmp_path, following):
    live, old = tmp_path / "live", datetime.now(UTC) - timedelta(seconds=100)
    rows = [row(0), row(1, reward=None), row(2, 1, reward=None), row(3, 2, reward=None)]
    append(live, [one._replace(time=old if number < 3 else one.time) for number, one in enumerate(rows)])
    assert following().found(1).candidates == []
    reader = following("experience.deadline_seconds=60")
    found = reader.found(1)
    assert names(found) == [[0]] and found.candidates[0].unrewarded == (2,)
    assert found.unrewarded == (3,) and found.without_reward == 1 and found.waiting == (1, 1, 1)
    assert reader.take(found, 1, 1).left_out == Counter(rows_without_reward=2, groups_without_reward=1)
    assert reader.taken.ranges == ((1, 4),) and reader.taken.unrewarded == {2, 3}
    give_rewards(live, [{"id": "row 2", "reward": 1.0}])
    resumed = following("experience.deadline_seconds=60")
    resumed.taken = reader.taken
    for again in (reader, resumed):
        later = again.found(1)
        assert later.late == {3} and later.candidates == []
        assert again.take(later, 1, 1).left_out == Counter(rewards_too_late=1) and again.taken.unrewarded == {2}
        assert again.found(1).late == set()


def test_what_cannot_be_trained_on_is_left_out_by_reason(tmp_path, following):
    rows = [
        row(0, 0, prompt_tokens=None, prompt=store.PROMPT_LEFT_OUT),
        row(1, 1, temperature=0.5),
        row(2, 2, behavior_logprobs=None),
        row(3, 3, length=11),
        row(4, 4, tokenizer="another"),
        row(5, 5),
    ]
    append(tmp_path / "live", rows)
    found = following().found(1)
    why = ["no_tokens", "other_sampling", "no_logprobs", "too_long", "no_tokens"]
    assert found.unusable == dict(enumerate(why, 1))
    assert names(found) == [[5]]
    reader = following("experience.missing_logprobs=unneeded", "algorithm.preset=red_weight")
    assert [*reader.found(1).unusable.values()] == ["no_tokens", "too_long", "no_tokens"]
    assert reader.take(reader.found(1), 1, 1).left_out == Counter(no_tokens=2, too_long=1)
    assert reader.found(1).unusable == {} and reader.take(reader.found(1), 1, 1).left_out == Counter()


def test_versions_are_this_runs_and_the_oldest_come_first(tmp_path, following):
    ours, theirs = ({"run": run} for run in ("this run", "another"))
    versions = [(4, ours), (2, ours), (9, ours), (2, theirs), (0, theirs)]
    rows = [row(n, n, policy_version=version, metadata=run) for n, (version, run) in enumerate(versions)]
    append(tmp_path / "live", rows)
    reader = following()
    groups = [reader._group(one, 6) for one in reader.found(6).candidates]
    found = [(one.completions[0].id, one.completions[0].policy_version) for one in groups]
    assert found == [("row 2", None), ("row 3", None), ("row 4", 0), ("row 1", 2), ("row 0", 4)]


def test_completions_that_are_deleted_are_no_error_and_damaged_ones_are(tmp_path, following):
    reader, live = following(), tmp_path / "live"
    append(live, [row(0), row(1, 1)])
    assert len(reader.found(1).candidates) == 2
    with store.Store(live) as opened:
        opened.delete([1])
    assert names(reader.found(1)) == [[1]]
    append(live, [row(2, 2)])
    with sqlite3.connect(live) as database:
        database.execute("update completions set completion = 'y' where number = 3")
    with pytest.raises(ValueError, match=r"experience.store = .*completion 3 \('row 2'\) does not match its checksum"):
        reader.found(1)


def test_a_poll_does_not_read_what_was_taken(tmp_path, following):
    """The rows that a poll reads are those that were added since the last one."""
    reader, live = following(), tmp_path / "live"
    append(live, [row(number, number) for number in range(300)])
    reader.take(reader.found(1), 300, 1)
    read = []
    records = reader._store.records
    reader._store.records = lambda *given, **how: (read.append(one.number) or one for one in records(*given, **how))
    append(live, [row(300, 300)])
    assert names(reader.found(1)) == [[300]] and read == [301]
    other = following()
    other.taken = reader.taken
    assert names(other.found(1)) == [[300]] and len(other._left) == 1
