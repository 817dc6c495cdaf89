"""Execution of users' code: in programs next to the training process, and in one event loop for coroutines."""

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
_END_SECONDS = 1.0  # time that canceled coroutines have to end
_loop: asyncio.AbstractEventLoop | None = None
_starting = threading.Lock()


def start(module: str, *arguments: object) -> subprocess.Popen:
    """Starts a module as a program that reads requests from standard input and writes answers to standard output.

    The program runs in its own session: Ctrl-C in a terminal reaches the training process, which then ends it.
    """
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        start_new_session=True,
    )


def end(process: subprocess.Popen) -> None:
    """Kills a program from `start` and all processes that it has started."""
    with contextlib.suppress(ProcessLookupError):  # the program has already ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def end_group() -> None:
    """Kills the calling program, which `start` has started, and all processes that it has started."""
    os.killpg(os.getpgid(0), signal.SIGKILL)


def replies() -> BinaryIO:
    """In a program from `start`: a stream for its answers; redirects the output of its workers to standard error."""
    stream = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    outlast_readers()
    return stream


def working(pool: ProcessPool | None, workers: int) -> ProcessPool:
    """In a program from `start`: the pool, or a new one if it is None or broken; a forkserver forks the workers."""
    if pool is not None and pool.active:
        return pool
    return ProcessPool(workers, initializer=_prepare_worker, context=multiprocessing.get_context("forkserver"))


def worded(error: BaseException) -> str:
    """An exception's type and message, cut to 500 characters."""
    try:
        message = str(error)
    except Exception:
        message = "its message cannot be printed"
    return f"{type(error).__name__}: {message}"[:500]


def finished(result: Any) -> Any:
    """Returns a result unchanged; runs an awaitable to its end in the process's single event loop first.

    A thread runs the loop as long as the process lives. A client, lock or semaphore in a user's module works with only
    one loop, so agents, rewards and tools share this loop, in training and in evaluations.
    """
    return _result_of(result) if inspect.isawaitable(result) else result


def _result_of(awaitable: Awaitable[Any]) -> Any:
    outcome: futures.Future = futures.Future()

    async def run() -> None:
        try:
            outcome.set_result(await awaitable)
        except BaseException as error:  # includes SystemExit, which would end the loop
            outcome.set_exception(error)

    task = asyncio.run_coroutine_threadsafe(run(), _event_loop())
    try:
        return outcome.result()
    finally:
        if not outcome.done():  # Ctrl-C in the waiting thread
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
                task._log_destroy_pending = False  # some tasks do not end when canceled
                task.cancel()
            await asyncio.wait(others, timeout=_END_SECONDS)

    task = asyncio.run_coroutine_threadsafe(cancel(), loop)
    futures.wait([task], 2 * _END_SECONDS)


def _prepare_worker() -> None:
    outlast_readers()
    with contextlib.suppress(ValueError, OSError):  # a lower limit is already set, or the system has no limits
        resource.setrlimit(resource.RLIMIT_AS, (_WORKER_MEMORY_BYTES, _WORKER_MEMORY_BYTES))
