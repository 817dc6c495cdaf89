"""Generators for a trainer of several processes: the first process runs them, and all processes get equal results."""

from typing import Any

import jax

from recjax import hosts
from recjax.config import RegimeConfig
from recjax.rollout.generators import AT_A_TIME, Generators, Sampler


def generators_of(regime: RegimeConfig) -> "Generators | SharedGenerators":
    """Creates the generators of an asynchronous run, for a trainer of one or several processes."""
    return Generators(regime) if jax.process_count() == 1 else SharedGenerators(regime)


class SharedGenerators:
    """`Generators` for several processes, which all make the same calls in the same order.

    Only the first process has Ray and the generators. All processes receive its results, its errors and the state that
    decides which batches are issued next. So all have equal queues and issue equal batches.
    """

    def __init__(self, regime: RegimeConfig):
        """Creates the generators in the first process; `start` starts them."""
        self._own = Generators(regime) if hosts.is_first() else None
        self._most, self._version = AT_A_TIME * regime.generators, 0
        self.in_flight: dict[int, int] = {}
        self.restarts, self.waited_seconds = 0, 0.0

    def __enter__(self) -> "SharedGenerators":
        """Enters `Generators` in the first process."""

        def enter() -> None:
            self._own.__enter__()

        hosts.from_first(enter)
        return self

    def __exit__(self, *exception: object) -> None:
        """Exits `Generators` in the first process."""
        if self._own:
            self._own.__exit__(*exception)

    def start(self, sampler: Sampler, *arguments: Any) -> None:
        """Starts the generators, with the first process's arguments."""
        hosts.from_first(lambda: self._own.start(sampler, *arguments))

    def publish(self, version: int, weights: dict) -> None:
        """Sets the weights for later batches to those of the first process, see `Generators.publish`."""
        self._version = version
        if self._own:
            self._own.publish(version, weights)

    def begin_step(self) -> None:
        """Resets `waited_seconds` at the start of a step."""
        self.waited_seconds = 0.0
        if self._own:
            self._own.begin_step()

    def issue(self, number: int) -> None:
        """Assigns a batch to a generator."""
        self.in_flight = {**self.in_flight, number: self._version}
        if self._own:
            self._own.issue(number)

    @property
    def are_busy(self) -> bool:
        """True if all generators have as many batches as they may have."""
        return len(self.in_flight) >= self._most

    def receive(self, wait: bool) -> list[tuple[int, Any]]:
        """Number and result of every batch that is done, in all processes, see `Generators.receive`."""

        def received() -> tuple[list[tuple[int, Any]], dict[int, int], int, float]:
            own = self._own
            return own.receive(wait), own.in_flight, own.restarts, own.waited_seconds

        found, self.in_flight, self.restarts, self.waited_seconds = hosts.from_first(received)
        return found
