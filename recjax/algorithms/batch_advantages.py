"""Advantages that read more than a group's rewards: the whole batch, lengths, parts of the reward, times of tokens."""

from collections.abc import Mapping
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from recjax.algorithms.advantages import deviations
from recjax.algorithms.groups import group_index, group_minima, group_sizes, group_sums
from recjax.algorithms.options import require


def _mean_and_deviation(values, weights, ddof=0):
    """Weighted mean and standard deviation of all values; of none, 0."""
    total = jnp.sum(weights)
    mean = jnp.sum(weights * values) / jnp.maximum(total, 1.0)
    return mean, jnp.sqrt(jnp.sum(weights * jnp.square(values - mean)) / jnp.maximum(total - ddof, 1.0))


def _whitened(values, kept, lengths, over, ddof, epsilon):
    """Values of kept rows with mean 0 and deviation 1 over completions, or over their tokens."""
    weights = kept.astype(values.dtype) * (lengths if over == "tokens" else 1)
    mean, deviation = _mean_and_deviation(jnp.where(kept, values, 0.0), weights, ddof)
    return jnp.where(kept, (values - mean) / (deviation + epsilon), 0.0)


def _normalized(values, kept, index, ddof, epsilon):
    """Group-centered values over the group's standard deviation."""
    centered = deviations(values, index, kept)
    variance = group_sums(jnp.square(centered), index) / jnp.maximum(group_sizes(index, kept) - ddof, 1.0)
    return centered / (jnp.sqrt(variance) + epsilon)


def _require_epsilon(epsilon: float) -> None:
    require(epsilon > 0, "epsilon", epsilon, "must be above 0, or equal rewards divide by zero")


def no_advantages(rewards: Float[Array, " batch"]) -> Float[Array, " batch"]:
    """0 for every completion, where something else than the reward teaches.

    Examples:
        >>> print(no_advantages(jnp.array([1.0, 0.0])))
        [0. 0.]
    """
    return jnp.zeros_like(rewards)


def batch_whitened_advantages(
    rewards: Float[Array, " batch"],
    group_ids: Int[Array, " batch"],
    kept: Bool[Array, " batch"],
    lengths: Int[Array, " batch"],
    *,
    baseline: Literal["none", "group"] = "group",
    over: Literal["completions", "tokens"] = "completions",
    ddof: Literal[0, 1] = 0,
    epsilon: float = 1e-6,
) -> Float[Array, " batch"]:
    """Rewards, or rewards over their group's mean, brought to mean 0 and deviation 1 over the batch.

    A_i = (a_i − ā) / (σ_a + ε),  a = r or r − r̄; mean and standard deviation over all kept rows.

    Args:
        rewards: any unit; ignored where not kept.
        group_ids: any integers, any group sizes, any order; not read with baseline "none".
        kept: rows that count; the others get 0.
        lengths: in tokens; read with over "tokens" alone.
        baseline: what is taken off a reward first.
        over: what mean and deviation are over; with "tokens" a completion counts as often as it has tokens.
        ddof: taken off the number that the deviation's mean divides by; 1 in verl's code.
        epsilon: in units of reward, above 0.
    Raises:
        ValueError: epsilon not above 0.
    Reference: arXiv 2501.03262 (REINFORCE++ and, with the group's baseline, REINFORCE++-baseline).

    Examples:
        >>> rewards, group_ids = jnp.array([1.0, 0.0, 0.0, 0.0]), jnp.array([0, 0, 1, 1])
        >>> kept = jnp.array([True, True, True, True])
        >>> lengths = jnp.array([3, 3, 3, 3])
        >>> advantages = batch_whitened_advantages(rewards, group_ids, kept, lengths)
        >>> [round(x, 3) for x in advantages.tolist()]
        [1.414, -1.414, 0.0, 0.0]
    """
    _require_epsilon(epsilon)
    values = jnp.where(kept, rewards, 0.0)
    if baseline == "group":
        values = deviations(rewards, group_index(group_ids), kept)
    return _whitened(values, kept, lengths, over, ddof, epsilon)


def batch_deviation_advantages(
    rewards: Float[Array, " batch"],
    group_ids: Int[Array, " batch"],
    kept: Bool[Array, " batch"],
    *,
    epsilon: float = 1e-6,
) -> Float[Array, " batch"]:
    """The reward over its group's mean, in standard deviations of all rewards of the batch.

    A_i = (r_i − r̄) / (σ_batch(r) + ε), ddof 0.

    Args:
        rewards: any unit; ignored where not kept.
        group_ids: any integers, any group sizes, any order.
        kept: rows that count; the others get 0.
        epsilon: in units of reward, above 0.
    Raises:
        ValueError: epsilon not above 0.
    Reference: arXiv 2508.08221 (LitePPO).

    Examples:
        >>> rewards, group_ids = jnp.array([1.0, 0.0, 0.0, 0.0]), jnp.array([0, 0, 1, 1])
        >>> kept = jnp.array([True, True, True, True])
        >>> advantages = batch_deviation_advantages(rewards, group_ids, kept)
        >>> [round(x, 3) for x in advantages.tolist()]
        [1.155, -1.155, 0.0, 0.0]
    """
    _require_epsilon(epsilon)
    _, deviation = _mean_and_deviation(jnp.where(kept, rewards, 0.0), kept.astype(rewards.dtype))
    return deviations(rewards, group_index(group_ids), kept) / (deviation + epsilon)


