"""The loss equation; every algorithm in this package is a special case.

    loss = reduce_t [ −sg(w · w_t · c_t · A · M_t) · log π(y_t) + regularizer_t + c_KL · KL_t + c_D · D_t − c_H · H_t ]

An agent's observations o_t can add λ mean_t(−log π(o_t)).

Call `row_terms` once on the whole batch and `loss` on each micro-batch. `loss` returns (sum, count), which add up.

The examples of this module start with these lines:

    >>> from recjax import algorithms
    >>> algorithm = algorithms.build("reinforce", {})
    >>> mask = jnp.array([[True, True], [True, True]])
    >>> rewards, group_ids = jnp.array([1.0, 0.0]), jnp.array([0, 0])
    >>> batch = BatchValues(rewards, group_ids, mask.any(-1), jax.random.key(0))
    >>> rows = row_terms(algorithm, batch)
    >>> logprobs = jnp.array([[-1.0, -2.0], [-4.0, -1.0]])
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from recjax.algorithms.algorithm import Algorithm
from recjax.algorithms.axis import Axis
from recjax.algorithms.groups import FirstRows, first_rows, one_per_trajectory, trajectory_sums
from recjax.algorithms.ratios import (
    LEAST_REST,
    bounded_exp,
    effective_share,
    log_difference,
    per_token,
    sequence_sum,
    with_rest,
)
from recjax.algorithms.reading import RESCORED
from recjax.algorithms.reduce import SumAndCount
from recjax.algorithms.values import Rows, Tokens
from recjax.errors import UserError


class Scored(NamedTuple):
    """Results of the scoring pass over the rows of an update, before the update; see `Algorithm.needs_scoring`."""

    logprobs: Float[Array, "batch time"]
    entropy: Float[Array, "batch time"]
    behavior_logprobs: Float[Array, "batch time"] | None
    reference_kl: Float[Array, "batch time"] | None = None


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
    coefficients: whole factor w · w_t · c_t · A · M_t, 0 where dropped or masked, and with a user's own objective.
    """

    ratio: Float[Array, "batch time"]
    advantages: Float[Array, "batch #time"]
    clip: Bool[Array, "batch time"]
    coefficients: Float[Array, "batch time"]


