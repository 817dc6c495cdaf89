"""Log-probabilities of given completions: cuts, chunks, shared prompts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recjax.algorithms.regularizers import teacher_divergence
from recjax.experience.recorded import has_sets, sets_from_lists, sets_to_lists, top_from_lists, top_to_lists
from recjax.models import logprobs as logprobs_module
from recjax.models.decoder import Decoder, logits
from recjax.models.decoder_config import DecoderConfig
from recjax.models.logprobs import (
    SAMPLED,
    Compared,
    Sampling,
    _in_distribution,
    chunked_scores,
    completion_logprobs,
    kept_tokens,
    recorded_shapes,
    sampling_logits,
    score_tokens,
    top_tokens,
)
from recjax.models.sampling import NOTHING_RECORDED, TokenRecord
from tests.closeness import assert_close, assert_same_gradient, assert_same_logprobs
from tests.tiny import params_of

CONFIG = DecoderConfig(13, 16, 32, 2, 4, 2, 4)
PROMPTS = jnp.array([[3, 4, 5, 0], [6, 7, 8, 9]])
PROMPT_MASK = jnp.array([[1, 1, 1, 0], [1, 1, 1, 1]], bool)
COMPLETIONS = jax.random.randint(jax.random.key(1), (6, 5), 0, 13)
MASK = jnp.arange(5) < jnp.array([5, 3, 1, 4, 2, 5])[:, None]


@functools.cache
def initial():
    """The decoder's parameters."""
    return params_of(CONFIG)


def masked_sum(params, prompts, prompt_mask, chunk=1024, remat="none", unrolled=False):
    decoder = Decoder(CONFIG, remat=remat, unrolled=unrolled)
    arguments = (decoder, params, prompts, prompt_mask, COMPLETIONS, MASK)
    scores = completion_logprobs(*arguments, sampling=Sampling(0.8), chunk=chunk)
    weights = jnp.arange(30.0).reshape(6, 5)
    return jnp.sum(jnp.where(MASK, weights * scores.logprobs + scores.entropy, 0.0))


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def value_and_gradient(params, prompts, prompt_mask, *options):
    return jax.value_and_grad(masked_sum)(params, prompts, prompt_mask, *options)


@pytest.mark.parametrize(
    ("chunk", "remat", "unrolled"),
    [
        (7, "dots", False),
        (7, "attention", False),
        (64, "attention", True),
        (64, "none", True),
        (1, "none", False),
        (1024, "full", True),
    ],
)
@pytest.mark.slow
def test_chunks_remat_and_unrolling_change_neither_values_nor_gradients(chunk, remat, unrolled):
    expected = value_and_gradient(initial(), PROMPTS, PROMPT_MASK)
    actual = value_and_gradient(initial(), PROMPTS, PROMPT_MASK, chunk, remat, unrolled)
    assert_close(actual[0], expected[0])
    assert_same_gradient(actual[1], expected[1])


@pytest.mark.slow
def test_one_token_completions_begin_longer_ones():
    @functools.partial(jax.jit, static_argnums=1)
    def first(params, time):
        arguments = Decoder(CONFIG), params, PROMPTS, PROMPT_MASK, COMPLETIONS[:, :time], MASK[:, :time]
        chunk = 7 if time > 1 else 1024  # which changes nothing, either
        return completion_logprobs(*arguments, sampling=Sampling(0.8), chunk=chunk).logprobs[:, 0]

    assert_same_logprobs(first(initial(), 1), first(initial(), 5))


def test_sharing_a_prompt_equals_repeating_it():
    expected = value_and_gradient(initial(), jnp.repeat(PROMPTS, 3, 0), jnp.repeat(PROMPT_MASK, 3, 0))
    actual = value_and_gradient(initial(), PROMPTS, PROMPT_MASK)
    assert_close(actual[0], expected[0])
    assert_same_gradient(actual[1], expected[1])


def test_tokens_beyond_the_masks_change_nothing():
    junk = jnp.where(PROMPT_MASK, PROMPTS, 12)
    wide = jnp.pad(junk, ((0, 0), (0, 3)), constant_values=5)
    wide_mask = jnp.pad(PROMPT_MASK, ((0, 0), (0, 3)))
    sums = jax.jit(masked_sum)
    actual, expected = sums(initial(), wide, wide_mask), sums(initial(), PROMPTS, PROMPT_MASK)
    assert_close(actual, expected, 2e-5)


