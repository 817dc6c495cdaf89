"""Clients that must not get in, ask for too much, are slow, or vanish."""

import asyncio
import contextlib
import json
import socket
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from recjax.agents.trajectory import Trajectory
from recjax.serving import answering, running
from recjax.serving.guards import Guard, Guarded
from recjax.serving.running import answering_not_ready
from recjax.serving.sampler import Sampler
from recjax.store.store import Store
from tests.experience.rows import read_columns
from tests.marks import slow
from tests.serving.some_server import LIMITS, POLICY, listening, post, serve

TEXT, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
UNAVAILABLE = "unavailable; send the API key to read the reason"
ENDLESS = {"policy": POLICY._replace(stop_ids=()), "limits": LIMITS._replace(context=5000, completion=4000)}


def test_who_has_no_key_gets_nothing_but_the_health(tmp_path, monkeypatch):
    with serve(tmp_path, guarded=Guarded(keys=("one", "two"))) as client:
        for header in ({}, *({"authorization": given} for given in ("Bearer three", "Bearer ", "bearer", "Basic one"))):
            for path in ("/v1/models", "/metrics", "/nothing"):
                reply = client.get(path, headers=header)
                assert reply.status_code == 401 and reply.json()["error"]["type"] == "authentication_error"
            assert client.post(TEXT, json={"prompt": "a"}, headers=header).status_code == 401
        assert client.get("/health").status_code == 200
        for given in ("Bearer one", "Bearer two", "bearer one", "BEARER two", "bearer  one"):
            assert client.get("/v1/models", headers={"authorization": given}).status_code == 200
        monkeypatch.setattr(Sampler, "error", "postgresql://me@inner/db: FATAL")
        for given, status in (
            ("one", Sampler.error),
            ("two", Sampler.error),
            ("three", UNAVAILABLE),
            ("", UNAVAILABLE),
        ):
            reply = client.get("/health", headers={"authorization": f"Bearer {given}"})
            assert reply.status_code == 503 and reply.json()["status"] == status
    with serve(tmp_path / "other.db") as client:
        assert client.get("/health").json()["status"] == Sampler.error, "a server without keys"


def test_a_server_that_is_not_ready_says_so():
    waits, listener = "waits for the first checkpoint of runs/live", socket.create_server(("127.0.0.1", 0))
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with listener, answering_not_ready(waits, Guarded(keys=("one",)), listener):
        for path, given, status in (
            ("/health", "x", 503),
            ("/health", "one", 503),
            (TEXT, "x", 401),
            (TEXT, "one", 503),
        ):
            reply = httpx.get(address + path, headers={"authorization": f"Bearer {given}"}, timeout=20)
            assert reply.status_code == status and (waits in reply.text) == (given == "one")
        waiting = socket.create_connection(listener.getsockname()[:2], timeout=20)  # does not keep the server
    with waiting, contextlib.suppress(ConnectionError):
        assert not waiting.recv(1)


def test_a_page_of_a_browser_does_not_get_in(tmp_path):
    with serve(tmp_path, guarded=Guarded(hosts=("127.0.0.1", "localhost"))) as client:
        assert client.get("/v1/models", headers={"host": "evil.example:8000"}).status_code == 403
        for host in ("localhost:8000", "LocalHost", "127.0.0.1"):
            assert client.get("/v1/models", headers={"host": host}).status_code == 200
        headers = {"host": "localhost:8000", "content-type": "text/plain"}
        assert client.post(TEXT, content='{"prompt": "a"}', headers=headers).status_code == 415


def test_bodies_have_a_limit_with_and_without_a_length(tmp_path):
    with serve(tmp_path, guarded=Guarded(body_bytes=1000)) as client:
        headers = {"content-type": "application/json"}
        assert client.post(TEXT, content=b" " * 1001, headers=headers).status_code == 413
        reply = client.post(TEXT, content=iter([b" " * 600] * 2), headers=headers)
        assert reply.status_code == 413 and "1000 bytes" in reply.json()["error"]["message"]
        post(client, TEXT, prompt="a", max_tokens=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "path", "header"),
    [
        (413, TEXT, {}),
        (413, "/nothing", {}),
        (413, TEXT, {"transfer-encoding": "chunked"}),
        (401, TEXT, {"authorization": "Bearer other"}),
        (415, TEXT, {"content-type": "text/plain"}),
    ],
)
def test_a_refused_body_still_gets_its_reply(status, path, header):
    async def main(port):
        headers = {"authorization": "Bearer one", "content-type": "application/json"} | header
        address, found = f"http://127.0.0.1:{port}", []

        async def body():
            for _ in range(32):
                yield b" " * 2**16

        async with httpx.AsyncClient(base_url=address, headers=headers, timeout=20) as client:
            for _ in range(12):  # on a connection that has served before
                await client.get("/v1/models", headers={"authorization": "Bearer one"})
                content = body() if "transfer-encoding" in header else b" " * 2**21
                found.append((await client.post(path, content=content)).status_code)
        return found

    with listening(None, guarded=Guarded(keys=("one",))) as (port, _):
        assert asyncio.run(main(port)) == [status] * 12