class BatchValues(NamedTuple):
    """Values of a whole batch: the inputs of `row_terms`. You can omit inputs that the algorithm does not read.

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


def row_terms(algorithm: Algorithm, batch: BatchValues) -> RowTerms:
    """Computes selection, advantages, row weights and masks of a whole batch, before the split into micro-batches.

    Raises:
        ValueError: an input that the algorithm reads is None; or, with trajectories, an advantage function that does
            not read `trajectories` returns an advantage for each token.

    Examples:
        >>> rows = row_terms(algorithm, batch)
        >>> print(rows.advantages, rows.weights, rows.kept)
        [ 0.5 -0.5] [1. 1.] [ True  True]
    """
    # Selection, advantages and weights are computed at the first row of each completion and copied to its other rows,
    # so that a completion counts once in its group, however many rows it has.
    first = None
    counted = batch.kept
    if batch.trajectories is not None:
        first = first_rows(batch.trajectories, batch.kept)
        counted = first.is_first
    tokens = Tokens(batch.completion_mask, token_turns=batch.token_turns)
    rows = _rows_of_batch(batch, kept=counted)

    # Selection. `counted` has the first row of each selected completion, and `kept` has all its rows.
    if algorithm.selection is not None:
        # A user's selection need not know which rows are padding, or repeat a completion.
        counted = counted & algorithm.selection(tokens, rows)
    kept = counted
    if first is not None:
        kept = batch.kept & first.shared(counted)
    rows = rows._replace(kept=counted)
    if batch.completion_mask is not None:
        tokens = tokens._replace(completion_mask=batch.completion_mask & kept[:, None])
    if batch.scored is not None:
        tokens, share = _scored_tokens(algorithm, tokens, batch, kept)
        rows = rows._replace(effective_share=share)

    # Advantages, weights and masks.
    advantages = algorithm.advantage(tokens, rows)
    if first is not None and advantages.ndim == 2:
        # Advantages of tokens cover all rows already, so their weights are computed at all rows too.
        _check_covers_all_rows(algorithm.advantage, advantages)
        rows = rows._replace(kept=kept)
    tokens = tokens._replace(advantages=advantages)
    weights = _row_weights(algorithm, tokens, rows, batch.minibatch)
    if first is not None:
        advantages = _copied_to_all_rows(advantages, first, kept)
        tokens = tokens._replace(advantages=advantages)
        rows = rows._replace(kept=kept)
        if weights.ndim == 2:
            # Weights of tokens read the tokens of all rows, and so the advantages of all rows.
            weights = _row_weights(algorithm, tokens, rows, batch.minibatch)
        weights = _copied_to_all_rows(weights, first, kept)
    mask = _whole_batch_mask(algorithm, tokens, rows, batch.minibatch)

    # Advantages compare whole groups, but an update of a minibatch trains only its own rows.
    trained = kept
    if batch.minibatch is not None:
        trained = kept & batch.minibatch
    terms = RowTerms(
        advantages=advantages,
        weights=weights,
        kept=trained,
        rewards=jnp.where(trained, batch.rewards, 0.0),
        group_ids=batch.group_ids,
        foreign=batch.foreign,
        mask=mask,
        proximal_logprobs=_proximal_logprobs(batch, kept),
        teacher_logprobs=_teacher_logprobs(batch),
        taught=batch.taught,
        effective_share=rows.effective_share,
        trajectories=batch.trajectories,
    )
    terms = terms._replace(observation_weights=_observation_weights(algorithm, batch, terms))
    # All these values weigh log π and are data; a gradient through a ratio or score in them would be another loss.
    return jax.lax.stop_gradient(terms)


def _rows_of_batch(batch: BatchValues, kept: Bool[Array, " batch"]) -> Rows:
    """The values of rows that functions may read before the scoring pass."""
    return Rows(
        foreign=batch.foreign,
        trajectories=batch.trajectories,
        kept=kept,
        rewards=batch.rewards,
        group_ids=batch.group_ids,
        lengths=_lengths(batch),
        reward_parts=batch.reward_parts,
        part_weights=batch.part_weights,
        turn_rewards=batch.turn_rewards,
        key=batch.key,
    )


def _lengths(batch: BatchValues) -> Int[Array, " batch"] | None:
    """Number of tokens of each row's completion; None without a mask."""
    if batch.completion_mask is None:
        return None
    lengths = jnp.sum(batch.completion_mask, axis=-1)
    if batch.trajectories is None:
        return lengths
    return trajectory_sums(lengths.astype(float), batch.trajectories).astype(int)


def _scored_tokens(
    algorithm: Algorithm, tokens: Tokens, batch: BatchValues, kept: Bool[Array, " batch"]
) -> tuple[Tokens, Float[Array, " batch"] | None]:
    """Adds masked results of the scoring pass to the tokens; the mask drops impossible tokens.

    Returns:
        The tokens, and the effective sample size as a share, for each row; None without behavior log-probs.
    """
    scored = batch.scored
    assert scored is not None and batch.completion_mask is not None
    mask = batch.completion_mask & kept[:, None] & ~jnp.isneginf(scored.logprobs)
    if scored.behavior_logprobs is not None and algorithm.needs_behavior_logprobs:
        mask &= ~jnp.isneginf(scored.behavior_logprobs)
    tokens = tokens._replace(
        completion_mask=mask,
        scored_logprobs=jnp.where(mask, scored.logprobs, 0.0),
        scored_entropy=jnp.where(mask, scored.entropy, 0.0),
    )
    if scored.reference_kl is not None:
        tokens = tokens._replace(scored_reference_kl=jnp.where(mask, scored.reference_kl, 0.0))
    if scored.behavior_logprobs is None:
        return tokens, None
    log_ratio = log_difference(scored.logprobs, scored.behavior_logprobs, mask)
    update_mask = mask
    if batch.minibatch is not None:
        update_mask = mask & batch.minibatch[:, None]
    # Rounding may put the share just above 1, which would turn the sign of 1 − share.
    share = jnp.minimum(effective_share(log_ratio, update_mask), 1.0)
    return tokens._replace(scored_log_ratio=log_ratio), jnp.broadcast_to(share, batch.rewards.shape)


