"""The reward of completions: the function that `task.reward` names, the reward's parts, and their weights."""

import ast
import functools
import inspect
import logging
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from recjax.algorithms.options import user_function
from recjax.config.parts import LENGTH, OVERLONG, ROWS, SCORE, SHAPING, TURNS
from recjax.config.tasks import PYTHON, OneTask
from recjax.errors import UserError
from recjax.grading.graders import GRADERS
from recjax.runtime.files import digest

MODEL = "model:"  # beginning of task.reward that names a reward model's folder
_REWARD_MODEL = "recjax.rewards.reward_model:RewardModel"  # The module imports JAX, so it is not imported here.
# Largest size of a reward or a part. Advantages and their squares are float32, which ends at 3e38.
MOST_REWARD = 1e9

logger = logging.getLogger(__name__)


class Reward(NamedTuple):
    """The reward of completions: a sum of named parts, each times its weight.

    name: value of `task.reward`.
    function: the function that `name` names, or the functions of a list.
    per_row: True for a function of recjax.grading.graders, which grades one row in a worker process; all other
        functions take a batch, see recjax.rewards.custom.
    weights: weights by part; a part without an entry has weight 1.
    seconds: time limit of an `async` function for a batch; None: no limit.
    retries: number of times that an `async` function is called again after it failed.
    remote: pickled function that a program passed to recjax.run and that is not `async`. Worker processes get only
        this function once; all other fields arrive with each call.
    answer: the data's answer column, for functions that take columns by name; None: the problems have no answers.
    columns: names of all other columns; None: those of the graded rows.
    """

    name: str
    function: Any
    per_row: bool
    weights: Mapping[str, float]
    seconds: float | None = None
    retries: int = 0
    remote: bytes | None = None
    answer: str | None = "answers"
    columns: tuple[str, ...] | None = None

    @property
    def functions(self) -> dict[str, "Reward"]:
        """The reward as rewards of one function each, by the part that a plain number of the function is."""
        if not isinstance(self.function, tuple):
            return {SCORE: self}
        named = _by_name(self.function)
        return {name: self._replace(name=name, function=function) for name, function in named.items()}

    @property
    def reads_chats(self) -> bool:
        """True if the function gets prompts as the task has them, text or messages, and not as the policy saw them."""
        return self.name.startswith(MODEL)


class MixedReward(NamedTuple):
    """The rewards of a mixture's tasks, by name. Their parts have no common weights."""

    rewards: Mapping[str, Reward]
    weights: Mapping[str, float] = MappingProxyType({})

    @property
    def per_row(self) -> bool:
        """True if worker processes compute any of the rewards."""
        return any(reward.per_row for reward in self.rewards.values())

    @property
    def remote(self) -> None:
        """A mixture has no function that a program passed."""


def load_reward(
    name: str,
    weights: Mapping[str, float] = MappingProxyType({}),
    overlong: bool = False,
    function: Callable | Sequence[Callable] | None = None,
    device: str = "auto",
) -> Reward:
    """Loads the reward that `task.reward` names; `task.reward_weights` overrides its default weights.

    Args:
        name: name of a built-in reward, a user's function as module:function, model:PATH, or the `passed_name` of
            `function`.
        overlong: flag to add the part OVERLONG, with weight 1.
        function: reward function, or list of functions, that a program passed to recjax.run; None without one.
        device: device of a reward model, see `RewardModel`.
    Raises:
        UserError: the module or function cannot be imported, a weight names a part that a built-in reward lacks, the
            folder has no reward model, or the function is missing or cannot be pickled.
    """
    default_weights = {OVERLONG: 1.0} if overlong else {}
    if name.startswith(PYTHON):
        if function is None:
            raise UserError(
                "task.reward",
                "a program passed this function to recjax.run",
                "pass it again as reward=…, or set task.reward to a module:function",
                value=name,
            )
        name = name.removeprefix(PYTHON).partition("#")[0]
        if isinstance(function, Sequence):
            function = tuple(function)
        reward = Reward(name, function, False, part_weights(weights, default_weights))
        if inspect.iscoroutinefunction(function):
            return reward
        import cloudpickle  # Only programs that pass functions need it.

        try:
            return reward._replace(remote=cloudpickle.dumps(function))
        except Exception as error:  # The values that the function reads raise errors of any kind.
            raise UserError(
                f"reward function {name}",
                f"cannot be sent to the grading workers ({type(error).__name__}: {error})",
                "create what it reads inside the function, or set task.reward to a module:function, which runs here",
            ) from error
    if name not in GRADERS:
        if name.startswith(MODEL):
            function = pkgutil.resolve_name(_REWARD_MODEL)(name.removeprefix(MODEL), device)
        else:
            function = user_function("task.reward", name)
        return Reward(name, function, False, part_weights(weights, default_weights))
    grader = GRADERS[name]
    check_parts(name, weights, [*grader.weights, LENGTH, *default_weights])
    all_weights = part_weights(weights, {**grader.weights, **default_weights})
    return Reward(name, user_function("task.reward", grader.grade), True, all_weights)


