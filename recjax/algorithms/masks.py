"""Masks next to the clip: they drop policy-gradient terms of completions, or of tokens compared in the whole batch.

Masked tokens stay in the denominator of a mean, like clipped tokens.
"""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from recjax.algorithms.clipping import binary_kl
from recjax.algorithms.options import (
    ABOVE_0,
    ABOVE_0_TO_1,
    AT_LEAST_0,
    AT_LEAST_1,
    FROM_0_TO_1,
    Bounds,
    Scalar,
    requires,
)
from recjax.algorithms.ratios import per_token, sequence_max, sequence_mean, sequence_sum
from recjax.algorithms.regularizers import kl_estimate


def off_policy_negatives_mask(
    log_ratio: Float[Array, "batch time"],
    advantages: Float[Array, "batch *rest"],
    completion_mask: Bool[Array, "batch time"],
    trajectories: Int[Array, " batch"] | None = None,
    *,
    delta: Scalar = 0.5,
) -> Bool[Array, "batch time"]:
    """False in completions with A < 0 that the policy has moved away from: mean_t log(μ/π) > δ.

    Args:
        log_ratio: log ρ of each token.
        advantages: advantage of each completion or token; only the sign is read.
        completion_mask: mask of the tokens that count.
        trajectories: id of each row's completion; None if each row is a completion.
        delta: threshold δ, in nats per token.
    Reference: arXiv 2512.02556 (DeepSeek-V3.2, off-policy sequence masking).

    Examples:
        >>> log_ratio, mask = jnp.array([[-1.0, -1.0], [0.0, 0.0]]), jnp.array([[True, True], [True, True]])
        >>> print(off_policy_negatives_mask(log_ratio, jnp.array([-1.0, -1.0]), mask))
        [[False False]
         [ True  True]]
    """
    moved_away = -sequence_mean(log_ratio, completion_mask, trajectories) > delta
    return jnp.broadcast_to(~(moved_away & (per_token(advantages) < 0)), log_ratio.shape)


@requires(delta=AT_LEAST_0)
def sequence_binary_kl_mask(
    logprobs: Float[Array, "batch time"],
    behavior_logprobs: Float[Array, "batch time"],
    completion_mask: Bool[Array, "batch time"],
    trajectories: Int[Array, " batch"] | None = None,
    *,
    delta: Scalar = 5e-3,
) -> Bool[Array, "batch time"]:
    """False in completions whose mean `binary_kl` is above δ, for either sign of the advantage.

    Args:
        logprobs: log π of each token.
        behavior_logprobs: log μ of each token.
        completion_mask: mask of the tokens that count.
        trajectories: id of each row's completion; None if each row is a completion.
        delta: largest mean KL δ, in nats per token, 0 or more.
    Raises:
        ValueError: a negative δ.
    Reference: FlashREINFORCE, https://github.com/OpenRLHF/OpenRLHF/pull/1339.

    Examples:
        >>> before, now = jnp.log(jnp.array([[0.5], [0.5]])), jnp.log(jnp.array([[0.52], [0.9]]))
        >>> print(sequence_binary_kl_mask(now, before, jnp.array([[True], [True]])))
        [[ True]
         [False]]
    """
    kl = sequence_mean(binary_kl(logprobs, behavior_logprobs), completion_mask, trajectories)
    return jnp.broadcast_to(kl <= delta, logprobs.shape)


@requires(delta=AT_LEAST_0)
def sequence_max_kl_mask(
    log_ratio: Float[Array, "batch time"],
    completion_mask: Bool[Array, "batch time"],
    trajectories: Int[Array, " batch"] | None = None,
    *,
    estimator: Literal["k2", "k3"] = "k3",
    delta: Scalar = 0.05,
) -> Bool[Array, "batch time"]:
    """False in completions with a token whose KL estimate is above δ, for either sign of the advantage.

    k2 = (log ρ)² / 2;  k3 = ρ − 1 − log ρ.

    Args:
        log_ratio: log ρ of each token.
        completion_mask: mask of the tokens that count.
        trajectories: id of each row's completion; None if each row is a completion.
        estimator: k2 or k3.
        delta: largest KL estimate δ of a token, in nats, 0 or more.
    Raises:
        ValueError: a negative δ.
    Reference: arXiv 2512.23075 (TRM); verl `seq_max_k2`, `seq_max_k3`.

    Examples:
        >>> log_ratio, mask = jnp.array([[0.1, 0.5], [0.1, -0.2]]), jnp.array([[True, True], [True, True]])
        >>> print(sequence_max_kl_mask(log_ratio, mask))
        [[False False]
         [ True  True]]
    """
    largest = sequence_max(kl_estimate(log_ratio, estimator), completion_mask, trajectories)
    return jnp.broadcast_to(largest <= delta, log_ratio.shape)


