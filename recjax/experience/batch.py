"""The batch that an update trains on: rows of any lengths, padded to arrays of one shape."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy.typing import DTypeLike

from recjax.config import Config, RolloutConfig, TaskConfig, TrainingConfig
from recjax.errors import UserError
from recjax.experience.group import (
    Completion,
    Grade,
    Group,
    Row,
    completion_turns,
    turn_rewards,
)
from recjax.experience.recorded import join_recorded, missing_value
from recjax.models.sampling import KEPT_LOGPROBS, TOP_IDS, TOP_LOGPROBS

FOREIGN = -1  # policy version of rows that another model sampled


class Batch(NamedTuple):
    """The rows of completions and the prompts that they follow; host arrays, right-padded.

    Each prompt has the same number of consecutive rows.

    completion_mask: True at tokens that the behavior policy chose, including its end-of-sequence token; all False in
        padding rows.
    behavior_logprobs: log-probs under the distribution that sampled each token; None if the algorithm does not read
        them.
    policy_version: optimizer updates of the weights that sampled the row; FOREIGN for rows of another model.
    truncated: True if the completion reached the token limit.
    accurate: 1 if the answer is right, independent of other reward terms, else 0; NaN: no part of the reward tells.
    reward_parts: unweighted terms of the reward, by name; NaN in rows without that term.
    part_weights: weight of each reward part, equal in all rows; empty if the algorithm reads no parts.
    token_mask: mask of real tokens, including tokens between turns; None: same as completion_mask.
    trajectories: number shared by all rows of one completion; None: every row is a completion.
    turn_rewards: rewards of the trajectory's turns, in order; NaN after the last turn; None if not read.
    token_turns: the turn that sampled each token, from 0; None if not read.
    recorded: other arrays that the sampler recorded for each token, by name, [batch, time, …]; `missing_value` where
        it recorded nothing.
    teacher_prompts: the prompt of each row that the teacher reads instead of the policy's; None: it reads the policy's.
    teacher_prompt_mask: mask of their tokens; all False in rows without a teacher.
    """

    prompts: Int[Any, "prompts prompt_time"]
    prompt_mask: Bool[Any, "prompts prompt_time"]
    completions: Int[Any, "batch time"]
    completion_mask: Bool[Any, "batch time"]
    behavior_logprobs: Float[Any, "batch time"] | None
    rewards: Float[Any, " batch"]
    group_ids: Int[Any, " batch"]
    policy_version: Int[Any, " batch"]
    truncated: Bool[Any, " batch"]
    accurate: Float[Any, " batch"]
    reward_parts: dict[str, Float[Any, " batch"]]
    part_weights: dict[str, Float[Any, " batch"]] = {}
    token_mask: Bool[Any, "batch time"] | None = None
    trajectories: Int[Any, " batch"] | None = None
    turn_rewards: Float[Any, "batch turns"] | None = None
    token_turns: Int[Any, "batch time"] | None = None
    recorded: dict[str, Any] = {}
    teacher_prompts: Int[Any, "batch teacher_time"] | None = None
    teacher_prompt_mask: Bool[Any, "batch teacher_time"] | None = None

    @property
    def real_tokens(self) -> Bool[Any, "batch time"]:
        """Mask of the tokens that later tokens have as context: `token_mask`, or `completion_mask` without one."""
        if self.token_mask is None:
            return self.completion_mask
        return self.token_mask

    @property
    def shape(self) -> "Shape":
        """The shape of the batch."""
        prompts, prompt_time = self.prompts.shape
        rows, time = self.completions.shape
        group = None
        if self.trajectories is None:
            group = rows // prompts
        return Shape(prompts, group, prompt_time, time)


class Shape(NamedTuple):
    """The shape of a batch: prompts, completions per prompt, tokens per prompt, tokens per completion.

    group: None if completions may have several rows or prompts of their own. `prompts` then counts rows, and a prompt
        and its row have at most `time` + 1 tokens together.
    """

    prompts: int
    group: int | None
    prompt_time: int
    time: int

    def without_groups(self) -> "Shape":
        """The shape of the same completions, each with a prompt of its own."""
        if self.group is None:
            return self
        return Shape(self.rows, None, self.longest, self.longest)

    @property
    def rows(self) -> int:
        """Number of rows."""
        if self.group is None:
            return self.prompts
        return self.prompts * self.group

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its row, without the last token, which is only a target."""
        if self.group is None:
            return self.time
        return self.prompt_time + self.time - 1

    @property
    def positions(self) -> int:
        """Token positions of an update without packing: each prompt once, and rows without their last token."""
        if self.group is None:
            return self.prompts * self.time
        return self.prompts * (self.prompt_time + self.group * (self.time - 1))


