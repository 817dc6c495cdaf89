"""What a task is: problems to train on, problems held out, and a reward for completions."""

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

RewardFunction = Callable[[Sequence[str], Sequence[str], Sequence[str]], Sequence[float]]


class Problem(NamedTuple):
    """One question: `prompt` is text or a list of chat messages, `answer` is what a completion is checked against.

    `mistakes` are wrong answers of a likely kind, which a warm start can show. `columns` are further columns of the
    data, for the reward function; `difficulty` is a label that evaluation breaks accuracy down by.
    """

    prompt: str | list[dict[str, str]]
    answer: str
    mistakes: tuple[str, ...] = ()
    columns: Mapping[str, Any] = MappingProxyType({})
    difficulty: str | None = None


class Task(NamedTuple):
    """Problems and the function that scores completions; no evaluation problem is among the train problems.

    `parse` takes a completion to the answer that it gives, as text by which votes are counted; None: it gives none.
    """

    train: list[Problem]
    evaluation: list[Problem]
    reward: RewardFunction
    parse: Callable[[str], str | None] = str.strip


def chat(system_prompt: str, question: str) -> list[dict[str, str]]:
    """A system message, where it says something, and a user's message."""
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, {"role": "user", "content": question}]


def is_chat(prompt: Any) -> bool:
    """Whether a value is a list of messages with role and content."""
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(isinstance(turn, dict) and {"role", "content"} <= turn.keys() for turn in prompt)
        and all(isinstance(turn["role"], str) and isinstance(turn["content"], str) for turn in prompt)
    )


def load_reward(name: str) -> RewardFunction:
    """The reward function `module:function`.

    It is called as function(prompts, completions, answers) with equally long lists of strings (prompts as the model
    saw them) and returns one finite number a completion.

    Raises:
        ValueError: the module or function cannot be imported.
    """
    module, _, function = name.partition(":")
    try:
        loaded = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"task.reward = {name!r}: {error}; the module must be importable from the folder you start in or installed"
        ) from error
    if not callable(loaded):
        raise ValueError(f"task.reward = {name!r}: {function} is not a function")
    return loaded


def score(
    reward: RewardFunction, prompts: Sequence[str], completions: Sequence[str], answers: Sequence[str]
) -> list[float]:
    """Rewards of completions, checked.

    Raises:
        ValueError: the function raised, or returned the wrong number of rewards or one that is not a finite number;
            the message names the function and, where one is at fault, the completion.
    """
    name = f"reward function {reward.__module__}:{reward.__qualname__}"
    try:
        rewards = [float(value) for value in reward(prompts, completions, answers)]
    except Exception as error:
        raise ValueError(f"{name} failed with {type(error).__name__}: {error}") from error
    if len(rewards) != len(completions):
        raise ValueError(f"{name} returned {len(rewards)} rewards for {len(completions)} completions")
    for value, completion, answer in zip(rewards, completions, answers, strict=True):
        if not math.isfinite(value):
            raise ValueError(f"{name} returned {value} for completion {completion!r} (answer {answer!r})")
    return rewards