@requires(low=FROM_0_TO_1, high=AT_LEAST_1)
def sequence_band_mask(
    log_ratio: Float[Array, "batch time"],
    completion_mask: Bool[Array, "batch time"],
    trajectories: Int[Array, " batch"] | None = None,
    *,
    level: Literal["mean", "product"] = "mean",
    low: Scalar = 0.99,
    high: Scalar = 1.01,
) -> Bool[Array, "batch time"]:
    """False in completions whose ratio is outside a band.

    The product of token ratios leaves any band in long completions, however near to 1 each ratio is; the geometric mean
    does not.

    Args:
        log_ratio: log ρ of each token.
        completion_mask: mask of the tokens that count.
        trajectories: id of each row's completion; None if each row is a completion.
        level: geometric mean or product of a completion's token ratios.
        low: lowest ratio, from 0 to 1.
        high: largest ratio, 1 or more.
    Raises:
        ValueError: a band without 1 in it.
    Reference: masked importance sampling (MIS), as TRL, verl and SkyRL have it.

    Examples:
        >>> log_ratio, mask = jnp.array([[0.1, 0.1], [0.1, -0.1]]), jnp.array([[True, True], [True, True]])
        >>> print(sequence_band_mask(log_ratio, mask))
        [[False False]
         [ True  True]]
    """
    combined = {"mean": sequence_mean, "product": sequence_sum}[level]
    sequence_log_ratio = combined(log_ratio, completion_mask, trajectories)
    is_above = sequence_log_ratio >= jnp.log(jnp.float32(low))
    is_below = sequence_log_ratio <= jnp.log(jnp.float32(high))
    return jnp.broadcast_to(is_above & is_below, log_ratio.shape)


@requires(tau=AT_LEAST_0)
def second_moment_mask(
    scored_log_ratio: Float[Array, "batch time"], completion_mask: Bool[Array, "batch time"], *, tau: Scalar = 0.04
) -> Bool[Array, "batch time"]:
    """True for as many tokens of lowest (log ρ)² as keep its mean at most τ; ties are kept or dropped together.

    Advantages play no role, as in AReaL; `one_side_second_moment_mask` is the authors' own form.

    Args:
        scored_log_ratio: log ρ of each token of the whole batch.
        completion_mask: mask of the tokens that count.
        tau: largest mean τ, in nats², 0 or more.
    Raises:
        ValueError: a negative τ.
    Reference: arXiv 2510.01161 (M2PO).

    Examples:
        >>> print(second_moment_mask(jnp.array([[0.1, -0.2, 1.0]]), jnp.array([[True, True, True]])))
        [[ True  True False]]
    """
    squares = jnp.where(completion_mask, jnp.square(scored_log_ratio), jnp.inf).reshape(-1)
    rising = jnp.sort(squares)
    sums = jnp.cumsum(jnp.where(jnp.isfinite(rising), rising, 0.0))
    not_above = jnp.searchsorted(rising, squares, side="right")
    means = sums[not_above - 1] / not_above
    return (means <= tau).reshape(completion_mask.shape) & completion_mask


