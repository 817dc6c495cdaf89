"""From a config to what a run works with: task, tokenised prompts, initial policy."""

import dataclasses
import logging
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from transformers import PreTrainedTokenizerBase

from recjax.config import Config, RolloutConfig, TrainingConfig
from recjax.experience.rows import Shape
from recjax.experience.stored import Stored, check_prompts, load_stored, with_chosen_logprobs
from recjax.hub.policy import Policy, load_params, policy_alone
from recjax.models.placement import row_shards
from recjax.models.trainable import in_compute_dtype, with_adapters
from recjax.tasks.loading import load_task
from recjax.tasks.problems import Problem, Reward, Task
from recjax.tasks.prompts import Prompts, encode_problems, fitting
from recjax.training.mesh import check_fits
from recjax.training.packing import shape_for
from recjax.training.warm_start import warm_start

logger = logging.getLogger(__name__)


class Setup(NamedTuple):
    """What a run works with, none of which changes while it runs; `seconds` is what it took to make.

    A run takes the `initial_params` out and leaves the dict empty, as it does not hold them all the time. `stored` is
    what all of a batch, or a share of it, is taken from.
    """

    policy: Policy
    initial_params: dict
    train: Prompts
    evaluation: Prompts
    reward: Reward
    seconds: float
    stored: Stored | None = None


def prepare(config: Config) -> Setup:
    """Loads the task, the initial policy, made by a warm start where the config has one, and the experience store.

    Raises:
        ValueError: a task, model or store that cannot be read or does not fit the rest; a micro-batch too small.
    """
    started = time.perf_counter()
    task = load_task(config)
    policy = policy_alone(config, characters([*task.train, *task.evaluation]))
    check_fits(jax.sharding.get_mesh(), policy.decoder.config)
    task = without_long_prompts(task, policy.tokenizer, config.rollout)
    problems = [*task.train, *task.evaluation]
    everything = encode_problems(problems, policy.tokenizer, config.rollout.max_prompt_tokens)
    train = everything.take(np.arange(len(task.train)))
    held_out = everything.take(np.arange(len(task.train), len(problems)))
    experience = config.experience
    stored = load_stored(config, policy) if experience and (experience.store or experience.mix) else None
    if stored and experience.mix and experience.mix.of == "group":
        check_prompts(stored, experience.mix, train)
    if config.training.tokens_per_micro_batch:
        shape_for(config, batch_shape(config, train, stored), row_shards())
    params = load_params(config, policy.decoder.config)
    if config.warm_start:
        params = warm_start(config, policy, params, train)
    if config.model.lora:
        key = jax.random.fold_in(jax.random.key(config.seed), 4)
        decoder, params = with_adapters(policy.decoder, params, config.model.lora, key)
        policy = policy._replace(decoder=decoder)
    if stored:
        stored = with_chosen_logprobs(stored, config, policy, in_compute_dtype(policy.decoder, params, copy=False))
    return Setup(policy, params, train, held_out, task.reward, time.perf_counter() - started, stored)


def untrained(config: Config) -> Config:
    """The same policy and task, with nothing that only training reads and that `prepare` would check."""
    return dataclasses.replace(config, experience=None, training=TrainingConfig())


def without_long_prompts(task: Task, tokenizer: PreTrainedTokenizerBase, rollout: RolloutConfig) -> Task:
    """The task as `rollout.long_prompts` says: all of it, or what fits; how much does not is logged.

    Raises:
        ValueError: too little is left.
    """
    if rollout.long_prompts == "refuse":
        return task
    train, evaluation = (
        fitting(problems, tokenizer, rollout.max_prompt_tokens) for problems in (task.train, task.evaluation)
    )
    dropped = [len(task.train) - len(train), len(task.evaluation) - len(evaluation)]
    limit = f"rollout.max_prompt_tokens = {rollout.max_prompt_tokens}"
    if len(train) < rollout.prompts_per_step or not evaluation:
        raise ValueError(
            f"{limit} leaves {len(train)} train and {len(evaluation)} held-out problems of {len(task.train)} and"
            f" {len(task.evaluation)}, too few; raise it"
        )
    logger.info("%s: %d train and %d held-out problems are longer and left out", limit, *dropped)
    return task._replace(train=train, evaluation=evaluation)


def batch_shape(config: Config, train: Prompts, stored: Stored | None) -> Shape:
    """Of batches into which the policy's own groups fit and those of the store, where either is trained on."""
    rollout, experience = config.rollout, config.experience
    if experience and experience.store:
        return stored.shape
    shape = Shape(rollout.prompts_per_step, rollout.group_size, train.tokens.shape[1], rollout.max_completion_tokens)
    if stored is None:
        return shape
    group = stored.shape.group if experience.mix.of == "batch" else 0
    return Shape(shape.prompts, *map(max, shape[1:], stored.shape._replace(group=group)[1:]))


def characters(problems: Sequence[Problem]) -> str:
    """Every character of the problems, sorted: the alphabet of the built-in tokenizer."""
    return "".join(sorted({*"".join(str(problem.prompt) + problem.answer for problem in problems)}))
