"""One function for attention: every kernel gives what attention is by definition, or leaves it to the plain one."""

import dataclasses
import functools
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recjax.config import ModelConfig
from recjax.hub.policy import attention_kernel, kernel_options
from recjax.models import attention
from recjax.models.attention import (
    KERNELS,
    attend,
    one_token_attention,
    plain_attention,
    self_attention_mask,
    splash_attention,
)
from recjax.models.decoder import REMAT, Decoder, DecoderTokens
from recjax.models.decoder_config import DecoderConfig
from recjax.models.logprobs import completion_logprobs
from recjax.models.sampling import Sampling
from tests.closeness import assert_close, assert_same_gradient
from tests.marks import campaign_except, slow_except
from tests.tiny import params_of

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


OVER_PROMPTS = ("cudnn_lengths", "splash")  # kernels for completions over a shared prompt

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

    def splash(*arguments, **options):
        ran.append("splash")
        return splash_attention(*arguments, **options, interpret=True)

    dot_product_attention = jax.nn.dot_product_attention

    def cudnn(*arguments, implementation, **options):
        by_lengths = options["query_seq_lengths"] is not None and options["key_value_seq_lengths"] is not None
        assert options["is_causal"] and by_lengths == (options["mask"] is None), "a mask, which is a bias, or lengths"
        ran.append(f"{implementation}_lengths" if by_lengths else implementation)
        mixed = dot_product_attention(*arguments, implementation="xla", **options)
        lengths = options["query_seq_lengths"]
        # A kernel may leave anything at padding.
        if lengths is None:
            return mixed
        real = jnp.arange(mixed.shape[1]) < lengths[:, None]
        return jnp.where(real[..., None, None], mixed, jnp.nan)

    monkeypatch.setattr(attention, "splash_attention", splash)
    monkeypatch.setattr(jax.nn, "dot_product_attention", cudnn)
    return ran


@pytest.mark.parametrize("case", campaign_except(CASES, "segments, cap and scale", slow=["padding, one kv head"]))
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_is_attention_by_definition(kernels_here, kernel, case):
    options = {"window": None, "cap": None, "scale": 0.5, "kv_heads": 2} | CASES[case]
    ids, window, cap, scale = (options[name] for name in ("ids", "window", "cap", "scale"))
    arrays = inputs(kv_heads=options["kv_heads"])
    given = None if window else (jnp.asarray(ids),)
    real = np.asarray(ids).reshape(-1) != 0

    @functools.partial(jax.jit, static_argnums=1)
    def mixed_and_gradients(arrays, kernel):
        def mixed(queries, keys, values):
            segments = [(keys, values, kernel_mask(ids, window))]
            return attend(queries, segments, scale, cap, ids=given, kernel=kernel)[real]

        return mixed(*arrays), jax.grad(lambda arrays: jnp.sum(jnp.sin(mixed(*arrays))))(arrays)

    mixed, gradients = mixed_and_gradients(arrays, kernel)
    assert_close(mixed, by_definition(*arrays, allowed(ids, window), scale, cap)[real], 2e-5)
    assert_same_gradient([*gradients], [*mixed_and_gradients(arrays, "plain")[1]])
    left_to_plain = {"splash": window, "cudnn": cap, "cudnn_lengths": cap, "plain": True}[kernel]
    takes = "cudnn" if kernel == "cudnn_lengths" and (window or ids.dtype != bool) else kernel
    assert set(kernels_here) == (set() if left_to_plain else {takes})


PROMPT_TIME = 5
PROMPT_MASK = np.arange(PROMPT_TIME) < np.array([5, 2])[:, None]
# Two completions of each prompt: of all, one and no tokens, the last to fill up a batch, and one with padding.
OWN_MASK = np.arange(TIME) < np.array([7, 1, 0, 4])[:, None]


