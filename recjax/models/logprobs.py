"""Log-probabilities of completions under the distribution that samples them."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from recjax.models.decoder import Decoder, DecoderTokens, logits
from recjax.models.decoder_config import DecoderConfig
from recjax.models.experts import EXPERTS, NO_RECORD, Load, apply_routed, load_of
from recjax.models.placement import constrain, over_rows
from recjax.models.sampling import KEPT, KEPT_LOGPROBS, TOP_IDS, TOP_LOGPROBS, Sampling, TokenRecord
from recjax.models.unrolling import params_for

LEAST_LOGPROB = -1e30  # in place of -inf, which times 0 would be NaN
FEW_SCORES = 2**24  # scores that may exist together in any case: 64 MiB
SAMPLED = "sampled"  # name of the mask of the tokens whose recorded arrays are read


class TokenScores(NamedTuple):
    """Scores of tokens by one forward pass; 0 or undefined where masked.

    logprobs: log-probs under the sampling distribution of the parameters.
    entropy: entropy of that distribution at each token, in nats.
    top_logprobs: log-probs of the recorded `top_ids` of each token; NaN at ids of -1. None if no ids are recorded.
    divergence: divergence from a teacher's distribution; None without a teacher.
    load: load of the experts; None for a model without experts, and for scores of a part of the forward pass.
    """

    logprobs: Float[Array, "*tokens"]
    entropy: Float[Array, "*tokens"]
    top_logprobs: Float[Array, "*tokens count"] | None = None
    divergence: Float[Array, "*tokens"] | None = None
    load: Load | None = None


class Compared(NamedTuple):
    """A teacher whose next-token distributions are compared with the policy's.

    divergence: function of the policy's and the teacher's logits over the temperature, both [tokens, vocab]; its values
        are [tokens].
    prompts: right-padded prompts that the teacher reads, one for each completion; None: it reads the policy's.
    prompt_mask: mask of their tokens, each row with at least one.
    """

    decoder: Decoder
    params: dict
    divergence: Callable
    prompts: Int[Array, "batch teacher_time"] | None = None
    prompt_mask: Bool[Array, "batch teacher_time"] | None = None


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
        highest, _ = jax.lax.top_k(scores, sampling.top_k)
        keep &= scores >= highest[:, -1:]
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


def kept_tokens(scores: Float[Array, "batch vocab"], sampling: Sampling, recording: TokenRecord) -> dict[str, Array]:
    """The tokens that each token is chosen from, as arrays to record; empty if the distribution has all tokens.

    `kept_bits` has a bit for each token of the vocabulary, [batch, vocab / 8]. If these bits take more memory than ids,
    or with log-probs, `kept_ids` has `recording.kept_ids` ids at most, most likely first, -1 after the last; all are -1
    if the set is larger. `kept_logprobs` has their log-probs under the sampling distribution, NaN at -1.
    """
    recording = recording.under(sampling)
    if not recording.kept_ids:
        return {}
    scores = sampling_logits(scores, sampling)
    keep = jnp.isfinite(scores)
    most = sampling.largest_set(recording.kept_ids)
    if 32 * most >= scores.shape[-1] and not recording.kept_logprobs:
        return {"kept_bits": jnp.packbits(keep, axis=-1)}
    if recording.kept_logprobs:
        scores = jax.nn.log_softmax(scores, axis=-1)
    values, ids = jax.lax.top_k(scores, min(most, scores.shape[-1]))
    is_whole = keep.sum(-1, keepdims=True) <= most
    is_recorded = is_whole & jnp.isfinite(values)
    recorded = {"kept_ids": jnp.where(is_recorded, ids, -1)}
    if recording.kept_logprobs:
        recorded[KEPT_LOGPROBS] = jnp.where(is_recorded, values, jnp.nan)
    return recorded


def top_tokens(scores: Float[Array, "batch vocab"], sampling: Sampling, count: int) -> dict[str, Array]:
    """The `count` most likely tokens of each token's distribution, as arrays to record; empty at temperature 0.

    `top_ids` are their ids, most likely first, -1 where the distribution has fewer possible tokens; `top_logprobs` are
    their log-probs under the sampling distribution, NaN at these places. Both are [batch, count], or [batch, vocab] for
    a smaller vocabulary.
    """
    if not TokenRecord(top_k=count).under(sampling).top_k:
        return {}
    distribution = jax.nn.log_softmax(sampling_logits(scores, sampling), axis=-1)
    logprobs, ids = jax.lax.top_k(distribution, min(count, scores.shape[-1]))
    is_possible = jnp.isfinite(logprobs)
    return {TOP_IDS: jnp.where(is_possible, ids, -1), TOP_LOGPROBS: jnp.where(is_possible, logprobs, jnp.nan)}


def recorded_tokens(
    scores: Float[Array, "batch vocab"], sampling: Sampling, recording: TokenRecord
) -> dict[str, Array]:
    """All arrays to record of the distribution of each token, by name."""
    return kept_tokens(scores, sampling, recording) | top_tokens(scores, sampling, recording.top_k)


def recorded_shapes(vocabulary: int, sampling: Sampling, recording: TokenRecord) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of the arrays of `recorded_tokens` for one token."""
    scores = jax.ShapeDtypeStruct((1, vocabulary), jnp.float32)
    return jax.eval_shape(functools.partial(recorded_tokens, sampling=sampling, recording=recording), scores)


