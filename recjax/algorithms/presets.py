"""The paper's table: names to compositions, and the changes that a config makes to them."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from recjax.algorithms import advantages, clipping, losses, reduce, regularizers, selection, weighting
from recjax.algorithms.losses import Algorithm
from recjax.algorithms.options import did_you_mean, require, resolved_options

OBJECTIVES = {
    "policy_gradient": losses.policy_gradient,
    "pairwise_consistency": losses.pairwise_consistency,
}
SELECTIONS = {
    "all": selection.keep_all,
    "drop_excess_negatives": selection.drop_excess_negatives,
}
ADVANTAGES = {
    "group_mean": advantages.group_mean_advantages,
    "group_normalized": advantages.group_normalized_advantages,
    "leave_one_out": advantages.leave_one_out_advantages,
    "asymmetric": advantages.asymmetric_advantages,
    "raw_reward": advantages.raw_reward_advantages,
}
CLIPS = {
    "none": clipping.no_clip,
    "one_side": clipping.one_side_mask,
    "two_side": clipping.two_side_mask,
    "ring": clipping.ring_mask,
}
WEIGHTS = {
    "none": weighting.unit_weights,
    "importance": weighting.importance_weights,
    "exp_advantage": weighting.exp_advantage_weights,
    "bisected_exp_advantage": weighting.bisected_exp_advantage_weights,
}
REGULARIZERS = {
    "none": regularizers.no_regularizer,
    "log_likelihood_bonus": regularizers.log_likelihood_bonus,
    "squared_log_ratio_per_token": regularizers.squared_log_ratio_per_token,
    "squared_log_ratio_per_completion": regularizers.squared_log_ratio_per_completion,
}
REDUCTIONS = {
    "token_mean": reduce.token_mean,
    "sequence_mean_token_mean": reduce.sequence_mean_token_mean,
    "sequence_mean_token_sum": reduce.sequence_mean_token_sum,
    "fixed_length": reduce.fixed_length,
}
AXES = {
    "objective": OBJECTIVES,
    "selection": SELECTIONS,
    "advantage": ADVANTAGES,
    "clip": CLIPS,
    "weight": WEIGHTS,
    "regularizer": REGULARIZERS,
    "reduction": REDUCTIONS,
}
# Added to the loss when their coefficient is above 0; there is nothing to choose by name.
ADDED_TERMS = {
    "reference_kl": regularizers.reference_kl_penalty,
    "entropy": regularizers.entropy_bonus,
}
REINFORCE = {
    "objective": {"name": "policy_gradient"},
    "selection": {"name": "all"},
    "advantage": {"name": "group_mean"},
    "clip": {"name": "none"},
    "weight": {"name": "none"},
    "regularizer": {"name": "none"},
    "reduction": {"name": "token_mean"},
    "reference_kl": {},
    "entropy": {},
}
# What each algorithm changes in REINFORCE. Options are the defaults of the functions' signatures.
PRESETS = {
    "reinforce": {},
    "grpo": {
        "advantage": {"name": "group_normalized"},
        "clip": {"name": "one_side"},
        "weight": {"name": "importance"},
    },
    "rec_one_side_is": {"clip": {"name": "one_side"}, "weight": {"name": "importance"}},
    "rec_one_side_nois": {"clip": {"name": "one_side"}},
    "rec_two_side_is": {"clip": {"name": "two_side"}, "weight": {"name": "importance"}},
    "rec_two_side_nois": {"clip": {"name": "two_side"}},
    "rec_ring_is": {"clip": {"name": "ring"}, "weight": {"name": "importance"}},
    "rec_ring_nois": {"clip": {"name": "ring"}},
    "asymre": {"regularizer": {"name": "log_likelihood_bonus"}},
    "opmd": {"regularizer": {"name": "squared_log_ratio_per_completion"}},
    "opmd_token": {"regularizer": {"name": "squared_log_ratio_per_token"}},
    "red_drop": {"selection": {"name": "drop_excess_negatives"}},
    "red_weight": {"weight": {"name": "exp_advantage"}},
    "pairwise_consistency": {"objective": {"name": "pairwise_consistency"}},
}
# Axes that the pairwise objective does not read; its row weights come from group-mean advantages.
NOT_PAIRWISE = ("advantage", "clip", "regularizer", "reduction", "reference_kl", "entropy")


def _chosen(kind: str, name: Any, names: Mapping[str, Any]) -> Any:
    """The entry of a table by name."""
    known = isinstance(name, str) and name in names
    require(known, kind, name, f"unknown; takes one of {', '.join(names)}{did_you_mean(name, names)}")
    return names[name]


def _check_pairwise(changes: Mapping[str, Mapping[str, Any]], weight: str) -> None:
    for axis in NOT_PAIRWISE:
        if changes.get(axis):
            require(False, axis, dict(changes[axis]), "the objective 'pairwise_consistency' does not read this axis")
    row_weights = [name for name in WEIGHTS if name != "importance"]
    remedy = f"the objective 'pairwise_consistency' takes one of {', '.join(row_weights)}"
    require(weight in row_weights, "weight.name", weight, remedy)


def resolve(preset: str, overrides: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Every axis that the algorithm reads, with the name of its function and the value of every option.

    An override of some options of an axis keeps the preset's others; one that changes the name of an axis' function
    drops the preset's options of that axis.

    Args:
        preset: a name of PRESETS.
        overrides: axis → {"name": …, option: …}; reference_kl and entropy take options only.
    Raises:
        ValueError: an unknown preset, axis, function or option; a value of another type; a required option without a
            value; a setting that nothing would read.
    """
    changes = dict(_chosen("preset", preset, PRESETS))
    for axis, block in overrides.items():
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
            function = _chosen(f"{axis}.name", name, AXES[axis])
            resolved[axis] = {"name": name, **resolved_options(axis, name, function, options)}
        else:
            resolved[axis] = resolved_options(axis, axis, ADDED_TERMS[axis], options)
            unread = [option for option in options if option != "coefficient" and not resolved[axis]["coefficient"]]
            for option in unread:
                require(False, f"{axis}.{option}", options[option], f"not read while {axis}.coefficient is 0; set that")
    if resolved["objective"]["name"] == "pairwise_consistency":
        _check_pairwise(changes, resolved["weight"]["name"])
        resolved = {axis: block for axis, block in resolved.items() if axis not in NOT_PAIRWISE}
    return resolved


