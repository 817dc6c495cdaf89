"""Reductions of a per-token loss to (sum, count).

Sums and counts add up over micro-batches and devices; the caller divides once, after adding, so that the split does not
matter. Masked values are never read, and a row without valid tokens adds to neither sum nor count. All rows of a
trajectory form one completion and must be in the same call.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from recjax.algorithms.options import require
from recjax.algorithms.trajectories import one_per_trajectory, trajectory_sums

SumAndCount = tuple[Float[Array, ""], Float[Array, ""]]


def _completions(per_token, completion_mask, trajectories):
    return jnp.sum(one_per_trajectory(jnp.any(completion_mask, axis=-1), trajectories), dtype=per_token.dtype)


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
    return jnp.sum(jnp.where(completion_mask, per_token, 0.0)), _completions(per_token, completion_mask, trajectories)


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
    require(length >= 1, "length", length, "must be 1 or more tokens")
    return jnp.sum(jnp.where(completion_mask, per_token, 0.0)) / length, _completions(
        per_token, completion_mask, trajectories
    )
