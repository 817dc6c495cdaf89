"""Clip masks: the tokens whose policy-gradient term counts, by ratio or probability and sign of the advantage."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from recjax.algorithms.options import require
from recjax.algorithms.ratios import bounded_exp, per_token


def _require_range(epsilon_low: float, epsilon_high: float) -> None:
    for name, value in (("epsilon_low", epsilon_low), ("epsilon_high", epsilon_high)):
        require(value >= 0, name, value, "must be 0 or more")


def no_clip(completion_mask: Bool[Array, "batch time"]) -> Bool[Array, "batch time"]:
    """True everywhere.

    Examples:
        >>> print(no_clip(jnp.array([[True, False]])))
        [[ True  True]]
    """
    return jnp.ones_like(completion_mask)


def _sides(advantages):
    """Whether the advantage pushes up, and whether down; of 0 both are True."""
    return per_token(advantages) >= 0, per_token(advantages) <= 0


def one_side_mask(
    ratio: Float[Array, "batch time"],
    advantages: Float[Array, "batch *rest"],
    *,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
) -> Bool[Array, "batch time"]:
    """False where the ratio has already gone beyond the range in the direction that the advantage pushes.

    M = (A ≥ 0 and ρ ≤ 1+ε_high) or (A ≤ 0 and ρ ≥ 1−ε_low).  With importance weights, the gradient is that of PPO's
    clipped objective.

    Args:
        ratio: ρ = π/μ of each token.
        advantages: only the sign is read.
        epsilon_low: how far the ratio may fall below 1 and still be pushed down, 0 or more.
        epsilon_high: how far the ratio may rise above 1 and still be pushed up, 0 or more.
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
    _require_range(epsilon_low, epsilon_high)
    up, down = _sides(advantages)
    return (up & (ratio <= 1 + epsilon_high)) | (down & (ratio >= 1 - epsilon_low))


def two_side_mask(
    ratio: Float[Array, "batch time"],
    advantages: Float[Array, "batch *rest"],
    *,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
) -> Bool[Array, "batch time"]:
    """True inside the range, whatever the advantage.

    M = 1−ε_low ≤ ρ ≤ 1+ε_high.

    Args:
        ratio: ρ = π/μ of each token.
        advantages: ignored.
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
    _require_range(epsilon_low, epsilon_high)
    return (ratio >= 1 - epsilon_low) & (ratio <= 1 + epsilon_high)


def ring_mask(
    ratio: Float[Array, "batch time"],
    advantages: Float[Array, "batch *rest"],
    *,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    outer_low: float = 0.6,
    outer_high: float = 2.0,
) -> Bool[Array, "batch time"]:
    """True inside the range, and far outside it where the advantage pushes back towards it.

    M = (1−ε_low ≤ ρ ≤ 1+ε_high) or (A ≥ 0 and ρ ≤ 1−ε'_low) or (A ≤ 0 and ρ ≥ 1+ε'_high).

    Args:
        ratio: ρ = π/μ of each token.
        advantages: only the sign is read.
        epsilon_low: width of the range below 1, 0 or more.
        epsilon_high: width of the range above 1, 0 or more.
        outer_low: ε'_low, at least epsilon_low.
        outer_high: ε'_high, at least epsilon_high.
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
    require(outer_low >= epsilon_low, "outer_low", outer_low, f"must be at least epsilon_low = {epsilon_low}")
    require(outer_high >= epsilon_high, "outer_high", outer_high, f"must be at least epsilon_high = {epsilon_high}")
    up, down = _sides(advantages)
    inside = two_side_mask(ratio, advantages, epsilon_low=epsilon_low, epsilon_high=epsilon_high)
    return inside | (up & (ratio <= 1 - outer_low)) | (down & (ratio >= 1 + outer_high))


