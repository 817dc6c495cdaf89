"""The engine for coroutines: many coroutines may send requests at any time, and each awaits its own completion.

Rounds run in a separate thread, so that the event loop stays free for agents, tools and connections.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax

from recjax.rollout.engine import Engine
from recjax.rollout.requests import Request, Sampled, Weights

# Passes of the event loop before a round of tokens. A coroutine that has just received a completion has then sent its
# next request, unless it waits for something else. So timing does not decide which requests share a round.
PASSES = 16


class _Asked:
    """A request, the future of its completion and, for followers, the tokens sampled so far."""

    def __init__(self, request: Request, followed: bool):
        self.request, self.followed = request, followed
        self.done: asyncio.Future[Sampled] = asyncio.get_running_loop().create_future()
        self.changed, self.so_far = asyncio.Event(), None
        self.done.add_done_callback(lambda _: self.changed.set())

    def tell(self, so_far: Sampled) -> None:
        """Passes on the tokens after a round."""
        self.so_far = so_far
        self.changed.set()


class LiveEngine:
    """An engine that admits requests as they arrive; a context that belongs to one event loop.

    A completion follows from its request and the weights, and does not depend on other requests.
    """

    def __init__(self, engine: Engine, passes: int = PASSES, newer: Callable[[], Weights | None] | None = None):
        """Takes the engine, which has no other users until this context closes, and the mesh in context.

        Args:
            engine: engine with weights.
            passes: passes of the event loop before a round. Two are enough for a follower to close its iterator.
            newer: called before each round; returns weights that have arrived since the last call, or None.
        """
        self._engine, self._mesh, self._passes, self._newer = engine, jax.sharding.get_mesh(), passes, newer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._arrived: list[_Asked] = []
        self._waiting: dict[int, _Asked] = {}
        self._serving: asyncio.Task | None = None
        self.error: BaseException | None = None  # the error that ended the engine

    async def __aenter__(self) -> "LiveEngine":
        """Returns itself; work starts with the first request."""
        return self

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
            ValueError: the request cannot be sampled.
            RuntimeError: the engine has failed.
        """
        return await self._ask(request, followed=False).done

    async def follow(self, request: Request) -> AsyncIterator[Sampled]:
        """Yields all tokens of a request so far after each of its rounds, and finally its completion.

        A slow follower misses rounds but no tokens. Closing the iterator early frees the request's slot.

        Raises:
            ValueError, RuntimeError: see `sample`.
        """
        asked = self._ask(request, followed=True)
        try:
            while True:
                await asked.changed.wait()
                asked.changed.clear()
                if asked.done.done():
                    break
                yield asked.so_far
            yield asked.done.result()
        finally:
            asked.done.cancel()

    def _ask(self, request: Request, followed: bool) -> _Asked:
        if self.error is not None:
            raise RuntimeError(f"the engine has failed: {self.error!r}") from self.error
        asked = _Asked(request, followed)
        self._arrived.append(asked)
        if self._serving is None:
            self._serving = asyncio.get_running_loop().create_task(self._serve())
        return asked

    async def replace_weights(self, params: dict, version: int) -> None:
        """Replaces the weights between two rounds, see `Engine.replace_weights`."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._on_mesh, self._engine.replace_weights, params, version)

    async def _serve(self) -> None:
        """Runs rounds until no coroutine waits."""
        try:
            while self._arrived or self._waiting:
                for _ in range(self._passes):
                    await asyncio.sleep(0)
                await self._serve_round()
        except Exception as error:
            self.error = error
            for asked in [*self._waiting.values(), *self._arrived]:
                if not asked.done.done():
                    failure = RuntimeError(f"the engine has failed: {error!r}")
                    failure.__cause__ = error
                    asked.done.set_exception(failure)
            self._waiting, self._arrived = {}, []
        finally:
            for asked in [*self._waiting.values(), *self._arrived]:
                asked.done.cancel()
            self._serving = None

    async def _serve_round(self) -> None:
        arrived = [asked for asked in self._arrived if not asked.done.done()]
        gone = [ticket for ticket, asked in self._waiting.items() if asked.done.done()]
        for ticket in gone:
            del self._waiting[ticket]
        followed = [ticket for ticket, asked in self._waiting.items() if asked.followed]
        self._arrived = []
        self._waiting |= {-place: asked for place, asked in enumerate(arrived, 1)}  # until they have tickets
        round_ = self._round, gone, arrived, followed
        tickets, so_far, finished = await asyncio.get_running_loop().run_in_executor(
            self._thread, self._on_mesh, *round_
        )
        for place, ticket in enumerate(tickets, 1):
            asked = self._waiting.pop(-place)
            if not isinstance(ticket, ValueError):
                self._waiting[ticket] = asked
            elif not asked.done.done():
                asked.done.set_exception(ticket)
        for ticket, sampled in so_far.items():
            self._waiting[ticket].tell(sampled)
        for ticket, sampled in finished.items():
            asked = self._waiting.pop(ticket)
            if not asked.done.done():
                asked.done.set_result(sampled)

    # --- In the engine's thread.

    def _on_mesh(self, function, *arguments):
        """Runs a function with the mesh in context, which each thread must set for itself."""
        if self._mesh.empty:
            return function(*arguments)
        with jax.set_mesh(self._mesh):
            return function(*arguments)

    def _round(
        self, gone: Collection[int], arrived: Sequence[_Asked], followed: Sequence[int]
    ) -> tuple[list[int | ValueError], dict[int, Sampled], dict[int, Sampled]]:
        """Cancels, admits and decodes; returns tickets or refusals, followed requests' tokens so far, completions."""
        if self._newer is not None and (weights := self._newer()) is not None:
            self._engine.replace_weights(weights.params, weights.version)
        self._engine.cancel(gone)
        tickets: list[int | ValueError] = []
        for asked in arrived:
            try:
                tickets += self._engine.admit([asked.request])
            except ValueError as error:
                tickets.append(error)
        finished = self._engine.round()
        new = [ticket for ticket, asked in zip(tickets, arrived, strict=True) if asked.followed]
        return tickets, self._engine.so_far([*followed, *new]), finished
