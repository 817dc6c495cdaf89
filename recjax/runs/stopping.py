"""Requests to stop a run: signals, and `on_step` functions that return True."""

import contextlib
import inspect
import logging
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from recjax.errors import UserError, shown

STOPPED = 0  # in `Run.stopping`, next to the numbers of signals: on_step asked the run to stop

logger = logging.getLogger(__name__)


def asks_to_stop(returned: Any) -> bool:
    """True if `on_step` returned True, False for False and None.

    Raises:
        UserError: it returned something else, which may be true by chance.
    """
    if returned is None or isinstance(returned, bool | np.bool_):
        return bool(returned)
    remedy = "return True to stop the run after this step, and False or None to go on"
    if inspect.isawaitable(returned):
        remedy = f"write it as def, not async def, and {remedy}"
    raise UserError(problem=f"on_step returned {shown(returned, 80)}", remedy=remedy)


@contextlib.contextmanager
def stop_requests() -> Iterator[list[int]]:
    """Received signals: SIGTERM of a cloud, SIGHUP of a closed terminal, Ctrl-C; a second Ctrl-C ends at once."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received  # Python delivers signals only to the main thread.
        return

    def receive(number: int, _: object) -> None:
        if number == signal.SIGINT and number in received:
            raise KeyboardInterrupt
        received.append(number)  # before the message, during which a second Ctrl-C may come
        if number == signal.SIGINT:
            logger.info("finishing this step and writing a checkpoint; press Ctrl-C again to stop without a checkpoint")

    earlier_handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    for number in (signal.SIGINT, signal.SIGHUP):
        # A shell's background jobs ignore Ctrl-C, and programs under nohup ignore SIGHUP; the run then does too.
        if earlier_handlers[number] == signal.SIG_IGN:
            del earlier_handlers[number]
    for number in earlier_handlers:
        signal.signal(number, receive)
    try:
        yield received
    finally:
        for number, handler in earlier_handlers.items():
            signal.signal(number, handler)
