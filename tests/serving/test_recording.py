"""What is served is recorded: whole, once, durably, with the rewards that come later."""

import asyncio
import contextlib
import shutil
import sqlite3
import threading
import time
from datetime import UTC, datetime

import numpy as np
import pytest
import sqlalchemy
import tokenizers
from transformers import PreTrainedTokenizerFast

from recjax.config import load_config
from recjax.experience.batch import Shape, pad
from recjax.experience.group import Grade, turn_rewards
from recjax.experience.recorded import has_sets, sets_to_lists, top_to_lists
from recjax.experience.records import PROMPT_LEFT_OUT
from recjax.hub.tokenizers import character_tokenizer
from recjax.rollout.requests import Sampled
from recjax.serving import recorder
from recjax.serving.bodies import RewardBody
from recjax.serving.recorder import Recorder, Recording
from recjax.serving.running import build_server
from recjax.store.database import Unavailable
from recjax.store.following import Follower
from recjax.store.store import Change, Store
from recjax.store.stored_groups import load_groups
from recjax.store.tokenize import tokenized
from tests.experience.rows import read, same
from tests.serving.some_server import POLICY, TOKENIZER, TestClient, post, serve, serving
from tests.store.test_feedback import give_rewards
from tests.training.tiny_run import TINY

TEXT, CHAT, FEEDBACK = "/v1/completions", "/v1/chat/completions", "/v1/feedback"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def db(tmp_path):
    """The file of a store that does not exist yet."""
    return tmp_path / "store.db"


def by_id(place):
    return {record.completion.id: record for record in read(place)}


def rewards(place):
    return {name: one.completion.grade and one.completion.grade.reward for name, one in by_id(place).items()}


def copied(place, other):
    """A copy of the files of a store that is in use, as they are on disk at this moment."""
    other.mkdir()
    for file in place.parent.glob(f"{place.name}*"):
        shutil.copy(file, other)
    return other / place.name


# The distribution of every test that records the tokens that cuts keep.
CUTS = {"temperature": 0.5, "top_p": 0.9, "min_p": 0.1}


def test_rows_say_what_was_served(db):
    with serve(db) as client:
        options = {"n": 2, "max_tokens": 9, "return_token_ids": True} | CUTS
        text = post(client, TEXT, prompt=["ab", "c"], user="me", metadata={"k": "v"}, **options)
        assert len(by_id(db)) == 4, "a row is there before its reply"
        chat = post(client, CHAT, messages=HELLO, max_tokens=9, return_token_ids=True)
        given = {"reward": 0.5, "reward_parts": {"good": 1.0}, "accurate": True, "comment": "fine"}
        assert post(client, FEEDBACK, id=text["id"], index=1, **given)["new"]
        assert rewards(db)[f"{text['id']}/1"] == 0.5
    rows = by_id(db)
    assert len(rows) == 5
    for choice in text["choices"]:
        record = rows[f"{text['id']}/{choice['index']}"]
        one, place = record.completion, choice["index"] // 2
        (row,) = one.rows
        assert (record.group.prompt, record.group.id) == (["ab", "c"][place], f"{text['id']}/prompt{place}")
        assert row.prompt_tokens.tolist() == choice["prompt_token_ids"]
        assert row.tokens.tolist() == choice["token_ids"] and row.mask.all()
        np.testing.assert_array_equal(row.behavior_logprobs, np.float32(choice["token_logprobs"]))
        assert one.sampling == (0.5, 0, 0.9, 0.1) and sets_to_lists(row.recorded) == choice["sampling_mask"]
        assert all(token in ids for token, ids in zip(choice["token_ids"], choice["sampling_mask"], strict=True))
        assert [list(map(list, pairs)) for pairs in top_to_lists(row.recorded)] == choice["token_top_logprobs"]
        assert row.recorded["top_ids"].shape == (len(row.tokens), 3)
        assert (one.policy_version, one.source) == (3, "tiny")
        assert one.text == choice["text"] and one.truncated == (choice["finish_reason"] == "length")
        comment = {"comment": "fine"} if choice["index"] == 1 else {}
        expected = {"request": text["id"], "endpoint": "text", "user": "me", "metadata": {"k": "v"}} | comment
        assert one.metadata == expected
        assert one.grade == (Grade(0.5, {"good": 1.0}, True) if comment else None)
    record = rows[f"{chat['id']}/0"]
    assert record.group.prompt == HELLO and record.completion.sampling.temperature == 1.0
    assert list(record.completion.rows[0].recorded) == ["top_ids", "top_logprobs"]
    assert "sampling_mask" not in chat["choices"][0]
    assert len(load_groups(db, POLICY)) == 3


