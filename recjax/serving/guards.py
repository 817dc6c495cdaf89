"""Checks before every request: API keys, hosts, body sizes, and time limits for slow clients."""

import asyncio
import contextlib
import hmac
import logging
import re
from collections.abc import Collection
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from recjax.serving.refusals import Refused

logger = logging.getLogger(__name__)

HAS_KEY = "recjax.has_key"  # key of a request's scope: True if it has an API key, or the server has none
_MOST_DISCARDED = 2**28  # bytes of a refused body that are read so that the client receives the refusal


class Guarded(NamedTuple):
    """Conditions for requests.

    keys: valid API keys, one per request; empty: requests need no key.
    hosts: names of the server; None: any name. Web pages in a browser cannot reach it under another name.
    body_bytes: largest body.
    client_seconds: time limit for a client to send a body, and to take each piece of a reply.
    """

    keys: tuple[str, ...] = ()
    hosts: Collection[str] | None = None
    body_bytes: int = 2**20
    client_seconds: float = 60.0


class Guard:
    """An ASGI application that wraps and protects another application."""

    def __init__(self, app: ASGIApp, guarded: Guarded):
        self._app = app
        self._guarded = guarded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves a request, or refuses it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client = _Client(receive, send, self._guarded, Headers(scope=scope))
        try:
            try:
                self._check(scope)
            except Refused as error:
                await JSONResponse(error.body, error.status, error.headers)(scope, client.receive, client.send)
                return
            await self._app(scope, client.receive, client.send)
        except Exception:
            if not client.is_slow:
                raise
            logger.info("a client did not receive its reply within %g s: disconnected", self._guarded.client_seconds)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        guarded = self._guarded
        host = re.sub(r":\d*$", "", headers.get("host", "")).lower()
        if guarded.hosts is not None and host.strip("[]") not in guarded.hosts:
            raise Refused(403, f"Host = {host!r:.100}: unknown; use one of {', '.join(guarded.hosts)}")
        sent_key = re.sub("^bearer +", "", headers.get("authorization", ""), flags=re.IGNORECASE).encode()
        # Compares all keys, so that the response time reveals no key.
        scope[HAS_KEY] = not guarded.keys or any([hmac.compare_digest(sent_key, key.encode()) for key in guarded.keys])
        if not scope[HAS_KEY] and scope["path"] != "/health":
            raise Refused(
                401,
                "no valid API key; send one as Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        if scope["method"] == "POST":
            # A web page can send other types to any server without a preflight request.
            if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
                raise Refused(415, "send the body with Content-Type: application/json")
            size = headers.get("content-length", "0")
            if not size.isdecimal() or len(size) > 15 or int(size) > guarded.body_bytes:
                raise _too_large(guarded.body_bytes)


class _Client:
    """Receives and sends messages for one request, within the limits."""

    def __init__(self, receive: Receive, send: Send, guarded: Guarded, headers: Headers):
        self._receive = receive
        self._send = send
        self._guarded = guarded
        has_body = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
        self._size = 0
        self._is_whole = not has_body
        self._closes = False
        self.is_slow = False
        self._deadline = asyncio.get_running_loop().time() + guarded.client_seconds

    async def receive(self) -> Message:
        """Returns a piece of the body; after the last piece, waits for the client to disconnect."""
        if self._is_whole:
            return await self._receive()
        try:
            message = await self._piece()
        except TimeoutError:
            seconds = self._guarded.client_seconds
            message = f"the body did not arrive within {seconds:g} s; send it faster"
            raise Refused(408, message, headers={"connection": "close"}) from None
        if self._size > self._guarded.body_bytes:
            raise _too_large(self._guarded.body_bytes)
        return message

    async def _piece(self) -> Message:
        async with asyncio.timeout_at(self._deadline):
            message = await self._receive()
        self._size += len(message.get("body", b""))
        self._is_whole = not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        """Sends a piece of the reply."""
        if message["type"] == "http.response.start":
            self._closes = Headers(raw=message["headers"]).get("connection") == "close"
        elif self._closes and not self._is_whole and not message.get("more_body"):
            await self._send_in_time({**message, "more_body": True})
            # Closing a connection with unread data resets it, and the client loses the reply.
            self._deadline = asyncio.get_running_loop().time() + self._guarded.client_seconds
            with contextlib.suppress(TimeoutError):
                while not self._is_whole and self._size <= _MOST_DISCARDED:
                    await self._piece()
            message = {"type": "http.response.body"}
        await self._send_in_time(message)

    async def _send_in_time(self, message: Message) -> None:
        try:
            async with asyncio.timeout(self._guarded.client_seconds):
                await self._send(message)
        except TimeoutError:
            self.is_slow = True
            raise


def _too_large(most: int) -> Refused:
    message = f"the body has more than {most} bytes; send less, or start the server with more --max_body_bytes"
    return Refused(413, message, headers={"connection": "close"})
