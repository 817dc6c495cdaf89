"""Late rewards: every pending row gets its own, once, and a bad line changes nothing."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recjax.experience import store
from recjax.experience.feedback import Given, give_rewards
from recjax.feedback import feedback
from tests import commands
from tests.experience.rows import make_row, same, text_row

PENDING = dict(reward=None, reward_parts=None, accurate=None)
ROWS = [make_row(i, group=i // 3, **PENDING) for i in range(6)] + [text_row(6, group=2)]


@pytest.fixture
def folder(tmp_path):
    """A store of three parts: two with pending rows, whose groups straddle them, and one without."""
    for part in (ROWS[:2], ROWS[2:6], ROWS[6:]):
        store.append(tmp_path / "s", part)
    return tmp_path / "s"


def test_rows_get_their_rewards_and_nothing_else_changes(folder):
    entries = [
        {"id": "row 0", "reward": 1, "reward_parts": {"correct": 1, "format": 0}, "accurate": True},
        {"group_id": "group 1", "reward": [0.25, 0.5, 0.75], "accurate": False},
        {"id": "row 2", "reward": -1.5},
    ]
    untouched = [part.stat().st_ino for part in store.part_files(folder)][2]
    assert give_rewards(folder, entries) == Given(5, 0)
    expected = list(ROWS)
    expected[0] = ROWS[0]._replace(reward=1.0, reward_parts={"correct": 1.0, "format": 0.0}, accurate=True)
    expected[2] = ROWS[2]._replace(reward=-1.5)
    for i, reward in ((3, 0.25), (4, 0.5), (5, 0.75)):
        expected[i] = ROWS[i]._replace(reward=reward, accurate=False)
    assert all(map(same, store.read(folder), expected))
    assert [part.stat().st_ino for part in store.part_files(folder)][2] == untouched


def test_one_reward_for_a_group_is_that_of_all_its_rows(folder):
    assert give_rewards(folder, [{"group_id": "group 0", "reward": 2}]) == Given(3, 0)
    assert [row.reward for row in store.read(folder)] == [2, 2, 2, None, None, None, 1]


def test_entries_that_cannot_be_used_may_be_refused_one_by_one(folder):
    """The others are given, and a group whose row has another reward gets nothing."""
    entries = [
        {"id": "row 0", "reward": 1, "comment": "good"},
        {"id": "row 0", "reward": 2},
        {"id": "no row", "reward": 1},
        {"id": "row 6", "reward": 0},
        {"group_id": "group 0", "reward": 0.5},
        {"id": "row 1", "reward": float("nan")},
        {"group_id": "group 1", "reward": 3},
        {"id": "row 2", "reward": 4},
    ]
    refused = {}
    assert give_rewards(folder, entries, refuse=refused.__setitem__) == Given(5, 0)
    assert [row.reward for row in store.read(folder)] == [1, None, 4, 3, 3, 3, 1]
    assert refused.keys() == {1, 2, 3, 4, 5} and "in an earlier entry" in refused[1] and "no such row" in refused[2]
    with pytest.raises(ValueError, match="another reward"):
        give_rewards(folder, entries)


@given(order=st.permutations(range(6)), cuts=st.sets(st.integers(0, 6)))
@settings(max_examples=10, deadline=None)
def test_in_any_order_and_any_portions_it_is_the_same_store(tmp_path_factory, order, cuts):
    folder = tmp_path_factory.mktemp("feedback")
    for part in (ROWS[:2], ROWS[2:6]):
        store.append(folder, part)
    edges = sorted({0, 6, *cuts})
    for start, end in zip(edges[:-1], edges[1:], strict=True):
        give_rewards(folder, [{"id": f"row {i}", "reward": i / 4} for i in order[start:end]])
    assert [row.reward for row in store.read(folder)] == [i / 4 for i in range(6)]


def test_the_same_reward_again_is_no_error_and_another_is(folder):
    entry = {"group_id": "group 0", "reward": [1, 0, 1], "reward_parts": {"a": 0.1}}
    assert give_rewards(folder, [entry, {"id": "row 3", "reward": 1}]) == Given(4, 0)
    assert give_rewards(folder, [entry, {"id": "row 4", "reward": 1}]) == Given(1, 3)
    with pytest.raises(ValueError, match="entry 0: row 'row 1' has another reward, 0.0"):
        give_rewards(folder, [{**entry, "reward": [1, 1, 1]}])
    with pytest.raises(ValueError, match="entry 0: row 'row 0' has another reward"):
        give_rewards(folder, [{**entry, "reward_parts": {"a": 0.2}}])


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"id": "row 9", "reward": 1}, "id = 'row 9': the store has no such row"),
        ({"group_id": "row 1", "reward": 1}, "group_id = 'row 1': the store has no such row"),
        ({"reward": 1}, "one of id and group_id"),
        ({"id": "row 1", "group_id": "group 0", "reward": 1}, "one of id and group_id"),
        ({"id": "row 1"}, "reward = None: takes finite"),
        ({"id": "row 1", "reward": float("nan")}, "reward = nan: takes finite"),
        ({"id": "row 1", "reward": True}, "reward = True: takes finite"),
        ({"id": "row 1", "reward": [1]}, r"reward = \[1\]: takes finite"),
        ({"id": "row 1", "reward": 1, "accurate": 1}, "accurate = 1: takes true"),
        ({"id": "row 1", "reward": 1, "reward_parts": {"a": "b"}}, "reward_parts = .*finite numbers"),
        ({"id": "row 1", "reward": 1, "score": 1}, "unknown key 'score'"),
        ({"group_id": "group 0", "reward": [1, 0]}, "reward has 2 values; give one for each of the 3 rows"),
        ({"id": "row 0", "reward": 2}, "row 'row 0' has another reward, 1.0, in an earlier entry"),
        ({"id": "text 6", "reward": 2}, "row 'text 6' has another reward, 1.0, in the store"),
        ([1], "must be an object with named columns"),
    ],
)
def test_a_bad_line_changes_nothing(folder, tmp_path, entry, reason):
    lines = [{"id": "row 0", "reward": 1}, entry]
    (tmp_path / "r.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
    with pytest.raises(ValueError, match=f"{re.escape(str(tmp_path))}/r.jsonl: line 3: .*{reason}"):
        feedback(folder, tmp_path / "r.jsonl")
    assert all(map(same, store.read(folder), ROWS))


def test_where_there_is_no_store_none_is_made(tmp_path):
    with pytest.raises(ValueError, match="is not an experience store"):
        give_rewards(tmp_path / "none", [{"id": "row 0", "reward": 1}])
    assert not (tmp_path / "none").exists()


def test_a_killed_feedback_leaves_rows_whole_and_is_given_again(folder, tmp_path):
    entries = [{"id": f"row {i}", "reward": i} for i in range(6)]
    script = (
        "import json, os, signal, sys\nfrom recjax.experience import store\n"
        "from recjax.experience.feedback import give_rewards\nreplace, calls = os.replace, []\n"
        "def dying(*paths):\n    calls.extend(path for path in paths[1:] if str(path).endswith('.parquet'))\n"
        "    replace(*paths) if len(calls) < 2 else os.kill(os.getpid(), signal.SIGKILL)\n"
        "os.replace = dying\ngive_rewards(sys.argv[1], json.loads(sys.argv[2]))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(folder), json.dumps(entries)])
    assert done.returncode == -signal.SIGKILL
    assert [row.reward for row in store.read(folder)] == [0, 1, None, None, None, None, 1]
    assert give_rewards(folder, entries) == Given(4, 2)
    assert [row.reward for row in store.read(folder)] == [0, 1, 2, 3, 4, 5, 1]
    assert not [name for name in os.listdir(folder) if name.startswith(".part")]


@pytest.mark.slow
def test_the_command(folder, tmp_path):
    (tmp_path / "r.jsonl").write_text('{"id": "row 0", "reward": 1}\n{"id": "row 1", "reward": 0}\n')
    command = ["-m", "recjax.feedback", folder, "--file", tmp_path / "r.jsonl"]
    done = commands.run(command)
    assert "2 rows got rewards, 0 already had the same reward" in done.stdout, done.stderr
    (tmp_path / "r.jsonl").write_text('{"id": "row 9", "reward": 1}\n')
    done = commands.run(command)
    assert done.returncode == 1 and "line 1: id = 'row 9': the store has no such row" in done.stderr