def shared_prompts(padding=None):
    """Queries, a prompt's keys and values, a completion's own keys and values; padding has a value instead of noise."""
    queries, keys, values = inputs(batch=4)
    _, *prompt = inputs(batch=2, time=PROMPT_TIME, seed=1)
    arrays = [queries, *prompt, keys, values]
    masks = [OWN_MASK, PROMPT_MASK, PROMPT_MASK, OWN_MASK, OWN_MASK]
    if padding is not None:
        arrays = [jnp.where(mask[:, None, :, None], x, padding) for x, mask in zip(arrays, masks, strict=True)]
    return arrays, masks


def over_prompts(queries, prompt_keys, prompt_values, keys, values, *, kernel, is_packed=False, **options):
    """Attention of completions over their prompts."""
    segments = [
        (prompt_keys, prompt_values, jnp.asarray(PROMPT_MASK)[:, None, None, None, None, :]),
        (keys, values, kernel_mask(OWN_MASK)),
    ]
    ids = tuple(jnp.asarray(mask, int if is_packed else bool) for mask in (PROMPT_MASK, OWN_MASK))
    return attend(queries, segments, 0.5, **({"ids": ids, "kernel": kernel} | options))


def mixed_over_prompts(kernel):
    """A function of the arrays: attention at real tokens, and the gradients of a sum over it."""

    def mixed(*arrays):
        return jnp.where(OWN_MASK.reshape(-1, 1), over_prompts(*arrays, kernel=kernel), 0.0)

    gradients = jax.grad(lambda arrays: jnp.sum(jnp.sin(mixed(*arrays))))
    return jax.jit(lambda arrays: (mixed(*arrays), gradients(arrays), over_prompts(*arrays, kernel=kernel)))


@pytest.mark.parametrize("kernel", slow_except(("plain", *OVER_PROMPTS), "plain", "cudnn_lengths"))
def test_completions_over_a_shared_prompt_are_attention_by_definition(kernels_here, kernel):
    by_kernel = mixed_over_prompts(kernel)
    arrays, masks = shared_prompts()
    queries, *prompt, keys, values = arrays
    mixed, gradients, _ = by_kernel(arrays)
    own = np.tril(np.ones((TIME, TIME), bool)) & OWN_MASK[:, None]
    look = np.concatenate([np.repeat(PROMPT_MASK, 2, 0)[:, None].repeat(TIME, 1), own], axis=-1)
    whole = [np.concatenate([np.repeat(x, 2, 0), y], axis=2) for x, y in zip(prompt, (keys, values), strict=True)]
    real = OWN_MASK.reshape(-1)
    assert_close(mixed[real], by_definition(queries, *whole, look, 0.5)[real], 2e-5)
    assert_same_gradient([*gradients], [*mixed_over_prompts("plain")(arrays)[1]])
    assert set(kernels_here) == {kernel} - {"plain"}

    junk, _ = shared_prompts(padding=1e3 if kernel == "plain" else np.nan)
    for_junk, of_junk, whole = by_kernel(junk)
    np.testing.assert_array_equal(for_junk, mixed)
    assert np.isfinite(whole).all(), "a later layer's weight gradients multiply padding by zero"
    for one, other, mask in zip(of_junk, gradients, masks, strict=True):
        np.testing.assert_array_equal(one, other)
        assert not np.where(mask[:, None, :, None], 0.0, one).any()


@pytest.mark.parametrize("kernel", slow_except(OVER_PROMPTS, "cudnn_lengths"))
def test_kernels_ignore_the_padding_of_a_row(kernels_here, kernel):
    arrays = inputs()
    ids = jnp.asarray(MASK & (np.arange(BATCH) != 1)[:, None])  # a row without any token

    @jax.jit
    def mixed_and_gradients(arrays):
        def total(arrays):
            mixed = attend(arrays[0], [(*arrays[1:], kernel_mask(ids))], 0.5, ids=(ids,), kernel=kernel)
            return jnp.sum(jnp.where(ids.reshape(-1, 1), jnp.sin(mixed), 0.0)), mixed

        return jax.value_and_grad(total, has_aux=True)(arrays)

    junk = [jnp.where(ids[:, None, :, None], x, np.nan) for x in arrays]
    ((_, expected), gradients), ((_, mixed), of_junk) = (mixed_and_gradients(given) for given in (arrays, junk))
    np.testing.assert_array_equal(mixed, expected)
    for one, other in zip(of_junk, gradients, strict=True):
        np.testing.assert_array_equal(one, other)
        assert np.isfinite(one).all() and np.abs(one).max() > 0