def test_turns_of_a_session_are_one_trajectory(db):
    with serve(db) as client:
        url, messages, replies = "/sessions/game-1" + CHAT, [{"role": "user", "content": "one"}], []
        for more in ("two", "three", "four"):
            reply = post(client, url, messages=messages, max_tokens=45, seed=61 + len(replies), return_token_ids=True)
            replies.append(reply)
            said = reply["choices"][0]["message"]["content"]
            messages = [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": more}]
        other = post(client, "/sessions/game-1" + TEXT, prompt="something else", max_tokens=3)
        assert not read(db), "an open session is no completion"
        assert post(client, FEEDBACK, id=other["id"], reward=-0.5)["turn"] == 3
        post(client, "/sessions/game-1/reward", reward=2.0, comment="well played")
        assert not post(client, "/sessions/game-1/reward", reward=2.0, comment="well played")["new"]
        error = post(client, url, status=409, messages=messages)["error"]
        assert error["code"] == "session_over"
    (record,) = read(db)
    one = record.completion
    assert one.id == "session/game-1" and one.grade.reward == 2.0 and one.grade.turns == (0, 0, 0, -0.5)
    assert [turn.row for turn in one.turns] == [0, 0, 0, 1] and one.turns[2].end == len(one.rows[0].tokens)
    first = one.rows[0]
    sampled = [token for reply in replies for token in reply["choices"][0]["token_ids"]]
    ended = [reply["choices"][0]["finish_reason"] == "stop" for reply in replies]
    assert all(ended[:2]), "take other seeds: the template closes a message that was cut off"
    assert len(one.rows) == 2 and first.tokens[first.mask].tolist() == sampled
    whole = replies[2]["prompt_token_ids"] + replies[2]["choices"][0]["token_ids"]
    assert [*first.prompt_tokens, *first.tokens] == whole
    found = [token for row in one.rows[:-1] for token in row.tokens[row.mask].tolist()]
    assert found == sampled, "every token that was sampled, once"
    said = one.metadata
    assert said["requests"] == [*(reply["id"] for reply in replies), other["id"]] and said["comment"] == "well played"
    (group,) = load_groups(db, POLICY)
    assert len(group.completions) == 1 and len(group.completions[0].rows) == 2


def test_a_continued_prompt_keeps_its_sampled_tokens(db):
    with serve(db) as client:
        options = {"max_tokens": 4, "return_token_ids": True} | CUTS
        first = post(client, "/sessions/s" + TEXT, prompt="ab", **options)
        text = "ab" + TOKENIZER.decode(first["choices"][0]["token_ids"])
        more = post(client, "/sessions/s" + TEXT, prompt=text + "xy", **options)
        ids = [*first["prompt_token_ids"], *first["choices"][0]["token_ids"], *TOKENIZER.encode("xy")]
        assert more["prompt_token_ids"] == ids
        error = post(client, "/sessions/s" + TEXT, status=409, prompt="ab", **(CUTS | {"temperature": 0.7}))["error"]
        assert error["param"] == "temperature"
    (row,) = read(db)[0].completion.rows
    given = len(first["choices"][0]["token_ids"])
    assert row.mask.tolist() == [True] * given + [False] * 2 + [True] * (len(row.tokens) - given - 2)
    assert (has_sets(row.recorded, np.ones_like(row.mask)) == row.mask).all()


def test_tokens_are_never_made_twice(db):
    letters = "abcdefghi"
    pairs = [(one, other) for one in letters for other in letters]
    tokens = ["<eos>", *letters, *map("".join, pairs), *"012345"]  # as many as the decoder of the other tests has
    vocabulary = {token: number for number, token in enumerate(tokens)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, pairs))
    made.decoder = tokenizers.decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", clean_up_tokenization_spaces=False)
    with serve(db, policy=POLICY._replace(tokenizer=tokenizer)) as client:
        for seed in range(50):
            url, options = f"/sessions/{seed}{TEXT}", {"max_tokens": 12, "return_token_ids": True, "seed": seed}
            (choice,) = post(client, url, prompt="a", **options)["choices"]
            if choice["finish_reason"] == "length" and tokenizer.encode(choice["text"]) != choice["token_ids"]:
                break
        else:
            pytest.fail("no seed samples tokens that the tokenizer would join")
        more = post(client, url, prompt="a" + choice["text"] + "b", **options)
        assert more["prompt_token_ids"] == [1, *choice["token_ids"], 2]


