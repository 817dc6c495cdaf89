"""The reward of completions: the function that `task.reward` names, the reward's parts, and their weights."""

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
OVERLONG = "overlong"  # part of every reward if task.overlong_tokens is set; see `overlong_penalty`
TURNS, ROWS = "turns", "rows"  # parts of agents' rewards: numbers of replies and of the trajectory's rows
LENGTH = "length"  # part of every reward: completion tokens / rollout.max_completion_tokens
# Largest size of a reward or a part. Advantages and their squares are float32, which ends at 3e38.
MOST_REWARD = 1e9


class Reward(NamedTuple):
    """The reward of completions: a sum of named parts, each times its weight.

    `name` is the value of `task.reward`, and `function` the function that it names. A `per_row` function is one of
    recjax.tasks.grading.graders and grades one row in a worker process; any other function takes a batch, see
    recjax.tasks.grading.custom. A part without an entry in `weights` has weight 1. An `async` function has `seconds`
    for a batch (None: no limit). A call that fails is retried `retries` times.
    """

    name: str
    function: Callable[..., Any]
    per_row: bool
    weights: Mapping[str, float]
    seconds: float | None = None
    retries: int = 0


def load_reward(name: str, weights: Mapping[str, float] = MappingProxyType({}), overlong: bool = False) -> Reward:
    """Loads the reward that `task.reward` names; `task.reward_weights` overrides its default weights.

    Args:
        name: name of a built-in reward, or a user's function as module:function.
        overlong: flag to add the part OVERLONG, with weight 1.
    Raises:
        ValueError: the module or function cannot be imported, or a weight names a part that a built-in reward lacks.
    """
    of_length = {OVERLONG: 1.0} if overlong else {}
    if name not in GRADERS:
        return Reward(name, imported(name), False, {LENGTH: 0.0, **of_length, **weights})
    grader = GRADERS[name]
    known = {**grader.weights, LENGTH: 0.0, **of_length}
    check_parts(name, weights, known)
    return Reward(name, imported(grader.grade), True, {**known, **weights})


def agent_weights(chosen: Mapping[str, float]) -> dict[str, float]:
    """Weights for the parts of an agent's rewards; `task.reward_weights` overrides the defaults."""
    return {TURNS: 0.0, ROWS: 0.0, LENGTH: 0.0, **chosen}


def check_parts(name: str, weights: Mapping[str, float], known: Iterable[str]) -> None:
    """Refuses weights for parts that the reward `name` does not have."""
    for part in weights:
        if part not in known:
            parts = ", ".join(known)
            raise ValueError(f"task.reward_weights.{part}: the reward {name} has the parts {parts}; name one of them")


def described(error: BaseException) -> str:
    """An exception's type and message, then a line for each frame of the traceback in the user's own code."""
    skipped = ("<frozen", "<@beartype", sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), str(PACKAGE))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(skipped)]
    places = [f"\n  {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in frames]
    return f"{type(error).__name__}: {error}" + "".join(places)


def imported(name: str) -> Callable[..., Any]:
    """Imports a function by its name module:function.

    Raises:
        ValueError: the module or function does not exist, or importing it failed.
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
