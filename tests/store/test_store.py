"""The store: what comes out is what went in, whoever writes, dies or reads beside it, and damage is noticed."""

import contextlib
import json
import os
import re
import signal
import sqlite3
import stat
import subprocess
import sys
import textwrap
import threading
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sql
from hypothesis import given, settings
from hypothesis import strategies as st

from recjax.errors import UserError
from recjax.experience import completion_checks
from recjax.experience.group import Grade, Row, Turn
from recjax.experience.records import groups_from_bytes, groups_of, groups_to_bytes
from recjax.store import database
from recjax.store.store import Change, Store
from tests.experience.groups import make_group, same_groups
from tests.experience.rows import TIME, Columns, append, columns_of, experts, grouped, make_row, read, same, text_row
from tests.marks import slow_except

CHAT = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": ""}]
TWO_ROWS = tuple(
    Row(np.array([1, place], np.int32), np.array([3, 4], np.int32), np.array([place > 0, True]), None, recorded)
    for place, recorded in enumerate(({}, experts(2)))
)
ROWS = [
    make_row(0, recorded=experts(3)),
    make_row(1, messages=CHAT, policy_version=None, top_k=5, truncated=True),
    make_row(2, reward=None, reward_parts=None, accurate=None),
    make_row(3, behavior_logprobs=None, length=1),
    make_row(4, completion_mask=np.array([True, False, True])),
    make_row(5, rows=TWO_ROWS, version_runs=((0, 1), (2, 2)), turns=(Turn(0, 2), Turn(1, 1)), turn_rewards=(0.5, -1.0)),
    make_row(
        6,
        metadata={"user": "me \u00e9\n", "n": [1, None, {"a": 0.1}], "turns": 3},
        time=TIME + timedelta(microseconds=1),
    ),
    text_row(7),
    text_row(8, prompt_tokens=np.array([5, 6], np.int32), tokenizer="t"),
]


def ids(place):
    return [record.completion.id for record in read(place)]


def test_rows_come_out_as_they_went_in(place):
    append(place, ROWS)
    for ours, theirs in zip(read(place), ROWS, strict=True):
        assert same(ours, theirs), (ours, theirs)
    with Store(place) as store:
        assert [record.completion.id for record in store.read([3, 1])] == ["row 2", "row 0"]
        assert store.numbers("group_id", ["group 0", "none"]) == {"group 0": [1, 2, 3, 4, 5, 6, 7, 8, 9]}
        assert list(store.numbers("id").values()) == [[number] for number in range(1, 10)]


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    rewards=st.lists(st.floats(-1e9, 1e9), min_size=8, max_size=8),
    text=st.text(),
    seed=st.integers(0, 99),
)
@settings(max_examples=30, deadline=None)
def test_any_rows_come_out_as_they_went_in(tmp_path_factory, lengths, rewards, text, seed):
    path = tmp_path_factory.mktemp("store") / "s.db"
    rows = [make_row(seed + i, length=n, reward=rewards[i], completion=text) for i, n in enumerate(lengths)]
    append(path, rows)
    assert all(map(same, read(path), rows))


def test_appends_are_read_in_their_order(place):
    for row in ROWS:
        append(place, [row])
    assert ids(place) == [row.completion.id for row in ROWS]
    with Store(place) as store:
        assert [record.number for record in store.records(3, 5)] == [4, 5]
        assert store.last() == (9, 8, 0, 9, 8, 0)