def sampled_shape(config: Config, prompt_tokens: int) -> Shape:
    """The shape of the batches that a run samples.

    Args:
        prompt_tokens: number of tokens in the longest prompt.
    """
    if config.has_trajectories:
        return answered_shape(config.rollout, config.rollout.group_size, None)
    return answered_shape(config.rollout, config.rollout.group_size, prompt_tokens)


def answered_shape(rollout: RolloutConfig, group_size: int, prompt_tokens: int | None) -> Shape:
    """The shape of `rollout.prompts_per_step` groups.

    Args:
        prompt_tokens: number of tokens in the longest prompt; None: completions may have several rows and prompts of
            their own, of `rollout.max_context_tokens` tokens together.
    """
    if prompt_tokens is None:
        assert rollout.max_context_tokens is not None
        context = rollout.max_context_tokens - 1
        return Shape(rollout.prompts_per_step * group_size, None, context, context)
    return Shape(rollout.prompts_per_step, group_size, prompt_tokens, rollout.max_completion_tokens)


def row_places(groups: Sequence[Group], shape: Shape) -> list[int]:
    """The index in the batch of each row of the groups, in order."""
    if shape.group is None:
        completions = _completions(groups)
        return list(range(sum(len(completion.rows) for completion in completions)))
    places = []
    for number, group in enumerate(groups):
        first = number * shape.group
        places += range(first, first + len(group.completions))
    return places


def _completions(groups: Iterable[Group]) -> list[Completion]:
    """The completions of all groups, in order."""
    return list(itertools.chain.from_iterable(group.completions for group in groups))


class _PlacedRow(NamedTuple):
    """A row of a completion, and where it is.

    index: index of the row in the batch.
    group: number of the row's group.
    number: index of the row in the completion.
    """

    index: int
    group: int
    completion: Completion
    number: int
    row: Row

    @property
    def name(self) -> str:
        """The name of the row in messages."""
        return f"row {self.completion.id!r}"

    @property
    def grade(self) -> Grade:
        """The grade of the completion; its reward is NaN without one."""
        if self.completion.grade is None:
            return Grade(np.nan)
        return self.completion.grade


def pad(groups: Sequence[Group], shape: Shape, logprobs: bool = True, turns: int | None = None) -> Batch:
    """Pads groups of any sizes to a batch; rows without tokens fill the rest of the shape.

    Padding rows do not affect loss, advantages or metrics. Missing values become FOREIGN (policy version) or NaN
    (accurate, reward parts; the reward of a completion without a grade).

    Args:
        shape: shape of the batch; without `group`, the number of rows doubles until all rows fit.
        logprobs: False to omit behavior log-probs, for algorithms that do not read them. If True, completions without
            log-probs get NaN, so that a loss that reads them becomes NaN too.
        turns: capacity for turns, which doubles until all turns fit; adds turn rewards to the batch. None: no turn
            rewards.
    Raises:
        ValueError: a group that does not fit the shape, or a completion that the shape has no place for.
    """
    # First, because with a group size a row's place follows from its group: one row too many would overwrite another.
    if shape.group is not None:
        _check_groups(groups, shape)
    placed_rows = _placed_rows(groups, shape)
    if shape.group is None:
        lengths = np.array([len(placed.row.prompt_tokens) + len(placed.row.tokens) for placed in placed_rows], int)
        _check_lengths(lengths, shape.time + 1, lambda number: placed_rows[number].name)
        # Doubled, and not the number that fits: each new shape compiles another update, so there should be few.
        while shape.prompts < len(placed_rows):
            shape = shape._replace(prompts=2 * shape.prompts)
    parts: set[str] = set()
    for placed in placed_rows:
        if placed.grade.reward_parts is not None:
            parts.update(placed.grade.reward_parts)
    batch = _empty_batch(shape, sorted(parts), logprobs)
    if shape.group is None:
        prompts = [placed.row.prompt_tokens for placed in placed_rows]
    else:
        prompts = [group.prompt_tokens for group in groups]

    def prompt_name(number: int) -> str:
        if shape.group is None:
            return placed_rows[number].name
        return f"prompt of group {groups[number].id!r}"

    _fill(batch.prompts, batch.prompt_mask, np.arange(len(prompts)), prompts, prompt_name)
    real = _fill_rows(batch, placed_rows)
    if shape.group is None:
        trajectories = np.arange(shape.rows, dtype=np.int32)
        batch.group_ids[:] = len(groups)  # padding rows keep this number
        for placed in placed_rows:
            batch.group_ids[placed.index] = placed.group
            # The rows of a completion are consecutive; the index of the first one is the trajectory's number.
            trajectories[placed.index] = placed.index - placed.number
        batch = batch._replace(token_mask=real, trajectories=trajectories)
    if turns is None:
        return batch
    most_turns = max((len(completion_turns(placed.completion)) for placed in placed_rows), default=0)
    # Doubled for the same reason as the rows.
    while turns < most_turns:
        turns *= 2
    rewards = np.full((shape.rows, turns), np.nan, np.float32)
    turn_numbers = np.full(real.shape, -1, np.int32)
    for placed in placed_rows:
        turn_count = len(completion_turns(placed.completion))
        token_count = len(placed.row.tokens)
        rewards[placed.index, :turn_count] = turn_rewards(placed.completion)
        turn_numbers[placed.index, :token_count] = token_turns(placed.completion, placed.number)
    return batch._replace(turn_rewards=rewards, token_turns=turn_numbers)