def is_kept(recorded: Mapping[str, Array], vocab: int) -> Bool[Array, "batch vocab"] | None:
    """The recorded sets as masks, all False for a token without a set; None if `recorded` has no sets."""
    keep = None
    if "kept_ids" in recorded:
        ids = recorded["kept_ids"]
        rows = jnp.arange(len(ids))[:, None]
        # An index beyond the vocabulary is dropped.
        columns = jnp.where(ids < 0, vocab, ids)
        keep = jnp.zeros((len(ids), vocab), bool).at[rows, columns].set(True, mode="drop")
    if "kept_bits" in recorded:
        bits = jnp.unpackbits(recorded["kept_bits"], axis=-1, count=vocab) > 0
        if keep is None:
            return bits
        keep |= bits
    return keep


def score_tokens(
    scores: Float[Array, "batch vocab"],
    tokens: Int[Array, " batch"],
    sampling: Sampling,
    recorded: Mapping[str, Array] = {},
) -> TokenScores:
    """log π(token), the entropy of π, and log π of the recorded `top_ids`, where π is the sampling distribution.

    At temperature 0 every token counts as the argmax: log-probability and entropy are zero.

    Args:
        scores: the model's logits.
        recorded: sets from which the behavior policy chose the tokens, see `kept_tokens`, and SAMPLED, a mask of the
            tokens whose results are read. π is limited to the recorded set of each token; for a token without a set, to
            the tokens that the current policy keeps.
    """
    if sampling.temperature == 0:
        return TokenScores(jnp.zeros(tokens.shape), jnp.zeros(tokens.shape))
    keep = is_kept(recorded, scores.shape[-1])
    if keep is None:
        kept_scores = sampling_logits(scores, sampling, forced=tokens)
    else:
        has_set = keep.any(-1) | ~recorded[SAMPLED]
        keep |= jnp.arange(scores.shape[-1]) == tokens[:, None]

        def recorded_scores() -> Array:
            return jnp.where(keep, scores / sampling.temperature, -jnp.inf)

        def recorded_or_current_scores() -> Array:
            return jnp.where(has_set[:, None], recorded_scores(), sampling_logits(scores, sampling, forced=tokens))

        # The cuts of the current policy, which sort the vocabulary, are computed only where a set is missing.
        kept_scores = jax.lax.cond(has_set.all(), recorded_scores, recorded_or_current_scores)
    is_cut = keep is not None or sampling.has_cuts
    logprobs, entropy, largest, log_total = _in_distribution(is_cut, kept_scores, tokens)
    if TOP_IDS not in recorded:
        return TokenScores(logprobs, entropy)
    ids = recorded[TOP_IDS]
    top_scores = jnp.take_along_axis(kept_scores, jnp.maximum(ids, 0), axis=-1)
    top_logprobs = top_scores - largest[:, None] - log_total[:, None]
    return TokenScores(logprobs, entropy, jnp.where(ids < 0, jnp.nan, top_logprobs))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_distribution(
    is_cut: bool, scores: Float[Array, "batch vocab"], tokens: Int[Array, " batch"]
) -> tuple[Float[Array, " batch"], ...]:
    """log p(token), the entropy of p in nats, m = max scores, and log Σ exp(scores − m), where p = softmax(scores).

    The backward pass reads the scores once and writes their gradient once; JAX's own rules for the same functions take
    eight arrays of this size. m has no gradient, which the others do not need.

    Args:
        is_cut: scores may be -inf, where p is 0.
    """
    return _forward(is_cut, scores, tokens)[0]


