"""Sampling in slots: the same completions as all rows at once, whatever the slots, and few programs for it."""

import itertools

import jax
import numpy as np
import pytest

from recjax.models.decoder import Decoder, DecoderConfig, RopeScaling, init_params
from recjax.models.logprobs import Sampling
from recjax.rollout import slots as module
from recjax.rollout.sampler import sample
from recjax.rollout.slots import sample_in_slots

SIZES = {"vocab_size": 23, "hidden_size": 16, "intermediate_size": 32, "num_layers": 2, "num_heads": 4}
PLAIN = DecoderConfig(**SIZES, num_kv_heads=2, head_dim=4, tie_embeddings=False)
WINDOWED = DecoderConfig(
    **SIZES,
    num_kv_heads=1,
    head_dim=6,
    windows=(3, None),
    rope_layers=(True, False),
    local_rope_theta=20.0,
    rope_scaling=RopeScaling("linear", 3.0),
    norm_offset=1.0,
    post_norms=True,
    qk_norm=True,
    attention_cap=1.5,
    logit_cap=3.0,
)
LENGTHS = (3, 5, 1, 4)
LATE, EARLY = (7,), (1, 4, 11, 13, 17, 20, 21)
MAX_TOKENS = 40


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    """Rounds of 5 tokens, caches from 8 and slots from 2: a short completion goes through many of them."""
    for name, value in {"ROUND": 5, "SHORTEST": 8, "FEWEST": 2}.items():
        monkeypatch.setattr(module, name, value)


def problem(config):
    params = jax.tree.map(lambda x: 2 * x, init_params(config, jax.random.key(0)))
    mask = np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]
    tokens = np.random.default_rng(0).integers(0, 23, mask.shape).astype(np.int32)
    return Decoder(config), params, np.where(mask, tokens, 0), mask


def assert_same(slots, config=PLAIN, group_size=3, **changes):
    options = {"max_tokens": MAX_TOKENS, "sampling": Sampling(), "stop_ids": LATE, "group_size": group_size} | changes
    arguments = (*problem(config), jax.random.key(3))
    expected = jax.device_get(sample(*arguments, **options))
    drawn = sample_in_slots(*arguments, slots=slots, **options)
    for name in ("tokens", "mask", "truncated"):
        np.testing.assert_array_equal(getattr(drawn, name), getattr(expected, name), err_msg=name)
    np.testing.assert_allclose(drawn.logprobs, expected.logprobs, atol=1e-5)
    return drawn


@pytest.mark.parametrize("slots", [1, 2, 5, 12, 40])
def test_any_number_of_slots_draws_the_same(slots):
    drawn = assert_same(slots)
    assert drawn.truncated.any() and not drawn.truncated.all()


@pytest.mark.parametrize("config", [PLAIN, WINDOWED], ids=["plain", "windowed"])
@pytest.mark.parametrize("unrolled", [True, False], ids=["unrolled", "scanned"])
def test_families_unrolled_and_scanned(config, unrolled, monkeypatch):
    monkeypatch.setattr(module, "MOST_UNROLLED", 2 if unrolled else 1)
    assert_same(5, config)


@pytest.mark.parametrize("stop_ids", [(), LATE, EARLY, tuple(range(23))], ids=["never", "late", "early", "at once"])
def test_stops(stop_ids):
    drawn = assert_same(5, group_size=4, stop_ids=stop_ids)
    assert (drawn.mask.sum(-1) == 1).all() == (len(stop_ids) == 23)


@pytest.mark.parametrize(
    "sampling", [Sampling(0.0), Sampling(0.7), Sampling(1.4, top_k=4), Sampling(1.0, top_p=0.8)], ids=str
)
def test_distributions(sampling):
    assert_same(5, sampling=sampling, group_size=1 if sampling.temperature == 0 else 5)


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 6])
def test_short_limits(max_tokens):
    assert_same(5, max_tokens=max_tokens)
