"""The source of runs whose batches come from a store at rest."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from recjax.experience.group import Group
from recjax.experience.queue import Arrival, Queue
from recjax.training.run import State


class StoreSource(contextlib.AbstractContextManager):
    """Groups at rest make up each batch; none arrive in the queue. See `recjax.training.run.Source`."""

    endless = False

    def __init__(self, complete: Callable[[State, list[Group], int], list[Group]]):
        """Takes the function that returns a step's batch; see `Source.completed`."""
        self._complete = complete

    def __exit__(self, *exception: object) -> None:
        """Does nothing."""

    def restore(self, state: State) -> None:
        """Does nothing, because a step's number determines its batch."""

    def begin_step(self, state: State) -> None:
        """Does nothing."""

    def poll(self, state: State, step: int, wait: bool) -> list[Arrival]:
        """Returns no groups."""
        return []

    def must_wait(self, queue: Queue, step: int) -> bool:
        """Returns False, because no groups are still to come."""
        return False

    def completed(self, state: State, groups: list[Group], step: int) -> list[Group]:
        """The groups of a step's batch."""
        return self._complete(state, groups, step)

    def record(self, batches: Sequence[list[Group]]) -> None:
        """Records nothing: the run samples no completions."""

    def write_record(self) -> None:
        """Writes nothing."""

    def state(self) -> dict[str, Any]:
        """Returns no data, see `restore`."""
        return {}

    def metrics(self, queue: Queue, groups: Sequence[Group], step: int) -> dict[str, float]:
        """Returns no metrics."""
        return {}
