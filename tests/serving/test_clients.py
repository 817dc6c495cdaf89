"""Clients that must not get in, ask for too much, are slow, or vanish."""

import asyncio
import json
import socket
import time

import httpx
import pytest

from recjax.models.sampling import Sampling
from recjax.serving.guards import Guard, Guarded
from tests.experience.rows import read_columns
from tests.serving.some_server import LIMITS, POLICY, listening, post, serve

TEXT = "/v1/completions"
ENDLESS = {"policy": POLICY._replace(stop_ids=()), "limits": LIMITS._replace(context=5000, completion=4000)}


def test_who_has_no_key_gets_nothing_but_the_health(tmp_path):
    with serve(tmp_path, guarded=Guarded(keys=("one", "two"))) as client:
        for header in ({}, *({"authorization": given} for given in ("Bearer three", "Bearer ", "bearer", "Basic one"))):
            for path in ("/v1/models", "/metrics", "/nothing"):
                reply = client.get(path, headers=header)
                assert reply.status_code == 401 and reply.json()["error"]["type"] == "authentication_error"
            assert client.post(TEXT, json={"prompt": "a"}, headers=header).status_code == 401
        assert client.get("/health").status_code == 200
        for given in ("Bearer one", "Bearer two", "bearer one", "BEARER two", "bearer  one"):
            assert client.get("/v1/models", headers={"authorization": given}).status_code == 200


def test_a_page_of_a_browser_does_not_get_in(tmp_path):
    with serve(tmp_path, guarded=Guarded(hosts=("127.0.0.1", "localhost"))) as client:
        assert client.get("/v1/models", headers={"host": "evil.example:8000"}).status_code == 403
        for host in ("localhost:8000", "LocalHost", "127.0.0.1"):
            assert client.get("/v1/models", headers={"host": host}).status_code == 200
        headers = {"host": "localhost:8000", "content-type": "text/plain"}
        assert client.post(TEXT, content='{"prompt": "a"}', headers=headers).status_code == 415


def test_bodies_have_a_limit_whether_or_not_they_say_how_long_they_are(tmp_path):
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
def test_the_reply_to_a_body_that_is_not_read_gets_there(status, path, header):
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
        with sampler.places(10, Sampling()):
            status, reply = ask(port, {"prompt": "a", "n": 3, "max_tokens": 1})
            assert status == 429 and reply["error"]["code"] == "rate_limit_exceeded"
            assert ask(port, {"prompt": "a", "n": 2, "max_tokens": 1})[0] == 200
        assert "12 at most" in ask(port, {"prompt": "a", "n": 13})[1]["error"]["message"]
        assert ask(port, {"prompt": "a", "n": 12, "max_tokens": 1})[0] == 200
        for temperature in (0.25, 0.5, 0.75):
            assert ask(port, {"prompt": "a", "max_tokens": 1, "temperature": temperature})[0] == 200
        status, reply = ask(port, {"prompt": "a", "max_tokens": 1, "temperature": 0.8})
        assert (
            status == 400
            and reply["error"]["param"] == "temperature"
            and "--distributions" in reply["error"]["message"]
        )
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


def wait_until(true, seconds=5.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_vanishes_frees_its_slots_and_leaves_no_record(tmp_path, stream):
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


def test_a_client_that_does_not_take_its_reply_is_left():
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
