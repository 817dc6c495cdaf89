"""One function for attention: every kernel gives what attention is by definition, or leaves it to the plain one."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recjax.hub.policy import attention_kernel
from recjax.models import attention
from recjax.models.attention import KERNELS, attend, one_token_attention, self_attention_mask, splash_attention
from recjax.models.decoder import Decoder, Tokens, init_params
from recjax.models.decoder_config import DecoderConfig
from tests.marks import campaign_except

BATCH, TIME, HEAD_DIM = 3, 7, 8
LENGTHS = np.array([7, 4, 2])
# Padding on the right, and two sequences in a row with padding after them.
MASK = np.arange(TIME) < LENGTHS[:, None]
IDS = np.array([[3, 3, 3, 7, 7, 7, 7], [2, 2, 4, 4, 0, 0, 0], [1, 2, 0, 0, 0, 0, 0]])  # where a sequence ends


def inputs(heads=4, kv_heads=2, batch=BATCH, time=TIME, seed=0):
    random = np.random.default_rng(seed)
    shapes = [(batch, heads, time, HEAD_DIM), *[(batch, kv_heads, time, HEAD_DIM)] * 2]
    return [jnp.array(random.normal(size=shape), jnp.float32) for shape in shapes]


def by_definition(queries, keys, values, allowed, scale, cap=None):
    """Attention in float64, one query at a time; zeros where a query may look at nothing."""
    queries, keys, values = (np.asarray(x, np.float64) for x in (queries, keys, values))
    batch, heads, time, head_dim = queries.shape
    mixed = np.zeros((batch, time, heads, head_dim))
    for row, head, at in np.ndindex(batch, heads, time):
        look = np.flatnonzero(allowed[row, at])
        if not len(look):
            continue
        kv_head = head * keys.shape[1] // heads
        scores = keys[row, kv_head, look] @ queries[row, head, at] * scale
        scores = scores if cap is None else cap * np.tanh(scores / cap)
        weights = np.exp(scores - scores.max())
        mixed[row, at, head] = weights @ values[row, kv_head, look] / weights.sum()
    return mixed.reshape(batch * time, heads * head_dim)


def allowed(ids, window=None):
    """[batch, query, key]: of the same id, not padding, not ahead, in the window."""
    same = (ids[:, :, None] == ids[:, None, :]) & (ids != 0)[:, None, :]
    distance = np.arange(TIME)[:, None] - np.arange(TIME)
    return same & (distance >= 0) & (distance < (window or TIME))


def kernel_mask(ids, window=None):
    """The decoder's mask of a lone segment."""
    mask = self_attention_mask(jnp.asarray(ids))
    return mask if window is None else mask & (np.subtract.outer(np.arange(TIME), np.arange(TIME)) < window)


CASES = {
    "padding, one kv head": dict(ids=MASK, kv_heads=1),
    "segments, ungrouped": dict(ids=IDS, kv_heads=4),
    "segments, window": dict(ids=IDS, window=2),
    "segments, cap and scale": dict(ids=IDS, cap=1.5, scale=0.9),
}


@pytest.fixture
def kernels_here(monkeypatch):
    """Kernels of other devices run here: splash step by step, cuDNN's arguments through XLA."""
    ran = []

    def splash(*arguments):
        ran.append("splash")
        return splash_attention(*arguments, interpret=True)

    dot_product_attention = jax.nn.dot_product_attention

    def cudnn(*arguments, implementation, **options):
        ran.append(implementation)
        return dot_product_attention(*arguments, implementation="xla", **options)

    monkeypatch.setattr(attention, "splash_attention", splash)
    monkeypatch.setattr(jax.nn, "dot_product_attention", cudnn)
    return ran


