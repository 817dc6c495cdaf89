"""Generators of a trainer of several processes: the first process has them, and all see the same of them."""

from typing import Any

import jax

from recjax import hosts
from recjax.config import RegimeConfig
from recjax.rollout.generators import AT_A_TIME, Generators, Sampler


def generators_of(regime: RegimeConfig) -> "Generators | SharedGenerators":
    """The generators of an asynchronous run, for a trainer of one process or of several."""
    return Generators(regime) if jax.process_count() == 1 else SharedGenerators(regime)


class SharedGenerators:
    """As `Generators`, for processes that all make the same calls in the same order.

    The first process alone has Ray and the generators. What arrives there, or is raised, comes to all processes, with
    what decides what is issued next. So all have the same queue, and issue the same batches.
    """

    def __init__(self, regime: RegimeConfig):
        """Starts nothing yet."""
        self._own = Generators(regime) if hosts.is_first() else None
        self._most, self._version = AT_A_TIME * regime.generators, 0
        self.in_flight: dict[int, int] = {}
        self.restarts, self.waited_seconds = 0, 0.0

    def __enter__(self) -> "SharedGenerators":
        """As of `Generators`, in the first process."""

        def enter() -> None:
            self._own.__enter__()

        hosts.from_first(enter)
        return self

    def __exit__(self, *exception: object) -> None:
        """As of `Generators`, in the first process."""
        if self._own:
            self._own.__exit__(*exception)

    def start(self, sampler: Sampler, *arguments: Any) -> None:
        """Starts the generators, with the first process's arguments."""
        hosts.from_first(lambda: self._own.start(sampler, *arguments))

    def publish(self, version: int, weights: dict) -> None:
        """As of `Generators`, with the first process's weights."""
        self._version = version
        if self._own:
            self._own.publish(version, weights)

    def begin_step(self) -> None:
        """Forgets the seconds that were waited for an earlier step."""
        self.waited_seconds = 0.0
        if self._own:
            self._own.begin_step()

    def issue(self, number: int) -> None:
        """Has a batch sampled."""
        self.in_flight = {**self.in_flight, number: self._version}
        if self._own:
            self._own.issue(number)

    @property
    def are_busy(self) -> bool:
        """Whether each has as many batches as it may have."""
        return len(self.in_flight) >= self._most

    def receive(self, wait: bool) -> list[tuple[int, Any]]:
        """Number and result of every batch that is done, as of `Generators`, in all processes."""

        def received() -> tuple[list[tuple[int, Any]], dict[int, int], int, float]:
            own = self._own
            return own.receive(wait), own.in_flight, own.restarts, own.waited_seconds

        found, self.in_flight, self.restarts, self.waited_seconds = hosts.from_first(received)
        return found
