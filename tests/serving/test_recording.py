"""What is served is recorded: whole, once, durably, with the rewards that come later."""

import asyncio
import json
import os
import shutil
from datetime import UTC, datetime

import jax
import numpy as np
import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from recjax.experience import store
from recjax.experience.feedback import give_rewards
from recjax.experience.sources import load_groups
from recjax.experience.tokenize import tokenized
from recjax.hub.policy import Policy
from recjax.hub.tokenizers import character_tokenizer
from recjax.models.decoder import Decoder, init_params
from recjax.models.decoder_config import DecoderConfig
from recjax.serving import recorder as recording
from recjax.serving.journal import Journal
from recjax.serving.recorder import Recorder, Recording, delete_before
from recjax.serving.refusals import Refused
from recjax.serving.served import Feedback
from tests.experience.rows import same
from tests.serving.some_server import POLICY, TOKENIZER, post, serve

TEXT, CHAT, FEEDBACK = "/v1/completions", "/v1/chat/completions", "/v1/feedback"
HELLO = [{"role": "user", "content": "hello"}]


def by_id(folder):
    return {row.id: row for row in store.read(folder)}


def test_rows_say_what_was_served(tmp_path):
    with serve(tmp_path) as client:
        options = {"n": 2, "max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "min_p": 0.1, "return_token_ids": True}
        text = post(client, TEXT, prompt=["ab", "c"], user="me", metadata={"k": "v"}, **options)
        chat = post(client, CHAT, messages=HELLO, max_tokens=9, return_token_ids=True)
        given = {"reward": 0.5, "reward_parts": {"good": 1.0}, "accurate": True, "comment": "fine"}
        assert post(client, FEEDBACK, id=text["id"], index=1, **given)["new"]
        assert not store.part_files(tmp_path), "rows wait for their rewards"
    rows = by_id(tmp_path)
    assert len(rows) == 5
    for choice in text["choices"]:
        row = rows[f"{text['id']}/{choice['index']}"]
        place = choice["index"] // 2
        assert (row.prompt, row.group_id) == (["ab", "c"][place], f"{text['id']}/prompt{place}")
        assert row.prompt_tokens.tolist() == choice["prompt_token_ids"]
        assert row.completion_tokens.tolist() == choice["token_ids"] and row.completion_mask.all()
        np.testing.assert_array_equal(row.behavior_logprobs, np.float32(choice["token_logprobs"]))
        assert (row.temperature, row.top_k, row.top_p, row.min_p) == (0.5, 0, 0.9, 0.1)
        assert (row.policy_version, row.source) == (3, "tiny")
        assert row.completion == choice["text"] and row.truncated == (choice["finish_reason"] == "length")
        said = json.loads(row.metadata)
        comment = {"comment": "fine"} if choice["index"] == 1 else {}
        expected = {"request": text["id"], "endpoint": "text", "user": "me", "metadata": {"k": "v"}} | comment
        assert said == expected
        reward = (row.reward, row.reward_parts, row.accurate)
        assert reward == ((0.5, {"good": 1.0}, True) if comment else (None, None, None))
    row = rows[f"{chat['id']}/0"]
    assert row.messages == HELLO and row.prompt is None and row.temperature == 1.0
    assert len(load_groups(tmp_path, POLICY)) == 3


def test_turns_of_a_session_are_one_trajectory(tmp_path):
    with serve(tmp_path) as client:
        url, messages, replies = "/sessions/game-1" + CHAT, [{"role": "user", "content": "one"}], []
        for more in ("two", "three", "four"):
            reply = post(client, url, messages=messages, max_tokens=45, seed=61 + len(replies), return_token_ids=True)
            replies.append(reply)
            said = reply["choices"][0]["message"]["content"]
            messages = [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": more}]
        other = post(client, "/sessions/game-1" + TEXT, prompt="something else", max_tokens=3)
        assert post(client, FEEDBACK, status=409, id=other["id"], reward=1)["error"]["message"].count(
            "/sessions/game-1"
        )
        post(client, "/sessions/game-1/reward", reward=2.0, comment="well played")
        error = post(client, url, status=409, messages=messages)["error"]
        assert error["code"] == "session_over"
    rows = store.read(tmp_path)
    assert {row.trajectory for row in rows} == {"session/game-1"} and {row.reward for row in rows} == {2.0}
    first = rows[0]
    sampled = [token for reply in replies for token in reply["choices"][0]["token_ids"]]
    ended = [reply["choices"][0]["finish_reason"] == "stop" for reply in replies]
    assert all(ended[:2]), "take other seeds: the template closes a message that was cut off"
    assert len(rows) == 2 and first.completion_tokens[first.completion_mask].tolist() == sampled
    whole = replies[2]["prompt_token_ids"] + replies[2]["choices"][0]["token_ids"]
    assert [*first.prompt_tokens, *first.completion_tokens] == whole
    found = [token for row in rows[:-1] for token in row.completion_tokens[row.completion_mask].tolist()]
    assert found == sampled, "every token that was sampled, once"
    said = json.loads(first.metadata)
    assert said["requests"] == [*(reply["id"] for reply in replies), other["id"]] and said["comment"] == "well played"
    (group,) = load_groups(tmp_path, POLICY)
    assert len(group.completions) == 1 and len(group.completions[0].rows) == len(rows)


def test_a_prompt_that_goes_on_has_the_tokens_that_were_sampled(tmp_path):
    with serve(tmp_path) as client:
        first = post(client, "/sessions/s" + TEXT, prompt="ab", max_tokens=4, return_token_ids=True)
        text = "ab" + TOKENIZER.decode(first["choices"][0]["token_ids"])
        more = post(client, "/sessions/s" + TEXT, prompt=text + "xy", max_tokens=4, return_token_ids=True)
        ids = [*first["prompt_token_ids"], *first["choices"][0]["token_ids"], *TOKENIZER.encode("xy")]
        assert more["prompt_token_ids"] == ids
        error = post(client, "/sessions/s" + TEXT, status=409, prompt="ab", temperature=0.5)["error"]
        assert error["param"] == "temperature"
    (row,) = store.read(tmp_path)
    given = len(first["choices"][0]["token_ids"])
    assert row.completion_mask.tolist() == [True] * given + [False] * 2 + [True] * (
        len(row.completion_tokens) - given - 2
    )


def test_tokens_are_never_made_twice(tmp_path):
    pairs = [("a", "a"), ("a", "b"), ("b", "a"), ("b", "b")]
    vocabulary = {token: number for number, token in enumerate(["<eos>", "a", "b", *map("".join, pairs)])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, pairs))
    made.decoder = tokenizers.decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", clean_up_tokenization_spaces=False)
    shape = DecoderConfig(7, 16, 32, 1, 2, 1, 8)
    policy, params = Policy(Decoder(shape), tokenizer, ()), init_params(shape, jax.random.key(0))
    with serve(tmp_path, policy=policy, params=params) as client:
        for seed in range(50):
            url, options = f"/sessions/{seed}{TEXT}", {"max_tokens": 12, "return_token_ids": True, "seed": seed}
            (choice,) = post(client, url, prompt="a", **options)["choices"]
            if tokenizer.encode(choice["text"]) != choice["token_ids"]:
                break
        else:
            pytest.fail("no seed samples tokens that the tokenizer would join")
        more = post(client, url, prompt="a" + choice["text"] + "b", **options)
        assert more["prompt_token_ids"] == [1, *choice["token_ids"], 2]


def test_a_rendered_chat_gets_no_special_tokens_and_plain_text_does(tmp_path):
    tokenizer = character_tokenizer("~[]:abcdefghijklmnopqrstuvwxyz")
    tokenizer.bos_token, tokenizer.chat_template = "~", "{% for m in messages %}[{{ m.content }}{% endfor %}[a:"
    tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="~ $A", special_tokens=[("~", 1)]
    )
    shape = DecoderConfig(len(tokenizer), 16, 32, 1, 2, 1, 8)
    policy, params = Policy(Decoder(shape), tokenizer, (0,)), init_params(shape, jax.random.key(0))
    options, chat = {"max_tokens": 1, "return_token_ids": True}, [{"role": "user", "content": "hi"}]
    with serve(tmp_path, policy=policy, params=params) as client:
        for session in ("", "/sessions/one", "/sessions/two"):
            asked = post(client, f"{session}{CHAT}", messages=chat, **options)["prompt_token_ids"]
            assert asked == tokenizer.apply_chat_template(chat, return_dict=False) and 1 not in asked
        asked = post(client, TEXT, prompt="hi", **options)["choices"][0]["prompt_token_ids"]
        assert asked == tokenizer("hi")["input_ids"] and asked[0] == 1
        tokenizer.add_tokens(["<extra>"])
        assert post(client, TEXT, status=400, prompt="hi <extra>")["error"]["param"] == "prompt"


