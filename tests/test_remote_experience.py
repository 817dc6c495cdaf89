"""A store from a server with OpenAI's API: one that gives tokens, and one that gives texts alone and fails at times."""

import http.server
import json
import threading
from contextlib import contextmanager

import numpy as np
import pytest

from recjax import generate_experience
from recjax.config_loading import load_config
from recjax.experience import store
from recjax.experience.tokenise import tokenised, tokenizer_name
from recjax.generate_experience import generate_remotely
from recjax.hub.policy import policy_alone
from recjax.rollout import remote
from recjax.rollout.remote import Address
from recjax.tasks.loading import load_task
from recjax.training.run import characters
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
def fake(answer):
    """A server that answers what `answer` makes of a path and a body: a status and an object."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply(200, {"data": [{"id": "sums"}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self.reply(*answer(self.path, body))

        def reply(self, status, said):
            content = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()


def test_a_server_of_texts_that_fails_now_and_then(config, tmp_path, monkeypatch):
    monkeypatch.setattr(remote.time, "sleep", lambda seconds: None)
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
    rows = store.read(tmp_path / "store")
    assert len(rows) == 18 and {row.source for row in rows} == {"sums"} and len({row.group_id for row in rows}) == 9
    assert all(row.completion == row.answer and row.reward > 0 and row.completion_tokens is None for row in rows)
    assert all(len(row.completion_tokens) for row in tokenised(rows, policy_of(config)))
    assert all(body["temperature"] == 1.0 and body["max_tokens"] == 3 for body in asked)


def test_token_ids_and_log_probs_are_taken_where_they_are_certain(config, tmp_path):
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
    rows = store.read(tmp_path / "store")
    known = [row for row in rows if "+9" not in row.prompt]
    assert 0 < len(known) < len(rows)
    for row in rows:
        assert (row.completion_tokens is not None) == (row in known)
    for row in known:
        assert row.tokenizer == tokenizer_name(tokenizer) and row.completion_tokens[-1] == end
        np.testing.assert_array_equal(row.behaviour_logprobs, np.full(len(row.completion_tokens), -0.5, np.float32))


def test_chats_are_asked_as_chats(config):
    asked = []

    def answer(path, body):
        asked.append((path, body))
        return 200, {"choices": [{"message": {"content": "hello"}, "finish_reason": "length"}] * body["n"]}

    hello = [{"role": "user", "content": "hi"}]
    with fake(answer) as url, remote.RemoteEngine(Address(url), policy_of(config), config.rollout) as engine:
        assert engine.answers([hello], 7) == [[remote.Answer("hello", truncated=True)] * 2]
    ((path, body),) = asked
    assert path == "/v1/chat/completions" and body["messages"] == hello and body["seed"] == 7 and body["logprobs"]


def test_a_server_gets_the_variables_of_each_chats_template(config):
    asked = []

    def answer(path, body):
        asked.append(body)
        return 200, {"choices": [{"message": {"content": "hello"}, "finish_reason": "stop"}] * body["n"]}

    chats = [[{"role": "user", "content": text}] for text in "ab"]
    tools = [{"type": "function", "function": {"name": "add"}}]
    templates = [{}, {"enable_thinking": False, "tools": tools}]
    with fake(answer) as url, remote.RemoteEngine(Address(url), policy_of(config), config.rollout) as engine:
        engine.answers(chats, 7, templates)
    first, second = sorted(asked, key=lambda body: body["seed"])
    assert not {"tools", "chat_template_kwargs"} & first.keys()
    assert second["tools"] == tools and second["chat_template_kwargs"] == {"enable_thinking": False}


def test_what_is_said_where_a_server_cannot_be_used(config, tmp_path, monkeypatch):
    monkeypatch.setattr(remote.time, "sleep", lambda seconds: None)

    def error(url, **changes):
        with pytest.raises(ValueError) as raised:
            generate_remotely(config, tmp_path / "store", 1, Address(url, retries=1)._replace(**changes), None)
        return str(raised.value)

    assert "does not answer" in error("http://127.0.0.1:1") and "the same command goes on" in error(
        "http://127.0.0.1:1"
    )
    assert "give http://HOST:PORT" in error("ftp://somewhere")
    with fake(lambda path, body: (401, {"error": {"message": "no key"}})) as url:
        assert "there is no such model; it has sums" in error(url, model="other")
        assert "no key" in error(url) and "--api_key_file" in error(url)
    with fake(lambda path, body: (500, {"error": {"message": "out of memory"}})) as url:
        assert "status 500: out of memory, after 2 tries" in error(url)
    with fake(lambda path, body: (200, {"choices": []})) as url:
        assert "no choices" in error(url)
    assert not store.part_files(tmp_path / "store")
    (tmp_path / "key").write_text("a b")
    with pytest.raises(ValueError, match="takes one key"):
        generate_experience.read_key(str(tmp_path / "key"))
