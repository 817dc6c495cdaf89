"""Worker processes for code that may hang, crash or take all memory: graders, tools, chat templates.

The first call starts a program that imports modules and then forks every worker from itself. Workers thus have neither
JAX nor the training process's threads and main module, and a new worker needs only milliseconds to start.
"""

import collections
import contextlib
import importlib
import multiprocessing
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from recjax.streams import outlast_readers

_MOST_CALLS = 16  # that a worker gets at once


class CallFailed(Exception):
    """A call that has no result; `reason` is timeout, crash or error."""

    def __init__(self, reason: str, message: str):
        """Stores the reason and the message."""
        super().__init__(message)
        self.reason = reason


class _Call(NamedTuple):
    future: Future
    request: bytes
    seconds: float | None


class Workers:
    """Calls functions in worker processes; kills and replaces a worker that exceeds the time limit.

    The processes run in a session of their own, so that Ctrl-C in a terminal reaches only the training process. All of
    them, and the processes that they start, end with the context or with this process, even if it is killed.
    """

    def __init__(self, count: int, seconds: float | None, *modules: str, memory: int | None = 4 * 2**30):
        """Stores the arguments; the first call starts the processes.

        Args:
            count: largest number of workers; more calls wait.
            seconds: time limit of one call; None: no limit.
            modules: modules to import before the workers start; the time limit does not include these imports.
            memory: number of bytes that a worker may allocate; None: no limit.
        """
        self._seconds, self._modules, self._memory = seconds, modules, memory
        self._calls: collections.deque[_Call] = collections.deque()
        self._count, self._threads = count, ThreadPoolExecutor(count, thread_name_prefix="workers")
        self._idle: list[tuple[int, Connection]] = []
        self._starting, self._program, self._control = threading.Lock(), None, None

    def __enter__(self) -> "Workers":
        """Returns itself; the first call starts the processes."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Kills the processes, even during a call."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for call in list(self._calls):
            call.future.cancel()
        with self._starting:
            if self._program:
                self._control.close()
                with contextlib.suppress(ProcessLookupError):  # the program has already ended
                    os.killpg(self._program.pid, signal.SIGKILL)
                self._program.wait()

    def call(self, function: Callable[..., Any], *args: Any, seconds: float | None = None) -> "Future[Any]":
        """Calls a function, which a module must define, in a worker.

        Args:
            seconds: time limit instead of the default.
        Returns:
            A future of the function's result, which should be plain values because this process unpickles it. The
            future raises `CallFailed` if there is no result, and RuntimeError if no workers can start.
        """
        seconds = self._seconds if seconds is None else seconds
        self._calls.append(call := _Call(Future(), pickle.dumps((function, args)), seconds))
        self._threads.submit(self._answer_some)
        return call.future

    def _answer_some(self) -> None:
        """Runs in a thread: takes one call, or several if many wait, so that a worker rarely waits for this process."""
        calls: collections.deque[_Call] = collections.deque()
        for _ in range(min(1 + len(self._calls) // (2 * self._count), _MOST_CALLS)):
            with contextlib.suppress(IndexError):  # other threads take calls, too
                if (call := self._calls.popleft()).future.set_running_or_notify_cancel():
                    calls.append(call)
        try:
            while calls:
                self._answer(calls)
        except Exception as error:
            for call in calls:
                call.future.set_exception(error)

    def _answer(self, calls: collections.deque[_Call]) -> None:
        """Sends calls to a worker and removes those that have ended; stops after a call that ends its worker."""
        pid, connection = self._free_worker()
        try:
            connection.send([call.request for call in calls])
            while calls:
                if not connection.poll(calls[0].seconds):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                    return calls.popleft().future.set_exception(CallFailed("timeout", "it took too long"))
                error, result = connection.recv()
                future = calls.popleft().future
                future.set_result(result) if error is None else future.set_exception(CallFailed("error", error))
            self._idle.append((pid, connection))
        except (EOFError, ConnectionError):
            self._idle.append(self._new_worker())  # raises an error if the program has also ended
            calls.popleft().future.set_exception(CallFailed("crash", "it crashed"))

    def _free_worker(self) -> tuple[int, Connection]:
        while True:
            try:
                pid, connection = self._idle.pop()
            except IndexError:
                return self._new_worker()
            if not connection.poll():  # an idle worker sends nothing; only its death makes the connection readable
                return pid, connection

    def _new_worker(self) -> tuple[int, Connection]:
        try:
            with self._starting:
                if not self._program:
                    self._start_program()
                connection, of_worker = multiprocessing.Pipe()
                with of_worker:
                    socket.send_fds(self._control, [b"\0"], [of_worker.fileno()])
            return connection.recv(), connection
        except (EOFError, OSError) as error:
            raise RuntimeError("the worker processes ended by themselves; standard error says why") from error

    def _start_program(self) -> None:
        self._control, of_program = socket.socketpair()
        arguments = of_program.fileno(), self._modules, self._memory
        with of_program:
            self._program = subprocess.Popen(
                [sys.executable, "-u", "-c", f"from recjax.workers import fork_workers; fork_workers{arguments}"],
                # Fixed hashes make the order of sets, and thus results, the same in every run.
                env={
                    **os.environ,
                    "PYTHONHASHSEED": "0",
                    "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
                },
                pass_fds=[of_program.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )


def fork_workers(control: int, modules: Sequence[str], memory: int | None) -> None:
    """Runs in the program: forks a worker for each connection that arrives; ends the process group at the end of input.

    Args:
        control: file descriptor of a socket that receives connections.
        (others): see `Workers`.
    """
    with contextlib.suppress(OSError):  # standard error is closed
        os.dup2(2, 1)
    outlast_readers()
    for module in modules:
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system removes ended workers
    with socket.socket(fileno=control) as connections:
        while descriptors := socket.recv_fds(connections, 1, 1)[1]:
            if os.fork() == 0:
                connections.close()
                _work(Connection(descriptors[0]), memory)
            os.close(descriptors[0])
    os.killpg(0, signal.SIGKILL)


def _work(connection: Connection, memory: int | None) -> None:
    """Runs in a worker: answers calls until the connection closes, then exits."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # The system may have no such files or limits, or a lower limit is already set.
        with contextlib.suppress(OSError, ValueError):
            if memory is not None:
                with open("/proc/self/statm", encoding="ascii") as file:
                    memory += int(file.read().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        connection.send(os.getpid())
        while True:
            for request in connection.recv():
                try:
                    function, args = pickle.loads(request)
                    reply = pickle.dumps((None, function(*args)))
                except BaseException as error:  # some exceptions cannot be pickled, and SystemExit would end the worker
                    try:
                        message = str(error)
                    except Exception:
                        message = "its message cannot be printed"
                    message = f"{type(error).__name__}: {message}"[:500].encode("utf-8", "replace").decode()
                    reply = pickle.dumps((message, None))
                connection.send_bytes(reply)
    except (EOFError, OSError):
        pass
    finally:
        os._exit(0)