def test_a_reward_is_given_once(tmp_path):
    with serve(tmp_path) as client:
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
    with serve(tmp_path) as client:
        post(client, FEEDBACK, status=409, id=one, reward=0)
        post(client, FEEDBACK, id=two, index=0, reward=0.5, comment="late")
        post(client, FEEDBACK, status=409, id=two, index=0, reward=0)
    rows = by_id(tmp_path)
    assert [rows[name].reward for name in (f"{one}/0", f"{two}/0", f"{two}/1")] == [1, 0.5, None]
    assert json.loads(rows[f"{two}/0"].metadata)["comment"] == "late"
    assert len(store.part_files(tmp_path)) == 1


def recorder_of(folder, **options):
    return Recorder(Recording(folder, "tiny", part_seconds=3600.0, **options), TOKENIZER)


def test_what_a_killed_server_leaves_is_taken_up_where_it_was(tmp_path):
    folder, left = tmp_path / "store", tmp_path / "left"
    with serve(folder) as client:
        ids = [post(client, TEXT, prompt="ab", max_tokens=3)["id"] for _ in range(3)]
        turn = post(client, "/sessions/s" + TEXT, prompt="ab", max_tokens=4, return_token_ids=True)
        post(client, FEEDBACK, id=ids[0], reward=1)
        shutil.copytree(folder, left)  # as it is on disk at this moment
    kept = by_id(folder)
    with serve(left) as client:
        post(client, FEEDBACK, status=409, id=ids[0], reward=0)
        text = "ab" + TOKENIZER.decode(turn["choices"][0]["token_ids"]) + "x"
        more = post(client, "/sessions/s" + TEXT, prompt=text, max_tokens=4, return_token_ids=True)
        assert more["prompt_token_ids"][2:-1] == turn["choices"][0]["token_ids"], "the session goes on"
        post(client, "/sessions/s/reward", reward=3)
    rows = by_id(left)
    assert rows.keys() == kept.keys() and rows["session/s"].reward == 3
    assert all(same(rows[f"{name}/0"], kept[f"{name}/0"]) for name in ids)