def _by_name(functions: Sequence[Callable]) -> dict[str, Callable]:
    """Functions by their names, with a number after a name that an earlier one has."""
    named = {}
    for function in functions:
        first_name = getattr(function, "__name__", type(function).__name__).strip("<>")
        name = first_name
        count = 1
        while name in named:
            count += 1
            name = f"{first_name}_{count}"
        named[name] = function
    return named


def named_weights(functions: Any, weights: Sequence[float]) -> dict[str, float]:
    """TRL's list of weights as `task.reward_weights`.

    Raises:
        UserError: there is another number of functions.
    """
    names = [SCORE]
    if isinstance(functions, Sequence):
        names = list(_by_name(functions))
    if len(names) != len(weights):
        raise UserError(
            "task.reward_weights", "takes a weight for each reward function", f"there are {len(names)}", value=weights
        )
    return dict(zip(names, weights, strict=True))


def passed_name(function: Any) -> str:
    """The value of `task.reward` for a program's function, or list of functions: the name and a digest.

    The digest covers the code, without comments and layout, and the plain values that it reads from outside, but no
    other functions. A function whose source is not at hand has none.

    Raises:
        UserError: the value is neither a function nor a list of functions.
    """
    if isinstance(function, Sequence) and not isinstance(function, str) and function:
        names = [passed_name(each).removeprefix(PYTHON) for each in function]
        joined = "+".join(name.partition("#")[0] for name in names)
        return f"{PYTHON}{joined}#{digest(repr(names).encode())[:16]}"
    if not callable(function):
        raise UserError(
            "reward",
            "takes a function, or a list of functions",
            "for a reward by its name, set task.reward",
            value=function,
        )
    name = PYTHON + getattr(function, "__name__", type(function).__name__).strip("<>")
    code: Any = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    # Python 3.13 keeps the text of `python -c` as <string>, which is also the file name of code from eval and exec.
    if getattr(code, "co_filename", "") == "<string>" and getattr(function, "__module__", "") != "__main__":
        return name
    try:
        tree = ast.parse("".join(inspect.findsource(code)[0]))
        outside: dict[str, Any] = {}
    except (OSError, TypeError, SyntaxError):
        return name
    if inspect.isfunction(function):
        codes = [code]
        names = set()
        for inner in codes:  # The list grows by the code of comprehensions and inner functions.
            codes += filter(inspect.iscode, inner.co_consts)
            names.update(inner.co_names)
        outside = {key: value for key, value in function.__globals__.items() if key in names}
        outside |= inspect.getclosurevars(function).nonlocals
    source = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            first_lines = [node.lineno]
            first_lines += [decorator.lineno for decorator in getattr(node, "decorator_list", ())]
            if code.co_firstlineno in first_lines:
                source.append(ast.unparse(node))
    values = sorted((key, value) for key, value in outside.items() if isinstance(value, int | float | str | None))
    return f"{name}#{digest(repr((source, values)).encode())[:16]}"


def part_weights(chosen: Mapping[str, float], own: Mapping[str, float] = MappingProxyType({})) -> dict[str, float]:
    """The weight of each part of a reward, for everything that adds parts up or reads them one by one.

    A part without an entry has weight 1. Counts of tokens, turns and rows weigh 0 unless `chosen` names them.

    Args:
        chosen: `task.reward_weights` of the completion's task.
        own: default weights of a reward function's parts.
    """
    return {LENGTH: 0.0, TURNS: 0.0, ROWS: 0.0, **own, **chosen}


