"""A store that grows: which of its completions are groups to train on, when, and that none is taken twice."""

import itertools
import json
import os
import shutil
import sqlite3
import time
from collections import Counter
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from recjax.config import load_config
from recjax.experience.records import PROMPT_LEFT_OUT
from recjax.hub.policy import Policy
from recjax.hub.tokenizers import character_tokenizer
from recjax.store import store
from recjax.store.following import Follower
from recjax.store.tokenize import tokenizer_name
from tests.experience.groups import ids
from tests.experience.rows import append, make_row
from tests.store.test_feedback import give_rewards
from tests.training.tiny_run import TINY

TOKENIZER = character_tokenizer("0123456789")
POLICY, NAME = Policy(None, TOKENIZER, (TOKENIZER.eos_token_id,)), tokenizer_name(TOKENIZER)


@pytest.fixture
def following(tmp_path):
    """A function from overrides to a reader of the store in `live`."""
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    always = [f"experience.store={tmp_path / 'live'}", "experience.follow=true", "rollout.max_context_tokens=12"]

    def reader(*overrides, state=None):
        options = [*always, "rollout.temperature=0.9", "rollout.group_size=2", *overrides]
        return Follower(load_config(path, options), POLICY, "this run", json.loads(json.dumps(state or {})))

    return reader


def row(number, group=0, **changes):
    plain = {"tokenizer": NAME, "time": datetime.now(UTC), "reward_parts": None, "accurate": None}
    return make_row(number, group, **plain | changes)


def taken(reader, room=9, step=1):
    """The groups that the reader takes, by the numbers in the ids of their completions."""
    groups = reader.poll(step, room).groups
    return [[int(one.id.removeprefix("row ")) for one in group.completions] for group in groups]


def test_groups_are_taken_when_they_are_whole_each_once(tmp_path, following):
    reader, live = following(), tmp_path / "live"
    assert taken(reader) == [] and reader.state() == {}  # there is no file yet
    live.touch()  # another process creates the store, which has no tables yet
    assert taken(reader) == [] and reader.state() == {}
    sqlite3.connect(live).execute("pragma journal_mode=wal").connection.close()
    assert taken(reader) == [] and reader.state() == {}
    append(live, [row(0), row(1), row(2, 1, reward=None), row(3, 1)])
    assert taken(reader, room=0) == [] and reader.rewarded == 1 and reader.waiting == (1, 2, 1)
    assert taken(reader) == [[0, 1]] and taken(reader) == [] and reader.state()["left"] == [[3, 4]]
    give_rewards(live, [{"id": "row 2", "reward": 1.0}])
    append(live, [row(4, 2)])
    assert taken(reader, room=1) == [[2, 3]]
    state = reader.state()
    row_5 = reader._store.identities(store.Last(5))[0]
    assert state == {"store": reader._store.id, "read": 5, "row": row_5, "left": [[5, 5]], "unrewarded": []}
    append(live, [row(6, 3)])
    # The same process, and others that go on from there, before and after they have read anything.
    resumed = following(state=state)
    assert resumed.state() == state
    for again in (reader, resumed, following(state=resumed.state())):
        assert taken(again) == [[4], [6]] and taken(again) == [] and again.state()["left"] == []
    with pytest.raises(ValueError, match="another store than the one that this run has followed"):
        taken(following(state=state | {"store": "another"}))


def test_a_resumed_reader_takes_the_remaining_completions(tmp_path, following):
    live, left = tmp_path / "live", {1, 2, 5, 8, 9, 10}
    append(live, [row(number, number, reward=None if number in left else 1.0) for number in range(12)])
    reader = following()
    assert taken(reader, room=20) == [[0], [3], [4], [6], [7], [11]] and reader.waiting == (6, 6, 6)
    assert reader.state()["left"] == [[2, 3], [6, 6], [9, 11]]
    give_rewards(live, [{"id": f"row {number}", "reward": 0.0} for number in left - {9}])
    with store.Store(live) as opened:
        opened.delete([3])
    for again in (following(state=reader.state()), reader):
        assert taken(again, room=20) == [[1], [5], [8], [10]] and again.waiting == (1, 1, 1)
        assert again.state()["left"] == [[10, 10]] and again.state()["read"] == 12