def _placed_rows(groups: Sequence[Group], shape: Shape) -> list[_PlacedRow]:
    """The rows of all completions with their indices in the batch, in order."""
    places = iter(row_places(groups, shape))
    rows = []
    for group_number, group in enumerate(groups):
        for completion in group.completions:
            for row_number, row in enumerate(completion.rows):
                rows.append(_PlacedRow(next(places), group_number, completion, row_number, row))
    return rows


def _empty_batch(shape: Shape, parts: Sequence[str], logprobs: bool) -> Batch:
    """A batch of padding rows.

    Args:
        parts: names of reward parts.
    """
    size = shape.rows, shape.time
    behavior_logprobs = None
    if logprobs:
        behavior_logprobs = np.zeros(size, np.float32)
    rows_per_prompt = shape.group
    if rows_per_prompt is None:
        rows_per_prompt = 1
    return Batch(
        prompts=np.zeros((shape.prompts, shape.prompt_time), np.int32),
        # Every prompt has at least one token, also in padding rows: attention over no token would be NaN.
        prompt_mask=np.tile(np.arange(shape.prompt_time) < 1, (shape.prompts, 1)),
        completions=np.zeros(size, np.int32),
        completion_mask=np.zeros(size, bool),
        behavior_logprobs=behavior_logprobs,
        rewards=np.zeros(shape.rows, np.float32),
        group_ids=np.repeat(np.arange(shape.prompts, dtype=np.int32), rows_per_prompt),
        policy_version=np.full(shape.rows, FOREIGN, np.int32),
        truncated=np.zeros(shape.rows, bool),
        accurate=np.full(shape.rows, np.nan, np.float32),
        reward_parts={name: np.full(shape.rows, np.nan, np.float32) for name in parts},
        recorded={},
    )


def _fill_rows(batch: Batch, placed_rows: Sequence[_PlacedRow]) -> Bool[np.ndarray, "batch time"]:
    """Writes tokens, masks, log-probs, recorded arrays and grades of the rows; returns the mask of real tokens."""
    real = np.zeros(batch.completions.shape, bool)
    indices = np.array([placed.index for placed in placed_rows], int)
    tokens = [placed.row.tokens for placed in placed_rows]
    _fill(batch.completions, real, indices, tokens, lambda number: placed_rows[number].name)
    # The mask selects the tokens in the order of the rows, so joined arrays of all rows are written at once.
    mask = _concatenated([placed.row.mask for placed in placed_rows], bool)
    batch.completion_mask[real] = mask
    if batch.behavior_logprobs is not None:
        logprobs = []
        for placed in placed_rows:
            known = placed.row.behavior_logprobs
            if known is None:
                known = np.full(len(placed.row.mask), np.nan)
            logprobs.append(known)
        batch.behavior_logprobs[real] = np.where(mask, _concatenated(logprobs, np.float32), 0.0)
    joined = join_recorded((placed.row.recorded, len(placed.row.tokens)) for placed in placed_rows)
    for name, values in joined.items():
        shape = real.shape + values.shape[1:]
        batch.recorded[name] = np.full(shape, missing_value(values.dtype), values.dtype)
        batch.recorded[name][real] = values
    batch.truncated[indices] = [placed.completion.truncated for placed in placed_rows]
    batch.rewards[indices] = [placed.grade.reward for placed in placed_rows]
    for placed in placed_rows:
        if placed.completion.policy_version is not None:
            batch.policy_version[placed.index] = placed.completion.policy_version
        if placed.grade.accurate is not None:
            batch.accurate[placed.index] = placed.grade.accurate
        if placed.grade.reward_parts is not None:
            for part, value in placed.grade.reward_parts.items():
                batch.reward_parts[part][placed.index] = value
    return real