def test_threads_that_append_at_one_time_lose_nothing(place):
    Store(place, create=True).close()

    def work(first):
        for number in range(first, first + 5):
            append(place, [make_row(number)])

    threads = [threading.Thread(target=work, args=(10 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(int(name.split()[1]) for name in ids(place)) == [10 * i + j for i in range(4) for j in range(5)]


def test_a_failed_write_of_another_thread_loses_nothing(db, monkeypatch):
    """The other thread writes, and fails, between a commit and the note of the last rows next to the file."""
    append(db, ROWS[:1])
    with Store(db) as store:
        begun = store._begun

        @contextlib.contextmanager
        def followed():
            with begun() as connection:
                yield connection
            monkeypatch.setattr(store, "_begun", begun)
            with pytest.raises(ZeroDivisionError), store._begun() as connection:
                store._save(connection, store.last()._replace(completion=9, completions=9))
                raise ZeroDivisionError

        monkeypatch.setattr(store, "_begun", followed)
        store.append([ROWS[1]])
    assert ids(db) == [row.completion.id for row in ROWS[:2]]


def test_an_empty_store_has_no_groups_and_no_rewards(place):
    with Store(place, create=True) as store:
        groups, _ = store.groups(store.last(), "t", 9)
        assert len(groups) == len(store.group_rewards(store.last())) == 0


def test_rewards_of_several_graders_stand_side_by_side(place):
    append(place, ROWS[:3])
    with Store(place) as store:
        unsure = Grade(None, failure="timeout")
        store.add_rewards({1: (Grade(0.25, {"a": 0.25}, False), None), 2: (unsure, None)}, "run")
        store.add_rewards({3: (Grade(5.0), "late")})
        (first, second, third) = store.read([1, 2, 3], "run")
        assert first.completion.grade == Grade(0.25, {"a": 0.25}, False) and third.completion.grade is None
        assert second.completion.grade == unsure
        given = store.read([1, 3])
        assert given[0].completion.grade == ROWS[0].completion.grade
        assert given[1].completion.grade == Grade(5.0) and given[1].completion.metadata == {"comment": "late"}
        (run_rewards,) = store.group_rewards(store.last(), "run")
        assert run_rewards.tolist()[:-1] == (1, 2, 1, 0.25, 0.25)
        (given,) = store.group_rewards(store.last())
        assert given.tolist()[:3] == (1, 3, 3) and given["highest"] == 5
        for number, grader in ((1, "run"), (3, "given")):
            with pytest.raises(ValueError, match=f"already has a reward of '{grader}'; rewards cannot change"):
                store.add_rewards({number: (Grade(1.0), None)}, grader)
        with pytest.raises(ValueError, match="completion 9, which gets a reward, was deleted"):
            store.add_rewards({9: (Grade(1.0), None)})
        store.delete([1])
        assert store.last() == (3, 5, 0, 2, 3, 0)
        assert [record.number for record in store.records()] == [2, 3]


def test_changes_are_made_together_or_not_at_all(place):
    with Store(place, create=True) as store:
        store.change([Change([ROWS[0]]), Change(turns=[("s", "one"), ("r", "two")]), Change(turns=[("s", "three")])])
        assert store.turns() == [("s", "one"), ("r", "two"), ("s", "three")] and not store.turns("another server")
        bad = Change(rewards={1: (Grade(1.0), None)})
        with pytest.raises(ValueError, match="rewards cannot change"):
            store.change([Change([ROWS[2]], ended=["s"]), bad])
        assert store.last() == (1, 1, 3, 1, 1, 3) and len(store.turns()) == 3
        store.change([Change([ROWS[2]], {}, [("r", "four")], ["s"])])
        assert store.turns() == [("r", "two"), ("r", "four")] and ids(place) == ["row 0", "row 2"]


@given(seed=st.integers(0, 99))
@settings(max_examples=10, deadline=None)
def test_groups_are_bytes_and_groups_again(seed):
    groups = [make_group(seed, (0.0, None, 1.0)), *(record.group for record in ROWS), make_group(seed + 1)]
    assert all(map(same_groups, groups_from_bytes(groups_to_bytes(groups)), groups))
    assert groups_from_bytes(groups_to_bytes([])) == []


def test_groups_with_two_prompts_are_refused():
    with pytest.raises(ValueError, match="group 'group 0': rows 'row 0' and 'row 1' have different prompts"):
        groups_of([make_row(0), make_row(1, prompt_tokens=np.array([9], np.int32))])


@pytest.mark.parametrize("change", ["completion = 'y' where number = 2", "number = 99 where number = 2"])
@pytest.mark.slow
def test_damage_in_a_server_is_noticed(place, change):
    append(place, ROWS)
    with Store(place, create=True) as store:
        grouped(store)
        with store._engine.begin() as connection:
            connection.execute(sql.text(f"update completions set {change}"))
        with pytest.raises(ValueError, match="is damaged"):
            grouped(store), list(store.records())


WRITER = """
import sys
from recjax.store.store import Store
from tests.experience.rows import make_row
store = Store(sys.argv[1], create=True)
print("ready", flush=True)
for number in range(100_000):
    store.append([make_row(1000 * number + i, length=50) for i in range(20)])
    print(number, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["any", "before the commit"])
def test_a_killed_writer_loses_no_confirmed_rows(db, moment):
    script = WRITER
    if moment != "any":
        dying = "import os, signal\nstore._save = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        script = script.replace(
            "    print(number, flush=True)", "    print(number, flush=True)\n" + textwrap.indent(dying, "    ")
        )
    process = subprocess.Popen([sys.executable, "-c", script, str(db)], stdout=subprocess.PIPE, text=True)
    said = [process.stdout.readline().strip() for _ in range(2)]
    if moment == "any":
        os.kill(process.pid, signal.SIGKILL)
    said += process.stdout.read().split()
    assert process.wait() == -signal.SIGKILL
    done = len(said) - 1
    rows = ids(db)
    # An append may be there whose number was not yet printed.
    assert len(rows) in (20 * done, 20 * (done + (moment == "any")))
    append(db, [text_row(0)])
    assert ids(db) == [*rows, "text 0"]


NAN, TOKENS = float("nan"), np.array([1, 2, 3], np.int32)
TOKEN = "takes a token id, a whole number from 0 to 2147483647"
REWARD = "takes a finite number from -1e9 to 1e9"
LOGPROB = "takes a log-probability, a finite number of at most 0"
BAD_ROWS = {
    "no id": (dict(id=None), "id = None", "takes text that is not empty"),
    "empty source": (dict(source=""), "source = ''", "takes text that is not empty"),
    "no time": (dict(time=None), "time = None", "takes a date and time"),
    "same id": (dict(id="row 0"), "id = 'row 0'", "is the id of an earlier completion"),
    "no prompt": (dict(prompt=None), "prompt = None", "give one of prompt and messages"),
    "empty prompt": (dict(prompt=""), "prompt = ''", "takes text that is not empty, or a list of messages"),
    "no messages": (dict(prompt=None, messages=[]), "messages = []", "takes a list of one message or more"),
    "no content": (
        dict(prompt=None, messages=[{"role": "user"}]),
        "messages[0] = {'role': 'user'}",
        "takes role and content",
    ),
    "half a character": (dict(completion="\ud800"), "completion = '\\ud800'", "takes text"),
    "half a character in metadata": (dict(metadata={"a": "\ud800"}), "metadata = ", "takes a JSON object"),
    "mask too short": (
        dict(completion_mask=np.ones(2, bool)),
        "completion_mask = [True, True]",
        "has 2 values for 3 tokens of the completion; give one for each token",
    ),
    "no mask": (dict(completion_mask=None), "completion_mask = None", "takes a list of true and false"),
    "mask with null": (dict(completion_mask=[True, None, True]), "completion_mask[1] = None", "takes true or false"),
    "mask of numbers": (dict(completion_mask=TOKENS), "completion_mask[0] = 1", "takes true or false"),
    "nothing drawn": (dict(completion_mask=np.zeros(3, bool)), "completion_mask = ", "must have sampled a token"),
    "no tokens": (dict(completion_tokens=TOKENS[:0]), "completion_tokens = []", "has no tokens"),
    "token below 0": (dict(completion_tokens=TOKENS - 2), "completion_tokens[0] = -1", TOKEN),
    "token too large": (
        dict(completion_tokens=TOKENS.astype(np.int64) + 2**31 - 2),
        "completion_tokens[1] = 2147483648",
        TOKEN,
    ),
    "token without end": (dict(completion_tokens=[1, 10**400, 2]), "completion_tokens[1] = 10000", TOKEN),
    "token that is true": (dict(completion_tokens=[1, True, 2]), "completion_tokens[1] = True", TOKEN),
    "null token": (dict(prompt_tokens=[1, None]), "prompt_tokens[1] = None", TOKEN),
    "token with a fraction": (dict(prompt_tokens=np.array([1.5])), "prompt_tokens[0] = 1.5", TOKEN),
    "tokens in tokens": (dict(prompt_tokens=np.ones((1, 2), int)), "prompt_tokens[0] = [1, 1]", TOKEN),
    "no tokenizer": (dict(tokenizer=None), "tokenizer = None", "is null, and the completion has tokens"),
    "log-probs too long": (
        dict(behavior_logprobs=-np.ones(4, np.float32)),
        "behavior_logprobs = [",
        "has 4 values for 3 tokens",
    ),
    "positive log-prob": (
        dict(behavior_logprobs=np.array([-1, 0.5, -1], np.float32)),
        "behavior_logprobs[1] = 0.5",
        LOGPROB,
    ),
    "infinite log-prob": (
        dict(behavior_logprobs=np.array([-1, -np.inf, -1], np.float32)),
        "behavior_logprobs[1] = -inf",
        LOGPROB,
    ),
    "log-prob beyond float32": (
        dict(behavior_logprobs=np.array([-1, -1e300, -1])),
        "behavior_logprobs[1] = -1e+300",
        LOGPROB,
    ),
    "NaN log-prob": (
        dict(behavior_logprobs=np.array([-1, NAN, -1], np.float32)),
        "behavior_logprobs[1] = nan",
        "or null if they are not known",
    ),
    "text for a reward": (dict(reward="high"), "reward = 'high'", REWARD),
    "NaN reward": (dict(reward=NAN), "reward = nan", REWARD),
    "reward that is true": (dict(reward=True), "reward = True", REWARD),
    "reward beyond float32": (dict(reward=1e300), "reward = 1e+300", REWARD),
    "reward without end": (dict(reward=10**400), "reward = 1000", REWARD),
    "part beyond float32": (dict(reward_parts={"correct": -1e39}), "reward_parts.correct = -1e+39", REWARD),
    "infinite reward": (dict(reward=np.inf), "reward = inf", REWARD),
    "NaN part": (dict(reward_parts={"correct": NAN}), "reward_parts.correct = nan", REWARD),
    "part without a name": (dict(reward_parts={"": 1.0}), "reward_parts = {'': 1.0}", "takes numbers by name"),
    "parts alone": (dict(reward=None), "reward_parts = {", "the reward is null"),
    "accurate as a number": (dict(accurate=1), "accurate = 1", "takes true or false, or null"),
    "metadata that is no object": (dict(metadata=[1]), "metadata = [1]", "takes a JSON object"),
    "metadata that is no JSON": (dict(metadata={"a": {1}}), "metadata = {'a': {1}}", "takes a JSON object"),
    "version below 0": (dict(policy_version=-1), "policy_version = -1", "takes a whole number from 0 to 2147483647"),
    "version that is true": (dict(policy_version=True), "policy_version = True", "takes a whole number from 0"),
    "temperature": (dict(temperature=-0.1), "temperature = -0.1", "takes a finite number, 0 or more"),
    "no temperature": (dict(temperature=None), "temperature = None", "takes a finite number, 0 or more"),
    "top_k": (dict(top_k=-1), "top_k = -1", "takes a whole number from 0 (all tokens) to 2147483647"),
    "top_p": (dict(top_p=0.0), "top_p = 0.0", "takes a number above 0"),
    "min_p": (dict(min_p=1.5), "min_p = 1.5", "takes a number from 0 to 1"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_refused(name):
    change, value, reason = BAD_ROWS[name]
    rows = [make_row(0), text_row(1), make_row(2, length=7), unchecked(change), make_row(4)]
    with pytest.raises(UserError, match=f"rows to append: row 3: {re.escape(value)}.*: .*{re.escape(reason)}") as error:
        completion_checks.check_records(rows, "rows to append: row {}".format)
    assert error.value.remedy
    row = make_row(3)
    rows = [
        renamed(row, make_row(0).completion.id),
        renamed(row, "id 1"),
        unchecked(change, row),
        unchecked(dict(reward="later"), make_row(5)),
    ]
    with pytest.raises(UserError, match=f"record 2: {re.escape(value)}.*: .*{re.escape(reason)}"):
        completion_checks.check_records(rows, "record {}".format)


def test_errors_name_the_first_of_several_bad_rows():
    """The check of a column neither hides an earlier row, which another check refuses, nor relies on a refused one."""
    names = ("no id", "NaN reward", "no tokens", "nothing drawn", "mask too short", "log-probs too long")
    others = [unchecked(BAD_ROWS[name][0], make_row(4)) for name in names]
    for change, value, _ in BAD_ROWS.values():
        row = unchecked(change, make_row(3))
        for other in others:
            with pytest.raises(UserError, match=f"^record 1: {re.escape(value)}"):
                completion_checks.check_records([make_row(0), row, other], "record {}".format)


def test_completions_of_a_policy_are_checked_together(monkeypatch):
    """The rules of a column run once for a batch, not once for a completion."""
    calls = []
    real = completion_checks.Check.plain
    monkeypatch.setattr(
        completion_checks.Check, "plain", lambda *given, **options: calls.append(given[1]) or real(*given, **options)
    )
    row = make_row(3)
    rows = [renamed(row, f"id {number}") for number in range(9)]
    completion_checks.check_records(rows, "record {}".format)
    assert len({*calls}) == len(calls) > 10
    with pytest.raises(UserError, match="record 9: id = 'id 0': is the id of an earlier completion"):
        completion_checks.check_records([*rows, rows[0]], "record {}".format)


def renamed(row, name):
    (completion,) = row.group.completions
    return row._replace(group=row.group._replace(completions=(completion._replace(id=name),)))


def unchecked(change, row=None):
    """A row with bad values, which the types of a completion do not allow."""
    row = row or make_row(3)
    record = {"time": "time", "tokenizer": "tokenizer"}
    one, group = row.completion, row.group
    (tokens,) = one.rows
    names = {"completion_tokens": "tokens", "completion_mask": "mask", "behavior_logprobs": "behavior_logprobs"}
    values = tokens._asdict() | {names[key]: value for key, value in change.items() if key in names}
    values |= {"prompt_tokens": change["prompt_tokens"]} if "prompt_tokens" in change else {}
    grade = one.grade._asdict()
    grade |= {key: change[key] for key in ("reward", "reward_parts", "accurate") if key in change}
    grade |= {"turns": change["turn_rewards"]} if "turn_rewards" in change else {}
    new_sampling = {key: change[key] for key in one.sampling._fields if key in change}
    sampling = made(type(one.sampling), one.sampling._asdict() | new_sampling) if new_sampling else one.sampling
    own = {"completion": "text"} | {key: key for key in ("id", "source", "policy_version", "metadata", "truncated")}
    ours = {own[key]: value for key, value in change.items() if key in own}
    one = one._replace(rows=(made(Row, values),), grade=made(Grade, grade), sampling=sampling, **ours)
    prompt = change.get("messages", change.get("prompt", group.prompt))
    group = made(type(group), group._asdict() | {"completions": (one,), "prompt": prompt})
    group = group._replace(prompt_tokens=values["prompt_tokens"])
    return row._replace(group=group, **{key: change[key] for key in record if key in change})


def made(kind, values):
    """A tuple of a kind, with values of any type."""
    return tuple.__new__(kind, values.values())


def test_a_bad_row_leaves_the_store_unchanged(place):
    append(place, ROWS[:1])
    with pytest.raises(UserError, match="record 1: reward = nan: takes a finite number"):
        append(place, [ROWS[1], make_row(2, reward=NAN)])
    with pytest.raises(ValueError, match="no rows"):
        append(place, [])
    assert ids(place) == ["row 0"]


def test_what_stands_at_tokens_not_drawn_is_nobodys_concern(place):
    mask, logprobs = np.array([True, False, True]), np.array([-1, np.nan, -1], np.float32)
    append(place, [make_row(0, completion_mask=mask, behavior_logprobs=logprobs)])
    assert np.isnan(read(place)[0].completion.rows[0].behavior_logprobs[1])


def test_ids_are_unique_and_groups_grow(place):
    append(place, [make_row(0), make_row(1)])
    with pytest.raises(UserError, match="id = 'row 1': is the id of an earlier completion"):
        append(place, [make_row(2), make_row(1)])
    append(place, [make_row(2)])
    assert ids(place) == ["row 0", "row 1", "row 2"]


# --- What is no store, or is damaged.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"turns": (Turn(2, 1), Turn(1, 1))},
            r"turns = \[\[2, 1\], \[1, 1\]\]: has a pair that is not the index of a row",
        ),
        ({"turns": (Turn(0, 3), Turn(1, 1))}, "turns = .*: has a pair that is not the index of a row"),
        ({"turns": (Turn(0, 1), Turn(1, 1))}, "turns = .*: has a pair .* and the end of sampled tokens in it"),
        ({"turn_rewards": (1.0,)}, r"turn_rewards = \[1.0\]: has 1 values for 2 turns"),
        ({"turn_rewards": (1.0, float("nan"))}, r"turn_rewards\[1\] = nan: takes a finite number from -1e9 to 1e9"),
    ],
)
def test_turns_that_do_not_fit_their_rows_are_refused(db, change, message):
    turns = dict(rows=TWO_ROWS, turns=(Turn(0, 2), Turn(1, 1)), turn_rewards=(0.5, -1.0))
    with pytest.raises(ValueError, match=message):
        append(db, [make_row(0, **turns | change)])


def test_what_is_no_store_is_refused(tmp_path, db):
    with pytest.raises(ValueError, match="is not an experience store .no such file.; create one with"):
        Store(tmp_path / "none")
    assert not (tmp_path / "none").exists()
    (tmp_path / "file").write_text("a file that is long enough to be something else" * 99)
    for create in (False, True):
        with pytest.raises(ValueError, match="file is not a database; it is not an experience store"):
            Store(tmp_path / "file", create=create)
    sqlite3.connect(tmp_path / "other").execute("create table t (x)").connection.close()
    with pytest.raises(ValueError, match="is not an experience store; create one with"):
        Store(tmp_path / "other")
    with pytest.raises(ValueError, match="is a folder, and a store is a file; give a file, such as"):
        Store(tmp_path, create=True)
    append(db, ROWS)
    with sqlite3.connect(db) as database:
        database.execute("update store set version = 6")
    with pytest.raises(ValueError, match="has store version 6, and this recjax reads version 9; export it with"):
        Store(db)


@pytest.mark.skipif(os.getuid() == 0, reason="the superuser may read everything")
def test_a_file_that_may_not_be_read_is_refused(db):
    append(db, ROWS)
    db.chmod(0)
    with pytest.raises(ValueError, match="permission denied"):
        Store(db)


def test_files_are_their_owners(db):
    with Store(db, create=True) as store:
        store.append(ROWS)
        files = list(db.parent.glob(f"{db.name}*"))
        assert len(files) == 4
        assert {stat.S_IMODE(file.stat().st_mode) & 0o077 for file in files} == {0}


def test_a_writer_that_waits_too_long_says_so(db, monkeypatch):
    monkeypatch.setattr(database, "LOCKED_SECONDS", 0.1)
    append(db, ROWS[:1])
    other = sqlite3.connect(db, isolation_level=None)
    other.execute("begin immediate")
    with Store(db) as store:
        assert len(list(store.records())) == 1, "readers do not wait"
        with pytest.raises(ValueError, match="cannot be written: database is locked; another process writes for more"):
            store.append(ROWS[1:2])
        other.execute("rollback")
        store.append(ROWS[1:2])


def test_a_full_disk_changes_nothing(db):
    append(db, ROWS[:1])
    with Store(db) as store:
        with store._engine.connect() as connection:
            pages = connection.exec_driver_sql("pragma page_count").scalar()
        sql.event.listen(store._engine, "begin", lambda one: one.exec_driver_sql(f"pragma max_page_count = {pages}"))
        with pytest.raises(ValueError, match="cannot be written: database or disk is full; free disk space"):
            store.append([make_row(number, length=500) for number in range(1, 99)])
    assert ids(db) == ["row 0"]
    append(db, ROWS[1:])
    assert len(ids(db)) == len(ROWS)


def test_a_deleted_log_is_noticed(db, tmp_path):
    """SQLite keeps the newest rows in a second file, and does not notice that it is gone."""
    append(db, ROWS[:1])
    script = WRITER.replace("1000 * number", "1000").replace(
        "    print(number, flush=True)", "    import os, signal\n    os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", script, str(db)], stdout=subprocess.DEVNULL)
    log = db.with_name(f"{db.name}-wal")
    assert log.stat().st_size
    log.unlink()
    db.with_name(f"{db.name}-shm").unlink()
    with pytest.raises(ValueError, match=r"the last 20 completions, 20 rewards and 0 turns are gone, perhaps with"):
        Store(db)
    db.with_name(f"{db.name}-last").unlink()
    assert ids(db) == ["row 0"]


CHANGES = {
    "a text": "update completions set completion = 'y' where number = 2",
    "a token": "update completions set completion_tokens = x'000000000000000000000000' where number = 1",
    "a number": "update completions set number = 99 where number = 2",
    "a reward": "update rewards set reward = 9 where completion = 2",
    "whose reward": "update rewards set completion = 99 where completion = 2",
    "a lost completion": "delete from completions where number = 2",
    "a count": "update store set last_completion = 7",
    "no counts": "delete from store",
}


@pytest.mark.parametrize("name", CHANGES)
def test_damage_is_noticed(db, name):
    append(db, ROWS)
    with sqlite3.connect(db) as database:
        database.execute(CHANGES[name])

    def use():
        with Store(db) as store:
            assert grouped(store) and len(list(store.records()))

    with pytest.raises(ValueError, match="is damaged"):
        use()


@pytest.mark.parametrize("seed", slow_except(range(3), 0))
def test_flipped_bits_and_cut_files_are_noticed_or_harmless(db, tmp_path, seed):
    append(db, [make_row(number, group=number // 4, length=20) for number in range(60)])
    content, expected = db.read_bytes(), read(db)
    generator, noticed = np.random.default_rng(seed), 0
    db.with_name(f"{db.name}-last").unlink()
    for _ in range(40):
        changed = bytearray(content)
        if generator.integers(8):
            place = int(generator.integers(len(content)))
            changed[place] ^= 1 << int(generator.integers(8))
        else:
            del changed[int(generator.integers(len(content))) :]
        other = tmp_path / "other.db"
        other.write_bytes(changed)
        try:
            with Store(other) as store:
                grouped(store)
                found = list(store.records())
        except ValueError as error:
            assert "Traceback" not in str(error)  # noqa: PT017 – the file may also be readable
            noticed += 1
        else:
            assert all(map(same, found, expected)) and len(found) == len(expected)
        for file in tmp_path.glob("other.db*"):
            file.unlink()
    assert noticed > 10


def test_a_store_in_a_read_only_folder_is_read(db, monkeypatch):
    append(db, ROWS)
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    before = sorted(db.parent.iterdir())
    assert len(ids(db)) == len(ROWS) and sorted(db.parent.iterdir()) == before
    with pytest.raises(ValueError, match="cannot be written: attempt to write a readonly database; grant write"):
        append(db, [text_row(20)])


# --- URLs.


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (
            "mysql://me@x/y",
            "mysql://me@x/y: recjax knows no such database; give a file, or postgresql://user@host/name",
        ),
        ("postgresql://me:se/cret@127.0.0.1:1/x", r"postgresql://me:\*\*\*@127.0.0.1:1/x: .*set .*PGPASSWORD, or"),
        ("postgresql://me@127.0.0.1:x/y", "is no URL of a database; give postgresql://user@host/name"),
        ("postgresql://me@127.0.0.1:1/x?password=secret", r"x\?password=\*\*\*: a password in a config is written"),
        ("postgresql://me@127.0.0.1:1/x", "127.0.0.1:1/x: cannot be opened: connection .*; .*URL, or try again"),
    ],
)
def test_urls_that_cannot_be_used_name_no_password(url, message, monkeypatch):
    monkeypatch.setitem(database._RESTARTS, "refused", 0)
    with pytest.raises(ValueError, match=message) as caught:
        Store(url)
    error, said = caught.value, ""
    while error is not None:
        said, error = said + str(error), error.__cause__ or error.__context__
    assert "secret" not in said and "se/cret" not in said


def test_the_pages_queries_run(db):
    page = (Path(__file__).parents[2] / "docs" / "store_format.md").read_text()
    queries = [query for query in page.split("```sql\n")[1].split("```")[0].split(";") if query.strip()]
    append(db, [*ROWS, text_row(30, id="session/a", reward=None), *(text_row(40 + i, group=5) for i in range(2))])
    with sqlite3.connect(db) as database:
        found = [database.execute(query).fetchall() for query in queries]
    assert len(found) == 5 and all(found)
    assert sum(count for _, count, _ in found[0]) == 10 and len(found[1]) == 10 and found[2] == [("session/a",)]
    assert found[3] == [("other", "2026-01-02", 5), ("test", "2026-01-02", 7)] and found[4] == [("group 5",)]


def test_values_never_become_statements(place):
    name = "x'; drop table completions; --"
    append(place, [text_row(0, id=name, group_id=name, source=name, prompt=name)])
    with Store(place) as store:
        assert store.numbers("id", [name]) == {name: [1]} and store.numbers("id", ["x%"]) == {}
    assert json.loads(json.dumps(ids(place))) == [name]


def test_rows_of_any_columns_can_be_made():
    row = Columns("a", "g", "s", "c", TIME, prompt="p")
    assert columns_of(row.record)._replace(truncated=False) == row._replace(min_p=None, metadata={})
