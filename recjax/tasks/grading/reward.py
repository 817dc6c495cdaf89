"""The reward of completions: the function that `task.reward` names, the reward's parts, and their weights."""

import pkgutil
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from recjax.algorithms.options import user_function
from recjax.tasks.grading.graders import GRADERS

OVERLONG = "overlong"  # part of every reward if task.overlong_tokens is set; see `overlong_penalty`
TURNS, ROWS = "turns", "rows"  # parts of agents' rewards: numbers of replies and of the trajectory's rows
MODEL = "model:"  # beginning of task.reward that names a reward model's folder
LENGTH = "length"  # part of every reward: completion tokens / rollout.max_completion_tokens
_REWARD_MODEL = "recjax.tasks.grading.reward_model:RewardModel"  # by name, as it imports JAX
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

    @property
    def reads_chats(self) -> bool:
        """True if the function gets prompts as the task has them, text or messages, and not as the policy saw them."""
        return self.name.startswith(MODEL)


def load_reward(
    name: str,
    weights: Mapping[str, float] = MappingProxyType({}),
    overlong: bool = False,
    device: str = "auto",
) -> Reward:
    """Loads the reward that `task.reward` names; `task.reward_weights` overrides its default weights.

    Args:
        name: name of a built-in reward, a user's function as module:function, or model:PATH.
        overlong: flag to add the part OVERLONG, with weight 1.
        device: device of a reward model, see `RewardModel`.
    Raises:
        ValueError: the module or function cannot be imported, a weight names a part that a built-in reward lacks, or
            the folder has no reward model.
    """
    of_length = {OVERLONG: 1.0} if overlong else {}
    if name not in GRADERS:
        if name.startswith(MODEL):
            function = pkgutil.resolve_name(_REWARD_MODEL)(name.removeprefix(MODEL), device)
        else:
            function = user_function("task.reward", name)
        return Reward(name, function, False, {LENGTH: 0.0, **of_length, **weights})
    grader = GRADERS[name]
    known = {**grader.weights, LENGTH: 0.0, **of_length}
    check_parts(name, weights, known)
    return Reward(name, user_function("task.reward", grader.grade), True, {**known, **weights})


def agent_weights(chosen: Mapping[str, float]) -> dict[str, float]:
    """Weights for the parts of an agent's rewards; `task.reward_weights` overrides the defaults."""
    return {TURNS: 0.0, ROWS: 0.0, LENGTH: 0.0, **chosen}


def check_parts(name: str, weights: Mapping[str, float], known: Iterable[str]) -> None:
    """Refuses weights for parts that the reward `name` does not have."""
    for part in weights:
        if part not in known:
            parts = ", ".join(known)
            raise ValueError(f"task.reward_weights.{part}: the reward {name} has the parts {parts}; name one of them")
