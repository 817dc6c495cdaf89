"""The engine for coroutines: many coroutines may send requests at any time, and each awaits its own completion.

Rounds run in a separate thread, so that the event loop stays free for agents, tools and connections.
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from recjax.rollout.engine import Engine
from recjax.rollout.requests import Request, Sampled

# Passes of the event loop before a round of tokens. A coroutine that has just received a completion has then sent its
# next request, unless it waits for something else. So timing does not decide which requests share a round.
PASSES = 16


class _Pending:
    """A request, the future of its completion and, for followers, the tokens sampled so far."""

    def __init__(self, request: Request, followed: bool):
        self.request = request
        self.followed = followed
        self.done: asyncio.Future[Sampled] = asyncio.get_running_loop().create_future()
        self.changed = asyncio.Event()
        self.so_far: Sampled | None = None
        self.done.add_done_callback(lambda _: self.changed.set())


class LiveEngine(contextlib.AbstractAsyncContextManager):
    """An engine that admits requests as they arrive; a context that belongs to one event loop.

    A completion follows from its request and the weights, and does not depend on other requests.
    """

    def __init__(self, engine: Engine, passes: int = PASSES):
        """Takes the engine, which has no other users until this context closes, and the mesh in context.

        Args:
            engine: engine with weights.
            passes: passes of the event loop before a round. Two are enough for a follower to close its iterator.
        """
        self._engine = engine
        self._mesh = jax.sharding.get_mesh()
        self._passes = passes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._arrived: list[_Pending] = []
        self._waiting: dict[int, _Pending] = {}
        self._serving: asyncio.Task | None = None
        self.error: BaseException | None = None  # the error that ended the engine

    async def __aexit__(self, *exception: object) -> None:
        """Ends after the current round; coroutines that still wait get asyncio.CancelledError."""
        if self._serving:
            self._serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._serving
        self._thread.shutdown(wait=True)
        del self._engine  # reference cycles of ended agents must not keep weights and cache in memory

    async def sample(self, request: Request) -> Sampled:
        """Returns the completion of a request. A task that is canceled while it waits frees only its own slot.

        Raises:
            UserError: the request cannot be sampled.
            RuntimeError: the engine has failed.
        """
        return await self._ask(request, followed=False).done

    async def follow(self, request: Request) -> AsyncGenerator[Sampled, None]:
        """Yields all tokens of a request so far after each of its rounds, and finally its completion.

        A slow follower misses rounds but no tokens. Closing the iterator early frees the request's slot.

        Raises:
            UserError, RuntimeError: see `sample`.
        """
        pending = self._ask(request, followed=True)
        try:
            while await pending.changed.wait() and not pending.done.done():
                pending.changed.clear()
                assert pending.so_far is not None
                yield pending.so_far
            yield pending.done.result()
        finally:
            pending.done.cancel()

    def _ask(self, request: Request, followed: bool) -> _Pending:
        if self.error is not None:
            raise self._failure()
        pending = _Pending(request, followed)
        self._arrived.append(pending)
        if self._serving is None:
            self._serving = asyncio.get_running_loop().create_task(self._serve())
        return pending

    async def replace_weights(self, params: dict, version: int) -> None:
        """Replaces the weights between two rounds, see `Engine.replace_weights`."""
        await self._in_thread(self._engine.replace_weights, params, version)

    async def _serve(self) -> None:
        """Runs rounds until no coroutine waits."""
        try:
            while self._arrived or self._waiting:
                for _ in range(self._passes):
                    await asyncio.sleep(0)
                self._admit_and_cancel()
                finished = await self._in_thread(self._engine.step)
                followed = [ticket for ticket, pending in self._waiting.items() if pending.followed]
                for ticket, sampled in self._engine.so_far(followed).items():
                    self._waiting[ticket].so_far = sampled
                    self._waiting[ticket].changed.set()
                for ticket, sampled in finished.items():
                    pending = self._waiting.pop(ticket)
                    if not pending.done.done():
                        pending.done.set_result(sampled)
        except Exception as error:
            self.error = error
            for pending in itertools.chain(self._waiting.values(), self._arrived):
                if not pending.done.done():
                    pending.done.set_exception(self._failure())
        finally:
            for pending in itertools.chain(self._waiting.values(), self._arrived):
                pending.done.cancel()
            self._serving = None
            self._waiting = {}
            self._arrived = []

    def _admit_and_cancel(self) -> None:
        """Between rounds: cancels requests that nobody awaits anymore, and admits requests that have arrived."""
        gone = [ticket for ticket, pending in self._waiting.items() if pending.done.done()]
        self._engine.cancel(gone)
        for ticket in gone:
            del self._waiting[ticket]
        arrived = [pending for pending in self._arrived if not pending.done.done()]
        self._arrived = []
        for pending in arrived:
            try:
                self._waiting |= dict.fromkeys(self._engine.admit([pending.request]), pending)
            except ValueError as error:
                pending.done.set_exception(error)

    def _failure(self) -> RuntimeError:
        failure = RuntimeError(f"the engine has failed: {self.error!r}")
        failure.__cause__ = self.error
        return failure

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Runs a function of the engine in its thread, which must itself set the mesh in context."""

        def on_mesh() -> Any:
            with contextlib.nullcontext() if self._mesh.empty else jax.set_mesh(self._mesh):
                return function(*arguments)

        return await asyncio.get_running_loop().run_in_executor(self._thread, on_mesh)
