"""Groups: one prompt and its completions, the record that passes from the sampler to the update."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from recjax.models.sampling import Sampling


class Grade(NamedTuple):
    """The grade of a completion.

    reward: weighted sum of the reward parts; None if the reward function gave no reward; training skips such
        completions.
    reward_parts: unweighted terms of the reward, by name; None if the reward has no parts.
    accurate: True if the answer is right, independent of other reward terms; None: not known.
    failure: one of `recjax.tasks.grading.pool.FAILURES`; None for a grade from a store.
    """

    reward: float | None
    reward_parts: dict[str, float] | None = None
    accurate: bool | None = None
    failure: str | None = None


class Row(NamedTuple):
    """A token sequence with one or more turns of a policy; every turn has all earlier tokens as context.

    prompt_tokens: tokens before the first turn.
    tokens: all later tokens: the turns, each with its end-of-sequence token, and the text between them.
    mask: True at tokens that the behavior policy chose.
    behavior_logprobs: log-probs under the distribution that sampled the tokens, 0 where mask is False; None: not known.
    """

    prompt_tokens: Int[np.ndarray, " prompt_time"]
    tokens: Int[np.ndarray, " time"]
    mask: Bool[np.ndarray, " time"]
    behavior_logprobs: Float[np.ndarray, " time"] | None


class Turn(NamedTuple):
    """A reply in a trajectory.

    row: index of the row that contains the turn, from 0.
    end: index after the turn's last token in the row's tokens. The turn consists of the sampled tokens between the end
        of the row's previous turn and this index.
    reward: weighted reward that the agent gave the turn; it belongs to the turn's last token.
    """

    row: int
    end: int
    reward: float


class Completion(NamedTuple):
    """One answer to a group's prompt, from any source, with one or many turns; host arrays of any length.

    A single turn has one row, and its prompt is the group's. An agent's trajectory is one completion too, with one
    grade, one advantage and usually one row. A turn starts another row if it does not extend the tokens before it,
    because the template dropped text or the context was cut.

    id: unique in a run and in a store.
    source: name of the sampler.
    text: the reply without its end token.
    rows: token sequences, in order of their first turns; empty for an agent that failed before its first turn.
    sampling: distribution that sampled the tokens; None: not known.
    policy_version: optimizer updates of the weights that sampled the completion, or of the oldest such weights; None
        for a completion of another model.
    truncated: True if the completion reached the token limit.
    grade: None until the completion is graded.
    version_runs: pairs (policy version, number of tokens) for the sampled tokens of all rows in order, if the weights
        changed during sampling; empty: all tokens have `policy_version`.
    turns: turns of an agent's trajectory, in order; any reward beyond the sum of turn rewards was given at the end.
    metadata: JSON values from the source, by name.
    """

    id: str
    source: str
    text: str
    rows: tuple[Row, ...]
    sampling: Sampling | None
    policy_version: int | None
    truncated: bool
    grade: Grade | None = None
    version_runs: tuple[tuple[int, int], ...] = ()
    turns: tuple[Turn, ...] = ()
    metadata: Mapping[str, Any] = {}

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the policy chose, in all rows."""
        return int(sum(row.mask.sum() for row in self.rows))


class Group(NamedTuple):
    """One prompt and any number of completions from any sources. Algorithms compare rewards inside a group.

    prompt_tokens: tokens of the prompt as the model reads it.
    prompt: text of the prompt, or the messages of a chat.
    answer: reference answer; None: not known.
    """

    id: str
    prompt_tokens: Int[np.ndarray, " prompt_time"]
    completions: tuple[Completion, ...]
    prompt: str | list[dict[str, str]]
    answer: str | None = None


def turn_rewards(completion: Completion) -> Float[np.ndarray, " turns"]:
    """The reward of each turn; the last turn also gets the part of the completion's reward that no turn was given.

    Raises:
        ValueError: the completion has no turns.
    """
    if not completion.turns:
        raise ValueError(
            f"row {completion.id!r}: the metadata has no turns; choose an advantage that compares whole trajectories,"
            " or start a new run"
        )
    rewards = np.array([turn.reward for turn in completion.turns])
    rewards[-1] += completion.grade.reward - rewards.sum()
    return rewards.astype(np.float32)


def is_whole(group: Group) -> bool:
    """True if every completion is graded."""
    return all(completion.grade is not None for completion in group.completions)


def with_grades(groups: Sequence[Group], grades: Sequence[Grade]) -> list[Group]:
    """The groups with a grade for each completion that has none, in order."""
    lacking = [one for group in groups for one in group.completions if one.grade is None]
    graded = iter([one._replace(grade=grade) for one, grade in zip(lacking, grades, strict=True)])
    return [
        group._replace(completions=tuple(one if one.grade else next(graded) for one in group.completions))
        for group in groups
    ]


def rewards(group: Group) -> np.ndarray:
    """The rewards of all graded completions."""
    return np.array([completion.grade.reward for completion in group.completions if completion.grade], np.float64)


def reward_spread(group: Group) -> float:
    """The highest minus the lowest reward; at 0, a group-relative algorithm learns nothing from the group."""
    return float(np.ptp(rewards(group))) if len(rewards(group)) else 0.0


def mean_absolute_advantage(group: Group) -> float:
    """The mean absolute difference from the group's mean reward: mean of |r − r̄|."""
    return float(np.abs(rewards(group) - rewards(group).mean()).mean()) if len(rewards(group)) else 0.0


def oldest_version(group: Group) -> int | None:
    """The lowest policy version of the group's completions; None if other models sampled all."""
    versions = [completion.policy_version for completion in group.completions]
    return min((version for version in versions if version is not None), default=None)


def runs_of(versions: Int[np.ndarray, " tokens"]) -> tuple[tuple[int, int], ...]:
    """Converts a policy version per token to the format of `Completion.version_runs`."""
    runs = tuple((version, len(list(same))) for version, same in itertools.groupby(versions.tolist()))
    return runs if len(runs) > 1 else ()


def token_staleness(groups: Sequence[Group], step: int) -> float | None:
    """Mean staleness of the sampled tokens, in optimizer steps; None if there are no tokens of this policy.

    Args:
        step: number of the step that trains on the groups, from 1.
    """
    known = [one for group in groups for one in group.completions if one.policy_version is not None]
    runs = [run for one in known for run in one.version_runs or ((one.policy_version, one.sampled_tokens),)]
    tokens = sum(count for _, count in runs)
    return sum((step - 1 - version) * count for version, count in runs) / tokens if tokens else None


def group_staleness(group: Group, step: int) -> int:
    """Optimizer steps from the oldest weights that sampled a completion to the weights that train on it at `step`.

    Ignores completions of other models; 0 for a group that consists only of such completions.
    """
    version = oldest_version(group)
    return 0 if version is None else step - 1 - version
