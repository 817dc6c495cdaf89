"""Builds algorithms from names: presets, and a config's changes to them."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from recjax.algorithms.algorithm import TOKEN_RATIO, Algorithm, values_read
from recjax.algorithms.axes import ADDED_TERMS, AXES, function_of, is_users
from recjax.algorithms.axis import Axis, check_users_function, takes_arrays
from recjax.algorithms.catalog import FIELD, PAPER
from recjax.algorithms.options import check_options, did_you_mean, resolved_options
from recjax.algorithms.reading import RESCORED, names_read
from recjax.errors import UserError

# A user's change of an axis: its function's name and options, only the name, or the user's own function.
Change = Mapping[str, Any] | str | Callable


def _block(change: Change) -> Mapping[str, Any]:
    """A change as a mapping with the function's name and options."""
    if isinstance(change, Mapping):
        return change
    return {"name": change}


# The first function of each axis; terms with their own defaults, which turn them off.
REINFORCE: dict[str, dict[str, Any]] = {axis: {"name": next(iter(table))} for axis, table in AXES.items()}
REINFORCE |= {term: {} for term in ADDED_TERMS}
# Changes of each algorithm to REINFORCE. Omitted options have the defaults of the functions' signatures.
PRESETS: dict[str, dict[str, Mapping[str, Any]]] = {}
for _name, _preset in {**PAPER, **FIELD}.items():
    PRESETS[_name] = {axis: _block(change) for axis, change in _preset.changes.items()}
# Axes that the pairwise objective does not read; its row weights depend on group-mean advantages.
NOT_PAIRWISE = tuple(axis for axis in REINFORCE if axis not in ("objective", "selection", "weight"))
# Axes that a user's own objective replaces.
REPLACED = ("clip", "mask", "weight", "correction", "regularizer", "term", "score_centering")
# Row weights of the pairwise objective: functions that read only advantages and kept rows.
ROW_WEIGHTS = ["none"]
for _name, _function in AXES["weight"].items():
    if _function is not None and {"advantages", "kept"}.issuperset(names_read(_function)):
        ROW_WEIGHTS.append(_name)


def resolve(preset: str, overrides: Mapping[str, Change]) -> dict[str, dict[str, Any]]:
    """Lists every axis that the algorithm reads, with its function's name and every option's value.

    An override of some options keeps the preset's remaining options of the axis. An override that names another
    function drops the preset's options of the axis.

    Args:
        preset: key of PRESETS.
        overrides: map of axis → {"name": …, option: …}, or axis → name. A name may be the user's own module:function
            or the function itself. ADDED_TERMS (such as reference_kl) take only options.
    Raises:
        ValueError: an unknown preset, axis, function or option; a value of another type; a required option without a
            value; a setting without effect.

    Examples:
        >>> resolve("rec_one_side_nois", {"clip": {"epsilon_high": 2.0}})["clip"]
        {'name': 'one_side', 'epsilon_low': 0.2, 'epsilon_high': 2.0}
    """
    if not isinstance(preset, str) or preset not in PRESETS:
        remedy = f"takes one of {', '.join(PRESETS)}{did_you_mean(preset, PRESETS)}"
        raise UserError("preset", "unknown", remedy, preset)
    changes = _changed(PRESETS[preset], overrides)
    resolved = {}
    for axis, default in REINFORCE.items():
        options = dict(changes.get(axis, default))
        if axis in AXES:
            name = options.pop("name")
            function = function_of(axis, name)
            resolved[axis] = {"name": name, **resolved_options(axis, str(name), function, options)}
        else:
            resolved[axis] = resolved_options(axis, axis, ADDED_TERMS[axis], options)
            _check_is_on(axis, options, resolved[axis]["coefficient"])
    objective = resolved["objective"]["name"]
    unread: tuple[str, ...] = ()
    if objective == "pairwise_consistency":
        unread = NOT_PAIRWISE
        _check_unread(objective, unread, changes)
        weight = resolved["weight"]["name"]
        if weight not in ROW_WEIGHTS:
            raise UserError("weight.name", f"the objective takes one of {', '.join(ROW_WEIGHTS)}", value=weight)
    elif is_users(objective):
        unread = REPLACED
        # The preset's own choices leave with its policy gradient.
        _check_unread(str(objective), unread, {axis: _block(change) for axis, change in overrides.items()})
    return {axis: block for axis, block in resolved.items() if axis not in unread}


