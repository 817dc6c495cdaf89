"""Grades of agents: from the values that they return, the task's reward, or the reward of a failure."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from recjax.config import Config
from recjax.experience.group import Grade
from recjax.rollout.agent_trials import Tried
from recjax.tasks.grading.custom import SCORE
from recjax.tasks.grading.pool import FAILURES, Answered, Grading
from recjax.tasks.grading.reward import LENGTH, ROWS, TURNS, agent_weights
from recjax.tasks.problems import Problem


class AgentGrades:
    """Grades of agents: from their return values, their last messages, or their failures."""

    def __init__(
        self,
        config: Config,
        tried: Sequence[Tried],
        texts: Sequence[str],
        openings: Sequence[str],
        problems: Sequence[Problem],
        grading: Grading,
    ):
        """Submits for grading the last messages of agents that returned None.

        Args:
            texts: text of each problem's prompt.
            openings: thinking tag that is open when each last message begins, or empty text.
        """
        self._config, self._tried = config, tried
        self._weights = agent_weights(config.task.reward_weights)
        self._graded = [place for place, one in enumerate(tried) if one.failure is None and one.returned is None]
        own = [
            Answered(texts[place], one.policy.last_text, problem.answer, problem.columns, _tokens(one), openings[place])
            for place, one, problem in ((place, tried[place], problems[place]) for place in self._graded)
        ]
        self._scores = own and grading.submit(own)

    def result(self) -> list[Grade]:
        """Waits and returns one grade per agent, in order.

        Raises:
            ValueError: the reward function is at fault, or an agent's rewards lack a part that has a weight.
        """
        grades = [self._own_grade(one) for one in self._tried]
        if self._graded:
            scores = self._scores.result()
            for row, place in enumerate(self._graded):
                parts = {part: float(values[row]) for part, values in scores.parts.items()}
                parts = {part: value for part, value in parts.items() if not math.isnan(value)}
                reward = None if np.isnan(scores.rewards[row]) else float(scores.rewards[row])
                rewarded = self._tried[place].policy.rewarded
                if rewarded is not None:
                    parts[SCORE] = parts.get(SCORE, 0.0) + rewarded
                    reward = None if reward is None else reward + self._weights.get(SCORE, 1.0) * rewarded
                graded = self._with_counts(self._tried[place], reward, parts, bool(scores.accurate[row]))
                grades[place] = graded._replace(failure=FAILURES[scores.failures[row]])
        return grades

    def _own_grade(self, tried: Tried) -> Grade:
        """Grades an agent by its return value or its failure; an empty grade if it returned None."""
        if tried.failure:
            return Grade(self._config.task.agent_failure_reward, None, False, tried.failure)
        if tried.returned is None:
            return Grade(None)
        parts = tried.returned if isinstance(tried.returned, Mapping) else {SCORE: tried.returned}
        parts = {part: float(value) for part, value in parts.items()}
        if tried.policy.rewarded is not None:
            parts[SCORE] = parts.get(SCORE, 0.0) + tried.policy.rewarded
        parts[LENGTH] = _tokens(tried) / self._config.rollout.max_completion_tokens
        unknown = [part for part in self._config.task.reward_weights if part not in {*parts, TURNS, ROWS}]
        if unknown:
            raise ValueError(
                f"task.reward_weights.{unknown[0]}: unknown part; choose one that the agent returns: {', '.join(parts)}"
            )
        reward = sum(self._weights.get(part, 1.0) * value for part, value in parts.items())
        return self._with_counts(tried, reward, parts, None)

    def _with_counts(self, tried: Tried, reward: float | None, parts: dict[str, float], accurate: bool | None) -> Grade:
        """Builds the grade, adding the rewards of the turns, and the parts that count turns and rows."""
        trajectory, given, weight = tried.policy.trajectory, tried.policy.rewards, self._weights.get(SCORE, 1.0)
        turns = tuple(weight * given.get(turn, 0.0) for turn in range(len(trajectory.turns))) if given else ()
        grade = Grade(reward, parts, accurate, FAILURES[0], turns)
        grade = with_counts(grade, len(trajectory.turns), len(trajectory.rows), self._weights)
        if accurate is not None:
            return grade
        success, reward = self._config.task.success, grade.reward
        is_accurate = parts["accuracy"] >= 1 if "accuracy" in parts else reward is not None and reward >= success
        return grade._replace(accurate=is_accurate)


def with_counts(grade: Grade, turns: int, rows: int, weights: Mapping[str, float]) -> Grade:
    """Adds the parts that count turns and rows to a grade, and their weighted values to its reward."""
    counts, reward = {TURNS: float(turns), ROWS: float(rows)}, grade.reward
    if reward is not None:
        reward = float(np.float32(reward + sum(weights[part] * value for part, value in counts.items())))
    return grade._replace(reward=reward, reward_parts=(grade.reward_parts or {}) | counts)


def _tokens(tried: Tried) -> int:
    return sum(len(turn.tokens) for turn in tried.policy.trajectory.turns)