def test_only_plain_text_gets_special_tokens(db):
    tokenizer = character_tokenizer("".join(map(chr, range(32, 127))) + "\n")
    tokenizer.bos_token, tokenizer.chat_template = "~", "{% for m in messages %}[{{ m.content }}{% endfor %}[a:"
    bos_id = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="~ $A", special_tokens=[("~", bos_id)]
    )
    options, chat = {"max_tokens": 1, "return_token_ids": True}, [{"role": "user", "content": "hi"}]
    with serve(db, policy=POLICY._replace(tokenizer=tokenizer)) as client:
        for session in ("", "/sessions/one", "/sessions/two"):
            asked = post(client, f"{session}{CHAT}", messages=chat, **options)["prompt_token_ids"]
            assert asked == tokenizer.apply_chat_template(chat, return_dict=False) and bos_id not in asked
        asked = post(client, TEXT, prompt="hi", **options)["choices"][0]["prompt_token_ids"]
        assert asked == tokenizer("hi")["input_ids"] and asked[0] == bos_id
        tokenizer.add_tokens(["<extra>"])
        assert post(client, TEXT, status=400, prompt="hi <extra>")["error"]["param"] == "prompt"


def test_a_reward_is_given_once(db):
    with serve(db) as client:
        one = post(client, TEXT, prompt="a", max_tokens=2)["id"]
        two = post(client, TEXT, prompt="a", max_tokens=2, n=2)["id"]
        assert post(client, FEEDBACK, id=one, reward=1)["id"] == f"{one}/0"
        assert not post(client, FEEDBACK, id=f"{one}/0", reward=1)["new"], "the very same one is no error"
        for other in ({"reward": 2}, {"reward": 1, "comment": "x"}, {"reward": 1, "accurate": False}):
            assert post(client, FEEDBACK, status=409, id=one, **other)["error"]["code"] == "reward_given"
        assert post(client, FEEDBACK, status=400, id=two, reward=1)["error"]["param"] == "index"
        post(client, FEEDBACK, status=404, id=two, index=2, reward=1)
        post(client, FEEDBACK, status=404, id="cmpl-1", reward=1)
        post(client, "/sessions/none/reward", status=404, reward=1)
        for bad in ({"reward": "1"}, {"reward": 1e10}, {}, {"reward": 1, "reward_parts": {}}, {"reward": 1, "x": 1}):
            post(client, FEEDBACK, status=400, id=two, index=0, **bad)
        post(client, "/sessions/a%2Fb/v1/completions", status=404, prompt="a")
        post(client, "/sessions/a b/v1/completions", status=400, prompt="a")
    with serve(db) as client:
        post(client, FEEDBACK, status=409, id=one, reward=0)
        post(client, FEEDBACK, id=two, index=0, reward=0.5, comment="late")
        post(client, FEEDBACK, status=409, id=two, index=0, reward=0)
    rows = rewards(db)
    assert [rows[name] for name in (f"{one}/0", f"{two}/0", f"{two}/1")] == [1, 0.5, None]
    assert by_id(db)[f"{two}/0"].completion.metadata["comment"] == "late"


