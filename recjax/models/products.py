"""Matmuls that accumulate in float32, forward and backward, in the form that the device computes fastest."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike
from jaxtyping import Array, Float

# Platforms on which XLA's aᵀ b is slow in float32 and missing in bfloat16.
WRITE_TRANSPOSED = ("cpu",)


def product(subscripts: str, a: Array, b: Array, dtype: DTypeLike) -> Array:
    """The einsum of a matrix of rows with a matrix of weights, accumulated in float32 and then cast to `dtype`.

    The backward pass casts the incoming gradient to the dtype of `a`, so that its matmuls are in low precision too;
    weight gradients have the precision of these matmuls. It keeps no low-precision copy of the weights.

    Args:
        subscripts: rows are the first index of `a` and of the result; every index is in two of the three operands.
        b: weights, cast to the dtype of `a`.
    """
    return _product(subscripts, dtype, a, b)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(subscripts: str, dtype: DTypeLike, a: Array, b: Array) -> Array:
    return _summed_in_float32(subscripts, a, b).astype(dtype)


def _summed_in_float32(subscripts: str, a: Array, b: Array) -> Array:
    return jnp.einsum(subscripts, a, b.astype(a.dtype), preferred_element_type=jnp.float32)


def _forward(subscripts: str, dtype: DTypeLike, a: Array, b: Array) -> tuple[Array, tuple[Array, Array]]:
    return _product(subscripts, dtype, a, b), (a, b)


def _backward(subscripts: str, dtype: DTypeLike, kept: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    (a, b), gradient = kept, gradient.astype(kept[0].dtype)
    inputs, output = subscripts.split("->")
    of_a, of_b = inputs.split(",")
    pair = (a, gradient) if of_b[0] in of_a else (gradient, a)
    return (
        _summed_in_float32(f"{output},{of_b}->{of_a}", gradient, b).astype(a.dtype),
        _summed_over_rows(*pair).astype(b.dtype),
    )


_product.defvjp(_forward, _backward)


def _summed_over_rows(a: Float[Array, "rows m"], b: Float[Array, "rows n"]) -> Float[Array, "m n"]:
    """aᵀ b, in float32."""

    def usual(a, b):
        return _summed_in_float32("rm,rn->mn", a, b)

    def transposed(a, b):
        # Without the layout constraint, XLA would fuse the transpose into the slow matmul again.
        return _summed_in_float32("mr,rn->mn", with_layout_constraint(a.T, Layout((0, 1))), b)

    if math.prod(jax.sharding.get_abstract_mesh().shape.values()) > 1:
        return usual(a, b)  # a layout constraint is not split over devices: rows would be sent to all of them
    return jax.lax.platform_dependent(a, b, default=usual, **dict.fromkeys(WRITE_TRANSPOSED, transposed))


def dense_product(
    x: Float[Array, "rows inputs"], kernel: Float[Array, "inputs units"], dimensions: tuple, **options
) -> Float[Array, "rows units"]:
    """The `dot_general` of flax.linen.Dense.

    XLA on the CPU has fast bfloat16 matmuls with a float32 result; it computes those with a bfloat16 result in float32.
    """
    return product("mk,kn->mn", x, kernel, x.dtype)


def all_but_kernel(x: Array, kernel: Array, bias: Array | None, *, dtype: DTypeLike) -> tuple:
    """The `promote_dtype` of flax.linen.Dense, which leaves the kernel to `product`."""
    return x.astype(dtype), kernel, None if bias is None else bias.astype(dtype)
