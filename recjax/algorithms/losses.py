"""The loss equation; every algorithm in this package is a special case.

    loss = reduce_t [ −sg(w · w_t · c_t · A · M_t) · log π(y_t) + regularizer_t + c_KL · KL_t + c_D · D_t − c_H · H_t ]

An agent's observations o_t can add λ mean_t(−log π(o_t)).

Call `row_terms` once on the whole batch and `loss` on each micro-batch. `loss` returns (sum, count), which add up.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from recjax.algorithms.algorithm import Algorithm
from recjax.algorithms.groups import FirstRows, first_rows, one_per_trajectory, trajectory_sums
from recjax.algorithms.options import require
from recjax.algorithms.ratios import (
    LEAST_REST,
    behavior_anchor,
    bounded_exp,
    effective_share,
    log_difference,
    per_token,
    sequence_sum,
    with_rest,
)
from recjax.algorithms.reading import RESCORED, call, is_of_whole_batch, names_read
from recjax.algorithms.reduce import SumAndCount
from recjax.algorithms.terms import terms_of
from recjax.errors import UserError


class Scored(NamedTuple):
    """Results of the scoring pass over the rows of an update, before the update; see `Algorithm.needs_scoring`."""

    logprobs: Float[Array, "batch time"]
    entropy: Float[Array, "batch time"]
    behavior_logprobs: Float[Array, "batch time"] | None


class RowTerms(NamedTuple):
    """Constants of each row in a loss; `batch` is the number of rows.

    Padding rows, dropped rows and rows outside the minibatch have kept False. Padding and dropped rows have advantages,
    weights and rewards of 0. Advantages and weights have a time axis if the algorithm distinguishes the tokens of a
    completion.

    foreign: True where another model wrote the completion; None if unknown.
    mask: joint mask of the axes `clip` and `mask`, as far as their functions read the whole batch.
    proximal_logprobs: log π before the batch's first update, if the algorithm reads it.
    teacher_logprobs: log-probs of a teacher, if the algorithm reads them.
    taught: mask of the rows with a teacher; None: all rows. In other rows the teacher equals the policy.
    effective_share: effective sample size of the update's tokens as a share, equal for all rows; None without scores.
    trajectories: id of each row's completion, which stays in one micro-batch; None if each row is a completion.
    observation_weights: see `regularizers.observation_cross_entropy`; None if the algorithm does not read observations.
    """

    advantages: Float[Array, "batch *rest"]
    weights: Float[Array, "batch *rest"]
    kept: Bool[Array, " batch"]
    rewards: Float[Array, " batch"]
    group_ids: Int[Array, " batch"]
    foreign: Bool[Array, " batch"] | None = None
    mask: Bool[Array, "batch time"] | None = None
    proximal_logprobs: Float[Array, "batch time"] | None = None
    teacher_logprobs: Float[Array, "batch time"] | None = None
    taught: Bool[Array, " batch"] | None = None
    effective_share: Float[Array, " batch"] | None = None
    trajectories: Int[Array, " batch"] | None = None
    observation_weights: Float[Array, "batch time"] | None = None


class TermScores(NamedTuple):
    """Scores of a micro-batch's tokens that only terms of the loss read; None if no term reads them.

    reference_logprobs: log π_ref, constant; for a KL to a reference.
    entropy: entropy of π at each token, in nats, differentiated; for an entropy bonus.
    divergence: `regularizers.teacher_divergence` at each token, differentiated.
    top_logprobs: log π of the behavior policy's most likely tokens, differentiated; for `score_centering`.
    behavior_top_logprobs: log μ of the same tokens, constant; NaN where unknown.
    """

    reference_logprobs: Float[Array, "batch time"] | None = None
    entropy: Float[Array, "batch time"] | None = None
    divergence: Float[Array, "batch time"] | None = None
    top_logprobs: Float[Array, "batch time count"] | None = None
    behavior_top_logprobs: Float[Array, "batch time count"] | None = None


NO_SCORES = TermScores()


class TokenTerms(NamedTuple):
    """Factors of −∇log π at each token, all constants.

    ratio: ratio to the anchor, at the level of the axis `ratio`.
    advantages: [batch, 1] or [batch, time].
    clip: False where clip or mask drops the token.
    coefficients: whole factor w · w_t · c_t · A · M_t, 0 where dropped or masked.
    """

    ratio: Float[Array, "batch time"]
    advantages: Float[Array, "batch #time"]
    clip: Bool[Array, "batch time"]
    coefficients: Float[Array, "batch time"]


class TokenValues(NamedTuple):
    """Values of a micro-batch that the functions of the axes read by name, masked; `reading` describes each.

    A value is None if it is unknown or not computed yet.
    """

    logprobs: Float[Array, "batch time"]
    behavior_logprobs: Float[Array, "batch time"]
    completion_mask: Bool[Array, "batch time"]
    foreign: Bool[Array, " batch"] | None
    trajectories: Int[Array, " batch"] | None
    effective_share: Float[Array, " batch"] | None = None
    proximal_logprobs: Float[Array, "batch time"] | None = None
    teacher_logprobs: Float[Array, "batch time"] | None = None
    reference_logprobs: Float[Array, "batch time"] | None = None
    entropy: Float[Array, "batch time"] | None = None
    divergence: Float[Array, "batch time"] | None = None
    advantages: Float[Array, "batch #time"] | None = None
    anchor_logprobs: Float[Array, "batch time"] | None = None
    log_ratio: Float[Array, "batch time"] | None = None
    ratio: Float[Array, "batch time"] | None = None
    per_token: Float[Array, "batch time"] | None = None
    observation_weights: Float[Array, "batch time"] | None = None
    top_logprobs: Float[Array, "batch time count"] | None = None
    behavior_top_logprobs: Float[Array, "batch time count"] | None = None
    top_weights: Float[Array, "batch time count_and_rest"] | None = None


class BatchValues(NamedTuple):
    """Values of a whole batch: the inputs of `row_terms`, and the values that axis functions read by name.

    `reading` describes the values that functions read. A value is None if it is unknown or not computed yet; you can
    omit inputs that the algorithm does not read.

    rewards: reward of each row, in any unit; ignored where not kept.
    group_ids: id of each row's group; any integers in any order, groups of any size.
    kept: mask of rows without padding rows, `completion_mask.any(-1)`; `row_terms` narrows it to the selected rows.
    key: random key for selections.
    completion_mask: mask of the tokens that the behavior policy chose.
    foreign: mask of completions by other models.
    reward_parts: unweighted values of each reward part, by name; NaN in rows without the part.
    part_weights: weight of each reward part, by name.
    trajectories: id of each row's completion, whose rows have equal rewards; None if each row is a completion.
    turn_rewards: rewards of the turns in each row's trajectory; NaN after the last turn.
    token_turns: index of the turn that sampled each token; ignored where masked.
    minibatch: rows that the update trains on, in whole groups; None: all rows. Rows outside it are not kept.
        Selection, advantages and weights use the whole batch. Functions that read scores read only the rows
        of the minibatch.
    observation_mask: mask of the tokens that an agent's tools and environment wrote.
    scored: results of the scoring pass; ignored where masked.
    proximal_logprobs: log π before the batch's first update; ignored where masked. None: the log-probs of `scored`.
    teacher_logprobs: log-probs of a teacher at each token; ignored where masked.
    taught: mask of the rows with a teacher; None: all rows.
    """

    rewards: Float[Array, " batch"]
    group_ids: Int[Array, " batch"]
    kept: Bool[Array, " batch"]
    key: PRNGKeyArray
    completion_mask: Bool[Array, "batch time"] | None = None
    foreign: Bool[Array, " batch"] | None = None
    reward_parts: Mapping[str, Float[Array, " batch"]] | None = None
    part_weights: Mapping[str, Float[Array, " batch"]] | None = None
    trajectories: Int[Array, " batch"] | None = None
    turn_rewards: Float[Array, "batch turns"] | None = None
    token_turns: Int[Array, "batch time"] | None = None
    minibatch: Bool[Array, " batch"] | None = None
    observation_mask: Bool[Array, "batch time"] | None = None
    scored: Scored | None = None
    proximal_logprobs: Float[Array, "batch time"] | None = None
    teacher_logprobs: Float[Array, "batch time"] | None = None
    taught: Bool[Array, " batch"] | None = None
    # `row_terms` computes the following values, in this order.
    lengths: Int[Array, " batch"] | None = None
    scored_logprobs: Float[Array, "batch time"] | None = None
    scored_entropy: Float[Array, "batch time"] | None = None
    scored_log_ratio: Float[Array, "batch time"] | None = None
    effective_share: Float[Array, " batch"] | None = None
    advantages: Float[Array, "batch *rest"] | None = None


def impossible_tokens(
    algorithm: Algorithm,
    logprobs: Float[Array, "batch time"],
    behavior_logprobs: Float[Array, "batch time"] | None,
    rows: RowTerms,
    completion_mask: Bool[Array, "batch time"],
) -> dict[str, Bool[Array, "batch time"]]:
    """For each policy that the algorithm reads, True at tokens of kept rows with probability 0 (log-prob −inf).

    Such a token has no finite ratio or loss. The losses treat it as a token that the policy did not choose, in values,
    gradients and counts. NaN is not −inf and stays NaN in the loss.

    Takes the arguments of `token_loss`.

    Examples:
        >>> from recjax import algorithms
        >>> algorithm = algorithms.build("reinforce", {})
        >>> mask = jnp.array([[True, True], [True, True]])
        >>> rewards, group_ids = jnp.array([1.0, 0.0]), jnp.array([0, 0])
        >>> rows = row_terms(algorithm, BatchValues(rewards, group_ids, mask.any(-1), jax.random.key(0)))
        >>> logprobs = jnp.array([[-1.0, -jnp.inf], [-4.0, -1.0]])
        >>> print(impossible_tokens(algorithm, logprobs, None, rows, mask)["policy"])
        [[False  True]
         [False False]]
    """
    read = {"policy": logprobs, "proximal": rows.proximal_logprobs, "teacher": rows.teacher_logprobs}
    read["behavior"] = behavior_logprobs if algorithm.needs_behavior_logprobs else None
    mask = completion_mask & rows.kept[:, None]
    return {name: mask & jnp.isneginf(values) for name, values in read.items() if values is not None}


def _tokens(
    algorithm: Algorithm,
    logprobs,
    behavior_logprobs,
    rows: RowTerms,
    completion_mask,
    scores: TermScores = NO_SCORES,
) -> TokenValues:
    """The tokens that count: in kept rows, not impossible.

    Of the values, `logprobs`, `entropy`, `divergence` and `top_logprobs` are differentiated, and the last three are not
    masked.
    """
    if algorithm.needs_behavior_logprobs and behavior_logprobs is None:
        raise UserError(
            "behavior_logprobs",
            "this algorithm reads them",
            "record them with the completions, or choose an algorithm without clip, importance weights and squared"
            " log-ratio, with the objective policy_gradient",
            None,
        )
    mask = completion_mask & rows.kept[:, None]
    for impossible in impossible_tokens(algorithm, logprobs, behavior_logprobs, rows, completion_mask).values():
        mask &= ~impossible

    def constant(x):
        return None if x is None else jax.lax.stop_gradient(jnp.where(mask, x, 0.0))

    teacher_logprobs = rows.teacher_logprobs
    divergence = scores.divergence
    if rows.taught is not None:
        taught = rows.taught[:, None]
        teacher_logprobs = None if teacher_logprobs is None else jnp.where(taught, teacher_logprobs, logprobs)
        divergence = None if divergence is None else jnp.where(taught, divergence, 0.0)
    return TokenValues(
        # Masked before any exponential: behind it, the gradient of a masked −inf would be NaN.
        jnp.where(mask, logprobs, 0.0),
        # An algorithm that does not need μ never reads this stand-in.
        jax.lax.stop_gradient(jnp.where(mask, logprobs if behavior_logprobs is None else behavior_logprobs, 0.0)),
        mask,
        rows.foreign,
        rows.trajectories,
        rows.effective_share,
        constant(rows.proximal_logprobs),
        constant(teacher_logprobs),
        constant(scores.reference_logprobs),
        scores.entropy,
        divergence,
        top_logprobs=scores.top_logprobs,
        behavior_top_logprobs=scores.behavior_top_logprobs,
    )


def row_terms(algorithm: Algorithm, batch: BatchValues) -> RowTerms:
    """Computes selection, advantages, row weights and masks of a whole batch, before the split into micro-batches.

    Raises:
        ValueError: an input that the algorithm reads is None; or, with trajectories, an advantage function that does
            not read `trajectories` returns an advantage for each token.

    Examples:
        >>> from recjax import algorithms
        >>> algorithm = algorithms.build("reinforce", {})
        >>> rewards, group_ids, is_row = jnp.array([1.0, 0.0]), jnp.array([0, 0]), jnp.array([True, True])
        >>> rows = row_terms(algorithm, BatchValues(rewards, group_ids, is_row, jax.random.key(0)))
        >>> print(rows.advantages, rows.weights, rows.kept)
        [ 0.5 -0.5] [1. 1.] [ True  True]
    """
    sampled_mask = batch.completion_mask
    # Selection, advantages and weights are computed at the first row of each completion and copied to its other rows,
    # so that a completion counts once in its group, however many rows it has.
    first = None if batch.trajectories is None else first_rows(batch.trajectories, batch.kept)
    batch, kept = _selected(algorithm, batch, first)
    batch = _with_scores(algorithm, batch, kept, sampled_mask)
    advantages = call(algorithm.advantage, batch)
    batch = batch._replace(advantages=advantages)
    if first and advantages.ndim == 2:
        # A function that does not know trajectories would give values only to the first row of each.
        remedy = "with trajectories, a function that does not read `trajectories` must return [batch]; choose another"
        require("trajectories" in names_read(algorithm.advantage), "advantages", advantages.shape, remedy)
        batch = batch._replace(kept=kept)
    if algorithm.row_weight:
        weights = _call_on_minibatch(algorithm.row_weight, batch)
    else:
        weights = batch.kept.astype(advantages.dtype)
    if first:
        advantages = _of_all_rows(advantages, first, kept)
        weights = _of_all_rows(weights, first, kept)
        batch = batch._replace(advantages=advantages, kept=kept)
    masks = [
        _call_on_minibatch(function, batch)
        for function in (algorithm.clip, algorithm.mask)
        if function is not None and is_of_whole_batch(function)
    ]
    proximal = batch.proximal_logprobs
    if proximal is None and batch.scored is not None:
        proximal = batch.scored.logprobs
    if proximal is not None:
        assert sampled_mask is not None
        proximal = jnp.where(sampled_mask & kept[:, None], proximal, 0.0)
    teacher_logprobs = batch.teacher_logprobs
    if teacher_logprobs is not None and batch.taught is not None:
        # Not −inf, which would be a token that the teacher cannot choose.
        teacher_logprobs = jnp.where(batch.taught[:, None], teacher_logprobs, 0.0)
    # Advantages compare whole groups, but an update of a minibatch trains only its own rows.
    trained = kept if batch.minibatch is None else kept & batch.minibatch
    observation_weights = None
    if algorithm.observations is not None and batch.observation_mask is not None:
        assert sampled_mask is not None
        mask = sampled_mask & trained[:, None]
        observed = batch.observation_mask & trained[:, None]
        nothing = jnp.zeros(mask.shape)
        values = TokenValues(nothing, nothing, mask, None, batch.trajectories, per_token=nothing)
        _, count = call(algorithm.reduction, values)
        # The sum of weighted values, divided by the loss's count, is their mean, however the batch is cut.
        observation_weights = jnp.where(observed, count / jnp.maximum(jnp.sum(observed), 1), 0.0)
    rows = RowTerms(
        advantages,
        weights,
        trained,
        jnp.where(trained, batch.rewards, 0.0),
        batch.group_ids,
        batch.foreign,
        mask=jnp.all(jnp.stack(masks), axis=0) if masks else None,
        proximal_logprobs=proximal,
        teacher_logprobs=teacher_logprobs,
        taught=batch.taught,
        effective_share=batch.effective_share,
        trajectories=batch.trajectories,
        observation_weights=observation_weights,
    )
    # All these values weigh log π and are data; a gradient through a ratio or score in them would be another loss.
    return jax.lax.stop_gradient(rows)


def _selected(
    algorithm: Algorithm, batch: BatchValues, first: FirstRows | None
) -> tuple[BatchValues, Bool[Array, " batch"]]:
    """The values with lengths and the algorithm's selection, and the mask of all rows of selected completions.

    `kept` of the values marks one row of each selected completion; their completion mask covers every row of the
    completion.
    """
    is_row = batch.kept
    if batch.completion_mask is not None:
        lengths = jnp.sum(batch.completion_mask, axis=-1)
        if first:
            lengths = trajectory_sums(lengths.astype(float), batch.trajectories).astype(int)
        batch = batch._replace(lengths=lengths)
    if first:
        batch = batch._replace(kept=first.is_first)
    if algorithm.selection is not None:
        batch = batch._replace(kept=call(algorithm.selection, batch))
    kept = is_row & first.shared(batch.kept) if first else batch.kept
    if batch.completion_mask is not None:
        batch = batch._replace(completion_mask=batch.completion_mask & kept[:, None])
    return batch, kept


def _with_scores(
    algorithm: Algorithm,
    batch: BatchValues,
    kept: Bool[Array, " batch"],
    sampled_mask: Bool[Array, "batch time"] | None,
) -> BatchValues:
    """The values with masked results of the scoring pass, if there was one; impossible tokens leave the mask."""
    scored = batch.scored
    if scored is None:
        return batch
    assert sampled_mask is not None
    mask = sampled_mask & kept[:, None] & ~jnp.isneginf(scored.logprobs)
    if scored.behavior_logprobs is not None and algorithm.needs_behavior_logprobs:
        mask &= ~jnp.isneginf(scored.behavior_logprobs)
    batch = batch._replace(
        completion_mask=mask,
        scored_logprobs=jnp.where(mask, scored.logprobs, 0.0),
        scored_entropy=jnp.where(mask, scored.entropy, 0.0),
    )
    if scored.behavior_logprobs is None:
        return batch
    log_ratio = log_difference(scored.logprobs, scored.behavior_logprobs, mask)
    update_mask = mask if batch.minibatch is None else mask & batch.minibatch[:, None]
    # Rounding may put the share just above 1, which would turn the sign of 1 − share.
    share = jnp.minimum(effective_share(log_ratio, update_mask), 1.0)
    return batch._replace(scored_log_ratio=log_ratio, effective_share=jnp.broadcast_to(share, batch.rewards.shape))


def _call_on_minibatch(function: Callable, batch: BatchValues) -> Array:
    """Calls a function on the minibatch if it reads scores, which other rows do not have; else on the whole batch."""
    if batch.minibatch is None or RESCORED.isdisjoint(names_read(function)):
        return call(function, batch)
    assert batch.completion_mask is not None
    mask = batch.completion_mask & batch.minibatch[:, None]
    return call(function, batch._replace(kept=batch.kept & batch.minibatch, completion_mask=mask))


def _of_all_rows(values: Array, first: FirstRows, kept: Bool[Array, " batch"]) -> Array:
    """Copies values of first rows to all kept rows of their trajectories; token values already cover all rows."""
    return values if values.ndim == 2 else jnp.where(kept, first.shared(values), 0.0)


def token_terms(
    algorithm: Algorithm,
    logprobs: Float[Array, "batch time"],
    behavior_logprobs: Float[Array, "batch time"] | None,
    rows: RowTerms,
    completion_mask: Bool[Array, "batch time"],
) -> TokenTerms:
    """Computes ratio, advantages, clip and coefficients of each token, as constants.

    Takes the arguments of `token_loss`.

    Raises:
        ValueError: an input that the algorithm needs is None.

    Examples:
        >>> from recjax import algorithms
        >>> algorithm = algorithms.build("reinforce", {})
        >>> mask = jnp.array([[True, True], [True, True]])
        >>> rewards, group_ids = jnp.array([1.0, 0.0]), jnp.array([0, 0])
        >>> rows = row_terms(algorithm, BatchValues(rewards, group_ids, mask.any(-1), jax.random.key(0)))
        >>> logprobs = jnp.array([[-1.0, -2.0], [-4.0, -1.0]])
        >>> print(token_terms(algorithm, logprobs, None, rows, mask).coefficients)
        [[ 0.5  0.5]
         [-0.5 -0.5]]
    """
    return _weighted_terms(algorithm, logprobs, behavior_logprobs, rows, completion_mask)[0]


def token_weights(
    algorithm: Algorithm,
    logprobs: Float[Array, "batch time"],
    behavior_logprobs: Float[Array, "batch time"] | None,
    rows: RowTerms,
    completion_mask: Bool[Array, "batch time"],
) -> Float[Array, "batch time"]:
    """Computes the weight w · w_t · c_t of each token: that of its row, of the axis `weight`, and of `correction`.

    Takes the arguments of `token_loss`.

    Returns:
        Weights; NaN where the clip or a mask drops the token, so that its weight has no effect.

    Examples:
        >>> from recjax import algorithms
        >>> algorithm = algorithms.build("cispo", {})
        >>> mask = jnp.array([[True, True], [True, True]])
        >>> rewards, group_ids = jnp.array([1.0, 0.0]), jnp.array([0, 0])
        >>> rows = row_terms(algorithm, BatchValues(rewards, group_ids, mask.any(-1), jax.random.key(0)))
        >>> log_ratios = jnp.log(jnp.array([[0.5, 1.0], [2.0, 9.0]]))
        >>> weights = token_weights(algorithm, log_ratios, jnp.zeros((2, 2)), rows, mask)
        >>> print(weights.round(3))  # capped at 5
        [[0.5 1. ]
         [2.  5. ]]
    """
    terms, weights = _weighted_terms(algorithm, logprobs, behavior_logprobs, rows, completion_mask)
    tokens = completion_mask & rows.kept[:, None] & terms.clip
    return jnp.where(tokens, weights, jnp.nan)


def _weighted_terms(
    algorithm: Algorithm, logprobs, behavior_logprobs, rows: RowTerms, completion_mask
) -> tuple[TokenTerms, Float[Array, "batch #time"]]:
    """The terms of each token, and the weights in their coefficients; see `token_terms` and `token_weights`."""
    tokens = _tokens(algorithm, logprobs, behavior_logprobs, rows, completion_mask)
    tokens = jax.lax.stop_gradient(tokens._replace(advantages=per_token(rows.advantages)))
    mask = tokens.completion_mask
    behavior_logprobs = tokens.behavior_logprobs
    if algorithm.distillation is not None:
        tokens = tokens._replace(advantages=tokens.advantages + call(algorithm.distillation, tokens))
    anchor = call(algorithm.anchor, tokens) if algorithm.reads_ratio else behavior_logprobs
    tokens = tokens._replace(anchor_logprobs=anchor, log_ratio=log_difference(tokens.logprobs, anchor, mask))
    # Bounded only here: bounds on single tokens would change the ratio of a completion, which sums their logarithms.
    tokens = tokens._replace(ratio=bounded_exp(call(algorithm.ratio, tokens)))
    weights = per_token(rows.weights)
    if algorithm.token_weight is not None:
        weights *= call(algorithm.token_weight, tokens)
    assert tokens.ratio is not None and tokens.advantages is not None
    coefficients = weights * tokens.advantages
    mismatch = log_difference(anchor, behavior_logprobs, mask)
    of_anchor = tokens._replace(log_ratio=mismatch, ratio=bounded_exp(mismatch))
    if algorithm.correction is not None:
        correction = call(algorithm.correction, of_anchor)
        coefficients *= correction
        weights *= correction
    # A mask measures how far a batch is off-policy, so with another anchor than μ it reads anchor/μ.
    of_anchor = of_anchor._replace(ratio=bounded_exp(call(algorithm.ratio, of_anchor)))
    masked_by = tokens if algorithm.anchor is behavior_anchor else of_anchor
    clip = mask if rows.mask is None else rows.mask
    for function, read in ((algorithm.clip, tokens), (algorithm.mask, masked_by)):
        if function is not None and not is_of_whole_batch(function):
            clip = clip & call(function, read)
    terms = TokenTerms(tokens.ratio, tokens.advantages, clip, jnp.where(mask & clip, coefficients, 0.0))
    return jax.lax.stop_gradient((terms, weights))


def _top_weights(
    algorithm: Algorithm, tokens: TokenValues, rows: RowTerms
) -> Float[Array, "batch time count_and_rest"] | None:
    """The weight of ∇log π that each of the most likely tokens would have, had it been sampled; constants.

    The last weight is that of all other tokens, which count as rare tokens with one ratio.

    Args:
        tokens: values with advantages and scores.
    """
    if tokens.top_logprobs is None or tokens.behavior_top_logprobs is None:
        return None
    assert tokens.advantages is not None
    factors = jnp.where(tokens.completion_mask, per_token(rows.weights) * tokens.advantages, 0.0)
    # The axis `mask` decides by the completion or its place, so it drops the mean together with the token.
    if rows.mask is not None:
        factors = jnp.where(rows.mask, factors, 0.0)
    elif algorithm.mask is not None:
        log_ratio = log_difference(tokens.logprobs, tokens.behavior_logprobs, tokens.completion_mask)
        factors = jnp.where(call(algorithm.mask, tokens._replace(log_ratio=log_ratio)), factors, 0.0)

    def weights_of(logprobs: Float[Array, "batch time"], behavior_logprobs: Float[Array, "batch time"]) -> Array:
        log_ratio = log_difference(logprobs, behavior_logprobs, tokens.completion_mask)
        values = tokens._replace(
            logprobs=logprobs,
            behavior_logprobs=behavior_logprobs,
            anchor_logprobs=behavior_logprobs,
            log_ratio=log_ratio,
            ratio=bounded_exp(log_ratio),
        )
        weights = factors
        if algorithm.token_weight is not None:
            weights = weights * call(algorithm.token_weight, values)
        return weights if algorithm.clip is None else jnp.where(call(algorithm.clip, values), weights, 0.0)

    policy = with_rest(tokens.top_logprobs)
    behavior = with_rest(tokens.behavior_top_logprobs)
    # The other tokens share their ratio, but each is rare: a bound on probabilities must not read their sum.
    rarer = jnp.log(LEAST_REST) - behavior[..., -1:]
    policy, behavior = (jnp.concatenate([x[..., :-1], x[..., -1:] + rarer], axis=-1) for x in (policy, behavior))
    return jax.lax.stop_gradient(jax.vmap(weights_of, -1, -1)(policy, behavior))


def token_loss(
    algorithm: Algorithm,
    logprobs: Float[Array, "batch time"],
    behavior_logprobs: Float[Array, "batch time"] | None,
    rows: RowTerms,
    completion_mask: Bool[Array, "batch time"],
    scores: TermScores = NO_SCORES,
) -> Float[Array, "batch time"]:
    """The loss of each token, before any reduction.

    −sg(w · w_t · c_t · A · M_t) · log π(y_t) + regularizer_t + term_t + c_KL · KL_t + c_D · D_t − c_H · H_t

    Args:
        logprobs: log π, differentiated; ignored where masked.
        behavior_logprobs: log μ, constant; None if the algorithm does not need it; ignored where masked.
        rows: result of `row_terms`, for the rows of this call.
        completion_mask: mask of the tokens that the behavior policy chose.
        scores: scores that the algorithm's terms read; others are ignored.
    Returns:
        Loss of each token; 0 where masked and in rows not kept.
    Raises:
        ValueError: an input that the algorithm needs is None.
    Reference: arXiv 2509.24203 §2.

    Examples:
        >>> from recjax import algorithms
        >>> algorithm = algorithms.build("reinforce", {})
        >>> mask = jnp.array([[True, True], [True, True]])
        >>> rewards, group_ids = jnp.array([1.0, 0.0]), jnp.array([0, 0])
        >>> rows = row_terms(algorithm, BatchValues(rewards, group_ids, mask.any(-1), jax.random.key(0)))
        >>> logprobs = jnp.array([[-1.0, -2.0], [-4.0, -1.0]])
        >>> print(token_loss(algorithm, logprobs, None, rows, mask))
        [[ 0.5  1. ]
         [-2.  -0.5]]
    """
    gradient_terms = token_terms(algorithm, logprobs, behavior_logprobs, rows, completion_mask)
    # The coefficients are constants; these tokens have the gradient of log π.
    tokens = _tokens(algorithm, logprobs, behavior_logprobs, rows, completion_mask, scores)
    tokens = tokens._replace(advantages=gradient_terms.advantages, ratio=gradient_terms.ratio)
    if algorithm.score_centering is not None:
        tokens = tokens._replace(top_weights=_top_weights(algorithm, tokens, rows))
    per_token = -gradient_terms.coefficients * tokens.logprobs
    for term in terms_of(algorithm):
        if term.per_token is not None:
            values = call(term.per_token, tokens)
            per_token = per_token + values if term.sign > 0 else per_token - values
    return jnp.where(tokens.completion_mask, per_token, 0.0)


def loss(
    algorithm: Algorithm,
    logprobs: Float[Array, "batch time"],
    behavior_logprobs: Float[Array, "batch time"] | None,
    rows: RowTerms,
    completion_mask: Bool[Array, "batch time"],
    scores: TermScores = NO_SCORES,
) -> SumAndCount:
    """Computes the loss of a micro-batch as (sum, count); add both over micro-batches and devices, then divide once.

    Takes the arguments of `token_loss`. All rows of a trajectory must be in the same micro-batch; for the pairwise
    objective, all rows of a group.

    Returns:
        Sum and count under the algorithm's reduction (for the pairwise objective, over groups). Both are 0 if no row
        is kept.
    Raises:
        ValueError: an input that the algorithm needs is None.

    Examples:
        >>> from recjax import algorithms
        >>> algorithm = algorithms.build("reinforce", {})
        >>> mask = jnp.array([[True, True], [True, True]])
        >>> rewards, group_ids = jnp.array([1.0, 0.0]), jnp.array([0, 0])
        >>> rows = row_terms(algorithm, BatchValues(rewards, group_ids, mask.any(-1), jax.random.key(0)))
        >>> logprobs = jnp.array([[-1.0, -2.0], [-4.0, -1.0]])
        >>> total, count = loss(algorithm, logprobs, None, rows, mask)
        >>> print(total, count, total / count)
        -1.0 4.0 -0.25
    """
    tokens = _tokens(algorithm, logprobs, behavior_logprobs, rows, completion_mask)
    if algorithm.objective is None:
        per_token = token_loss(algorithm, logprobs, behavior_logprobs, rows, completion_mask, scores)
        total, count = call(algorithm.reduction, tokens._replace(per_token=per_token))
        # These terms have masks of their own, so they read the log-probs of all tokens.
        values = tokens._replace(logprobs=logprobs, observation_weights=rows.observation_weights)
        for term in terms_of(algorithm):
            if term.total is not None:
                total += call(term.total, values)
        return total, count
    mask = tokens.completion_mask
    policy = sequence_sum(tokens.logprobs, mask, rows.trajectories)[:, 0]
    behavior = sequence_sum(tokens.behavior_logprobs, mask, rows.trajectories)[:, 0]
    # A completion takes part in its group's pairs once, however many rows it has.
    kept = one_per_trajectory(rows.kept & jnp.any(mask, axis=-1), rows.trajectories)
    return algorithm.objective(policy, behavior, rows.rewards, rows.weights, rows.group_ids, kept)