def dual_clip_mask(
    ratio: Float[Array, "batch time"],
    advantages: Float[Array, "batch *rest"],
    *,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    bound: float = 3.0,
) -> Bool[Array, "batch time"]:
    """`one_side_mask`, and False as well where A < 0 and the ratio is above a bound.

    Args:
        ratio: ρ of each token.
        advantages: only the sign is read.
        epsilon_low: as of `one_side_mask`.
        epsilon_high: as of `one_side_mask`.
        bound: c, at least 1.
    Raises:
        ValueError: a negative range, or a bound below 1.
    Reference: arXiv 1912.09729 (dual-clip PPO).

    Examples:
        >>> ratio = jnp.array([[1.0, 2.0, 4.0]])
        >>> print(dual_clip_mask(ratio, jnp.array([-1.0])))
        [[ True  True False]]
    """
    require(bound >= 1, "bound", bound, "must be 1 or more")
    kept = one_side_mask(ratio, advantages, epsilon_low=epsilon_low, epsilon_high=epsilon_high)
    return kept & ((per_token(advantages) >= 0) | (ratio <= bound))


def log_one_side_mask(
    log_ratio: Float[Array, "batch time"],
    advantages: Float[Array, "batch *rest"],
    *,
    epsilon_low: float = 0.4,
    epsilon_high: float = 0.4,
) -> Bool[Array, "batch time"]:
    """`one_side_mask` of each token's own log-ratio, at whatever level the weights are.

    M = (A ≥ 0 and log ρ_t ≤ ε_high) or (A ≤ 0 and log ρ_t ≥ −ε_low).

    Args:
        log_ratio: log ρ of each token.
        advantages: only the sign is read.
        epsilon_low: in units of log ρ, 0 or more.
        epsilon_high: in units of log ρ, 0 or more.
    Raises:
        ValueError: a negative range.
    Reference: arXiv 2507.20673 (GMPO).

    Examples:
        >>> log_ratio = jnp.array([[-0.5, 0.0, 0.5]])
        >>> print(log_one_side_mask(log_ratio, jnp.array([1.0])))
        [[ True  True False]]
    """
    _require_range(epsilon_low, epsilon_high)
    up, down = _sides(advantages)
    return (up & (log_ratio <= epsilon_high)) | (down & (log_ratio >= -epsilon_low))


def probability_difference_mask(
    logprobs: Float[Array, "batch time"],
    behavior_logprobs: Float[Array, "batch time"],
    advantages: Float[Array, "batch *rest"],
    *,
    delta: float = 0.2,
) -> Bool[Array, "batch time"]:
    """False where the token's probability has already moved by more than δ in the direction of the advantage.

    M = (A ≥ 0 and π − μ ≤ δ) or (A ≤ 0 and π − μ ≥ −δ): rare tokens, whose ratio moves easily, stay.

    Args:
        logprobs: log π of each token.
        behavior_logprobs: log μ of each token.
        advantages: only the sign is read.
        delta: a difference of probabilities, 0 or more.
    Raises:
        ValueError: a negative δ.
    Reference: arXiv 2602.04879 (DPPO, total variation).

    Examples:
        >>> before, now = jnp.log(jnp.array([[0.01, 0.5]])), jnp.log(jnp.array([[0.05, 0.9]]))
        >>> print(probability_difference_mask(now, before, jnp.array([1.0])))
        [[ True False]]
    """
    require(delta >= 0, "delta", delta, "must be 0 or more")
    up, down = _sides(advantages)
    moved = jnp.exp(logprobs) - jnp.exp(behavior_logprobs)
    return (up & (moved <= delta)) | (down & (moved >= -delta))


