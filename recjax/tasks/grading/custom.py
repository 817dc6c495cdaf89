"""Custom rewards: a user's function of a batch, sync or async; errors name the function and the completion."""

import asyncio
import contextlib
import inspect
import itertools
import logging
import math
import time
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

import numpy as np

from recjax.algorithms.options import described
from recjax.tasks.grading.event_loop import finished
from recjax.tasks.grading.reward import LENGTH, MOST_REWARD, OVERLONG, Reward, check_parts

logger = logging.getLogger(__name__)

FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0  # seconds before an async reward is retried; doubled for each further retry
SCORE = "score"  # name of the part if the function returns plain numbers
# Prompt, completion, answer, the problem's other columns. Reward models get the messages of a prompt that is a chat.
Row = tuple[str | list[dict[str, str]], str, str, Mapping[str, Any]]


def custom_parts(reward: Reward, rows: Sequence[Row]) -> dict[str, np.ndarray]:
    """Calls the user's function on a batch and checks the named parts that it returns.

    recjax calls function(prompts, completions, answers) with equally long lists of strings; prompts are as the model
    saw them. A function with a fourth parameter also gets a dict that maps the name of every other column to its list
    of values, None in rows without this column. The function returns a number from −MOST_REWARD to MOST_REWARD for
    each completion, or a dict that maps names of parts to such lists. None instead of a number, in any part, leaves
    the completion without a reward. The function may be `async def`; recjax then awaits it once for the batch.

    Returns:
        The values of each part; NaN stands for None.
    Raises:
        ValueError: the function raised, would end the program, or returned the wrong number of values or an invalid
            value. The message names the function and, for an invalid value, the row and the completion.
    """
    try:
        result = _call(reward, rows)
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # the last two would end more than the batch
        raise ValueError(f"reward function {reward.name} failed with {described(error)}") from error
    parts = result if isinstance(result, Mapping) else {SCORE: result}
    return {part: _checked(reward, part, values, rows) for part, values in parts.items()}


def check_weights(reward: Reward, row: Row) -> None:
    """Refuses weights of parts that a user's function does not return; calls the function once, with only `row`.

    Raises:
        ValueError: an unknown part has a weight; the message lists the known parts. Also see `custom_parts`.
    """
    try:
        parts = custom_parts(reward, [row])
    except ValueError as error:
        raise ValueError(
            f"{error}\n  (it was asked about an empty completion, to know the names of its parts)"
        ) from error
    check_parts(reward.name, reward.weights, [*parts, LENGTH, OVERLONG])


def _call(reward: Reward, rows: Sequence[Row]) -> Any:
    """The function's result; a failed call is retried `reward.retries` times, after longer and longer waits."""
    for retry in itertools.count():
        arguments = [list(column) for column in zip(*rows, strict=True)]
        columns = arguments.pop()
        with contextlib.suppress(TypeError):  # of a function that takes no columns
            inspect.signature(reward.function).bind(*arguments, columns)
            names = dict.fromkeys(name for row in columns for name in row)
            arguments.append({name: [row.get(name) for row in columns] for name in names})
        try:
            result = reward.function(*arguments)
            return finished(_within(result, reward.seconds) if inspect.isawaitable(result) else result)
        except Exception as error:
            if retry == reward.retries:
                raise
            wait = min(FIRST_WAIT * 2**retry, LONGEST_WAIT)
            words = described(error).splitlines()[0]
            logger.warning("reward %s failed with %s; it is asked again in %g s", reward.name, words, wait)
            time.sleep(wait)


async def _within(result: Awaitable[Any], seconds: float | None) -> Any:
    try:
        async with asyncio.timeout(seconds):
            return await result
    except TimeoutError as error:
        if seconds is None:
            raise
        raise TimeoutError(f"no reward within task.reward_seconds = {seconds:g}") from error


def _checked(reward: Reward, part: str, values: Any, rows: Sequence[Row]) -> np.ndarray:
    name = f"reward function {reward.name}" + ("" if part == SCORE else f", part {part!r},")
    try:
        values = list(values)
        numbers = [math.nan if value is None else float(value) for value in values]
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} returned {values!r:.200}: {error}; it must return numbers, or None") from error
    if len(numbers) != len(rows):
        raise ValueError(f"{name} returned {len(numbers)} rewards for {len(rows)} completions")
    for index, (value, (_, completion, answer, _)) in enumerate(zip(numbers, rows, strict=True)):
        if not (abs(value) <= MOST_REWARD or values[index] is None):
            raise ValueError(
                f"{name} returned {value} for completion {completion!r} (row {index}, answer {answer!r}); rewards are"
                f" finite and at most {MOST_REWARD:g} either way, so scale or bound it there"
            )
    return np.array(numbers)
