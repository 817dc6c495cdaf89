"""Worker processes for code that may hang, crash or take all memory: graders, tools, chat templates.

The first call starts a program that imports modules and then forks every worker from itself. Workers thus have neither
JAX nor the training process's threads and main module, and a new worker needs only milliseconds to start.
"""

import collections
import contextlib
import ctypes
import functools
import glob
import importlib
import multiprocessing
import os
import pickle
import queue
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from recjax.errors import UserError
from recjax.runtime.streams import outlast_readers

_LOOK_SECONDS = 0.25  # time between two looks for the process that started the program
_MOST_CALLS = 16  # a worker gets at most so many calls at once
_PR_SET_PDEATHSIG = 1  # linux/prctl.h defines it
_PR_SET_CHILD_SUBREAPER = 36


def cores() -> int:
    """Number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def refuse_while_loading(what: str) -> None:
    """Raises if this process is a program of workers that still imports its modules.

    Raises:
        UserError: a module that the workers import would start workers, which would import the module again.
    """
    if Workers.loading:
        raise UserError(
            what,
            "cannot start in a module that worker processes import for its functions",
            'put the call under `if __name__ == "__main__":`, or move the functions to a module of their own',
        )


class CallFailed(Exception):
    """A call that has no result; `reason` is timeout, crash or error."""

    def __init__(self, reason: str, message: str):
        """Stores the reason and the message."""
        super().__init__(message)
        self.reason = reason


class DaemonThreads(ThreadPoolExecutor):
    """Calls functions in threads that the end of the process does not wait for, as a user's function may hang.

    It is a ThreadPoolExecutor, of which asyncio takes no other kind, with threads of its own.
    """

    def __init__(self, count: int, name: str):
        """Starts no threads; a call starts one if all are busy and there are fewer than `count`."""
        super().__init__(count, name)
        self._name = name
        self._started = 0
        self._idle = threading.Semaphore(0)
        self._waiting: queue.SimpleQueue[tuple[Future, Callable[[], Any]] | None] = queue.SimpleQueue()
        self._changing = threading.Lock()
        self._closed = False

    def submit(self, function: Callable[..., Any], /, *args: Any, **named: Any) -> "Future[Any]":
        """A future of the function's result; calls begin in the order of submission."""
        future: Future[Any] = Future()
        with self._changing:
            if self._closed:
                raise RuntimeError("the threads are closed")
            self._waiting.put((future, functools.partial(function, *args, **named)))
            if not self._idle.acquire(blocking=False) and self._started < self._max_workers:
                self._started += 1
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Takes no more calls, and cancels calls that have not started; it does not wait for active calls."""
        with self._changing:
            self._closed = True
            with contextlib.suppress(queue.Empty):
                while call := self._waiting.get_nowait():
                    call[0].cancel()
            for _ in range(self._started):
                self._waiting.put(None)

    def _run(self) -> None:
        while call := self._waiting.get():
            future, function = call
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)
            self._idle.release()


class _Call(NamedTuple):
    future: Future
    request: bytes
    seconds: float | None


class _Worker(NamedTuple):
    """A worker process: its id, and the connection that carries calls and results."""

    pid: int
    connection: Connection


class Workers:
    """Calls functions in worker processes; kills and replaces a worker that exceeds the time limit.

    The processes run in a session of their own, so that Ctrl-C in a terminal reaches only the training process. All of
    them, and the processes that they start, end with the context or with this process, even if it is killed. On Linux,
    all processes that a worker started end with the worker, also processes in a separate session. On other systems,
    they outlive a worker that exceeds its time limit, and processes in a separate process group also outlive the
    context.
    """

    def __init__(
        self,
        count: int,
        seconds: float | None,
        *modules: str,
        memory: int | None = 4 * 2**30,
        held: bytes | None = None,
    ):
        """Stores the arguments; the first call starts the processes.

        Args:
            count: largest number of workers; more calls wait.
            seconds: time limit of one call; None: no limit.
            modules: modules to import before the workers start; the time limit does not include these imports.
            memory: number of bytes that a worker may allocate; None: no limit.
            held: pickled object that every worker has in `Workers.held`; the time limit does not include its loading.
        """
        self._count = count
        self._seconds = seconds
        self._modules = modules
        self._memory = memory
        self._held = held
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._closed = False
        self._program: subprocess.Popen | None = None
        self._control: socket.socket | None = None

    held: Any = None  # a worker has the object of the argument `held` here
    loading = False  # True in the program while it imports its modules

    def __enter__(self) -> "Workers":
        """Returns itself; the first call starts the processes."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Kills the processes, even during a call, and cancels waiting calls."""
        with self._starting:
            self._closed = True
        if self._program:
            with contextlib.suppress(queue.Empty):
                while True:
                    waiting = self._calls.get_nowait()
                    assert waiting is not None
                    waiting.future.cancel()
            for _ in range(self._count):
                self._calls.put(None)
            assert self._control is not None
            self._control.close()
            with contextlib.suppress(ProcessLookupError):  # the program has already ended
                os.kill(self._program.pid, signal.SIGSTOP)  # no more workers; it still adopts
                _end_descendants(self._program.pid)
                os.killpg(self._program.pid, signal.SIGKILL)
            self._program.wait()

    def call(self, function: Callable[..., Any], *args: Any, seconds: float | None = None) -> "Future[Any]":
        """Calls a function, which a module must define, in a worker.

        Args:
            seconds: time limit instead of the default.
        Returns:
            A future of the function's result, which should be plain values because this process unpickles it. The
            future raises `CallFailed` if the call has no result, and UserError if no workers can start.
        """
        request = pickle.dumps((function, args))
        with self._starting:
            if self._closed:
                raise RuntimeError("the workers are closed")
            if not self._program:
                self._start()
        call = _Call(Future(), request, self._seconds if seconds is None else seconds)
        self._calls.put(call)
        return call.future

    def _answer_all(self) -> None:
        """Runs in a thread for each worker; takes several calls if many wait, so that the worker rarely waits."""
        worker = None
        while first_call := self._calls.get():
            calls = collections.deque([first_call])
            with contextlib.suppress(queue.Empty):  # other threads take calls, too
                fair_share = self._calls.qsize() // (2 * self._count)
                for _ in range(min(fair_share, _MOST_CALLS)):
                    waiting = self._calls.get_nowait()
                    assert waiting is not None
                    calls.append(waiting)
            calls = collections.deque(call for call in calls if call.future.set_running_or_notify_cancel())
            try:
                while calls:
                    # An idle worker does not send; its connection becomes readable when it ends.
                    if worker is None or worker.connection.poll():
                        worker = self._new_worker()
                    worker = self._answer(calls, worker)
            except Exception as error:
                worker = None
                for call in calls:
                    call.future.set_exception(error)

    def _answer(self, calls: collections.deque[_Call], worker: _Worker) -> _Worker | None:
        """Removes calls as the worker answers them, up to a call that ends it; returns the worker for other calls."""
        pid, connection = worker
        try:
            connection.send([call.request for call in calls])
            while calls:
                if not connection.poll(calls[0].seconds):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                    calls.popleft().future.set_exception(CallFailed("timeout", "it took too long"))
                    return None
                reply = connection.recv_bytes()
                future = calls.popleft().future
                try:
                    error, result = pickle.loads(reply)
                except Exception as exception:  # a class in the result decides which
                    words = f"its result cannot be unpickled ({type(exception).__name__}: {exception})"
                    future.set_exception(CallFailed("error", words))
                    continue
                if error is None:
                    future.set_result(result)
                else:
                    failure = CallFailed("error", error)
                    failure.add_note(f"in the worker process:\n{result}")
                    future.set_exception(failure)
        except (EOFError, ConnectionError):
            worker = self._new_worker()  # raises an error if the program has also ended
            calls.popleft().future.set_exception(CallFailed("crash", "it crashed"))
        return worker

    def _new_worker(self) -> _Worker:
        connection, worker_end = multiprocessing.Pipe()
        try:
            with worker_end:
                assert self._control is not None
                socket.send_fds(self._control, [b"\0"], [worker_end.fileno()])
            pid = connection.recv()  # `_work` sends it first.
            return _Worker(pid, connection)
        except (EOFError, OSError) as error:
            raise UserError(problem="the worker processes ended by themselves; standard error says why") from error

    def _start(self) -> None:
        refuse_while_loading("worker processes")
        self._control, program_end = socket.socketpair()
        with program_end:
            arguments = (program_end.fileno(), self._modules, self._memory, os.getpid())
            code = f"from recjax.runtime.workers import fork_workers; fork_workers{arguments}"
            environment = dict(os.environ)
            # Fixed hashes make the order of sets, and thus results, the same in every run.
            environment["PYTHONHASHSEED"] = "0"
            environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
            self._program = subprocess.Popen(
                [sys.executable, "-u", "-c", code],
                env=environment,
                pass_fds=[program_end.fileno()],
                stdin=subprocess.DEVNULL if self._held is None else subprocess.PIPE,
                start_new_session=True,
            )
        if self._held is not None:
            assert self._program.stdin is not None
            # If the program has ended, the calls report it.
            with contextlib.suppress(BrokenPipeError), self._program.stdin as file:
                file.write(self._held)
        for _ in range(self._count):
            threading.Thread(target=self._answer_all, name="workers", daemon=True).start()


