"""The routes of the server, as a Starlette application."""

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from recjax.serving.answering import Answering
from recjax.serving.bodies import CompletionReward, PushedWeights, RewardBody, SessionReward, read_body
from recjax.serving.guards import HAS_KEY, Guard, Guarded
from recjax.serving.numbers import CONTENT_TYPE, Numbers
from recjax.serving.refusals import Refused
from recjax.serving.replies import Chunks, Job, full_reply, last_chunk
from recjax.serving.sampler import Piece
from recjax.serving.units import session_row

logger = logging.getLogger(__name__)

_DEEPEST = 100  # objects and lists within each other in a body
_SESSION = re.compile(r"[A-Za-z0-9._~-]{1,128}")
_PATHS = {"chat": "/v1/chat/completions", "text": "/v1/completions", "generate": "/inference/v1/generate"}


class Server:
    """Answers requests; `app` is its ASGI application, and `answering` produces the completions."""

    def __init__(self, answering: Answering, numbers: Numbers, guarded: Guarded, lifespan: Callable):
        """Creates the routes.

        Args:
            lifespan: asynchronous context manager in which the application serves.
        """
        self.answering = answering
        self._numbers = numbers
        routes = [
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/v1/models", self.models),
            Route("/v1/models/{model:path}", self.models),
            Route("/v1/feedback", self.feedback, methods=["POST"]),
            Route("/update_weights_from_disk", self.push, methods=["POST"]),
            Route("/sessions/{session}/reward", self.session_reward, methods=["POST"]),
            Route("/sessions/{session}/v1/models", self.models),
        ]
        for kind, path in _PATHS.items():
            for prefix in ("", "/sessions/{session}"):
                routes.append(Route(prefix + path, self._answers(kind), methods=["POST"]))

        async def refuse(request: Request, error: Exception) -> Response:
            if isinstance(error, HTTPException):
                paths = ", ".join(["/v1/models", "/v1/feedback", *_PATHS.values()])
                path = f"unknown path {request.url.path!r:.200}; this server has {paths}, also under /sessions/NAME"
                method = request.method
                words = {404: path, 405: f"this path does not support {method}"}.get(error.status_code, error.detail)
                error = Refused(error.status_code, words)
            if not isinstance(error, Refused):
                error = _FAILED
            return JSONResponse(error.body, error.status, error.headers)

        handlers = dict.fromkeys((Refused, HTTPException, Exception), refuse)
        starlette = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
        self.app = Guard(_Counted(starlette, numbers), guarded)

    # --- Completions.

    def _answers(self, kind: str) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            body = self.answering.checked_body(kind, await _body(request))
            with contextlib.ExitStack() as stack:
                stack.enter_context(self.answering.sampler.places(body.count))
                job = await _unless_gone(request, self.answering.job(kind, body, _session(request)))
                if job.body.stream:
                    return _Events(self._events(job), stack.pop_all())
                pieces = await _unless_gone(request, complete(job))
            return JSONResponse(full_reply(job, pieces, self.answering.versions.tag))

        async def complete(job: Job) -> list[Piece]:
            async with contextlib.aclosing(self.answering.pieces(job)) as pieces:
                return [piece async for _, piece in pieces if piece.finish is not None]

        return answer

    async def _events(self, job: Job) -> AsyncGenerator[dict[str, Any], None]:
        """Yields the chunks of a stream; chunks with a finish reason follow only after all completions are on disk."""
        streams = [Chunks(job, index) for index in range(job.body.count)]
        completed = []
        for stream in streams:
            for chunk in stream.first():
                yield chunk
        async with contextlib.aclosing(self.answering.pieces(job)) as pieces:
            async for index, piece in pieces:
                if piece.finish is not None:
                    completed.append(piece)
                for chunk in streams[index].next(piece):
                    yield chunk
        if job.body.stream_options.include_usage:
            yield last_chunk(job, completed)

    # --- Feedback.

    async def feedback(self, request: Request) -> Response:
        """Takes a reward for a completion or a turn, by the id of the reply or the row."""
        recorder = self.answering.require_recorder()
        body = read_body(CompletionReward, await _body(request))
        if "/" in body.id:
            return await self._rewarded(body.id, None, body)
        row, turn = await recorder.place_of(body.id, body.index)
        return await self._rewarded(row, turn, body)

    async def session_reward(self, request: Request) -> Response:
        """Takes the reward of a session or a turn."""
        self.answering.require_recorder()
        body = read_body(SessionReward, await _body(request))
        return await self._rewarded(session_row(str(_session(request))), body.turn, body)

    async def _rewarded(self, row: str, turn: int | None, body: RewardBody) -> Response:
        recorder = self.answering.require_recorder()
        reply: dict[str, Any] = {"id": row}
        if turn is None:
            reward, is_new = await recorder.reward(row, body)
        else:
            reward = body.turn_reward()
            is_new = await recorder.reward_turn(row, turn, reward)
            reply["turn"] = turn
        self._numbers.rewards.inc(is_new)
        return JSONResponse(reply | {"reward": reward, "new": is_new})

    # --- Weights.

    async def push(self, request: Request) -> Response:
        """Takes new weights from a folder, between two engine steps; see SGLang's /update_weights_from_disk."""
        body = read_body(PushedWeights, await _body(request))
        await self.answering.versions.push(body.model_path, body.weight_version)
        return JSONResponse({"success": True, "message": f"serving {body.weight_version}"})

    # --- About the server.

    async def models(self, request: Request) -> Response:
        """Describes the single model."""
        answering = self.answering
        model = {"id": answering.name, "object": "model", "created": answering.created, "owned_by": "recjax"}
        limits = answering.sampler.limits
        model |= {"max_model_len": limits.context, "policy_version": answering.versions.version}
        name = request.path_params.get("model")
        if name not in (None, answering.name):
            raise Refused(404, f"model = {name!r:.100}: unknown; this server has {answering.name!r}", param="model")
        if name:
            return JSONResponse(model)
        return JSONResponse({"object": "list", "data": [model]})

    async def health(self, request: Request) -> Response:
        """Reports if requests can be served, and if not, why."""
        problem = self.answering.sampler.error
        recorder = self.answering.recorder
        if problem is None and recorder is not None:
            problem = recorder.error
        return health(request.scope, problem)

    async def metrics(self, request: Request) -> Response:
        """Reports metrics for Prometheus."""
        return Response(self._numbers.text(), headers={"content-type": CONTENT_TYPE})


