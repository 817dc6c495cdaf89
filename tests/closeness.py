"""Comparisons that any CPU passes: an error is relative to the largest element of its tensor.

Two programs that add the same numbers in another order differ by the rounding of the largest ones, also where the sum
is small. An absolute tolerance passes or fails with the scale of a tensor, one relative to each element with luck.
"""

from typing import Any

import chex
import jax
import numpy as np


def assert_close(found: Any, expected: Any, tolerance: float = 1e-4, *, least: float = 0.0, err_msg: str = "") -> None:
    """Compares two trees of arrays, tensor by tensor.

    Args:
        tolerance: the error that each element may have, as a share of the largest absolute value of its tensor.
        least: what counts as the largest value where all are smaller, for sums that may be 0: the size of their terms.
        err_msg: names the comparison.
    """
    chex.assert_trees_all_equal_structs(found, expected)
    leaves = jax.tree_util.tree_leaves_with_path(expected)
    for one, (path, other) in zip(jax.tree.leaves(found), leaves, strict=True):
        other = np.asarray(other, np.float64)
        allowed = tolerance * max(_largest(other), least)
        message = f"{err_msg} {jax.tree_util.keystr(path)}"
        np.testing.assert_allclose(np.asarray(one, np.float64), other, rtol=0, atol=allowed, err_msg=message)


def assert_same_logprobs(found: Any, expected: Any, tolerance: float = 2e-5) -> None:
    """Compares an array of log-probs by two programs, whose errors are those of logits of at least about 1."""
    assert_close(np.asarray(found), np.asarray(expected), tolerance, least=1.0)


def assert_same_gradient(found: Any, expected: Any, tolerance: float = 1e-4) -> None:
    """Compares two gradients with respect to a tree of parameters, tensor by tensor.

    A thousandth of the largest element of the whole gradient is the least that an error is relative to: the gradient of
    a key's bias, for example, is 0 but for rounding.
    """
    assert_close(found, expected, tolerance, least=1e-3 * max(map(_largest, jax.tree.leaves(expected))))


def assert_same_change(before: Any, found: Any, expected: Any, tolerance: float = 1e-4) -> None:
    """Compares the parameters after two updates of the same ones by their changes, which with SGD are gradients.

    Args:
        tolerance: as for a gradient. Two roundings of the largest parameter of a tensor come on top.
    """
    chex.assert_trees_all_equal_structs(before, found, expected)
    changes = jax.tree.map(lambda x, y: np.asarray(y, np.float64) - np.asarray(x, np.float64), before, expected)
    least = 1e-3 * max(map(_largest, jax.tree.leaves(changes)))
    starts = jax.tree_util.tree_leaves_with_path(before)
    for (path, start), after, change in zip(starts, jax.tree.leaves(found), jax.tree.leaves(changes), strict=True):
        start = np.asarray(start, np.float64)
        allowed = tolerance * max(_largest(change), least) + 2 * np.finfo(np.float32).eps * _largest(start)
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(np.asarray(after) - start, change, rtol=0, atol=allowed, err_msg=name)


def _largest(x: Any) -> float:
    """The largest absolute value that is finite; 0 if there is none."""
    x = np.asarray(x, np.float64)
    return np.abs(x[np.isfinite(x)]).max(initial=0.0)