def binary_kl_mask(
    logprobs: Float[Array, "batch time"],
    behavior_logprobs: Float[Array, "batch time"],
    advantages: Float[Array, "batch *rest"],
    *,
    delta: float = 0.05,
) -> Bool[Array, "batch time"]:
    """False where the token has moved in the direction of the advantage by more than δ of KL(μ ‖ π).

    The KL is of "this token or another": μ log(μ/π) + (1−μ) log((1−μ)/(1−π)), in nats.

    Args:
        logprobs: log π of each token.
        behavior_logprobs: log μ of each token.
        advantages: only the sign is read.
        delta: in nats, 0 or more.
    Raises:
        ValueError: a negative δ.
    Reference: arXiv 2602.04879 (DPPO, KL).

    Examples:
        >>> before, now = jnp.log(jnp.array([[0.01, 0.5]])), jnp.log(jnp.array([[0.05, 0.9]]))
        >>> print(binary_kl_mask(now, before, jnp.array([1.0])))
        [[ True False]]
    """
    require(delta >= 0, "delta", delta, "must be 0 or more")
    up, down = _sides(advantages)
    # A certain token leaves nothing for the others; the least float32 stands for that.
    tiny = jnp.finfo(logprobs.dtype).tiny
    others, others_before = (jnp.log(jnp.maximum(-jnp.expm1(x), tiny)) for x in (logprobs, behavior_logprobs))
    before = jnp.exp(behavior_logprobs)
    kl = before * (behavior_logprobs - logprobs) + (1 - before) * (others_before - others)
    near = kl <= delta
    return (up & (near | (logprobs <= behavior_logprobs))) | (down & (near | (logprobs >= behavior_logprobs)))


def balanced_mask(
    scored_log_ratio: Float[Array, "batch time"],
    advantages: Float[Array, "batch *rest"],
    completion_mask: Bool[Array, "batch time"],
    *,
    low: float = 0.6,
    highest_low: float = 0.9,
    high: float = 1.2,
    highest_high: float = 3.0,
    step_low: float = 0.02,
    step_high: float = 0.05,
    positive_share: float = 0.5,
) -> Bool[Array, "batch time"]:
    """`one_side_mask` with bounds that rise until tokens with A > 0 have their share of the batch's policy gradient.

    The share is Σ_{A>0} ρA over Σ ρ|A|, of tokens inside the bounds. The upper bound rises first, to its highest; then
    the lower one does. Where neither helps both are at their highest.

    Args:
        scored_log_ratio: log ρ of each token of the whole batch.
        advantages: of the whole batch.
        completion_mask: True at tokens that count.
        low: of the ratio where A < 0, at first.
        highest_low: at least `low`.
        high: of the ratio where A > 0, at first.
        highest_high: at least `high`.
        step_low: by which the lower bound rises, above 0.
        step_high: by which the upper bound rises, above 0.
        positive_share: from 0 to 1.
    Raises:
        ValueError: a highest bound below the first one, a step not above 0, or a share outside of its range.
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
    require(highest_low >= low, "highest_low", highest_low, f"must be at least low = {low}")
    require(highest_high >= high, "highest_high", highest_high, f"must be at least high = {high}")
    require(step_low > 0, "step_low", step_low, "must be above 0")
    require(step_high > 0, "step_high", step_high, "must be above 0")
    require(0 <= positive_share <= 1, "positive_share", positive_share, "must be from 0 to 1")
    ratio, sign = bounded_exp(scored_log_ratio), per_token(advantages)
    size = jnp.where(completion_mask, ratio * jnp.abs(sign), 0.0)
    high_steps, low_steps = (round(x, 6) for x in ((highest_high - high) / step_high, (highest_low - low) / step_low))
    high_steps, low_steps = -int(-high_steps // 1), -int(-low_steps // 1)

    def bounds(step):
        upper = jnp.minimum(high + jnp.minimum(step, high_steps) * step_high, highest_high)
        return jnp.minimum(low + jnp.maximum(step - high_steps, 0) * step_low, highest_low), upper

    def too_few(step):
        lower, upper = bounds(step)
        positive = jnp.sum(jnp.where((sign > 0) & (ratio <= upper), size, 0.0))
        negative = jnp.sum(jnp.where((sign < 0) & (ratio >= lower), size, 0.0))
        return (step < high_steps + low_steps) & (positive < positive_share * (positive + negative))

    lower, upper = bounds(jax.lax.while_loop(too_few, lambda step: step + 1, jnp.int32(0)))
    up, down = _sides(advantages)
    return (up & (ratio <= upper)) | (down & (ratio >= lower))
