"""What only an NVIDIA GPU can show: bfloat16, cuDNN's attention, donation and memory. `python -m pytest -m gpu`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from recjax.algorithms.presets import build_algorithm
from recjax.experience.layout import Layout
from recjax.experience.packing import RowShape, pack
from recjax.hub.policy import attention_kernel, compute_dtype
from recjax.models.attention import attend, self_attention_mask
from recjax.models.decoder import Decoder, init_params
from recjax.models.decoder_config import DecoderConfig
from recjax.models.logprobs import Sampling, completion_logprobs
from recjax.rollout.keys_values import put_behind
from recjax.training.update import Recipe, TrainState, UpdateContext, update
from tests.models.test_attention import contexts_of_one_token
from tests.rollout.padded import engine_completions
from tests.training.test_update import make_batch

pytestmark = pytest.mark.gpu

CONFIG = DecoderConfig(8192, 256, 512, 2, 4, 2, 64)
OPTIMIZER = optax.adamw(1e-3)
SHAPE = RowShape(4, 1024)
HALF = jnp.dtype("bfloat16")


@pytest.fixture(autouse=True)
def gpu():
    """An NVIDIA GPU, or no test."""
    device = jax.devices()[0]
    if device.platform != "gpu" or "nvidia" not in device.device_kind.lower():
        pytest.skip(f"needs an NVIDIA GPU and jax[cuda13]; JAX computes on {device.device_kind}")
    return device


@functools.cache
def params():
    return init_params(CONFIG, jax.random.key(0))


@functools.cache
def batch():
    """16 completions of up to 400 tokens, of a vocabulary's first tokens."""
    made = make_batch(prompts=4, group=4, time=400)
    return made._replace(behavior_logprobs=np.full(made.completions.shape, -9.0, np.float32))


CUDNN = ["cudnn", "cudnn_lengths"]


def update_options(dtype, kernel, chunk=256, joined_projections=False):
    overrides = {"reference_kl": {"coefficient": 0.1}, "entropy": {"coefficient": 0.01}}
    decoder = Decoder(CONFIG, dtype, "full", attention=kernel, joined_projections=joined_projections)
    return {"recipe": Recipe(decoder, build_algorithm("grpo", overrides), OPTIMIZER, Sampling(), chunk)}


def update_arguments():
    state = TrainState(jax.tree.map(jnp.copy, params()), OPTIMIZER.init(params()))
    return (
        state,
        batch(),
        Layout(1, pack(batch(), SHAPE)),
        UpdateContext({}, jax.random.key(0), reference_params=params()),
    )


def test_auto_means_bfloat16_and_cudnn(gpu):
    assert compute_dtype("auto") == HALF
    assert attention_kernel("auto", CONFIG, HALF) == "cudnn"


@pytest.mark.parametrize("are_packed", [True, False])
@pytest.mark.parametrize("time", [256, 333])
@pytest.mark.parametrize("cudnn", CUDNN)
def test_cudnn_attention_is_the_plain_one(gpu, cudnn, time, are_packed):
    random = np.random.default_rng(0)
    shapes = [(3, 4, time, 64), (3, 2, time, 64), (3, 2, time, 64)]
    arrays = [jnp.array(random.normal(size=shape), jnp.bfloat16) for shape in shapes]
    # Two sequences a row and padding after them; a row without any. Or right-padded rows, one empty.
    places = np.arange(time)
    two = [np.where(places < first, first, np.where(places < last, last, 0)) for first, last in ((90, 200), (10, time))]
    ids = jnp.array([*two, 0 * places], jnp.int32)
    ids = ids if are_packed else ids > 0
    mask = self_attention_mask(ids)
    real = (ids > 0).reshape(-1)

    @functools.partial(jax.jit, static_argnums=1)
    def mixed_and_gradients(arrays, kernel):
        def total(queries, keys, values):
            mixed = attend(queries, [(keys, values, mask)], 0.125, ids=(ids,), kernel=kernel).astype(jnp.float32)
            mixed = jnp.where(real[:, None], mixed, 0.0)
            return jnp.sum(jnp.sin(mixed)), mixed

        return jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)(*arrays)

    (_, by_cudnn), gradients = mixed_and_gradients(arrays, cudnn)
    (_, plain), expected = mixed_and_gradients([x.astype(jnp.float32) for x in arrays], "plain")
    np.testing.assert_allclose(by_cudnn, plain, atol=0.03)
    for one, other in zip(gradients, expected, strict=True):
        assert np.isfinite(one.astype(jnp.float32)).all()
        np.testing.assert_allclose(one.astype(jnp.float32), other, atol=0.1)