TAKEN = {  # options, and whether completions over a prompt then take the kernel
    "right-padded": ({}, True),
    "sequences' ids": ({"is_packed": True}, False),
    "masks that ids do not determine": ({"ids": None}, False),
    "a context before the prompt": ({"ids": (jnp.asarray(OWN_MASK),)}, False),
    "a bound on scores": ({"cap": 2.0}, {"cudnn_lengths": False, "splash": True}),
}


@pytest.mark.parametrize("kernel", KERNELS[1:])
def test_completions_over_a_prompt_take_a_kernel_that_fits(monkeypatch, kernel):
    ran = []
    names = {name: f"{name.removesuffix('_lengths')}_attention" for name in KERNELS}
    for name in names.values():
        monkeypatch.setattr(attention, name, lambda queries, *_, name=name, **__: ran.append(name) or queries)
    arrays, _ = shared_prompts()
    for case, (options, expected) in TAKEN.items():
        jax.eval_shape(functools.partial(over_prompts, kernel=kernel, **options), *arrays)
        takes_it = kernel in OVER_PROMPTS and (expected if isinstance(expected, bool) else expected[kernel])
        assert ran.pop() == (names[kernel] if takes_it else names["plain"]), case
    # A prompt of four lengths of the completions is the longest; a completion of one token is plain.
    longest = kernel if kernel in OVER_PROMPTS else "plain"
    for prompt_time, time, name in ((12, 3, longest), (13, 3, "plain"), (1, 1, "plain")):
        (queries, *own), (_, *prompt) = inputs(batch=4, time=time), inputs(batch=2, time=prompt_time)
        ids = tuple(jnp.ones(shape, bool) for shape in ((2, prompt_time), (4, time)))
        segments = [(*prompt, ids[0][:, None, None, None, None, :]), (*own, self_attention_mask(ids[1]))]
        jax.eval_shape(lambda x, given=segments, of=ids: attend(x, given, 0.5, ids=of, kernel=kernel), queries)
        assert ran.pop() == names[name], (prompt_time, time)
    # A layer with a window is plain over a prompt, and by cuDNN reads a mask in the prompt itself.
    decoder = Decoder(DecoderConfig(11, 16, 32, 2, 2, 1, 8, windows=(2, None)), attention=kernel)
    params = params_of(decoder.config)
    ran.clear()
    jax.eval_shape(functools.partial(completions_of, decoder), params)
    assert set(ran) == {names["plain"]} | ({names["cudnn"]} if kernel != "splash" else set())


def completions_of(decoder, params):
    """Log-probs of ragged completions of two prompts: several tokens, one, none, and all."""
    tokens = np.random.default_rng(1)
    prompts, completions = (tokens.integers(0, 11, mask.shape) for mask in (PROMPT_MASK, OWN_MASK))
    arrays = map(jnp.asarray, (prompts, PROMPT_MASK, completions, OWN_MASK))
    logprobs = completion_logprobs(decoder, params, *arrays, sampling=Sampling(), chunk=64).logprobs
    return jnp.where(OWN_MASK, logprobs, 0.0)


