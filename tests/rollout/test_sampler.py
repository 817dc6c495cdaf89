"""The sampler: what it draws, what it stores, when it stops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recjax.models.decoder import Decoder, logits
from recjax.models.decoder_config import DecoderConfig
from recjax.models.logprobs import Sampling, sampling_logits
from recjax.rollout import decoding
from recjax.rollout.decoding import sample_tokens, token_noise
from tests.closeness import assert_same_logprobs
from tests.marks import campaign
from tests.rollout.reference_sampler import sample
from tests.tiny import params_of

CONFIG = DecoderConfig(13, 16, 32, 2, 4, 2, 4, tie_embeddings=False)
DECODER = Decoder(CONFIG)
PROMPTS = np.array([[3, 4, 5, 0, 0], [6, 7, 8, 9, 2]], np.int32)
MASK = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], bool)
STOP = (1, 11)
PLAIN = Sampling()


@functools.cache
def initial():
    """The decoder's parameters, large enough for uneven probabilities."""
    return jax.device_put(jax.tree.map(lambda x: 2 * x, jax.device_get(params_of(CONFIG))))


def draw(seed=0, prompts=PROMPTS, mask=MASK, group_size=3, max_tokens=6, sampling=None, stop_ids=STOP):
    sampling = sampling or Sampling()
    key = jax.random.key(seed)
    options = {"group_size": group_size, "max_tokens": max_tokens, "sampling": sampling, "stop_ids": stop_ids}
    return jax.device_get(sample(DECODER, initial(), prompts, mask, key, **options))


@functools.partial(jax.jit, static_argnums=2)
def forward_logprobs(params, tokens, sampling):
    positions = jnp.arange(len(tokens))[None]
    hidden, _ = DECODER.apply({"params": params}, tokens[None], positions, jnp.ones((1, len(tokens)), bool))
    return jax.nn.log_softmax(sampling_logits(logits(CONFIG, params, hidden[0]), sampling))


def logprobs_after(tokens, sampling=PLAIN):
    """Log-probs of the vocabulary after each one of `tokens`, from one plain forward pass: no cache, no sharing.

    Some more tokens, which no token before them sees, make all passes one program.
    """
    padded = np.pad(np.asarray(tokens, np.int32), (0, 16 - len(tokens)))
    return np.asarray(forward_logprobs(initial(), padded, sampling))[: len(tokens)]


@pytest.mark.parametrize(
    "sampling",
    [
        *campaign(Sampling(), Sampling(0.7), Sampling(1.6, top_k=4), Sampling(1.0, top_p=0.8)),
        *campaign(Sampling(0.9, min_p=0.3)),
        Sampling(0.8, top_k=6, top_p=0.9),
    ],
)
def test_logprobs_belong_to_the_distribution_that_sampled(sampling):
    drawn = draw(sampling=sampling)
    for row in range(len(drawn.tokens)):
        prompt = row // 3
        sequence = PROMPTS[prompt][MASK[prompt]].tolist()
        tokens = drawn.tokens[row][drawn.mask[row]]
        # No token sees a later one, so one pass serves all of them.
        after = logprobs_after([*sequence, *tokens], sampling)[len(sequence) - 1 : -1]
        expected = after[np.arange(len(tokens)), tokens]
        assert_same_logprobs(drawn.logprobs[row][drawn.mask[row]], expected)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(1.0, top_p=0.7), *campaign(Sampling(), Sampling(0.6), Sampling(1.0, top_k=3), Sampling(min_p=0.4))],
)
def test_frequencies_match_probabilities_for_independent_tokens(sampling):
    options = {"group_size": 20_000, "max_tokens": 2, "sampling": sampling, "stop_ids": ()}
    tokens = draw(prompts=PROMPTS[1:], mask=MASK[1:], **options).tokens
    first = int(np.bincount(tokens[:, 0]).argmax())
    for before, found in (([], tokens[:, 0]), ([first], tokens[tokens[:, 0] == first, 1])):
        expected = np.exp(logprobs_after([*PROMPTS[1], *before], sampling)[-1])
        frequencies = np.bincount(found, minlength=CONFIG.vocab_size) / len(found)
        assert (frequencies[expected == 0] == 0).all()
        np.testing.assert_allclose(frequencies, expected, atol=5 * np.sqrt(expected.max() / len(found)))


def test_same_key_repeats_and_other_keys_and_rows_differ():
    first, again, other = draw(seed=1), draw(seed=1), draw(seed=2)
    np.testing.assert_array_equal(first.tokens, again.tokens)
    assert (first.tokens != other.tokens).any()
    assert len({tuple(row) for row in first.tokens[:3]}) > 1


