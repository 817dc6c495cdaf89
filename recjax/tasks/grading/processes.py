"""Programs that run what others wrote, beside the training process: how they start, work and end."""

import contextlib
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
from typing import BinaryIO

from pebble import ProcessPool

from recjax.console import outlast_readers

_WORKER_MEMORY_BYTES = 4 * 2**30


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


def _prepare_worker() -> None:
    outlast_readers()
    with contextlib.suppress(ValueError, OSError):  # a lower limit is set already, or the system has none
        resource.setrlimit(resource.RLIMIT_AS, (_WORKER_MEMORY_BYTES, _WORKER_MEMORY_BYTES))