def _check_covers_all_rows(advantage: Axis, advantages: Float[Array, "batch time"]) -> None:
    """Refuses advantages of tokens that only the first row of each trajectory has."""
    if "trajectories" not in advantage.reads:
        raise UserError(
            "advantages",
            "with trajectories, a function that does not read `trajectories` must return [batch]",
            "choose another",
            advantages.shape,
        )


def _row_weights(
    algorithm: Algorithm, tokens: Tokens, rows: Rows, minibatch: Bool[Array, " batch"] | None
) -> Float[Array, "batch *rest"]:
    """The weights of the kept rows: those of the axis `weight` if its function reads the whole batch, else 1."""
    if algorithm.row_weight is not None:
        return _called_on_minibatch(algorithm.row_weight, tokens, rows, minibatch)
    assert rows.kept is not None and tokens.advantages is not None
    return rows.kept.astype(tokens.advantages.dtype)


def _whole_batch_mask(
    algorithm: Algorithm, tokens: Tokens, rows: Rows, minibatch: Bool[Array, " batch"] | None
) -> Bool[Array, "batch time"] | None:
    """The joint mask of clip and mask, as far as their functions read the whole batch; None if neither does."""
    masks = []
    for axis in (algorithm.clip, algorithm.mask):
        if axis is not None and axis.reads_whole_batch:
            masks.append(_called_on_minibatch(axis, tokens, rows, minibatch))
    if not masks:
        return None
    return jnp.all(jnp.stack(masks), axis=0)


def _called_on_minibatch(axis: Axis, tokens: Tokens, rows: Rows, minibatch: Bool[Array, " batch"] | None) -> Array:
    """Calls a function on the minibatch if it reads scores, which other rows do not have; else on the whole batch."""
    if minibatch is not None and not RESCORED.isdisjoint(axis.reads):
        assert tokens.completion_mask is not None and rows.kept is not None
        tokens = tokens._replace(completion_mask=tokens.completion_mask & minibatch[:, None])
        rows = rows._replace(kept=rows.kept & minibatch)
    return axis(tokens, rows)


def _copied_to_all_rows(values: Array, first: FirstRows, kept: Bool[Array, " batch"]) -> Array:
    """Copies values of first rows to all kept rows of their trajectories; token values already cover all rows."""
    if values.ndim == 2:
        return values
    return jnp.where(kept, first.shared(values), 0.0)


def _proximal_logprobs(batch: BatchValues, kept: Bool[Array, " batch"]) -> Float[Array, "batch time"] | None:
    """The given log-probs before the batch's first update; in that update itself, those of its scoring pass."""
    proximal = batch.proximal_logprobs
    if proximal is None and batch.scored is not None:
        proximal = batch.scored.logprobs
    if proximal is None:
        return None
    assert batch.completion_mask is not None
    return jnp.where(batch.completion_mask & kept[:, None], proximal, 0.0)


def _teacher_logprobs(batch: BatchValues) -> Float[Array, "batch time"] | None:
    """The teacher's log-probs; 0 in rows without a teacher: −inf would be a token that the teacher cannot choose."""
    if batch.teacher_logprobs is None or batch.taught is None:
        return batch.teacher_logprobs
    return jnp.where(batch.taught[:, None], batch.teacher_logprobs, 0.0)


