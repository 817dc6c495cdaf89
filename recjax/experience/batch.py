"""What the update takes: groups of any sizes, padded to arrays of one shape."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Float, Int

from recjax.config import Config, TaskConfig
from recjax.experience.group import Completion, Grade, Group

FOREIGN = -1  # policy version of a batch's rows that another model wrote


class Batch(NamedTuple):
    """Completions of prompts, as many consecutive rows for each prompt; host arrays, right-padded.

    completion_mask: True at tokens that the behavior policy chose, its end-of-sequence token among them; False
        everywhere in rows that only fill the shape.
    behavior_logprobs: under the distribution that sampled each token; None where no algorithm reads them.
    policy_version: optimizer updates of the weights that sampled the row; FOREIGN: of another model.
    truncated: the row ran into the token limit.
    accurate: the answer is right, whatever else the reward is of.
    reward_parts: the named terms, not weighted, that the reward is the weighted sum of; NaN where a row has none.
    part_weights: the weight of each of these parts, equal in all rows; empty where nothing reads it.
    token_mask: of trajectories, True at real tokens, what stands between turns among them; None: as completion_mask.
    trajectories: equal for rows of one completion; None: each row is one.
    turn_rewards: of each turn of the row's trajectory, in their order; NaN behind the last one; None where no
        algorithm reads them.
    token_turns: the turn that sampled each token, from 0; likewise.
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
        """True at tokens that a row goes on from."""
        return self.completion_mask if self.token_mask is None else self.token_mask


class Shape(NamedTuple):
    """Of a batch's arrays: prompts, completions of each prompt, tokens of a prompt, tokens of a completion."""

    prompts: int
    group: int
    prompt_time: int
    time: int

    @property
    def positions(self) -> int:
        """Tokens that an update runs, each prompt once for its group; no token comes after a completion's last."""
        return self.prompts * (self.prompt_time + self.group * (self.time - 1))


def sampled_shape(config: Config, prompt_tokens: int) -> Shape:
    """The shape of the batches that a run samples.

    Args:
        prompt_tokens: of the longest prompt.
    """
    rollout = config.rollout
    if config.has_trajectories:  # a row is a whole sequence, of which the first token is the prompt
        return Shape(rollout.prompts_per_step * rollout.group_size, 1, 1, rollout.max_context_tokens - 1)
    return Shape(rollout.prompts_per_step, rollout.group_size, prompt_tokens, rollout.max_completion_tokens)


def pad(groups: Sequence[Group], shape: Shape, logprobs: bool = True) -> Batch:
    """Groups of any sizes as a batch; the rest of the shape is filled with rows that have no token.

    Such rows take no part in loss, advantages or metrics. What a completion does not say becomes FOREIGN (its policy
    version), False (accurate), NaN (a part of the reward) or, without a grade, a reward of NaN.

    Args:
        logprobs: False leaves behavior log-probs out of the batch, for algorithms that read none. Where True, those of
            a completion without any are NaN, so that no number comes of them unnoticed.
    Raises:
        ValueError: a group that does not fit the shape, or a completion with tokens that its policy did not choose.
    """
    if len(groups) > shape.prompts:
        raise ValueError(f"{len(groups)} groups do not fit a batch of {shape.prompts} prompts")
    rows = shape.prompts * shape.group
    grades = [completion.grade for group in groups for completion in group.completions if completion.grade]
    parts = sorted({name for grade in grades for name in grade.reward_parts or ()})
    batch = Batch(
        prompts=np.zeros((shape.prompts, shape.prompt_time), np.int32),
        # A prompt has a token.
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
            raise ValueError(f"group {group.id!r} has {size} rows; the batch has {shape.group} a prompt")
    names = [f"prompt of group {group.id!r}" for group in groups]
    prompts = [group.prompt_tokens for group in groups]
    _fill(batch.prompts, batch.prompt_mask, np.arange(len(groups)), prompts, names)
    filled = np.flatnonzero(np.arange(shape.group) < sizes[:, None])
    _fill_rows(batch, filled, [completion for group in groups for completion in group.completions])
    return batch


def _fill_rows(batch: Batch, rows: Int[np.ndarray, " some"], completions: Sequence[Completion]) -> None:
    """Writes completions into rows of the batch."""
    names = [f"row {one.id!r}" for one in completions]
    for name, one in zip(names, completions, strict=True):
        if not one.mask.all():
            raise ValueError(
                f"{name} of source {one.source!r} has tokens that its policy did not choose (completion_mask); a"
                " run trains on the trajectories of its own agent, and of a store on completions that were sampled from"
                " their first token to their last"
            )
    _fill(batch.completions, batch.completion_mask, rows, [one.tokens for one in completions], names)
    if batch.behavior_logprobs is not None:
        known = [
            np.full(len(one.tokens), np.nan) if one.behavior_logprobs is None else one.behavior_logprobs
            for one in completions
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
    """Writes rows of tokens, and where there are some into the mask."""
    room, lengths = tokens.shape[1], np.array([len(each) for each in found], int)
    for name, length in zip(names, lengths, strict=True):
        if length > room:
            raise ValueError(f"{name} has {length} tokens; the batch has room for {room}")
    mask[rows] = np.arange(room) < lengths[:, None]
    filled = np.zeros((len(rows), room), tokens.dtype)
    filled[mask[rows]] = np.concatenate([[], *found])
    tokens[rows] = filled


def to_learn_from(batch: Batch, task: TaskConfig) -> Batch:
    """The batch as the update sees it, by what `task.truncated` says of completions that ran into the token limit.

    train: they are as any other. mask: they leave the loss and their group's statistics, as if never sampled.
    penalize: their reward is `task.truncated_reward`, whatever they say.
    """
    if task.truncated == "mask":
        return batch._replace(completion_mask=batch.completion_mask & ~batch.truncated[:, None])
    if task.truncated == "penalize":
        rewards = np.where(batch.truncated, np.float32(task.truncated_reward), batch.rewards)
        return batch._replace(rewards=rewards)
    return batch


def with_part_weights(batch: Batch, weights: Mapping[str, float] | None) -> Batch:
    """The batch with the weight of each part of the reward, as the update reads them; None: without any parts.

    Args:
        weights: by part; one that is not named weighs 1, and one of weight 0 is left out.
    """
    if weights is None:
        return batch._replace(reward_parts={})
    parts = {name: values for name, values in batch.reward_parts.items() if weights.get(name, 1.0) != 0}
    rows = len(batch.rewards)
    return batch._replace(
        reward_parts=parts,
        part_weights={name: np.full(rows, weights.get(name, 1.0), np.float32) for name in parts},
    )
