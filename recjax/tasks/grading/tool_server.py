"""The process that runs tools: takes calls from its standard input, answers each as it is done.

`recjax.rollout.tools` starts it as a program of its own, so that workers come from a process without JAX. It leads a
process group that ends with it, and it ends with its standard input.
"""

import asyncio
import json
import pickle
import pkgutil
import queue
import sys
import threading
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from pebble import ProcessExpired

from recjax.tasks.grading import processes

MOST_CHARACTERS = 20_000  # of a result; more are cut off
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
        said = future.result() if error is None else f"error: {_REASONS.get(type(error), type(error).__name__)}"
        pickle.dump((number, said), replies)
        replies.flush()


def _call(function: str, arguments: dict[str, Any]) -> str:
    """In a worker: the result of a call as text, or its error. Objects stay here, as not all can be sent."""
    try:
        said = _text(processes.finished(pkgutil.resolve_name(function)(**arguments)))
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        said = f"error: {processes.worded(error)}"
    return str.encode(said, "utf-8", "replace").decode()[:MOST_CHARACTERS]  # a plain string without lone surrogates


def _text(result: Any) -> str:
    """A string as it is; anything else as JSON, or as Python prints it where JSON has no form for it."""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, default=str)
    except (TypeError, ValueError, RecursionError):  # keys that are no strings, or circles
        return str(result)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
