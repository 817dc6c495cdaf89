"""A store from a server with OpenAI's API: one that gives tokens, and one that gives texts alone and fails at times."""

import http.server
import json
import threading
from contextlib import contextmanager

import numpy as np
import pytest

from recjax.config import load_config
from recjax.experience.recorded import sets_to_lists
from recjax.generate_experience import generate_remotely
from recjax.hub.policy import policy_alone
from recjax.remote import client as remote
from recjax.remote import dialects, server
from recjax.remote.server import Address, read_keys
from recjax.store.tokenize import tokenized, tokenizer_name
from recjax.tasks.loading import load_task
from recjax.tasks.problems import Problem, characters
from tests.experience.rows import read_columns
from tests.marks import campaign_except
from tests.training.tiny_run import TINY


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("remote") / "tiny.yaml"
    path.write_text(TINY)
    return load_config(path, ["rollout.prompts_per_step=3", "rollout.group_size=2", "model.dtype=float32"])


def policy_of(config):
    task = load_task(config)
    return policy_alone(config, characters([*task.train, *task.evaluation]))


@contextmanager
def fake(answer, owner="", posts=()):
    """A server that answers what `answer` makes of a path and a body: a status, and an object or None for no body.

    It lists one model with its owner. A path in `posts` takes no GET, and no empty object.
    """

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            if owner and self.path != "/v1/models":
                takes_posts = self.path in (*posts, dialects.GENERATE)  # vLLM has the route where it refuses requests
                self.reply(*((405, None) if takes_posts else answer(self.path, None)))
            else:
                self.reply(200, {"data": [{"id": "sums", "owned_by": owner}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            is_probe = body == {} and self.path == dialects.GENERATE
            self.reply(*((400 if self.path in posts else 403, None) if is_probe else answer(self.path, body)))

        def reply(self, status, said):
            content = b"" if said is None else json.dumps(said).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    class Listener(http.server.ThreadingHTTPServer):
        request_queue_size = 128  # a busy machine takes a while to accept 64 connections that come at once

    listener = Listener(("127.0.0.1", 0), Handler)
    threading.Thread(target=listener.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.server_port}/v1"
    finally:
        listener.shutdown()
        listener.server_close()


def test_a_server_of_texts_that_fails_now_and_then(config, tmp_path, monkeypatch):
    monkeypatch.setattr(server.time, "sleep", lambda seconds: None)
    asked = []

    def answer(path, body):
        asked.append(body)
        if "return_token_ids" in body:
            return 400, {"error": {"message": "return_token_ids is not known"}}
        if len(asked) % 5 == 0:
            return 503, {"error": {"message": "busy"}}
        text = str(eval(body["prompt"].rstrip("=")))  # one choice, whatever is asked for
        return 200, {"choices": [{"index": 0, "text": text, "finish_reason": "stop", "logprobs": None}]}

    with fake(answer) as url:
        address = Address(url, "sums", concurrency=2)
        assert generate_remotely(config, tmp_path / "store", 2, address, None) == 2
        assert generate_remotely(config, tmp_path / "store", 3, address, None) == 1  # it goes on
    rows = read_columns(tmp_path / "store")
    assert len(rows) == 18 and {row.source for row in rows} == {"sums"} and len({row.group_id for row in rows}) == 9
    assert all(row.completion == row.answer and row.reward > 0 and row.completion_tokens is None for row in rows)
    assert all(one.completion.rows for one in tokenized([row.record for row in rows], policy_of(config)))
    plain = [body for body in asked if "return_token_ids" not in body]
    assert all(body["temperature"] == 1.0 and body["max_tokens"] == 3 and "min_p" not in body for body in plain)
    cut = config.model_copy(update={"rollout": config.rollout.model_copy(update={"min_p": 0.2})})
    with fake(answer) as url:
        assert generate_remotely(cut, tmp_path / "cut", 1, Address(url, "sums", concurrency=2), None) == 1
    assert asked[-1]["min_p"] == 0.2


def test_answers_are_stored_before_the_server_fails(config, tmp_path, monkeypatch):
    monkeypatch.setattr(server.time, "sleep", lambda seconds: None)
    asked = []

    def answer(path, body):
        asked.append(body)
        text = {"text": "7", "finish_reason": "stop", "logprobs": None}
        return (200, {"choices": [text] * 2}) if len(asked) <= 3 else (500, {"error": {"message": "broken"}})

    with fake(answer) as url, pytest.raises(ValueError, match="status 500: broken"):
        generate_remotely(config, tmp_path / "store", 2, Address(url, "sums", concurrency=1, retries=0), None)
    assert len(read_columns(tmp_path / "store")) == 6


def test_only_certain_token_ids_and_log_probs_count(config, tmp_path):
    policy = policy_of(config)
    tokenizer, end = policy.tokenizer, policy.stop_ids[0]

    def answer(path, body):
        prompt = tokenizer.encode(body["prompt"])
        ids = [[*tokenizer.encode("12"), end], [*tokenizer.encode("7"), end]]
        choices = [
            {"text": text, "finish_reason": "stop", "token_ids": one, "prompt_token_ids": prompt}
            | {"logprobs": {"token_logprobs": [-0.5] * len(one)}}
            for text, one in zip(("12", "7"), ids, strict=True)
        ]
        if "+9" in body["prompt"]:  # of another vocabulary
            choices[1]["text"] = "8"
        return 200, {"choices": choices}

    with fake(answer) as url:
        generate_remotely(config, tmp_path / "store", 8, Address(url), "other")
    rows = read_columns(tmp_path / "store")
    known = [row for row in rows if "+9" not in row.prompt]
    assert 0 < len(known) < len(rows)
    for row in rows:
        assert (row.completion_tokens is not None) == (row in known)
    for row in known:
        assert row.tokenizer == tokenizer_name(tokenizer) and row.completion_tokens[-1] == end
        np.testing.assert_array_equal(row.behavior_logprobs, np.full(len(row.completion_tokens), -0.5, np.float32))


def test_log_probs_under_cuts_need_vllms_sets(config):
    cut = config.model_copy(update={"rollout": config.rollout.model_copy(update={"top_p": 0.9, "kept_ids": 2})})
    policy = policy_of(cut)
    ids = [*policy.tokenizer.encode("7"), policy.stop_ids[0]]
    masks = [[ids[0], 3], [4, 5, ids[1]]], [[ids[0], 3], [4]], None

    def answer(path, body):
        choice = {"text": "7", "finish_reason": "stop", "token_ids": ids, "prompt_token_ids": [3]}
        choice |= {"logprobs": {"token_logprobs": [-0.5] * 2}}
        return 200, {"choices": [choice | ({"sampling_mask": one} if one else {}) for one in masks]}

    cut = cut.model_copy(update={"rollout": cut.rollout.model_copy(update={"group_size": 3})})
    with fake(answer) as url, remote.RemoteEngine(Address(url), policy, cut) as engine:
        (group,) = engine.sample_groups([Problem("3", "")], 7, name="b", source="server")
    rows = [one.rows[0] for one in group.completions]
    assert (
        sets_to_lists(rows[0].recorded) == [sorted(masks[0][0]), []]
        and rows[0].behavior_logprobs.tolist() == [-0.5] * 2
    )
    assert all(row.behavior_logprobs is None and not row.recorded for row in rows[1:])  # no set with the token, or none


def answers(engine, prompts, templates=({}, {})):
    """Texts of each prompt's completions, and whether they were truncated."""
    problems = [Problem(prompt, "", template=template) for prompt, template in zip(prompts, templates, strict=False)]
    groups = engine.sample_groups(problems, 7, name="b", source="server")
    ids = [one.id for group in groups for one in group.completions]
    assert ids == [f"b/{number:05d}" for number in range(len(ids))]
    return [[(one.text, one.truncated) for one in group.completions] for group in groups]


def test_chats_are_asked_as_chats(config):
    asked = []

    def answer(path, body):
        asked.append((path, body))
        return 200, {"choices": [{"message": {"content": "hello"}, "finish_reason": "length"}] * body["n"]}

    hello = [{"role": "user", "content": "hi"}]
    with fake(answer) as url, remote.RemoteEngine(Address(url), policy_of(config), config) as engine:
        assert answers(engine, [hello]) == [[("hello", True)] * 2]
    ((path, body),) = asked
    assert path == "/v1/chat/completions" and body["messages"] == hello and body["seed"] == 7 and body["logprobs"]


ENDS = ("abort", "content_filter", "error", "tool_calls")
WRONG = [(kind, {"finish_reason": end}, f"finish_reason {end}") for kind in ("chat", "text") for end in ENDS]
WRONG += [(kind, {"finish_reason": None}, "no finish_reason") for kind in ("chat", "text")]
WRONG += [
    ("text", {"text": None}, "no text"),
    ("chat", {"message": {"content": None}}, "no text"),
    ("chat", {"message": {"content": None, "refusal": "I cannot do that."}}, "refusal"),
    ("chat", {"message": {"content": "No.", "refusal": "No."}}, "refusal"),
    ("chat", {"message": {"content": None, "reasoning_content": "Hm."}}, "only reasoning"),
    ("chat", {"message": {"content": "", "reasoning": "Hm."}, "finish_reason": "length"}, "only reasoning"),
]


def choice_of(body, changes, text="12"):
    """A choice of a chat, or of a text, with changes to it."""
    said = {"message": {"content": text}} if "messages" in body else {"text": text}
    return {"finish_reason": "stop"} | said | changes


@pytest.mark.parametrize("wrong", campaign_except(WRONG, *WRONG[::4]))
def test_unusable_replies_are_repeated_or_left_out(config, caplog, wrong):
    kind, changes, reason = wrong
    seeds = []

    def answer(path, body):
        seeds.append(body["seed"])
        is_wrong = "never" in json.dumps(body) or len(seeds) == 1
        return 200, {"choices": [choice_of(body, changes if is_wrong else {}), choice_of(body, {})][: body["n"]]}

    prompts = ["hi", "never"]
    prompts = [[{"role": "user", "content": prompt}] for prompt in prompts] if kind == "chat" else prompts
    with fake(answer) as url:
        address = Address(url, retries=2, concurrency=1)
        with remote.RemoteEngine(address, policy_of(config), config) as engine:
            once, never = answers(engine, prompts)
            assert once == [("12", False)] * 2 and never == [("12", False)]
            assert engine.left_out == {reason: 4} and engine.missing == 1
    assert len({*seeds}) == 5, "another seed each time"
    assert not {7, 8, 9, 10} & {seeds[1], *seeds[3:]}, "no seed of the first tries"
    assert f"4 replies were not completions of the policy ({reason} 4); after retries 1 completions are" in caplog.text


@pytest.mark.parametrize("most_choices", [None, 1])
def test_each_completion_of_a_batch_has_its_own_seed(config, most_choices):
    """A server that uses seeds gives the choices of a request the seeds `seed`, `seed` + 1, …."""
    seeds = []

    def answer(path, body):
        seeds.extend(range(body["seed"], body["seed"] + body["n"]))
        return 200, {"choices": [choice_of(body, {})] * body["n"]}

    with fake(answer) as url, remote.RemoteEngine(Address(url, concurrency=1), policy_of(config), config) as engine:
        engine.most_choices = most_choices
        answers(engine, ["hi"] * 3, [{}] * 3)
    assert sorted(seeds) == [*range(7, 13)]


@pytest.mark.parametrize(("reason", "truncated"), [("stop", False), ("eos_token", False), ("length", True)])
def test_an_ended_completion_may_be_empty(config, reason, truncated):
    changes = {"message": {"content": "", "refusal": None, "reasoning_content": None}, "finish_reason": reason}
    with (
        fake(lambda path, body: (200, {"choices": [choice_of(body, changes)] * body["n"]})) as url,
        remote.RemoteEngine(Address(url), policy_of(config), config) as engine,
    ):
        assert answers(engine, [[{"role": "user", "content": "hi"}]]) == [[("", truncated)] * 2]
        assert not engine.left_out and not engine.missing


def test_groups_have_the_answers_that_there_are(config, tmp_path):
    def answer(path, body):
        asked.append(body["prompt"])
        if body["prompt"] == asked[0]:  # of which there are none, as Azure says it
            return 400, {"error": {"code": "content_filter", "message": "the prompt is filtered"}}
        text = str(eval(body["prompt"].rstrip("=")))
        # The first one of some prompts never comes.
        wrong = {"finish_reason": "abort"} if sum(map(ord, body["prompt"])) % 2 else {}
        return 200, {"choices": [choice_of(body, wrong, text), choice_of(body, {}, text)][: body["n"]]}

    asked = []
    with fake(answer) as url:
        generate_remotely(config, tmp_path / "store", 2, Address(url, "sums", concurrency=1, retries=1), None)
    rows = read_columns(tmp_path / "store")
    sizes = {row.group_id: sum(one.group_id == row.group_id for one in rows) for row in rows}
    assert {*sizes.values()} == {1, 2} and asked[0] not in {row.prompt for row in rows}
    assert all(row.completion == row.answer and row.reward > 0 and not row.truncated for row in rows)


def test_a_batch_without_any_completion_is_none(config, tmp_path):
    with fake(lambda path, body: (200, {"choices": [choice_of(body, {"finish_reason": "abort"})]})) as url:
        generate_remotely(config, tmp_path / "store", 1, Address(url, "sums", retries=0), None)
    assert not (tmp_path / "store").exists()


def test_a_server_gets_the_variables_of_each_chats_template(config):
    asked = []

    def answer(path, body):
        asked.append(body)
        return 200, {"choices": [{"message": {"content": "hello"}, "finish_reason": "stop"}] * body["n"]}

    chats = [[{"role": "user", "content": text}] for text in "ab"]
    tools = [{"type": "function", "function": {"name": "add"}}]
    templates = [{}, {"enable_thinking": False, "tools": tools}]
    with fake(answer) as url, remote.RemoteEngine(Address(url), policy_of(config), config) as engine:
        answers(engine, chats, templates)
    first, second = sorted(asked, key=lambda body: body["seed"])
    assert not {"tools", "chat_template_kwargs"} & first.keys()
    assert second["tools"] == tools and second["chat_template_kwargs"] == {"enable_thinking": False}


def test_what_is_said_where_a_server_cannot_be_used(config, tmp_path, monkeypatch):
    monkeypatch.setattr(server.time, "sleep", lambda seconds: None)

    def error(url, **changes):
        with pytest.raises(ValueError) as raised:
            generate_remotely(config, tmp_path / "store", 1, Address(url, retries=1)._replace(**changes), None)
        return str(raised.value)

    assert "does not answer" in error("http://127.0.0.1:1") and "start the same command again" in error(
        "http://127.0.0.1:1"
    )
    assert "give http://HOST:PORT" in error("ftp://somewhere")
    with fake(lambda path, body: (401, {"error": {"message": "no key"}})) as url:
        assert "--model 'other': unknown; the server has sums" in error(url, model="other")
        assert "no key" in error(url) and "--api_key_file" in error(url)
    with fake(lambda path, body: (500, {"error": {"message": "out of memory"}})) as url:
        assert "status 500: out of memory, after 2 tries" in error(url)
    with fake(lambda path, body: (200, {"choices": []})) as url:
        assert "no choices" in error(url)
    assert not (tmp_path / "store").exists()
    (tmp_path / "key").write_text("a b")
    with pytest.raises(ValueError, match="takes one key"):
        read_keys(str(tmp_path / "key"), most=1)
    (tmp_path / "key").write_text("a\nb\n")
    with pytest.raises(ValueError, match="takes one key"):
        read_keys(str(tmp_path / "key"), most=1)
    assert read_keys(str(tmp_path / "key")) == ("a", "b") and read_keys(None) == ()