def _changed(preset: Mapping[str, Mapping[str, Any]], overrides: Mapping[str, Change]) -> dict[str, Mapping[str, Any]]:
    """A preset's changes with a user's overrides."""
    changes = dict(preset)
    for axis, change in overrides.items():
        block = _block(change)
        if axis not in REINFORCE:
            remedy = f"takes one of {', '.join(REINFORCE)}{did_you_mean(axis, REINFORCE)}"
            raise UserError(axis, "unknown axis", remedy, block)
        before = changes.get(axis, REINFORCE[axis])
        if not block:
            continue
        is_off = axis in ADDED_TERMS and block.get("coefficient") == 0
        if is_off or ("name" in block and block["name"] != before.get("name")):
            changes[axis] = dict(block)
        else:
            changes[axis] = {**before, **block}
    return changes


def _check_is_on(term: str, options: Mapping[str, Any], coefficient: float) -> None:
    """Rejects options of a term without a coefficient."""
    if coefficient:
        return
    for option, value in options.items():
        if option != "coefficient":
            problem = f"has no effect while {term}.coefficient is 0"
            raise UserError(f"{term}.{option}", problem, "set the coefficient", value)


def _check_unread(objective: str, unread: Iterable[str], changes: Mapping[str, Mapping[str, Any]]) -> None:
    """Rejects changes of axes that an objective does not read."""
    for axis in unread:
        if changes.get(axis):
            problem = f"the objective {objective!r} does not read this axis"
            raise UserError(axis, problem, "remove it", dict(changes[axis]))


@functools.cache
def free_options(algorithm: Algorithm) -> tuple[Algorithm, dict[str, dict[str, float]]]:
    """Separates an algorithm from its numeric options' values, so that one compiled program serves all values.

    A user's own function keeps values that it computes with outside of JAX, as in `if cap > 1`.

    Returns:
        The algorithm without the values, equal for all values; and the values by axis and option, for
        `Algorithm.with_options`.

    Examples:
        >>> free, options = free_options(build_algorithm("rec_one_side_nois", {"clip": {"epsilon_low": 0.5}}))
        >>> options
        {'clip': {'epsilon_low': 0.5, 'epsilon_high': 0.2}}
        >>> free == free_options(build_algorithm("rec_one_side_nois", {}))[0]
        True
    """
    without: dict[str, Axis] = {}
    values: dict[str, dict[str, float]] = {}
    for name, axis in vars(algorithm).items():
        if axis is None:
            continue
        numbers = {option: value for option, value in axis.options if type(value) is float}
        if not numbers or (axis.users and not takes_arrays(axis, tuple(numbers))):
            continue
        remaining = tuple((option, value) for option, value in axis.options if option not in numbers)
        without[name] = dataclasses.replace(axis, options=remaining)
        values[name] = numbers
    return dataclasses.replace(algorithm, **without), values


def build_algorithm(preset: str, overrides: Mapping[str, Change]) -> Algorithm:
    """Builds the algorithm of a preset with a config's changes, which `resolve` describes.

    Raises:
        ValueError: an error of `resolve`, or a value that a function refuses.

    Examples:
        >>> algorithm = build_algorithm("gspo", {"clip": {"epsilon_high": 1e-3}})
        >>> algorithm.needs_behavior_logprobs
        True
    """
    chosen: dict[str, Axis] = {}
    for name, block in resolve(preset, overrides).items():
        axis = _built_axis(name, block)
        if axis is None:
            continue
        field = name
        if name == "weight":
            field = "row_weight" if axis.reads_whole_batch else "token_weight"
        elif name == "objective" and axis.users:
            field = "token_objective"
        chosen[field] = axis
    algorithm = Algorithm(**chosen)
    _check_read(algorithm, {name: _block(change) for name, change in overrides.items()})
    return algorithm


