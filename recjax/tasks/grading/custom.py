"""Rewards of the user's own: a function of a batch, sync or async, whose mistakes are named."""

import asyncio
import inspect
import itertools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from recjax.tasks.grading.processes import finished
from recjax.tasks.grading.reward import LENGTH, MOST_REWARD, OVERLONG, Reward, check_parts, described

logger = logging.getLogger(__name__)

FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0  # seconds before an async reward is asked again; each time twice as long
SCORE = "score"  # the part of a function that returns plain numbers
Row = tuple[str, str, str, Mapping[str, Any]]  # prompt, completion, answer, further columns of the problem


def custom_parts(reward: Reward, rows: Sequence[Row]) -> dict[str, np.ndarray]:
    """The named parts that a user's function gives to a batch, checked.

    It is called as function(prompts, completions, answers), with equally long lists of strings (prompts as the model
    saw them), or with a fourth argument where it takes one: a dict from the name of each further column to the list
    of its values, None in rows without it. It returns one number a completion, of at most MOST_REWARD either way, or a
    dict from names of parts to such lists. None in place of a number, there or in one part, leaves the completion
    without a reward. It may be `async def`: the batch is awaited as one.

    Returns:
        The values of each part; NaN for None.
    Raises:
        ValueError: the function raised or would end the program, or returned the wrong number of values or one that is
            no such number; the message names the function and, where one is at fault, row and completion.
    """
    try:
        result = _call(reward, rows)
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # the last two would end more than the batch
        raise ValueError(f"reward function {reward.name} failed with {described(error)}") from error
    parts = result if isinstance(result, Mapping) else {SCORE: result}
    return {part: _checked(reward, part, values, rows) for part, values in parts.items()}


def check_weights(reward: Reward, row: Row) -> None:
    """Refuses weights of parts that a user's function does not return. Calls it once, with `row` alone.

    Raises:
        ValueError: with the weight and the parts that there are; and as `custom_parts`.
    """
    try:
        parts = custom_parts(reward, [row])
    except ValueError as error:
        raise ValueError(
            f"{error}\n  (it was asked about an empty completion, to know the names of its parts)"
        ) from error
    check_parts(reward.name, reward.weights, [*parts, LENGTH, OVERLONG])


def _call(reward: Reward, rows: Sequence[Row]) -> Any:
    """What the function returns; an async one is asked again after it has failed, ever later, as long as it may."""
    for retry in itertools.count():
        try:
            result = reward.function(*_arguments(reward.function, rows))
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


def _arguments(function: Callable[..., Any], rows: Sequence[Row]) -> list[Any]:
    prompts, completions, answers, columns = (list(column) for column in zip(*rows, strict=True))
    arguments = [prompts, completions, answers]
    if _takes_columns(function):
        names = dict.fromkeys(name for row in columns for name in row)
        arguments.append({name: [row.get(name) for row in columns] for name in names})
    return arguments


def _takes_columns(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(*[None] * 4)
    except TypeError:
        return False
    return True


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