@pytest.mark.slow
def test_completions_of_one_token():
    arguments = (Decoder(CONFIG), initial(), PROMPTS, PROMPT_MASK)
    long = completion_logprobs(*arguments, COMPLETIONS, MASK, sampling=Sampling(), chunk=64).logprobs
    arguments += COMPLETIONS[:, :1], MASK[:, :1]
    short = completion_logprobs(*arguments, sampling=Sampling(), chunk=64).logprobs
    assert_same_logprobs(short, long[:, :1])


jitted_logits = jax.jit(sampling_logits, static_argnums=1)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(6, 0.75, 0.0), (0, 1.0, 0.2), (0, 1.0, 1.0), (0, 1.0, 1e-6), (6, 1.0, 0.1), (0, 0.8, 0.1), (6, 0.9, 0.05)],
)
def test_cuts_keep_the_tokens_that_numpy_keeps(top_k, top_p, min_p):
    scores = np.random.default_rng(0).normal(size=(50, 13)).astype(np.float32) * 2
    sampling = Sampling(0.7, top_k=top_k, top_p=top_p, min_p=min_p)
    forced = np.random.default_rng(1).integers(0, 13, 50)
    actual = np.isfinite(jitted_logits(scores, sampling))
    with_forced = np.isfinite(jitted_logits(scores, sampling, forced))
    for row, kept, also, token in zip(scores / 0.7, actual, with_forced, forced, strict=True):
        order = np.argsort(-row)[: top_k or 13]
        probabilities = np.exp(row[order]) / np.exp(row[order]).sum()
        before = np.cumsum(probabilities) - probabilities
        expected = set(order[(before < top_p) & (probabilities >= min_p * probabilities[0])])
        assert set(np.flatnonzero(kept)) == expected
        assert set(np.flatnonzero(also)) == expected | {int(token)}


@pytest.mark.parametrize("sampling", [Sampling(top_k=2), Sampling(min_p=0.3)])
def test_a_token_outside_the_cut_has_a_finite_gradient(sampling):
    scores = jnp.array([[4.0, 3.0, 0.0, -5.0]])

    def logprob(scores):
        return score_tokens(scores, jnp.array([3]), sampling).logprobs[0]

    value, gradient = jax.jit(jax.value_and_grad(logprob))(scores)
    np.testing.assert_allclose(value, -5 - np.log(np.exp([4.0, 3.0, -5.0]).sum()), rtol=1e-5)
    assert np.isfinite(gradient).all() and gradient[0, 2] == 0


def test_entropy_is_that_of_the_cut_distribution():
    scores = jnp.log(jnp.array([[0.5, 0.25, 0.2, 0.05]]))
    entropy = score_tokens(scores, jnp.array([0]), Sampling(top_k=2)).entropy
    shares = np.array([2 / 3, 1 / 3])
    np.testing.assert_allclose(entropy[0], -(shares * np.log(shares)).sum(), rtol=1e-5)


@pytest.mark.parametrize(
    ("sampling", "most", "name", "unknown"),
    [
        (Sampling(0.7, top_k=3), 4, "kept_ids", False),
        (Sampling(1.3, top_p=0.8), 4, "kept_ids", True),
        (Sampling(1.3, 20, 0.9, 0.02), 4, "kept_ids", True),
        (Sampling(1.3, top_p=0.8), 5, "kept_bits", False),
    ],
)
def test_logprobs_over_recorded_sets_by_a_double_loop(sampling, most, name, unknown):
    generator, vocab = np.random.default_rng(0), 131
    behavior, scores = generator.normal(size=(2, 40, vocab)).astype(np.float32) * 3
    kept = np.isfinite(jitted_logits(behavior, sampling))
    tokens = np.array([generator.choice(np.flatnonzero(row)) for row in kept])
    recorded = jax.device_get(jax.jit(kept_tokens, static_argnums=(1, 2))(behavior, sampling, TokenRecord(most)))
    assert list(recorded) == [name]
    if name == "kept_ids":
        ids = recorded[name]
        recorded[name] = np.concatenate([ids, np.full_like(ids, -1)], axis=1)  # as next to rows with larger sets
    assert has_sets({name: recorded[name]}, tokens >= 0).all() != unknown
    recorded[SAMPLED] = np.ones(40, bool)

    def total(scores):
        logprobs, entropy, *_ = score_tokens(scores, jnp.array(tokens), sampling, jax.tree.map(jnp.array, recorded))
        return logprobs.sum(), (logprobs, entropy)

    (_, (logprobs, entropy)), gradient = jax.device_get(jax.jit(jax.value_and_grad(total, has_aux=True))(scores))
    now = np.isfinite(jitted_logits(scores, sampling, tokens))
    for row, token in enumerate(tokens):
        is_known = name == "kept_bits" or kept[row].sum() <= most
        possible = np.flatnonzero(kept[row] if is_known else now[row])
        exact = scores[row, possible].astype(np.float64) / sampling.temperature
        shares = np.exp(exact) / np.exp(exact).sum()
        assert_same_logprobs(logprobs[row], np.log(shares[possible == token][0]))
        assert_same_logprobs(entropy[row], -(shares * np.log(shares)).sum())
        expected = np.zeros(vocab)
        expected[possible] = -shares / sampling.temperature
        expected[token] += 1 / sampling.temperature
        assert_close(gradient[row], expected, 2e-5, least=1.0)


