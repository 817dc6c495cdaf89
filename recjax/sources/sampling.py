"""Samples numbered batches: in the trainer, in a generator process, or for a store."""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Array, Key, UInt32

from recjax.agents.agents import Agents
from recjax.config import Config
from recjax.experience.batch import Shape
from recjax.experience.group import Grade, Group
from recjax.experience.queue import ToCome
from recjax.experience.records import Record, records_of
from recjax.hub.policy import Policy
from recjax.models.drift import drifted
from recjax.models.trainable import combine
from recjax.rewards.pool import Grading
from recjax.rollout.collecting import Grades, row_keys, sample_groups, submit
from recjax.rollout.requests import Weights
from recjax.runtime.clocks import PhaseSeconds
from recjax.store.missing_logprobs import with_logprobs
from recjax.store.tokenize import tokenizer_name
from recjax.tasks.prompts import Prompts, batch_prompts

logger = logging.getLogger(__name__)
_TOGETHER = 32  # batches whose keys are made at once

SampledBatch = tuple[list[Group], Sequence[Grade] | ToCome]  # groups and their grades, which may still be computed


@runtime_checkable
class PolicySampler(Protocol):
    """Samples numbered batches for a source; a context for the time of a run.

    Prompts and random keys of a batch follow from its number. A batch begins with the weights of the last
    `replace_weights` before its `issue`; a sampler may use newer weights for its later tokens, or if it has to sample
    the batch again. `receive` gives each issued batch once, in any order, and until then it is in flight. A checkpoint
    holds the numbers of these batches, and a resumed run issues them again.

    All processes of a trainer make the same calls in the same order and receive the same batches.

    Attributes:
        in_flight: batches that were issued and not received: number to version of the weights, in order of issue.
        counts: the sampler's own metrics, by name, while it is open.
    """

    @property
    def in_flight(self) -> Mapping[int, int]:
        """See the class."""

    if TYPE_CHECKING:

        @property
        def counts(self) -> Mapping[str, float]: ...

        def __enter__(self) -> Any: ...

        def __exit__(self, *exception: object) -> Any: ...

    def replace_weights(self, version: int, weights: Callable[[], dict]) -> None:
        """Sets the weights of batches issued from here on.

        Args:
            version: their policy version; a sampler that has this version already need not call `weights`.
            weights: returns the trained parameters in the compute dtype, which the next update may overwrite. Before
                that, a sampler copies them, or has used them and forgets them.
        """

    def issue(self, number: int, rates: Mapping[str, float | None] | None = None) -> None:
        """Takes on a batch, and returns without waiting for it.

        Args:
            rates: see `BatchSampler.batch_prompts`.
        """

    def receive(self, wait: bool) -> list[tuple[int, SampledBatch]]:
        """The number and content of every batch that is done.

        Args:
            wait: True to wait for at least one batch if any is in flight.
        Raises:
            UserError: the sampler cannot sample a batch that is in flight.
        """


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
        names: dict[str, Any] = {"name": f"{prefix}{number:06d}", "source": source, "version": version, "newer": newer}
        if self.agents:
            key = batch_key(config.seed, number)
            self.phases.device.call()
            # Frozen seats drift as well, so that weights play alike before and after they are frozen.
            sampled = self.agents.sample_groups(
                self.policy,
                params,
                prompts,
                key,
                group_size,
                sampling,
                self.grading,
                drifted=self._drifted,
                **names,
            )
            self.phases.device.end()
            return sampled
        keys = _row_keys(config.seed, number // _TOGETHER, count * group_size)[number % _TOGETHER]
        longest = config.rollout.max_completion_tokens
        names["clock"] = self.phases.device
        groups = sample_groups(self.policy, params, prompts, keys, group_size, longest, sampling, **names)
        if config.rollout.drift and config.rollout.drift.logprobs == "exact":
            groups = self._with_exact_logprobs(groups, exact)
        return groups, submit(groups, prompts, self.grading)

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
        return [
            record
            for record in records
            if (completion := record.completion).rows and completion.grade and completion.grade.reward is not None
        ]


class LocalSampler(AbstractContextManager):
    """A `PolicySampler` in this process: it samples in `receive`, after which nothing is in flight."""

    counts: Mapping[str, float] = {}

    def __init__(self, sampler: BatchSampler, frozen: dict, sample: Callable = BatchSampler.sample):
        """Takes the parameters that are not trained, in the compute dtype.

        Args:
            sample: a function that samples instead of `BatchSampler.sample`, with its first four arguments and results;
                with a curriculum also `rates`.
        """
        self.sample = sample
        self._sampler = sampler
        self._frozen = frozen
        self._named: dict[int, Mapping] = {}
        self.in_flight: dict[int, int] = {}

    def __exit__(self, *exception: object) -> None:
        """A batch ends before `receive` returns, so nothing remains to stop."""

    def replace_weights(self, version: int, weights: Callable[[], dict]) -> None:
        """See `PolicySampler`."""
        self._version = version
        self._weights = weights

    def issue(self, number: int, rates: Mapping[str, float | None] | None = None) -> None:
        """See `PolicySampler`."""
        self.in_flight[number] = self._version
        self._named[number] = {} if rates is None else {"rates": rates}

    def receive(self, wait: bool) -> list[tuple[int, SampledBatch]]:
        """Samples all issued batches; their grades may still be computed."""
        weights = self._weights
        self._weights = None  # the update needs the memory of the weights
        params = {}
        if self.in_flight:
            assert weights is not None
            params = combine(weights(), self._frozen)
        received = [
            (number, self.sample(self._sampler, params, version, number, **self._named.pop(number)))
            for number, version in self.in_flight.items()
        ]
        self.in_flight = {}
        return received


def batch_key(seed: int, number: int | Array) -> Key[Array, ""]:
    """The random key for the completions of a batch; batches count from 1."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 1), number)


@functools.lru_cache(maxsize=2)
def _row_keys(seed: int, block: int, rows: int) -> UInt32[np.ndarray, "batches batch words"]:
    """Key data for the completions of several consecutive batches.

    They are computed together, as the host would otherwise wait for them behind the running update in each step.
    """
    numbers: Any = np.arange(block * _TOGETHER, (block + 1) * _TOGETHER)
    return row_keys(jax.vmap(functools.partial(batch_key, seed))(numbers), rows)