def test_killed_between_a_part_and_the_journal_nothing_is_there_twice(tmp_path):
    with serve(tmp_path) as client:
        post(client, TEXT, prompt=["ab", "c"], max_tokens=3)
        post(client, "/sessions/s" + TEXT, prompt="ab", max_tokens=4)
        journal = (tmp_path / ".served.jsonl").read_bytes()
    kept = by_id(tmp_path)
    (tmp_path / ".served.jsonl").write_bytes(journal)
    with serve(tmp_path) as client:
        post(client, "/sessions/s" + TEXT, status=409, prompt="a")
    assert by_id(tmp_path).keys() == kept.keys() and len(store.part_files(tmp_path)) == 1
    assert not (tmp_path / ".served.jsonl").read_bytes(), "nothing is left that the store would not take"


def test_a_journal_cut_anywhere_has_its_whole_lines(tmp_path):
    async def write():
        journal, seen = Journal(tmp_path / "whole"), []
        await asyncio.gather(*(journal.add({"n": number, "é": "\r\n\u2028"}, seen.append) for number in range(5)))
        await journal.close()
        return seen

    lines = asyncio.run(write())
    content = (tmp_path / "whole").read_bytes()
    assert content == b"".join(lines) and [json.loads(line[33:])["n"] for line in lines] == [*range(5)]
    for size in range(len(content) + 1):
        (tmp_path / "cut").write_bytes(content[:size])
        found = Journal(tmp_path / "cut").read()
        assert [line for line, _ in found] == [line for line in lines if content[:size].find(line) >= 0]
        assert (tmp_path / "cut").read_bytes() == b"".join(line for line, _ in found)
    (tmp_path / "cut").write_bytes(content.replace(b'"n": 2', b'"n": 7'))
    with pytest.raises(ValueError, match="line 3 is damaged"):
        Journal(tmp_path / "cut").read()