@pytest.mark.parametrize("case", campaign_except(CASES, "segments, cap and scale", slow=["padding, one kv head"]))
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_is_attention_by_definition(kernels_here, kernel, case):
    options = {"window": None, "cap": None, "scale": 0.5, "kv_heads": 2} | CASES[case]
    ids, window, cap, scale = (options[name] for name in ("ids", "window", "cap", "scale"))
    arrays = inputs(kv_heads=options["kv_heads"])
    given = None if window else jnp.asarray(ids)
    real = np.asarray(ids).reshape(-1) != 0

    @functools.partial(jax.jit, static_argnums=1)
    def mixed_and_gradients(arrays, kernel):
        def mixed(queries, keys, values):
            segments = [(keys, values, kernel_mask(ids, window))]
            return attend(queries, segments, scale, cap, ids=given, kernel=kernel)[real]

        return mixed(*arrays), jax.grad(lambda arrays: jnp.sum(jnp.sin(mixed(*arrays))))(arrays)

    mixed, gradients = mixed_and_gradients(arrays, kernel)
    np.testing.assert_allclose(mixed, by_definition(*arrays, allowed(ids, window), scale, cap)[real], atol=2e-5)
    for one, other in zip(gradients, mixed_and_gradients(arrays, "plain")[1], strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)
    left_to_plain = {"splash": window, "cudnn": cap, "plain": True}[kernel]
    assert set(kernels_here) == (set() if left_to_plain else {kernel})


@pytest.mark.parametrize("kernel", KERNELS)
def test_contexts_shared_by_a_group_are_plain(kernels_here, kernel):
    queries, keys, values = inputs(batch=6)
    _, *prompt = inputs(batch=2, seed=1)
    ids, prompt_ids = np.tile(MASK, (2, 1)), MASK[1:]

    @jax.jit
    def mixed(queries, keys, values, prompt):
        segments = [(*prompt, jnp.asarray(prompt_ids)[:, None, None, None, None, :])]
        return attend(queries, [*segments, (keys, values, kernel_mask(ids))], 0.5, kernel=kernel)

    look = np.concatenate([np.repeat(prompt_ids, 3, 0)[:, None].repeat(TIME, 1), allowed(ids)], axis=-1)
    whole = [np.concatenate([np.repeat(x, 3, 0), own], axis=2) for x, own in zip(prompt, (keys, values), strict=True)]
    expected = by_definition(queries, *whole, look, 0.5)
    found, real = np.asarray(mixed(queries, keys, values, prompt)), ids.reshape(-1)
    np.testing.assert_allclose(found[real], expected[real], atol=2e-5)
    assert kernels_here == []


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_single_token_is_plain(kernels_here, kernel):
    queries, keys, values = (np.asarray(x)[:, :, :1] for x in inputs())

    @jax.jit
    def mixed(queries, keys, values):
        segments = [(keys, values, kernel_mask(MASK)[..., :1, :1])]
        return attend(queries, segments, 0.5, ids=jnp.asarray(MASK[:, :1]), kernel=kernel)

    expected = np.repeat(values, 2, 1).reshape(BATCH, -1)
    np.testing.assert_allclose(mixed(queries, keys, values), expected, atol=1e-6)
    assert kernels_here == []


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "kv_heads", "part"), [(4, 2, (2, 2)), (3, 1, (3, 4))])
def test_splash_runs_on_the_part_of_each_device(monkeypatch, batch, kv_heads, part):
    parts = []

    def splash(*arguments):
        parts.append(arguments[0].shape[:2])
        return splash_attention(*arguments, interpret=True)

    monkeypatch.setattr(attention, "splash_attention", splash)
    arrays, ids = inputs(kv_heads=kv_heads, batch=batch), jnp.tile(IDS, (2, 1))[:batch]

    @jax.jit
    def gradients(arrays):
        def total(queries, keys, values):
            return jnp.sin(attend(queries, [(keys, values, kernel_mask(ids))], 0.5, ids=ids, kernel="splash")).sum()

        return jax.value_and_grad(total, argnums=(0, 1, 2))(*arrays)

    alone = gradients(arrays)
    mesh = jax.make_mesh((2, 1, 2), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    with jax.set_mesh(mesh):
        for one, other in zip(jax.tree.leaves(gradients(arrays)), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-4)
    assert parts == [(batch, 4), part]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "windows"),
    [
        pytest.param("cudnn", (2, None), marks=pytest.mark.campaign),
        ("splash", ()),
        pytest.param("splash", (2, None), marks=pytest.mark.campaign),
    ],
)
def test_a_decoder_computes_the_same_by_every_kernel(kernels_here, kernel, windows):
    config = DecoderConfig(11, 16, 32, 2, 2, 1, 8, windows=windows)
    params = init_params(config, jax.random.key(0))
    tokens = np.random.default_rng(1).integers(0, 11, IDS.shape)
    positions = np.array([[0, 1, 2, 0, 1, 2, 3], [0, 1, 0, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0]])
    arrays = {"params": params}, tokens, positions, IDS
    by_kernel, plain = (jax.jit(Decoder(config, attention=name).apply)(*arrays)[0] for name in (kernel, "plain"))
    np.testing.assert_allclose(np.asarray(by_kernel)[IDS > 0], np.asarray(plain)[IDS > 0], atol=2e-5)
    assert set(kernels_here) == (set() if kernel == "splash" and windows else {kernel})


