"""Run clocks: the seconds of each phase, and the idle seconds of the devices."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax


class DeviceClock:
    """Seconds in which this process's devices had nothing to compute, because the host had not called a program yet.

    Devices run programs in the order of their calls, so they are idle from the end of the program that was called last
    until the host calls the next one. A call includes the compilation of its program.

    Attributes:
        idle_seconds: the seconds so far.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        """Takes the function that returns seconds."""
        self.idle_seconds = 0.0
        self._now = now
        self._ended: float | Future[float] | None = None  # None: not known
        self._waiter = ThreadPoolExecutor(1, "device clock")

    def call(self) -> None:
        """Tells the clock that the host is about to call a program."""
        ended = self._ended
        self._ended = None
        if isinstance(ended, Future):
            ended = ended.result() if ended.done() else None  # None: the device still computes
        if ended is not None:
            self.idle_seconds += self._now() - ended

    def wait_for(self, result: Any) -> "Future[float]":
        """Takes the arrays of the program that was called last; a thread waits for them, and the host does not."""

        def wait() -> float:
            jax.block_until_ready(result)
            return self._now()

        self._ended = self._waiter.submit(wait)
        return self._ended

    def end(self) -> None:
        """Tells the clock that all programs have ended, since the host has the results of the last one.

        What the host did before, such as an evaluation, does not count.
        """
        self._ended = self._now()


class PhaseSeconds:
    """Wall seconds that the host spends in each named phase of a run.

    The device runs asynchronously, so a phase includes the seconds for which the host waits for the device. "update" is
    the dispatch of an update, and the wait for its numbers unless another phase has waited before. Usually the next
    step's "sample" has: the device computes its first tokens after the update, so "sample" includes the update's
    seconds. A trace (`training.profile_steps`) shows the work of the device.
    """

    def __init__(self):
        """Starts the clock, and that of the devices."""
        self.device = DeviceClock()
        self.totals: dict[str, float] = defaultdict(float)
        self._began = time.perf_counter()

    def go_on_from(self, totals: dict[str, float], wall_seconds: float) -> None:
        """Adds the seconds of an earlier part of the run."""
        self._began -= wall_seconds
        for name, seconds in totals.items():
            self.totals[name] += seconds

    @property
    def wall_seconds(self) -> float:
        """Wall seconds of the whole run so far."""
        return time.perf_counter() - self._began

    @property
    def loop_seconds(self) -> float:
        """Seconds spent sampling, grading and updating."""
        return sum(self.totals[name] for name in ("sample", "score", "update"))

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the seconds of the `with` block to phase `name`, which a profiler trace shows under the same name."""
        start = time.perf_counter()
        try:
            with jax.profiler.TraceAnnotation(name):
                yield
        finally:
            self.totals[name] += time.perf_counter() - start