def health(scope: Scope, problem: str | None) -> Response:
    """The reply of /health; only a client with a key reads a problem, which may name files, URLs and users."""
    if problem is None:
        return JSONResponse({"status": "ok"})
    shown = "unavailable; send the API key to read the reason"
    if scope[HAS_KEY]:
        shown = problem
    return JSONResponse({"status": shown} | Refused(503, shown).body, 503, {"retry-after": "10"})


def not_ready(problem: str, guarded: Guarded) -> ASGIApp:
    """An application that answers every request as /health, with a problem."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await health(scope, problem)(scope, receive, send)

    return Guard(app, guarded)


class _Events(StreamingResponse):
    """Chunks as server-sent events. The places are freed even if the client disconnects."""

    def __init__(self, chunks: AsyncGenerator[dict[str, Any], None], places: contextlib.ExitStack):
        self._chunks = chunks
        self._places = places
        super().__init__(self._lines(), headers={"cache-control": "no-cache"}, media_type="text/event-stream")

    async def _lines(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._chunks:
                yield _event(chunk)
            yield b"data: [DONE]\n\n"
        except Refused as error:
            yield _event(error.body)
        except Exception:
            logger.exception("a stream has failed")
            yield _event(_FAILED.body)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            try:
                await cast(AsyncGenerator, self.body_iterator).aclose()
                await self._chunks.aclose()
            finally:
                self._places.close()


class _Counted:
    """Counts requests by path and status."""

    def __init__(self, app: ASGIApp, numbers: Numbers):
        self._app = app
        self._numbers = numbers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                # The label is the route's pattern, so that clients cannot create unlimited metrics.
                path = "other"
                route = scope.get("route")
                if isinstance(route, Route):
                    path = route.path
                self._numbers.requests.labels(path, str(message["status"])).inc()
            await send(message)

        if scope["type"] == "http":
            send_counted = counted
        else:
            send_counted = send
        await self._app(scope, receive, send_counted)


_FAILED = Refused(500, "the server failed at this request; its log has the error")


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _session(request: Request) -> str | None:
    """The session in a URL; None if the URL has no session."""
    name = request.path_params.get("session")
    if name is not None and not _SESSION.fullmatch(name):
        raise Refused(400, f"session {name!r:.140}: takes 1 to 128 of A-Z, a-z, 0-9, '.', '_', '~' and '-'")
    return name


async def _body(request: Request) -> Any:
    """The parsed body."""
    content = await request.body()
    try:
        values = json.loads(content)
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeError:
        raise Refused(400, "the body must be UTF-8, without half of a surrogate pair") from None
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body must be JSON ({type(error).__name__}: {error!s:.200})") from None
    level = [values]
    for _ in range(_DEEPEST):
        level = _inner_containers(level)
    if level:
        raise Refused(400, f"the body is nested more than {_DEEPEST} deep; send flatter objects")
    return values


def _inner_containers(values: list[Any]) -> list[Any]:
    """The objects and lists directly inside the objects and lists of `values`."""
    containers = []
    for value in values:
        if isinstance(value, dict):
            containers += value.values()
        elif isinstance(value, list):
            containers += value
    return [inner for inner in containers if isinstance(inner, dict | list)]


async def _unless_gone(request: Request, work: Awaitable[Any]) -> Any:
    """Waits for the result of `work`, and cancels it if the client disconnects."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(gone())
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Refused(499, "the client has gone")  # nobody reads this
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
