"""Builds algorithms from names: presets, and a config's changes to them."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from recjax.algorithms import losses
from recjax.algorithms.algorithm import RATIO, Algorithm
from recjax.algorithms.axes import ADDED_TERMS, AXES, function_of
from recjax.algorithms.catalog import FIELD, PAPER
from recjax.algorithms.options import described, did_you_mean, require, resolved_options
from recjax.algorithms.reading import RESCORED, base, is_of_whole_batch, names_read
from recjax.errors import UserError

REINFORCE = {axis: {"name": next(iter(table))} for axis, table in AXES.items()} | {term: {} for term in ADDED_TERMS}
# Changes of each algorithm to REINFORCE. Omitted options have the defaults of the functions' signatures.
PRESETS = {
    name: {axis: {"name": change} if isinstance(change, str) else change for axis, change in preset.changes.items()}
    for name, preset in {**PAPER, **FIELD}.items()
}
# Axes that the pairwise objective does not read; its row weights depend on group-mean advantages.
NOT_PAIRWISE = tuple(axis for axis in REINFORCE if axis not in ("objective", "selection", "weight"))
# Row weights of the pairwise objective: functions that read only advantages and kept rows.
ROW_WEIGHTS = [name for name, function in AXES["weight"].items() if {*names_read(function)} <= {"advantages", "kept"}]


# What a user sets of an axis: its function's name and options, only the name, or the user's own function.
Change = Mapping[str, Any] | str | Callable


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
    is_known = isinstance(preset, str) and preset in PRESETS
    require(is_known, "preset", preset, f"unknown; takes one of {', '.join(PRESETS)}{did_you_mean(preset, PRESETS)}")
    changes = dict(PRESETS[preset])
    for axis, block in overrides.items():
        block = _block(block)
        remedy = f"unknown axis; takes one of {', '.join(REINFORCE)}{did_you_mean(axis, REINFORCE)}"
        require(axis in REINFORCE, axis, block, remedy)
        before = changes.get(axis, REINFORCE[axis])
        renamed = "name" in block and block["name"] != before.get("name")
        if block:
            changes[axis] = dict(block) if renamed else {**before, **block}
    resolved = {}
    for axis, default in REINFORCE.items():
        options = dict(changes.get(axis, default))
        if axis in AXES:
            name = options.pop("name")
            function = function_of(axis, name)
            resolved[axis] = {"name": name, **resolved_options(axis, str(name), function, options)}
        else:
            resolved[axis] = resolved_options(axis, axis, ADDED_TERMS[axis], options)
            unread = [option for option in options if option != "coefficient" and not resolved[axis]["coefficient"]]
            for option in unread:
                require(
                    False,
                    f"{axis}.{option}",
                    options[option],
                    f"has no effect while {axis}.coefficient is 0; set the coefficient",
                )
    if resolved["objective"]["name"] == "pairwise_consistency":
        for axis in NOT_PAIRWISE:
            remedy = "the objective 'pairwise_consistency' does not read this axis; remove it"
            require(not changes.get(axis), axis, dict(changes.get(axis, {})), remedy)
        weight = resolved["weight"]["name"]
        remedy = f"the objective takes one of {', '.join(ROW_WEIGHTS)}"
        require(weight in ROW_WEIGHTS, "weight.name", weight, remedy)
        resolved = {axis: block for axis, block in resolved.items() if axis not in NOT_PAIRWISE}
    return resolved


# One partial per function and options, so that equal algorithms compare equal and share a jit cache.
_bind = functools.cache(functools.partial)
# Shape of the arrays that trace an algorithm.
ROWS = 4
TIME = 3


@functools.cache
def _trace(algorithm: Algorithm, free: tuple[tuple[str, tuple[str, ...]], ...] = ()) -> None:
    """Traces an algorithm once, to check shapes and run the functions' range checks.

    Args:
        free: names of options, by axis, that are arguments of the traced program.
    """

    def traced_loss(values, row, ids, flag, token, mask, key):
        traced = algorithm.with_options({axis: dict.fromkeys(options, values) for axis, options in free})
        batch = losses.BatchValues(
            row,
            ids,
            flag,
            key,
            completion_mask=mask,
            foreign=flag,
            reward_parts={"part": row},
            part_weights={"part": row},
            turn_rewards=token,
            token_turns=token.astype(int),
            observation_mask=~mask,
            scored=losses.Scored(token, token, token),
            teacher_logprobs=token,
        )
        rows = losses.row_terms(traced, batch)
        for name in ("advantages", "weights", "kept"):
            shape = getattr(rows, name).shape
            allowed = [(ROWS,)] if name == "kept" else [(ROWS,), (ROWS, TIME)]
            require(shape in allowed, name, shape, "a function must return an array [batch] or [batch, time]")
        if traced.teacher_divergence is not None:  # the arrays stand for logits
            traced.teacher_divergence(token, token)
        top = jnp.broadcast_to(token[..., None], (ROWS, TIME, 2))
        return losses.loss(traced, token, token, rows, mask, losses.TermScores(token, token, token, top, top))

    # Shapes only: a config is read before a device cluster is set up, and a real array would claim the local devices.
    row = (ROWS,)
    token = (ROWS, TIME)
    shapes = [(row, jnp.float32), (row, jnp.int32), (row, jnp.bool_), (token, jnp.float32), (token, jnp.bool_)]
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    jax.eval_shape(traced_loss, 1.0, *arrays, jax.eval_shape(jax.random.key, 0))


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
    free: dict[str, Any] = {}
    options = {}
    for axis, function in vars(algorithm).items():
        bound = getattr(function, "keywords", {})
        values = {option: value for option, value in bound.items() if type(value) is float}
        kept = {option: value for option, value in bound.items() if option not in values}
        with contextlib.suppress(Exception):  # raised by a user's own function
            if values:
                _trace(algorithm, ((axis, tuple(values)),))
                free[axis] = _bind(base(function), **kept) if kept else base(function)
                options[axis] = values
    return dataclasses.replace(algorithm, **free), options


def _block(change: Change) -> Mapping[str, Any]:
    return change if isinstance(change, Mapping) else {"name": change}


def build_algorithm(preset: str, overrides: Mapping[str, Change]) -> Algorithm:
    """Builds the algorithm of a preset with a config's changes, which `resolve` describes.

    Raises:
        ValueError: an error of `resolve`, or a value that a function refuses.

    Examples:
        >>> algorithm = build_algorithm("gspo", {"clip": {"epsilon_high": 1e-3}})
        >>> algorithm.needs_behavior_logprobs
        True
    """
    chosen: dict[str, Any] = {}
    for axis, block in resolve(preset, overrides).items():
        options = {option: value for option, value in block.items() if option != "name"}
        function = function_of(axis, block["name"]) if axis in AXES else ADDED_TERMS[axis]
        if function is None or (axis in ADDED_TERMS and not options["coefficient"]):
            continue
        field = axis
        if axis == "weight":
            field = "row_weight" if is_of_whole_batch(function) else "token_weight"
        chosen[field] = _bind(function, **options) if options else function
        name = block.get("name", "")
        is_users = callable(name) or ":" in name
        if options or is_users:
            # The default algorithm never reads its anchor; importance weights do.
            reader = {"token_weight": AXES["weight"]["importance"]} if axis == "anchor" else {}
            traced = _with_checked_result(axis, chosen[field]) if is_users else chosen[field]
            functions: dict[str, Any] = {field: traced, **reader}
            _check_by_tracing(axis, block, Algorithm(**functions), is_users)
    algorithm = Algorithm(**chosen)
    _check_read(algorithm, {axis: _block(change) for axis, change in overrides.items()})
    return algorithm


def _check_by_tracing(axis: str, block: Mapping[str, Any], algorithm: Algorithm, is_users: bool) -> None:
    """Traces an axis' function; reports any exception in a user's own function as a config error."""
    try:
        _trace(algorithm)
    except UserError as error:
        if is_users:
            raise UserError(f"{axis}.name", str(error), value=block["name"]) from error
        raise UserError(f"{axis}.{error.where}", error.problem, error.remedy, error.value) from error
    except Exception as error:
        if not is_users:
            raise
        is_branch = isinstance(error, jax.errors.ConcretizationTypeError)
        remedy = (
            "\n  values of arrays are not known here: write jnp.where in place of if, and, or, not" if is_branch else ""
        )
        problem = f"fails on arrays of {ROWS} completions and {TIME} tokens with {described(error, first_line=True)}"
        raise UserError(f"{axis}.name", problem + remedy, value=block["name"]) from error


@functools.cache  # so that a function is traced once
def _with_checked_result(axis: str, function: Callable) -> Callable:
    """A user's function of an axis, for `_trace`, that checks the shape and the kind of its own result."""
    users = base(function)
    is_mask = axis in ("selection", "clip", "mask")
    of_batch = is_of_whole_batch(function)
    if axis == "selection":
        shapes = ["[batch]"]
    elif axis == "advantage" or (axis == "weight" and of_batch):
        shapes = ["[batch]", "[batch, time]"]
    elif axis == "anchor" or (is_mask and of_batch):
        shapes = ["[batch, time]"]
    else:
        shapes = ["[batch, time]", "[batch, 1]"]
    axis_names = {ROWS: "batch", TIME: "time"}

    @functools.wraps(users)
    def checked(*values: Any, **options: Any) -> Any:
        result = users(*values, **options)
        if axis == "reduction":  # a sum and a count
            return result
        array = jnp.asarray(result)
        shape = f"[{', '.join(axis_names.get(size, str(size)) for size in array.shape)}]"
        kind = "true and false" if is_mask else "numbers"
        is_kind = array.dtype == bool if is_mask else jnp.isrealobj(array) and array.dtype != bool
        problem = f"returns an array of shape {shape}" if array.ndim else "returns a scalar"
        if shape not in shapes or not is_kind:
            code = getattr(users, "__code__", None)
            defined_at = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
            raise UserError(
                "",
                f"must return {' or '.join(shapes)} of {kind}, and {problem} and dtype {array.dtype}{defined_at}",
                "a result for each row or token does not depend on the split into micro-batches",
            )
        return result

    return functools.partial(checked, **function.keywords) if isinstance(function, functools.partial) else checked