def test_completions_with_equal_prompts_or_values_form_full_groups(tmp_path, following):
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
    assert taken(following("experience.group_by=prompt")) == [[0, 3], [1, 4], [2, 5]]
    by_task = following("experience.group_by=metadata.task")
    assert taken(by_task) == [[0, 2], [1, 3]]
    assert by_task.waiting == (2, 2, 0)  # those without the key are by themselves, and too few


def test_each_seat_has_a_group_of_its_own(tmp_path, following):
    tokens = np.array([1, 2], np.int32)
    rows = [row(number, number, metadata={"seat": "ab"[number % 2]}, prompt_tokens=tokens) for number in range(4)]
    append(tmp_path / "live", rows)
    assert taken(following("experience.group_by=prompt")) == [[0, 2], [1, 3]]


def test_a_session_is_one_completion_of_all_its_rows(tmp_path, following):
    first = row(0).completion.rows[0]
    rows = first, first._replace(mask=np.array([True, False, True]))
    append(tmp_path / "live", [row(0, metadata={"run": "this run"}, policy_version=3, rows=rows)])
    (group,) = following().poll(4, 9).groups
    (completion,) = group.completions
    assert len(completion.rows) == 2 and completion.sampled_tokens == 5 and completion.policy_version == 3


def test_groups_leave_incomplete_at_the_deadline(tmp_path, following):
    live, old = tmp_path / "live", datetime.now(UTC) - timedelta(seconds=100)
    rows = [row(0), row(1, reward=None), row(2, 1, reward=None), row(3, 2, reward=None)]
    append(live, [one._replace(time=old if number < 3 else one.time) for number, one in enumerate(rows)])
    assert taken(following()) == []
    reader = following("experience.deadline_seconds=60")
    assert reader.poll(1, 0).left_out == Counter(rows_without_reward=1, groups_without_reward=1)
    assert reader.rewarded == 1 and reader.waiting == (1, 1, 1)
    arrival = reader.poll(1, 1)
    assert [ids(group) for group in arrival.groups] == [["row 0"]]
    assert arrival.left_out == Counter(rows_without_reward=1)
    assert reader.state()["left"] == [[4, 4]] and reader.state()["unrewarded"] == [2, 3]
    give_rewards(live, [{"id": "row 2", "reward": 1.0}])
    for again in (following("experience.deadline_seconds=60", state=reader.state()), reader):
        arrival = again.poll(1, 9)
        assert arrival.groups == [] and arrival.left_out == Counter(rewards_too_late=1)
        assert again.state()["unrewarded"] == [2] and again.poll(1, 9).left_out == Counter()


BEHIND = {
    "the last rows are missing": (6, 0, 0),
    "other rows have their numbers": (6, 3, 0),
    "other rewards have their numbers": (8, 0, 2),
}


@pytest.mark.parametrize("name", BEHIND)
@pytest.mark.parametrize("resumes", [False, True])
def test_a_store_that_has_gone_back_is_refused(tmp_path, following, name, resumes):
    kept, added, rewarded = BEHIND[name]
    if rewarded and resumes:
        pytest.skip("a run that resumes reads all rewards")
    live, backup = tmp_path / "live", tmp_path / "backup"
    rows = [row(number, number, reward=None) for number in range(8)]
    append(live, rows[:kept])
    shutil.copy(live, backup)
    append(live, rows[kept:]) if rows[kept:] else None
    give_rewards(live, [{"id": "row 0", "reward": 1.0}])
    reader = following()
    assert taken(reader) == [[0]]
    state = reader.state()
    shutil.copy(backup, tmp_path / "new")  # as one restores a file: a whole one takes its place
    for file in tmp_path.glob("live-*"):
        file.unlink()
    os.replace(tmp_path / "new", live)
    if added:
        append(live, [row(20 + number, number) for number in range(added)])
    give_rewards(
        live, [{"id": f"row {number}", "reward": 0.5} for number in range(1, 1 + rewarded)]
    ) if rewarded else None
    again = following(state=state) if resumes else reader
    with pytest.raises(ValueError, match="experience.store = .*has gone back to an earlier state: this run has read"):
        taken(again)


