"""From a config to what a run works with: task, tokenised prompts, initial policy."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from recjax.config import Config
from recjax.models.policy import Policy, load_policy
from recjax.models.trainable import with_adapters
from recjax.rollout.prompts import Prompts, encode_problems
from recjax.tasks.loading import load_task
from recjax.tasks.problems import Problem, Reward
from recjax.training.warm_start import warm_start


class Setup(NamedTuple):
    """What a run works with, none of which changes while it runs; `seconds` is what it took to make."""

    policy: Policy
    initial_params: dict
    train: Prompts
    evaluation: Prompts
    reward: Reward
    seconds: float


def prepare(config: Config) -> Setup:
    """Loads the task and the initial policy, made by a warm start where the config has one."""
    started = time.perf_counter()
    task = load_task(config)
    problems = [*task.train, *task.evaluation]
    policy, params = load_policy(config, characters(problems))
    everything = encode_problems(problems, policy.tokenizer, config.rollout.max_prompt_tokens)
    train = everything.take(np.arange(len(task.train)))
    held_out = everything.take(np.arange(len(task.train), len(problems)))
    if config.warm_start:
        params = warm_start(config, policy, params, train)
    if config.model.lora:
        key = jax.random.fold_in(jax.random.key(config.seed), 4)
        decoder, params = with_adapters(policy.decoder, params, config.model.lora, key)
        policy = policy._replace(decoder=decoder)
    return Setup(policy, params, train, held_out, task.reward, time.perf_counter() - started)


def characters(problems: Sequence[Problem]) -> str:
    """Every character of the problems, sorted: the alphabet of the built-in tokenizer."""
    return "".join(sorted({*"".join(str(problem.prompt) + problem.answer for problem in problems)}))
