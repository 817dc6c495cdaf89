"""Runs the server process: takes a policy and limits, and answers requests until a signal ends it."""

import asyncio
import contextlib
import dataclasses
import resource
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, ClassVar

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from recjax.hub.policy import Policy
from recjax.rollout.engine import Engine
from recjax.rollout.live import LiveEngine
from recjax.rollout.requests import Weights
from recjax.serving.answering import Answering
from recjax.serving.app import Server, not_ready
from recjax.serving.guards import Guarded
from recjax.serving.numbers import Numbers
from recjax.serving.recorder import Recorder, Recording
from recjax.serving.sampler import Limits, Sampler
from recjax.serving.versions import Versions

_MOST_DESCRIPTORS = 65_536
_OTHER_DESCRIPTORS = 64  # for files, the store, its journal and pushes
PREFIX_TIME = 64  # length in tokens to which shorter prompts are padded
# Event-loop passes before a round, enough for stop strings to free slots. Replies are written during the round.
PASSES = 2


@dataclasses.dataclass(frozen=True)
class Serving:
    """The model to serve, and its options.

    Attributes:
        name: name of the model.
        weights: first weights.
        newer: function that returns weights that have arrived since its last call, or None. None: weights never change.
        pushed: function that reads the weights in a client's folder; None: clients may not push weights.
        recording: options for recording; None: no recording.
        seed: seed for requests without one.
    """

    name: str
    policy: Policy
    weights: Weights
    limits: Limits
    guarded: Guarded
    recording: Recording | None
    seed: int
    newer: Callable[[], Weights | None] | None = None
    pushed: Callable[[str], dict] | None = None


def build_server(serving: Serving, when_ready: str) -> Server:
    """Creates the server; its application's lifespan starts and ends everything that it needs.

    Args:
        when_ready: line to print when the server is ready.
    Raises:
        UserError: the record cannot be used.
    """
    policy = serving.policy
    limits = serving.limits
    recorder = None
    if serving.recording:
        recorder = Recorder(serving.recording, policy.tokenizer)
    engine = Engine(
        policy.decoder,
        policy.stop_ids,
        slots=limits.slots,
        prefix_time=PREFIX_TIME,
        recording=policy.recording,
    )
    engine.replace_weights(serving.weights.params, serving.weights.version)
    live = LiveEngine(engine, PASSES)
    versions = Versions(live, serving.weights, serving.newer, serving.pushed)
    sampler = Sampler(live, policy, limits, serving.seed)

    def open_sessions() -> int:
        if recorder is None:
            return 0
        return len(recorder.sessions)

    numbers = Numbers(
        {
            "under_way": ("Completions that run or wait.", lambda: sampler.under_way),
            "policy_version": ("Optimizer updates of the weights.", lambda: versions.version),
            "open_sessions": ("Sessions that wait for a reward.", open_sessions),
        }
    )

    @contextlib.asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        async with live, recorder or contextlib.nullcontext(), versions:
            print(when_ready)
            yield

    answering = Answering(sampler, recorder, numbers, serving.name, versions)
    return Server(answering, numbers, serving.guarded, lifespan)


class Connection(H11Protocol):
    """A connection that closes without a complete request head within `timeout_keep_alive`.

    uvicorn itself has a limit only between requests, which ends with the first byte. If there are more connections than
    the process can have, the oldest idle one closes, so that idle clients keep nobody out.
    """

    opened: ClassVar[dict["Connection", None]] = {}  # all connections of the process, in the order of opening

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Starts to wait for the first request."""
        super().connection_made(transport)
        self._wait_for_head()
        self.opened[self] = None
        if len(self.opened) > most_connections():
            for oldest in self.opened:
                if oldest.cycle is None or oldest.cycle.response_complete:
                    oldest.transport.close()
                    self.opened.pop(oldest, None)
                    break

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets the connection."""
        self.opened.pop(self, None)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Starts to wait for the next request, which may be there already."""
        self._waiting.cancel()  # otherwise each request of the last minute would keep a timer
        self._wait_for_head()
        super().on_response_complete()

    def _wait_for_head(self) -> None:
        self._waiting = self.loop.call_later(self.timeout_keep_alive, self._close_idle, self.cycle)

    def _close_idle(self, before: Any) -> None:
        if self.cycle is before:  # each request has its own cycle
            self.timeout_keep_alive_handler()


def most_connections() -> int:
    """Number of connections that leave descriptors for files, the store and pushes."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(16, min(soft, _MOST_DESCRIPTORS) - _OTHER_DESCRIPTORS)


def raise_descriptor_limit() -> None:
    """Takes as many descriptors as the system allows this process, as each connection needs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_DESCRIPTORS
    if hard != resource.RLIM_INFINITY:
        most = min(hard, _MOST_DESCRIPTORS)
    if soft < most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def uvicorn_server(app: ASGIApp, guarded: Guarded, **options: Any) -> uvicorn.Server:
    """The HTTP server of an application."""
    keep_alive: Any = guarded.client_seconds
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http=Connection,
        ws="none",
        timeout_keep_alive=keep_alive,
        log_config=None,  # uvicorn's would close the handlers of the whole process
        log_level="warning",
        access_log=False,
        server_header=False,
        backlog=128,  # asyncio accepts as often in a row, and logs each failure
        **options,
    )
    return uvicorn.Server(config)


@contextlib.contextmanager
def answering_not_ready(problem: str, guarded: Guarded, listening: socket.socket) -> Iterator[None]:
    """Answers all requests with 503 and a problem until the block ends, while the model is loaded."""
    server = uvicorn_server(not_ready(problem, guarded), guarded, lifespan="off", timeout_graceful_shutdown=1)
    thread = threading.Thread(target=server.run, args=([listening.dup()],), name="not ready")
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


def address(listening: socket.socket) -> str:
    """The URL of a server, for messages."""
    host, port = listening.getsockname()[:2]
    if ":" in host:
        host = f"[{host}]"
    return f"http://{host}:{port}/v1"


def serve(server: Server, guarded: Guarded, listening: socket.socket) -> None:
    """Serves until SIGTERM, SIGHUP or Ctrl-C; then finishes open requests and writes all records to the store.

    Args:
        listening: bound socket for requests.
    """
    raise_descriptor_limit()
    # uvicorn raises the signal again when it ends; ignoring it lets the process exit without failure.
    signal.signal(signal.SIGTERM, lambda *_: None)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    uvicorn_server(server.app, guarded, lifespan="on").run(sockets=[listening])