def device(platform, kind, capability="9.0"):
    """All that is asked of a device."""
    made = mock.Mock(jax.Device, platform=platform, device_kind=kind)
    made.compute_capability = capability
    return made


H100, TPU, CPU = device("gpu", "NVIDIA H100 80GB HBM3"), device("tpu", "TPU v5 lite"), device("cpu", "cpu")
LLAMA = DecoderConfig(11, 256, 32, 2, 2, 1, 128)
GEMMA = dataclasses.replace(LLAMA, windows=(4, None), attention_cap=50.0)
HALF, SINGLE = jnp.dtype("bfloat16"), jnp.dtype("float32")


@pytest.mark.parametrize(
    ("on", "config", "dtype", "kernel"),
    [
        (H100, LLAMA, HALF, "cudnn"),
        (H100, LLAMA, SINGLE, "plain"),
        (H100, GEMMA, HALF, "plain"),
        (H100, dataclasses.replace(LLAMA, head_dim=256), HALF, "plain"),
        (device("gpu", "AMD Instinct MI300X"), LLAMA, HALF, "plain"),
        (device("gpu", "NVIDIA T4", "7.5"), LLAMA, HALF, "plain"),
        (TPU, LLAMA, SINGLE, "splash"),
        (TPU, GEMMA, HALF, "plain"),
        (CPU, LLAMA, SINGLE, "plain"),
    ],
)
def test_auto_is_the_devices_kernel_where_it_fits(on, config, dtype, kernel):
    assert attention_kernel("auto", config, dtype, on) == kernel
    assert attention_kernel(kernel, config, dtype, on) == kernel
    for other in {*KERNELS} - {kernel, "plain"}:
        with pytest.raises(ValueError, match=f"model.attention = '{other}' needs .*; this is {on.device_kind}"):
            attention_kernel(other, config, dtype, on)


def lowered(kernel, platform, dtype=jnp.bfloat16):
    """The program that a device of another kind would compile."""
    queries, keys, values = (x.astype(dtype) for x in inputs())
    mask, ids = kernel_mask(IDS), jnp.asarray(IDS)

    def loss(queries, keys, values):
        return attend(queries, [(keys, values, mask)], 0.5, ids=ids, kernel=kernel).astype(jnp.float32).sum()

    gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
    return gradients.trace(queries, keys, values).lower(lowering_platforms=(platform,)).as_text()


def test_splash_becomes_a_kernel_of_a_tpu_forwards_and_backwards():
    text = lowered("splash", "tpu", jnp.float32)
    assert text.count("tpu_custom_call") >= 3 and "splash_mha_fwd" in text and "splash_mha_dkv" in text