@pytest.mark.slow
def test_a_run_waits_for_an_unavailable_database(following, database_url, caplog):
    url = database_url()
    append(url, [row(0), row(1, reward=None), row(2, 1)])
    options = (f"experience.store={url}", "experience.group_by=group", "experience.outage_seconds=0.3")
    reader = following(*options)
    assert taken(reader) == [[2]]
    away, real = (
        store.sql.exc.OperationalError("", {}, Exception("the database system is starting up")),
        store.Store._select,
    )
    away.orig.sqlstate = "57P03"
    append(url, [row(3, 2), row(4, 3, length=11)])

    queries = itertools.count()

    def fails_at_the_second_query(self, *given):
        if next(queries) % 2:
            with self._trying("read"):
                raise away
        return real(self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store.Store, "_select", fails_at_the_second_query)
        assert taken(reader) == [] and taken(reader) == []
    assert caplog.text.count("starting up; ") == 1 and "the run waits for it, up to 0.3 seconds" in caplog.text
    arrival = reader.poll(1, 9)
    assert [ids(group) for group in arrival.groups] == [["row 3"]] and arrival.left_out == Counter(too_long=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store.Store, "_select", fails_at_the_second_query)
        assert taken(reader) == []
        time.sleep(0.4)
        with pytest.raises(ValueError, match="experience.store = .*: .* cannot be read: the database system is start"):
            taken(reader)
    gone = url.rpartition("/")[0] + "/none"
    with pytest.raises(ValueError, match="cannot be opened"):
        taken(following(f"experience.store={gone}"))
    assert taken(following(f"experience.store={gone}", state=reader.state())) == []


def test_unusable_completions_are_counted_by_reason(tmp_path, following):
    rows = [
        row(0, 0, prompt_tokens=None, prompt=PROMPT_LEFT_OUT),
        row(1, 1, temperature=0.5),
        row(2, 2, behavior_logprobs=None),
        row(3, 3, length=11),
        row(4, 4, tokenizer="another"),
        row(5, 5, top_k=7, recorded={"kept_bits": np.uint8([[1], [2], [4]])}),
        row(6, 6, top_k=7, recorded={"kept_bits": np.uint8([[1], [0], [4]])}),
    ]
    append(tmp_path / "live", rows)
    reader = following()
    assert reader.poll(1, 0).left_out == Counter(no_tokens=2, other_sampling=2, no_logprobs=1, too_long=1)
    assert reader.state()["left"] == [[6, 6]] and taken(reader) == [[5]]  # its sets replace rollout's cuts
    reader = following("experience.missing_logprobs=unneeded", "algorithm.preset=red_weight")
    assert reader.poll(1, 0).left_out == Counter(no_tokens=2, too_long=1)
    assert reader.poll(1, 0).left_out == Counter() and taken(reader) == [[1], [2], [5], [6]]


def test_versions_are_this_runs_and_the_oldest_come_first(tmp_path, following):
    ours, theirs = ({"run": run} for run in ("this run", "another"))
    versions = [(4, ours), (2, ours), (9, ours), (2, theirs), (0, theirs)]
    rows = [row(n, n, policy_version=version, metadata=run) for n, (version, run) in enumerate(versions)]
    append(tmp_path / "live", rows)
    groups = following().poll(6, 9).groups
    found = [(one.completions[0].id, one.completions[0].policy_version) for one in groups]
    assert found == [("row 2", None), ("row 3", None), ("row 4", 0), ("row 1", 2), ("row 0", 4)]


def test_deleted_completions_are_accepted_and_damaged_ones_refused(tmp_path, following):
    reader, live = following(), tmp_path / "live"
    append(live, [row(0), row(1, 1)])
    assert taken(reader, room=0) == [] and reader.rewarded == 2
    with store.Store(live) as opened:
        opened.delete([1])
    assert taken(reader) == [[1]]
    append(live, [row(2, 2)])
    with sqlite3.connect(live) as database:
        database.execute("update completions set completion = 'y' where number = 3")
    with pytest.raises(ValueError, match=r"experience.store = .*completion 3 \('row 2'\) does not match its checksum"):
        taken(reader)


def test_a_poll_does_not_read_what_was_taken(tmp_path, following):
    """The rows that a poll reads are those that were added since the last one."""
    reader, live = following(), tmp_path / "live"
    append(live, [row(number, number) for number in range(300)])
    assert len(taken(reader, room=300)) == 300
    read = []
    records = reader._store.records
    reader._store.records = lambda *given, **how: (read.append(one.number) or one for one in records(*given, **how))
    append(live, [row(300, 300)])
    state = reader.state()
    assert taken(reader) == [[300]] and read == [301]
    other = following(state=state)
    assert taken(other, room=0) == [] and len(other._left) == 1
