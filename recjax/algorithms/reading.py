"""Names of the values that axis functions read: a function receives the values that its positional parameters name.

A function that names a value of WHOLE_BATCH is evaluated once, on the whole batch; other functions on each micro-batch.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping

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
# Available on each micro-batch, only to the axis `term`.
TERMS = {
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
    "scored_reference_kl": "KL(π ‖ π_ref) over the vocabulary at each token before the update, in nats, [batch, time];"
    " needs the scoring pass and the reference of `reference_logprobs`",
}
# Computed before each update of a batch.
RESCORED = frozenset(
    {"scored_logprobs", "scored_log_ratio", "scored_entropy", "scored_reference_kl", "effective_share"}
)
SCORED = RESCORED | {"proximal_logprobs"}


@functools.cache  # by functions without options, which may be arguments of a compiled program
def parameters(function: Callable) -> Mapping[str, inspect.Parameter]:
    """The parameters in a function's signature, by name.

    Examples:
        >>> def bounded(ratio, *, cap=3.0): ...
        ...
        >>> parameters(bounded)["cap"].default
        3.0
    """
    return inspect.signature(function).parameters


@functools.cache
def names_read(function: Callable) -> tuple[str, ...]:
    """Names of a function's positional parameters, which are the values that it reads.

    Examples:
        >>> def bounded(ratio, advantages, *, cap=3.0): ...
        ...
        >>> names_read(bounded)
        ('ratio', 'advantages')
    """
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return tuple(parameter.name for parameter in parameters(function).values() if parameter.kind in kinds)


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
    read = names_read(function)
    for parameter in read:
        if parameter not in known:
            similar = did_you_mean(parameter, known)
            raise UserError(
                key,
                f"its parameter {parameter!r} is not a value of this axis",
                f"read some of {', '.join(known)}{similar}. Options come after a * in the signature",
                name,
            )
    from_micro_batch = [value for value in read if value in MICRO_BATCH]
    from_whole_batch = [value for value in read if value in WHOLE_BATCH]
    has_micro_batch = any(value in MICRO_BATCH for value in known)
    if from_micro_batch and from_whole_batch and has_micro_batch:
        problem = (
            f"reads {', '.join(from_micro_batch)} of a micro-batch and {', '.join(from_whole_batch)} of the whole batch"
        )
        raise UserError(
            key,
            problem,
            "instead of the first, read scored_logprobs or scored_log_ratio",
            name,
        )
