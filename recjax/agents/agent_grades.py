"""Grades the trials of agents: by their return values, their failures, or the task's reward."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from recjax.agents.trials import Trial
from recjax.config import Config
from recjax.config.parts import PLAYED
from recjax.config.tasks import OneTask
from recjax.errors import UserError
from recjax.experience.group import Completion, Grade
from recjax.rewards.pool import FAILURES
from recjax.rewards.reward import LENGTH, ROWS, SCORE, TURNS, is_accurate, part_weights, verdict_of


class AgentGrader:
    """Grades the trials of a run's agents."""

    def __init__(self, config: Config):
        """Takes the tasks, with their rewards' weights."""
        self._config = config
        self._reads_parts = config.algorithm.build().reads("reward_parts")
        self._without_verdict: set[str | None] = set()  # names of tasks whose grades do not say what is accurate

    def grades(
        self,
        trials: Sequence[Trial],
        completions: Sequence[Completion],
        reward_weights: Mapping[str, float],
        task_grades: Sequence[Grade],
    ) -> list[Grade]:
        """Grades trials by their return values, their failures, or the grades of the task's reward.

        Args:
            completions: the completion of each trial.
            reward_weights: weights of the parts that the task's reward gives.
            task_grades: grades that the task's reward gave, one for each trial that needs a reward.
        Raises:
            UserError: an agent's rewards lack a part that has a weight, or have one with two weights.
        """
        remaining = iter(task_grades)
        grades = []
        for trial, completion in zip(trials, completions, strict=True):
            task_name = completion.metadata.get("task")
            if trial.failure:
                accurate = False
                if task_name in self._without_verdict:
                    accurate = None
                grades.append(Grade(self._config.task.agent_failure_reward, None, accurate, trial.failure))
                continue
            grade = self._grade(trial, completion, reward_weights, remaining)
            if grade.accurate is None:
                self._without_verdict.add(task_name)
            grades.append(grade)
        return grades

    def _grade(
        self, trial: Trial, completion: Completion, reward_weights: Mapping[str, float], task_grades: Iterator[Grade]
    ) -> Grade:
        """The grade of a trial without failure."""
        task_name = completion.metadata.get("task")
        task = self._config.task.of(task_name)
        weights = part_weights(task.reward_weights)
        returned = _returned_parts(trial)
        if self._config.task.agent in PLAYED:
            # The environment has added its rewards up to the score.
            weights = {**dict.fromkeys(returned, 0.0), SCORE: 1.0, **weights}
        turn_total = trial.policy.rewarded
        given = list(returned)
        if turn_total is not None:
            given.append(SCORE)
        self._check_parts(given, weights, reward_weights)

        if trial.needs_reward:
            grade = next(task_grades)
        else:
            grade = Grade(None, returned, failure=FAILURES[0])
        reward = grade.reward
        parts = dict(grade.reward_parts or {})
        if turn_total is not None:
            parts[SCORE] = parts.get(SCORE, 0.0) + turn_total
        if not trial.needs_reward:
            parts[LENGTH] = completion.sampled_tokens / self._config.rollout.max_completion_tokens
            self._check_weights(parts, task, task_name)
            reward = sum(weights.get(name, 1.0) * value for name, value in parts.items())
        elif reward is not None and turn_total is not None:
            reward += weights.get(SCORE, 1.0) * turn_total

        turns = ()
        if trial.policy.rewards:
            turn_rewards = [trial.policy.rewards.get(turn, 0.0) for turn in range(len(completion.turns))]
            turns = tuple(weights.get(SCORE, 1.0) * turn_reward for turn_reward in turn_rewards)
        grade = grade._replace(reward=reward, turns=turns)
        if reward is not None:
            grade = grade._replace(reward_parts=parts)
        grade = with_counts(grade, completion, weights)
        if trial.needs_reward:
            return grade
        if turn_total is not None and SCORE not in returned:
            # The rewards of turns are not the complete score.
            parts = {LENGTH: parts[LENGTH]} | returned
            if len(returned) == 1 or task.verdict == SCORE:
                parts[SCORE] = turn_total + sum(returned.values())
        if self._config.task.seats:  # the verdict may be a part of a different seat
            accurate = is_accurate(parts, None, task.success, task.verdict)
        else:
            reader = self._config.verdict_reader(task_name or "")
            accurate = verdict_of("the agent's reward", parts, task, reader)
        assert not isinstance(accurate, np.ndarray)
        return grade._replace(accurate=accurate)

    def _check_parts(
        self, returned: Iterable[str], weights: Mapping[str, float], reward_weights: Mapping[str, float]
    ) -> None:
        """Refuses parts of an agent that clash with a task's name or with a weight of the task's reward."""
        for name in returned:
            if name in (self._config.task.mixture or ()):
                raise UserError(
                    f"task.mixture.{name}",
                    f"the agent returns a part {name!r}, so that both would be the metric reward/NAME",
                    "rename the task",
                )
            task_weight = reward_weights.get(name, 1.0)
            if self._reads_parts and weights.get(name, 1.0) != task_weight:
                raise UserError(
                    f"task.reward_weights.{name}",
                    f"the agent gives the part {name!r}, which has weight 1, and the task's reward gives it weight"
                    f" {task_weight:g}",
                    "the advantage reads parts, so set one weight for both",
                )

    def _check_weights(self, parts: Mapping[str, float], task: OneTask, task_name: str | None) -> None:
        """Refuses weights for parts that the agent does not return."""
        if self._config.task.seats:
            return  # a part may be of a different seat
        for name in task.reward_weights:
            if name in parts or name in (TURNS, ROWS):
                continue
            block_key = "task"
            if self._config.task.mixture:
                block_key = f"task.mixture.{task_name}"
            raise UserError(
                f"{block_key}.reward_weights.{name}",
                "unknown part",
                f"choose one that the agent returns: {', '.join(parts)}",
            )


def _returned_parts(trial: Trial) -> dict[str, float]:
    """The parts of an agent's return value; a single number is the score."""
    if trial.needs_reward:
        return {}
    if isinstance(trial.returned, Mapping):
        return {name: float(value) for name, value in trial.returned.items()}
    return {SCORE: float(trial.returned)}


def with_counts(grade: Grade, completion: Completion, weights: Mapping[str, float]) -> Grade:
    """Adds the parts that count turns and rows to a grade with a reward, and their weighted values to the reward."""
    if grade.reward is None:
        return grade
    counts = {TURNS: float(len(completion.turns)), ROWS: float(len(completion.rows))}
    weighted = sum(weights[name] * value for name, value in counts.items())
    reward = float(np.float32(grade.reward + weighted))
    return grade._replace(reward=reward, reward_parts=(grade.reward_parts or {}) | counts)
