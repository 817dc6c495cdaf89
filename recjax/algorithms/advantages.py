"""Advantages: how much better a completion is than its group, or a token is under a teacher."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from recjax.algorithms.clipping import binary_kl
from recjax.algorithms.groups import group_index, group_minima, group_sizes, group_sums
from recjax.algorithms.options import ABOVE_0, AT_LEAST_0, Bounds, Scalar, requires
from recjax.algorithms.ratios import log_difference, sequence_sum

Singleton = Literal["zero", "reward"]


def deviations(
    rewards: Float[Array, " batch"],
    index: Int[Array, " batch"],
    kept: Bool[Array, " batch"],
    weights: Int[Array, " batch"] | None = None,
) -> Float[Array, " batch"]:
    """Kept rewards minus their group's mean (`index` by `group_index`); 0 where not kept, exactly 0 for equal rewards.

    Args:
        weights: weight of each row in the mean; None: all rows weigh the same.

    Examples:
        >>> print(deviations(jnp.array([1.0, 0.0, 5.0]), jnp.array([0, 0, 1]), jnp.array([True, True, True])))
        [ 0.5 -0.5  0. ]
    """
    # Measured from the group's lowest reward, equal rewards are all 0, so their mean has no rounding error.
    above = rewards - group_minima(jnp.where(kept, rewards, jnp.inf), index)
    above = jnp.where(kept, above, 0.0)
    counts = kept
    if weights is not None:
        counts = jnp.where(kept, weights, 0)
    counts = counts.astype(above.dtype)
    # A group without kept rows has sums of 0; dividing by at least 1 keeps its mean 0.
    means = group_sums(counts * above, index) / jnp.maximum(group_sums(counts, index), 1.0)
    return jnp.where(kept, above - means, 0.0)


def _with_singletons(
    advantages: Float[Array, " batch"],
    rewards: Float[Array, " batch"],
    index: Int[Array, " batch"],
    kept: Bool[Array, " batch"],
    singleton: Singleton,
) -> Float[Array, " batch"]:
    """Advantages with the chosen value in groups of one kept row, and 0 where not kept."""
    value = {"zero": jnp.zeros_like(rewards), "reward": rewards}[singleton]
    # A single row has no other row to compare with; its deviation is 0 for any reward.
    is_single = group_sizes(index, kept) == 1
    return jnp.where(kept, jnp.where(is_single, value, advantages), 0.0)


def group_mean_advantages(
    rewards: Float[Array, " batch"],
    group_ids: Int[Array, " batch"],
    kept: Bool[Array, " batch"],
    *,
    singleton: Singleton = "zero",
) -> Float[Array, " batch"]:
    """Reward minus the group's mean.

    A_i = r_i − r̄,  r̄ the mean over the kept rows of the group.

    Args:
        rewards: reward of each row, in any unit; ignored where not kept.
        group_ids: id of each row's group; any integers in any order, groups of any size.
        kept: mask of the rows that count; other rows get 0 and do not enter the mean.
        singleton: advantage of a group's only kept row: 0, or its reward.
    Reference: arXiv 2509.24203 §2 (REINFORCE).

    Examples:
        >>> rewards, group_ids = jnp.array([3.0, 0.0, 0.0]), jnp.array([7, 7, 7])
        >>> kept = jnp.array([True, True, True])
        >>> print(group_mean_advantages(rewards, group_ids, kept))
        [ 2. -1. -1.]
    """
    index = group_index(group_ids)
    return _with_singletons(deviations(rewards, index, kept), rewards, index, kept, singleton)


def solved_bonus_advantages(
    rewards: Float[Array, " batch"],
    group_ids: Int[Array, " batch"],
    kept: Bool[Array, " batch"],
    *,
    bonus: Scalar = 0.1,
) -> Float[Array, " batch"]:
    """Reward minus the group's mean, or a bonus in groups whose rewards are all above 0.5.

    Args:
        rewards: reward of each row, 1 for a right completion; ignored where not kept.
        group_ids: id of each row's group; any integers in any order, groups of any size.
        kept: mask of the rows that count; other rows get 0 and do not enter the mean.
        bonus: advantage of all rows in a solved group, in units of reward.
    Reference: https://github.com/krafton-ai/Offline-GRPO.

    Examples:
        >>> rewards, group_ids = jnp.array([1.0, 1.0, 1.0, 0.0]), jnp.array([7, 7, 3, 3])
        >>> print(solved_bonus_advantages(rewards, group_ids, jnp.array([True, True, True, True])))
        [ 0.1  0.1  0.5 -0.5]
    """
    index = group_index(group_ids)
    is_solved = group_minima(jnp.where(kept, rewards, jnp.inf), index) > 0.5
    return jnp.where(kept & is_solved, bonus, deviations(rewards, index, kept))


@requires(epsilon=Bounds(ABOVE_0.accepts, "must be above 0, or a group of equal rewards divides by zero"))
def group_normalized_advantages(
    rewards: Float[Array, " batch"],
    group_ids: Int[Array, " batch"],
    kept: Bool[Array, " batch"],
    *,
    epsilon: Scalar = 1e-6,
    ddof: Literal[0, 1] = 0,
    singleton: Singleton = "zero",
) -> Float[Array, " batch"]:
    """Reward minus the group's mean, divided by the group's standard deviation.

    A_i = (r_i − r̄) / (σ + ε),  σ² = Σ_j (r_j − r̄)² / (K − ddof).

    Args:
        rewards: reward of each row, in any unit; ignored where not kept.
        group_ids: id of each row's group; any integers in any order, groups of any size.
        kept: mask of the rows that count; other rows get 0 and do not enter mean or deviation.
        epsilon: constant ε, in units of reward, above 0.
        ddof: number subtracted from K in σ: 0 as in the paper, 1 as in much GRPO code.
        singleton: advantage of a group's only kept row: 0, or its reward.
    Raises:
        ValueError: epsilon is not above 0.
    Reference: arXiv 2509.24203 §2 (GRPO).

    Examples:
        >>> rewards, group_ids = jnp.array([3.0, 0.0, 0.0]), jnp.array([7, 7, 7])
        >>> kept = jnp.array([True, True, True])
        >>> advantages = group_normalized_advantages(rewards, group_ids, kept)
        >>> [round(x, 3) for x in advantages.tolist()]
        [1.414, -0.707, -0.707]
    """
    index = group_index(group_ids)
    centered = deviations(rewards, index, kept)
    # With ddof 1, a group of one row would divide 0 by 0.
    degrees = jnp.maximum(group_sizes(index, kept) - ddof, 1.0)
    standard_deviation = jnp.sqrt(group_sums(jnp.square(centered), index) / degrees)
    return _with_singletons(centered / (standard_deviation + epsilon), rewards, index, kept, singleton)


def leave_one_out_advantages(
    rewards: Float[Array, " batch"],
    group_ids: Int[Array, " batch"],
    kept: Bool[Array, " batch"],
    *,
    singleton: Singleton = "zero",
) -> Float[Array, " batch"]:
    """Reward minus the mean of the group's other rows.

    A_i = r_i − (1/(K−1)) Σ_{j≠i} r_j = K/(K−1) · (r_i − r̄).

    Args:
        rewards: reward of each row, in any unit; ignored where not kept.
        group_ids: id of each row's group; any integers in any order, groups of any size.
        kept: mask of the rows that count; other rows get 0 and do not enter the mean.
        singleton: advantage of a group's only kept row: 0, or its reward.
    Reference: Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free!".

    Examples:
        >>> rewards, group_ids = jnp.array([3.0, 0.0, 0.0]), jnp.array([7, 7, 7])
        >>> kept = jnp.array([True, True, True])
        >>> print(leave_one_out_advantages(rewards, group_ids, kept))
        [ 3.  -1.5 -1.5]
    """
    index = group_index(group_ids)
    # The second form of the equation needs no sum over other rows for each row.
    sizes = group_sizes(index, kept)
    scale = sizes / jnp.maximum(sizes - 1.0, 1.0)
    return _with_singletons(scale * deviations(rewards, index, kept), rewards, index, kept, singleton)


def asymmetric_advantages(
    rewards: Float[Array, " batch"],
    group_ids: Int[Array, " batch"],
    kept: Bool[Array, " batch"],
    *,
    beta: Scalar = 0.1,
    singleton: Singleton = "zero",
) -> Float[Array, " batch"]:
    """Reward minus a lowered baseline, which stresses good completions over bad ones.

    A_i = r_i − (r̄ − β).  In groups of several rows, this has the gradient of group means plus `log_likelihood_bonus`.

    Args:
        rewards: reward of each row, in any unit; ignored where not kept.
        group_ids: id of each row's group; any integers in any order, groups of any size.
        kept: mask of the rows that count; other rows get 0 and do not enter the mean.
        beta: reduction β of the baseline, in units of reward; negative values raise it.
        singleton: advantage of a group's only kept row: 0 (not β), or its reward.
    Reference: arXiv 2509.24203 §2 (AsymRE).

    Examples:
        >>> rewards, group_ids = jnp.array([3.0, 0.0, 0.0]), jnp.array([7, 7, 7])
        >>> kept = jnp.array([True, True, True])
        >>> print(asymmetric_advantages(rewards, group_ids, kept, beta=0.5))
        [ 2.5 -0.5 -0.5]
    """
    index = group_index(group_ids)
    # β is added before the values of single rows are set, which get 0 and not β.
    return _with_singletons(deviations(rewards, index, kept) + beta, rewards, index, kept, singleton)


def raw_reward_advantages(
    rewards: Float[Array, " batch"], group_ids: Int[Array, " batch"], kept: Bool[Array, " batch"]
) -> Float[Array, " batch"]:
    """The reward itself, without a baseline.

    A_i = r_i.  Groups are ignored; 0 where not kept.

    Examples:
        >>> rewards, group_ids = jnp.array([3.0, 0.0, 0.0]), jnp.array([7, 7, 7])
        >>> kept = jnp.array([True, True, True])
        >>> print(raw_reward_advantages(rewards, group_ids, kept))
        [3. 0. 0.]
    """
    del group_ids
    return jnp.where(kept, rewards, 0.0)


@requires(coefficient=AT_LEAST_0, prefix_weight=AT_LEAST_0)
def teacher_advantages(
    logprobs: Float[Array, "batch time"],
    teacher_logprobs: Float[Array, "batch time"],
    completion_mask: Bool[Array, "batch time"],
    *,
    coefficient: Scalar = 0.0,
    prefix_weight: Scalar = 0.0,
) -> Float[Array, "batch time"]:
    """Teacher's log-probs minus the policy's log-probs: A_t = c (log π_teacher − log π).

    On the policy's own samples, these advantages give the gradient of c KL(π ‖ π_teacher), token by token. A prefix
    weight γ multiplies them by 1 + γ (1 − Σ_{u<t} |A_u| / Σ_u |A_u|), which falls from 1 + γ at a row's first token
    as the row drifts away from the teacher.

    Args:
        logprobs: log π of each token, constant.
        teacher_logprobs: log π_teacher of each token, constant.
        completion_mask: mask of the tokens that count; other tokens get 0.
        coefficient: weight c, 0 or more.
        prefix_weight: γ, 0 or more; 0: all tokens weigh the same.
    Raises:
        ValueError: a negative coefficient or γ.
    Reference: arXiv 2306.13649 (GKD, its reverse KL on the student's samples); prefix_weight: arXiv 2606.22600
        (IW-OPD).

    Examples:
        >>> logprobs, teacher = jnp.array([[-2.0, -1.0, -9.0]]), jnp.array([[-1.0, -1.5, 0.0]])
        >>> mask = jnp.array([[True, True, False]])
        >>> print(teacher_advantages(logprobs, teacher, mask, coefficient=1.0))
        [[ 1.  -0.5  0. ]]
        >>> print(teacher_advantages(logprobs, teacher, mask, coefficient=1.0, prefix_weight=3.0))
        [[ 4. -1.  0.]]
    """
    advantages = jnp.where(completion_mask, teacher_logprobs - logprobs, 0.0)
    sizes = jnp.abs(advantages)
    total = jnp.sum(sizes, axis=-1, keepdims=True)
    drift = (jnp.cumsum(sizes, axis=-1) - sizes) / jnp.where(total > 0, total, 1.0)
    return coefficient * (1 + prefix_weight * (1 - drift)) * advantages


@requires(coefficient=AT_LEAST_0)
def log_ratio_penalty(
    logprobs: Float[Array, "batch time"],
    behavior_logprobs: Float[Array, "batch time"],
    completion_mask: Bool[Array, "batch time"],
    trajectories: Int[Array, " batch"] | None = None,
    *,
    coefficient: Scalar = 0.0,
    level: Literal["token", "completion"] = "token",
) -> Float[Array, "batch time"]:
    """Penalty on the log-ratio to the behavior policy, subtracted from the advantages, in the reward's unit.

    β log ρ_t of each token, or β Σ_t (log ρ_t + k_t) of its completion, with the KL k_t of `binary_kl`. Clips, weights
    and `score_centering` read the advantages after the subtraction.

    Args:
        logprobs: log π of each token, constant.
        behavior_logprobs: log μ of each token, constant.
        completion_mask: mask of the tokens that count; other tokens get 0.
        trajectories: id of each row's completion; None if each row is a completion.
        coefficient: weight β, 0 or more.
        level: token, or completion for the sum over its tokens.
    Raises:
        ValueError: a negative coefficient.
    Reference: arXiv 2610.08963 (KLPO, token and sequence regression).

    Examples:
        >>> now, before = jnp.array([[-0.5, -1.0]]), jnp.array([[-1.0, -1.0]])
        >>> print(log_ratio_penalty(now, before, jnp.array([[True, True]]), coefficient=0.1))
        [[0.05 0.  ]]
    """
    penalty = log_difference(logprobs, behavior_logprobs, completion_mask)
    if level == "completion":
        drift = penalty + jnp.where(completion_mask, binary_kl(logprobs, behavior_logprobs), 0.0)
        penalty = jnp.where(completion_mask, sequence_sum(drift, completion_mask, trajectories), 0.0)
    return coefficient * penalty