@pytest.mark.slow
def test_places_and_distributions_have_limits(tmp_path):
    with listening(tmp_path) as (port, server):
        sampler = server.answering.sampler
        with sampler.places(10):
            status, reply = ask(port, {"prompt": "a", "n": 3, "max_tokens": 1})
            assert status == 429 and reply["error"]["code"] == "rate_limit_exceeded"
            assert ask(port, {"prompt": "a", "n": 2, "max_tokens": 1})[0] == 200
        assert "12 at most" in ask(port, {"prompt": "a", "n": 13})[1]["error"]["message"]
        assert ask(port, {"prompt": "a", "n": 12, "max_tokens": 1})[0] == 200
        for temperature in (0.25, 0.5, 0.75, 0.8):
            assert ask(port, {"prompt": "a", "max_tokens": 1, "temperature": temperature})[0] == 200
        status, reply = ask(port, {"prompt": "a", "max_tokens": 1, "temperature": 0.9})
        assert (
            status == 400
            and reply["error"]["param"] == "temperature"
            and "--distributions" in reply["error"]["message"]
        )
        for temperature in (0.0, 1.0):
            assert ask(port, {"prompt": "a", "max_tokens": 1, "temperature": temperature})[0] == 200, "never shut out"
        assert sampler.under_way == 0


def send(port, body, more=0):
    """A connection with a request, of whose body so many bytes are still to come."""
    content = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", port), timeout=20)
    head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    connection.sendall(f"{head}Content-Length: {len(content) + more}\r\n\r\n".encode() + content)
    return connection


def received(connection):
    """Status and reply."""
    with connection, connection.makefile("rb") as file:
        head, _, content = file.read().partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(content)


def ask(port, body):
    return received(send(port, body))


@pytest.fixture
def held(monkeypatch):
    """A function that makes another one wait, from its first call to the event that it returns."""
    ended = []

    def hold(owner, name):
        began, go_on, real = threading.Event(), threading.Event(), getattr(owner, name)
        ended.append(go_on)

        def waits(*arguments, **options):
            began.set()
            assert go_on.wait(60)
            return real(*arguments, **options)

        monkeypatch.setattr(owner, name, waits)
        return began, go_on

    yield hold
    for go_on in ended:
        go_on.set()


def in_thread(function, *arguments):
    """The future of a call."""
    threads = ThreadPoolExecutor(1)
    future = threads.submit(function, *arguments)
    threads.shutdown(wait=False)
    return future


@pytest.mark.parametrize(
    ("path", "body", "length"),
    [
        (TEXT, {"prompt": "a" * 1001}, "1001 characters"),
        (TEXT, {"prompt": ["a", "b" * 5000]}, "5000 characters"),
        (f"/sessions/s{TEXT}", {"prompt": "a" * 1001}, "1001 characters"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 1000}]}, "1017 characters"),
        (TEXT, {"prompt": [5] * 200}, "200 tokens"),
        (GENERATE, {"token_ids": [5] * 300_000}, "300000 tokens"),
    ],
)
def test_too_long_prompts_are_refused_before_tokenization(tmp_path, monkeypatch, path, body, length):
    for name in ("decode_after", "Trajectory"):
        monkeypatch.setattr(answering, name, None)
    with serve(tmp_path) as client:
        error = post(client, path, status=400, **body)["error"]
    assert f"the prompt has {length}" in error["message"] and error["code"] == "context_length_exceeded"