def _concatenated(arrays: Sequence[np.ndarray], dtype: DTypeLike) -> np.ndarray:
    """Arrays end to end; without arrays, none of this dtype."""
    if not arrays:
        return np.zeros(0, dtype)
    return np.concatenate(arrays)


def minibatch_rows(
    batch: Batch, groups: int, index: int, training: TrainingConfig, seed: int
) -> Bool[np.ndarray, " batch"] | None:
    """The rows that an update of a batch trains on.

    Every pass over the batch deals its groups out to the minibatches, in a random order that depends only on the seed,
    the batch and the pass.

    Args:
        groups: number of groups in the batch; the other prompts are padding.
        index: number of the update within the run, from 0.
    Returns:
        Mask of the rows; None if the minibatch is the whole batch.
    """
    if training.minibatches == 1:
        return None
    # Cut by groups and not by rows: advantages compare the completions of a group.
    pass_, minibatch = divmod(index, training.minibatches)
    order = np.random.default_rng([seed, 7, pass_]).permutation(groups).tolist()
    order += range(groups, batch.shape.prompts)  # padding, so that all minibatches have equally many prompts
    own_groups = order[minibatch :: training.minibatches]
    return np.isin(batch.group_ids, own_groups)


def _check_groups(groups: Sequence[Group], shape: Shape) -> None:
    """Refuses groups that do not fit the shape, and completions whose rows a group's prompt does not precede."""
    if len(groups) > shape.prompts:
        raise ValueError(f"{len(groups)} groups do not fit in a batch of {shape.prompts} prompts")
    assert shape.group is not None
    for group in groups:
        if len(group.completions) > shape.group:
            size = len(group.completions)
            raise ValueError(f"group {group.id!r} has {size} completions; the batch has room for {shape.group}")
    completions = _completions(groups)
    # Checks all masks at once, and looks for the completion only to name it in an error.
    if all(len(completion.rows) == 1 for completion in completions):
        masks = [completion.rows[0].mask for completion in completions]
        if _concatenated(masks, bool).all():
            return
    for completion in completions:
        if len(completion.rows) != 1 or not completion.rows[0].mask.all():
            raise ValueError(f"row {completion.id!r} is a trajectory, which does not fit a batch of single turns")


def _check_lengths(lengths: Int[np.ndarray, " sequences"], capacity: int, name: Callable[[int], str]) -> None:
    """Refuses the first sequence that is too long.

    Args:
        name: function from a sequence's number to its name in the message.
    """
    too_long = np.flatnonzero(lengths > capacity)
    if len(too_long):
        first = int(too_long[0])
        raise ValueError(f"{name(first)} has {lengths[first]} tokens; the batch has room for {capacity}")


def _fill(
    tokens: np.ndarray,
    mask: np.ndarray,
    rows: np.ndarray,
    sequences: Sequence[np.ndarray],
    name: Callable[[int], str],
) -> None:
    """Writes token sequences into the given rows, and True into the mask at each token."""
    capacity = tokens.shape[1]
    lengths = np.array([len(sequence) for sequence in sequences], int)
    _check_lengths(lengths, capacity, name)
    is_token = np.arange(capacity) < lengths[:, None]
    mask[rows] = is_token
    filled = np.zeros(is_token.shape, tokens.dtype)
    filled[is_token] = _concatenated(sequences, tokens.dtype)
    tokens[rows] = filled


def token_turns(completion: Completion, row: int) -> Int[np.ndarray, " time"]:
    """The turn that sampled each token of a completion's row; -1 at tokens that no turn sampled.

    Args:
        row: index of the row in the completion.
    """
    mask = completion.rows[row].mask
    turns = completion_turns(completion)
    numbers = [number for number, turn in enumerate(turns) if turn.row == row]
    ends = [turns[number].end for number in numbers]
    # The number of the row's turns that have ended before a token is the index of the token's own turn.
    ended = np.searchsorted(ends, np.arange(len(mask)), side="right")
    numbers.append(-1)  # tokens after the last turn have this number
    return np.where(mask, np.array(numbers)[ended], -1).astype(np.int32)


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


