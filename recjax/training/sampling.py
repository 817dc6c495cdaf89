"""Samples numbered batches: in the trainer, in a generator process, or for a store."""

import functools
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Key, UInt32

from recjax.config import Config
from recjax.experience.batch import Shape
from recjax.experience.group import Group
from recjax.experience.records import Record, records_of
from recjax.experience.sources import with_logprobs
from recjax.experience.tokenize import tokenizer_name
from recjax.hub.policy import Policy
from recjax.models.drift import drifted
from recjax.rollout.agents import Agents
from recjax.rollout.collecting import Grades, row_keys, sample_groups, submit
from recjax.rollout.requests import Weights
from recjax.tasks.grading.pool import Grading
from recjax.tasks.prompts import Prompts, batch_prompts
from recjax.training.metrics import PhaseSeconds

_TOGETHER = 32  # batches whose keys are made at once


class BatchSampler(NamedTuple):
    """Samples numbered batches of a policy.

    prompts: the prompts to draw from.
    grading: open grading pool.
    phases: the clock of the phases.
    agents: open agents; None if the config names none.
    """

    config: Config
    policy: Policy
    prompts: Prompts
    grading: Grading
    phases: PhaseSeconds
    agents: Agents | None = None

    def batch_prompts(self, number: int, rates: Mapping[str, float | None] | None = None) -> Prompts:
        """The prompts of a batch, one for each group, or for each agent with its seats.

        Args:
            rates: see `recjax.tasks.prompts.batch_prompts`.
        """
        count, _ = self.config.own_counts
        seats = len(self.config.task.trained_seats)
        return batch_prompts(self.prompts, self.config, count // seats, number, rates)

    def sample(
        self,
        params: dict,
        version: int,
        number: int,
        prefix: str = "",
        source: str = "policy",
        newer: Callable[[], Weights | None] | None = None,
        rates: Mapping[str, float | None] | None = None,
    ) -> tuple[list[Group], Grades]:
        """Samples the groups of a batch, which depend only on its number and the parameters.

        Args:
            params: all parameters, in the compute dtype.
            version: their policy version.
            prefix: prefix of the completions' ids, before the batch's number.
            source: the completions' source.
            newer: returns newer weights between rounds of tokens, if some have arrived; None: no new weights.
            rates: see `batch_prompts`.
        Returns:
            The groups, and their pending grades.
        """
        config = self.config
        count, group_size = config.own_counts
        sampling = config.rollout.sampling()
        prompts = self.batch_prompts(number, rates)
        exact = params
        params = self._drifted(Weights(params, version)).params
        arrived = newer or (lambda: None)
        newer = newer and (lambda: (weights := arrived()) and self._drifted(weights))
        names = {"name": f"{prefix}{number:06d}", "source": source, "version": version, "newer": newer}
        with self.phases.phase("sample"):
            if self.agents:
                key = batch_key(config.seed, number)
                return self.agents.sample_groups(
                    self.policy, params, prompts, key, group_size, sampling, self.grading, **names
                )
            keys = _row_keys(config.seed, number // _TOGETHER, count * group_size)[number % _TOGETHER]
            longest = config.rollout.max_completion_tokens
            groups = sample_groups(self.policy, params, prompts, keys, group_size, longest, sampling, **names)
            if config.rollout.drift and config.rollout.drift.logprobs == "exact":
                groups = self._with_exact_logprobs(groups, exact)
            return groups, submit(groups, prompts, self.grading)

    def _drifted(self, weights: Weights) -> Weights:
        """The sampler's weights under `rollout.drift`, which depend only on the exact weights and their version."""
        drift = self.config.rollout.drift
        if drift is None or drift.scale == 0:
            return weights
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.config.seed), 8), weights.version)
        return weights._replace(params=drifted(weights.params, key, drift.weights, drift.scale))

    def _with_exact_logprobs(self, groups: list[Group], params: dict) -> list[Group]:
        """The groups with the log-probs of the exact weights instead of those that sampled."""
        without = [
            group._replace(
                completions=tuple(
                    completion._replace(rows=tuple(row._replace(behavior_logprobs=None) for row in completion.rows))
                    for completion in group.completions
                )
            )
            for group in groups
        ]
        config = self.config
        count, group_size = config.own_counts
        shape = Shape(count, group_size, self.prompts.tokens.shape[1], config.rollout.max_completion_tokens)
        sampling = config.rollout.sampling()
        return with_logprobs(without, shape, self.policy, params, sampling, config.model.logprob_chunk)

    def records(self, groups: list[Group]) -> list[Record]:
        """The completions of graded groups for a store, without those of agents that failed and got no reward."""
        records = records_of(groups, tokenizer_name(self.policy.tokenizer), datetime.now(UTC))
        if not self.agents:
            return records
        pairs = [(record, record.completion) for record in records]
        return [
            record
            for record, completion in pairs
            if completion.rows and completion.grade and completion.grade.reward is not None
        ]


def batch_key(seed: int, number: int | Array) -> Key[Array, ""]:
    """The random key for the completions of a batch; batches count from 1."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 1), number)


@functools.lru_cache(maxsize=2)
def _row_keys(seed: int, block: int, rows: int) -> UInt32[np.ndarray, "batches batch words"]:
    """Key data for the completions of several consecutive batches.

    They are computed together, as the host would otherwise wait for them behind the running update in each step.
    """
    numbers = np.arange(block * _TOGETHER, (block + 1) * _TOGETHER)
    return row_keys(jax.vmap(functools.partial(batch_key, seed))(numbers), rows)