def _forward(is_cut: bool, scores: Array, tokens: Array) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    largest = scores.max(axis=-1)
    shifted = scores - largest[:, None]
    if is_cut:
        shifted = jnp.maximum(shifted, LEAST_LOGPROB)
    weights = jnp.exp(shifted)
    total = weights.sum(axis=-1)
    log_total = jnp.log(total)
    entropy = log_total - (weights * shifted).sum(axis=-1) / total
    chosen = jnp.take_along_axis(scores, tokens[:, None], axis=-1)[:, 0]
    logprobs = chosen - largest - log_total
    return (logprobs, entropy, largest, log_total), (scores, tokens, largest + log_total, entropy)


def _backward(is_cut: bool, kept: tuple[Array, ...], gradients: tuple[Array, ...]) -> tuple[Array, None]:
    """The gradients of log p(token), H and log Σ exp(scores − m) are 1{token} − p, −p (log p + H), and p."""
    scores, tokens, normalizer, entropy = kept
    of_logprobs, of_entropy, _, of_log_total = (gradient[:, None] for gradient in gradients)
    logprobs = scores - normalizer[:, None]
    if is_cut:
        logprobs = jnp.maximum(logprobs, LEAST_LOGPROB)
    factor = of_log_total - of_logprobs - of_entropy * (logprobs + entropy[:, None])
    is_token = jnp.arange(scores.shape[-1]) == tokens[:, None]
    return jnp.exp(logprobs) * factor + jnp.where(is_token, of_logprobs, 0.0), None


_in_distribution.defvjp(_forward, _backward)


def positions_at_once(config: DecoderConfig, chunk: int) -> int:
    """Token positions of one chunk: `chunk`, or more if their scores are few."""
    return max(chunk, FEW_SCORES // 4 // config.vocab_size)


def chunked_scores(
    config: DecoderConfig,
    params: dict,
    hidden: Float[Array, "batch time hidden"],
    tokens: Int[Array, "batch time"],
    sampling: Sampling,
    chunk: int,
    recorded: Mapping[str, Array] = {},
    compared: Compared | None = None,
    teacher_hidden: Float[Array, "batch time teacher_hidden"] | None = None,
) -> TokenScores:
    """Scores of `tokens` after hidden states, `positions_at_once` positions at a time, forwards and backwards.

    [batch, time, vocab] only exists, in up to four parts, where it has at most FEW_SCORES scores; elsewhere the
    backward pass recomputes each chunk's logits. On a mesh each device computes its own rows, with a head that is
    gathered once and not for every chunk.

    Args:
        recorded: arrays recorded for each of `tokens`, [batch, time, …]; see `score_tokens`.
        compared: adds the divergence from this teacher, between distributions at the temperature of `sampling`, without
            its cuts.
        teacher_hidden: the teacher's hidden states; None without a teacher.
    """
    recorded = {name: values for name, values in recorded.items() if name in (*KEPT, TOP_IDS, SAMPLED)}
    if not recorded.keys() - {SAMPLED}:
        recorded = {}

    def score_rows(heads, hidden, teacher_hidden, recorded, tokens):
        count = tokens.size
        length = min(positions_at_once(config, chunk), count)

        def in_chunks(x):
            x = x.reshape(count, *x.shape[2:])
            padding = [(0, 0)] * x.ndim
            padding[0] = (0, -count % length)
            return jnp.pad(x, padding).reshape(-1, length, *x.shape[1:])

        def without_chunks(x):
            x = x.reshape(-1, *x.shape[2:])[:count]
            return x.reshape(*tokens.shape, *x.shape[1:])

        def one_chunk(inputs):
            chunk_hidden, chunk_teacher_hidden, chunk_recorded, chunk_tokens = inputs
            vocabulary_scores = constrain(logits(config, heads[0], chunk_hidden), None, "tensor")
            scores = score_tokens(vocabulary_scores, chunk_tokens, sampling, chunk_recorded)
            if compared is None:
                return scores
            teacher_scores = logits(compared.decoder.config, heads[1], chunk_teacher_hidden)
            teacher_scores = constrain(teacher_scores, None, "tensor")
            divergence = compared.divergence(
                vocabulary_scores / sampling.temperature, teacher_scores / sampling.temperature
            )
            return scores._replace(divergence=divergence)

        inputs = hidden, teacher_hidden, recorded, tokens
        chunks = jax.tree.map(in_chunks, inputs)
        if len(jax.tree.leaves(chunks)[0]) * length * config.vocab_size <= FEW_SCORES:
            # A loop would copy the scores into a stack and out of it again.
            parts = [one_chunk(part) for part in _unstacked(chunks)]
            scores = jax.tree.map(lambda *parts: jnp.stack(parts), *parts)
        else:
            scores = jax.lax.map(jax.checkpoint(one_chunk), chunks)
        return jax.tree.map(without_chunks, scores)

    heads = [_head(params)]
    if compared is not None:
        heads.append(_head(compared.params))
    return over_rows(score_rows, heads, hidden, teacher_hidden, recorded, tokens)


def _unstacked(arrays: Any) -> list[Any]:
    """Trees of the entries of all arrays' first axis."""
    leaves, structure = jax.tree.flatten(arrays)
    return [structure.unflatten(entries) for entries in zip(*leaves, strict=True)]


def _head(params: dict) -> dict:
    """The parameters that `logits` reads."""
    if "head" in params:
        return {"head": params["head"]}
    return {"embedding": params["embedding"]}


def last_hidden(
    hidden: Float[Array, "rows time hidden"], mask: Bool[Array, "rows time"]
) -> Float[Array, "rows hidden"]:
    """The hidden state at each row's last real token, for rows padded on the right."""
    last = mask.sum(-1) - 1
    return jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]


