"""The store: what comes out is what went in, whoever writes, dies or reads beside it."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import datasets
import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recjax.experience import ledger, store
from tests.experience.rows import make_row, same, text_row

CHAT = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": ""}]
ROWS = [
    make_row(0),
    make_row(1, prompt=None, messages=CHAT, policy_version=None, top_k=5, truncated=True),
    make_row(2, reward=None, reward_parts=None, accurate=None),
    make_row(3, behavior_logprobs=None, length=1),
    make_row(4, completion_mask=np.array([True, False, True])),
    text_row(5),
]


def test_rows_come_out_as_they_went_in(tmp_path):
    store.append(tmp_path / "s", ROWS)
    for ours, theirs in zip(store.read(tmp_path / "s"), ROWS, strict=True):
        assert same(ours, theirs)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    rewards=st.lists(st.floats(-1e9, 1e9), min_size=8, max_size=8),
    text=st.text(),
    seed=st.integers(0, 99),
)
@settings(max_examples=30, deadline=None)
def test_any_rows_come_out_as_they_went_in(tmp_path_factory, lengths, rewards, text, seed):
    folder = tmp_path_factory.mktemp("store")
    rows = [make_row(seed + i, length=n, reward=rewards[i], completion=text) for i, n in enumerate(lengths)]
    store.append(folder, rows)
    assert all(map(same, store.read(folder), rows))


def test_appends_are_read_in_their_order(tmp_path):
    for row in ROWS:
        store.append(tmp_path, [row])
    assert [row.id for row in store.read(tmp_path)] == [row.id for row in ROWS]
    assert [part.name for part in store.part_files(tmp_path)] == [f"part-{i:08d}.parquet" for i in range(6)]


def test_threads_that_append_at_one_time_lose_nothing(tmp_path):
    def work(first):
        for number in range(first, first + 5):
            store.append(tmp_path, [make_row(number)])

    threads = [threading.Thread(target=work, args=(10 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(int(row.id.split()[1]) for row in store.read(tmp_path)) == [
        10 * i + j for i in range(4) for j in range(5)
    ]


def test_other_programs_read_it_as_it_is(tmp_path):
    store.append(tmp_path, ROWS[:3])
    store.append(tmp_path, ROWS[3:])
    expected = [row.reward for row in ROWS]
    assert pd.read_parquet(tmp_path)["reward"].replace({np.nan: None}).tolist() == expected
    assert datasets.load_dataset("parquet", data_dir=str(tmp_path), split="train")["reward"][:] == expected
    parts = str(tmp_path / "*.parquet")
    assert duckdb.sql(f"select reward from '{parts}' order by filename, file_row_number").fetchall() == [
        (reward,) for reward in expected
    ]
    assert duckdb.sql(f"select sum(len(completion_tokens)) from '{parts}'").fetchall() == [(13,)]


WRITER = """
import sys
from recjax.experience import store
from tests.experience.rows import make_row
print("ready", flush=True)
for number in range(100_000):
    store.append(sys.argv[1], [make_row(1000 * number + i, length=50) for i in range(20)])
    print(number, flush=True)
