"""Weights of a sampler that is wrong on purpose: quantized, or disturbed by noise."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Key

from recjax.models.trainable import flatten, unflatten

_LARGEST = {"int8": 127.0, "int4": 7.0, "float8": 448.0}  # float8 has 4 bits of exponent


@functools.partial(jax.jit, static_argnames=("kind", "group"))
def drifted(params: dict, key: Key[Array, ""], kind: str, scale: ArrayLike, group: int | None = None) -> dict:
    """Parameters whose matrices are w + scale · e, with e the error of a sampler's weights.

    int8, int4, float8: e is the rounding error of these numbers, with one scale for each output of a matrix, or for
        each output and `group` inputs.
    noise: e is normal with the root mean square of the matrix, so `scale` is the relative error.

    Embeddings, norms and routers stay exact, as in servers with quantized weights.

    Args:
        kind: int8, int4, float8 or noise.
        key: random key of the noise; equal keys give equal weights.
        scale: 0: the exact weights; 1: the whole rounding error.
        group: number of consecutive inputs of an output that share a scale; None: all of them.

    Examples:
        >>> params = {"up": {"kernel": jnp.array([[1.0, 3.0], [0.503, 0.02]])}, "norm": {"scale": jnp.ones(2)}}
        >>> print(drifted(params, jax.random.key(0), "int8", 1.0)["up"]["kernel"])
        [[1.         3.        ]
         [0.503937   0.02362205]]
    """
    leaves = {}
    for number, (path, leaf) in enumerate(flatten(params).items()):
        leaves[path] = leaf
        if not path.endswith("/kernel") or path.endswith("router/kernel"):
            continue
        exact = leaf.astype(jnp.float32)
        if kind == "noise":
            size = jnp.sqrt(jnp.mean(jnp.square(exact), axis=(-2, -1), keepdims=True))
            error = size * jax.random.normal(jax.random.fold_in(key, number), exact.shape)
        else:
            inputs = exact.shape[-2] if group is None else group
            error = _rounded(exact, kind, inputs) - exact
        leaves[path] = (exact + scale * error).astype(leaf.dtype)
    return unflatten(leaves)


def _rounded(
    matrix: Float[Array, "*layers inputs outputs"], kind: str, group: int
) -> Float[Array, "*layers inputs outputs"]:
    """A matrix rounded to a kind's numbers, with one scale for each output and `group` inputs."""
    inputs, outputs = matrix.shape[-2:]
    groups = -(-inputs // group)
    # Zeros that fill the last group change no scale.
    filled = jnp.zeros((*matrix.shape[:-2], groups * group, outputs)).at[..., :inputs, :].set(matrix)
    grouped = filled.reshape(*matrix.shape[:-2], groups, group, outputs)
    unit = jnp.max(jnp.abs(grouped), axis=-2, keepdims=True) / _LARGEST[kind]
    unit = jnp.where(unit > 0, unit, 1.0)
    steps = grouped / unit
    if kind == "float8":
        steps = steps.astype(jnp.float8_e4m3fn).astype(jnp.float32)
    else:
        steps = jnp.round(steps)
    return (steps * unit).reshape(filled.shape)[..., :inputs, :]
