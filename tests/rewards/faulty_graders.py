"""Row graders that misbehave, for the worker pool: a completion says what is to happen."""

import ctypes
import os
import sys
import time


class Refused(Exception):
    """Cannot be made again from its words, as it takes more than these."""

    def __init__(self, text, *, response):
        super().__init__(text)
        self.response = response


def grade(completion, answer, columns):
    """accuracy 1 where the completion is the answer; others do as they say."""
    if completion == "sleep":
        time.sleep(1000)
    if completion == "spin":
        while True:
            pass
    if completion == "exit":
        os._exit(3)
    if completion == "kill":
        os.kill(os.getpid(), 9)
    if completion == "segfault":
        ctypes.string_at(0)
    if completion == "memory":
        bytearray(8 * 2**30)
    if completion == "deep":
        deep = lambda depth: deep(depth + 1)  # noqa: E731
        deep(0)
    if completion == "raise":
        raise KeyError("oops")
    if completion == "refuse":
        raise Refused("no", response=3)
    if completion == "unsent":
        raise Refused("no", response=lambda: 3)
    if completion == "leave":
        sys.exit(0)
    if completion == "print":
        print("x" * 100_000)
    if completion == "modules":
        return {"accuracy": float(not {"jax", "jaxlib", "recjax.train", "absl"} & {*sys.modules})}
    if completion == "column":
        return {"accuracy": float(columns["level"] == 3)}
    if completion == "pid":
        return {"accuracy": float(os.getpid())}
    return {"accuracy": float(completion == answer)}


def parse(completion):
    """Misbehaves as `grade` does; else the answer in capitals, None of "none"."""
    grade(completion, "", {})
    return None if completion == "none" else completion.upper()
