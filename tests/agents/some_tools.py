"""Tools for tests; worker processes import this file, and nothing heavy with it."""

import asyncio
import os
import threading
import time

LOCK = asyncio.Lock()


def add(a: int, b: int) -> int:
    """
    Adds two numbers.

    Args:
        a: one
        b: the other
    """
    return a + b


def sleep(seconds: float) -> str:
    """
    Sleeps.

    Args:
        seconds: so long
    """
    time.sleep(seconds)
    return "slept"


def die() -> None:
    """Ends its process."""
    os._exit(1)


def fail(text: str) -> None:
    """
    Raises.

    Args:
        text: what it says
    """
    raise ValueError(text)


class Refused(Exception):
    """An exception that pickle cannot make again, as httpx.HTTPStatusError is one."""

    def __init__(self, text, *, response):
        super().__init__(text)
        self.response = response


class Unprintable(Exception):
    """An exception without words."""

    def __str__(self):
        raise RuntimeError("no words")


def refuse(text: str) -> None:
    """
    Raises what cannot be sent to another process.

    Args:
        text: what it says
    """
    raise Refused(text, response=threading.Lock())


def give(what: str) -> object:
    """
    Gives something that is not easily sent.

    Args:
        what: kind of thing
    """
    circle = []
    circle.append(circle)
    match what:
        case "lock":
            return threading.Lock()
        case "circle":
            return circle
        case "keys":
            return {(1, 2): 3}
        case "surrogate":
            return "a\udcffb"
        case "long":
            return "x" * 30_000
        case "exit":
            raise SystemExit(3)
        case "unprintable":
            raise Unprintable
        case "local":
            return type("Local", (), {"__repr__": lambda self: "a local"})()
    return {"given": what}


async def wait(seconds: float) -> int:
    """
    Waits, one call of a process after another.

    Args:
        seconds: so long
    """

    async def once() -> None:
        async with LOCK:
            await asyncio.sleep(seconds)

    await asyncio.gather(once(), once())
    return 2


async def refuse_later(text: str) -> None:
    """
    Raises after a while.

    Args:
        text: what it says
    """
    await asyncio.sleep(0.01)
    refuse(text)


def yields() -> int:
    """Yields."""
    yield 1


async def yields_later() -> int:
    """Yields in an event loop."""
    yield 1