def _check_read(algorithm: Algorithm, overrides: Mapping[str, Mapping[str, Any]]) -> None:
    """Rejects a ratio, anchor or correction without effect, and a correction that would count twice."""
    if algorithm.correction is not None and algorithm.anchor is Algorithm().anchor:
        remedy = "corrects from the anchor to the behavior policy, which are the same; set anchor.name, or use weight"
        require(False, "correction", dict(overrides.get("correction", {})), remedy)
    if algorithm.correction is not None and "scored_log_ratio" in names_read(algorithm.row_weight):
        assert algorithm.row_weight is not None
        name = getattr(base(algorithm.row_weight), "__name__", "the weight")
        remedy = f"{name} also is a ratio to the behavior policy, which would count twice; remove one of the two"
        require(False, "correction", dict(overrides.get("correction", {})), remedy)
    if algorithm.score_centering is not None:
        _check_centering(algorithm)
    for axis, names in (("anchor", RATIO), ("ratio", ("ratio",))):
        read = algorithm.reads(*names) or (axis == "anchor" and algorithm.correction is not None)
        remedy = "neither clip, mask nor weight reads a ratio; choose one that reads it, or remove this key"
        require(read or not overrides.get(axis), axis, dict(overrides.get(axis, {})), remedy)


# Values that the sampler's top tokens have too; a weight of other values is unknown for tokens that were not sampled.
_OF_ANY_TOKEN = {"ratio", "log_ratio", "logprobs", "behavior_logprobs", "anchor_logprobs", "advantages", "foreign"}
_OF_ANY_TOKEN |= {"completion_mask", "effective_share"}


def _check_centering(algorithm: Algorithm) -> None:
    """Rejects score centering of weights that a token has only if it was sampled."""
    axes = {"anchor": algorithm.anchor, "ratio": algorithm.ratio}
    plain = {"anchor": Algorithm().anchor, "ratio": Algorithm().ratio}
    misfits = [axis for axis, function in axes.items() if algorithm.reads_ratio and function is not plain[axis]]
    axes = {"clip": algorithm.clip, "weight": algorithm.token_weight}
    misfits += [axis for axis, function in axes.items() if {*names_read(function)} - _OF_ANY_TOKEN]
    axes = {"weight": algorithm.row_weight, "mask": algorithm.mask}
    misfits += [axis for axis, function in axes.items() if not RESCORED.isdisjoint(names_read(function))]
    remedy = (
        "centers weights of single tokens by their ratio to the behavior policy; choose a preset without another"
        f" {' and '.join(misfits)}, or set the coefficient to 0"
    )
    assert isinstance(algorithm.score_centering, functools.partial)  # as presets build it
    require(not misfits, "score_centering.coefficient", algorithm.score_centering.keywords["coefficient"], remedy)
