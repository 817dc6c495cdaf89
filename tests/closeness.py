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
    paths, leaves = zip(*jax.tree_util.tree_leaves_with_path(expected), strict=True)
    for path, one, other in zip(paths, jax.tree.leaves(found), leaves, strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        largest = max(np.abs(other).max(initial=0.0), least)
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * largest, err_msg=jax.tree_util.keystr(path))


def change(before: Any, after: Any) -> Any:
    """What an update subtracted from the parameters: with SGD at rate 1, the gradient."""
    return jax.tree.map(lambda x, y: x - y, before, after)