@pytest.mark.parametrize(("sampling", "most"), [(Sampling(1.3, top_p=0.8), 15), (Sampling(0.7, top_k=3), 131)])
def test_sets_with_logprobs_have_the_whole_distribution(sampling, most):
    scores = np.random.default_rng(0).normal(size=(40, 131)).astype(np.float32) * 3
    record = TokenRecord(most, kept_logprobs=True)
    recorded = jax.device_get(jax.jit(kept_tokens, static_argnums=(1, 2))(scores, sampling, record))
    columns = record.known_tokens(sampling)
    assert list(recorded) == ["kept_ids", "kept_logprobs"] and recorded["kept_ids"].shape == (40, columns)
    logits = np.asarray(jitted_logits(scores, sampling), np.float64)
    sizes = np.isfinite(logits).sum(-1)
    assert (sizes <= most).any() and (sizes > most).any() == (most == 15)
    for row, ids, logprobs in zip(logits, recorded["kept_ids"], recorded["kept_logprobs"], strict=True):
        is_known = ids >= 0
        assert (is_known == ~np.isnan(logprobs)).all()
        if np.isfinite(row).sum() <= most:
            assert set(ids[is_known]) == set(np.flatnonzero(np.isfinite(row)))
            np.testing.assert_allclose(logprobs[is_known], row[ids[is_known]] - np.log(np.exp(row).sum()), atol=1e-5)
        else:
            assert not is_known.any()


def test_nothing_is_recorded_without_cuts():
    scores = jnp.zeros((1, 9))
    for sampling in (Sampling(), Sampling(0.7), Sampling(0.0, top_k=2)):
        assert not kept_tokens(scores, sampling, TokenRecord(4, kept_logprobs=True))
    assert not kept_tokens(scores, Sampling(top_k=2), TokenRecord())


@pytest.mark.parametrize(
    ("sampling", "whole"),
    [
        (Sampling(), TokenRecord(0, 3)),
        (Sampling(0.0), TokenRecord()),
        (Sampling(0.7, top_k=2), TokenRecord(4, 3)),
        (Sampling(0.0, top_k=2), TokenRecord()),
    ],
)
def test_a_record_under_a_distribution_has_the_same_arrays(sampling, whole):
    assert TokenRecord(4, 3).under(sampling) == whole
    for recording in (TokenRecord(), TokenRecord(4), TokenRecord(0, 3), TokenRecord(4, 3)):
        shapes = recorded_shapes(9, sampling, recording)
        assert recorded_shapes(9, sampling, recording.under(sampling)) == shapes
        assert bool(shapes) == (recording.under(sampling) != NOTHING_RECORDED)


def test_reply_sets_are_recorded_if_they_contain_their_tokens():
    lists, tokens = [[5, 2], [7], [1, 2, 3, 4]], [2, 7, 4]
    recorded = sets_from_lists(lists, tokens, 3)
    assert recorded["kept_ids"].tolist() == [[5, 2], [7, -1], [-1, -1]]
    assert sets_to_lists(recorded) == [[2, 5], [7], []] and sets_to_lists({}) is None
    bits = kept_tokens(jnp.log(jnp.array([[0.4, 0.05, 0.5, 0.05]])), Sampling(top_p=0.8), TokenRecord(4))
    assert sets_to_lists({name: np.asarray(one) for name, one in bits.items()}) == [[0, 2]]
    for wrong in (None, {}, [[2], [7]], [[2], [7], [1]], [[2], [7], ["4", 4]], [[2], [7], [4, -1]], [[2], 7, [4]]):
        assert sets_from_lists(wrong, tokens, 3) == {}
    assert sets_from_lists(lists, tokens, 0) == {} and sets_from_lists([[], [], []], tokens, 3) == {}
    assert sets_from_lists([[5, 2], [], [4]], tokens, 3)["kept_ids"].tolist() == [[5, 2], [-1, -1], [4, -1]]


