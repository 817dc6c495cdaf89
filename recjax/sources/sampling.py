"""Samples the numbered batches of a run's train prompts with this process's engine."""

import functools
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Key, UInt32

from recjax.agents.agents import Agents
from recjax.config import Config
from recjax.experience.batch import Shape
from recjax.experience.group import Group
from recjax.experience.records import Record, records_of
from recjax.hub.policy import Policy
from recjax.models.drift import drifted
from recjax.rewards.pool import Grading
from recjax.rollout.collecting import Grades, row_keys, sample_groups, submit
from recjax.rollout.requests import Weights
from recjax.runtime.clocks import PhaseSeconds
from recjax.store.missing_logprobs import with_logprobs
from recjax.store.tokenize import tokenizer_name
from recjax.tasks.prompts import Prompts, batch_prompts

DROPPED_TOKENS = "dropped_tokens"
_BLOCK = 32  # consecutive batches whose random keys are computed at once


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
        name = f"{prefix}{number:06d}"
        drifted_params = self._drifted(Weights(params, version)).params
        newer_drifted = None
        if newer is not None:
            newer_drifted = functools.partial(self._newer_drifted, newer)
        if self.agents:
            key = batch_key(config.seed, number)
            self.phases.device.call()
            sampled = self.agents.sample_groups(
                self.policy,
                drifted_params,
                prompts,
                key=key,
                group_size=group_size,
                sampling=sampling,
                grading=self.grading,
                name=name,
                source=source,
                version=version,
                newer=newer_drifted,
                # Frozen seats drift as well, so that weights play alike before and after they are frozen.
                drifted=self._drifted,
            )
            self.phases.device.end()
            return sampled
        block, index = divmod(number, _BLOCK)
        drawn = config.drawn_completions
        block_keys = _block_keys(config.seed, block, count * drawn)
        groups = sample_groups(
            self.policy,
            drifted_params,
            prompts,
            keys=block_keys[index],
            group_size=drawn,
            max_tokens=config.rollout.max_completion_tokens,
            sampling=sampling,
            name=name,
            source=source,
            version=version,
            newer=newer_drifted,
            clock=self.phases.device,
        )
        if drawn > group_size:
            groups = [first_finished(group, group_size) for group in groups]
        if config.rollout.drift and config.rollout.drift.logprobs == "exact":
            groups = self._with_exact_logprobs(groups, params)
        return groups, submit(groups, prompts, self.grading)

    def _newer_drifted(self, newer: Callable[[], Weights | None]) -> Weights | None:
        """The sampler's weights if new weights have arrived, or None."""
        weights = newer()
        if weights is None:
            return None
        return self._drifted(weights)

    def _drifted(self, weights: Weights) -> Weights:
        """The sampler's weights under `rollout.drift`, which depend only on the seed, the exact weights, their version.

        Fixed noise does not depend on the version.
        """
        drift = self.config.rollout.drift
        if drift is None or drift.scale == 0:
            return weights
        key = jax.random.fold_in(jax.random.key(self.config.seed), 8)
        if not drift.fixed:
            key = jax.random.fold_in(key, weights.version)
        return weights._replace(params=drifted(weights.params, key, drift.weights, drift.scale, drift.group))

    def _with_exact_logprobs(self, groups: list[Group], params: dict) -> list[Group]:
        """The groups with log-probs of the exact weights; disturbed weights sampled them."""
        config = self.config
        count, group_size = config.own_counts
        shape = Shape(count, group_size, self.prompts.tokens.shape[1], config.rollout.max_completion_tokens)
        return with_logprobs(
            [_without_logprobs(group) for group in groups],
            shape=shape,
            policy=self.policy,
            params=params,
            sampling=config.rollout.sampling(),
            chunk=config.model.logprob_chunk,
        )

    def records(self, groups: list[Group]) -> list[Record]:
        """The completions of graded groups for a store, without those of agents that failed and got no reward."""
        records = records_of(groups, tokenizer_name(self.policy.tokenizer), datetime.now(UTC))
        if not self.agents:
            return records
        rewarded = []
        for record in records:
            completion = record.completion
            if completion.rows and completion.grade and completion.grade.reward is not None:
                rewarded.append(record)
        return rewarded


def first_finished(group: Group, count: int) -> Group:
    """The group with the `count` completions that end first if all begin together: those with the fewest tokens.

    Their metadata has the tokens of each dropped completion as `dropped_tokens`.
    """
    lengths = [completion.sampled_tokens for completion in group.completions]
    by_length = np.argsort(lengths, kind="stable").tolist()
    dropped_tokens = [lengths[place] for place in by_length[count:]]
    kept = []
    for place in sorted(by_length[:count]):
        completion = group.completions[place]
        kept.append(completion._replace(metadata={**completion.metadata, DROPPED_TOKENS: dropped_tokens}))
    return group._replace(completions=tuple(kept))


def oversampling_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Mean tokens of the completions that `first_finished` dropped, and the bias of the length; empty without any.

    The bias is the kept completions' mean number of tokens over the mean of all, minus 1.
    """
    kept = []
    dropped = []
    for group in groups:
        dropped_tokens: list[int] = []
        for completion in group.completions:
            if DROPPED_TOKENS in completion.metadata:
                kept.append(completion.sampled_tokens)
                dropped_tokens = completion.metadata[DROPPED_TOKENS]
        dropped += dropped_tokens
    if not kept:
        return {}
    return {
        "oversampling/dropped_tokens": float(np.mean(dropped)),
        "oversampling/length_bias": float(np.mean(kept) / np.mean(kept + dropped) - 1),
    }


def _without_logprobs(group: Group) -> Group:
    """The group without behavior log-probs."""
    completions = []
    for completion in group.completions:
        rows = tuple(row._replace(behavior_logprobs=None) for row in completion.rows)
        completions.append(completion._replace(rows=rows))
    return group._replace(completions=tuple(completions))


def batch_key(seed: int, number: int | Array) -> Key[Array, ""]:
    """The random key for the completions of a batch; batches count from 1."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 1), number)


@functools.lru_cache(maxsize=2)
def _block_keys(seed: int, block: int, rows: int) -> UInt32[np.ndarray, "batches batch words"]:
    """Key data for the completions of several consecutive batches.

    They are computed together; otherwise the host would wait in each step until the device, busy with the update,
    computes them.
    """
    numbers: Any = np.arange(block * _BLOCK, (block + 1) * _BLOCK)
    return row_keys(jax.vmap(functools.partial(batch_key, seed))(numbers), rows)