def test_cudnn_becomes_its_flash_attention_forwards_and_backwards(monkeypatch):
    # Of a machine without cuDNN only the check of its version stands in the way.
    version = "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version"
    monkeypatch.setattr(version, lambda: 91000)
    text = lowered("cudnn", "cuda")
    assert "__cudnn$fmhaScaleBiasSoftmax" in text and "__cudnn$fmhaScaleBiasSoftmaxBackward" in text
    assert f"tensor<{BATCH}x8x4x{HEAD_DIM}xbf16>" in text, "an even number of tokens"


def contexts_of_one_token(heads, kv_heads, head_dim, lengths, seed=0):
    """Queries of 4 rows, and segments of which the first has a row for two rows each; some tokens are masked."""
    random = np.random.default_rng(seed)
    segments = []
    for number, length in enumerate(lengths):
        rows = 4 if number else 2
        keys, values = (jnp.array(random.normal(size=(rows, kv_heads, length, head_dim)), jnp.bfloat16) for _ in "kv")
        seen = random.random((rows, length)) < 0.7
        seen[:, 0] |= number == 0
        segments.append((keys, values, jnp.array(seen)[:, None, None, None, None, :]))
    return jnp.array(random.normal(size=(4, heads, 1, head_dim)), jnp.bfloat16), segments


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "lengths"),
    [(14, 2, 64, (128, 70, 16)), (3, 3, 16, (5, 1)), (40, 2, 32, (130,))],  # blocks with a rest; 7, 1 and 20 heads
)
def test_the_kernel_for_one_token_is_attention_by_its_definition(heads, kv_heads, head_dim, lengths):
    queries, segments = contexts_of_one_token(heads, kv_heads, head_dim, lengths)
    found = one_token_attention(queries, segments, 0.3, interpret=True)
    keys, values, seen = (
        np.concatenate([np.repeat(x, 4 // len(x), axis=0) for x in map(np.asarray, column)], axis=axis)
        for column, axis in zip(zip(*segments, strict=True), (2, 2, -1), strict=True)
    )
    expected = by_definition(queries, keys, values, seen[:, 0, 0, 0], 0.3)
    np.testing.assert_allclose(found.astype(jnp.float32).reshape(4, -1), expected, atol=0.01)


@pytest.mark.slow
def test_one_token_takes_the_kernel_on_one_gpu_alone(monkeypatch):
    queries, segments = contexts_of_one_token(4, 2, 16, (16, 16))
    monkeypatch.setattr(attention, "one_token_attention", lambda *_: 7 * queries)

    def takes_it(platform="gpu", kernel="cudnn", cap=None, is_sampling=True):
        monkeypatch.setattr(jax, "default_backend", lambda: platform)
        found = attend(queries, segments, 0.3, cap, kernel=kernel, is_sampling=is_sampling)
        return bool((found == 7 * queries.reshape(4, -1)).all())

    assert takes_it()
    assert not takes_it("cpu") and not takes_it(kernel="plain") and not takes_it(cap=30.0)
    assert not takes_it(is_sampling=False)
    with jax.set_mesh(jax.make_mesh((2,), ("data",))):
        assert not takes_it()


@pytest.mark.slow
def test_an_update_of_a_single_token_on_a_gpu_has_a_gradient(monkeypatch):
    config = DecoderConfig(13, 16, 32, 1, 2, 1, 8)
    decoder, params = Decoder(config, jnp.bfloat16, attention="cudnn"), init_params(config, jax.random.key(0))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")  # the rest of the update is computed here
    token, mask = jnp.ones((2, 1), jnp.int32), jnp.ones((2, 1), bool)

    def total(params):
        parts = [Tokens(token, token - 1, mask), Tokens(token, token, mask)]  # a prompt, and its completion
        of_parts = decoder.apply({"params": params}, *parts, method="run_groups")
        return sum(hidden.astype(jnp.float32).sum() for hidden in of_parts)

    gradient = jax.grad(total)(params)["layers"]["key"]["kernel"]
    assert np.isfinite(gradient).all() and np.abs(gradient).max() > 0
