"""Reductions of a per-token loss to (sum, count).

Sums and counts add over micro-batches and devices; the caller divides once, after adding, so that the result depends on
neither. Masked values are never read, and a row without a valid token adds to neither sum nor count. Rows of one
trajectory are one completion, and must then be in the same call.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from recjax.algorithms.options import require
from recjax.algorithms.trajectories import one_per_trajectory, trajectory_sums

SumAndCount = tuple[Float[Array, ""], Float[Array, ""]]


def _completions(per_token, completion_mask, trajectories):
    return jnp.sum(one_per_trajectory(jnp.any(completion_mask, axis=-1), trajectories), dtype=per_token.dtype)


def token_mean(per_token: Float[Array, "batch time"], completion_mask: Bool[Array, "batch time"]) -> SumAndCount:
    """Every token counts the same: Σ over valid tokens, over their number.

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
    """Every completion counts the same: Σ of the means over their tokens, over the number of completions.

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
    """A completion's loss is the sum over its tokens, as in the paper's sequence-level terms; mean over completions.

    Examples:
        >>> per_token = jnp.array([[1.0, 1.0, 1.0], [4.0, 0.0, 0.0]])
        >>> mask = jnp.array([[True, True, True], [True, False, False]])
        >>> total, count = sequence_mean_token_sum(per_token, mask)
        >>> print(total, count)
        7.0 2.0
    """
    return jnp.sum(jnp.where(completion_mask, per_token, 0.0)), _completions(per_token, completion_mask, trajectories)


def fixed_length(
    per_token: Float[Array, "batch time"],
    completion_mask: Bool[Array, "batch time"],
    trajectories: Int[Array, " batch"] | None = None,
    *,
    length: int,
) -> SumAndCount:
    """Every token counts the same in every batch: Σ over valid tokens / length, over the number of completions.

    Args:
        length: in tokens, usually the longest completion allowed; 1 or more.
    Raises:
        ValueError: length below 1.

    Examples:
        >>> per_token = jnp.array([[1.0, 1.0, 1.0], [4.0, 0.0, 0.0]])
        >>> mask = jnp.array([[True, True, True], [True, False, False]])
        >>> total, count = fixed_length(per_token, mask, length=4)
        >>> print(total, count)
        1.75 2.0
    """
    require(length >= 1, "length", length, "must be 1 or more tokens")
    return jnp.sum(jnp.where(completion_mask, per_token, 0.0)) / length, _completions(
        per_token, completion_mask, trajectories
    )