def recorder_of(place, **options):
    return Recorder(Recording(str(place), "tiny", **options), TOKENIZER)


def test_the_next_server_continues_a_killed_servers_sessions(tmp_path, db):
    with serve(db) as client:
        ids = [post(client, TEXT, prompt="ab", max_tokens=3)["id"] for _ in range(3)]
        turn = post(client, "/sessions/s" + TEXT, prompt="ab", max_tokens=4, top_k=20, return_token_ids=True)
        post(client, FEEDBACK, id=ids[0], reward=1)
        left = copied(db, tmp_path / "left")
    kept = by_id(db)
    with serve(left) as client:
        post(client, FEEDBACK, status=409, id=ids[0], reward=0)
        text = "ab" + TOKENIZER.decode(turn["choices"][0]["token_ids"]) + "x"
        more = post(client, "/sessions/s" + TEXT, prompt=text, max_tokens=4, top_k=20, return_token_ids=True)
        assert more["prompt_token_ids"][2:-1] == turn["choices"][0]["token_ids"], "the session goes on"
        post(client, "/sessions/s/reward", reward=3)
    rows = by_id(left)
    assert rows.keys() == kept.keys() and rows["session/s"].completion.grade.reward == 3
    assert all(same(rows[f"{name}/0"], kept[f"{name}/0"]) for name in ids)
    with Store(left) as store:
        assert not store.turns()
    row = rows["session/s"].completion.rows[0]
    sets = [one for reply in (turn, more) for one in reply["choices"][0]["sampling_mask"]]
    assert [one for one in sets_to_lists(row.recorded) if one] == sets and len(sets) == row.mask.sum()


def several_turns(client):
    """Four turns of a session in three replies, the second of which has two choices."""
    prompts = [{"prompt": "a"}, {"prompt": "b", "n": 2}, {"prompt": "c"}]
    return [post(client, "/sessions/s" + TEXT, max_tokens=3, seed=7, **prompt) for prompt in prompts]


def test_rewards_of_single_turns_survive_a_kill(db, tmp_path):
    with serve(db) as client:
        first, second, third = (reply["id"] for reply in several_turns(client))
        reply = {"id": "session/s", "turn": 0, "reward": 0.25}
        assert post(client, FEEDBACK, id=first, reward=0.25) == reply | {"new": True}
        assert post(client, FEEDBACK, id=first, index=0, reward=0.25) == reply | {"new": False}
        assert post(client, FEEDBACK, status=409, id=first, reward=0)["error"]["code"] == "reward_given"
        assert post(client, FEEDBACK, status=400, id=second, reward=1)["error"]["param"] == "index"
        post(client, FEEDBACK, status=404, id=second, index=2, reward=1)
        assert post(client, FEEDBACK, id=second, index=1, reward=0.5)["turn"] == 2
        assert post(client, "/sessions/s/reward", turn=3, reward=-1)["new"]
        post(client, "/sessions/s/reward", status=404, turn=4, reward=1)
        post(client, "/sessions/t/reward", status=404, turn=0, reward=1)
        for bad in ({}, {"reward": "1"}, {"reward": 1, "comment": "x"}, {"reward": 1, "turn_rewards": [1]}):
            post(client, FEEDBACK, status=400, id=third, **bad)
        left, other = copied(db, tmp_path / "left"), copied(db, tmp_path / "other")
        assert not read(db), "the session goes on"
    # A server that was killed at that moment: the session goes on, with the rewards of its turns.
    with serve(left) as client:
        assert not post(client, "/sessions/s/reward", turn=0, reward=0.25)["new"]
        post(client, FEEDBACK, status=409, id=third, reward=1)
        post(client, "/sessions/s/reward", turn=1, reward=0)
        post(client, "/sessions/s/reward", status=400, reward=1, turn_rewards=[1, 1, 1, 1])
        assert post(client, "/sessions/s/reward", reward=0.5, comment="slow")["reward"] == 0.5
        assert not post(client, "/sessions/s/reward", reward=0.5, comment="slow")["new"]
        post(client, FEEDBACK, status=404, id=third, reward=-1)
    grade, turns = Grade(0.5, turns=(0.25, 0.0, 0.5, -1.0)), read(left)[0].completion.turns
    assert read(left)[0].completion.grade == grade and len(turns) == 4
    np.testing.assert_array_equal(turn_rewards(read(left)[0].completion), [0.25, 0, 0.5, -0.25])
    # Without a reward of its own, the total is the turns' sum.
    with serve(other) as client:
        assert post(client, "/sessions/s/reward")["reward"] == -0.25
    assert read(other)[0].completion.grade == grade._replace(reward=-0.25)
    # The first server has ended, and with it the session; its reward comes later.
    assert read(db)[0].completion.grade is None
    with serve(db) as client:
        error = post(client, "/sessions/s/reward", status=409, turn=1, reward=1)["error"]
        assert error["code"] == "session_over" and "turn_rewards" in error["message"]
        assert post(client, "/sessions/s/reward", reward=2)["new"]
        assert not post(client, "/sessions/s/reward", reward=2, turn_rewards=[0.25, 0, 0.5, -1])["new"]
    assert read(db)[0].completion.grade == grade._replace(reward=2.0)