"""


@pytest.mark.parametrize("moment", ["any", "before the rename"])
def test_a_killed_writer_leaves_a_readable_store(tmp_path, moment):
    script = WRITER
    if moment != "any":
        dying = "import os, signal\nos.replace = lambda a, b: os.kill(os.getpid(), signal.SIGKILL)\n"
        script = script.replace(
            "    print(number, flush=True)", "    print(number, flush=True)\n" + textwrap.indent(dying, "    ")
        )
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    said = [process.stdout.readline().strip() for _ in range(2 if moment != "any" else 4)]
    if moment == "any":
        os.kill(process.pid, signal.SIGKILL)
    said += process.stdout.read().split()
    assert process.wait() == -signal.SIGKILL
    unfinished = list(tmp_path.glob(".part-*"))
    if moment != "any":
        assert len(unfinished) == 1
    done = len(said) - 1
    rows = store.read(tmp_path)
    # A part may be there whose number was not yet printed.
    assert len(rows) in (20 * done, 20 * (done + 1))
    store.append(tmp_path, [text_row(0)])
    assert [row.id for row in store.read(tmp_path)] == [*(row.id for row in rows), "text 0"]
    assert not list(tmp_path.glob(".part-*"))


NAN, TOKENS = float("nan"), np.array([1, 2, 3], np.int32)
BAD_ROWS = {
    "no id": (dict(id=None), "id", "must be given"),
    "empty source": (dict(source=""), "source", "must not be empty"),
    "no time": (dict(time=None), "time", "must be given"),
    "same id": (dict(id="row 0"), "id", "id of an earlier row"),
    "two prompts": (dict(messages=CHAT), "prompt", "one of prompt and messages"),
    "no prompt": (dict(prompt=None), "prompt", "one of prompt and messages"),
    "no messages": (dict(prompt=None, messages=[]), "messages", "one message or more"),
    "no content": (dict(prompt=None, messages=[{"role": "user"}]), "messages", "role and content"),
    "mask too short": (dict(completion_mask=np.ones(2, bool)), "completion_mask", "as long as completion_tokens"),
    "no mask": (dict(completion_mask=None), "completion_mask", "as long as completion_tokens"),
    "mask with null": (dict(completion_mask=[True, None, True]), "completion_mask", "null"),
    "nothing drawn": (dict(completion_mask=np.zeros(3, bool)), "completion_mask", "must have chosen a token"),
    "no tokens": (dict(completion_tokens=TOKENS[:0]), "completion_tokens", "no token"),
    "no prompt tokens": (dict(prompt_tokens=TOKENS[:0]), "prompt_tokens", "no token"),
    "token below 0": (dict(completion_tokens=TOKENS - 2), "completion_tokens", "0 or more"),
    "null token": (dict(prompt_tokens=[1, None]), "prompt_tokens", "0 or more"),
    "no tokenizer": (dict(tokenizer=None), "prompt_tokens", "column tokenizer"),
    "log-probs too long": (dict(behavior_logprobs=-np.ones(4, np.float32)), "behavior_logprobs", "as long as"),
    "log-probs alone": (
        dict(completion_tokens=None, completion_mask=None, behavior_logprobs=-np.ones(3, np.float32)),
        "behavior_logprobs",
        "as long as",
    ),
    "positive log-prob": (
        dict(behavior_logprobs=np.array([-1, 0.5, -1], np.float32)),
        "behavior_logprobs",
        "at most 0",
    ),
    "infinite log-prob": (
        dict(behavior_logprobs=np.array([-1, -np.inf, -1], np.float32)),
        "behavior_logprobs",
        "finite",
    ),
    "NaN log-prob": (dict(behavior_logprobs=np.array([-1, NAN, -1], np.float32)), "behavior_logprobs", "give null"),
    "NaN reward": (dict(reward=NAN), "reward", "finite"),
    "reward beyond float32": (dict(reward=1e300), "reward", "at most 1e\\+09"),
    "part beyond float32": (dict(reward_parts={"correct": -1e39}), "reward_parts", "at most 1e\\+09"),
    "infinite reward": (dict(reward=np.inf), "reward", "finite"),
    "NaN part": (dict(reward_parts={"correct": NAN}), "reward_parts", "finite"),
    "parts alone": (dict(reward=None), "reward_parts", "the reward is null"),
    "metadata that is no object": (dict(metadata="[1]"), "metadata", "JSON object"),
    "metadata that is no JSON": (dict(metadata="{"), "metadata", "JSON object"),
    "version below 0": (dict(policy_version=-1), "policy_version", "0 or more"),
    "temperature": (dict(temperature=-0.1), "temperature", "0 or more"),
    "top_k": (dict(top_k=-1), "top_k", "0 \\(all tokens\\) or more"),
    "top_p": (dict(top_p=0.0), "top_p", "above 0"),
    "min_p": (dict(min_p=1.5), "min_p", "from 0 to 1"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_refused_on_append_and_on_read(tmp_path, name, monkeypatch):
    change, column, reason = BAD_ROWS[name]
    # Neighbours with null and longer lists: an index into the flat values is not a row.
    rows = [make_row(0), text_row(1), make_row(2, length=7), make_row(3)._replace(**change), make_row(4)]
    with pytest.raises(ValueError, match=f"rows to append: row 3: column {column}: .*{reason}"):
        store.append(tmp_path, rows)
    assert not store.part_files(tmp_path)
    with monkeypatch.context() as unchecked:
        unchecked.setattr(store, "check_rows", lambda table, place: None)
        part = store.append(tmp_path, rows)
    with pytest.raises(ValueError, match=f"{re.escape(str(part))}: row 3: column {column}: .*{reason}"):
        store.read(tmp_path)


def test_what_stands_at_tokens_not_drawn_is_nobodys_concern(tmp_path):
    mask, logprobs = np.array([True, False, True]), np.array([-1, np.nan, -1], np.float32)
    store.append(tmp_path, [make_row(0, completion_mask=mask, behavior_logprobs=logprobs)])
    assert np.isnan(store.read(tmp_path)[0].behavior_logprobs[1])


def test_ids_are_unique_in_a_store_and_groups_go_on(tmp_path):
    store.append(tmp_path, [make_row(0), make_row(1)])
    with pytest.raises(ValueError, match="already has a row with id 'row 1'"):
        store.append(tmp_path, [make_row(2), make_row(1)])
    store.append(tmp_path, [make_row(2)])
    copy = tmp_path / "part-00000007.parquet"
    copy.write_bytes((tmp_path / "part-00000001.parquet").read_bytes())
    with pytest.raises(
        ValueError, match="part-00000007.*row 0: id 'row 2' is also the id of part-00000001.parquet, row 0"
    ):
        store.read(tmp_path)


def rewrite(part: Path, change) -> None:
    table = pq.read_table(part, partitioning=None)
    pq.write_table(change(table), part)
    (part.parent / ledger.NAME).unlink()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.replace_schema_metadata({}), "not written by a store, .* reads version 4; .*import_experience"),
        *(
            (lambda t, v=v: t.replace_schema_metadata({store._VERSION_KEY: v}), f"store version '{v.decode()}', and")
            for v in (b"3", b"5")
        ),
        (lambda t: t.drop_columns(["answer"]), "column answer is missing"),
        (lambda t: t.append_column("mood", pa.array(["good"] * len(t))), "column mood is unknown"),
        (
            lambda t: t.set_column(t.schema.get_field_index("reward"), "reward", t["reward"].cast(pa.string())),
            "column reward has type string; convert it to double",
        ),
    ],
)
def test_files_of_another_version_or_shape_are_refused(tmp_path, change, message):
    part = store.append(tmp_path, ROWS)
    rewrite(part, change)
    with pytest.raises(ValueError, match=f"{re.escape(str(part))}.*{message}"):
        store.read(tmp_path)


def test_what_is_no_store_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is not an experience store"):
        store.read(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file, and a store is a folder"):
        store.append(tmp_path / "file", ROWS)
    with pytest.raises(ValueError, match="no rows"):
        store.append(tmp_path, [])
    with pytest.raises(ValueError, match="row 1: column reward: 'high' is not double"):
        store.append(tmp_path, [make_row(0), make_row(1, reward="high")])
    (tmp_path / "part-00000000.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(ValueError, match="part-00000000.parquet cannot be read"):
        store.read(tmp_path)


def test_a_lock_that_is_a_folder_is_refused(tmp_path):
    (tmp_path / "s" / ".lock").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"\.lock must be a file, as it is the store's lock; remove it"):
        store.append(tmp_path / "s", ROWS)
