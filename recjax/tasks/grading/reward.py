"""What completions are worth: the reward that `task.reward` names, its parts and their weights."""

import importlib
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from recjax.tasks.grading.graders import GRADERS

OVERLONG = "overlong"  # a part that a reward has with task.overlong_tokens: see `overlong_penalty`
LENGTH = "length"  # a part that every reward has: completion tokens over rollout.max_completion_tokens


class Reward(NamedTuple):
    """What completions are worth: a sum of named parts, each times its weight.

    name is what `task.reward` says, with `function` behind it. A `per_row` function is one of
    recjax.tasks.grading.graders and grades one row, in a worker process; any other takes the batch, as
    recjax.tasks.grading.custom says. A part that `weights` does not name weighs 1.
    """

    name: str
    function: Callable[..., Any]
    per_row: bool
    weights: Mapping[str, float]


def load_reward(name: str, weights: Mapping[str, float] = MappingProxyType({}), overlong: bool = False) -> Reward:
    """The reward that `task.reward` names, with the weights of `task.reward_weights` over its own.

    Args:
        name: a built-in reward, or a user's module:function.
        overlong: whether it has the part OVERLONG, of weight 1.
    Raises:
        ValueError: the module or function cannot be imported, or a built-in reward has no part of a weight's name.
    """
    of_length = {OVERLONG: 1.0} if overlong else {}
    if name not in GRADERS:
        return Reward(name, imported(name), False, {LENGTH: 0.0, **of_length, **weights})
    grader = GRADERS[name]
    known = {**grader.weights, LENGTH: 0.0, **of_length}
    check_parts(name, weights, known)
    return Reward(name, imported(grader.grade), True, {**known, **weights})


def check_parts(name: str, weights: Mapping[str, float], known: Iterable[str]) -> None:
    """Refuses weights of parts that the reward `name` does not have."""
    for part in weights:
        if part not in known:
            parts = ", ".join(known)
            raise ValueError(f"task.reward_weights.{part}: the reward {name} has the parts {parts}; name one of them")


def answer_parser(name: str) -> Callable[[str], str | None]:
    """What takes a completion to the answer it gives, under the reward `name`: of a user's own, the text itself."""
    return imported(GRADERS[name].parse) if name in GRADERS else str.strip


def imported(name: str) -> Callable[..., Any]:
    """The function module:function.

    Raises:
        ValueError: there is no such module or function.
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
