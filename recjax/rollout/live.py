"""The engine for coroutines: requests come from any number of them at any time, and each awaits its own completion.

Rounds run in a thread of their own, so that the event loop stays free for agents, tools and connections meanwhile.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import jax

from recjax.rollout.engine import Engine
from recjax.rollout.requests import Request, Sampled

# Times that the event loop goes round before a round of tokens begins: whoever has just got a completion, and waits
# for nothing else, has then asked for the next one. So what runs beside what does not depend on the clock.
PASSES = 16


class LiveEngine:
    """An engine that requests are admitted to as they come; a context, of one event loop.

    A completion is the same whatever else is asked for: it follows from its request and the weights.
    """

    def __init__(self, engine: Engine):
        """Takes the engine, which nobody else may use until this is closed, and the mesh in context.

        Args:
            engine: with weights.
        """
        self._engine, self._mesh = engine, jax.sharding.get_mesh()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._arrived: list[tuple[Request, asyncio.Future]] = []
        self._waiting: dict[int, asyncio.Future] = {}
        self._serving: asyncio.Task | None = None
        self.error: BaseException | None = None  # what ended the engine

    async def __aenter__(self) -> "LiveEngine":
        """Starts nothing yet."""
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Ends after the round under way; whoever still waits gets asyncio.CancelledError."""
        if self._serving:
            self._serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._serving
        self._thread.shutdown(wait=True)

    async def sample(self, request: Request) -> Sampled:
        """The completion of a request. Who is cancelled while it waits leaves the others as they are.

        Raises:
            ValueError: a request that cannot be sampled.
            RuntimeError: the engine has failed.
        """
        if self.error is not None:
            raise RuntimeError(f"the engine has failed: {self.error!r}") from self.error
        future = asyncio.get_running_loop().create_future()
        self._arrived.append((request, future))
        if self._serving is None:
            self._serving = asyncio.get_running_loop().create_task(self._serve())
        return await future

    async def replace_weights(self, params: dict, version: int) -> None:
        """As `Engine.replace_weights`, between two rounds."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._on_mesh, self._engine.replace_weights, params, version)

    async def _serve(self) -> None:
        """Rounds, until nobody waits."""
        try:
            while self._arrived or self._waiting:
                for _ in range(PASSES):
                    await asyncio.sleep(0)
                await self._serve_round()
        except Exception as error:
            self.error = error
            for future in [*self._waiting.values(), *(future for _, future in self._arrived)]:
                if not future.done():
                    failure = RuntimeError(f"the engine has failed: {error!r}")
                    failure.__cause__ = error
                    future.set_exception(failure)
            self._waiting, self._arrived = {}, []
        finally:
            for future in [*self._waiting.values(), *(future for _, future in self._arrived)]:
                future.cancel()
            self._serving = None

    async def _serve_round(self) -> None:
        arrived = [(request, future) for request, future in self._arrived if not future.done()]
        self._arrived = []
        self._waiting |= {-place: future for place, (_, future) in enumerate(arrived, 1)}  # until they have tickets
        requests = [request for request, _ in arrived]
        round_ = asyncio.get_running_loop().run_in_executor(self._thread, self._on_mesh, self._round, requests)
        tickets, finished = await round_
        for place, ticket in enumerate(tickets, 1):
            future = self._waiting.pop(-place)
            if not isinstance(ticket, ValueError):
                self._waiting[ticket] = future
            elif not future.done():
                future.set_exception(ticket)
        for ticket, sampled in finished.items():
            future = self._waiting.pop(ticket)
            if not future.done():
                future.set_result(sampled)

    # --- In the engine's thread.

    def _on_mesh(self, function, *arguments):
        """The mesh in context is each thread's own."""
        if self._mesh.empty:
            return function(*arguments)
        with jax.set_mesh(self._mesh):
            return function(*arguments)

    def _round(self, requests: Sequence[Request]) -> tuple[list[int | ValueError], dict[int, Sampled]]:
        """A round after these are admitted: their tickets, or why they were refused; and what has ended."""
        tickets: list[int | ValueError] = []
        for request in requests:
            try:
                tickets += self._engine.admit([request])
            except ValueError as error:
                tickets.append(error)
        return tickets, self._engine.round()
