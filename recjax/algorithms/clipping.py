"""Clip masks: the tokens whose policy-gradient term counts, by ratio and sign of the advantage."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from recjax.algorithms.options import require


def _require_range(epsilon_low: float, epsilon_high: float) -> None:
    for name, value in (("epsilon_low", epsilon_low), ("epsilon_high", epsilon_high)):
        require(value >= 0, name, value, "must be 0 or more")


def no_clip(ratio: Float[Array, "batch time"], advantages: Float[Array, " batch"]) -> Bool[Array, "batch time"]:
    """True everywhere."""
    del advantages
    return jnp.ones(ratio.shape, bool)


def one_side_mask(
    ratio: Float[Array, "batch time"],
    advantages: Float[Array, " batch"],
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
    """
    _require_range(epsilon_low, epsilon_high)
    up, down = advantages[:, None] >= 0, advantages[:, None] <= 0
    return (up & (ratio <= 1 + epsilon_high)) | (down & (ratio >= 1 - epsilon_low))


def two_side_mask(
    ratio: Float[Array, "batch time"],
    advantages: Float[Array, " batch"],
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
    """
    del advantages
    _require_range(epsilon_low, epsilon_high)
    return (ratio >= 1 - epsilon_low) & (ratio <= 1 + epsilon_high)


def ring_mask(
    ratio: Float[Array, "batch time"],
    advantages: Float[Array, " batch"],
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
    """
    require(outer_low >= epsilon_low, "outer_low", outer_low, f"must be at least epsilon_low = {epsilon_low}")
    require(outer_high >= epsilon_high, "outer_high", outer_high, f"must be at least epsilon_high = {epsilon_high}")
    up, down = advantages[:, None] >= 0, advantages[:, None] <= 0
    inside = two_side_mask(ratio, advantages, epsilon_low=epsilon_low, epsilon_high=epsilon_high)
    return inside | (up & (ratio <= 1 - outer_low)) | (down & (ratio >= 1 + outer_high))