def _observation_weights(algorithm: Algorithm, batch: BatchValues, rows: RowTerms) -> Float[Array, "batch time"] | None:
    """Weights that make the sum over the observed tokens, divided by the loss's count, a mean over these tokens.

    The count excludes tokens with probability 0, as the loss does; the policy's are known only with a scoring pass.
    """
    if algorithm.observations is None or batch.observation_mask is None:
        return None
    assert batch.completion_mask is not None
    logprobs = jnp.zeros(batch.completion_mask.shape)
    behavior_logprobs = None
    if batch.scored is not None:
        logprobs = batch.scored.logprobs
        behavior_logprobs = batch.scored.behavior_logprobs
    mask = _counted_tokens(algorithm, logprobs, behavior_logprobs, rows, batch.completion_mask)
    no_losses = Tokens(mask, per_token=jnp.zeros(mask.shape))
    _, count = algorithm.reduction(no_losses, Rows(trajectories=batch.trajectories))
    observed = batch.observation_mask & rows.kept[:, None]
    return jnp.where(observed, count / jnp.maximum(jnp.sum(observed), 1), 0.0)


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
        >>> logprobs = jnp.array([[-1.0, -jnp.inf], [-4.0, -1.0]])
        >>> print(impossible_tokens(algorithm, logprobs, None, rows, mask)["policy"])
        [[False  True]
         [False False]]
    """
    read = {"policy": logprobs, "proximal": rows.proximal_logprobs, "teacher": rows.teacher_logprobs}
    if algorithm.needs_behavior_logprobs:
        read["behavior"] = behavior_logprobs
    mask = completion_mask & rows.kept[:, None]
    return {name: mask & jnp.isneginf(values) for name, values in read.items() if values is not None}


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
        >>> print(token_loss(algorithm, logprobs, None, rows, mask))
        [[ 0.5  1. ]
         [-2.  -0.5]]
    """
    tokens = _masked_tokens(algorithm, logprobs, behavior_logprobs, rows, completion_mask, scores=scores)
    row_values = _row_values(rows)
    gradient_terms, _ = _gradient_terms(algorithm, tokens, rows)
    tokens = _with_ratio(algorithm, tokens._replace(advantages=gradient_terms.advantages), row_values)
    mask = tokens.completion_mask
    assert mask is not None and tokens.logprobs is not None

    if algorithm.token_objective is not None:
        losses = algorithm.token_objective(tokens, row_values)
    else:
        # The coefficients are constants, so the gradient is theirs times that of log π.
        losses = -gradient_terms.coefficients * tokens.logprobs
    tokens = tokens._replace(ratio=gradient_terms.ratio)
    if algorithm.regularizer is not None:
        losses += algorithm.regularizer(tokens, row_values)
    if algorithm.term is not None:
        losses += algorithm.term(tokens, row_values)
    if algorithm.reference_kl is not None:
        losses += algorithm.reference_kl.apply(
            logprobs=tokens.logprobs, reference_logprobs=tokens.reference_logprobs, completion_mask=mask
        )
    if algorithm.unbiased_reference_kl is not None:
        losses += algorithm.unbiased_reference_kl.apply(
            logprobs=tokens.logprobs,
            behavior_logprobs=tokens.behavior_logprobs,
            reference_logprobs=tokens.reference_logprobs,
            completion_mask=mask,
        )
    if algorithm.entropy is not None:
        losses -= algorithm.entropy.apply(entropy=tokens.entropy, completion_mask=mask)
    if algorithm.teacher_divergence is not None:
        losses += _weighted_divergence(algorithm.teacher_divergence, tokens)
    if algorithm.score_centering is not None:
        losses += algorithm.score_centering.apply(
            top_logprobs=tokens.top_logprobs,
            behavior_top_logprobs=tokens.behavior_top_logprobs,
            top_weights=_top_weights(algorithm, tokens, rows),
            completion_mask=mask,
        )
    return jnp.where(mask, losses, 0.0)


