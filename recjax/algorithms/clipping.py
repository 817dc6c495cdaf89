"""Clip masks: True for tokens whose policy-gradient term counts, by ratio or probability and the advantage's sign."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from recjax.algorithms.options import ABOVE_0, AT_LEAST_0, AT_LEAST_1, FROM_0_TO_1, AtLeast, Scalar, requires
from recjax.algorithms.ratios import bounded_exp, per_token


def _sides(advantages):
    """Masks of advantages that push up and that push down; an advantage of 0 is in both."""
    return per_token(advantages) >= 0, per_token(advantages) <= 0


@requires(epsilon_low=AT_LEAST_0, epsilon_high=AT_LEAST_0)
def one_side_mask(
    ratio: Float[Array, "batch time"],
    advantages: Float[Array, "batch *rest"],
    *,
    epsilon_low: Scalar = 0.2,
    epsilon_high: Scalar = 0.2,
) -> Bool[Array, "batch time"]:
    """False where the ratio has already left the range in the direction in which the advantage pushes.

    M = (A ≥ 0 and ρ ≤ 1+ε_high) or (A ≤ 0 and ρ ≥ 1−ε_low).  With importance weights, the gradient is that of PPO's
    clipped objective.

    Args:
        ratio: ratio ρ = π/μ of each token.
        advantages: advantage of each completion or token; only the sign is read.
        epsilon_low: distance below 1 up to which a ratio is still pushed down, 0 or more.
        epsilon_high: distance above 1 up to which a ratio is still pushed up, 0 or more.
    Raises:
        ValueError: a negative range.
    Reference: arXiv 2509.24203 §2 (REC-OneSide).

    Examples:
        >>> ratio = jnp.array([[0.5, 1.0, 1.5]])
        >>> print(one_side_mask(ratio, jnp.array([1.0])))
        [[ True  True False]]
        >>> print(one_side_mask(ratio, jnp.array([-1.0])))
        [[False  True  True]]
    """
    up, down = _sides(advantages)
    return (up & (ratio <= 1 + epsilon_high)) | (down & (ratio >= 1 - epsilon_low))


@requires(epsilon_low=AT_LEAST_0, epsilon_high=AT_LEAST_0)
def two_side_mask(
    ratio: Float[Array, "batch time"],
    advantages: Float[Array, "batch *rest"],
    *,
    epsilon_low: Scalar = 0.2,
    epsilon_high: Scalar = 0.2,
) -> Bool[Array, "batch time"]:
    """True where the ratio is inside the range, regardless of the advantage.

    M = 1−ε_low ≤ ρ ≤ 1+ε_high.

    Args:
        ratio: ratio ρ = π/μ of each token.
        advantages: advantage of each completion or token; ignored.
        epsilon_low: width of the range below 1, 0 or more.
        epsilon_high: width of the range above 1, 0 or more.
    Raises:
        ValueError: a negative range.
    Reference: arXiv 2509.24203 §2 (REC-TwoSide).

    Examples:
        >>> ratio = jnp.array([[0.5, 1.0, 1.5]])
        >>> print(two_side_mask(ratio, jnp.array([1.0])))
        [[False  True False]]
        >>> print(two_side_mask(ratio, jnp.array([1.0]), epsilon_low=0.6, epsilon_high=2.0))
        [[ True  True  True]]
    """
    del advantages
    return (ratio >= 1 - epsilon_low) & (ratio <= 1 + epsilon_high)


@requires(
    outer_low=AtLeast("epsilon_low"),
    outer_high=AtLeast("epsilon_high"),
    epsilon_low=AT_LEAST_0,
    epsilon_high=AT_LEAST_0,
)
def ring_mask(
    ratio: Float[Array, "batch time"],
    advantages: Float[Array, "batch *rest"],
    *,
    epsilon_low: Scalar = 0.2,
    epsilon_high: Scalar = 0.2,
    outer_low: Scalar = 0.6,
    outer_high: Scalar = 2.0,
) -> Bool[Array, "batch time"]:
    """True inside the range, and also far outside where the advantage pushes the ratio back toward the range.

    M = (1−ε_low ≤ ρ ≤ 1+ε_high) or (A ≥ 0 and ρ ≤ 1−ε'_low) or (A ≤ 0 and ρ ≥ 1+ε'_high).

    Args:
        ratio: ratio ρ = π/μ of each token.
        advantages: advantage of each completion or token; only the sign is read.
        epsilon_low: width of the range below 1, 0 or more.
        epsilon_high: width of the range above 1, 0 or more.
        outer_low: distance ε'_low below 1, at least epsilon_low.
        outer_high: distance ε'_high above 1, at least epsilon_high.
    Raises:
        ValueError: a negative range, or an outer bound inside the inner one.
    Reference: arXiv 2509.24203 §2 (REC-Ring).

    Examples:
        >>> ratio = jnp.array([[0.3, 0.7, 1.0, 1.5]])
        >>> print(ring_mask(ratio, jnp.array([1.0])))
        [[ True False  True False]]
        >>> print(ring_mask(ratio, jnp.array([-1.0])))
        [[False False  True False]]
    """
    up, down = _sides(advantages)
    inside = two_side_mask(ratio, advantages, epsilon_low=epsilon_low, epsilon_high=epsilon_high)
    return inside | (up & (ratio <= 1 - outer_low)) | (down & (ratio >= 1 + outer_high))


@requires(bound=AT_LEAST_1, epsilon_low=AT_LEAST_0, epsilon_high=AT_LEAST_0)
def dual_clip_mask(
    ratio: Float[Array, "batch time"],
    advantages: Float[Array, "batch *rest"],
    *,
    epsilon_low: Scalar = 0.2,
    epsilon_high: Scalar = 0.2,
    bound: Scalar = 3.0,
) -> Bool[Array, "batch time"]:
    """`one_side_mask`, but also False where A < 0 and the ratio is above a bound.

    Args:
        ratio: ratio ρ of each token.
        advantages: advantage of each completion or token; only the sign is read.
        epsilon_low: see `one_side_mask`.
        epsilon_high: see `one_side_mask`.
        bound: largest ratio c where A < 0, at least 1.
    Raises:
        ValueError: a negative range, or a bound below 1.
    Reference: arXiv 1912.09729 (dual-clip PPO).

    Examples:
        >>> ratio = jnp.array([[1.0, 2.0, 4.0]])
        >>> print(dual_clip_mask(ratio, jnp.array([-1.0])))
        [[ True  True False]]
    """
    kept = one_side_mask(ratio, advantages, epsilon_low=epsilon_low, epsilon_high=epsilon_high)
    return kept & ((per_token(advantages) >= 0) | (ratio <= bound))


@requires(epsilon_low=AT_LEAST_0, epsilon_high=AT_LEAST_0)
def log_one_side_mask(
    log_ratio: Float[Array, "batch time"],
    advantages: Float[Array, "batch *rest"],
    *,
    epsilon_low: Scalar = 0.4,
    epsilon_high: Scalar = 0.4,
) -> Bool[Array, "batch time"]:
    """`one_side_mask` on each token's own log-ratio, even if weights use the ratio of a completion.

    M = (A ≥ 0 and log ρ_t ≤ ε_high) or (A ≤ 0 and log ρ_t ≥ −ε_low).

    Args:
        log_ratio: log ρ of each token.
        advantages: advantage of each completion or token; only the sign is read.
        epsilon_low: distance of the lower bound on log ρ below 0; not negative.
        epsilon_high: distance of the upper bound on log ρ above 0; not negative.
    Raises:
        ValueError: a negative range.
    Reference: arXiv 2507.20673 (GMPO).

    Examples:
        >>> log_ratio = jnp.array([[-0.5, 0.0, 0.5]])
        >>> print(log_one_side_mask(log_ratio, jnp.array([1.0])))
        [[ True  True False]]
    """
    up, down = _sides(advantages)
    return (up & (log_ratio <= epsilon_high)) | (down & (log_ratio >= -epsilon_low))


@requires(delta=AT_LEAST_0)
def probability_difference_mask(
    logprobs: Float[Array, "batch time"],
    behavior_logprobs: Float[Array, "batch time"],
    advantages: Float[Array, "batch *rest"],
    *,
    delta: Scalar = 0.2,
) -> Bool[Array, "batch time"]:
    """False where the token's probability has already moved by more than δ in the direction of the advantage.

    M = (A ≥ 0 and π − μ ≤ δ) or (A ≤ 0 and π − μ ≥ −δ).  Rare tokens, whose ratio moves easily, are kept.

    Args:
        logprobs: log π of each token.
        behavior_logprobs: log μ of each token.
        advantages: advantage of each completion or token; only the sign is read.
        delta: largest difference δ of probabilities, 0 or more.
    Raises:
        ValueError: a negative δ.
    Reference: arXiv 2602.04879 (DPPO, total variation).

    Examples:
        >>> before, now = jnp.log(jnp.array([[0.01, 0.5]])), jnp.log(jnp.array([[0.05, 0.9]]))
        >>> print(probability_difference_mask(now, before, jnp.array([1.0])))
        [[ True False]]
    """
    up, down = _sides(advantages)
    moved = jnp.exp(logprobs) - jnp.exp(behavior_logprobs)
    return (up & (moved <= delta)) | (down & (moved >= -delta))


@requires(delta=AT_LEAST_0)
def probability_distance_mask(
    logprobs: Float[Array, "batch time"], behavior_logprobs: Float[Array, "batch time"], *, delta: Scalar = 0.3
) -> Bool[Array, "batch time"]:
    """False where the token's probability has moved by more than δ, whatever the sign of the advantage: |π − μ| ≤ δ.

    Args:
        logprobs: log π of each token.
        behavior_logprobs: log μ of each token.
        delta: largest difference δ of probabilities, 0 or more.
    Raises:
        ValueError: a negative δ.
    Reference: IPO, https://github.com/PrimeIntellect-ai/prime-rl/pull/3418.

    Examples:
        >>> before, now = jnp.log(jnp.array([[0.01, 0.5, 0.5]])), jnp.log(jnp.array([[0.05, 0.9, 0.1]]))
        >>> print(probability_distance_mask(now, before))
        [[ True False False]]
    """
    return jnp.abs(jnp.exp(logprobs) - jnp.exp(behavior_logprobs)) <= delta


def binary_kl(
    logprobs: Float[Array, "batch time"], behavior_logprobs: Float[Array, "batch time"]
) -> Float[Array, "batch time"]:
    """KL(μ ‖ π) of two outcomes, this token or any other: μ log(μ/π) + (1−μ) log((1−μ)/(1−π)), in nats.

    Examples:
        >>> kl = binary_kl(jnp.log(jnp.array([[0.25]])), jnp.log(jnp.array([[0.5]])))
        >>> round(float(kl[0, 0]), 4)
        0.1438
    """
    # A token of probability 1 leaves 0 for all other tokens, whose logarithm must stay finite.
    tiny = jnp.finfo(logprobs.dtype).tiny
    others, others_before = (jnp.log(jnp.maximum(-jnp.expm1(x), tiny)) for x in (logprobs, behavior_logprobs))
    before = jnp.exp(behavior_logprobs)
    return before * (behavior_logprobs - logprobs) + (1 - before) * (others_before - others)


@requires(delta=AT_LEAST_0)
def binary_kl_mask(
    logprobs: Float[Array, "batch time"],
    behavior_logprobs: Float[Array, "batch time"],
    advantages: Float[Array, "batch *rest"],
    *,
    delta: Scalar = 0.05,
) -> Bool[Array, "batch time"]:
    """False where the token has moved in the direction of the advantage and KL(μ ‖ π) is above δ.

    The KL is that of `binary_kl`.

    Args:
        logprobs: log π of each token.
        behavior_logprobs: log μ of each token.
        advantages: advantage of each completion or token; only the sign is read.
        delta: largest KL δ, in nats, 0 or more.
    Raises:
        ValueError: a negative δ.
    Reference: arXiv 2602.04879 (DPPO, KL).

    Examples:
        >>> before, now = jnp.log(jnp.array([[0.01, 0.5]])), jnp.log(jnp.array([[0.05, 0.9]]))
        >>> print(binary_kl_mask(now, before, jnp.array([1.0])))
        [[ True False]]
    """
    up, down = _sides(advantages)
    is_near = binary_kl(logprobs, behavior_logprobs) <= delta
    return (up & (is_near | (logprobs <= behavior_logprobs))) | (down & (is_near | (logprobs >= behavior_logprobs)))


@requires(
    highest_low=AtLeast("low"),
    highest_high=AtLeast("high"),
    step_low=ABOVE_0,
    step_high=ABOVE_0,
    positive_share=FROM_0_TO_1,
)
def balanced_mask(
    scored_log_ratio: Float[Array, "batch time"],
    advantages: Float[Array, "batch *rest"],
    completion_mask: Bool[Array, "batch time"],
    *,
    low: Scalar = 0.6,
    highest_low: Scalar = 0.9,
    high: Scalar = 1.2,
    highest_high: Scalar = 3.0,
    step_low: Scalar = 0.02,
    step_high: Scalar = 0.05,
    positive_share: Scalar = 0.5,
) -> Bool[Array, "batch time"]:
    """`one_side_mask` with bounds that rise until tokens with A > 0 reach a share of the batch's policy gradient.

    The share is Σ_{A>0} ρA over Σ ρ|A|, over tokens inside the bounds. The upper bound rises first, to its highest
    value, then the lower bound. If the share is never reached, both bounds end at their highest values.

    Args:
        scored_log_ratio: log ρ of each token of the whole batch.
        advantages: advantages of the whole batch.
        completion_mask: mask of the tokens that count.
        low: initial lower bound of the ratio, for A < 0.
        highest_low: highest lower bound, at least `low`.
        high: initial upper bound of the ratio, for A > 0.
        highest_high: highest upper bound, at least `high`.
        step_low: step of the lower bound, above 0.
        step_high: step of the upper bound, above 0.
        positive_share: share to reach, from 0 to 1.
    Raises:
        ValueError: a highest bound below the initial one, a step not above 0, or a share out of range.
    Reference: arXiv 2510.18927 (BAPO).

    Examples:
        >>> log_ratio = jnp.log(jnp.array([[1.0, 2.0], [1.0, 0.8]]))
        >>> mask = jnp.array([[True, True], [True, True]])
        >>> advantages = jnp.array([1.0, -1.0])
        >>> print(one_side_mask(jnp.exp(log_ratio), advantages))
        [[ True False]
         [ True  True]]
        >>> print(balanced_mask(log_ratio, advantages, mask))
        [[ True  True]
         [ True  True]]
    """
    ratio = bounded_exp(scored_log_ratio)
    sign = per_token(advantages)
    size = jnp.where(completion_mask, ratio * jnp.abs(sign), 0.0)
    # Slightly below the quotients, because rounding may put them just above a whole number.
    quotients = (highest_high - high) / step_high, (highest_low - low) / step_low
    high_steps, low_steps = (jnp.ceil(x * (1 - 1e-6)).astype(int) for x in quotients)

    def bounds(step):
        upper = jnp.minimum(high + jnp.minimum(step, high_steps) * step_high, highest_high)
        return jnp.minimum(low + jnp.maximum(step - high_steps, 0) * step_low, highest_low), upper

    def needs_another_step(step):
        lower, upper = bounds(step)
        positive = jnp.sum(jnp.where((sign > 0) & (ratio <= upper), size, 0.0))
        negative = jnp.sum(jnp.where((sign < 0) & (ratio >= lower), size, 0.0))
        return (step < high_steps + low_steps) & (positive < positive_share * (positive + negative))

    lower, upper = bounds(jax.lax.while_loop(needs_another_step, lambda step: step + 1, jnp.int32(0)))
    up, down = _sides(advantages)
    return (up & (ratio <= upper)) | (down & (ratio >= lower))
