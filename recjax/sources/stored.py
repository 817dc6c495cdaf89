"""Sources that read a store: one at rest, and one that another process writes."""

import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Any

from recjax.experience.group import Group, token_staleness
from recjax.experience.queue import LEFT, LOST, Arrival, Queue
from recjax.runtime import hosts
from recjax.sources.drawing import groups_at
from recjax.sources.setup import Setup
from recjax.store.following import UNUSABLE, Follower
from recjax.store.missing_logprobs import with_logprobs
from recjax.store.store import Store
from recjax.training import schedule
from recjax.training.learner import Learner
from recjax.training.run import Source, State

POLL_SECONDS = 0.5  # interval between reads of a followed store while a step waits
LINE_SECONDS = 10.0  # interval between log lines while a step waits

logger = logging.getLogger(__name__)


class StoreSource(Source):
    """The groups of a store at rest join each batch; nothing else arrives. The base of all other sources."""

    def __init__(self, setup: Setup, learner: Learner):
        """Takes the run's data, and the learner that computes log-probs which completions of a store lack."""
        self._setup = setup
        self._config = setup.config
        self._learner = learner
        self._unrecorded: list[list[Group]] = []

    def completed(self, state: State, groups: list[Group], step: int) -> list[Group]:
        """The groups from the queue, then those of the store, which depend only on the step.

        With `missing_logprobs: current`, the policy scores them here, before their first update, and not when they
        arrive: a group may wait for many updates.
        """
        config = self._config
        count = config.stored_groups
        if count:
            # They skip the queue: their rewards are known, and the checkpoint need not hold them.
            batch = schedule.batch_of(step, config.training.updates)
            with self._setup.phases.phase("sample"):
                assert self._setup.stored is not None
                groups = groups + groups_at(self._setup.stored.groups, count, batch, config.seed)
        return self._with_missing_logprobs(state, groups)

    def record(self, batches: Sequence[list[Group]]) -> None:
        """Takes graded batches for the store of a run that records."""
        if self._config.record_file and hosts.is_first():
            self._unrecorded += batches

    def write_record(self) -> None:
        """Adds the batches that `record` has taken to the store."""
        batches = self._unrecorded
        self._unrecorded = []
        if not batches:
            return
        with Store(self._config.record_file, create=True) as store:
            for groups in batches:
                records = self._setup.sampler.records(groups)
                # A batch that was in the queue at the checkpoint is in the record already.
                if records and not store.numbers("id", [records[0].completion.id]):
                    store.append(records)

    def _with_missing_logprobs(self, state: State, groups: list[Group]) -> list[Group]:
        """Fills in log-probs of the current parameters if `experience.missing_logprobs` is `current`."""
        config = self._config
        if config.experience is None or config.experience.missing_logprobs != "current":
            return groups
        with self._setup.phases.phase("sample"):
            params = self._learner.current_params(state)
            sampling = config.rollout.sampling()
            shape = self._setup.shape
            self._setup.phases.device.call()
            groups = with_logprobs(groups, shape, self._setup.policy, params, sampling, config.model.logprob_chunk)
            self._setup.phases.device.end()
            return groups


class FollowedSource(StoreSource):
    """A store that another process writes; a step waits until it has enough groups, and takes each group once."""

    endless = True

    def opened(self, state: State) -> contextlib.AbstractContextManager:
        """Continues after the completions that were taken before the checkpoint."""
        self._follower = Follower(self._config, self._setup.policy, state.totals["run"], state.source)
        return contextlib.nullcontext()

    def begin_step(self, state: State) -> None:
        """Begins to count the groups and seconds of a step."""
        self._admitted = 0
        self._before = state.queue.counts
        self._began = time.monotonic()
        self._said = time.monotonic() - LINE_SECONDS + 1

    def poll(self, state: State, step: int, wait: bool) -> list[Arrival]:
        """Takes groups, at most as many as the step lacks, with the oldest weights first."""
        follower = self._follower
        count, _ = self._config.own_counts
        ready = len(state.queue.ready)
        # A step adds one batch to a replay buffer, and more only if it has too few groups. Without replay, groups stay
        # in the store until their turn.
        room = count - (min(ready, self._admitted) if self._setup.settings.replay else ready)
        if wait and time.monotonic() - self._said >= LINE_SECONDS:
            self._said = time.monotonic()
            waiting, completions, pending = follower.waiting
            rewards = f"{waiting} groups wait: {pending} of their {completions} completions have no reward yet"
            removed = state.queue.counts - self._before
            names = [name for name in (*LOST, *LEFT, *UNUSABLE) if removed[name] and name != "used_up"]
            left_out = ", ".join(f"experience/left_out/{name} {removed[name]}" for name in names)
            line = f"step {step} waits for {follower.name}: {ready} of {count} groups are ready; {rewards}"
            if left_out:
                logger.warning("%s; the run has left out others since the last step: %s", line, left_out)
            else:
                logger.info("%s", line)
        with self._setup.phases.phase("sample"):
            time.sleep(POLL_SECONDS if wait else 0)
            arrival = follower.poll(step, room)
        self._admitted = self._admitted + len(arrival.groups)
        self._waited_seconds = time.monotonic() - self._began
        return [arrival]

    def state(self) -> dict[str, Any]:
        """The completions that were taken."""
        return self._follower.state()

    def metrics(self, queue: Queue, groups: Sequence[Group], step: int) -> dict[str, float]:
        """The store's completions that were not taken, and the staleness of the step's tokens."""
        of_tokens = token_staleness(groups, step)
        waiting, completions, pending = self._follower.waiting
        return {
            **{f"experience/left_out/{reason}": queue.counts[reason] for reason in UNUSABLE},
            **({} if of_tokens is None else {"follow/token_staleness": of_tokens}),
            "follow/waited_seconds": self._waited_seconds,
            "follow/rewarded_groups": self._follower.rewarded,
            "follow/waiting_groups": waiting,
            "follow/waiting_completions": completions,
            "follow/pending_completions": pending,
        }
