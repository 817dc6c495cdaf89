"""What completions are worth: the reward that `task.reward` names, its parts and their weights."""

import importlib
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from recjax.algorithms.options import did_you_mean
from recjax.tasks.grading.graders import GRADERS

PACKAGE = Path(__file__).parents[2]
OVERLONG = "overlong"  # a part that a reward has with task.overlong_tokens: see `overlong_penalty`
TURNS, ROWS = "turns", "rows"  # parts that the rewards of agents have: replies, and rows of the trajectory
LENGTH = "length"  # a part that every reward has: completion tokens over rollout.max_completion_tokens
# Of a reward or a part of one, either sign. Advantages and their squares are float32, which ends at 3e38.
MOST_REWARD = 1e9


class Reward(NamedTuple):
    """What completions are worth: a sum of named parts, each times its weight.

    name is what `task.reward` says, with `function` behind it. A `per_row` function is one of
    recjax.tasks.grading.graders and grades one row, in a worker process; any other takes the batch, as
    recjax.tasks.grading.custom says. A part that `weights` does not name weighs 1. An `async` function gets `seconds`
    for a batch, None: as many as it takes, and is asked again `retries` times where it fails.
    """

    name: str
    function: Callable[..., Any]
    per_row: bool
    weights: Mapping[str, float]
    seconds: float | None = None
    retries: int = 0


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


def agent_weights(chosen: Mapping[str, float]) -> dict[str, float]:
    """The weights of the parts that an agent's rewards have, with those of `task.reward_weights` over them."""
    return {TURNS: 0.0, ROWS: 0.0, LENGTH: 0.0, **chosen}


def check_parts(name: str, weights: Mapping[str, float], known: Iterable[str]) -> None:
    """Refuses weights of parts that the reward `name` does not have."""
    for part in weights:
        if part not in known:
            parts = ", ".join(known)
            raise ValueError(f"task.reward_weights.{part}: the reward {name} has the parts {parts}; name one of them")


def described(error: BaseException) -> str:
    """An exception's type and message, then a line for each place in the user's own code that it passed."""
    skipped = ("<frozen", sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), str(PACKAGE))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(skipped)]
    places = [f"\n  {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in frames]
    return f"{type(error).__name__}: {error}" + "".join(places)


def imported(name: str) -> Callable[..., Any]:
    """The function module:function.

    Raises:
        ValueError: there is no such module or function.
    """
    module, _, function = name.partition(":")
    try:
        loaded = importlib.import_module(module)
    except SystemExit as error:
        raise ValueError(
            f"task.reward = {name!r}: importing {module} ends the program (SystemExit: {error.code}); put what only a"
            ' script does under `if __name__ == "__main__":`'
        ) from error
    except ImportError as error:
        remedy = "the module must be importable from the folder you start in or installed"
        raise ValueError(f"task.reward = {name!r}: {described(error)}; {remedy}") from error
    except Exception as error:
        raise ValueError(f"task.reward = {name!r}: importing it failed with {described(error)}") from error
    if not callable(found := getattr(loaded, function, None)):
        own = [name for name, value in vars(loaded).items() if callable(value)]
        raise ValueError(f"task.reward = {name!r}: {module} has no function {function!r}{did_you_mean(function, own)}")
    return found