def test_the_server_answers_while_it_reads_prompts(tmp_path, held):
    began, go_on = held(Trajectory, "tokens_of")
    with listening(tmp_path) as (port, server):
        replies = [in_thread(ask, port, {"prompt": "a", "n": 6, "max_tokens": 1}) for _ in range(2)]
        assert began.wait(20)
        wait_until(lambda: server.answering.sampler.under_way == 12)
        assert httpx.get(f"http://127.0.0.1:{port}/health", timeout=20).status_code == 200
        assert ask(port, {"prompt": "a"})[0] == 429
        go_on.set()
        assert [reply.result()[0] for reply in replies] == [200, 200]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/feedback", {"id": "a", "reward": 1}),
        ("/v1/feedback", {"id": "a/0", "reward": 1}),
        ("/sessions/s/reward", {"turn": 0, "reward": 1}),
        (f"/sessions/s{TEXT}", {"prompt": "a", "max_tokens": 1}),
    ],
)
def test_the_server_answers_while_its_store_does_not(tmp_path, held, path, body):
    began, go_on = held(Store, "numbers")
    with listening(tmp_path) as (port, _):
        address = f"http://127.0.0.1:{port}"
        reply = in_thread(lambda: httpx.post(address + path, json=body, timeout=60))
        assert began.wait(20)
        assert httpx.get(f"{address}/health", timeout=20).status_code == 200
        go_on.set()
        assert reply.result().status_code == (200 if TEXT in path else 404)


HEADS = {
    "nothing": b"",
    "half a line": b"GET /hea",
    "headers without an end": b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * 100,
    "half of a second request": b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea",
    "a body after the refusal": b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999999\r\n\r\n",
}


@pytest.mark.parametrize("drips", [*slow(False), True])
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_a_connection_without_a_request_is_closed(head, drips):
    with listening(None, guarded=Guarded(client_seconds=0.5)) as (port, _):
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            connection.sendall(head)
            connection.settimeout(0.05)
            for _ in range(400):
                with contextlib.suppress(TimeoutError):
                    if not connection.recv(9999):
                        return
                if drips:
                    connection.sendall(b"x")
    pytest.fail("the connection is open after 20 seconds")


def test_requests_longer_than_the_head_timeout_are_answered(tmp_path, held):
    _, go_on = held(Trajectory, "tokens_of")
    with listening(tmp_path, guarded=Guarded(client_seconds=0.2)) as (port, _):
        reply = in_thread(ask, port, {"prompt": "a", "max_tokens": 1})
        time.sleep(0.6)
        go_on.set()
        assert reply.result()[0] == 200


def wait_until(true, seconds=20.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_vanished_client_frees_slots_and_leaves_no_record(tmp_path, stream):
    with listening(tmp_path, **ENDLESS) as (port, server):
        sampler, engine = server.answering.sampler, server.answering.sampler._live._engine
        # The last six wait in line.
        connection = send(port, {"prompt": "a", "n": 10, "max_tokens": 4000, "stream": stream})
        if stream:
            assert b"text/event-stream" in connection.recv(300)
        wait_until(lambda: engine._slots.live.any(), 20)
        assert sampler.under_way == 10
        connection.close()
        wait_until(lambda: sampler.under_way == 0)
        wait_until(lambda: not engine._slots.live.any() and not engine._waiting())
        status, reply = ask(port, {"prompt": "a", "max_tokens": 3})
        assert status == 200
    assert [row.id for row in read_columns(tmp_path / "store.db")] == [f"{reply['id']}/0"]


def test_a_slow_body_is_not_waited_for(tmp_path):
    with listening(tmp_path, guarded=Guarded(client_seconds=0.3)) as (port, _):
        status, reply = received(send(port, {"prompt": "a"}, more=10))
        assert status == 408 and "0.3 s" in reply["error"]["message"]

        def slow_body():
            for _ in range(5):
                time.sleep(0.1)
                yield b" "

        headers = {"content-type": "application/json"}
        for _ in range(3):
            assert httpx.post(f"http://127.0.0.1:{port}{TEXT}", content=slow_body(), headers=headers).status_code == 408


def test_a_client_that_takes_no_reply_is_disconnected():
    ended = []

    async def app(scope, receive, send):
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        finally:
            ended.append(True)

    async def never(*_):
        await asyncio.sleep(100)

    async def main():
        scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
        began = time.monotonic()
        await Guard(app, Guarded(client_seconds=0.1))(scope, never, never)
        return time.monotonic() - began

    assert asyncio.run(main()) < 5 and ended


def test_idle_connections_keep_no_other_client_out(monkeypatch):
    monkeypatch.setattr(running, "most_connections", lambda: 4)
    with listening(None, guarded=Guarded(client_seconds=30.0)) as (port, _), contextlib.ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20)) for _ in range(8)]
        for connection in idle[:4]:
            assert connection.recv(9) == b"", "the oldest idle connections close"
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=20) as reply:
            assert reply.status == 200
