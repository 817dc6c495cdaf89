"""The source whose groups the policy samples: in this process, in generators or on a server."""

import contextlib
import functools
import logging
import time
from collections.abc import Sequence
from typing import Any

from recjax.experience.group import Group, token_staleness
from recjax.experience.queue import Arrival, Queue, queued_versions
from recjax.sources.completing import complete_batch
from recjax.sources.drawing import mixed
from recjax.sources.generators import BATCHES_PER_GENERATOR
from recjax.sources.policy_sampler import PolicySampler
from recjax.sources.recording import BatchRecorder
from recjax.sources.sampling import oversampling_metrics
from recjax.sources.setup import Setup
from recjax.tasks.problems import question_of
from recjax.training import schedule
from recjax.training.learner import Learner
from recjax.training.run import State

logger = logging.getLogger(__name__)


class PolicySource(contextlib.AbstractContextManager):
    """The policy samples numbered batches: in this process, in generators or on a server.

    A synchronous run waits for each batch in the round in which it issues it. An asynchronous run trains meanwhile.
    See `recjax.training.run.Source`.

    Attributes:
        sampler: samples the batches.
    """

    endless = False

    def __init__(self, setup: Setup, learner: Learner, sampler: PolicySampler):
        """Takes the run's data, and the learner that has the weights; opens no sampler yet."""
        self.sampler = sampler
        self._setup = setup
        self._config = setup.config
        self._learner = learner
        self._recorder = BatchRecorder(setup)
        self._is_async = setup.config.regime.mode == "async"
        self._warns_of_avoided = True  # once in a run

    def __enter__(self) -> "PolicySource":
        """Opens the sampler."""
        self.sampler.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        """Closes the sampler."""
        self.sampler.__exit__(*exception)

    def restore(self, state: State) -> None:
        """Issues the batches again that were in flight at the checkpoint.

        Batches that the run sampled after the checkpoint leave the record, because it samples them again.
        """
        in_flight = state.source.get("in_flight", [])
        self._recorder.restore(state.queue.counts["batches"] + len(in_flight), in_flight)
        if self._is_async:
            self._offer_weights(state)
        for number in in_flight:
            self.sampler.issue(number)

    def _offer_weights(self, state: State) -> None:
        self.sampler.offer_weights(functools.partial(self._learner.behavior_params, state), state.version)

    def begin_step(self, state: State) -> None:
        """Starts to count the seconds for which a step waits."""
        self._waited_seconds = 0.0

    def poll(self, state: State, step: int, wait: bool) -> list[Arrival]:
        """Issues the batches that are due; returns finished ones, in a synchronous run all that it issued."""
        queue = state.queue
        if not wait:  # in the second poll of a round the step waits, and nothing has changed since the first one
            self._warn_of_avoided_problems(queue)
            self._offer_weights(state)
            self._issue_due_batches(state, step)
        started = time.monotonic()
        with self._setup.phases.phase("sample"):
            batches = self.sampler.receive(wait)
            while self.sampler.in_flight and not self._is_async:
                batches += self.sampler.receive(wait=True)
        if wait:
            self._waited_seconds += time.monotonic() - started
        arrivals = []
        for number, (groups, grades) in batches:
            is_early = not self._is_async and self._rounds_before(number) >= queue.round
            arrivals.append(Arrival(self._with_stored_completions(groups, number), grades, number, early=is_early))
        return arrivals

    def _issue_due_batches(self, state: State, step: int) -> None:
        rates = None
        if self._config.task.curriculum:
            rates = state.queue.rates
        number = state.queue.counts["batches"] + len(self.sampler.in_flight) + 1
        while self._is_due(state, number, step):
            self.sampler.issue(number, rates)
            number += 1

    def _rounds_before(self, number: int) -> int:
        """Number of rounds of a synchronous run before the one that samples a batch."""
        return (number - 1) * self._setup.settings.sampling_interval

    def _with_stored_completions(self, groups: list[Group], number: int) -> list[Group]:
        """Adds stored completions of the same prompts to a batch's groups, if the run mixes them."""
        others = self._setup.others
        if not others:
            return groups
        _, sampled_count = self._config.own_counts
        stored_count = self._config.rollout.group_size - sampled_count
        with self._setup.phases.phase("sample"):
            # The choice depends on the batch's number, not on the step, so that a late batch gets the same completions.
            return mixed(groups, others, stored_count, number, self._config.seed)

    def _is_due(self, state: State, number: int, step: int) -> bool:
        """True if a batch should be sampled now."""
        config = self._config
        regime = config.regime
        updates = config.training.updates
        if not self._is_async:
            # The next round's batch is sampled during the grading of this one, if both use the same weights. The grades
            # decide which problems a curriculum draws next.
            batch = schedule.batch_of(step, updates)
            last_batch = schedule.batch_of(config.training.steps, updates)
            is_ahead = schedule.samples_ahead(batch, last_batch, regime) and config.task.curriculum is None
            return self._rounds_before(number) < state.queue.round + is_ahead
        if len(self.sampler.in_flight) >= BATCHES_PER_GENERATOR * regime.generators:
            return False
        count, _ = config.own_counts
        ahead = self._versions_ahead(state.queue)
        interval = self._setup.settings.sampling_interval
        batches_ahead = len(ahead) // count
        first_step = step + batches_ahead * interval * updates  # the first step that trains on the batch
        if first_step > config.training.steps:
            return False
        versions = [*ahead, state.version]
        if not schedule.in_time(versions, step, count, regime, updates):
            return False
        return schedule.is_wanted(
            number,
            round_=state.queue.round,
            every=interval,
            version=state.version,
            step=step,
            regime=regime,
            updates=updates,
        )

    def must_wait(self, queue: Queue, step: int) -> bool:
        """True if a batch in flight would exceed `regime.max_staleness` at its turn after `step`."""
        if not self.sampler.in_flight:
            return False
        updates = self._config.training.updates
        count, _ = self._config.own_counts
        ahead = self._versions_ahead(queue)
        return not schedule.in_time(ahead, step + updates, count, self._config.regime, updates)

    def _versions_ahead(self, queue: Queue) -> list[int]:
        """Policy versions of the groups in the queue and in flight."""
        count, _ = self._config.own_counts
        versions = list(queued_versions(queue, self._setup.settings))
        for version in self.sampler.in_flight.values():
            versions += [version] * count
        return versions

    def completed(self, state: State, groups: list[Group], step: int) -> list[Group]:
        """The groups of a step's batch; see `complete_batch`."""
        return complete_batch(self._setup, self._learner, state, groups, step)

    def record(self, batches: Sequence[list[Group]]) -> None:
        """Takes graded batches for the store of a run that records."""
        self._recorder.take(batches)

    def write_record(self) -> None:
        """Adds the batches that `record` has taken to the store."""
        self._recorder.write()

    def state(self) -> dict[str, Any]:
        """The numbers of the batches in flight."""
        return {"in_flight": list(self.sampler.in_flight)}

    def _warn_of_avoided_problems(self, queue: Queue) -> None:
        """Logs the problems whose completions got no reward, once; the curriculum rarely draws them again."""
        if not self._warns_of_avoided or None not in queue.rates.values():
            return
        self._warns_of_avoided = False
        train = self._setup.train
        avoided = []
        for key, problem in zip(train.keys, train.problems, strict=True):
            if queue.rates.get(key, 0.0) is None:
                avoided.append(question_of(problem.prompt))
        assert self._config.task.curriculum is not None
        logger.warning(
            "task.curriculum: no completion of %d problems got a reward: %.200s; the curriculum draws such problems"
            " only by its share task.curriculum.uniform = %g. metrics.jsonl counts the reasons: grading/… and"
            " agent/…",
            len(avoided),
            ", ".join(map(repr, avoided)),
            self._config.task.curriculum.uniform,
        )

    def metrics(self, queue: Queue, groups: Sequence[Group], step: int) -> dict[str, float]:
        """The sampler's metrics; the curriculum's pass rates; of asynchronous runs, waits and the tokens' staleness."""
        measured = oversampling_metrics(groups)
        if self._is_async:
            measured["generators/waited_seconds"] = self._waited_seconds
            measured["generators/in_flight"] = len(self.sampler.in_flight)
        else:
            rates = [rate for rate in queue.rates.values() if rate is not None]
            if rates:
                measured["curriculum/problems"] = len(rates)
                measured["curriculum/pass_rate"] = sum(rates) / len(rates)
        measured.update(self.sampler.counts)
        if self._is_async:
            staleness = token_staleness(groups, step)
            if staleness is not None:
                measured["generators/token_staleness"] = staleness
        return measured
