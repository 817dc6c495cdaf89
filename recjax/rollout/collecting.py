"""Prompts to scored completions: the one path for training and for evaluation."""

from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, PRNGKeyArray

from recjax import hosts
from recjax.config import TaskConfig
from recjax.experience.records import Batch
from recjax.hub.policy import Policy
from recjax.models.logprobs import Sampling
from recjax.rollout.engine import Engine
from recjax.rollout.groups import sample_groups
from recjax.tasks.grading.pool import Grading, Scores
from recjax.tasks.prompts import Prompts


class Completions(NamedTuple):
    """Sampled completions, `group_size` consecutive rows a prompt, right-padded.

    `mask` is True at tokens that the policy sampled, the end-of-sequence token among them. `truncated` rows ran into
    the token limit before they ended.
    """

    tokens: Int[np.ndarray, "batch time"]
    mask: Bool[np.ndarray, "batch time"]
    logprobs: Float[np.ndarray, "batch time"]
    truncated: Bool[np.ndarray, " batch"]


class Pending(NamedTuple):
    """Drawn completions, their texts, and their scores, which may still be on their way."""

    prompts: Prompts
    drawn: Completions
    policy_version: int
    texts: list[str]
    scores: Future[Scores]


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
    engine = Engine(policy.decoder, policy.stop_ids, slots=policy.slots, prefix_time=prompts.tokens.shape[1])
    engine.replace_weights(params, version=0)
    options = {"group_size": group_size, "max_tokens": max_tokens, "sampling": sampling}
    sampled = sample_groups(engine, prompts.tokens, prompts.mask, key, **options)
    lengths = np.array([len(completion.tokens) for completion in sampled])
    mask = np.arange(max_tokens) < lengths[:, None]
    tokens, logprobs = np.zeros(mask.shape, np.int32), np.zeros(mask.shape, np.float32)
    tokens[mask] = np.concatenate([completion.tokens for completion in sampled])
    logprobs[mask] = np.concatenate([completion.logprobs for completion in sampled])
    return Completions(tokens, mask, logprobs, np.array([completion.truncated for completion in sampled]))


def submitted(policy: Policy, prompts: Prompts, drawn: Completions, grading: Grading, policy_version: int) -> Pending:
    """Sends drawn completions to be scored; the reward sees a text without the token that stopped it.

    Of several processes each scores the completions of its own share of the prompts.
    """
    group_size = len(drawn.tokens) // len(prompts.texts)
    said = drawn.mask & ~np.isin(drawn.tokens, policy.stop_ids)
    texts = policy.tokenizer.batch_decode([row[keep] for row, keep in zip(drawn.tokens, said, strict=True)])
    own = (hosts.share(len(prompts.texts))[:, None] * group_size + np.arange(group_size)).reshape(-1)
    problems = [prompts.problems[row // group_size] for row in own]
    scores = grading.submit(
        [prompts.texts[row // group_size] for row in own],
        [texts[row] for row in own],
        [problem.answer for problem in problems],
        [problem.columns for problem in problems],
        drawn.mask[own].sum(-1),
    )
    return Pending(prompts, drawn, policy_version, texts, scores)


def finished(batch: Pending | Batch) -> Batch:
    """The batch with its scores, once they are there; of several processes all have the whole batch.

    Raises:
        ValueError: the reward function is at fault; see `recjax.tasks.grading.custom.custom_parts`.
    """
    if isinstance(batch, Batch):
        return batch
    prompts, drawn, policy_version, texts, scores = batch
    rewards, parts, accurate, failures = hosts.gathered(scores.result(), len(texts))
    return Batch(
        prompts=prompts.tokens,
        prompt_mask=prompts.mask,
        completions=drawn.tokens,
        completion_mask=drawn.mask,
        behaviour_logprobs=drawn.logprobs,
        rewards=rewards,
        group_ids=np.repeat(np.arange(len(prompts.texts), dtype=np.int32), len(texts) // len(prompts.texts)),
        policy_version=np.full(len(texts), policy_version, np.int32),
        truncated=drawn.truncated,
        accurate=accurate,
        reward_parts=parts,
        failures=failures,
    )


def scored(policy: Policy, prompts: Prompts, drawn: Completions, grading: Grading, policy_version: int) -> Collected:
    """Drawn completions with their scores, waited for."""
    pending = submitted(policy, prompts, drawn, grading, policy_version)
    return Collected(finished(pending), pending.texts)


def to_learn_from(batch: Batch, task: TaskConfig) -> Batch:
    """The batch as the update sees it, by what `task.truncated` says of completions that ran into the token limit.

    train: they are as any other. mask: they leave the loss and their group's statistics, as if never drawn.
    penalise: their reward is `task.truncated_reward`, whatever they say.
    """
    if task.truncated == "mask":
        return batch._replace(completion_mask=batch.completion_mask & ~batch.truncated[:, None])
    if task.truncated == "penalise":
        rewards = np.where(batch.truncated, np.float32(task.truncated_reward), batch.rewards)
        return batch._replace(rewards=rewards)
    return batch
