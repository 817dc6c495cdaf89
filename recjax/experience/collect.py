"""Prompts to scored completions: the one path for training and for evaluation."""

import functools
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from recjax.experience.records import Batch
from recjax.models.logprobs import Sampling
from recjax.models.policy import Policy
from recjax.rollout.prompts import Prompts
from recjax.rollout.sampler import Completions, sample
from recjax.rollout.slots import sample_in_slots
from recjax.tasks.problems import RewardFunction, score


class Collected(NamedTuple):
    """A batch and the texts of its completions."""

    batch: Batch
    texts: list[str]


def draw(
    policy: Policy,
    params: dict,
    prompts: Prompts,
    key: PRNGKeyArray,
    group_size: int,
    max_tokens: int,
    sampling: Sampling,
) -> Completions:
    """`group_size` completions of each prompt from `params`, as host arrays."""
    way = sample if policy.slots is None else functools.partial(sample_in_slots, slots=policy.slots)
    drawn = way(
        policy.decoder,
        params,
        prompts.tokens,
        prompts.mask,
        key,
        group_size=group_size,
        max_tokens=max_tokens,
        sampling=sampling,
        stop_ids=policy.stop_ids,
    )
    return jax.device_get(drawn)


def scored(
    policy: Policy, prompts: Prompts, drawn: Completions, reward: RewardFunction, success: float, policy_version: int
) -> Collected:
    """Drawn completions with their rewards; the reward function sees a text without the token that stopped it."""
    group_size = len(drawn.tokens) // len(prompts.texts)
    said = drawn.mask & ~np.isin(drawn.tokens, policy.stop_ids)
    texts = policy.tokenizer.batch_decode([row[keep] for row, keep in zip(drawn.tokens, said, strict=True)])
    asked = [text for text in prompts.texts for _ in range(group_size)]
    answers = [answer for answer in prompts.answers for _ in range(group_size)]
    rewards = np.asarray(score(reward, asked, texts, answers), np.float32)
    batch = Batch(
        prompts=prompts.tokens,
        prompt_mask=prompts.mask,
        completions=drawn.tokens,
        completion_mask=drawn.mask,
        behaviour_logprobs=drawn.logprobs,
        rewards=rewards,
        group_ids=np.repeat(np.arange(len(prompts.texts), dtype=np.int32), group_size),
        policy_version=np.full(len(texts), policy_version, np.int32),
        truncated=drawn.truncated,
        accurate=rewards >= success,
        reward_parts={},
    )
    return Collected(batch, texts)