@pytest.mark.parametrize("kernel", slow_except(OVER_PROMPTS, "cudnn_lengths"))
@pytest.mark.parametrize("remat", slow_except(["attention", "none"], "attention"))
def test_all_kernels_give_equal_logprobs_over_shared_prompts(kernels_here, monkeypatch, kernel, remat):
    config = DecoderConfig(11, 16, 32, 2, 4, 2, 8)
    params = params_of(config)

    @functools.partial(jax.jit, static_argnums=1)
    def gradient(params, decoder):
        def total(params):
            logprobs = completions_of(decoder, params)
            return jnp.sum(jnp.sin(logprobs)), logprobs

        return jax.grad(total, has_aux=True)(params)

    with monkeypatch.context() as without_plain:
        without_plain.setattr(attention, "plain_attention", None)
        found = gradient(params, Decoder(config, remat=remat, attention=kernel))
    assert set(kernels_here) == {kernel}
    assert_same_gradient(found, gradient(params, Decoder(config)))


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
    assert_close(found[real], expected[real], 2e-5)
    assert kernels_here == []


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_single_token_is_plain(kernels_here, kernel):
    queries, keys, values = (np.asarray(x)[:, :, :1] for x in inputs())

    @jax.jit
    def mixed(queries, keys, values):
        segments = [(keys, values, kernel_mask(MASK)[..., :1, :1])]
        return attend(queries, segments, 0.5, ids=(jnp.asarray(MASK[:, :1]),), kernel=kernel)

    expected = np.repeat(values, 2, 1).reshape(BATCH, -1)
    assert_close(mixed(queries, keys, values), expected, 1e-5)
    assert kernels_here == []


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "kv_heads", "part"), [(4, 2, (2, 2)), (3, 1, (3, 4))])
def test_splash_runs_on_the_part_of_each_device(monkeypatch, batch, kv_heads, part):
    parts = []

    def splash(*arguments, **options):
        parts.append(arguments[0].shape[:2])
        return splash_attention(*arguments, **options, interpret=True)

    monkeypatch.setattr(attention, "splash_attention", splash)
    arrays, ids = inputs(kv_heads=kv_heads, batch=batch), jnp.tile(IDS, (2, 1))[:batch]

    @jax.jit
    def gradients(arrays):
        def total(queries, keys, values):
            return jnp.sin(attend(queries, [(keys, values, kernel_mask(ids))], 0.5, ids=(ids,), kernel="splash")).sum()

        return jax.value_and_grad(total, argnums=(0, 1, 2))(*arrays)

    alone = gradients(arrays)
    mesh = jax.make_mesh((2, 1, 2), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    with jax.set_mesh(mesh):
        assert_same_gradient(gradients(arrays), alone)
    assert parts == [(batch, 4), part]


@pytest.mark.slow
@pytest.mark.parametrize("kernel", OVER_PROMPTS)
def test_kernels_run_on_each_devices_part_of_shared_prompts(kernels_here, monkeypatch, kernel):
    parts = []
    name = f"{kernel.removesuffix('_lengths')}_attention"
    run = getattr(attention, name)
    shape_of = lambda queries, keys, *_, **__: parts.append((len(queries), keys.shape[1]))  # noqa: E731
    monkeypatch.setattr(attention, name, lambda *given, **options: (shape_of(*given), run(*given, **options))[1])
    arrays, _ = shared_prompts()
    alone = mixed_over_prompts(kernel)(arrays)
    mesh = jax.make_mesh((2, 1, 2), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    with jax.set_mesh(mesh):
        assert_close(mixed_over_prompts(kernel)(arrays), alone, 2e-5)
    assert set(parts) == {(4, 2), (2, 1)}  # all completions and heads, and those of a device with one prompt


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
    params = params_of(config)
    tokens = np.random.default_rng(1).integers(0, 11, IDS.shape)
    positions = np.array([[0, 1, 2, 0, 1, 2, 3], [0, 1, 0, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0]])
    arrays = {"params": params}, tokens, positions, IDS
    by_kernel, plain = (jax.jit(Decoder(config, attention=name).apply)(*arrays)[0] for name in (kernel, "plain"))
    assert_close(np.asarray(by_kernel)[IDS > 0], np.asarray(plain)[IDS > 0], 2e-5)
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
        (TPU, LLAMA, SINGLE, "plain"),
        (TPU, GEMMA, HALF, "plain"),
        (CPU, LLAMA, SINGLE, "plain"),
    ],
)
def test_auto_is_a_measured_kernel_that_fits(on, config, dtype, kernel):
    assert attention_kernel("auto", config, dtype, on) == kernel
    fitting = {"plain", kernel}
    fitting |= {"cudnn_lengths"} if kernel == "cudnn" else set()
    fitting |= {"splash"} if on is TPU and not config.windows else set()
    for name in fitting:
        assert attention_kernel(name, config, dtype, on) == name
    for other in {*KERNELS} - fitting:
        with pytest.raises(ValueError, match=f"model.attention = '{other}': needs .*; this is {on.device_kind}"):
            attention_kernel(other, config, dtype, on)


