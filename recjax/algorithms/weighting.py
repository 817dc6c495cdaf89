"""Row weights and selections, from the whole batch. The loss treats them as constants."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from recjax.algorithms.advantages import deviations
from recjax.algorithms.groups import group_index, group_minima, group_sums
from recjax.algorithms.options import ABOVE_0, AtLeast, Scalar, requires

# e^20 ≈ 5e8: no useful weight is larger, and a product of two such weights does not overflow float32.
MAX_EXPONENT = 20.0
# Halves log(ceiling/floor) to below float32's resolution.
BISECTIONS = 40


def _kept_like(kept, advantages):
    """`kept`, reshaped to broadcast with advantages of completions or tokens."""
    return kept.reshape(kept.shape + (1,) * (advantages.ndim - 1))


def _exp_weights(advantages, kept, temperature):
    kept = _kept_like(kept, advantages)
    exponent = jnp.where(kept, advantages, 0.0) / temperature
    return jnp.where(kept, jnp.exp(jnp.clip(exponent, -MAX_EXPONENT, MAX_EXPONENT)), 0.0)


@requires(temperature=ABOVE_0)
def exp_advantage_weights(
    advantages: Float[Array, "batch *rest"], kept: Bool[Array, " batch"], *, temperature: Scalar = 1.0
) -> Float[Array, "batch *rest"]:
    """Weights that grow with the advantage.

    w_i = exp(A_i / τ), the exponent clipped to ±MAX_EXPONENT.

    Args:
        advantages: advantage of each completion or token; ignored where not kept.
        kept: mask of the rows that count; other rows get 0.
        temperature: temperature τ, in units of advantage, above 0.
    Raises:
        ValueError: τ is not above 0.
    Reference: arXiv 2509.24203 §2 (RED-Weight).

    Examples:
        >>> weights = exp_advantage_weights(jnp.array([0.5, -0.5]), jnp.array([True, True]))
        >>> [round(x, 3) for x in weights.tolist()]
        [1.649, 0.607]
    """
    return _exp_weights(advantages, kept, temperature)


@requires(floor=ABOVE_0, ceiling=AtLeast("floor"))
def bisected_temperature(
    advantages: Float[Array, "batch *rest"], kept: Bool[Array, " batch"], *, floor: Scalar, ceiling: Scalar
) -> Float[Array, ""]:
    """Temperature τ at which the batch's exponentially weighted advantages sum to zero.

    f(τ) = Σ_i A_i exp(A_i / τ) = 0.  f falls strictly, from +∞ (if any A > 0) to Σ A as τ → ∞, so that a root exists
    only if Σ A < 0 < max A. Without a root in range, the result is the nearer end. It is the ceiling if f(ceiling) > 0,
    as for group-centered advantages (Σ A = 0), and the floor if f(floor) ≤ 0, as for advantages that are all 0.

    Args:
        advantages: advantage of each completion or token; ignored where not kept.
        kept: mask of the rows that count.
        floor: lowest τ, in units of advantage, above 0.
        ceiling: highest τ, at least the floor.
    Raises:
        ValueError: floor not above 0, or ceiling below it.
    Reference: arXiv 2509.24203 §2 (RED-Weight) for the weights; for the bisection arXiv 2606.20002 (CoD), by the same
        authors, whose sum is over tokens, and whose weights are 1 if Σ A ≥ 0.

    Examples:
        >>> advantages, kept = jnp.array([1.0, -0.5, -0.8]), jnp.array([True, True, True])
        >>> round(float(bisected_temperature(advantages, kept, floor=0.8, ceiling=100.0)), 2)
        6.41
    """
    advantages = jnp.where(_kept_like(kept, advantages), advantages, 0.0)
    highest = jnp.max(advantages)

    def still_positive(log_temperature):
        # Only the sign matters: a factor exp(−max A / τ) keeps every exponent at or below 0.
        scaled = advantages * jnp.exp((advantages - highest) / jnp.exp(log_temperature))
        return jnp.sum(scaled) > 0

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) / 2
        root_above = still_positive(middle)
        return jnp.where(root_above, middle, low), jnp.where(root_above, high, middle)

    ends = tuple(jnp.log(jnp.asarray(end, advantages.dtype)) for end in (floor, ceiling))
    root = jnp.exp(sum(jax.lax.fori_loop(0, BISECTIONS, halve, ends)) / 2)
    return jnp.where(still_positive(ends[0]), jnp.where(still_positive(ends[1]), ceiling, root), floor)


@requires(floor=ABOVE_0, ceiling=AtLeast("floor"))
def bisected_exp_advantage_weights(
    advantages: Float[Array, "batch *rest"],
    kept: Bool[Array, " batch"],
    *,
    floor: Scalar = 0.8,
    ceiling: Scalar = 100.0,
) -> Float[Array, "batch *rest"]:
    """Weights that grow with the advantage, at the τ at which the batch's weighted advantages sum to zero.

    w_i = exp(A_i / τ),  τ = `bisected_temperature`; the exponent is clipped to ±MAX_EXPONENT.

    Args:
        advantages: advantages of the whole batch; ignored where not kept.
        kept: mask of the rows that count; other rows get 0.
        floor: lowest τ, in units of advantage, above 0.
        ceiling: highest τ, at least the floor; group-centered advantages get this τ.
    Raises:
        ValueError: floor not above 0, or ceiling below it.
    Reference: see `bisected_temperature`.

    Examples:
        >>> advantages, kept = jnp.array([1.0, -0.5, -0.8]), jnp.array([True, True, True])
        >>> weights = bisected_exp_advantage_weights(advantages, kept)
        >>> round(abs(float((weights * advantages).sum())), 3)
        0.0
    """
    return _exp_weights(advantages, kept, bisected_temperature(advantages, kept, floor=floor, ceiling=ceiling))


# Rewards within this share of the group's range around the mean count as equal to the mean: float32 means are rounded.
TIE = 1e-6


def drop_excess_negatives(
    rewards: Float[Array, " batch"], group_ids: Int[Array, " batch"], kept: Bool[Array, " batch"], key: PRNGKeyArray
) -> Bool[Array, " batch"]:
    """Drops random negatives of each group until the group has no more negatives than positives.

    Negatives have r < r̄, positives r ≥ r̄. A group of equal rewards has no negatives, and stays whole with advantages of
    zero.

    Args:
        rewards: reward of each row, in any unit; ignored where not kept.
        group_ids: id of each row's group; any integers in any order, groups of any size.
        kept: mask of the rows that count; other rows stay dropped.
        key: random key that picks the negatives to drop.
    Reference: arXiv 2509.24203 §2 (RED-Drop); ties as in Trinity-RFT, `advantage_fn/rec_advantage.py`.

    Examples:
        >>> rewards, group_ids = jnp.array([3.0, 0.0, 0.0]), jnp.array([7, 7, 7])
        >>> kept = jnp.array([True, True, True])
        >>> left = drop_excess_negatives(rewards, group_ids, kept, jax.random.key(0))
        >>> print(left[0], left.sum())
        True 2
    """
    index = group_index(group_ids)
    centered = deviations(rewards, index, kept)
    spread = -group_minima(-centered, index) - group_minima(centered, index)
    negative = centered < -TIE * spread
    positives = group_sums((kept & ~negative).astype(rewards.dtype), index)
    # Sorted by group, with negatives first in random order: a negative's rank in its group is random.
    order = jnp.lexsort((jax.random.uniform(key, rewards.shape), ~negative, index))
    rank = jnp.argsort(order)
    first = jax.ops.segment_min(rank, index, num_segments=index.shape[0])[index]
    return kept & (~negative | (rank - first < positives))
