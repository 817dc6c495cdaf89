"""Grading in parallel with training: turns batches into futures of scores; built-in rewards run in worker processes."""

import itertools
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np

from recjax.config import Config
from recjax.errors import UserError
from recjax.grading.graders import GRADERS, grade_row
from recjax.grading.thinking import after_thoughts, opening_tag, whole_reply
from recjax.rewards.custom import Answered, custom_parts, remote_parts
from recjax.rewards.reward import (
    LENGTH,
    MOST_REWARD,
    OVERLONG,
    ROWS,
    SCORE,
    SHAPING,
    TURNS,
    MixedReward,
    Reward,
    check_parts,
    is_accurate,
    verdict_of,
)
from recjax.runtime.workers import CallFailed, DaemonThreads, Workers

# Reasons why a completion has no grade; no_reward: the user's function returned None in all parts with a weight.
FAILURES = ("none", "timeout", "crash", "too_long", "error", "no_reward")
NO_REWARD = FAILURES.index("no_reward")


class Scores(NamedTuple):
    """Scores of each completion: its reward, the parts whose weighted sum is the reward, and whether it is correct.

    A part that a completion does not have is NaN. `accurate` is 1 or 0, or NaN if no part of the reward is a verdict.
    `failures` holds indices into FAILURES; a completion with a failure
    is not accurate. With a user's function, no_reward has the reward NaN, exceptions stop the run, and only a function
    in worker processes has the failures timeout, crash and too_long.
    """

    rewards: np.ndarray
    parts: dict[str, np.ndarray]
    accurate: np.ndarray
    failures: np.ndarray