def test_a_follower_has_the_rewards_of_turns(db, tmp_path):
    (tmp_path / "tiny.yaml").write_text(TINY)
    options = [f"experience.store={db}", "experience.follow=true", "rollout.max_context_tokens=200"]
    options += [f"output={tmp_path / 'run'}", "algorithm.advantage={name: turn_returns}"]
    follower = Follower(load_config(tmp_path / "tiny.yaml", options), POLICY, "this run")
    with serve(db) as client:
        several_turns(client)
        post(client, "/sessions/s/reward", turn=2, reward=0.5)
        assert not follower.poll(1, 4).groups
        post(client, "/sessions/s/reward", reward=2)
        groups = follower.poll(1, 4).groups
    batch = pad(groups, Shape(4, None, 199, 199), turns=4)
    np.testing.assert_array_equal(batch.turn_rewards, [[0, 0, 0.5, 1.5]] * 4)
    assert [{*row[mask].tolist()} for row, mask in zip(batch.token_turns, batch.completion_mask, strict=True)] == [
        {turn} for turn in range(4)
    ]


@pytest.mark.parametrize("prompts", [True, False])
def test_the_rewards_of_turns_may_come_with_the_sessions(db, prompts):
    with serve(db, prompts=prompts) as client:
        several_turns(client)
        for bad in ({"turn_rewards": [1]}, {"turn_rewards": "1"}, {"turn_rewards": [1, 2, 3, "4"]}, {}):
            post(client, "/sessions/s/reward", status=400, **bad)
        assert post(client, "/sessions/s/reward", turn_rewards=[1, 0, 0, 2], accurate=True)["reward"] == 3
    (record,) = read(db)
    one = record.completion
    assert one.grade == Grade(3.0, None, True, turns=(1.0, 0.0, 0.0, 2.0))
    assert len(one.rows) == (4 if prompts else 1) and len({*one.turns}) == 4
    assert [turn.row for turn in one.turns] == ([0, 1, 2, 3] if prompts else [0] * 4)
    ends = {turn.row: turn.end for turn in one.turns}
    assert [ends[place] for place in range(len(one.rows))] == [len(row.tokens) for row in one.rows]


