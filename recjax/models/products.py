"""Matmuls that accumulate in float32, forward and backward, in the form that the device computes fastest."""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

PRODUCT = "product"  # checkpoint name of the projections' outputs

# Platforms on which XLA's aᵀ b is slow in float32 and missing in bfloat16.
WRITE_TRANSPOSED = ("cpu",)

# Platforms on which matmuls of the same rows may be faster as one, and the number of rows from which joining the
# kernels costs little.
JOIN = ("cuda", "rocm")
LEAST_JOINED = 1024


def product(subscripts: str, a: Array, b: Array, dtype: DTypeLike) -> Array:
    """The einsum of a matrix of rows with a matrix of weights, accumulated in float32 and then cast to `dtype`.

    The backward pass casts the incoming gradient to the dtype of `a`, so that its matmuls are in low precision too;
    weight gradients have the same precision. It keeps no low-precision copy of the weights.

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
    a, b = kept
    gradient = gradient.astype(a.dtype)
    inputs, output = subscripts.split("->")
    a_axes, b_axes = inputs.split(",")
    a_gradient = _summed_in_float32(f"{output},{b_axes}->{a_axes}", gradient, b).astype(a.dtype)
    if b_axes[0] in a_axes:
        return a_gradient, _summed_over_rows(a, gradient).astype(b.dtype)
    return a_gradient, _summed_over_rows(gradient, a).astype(b.dtype)


_product.defvjp(_forward, _backward)


def _summed_over_rows(a: Float[Array, "rows m"], b: Float[Array, "rows n"]) -> Float[Array, "m n"]:
    """aᵀ b, in float32."""

    def usual(a, b):
        return _summed_in_float32("rm,rn->mn", a, b)

    def transposed(a, b):
        # The narrower operand is the cheaper one to write out. Without the layout constraints, XLA would fuse the
        # transposes into the slow matmul again.
        if a.shape[1] > b.shape[1]:
            return with_layout_constraint(transposed(b, a), Layout((0, 1))).T
        return _summed_in_float32("mr,rn->mn", with_layout_constraint(a.T, Layout((0, 1))), b)

    if math.prod(jax.sharding.get_abstract_mesh().shape.values()) > 1:
        return usual(a, b)  # a layout constraint is not split over devices: rows would be sent to every device
    return jax.lax.platform_dependent(a, b, default=usual, **dict.fromkeys(WRITE_TRANSPOSED, transposed))


# --- Matmuls of the same rows with several kernels.


def products(
    x: Float[Array, "rows inputs"], kernels: Sequence[Array], joins: bool = False
) -> list[Float[Array, "rows ..."]]:
    """`product` of the rows with each kernel, in the dtype of `x`.

    XLA on the CPU has fast bfloat16 matmuls with a float32 result; with a bfloat16 result, it computes in float32.

    Args:
        kernels: [inputs, units] each; `units` may differ.
        joins: compute one matmul on platforms of JOIN, from LEAST_JOINED rows on. No device has measured it.
    """
    # Where units are split over devices, joined units would move between them.
    is_split = jax.sharding.get_abstract_mesh().shape.get("tensor", 1) > 1
    if not joins or len(kernels) == 1 or len(x) < LEAST_JOINED or is_split:
        return [product("mk,kn->mn", x, kernel, x.dtype) for kernel in kernels]
    return list(_products(x, tuple(kernels)))


@jax.custom_vjp
def _products(x: Array, kernels: tuple[Array, ...]) -> tuple[Array, ...]:
    def joined(x, kernels):
        outputs = _summed_in_float32("mk,kn->mn", x, _joined(x, kernels)).astype(x.dtype)
        return tuple(_split(outputs, kernels))

    def apart(x, kernels):
        return tuple(_product("mk,kn->mn", x.dtype, x, kernel) for kernel in kernels)

    return jax.lax.platform_dependent(x, kernels, default=apart, **dict.fromkeys(JOIN, joined))


def _products_forward(x: Array, kernels: tuple[Array, ...]) -> tuple[tuple[Array, ...], tuple]:
    return _products(x, kernels), (x, kernels)  # the kernels themselves, as joined kernels would be a copy


def _products_backward(kept: tuple, gradients: tuple[Array, ...]) -> tuple[Array, tuple[Array, ...]]:
    def joined(x, kernels, gradients):
        gradient = jnp.concatenate(gradients, axis=-1)
        x_gradient = _summed_in_float32("mn,kn->mk", gradient, _joined(x, kernels)).astype(x.dtype)
        kernel_gradients = _split(_summed_over_rows(x, gradient), kernels)
        pairs = zip(kernel_gradients, kernels, strict=True)
        return x_gradient, tuple(kernel_gradient.astype(kernel.dtype) for kernel_gradient, kernel in pairs)

    def apart(x, kernels, gradients):
        x_gradients = []
        kernel_gradients = []
        for kernel, gradient in zip(kernels, gradients, strict=True):
            x_gradient, kernel_gradient = _backward("mk,kn->mn", x.dtype, (x, kernel), gradient)
            x_gradients.append(x_gradient)
            kernel_gradients.append(kernel_gradient)
        # The last is first, as without this function, where JAX adds them.
        return functools.reduce(jnp.add, reversed(x_gradients)), tuple(kernel_gradients)

    return jax.lax.platform_dependent(*kept, gradients, default=apart, **dict.fromkeys(JOIN, joined))


_products.defvjp(_products_forward, _products_backward)


def _joined(x: Array, kernels: Sequence[Array]) -> Array:
    """The kernels side by side, in the dtype of `x`."""
    return jnp.concatenate([kernel.astype(x.dtype) for kernel in kernels], axis=-1)


def _split(units: Array, kernels: Sequence[Array]) -> list[Array]:
    """The units of each kernel."""
    ends = np.cumsum([kernel.shape[-1] for kernel in kernels])
    return jnp.split(units, ends[:-1], axis=-1)


# --- Matmuls of groups of rows; each group has its own kernel.


@jax.custom_vjp
def grouped_product(
    x: Float[Array, "rows inputs"], kernels: Float[Array, "groups inputs units"], sizes: Int[Array, " groups"]
) -> Float[Array, "rows units"]:
    """Matmuls of consecutive groups of rows with their groups' kernels, accumulated in float32; 0 in further rows.

    XLA on the CPU computes `jax.lax.ragged_dot` as a matmul of all rows with all kernels. There, a loop runs over
    blocks of rows of one group each.

    Args:
        kernels: cast to the dtype of `x`.
        sizes: rows of each group.
    """
    return _by_group(x, kernels, sizes)


def _by_group(x: Array, kernels: Array, sizes: Array) -> Array:
    def ragged(x, kernels, sizes):
        whole = jax.lax.ragged_dot(x, kernels.astype(x.dtype), sizes, preferred_element_type=jnp.float32)
        return whole.astype(x.dtype)

    def in_blocks(x, kernels, sizes):
        size = _block_size(len(x), len(sizes))
        blocks = _Blocks.of(sizes, len(x))
        rows = jnp.pad(x, ((0, size), (0, 0)))

        def put_block(number, whole):
            group = blocks.groups[number]
            start = blocks.starts[number]
            kernel = jax.lax.dynamic_index_in_dim(kernels, group, keepdims=False)
            inputs = jax.lax.dynamic_slice_in_dim(rows, start, size)
            outputs = _summed_in_float32("rm,mn->rn", inputs, kernel).astype(x.dtype)
            # The next block overwrites the rows after the group's end, which are wrong here.
            return jax.lax.dynamic_update_slice_in_dim(whole, outputs, start, 0)

        whole = jnp.zeros((len(rows), kernels.shape[-1]), x.dtype)
        return jax.lax.fori_loop(0, blocks.count, put_block, whole)[: len(x)]

    whole = jax.lax.platform_dependent(x, kernels, sizes, default=ragged, cpu=in_blocks)
    return jnp.where((jnp.arange(len(x)) < sizes.sum())[:, None], whole, 0)


def _grouped_backward(kept: tuple, gradient: Array) -> tuple[Array, Array, None]:
    x, kernels, sizes = kept

    def ragged(x, gradient, sizes):
        numbers = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
        return jax.lax.ragged_dot_general(x, gradient, sizes, numbers, preferred_element_type=jnp.float32)

    def in_blocks(x, gradient, sizes):
        size = _block_size(len(x), len(sizes))
        blocks = _Blocks.of(sizes, len(x))
        x, gradient = (jnp.pad(y, ((0, size), (0, 0))) for y in (x, gradient))

        def add_block(number, whole):
            group = blocks.groups[number]
            start = blocks.starts[number]
            inputs, outputs = (jax.lax.dynamic_slice_in_dim(y, start, size) for y in (x, gradient))
            inputs = jnp.where((jnp.arange(size) < blocks.ends[number] - start)[:, None], inputs, 0)
            return whole.at[group].add(_summed_in_float32("rm,rn->mn", inputs, outputs))

        return jax.lax.fori_loop(0, blocks.count, add_block, jnp.zeros(kernels.shape, jnp.float32))

    kernel_gradients = jax.lax.platform_dependent(x, gradient, sizes, default=ragged, cpu=in_blocks)
    return _by_group(gradient, kernels.swapaxes(1, 2), sizes), kernel_gradients.astype(kernels.dtype), None


grouped_product.defvjp(lambda *operands: (grouped_product(*operands), operands), _grouped_backward)


class _Blocks(NamedTuple):
    """Blocks of rows of one group each: their groups, first rows, ends of their groups, and the number of blocks."""

    groups: Array
    starts: Array
    ends: Array
    count: Array

    @classmethod
    def of(cls, sizes: Array, rows: int) -> "_Blocks":
        size = _block_size(rows, len(sizes))
        counts = -(-sizes // size)
        ends = jnp.cumsum(sizes)
        last = jnp.cumsum(counts)
        numbers = jnp.arange(rows // size + len(sizes))
        groups = jnp.minimum(jnp.searchsorted(last, numbers, side="right"), len(sizes) - 1)
        starts = (ends - sizes)[groups] + (numbers - (last - counts)[groups]) * size
        return cls(groups, starts, ends[groups], last[-1])


def _block_size(rows: int, groups: int) -> int:
    """Rows of a block, from 8 to 256: about the mean size of a group."""
    return min(max(8, 2 ** (rows // groups).bit_length()), 256)
