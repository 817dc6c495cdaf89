"""The source whose groups the policy samples: in this process, in generators or on a server."""

import contextlib
import functools
import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

from recjax.experience.group import Group, token_staleness
from recjax.experience.queue import Arrival, Queue, queued_versions
from recjax.runtime import hosts
from recjax.sources.drawing import mixed
from recjax.sources.generators import AT_A_TIME
from recjax.sources.sampling import PolicySampler
from recjax.sources.setup import Setup
from recjax.sources.stored import StoreSource
from recjax.store.store import Store
from recjax.tasks.problems import question_of
from recjax.training import schedule
from recjax.training.learner import Learner
from recjax.training.run import State

logger = logging.getLogger(__name__)


class PolicySource(StoreSource):
    """The policy samples numbered batches: in this process, in generators or on a server.

    A synchronous run waits for each batch in the round in which it issues it. An asynchronous run trains meanwhile.

    Attributes:
        sampler: samples the batches.
    """

    _warns = True  # of problems that a curriculum avoids, once

    def __init__(self, setup: Setup, learner: Learner, sampler: PolicySampler):
        """Opens no sampler yet."""
        super().__init__(setup, learner)
        self.sampler = sampler
        self._is_async = setup.config.regime.mode == "async"

    @contextlib.contextmanager
    def opened(self, state: State) -> Iterator[None]:
        """Opens the sampler, and issues the batches again that were in flight at the checkpoint.

        Batches that the run sampled after the checkpoint leave the record, as it samples them again, maybe otherwise.
        """
        in_flight = state.source.get("in_flight", [])
        with self.sampler:
            issued = state.queue.counts["batches"] + len(in_flight)
            record = self._config.record_file
            if record and issued and hosts.is_first() and not record.exists():
                logger.warning("%s is gone; the record has only batches after number %d", record, issued)
            elif record and hosts.is_first() and record.exists():
                with Store(record, create=True) as store:
                    batches = ((number, int(name.split("/")[0])) for name, (number,) in store.numbers("id").items())
                    store.delete([number for number, batch in batches if batch > issued or batch in in_flight])
            if self._is_async:
                self.sampler.replace_weights(state.version, functools.partial(self._learner.behavior_params, state))
            for number in in_flight:
                self.sampler.issue(number)
            del state  # a reference would keep its weights in memory during the whole run
            yield

    def begin_step(self, state: State) -> None:
        """Begins to count the seconds for which a step waits."""
        self._waited_seconds = 0.0

    def poll(self, state: State, step: int, wait: bool) -> list[Arrival]:
        """Issues the batches that are due; returns finished ones, in a synchronous run all that it issued."""
        queue = state.queue
        sampler = self.sampler
        if not wait:  # in the second poll of a round the step waits, and nothing has changed since the first one
            self._warn_of_avoided_problems(queue)
            sampler.replace_weights(state.version, functools.partial(self._learner.behavior_params, state))
            rates = queue.rates if self._config.task.curriculum else None
            number = queue.counts["batches"] + len(sampler.in_flight) + 1
            while self._is_due(state, number, step):
                sampler.issue(number, rates)
                number += 1
        began = time.monotonic()
        with self._setup.phases.phase("sample"):
            batches = sampler.receive(wait)
            while sampler.in_flight and not self._is_async:
                batches += sampler.receive(wait=True)
        self._waited_seconds += time.monotonic() - began if wait else 0.0
        arrivals = []
        others = self._setup.others
        for number, (groups, grades) in batches:
            if others:
                _, sampled_count = self._config.own_counts
                stored_count = self._config.rollout.group_size - sampled_count
                # By the batch's number, not the step, so that a batch that arrives late gets the same completions.
                with self._setup.phases.phase("sample"):
                    groups = mixed(groups, others, stored_count, number, self._config.seed)
            is_early = not self._is_async and (number - 1) * self._setup.settings.sampling_interval >= queue.round
            arrivals.append(Arrival(groups, grades, number, early=is_early))
        return arrivals

    def _is_due(self, state: State, number: int, step: int) -> bool:
        """True if a batch should be sampled now."""
        config = self._config
        regime = config.regime
        updates = config.training.updates
        interval = self._setup.settings.sampling_interval
        if not self._is_async:
            # The next round's batch is sampled during the grading of this one, if both use the same weights.
            batches = schedule.batch_of(config.training.steps, updates)
            is_ahead = schedule.samples_ahead(schedule.batch_of(step, updates), batches, regime)
            return (number - 1) * interval < state.queue.round + is_ahead
        if len(self.sampler.in_flight) >= AT_A_TIME * regime.generators:
            return False
        count, _ = config.own_counts
        ahead = self._versions_ahead(state.queue)
        # A batch whose turn comes after the last step, or too late for its version, is not sampled.
        has_turn = step + len(ahead) // count * interval * updates <= config.training.steps
        has_turn = has_turn and schedule.in_time([*ahead, state.version], step, count, regime, updates)
        due = number, state.queue.round, interval, state.version, step
        return has_turn and schedule.is_wanted(*due, regime, updates)

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
        coming = [version for version in self.sampler.in_flight.values() for _ in range(count)]
        return [*queued_versions(queue, self._setup.settings), *coming]

    def state(self) -> dict[str, Any]:
        """The numbers of the batches in flight."""
        return {"in_flight": [*self.sampler.in_flight]}

    def _warn_of_avoided_problems(self, queue: Queue) -> None:
        """Logs the problems whose completions got no reward, once; the curriculum rarely draws them again."""
        if not self._warns or None not in queue.rates.values():
            return
        self._warns = False
        avoided = [
            question_of(problem.prompt)
            for key, problem in zip(self._setup.train.keys, self._setup.train.problems, strict=True)
            if queue.rates.get(key, 0.0) is None
        ]
        assert self._config.task.curriculum is not None
        logger.warning(
            "task.curriculum: no completion of %d problems got a reward: %.200s; the curriculum draws such problems"
            " only by its share task.curriculum.uniform = %g. metrics.jsonl counts the reasons: grading/… and"
            " agent/…",
            *(len(avoided), ", ".join(map(repr, avoided)), self._config.task.curriculum.uniform),
        )

    def metrics(self, queue: Queue, groups: Sequence[Group], step: int) -> dict[str, float]:
        """The sampler's metrics; the curriculum's pass rates; of asynchronous runs, waits and the tokens' staleness."""
        rates = [rate for rate in queue.rates.values() if rate is not None]
        measured = {"curriculum/problems": len(rates), "curriculum/pass_rate": sum(rates) / len(rates)} if rates else {}
        if not self._is_async:
            return {**measured, **self.sampler.counts}
        of_tokens = token_staleness(groups, step)
        return {
            "generators/waited_seconds": self._waited_seconds,
            "generators/in_flight": len(self.sampler.in_flight),
            **self.sampler.counts,
            **({} if of_tokens is None else {"generators/token_staleness": of_tokens}),
        }