@pytest.mark.parametrize(("sampling", "possible"), [(Sampling(), 9), (Sampling(0.7), 9), (Sampling(1.3, top_k=3), 3)])
def test_top_tokens_equal_a_double_loop(sampling, possible):
    generator = np.random.default_rng(1)
    behavior, scores = generator.normal(size=(2, 6, 9)).astype(np.float32)
    recorded = jax.device_get(jax.jit(top_tokens, static_argnums=(1, 2))(behavior, sampling, 4))
    tokens = recorded["top_ids"][:, 0]

    @jax.jit
    def scored(scores):
        of_sampler = jax.tree.map(jnp.array, recorded)
        logprobs, _, top, *_ = score_tokens(scores, jnp.array(tokens), sampling, of_sampler)
        return logprobs, top, jax.nn.log_softmax(sampling_logits(scores, sampling, jnp.array(tokens)))

    logprobs, top, now = jax.device_get(scored(scores))
    for row in range(6):
        order = np.argsort(-behavior[row])[: min(4, possible)]
        chosen = np.argsort(-behavior[row])[:possible]
        shares = np.exp(behavior[row].astype(float) / sampling.temperature)
        expected = np.log(shares / shares[chosen].sum())
        unknown = [-1] * (4 - len(order))
        assert recorded["top_ids"][row].tolist() == [*order, *unknown]
        known = recorded["top_logprobs"][row, : len(order)]
        assert_same_logprobs(known, expected[order])
        assert np.isnan(recorded["top_logprobs"][row, len(order) :]).all()
        np.testing.assert_array_equal(top[row, : len(order)], now[row, order])
        assert np.isnan(top[row, len(order) :]).all() and logprobs[row] == now[row, tokens[row]]
    assert top_tokens(jnp.array(behavior), sampling, 40)["top_ids"].shape == (6, 9)
    assert top_tokens(jnp.array(behavior), Sampling(0.0), 4) == {} == top_tokens(jnp.array(behavior), sampling, 0)


def test_top_tokens_of_a_reply_ignore_the_sampled_token():
    # vLLM puts the sampled token first; token 9 is not among the two most likely ones.
    lists = [[(3, -0.5), (7, -1.5)], [(9, -8.0), (3, -0.5), (7, -1.5)], [(7, -1.5), (3, 1e-7), (2, -9999.0)]]
    recorded = top_from_lists(lists, 3, 2)
    assert recorded["top_ids"].tolist() == [[3, 7], [3, 7], [3, 7]]
    assert recorded["top_logprobs"].tolist() == [[-0.5, -1.5], [-0.5, -1.5], [0.0, -1.5]]
    assert top_to_lists(recorded) == [[(3, -0.5), (7, -1.5)]] * 2 + [[(3, 0.0), (7, -1.5)]] and top_to_lists({}) is None
    assert top_from_lists(lists, 3, 4)["top_ids"].tolist()[2] == [3, 7, -1, -1]
    for wrong in (None, {}, lists[:2], [[], *lists[1:]], [[(-1, -0.5)], *lists[1:]], [[("3",)], *lists[1:]], [7, 7, 7]):
        assert top_from_lists(wrong, 3, 2) == {}
    assert top_from_lists([[(3, float("nan"))]], 1, 2) == {} == top_from_lists(lists, 3, 0)


