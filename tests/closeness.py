"""Comparisons that any CPU passes: an error is relative to the largest element of its tensor.

Two programs that add the same numbers in another order differ by the rounding of the largest ones, also where the sum
is small. An absolute tolerance passes or fails with the scale of the tensor, one relative to each element with luck.
"""

from typing import Any

import chex
import jax
import numpy as np


def assert_close(found: Any, expected: Any, tolerance: float = 1e-4, *, least: float = 0.0) -> None:
    """Compares two trees of arrays, tensor by tensor.

    Args:
        tolerance: the error that each element may have, as a share of the largest absolute value of its tensor.
        least: what counts as the largest value where all are smaller. It is for scalars and tensors that may be 0,
            whose terms are about this large.
    """
    chex.assert_trees_all_equal_structs(found, expected)
    leaves = jax.tree_util.tree_leaves_with_path(expected)
    for one, (path, other) in zip(jax.tree.leaves(found), leaves, strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        largest = max(np.abs(other[np.isfinite(other)]).max(initial=0.0), least)
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * largest, err_msg=jax.tree_util.keystr(path))


def assert_same_change(before: Any, found: Any, expected: Any, tolerance: float = 1e-4) -> None:
    """Compares the parameters after two updates of the same ones by their changes, which with SGD are gradients.

    Args:
        tolerance: the error of a change, as a share of the largest change of its tensor. Two roundings of the sum with
            the largest parameter come on top.
    """
    chex.assert_trees_all_equal_structs(before, found, expected)
    leaves = jax.tree_util.tree_leaves_with_path(before)
    for (path, start), one, other in zip(leaves, jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        start, one, other = (np.asarray(x, np.float64) for x in (start, one, other))
        rounding = 2 * np.finfo(np.float32).eps * np.abs(start).max()
        allowed = tolerance * np.abs(other - start).max() + rounding
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(one - start, other - start, rtol=0, atol=allowed, err_msg=name)
