"""The source of runs that follow a store while another process writes it."""

import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Any

from recjax.experience.group import Group, token_staleness
from recjax.experience.queue import LEFT, LOST, Arrival, Queue
from recjax.sources.completing import complete_batch
from recjax.sources.setup import Setup
from recjax.store.following import UNUSABLE, Follower
from recjax.training.learner import Learner
from recjax.training.run import State

POLL_SECONDS = 0.5  # interval between reads of the store while a step waits
LINE_SECONDS = 10.0  # interval between log lines while a step waits

logger = logging.getLogger(__name__)


class FollowedSource(contextlib.AbstractContextManager):
    """A store that another process writes. A step waits until it has enough groups, and takes each group once.

    See `recjax.training.run.Source`.
    """

    endless = True

    def __init__(self, setup: Setup, learner: Learner):
        """Takes the run's data, and the learner that computes log-probs which completions of a store lack."""
        self._setup = setup
        self._config = setup.config
        self._learner = learner

    def __exit__(self, *exception: object) -> None:
        """The store's connection ends with the follower."""

    def restore(self, state: State) -> None:
        """Continues after the completions that were taken before the checkpoint."""
        self._follower = Follower(self._config, self._setup.policy, state.totals["run"], state.source)

    def begin_step(self, state: State) -> None:
        """Starts to count the groups and seconds of a step."""
        self._admitted = 0
        self._counts_before = state.queue.counts
        self._started = time.monotonic()
        # The first line comes after one second of waiting.
        self._last_line = time.monotonic() - LINE_SECONDS + 1

    def poll(self, state: State, step: int, wait: bool) -> list[Arrival]:
        """Takes groups, at most as many as the step lacks, with the oldest weights first."""
        count, _ = self._config.own_counts
        ready = len(state.queue.ready)
        # A step adds one batch to a replay buffer, and more only if it has too few groups. Without replay, groups stay
        # in the store until their turn.
        if self._setup.settings.replay:
            missing = count - min(ready, self._admitted)
        else:
            missing = count - ready
        # Of enough groups, the mean staleness may be above its limit, until newer ones take the places of the stalest.
        missing = max(missing, int(wait))
        if wait and time.monotonic() - self._last_line >= LINE_SECONDS:
            self._last_line = time.monotonic()
            self._log_waiting(state.queue, step)
        with self._setup.phases.phase("sample"):
            if wait:
                time.sleep(POLL_SECONDS)
            arrival = self._follower.poll(step, missing)
        self._admitted += len(arrival.groups)
        self._waited_seconds = time.monotonic() - self._started
        return [arrival]

    def _log_waiting(self, queue: Queue, step: int) -> None:
        follower = self._follower
        count, _ = self._config.own_counts
        waiting, completions, pending = follower.waiting
        line = (
            f"step {step} waits for {follower.name}: {len(queue.ready)} of {count} groups are ready;"
            f" {waiting} groups wait: {pending} of their {completions} completions have no reward yet"
        )
        removed = queue.counts - self._counts_before
        reasons = [reason for reason in LOST + LEFT + UNUSABLE if removed[reason] and reason != "used_up"]
        if reasons:
            left_out = ", ".join(f"experience/left_out/{reason} {removed[reason]}" for reason in reasons)
            logger.warning("%s; the run has left out others since the last step: %s", line, left_out)
        else:
            logger.info("%s", line)

    def must_wait(self, queue: Queue, step: int) -> bool:
        """False: groups in the store have no turn that they could miss."""
        return False

    def completed(self, state: State, groups: list[Group], step: int) -> list[Group]:
        """The groups of a step's batch; see `complete_batch`."""
        return complete_batch(self._setup, self._learner, state, groups, step)

    def record(self, batches: Sequence[list[Group]]) -> None:
        """Records nothing: the groups are in the followed store."""

    def write_record(self) -> None:
        """Writes nothing."""

    def state(self) -> dict[str, Any]:
        """The completions that were taken."""
        return self._follower.state()

    def metrics(self, queue: Queue, groups: Sequence[Group], step: int) -> dict[str, float]:
        """The store's completions that were not taken, and the staleness of the step's tokens."""
        measured: dict[str, float] = {f"experience/left_out/{reason}": queue.counts[reason] for reason in UNUSABLE}
        staleness = token_staleness(groups, step)
        if staleness is not None:
            measured["follow/token_staleness"] = staleness
        waiting, completions, pending = self._follower.waiting
        measured["follow/waited_seconds"] = self._waited_seconds
        measured["follow/rewarded_groups"] = self._follower.rewarded
        measured["follow/waiting_groups"] = waiting
        measured["follow/waiting_completions"] = completions
        measured["follow/pending_completions"] = pending
        return measured
