"""One event loop for the coroutines of users' code: agents, rewards and tools."""

import asyncio
import atexit
import contextlib
import inspect
import threading
from concurrent import futures
from typing import Any

from recjax.runtime.workers import DaemonThreads

_MOST_THREADS = 4096  # more than any batch has agents; a thread starts when no other is free
_END_SECONDS = 1.0  # time that canceled coroutines have to end
_loop: asyncio.AbstractEventLoop | None = None
_starting = threading.Lock()


def run_to_end(result: Any) -> Any:
    """Returns a result unchanged; runs an awaitable to its end in the process's single event loop first.

    A thread runs the loop as long as the process lives. A client, lock or semaphore in a user's module works with only
    one loop, so agents, rewards and tools share this loop, in training and in evaluations.
    """
    global _loop
    if not inspect.isawaitable(result):
        return result

    def run_forever() -> None:
        asyncio.set_event_loop(_loop)
        while True:
            # A task that raises SystemExit stops the loop; all other tasks continue.
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                assert _loop is not None
                _loop.run_forever()

    with _starting:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            # asyncio's own has six threads on two cores, and all agents of a batch may block one at a time.
            _loop.set_default_executor(DaemonThreads(_MOST_THREADS, "to_thread"))
            threading.Thread(target=run_forever, name="event loop", daemon=True).start()
            atexit.register(_cancel_all, _loop)
    outcome: futures.Future = futures.Future()

    async def run() -> None:
        try:
            outcome.set_result(await result)
        except BaseException as error:  # includes SystemExit, which would end the loop
            outcome.set_exception(error)

    task = asyncio.run_coroutine_threadsafe(run(), _loop)
    try:
        return outcome.result()
    finally:
        if not outcome.done():  # Ctrl-C in the waiting thread
            task.cancel()
            futures.wait([outcome], _END_SECONDS)


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    async def cancel() -> None:
        if tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                # Some tasks do not end when canceled; asyncio itself also silences its message about them in this way.
                task._log_destroy_pending = False  # type: ignore  # asyncio has no public name for it
                task.cancel()
            await asyncio.wait(tasks, timeout=_END_SECONDS)

    task = asyncio.run_coroutine_threadsafe(cancel(), loop)
    futures.wait([task], 2 * _END_SECONDS)