def test_what_cannot_be_recorded_is_not_served(db, monkeypatch):
    with serve(db) as client:
        real = Store.change

        def full(self, *given):
            with self._trying("written"):
                raise sqlalchemy.exc.OperationalError("", {}, sqlite3.OperationalError("database or disk is full"))

        monkeypatch.setattr(Store, "change", full)
        error = post(client, TEXT, status=503, prompt="a", max_tokens=2)["error"]
        assert "disk is full; free disk space" in error["message"] and error["type"] == "server_error"
        assert client.get("/health").status_code == 503
        stream = client.post(TEXT, json={"prompt": "a", "max_tokens": 2, "stream": True})
        assert "disk is full" in stream.text and 'finish_reason":"' not in stream.text and "[DONE]" not in stream.text
        post(client, "/sessions/s" + TEXT, status=503, prompt="a", max_tokens=2)
        monkeypatch.setattr(Store, "change", real)
        name = post(client, TEXT, prompt="a", max_tokens=2)["id"]
        assert client.get("/health").status_code == 200
        monkeypatch.setattr(Store, "change", full)
        post(client, FEEDBACK, status=503, id=name, reward=1)
        monkeypatch.setattr(Store, "change", real)
        post(client, FEEDBACK, id=name, reward=0)
    assert rewards(db) == {f"{name}/0": 0}


def wait_for_health(client, status):
    """Without another request."""
    end = time.monotonic() + 20
    while client.get("/health").status_code != status:
        assert time.monotonic() < end
        time.sleep(0.02)


def fails_with(error, verb="read"):
    def fails(self, *_):
        with self._trying(verb):
            raise error

    return fails


FULL = sqlalchemy.exc.OperationalError("", {}, sqlite3.OperationalError("database or disk is full"))
LOCKED = sqlalchemy.exc.OperationalError("", {}, sqlite3.OperationalError("database is locked"))


STRANGE = sqlalchemy.exc.InvalidRequestError("a strange error")


@pytest.mark.parametrize("is_written", [True, False])
def test_a_session_survives_a_lost_answer_to_its_end(db, monkeypatch, is_written):
    with serve(db) as client:
        path = "/sessions/game" + TEXT
        post(client, path, prompt="a", max_tokens=2)
        change = Store.change

        def loses_the_answer(store, *arguments):
            if is_written:
                change(store, *arguments)
            raise Unavailable("the connection was lost")

        monkeypatch.setattr(Store, "change", loses_the_answer)
        feedback = {"id": "session/game", "reward": 1.0}
        post(client, FEEDBACK, status=503, **feedback)
        monkeypatch.setattr(Store, "change", change)
        repeated = post(client, FEEDBACK, **feedback)
        assert (repeated["reward"], repeated["new"]) == (1.0, not is_written)
        assert post(client, path, status=409, prompt="a", max_tokens=2)["error"]["code"] == "session_over"
        post(client, FEEDBACK, status=409, **feedback | {"reward": 0.0})
    with Store(db) as store:
        assert not list(store.turns("")) and rewards(db) == {"session/game": 1.0}


@pytest.mark.parametrize(
    ("name", "error"), [("change", FULL), ("change", LOCKED), ("change", STRANGE), ("numbers", LOCKED)]
)
def test_the_health_recovers_without_a_request(db, monkeypatch, name, error):
    monkeypatch.setattr(recorder, "_TICK_SECONDS", 0.05)
    with serve(db) as client:
        real = getattr(Store, name)
        monkeypatch.setattr(Store, name, fails_with(error))
        path, body = (TEXT, {"prompt": "a", "max_tokens": 1}) if name == "change" else (FEEDBACK, {"id": "a/0"})
        assert str(getattr(error, "orig", error)) in post(client, path, status=503, **body)["error"]["message"]
        assert client.get("/health").status_code == 503
        monkeypatch.setattr(Store, name, real)
        wait_for_health(client, 200)


def test_an_unreadable_row_does_not_fail_the_server(db, monkeypatch):
    with serve(db) as client:
        name = post(client, TEXT, prompt="a", max_tokens=1)["id"]
        with contextlib.closing(sqlite3.connect(db, isolation_level=None)) as other:
            other.execute("update completions set completion = 'x'")
        assert "match its checksum" in post(client, FEEDBACK, status=503, id=name, reward=1)["error"]["message"]
        assert client.get("/health").status_code == 200