def with_top_tokens(batch: Batch, count: int) -> Batch:
    """The batch with the `count` most likely recorded tokens of each token, or without any if `count` is 0.

    A token without such a record has the ids of its recorded set, if the set's log-probs are recorded.
    """
    removed = (TOP_IDS, TOP_LOGPROBS, KEPT_LOGPROBS)
    recorded = {name: values for name, values in batch.recorded.items() if name not in removed}
    if not count:
        return batch._replace(recorded=recorded)
    # One shape for all batches, as completions of a store may have records of a different size, or none.
    shape = (*batch.completions.shape, count)
    top_ids = np.full(shape, -1, np.int32)
    top_logprobs = np.full(shape, np.nan, np.float32)
    for ids_name, logprobs_name in ((TOP_IDS, TOP_LOGPROBS), ("kept_ids", KEPT_LOGPROBS)):
        if logprobs_name not in batch.recorded:
            continue
        logprobs = batch.recorded[logprobs_name][..., :count]
        columns = slice(logprobs.shape[-1])
        is_new = (top_ids < 0).all(-1, keepdims=True) & ~np.isnan(logprobs)
        top_ids[..., columns] = np.where(is_new, batch.recorded[ids_name][..., columns], top_ids[..., columns])
        top_logprobs[..., columns] = np.where(is_new, logprobs, top_logprobs[..., columns])
    return batch._replace(recorded=recorded | {TOP_IDS: top_ids, TOP_LOGPROBS: top_logprobs})


def with_teacher_prompts(batch: Batch, rows: Sequence[int], prompts: Sequence[np.ndarray | None], room: int) -> Batch:
    """The batch with the prompts of a teacher.

    Args:
        rows: row of each prompt in the batch.
        prompts: tokens of each prompt; None for a completion without a teacher.
        room: tokens of the longest possible prompt.
    """
    size = len(batch.rewards), room
    tokens = np.zeros(size, np.int32)
    mask = np.zeros(size, bool)
    for row, prompt in zip(rows, prompts, strict=True):
        if prompt is not None:
            tokens[row, : len(prompt)] = prompt
            mask[row, : len(prompt)] = True
    return batch._replace(teacher_prompts=tokens, teacher_prompt_mask=mask)


def check_graded_parts(groups: Iterable[Group], weights: Mapping[str, float]) -> None:
    """Refuses completions of which an algorithm that reads reward parts would learn nothing, despite their reward.

    Args:
        weights: weights by part name, with default 1.
    Raises:
        ValueError: a completion with a reward has no part with a weight, or no such part is common to the sources of a
            group, which the algorithm would not compare.
    """
    for group in groups:
        names: dict[str, set[str]] = {}  # weighted parts of each source
        for completion in group.completions:
            grade = completion.known_grade
            weighted = []
            if grade.reward_parts is not None:
                weighted = [name for name in grade.reward_parts if weights.get(name, 1.0)]
            names.setdefault(completion.source, set()).update(weighted)
            if completion.rows and not weighted:
                raise UserError(
                    f"completion {completion.id!r} of source {completion.source!r}",
                    f"has the reward {grade.reward:g} and no reward part with a weight (reward_parts ="
                    f" {grade.reward_parts}), and the algorithm reads only parts",
                    "give it reward_parts, or use another algorithm.advantage",
                )
        for source, other_source in itertools.combinations(names, 2):
            parts = names[source]
            other_parts = names[other_source]
            if parts and other_parts and parts.isdisjoint(other_parts):
                raise UserError(
                    f"group {group.id!r}",
                    f"its sources {source!r} and {other_source!r} have no reward part in common"
                    f" ({', '.join(sorted(parts))}; {', '.join(sorted(other_parts))}), and the algorithm compares only"
                    " parts",
                    "give the parts equal names, set experience.regrade, or use another algorithm.advantage",
                )


def with_part_weights(batch: Batch, weights: Mapping[str, float] | None) -> Batch:
    """Adds the weights of reward parts to the batch, or removes the parts if `weights` is None.

    Args:
        weights: weights by part name, with default 1; parts with weight 0 are removed.
    """
    if weights is None:
        return batch._replace(reward_parts={})
    parts = {name: values for name, values in batch.reward_parts.items() if weights.get(name, 1.0) != 0}
    rows = len(batch.rewards)
    part_weights = {name: np.full(rows, weights.get(name, 1.0), np.float32) for name in parts}
    return batch._replace(reward_parts=parts, part_weights=part_weights)