def completion_logprobs(
    decoder: Decoder,
    params: dict,
    prompts: Int[Array, "prompts prompt_time"],
    prompt_mask: Bool[Array, "prompts prompt_time"],
    completions: Int[Array, "batch time"],
    completion_mask: Bool[Array, "batch time"],
    recorded: Mapping[str, Array] = {},
    *,
    sampling: Sampling,
    chunk: int,
    compared: Compared | None = None,
) -> TokenScores:
    """Scores of completions under the sampling distribution of `params`: log-probabilities, entropies and more.

    Each prompt is run once for its batch/prompts consecutive completions, forward and backward.

    Args:
        params: parameters with stacked layers, also for an unrolled decoder.
        prompts: right-padded prompt tokens, each row with at least one.
        completions: right-padded completion tokens, grouped by prompt in the order of `prompts`.
        completion_mask: True at real tokens. Results at padding are finite and undefined.
        recorded: arrays that the sampler recorded for each token, [batch, time, …]; see `recjax.experience.group.Row`.
        sampling: the distribution that sampled the completions.
        chunk: token positions whose logits exist at the same time.
        compared: adds the divergence from a teacher at each token; see `chunked_scores`.
    """
    teacher_hidden = None
    if compared is not None:
        teacher_prompts = prompts
        teacher_mask = prompt_mask
        if compared.prompts is not None:
            assert compared.prompt_mask is not None
            teacher_prompts = compared.prompts
            teacher_mask = compared.prompt_mask
        teacher_hidden, _ = _hidden_before_completions(
            compared.decoder,
            compared.params,
            teacher_prompts,
            teacher_mask,
            completions=completions,
            completion_mask=completion_mask,
        )
    experts = _recorded_experts(decoder, recorded)
    hidden, load = _hidden_before_completions(
        decoder,
        params,
        prompts,
        prompt_mask,
        completions=completions,
        completion_mask=completion_mask,
        experts=experts,
    )
    scores = chunked_scores(
        decoder.config,
        params,
        hidden,
        completions,
        sampling=sampling,
        chunk=chunk,
        recorded=recorded,
        compared=compared,
        teacher_hidden=teacher_hidden,
    )
    return scores._replace(load=load)