class Grading:
    """Scores batches in the background, in the order of submission; a context manager that owns the worker processes.

    A completion gets reward 0, and 0 for all parts except length, if it is longer than `grading.max_characters` or if a
    built-in reward crashes, raises, or takes longer than `grading.seconds`. Other completions are not affected. A
    function that a program passed grades all completions of a prompt in one call, within the sum of their limits. If
    that call crashes or takes longer, it grades each by itself. Each task of a mixture has its own reward; they
    share the worker processes.
    """

    def __init__(self, config: Config, reward: Reward | MixedReward):
        """Starts no processes; `__enter__` does."""
        self._config = config
        self.reward = reward
        self._rewards = reward.rewards if isinstance(reward, MixedReward) else {"": reward}
        self._thread: DaemonThreads | None = None
        self._workers: Workers | None = None
        self._without_verdict: set[str] = set()  # These tasks have no verdict.
        self._names: dict[str, list[str]] = {}  # Each reward has the part names of its function's first result.

    @property
    def failures(self) -> tuple[str, ...]:
        """The FAILURES that completions of this reward can have."""
        failures = []
        if self.reward.per_row or self.reward.remote:
            failures += FAILURES[1:NO_REWARD]
        if isinstance(self.reward, MixedReward) or not self.reward.per_row:  # A user's function may refuse to grade.
            failures += FAILURES[NO_REWARD:]
        return tuple(failures)

    def __enter__(self) -> "Grading":
        """Starts the worker processes, if the reward needs any."""
        limits = self._config.grading
        remote = self.reward.remote
        modules = set()
        for reward in self._rewards.values():
            if reward.per_row:
                grader = GRADERS[reward.name]
                modules.add(grader.grade.partition(":")[0])
                if grader.package:
                    modules.add(grader.package)
        if remote:
            modules.add(remote_parts.__module__)
        if modules:
            self._workers = Workers(limits.workers, limits.seconds, *sorted(modules), held=remote)
            self._workers.call(str)  # This first call starts the imports.
        self._thread = DaemonThreads(1, "grading")
        return self

    def __exit__(self, *exception: object) -> None:
        """Kills the worker processes, even while they work; a reward in this process is left alone."""
        if self._workers:
            self._workers.__exit__()
        assert self._thread is not None
        self._thread.shutdown()

    def submit(self, rows: Sequence[Answered]) -> "Future[Scores]":
        """A future of a batch's scores; its `result()` raises any exception of the grading."""
        assert self._thread is not None
        return self._thread.submit(self._scores, rows)

    def _scores(self, rows: Sequence[Answered]) -> Scores:
        if not isinstance(self.reward, MixedReward):
            return self._scored(self.reward, rows, "")
        order = sorted(range(len(rows)), key=lambda index: rows[index].task)
        task_scores = []
        for task, indices in itertools.groupby(order, key=lambda index: rows[index].task):
            if task not in self._rewards:
                raise UserError(
                    "task.mixture",
                    f"a completion belongs to the task {task!r}",
                    f"the mixture has {', '.join(self._rewards)}. Name the task in the row's metadata as `task`,"
                    " or remove the row",
                )
            task_rows = [rows[index] for index in indices]
            task_scores.append(self._scored(self._rewards[task], task_rows, task))
            clash = task_scores[-1].parts.keys() & self._rewards.keys()
            if clash:
                raise UserError(
                    f"task.mixture.{task}",
                    f"its reward has a part {min(clash)!r}, and a task has the same name, so that both would be"
                    " the metric reward/NAME",
                    "rename the task",
                )
        back = np.argsort(order)
        rewards = np.concatenate([scores.rewards for scores in task_scores])[back]
        accurate = np.concatenate([scores.accurate for scores in task_scores])[back]
        failures = np.concatenate([scores.failures for scores in task_scores])[back]
        missing_parts = [np.full(len(scores.rewards), np.nan, np.float32) for scores in task_scores]
        names = {}
        for scores in task_scores:
            names |= dict.fromkeys(scores.parts)
        parts = {}
        for name in names:
            pairs = zip(task_scores, missing_parts, strict=True)
            parts[name] = np.concatenate([scores.parts.get(name, missing) for scores, missing in pairs])[back]
        return Scores(rewards, parts, accurate, failures)

    def _scored(self, reward: Reward, rows: Sequence[Answered], task_name: str) -> Scores:
        task = self._config.task.of(task_name)
        lengths = np.array([row.length for row in rows])
        if reward.per_row:
            parts, failures = self._graded(reward, rows)
        else:
            parts, failures = self._custom(reward, rows)
        longest = self._config.rollout.max_completion_tokens
        overlong = self._config.task.overlong_tokens
        parts[LENGTH] = lengths / longest
        if overlong is not None:
            parts[OVERLONG] = overlong_penalty(lengths, longest, overlong)
        weights = reward.weights
        if task.reward or not self._config.task.agent:  # Otherwise weights may belong to rewards that agents return.
            check_parts(reward.name, [name for name in reward.weights if name not in (TURNS, ROWS)], parts)
        rewards = sum(weights.get(name, 1.0) * np.nan_to_num(values) for name, values in parts.items())
        rewards = np.where(failures > 0, 0.0, rewards)
        rewards = np.where(failures == NO_REWARD, np.nan, rewards)
        is_invalid = (failures == 0) & ~(np.abs(rewards) <= MOST_REWARD)
        if is_invalid.any():
            row = int(np.argmax(is_invalid))
            raise UserError(
                f"reward {reward.name}",
                f"the sum of its parts, each times its weight, is {rewards[row]} for completion"
                f" {rows[row].completion!r:.200} (row {row})",
                f"rewards are finite and at most {MOST_REWARD:g} either way, so lower task.reward_weights",
            )
        accurate = np.zeros(len(rows), np.float32)
        is_graded = failures == 0
        if is_graded.any():  # Otherwise the names of the parts may not be known.
            graded = {name: values[is_graded] for name, values in parts.items()}
            if self._config.task.agent and not task.reward:  # The verdict may be a part that agents return.
                right = is_accurate(graded, None, task.success, task.verdict)
            else:
                right = verdict_of(f"the reward {reward.name}", graded, task, self._config.verdict_reader(task_name))
            if right is None:
                self._without_verdict.add(task_name)
            else:
                accurate[is_graded] = right
        if task_name in self._without_verdict:
            accurate[:] = np.nan
        parts = {name: values.astype(np.float32) for name, values in parts.items()}
        return Scores(rewards.astype(np.float32), parts, accurate, failures)

    def _custom(self, reward: Reward, rows: Sequence[Answered]) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Parts of each row from a user's function, and each row's failure."""
        failures = np.zeros(len(rows), np.int32)
        parts = {}
        if reward.remote:
            outcomes = self._remote(reward, rows)
        else:
            outcomes = [(slice(None), custom_parts(reward, rows))]
        for indices, values in outcomes:
            if isinstance(values, str):
                failures[indices] = FAILURES.index(values)
                continue
            names = self._names.setdefault(reward.name, sorted(values))
            if sorted(values) != names:
                raise UserError(
                    problem=(
                        f"reward function {reward.name} returned the parts {', '.join(sorted(values))}, and earlier"
                        f" {', '.join(names)}"
                    ),
                    remedy="it must return the same parts for every batch, with 0 or None in them",
                )
            for name, numbers in values.items():
                parts.setdefault(name, np.zeros(len(rows)))[indices] = numbers
        if not parts:  # All calls failed.
            names = self._names.get(reward.name)
            if not names:
                names = [name for name in reward.weights if name not in SHAPING]
            if not names:
                names = [SCORE]
            parts = {name: np.zeros(len(rows)) for name in names}
        # A part without weight is a measurement, and makes no reward.
        counted = [values for name, values in parts.items() if reward.weights.get(name, 1.0)]
        if not counted:
            counted = list(parts.values())
        failures[np.isnan(counted).all(0)] = NO_REWARD
        return parts, failures

    def _remote(self, reward: Reward, rows: Sequence[Answered]) -> list[tuple[list[int], dict[str, list[float]] | str]]:
        """The parts, or the failure, of each list of indices in `rows`, from the worker processes."""
        limits = self._config.grading
        assert self._workers is not None
        workers = self._workers
        outcomes: list[tuple[list[int], dict[str, list[float]] | str]] = []
        settings = reward._replace(function=None, remote=None)  # The workers hold the function.

        def started(indices: list[int]) -> tuple[list[int], Future]:
            copies = [rows[index]._replace(columns=dict(rows[index].columns)) for index in indices]
            return indices, workers.call(remote_parts, settings, copies, seconds=limits.seconds * len(indices))

        short = [index for index, row in enumerate(rows) if len(row.completion) <= limits.max_characters]
        long = [index for index, row in enumerate(rows) if len(row.completion) > limits.max_characters]
        outcomes.append((long, "too_long"))
        calls = [started(list(group)) for _, group in itertools.groupby(short, lambda index: rows[index].prompt)]
        for indices, call in calls:
            try:
                outcomes.append((indices, call.result()))
            except CallFailed as error:
                if error.reason == "error":
                    name, _, text = str(error).partition(": ")
                    if name != UserError.__name__:
                        raise
                    raise UserError(problem=text) from error
                if len(indices) > 1:
                    calls += [started([index]) for index in indices]
                else:
                    outcomes.append((indices, error.reason))
        return outcomes

    def parsed(
        self, completions: Sequence[str], openings: Sequence[str] | None = None, task: str = ""
    ) -> list[str | None]:
        """The answer of each completion as text, for counting votes, under the limits of grading.

        Args:
            openings: thinking tag that each prompt leaves open, or an empty string; None: no prompt leaves one open.
            task: name of the completions' task in a mixture.
        Returns:
            A text for each completion; None if it has no answer, or cannot be read within the limits.
        """
        openings = openings or [""] * len(completions)
        reward = self._rewards[task]
        if not reward.per_row:
            answers = []
            for opening, completion in zip(openings, completions, strict=True):
                reply = whole_reply(opening, completion)
                answer = after_thoughts(reply).strip()
                if reply.strip() and not answer:  # A completion that ends inside its thoughts has no answer.
                    answer = None
                answers.append(answer)
            return answers
        rows = [(text,) for text in completions]
        return [answer for _, answer in self._called(GRADERS[reward.name].parse, rows, openings)]

    def _graded(self, reward: Reward, rows: Sequence[Answered]) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Parts and failure of each row, from the worker processes."""
        grader = GRADERS[reward.name]
        openings = [opening_tag(row.prompt) if row.opening is None else row.opening for row in rows]
        arguments = [(row.completion, row.answer, dict(row.columns)) for row in rows]
        outcomes = self._called(grader.grade, arguments, openings)
        failed = dict.fromkeys(grader.weights, 0.0)
        grades = [values or failed for _, values in outcomes]
        parts = {}
        for name in grader.weights:
            parts[name] = np.array([values[name] for values in grades])
        return parts, np.array([FAILURES.index(failure) for failure, _ in outcomes], np.int32)

    def _called(self, function: str, rows: Sequence[tuple], openings: Sequence[str]) -> list[tuple[str, Any]]:
        """Calls a function for every row in the worker processes; the first value of a row is a completion.

        Returns:
            The failure and the result of each row; the result of a failure is None.
        """
        limit = self._config.grading.max_characters
        assert self._workers is not None
        calls = []
        for (completion, *arguments), opening in zip(rows, openings, strict=True):
            call = None
            if len(completion) <= limit:
                call = self._workers.call(grade_row, function, whole_reply(opening, completion), *arguments)
            calls.append(call)
        outcomes = []
        for call in calls:
            if call is None:
                outcomes.append(("too_long", None))
                continue
            try:
                outcomes.append((FAILURES[0], call.result()))
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
