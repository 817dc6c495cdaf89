"""Inputs of axis functions: a function receives exactly the values that its positional parameters name.

A function that names a value of WHOLE_BATCH is evaluated once, on the whole batch; other functions on each micro-batch.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from recjax.algorithms.options import did_you_mean
from recjax.errors import UserError

# Available on the whole batch and on each micro-batch.
EVERYWHERE = {
    "advantages": "advantages A, [batch] or [batch, time]; inside the loss [batch, 1] or [batch, time]",
    "completion_mask": "[batch, time], True at tokens that count: sampled by the behavior policy, in kept rows",
    "foreign": "[batch], True for completions by another model; those that experience.mix adds all count as such",
    "effective_share": "[batch], equal for all rows: (Σρ)² / (n Σρ²) over the batch's n tokens, with ρ = π/μ before the"
    " update; needs the scoring pass",
    "trajectories": "[batch], equal for rows of one completion; None if each row is one; give it the default None",
}
MICRO_BATCH = {
    "ratio": "ρ = π/anchor at the level of the axis `ratio`, [batch, time]; for `correction`, and for `mask` if the"
    " anchor is not μ: anchor/μ",
    "log_ratio": "log π − log anchor of each token, [batch, time], unbounded; for `correction`, and for `mask` if the"
    " anchor is not μ: log anchor − log μ",
    "logprobs": "log π of each token, [batch, time]",
    "behavior_logprobs": "log μ of each token, [batch, time]; μ sampled it",
    "anchor_logprobs": "log-probs of the axis `anchor`, [batch, time]; log μ by default",
    "proximal_logprobs": "log π of each token before the batch's first update, [batch, time]; needs the scoring pass",
}
# Available on each micro-batch, to the axis `term` alone.
OF_TERMS = {
    "entropy": "entropy of π at each token, in nats, [batch, time]; a gradient flows through it",
    "reference_logprobs": "log-probs under the initial policy or `model.reference`, [batch, time]",
    "teacher_logprobs": "log-probs under `model.teacher`, [batch, time]",
}
WHOLE_BATCH = {
    "rewards": "[batch], ignored where not kept",
    "group_ids": "[batch], equal for completions of one prompt",
    "kept": "[batch], True for completions that count",
    "lengths": "tokens of each completion, [batch]",
    "reward_parts": "dict of [batch]: the parts of the rewards by name, unweighted; NaN in rows without the part",
    "part_weights": "dict of [batch]: the weight of each part in the reward",
    "turn_rewards": "[batch, turns], the reward of each turn of an agent's trajectory; NaN after its last turn",
    "token_turns": "[batch, time], the turn of an agent that sampled the token, from 0; ignored where masked",
    "scored_logprobs": "log π of each token before the update, [batch, time]; needs the scoring pass",
    "scored_log_ratio": "log π − log μ of each token before the update, [batch, time]; needs the scoring pass",
    "scored_entropy": "entropy of π at each token before the update, in nats, [batch, time]; needs the scoring pass",
}
# Computed before each update of a batch.
RESCORED = frozenset({"scored_logprobs", "scored_log_ratio", "scored_entropy", "effective_share"})
SCORED = RESCORED | {"proximal_logprobs"}


def base(function: Callable) -> Callable:
    """The function that a partial wraps; other functions unchanged.

    Examples:
        >>> import functools
        >>> base(functools.partial(max, default=0)) is max
        True
    """
    return function.func if isinstance(function, functools.partial) else function


def names_read(function: Callable | None) -> tuple[str, ...]:
    """Names of a function's positional parameters; an axis that is off reads none.

    Examples:
        >>> def bounded(ratio, advantages, *, cap=3.0): ...
        ...
        >>> names_read(bounded)
        ('ratio', 'advantages')
    """
    return () if function is None else _positional(base(function))


@functools.cache  # by functions without options, which may be arguments of a compiled program
def _positional(function: Callable) -> tuple[str, ...]:
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = inspect.signature(function).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind in kinds)


def is_of_whole_batch(function: Callable | None) -> bool:
    """True if the function reads a value that only the whole batch has.

    Examples:
        >>> def by_reward(rewards): ...
        ...
        >>> is_of_whole_batch(by_reward)
        True
    """
    return any(name in WHOLE_BATCH for name in names_read(function))


def call(function: Callable, values: object) -> Any:
    """Calls a function with those attributes of `values` that its positional parameters name.

    Raises:
        ValueError: a value that the function reads is missing or None.

    Examples:
        >>> from typing import NamedTuple
        >>> class Values(NamedTuple):
        ...     ratio: float
        ...
        >>> def doubled(ratio): return 2 * ratio
        ...
        >>> call(doubled, Values(1.5))
        3.0
    """
    read = {name: getattr(values, name, None) for name in names_read(function)}
    for name, value in read.items():
        parameters = inspect.signature(base(function)).parameters
        # A parameter with the default None may be None.
        if value is None and parameters[name].default is not None:
            title = getattr(base(function), "__name__", repr(function))
            off = "set its coefficient to 0" if "coefficient" in parameters else "choose another function for this axis"
            raise UserError(name, f"{title} reads it", f"pass it, or {off}", None)
    return function(*read.values())


def check_names(key: str, name: str, function: Callable, known: Iterable[str]) -> None:
    """Rejects a function that reads values unknown to its axis, or values of both micro-batch and whole batch.

    Args:
        key: key of the function in a config, such as "clip.name".
        name: name of the function in the config.
        known: names of the values that the axis has.

    Examples:
        >>> def bounded(ratio, *, cap=3.0): ...
        ...
        >>> check_names("weight.name", "mine:bounded", bounded, ["ratio", "logprobs"])  # accepted
    """
    known = list(known)
    for parameter in names_read(function):
        if parameter not in known:
            similar = did_you_mean(parameter, known)
            raise UserError(
                key,
                f"its parameter {parameter!r} is not a value of this axis",
                f"read some of {', '.join(known)}{similar}. Options come after a * in the signature",
                name,
            )
    of_micro_batch = [value for value in names_read(function) if value in MICRO_BATCH]
    of_whole_batch = [value for value in names_read(function) if value in WHOLE_BATCH]
    if of_micro_batch and of_whole_batch and any(value in MICRO_BATCH for value in known):
        raise UserError(
            key,
            f"reads {', '.join(of_micro_batch)} of a micro-batch and {', '.join(of_whole_batch)} of the whole batch",
            "instead of the first, read scored_logprobs or scored_log_ratio",
            name,
        )