def length_weighted_advantages(
    rewards: Float[Array, " batch"],
    group_ids: Int[Array, " batch"],
    kept: Bool[Array, " batch"],
    lengths: Int[Array, " batch"],
) -> Float[Array, " batch"]:
    """The reward over the group's mean per token, the baseline of least variance where gradients grow with length.

    A_i = r_i − Σ_j L_j r_j / Σ_j L_j.

    Args:
        rewards: any unit; ignored where not kept.
        group_ids: any integers, any group sizes, any order.
        kept: rows that count; the others get 0 and no part in the mean.
        lengths: L, in tokens.
    Reference: arXiv 2505.23585 (OPO).

    Examples:
        >>> rewards, group_ids = jnp.array([3.0, 0.0, 0.0]), jnp.array([7, 7, 7])
        >>> kept = jnp.array([True, True, True])
        >>> print(length_weighted_advantages(rewards, group_ids, kept, jnp.array([2, 1, 1])))
        [ 1.5 -1.5 -1.5]
    """
    index = group_index(group_ids)
    # From the group's least reward on, equal rewards are all 0, free of rounding.
    above = rewards - group_minima(jnp.where(kept, rewards, jnp.inf), index)
    above, weights = jnp.where(kept, above, 0.0), jnp.where(kept, lengths, 0).astype(rewards.dtype)
    means = group_sums(weights * above, index) / jnp.maximum(group_sums(weights, index), 1.0)
    return jnp.where(kept, above - means, 0.0)


def mean_relative_advantages(
    rewards: Float[Array, " batch"], group_ids: Int[Array, " batch"], kept: Bool[Array, " batch"]
) -> Float[Array, " batch"]:
    """The reward over the group's mean, relative to that mean: the rarer success is, the more it weighs.

    A_i = (r_i − r̄) / r̄;  0 in groups whose mean is not above 0.

    Args:
        rewards: 0 or more, as of 0 and 1; ignored where not kept.
        group_ids: any integers, any group sizes, any order.
        kept: rows that count; the others get 0 and no part in the mean.
    Reference: arXiv 2602.02710 (MaxRL).

    Examples:
        >>> rewards, group_ids = jnp.array([3.0, 0.0, 0.0]), jnp.array([7, 7, 7])
        >>> kept = jnp.array([True, True, True])
        >>> print(mean_relative_advantages(rewards, group_ids, kept))
        [ 2. -1. -1.]
    """
    index = group_index(group_ids)
    means = group_sums(jnp.where(kept, rewards, 0.0), index) / jnp.maximum(group_sizes(index, kept), 1.0)
    return jnp.where(means > 0, deviations(rewards, index, kept) / jnp.where(means > 0, means, 1.0), 0.0)


def signal_scaled_advantages(
    rewards: Float[Array, " batch"], group_ids: Int[Array, " batch"], kept: Bool[Array, " batch"]
) -> Float[Array, " batch"]:
    """The reward over the group's mean, scaled up for the groups that teach nothing.

    A_i = (r_i − r̄) · G / G₊,  G groups in the batch, G₊ of them with different rewards.

    Args:
        rewards: any unit; ignored where not kept.
        group_ids: any integers, any group sizes, any order.
        kept: rows that count; the others get 0 and no part in the mean.
    Reference: arXiv 2504.02546 (GPG).

    Examples:
        >>> rewards, group_ids = jnp.array([1.0, 0.0, 0.0, 0.0]), jnp.array([0, 0, 1, 1])
        >>> kept = jnp.array([True, True, True, True])
        >>> print(signal_scaled_advantages(rewards, group_ids, kept))
        [ 1. -1.  0.  0.]
    """
    index = group_index(group_ids)
    centered = deviations(rewards, index, kept)
    # Each kept row has its share of its group, so that groups are counted.
    shares = jnp.where(kept, 1.0 / jnp.maximum(group_sizes(index, kept), 1.0), 0.0)
    teaches = group_sums(jnp.abs(centered), index) > 0
    return centered * jnp.sum(shares) / jnp.maximum(jnp.sum(jnp.where(teaches, shares, 0.0)), 1.0)


