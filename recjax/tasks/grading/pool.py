"""Grading in parallel with training: turns batches into futures of scores; built-in rewards run in worker processes."""

import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from recjax.config import Config
from recjax.tasks.grading.custom import Row, custom_parts
from recjax.tasks.grading.graders import GRADERS, grade_row
from recjax.tasks.grading.reward import LENGTH, MOST_REWARD, OVERLONG, Reward, check_parts
from recjax.tasks.grading.thinking import after_thoughts, opening_tag, whole_reply
from recjax.workers import CallFailed, Workers

# Reasons why a completion has no grade; no_reward: the user's function returned None.
FAILURES = ("none", "timeout", "crash", "too_long", "error", "no_reward")


class Scores(NamedTuple):
    """Scores of each completion: its reward, the parts whose weighted sum is the reward, and whether it is correct.

    `failures` holds indices into FAILURES. With a user's function the only failure is no_reward, with the reward NaN;
    exceptions of the function stop the run.
    """

    rewards: np.ndarray
    parts: dict[str, np.ndarray]
    accurate: np.ndarray
    failures: np.ndarray


class Answered(NamedTuple):
    """A completion to grade: its prompt as the model saw it, its text, and the problem's answer and columns.

    length: number of tokens.
    opening: thinking tag that the prompt leaves open, or an empty string; None: detect it at the prompt's end.
    asked: prompt as the task has it, text or messages, for reward models.
    """

    prompt: str
    completion: str
    answer: str
    columns: Mapping[str, Any]
    length: int
    opening: str | None = None
    asked: str | list[dict[str, str]] = ""


