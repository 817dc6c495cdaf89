"""Sums over groups of completions. Rows with the same id form a group; ids, group sizes and row order are free.

The functions take `index`: the group ids renumbered by `group_index`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def group_index(group_ids: Int[Array, " batch"]) -> Int[Array, " batch"]:
    """Renumbers group ids to 0, 1, 2, …, as JAX's segment functions require.

    Examples:
        >>> print(group_index(jnp.array([40, 7, 40])))
        [1 0 1]
    """
    return jnp.unique(group_ids, return_inverse=True, size=group_ids.shape[0])[1]


def group_sums(values: Float[Array, " batch"], index: Int[Array, " batch"]) -> Float[Array, " batch"]:
    """For each row, the sum of `values` in its group.

    Examples:
        >>> print(group_sums(jnp.array([1.0, 2.0, 3.0]), jnp.array([1, 0, 1])))
        [4. 2. 4.]
    """
    return jax.ops.segment_sum(values, index, num_segments=index.shape[0])[index]


def group_minima(values: Float[Array, " batch"], index: Int[Array, " batch"]) -> Float[Array, " batch"]:
    """For each row, the lowest of `values` in its group.

    Examples:
        >>> print(group_minima(jnp.array([1.0, 2.0, 3.0]), jnp.array([1, 0, 1])))
        [1. 2. 1.]
    """
    return jax.ops.segment_min(values, index, num_segments=index.shape[0])[index]


def group_sizes(index: Int[Array, " batch"], kept: Bool[Array, " batch"]) -> Float[Array, " batch"]:
    """For each row, the number of kept rows in its group, as a float.

    Examples:
        >>> print(group_sizes(jnp.array([1, 0, 1]), jnp.array([True, True, False])))
        [1. 1. 1.]
    """
    return group_sums(kept.astype(jnp.float32), index)


def group_count(index: Int[Array, " batch"], kept: Bool[Array, " batch"]) -> Int[Array, ""]:
    """The number of groups with at least one kept row.

    Examples:
        >>> print(group_count(jnp.array([1, 0, 1]), jnp.array([True, False, True])))
        1
    """
    return jnp.sum(jax.ops.segment_sum(kept.astype(jnp.int32), index, num_segments=index.shape[0]) > 0)