def test_joined_projections_need_a_gpu_and_a_key():
    options = ModelConfig(joined_projections=True), LLAMA, SINGLE
    assert kernel_options(*options, H100) == {"attention": "plain", "joined_projections": True}
    assert not kernel_options(ModelConfig(), LLAMA, HALF, H100)["joined_projections"]
    for on in (CPU, TPU):
        with pytest.raises(ValueError, match=f"joined_projections = True needs a GPU; this is {on.device_kind}"):
            kernel_options(*options, on)


def lowered(kernel, platform, dtype=jnp.bfloat16):
    """The program that a device of another kind would compile."""
    queries, keys, values = (x.astype(dtype) for x in inputs())
    mask, ids = kernel_mask(IDS), jnp.asarray(IDS)

    def loss(queries, keys, values):
        return attend(queries, [(keys, values, mask)], 0.5, ids=(ids,), kernel=kernel).astype(jnp.float32).sum()

    gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
    return gradients.trace(queries, keys, values).lower(lowering_platforms=(platform,)).as_text()


def test_splash_compiles_for_a_tpu_in_both_directions():
    text = lowered("splash", "tpu", jnp.float32)
    assert text.count("tpu_custom_call") >= 3 and "splash_mha_fwd" in text and "splash_mha_dkv" in text


def test_cudnn_becomes_its_flash_attention_forwards_and_backwards(monkeypatch):
    # Of a machine without cuDNN only the check of its version stands in the way.
    version = "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version"
    monkeypatch.setattr(version, lambda: 91000)
    text = lowered("cudnn", "cuda")
    assert "__cudnn$fmhaScaleBiasSoftmax" in text and "__cudnn$fmhaScaleBiasSoftmaxBackward" in text
    assert f"tensor<{BATCH}x8x4x{HEAD_DIM}xbf16>" in text, "an even number of tokens"


def lowered_update(platform, **options):
    """The gradient of a decoder's log-probs over shared prompts, as a device of another kind would compile it."""
    config = DecoderConfig(11, 16, 32, 3, 4, 2, 8)
    dtype = jnp.float32 if platform == "tpu" else jnp.bfloat16
    params = params_of(config)
    decoder = Decoder(config, dtype, **options)
    gradient = jax.jit(jax.grad(lambda params: completions_of(decoder, params).sum()))
    return gradient.trace(params).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.slow
def test_cudnn_lengths_holds_no_scores_of_a_shared_prompt(monkeypatch):
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000)
    text = lowered_update("cuda", attention="cudnn_lengths")
    assert text.count("@__cudnn$fmhaSoftmax(") == text.count("@__cudnn$fmhaSoftmaxBackward(") == 2
    assert "fmhaScaleBias" not in text and "PADDING_CAUSAL" in text
    rows = PROMPT_TIME + TIME - 1  # the last token predicts none
    rows += rows % 2
    assert f"tensor<4x{rows}x4x8xbf16>" in text, "queries of a row for each completion"
    scores = {(TIME - 1, PROMPT_TIME), (TIME - 1, TIME - 1), (rows, rows), (PROMPT_TIME, PROMPT_TIME)}
    shapes = {tuple(map(int, shape.split("x"))) for shape in re.findall(r"tensor<([0-9x]+)x(?:f32|bf16)>", text)}
    assert not [shape for shape in shapes if len(shape) >= 3 and shape[-2:] in scores]
    plain = lowered_update("cuda", attention="plain")
    assert f"x{TIME - 1}x{PROMPT_TIME}xf32>" in plain
    measured = lowered_update("cuda", attention="cudnn")
    assert measured.count("@__cudnn$fmhaScaleBiasSoftmax(") == 1, "the prompts'"
    assert f"x{TIME - 1}x{PROMPT_TIME}xf32>" in measured and "PADDING_CAUSAL" not in measured


