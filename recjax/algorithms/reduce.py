"""Reductions of a loss to (sum, count).

Sums and counts add up over micro-batches and devices; the caller divides once, after adding, so that the split does not
matter. Masked values are never read, and a row without valid tokens adds to neither sum nor count. All rows of a
trajectory form one completion and must be in the same call.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from recjax.algorithms.groups import (
    group_count,
    group_index,
    group_minima,
    group_sizes,
    group_sums,
    one_per_trajectory,
    trajectory_sums,
)
from recjax.algorithms.options import ABOVE_0, AT_LEAST_1, Bounds, Scalar, requires

SumAndCount = tuple[Float[Array, ""], Float[Array, ""]]


def _completions(per_token, completion_mask, trajectories):
    """The number of completions with a valid token, in the dtype of the loss."""
    return jnp.sum(one_per_trajectory(jnp.any(completion_mask, axis=-1), trajectories), dtype=per_token.dtype)


def token_average(
    per_token: Float[Array, "batch time"], completion_mask: Bool[Array, "batch time"]
) -> Float[Array, ""]:
    """Mean over valid tokens; 0 without valid tokens. For entropies, this is the mean entropy in nats per token.

    Examples:
        >>> mask = jnp.array([[True, True, False]])
        >>> print(token_average(jnp.array([[1.0, 2.0, 9.0]]), mask))
        1.5
    """
    return jnp.sum(jnp.where(completion_mask, per_token, 0.0)) / jnp.maximum(jnp.sum(completion_mask), 1)


def token_mean(per_token: Float[Array, "batch time"], completion_mask: Bool[Array, "batch time"]) -> SumAndCount:
    """Every token counts equally: the sum over valid tokens, divided by their number.

    Examples:
        >>> per_token = jnp.array([[1.0, 1.0, 1.0], [4.0, 0.0, 0.0]])
        >>> mask = jnp.array([[True, True, True], [True, False, False]])
        >>> total, count = token_mean(per_token, mask)
        >>> print(total, count)
        7.0 4.0
    """
    total = jnp.sum(jnp.where(completion_mask, per_token, 0.0))
    return total, jnp.sum(completion_mask, dtype=per_token.dtype)


def sequence_mean_token_mean(
    per_token: Float[Array, "batch time"],
    completion_mask: Bool[Array, "batch time"],
    trajectories: Int[Array, " batch"] | None = None,
) -> SumAndCount:
    """Every completion counts equally: the mean over completions of their token means.

    Examples:
        >>> per_token = jnp.array([[1.0, 1.0, 1.0], [4.0, 0.0, 0.0]])
        >>> mask = jnp.array([[True, True, True], [True, False, False]])
        >>> total, count = sequence_mean_token_mean(per_token, mask)
        >>> print(total, count)
        5.0 2.0
    """
    lengths = trajectory_sums(jnp.sum(completion_mask, axis=-1, dtype=per_token.dtype), trajectories)
    row_sums = jnp.sum(jnp.where(completion_mask, per_token, 0.0), axis=-1)
    return jnp.sum(row_sums / jnp.maximum(lengths, 1.0)), _completions(per_token, completion_mask, trajectories)


def sequence_mean_token_sum(
    per_token: Float[Array, "batch time"],
    completion_mask: Bool[Array, "batch time"],
    trajectories: Int[Array, " batch"] | None = None,
) -> SumAndCount:
    """Mean over completions of the sums over their tokens, as in the paper's sequence-level terms.

    Examples:
        >>> per_token = jnp.array([[1.0, 1.0, 1.0], [4.0, 0.0, 0.0]])
        >>> mask = jnp.array([[True, True, True], [True, False, False]])
        >>> total, count = sequence_mean_token_sum(per_token, mask)
        >>> print(total, count)
        7.0 2.0
    """
    total = jnp.sum(jnp.where(completion_mask, per_token, 0.0))
    return total, _completions(per_token, completion_mask, trajectories)


@requires(length=Bounds(AT_LEAST_1.accepts, "must be 1 or more tokens"))
def fixed_length(
    per_token: Float[Array, "batch time"],
    completion_mask: Bool[Array, "batch time"],
    trajectories: Int[Array, " batch"] | None = None,
    *,
    length: int,
) -> SumAndCount:
    """Every token counts equally in every batch: sum over valid tokens / length, divided by the number of completions.

    Args:
        length: number of tokens, usually of the longest completion allowed; 1 or more.
    Raises:
        ValueError: length is below 1.

    Examples:
        >>> per_token = jnp.array([[1.0, 1.0, 1.0], [4.0, 0.0, 0.0]])
        >>> mask = jnp.array([[True, True, True], [True, False, False]])
        >>> total, count = fixed_length(per_token, mask, length=4)
        >>> print(total, count)
        1.75 2.0
    """
    total = jnp.sum(jnp.where(completion_mask, per_token, 0.0))
    return total / length, _completions(per_token, completion_mask, trajectories)


@requires(tau=ABOVE_0)
def pairwise_consistency_loss(
    sequence_logprobs: Float[Array, " batch"],
    anchor_logprobs: Float[Array, " batch"],
    rewards: Float[Array, " batch"],
    weights: Float[Array, " batch"],
    group_ids: Int[Array, " batch"],
    kept: Bool[Array, " batch"],
    *,
    tau: Scalar = 1.0,
    anchor: Literal["behavior", "reference"] = "behavior",
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Sum over groups of the weighted pairwise consistency loss, and the number of groups.

    a_i = r_i − τ (log π(y_i) − log π_t(y_i)),  L = (1/K²) Σ_{i<j} w_i w_j (a_i − a_j)² = (W/K²) Σ_i w_i (a_i − ā_w)²
    with W = Σ w and ā_w = Σ w a / W over the K kept rows of a group. At π = π_t the gradient is −(2τ/K) times that of
    group-relative REINFORCE, regardless of the policy that sampled the completions.

    Args:
        sequence_logprobs: log π(y_i), the sum over a completion's tokens.
        anchor_logprobs: log π_t(y_i), constant.
        rewards: reward of each row, in any unit, constant.
        weights: weight of each row, 0 or more, constant.
        group_ids: id of each row's group, any integers; all kept rows of a group must be in the same call.
        kept: mask of the rows that count; values of other rows are ignored.
        tau: temperature τ, in units of reward, above 0.
        anchor: policy π_t, the behavior policy or the reference policy. The loss passes its log-probs.
    Returns:
        Sum over groups, and number of groups with at least one kept row.
    Raises:
        ValueError: τ is not above 0.
    Reference: arXiv 2509.24203 §1 (pairwise consistency); up to a factor arXiv 2504.19599 (GVPO) and, with the
        reference policy as anchor, arXiv 2503.18929 (TBA, whose loss is VarGrad's).

    Examples:
        >>> logprobs, anchor, weights = jnp.array([-1.0, -2.0]), jnp.array([-1.0, -2.0]), jnp.array([1.0, 1.0])
        >>> rewards, group_ids, kept = jnp.array([1.0, 0.0]), jnp.array([0, 0]), jnp.array([True, True])
        >>> total, groups = pairwise_consistency_loss(logprobs, anchor, rewards, weights, group_ids, kept)
        >>> print(total, groups)
        0.25 1.0
    """
    del anchor
    policy = jnp.where(kept, sequence_logprobs, 0.0)
    anchored = jax.lax.stop_gradient(jnp.where(kept, anchor_logprobs, 0.0))
    rewards = jax.lax.stop_gradient(jnp.where(kept, rewards, 0.0))
    weights = jax.lax.stop_gradient(jnp.where(kept, weights, 0.0))
    index = group_index(group_ids)
    # Measured from the group's lowest reward, so that equal rewards have exactly equal agreements at π = π_t.
    above = jnp.where(kept, rewards - group_minima(jnp.where(kept, rewards, jnp.inf), index), 0.0)
    agreement = above - tau * (policy - anchored)
    weight_sums = group_sums(weights, index)
    means = group_sums(weights * agreement, index) / jnp.where(weight_sums > 0, weight_sums, 1.0)
    sizes = jnp.maximum(group_sizes(index, kept), 1.0)
    per_row = weight_sums * weights * jnp.square(agreement - means) / jnp.square(sizes)
    return jnp.sum(jnp.where(kept, per_row, 0.0)), group_count(index, kept).astype(policy.dtype)
