"""The batch that an update trains on: groups of any sizes, padded to arrays of one shape."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from recjax.config import Config, TaskConfig
from recjax.experience.group import Completion, Grade, Group
from recjax.hub.policy import Policy
from recjax.models.logprobs import completion_logprobs
from recjax.models.placement import on_host, put_rows
from recjax.models.sampling import Sampling

_logprobs = jax.jit(completion_logprobs, static_argnames=("decoder", "sampling", "chunk"))

FOREIGN = -1  # policy version of rows that another model sampled


class Batch(NamedTuple):
    """Prompts and their completions, with the same number of consecutive rows per prompt; host arrays, right-padded.

    completion_mask: True at tokens that the behavior policy chose, including its end-of-sequence token; all False in
        padding rows.
    behavior_logprobs: log-probs under the distribution that sampled each token; None if the algorithm does not read
        them.
    policy_version: optimizer updates of the weights that sampled the row; FOREIGN for rows of another model.
    truncated: True if the completion reached the token limit.
    accurate: True if the answer is right, independent of other reward terms.
    reward_parts: unweighted terms of the reward, by name; NaN in rows without that term.
    part_weights: weight of each reward part, equal in all rows; empty if the algorithm reads no parts.
    token_mask: mask of real tokens in trajectories, including tokens between turns; None: same as completion_mask.
    trajectories: number shared by all rows of one trajectory; None: every row is a completion.
    turn_rewards: rewards of the trajectory's turns, in order; NaN after the last turn; None if not read.
    token_turns: the turn that sampled each token, from 0; None if not read.
    """

    prompts: Int[np.ndarray, "prompts prompt_time"]
    prompt_mask: Bool[np.ndarray, "prompts prompt_time"]
    completions: Int[np.ndarray, "batch time"]
    completion_mask: Bool[np.ndarray, "batch time"]
    behavior_logprobs: Float[np.ndarray, "batch time"] | None
    rewards: Float[np.ndarray, " batch"]
    group_ids: Int[np.ndarray, " batch"]
    policy_version: Int[np.ndarray, " batch"]
    truncated: Bool[np.ndarray, " batch"]
    accurate: Bool[np.ndarray, " batch"]
    reward_parts: dict[str, Float[np.ndarray, " batch"]]
    part_weights: dict[str, Float[np.ndarray, " batch"]] = {}
    token_mask: Bool[np.ndarray, "batch time"] | None = None
    trajectories: Int[np.ndarray, " batch"] | None = None
    turn_rewards: Float[np.ndarray, "batch turns"] | None = None
    token_turns: Int[np.ndarray, "batch time"] | None = None

    @property
    def real_tokens(self) -> Bool[np.ndarray | Array, "batch time"]:
        """Mask of the tokens that later tokens have as context: `token_mask`, or `completion_mask` without one."""
        return self.completion_mask if self.token_mask is None else self.token_mask


class Shape(NamedTuple):
    """The shape of a batch: prompts, completions per prompt, tokens per prompt, tokens per completion."""

    prompts: int
    group: int
    prompt_time: int
    time: int

    @property
    def positions(self) -> int:
        """Token positions that an update computes: each prompt once, and completions without their last token."""
        return self.prompts * (self.prompt_time + self.group * (self.time - 1))


def sampled_shape(config: Config, prompt_tokens: int) -> Shape:
    """The shape of the batches that a run samples.

    Args:
        prompt_tokens: number of tokens in the longest prompt.
    """
    rollout = config.rollout
    if config.has_trajectories:  # each row is a whole sequence with its first token as the prompt
        return Shape(rollout.prompts_per_step * rollout.group_size, 1, 1, rollout.max_context_tokens - 1)
    return Shape(rollout.prompts_per_step, rollout.group_size, prompt_tokens, rollout.max_completion_tokens)


def pad(groups: Sequence[Group], shape: Shape, logprobs: bool = True) -> Batch:
    """Pads groups of any sizes to a batch; rows without tokens fill the rest of the shape.

    Padding rows do not affect loss, advantages or metrics. Missing values become FOREIGN (policy version), False
    (accurate) or NaN (reward parts; the reward of a completion without a grade).

    Args:
        logprobs: False to omit behavior log-probs, for algorithms that do not read them. If True, completions without
            log-probs get NaN, so that a loss that reads them becomes NaN too.
    Raises:
        ValueError: a group that does not fit the shape, or a completion with tokens that its policy did not choose.
    """
    if len(groups) > shape.prompts:
        raise ValueError(f"{len(groups)} groups do not fit in a batch of {shape.prompts} prompts")
    rows = shape.prompts * shape.group
    grades = [completion.grade for group in groups for completion in group.completions if completion.grade]
    parts = sorted({name for grade in grades for name in grade.reward_parts or ()})
    batch = Batch(
        prompts=np.zeros((shape.prompts, shape.prompt_time), np.int32),
        # Every prompt has at least one token, also in padding rows.
        prompt_mask=np.tile(np.arange(shape.prompt_time) < 1, (shape.prompts, 1)),
        completions=np.zeros((rows, shape.time), np.int32),
        completion_mask=np.zeros((rows, shape.time), bool),
        behavior_logprobs=np.zeros((rows, shape.time), np.float32) if logprobs else None,
        rewards=np.zeros(rows, np.float32),
        group_ids=np.repeat(np.arange(shape.prompts, dtype=np.int32), shape.group),
        policy_version=np.full(rows, FOREIGN, np.int32),
        truncated=np.zeros(rows, bool),
        accurate=np.zeros(rows, bool),
        reward_parts={name: np.full(rows, np.nan, np.float32) for name in parts},
    )
    sizes = np.array([len(group.completions) for group in groups], int)
    for group, size in zip(groups, sizes, strict=True):
        if size > shape.group:
            raise ValueError(f"group {group.id!r} has {size} completions; the batch has room for {shape.group}")
    names = [f"prompt of group {group.id!r}" for group in groups]
    prompts = [group.prompt_tokens for group in groups]
    _fill(batch.prompts, batch.prompt_mask, np.arange(len(groups)), prompts, names)
    filled = np.flatnonzero(np.arange(shape.group) < sizes[:, None])
    _fill_rows(batch, filled, [completion for group in groups for completion in group.completions])
    return batch


def _fill_rows(batch: Batch, rows: Int[np.ndarray, " some"], completions: Sequence[Completion]) -> None:
    """Writes completions into the given rows of the batch."""
    names = [f"row {one.id!r}" for one in completions]
    for name, one in zip(names, completions, strict=True):
        if len(one.rows) != 1 or not one.rows[0].mask.all():
            raise ValueError(
                f"{name} of source {one.source!r} has tokens that its policy did not choose (completion_mask), and runs"
                " cannot train on stored trajectories; remove the row, or train on them with experience.follow"
            )
    _fill(batch.completions, batch.completion_mask, rows, [one.rows[0].tokens for one in completions], names)
    if batch.behavior_logprobs is not None:
        known = [
            np.full(len(row.tokens), np.nan) if row.behavior_logprobs is None else row.behavior_logprobs
            for (row,) in (one.rows for one in completions)
        ]
        batch.behavior_logprobs[batch.completion_mask] = np.concatenate([[], *known])
    versions = [one.policy_version for one in completions]
    batch.policy_version[rows] = [FOREIGN if version is None else version for version in versions]
    batch.truncated[rows] = [one.truncated for one in completions]
    grades = [one.grade or Grade(np.nan) for one in completions]
    batch.rewards[rows] = [grade.reward for grade in grades]
    batch.accurate[rows] = [bool(grade.accurate) for grade in grades]
    for part, values in batch.reward_parts.items():
        values[rows] = [(grade.reward_parts or {}).get(part, np.nan) for grade in grades]


def _fill(
    tokens: np.ndarray, mask: np.ndarray, rows: np.ndarray, found: Sequence[np.ndarray], names: Sequence[str]
) -> None:
    """Writes tokens into the given rows, and True into the mask at each token."""
    room, lengths = tokens.shape[1], np.array([len(each) for each in found], int)
    for name, length in zip(names, lengths, strict=True):
        if length > room:
            raise ValueError(f"{name} has {length} tokens; the batch has room for {room}")
    mask[rows] = np.arange(room) < lengths[:, None]
    filled = np.zeros((len(rows), room), tokens.dtype)
    filled[mask[rows]] = np.concatenate([[], *found])
    tokens[rows] = filled


def score(
    policy: Policy, params: dict, batch: Batch, sampling: Sampling, chunk: int
) -> Float[np.ndarray, "batch time"]:
    """Log-probs of a batch's tokens under the parameters, on the host; undefined at padding.

    Args:
        params: all parameters of the policy.
        sampling: the distribution that sampled the tokens.
        chunk: token positions whose logits exist at the same time.
    """
    arrays = put_rows((batch.prompts, batch.prompt_mask, batch.completions, batch.real_tokens))
    return on_host(_logprobs(policy.decoder, params, *arrays, sampling=sampling, chunk=chunk)[0])


def to_learn_from(batch: Batch, task: TaskConfig) -> Batch:
    """Applies `task.truncated` to the completions that reached the token limit.

    train: keep them unchanged. mask: exclude them from the loss and from group statistics, as if never sampled.
    penalize: set their reward to `task.truncated_reward`.
    """
    if task.truncated == "mask":
        return batch._replace(completion_mask=batch.completion_mask & ~batch.truncated[:, None])
    if task.truncated == "penalize":
        rewards = np.where(batch.truncated, np.float32(task.truncated_reward), batch.rewards)
        return batch._replace(rewards=rewards)
    return batch


def with_part_weights(batch: Batch, weights: Mapping[str, float] | None) -> Batch:
    """Adds the weights of reward parts to the batch, or removes the parts if `weights` is None.

    Args:
        weights: weights by part name, with default 1; parts with weight 0 are removed.
    """
    if weights is None:
        return batch._replace(reward_parts={})
    parts = {name: values for name, values in batch.reward_parts.items() if weights.get(name, 1.0) != 0}
    rows = len(batch.rewards)
    return batch._replace(
        reward_parts=parts,
        part_weights={name: np.full(rows, weights.get(name, 1.0), np.float32) for name in parts},
    )