class Grading:
    """Scores batches in the background, in the order of submission; a context manager that owns the worker processes.

    A completion gets reward 0, and 0 for all parts except length, if it is longer than `grading.max_characters` or if a
    built-in reward crashes, raises, or takes longer than `grading.seconds`. Other completions are not affected.
    """

    def __init__(self, config: Config, reward: Reward):
        """Starts no processes; `__enter__` does."""
        self._config, self.reward = config, reward
        self._thread: ThreadPoolExecutor | None = None
        self._workers: Workers | None = None
        self._names: list[str] | None = None  # names of the parts in the first result of a user's function

    def __enter__(self) -> "Grading":
        """Starts the worker processes, if the reward needs any."""
        if self.reward.per_row:
            module, limits = GRADERS[self.reward.name].grade.partition(":")[0], self._config.grading
            self._workers = Workers(limits.workers, limits.seconds, module)
            self._workers.call(str)  # starts the imports
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grading")
        return self

    def __exit__(self, *exception: object) -> None:
        """Kills the worker processes, even while they work; a running call of a user's function finishes by itself."""
        if self._workers:
            self._workers.__exit__()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def submit(self, asked: Sequence[Answered]) -> "Future[Scores]":
        """A future of a batch's scores; its `result()` raises any exception of the grading."""
        return self._thread.submit(self._scores, asked)

    def _scores(self, asked: Sequence[Answered]) -> Scores:
        rows, lengths = [row[:4] for row in asked], np.array([row.length for row in asked])
        if self.reward.reads_chats:
            rows = [(row.asked, *row[1:4]) for row in asked]
        parts, failures = self._graded(asked) if self._workers else self._custom(rows)
        longest, overlong = self._config.rollout.max_completion_tokens, self._config.task.overlong_tokens
        parts[LENGTH] = lengths / longest
        if overlong is not None:
            parts[OVERLONG] = overlong_penalty(lengths, longest, overlong)
        weights = self.reward.weights
        check_parts(self.reward.name, weights, parts)
        rewards = sum(weights.get(part, 1.0) * values for part, values in parts.items())
        if self._workers:
            rewards = np.where(failures > 0, 0.0, rewards)
        self._check_bounded(rewards, rows, failures == 0)
        success = parts["accuracy"] >= 1 if "accuracy" in parts else rewards >= self._config.task.success
        parts = {part: values.astype(np.float32) for part, values in parts.items()}
        return Scores(rewards.astype(np.float32), parts, success, failures)

    def _custom(self, rows: Sequence[Row]) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Parts of each row from a user's function, and the failure no_reward for rows without a reward."""
        parts = custom_parts(self.reward, rows)
        self._names = self._names or sorted(parts)
        if sorted(parts) != self._names:
            raise ValueError(
                f"reward function {self.reward.name} returned the parts {', '.join(sorted(parts))}, and earlier"
                f" {', '.join(self._names)}; it must return the same parts for every batch, with 0 or None in them"
            )
        missing = np.isnan(list(parts.values())).any(0)
        return parts, np.where(missing, FAILURES.index("no_reward"), 0).astype(np.int32)

    def _check_bounded(self, rewards: np.ndarray, rows: Sequence[Row], graded: np.ndarray) -> None:
        """Refuses rewards that training cannot compute with: not finite, or larger than MOST_REWARD."""
        if (bad := graded & ~(np.abs(rewards) <= MOST_REWARD)).any():
            row = int(np.argmax(bad))
            raise ValueError(
                f"reward {self.reward.name}: the sum of its parts, each times its weight, is {rewards[row]} for"
                f" completion {rows[row][1]!r:.200} (row {row}); rewards are finite and at most {MOST_REWARD:g} either"
                " way, so lower task.reward_weights"
            )

    def parsed(self, completions: Sequence[str], openings: Sequence[str] | None = None) -> list[str | None]:
        """The answer of each completion as text, for counting votes, under the limits of grading.

        Args:
            openings: thinking tag that each prompt leaves open, or an empty string; None: no prompt leaves one open.
        Returns:
            A text for each completion; None if it has no answer, or cannot be read within the limits.
        """
        openings = openings or [""] * len(completions)
        if not self.reward.per_row:
            said = zip(openings, completions, strict=True)
            # A completion that ends inside its thoughts has no answer.
            texts = [(whole, after_thoughts(whole)) for whole in itertools.starmap(whole_reply, said)]
            return [None if whole.strip() and not text.strip() else text.strip() for whole, text in texts]
        rows = [(text,) for text in completions]
        return [answer for _, answer in self._called(GRADERS[self.reward.name].parse, rows, openings)]

    def _graded(self, asked: Sequence[Answered]) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Parts of each row, and the failure of its grading, from the worker processes."""
        grader = GRADERS[self.reward.name]
        openings = [opening_tag(row.prompt) if row.opening is None else row.opening for row in asked]
        rows = [(row.completion, row.answer, dict(row.columns)) for row in asked]
        outcomes = self._called(grader.grade, rows, openings)
        parts = {
            name: np.array([0.0 if values is None else values[name] for _, values in outcomes])
            for name in grader.weights
        }
        return parts, np.array([FAILURES.index(failure) for failure, _ in outcomes], np.int32)

    def _called(self, function: str, rows: Sequence[tuple], openings: Sequence[str]) -> list[tuple[str, Any]]:
        """Calls a function for every row in the worker processes; the first value of a row is a completion.

        Returns:
            The failure and the result of each row; the result of a failure is None.
        """
        limit = self._config.grading.max_characters
        calls = [
            self._workers.call(grade_row, function, whole_reply(opening, row[0]), *row[1:])
            if len(row[0]) <= limit
            else None
            for row, opening in zip(rows, openings, strict=True)
        ]
        outcomes = []
        for call in calls:
            try:
                outcomes.append(("too_long", None) if call is None else (FAILURES[0], call.result()))
            except CallFailed as error:
                outcomes.append((error.reason, None))
        return outcomes


def overlong_penalty(lengths: np.ndarray, longest: int, margin: int) -> np.ndarray:
    """Penalty for long completions: 0 up to `longest` − `margin` tokens, then linearly down to −1 at `longest` tokens.

    Args:
        lengths: numbers of tokens.
        longest: limit of the number of tokens.
        margin: number of tokens over which the penalty grows, from 1 to `longest`.
    Reference: arXiv 2503.14476 (DAPO, soft overlong punishment).
    """
    return -np.clip((lengths - (longest - margin)) / margin, 0.0, 1.0)
