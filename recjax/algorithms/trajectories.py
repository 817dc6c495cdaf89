"""Rows that belong together: a trajectory of several turns is one completion, in one row or in several.

All rows of a trajectory have the same id. Values per completion are computed at the trajectory's first row and copied
to its other rows. Without ids, every row is a trajectory.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from recjax.algorithms.groups import group_index, group_sums


class FirstRows(NamedTuple):
    """First rows: `is_first` marks the first row of each trajectory; `place` is the index of each row's first row."""

    is_first: Bool[Array, " batch"]
    place: Int[Array, " batch"]

    def shared(self, values: Shaped[Array, "batch *rest"]) -> Shaped[Array, "batch *rest"]:
        """For each row, the value at the first row of its trajectory."""
        return values[self.place]


def first_rows(trajectories: Int[Array, " batch"], row_mask: Bool[Array, " batch"]) -> FirstRows:
    """Finds each trajectory's first row among the rows of `row_mask`; a trajectory without such rows has no first row.

    Args:
        trajectories: id of each row's trajectory; any integers in any order.
        row_mask: mask of the rows that count.

    Examples:
        >>> first = first_rows(jnp.array([3, 3, 8]), jnp.array([True, True, True]))
        >>> print(first.is_first, first.place)
        [ True False  True] [0 0 2]
    """
    places, index = jnp.arange(len(row_mask)), group_index(trajectories)
    first = jax.ops.segment_min(jnp.where(row_mask, places, len(row_mask)), index, num_segments=len(row_mask))[index]
    return FirstRows(row_mask & (places == first), jnp.minimum(first, len(row_mask) - 1))


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