def check_part_names(names: Iterable[str], owner: str) -> None:
    """Refuses names of parts that recjax adds itself.

    Args:
        owner: source of the parts, for the message.
    Raises:
        UserError: a name is in SHAPING.
    """
    for name in names:
        if name in SHAPING:
            raise UserError(
                owner,
                f"has a part {name!r}",
                f"recjax itself adds parts with the names {', '.join(SHAPING)}, so rename it, for example to"
                f" {name}_penalty",
            )


def is_accurate(
    parts: Mapping[str, float | Float[np.ndarray, " batch"]],
    reward: float | None,
    success: float,
    verdict: str | None = None,
) -> bool | Bool[np.ndarray, " batch"] | None:
    """True if an answer is right, which no weight and no part in SHAPING changes; None if no part is a verdict.

    The verdict is the part `verdict`, or else `accuracy`, `score`, or the only part that the completion has. It must be
    at least `success`, and `accuracy` at least 1. A NaN in it is not right.

    Args:
        parts: unweighted parts by name, of one completion or of a batch; NaN: the completion does not have the part.
        reward: a completion's reward, which is the verdict if there is at most one part and none is in SHAPING: then
            recjax did not compute the reward, and its parts need not be complete. Not read in other cases.
        success: `task.success` of the completion's task.
        verdict: `task.verdict` of the completion's task.
    """
    returned = [name for name in parts if name not in SHAPING]
    candidates = [verdict] if verdict else ["accuracy", SCORE]
    named = [name for name in candidates if name in parts]
    is_graded_here = len(returned) < len(parts)
    if "accuracy" in named:
        return parts["accuracy"] >= 1
    if verdict is None and not is_graded_here and len(returned) < 2:
        score = reward
    elif named:
        score = parts[named[0]]
    elif verdict is None and returned:
        values = np.array([parts[name] for name in returned])
        if (np.sum(~np.isnan(values), axis=0) > 1).any():
            warn_of_no_verdict(tuple(returned))
            return None
        score = np.nansum(values, axis=0)
    else:
        return None
    right = np.float32(score) >= np.float32(success)  # Training has rewards in float32: 0.9 is at least 0.9 there.
    if np.ndim(right):
        return np.asarray(right)
    return bool(right)


@functools.cache
def warn_of_no_verdict(parts: tuple[str, ...]) -> None:
    """Logs once that a reward's parts have no verdict, and the remedy."""
    logger.warning(
        "a reward has the parts %s, and none is the verdict: recjax shows the reward instead of an accuracy. Name the"
        " part that says whether an answer is right with task.verdict, or return a part `accuracy` as well: 1 for right"
        " answers, else 0",
        ", ".join(parts),
    )


def verdict_of(
    name: str, parts: Mapping[str, float | Float[np.ndarray, " batch"]], task: OneTask, read_by: str | None
) -> bool | Bool[np.ndarray, " batch"] | None:
    """The verdict of `is_accurate` on the parts that a reward or an agent gave.

    Args:
        name: name of the reward or the agent, for messages.
        read_by: key that reads which answers are right; None if no key does.
    Raises:
        UserError: `task.verdict` is no part, or there is no verdict and a key reads it.
    """
    names = [part_name for part_name in parts if part_name not in SHAPING]
    listed = f"{name} has the parts {', '.join(names)}"
    if task.verdict is not None and task.verdict not in names:
        raise UserError("task.verdict", listed, "name one of them", value=task.verdict)
    accurate = is_accurate(parts, None, task.success, task.verdict)
    if accurate is None and read_by:
        raise UserError(
            read_by,
            f"reads which answers are right, and {listed}, none of which says so",
            "name it with task.verdict, or return a part `accuracy`",
        )
    return accurate


def check_parts(name: str, weights: Iterable[str], known: Iterable[str]) -> None:
    """Refuses weights, by the names of their parts, for parts that the reward `name` does not have."""
    for part_name in weights:
        if part_name not in known:
            parts = ", ".join(known)
            raise UserError(
                f"task.reward_weights.{part_name}", f"the reward {name} has the parts {parts}", "name one of them"
            )
