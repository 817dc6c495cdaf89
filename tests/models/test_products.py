"""Products in low precision: sums in float32, gradients as those of the plain product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recjax.models.products import product


def operands(subscripts, dtype):
    sizes = dict(zip("mknrev", (5, 700, 3, 5, 700, 3), strict=True))
    shapes = [[sizes[axis] for axis in operand] for operand in subscripts.split("->")[0].split(",")]
    return [jax.random.normal(jax.random.key(i), shape).astype(dtype) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize(
    ("dtype", "of_weights"),
    [(jnp.float32, jnp.float32), (jnp.bfloat16, jnp.bfloat16), (jnp.bfloat16, jnp.float32)],
)
@pytest.mark.parametrize("subscripts", ["mk,kn->mn", "re,ve->rv", "re,ev->rv"])
def test_values_and_gradients_are_the_einsum_of_the_same_numbers(subscripts, dtype, of_weights):
    a, b = operands(subscripts, dtype)
    b = b.astype(of_weights)

    def weighed(multiply):
        def total(a, b):
            y = multiply(a, b)
            return jnp.sum(y * jnp.cos(jnp.arange(y.size)).astype(dtype).astype(jnp.float32).reshape(y.shape)), y

        (_, y), gradients = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(a, b)
        return y, *gradients

    found = jax.jit(lambda: weighed(lambda a, b: product(subscripts, a, b, jnp.float32)))()
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    expected = weighed(lambda a, b: jnp.einsum(subscripts, a, b))
    assert [x.dtype for x in found] == [jnp.float32, dtype, of_weights]
    np.testing.assert_allclose(
        found[0], expected[0], rtol=1e-4, atol=1e-4
    )  # sums of 700 bfloat16 numbers would be off by 1
    for one, other in zip(found[1:], expected[1:], strict=True):
        np.testing.assert_allclose(one.astype(jnp.float32), other, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize(
    ("platform", "devices", "written"), [("cpu", 1, True), ("cpu", 2, False), ("tpu", 1, False), ("cuda", 1, False)]
)
def test_the_transpose_of_the_rows_is_written_out_for_one_cpu_alone(platform, devices, written):
    a, b = operands("mk,kn->mn", jnp.bfloat16)
    gradient = jax.jit(jax.grad(lambda b: product("mk,kn->mn", a, b, jnp.float32).sum()))
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((devices,), ("data",))):
        lowered = gradient.trace(b).lower(lowering_platforms=(platform,)).as_text()
    assert ("LayoutConstraint" in lowered) == written


def test_weights_of_higher_precision_are_kept_as_they_are_and_not_as_a_copy():
    a, b = operands("mk,kn->mn", jnp.bfloat16)
    weights = b.astype(jnp.float32)
    _, backward = jax.vjp(lambda a, b: product("mk,kn->mn", a, b, jnp.float32), a, weights)
    assert {leaf.dtype for leaf in jax.tree.leaves(backward) if leaf.shape == b.shape} == {jnp.dtype(jnp.float32)}


def test_all_three_products_are_of_bfloat16_arrays_with_weights_in_float32_too():
    a, b = operands("mk,kn->mn", jnp.bfloat16)
    both = jax.jit(jax.grad(lambda a, b: product("mk,kn->mn", a, b, jnp.float32).sum(), argnums=(0, 1)))
    products = [line for line in both.lower(a, b.astype(jnp.float32)).as_text().splitlines() if "dot_general" in line]
    assert len(products) >= 2 and all(line.split("->")[-2].count("xbf16>") == 2 for line in products)
