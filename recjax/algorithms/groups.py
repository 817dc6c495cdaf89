"""Rows that belong together: completions of a group, and the rows of a trajectory.

Rows with the same id form a group; ids, group sizes and row order are free. The functions on groups take `index`: the
group ids renumbered by `group_index`.

A trajectory of several turns is one completion, in one row or in several rows with the same id. Values per completion
are computed at the trajectory's first row and copied to its other rows. Without ids, every row is a trajectory.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped


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


class FirstRows(NamedTuple):
    """`is_first` marks the first row of each trajectory; `first_row` is the index of each row's first row."""

    is_first: Bool[Array, " batch"]
    first_row: Int[Array, " batch"]

    def shared(self, values: Shaped[Array, "batch *rest"]) -> Shaped[Array, "batch *rest"]:
        """The value at the first row of each row's trajectory."""
        return values[self.first_row]


def first_rows(trajectories: Int[Array, " batch"], row_mask: Bool[Array, " batch"]) -> FirstRows:
    """Finds each trajectory's first row among the rows of `row_mask`; a trajectory without such rows has no first row.

    Args:
        trajectories: id of each row's trajectory; any integers in any order.
        row_mask: mask of the rows that count.

    Examples:
        >>> first = first_rows(jnp.array([3, 3, 8]), jnp.array([True, True, True]))
        >>> print(first.is_first, first.first_row)
        [ True False  True] [0 0 2]
    """
    rows = jnp.arange(len(row_mask))
    index = group_index(trajectories)
    first = jax.ops.segment_min(jnp.where(row_mask, rows, len(row_mask)), index, num_segments=len(row_mask))[index]
    return FirstRows(row_mask & (rows == first), jnp.minimum(first, len(row_mask) - 1))


def one_per_trajectory(
    row_mask: Bool[Array, " batch"], trajectories: Int[Array, " batch"] | None
) -> Bool[Array, " batch"]:
    """Keeps only the first row of each trajectory in `row_mask`; without trajectories, returns `row_mask` unchanged.

    Examples:
        >>> print(one_per_trajectory(jnp.array([True, True, True]), jnp.array([3, 3, 8])))
        [ True False  True]
    """
    return row_mask if trajectories is None else first_rows(trajectories, row_mask).is_first


def trajectory_sums(
    row_sums: Float[Array, " batch"], trajectories: Int[Array, " batch"] | None
) -> Float[Array, " batch"]:
    """For each row, the sum over its trajectory's rows.

    Examples:
        >>> print(trajectory_sums(jnp.array([1.0, 2.0, 4.0]), jnp.array([3, 3, 8])))
        [3. 3. 4.]
    """
    return row_sums if trajectories is None else group_sums(row_sums, group_index(trajectories))