@pytest.mark.parametrize(("prompt_time", "time"), [(128, 200), (77, 301)])
def test_cudnn_equals_plain_attention_over_shared_prompts(gpu, prompt_time, time):
    random = np.random.default_rng(0)
    shapes = [(6, 4, time, 64), *2 * [(2, 2, prompt_time, 64)], *2 * [(6, 2, time, 64)]]
    masks = [
        jnp.asarray(np.arange(longest) < np.array(lengths)[:, None])
        for longest, lengths in ((prompt_time, [prompt_time, 3]), (time, [time, 1, 0, 90, time - 1, 2]))
    ]
    own, of_prompt = (mask[:, None, :, None] for mask in masks[::-1])
    reals = [own, of_prompt, of_prompt, own, own]
    arrays = [jnp.array(random.normal(size=shape), jnp.bfloat16) for shape in shapes]
    arrays = [jnp.where(real, x, jnp.nan) for x, real in zip(arrays, reals, strict=True)]

    @functools.partial(jax.jit, static_argnums=1)
    def mixed_and_gradients(arrays, kernel):
        def total(arrays):
            queries, *prompt, keys, values = arrays
            segments = [
                (*prompt, masks[0][:, None, None, None, None, :]),
                (keys, values, self_attention_mask(masks[1])),
            ]
            mixed = attend(queries, segments, 0.125, ids=tuple(masks), kernel=kernel).astype(jnp.float32)
            return jnp.sum(jnp.where(masks[1].reshape(-1, 1), jnp.sin(mixed), 0.0)), mixed

        return jax.value_and_grad(total, has_aux=True)(arrays)

    (_, by_cudnn), gradients = mixed_and_gradients(arrays, "cudnn_lengths")
    exact = [jnp.where(real, x, 0).astype(jnp.float32) for x, real in zip(arrays, reals, strict=True)]
    (_, plain), expected = mixed_and_gradients(exact, "plain")
    np.testing.assert_allclose(by_cudnn, jnp.where(masks[1].reshape(-1, 1), plain, 0.0), atol=0.03)
    for one, other in zip(gradients, expected, strict=True):
        one = one.astype(jnp.float32)
        assert np.isfinite(one).all()
        np.testing.assert_allclose(one, other, atol=0.03 * np.abs(other).max())
    text = mixed_and_gradients.lower(arrays, "cudnn_lengths").compile().as_text()
    assert "__cudnn$fmhaSoftmaxBackward" in text and "fmhaScaleBias" not in text


def test_the_kernel_for_one_token_is_the_plain_attention(gpu):
    queries, segments = contexts_of_one_token(14, 2, 64, (128, 270, 16))
    found = jax.jit(lambda *given: attend(*given, 0.125, kernel="cudnn", is_sampling=True))(queries, segments)
    exact = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == HALF else x, (queries, segments))
    expected = attend(*exact, 0.125, kernel="plain")
    assert not np.array_equal(found, attend(queries, segments, 0.125, kernel="plain"))  # another kernel
    np.testing.assert_allclose(found.astype(jnp.float32), expected, atol=0.01)


def test_slots_get_the_same_tokens_as_on_cpus(gpu):
    random = np.random.default_rng(0)
    cache, new = (tuple(random.normal(size=(5, 2, time, 4)).astype(np.float32) for _ in "kv") for time in (9, 3))
    places = np.array([[3, 0, 4, 1], [2, 0, 3, 1], [0, 6, 5, 2]], np.int32)
    found = [
        jax.jit(put_behind)(*jax.device_put((cache, new, places, np.int32(3)), device))
        for device in (gpu, jax.devices("cpu")[0])
    ]
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("joined_projections", [False, True])
@pytest.mark.parametrize("kernel", CUDNN)
def test_bfloat16_cudnn_updates_are_near_float32(gpu, kernel, joined_projections):
    options = update_options(HALF, kernel, joined_projections=joined_projections)
    _, half, _ = update(*update_arguments(), **options)
    _, single, _ = update(*update_arguments(), **update_options(jnp.dtype("float32"), "plain"))
    for name in ("loss", "gradient_norm", "entropy"):
        np.testing.assert_allclose(half[name], single[name], rtol=0.05, atol=1e-3)


@pytest.mark.parametrize("kernel", CUDNN)
def test_the_state_is_updated_in_its_own_memory(gpu, kernel):
    arguments = update_arguments()
    leaves = jax.tree.leaves(arguments[0])
    size = sum(leaf.nbytes for leaf in leaves)
    compiled = update.lower(*arguments, **update_options(HALF, kernel)).compile()
    # Scalars need not be aliased.
    assert size - 64 <= compiled.memory_analysis().alias_size_in_bytes <= size
    jax.block_until_ready(update(*arguments, **update_options(HALF, kernel)))
    assert all(leaf.is_deleted() for leaf in leaves if leaf.size > 1)


@pytest.mark.parametrize("kernel", CUDNN)
def test_no_complete_scores_are_in_memory(gpu, kernel):
    def temporary(**options):
        compiled = update.lower(*update_arguments(), **update_options(HALF, **options)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    cudnn = temporary(kernel=kernel)
    everything = SHAPE.rows * SHAPE.tokens
    assert temporary(kernel=kernel, chunk=everything) > cudnn + (everything - 256) * CONFIG.vocab_size * 4
    # Float32 scores of one layer, forwards alone.
    assert temporary(kernel="plain") > cudnn + SHAPE.rows * CONFIG.num_heads * SHAPE.tokens**2 * 4


@pytest.mark.parametrize("kernel", CUDNN)
def test_an_unchanged_policy_has_ratio_one(gpu, kernel):
    decoder = Decoder(CONFIG, HALF, attention=kernel)
    prompts, mask = batch().prompts, batch().prompt_mask
    options = {"group_size": 4, "max_tokens": 64, "sampling": Sampling(), "stop_ids": (1,)}
    drawn = engine_completions(decoder, params(), prompts, mask, jax.random.key(1), **options)
    arrays = map(jnp.asarray, (prompts, mask, drawn.tokens, drawn.mask))
    logprobs = completion_logprobs(decoder, params(), *arrays, sampling=Sampling(), chunk=256).logprobs
    assert np.abs(np.where(drawn.mask, logprobs - drawn.logprobs, 0.0)).max() < 0.1
