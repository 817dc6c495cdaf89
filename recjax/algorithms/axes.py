"""The axes of the equation: names of their functions in a config, and values that these functions may read."""

from collections.abc import Callable
from typing import Any

from recjax.algorithms import (
    advantages,
    batch_advantages,
    clipping,
    masks,
    ratios,
    reduce,
    regularizers,
    token_weighting,
    weighting,
)
from recjax.algorithms.options import did_you_mean, user_function
from recjax.algorithms.reading import EVERYWHERE, MICRO_BATCH, RESCORED, TERMS, WHOLE_BATCH, check_names
from recjax.errors import UserError

_TOKEN_WEIGHTS = {
    "importance": token_weighting.importance_weights,
    "truncated": token_weighting.truncated_weights,
    "banded": token_weighting.banded_weights,
    "sequence_banded": token_weighting.sequence_banded_weights,
    "bounded": token_weighting.bounded_weights,
}
# Functions of each axis by name. The first function of each axis is that of REINFORCE.
AXES = {
    "objective": {
        "policy_gradient": None,
        "pairwise_consistency": reduce.pairwise_consistency_loss,
    },
    "selection": {
        "all": None,
        "drop_excess_negatives": weighting.drop_excess_negatives,
    },
    "advantage": {
        "group_mean": advantages.group_mean_advantages,
        "solved_bonus": advantages.solved_bonus_advantages,
        "group_normalized": advantages.group_normalized_advantages,
        "leave_one_out": advantages.leave_one_out_advantages,
        "asymmetric": advantages.asymmetric_advantages,
        "raw_reward": advantages.raw_reward_advantages,
        "batch_mean": batch_advantages.batch_mean_advantages,
        "batch_whitened": batch_advantages.batch_whitened_advantages,
        "batch_deviation": batch_advantages.batch_deviation_advantages,
        "length_weighted": batch_advantages.length_weighted_advantages,
        "mean_relative": batch_advantages.mean_relative_advantages,
        "signal_scaled": batch_advantages.signal_scaled_advantages,
        "part_normalized": batch_advantages.part_normalized_advantages,
        "divergence_penalized": batch_advantages.divergence_penalized_advantages,
        "log_mean_exp": batch_advantages.log_mean_exp_advantages,
        "discounted": batch_advantages.discounted_advantages,
        "turn_returns": batch_advantages.turn_return_advantages,
        "none": batch_advantages.no_advantages,
    },
    "anchor": {
        "behavior": ratios.behavior_anchor,
        "proximal": ratios.proximal_anchor,
        "interpolated": ratios.interpolated_anchor,
    },
    "ratio": {
        "token": ratios.token_ratio,
        "sequence_mean": ratios.sequence_mean_ratio,
        "sequence_product": ratios.sequence_product_ratio,
        "clipped_sequence_mean": ratios.clipped_sequence_mean_ratio,
    },
    "clip": {
        "none": None,
        "one_side": clipping.one_side_mask,
        "two_side": clipping.two_side_mask,
        "ring": clipping.ring_mask,
        "dual": clipping.dual_clip_mask,
        "log_one_side": clipping.log_one_side_mask,
        "probability_difference": clipping.probability_difference_mask,
        "probability_distance": clipping.probability_distance_mask,
        "binary_kl": clipping.binary_kl_mask,
        "balanced": clipping.balanced_mask,
    },
    "mask": {
        "none": None,
        "off_policy_negatives": masks.off_policy_negatives_mask,
        "sequence_binary_kl": masks.sequence_binary_kl_mask,
        "sequence_max_kl": masks.sequence_max_kl_mask,
        "sequence_band": masks.sequence_band_mask,
        "second_moment": masks.second_moment_mask,
        "one_side_second_moment": masks.one_side_second_moment_mask,
        "entropy_scaled": masks.entropy_scaled_mask,
        "entropy_change": masks.entropy_change_mask,
        "high_entropy": masks.high_entropy_mask,
        "covariance": masks.covariance_mask,
    },
    "weight": {
        "none": None,
        **_TOKEN_WEIGHTS,
        "tapered": token_weighting.tapered_weights,
        "inverse": token_weighting.inverse_weights,
        "soft": token_weighting.soft_weights,
        "peaked": token_weighting.peaked_weights,
        "blended": token_weighting.blended_weights,
        "complement": token_weighting.complement_weights,
        "probability": token_weighting.probability_weights,
        "expert_shaped": token_weighting.expert_shaped_weights,
        "own": token_weighting.own_weights,
        "effective_size_capped": token_weighting.effective_size_capped_weights,
        "exp_advantage": weighting.exp_advantage_weights,
        "bisected_exp_advantage": weighting.bisected_exp_advantage_weights,
    },
    "correction": {"none": None, **_TOKEN_WEIGHTS},
    "regularizer": {
        "none": None,
        "log_likelihood_bonus": regularizers.log_likelihood_bonus,
        "squared_log_ratio_per_token": regularizers.squared_log_ratio_per_token,
        "squared_log_ratio_per_completion": regularizers.squared_log_ratio_per_completion,
        "effective_size_kl": regularizers.effective_size_kl_penalty,
        "expert_cross_entropy": regularizers.expert_cross_entropy,
    },
    "term": {
        "none": None,
    },
    "reduction": {
        "token_mean": reduce.token_mean,
        "sequence_mean_token_mean": reduce.sequence_mean_token_mean,
        "sequence_mean_token_sum": reduce.sequence_mean_token_sum,
        "fixed_length": reduce.fixed_length,
    },
}
# Terms without a name, on if their coefficient is above 0. `distillation` and `log_ratio_penalty` change advantages;
# every other term adds to the loss.
ADDED_TERMS = {
    "reference_kl": regularizers.reference_kl_penalty,
    "unbiased_reference_kl": regularizers.unbiased_reference_kl_penalty,
    "entropy": regularizers.entropy_bonus,
    "distillation": advantages.teacher_advantages,
    "log_ratio_penalty": advantages.log_ratio_penalty,
    "teacher_divergence": regularizers.teacher_divergence,
    "score_centering": regularizers.score_centering,
    "observations": regularizers.observation_cross_entropy,
}
_EVERYWHERE = list(EVERYWHERE)
_MICRO_BATCH = list(MICRO_BATCH)
_WHOLE_BATCH = list(WHOLE_BATCH)
# What is known before advantages are computed, and before the scoring pass.
_BEFORE_ADVANTAGES = [name for name in _EVERYWHERE if name != "advantages"]
_BEFORE_SCORING = [name for name in _BEFORE_ADVANTAGES + _WHOLE_BATCH if name not in RESCORED]
_BEFORE_RATIO = [name for name in _MICRO_BATCH if name != "ratio"]
# Values that a user's own function may read, by axis.
READABLE = {
    "objective": [*_EVERYWHERE, "logprobs", "behavior_logprobs", "proximal_logprobs", "ratio", *TERMS],
    "selection": ["key", *_BEFORE_SCORING],
    "advantage": _BEFORE_SCORING + sorted(RESCORED),
    "anchor": [*_EVERYWHERE, "logprobs", "behavior_logprobs", "proximal_logprobs"],
    "ratio": _EVERYWHERE + _BEFORE_RATIO,
    "clip": _EVERYWHERE + _MICRO_BATCH + _WHOLE_BATCH,
    "mask": _EVERYWHERE + _MICRO_BATCH + _WHOLE_BATCH,
    "weight": _EVERYWHERE + _MICRO_BATCH + _WHOLE_BATCH,
    "correction": _EVERYWHERE + _MICRO_BATCH,
    "regularizer": [*_BEFORE_ADVANTAGES, "logprobs", "behavior_logprobs"],
    "term": [*_EVERYWHERE, "logprobs", "behavior_logprobs", "ratio", *TERMS],
    "reduction": ["per_token", "completion_mask", "trajectories"],
}


def is_users(name: Any) -> bool:
    """True if a name on an axis is a user's own module:function, or a function itself.

    Examples:
        >>> is_users("mine:bounded"), is_users("one_side")
        (True, False)
    """
    return callable(name) or (isinstance(name, str) and ":" in name)


def function_of(axis: str, name: Any) -> Callable | None:
    """Looks up a function by its name in the axis' table, or imports the user's own module:function.

    Args:
        name: the name, or the user's function itself.
    Returns:
        None if the name turns the axis off.

    Raises:
        ValueError: an unknown name, a function that cannot be imported, or one that reads a value its axis lacks.

    Examples:
        >>> function_of("clip", "one_side").__name__
        'one_side_mask'
    """
    key = f"{axis}.name"
    table = AXES[axis]
    if is_users(name):
        function = name
        if not callable(name):
            function = user_function(key, name)
        check_names(key, str(name), function, READABLE[axis])
        return function
    if not isinstance(name, str) or name not in table:
        remedy = f"takes one of {', '.join(table)}, or your own module:function{did_you_mean(name, table)}"
        raise UserError(key, "unknown", remedy, name)
    return table[name]
