"""Selections: which completions of a batch are learned from."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from recjax.algorithms.advantages import deviations
from recjax.algorithms.groups import group_index, group_minima, group_sums

# Rewards this close to the group's mean, as a share of the group's range, are at the mean: float32 means are rounded.
TIE = 1e-6


def keep_all(
    rewards: Float[Array, " batch"], group_ids: Int[Array, " batch"], kept: Bool[Array, " batch"], key: PRNGKeyArray
) -> Bool[Array, " batch"]:
    """All rows that were kept before.

    Examples:
        >>> rewards, group_ids, kept = jnp.array([1.0, 0.0]), jnp.array([0, 0]), jnp.array([True, False])
        >>> print(keep_all(rewards, group_ids, kept, jax.random.key(0)))
        [ True False]
    """
    del rewards, group_ids, key
    return kept


def drop_excess_negatives(
    rewards: Float[Array, " batch"], group_ids: Int[Array, " batch"], kept: Bool[Array, " batch"], key: PRNGKeyArray
) -> Bool[Array, " batch"]:
    """Drops random negatives of a group until it has no more of them than positives.

    Negatives have r < r̄, positives r > r̄; rows at the mean are neither, and stay. A group without positives has equal
    rewards, hence no negatives either, and stays whole with advantages of zero.

    Args:
        rewards: any unit; ignored where not kept.
        group_ids: any integers, any group sizes, any order.
        kept: rows that count; the others stay dropped.
        key: decides which negatives go.
    Reference: arXiv 2509.24203 §2 (RED-Drop).

    Examples:
        >>> rewards, group_ids = jnp.array([3.0, 0.0, 0.0]), jnp.array([7, 7, 7])
        >>> kept = jnp.array([True, True, True])
        >>> left = drop_excess_negatives(rewards, group_ids, kept, jax.random.key(0))
        >>> print(left[0], left.sum())
        True 2
    """
    index = group_index(group_ids)
    centered = deviations(rewards, index, kept)
    spread = -group_minima(-centered, index) - group_minima(centered, index)
    negative = centered < -TIE * spread
    positives = group_sums((centered > TIE * spread).astype(rewards.dtype), index)
    # Sorted by group, negatives first in random order, a negative's place in its group is its rank in that order.
    order = jnp.lexsort((jax.random.uniform(key, rewards.shape), ~negative, index))
    place = jnp.argsort(order)
    start = jax.ops.segment_min(place, index, num_segments=index.shape[0])[index]
    return kept & (~negative | (place - start < positives))