@contextlib.contextmanager
def _ending_with(starter: int) -> Iterator[None]:
    """Ends this program during the block, which may import for minutes, if the process that started it ends.

    Linux's signal for this comes at the end of the thread that started the program, which is too early.
    """
    is_done = threading.Event()

    def watch() -> None:
        while not is_done.wait(_LOOK_SECONDS):
            if os.getppid() != starter:
                _end_descendants(os.getpid())
                os.killpg(0, signal.SIGKILL)

    watcher = threading.Thread(target=watch, name="parent", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_done.set()
        watcher.join()  # workers are forked from a single thread


def fork_workers(control: int, modules: Sequence[str], memory: int | None, starter: int) -> None:
    """Runs in the program: forks a worker for each connection that arrives; ends everything at the end of input.

    Args:
        control: file descriptor of a socket that receives connections.
        starter: id of the process that started the program.
        (others): see `Workers`.
    """
    with contextlib.suppress(OSError):  # standard error is closed
        os.dup2(2, 1)
    outlast_readers()
    _set_process(_PR_SET_CHILD_SUBREAPER, 1)
    Workers.loading = True
    with _ending_with(starter):
        for module in modules:
            importlib.import_module(module)
        held = sys.stdin.buffer.read()
        if held:
            Workers.held = pickle.loads(held)
    Workers.loading = False
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system removes ended workers
    with socket.socket(fileno=control) as connections:
        while descriptors := socket.recv_fds(connections, 1, 1)[1]:
            if os.fork() == 0:
                connections.close()
                _keep_worker(descriptors[0], memory)
            os.close(descriptors[0])
    _end_descendants(os.getpid())
    os.killpg(0, signal.SIGKILL)


def _keep_worker(descriptor: int, memory: int | None) -> None:
    """Runs in a process for each worker: starts the worker, and ends with it, after everything that it started.

    A process whose parent has ended gets this process as its parent, in whichever group or session it is.
    """
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        _set_process(_PR_SET_CHILD_SUBREAPER, 1)
        _set_process(_PR_SET_PDEATHSIG, signal.SIGTERM)  # the program may be killed without its children
        worker = os.fork()
        if worker == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if sys.platform == "linux":
                # A tool that kills its own group then ends no other worker.
                os.setpgid(0, 0)
                _set_process(_PR_SET_PDEATHSIG, signal.SIGKILL)
            _work(Connection(descriptor), memory)
        os.close(descriptor)
        while os.wait()[0] != worker:  # this also removes orphans that have ended
            pass
    finally:
        _end_descendants(os.getpid())
        os._exit(0)


def _set_process(option: int, value: int) -> None:
    """Sets an option of this process by Linux's prctl; other systems have none."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def end_with_parent() -> None:
    """In a new child process: kills it at the end of the thread that started it; has no effect beyond Linux."""
    _set_process(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_descendants(root: int) -> None:
    """Kills all processes that descend from a process; has no effect on systems without /proc."""
    for _ in range(500):  # processes may start others before they are killed
        running = _descendants(root)
        if not running:
            return
        for pid in running:
            with contextlib.suppress(OSError):  # it has already ended, or belongs to a different user
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _descendants(root: int) -> list[int]:
    """The processes that descend from a process and have not ended."""
    children = collections.defaultdict(list)
    for path in glob.iglob("/proc/[0-9]*/stat"):
        with contextlib.suppress(OSError), open(path, "rb") as file:  # the process has ended
            state, parent = file.read().rpartition(b")")[2].split()[:2]
            if state not in b"ZX":
                children[int(parent)].append(int(path.split("/")[2]))
    descendants = list(children[root])
    for pid in descendants:  # the list grows during the loop
        descendants += children[pid]
    return descendants


def _work(connection: Connection, memory: int | None) -> None:
    """Runs in a worker: answers calls until the connection closes, then exits."""
    try:
        # The system may have no such files or limits, or a lower limit is already set.
        with contextlib.suppress(OSError, ValueError):
            if memory is not None:
                with open("/proc/self/statm", encoding="ascii") as file:
                    memory += int(file.read().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        pid = os.getpid()
        connection.send(pid)
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
                    frames = "".join(traceback.format_tb(error.__traceback__, -10))
                    reply = pickle.dumps((message, frames))
                if os.getpid() != pid:  # a child that the function forked; the worker itself answers
                    os._exit(0)
                connection.send_bytes(reply)
    except (EOFError, OSError):
        pass
    finally:
        os._exit(0)