@functools.cache
def _bound(function: Callable, **options: Any) -> functools.partial:
    """A partial; the same one for the same options, so that equal algorithms are equal and share a jit cache."""
    return functools.partial(function, **options)


@functools.cache
def _try(algorithm: Algorithm) -> None:
    """Traces an algorithm once, which runs the range checks of its functions."""

    def once(row, ids, token, mask, key):
        rows = losses.row_terms(algorithm, row, ids, mask.any(-1), key)
        return losses.loss(algorithm, token, token, rows, mask, reference_logprobs=token, entropy=token)

    # Shapes only: a config is read before a cluster of devices is set up, and a real array would claim the local ones.
    shapes = [((2,), jnp.float32), ((2,), jnp.int32), ((2, 1), jnp.float32), ((2, 1), jnp.bool_)]
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    jax.eval_shape(once, *arrays, jax.eval_shape(jax.random.key, 0))


def build_algorithm(preset: str, overrides: Mapping[str, Mapping[str, Any]]) -> Algorithm:
    """The algorithm of a preset with a config's changes; see `resolve` for what they may be.

    Raises:
        ValueError: as `resolve`, and a value out of its function's range.
    """
    chosen: dict[str, Any] = {}
    for axis, block in resolve(preset, overrides).items():
        options = {option: value for option, value in block.items() if option != "name"}
        if axis in ADDED_TERMS and not options["coefficient"]:
            continue
        function = AXES[axis][block["name"]] if axis in AXES else ADDED_TERMS[axis]
        field = axis
        if axis == "weight":
            field = "token_weight" if function is weighting.importance_weights else "row_weight"
        chosen[field] = _bound(function, **options) if options else function
        try:
            if options:
                _try(Algorithm(**{field: chosen[field]}))
        except ValueError as error:
            raise ValueError(f"{axis}.{error}") from error
    return Algorithm(**chosen)