def test_rows_end_at_a_stop_token_or_are_truncated():
    drawn = jax.tree.map(lambda *parts: np.concatenate(parts), *map(draw, range(60)))
    stops = np.isin(drawn.tokens, STOP) & drawn.mask
    lengths = drawn.mask.sum(-1)
    assert (drawn.mask == (np.arange(6) < lengths[:, None])).all()  # one run from the start
    last_is_stop = stops[np.arange(len(lengths)), lengths - 1]
    assert (stops.sum(-1) == last_is_stop).all()  # a stop is the last drawn token
    np.testing.assert_array_equal(drawn.truncated, ~last_is_stop)
    assert (lengths[drawn.truncated] == 6).all()
    assert drawn.truncated.any() and not drawn.truncated.all()
    assert (drawn.logprobs[~drawn.mask] == 0).all() and (drawn.tokens[~drawn.mask] == 0).all()


def test_a_row_ignores_padding_and_later_prompts():
    together = draw()
    alone = draw(prompts=PROMPTS[:1, :3], mask=MASK[:1, :3])
    np.testing.assert_array_equal(together.tokens[:3], alone.tokens)
    assert_same_logprobs(together.logprobs[:3], alone.logprobs)


def test_temperature_zero_takes_the_most_likely_token():
    drawn = draw(group_size=1, sampling=Sampling(0.0), stop_ids=())
    sequence = PROMPTS[1].tolist()
    expected = np.argmax(logprobs_after([*sequence, *drawn.tokens[1]]), axis=-1)
    np.testing.assert_array_equal(drawn.tokens[1], expected[len(sequence) - 1 : -1])
    assert (drawn.logprobs == 0).all()


@pytest.mark.parametrize("vocabulary", [23, 26, *campaign(1, 2, 25)])
def test_a_choice_in_two_steps_equals_one_step(vocabulary):
    rows = 40_000 if vocabulary == 23 else 50
    scores = np.round(2 * np.random.default_rng(1).normal(size=vocabulary)).astype(np.float32)
    scores[vocabulary // 2] = -np.inf if vocabulary > 1 else 0.0
    every = np.broadcast_to(scores, (rows, vocabulary))
    keys = jax.random.split(jax.random.key(2), rows)

    @functools.partial(jax.jit, static_argnums=1)
    def draw_tokens(scores, sampling, keys):
        return sample_tokens(scores, sampling, token_noise(keys, vocabulary, sampling))

    greedy, _ = draw_tokens(every, Sampling(temperature=0.0), keys)
    np.testing.assert_array_equal(greedy, np.argmax(every, axis=-1))  # the first of several that are highest
    drawn, logprobs = draw_tokens(every, Sampling(), keys)
    probabilities = np.exp(scores) / np.exp(scores).sum()
    assert_same_logprobs(logprobs, np.log(probabilities[drawn]))
    frequencies = np.bincount(drawn, minlength=vocabulary) / rows
    np.testing.assert_allclose(frequencies, probabilities, atol=5 * np.sqrt(probabilities.max() / rows))


def test_noise_makes_the_choices_of_jax_categorical():
    vocabulary = 23  # five blocks of five, the last with padding
    keys = jax.random.split(jax.random.key(2), 40)
    noise = token_noise(keys, vocabulary, PLAIN)
    scores = jnp.array(np.random.default_rng(1).normal(size=5), jnp.float32)
    for step, of_step in enumerate(noise):
        drawn = jax.vmap(lambda key, step=step: jax.random.categorical(jax.random.fold_in(key, step), scores))(keys)
        np.testing.assert_array_equal(jnp.argmax(scores + of_step, axis=-1), drawn)
    assert token_noise(keys, vocabulary, Sampling(temperature=0.0)) is None


def test_noise_of_a_round_is_that_of_its_tokens(monkeypatch):
    keys = jax.random.key_data(jax.random.split(jax.random.key(2), 3))
    counts = jnp.array([4, 0, 9])
    options = decoding.RoundOptions(PLAIN, STOP, time=5)
    together = decoding.round_noise(keys, counts, 23, options)
    monkeypatch.setattr(decoding, "MOST_NOISE", 0)
    one_by_one = decoding.round_noise(keys, counts, 23, options)
    for time in jnp.arange(5):
        jax.tree.map(np.testing.assert_array_equal, together(time), one_by_one(time))
