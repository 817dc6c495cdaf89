"""Products in low precision: sums in float32, gradients as those of the plain product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recjax.models.decoder import Decoder
from recjax.models.decoder_config import DecoderConfig, Lora
from recjax.models.products import product, products
from recjax.models.unrolling import params_for
from tests.closeness import assert_close, assert_same_gradient
from tests.marks import slow, slow_except
from tests.tiny import params_of


def operands(subscripts, dtype):
    sizes = dict(zip("mknrev", (5, 700, 3, 5, 700, 3), strict=True))
    shapes = [[sizes[axis] for axis in operand] for operand in subscripts.split("->")[0].split(",")]
    return [jax.random.normal(jax.random.key(i), shape).astype(dtype) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize(
    ("dtype", "of_weights"),
    [(jnp.float32, jnp.float32), (jnp.bfloat16, jnp.bfloat16), (jnp.bfloat16, jnp.float32)],
)
@pytest.mark.parametrize("subscripts", ["mk,kn->mn", *slow("re,ve->rv", "re,ev->rv")])
def test_products_and_gradients_equal_einsum(subscripts, dtype, of_weights):
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
    expected = jax.jit(lambda: weighed(lambda a, b: jnp.einsum(subscripts, a, b)))()
    assert [x.dtype for x in found] == [jnp.float32, dtype, of_weights]
    assert_close(found[0], expected[0], 1e-5)  # sums of 700 bfloat16 numbers would be off by 1
    for one, other in zip(found[1:], expected[1:], strict=True):
        assert_close(one, other, 1e-5 if one.dtype == jnp.float32 else 1e-2)


@pytest.mark.parametrize(
    ("platform", "devices", "written"), [("cpu", 1, True), ("cpu", 2, False), ("tpu", 1, False), ("cuda", 1, False)]
)
def test_only_one_cpu_writes_out_transposed_rows(platform, devices, written):
    a, b = operands("mk,kn->mn", jnp.bfloat16)
    gradient = jax.jit(jax.grad(lambda b: product("mk,kn->mn", a, b, jnp.float32).sum()))
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((devices,), ("data",))):
        lowered = gradient.trace(b).lower(lowering_platforms=(platform,)).as_text()
    assert ("LayoutConstraint" in lowered) == written


def test_weights_of_higher_precision_are_kept_without_a_copy():
    a, b = operands("mk,kn->mn", jnp.bfloat16)
    weights = b.astype(jnp.float32)
    _, backward = jax.vjp(lambda a, b: product("mk,kn->mn", a, b, jnp.float32), a, weights)
    assert {leaf.dtype for leaf in jax.tree.leaves(backward) if leaf.shape == b.shape} == {jnp.dtype(jnp.float32)}


def test_all_three_products_read_bfloat16_arrays():
    a, b = operands("mk,kn->mn", jnp.bfloat16)
    both = jax.jit(jax.grad(lambda a, b: product("mk,kn->mn", a, b, jnp.float32).sum(), argnums=(0, 1)))
    products = [line for line in both.lower(a, b.astype(jnp.float32)).as_text().splitlines() if "dot_general" in line]
    assert len(products) >= 2 and all(line.split("->")[-2].count("xbf16>") == 2 for line in products)


# --- Products of the same rows with several kernels.

UNITS = (6, 2, 3)


def rows_and_kernels(dtype, of_weights=jnp.float32):
    x = jax.random.normal(jax.random.key(0), (5, 700)).astype(dtype)
    keys = jax.random.split(jax.random.key(1), len(UNITS))
    return x, [jax.random.normal(key, (700, units)).astype(of_weights) for key, units in zip(keys, UNITS, strict=True)]


def weighed_products(x, kernels, joins=True):
    outputs = products(x, kernels, joins)
    return sum(jnp.sum(y.astype(jnp.float32) * jnp.cos(jnp.arange(y.size)).reshape(y.shape)) for y in outputs), outputs


def joined_on(monkeypatch, *platforms, rows=1):
    monkeypatch.setattr("recjax.models.products.JOIN", platforms)
    monkeypatch.setattr("recjax.models.products.LEAST_JOINED", rows)


@pytest.mark.parametrize(
    ("dtype", "of_weights", "tolerance"),
    [(jnp.float32, jnp.float32, 1e-5), (jnp.bfloat16, jnp.bfloat16, 2e-2), (jnp.bfloat16, jnp.float32, 2e-2)],
)
def test_joined_and_separate_products_have_equal_gradients(monkeypatch, dtype, of_weights, tolerance):
    x, kernels = rows_and_kernels(dtype, of_weights)
    graded = jax.value_and_grad(weighed_products, argnums=(0, 1), has_aux=True)

    def found():
        (_, outputs), gradients = jax.jit(lambda: graded(x, kernels))()
        return jax.tree.leaves((outputs, gradients))

    apart = found()
    joined_on(monkeypatch, "cpu")
    joined = found()
    assert [y.shape[-1] for y in joined[: len(UNITS)]] == list(UNITS)
    for one, other in zip(joined, apart, strict=True):
        assert one.dtype == other.dtype
        assert_close(one, other, tolerance)


@pytest.mark.parametrize(
    ("platform", "joins", "rows", "tensor", "matmuls"),
    [
        ("cuda", True, 5, 1, 3),
        ("cuda", False, 5, 1, 9),
        ("cuda", True, 6, 1, 9),
        ("cuda", True, 5, 2, 9),
        ("cpu", True, 5, 1, 9),
        ("tpu", True, 5, 1, 9),
    ],
)
def test_products_of_many_rows_join_on_a_gpu(monkeypatch, platform, joins, rows, tensor, matmuls):
    joined_on(monkeypatch, "cuda", rows=rows)
    graded = jax.jit(jax.value_and_grad(lambda *given: weighed_products(*given, joins)[0], argnums=(0, 1)))
    arrays = rows_and_kernels(jnp.bfloat16)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1, tensor), ("data", "tensor"))):
        lowered = graded.trace(*arrays).lower(lowering_platforms=(platform,)).as_text()
    assert lowered.count("dot_general") == matmuls


def test_joined_kernels_are_not_kept_for_the_backward_pass(monkeypatch):
    joined_on(monkeypatch, "cpu")
    x, kernels = rows_and_kernels(jnp.bfloat16)
    _, backward = jax.vjp(lambda x, kernels: products(x, kernels, True), x, kernels)
    assert sorted(leaf.size for leaf in jax.tree.leaves(backward)) == sorted([x.size, *(k.size for k in kernels)])


@pytest.mark.parametrize("unrolled", slow_except([True, False], False))
def test_a_decoder_has_the_gradients_of_products_apart(monkeypatch, unrolled):
    lora = Lora(2, 1.0, ("query", "up"))
    config = DecoderConfig(16, 8, 12, 2, 2, 1, 4, qkv_bias=True, lora=lora)
    decoder = Decoder(config, unrolled=unrolled, joined_projections=True)
    start = jax.device_get(params_of(config))
    params = jax.device_put(jax.tree.map(lambda leaf: leaf + np.float32(0.1), start))  # no bias or adapter is 0
    tokens = jnp.arange(6).reshape(2, 3)
    positions = jnp.arange(3) + jnp.zeros_like(tokens)

    def gradients():
        def total(params):
            hidden, _ = decoder.apply({"params": params_for(decoder, params)}, tokens, positions, tokens >= 0)
            return jnp.sum(hidden * jnp.cos(jnp.arange(hidden.size)).reshape(hidden.shape))

        return jax.jit(jax.grad(total))(params)

    apart = gradients()
    joined_on(monkeypatch, "cpu")
    assert_same_gradient(gradients(), apart)
