"""How recjax runs code of users: programs next to the training process, and one event loop for coroutines."""

import asyncio
import atexit
import contextlib
import inspect
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable
from concurrent import futures
from typing import Any, BinaryIO

from pebble import ProcessPool

from recjax.streams import outlast_readers

_WORKER_MEMORY_BYTES = 4 * 2**30
_END_SECONDS = 1.0  # for coroutines that are told to end
_loop: asyncio.AbstractEventLoop | None = None
_starting = threading.Lock()


def start(module: str, *arguments: object) -> subprocess.Popen:
    """Starts a module as a program that is asked through its standard input and answers through its standard output.

    It runs in a session of its own: Ctrl-C in a terminal is for the training process, which then ends this one.
    """
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        start_new_session=True,
    )


def end(process: subprocess.Popen) -> None:
    """Ends such a program and all that it has started, whatever they are at."""
    with contextlib.suppress(ProcessLookupError):  # it ended by itself
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def end_group() -> None:
    """In such a program: ends it and all that it has started."""
    os.killpg(os.getpgid(0), signal.SIGKILL)


def replies() -> BinaryIO:
    """In such a program: where its answers go; what its workers print goes to standard error instead."""
    stream = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    outlast_readers()
    return stream


def working(pool: ProcessPool | None, workers: int) -> ProcessPool:
    """In such a program: the pool, or a new one where there is none yet or it broke; workers come from a forkserver."""
    if pool is not None and pool.active:
        return pool
    return ProcessPool(workers, initializer=_prepare_worker, context=multiprocessing.get_context("forkserver"))


def worded(error: BaseException) -> str:
    """An exception's type and message, in short."""
    try:
        message = str(error)
    except Exception:
        message = "its message cannot be printed"
    return f"{type(error).__name__}: {message}"[:500]


def finished(result: Any) -> Any:
    """A result as it is; that of an awaitable once it is there, from the one event loop of this process.

    The loop lives in a thread as long as the process. A client, lock or semaphore that a user's module holds works with
    one loop only, so all coroutines share this one: agents, rewards and tools, in training and in evaluations.
    """
    return _result_of(result) if inspect.isawaitable(result) else result


def _result_of(awaitable: Awaitable[Any]) -> Any:
    outcome: futures.Future = futures.Future()

    async def run() -> None:
        try:
            outcome.set_result(await awaitable)
        except BaseException as error:  # SystemExit among them, which would end the loop
            outcome.set_exception(error)

    task = asyncio.run_coroutine_threadsafe(run(), _event_loop())
    try:
        return outcome.result()
    finally:
        if not outcome.done():  # Ctrl-C, in the thread that waits
            task.cancel()
            futures.wait([outcome], _END_SECONDS)


def _event_loop() -> asyncio.AbstractEventLoop:
    global _loop
    with _starting:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_run_forever, args=(_loop,), name="event loop", daemon=True).start()
            atexit.register(_cancel_all, _loop)
    return _loop


def _run_forever(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    while True:
        # A task that raises SystemExit stops the loop; all other tasks continue.
        with contextlib.suppress(SystemExit, KeyboardInterrupt):
            loop.run_forever()


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    async def cancel() -> None:
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in others:
                task._log_destroy_pending = False  # some do not end when cancelled
                task.cancel()
            await asyncio.wait(others, timeout=_END_SECONDS)

    task = asyncio.run_coroutine_threadsafe(cancel(), loop)
    futures.wait([task], 2 * _END_SECONDS)


def _prepare_worker() -> None:
    outlast_readers()
    with contextlib.suppress(ValueError, OSError):  # a lower limit is set already, or the system has none
        resource.setrlimit(resource.RLIMIT_AS, (_WORKER_MEMORY_BYTES, _WORKER_MEMORY_BYTES))