def _built_axis(name: str, block: Mapping[str, Any]) -> Axis | None:
    """An axis with its function's name and options; None if it is off. Checks the options, or the user's function."""
    options = {option: value for option, value in block.items() if option != "name"}
    if name in ADDED_TERMS:
        if not options["coefficient"]:
            return None
        function = ADDED_TERMS[name]
    else:
        function = function_of(name, block["name"])
        if function is None:
            return None
        if is_users(block["name"]):
            axis = Axis(function, tuple(options.items()), users=name)
            check_users_function(axis, f"{name}.name", block["name"])
            return axis
    try:
        check_options(function, options)
    except UserError as error:
        raise UserError(f"{name}.{error.where}", error.problem, error.remedy, error.value) from error
    return Axis(function, tuple(options.items()))


def _check_read(algorithm: Algorithm, overrides: Mapping[str, Mapping[str, Any]]) -> None:
    """Rejects a ratio, anchor or correction without effect, and a correction that would count twice."""
    if algorithm.correction is not None:
        _check_correction(algorithm, dict(overrides.get("correction", {})))
    if algorithm.score_centering is not None:
        _check_centering(algorithm)
    reads = {"anchor": algorithm.reads_ratio, "ratio": algorithm.reads("ratio")}
    for name, is_read in reads.items():
        if overrides.get(name) and not is_read:
            raise UserError(
                name,
                "neither clip, mask nor weight reads a ratio",
                "choose one that reads it, or remove this key",
                dict(overrides[name]),
            )


def _check_correction(algorithm: Algorithm, block: Mapping[str, Any]) -> None:
    """Rejects a correction without effect, and one that would count twice."""
    if algorithm.is_anchored_at_behavior:
        problem = "corrects from the anchor to the behavior policy, which are the same"
        raise UserError("correction", problem, "set anchor.name, or use weight", block)
    weight = algorithm.row_weight
    if weight is not None and "scored_log_ratio" in weight.reads:
        problem = f"{weight.title} also is a ratio to the behavior policy, which would count twice"
        raise UserError("correction", problem, "remove one of the two", block)


# Values that are also known of the sampler's top tokens; a weight that reads other values is unknown for tokens that
# were not sampled.
_KNOWN_UNSAMPLED = {
    "ratio",
    "log_ratio",
    "logprobs",
    "behavior_logprobs",
    "anchor_logprobs",
    "advantages",
    "foreign",
    "completion_mask",
    "effective_share",
}


def _check_centering(algorithm: Algorithm) -> None:
    """Rejects score centering of weights that a token has only if it was sampled."""
    misfits = []
    if algorithm.reads_ratio:
        if not algorithm.is_anchored_at_behavior:
            misfits.append("anchor")
        if algorithm.ratio != TOKEN_RATIO:
            misfits.append("ratio")
    if values_read(algorithm.clip) - _KNOWN_UNSAMPLED:
        misfits.append("clip")
    if values_read(algorithm.token_weight) - _KNOWN_UNSAMPLED:
        misfits.append("weight")
    if not RESCORED.isdisjoint(values_read(algorithm.row_weight)):
        misfits.append("weight")
    if not RESCORED.isdisjoint(values_read(algorithm.mask)):
        misfits.append("mask")
    if misfits:
        assert algorithm.score_centering is not None
        raise UserError(
            "score_centering.coefficient",
            "centers weights of single tokens by their ratio to the behavior policy",
            f"choose a preset without another {' and '.join(misfits)}, or set the coefficient to 0",
            algorithm.score_centering.option("coefficient"),
        )
