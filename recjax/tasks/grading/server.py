"""The grading process: reads batches of rows from standard input, and answers with the results of a pool of workers.

`recjax.tasks.grading.pool` starts this module as a separate program, so that workers are forked from a process without
JAX, JAX's threads and the user's main module. The program ends when its standard input ends, and its process group ends
with it: no process stays behind, in whatever way the training process ended.
"""

import multiprocessing
import pickle
import pkgutil
import queue
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any, BinaryIO

from pebble import ProcessExpired, ProcessPool

from recjax.tasks.grading import processes
from recjax.tasks.grading.graders import Failure

_FAILURES = {TimeoutError: "timeout", ProcessExpired: "crash", BrokenProcessPool: "crash"}


def main(function: str, workers: int, seconds: float) -> None:
    """Serves requests until standard input ends.

    A request contains a function of the same module as `function`, as module:function, and the arguments of each call.

    Args:
        function: row grader, as module:function; its module is imported before workers are forked.
        seconds: time limit of one call.
    """
    replies = processes.replies()
    multiprocessing.set_forkserver_preload([function.partition(":")[0]])
    requests: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_read, args=(sys.stdin.buffer, requests), daemon=True).start()
    pool = None
    while True:
        called, rows = requests.get()
        pool = processes.working(pool, workers)
        pickle.dump(outcomes(pool, called, rows, seconds), replies)
        replies.flush()


def _read(stream: BinaryIO, requests: queue.SimpleQueue) -> None:
    try:
        while True:
            requests.put(pickle.load(stream))
    finally:
        processes.end_group()


def outcomes(pool: ProcessPool, function: str, rows: Sequence[tuple], seconds: float) -> list[Any]:
    """The function's result for each row, or a Failure; a failure does not affect other rows."""
    futures = [pool.schedule(_call, (function, *row), timeout=seconds) for row in rows]
    errors = [future.exception() for future in futures]
    return [
        future.result() if error is None else Failure(_FAILURES.get(type(error), "error"))
        for future, error in zip(futures, errors, strict=True)
    ]


def _call(function: str, *arguments: Any) -> Any:
    """Runs in a worker: a result of plain values, or a Failure; some exceptions cannot be pickled, so none is sent."""
    try:
        result = pkgutil.resolve_name(function)(*arguments)
        if isinstance(result, Mapping):
            return {str(name): float(value) for name, value in result.items()}
        return None if result is None else str(result)
    except (Exception, SystemExit):
        return Failure("error")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
