"""The process that grades: takes batches of rows from its standard input, answers with what a pool of workers found.

`recjax.tasks.grading.pool` starts it as a program of its own. Workers then come from a process that has neither JAX nor
its threads nor the user's main module in it. It leads a process group that ends with it, and it ends with its standard
input: however the training process went, nothing stays behind.
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
    """Serves until standard input ends.

    A request is a function of the module, module:function, and the arguments of each call.

    Args:
        function: the row grader, module:function, whose module workers have imported.
        seconds: limit for one call.
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
    """What the function makes of each row, or a Failure; a row's failure costs that row alone."""
    futures = [pool.schedule(_call, (function, *row), timeout=seconds) for row in rows]
    errors = [future.exception() for future in futures]
    return [
        future.result() if error is None else Failure(_FAILURES.get(type(error), "error"))
        for future, error in zip(futures, errors, strict=True)
    ]


def _call(function: str, *arguments: Any) -> Any:
    """In a worker: a result of plain values, or a Failure. Exceptions stay here, as not all can be sent."""
    try:
        result = pkgutil.resolve_name(function)(*arguments)
        if isinstance(result, Mapping):
            return {str(name): float(value) for name, value in result.items()}
        return None if result is None else str(result)
    except (Exception, SystemExit):
        return Failure("error")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
