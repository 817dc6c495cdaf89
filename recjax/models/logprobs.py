"""Log-probabilities of completions under the distribution that samples them."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from recjax.models.decoder import Decoder, Tokens, logits
from recjax.models.decoder_config import DecoderConfig
from recjax.models.placement import constrain, over_rows
from recjax.models.sampling import Sampling
from recjax.models.unrolling import params_for


class Compared(NamedTuple):
    """A teacher whose next-token distributions are compared with the policy's.

    divergence: function of the policy's and the teacher's logits over the temperature, both [tokens, vocab]; its values
        are [tokens].
    """

    decoder: Decoder
    params: dict
    divergence: Callable


def sampling_logits(
    scores: Float[Array, "batch vocab"], sampling: Sampling, forced: Int[Array, " batch"] | None = None
) -> Float[Array, "batch vocab"]:
    """Unnormalized log-probabilities of the sampling distribution; -inf for tokens that cannot be sampled.

    Args:
        scores: the model's logits.
        sampling: temperature above 0, and cuts.
        forced: tokens that no cut removes. A trainer passes the tokens it evaluates, so that a token outside the set
            kept by the current policy keeps a finite log-probability and gradient.
    """
    scores = scores / sampling.temperature
    keep = jnp.ones(scores.shape, bool)
    if 0 < sampling.top_k < scores.shape[-1]:
        keep &= scores >= jax.lax.top_k(scores, sampling.top_k)[0][:, -1:]
    if sampling.top_p < 1.0:
        # Top-p applies to the tokens that top-k kept, as in transformers.
        descending = -jnp.sort(-jnp.where(keep, scores, -jnp.inf), axis=-1)
        probabilities = jax.nn.softmax(descending, axis=-1)
        inside = jnp.cumsum(probabilities, axis=-1) - probabilities < sampling.top_p
        keep &= scores >= jnp.min(jnp.where(inside, descending, jnp.inf), axis=-1, keepdims=True)
    if sampling.min_p > 0:
        # The limit is relative to the most likely token, which top-k and top-p keep, so their order does not matter.
        keep &= scores >= jnp.max(scores, axis=-1, keepdims=True) + math.log(sampling.min_p)
    if forced is not None:
        keep |= jnp.arange(scores.shape[-1]) == forced[:, None]
    return jnp.where(keep, scores, -jnp.inf)


def logprobs_and_entropy(
    scores: Float[Array, "batch vocab"], tokens: Int[Array, " batch"], sampling: Sampling
) -> tuple[Float[Array, " batch"], Float[Array, " batch"]]:
    """log π(token) and the entropy of π in nats, where π is the sampling distribution.

    At temperature 0 every token counts as the argmax: log-probability and entropy are zero.
    """
    if sampling.temperature == 0:
        return jnp.zeros(tokens.shape), jnp.zeros(tokens.shape)
    distribution = jax.nn.log_softmax(sampling_logits(scores, sampling, forced=tokens), axis=-1)
    possible = jnp.where(jnp.isfinite(distribution), distribution, 0.0)
    entropy = -jnp.sum(jnp.exp(distribution) * possible, axis=-1)
    return jnp.take_along_axis(distribution, tokens[:, None], axis=-1)[:, 0], entropy


def chunked_logprobs(
    config: DecoderConfig,
    params: dict,
    hidden: Float[Array, "batch time hidden"],
    tokens: Int[Array, "batch time"],
    sampling: Sampling,
    chunk: int,
    compared: Compared | None = None,
    teacher_hidden: Float[Array, "batch time teacher_hidden"] | None = None,
) -> tuple[Float[Array, "batch time"], ...]:
    """Log-probabilities and entropies of `tokens`, `chunk` positions at a time, forwards and backwards.

    A third array has the divergence from `compared` at each token, between distributions at the temperature of
    `sampling`, without its cuts.

    [batch, time, vocab] never exists whole: the backward pass recomputes each chunk's logits. On a mesh each device
    computes its own rows, with a head that is gathered once and not for every chunk.
    """

    def head_of(params):
        name = "head" if "head" in params else "embedding"
        return {name: params[name]}

    def of_rows(heads, *rows):
        tokens = rows[-1]
        count = tokens.size
        length = min(chunk, count)
        padding = -count % length

        def in_chunks(hidden):
            return jnp.pad(hidden.reshape(count, -1), ((0, padding), (0, 0))).reshape(-1, length, hidden.shape[-1])

        @jax.checkpoint
        def one_chunk(inputs):
            *chunk_hidden, chunk_tokens = inputs
            scores = constrain(logits(config, heads[0], chunk_hidden[0]), None, "tensor")
            values = logprobs_and_entropy(scores, chunk_tokens, sampling)
            if compared is None:
                return values
            theirs = constrain(logits(compared.decoder.config, heads[1], chunk_hidden[1]), None, "tensor")
            return *values, compared.divergence(scores / sampling.temperature, theirs / sampling.temperature)

        flat_hidden = [in_chunks(hidden) for hidden in rows[:-1]]
        flat_tokens = jnp.pad(tokens.reshape(count), (0, padding)).reshape(-1, length)
        values = jax.lax.map(one_chunk, (*flat_hidden, flat_tokens))
        return tuple(x.reshape(-1)[:count].reshape(tokens.shape) for x in values)

    if compared is None:
        return over_rows(of_rows, (head_of(params),), hidden, tokens)
    return over_rows(of_rows, (head_of(params), head_of(compared.params)), hidden, teacher_hidden, tokens)


def last_hidden(
    hidden: Float[Array, "rows time hidden"], mask: Bool[Array, "rows time"]
) -> Float[Array, "rows hidden"]:
    """The hidden state at each row's last real token, for rows padded on the right."""
    return jnp.take_along_axis(hidden, (mask.sum(-1) - 1)[:, None, None], axis=1)[:, 0]


