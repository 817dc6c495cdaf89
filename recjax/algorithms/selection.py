"""Selections: choose the completions of a batch to learn from."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from recjax.algorithms.advantages import deviations
from recjax.algorithms.groups import group_index, group_minima, group_sums

# Rewards within this share of the group's range around the mean count as equal to the mean: float32 means are rounded.
TIE = 1e-6


def drop_excess_negatives(
    rewards: Float[Array, " batch"], group_ids: Int[Array, " batch"], kept: Bool[Array, " batch"], key: PRNGKeyArray
) -> Bool[Array, " batch"]:
    """Drops random negatives of each group until the group has no more negatives than positives.

    Negatives have r < r̄, positives r > r̄; rows at the mean are neither, and stay. A group without positives has equal
    rewards, so it has no negatives either, and stays whole with advantages of zero.

    Args:
        rewards: reward of each row, in any unit; ignored where not kept.
        group_ids: id of each row's group; any integers in any order, groups of any size.
        kept: mask of the rows that count; other rows stay dropped.
        key: random key that picks the negatives to drop.
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
    # Sorting by group, with negatives first in random order, makes a negative's place in its group a random rank.
    order = jnp.lexsort((jax.random.uniform(key, rewards.shape), ~negative, index))
    place = jnp.argsort(order)
    start = jax.ops.segment_min(place, index, num_segments=index.shape[0])[index]
    return kept & (~negative | (place - start < positives))
