"""Groups: one prompt and its completions, the record that passes from the sampler to the update."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from recjax.errors import UserError
from recjax.models.sampling import Sampling


class Grade(NamedTuple):
    """The grade of a completion.

    reward: weighted sum of the reward parts; None if the reward function gave no reward; training skips such
        completions.
    reward_parts: unweighted terms of the reward, by name; None if the reward has no parts.
    accurate: True if the answer is right, independent of other reward terms; None: not known.
    failure: one of `recjax.rewards.pool.FAILURES`; None for a grade from a store.
    turns: part of the reward that each turn got, weighted; empty if turns have no rewards. The reward is the total: the
        part that no turn got belongs to the end of the last turn.
    """

    reward: float | None
    reward_parts: dict[str, float] | None = None
    accurate: bool | None = None
    failure: str | None = None
    turns: tuple[float, ...] = ()

    @classmethod
    def from_json(cls, values: Sequence) -> "Grade":
        """Makes a grade from a JSON list with the values of its fields."""
        reward, reward_parts, accurate, failure, turns = values
        return cls(reward, reward_parts, accurate, failure, tuple(turns))


class Row(NamedTuple):
    """A token sequence with one or more turns of a policy; every turn has all earlier tokens as context.

    prompt_tokens: tokens before the first turn.
    tokens: all later tokens: the turns, each with its end-of-sequence token, and the text between them.
    mask: True at tokens that the behavior policy chose.
    behavior_logprobs: log-probs under the distribution that sampled the tokens, 0 where mask is False; None: not known.
    recorded: other arrays that the sampler recorded for each token, by name, [time, …]; `recorded.missing_value`
        where it recorded nothing.
    """

    prompt_tokens: Int[np.ndarray, " prompt_time"]
    tokens: Int[np.ndarray, " time"]
    mask: Bool[np.ndarray, " time"]
    behavior_logprobs: Float[np.ndarray, " time"] | None
    recorded: Mapping[str, np.ndarray] = {}


class Turn(NamedTuple):
    """A reply in a trajectory: the sampled tokens between the end of the row's previous turn and its own end.

    row: index of the row that contains the turn, from 0.
    end: index after the turn's last token in the row's tokens.
    """

    row: int
    end: int


class Completion(NamedTuple):
    """One answer to a group's prompt, from any source, with one or many turns; host arrays of any length.

    A single turn has one row, and its prompt is the group's. An agent's trajectory is one completion too, with one
    grade, one advantage and usually one row. A turn starts a new row if it does not extend the tokens before it,
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
    turns: turns of an agent's trajectory, in order; empty: the tokens of its only row are a single turn.
    metadata: JSON values from the source, by name; `task` of a mixture, `seat` of an agent with seats,
        `dropped_tokens` with `rollout.oversample`.
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
        return sum(int(np.count_nonzero(row.mask)) for row in self.rows)

    @property
    def known_grade(self) -> Grade:
        """The grade of a completion that has one."""
        assert self.grade is not None
        return self.grade


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

    @property
    def seat(self) -> str | None:
        """The seat of an agent that sampled the completions; None without seats."""
        if not self.completions:
            return None
        # A group has completions of one seat only.
        return self.completions[0].metadata.get("seat")


def completion_turns(completion: Completion) -> tuple[Turn, ...]:
    """The turns of a completion; one row without recorded turns is a single turn.

    Raises:
        UserError: several rows without turns.
    """
    if completion.turns:
        return completion.turns
    if len(completion.rows) == 1:
        return (Turn(row=0, end=len(completion.rows[0].tokens)),)
    raise UserError(
        f"row {completion.id!r}",
        f"has {len(completion.rows)} token sequences without turns",
        "choose an advantage that compares whole trajectories, or remove the row",
    )


def turn_rewards(completion: Completion) -> Float[np.ndarray, " turns"]:
    """The reward of each turn; the last turn also gets the part of the completion's reward that no turn got."""
    grade = completion.known_grade
    assert grade.reward is not None
    if grade.turns:
        rewards = np.array(grade.turns)
    else:
        rewards = np.zeros(len(completion_turns(completion)))
    rewards[-1] += grade.reward - rewards.sum()
    return rewards.astype(np.float32)


def is_whole(group: Group) -> bool:
    """True if every completion is graded."""
    return all(completion.grade is not None for completion in group.completions)


def with_grades(groups: Sequence[Group], grades: Sequence[Grade]) -> list[Group]:
    """Gives a grade to each completion that has none, in order."""
    # Completions that arrive with a grade, such as stored ones, keep it.
    lacking = []
    for group in groups:
        lacking += [completion for completion in group.completions if completion.grade is None]
    newly_graded = []
    for completion, grade in zip(lacking, grades, strict=True):
        newly_graded.append(completion._replace(grade=grade))
    remaining = iter(newly_graded)
    graded_groups = []
    for group in groups:
        completions = []
        for completion in group.completions:
            if completion.grade is None:
                completion = next(remaining)
            completions.append(completion)
        graded_groups.append(group._replace(completions=tuple(completions)))
    return graded_groups


def rewards(group: Group) -> np.ndarray:
    """The rewards of all graded completions."""
    return np.array([completion.grade.reward for completion in group.completions if completion.grade], np.float64)


def reward_spread(group: Group) -> float:
    """The highest minus the lowest reward; at 0, a group-relative algorithm learns nothing from the group."""
    values = rewards(group)
    if not len(values):
        return 0.0
    return float(np.ptp(values))


def oldest_version(group: Group) -> int | None:
    """The lowest policy version of the group's completions; None if other models sampled all."""
    versions = [completion.policy_version for completion in group.completions]
    return min((version for version in versions if version is not None), default=None)


def runs_of(versions: Int[np.ndarray, " tokens"]) -> tuple[tuple[int, int], ...]:
    """Converts a policy version per token to the format of `Completion.version_runs`."""
    # `Completion.policy_version` is enough for a completion with one version, as most have.
    if (versions[1:] == versions[:-1]).all():
        return ()
    return tuple((version, len(list(same))) for version, same in itertools.groupby(versions.tolist()))


def token_staleness(groups: Sequence[Group], step: int) -> float | None:
    """Mean staleness of the sampled tokens, in optimizer steps; None if there are no tokens of this policy.

    Args:
        step: number of the step that trains on the groups, from 1.
    """
    tokens = 0
    total_staleness = 0
    for group in groups:
        for completion in group.completions:
            if completion.policy_version is None:
                continue
            runs = completion.version_runs
            if not runs:
                runs = ((completion.policy_version, completion.sampled_tokens),)
            for version, count in runs:
                tokens += count
                # Step 1 trains on samples of version 0, which are not stale.
                total_staleness += (step - 1 - version) * count
    if not tokens:
        return None
    return total_staleness / tokens


def group_staleness(group: Group, step: int) -> int:
    """Optimizer steps from the oldest weights that sampled a completion to the weights that train on it at `step`.

    Ignores completions of other models; 0 for a group that consists only of such completions.
    """
    # A step trains on all completions of a group together, so the oldest one decides.
    version = oldest_version(group)
    if version is None:
        return 0
    return step - 1 - version