def completion_logprobs(
    decoder: Decoder,
    params: dict,
    prompts: Int[Array, "prompts prompt_time"],
    prompt_mask: Bool[Array, "prompts prompt_time"],
    completions: Int[Array, "batch time"],
    completion_mask: Bool[Array, "batch time"],
    *,
    sampling: Sampling,
    chunk: int,
    compared: Compared | None = None,
) -> tuple[Float[Array, "batch time"], ...]:
    """Log-probabilities and entropies of completions under the sampling distribution of `params`.

    Each prompt is run once for its batch/prompts consecutive completions, forward and backward.

    Args:
        params: parameters with stacked layers, also for an unrolled decoder.
        prompts: right-padded prompt tokens, each row with at least one.
        completions: right-padded completion tokens, grouped by prompt in the order of `prompts`.
        completion_mask: True at real tokens. Results at padding are finite and undefined.
        sampling: the distribution that sampled the completions.
        chunk: token positions whose logits exist at the same time.
        compared: adds the divergence from a teacher at each token; see `chunked_logprobs`.
    """
    group = completions.shape[0] // prompts.shape[0]
    positions = jnp.broadcast_to(jnp.arange(prompts.shape[1]), prompts.shape)
    asked = Tokens(prompts, positions, prompt_mask)

    def before(decoder, params):
        weights = {"params": params_for(decoder, params)}
        if completions.shape[1] > 1:
            positions = jnp.repeat(prompt_mask.sum(-1), group)[:, None] + jnp.arange(completions.shape[1] - 1)
            written = Tokens(completions[:, :-1], positions, completion_mask[:, :-1])
            hidden, *rest = decoder.apply(weights, asked, written, method="of_groups")
        else:
            (hidden, _), rest = decoder.apply(weights, *asked), ()
        first = jnp.repeat(last_hidden(hidden, prompt_mask), group, axis=0)[:, None]
        return jnp.concatenate([first, *rest], axis=1)

    theirs = None if compared is None else before(compared.decoder, compared.params)
    hidden = before(decoder, params)
    return chunked_logprobs(decoder.config, params, hidden, completions, sampling, chunk, compared, theirs)


def packed_logprobs(
    decoder: Decoder,
    params: dict,
    tokens: Int[Array, "rows row_tokens"],
    positions: Int[Array, "rows row_tokens"],
    targets: Int[Array, "rows row_tokens"],
    ends: Int[Array, "rows row_tokens"],
    *,
    sampling: Sampling,
    chunk: int,
    compared: Compared | None = None,
) -> tuple[Float[Array, "rows row_tokens"], ...]:
    """Log-probabilities and entropies of the targets of packed sequences, under the sampling distribution of `params`.

    Args:
        tokens, positions, targets, ends: see `recjax.experience.packing.Packed`. Results at padding are undefined.
        sampling: the distribution that sampled the completions.
        chunk: token positions whose logits exist at the same time.
        compared: adds the divergence from a teacher at each token; see `chunked_logprobs`.
    """

    def hidden_of(decoder, params):
        return decoder.apply({"params": params_for(decoder, params)}, tokens, positions, ends)[0]

    theirs = None if compared is None else hidden_of(compared.decoder, compared.params)
    hidden = hidden_of(decoder, params)
    return chunked_logprobs(decoder.config, params, hidden, targets, sampling, chunk, compared, theirs)