@requires(tau=AT_LEAST_0)
def one_side_second_moment_mask(
    scored_log_ratio: Float[Array, "batch time"],
    advantages: Float[Array, "batch *rest"],
    completion_mask: Bool[Array, "batch time"],
    *,
    tau: Scalar = 0.04,
    dropped: Literal["ignored", "bounded"] = "ignored",
) -> Bool[Array, "batch time"]:
    """False for the tokens that moved furthest in the advantage's direction, if their mean (log ρ)² is above τ.

    Candidates have A > 0 and ρ > 1, or A < 0 and ρ < 1; all other tokens are kept. Candidates with |log ρ| up to b are
    kept, for the largest b with a mean of at most τ; without such a b, all candidates are dropped.

    Args:
        scored_log_ratio: log ρ of each token of the whole batch.
        advantages: advantage of each completion or token; only the sign is read.
        completion_mask: mask of the tokens that count.
        tau: largest mean τ, in nats², 0 or more.
        dropped: value of dropped candidates in the mean: ignored for the mean of (log ρ)² over kept candidates, bounded
            for the mean of min((log ρ)², b²) over all candidates, which is below τ.
    Raises:
        ValueError: a negative τ.
    Reference: https://openreview.net/forum?id=IIgl5MWelz (M2PO, Algorithm 1); bounded: the authors' code of arXiv
        2510.01161, which computes the moment over a micro-batch.

    Examples:
        >>> log_ratio, mask = jnp.array([[-0.7, 0.1, 0.25, 1.0]]), jnp.array([[True, True, True, True]])
        >>> print(one_side_second_moment_mask(log_ratio, jnp.array([1.0]), mask))
        [[ True  True  True False]]
        >>> print(one_side_second_moment_mask(log_ratio, jnp.array([1.0]), mask, dropped="bounded"))
        [[ True  True False False]]
    """
    pushed = completion_mask & (per_token(advantages) * scored_log_ratio > 0)
    squares = jnp.where(pushed, jnp.square(scored_log_ratio), jnp.inf).reshape(-1)
    rising = jnp.sort(squares)
    count = jnp.sum(pushed)
    sums = jnp.cumsum(jnp.where(jnp.isfinite(rising), rising, 0.0))
    not_above = jnp.searchsorted(rising, squares, side="right")
    within = sums[not_above - 1] <= tau * not_above
    if dropped == "bounded":
        capped = sums[not_above - 1] + squares * (count - not_above)
        within = (capped < tau * count) | (sums[-1] <= tau * count)
    return (within.reshape(pushed.shape) | ~pushed) & completion_mask


@requires(tau=AT_LEAST_0, epsilon=ABOVE_0)
def entropy_scaled_mask(
    scored_log_ratio: Float[Array, "batch time"],
    scored_entropy: Float[Array, "batch time"],
    completion_mask: Bool[Array, "batch time"],
    *,
    tau: Scalar = 0.1,
    epsilon: Scalar = 1e-3,
) -> Bool[Array, "batch time"]:
    """True where the token has moved little for its entropy, for either sign of the advantage: (log ρ)² / (H + ε) ≤ τ.

    Args:
        scored_log_ratio: log ρ of each token of the whole batch.
        scored_entropy: entropy H at each token, in nats.
        completion_mask: mask of the tokens that count.
        tau: largest quotient τ, in nats, 0 or more.
        epsilon: constant ε, in nats, above 0.
    Raises:
        ValueError: a negative τ, or ε not above 0.
    Reference: arXiv 2607.22186 (ESTR).

    Examples:
        >>> log_ratio, entropy = jnp.array([[0.2, 0.2, -0.5]]), jnp.array([[2.0, 0.1, 1.0]])
        >>> print(entropy_scaled_mask(log_ratio, entropy, jnp.array([[True, True, True]])))
        [[ True False False]]
    """
    return completion_mask & (jnp.square(scored_log_ratio) <= tau * (scored_entropy + epsilon))