def _hidden_before_completions(
    decoder: Decoder,
    params: dict,
    prompts: Int[Array, "prompts prompt_time"],
    prompt_mask: Bool[Array, "prompts prompt_time"],
    *,
    completions: Int[Array, "batch time"],
    completion_mask: Bool[Array, "batch time"],
    experts: Int[Array, "batch time layers per_token"] | None = None,
) -> tuple[Float[Array, "batch time hidden"], Load | None]:
    """The hidden state that predicts each completion token, which is the state at the token before it.

    Args:
        experts: recorded experts for each completion token; None: the router chooses.
    """
    group_size = completions.shape[0] // prompts.shape[0]
    positions = jnp.broadcast_to(jnp.arange(prompts.shape[1]), prompts.shape)
    if decoder.config.experts is not None:  # prompts that only fill up the batch are no load
        prompt_mask = prompt_mask & completion_mask.reshape(len(prompts), -1).any(-1, keepdims=True)
    prompt_tokens = DecoderTokens(prompts, positions, prompt_mask)
    weights = {"params": params_for(decoder, params)}
    if completions.shape[1] == 1:
        (hidden, _), sown = apply_routed(decoder, weights, prompts, positions, prompt_mask)
        first = jnp.repeat(last_hidden(hidden, prompt_mask), group_size, axis=0)[:, None]
        return jnp.concatenate([first], axis=1), _load(decoder, sown)
    prompt_lengths = jnp.repeat(prompt_mask.sum(-1), group_size)
    later_positions = prompt_lengths[:, None] + jnp.arange(completions.shape[1] - 1)
    if experts is not None:
        # Each array holds the experts of the pass that predicts a token; prompts have none and are routed again.
        experts = experts[:, 1:]
    later_tokens = DecoderTokens(completions[:, :-1], later_positions, completion_mask[:, :-1], experts)
    (hidden, later), sown = apply_routed(decoder, weights, prompt_tokens, later_tokens, method="run_groups")
    first = jnp.repeat(last_hidden(hidden, prompt_mask), group_size, axis=0)[:, None]
    return jnp.concatenate([first, later], axis=1), _load(decoder, sown)


def _recorded_experts(decoder: Decoder, recorded: Mapping[str, Array]) -> Int[Array, "rows time layers k"] | None:
    if not decoder.replays_routing or EXPERTS not in recorded:
        return None
    return recorded[EXPERTS].astype(jnp.int32)


def _load(decoder: Decoder, sown: dict) -> Load | None:
    """The experts' load in a forward pass; None for a model without experts."""
    if decoder.config.experts is None:
        return None
    return load_of(sown, decoder.config.experts.per_token)


def packed_logprobs(
    decoder: Decoder,
    params: dict,
    tokens: Int[Array, "rows row_tokens"],
    positions: Int[Array, "rows row_tokens"],
    targets: Int[Array, "rows row_tokens"],
    ends: Int[Array, "rows row_tokens"],
    recorded: Mapping[str, Array] = {},
    *,
    sampling: Sampling,
    chunk: int,
    compared: Compared | None = None,
) -> TokenScores:
    """Scores of the targets of packed sequences under the sampling distribution of `params`.

    Args:
        tokens, positions, targets, ends: see `recjax.experience.packing.Packed`. Results at padding are undefined.
        recorded: arrays that the sampler recorded for each target, [rows, row_tokens, …].
        sampling: the distribution that sampled the completions.
        chunk: token positions whose logits exist at the same time.
        compared: adds the divergence from a teacher at each token; see `chunked_scores`.
    """

    def run(decoder: Decoder, params: dict, experts: Array | None) -> tuple[Array, Load | None]:
        weights = {"params": params_for(decoder, params)}
        if experts is not None:
            experts = jnp.where(recorded[SAMPLED][..., None, None], experts, NO_RECORD)
        (hidden, _), sown = apply_routed(decoder, weights, tokens, positions, ends, experts=experts)
        return hidden, _load(decoder, sown)

    teacher_hidden = None
    if compared is not None:
        teacher_hidden, _ = run(compared.decoder, compared.params, None)
    hidden, load = run(decoder, params, _recorded_experts(decoder, recorded))
    scores = chunked_scores(
        decoder.config,
        params,
        hidden,
        targets,
        sampling=sampling,
        chunk=chunk,
        recorded=recorded,
        compared=compared,
        teacher_hidden=teacher_hidden,
    )
    return scores._replace(load=load)
