"""Runs the server process: takes a policy and limits, and answers requests until a signal ends it."""

import contextlib
import dataclasses
import signal
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import uvicorn

from recjax.experience.database import store_name
from recjax.hub.policy import Policy
from recjax.rollout.engine import Engine
from recjax.rollout.live import LiveEngine
from recjax.rollout.requests import Weights
from recjax.serving.answering import Answering
from recjax.serving.app import Server
from recjax.serving.guards import Guarded
from recjax.serving.numbers import Numbers
from recjax.serving.recorder import Recorder, Recording
from recjax.serving.sampler import Limits, Sampler
from recjax.serving.versions import Versions

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


def made(serving: Serving, when_ready: str) -> Server:
    """Creates the server; its application's lifespan starts and ends everything that it needs.

    Args:
        when_ready: line to print when the server is ready.
    Raises:
        ValueError: the record cannot be used.
    """
    policy, limits = serving.policy, serving.limits
    recorder = Recorder(serving.recording, policy.tokenizer) if serving.recording else None
    sizes = {"slots": limits.slots, "prefix_time": PREFIX_TIME, "kept_ids": policy.kept_ids}
    engine = Engine(policy.decoder, policy.stop_ids, **sizes)
    engine.replace_weights(serving.weights.params, serving.weights.version)
    live = LiveEngine(engine, PASSES)
    versions = Versions(live, serving.weights, serving.newer, serving.pushed)
    sampler = Sampler(live, policy, limits, serving.seed)
    numbers = Numbers(
        {
            "under_way": ("Completions that run or wait.", lambda: sampler.under_way),
            "policy_version": ("Optimizer updates of the weights.", lambda: versions.version),
            "open_sessions": ("Sessions that wait for a reward.", lambda: len(recorder.sessions) if recorder else 0),
        }
    )

    @contextlib.asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        async with live, recorder or contextlib.nullcontext(), versions:
            print(when_ready)
            yield

    answering = Answering(sampler, recorder, numbers, serving.name, versions)
    return Server(answering, numbers, serving.guarded, lifespan)


def serve(serving: Serving, listening: socket.socket) -> None:
    """Serves until SIGTERM, SIGHUP or Ctrl-C; then finishes open requests and writes all records to the store.

    Args:
        listening: bound socket for requests.
    Raises:
        ValueError: see `made`.
    """
    host, port = listening.getsockname()[:2]
    place = f"recording in {store_name(serving.recording.store)}" if serving.recording else "recording is off"
    where = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
    server = made(serving, f"serving {serving.name}, version {serving.weights.version}, at {where}; {place}")
    options = {
        "loop": "asyncio",
        "http": "h11",
        "ws": "none",
        "lifespan": "on",
        "log_level": "warning",
        "access_log": False,
    }
    # uvicorn raises the signal again when it ends; ignoring it lets the process exit without failure.
    signal.signal(signal.SIGTERM, lambda *_: None)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    uvicorn.Server(uvicorn.Config(server.app, server_header=False, **options)).run(sockets=[listening])