def test_a_completion_that_cannot_be_recorded_fails_alone(db, monkeypatch):
    sampled = Sampled.row_columns.fget
    columns = property(lambda self: (*sampled(self)[:2], np.full(len(self.tokens), np.nan, np.float32), {}))
    with TestClient(build_server(serving(db), "ready").app, raise_server_exceptions=False) as client:
        monkeypatch.setattr(Sampled, "row_columns", columns)
        for path in (TEXT, f"/sessions/s{TEXT}"):
            error = post(client, path, status=500, prompt="a", max_tokens=1)["error"]
            assert error["type"] == "server_error" and error["code"] is None
        assert client.get("/health").status_code == 200
    assert not read(db)


def test_a_completion_deleted_during_its_reward_is_unknown(db, monkeypatch):
    for name in ("rewards", "change"):
        real = getattr(Store, name)

        def deleted(self, *arguments, real=real):
            self.delete(next(iter(self.numbers("id").values())) if self.last().completions else [])
            return real(self, *arguments)

        with serve(db) as client:
            row = post(client, TEXT, prompt="a", max_tokens=1)["id"]
            monkeypatch.setattr(Store, name, deleted)
            assert post(client, FEEDBACK, status=404, id=row, reward=1)["error"]["param"] == "id"
            assert client.get("/health").status_code == 200
            monkeypatch.setattr(Store, name, real)


def test_writes_that_a_database_does_not_take_fail_together(db, monkeypatch):
    tried = []

    def away(self, changes, *_):
        tried.append(len(changes))
        fails_with(LOCKED)(self)

    async def main():
        async with recorder_of(db) as recording:
            monkeypatch.setattr(Store, "change", away)
            errors = await asyncio.gather(*(recording._write(Change()) for _ in range(5)), return_exceptions=True)
        with pytest.raises(RuntimeError, match="after shutdown"):
            recording._threads.submit(int)
        return errors

    assert {error.status for error in asyncio.run(main())} == {503} and tried[:1] == [5] and len(tried) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "PostgreSQL"])
def test_strange_values_of_a_client_are_its_own(db, database_url, kind):
    place = db if kind == "file" else database_url()
    with serve(place) as client:
        for name in ("a\0/0", "a" * 512, "\U0001f600" * 512):
            post(client, FEEDBACK, status=404, id=name, reward=1)
        post(client, FEEDBACK, status=400, id="a" * 513, reward=1)
        post(client, FEEDBACK, status=400, id="a", index=2**31, reward=1)
        options = {"max_tokens": 1, "user": "\0", "metadata": {"\0": "\0\x1a"}}
        row = post(client, TEXT, prompt="a", **options)["id"]
        given = {"reward": 1, "comment": "a\0\x1a", "reward_parts": {"\0": 1.0}}
        assert post(client, FEEDBACK, id=row, **given)["new"] and not post(client, FEEDBACK, id=row, **given)["new"]
        assert post(client, FEEDBACK, status=409, id=row, reward=0)["error"]["code"] == "reward_given"
        assert client.get("/health").status_code == 200
    (record,) = read(place)
    assert record.completion.metadata["comment"] == "a\0\x1a" and record.completion.metadata["user"] == "\0"


def test_sessions_end_with_a_reward_or_after_waiting(db, tmp_path):
    with serve(db) as client:
        post(client, "/sessions/s" + TEXT, prompt="a", max_tokens=2)
        again = copied(db, tmp_path / "again")
        with pytest.raises(ValueError, match="another server records there"):
            recorder_of(db)

    async def later():
        async with recorder_of(again, reward_seconds=0.2) as opened:
            await opened.end_sessions(60.0)
            assert not read(again)
            await asyncio.sleep(0.25)
            await opened.end_sessions(0.2)
            assert rewards(again) == {"session/s": None} and not opened.sessions
            assert await opened.reward("session/s", RewardBody(reward=0.0, comment="late")) == (0.0, True)
            assert await opened.reward("session/s", RewardBody(reward=0.0, comment="late")) == (0.0, False)
            assert rewards(again) == {"session/s": 0.0}

    asyncio.run(later())