@pytest.mark.slow
@pytest.mark.parametrize("unrolled", [False, True])
def test_remat_that_keeps_attention_runs_no_kernel_twice(monkeypatch, unrolled):
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000)
    kernels, products = {}, {}
    for remat in REMAT:
        text = lowered_update("cuda", attention="cudnn_lengths", remat=remat, unrolled=unrolled)
        kernels[remat] = text.count("@__cudnn$fmhaSoftmax(")
        products[remat] = lowered_update("cpu", remat=remat, unrolled=unrolled).count("dot_general")
    layers = 3 if unrolled else 1
    once = 2 * layers  # the prompts', and the completions'
    assert kernels == {"none": once, "attention": once, "dots": 2 * once, "full": 2 * once}
    # Plain attention multiplies weights and values once for a prompt and twice for completions.
    assert products["dots"] - products["attention"] == 3 * layers
    assert products["none"] < products["attention"] < products["dots"] < products["full"]


@pytest.mark.slow
def test_remat_that_keeps_attention_runs_splash_once():
    for remat, count in (("attention", 2), ("dots", 4)):
        text = lowered_update("tpu", attention="splash", remat=remat)
        assert len(re.findall(r'kernel_name = "splash_mha_fwd', text)) == count, remat


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
def test_the_one_token_kernel_equals_plain_attention(heads, kv_heads, head_dim, lengths):
    queries, segments = contexts_of_one_token(heads, kv_heads, head_dim, lengths)
    found = one_token_attention(queries, segments, 0.3, interpret=True)
    keys, values, seen = (
        np.concatenate([np.repeat(x, 4 // len(x), axis=0) for x in map(np.asarray, column)], axis=axis)
        for column, axis in zip(zip(*segments, strict=True), (2, 2, -1), strict=True)
    )
    expected = by_definition(queries, keys, values, seen[:, 0, 0, 0], 0.3)
    np.testing.assert_allclose(found.astype(jnp.float32).reshape(4, -1), expected, atol=0.01)


def test_skipped_segments_change_nothing():
    queries, segments = contexts_of_one_token(4, 2, 16, (7, 5, 6))
    keys, values, seen = segments[1]
    segments[1] = keys, jnp.full_like(values, jnp.nan), jnp.zeros_like(seen)  # nobody attends to it
    skipped = plain_attention(queries, segments, 0.3, None, skips=True)
    expected = plain_attention(queries, [segments[0], segments[2]], 0.3, None)
    np.testing.assert_array_equal(skipped, expected)


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
def test_a_one_token_update_has_a_gradient_on_gpus(monkeypatch):
    config = DecoderConfig(13, 16, 32, 1, 2, 1, 8)
    decoder, params = Decoder(config, jnp.bfloat16, attention="cudnn"), params_of(config)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")  # the rest of the update is computed here
    token, mask = jnp.ones((2, 1), jnp.int32), jnp.ones((2, 1), bool)

    def total(params):
        parts = [
            DecoderTokens(token, token - 1, mask),
            DecoderTokens(token, token, mask),
        ]  # a prompt, and its completion
        of_parts = decoder.apply({"params": params}, *parts, method="run_groups")
        return sum(hidden.astype(jnp.float32).sum() for hidden in of_parts)

    gradient = jax.grad(total)(params)["layers"]["key"]["kernel"]
    assert np.isfinite(gradient).all() and np.abs(gradient).max() > 0
