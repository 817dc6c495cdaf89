"""Grading beside training: batches go in, futures of scores come out; built-in rewards run in worker processes."""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from recjax.config import Config
from recjax.tasks.grading.custom import Row, custom_parts
from recjax.tasks.grading.graders import GRADERS
from recjax.tasks.grading.reward import LENGTH, OVERLONG, Reward, check_parts

FAILURES = ("none", "timeout", "crash", "too_long", "error")  # why a completion could not be graded


class Scores(NamedTuple):
    """Of each completion: its reward, the parts that this is the weighted sum of, whether it is right.

    failures are places in FAILURES; None where the reward is a user's function, whose failures stop the run.
    """

    rewards: np.ndarray
    parts: dict[str, np.ndarray]
    accurate: np.ndarray
    failures: np.ndarray | None


class Grading:
    """Scores batches in the order they come, in the background; a context that holds the worker processes.

    A completion that takes a built-in reward longer than `grading.seconds`, kills its worker, makes it fail, or has
    more than `grading.max_characters` gets reward 0, and so do its parts but length; the others are not touched.
    """

    def __init__(self, config: Config, reward: Reward):
        """Starts nothing yet."""
        self._config, self.reward = config, reward
        self._thread: ThreadPoolExecutor | None = None
        self._server: subprocess.Popen | None = None

    def __enter__(self) -> "Grading":
        """Starts the worker processes, if the reward needs any."""
        if self.reward.per_row:
            limits = [str(self._config.grading.workers), str(self._config.grading.seconds)]
            # In a session of its own: Ctrl-C in a terminal is for the training process, which then ends this one.
            self._server = subprocess.Popen(
                [sys.executable, "-m", "recjax.tasks.grading.server", GRADERS[self.reward.name].grade, *limits],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
                start_new_session=True,
            )
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grading")
        return self

    def __exit__(self, *exception: object) -> None:
        """Ends the worker processes, whatever they are at; a user's function that is at work ends by itself."""
        if self._server:
            with contextlib.suppress(ProcessLookupError):  # it ended by itself
                os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def submit(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        answers: Sequence[str],
        columns: Sequence[Mapping[str, Any]],
        lengths: np.ndarray,
    ) -> "Future[Scores]":
        """Scores of a batch to come; what is raised while they are made, `result()` raises.

        Args:
            prompts: as the model saw them.
            columns: further columns of each row's problem.
            lengths: tokens of each completion.
        """
        rows = list(zip(prompts, completions, answers, columns, strict=True))
        return self._thread.submit(self._scores, rows, lengths)

    def _scores(self, rows: Sequence[Row], lengths: np.ndarray) -> Scores:
        parts, failures = self._graded(rows) if self._server else (custom_parts(self.reward, rows), None)
        longest, overlong = self._config.rollout.max_completion_tokens, self._config.task.overlong_tokens
        parts[LENGTH] = lengths / longest
        if overlong is not None:
            parts[OVERLONG] = overlong_penalty(lengths, longest, overlong)
        weights = self.reward.weights
        check_parts(self.reward.name, weights, parts)
        rewards = sum(weights.get(part, 1.0) * values for part, values in parts.items())
        if failures is not None:
            rewards = np.where(failures > 0, 0.0, rewards)
        success = parts["accuracy"] >= 1 if "accuracy" in parts else rewards >= self._config.task.success
        parts = {part: values.astype(np.float32) for part, values in parts.items()}
        return Scores(rewards.astype(np.float32), parts, success, failures)

    def _graded(self, rows: Sequence[Row]) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Parts of each row and how its grading failed, from the worker processes."""
        limit = self._config.grading.max_characters
        asked = [(text, answer, dict(columns)) for _, text, answer, columns in rows if len(text) <= limit]
        try:
            pickle.dump(asked, self._server.stdin)
            self._server.stdin.flush()
            replies = iter(pickle.load(self._server.stdout))
        except (EOFError, OSError) as error:
            raise RuntimeError("the grading process ended by itself; standard error has its last words") from error
        outcomes = [next(replies) if len(text) <= limit else "too_long" for _, text, *_ in rows]
        names = GRADERS[self.reward.name].weights
        parts = {name: np.array([0.0 if isinstance(row, str) else row[name] for row in outcomes]) for name in names}
        failures = [FAILURES.index(row) if isinstance(row, str) else 0 for row in outcomes]
        return parts, np.array(failures, np.int32)


def overlong_penalty(lengths: np.ndarray, longest: int, margin: int) -> np.ndarray:
    """0 for completions that end before the last `margin` tokens of the limit; from there linearly down to −1 at it.

    Args:
        lengths: in tokens.
        longest: the limit.
        margin: from 1 to `longest`.
    Reference: arXiv 2503.14476 (DAPO, soft overlong punishment).
    """
    return -np.clip((lengths - (longest - margin)) / margin, 0.0, 1.0)
