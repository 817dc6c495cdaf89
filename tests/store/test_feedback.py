"""Late rewards: every pending row gets its own, once, and a bad line changes nothing."""

import itertools
import json
import re
import signal
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recjax.experience.group import Grade, Turn
from recjax.feedback import feedback
from recjax.store.feedback import Given
from recjax.store.feedback import give_rewards as give
from recjax.store.store import TURNS, Store
from tests import commands
from tests.experience.rows import append, make_row, read, same, text_row
from tests.store.test_store import TWO_ROWS

PENDING = dict(reward=None, reward_parts=None, accurate=None)
ROWS = [make_row(i, group=i // 3, **PENDING) for i in range(6)] + [text_row(6, group=2)]


def give_rewards(place, entries):
    with Store(place) as store:
        return give(store, entries)


def rewards(place):
    return [record.completion.grade and record.completion.grade.reward for record in read(place)]


@pytest.fixture
def folder(tmp_path):
    """A store of three appends: two with pending rows, whose groups straddle them, and one without."""
    for part in (ROWS[:2], ROWS[2:6], ROWS[6:]):
        append(tmp_path / "s", part)
    return tmp_path / "s"


def test_rows_get_their_rewards_and_nothing_else_changes(folder):
    entries = [
        {"id": "row 0", "reward": 1, "reward_parts": {"correct": 1, "format": 0}, "accurate": True, "comment": "good"},
        {"group_id": "group 1", "reward": [0.25, 0.5, 0.75], "accurate": False},
        {"id": "row 2", "reward": -1.5},
    ]
    assert give_rewards(folder, entries) == Given(5, 0)
    grades = {0: Grade(1.0, {"correct": 1.0, "format": 0.0}, True), 2: Grade(-1.5)}
    grades |= {i: Grade(reward, None, False) for i, reward in ((3, 0.25), (4, 0.5), (5, 0.75))}
    expected = list(ROWS)
    for i, grade in grades.items():
        completion = ROWS[i].completion._replace(grade=grade, metadata={} if i else {"comment": "good"})
        expected[i] = ROWS[i]._replace(group=ROWS[i].group._replace(completions=(completion,)))
    assert all(map(same, read(folder), expected))


def test_one_reward_of_a_group_goes_to_all_rows(folder):
    assert give_rewards(folder, [{"group_id": "group 0", "reward": 2}]) == Given(3, 0)
    assert rewards(folder) == [2, 2, 2, None, None, None, 1]


def test_turns_get_their_rewards_with_that_of_their_completion(tmp_path):
    turns = dict(rows=TWO_ROWS, turns=(Turn(0, 2), Turn(1, 1), Turn(1, 2)), **PENDING)
    append(tmp_path / "s", [make_row(i, group=i // 2, **turns) for i in range(4)] + [text_row(4, group=9, **PENDING)])
    with Store(tmp_path / "s") as store:  # a server's session that ended before its reward came
        store.add_rewards({4: (Grade(0.5, turns=(0.25, 0.0, 0.25)), None)}, TURNS)
    entries = [
        {"group_id": "group 0", "turn_rewards": [[1, 0, 0], [0.5, 0.5, 1]], "reward": [3, None]},
        {"id": "row 2", "reward": 1},
        {"id": "row 3", "reward": 2},
        {"id": "text 4", "turn_rewards": [0.5]},
    ]
    assert give_rewards(tmp_path / "s", entries) == Given(5, 0)
    assert give_rewards(tmp_path / "s", entries) == Given(0, 5)
    expected = [(3, (1, 0, 0)), (2, (0.5, 0.5, 1)), (1, ()), (2, (0.25, 0, 0.25)), (0.5, (0.5,))]
    assert [one.completion.grade for one in read(tmp_path / "s")] == [Grade(a, turns=turns) for a, turns in expected]
    with pytest.raises(
        ValueError, match=r"entry 0: turn_rewards = .*: the turns already have the rewards 0.25, 0, 0.25"
    ):
        give_rewards(tmp_path / "s", [{"id": "row 3", "reward": 2, "turn_rewards": [1, 0, 0]}])
    with pytest.raises(ValueError, match="entry 0: reward = 1.0: row 'row 2' has another reward, 1.0, in the store"):
        give_rewards(tmp_path / "s", [{"id": "row 2", "reward": 1, "turn_rewards": [1, 0, 0]}])


@given(order=st.permutations(range(6)), cuts=st.sets(st.integers(0, 6)))
@settings(max_examples=10, deadline=None)
def test_order_and_portions_of_feedback_do_not_matter(tmp_path_factory, order, cuts):
    folder = tmp_path_factory.mktemp("feedback") / "s.db"
    for part in (ROWS[:2], ROWS[2:6]):
        append(folder, part)
    edges = sorted({0, 6, *cuts})
    for start, end in itertools.pairwise(edges):
        give_rewards(folder, [{"id": f"row {i}", "reward": i / 4} for i in order[start:end]])
    assert rewards(folder) == [i / 4 for i in range(6)]


def test_equal_rewards_are_accepted_and_different_ones_refused(folder):
    entry = {"group_id": "group 0", "reward": [1, 0, 1], "reward_parts": {"a": 0.1}}
    assert give_rewards(folder, [entry, {"id": "row 3", "reward": 1}]) == Given(4, 0)
    assert give_rewards(folder, [entry, {"id": "row 4", "reward": 1}]) == Given(1, 3)
    with pytest.raises(ValueError, match="entry 0: reward = 1.0: row 'row 1' has another reward, 0.0"):
        give_rewards(folder, [{**entry, "reward": [1, 1, 1]}])
    with pytest.raises(ValueError, match="entry 0: reward = 1.0: row 'row 0' has another reward"):
        give_rewards(folder, [{**entry, "reward_parts": {"a": 0.2}}])


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"id": "row 9", "reward": 1}, "id = 'row 9': the store has no such row"),
        ({"group_id": "row 1", "reward": 1}, "group_id = 'row 1': the store has no such row"),
        ({"reward": 1}, "one of id and group_id"),
        ({"id": "row 1", "group_id": "group 0", "reward": 1}, "one of id and group_id"),
        ({"id": "row 1"}, "reward = None: takes a finite number from -1e9 to 1e9"),
        ({"id": "row 1", "reward": float("nan")}, "reward = nan: takes a finite number from -1e9 to 1e9"),
        ({"id": "row 1", "reward": True}, "reward = True: takes a finite number from -1e9 to 1e9"),
        ({"id": "row 1", "reward": [1]}, r"reward = \[1\]: takes a finite number from -1e9 to 1e9"),
        ({"id": "row 1", "reward": 1, "accurate": 1}, "accurate = 1: takes true"),
        ({"id": "row 1", "reward": 1, "reward_parts": {"a": "b"}}, r"reward_parts\.a = 'b': takes a finite number"),
        (
            {"id": "row 1", "reward": 1, "reward_parts": {"": 1}},
            "reward_parts = .*: takes numbers by name, at least one",
        ),
        ({"id": "row 1", "reward": 1, "reward_parts": {}}, "reward_parts = {}: takes numbers by name, at least one"),
        ({"id": "row 1", "reward": 1, "reward_parts": {"turns": 1}}, "reward_parts: has a part 'turns'; recjax itself"),
        (
            {"id": "row 1", "reward": 1, "turn_rewards": [1, 2]},
            r"turn_rewards = \[1.0, 2.0\]: has 2 values for 1 turns",
        ),
        ({"id": "row 1", "reward": 1, "turn_rewards": ["1"]}, r"turn_rewards\[0\] = '1': takes a finite number"),
        (
            {"id": "row 1", "reward": 1, "turn_rewards": 1},
            "turn_rewards = 1: takes a list of numbers, one for each turn",
        ),
        ({"id": "row 1", "reward": 1, "score": 1}, "unknown key 'score'"),
        ({"group_id": "group 0", "reward": [1, 0]}, r"reward = \[1, 0\]: has 2 values for 3 rows of the group"),
        ({"id": "row 0", "reward": 2}, "reward = 2.0: row 'row 0' has another reward, 1.0, in an earlier entry"),
        ({"id": "text 6", "reward": 2}, "reward = 2.0: row 'text 6' has another reward, 1.0, in the store"),
        ([1], "must be an object with named columns"),
    ],
)
def test_a_bad_line_changes_nothing(folder, tmp_path, entry, reason):
    lines = [{"id": "row 0", "reward": 1}, entry]
    (tmp_path / "r.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
    with pytest.raises(ValueError, match=f"{re.escape(str(tmp_path))}/r.jsonl: line 3: .*{reason}"):
        feedback(folder, tmp_path / "r.jsonl")
    assert all(map(same, read(folder), ROWS))


def test_where_there_is_no_store_none_is_made(tmp_path):
    with pytest.raises(ValueError, match="is not an experience store"):
        give_rewards(tmp_path / "none", [{"id": "row 0", "reward": 1}])
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before the commit", "after it"])
def test_killed_feedback_is_atomic_and_can_be_repeated(folder, moment):
    entries = [{"id": f"row {i}", "reward": i} for i in range(6)]
    script = (
        "import json, os, signal, sys\nfrom recjax.store.feedback import give_rewards\n"
        "from recjax.store.store import Store\nstore, name = Store(sys.argv[1]), sys.argv[3]\n"
        "before = getattr(store, name)\n"
        "def dying(*given):\n    before(*given)\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "setattr(store, name, dying)\ngive_rewards(store, json.loads(sys.argv[2]))\n"
    )
    name = "_save" if moment == "before the commit" else "add_rewards"
    done = subprocess.run([sys.executable, "-c", script, str(folder), json.dumps(entries), name])
    assert done.returncode == -signal.SIGKILL
    given = moment == "after it"
    assert rewards(folder) == [*((0, 1, 2, 3, 4, 5) if given else [None] * 6), 1]
    assert give_rewards(folder, entries) == (Given(0, 6) if given else Given(6, 0))
    assert rewards(folder) == [0, 1, 2, 3, 4, 5, 1]


@pytest.mark.slow
def test_the_command(folder, tmp_path):
    (tmp_path / "r.jsonl").write_text('{"id": "row 0", "reward": 1}\n{"id": "row 1", "reward": 0}\n')
    command = ["-m", "recjax.feedback", folder, "--file", tmp_path / "r.jsonl"]
    done = commands.run(command)
    assert "2 rows got rewards, 0 already had the same reward" in done.stdout, done.stderr
    (tmp_path / "r.jsonl").write_text('{"id": "row 9", "reward": 1}\n')
    done = commands.run(command)
    assert done.returncode == 1 and "line 1: id = 'row 9': the store has no such row" in done.stderr