def test_what_cannot_be_recorded_is_not_served(tmp_path, monkeypatch):
    with serve(tmp_path) as client:
        real = os.fsync

        def full(_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        error = post(client, TEXT, status=503, prompt="a", max_tokens=2)["error"]
        assert "No space left" in error["message"] and error["type"] == "server_error"
        assert client.get("/health").status_code == 503
        stream = client.post(TEXT, json={"prompt": "a", "max_tokens": 2, "stream": True})
        assert "No space left" in stream.text and 'finish_reason":"' not in stream.text and "[DONE]" not in stream.text
        monkeypatch.setattr(os, "fsync", real)
        name = post(client, TEXT, prompt="a", max_tokens=2)["id"]
        assert client.get("/health").status_code == 200
        monkeypatch.setattr(os, "fsync", full)
        post(client, FEEDBACK, status=503, id=name, reward=1)
        monkeypatch.setattr(os, "fsync", real)
        post(client, FEEDBACK, id=name, reward=0)
    assert [(row.id, row.reward) for row in store.read(tmp_path)] == [(f"{name}/0", 0)]


def test_rewarded_rows_go_to_the_store_and_others_when_they_have_waited(tmp_path):
    recorded = tmp_path / "store"
    with serve(recorded) as client:
        one, two = (post(client, TEXT, prompt="a", max_tokens=2)["id"] for _ in range(2))
        post(client, FEEDBACK, id=one, reward=1)
        shutil.copytree(recorded, tmp_path / "again")

    async def later():
        recorder = recorder_of(tmp_path / "again", reward_seconds=0.2)
        async with recorder:
            await recorder.flush(recorder.options.reward_seconds)
            assert [*by_id(tmp_path / "again")] == [f"{one}/0"]
            await asyncio.sleep(0.25)
            await recorder.flush(recorder.options.reward_seconds)
            assert by_id(tmp_path / "again")[f"{two}/0"].reward is None
            assert await recorder.reward(f"{two}/0", Feedback(0.0, None, None, "late"))
            await recorder.flush(recorder.options.reward_seconds)
            assert by_id(tmp_path / "again")[f"{two}/0"].reward == 0
        with pytest.raises(ValueError, match="another server records there"):
            async with recorder_of(tmp_path / "twice"):
                recorder_of(tmp_path / "twice")

    asyncio.run(later())


def test_a_late_reward_that_conflicts_is_refused_and_holds_up_no_other(tmp_path):
    with serve(tmp_path) as client:
        a, b, c = (post(client, TEXT, prompt="a", max_tokens=2)["id"] + "/0" for _ in range(3))
        post(client, "/sessions/s" + TEXT, prompt="a", max_tokens=2)
    with serve(tmp_path) as client:
        give_rewards(tmp_path, [{"id": a, "reward": 0.0}, {"group_id": "session/s", "reward": 0.0}])
        assert post(client, FEEDBACK, status=409, id=a, reward=1.0)["error"]["code"] == "reward_given"
        post(client, "/sessions/s/reward", status=409, reward=1.0)
        post(client, FEEDBACK, id=b, reward=1.0)
        post(client, FEEDBACK, id=c, reward=0.5)
        assert client.get("/health").json() == {"status": "ok", "late_rewards": 2}
        assert "recjax_late_rewards 2.0" in client.get("/metrics").text
        assert not post(client, FEEDBACK, id=a, reward=0.0)["new"], "the very same one is no error, whoever gave it"
    rows = by_id(tmp_path)
    assert [rows[name].reward for name in (a, b, c, "session/s")] == [0.0, 1.0, 0.5, 0.0]
    assert not (tmp_path / ".served.jsonl").read_bytes()


def test_rewards_that_were_taken_and_that_the_store_refuses_are_kept(tmp_path, caplog):
    """Somebody else gives a row its reward, or deletes it, when the server has told its client that it is taken."""
    names = []
    for _ in range(2):
        with serve(tmp_path) as client:
            names += [post(client, TEXT, prompt="a", max_tokens=2)["id"] + "/0" for _ in range(2)]
            post(client, f"/sessions/{len(names)}{TEXT}", prompt="a", max_tokens=2)
    (a, b, gone, _), session = names, "session/2"

    async def conflict():
        async with recorder_of(tmp_path) as recorder:
            for row, reward in ((a, 1.0), (b, 1.0), (gone, 0.5), (session, 2.0)):
                assert await recorder.reward(row, Feedback(reward))
            give_rewards(tmp_path, [{"id": a, "reward": 0.0}, {"id": session, "reward": 0.25}])
            store.keep_parts(tmp_path, lambda first: first != gone)
            for _ in range(2):
                await recorder.flush(recorder.options.reward_seconds)
            assert "3 rewards are not in the store" in recorder.trouble
            waiting = recorder.waiting()
            assert waiting["late_rewards"] == 3 and waiting["refused_rewards"].keys() == {a, gone, session}
            for row, given in ((a, Feedback(1.0)), (session, Feedback(2.0))):
                with pytest.raises(Refused, match="another reward"):
                    await recorder.reward(row, given)
            assert not await recorder.reward(a, Feedback(0.0))

    asyncio.run(conflict())
    assert len([record for record in caplog.records if "stays in .served.jsonl" in record.message]) == 3, "said once"
    for _ in range(2):
        rows = by_id(tmp_path)
        assert [rows[name].reward for name in (a, b, session)] == [0.0, 1.0, 0.25] and gone not in rows
        kept = [line.partition(b" ")[2] for line in (tmp_path / ".served.jsonl").read_bytes().splitlines()]
        kept = {entry["feedback"]: entry["given"]["reward"] for entry in map(json.loads, kept)}
        assert kept == {a: 1.0, gone: 0.5, session: 2.0}
        with serve(tmp_path) as client:
            reply = client.get("/health")
            assert reply.status_code == 200 and a in reply.json()["status"] and reply.json()["late_rewards"] == 3
            assert {a, session} <= reply.json()["refused_rewards"].keys()
            post(client, FEEDBACK, status=409, id=a, reward=1.0)


def test_health_says_when_the_store_cannot_be_written(tmp_path, monkeypatch):
    with serve(tmp_path) as client:
        row = post(client, TEXT, prompt="a", max_tokens=2)["id"] + "/0"

    def full(*_):
        raise OSError(28, "No space left on device")

    async def main():
        async with recorder_of(tmp_path) as recorder:
            await recorder.reward(row, Feedback(1.0))
            monkeypatch.setattr(recording, "give_rewards", full)
            await recorder.flush(recorder.options.reward_seconds)
            assert "late rewards cannot be written" in recorder.trouble and recorder.waiting() == {"late_rewards": 1}
            monkeypatch.setattr(recording, "give_rewards", give_rewards)
            await recorder.flush(recorder.options.reward_seconds)
            assert recorder.trouble is None and recorder.waiting() == {}

    asyncio.run(main())
    assert by_id(tmp_path)[row].reward == 1.0


def test_prompts_can_be_left_out(tmp_path):
    with serve(tmp_path, prompts=False) as client:
        post(client, CHAT, messages=[{"role": "user", "content": "secret"}], max_tokens=5)
        url = "/sessions/s" + TEXT
        first = post(client, url, prompt="secret", max_tokens=4, return_token_ids=True)["choices"][0]["token_ids"]
        text = "secret" + TOKENIZER.decode(first) + "secret"
        more = post(client, url, prompt=text, max_tokens=4, return_token_ids=True)["choices"][0]["token_ids"]
        journal = (tmp_path / ".served.jsonl").read_text()
        assert "secret" not in journal and str(TOKENIZER.encode("secret"))[1:-1] not in journal
    rows = store.read(tmp_path)
    assert all(row.prompt == store.PROMPT_LEFT_OUT and row.prompt_tokens is None for row in rows) and len(rows) == 2
    assert rows[1].completion_tokens.tolist() == [*first, *more] and rows[1].completion_mask.all()
    with pytest.raises(ValueError, match="its prompt was not recorded, so it cannot be trained on"):
        tokenized(rows, POLICY)


def test_nothing_is_recorded_where_that_is_off():
    with serve(None) as client:
        name = post(client, TEXT, prompt="a", max_tokens=2)["id"]
        assert "does not record" in post(client, FEEDBACK, status=404, id=name, reward=1)["error"]["message"]
        post(client, "/sessions/s" + TEXT, status=404, prompt="a")


def test_old_parts_are_deleted(tmp_path):
    for _ in range(2):
        with serve(tmp_path) as client:
            post(client, TEXT, prompt="a", max_tokens=2)
    first, second = store.read(tmp_path)
    assert delete_before(tmp_path, first.time) == []
    assert delete_before(tmp_path, second.time) == [first.id] and [*by_id(tmp_path)] == [second.id]
    with serve(tmp_path, keep_days=0.0) as client:
        post(client, FEEDBACK, id=second.id, reward=1)
    assert not store.part_files(tmp_path) and not (tmp_path / ".served.jsonl").read_bytes()
    assert second.time < datetime.now(UTC)