def part_normalized_advantages(
    reward_parts: Mapping[str, Float[Array, " batch"]],
    part_weights: Mapping[str, Float[Array, " batch"]],
    group_ids: Int[Array, " batch"],
    kept: Bool[Array, " batch"],
    lengths: Int[Array, " batch"],
    *,
    over: Literal["completions", "tokens"] = "completions",
    ddof: Literal[0, 1] = 0,
    epsilon: float = 1e-6,
) -> Float[Array, " batch"]:
    """Each part of the reward in deviations of its own group, added up by weight, then whitened over the batch.

    a_i = Σ_p w_p (r_p,i − r̄_p) / (σ_p + ε);  A_i = (a_i − ā) / (σ_a + ε), over the kept rows of the batch.

    Args:
        reward_parts: values by part, not weighted; NaN in rows without it, which then is 0 there.
        part_weights: by part, in the reward.
        group_ids: any integers, any group sizes, any order.
        kept: rows that count; the others get 0.
        lengths: in tokens; read with over "tokens" only.
        over: what ā and σ_a are over; with "tokens" a completion counts as often as it has tokens.
        ddof: taken off the numbers that σ_p and σ_a divide by; both options are "tokens" and 1 in the authors' code.
        epsilon: in units of a part, and of a, above 0.
    Raises:
        ValueError: epsilon not above 0, or no parts.
    Reference: arXiv 2601.05242 (GDPO).

    Examples:
        >>> parts = {"right": jnp.array([1.0, 0.0]), "form": jnp.array([0.1, 0.0])}
        >>> weights = {"right": jnp.array([1.0, 1.0]), "form": jnp.array([0.5, 0.5])}
        >>> kept, lengths = jnp.array([True, True]), jnp.array([3, 3])
        >>> advantages = part_normalized_advantages(parts, weights, jnp.array([0, 0]), kept, lengths)
        >>> [round(x, 3) for x in advantages.tolist()]
        [1.0, -1.0]
    """
    _require_epsilon(epsilon)
    require(bool(reward_parts), "reward_parts", dict(reward_parts), "the reward has no parts to normalize one by one")
    index = group_index(group_ids)
    total = jnp.zeros(kept.shape)
    for part, values in reward_parts.items():
        there = kept & jnp.isfinite(values)
        total += part_weights[part] * _normalized(jnp.where(there, values, 0.0), there, index, ddof, epsilon)
    return _whitened(total, kept, lengths, over, ddof, epsilon)


def log_mean_exp_advantages(
    rewards: Float[Array, " batch"],
    group_ids: Int[Array, " batch"],
    kept: Bool[Array, " batch"],
    *,
    beta: float = 1.0,
) -> Float[Array, " batch"]:
    """The reward over the soft maximum of its group, the value of the KL-regularized optimum.

    A_i = r_i − β log((1/K) Σ_j exp(r_j / β)).

    Args:
        rewards: any unit; ignored where not kept.
        group_ids: any integers, any group sizes, any order.
        kept: rows that count; the others get 0 and no part in the mean.
        beta: in units of reward, above 0.
    Raises:
        ValueError: β not above 0.
    Reference: arXiv 2505.20686 (A*-PO); arXiv 2602.19362 (OAPL).

    Examples:
        >>> rewards, group_ids = jnp.array([3.0, 0.0, 0.0]), jnp.array([7, 7, 7])
        >>> kept = jnp.array([True, True, True])
        >>> advantages = log_mean_exp_advantages(rewards, group_ids, kept)
        >>> [round(x, 3) for x in advantages.tolist()]
        [1.004, -1.996, -1.996]
    """
    require(beta > 0, "beta", beta, "must be above 0")
    index = group_index(group_ids)
    # Down from the group's highest reward, so that no exponent is above 0.
    highest = -group_minima(jnp.where(kept, -rewards, jnp.inf), index)
    below = jnp.where(kept, rewards - highest, 0.0)
    exponentials = jnp.where(kept, jnp.exp(below / beta), 0.0)
    means = group_sums(exponentials, index) / jnp.maximum(group_sizes(index, kept), 1.0)
    return jnp.where(kept, below - beta * jnp.log(jnp.where(kept, means, 1.0)), 0.0)


def discounted_advantages(
    rewards: Float[Array, " batch"],
    group_ids: Int[Array, " batch"],
    kept: Bool[Array, " batch"],
    completion_mask: Bool[Array, "batch time"],
    *,
    discount: float = 0.99,
) -> Float[Array, "batch time"]:
    """The reward over the group's mean, discounted from the completion's last token back.

    A_i,t = γ^(L_i − t) (r_i − r̄),  t from 1 to L_i.

    Args:
        rewards: of whole completions; ignored where not kept.
        group_ids: any integers, any group sizes, any order.
        kept: rows that count; the others get 0.
        completion_mask: True at tokens that count.
        discount: γ, above 0, at most 1.
    Raises:
        ValueError: γ out of its range.

    Examples:
        >>> rewards, group_ids, kept = jnp.array([1.0, 0.0]), jnp.array([0, 0]), jnp.array([True, True])
        >>> mask = jnp.array([[True, True], [True, False]])
        >>> print(discounted_advantages(rewards, group_ids, kept, mask, discount=0.5))
        [[ 0.25  0.5 ]
         [-0.5   0.  ]]
    """
    require(0 < discount <= 1, "discount", discount, "must be above 0 and at most 1")
    counts = completion_mask.astype(rewards.dtype)
    to_come = jnp.sum(counts, axis=-1, keepdims=True) - jnp.cumsum(counts, axis=-1)
    centered = deviations(rewards, group_index(group_ids), kept)[:, None]
    return jnp.where(completion_mask & kept[:, None], discount**to_come * centered, 0.0)
