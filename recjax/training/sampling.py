"""Samples numbered batches: in the trainer, in a generator process, or for a store."""

import functools
import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Key, UInt32
from transformers import PreTrainedTokenizerBase

from recjax.config import Config, RolloutConfig
from recjax.experience.group import Group
from recjax.experience.records import Record, records_of
from recjax.experience.tokenize import tokenizer_name
from recjax.hub.policy import Policy
from recjax.rollout.agents import Agents
from recjax.rollout.collecting import Grades, row_keys, sample_groups, submit
from recjax.rollout.requests import Weights
from recjax.tasks.grading.pool import Grading
from recjax.tasks.loading import require_enough
from recjax.tasks.problems import Task
from recjax.tasks.prompts import Prompts, batch_prompts, encode_problems, fitting
from recjax.training.metrics import PhaseSeconds

logger = logging.getLogger(__name__)
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
        names = {"name": f"{prefix}{number:06d}", "source": source, "version": version, "newer": newer}
        with self.phases.phase("sample"):
            if self.agents:
                key = batch_key(config.seed, number)
                self.phases.device.call()
                sampled = self.agents.sample_groups(
                    self.policy, params, prompts, key, group_size, sampling, self.grading, **names
                )
                self.phases.device.end()
                return sampled
            keys = _row_keys(config.seed, number // _TOGETHER, count * group_size)[number % _TOGETHER]
            longest = config.rollout.max_completion_tokens
            names["clock"] = self.phases.device
            groups = sample_groups(self.policy, params, prompts, keys, group_size, longest, sampling, **names)
            return groups, submit(groups, prompts, self.grading)

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


def prompts_of(config: Config, policy: Policy, task: Task) -> tuple[Prompts, Prompts]:
    """The task's training and evaluation prompts, encoded to one width; does not load the reward.

    Raises:
        ValueError: see `without_long_prompts`; also a prompt that cannot be encoded.
    """
    task = without_long_prompts(task, policy.tokenizer, config.rollout)
    if task.reward:
        require_enough(task.train, config, "raise rollout.max_prompt_tokens")
    problems = [*task.train, *task.evaluation]
    everything = encode_problems(problems, policy.tokenizer, config.rollout.max_prompt_tokens, policy.vocabulary)
    train = everything.take(np.arange(len(task.train)))
    return train, everything.take(np.arange(len(task.train), len(problems)))


def without_long_prompts(task: Task, tokenizer: PreTrainedTokenizerBase, rollout: RolloutConfig) -> Task:
    """Applies `rollout.long_prompts`: returns the whole task, or drops long prompts and logs their number.

    Raises:
        ValueError: too few problems remain.
    """
    if rollout.long_prompts == "refuse":
        return task
    train, evaluation = (
        fitting(problems, tokenizer, rollout.max_prompt_tokens) for problems in (task.train, task.evaluation)
    )
    dropped = [len(task.train) - len(train), len(task.evaluation) - len(evaluation)]
    limit = f"rollout.max_prompt_tokens = {rollout.max_prompt_tokens}"
    if (task.train and len(train) < rollout.prompts_per_step) or not evaluation:
        raise ValueError(
            f"{limit}: only {len(train)} of {len(task.train)} train problems and {len(evaluation)} of"
            f" {len(task.evaluation)} held-out problems fit, too few; raise it"
        )
    logger.info("%s: skipping %d longer train problems and %d longer held-out problems", limit, *dropped)
    return task._replace(train=train, evaluation=evaluation)