def test_rewards_that_others_give_count(db):
    with serve(db) as client:
        a, b = (post(client, TEXT, prompt="a", max_tokens=2)["id"] + "/0" for _ in range(2))
        post(client, "/sessions/s" + TEXT, prompt="a", max_tokens=2)
    with serve(db) as client:
        give_rewards(db, [{"id": a, "reward": 0.0}, {"group_id": "session/s", "reward": 0.0}])
        assert post(client, FEEDBACK, status=409, id=a, reward=1.0)["error"]["code"] == "reward_given"
        post(client, "/sessions/s/reward", status=409, reward=1.0)
        assert not post(client, FEEDBACK, id=a, reward=0.0)["new"], "the very same one is no error, whoever gave it"
        post(client, FEEDBACK, id=b, reward=1.0)
        with Store(db) as store:
            store.delete([1])
        post(client, FEEDBACK, status=404, id=a, reward=0.0)
    assert rewards(db) == {b: 1.0, "session/s": 0.0}


def test_a_session_ends_after_its_turns_are_written(db, monkeypatch):
    """The reward arrives while a turn is being written: the turn is in the session, or the session is over."""
    began, go_on, real = threading.Event(), threading.Event(), Store.change

    def slow(self, changes, *arguments):
        if any(change.turns for change in changes):
            began.set()
            assert go_on.wait(10)
        real(self, changes, *arguments)

    with serve(db) as client:
        post(client, "/sessions/s" + TEXT, prompt="a", max_tokens=2)
        monkeypatch.setattr(Store, "change", slow)
        turn = threading.Thread(target=post, args=(client, "/sessions/s" + TEXT), kwargs={"prompt": "b"})
        turn.start()
        assert began.wait(10)
        reward = threading.Thread(target=post, args=(client, "/sessions/s/reward"), kwargs={"reward": 1.0})
        reward.start()
        go_on.set()
        turn.join()
        reward.join()
    (record,) = read(db)
    assert len(record.completion.metadata["requests"]) == 2 and record.completion.grade.reward == 1.0


def test_prompts_can_be_left_out(db):
    with serve(db, prompts=False) as client:
        post(client, CHAT, messages=[{"role": "user", "content": "secret"}], max_tokens=5)
        url = "/sessions/s" + TEXT
        first = post(client, url, prompt="secret", max_tokens=4, return_token_ids=True)["choices"][0]["token_ids"]
        text = "secret" + TOKENIZER.decode(first) + "secret"
        more = post(client, url, prompt=text, max_tokens=4, return_token_ids=True)["choices"][0]["token_ids"]
        files = b"".join(file.read_bytes() for file in db.parent.iterdir() if file.is_file())
        tokens = np.array(TOKENIZER.encode("secret"), np.int32).tobytes()
        assert b"secret" not in files and tokens not in files
    records = read(db)
    assert all(one.group.prompt == PROMPT_LEFT_OUT and not len(one.group.prompt_tokens) for one in records)
    (row,) = records[1].completion.rows
    assert len(records) == 2 and row.tokens.tolist() == [*first, *more] and row.mask.all()
    with pytest.raises(ValueError, match="its prompt was not recorded, so it cannot be trained on"):
        tokenized(records, POLICY)


def test_nothing_is_recorded_where_that_is_off():
    with serve(None) as client:
        name = post(client, TEXT, prompt="a", max_tokens=2)["id"]
        assert "does not record" in post(client, FEEDBACK, status=404, id=name, reward=1)["error"]["message"]
        post(client, "/sessions/s" + TEXT, status=404, prompt="a")


def test_old_completions_are_deleted(db):
    for _ in range(2):
        with serve(db) as client:
            post(client, TEXT, prompt="a", max_tokens=2)
    first, second = read(db)
    with Store(db) as store:
        assert store.older_than(first.time) == [] and store.older_than(second.time) == [first.number]
    with serve(db, keep_days=0.0) as client:
        post(client, FEEDBACK, id=second.completion.id, reward=1)
    assert not read(db) and second.time < datetime.now(UTC)
