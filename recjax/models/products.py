"""Products of arrays in low precision whose sums are in float32, forwards and backwards."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float


def product(subscripts: str, a: Array, b: Array, dtype: DTypeLike) -> Array:
    """The einsum of two arrays of one dtype, summed in float32 and then cast to `dtype`.

    Gradients that flow back are cast to the dtype of the arrays, so that the products of the backward pass are in low
    precision too. Float32 arrays are multiplied as ever.

    Args:
        subscripts: of matrices, every index in two of the operands and the result. XLA on the CPU has not all products
            of bfloat16 arrays with more axes.
    """
    if a.dtype == jnp.float32:
        return jnp.einsum(subscripts, a, b)
    return _low_product(subscripts, dtype, a, b)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _low_product(subscripts: str, dtype: DTypeLike, a: Array, b: Array) -> Array:
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32).astype(dtype)


def _forward(subscripts: str, dtype: DTypeLike, a: Array, b: Array) -> tuple[Array, tuple[Array, Array]]:
    return _low_product(subscripts, dtype, a, b), (a, b)


def _backward(subscripts: str, dtype: DTypeLike, kept: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    (a, b), gradient = kept, gradient.astype(kept[0].dtype)
    inputs, output = subscripts.split("->")
    of_a, of_b = inputs.split(",")
    return (
        _low_product(f"{output},{of_b}->{of_a}", a.dtype, gradient, b),
        _low_product(f"{of_a},{output}->{of_b}", b.dtype, a, gradient),
    )


_low_product.defvjp(_forward, _backward)


def dense_product(
    x: Float[Array, "rows inputs"], kernel: Float[Array, "inputs units"], dimensions: tuple, **options
) -> Float[Array, "rows units"]:
    """What flax.linen.Dense takes as its `dot_general`.

    XLA on the CPU has fast products of bfloat16 that give float32; those that give bfloat16 it computes in float32.
    """
    return product("mk,kn->mn", x, kernel, x.dtype)
