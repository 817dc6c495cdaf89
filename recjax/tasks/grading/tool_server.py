"""The process that runs tools: takes calls from its standard input, answers each as it is done.

`recjax.rollout.tools` starts it as a program of its own, so that workers come from a process without JAX. It leads a
process group that ends with it, and it ends with its standard input.
"""

import pickle
import pkgutil
import queue
import sys
import threading
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from pebble import ProcessExpired

from recjax.tasks.grading import processes
from recjax.tasks.grading.graders import Failure

_REASONS = {TimeoutError: "it took too long", ProcessExpired: "it crashed", BrokenProcessPool: "it crashed"}


def main(workers: int, seconds: float) -> None:
    """Serves until standard input ends.

    A request is a number, a function as module:function, and its arguments by name.

    Args:
        seconds: limit for one call.
    """
    done: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_answer, args=(processes.replies(), done), daemon=True).start()
    pool = None
    try:
        while True:
            number, function, arguments = pickle.load(sys.stdin.buffer)
            pool = processes.working(pool, workers)
            future = pool.schedule(_call, (function, arguments), timeout=seconds)
            future.add_done_callback(lambda future, number=number: done.put((number, future)))
    finally:
        processes.end_group()


def _answer(replies: Any, done: queue.SimpleQueue) -> None:
    while True:
        number, future = done.get()
        error = future.exception()
        said = future.result() if error is None else Failure(_reason(error))
        pickle.dump((number, said), replies)
        replies.flush()


def _reason(error: BaseException) -> str:
    return _REASONS.get(type(error), f"{type(error).__name__}: {error}"[:500])


def _call(function: str, arguments: dict[str, Any]) -> Any:
    """In a worker; what it returns must be picklable, and what it raises is told by its text."""
    result = pkgutil.resolve_name(function)(**arguments)
    pickle.dumps(result)
    return result


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