@requires(deviations=AT_LEAST_0)
def entropy_change_mask(
    scored_logprobs: Float[Array, "batch time"],
    scored_entropy: Float[Array, "batch time"],
    advantages: Float[Array, "batch *rest"],
    completion_mask: Bool[Array, "batch time"],
    *,
    deviations: Scalar = 2.5,
) -> Bool[Array, "batch time"]:
    """False for tokens with A < 0 that would lower the entropy most: unlikely tokens that are pushed down.

    S = p (H + log p) is the first-order change of the entropy H where a token of probability p is pushed down. Tokens
    with S below the batch's mean of S by more than m standard deviations are dropped.

    Args:
        scored_logprobs: log π of each token of the whole batch.
        scored_entropy: entropy H at each token, in nats.
        advantages: advantage of each completion or token; only the sign is read.
        completion_mask: mask of the tokens that count.
        deviations: number m of standard deviations, 0 or more.
    Raises:
        ValueError: a negative m.
    Reference: arXiv 2602.03392 (Clip-B), as in the authors' Trinity-RFT.

    Examples:
        >>> logprobs, entropy = jnp.log(jnp.array([[0.5, 0.1, 0.5]])), jnp.array([[1.0, 1.0, 1.0]])
        >>> mask = jnp.array([[True, True, True]])
        >>> print(entropy_change_mask(logprobs, entropy, jnp.array([-1.0]), mask, deviations=1.0))
        [[ True False  True]]
    """
    change = jnp.where(completion_mask, jnp.exp(scored_logprobs) * (scored_entropy + scored_logprobs), 0.0)
    count = jnp.maximum(jnp.sum(completion_mask), 1)
    centered = jnp.where(completion_mask, change - jnp.sum(change) / count, 0.0)
    deviation = jnp.sqrt(jnp.sum(jnp.square(centered)) / count)
    return (centered >= -deviations * deviation) | (per_token(advantages) >= 0)


@requires(share=ABOVE_0_TO_1)
def high_entropy_mask(
    scored_entropy: Float[Array, "batch time"], completion_mask: Bool[Array, "batch time"], *, share: Scalar = 0.2
) -> Bool[Array, "batch time"]:
    """True for a share of the batch's tokens, chosen by highest entropy; ties are kept together.

    Args:
        scored_entropy: entropy at each token of the whole batch, in nats.
        completion_mask: mask of the tokens that count.
        share: share of tokens to keep, above 0, at most 1.
    Raises:
        ValueError: share is out of range.
    Reference: arXiv 2506.01939 (beyond the 80/20 rule).

    Examples:
        >>> print(high_entropy_mask(jnp.array([[0.1, 2.0, 0.5]]), jnp.array([[True, True, True]]), share=0.3))
        [[False  True False]]
    """
    return _among_highest(scored_entropy, completion_mask, share)


@requires(share=Bounds(lambda share: (0 <= share) & (share < 1), "must be from 0 to below 1"))
def covariance_mask(
    scored_logprobs: Float[Array, "batch time"],
    advantages: Float[Array, "batch *rest"],
    completion_mask: Bool[Array, "batch time"],
    *,
    share: Scalar = 0.0002,
) -> Bool[Array, "batch time"]:
    """False for the batch's share of tokens with the highest covariance of log π and A, which reduce entropy most.

    Tokens are ranked by (log π_t − mean log π)(A_t − mean A), with means over tokens.

    Args:
        scored_logprobs: log π of each token of the whole batch.
        advantages: advantages of the whole batch.
        completion_mask: mask of the tokens that count.
        share: share of tokens to drop, from 0 to below 1; a positive share drops at least one token.
    Raises:
        ValueError: share is out of range.
    Reference: arXiv 2505.22617 (Clip-Cov, here by rank and without chance).

    Examples:
        >>> logprobs, mask = jnp.array([[-0.1, -3.0], [-1.0, -1.0]]), jnp.array([[True, True], [True, True]])
        >>> print(covariance_mask(logprobs, jnp.array([1.0, -1.0]), mask))
        [[False  True]
         [ True  True]]
    """
    count = jnp.maximum(jnp.sum(completion_mask), 1)
    token_advantages = jnp.where(completion_mask, per_token(advantages), 0.0)
    logprobs = jnp.where(completion_mask, scored_logprobs, 0.0)
    centered = (logprobs - jnp.sum(logprobs) / count) * (token_advantages - jnp.sum(token_advantages) / count)
    return ~(_among_highest(centered, completion_mask, share) & (share > 0))


def _among_highest(values: Float[Array, "batch time"], mask: Bool[Array, "batch time"], share: Scalar):
    """True for the highest ceil(share · n) of n unmasked values, and for values equal to the lowest chosen one."""
    falling = -jnp.sort(-jnp.where(mask, values, -jnp.inf).reshape(-1))
    # Slightly below the share, because rounding may put the product just above a whole number.
    last = jnp.ceil(share * jnp.sum(mask) * (1 - 1e-6)).astype(int) - 1
    return mask & (values >= falling[jnp.maximum(last, 0)])