def _weighted_divergence(teacher_divergence: Axis, tokens: Tokens) -> Float[Array, "batch time"]:
    """The divergence from the teacher, which the forward pass computed, with the weight that its options choose."""
    if tokens.divergence is None:
        raise UserError("divergence", "teacher_divergence reads it", "pass it, or set its coefficient to 0", None)
    if teacher_divergence.option("weight") != "truncated":
        return tokens.divergence
    assert tokens.logprobs is not None and tokens.behavior_logprobs is not None
    ratio = bounded_exp(tokens.logprobs - tokens.behavior_logprobs)
    weights = jnp.minimum(ratio, teacher_divergence.option("cap"))
    return jax.lax.stop_gradient(weights) * tokens.divergence


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
        >>> total, count = loss(algorithm, logprobs, None, rows, mask)
        >>> print(total, count, total / count)
        -1.0 4.0 -0.25
    """
    if algorithm.objective is not None:
        tokens = _masked_tokens(algorithm, logprobs, behavior_logprobs, rows, completion_mask, scores=scores)
        return _compared_completions(algorithm, tokens, rows)
    per_token = token_loss(algorithm, logprobs, behavior_logprobs, rows, completion_mask, scores=scores)
    mask = _counted_tokens(algorithm, logprobs, behavior_logprobs, rows, completion_mask)
    total, count = algorithm.reduction(Tokens(mask, per_token=per_token), _row_values(rows))
    if algorithm.observations is not None:
        # Observed tokens are not in the completion mask, so this term reads the log-probs of all tokens.
        observed = algorithm.observations.apply(logprobs=logprobs, observation_weights=rows.observation_weights)
        total += jnp.sum(observed)
    return total, count


def _compared_completions(algorithm: Algorithm, tokens: Tokens, rows: RowTerms) -> SumAndCount:
    """The loss of an objective that compares the completions of each group."""
    mask = tokens.completion_mask
    anchor_logprobs = tokens.behavior_logprobs
    if algorithm.is_anchored_at_reference:
        anchor_logprobs = tokens.reference_logprobs
    if anchor_logprobs is None:
        raise UserError("reference_logprobs", "this objective reads them", "pass them, or set another anchor", None)
    assert algorithm.objective is not None and mask is not None and tokens.logprobs is not None
    return algorithm.objective.apply(
        sequence_logprobs=sequence_sum(tokens.logprobs, mask, rows.trajectories)[:, 0],
        anchor_logprobs=sequence_sum(anchor_logprobs, mask, rows.trajectories)[:, 0],
        rewards=rows.rewards,
        weights=rows.weights,
        group_ids=rows.group_ids,
        # A completion takes part in its group's pairs once, however many rows it has.
        kept=one_per_trajectory(rows.kept & jnp.any(mask, axis=-1), rows.trajectories),
    )


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
        >>> print(token_terms(algorithm, logprobs, None, rows, mask).coefficients)
        [[ 0.5  0.5]
         [-0.5 -0.5]]
    """
    tokens = _masked_tokens(algorithm, logprobs, behavior_logprobs, rows, completion_mask)
    terms, _ = _gradient_terms(algorithm, tokens, rows)
    return terms


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
        >>> capped = algorithms.build("cispo", {})
        >>> log_ratios = jnp.log(jnp.array([[0.5, 1.0], [2.0, 9.0]]))
        >>> weights = token_weights(capped, log_ratios, jnp.zeros((2, 2)), row_terms(capped, batch), mask)
        >>> print(weights.round(3))  # capped at 5
        [[0.5 1. ]
         [2.  5. ]]
    """
    tokens = _masked_tokens(algorithm, logprobs, behavior_logprobs, rows, completion_mask)
    terms, weights = _gradient_terms(algorithm, tokens, rows)
    return jnp.where(completion_mask & rows.kept[:, None] & terms.clip, weights, jnp.nan)


def _counted_tokens(
    algorithm: Algorithm,
    logprobs: Float[Array, "batch time"],
    behavior_logprobs: Float[Array, "batch time"] | None,
    rows: RowTerms,
    completion_mask: Bool[Array, "batch time"],
) -> Bool[Array, "batch time"]:
    """The mask of the tokens that count: in kept rows, and possible under every policy that the algorithm reads."""
    mask = completion_mask & rows.kept[:, None]
    for impossible in impossible_tokens(algorithm, logprobs, behavior_logprobs, rows, completion_mask).values():
        mask &= ~impossible
    return mask


def _masked_tokens(
    algorithm: Algorithm,
    logprobs: Float[Array, "batch time"],
    behavior_logprobs: Float[Array, "batch time"] | None,
    rows: RowTerms,
    completion_mask: Bool[Array, "batch time"],
    scores: TermScores = NO_SCORES,
) -> Tokens:
    """The values of a micro-batch's tokens, masked to the tokens that count.

    `logprobs`, `entropy`, `divergence` and `top_logprobs` are differentiated; the last three are not masked.
    """
    if algorithm.needs_behavior_logprobs and behavior_logprobs is None:
        raise UserError(
            "behavior_logprobs",
            "this algorithm reads them",
            "record them with the completions, or choose an algorithm without clip, importance weights and squared"
            " log-ratio, with the objective policy_gradient",
            None,
        )
    mask = _counted_tokens(algorithm, logprobs, behavior_logprobs, rows, completion_mask)
    if behavior_logprobs is None:
        behavior_logprobs = logprobs  # an algorithm that does not need μ never reads this stand-in
    teacher_logprobs = rows.teacher_logprobs
    divergence = scores.divergence
    if rows.taught is not None:
        # In rows without a teacher, the teacher equals the policy.
        taught = rows.taught[:, None]
        if teacher_logprobs is not None:
            teacher_logprobs = jnp.where(taught, teacher_logprobs, logprobs)
        if divergence is not None:
            divergence = jnp.where(taught, divergence, 0.0)

    def constant(values: Array | None) -> Array | None:
        if values is None:
            return None
        return jax.lax.stop_gradient(jnp.where(mask, values, 0.0))

    return Tokens(
        completion_mask=mask,
        # Masked before any exponential: after it, the gradient of a masked −inf would be NaN.
        logprobs=jnp.where(mask, logprobs, 0.0),
        behavior_logprobs=constant(behavior_logprobs),
        proximal_logprobs=constant(rows.proximal_logprobs),
        reference_logprobs=constant(scores.reference_logprobs),
        teacher_logprobs=constant(teacher_logprobs),
        entropy=scores.entropy,
        divergence=divergence,
        top_logprobs=scores.top_logprobs,
        behavior_top_logprobs=scores.behavior_top_logprobs,
    )


def _row_values(rows: RowTerms) -> Rows:
    """The values of rows that functions of a micro-batch may read."""
    return Rows(foreign=rows.foreign, trajectories=rows.trajectories, effective_share=rows.effective_share)


def _gradient_terms(
    algorithm: Algorithm, tokens: Tokens, rows: RowTerms
) -> tuple[TokenTerms, Float[Array, "batch #time"]]:
    """The factors of −∇log π at each token, and the weights in their coefficients; constants."""
    row_values = _row_values(rows)
    tokens = jax.lax.stop_gradient(tokens._replace(advantages=per_token(rows.advantages)))
    mask = tokens.completion_mask
    logprobs = tokens.logprobs
    behavior_logprobs = tokens.behavior_logprobs
    advantages = tokens.advantages
    assert mask is not None and logprobs is not None and behavior_logprobs is not None and advantages is not None
    if algorithm.distillation is not None:
        advantages += algorithm.distillation.apply(
            logprobs=logprobs, teacher_logprobs=tokens.teacher_logprobs, completion_mask=mask
        )
        tokens = tokens._replace(advantages=advantages)
    if algorithm.log_ratio_penalty is not None:
        advantages -= algorithm.log_ratio_penalty.apply(
            logprobs=logprobs,
            behavior_logprobs=behavior_logprobs,
            completion_mask=mask,
            trajectories=rows.trajectories,
        )
        tokens = tokens._replace(advantages=advantages)

    tokens = _with_ratio(algorithm, tokens, row_values)
    anchor = tokens.anchor_logprobs
    ratio = tokens.ratio
    assert anchor is not None and ratio is not None

    # The weights, and the correction from the anchor to μ.
    weights = per_token(rows.weights)
    if algorithm.token_weight is not None:
        weights *= algorithm.token_weight(tokens, row_values)
    coefficients = weights * advantages
    mismatch = log_difference(anchor, behavior_logprobs, mask)
    anchor_tokens = tokens._replace(log_ratio=mismatch, ratio=bounded_exp(mismatch))
    if algorithm.correction is not None:
        correction = algorithm.correction(anchor_tokens, row_values)
        coefficients *= correction
        weights *= correction

    # The clip and the mask.
    clip = mask
    if algorithm.token_objective is not None:
        coefficients = jnp.zeros(mask.shape)
    if rows.mask is not None:
        clip = rows.mask
    if algorithm.clip is not None and not algorithm.clip.reads_whole_batch:
        clip = clip & algorithm.clip(tokens, row_values)
    if algorithm.mask is not None and not algorithm.mask.reads_whole_batch:
        compared = tokens
        if not algorithm.is_anchored_at_behavior:
            # A mask measures how far a batch is off-policy, so with another anchor than μ it reads anchor/μ.
            compared = anchor_tokens._replace(ratio=bounded_exp(algorithm.ratio(anchor_tokens, row_values)))
        clip = clip & algorithm.mask(compared, row_values)
    terms = TokenTerms(
        ratio=ratio,
        advantages=advantages,
        clip=clip,
        coefficients=jnp.where(mask & clip, coefficients, 0.0),
    )
    return jax.lax.stop_gradient((terms, weights))


def _with_ratio(algorithm: Algorithm, tokens: Tokens, row_values: Rows) -> Tokens:
    """Adds the anchor and the ratio π/anchor, through which a gradient flows to the log-probs."""
    anchor = tokens.behavior_logprobs
    if algorithm.reads_ratio:
        anchor = algorithm.anchor(tokens, row_values)
    assert anchor is not None and tokens.logprobs is not None and tokens.completion_mask is not None
    log_ratio = log_difference(tokens.logprobs, anchor, tokens.completion_mask)
    tokens = tokens._replace(anchor_logprobs=anchor, log_ratio=log_ratio)
    # Bounded only here: bounds on single tokens would change the ratio of a completion, which sums their logarithms.
    return tokens._replace(ratio=bounded_exp(algorithm.ratio(tokens, row_values)))


def _top_weights(
    algorithm: Algorithm, tokens: Tokens, rows: RowTerms
) -> Float[Array, "batch time count_and_rest"] | None:
    """The weight of ∇log π that each of the most likely tokens would have, had it been sampled; constants.

    The last weight is that of all other tokens, which count as rare tokens with one ratio.

    Args:
        tokens: values with advantages and scores.
    """
    if tokens.top_logprobs is None or tokens.behavior_top_logprobs is None:
        return None
    mask = tokens.completion_mask
    assert tokens.advantages is not None and mask is not None
    assert tokens.logprobs is not None and tokens.behavior_logprobs is not None
    row_values = _row_values(rows)
    factors = jnp.where(mask, per_token(rows.weights) * tokens.advantages, 0.0)
    # The axis `mask` decides by the completion or its place, so it drops the mean together with the token.
    if rows.mask is not None:
        factors = jnp.where(rows.mask, factors, 0.0)
    elif algorithm.mask is not None:
        factors = jnp.where(algorithm.mask(tokens, row_values), factors, 0.0)

    def weights_as_sampled(
        logprobs: Float[Array, "batch time"], behavior_logprobs: Float[Array, "batch time"]
    ) -> Array:
        log_ratio = log_difference(logprobs, behavior_logprobs, mask)
        sampled = tokens._replace(
            logprobs=logprobs,
            behavior_logprobs=behavior_logprobs,
            anchor_logprobs=behavior_logprobs,
            log_ratio=log_ratio,
            ratio=bounded_exp(log_ratio),
        )
        weights = factors
        if algorithm.token_weight is not None:
            weights = weights * algorithm.token_weight(sampled, row_values)
        if algorithm.clip is not None:
            weights = jnp.where(algorithm.clip(sampled, row_values), weights, 0.0)
        return weights

    policy = with_rest(tokens.top_logprobs)
    behavior = with_rest(tokens.behavior_top_logprobs)
    # The other tokens share their ratio, but each is rare: a bound on probabilities must not read their sum.
    policy_rest = policy[..., -1:]
    behavior_rest = behavior[..., -1:]
    to_rare = jnp.log(LEAST_REST) - behavior_rest
    policy = jnp.concatenate([policy[..., :-1], policy_rest + to_rare], axis=-1)
    behavior = jnp.concatenate([behavior[..., :-1], behavior_rest + to_rare], axis=-1)
    weights_of_each = jax.vmap(weights_as_sampled, in_axes=-1, out_axes=-1)
    return jax.lax.stop_gradient(weights_of_each(policy, behavior))
