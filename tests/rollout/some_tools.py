"""Tools for tests; worker processes import this file, and nothing heavy with it."""

import os
import time


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