TEACHER = DecoderConfig(13, 8, 16, 1, 2, 1, 4)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"kind": "jsd", "beta": 0.3, "top_k": 4}], ids=str)
def test_a_divergence_in_chunks_equals_the_plain_one(monkeypatch, options):
    monkeypatch.setattr(logprobs_module, "FEW_SCORES", 0)  # or all chunks would be one
    compared = Compared(
        Decoder(TEACHER),
        params_of(TEACHER, 7),
        functools.partial(teacher_divergence, coefficient=1.0, **options),
    )
    arguments = PROMPTS, PROMPT_MASK, COMPLETIONS, MASK

    def in_chunks(params, chunk=7):
        options = {"sampling": Sampling(0.8, top_k=3), "chunk": chunk, "compared": compared}
        divergence = completion_logprobs(Decoder(CONFIG), params, *arguments, **options).divergence
        return jnp.sum(jnp.where(MASK, divergence, 0.0) * jnp.arange(30.0).reshape(6, 5)), divergence

    prompts = [np.array(row)[np.array(mask)] for row, mask in zip(PROMPTS, PROMPT_MASK, strict=True)]

    def plain(params):
        """Every row alone, with all logits at once."""

        def scores(config, params):
            rows = []
            for row in range(6):
                prompt = prompts[row // 3]
                tokens = jnp.concatenate([prompt, COMPLETIONS[row]])[None]
                there = jnp.arange(tokens.shape[1])[None]
                hidden, _ = Decoder(config).apply({"params": params}, tokens, there, there >= 0)
                rows.append(logits(config, params, hidden[0, len(prompt) - 1 : -1]))
            return jnp.stack(rows)

        divergence = compared.divergence(scores(CONFIG, params) / 0.8, scores(TEACHER, compared.params) / 0.8)
        return jnp.sum(jnp.where(MASK, divergence, 0.0) * jnp.arange(30.0).reshape(6, 5)), divergence

    (found, values), gradient = jax.jit(jax.value_and_grad(in_chunks, has_aux=True))(initial())
    (expected, plain_values), plain_gradient = jax.jit(jax.value_and_grad(plain, has_aux=True))(initial())
    assert_close(values[MASK], plain_values[MASK])
    assert_close(found, expected)
    assert_same_gradient(gradient, plain_gradient)
    assert found > 1e-2
    jaxpr = str(jax.make_jaxpr(jax.grad(lambda params: in_chunks(params)[0]))(initial()))
    assert "f32[7,13]" in jaxpr and "f32[30,13]" not in jaxpr and "f32[6,5,13]" not in jaxpr


@pytest.mark.parametrize("is_cut", [False, True])
def test_distributions_have_the_gradients_of_their_definition(is_cut):
    generator = np.random.default_rng(0)
    scores = jnp.array(3 * generator.normal(size=(6, 11)), jnp.float32)
    tokens = jnp.array(generator.integers(0, 11, 6))
    if is_cut:
        removed = jnp.array(generator.random((6, 11)) < 0.4) & (jnp.arange(11) != tokens[:, None])
        scores = jnp.where(removed, -jnp.inf, scores)
    weights = jnp.array(generator.normal(size=(3, 6)), jnp.float32)

    def own(scores):
        logprobs, entropy, largest, log_total = _in_distribution(is_cut, scores, tokens)
        return (weights * jnp.stack([logprobs, entropy, jax.lax.stop_gradient(largest) + log_total])).sum()

    def defined(scores):
        logprobs = jax.nn.log_softmax(scores)
        finite = jnp.isfinite(logprobs)
        entropy = -jnp.where(finite, jnp.exp(logprobs) * jnp.where(finite, logprobs, 0.0), 0.0).sum(-1)
        chosen = jnp.take_along_axis(logprobs, tokens[:, None], -1)[:, 0]
        return (weights * jnp.stack([chosen, entropy, jax.nn.logsumexp(scores, axis=-1)])).sum()

    found, expected = (jax.value_and_grad(function)(scores) for function in (own, defined))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    kept = np.isfinite(scores)
    np.testing.assert_allclose(found[1][kept], expected[1][kept], atol=2e-6)
    assert not np.any(found[1][~kept])


@pytest.mark.parametrize("chunk", [3, 8, 100])
def test_chunks_of_every_size_give_equal_gradients(monkeypatch, chunk):
    config = DecoderConfig(13, 16, 32, 1, 2, 1, 8)
    params = params_of(config)
    generator = np.random.default_rng(0)
    hidden = jnp.array(generator.normal(size=(4, 5, 16)), jnp.float32)
    tokens = jnp.array(generator.integers(0, 13, (4, 5)))

    def total(hidden, chunk):
        scores = chunked_scores(config, params, hidden, tokens, Sampling(), chunk)
        return (scores.logprobs * jnp.arange(20.0).reshape(4, 5)).sum() + scores.entropy.sum()

    expected = jax.grad(total)(hidden, 20)  # few scores: all at once
    for few in (0, 13 * 8 * 3, 2**24):  # a loop; a few chunks written out; all at once
        monkeypatch.setattr(logprobs_module, "FEW_SCORES", few)
        assert_close(jax.grad(total)(hidden, chunk), expected, 1e-5)
