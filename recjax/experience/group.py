"""The record that passes from the sampler to the update: a group, which is one prompt and its completions."""

import itertools
from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from recjax.models.sampling import Sampling


class Grade(NamedTuple):
    """What a completion is worth.

    reward: the weighted sum of its parts; None: the reward function gave none, and the completion is left out.
    reward_parts: the named terms, not weighted; None where there are none.
    accurate: whether the answer is right, whatever else the reward is of; None: not known.
    failure: of recjax.tasks.grading.pool.FAILURES; None where the grade is from a store.
    """

    reward: float | None
    reward_parts: dict[str, float] | None = None
    accurate: bool | None = None
    failure: str | None = None


class Row(NamedTuple):
    """A sequence that a policy wrote parts of: a turn or several, each of which goes on from all that is before it.

    prompt_tokens: what its first turn follows.
    tokens: all that comes after, turns and what stands between them.
    mask, behavior_logprobs: as in `Completion`; the latter are 0 where the mask is False.
    """

    prompt_tokens: Int[np.ndarray, " prompt_time"]
    tokens: Int[np.ndarray, " time"]
    mask: Bool[np.ndarray, " time"]
    behavior_logprobs: Float[np.ndarray, " time"] | None


class Turn(NamedTuple):
    """A reply in a trajectory.

    row: of the trajectory's rows, in order; 0 is the first.
    end: the place behind its last token among the row's tokens; its other tokens are the sampled ones between this and
        the end of the row's turn before.
    reward: what its agent gave it, weighted; it stands at the last token.
    """

    row: int
    end: int
    reward: float


class Completion(NamedTuple):
    """One answer to a group's prompt, whoever gave it, in one turn or in many; ragged host arrays.

    The trajectory of an agent is one completion: it has one grade and one advantage, and usually one row. Where a turn
    does not go on from what is before it, because a template has dropped something or a context was cut, it begins a
    further row.

    id: given to no other completion of a run or a store.
    source: who sampled it.
    text: what it says, without the token that ended it.
    tokens: the end-of-sequence token among them.
    mask: True where the behavior policy chose the token.
    behavior_logprobs: under `sampling`, the distribution that sampled the tokens; None: not known.
    policy_version: optimizer updates of the weights that sampled it, the oldest where there were several; None: of
        another model.
    truncated: whether it ran into the token limit.
    grade: None while it is still to come.
    prompt_tokens: what it follows, where that is an agent's own context; None: its group's prompt.
    further: an agent's further rows.
    version_runs: where new weights came on the way, (version, tokens) of one after the other, of the tokens that the
        policy chose in all rows; empty: all are of `policy_version`.
    turns: of an agent, in the order of its replies; what its reward is above the sum of theirs came at the end.
    """

    id: str
    source: str
    text: str
    tokens: Int[np.ndarray, " time"]
    mask: Bool[np.ndarray, " time"]
    behavior_logprobs: Float[np.ndarray, " time"] | None
    sampling: Sampling | None
    policy_version: int | None
    truncated: bool
    grade: Grade | None = None
    prompt_tokens: Int[np.ndarray, " prompt_time"] | None = None
    further: tuple[Row, ...] = ()
    version_runs: tuple[tuple[int, int], ...] = ()
    turns: tuple[Turn, ...] = ()

    @property
    def sampled_tokens(self) -> int:
        """Tokens that the policy chose, in all rows."""
        return int(sum(row.mask.sum() for row in (self, *self.further)))


class Group(NamedTuple):
    """One prompt and its completions: any number of them, from any sources. Rewards are compared inside a group.

    prompt_tokens: as the model sees the prompt.
    prompt: text, or the messages of a chat.
    answer: the true one; None: not known.
    """

    id: str
    prompt_tokens: Int[np.ndarray, " prompt_time"]
    completions: tuple[Completion, ...]
    prompt: str | list[dict[str, str]]
    answer: str | None = None


def is_whole(group: Group) -> bool:
    """Whether every completion has its reward."""
    return all(completion.grade is not None for completion in group.completions)


def completion_ids(groups: Sequence[Group]) -> tuple[str, ...]:
    """The ids of all completions, group by group."""
    return tuple(completion.id for group in groups for completion in group.completions)


def graded(group: Group, grades: Mapping[str, Grade]) -> Group:
    """The group with grades, by completion id, in it.

    Raises:
        ValueError: a completion has another grade already.
    """
    if not any(completion.id in grades for completion in group.completions):
        return group

    def complete(completion: Completion) -> Completion:
        given, known = grades.get(completion.id), completion.grade
        if given and known and known.reward != given.reward:
            message = f"row {completion.id!r} has another reward, {known.reward}; a reward is given once"
            raise ValueError(message)
        return completion._replace(grade=given or known)

    return group._replace(completions=tuple(map(complete, group.completions)))


def without(group: Group, ids: Container[str]) -> Group:
    """The group without the completions of these ids."""
    return group._replace(completions=tuple(one for one in group.completions if one.id not in ids))


def rewards(group: Group) -> np.ndarray:
    """The rewards that are there."""
    return np.array([completion.grade.reward for completion in group.completions if completion.grade], np.float64)


def reward_spread(group: Group) -> float:
    """Highest less lowest reward; 0 where the group teaches a group-relative algorithm nothing."""
    return float(np.ptp(rewards(group))) if len(rewards(group)) else 0.0


def mean_absolute_advantage(group: Group) -> float:
    """The mean of |r − r̄|."""
    return float(np.abs(rewards(group) - rewards(group).mean()).mean()) if len(rewards(group)) else 0.0


def oldest_version(group: Group) -> int | None:
    """The least policy version of its completions; None where all are of other models."""
    versions = [completion.policy_version for completion in group.completions]
    return min((version for version in versions if version is not None), default=None)


def runs_of(versions: Int[np.ndarray, " tokens"]) -> tuple[tuple[int, int], ...]:
    """The versions of tokens as `Completion.version_runs`."""
    runs = tuple((version, len(list(same))) for version, same in itertools.groupby(versions.tolist()))
    return runs if len(runs) > 1 else ()


def token_staleness(groups: Sequence[Group], step: int) -> float | None:
    """The mean over sampled tokens of the optimizer steps since the weights that sampled each; None: of other models.

    Args:
        step: that trains on them, from 1.
    """
    known = [one for group in groups for one in group.completions if one.policy_version is not None]
    runs = [run for one in known for run in one.version_runs or ((one.policy_version, one.sampled_tokens),)]
    tokens = sum(count for _, count in runs)
    return sum((step - 1 - version) * count for version, count in runs) / tokens if tokens else None


def staleness(group: Group, step: int) -> int:
    """Optimizer steps between the oldest weights that sampled a completion and those that train on it at `step`.

    Completions of other models have none; it is 0 for a group of these alone.
    """
    version = oldest_version(group)
    return 0 if version is None else step - 1 - version
