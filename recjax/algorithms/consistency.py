"""The paper's surrogate objective as a loss: all completions of a prompt should agree on r − τ log(π/π_t)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from recjax.algorithms.groups import group_count, group_index, group_sizes, group_sums
from recjax.algorithms.options import require


def pairwise_consistency_loss(
    sequence_logprobs: Float[Array, " batch"],
    anchor_logprobs: Float[Array, " batch"],
    rewards: Float[Array, " batch"],
    weights: Float[Array, " batch"],
    group_ids: Int[Array, " batch"],
    kept: Bool[Array, " batch"],
    *,
    tau: float = 1.0,
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
    Returns:
        Sum over groups, and number of groups with at least one kept row.
    Raises:
        ValueError: τ is not above 0.
    Reference: arXiv 2509.24203 §1 (pairwise consistency).

    Examples:
        >>> logprobs, anchor, weights = jnp.array([-1.0, -2.0]), jnp.array([-1.0, -2.0]), jnp.array([1.0, 1.0])
        >>> rewards, group_ids, kept = jnp.array([1.0, 0.0]), jnp.array([0, 0]), jnp.array([True, True])
        >>> total, groups = pairwise_consistency_loss(logprobs, anchor, rewards, weights, group_ids, kept)
        >>> print(total, groups)
        0.25 1.0
    """
    require(tau > 0, "tau", tau, "must be above 0")
    policy, anchor, rewards, weights = (
        jnp.where(kept, x, 0.0) for x in (sequence_logprobs, anchor_logprobs, rewards, weights)
    )
    anchor, rewards, weights = jax.lax.stop_gradient((anchor, rewards, weights))
    agreement = rewards - tau * (policy - anchor)
    index = group_index(group_ids)
    weight_sums = group_sums(weights, index)
    means = group_sums(weights * agreement, index) / jnp.where(weight_sums > 0, weight_sums, 1.0)
    sizes = jnp.maximum(group_sizes(index, kept), 1.0)
    per_row = weight_sums * weights * jnp.square(agreement - means) / jnp.square(sizes)
    return jnp.sum(jnp.where(kept, per_row, 0.0)), group_count(index, kept).astype(policy.dtype)
