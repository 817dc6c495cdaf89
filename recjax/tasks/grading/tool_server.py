"""The process that runs tools: reads calls from standard input, and answers each call when it is done.

`recjax.rollout.tools` starts this module as a separate program, so that workers are forked from a process without JAX.
The program ends when its standard input ends, and its process group ends with it.
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

MOST_CHARACTERS = 20_000  # longer results are cut
_REASONS = {TimeoutError: "it took too long", ProcessExpired: "it crashed", BrokenProcessPool: "it crashed"}


def main(workers: int, seconds: float) -> None:
    """Serves requests until standard input ends.

    A request contains its number, a function as module:function, and the function's arguments by name.

    Args:
        seconds: time limit of one call.
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
    """Runs in a worker: a call's result or error as text; some objects cannot be pickled, so none is sent."""
    try:
        said = _text(processes.finished(pkgutil.resolve_name(function)(**arguments)))
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        said = f"error: {processes.worded(error)}"
    return str.encode(said, "utf-8", "replace").decode()[:MOST_CHARACTERS]  # a plain string without lone surrogates


def _text(result: Any) -> str:
    """A string unchanged; any other object as JSON, or as Python prints it if JSON cannot express it."""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, default=str)
    except (TypeError, ValueError, RecursionError):  # unsupported keys, or circular references
        return str(result)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
