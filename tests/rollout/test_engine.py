"""Sampling in slots: the same completions as all rows at once, whatever the slots, and few programs for it."""

import jax
import numpy as np
import pytest
from recjax.rollout.sampler import sample

from recjax.hub.policy import Policy
from recjax.models.decoder import Decoder, DecoderConfig, init_params
from recjax.models.logprobs import Sampling
from recjax.models.rotary import RopeScaling
from recjax.rollout import slots as module
from recjax.rollout.collecting import draw
from recjax.rollout.slots import sample_in_slots
from recjax.tasks.prompts import Prompts

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
MAX_TOKENS = 24


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    """Rounds of 5 tokens, caches from 8 and slots from 3: a short completion goes through many of them."""
    for name, value in {"ROUND": 5, "SHORTEST": 8, "FEWEST": 3}.items():
        monkeypatch.setattr(module, name, value)
    # Nearly all the time here goes into compiling.
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def problem(config):
    params = init_params(config, jax.random.key(0))
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


@pytest.mark.parametrize("slots", [1, 5, 12, 40])
def test_any_number_of_slots_draws_the_same(slots):
    drawn = assert_same(slots)
    assert drawn.truncated.any() and not drawn.truncated.all()


@pytest.mark.parametrize("unrolled", [True, False], ids=["unrolled", "scanned"])
def test_layers_that_differ(unrolled, monkeypatch):
    monkeypatch.setattr(module, "MOST_UNROLLED", 2 if unrolled else 1)
    assert_same(5, WINDOWED)


@pytest.mark.parametrize("stop_ids", [(), EARLY, tuple(range(23))], ids=["never", "early", "at once"])
def test_stops(stop_ids):
    drawn = assert_same(5, group_size=4, stop_ids=stop_ids)
    assert (drawn.mask.sum(-1) == 1).all() == (len(stop_ids) == 23)


@pytest.mark.parametrize(
    "sampling", [Sampling(0.0), Sampling(1.4, top_k=6), Sampling(0.7, top_p=0.8)], ids=["greedy", "top-k", "top-p"]
)
def test_distributions(sampling):
    assert_same(5, sampling=sampling, group_size=1 if sampling.temperature == 0 else 5)


@pytest.mark.parametrize("max_tokens", [1, 2, 6])
def test_short_limits(max_tokens):
    assert_same(5, max_tokens=max_tokens)


def test_steps_of_any_lengths_share_few_programs():
    arguments, programs = problem(PLAIN), (module._prefill, module._decode, module._gather, module._admit)
    options = {"slots": 5, "group_size": 3, "max_tokens": MAX_TOKENS, "sampling": Sampling(), "stop_ids": (7, 9)}

    def counts_after(keys):
        decoder, params, prompts, mask = arguments
        for key in keys:
            params = jax.tree.map(lambda x: x * 1.01, params)
            sample_in_slots(decoder, params, (prompts + key) % 23, mask, jax.random.key(key), **options)
        return [program._cache_size() for program in programs]

    for program in programs:
        program.clear_cache()
    first = counts_after(range(8))
    assert first[0] == 1 and first[1] <= 2 * 3  # two numbers of slots, three lengths
    assert counts_after(range(8)) == first
    most = [1, 2 * 3, (2 * 3) ** 2, 2 * 3]
    assert all(now <= limit for now, limit in zip(counts_after(range(8, 30)), most, strict=True))


def test_a_policy_with_slots_draws_the_same():
    decoder, params, prompts, mask = problem(PLAIN)
    asked = Prompts(prompts, mask, [""] * 4, [])
    policies = [Policy(decoder, None, LATE, slots) for slots in (None, 5)]
    key = jax.random.key(1)
    expected, drawn = (draw(policy, params, asked, key, 3, MAX_TOKENS, Sampling()) for policy in policies)
    np.testing.assert_array_equal(drawn.tokens, expected.tokens)


def test_the_ladders():
    assert module._sizes(1) == [1] and module._sizes(5) == [3, 5] and module._sizes(13) == [4, 7, 13]
    assert module._lengths(1) == [6] and module._lengths(24) == [8, 16, 29]
