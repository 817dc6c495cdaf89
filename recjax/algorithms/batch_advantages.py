"""Advantages from more than a group's rewards: batch statistics, lengths, reward parts, token positions, turns."""

from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from recjax.algorithms.advantages import deviations
from recjax.algorithms.groups import first_rows, group_index, group_minima, group_sizes, group_sums, trajectory_sums
from recjax.algorithms.options import ABOVE_0, ABOVE_0_TO_1, AT_LEAST_0, Bounds, Scalar, require, requires
from recjax.algorithms.ratios import sequence_mean

_EPSILON = Bounds(ABOVE_0.accepts, "must be above 0, or equal rewards divide by zero")


def _batch_deviations(values, kept, weights=None):
    """`deviations` with all rows as one group, so that equal values give exactly 0."""
    return deviations(values, jnp.zeros(kept.shape, int), kept, weights)


def _standard_deviation(centered, weights, ddof=0):
    """Weighted root mean square of deviations from a mean; 0 if all weights are 0."""
    return jnp.sqrt(jnp.sum(weights * jnp.square(centered)) / jnp.maximum(jnp.sum(weights) - ddof, 1.0))


def _whitened(values, kept, lengths, *, over, ddof, epsilon):
    """Scales the values of kept rows to mean 0 and standard deviation 1, over completions or tokens."""
    weights = kept * 1
    if over == "tokens":
        weights = kept * lengths
    centered = _batch_deviations(values, kept, weights)
    return centered / (_standard_deviation(centered, weights, ddof) + epsilon)


def no_advantages(rewards: Float[Array, " batch"]) -> Float[Array, " batch"]:
    """0 for every completion, for training without rewards, such as distillation.

    Examples:
        >>> print(no_advantages(jnp.array([1.0, 0.0])))
        [0. 0.]
    """
    return jnp.zeros_like(rewards)


def batch_mean_advantages(rewards: Float[Array, " batch"], kept: Bool[Array, " batch"]) -> Float[Array, " batch"]:
    """Reward minus the mean reward of the whole batch; works with one completion a prompt.

    A_i = r_i − mean r.  The mean is over all kept rows; groups are ignored; 0 where not kept.

    Reference: FlashREINFORCE, https://github.com/OpenRLHF/OpenRLHF/pull/1339.

    Examples:
        >>> print(batch_mean_advantages(jnp.array([3.0, 0.0, 9.0]), jnp.array([True, True, False])))
        [ 1.5 -1.5  0. ]
    """
    return _batch_deviations(rewards, kept)


@requires(epsilon=_EPSILON)
def batch_whitened_advantages(
    rewards: Float[Array, " batch"],
    group_ids: Int[Array, " batch"],
    kept: Bool[Array, " batch"],
    lengths: Int[Array, " batch"],
    *,
    baseline: Literal["none", "group"] = "group",
    over: Literal["completions", "tokens"] = "completions",
    ddof: Literal[0, 1] = 0,
    epsilon: Scalar = 1e-6,
) -> Float[Array, " batch"]:
    """Rewards, raw or minus their group's mean, scaled to mean 0 and standard deviation 1 over the batch.

    A_i = (a_i − ā) / (σ_a + ε),  a = r or r − r̄; mean and standard deviation over all kept rows.

    Args:
        rewards: reward of each row, in any unit; ignored where not kept.
        group_ids: id of each row's group, any integers in any order; ignored with baseline "none".
        kept: mask of the rows that count; other rows get 0.
        lengths: number of tokens of each completion; read only with over "tokens".
        baseline: baseline to subtract from each reward first.
        over: unit of mean and deviation; with "tokens" each completion counts once per token.
        ddof: number subtracted from the divisor in σ_a; 1 in verl's code.
        epsilon: constant ε, in units of reward, above 0.
    Raises:
        ValueError: epsilon is not above 0.
    Reference: arXiv 2501.03262 (REINFORCE++ and, with the group's baseline, REINFORCE++-baseline).

    Examples:
        >>> rewards, group_ids = jnp.array([1.0, 0.0, 0.0, 0.0]), jnp.array([0, 0, 1, 1])
        >>> kept = jnp.array([True, True, True, True])
        >>> lengths = jnp.array([3, 3, 3, 3])
        >>> advantages = batch_whitened_advantages(rewards, group_ids, kept, lengths)
        >>> [round(x, 3) for x in advantages.tolist()]
        [1.414, -1.414, 0.0, 0.0]
    """
    values = jnp.where(kept, rewards, 0.0)
    if baseline == "group":
        values = deviations(rewards, group_index(group_ids), kept)
    return _whitened(values, kept, lengths, over=over, ddof=ddof, epsilon=epsilon)


@requires(epsilon=_EPSILON)
def batch_deviation_advantages(
    rewards: Float[Array, " batch"],
    group_ids: Int[Array, " batch"],
    kept: Bool[Array, " batch"],
    *,
    epsilon: Scalar = 1e-6,
) -> Float[Array, " batch"]:
    """Reward minus the group's mean, divided by the standard deviation of all rewards in the batch.

    A_i = (r_i − r̄) / (σ_batch(r) + ε), ddof 0.

    Args:
        rewards: reward of each row, in any unit; ignored where not kept.
        group_ids: id of each row's group; any integers in any order, groups of any size.
        kept: mask of the rows that count; other rows get 0.
        epsilon: constant ε, in units of reward, above 0.
    Raises:
        ValueError: epsilon is not above 0.
    Reference: arXiv 2508.08221 (LitePPO).

    Examples:
        >>> rewards, group_ids = jnp.array([1.0, 0.0, 0.0, 0.0]), jnp.array([0, 0, 1, 1])
        >>> kept = jnp.array([True, True, True, True])
        >>> advantages = batch_deviation_advantages(rewards, group_ids, kept)
        >>> [round(x, 3) for x in advantages.tolist()]
        [1.155, -1.155, 0.0, 0.0]
    """
    deviation = _standard_deviation(_batch_deviations(rewards, kept), kept)
    return deviations(rewards, group_index(group_ids), kept) / (deviation + epsilon)


def length_weighted_advantages(
    rewards: Float[Array, " batch"],
    group_ids: Int[Array, " batch"],
    kept: Bool[Array, " batch"],
    lengths: Int[Array, " batch"],
) -> Float[Array, " batch"]:
    """Reward minus the group's length-weighted mean: the lowest-variance baseline if gradients grow with length.

    A_i = r_i − Σ_j L_j r_j / Σ_j L_j.

    Args:
        rewards: reward of each row, in any unit; ignored where not kept.
        group_ids: id of each row's group; any integers in any order, groups of any size.
        kept: mask of the rows that count; other rows get 0 and do not enter the mean.
        lengths: number of tokens L of each completion.
    Reference: arXiv 2505.23585 (OPO).

    Examples:
        >>> rewards, group_ids = jnp.array([3.0, 0.0, 0.0]), jnp.array([7, 7, 7])
        >>> kept = jnp.array([True, True, True])
        >>> print(length_weighted_advantages(rewards, group_ids, kept, jnp.array([2, 1, 1])))
        [ 1.5 -1.5 -1.5]
    """
    return deviations(rewards, group_index(group_ids), kept, lengths)


def mean_relative_advantages(
    rewards: Float[Array, " batch"], group_ids: Int[Array, " batch"], kept: Bool[Array, " batch"]
) -> Float[Array, " batch"]:
    """Reward minus the group's mean, divided by that mean: the rarer success is, the more it weighs.

    A_i = (r_i − r̄) / r̄;  0 in groups whose mean is not above 0.

    Args:
        rewards: reward of each row, 0 or more (usually 0 and 1); ignored where not kept.
        group_ids: id of each row's group; any integers in any order, groups of any size.
        kept: mask of the rows that count; other rows get 0 and do not enter the mean.
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
    """Reward minus the group's mean, scaled up to make up for groups without signal (equal rewards).

    A_i = (r_i − r̄) · G / G₊,  for G groups in the batch, G₊ with different rewards.

    Args:
        rewards: reward of each row, in any unit; ignored where not kept.
        group_ids: id of each row's group; any integers in any order, groups of any size.
        kept: mask of the rows that count; other rows get 0 and do not enter the mean.
    Reference: arXiv 2504.02546 (GPG).

    Examples:
        >>> rewards, group_ids = jnp.array([1.0, 0.0, 0.0, 0.0]), jnp.array([0, 0, 1, 1])
        >>> kept = jnp.array([True, True, True, True])
        >>> print(signal_scaled_advantages(rewards, group_ids, kept))
        [ 1. -1.  0.  0.]
    """
    index = group_index(group_ids)
    centered = deviations(rewards, index, kept)
    # The shares of a group add up to 1, so that their sum counts groups.
    shares = jnp.where(kept, 1.0 / jnp.maximum(group_sizes(index, kept), 1.0), 0.0)
    teaches = group_sums(jnp.abs(centered), index) > 0
    return centered * jnp.sum(shares) / jnp.maximum(jnp.sum(jnp.where(teaches, shares, 0.0)), 1.0)


@requires(epsilon=_EPSILON)
def part_normalized_advantages(
    reward_parts: Mapping[str, Float[Array, " batch"]],
    part_weights: Mapping[str, Float[Array, " batch"]],
    group_ids: Int[Array, " batch"],
    kept: Bool[Array, " batch"],
    lengths: Int[Array, " batch"],
    *,
    over: Literal["completions", "tokens"] = "completions",
    ddof: Literal[0, 1] = 0,
    epsilon: Scalar = 1e-6,
) -> Float[Array, " batch"]:
    """Weighted sum of reward parts, each normalized within its group; the sum is then whitened over the batch.

    a_i = Σ_p w_p (r_p,i − r̄_p) / (σ_p + ε);  A_i = (a_i − ā) / (σ_a + ε), over the kept rows of the batch.

    Args:
        reward_parts: unweighted values of each part; NaN in rows without the part, where the part adds 0.
        part_weights: weight of each part in the reward.
        group_ids: id of each row's group; any integers in any order, groups of any size.
        kept: mask of the rows that count; other rows get 0.
        lengths: number of tokens of each completion; read only with over "tokens".
        over: unit of ā and σ_a; with "tokens" each completion counts once per token, as in the authors' code.
        ddof: number subtracted from the divisors in σ_p and σ_a; 1 in the authors' code.
        epsilon: constant ε, in units of a part in the first equation and of a in the second, above 0.
    Raises:
        ValueError: epsilon is not above 0, or no parts.
    Reference: arXiv 2601.05242 (GDPO).

    Examples:
        >>> parts = {"right": jnp.array([1.0, 0.0]), "form": jnp.array([0.1, 0.0])}
        >>> weights = {"right": jnp.array([1.0, 1.0]), "form": jnp.array([0.5, 0.5])}
        >>> kept, lengths = jnp.array([True, True]), jnp.array([3, 3])
        >>> advantages = part_normalized_advantages(parts, weights, jnp.array([0, 0]), kept, lengths)
        >>> [round(x, 3) for x in advantages.tolist()]
        [1.0, -1.0]
    """
    require(bool(reward_parts), "reward_parts", dict(reward_parts), "the reward has no parts to normalize one by one")
    index = group_index(group_ids)
    total = jnp.zeros(kept.shape)
    largest = 0.0
    for name, values in reward_parts.items():
        has_part = kept & jnp.isfinite(values)
        centered = deviations(jnp.where(has_part, values, 0.0), index, has_part)
        variance = group_sums(jnp.square(centered), index) / jnp.maximum(group_sizes(index, has_part) - ddof, 1.0)
        normalized = part_weights[name] * (centered / (jnp.sqrt(variance) + epsilon))
        total += normalized
        largest += jnp.max(jnp.abs(normalized))
    # If the parts cancel each other everywhere, only rounding errors are left, which whitening would scale up to 1.
    is_signal = jnp.max(jnp.abs(total)) > len(kept) * jnp.finfo(total.dtype).eps * largest
    return jnp.where(is_signal, _whitened(total, kept, lengths, over=over, ddof=ddof, epsilon=epsilon), 0.0)


@requires(beta=AT_LEAST_0)
def divergence_penalized_advantages(
    rewards: Float[Array, " batch"],
    group_ids: Int[Array, " batch"],
    kept: Bool[Array, " batch"],
    scored_reference_kl: Float[Array, "batch time"],
    completion_mask: Bool[Array, "batch time"],
    trajectories: Int[Array, " batch"] | None = None,
    *,
    beta: Scalar = 0.1,
) -> Float[Array, " batch"]:
    """Reward minus the group's mean in units of its largest deviation, less the KL to the reference, centered as well.

    A_i = (r_i − r̄) / max_j |r_j − r̄| − β (D_i − D̄),  D_i the mean over tokens of KL(π ‖ π_ref);  0 in groups of equal
    rewards.

    Args:
        rewards: reward of each row, in any unit; ignored where not kept.
        group_ids: id of each row's group; any integers in any order, groups of any size.
        kept: mask of the rows that count; other rows get 0 and do not enter the means.
        scored_reference_kl: KL(π ‖ π_ref) over the vocabulary at each token, in nats.
        completion_mask: mask of the tokens that count.
        trajectories: id of each row's completion; None if each row is a completion.
        beta: weight β, per nat, 0 or more.
    Raises:
        ValueError: a negative β.
    Reference: arXiv 2610.12161 (ZCPO).

    Examples:
        >>> rewards, group_ids, kept = jnp.array([3.0, 1.0]), jnp.array([7, 7]), jnp.array([True, True])
        >>> kl, mask = jnp.array([[0.4, 0.6], [0.1, 9.0]]), jnp.array([[True, True], [True, False]])
        >>> print(divergence_penalized_advantages(rewards, group_ids, kept, kl, mask, beta=1.0).round(3))
        [ 0.8 -0.8]
    """
    index = group_index(group_ids)
    centered = deviations(rewards, index, kept)
    largest = -group_minima(-jnp.abs(centered), index)
    drift = deviations(sequence_mean(scored_reference_kl, completion_mask, trajectories)[:, 0], index, kept)
    return jnp.where(largest > 0, centered / jnp.where(largest > 0, largest, 1.0) - beta * drift, 0.0)


@requires(beta=ABOVE_0)
def log_mean_exp_advantages(
    rewards: Float[Array, " batch"],
    group_ids: Int[Array, " batch"],
    kept: Bool[Array, " batch"],
    *,
    beta: Scalar = 1.0,
) -> Float[Array, " batch"]:
    """Reward minus the group's soft maximum, which is the value of the KL-regularized optimum.

    A_i = r_i − β log((1/K) Σ_j exp(r_j / β)).

    Args:
        rewards: reward of each row, in any unit; ignored where not kept.
        group_ids: id of each row's group; any integers in any order, groups of any size.
        kept: mask of the rows that count; other rows get 0 and do not enter the mean.
        beta: temperature β, in units of reward, above 0.
    Raises:
        ValueError: β is not above 0.
    Reference: arXiv 2505.20686 (A*-PO); arXiv 2602.19362 (OAPL).

    Examples:
        >>> rewards, group_ids = jnp.array([3.0, 0.0, 0.0]), jnp.array([7, 7, 7])
        >>> kept = jnp.array([True, True, True])
        >>> advantages = log_mean_exp_advantages(rewards, group_ids, kept)
        >>> [round(x, 3) for x in advantages.tolist()]
        [1.004, -1.996, -1.996]
    """
    index = group_index(group_ids)
    # Measured from the group's highest reward, so that no exponent is above 0.
    highest = -group_minima(jnp.where(kept, -rewards, jnp.inf), index)
    below = jnp.where(kept, rewards - highest, 0.0)
    exponentials = jnp.where(kept, jnp.exp(below / beta), 0.0)
    means = group_sums(exponentials, index) / jnp.maximum(group_sizes(index, kept), 1.0)
    return jnp.where(kept, below - beta * jnp.log(jnp.where(kept, means, 1.0)), 0.0)


@requires(discount=ABOVE_0_TO_1)
def discounted_advantages(
    rewards: Float[Array, " batch"],
    group_ids: Int[Array, " batch"],
    kept: Bool[Array, " batch"],
    completion_mask: Bool[Array, "batch time"],
    *,
    discount: Scalar = 0.99,
) -> Float[Array, "batch time"]:
    """Reward minus the group's mean, discounted backward from the completion's last token.

    A_i,t = γ^(L_i − t) (r_i − r̄),  t from 1 to L_i.

    Args:
        rewards: reward of each completion; ignored where not kept.
        group_ids: id of each row's group; any integers in any order, groups of any size.
        kept: mask of the rows that count; other rows get 0.
        completion_mask: mask of the tokens that count.
        discount: discount factor γ per token, above 0, at most 1.
    Raises:
        ValueError: γ is out of range.

    Examples:
        >>> rewards, group_ids, kept = jnp.array([1.0, 0.0]), jnp.array([0, 0]), jnp.array([True, True])
        >>> mask = jnp.array([[True, True], [True, False]])
        >>> print(discounted_advantages(rewards, group_ids, kept, mask, discount=0.5))
        [[ 0.25  0.5 ]
         [-0.5   0.  ]]
    """
    counts = completion_mask.astype(rewards.dtype)
    to_come = jnp.sum(counts, axis=-1, keepdims=True) - jnp.cumsum(counts, axis=-1)
    centered = deviations(rewards, group_index(group_ids), kept)[:, None]
    return jnp.where(completion_mask & kept[:, None], discount**to_come * centered, 0.0)


def turn_returns(turn_rewards: Float[Array, "batch turns"], *, discount: Scalar) -> Float[Array, "batch turns"]:
    """Discounted sum of a trajectory's rewards from each turn onward.

    G_k = r_k + γ G_{k+1};  after its last turn, a trajectory has the return of that turn.

    Args:
        turn_rewards: reward of each turn; NaN after the last turn. A trajectory without turns gets returns of 0.
        discount: discount factor γ per turn.

    Examples:
        >>> print(turn_returns(jnp.array([[1.0, 0.0, 4.0], [0.0, 2.0, jnp.nan]]), discount=0.5))
        [[2. 2. 4.]
         [1. 2. 2.]]
    """
    has_reward = jnp.isfinite(turn_rewards)
    rewards = jnp.where(has_reward, turn_rewards, 0.0)

    def add_reward(later_return, reward):
        turn_return = reward + discount * later_return
        return turn_return, turn_return

    _, returns = jax.lax.scan(add_reward, jnp.zeros_like(rewards[:, 0]), rewards.T, reverse=True)
    last = jnp.maximum(jnp.sum(has_reward, axis=-1, keepdims=True) - 1, 0)
    return jnp.take_along_axis(returns.T, jnp.minimum(jnp.arange(turn_rewards.shape[1])[None], last), axis=1)


@requires(discount=ABOVE_0_TO_1)
def turn_return_advantages(
    turn_rewards: Float[Array, "batch turns"],
    token_turns: Int[Array, "batch time"],
    group_ids: Int[Array, " batch"],
    kept: Bool[Array, " batch"],
    completion_mask: Bool[Array, "batch time"],
    trajectories: Int[Array, " batch"] | None = None,
    *,
    discount: Scalar = 1.0,
    baseline: Literal["none", "group"] = "group",
    returns: Literal["sum", "mean"] = "sum",
) -> Float[Array, "batch time"]:
    """Discounted rewards from each turn onward, minus the group's mean for that turn.

    A_i,t = G_i,k − (1/K) Σ_j G_j,k,  k the turn of token t,  G_k = r_k + γ G_{k+1}.  Shorter trajectories enter the
    mean with the return of their last turn. With γ = 1 and rewards only at the last turns, this is
    `group_mean_advantages`.

    Args:
        turn_rewards: reward of each turn, equal in all rows of a trajectory; NaN after the last turn.
        token_turns: index of the turn that sampled each token, from 0; ignored where masked.
        group_ids: id of each row's group; any integers in any order, groups of any size.
        kept: mask of the rows that count, only the first row of each trajectory; other rows do not enter the mean.
        completion_mask: mask of the tokens that count, in all rows.
        trajectories: id of each row's trajectory; None if each row is a trajectory.
        discount: discount factor γ per turn, above 0, at most 1.
        baseline: baseline to subtract from each return.
        returns: sum, or mean for the discounted mean of the same rewards, so that early turns are not larger.
    Raises:
        ValueError: γ is out of range.
    Reference: returns: arXiv 2606.20002 (CoD).

    Examples:
        >>> turn_rewards = jnp.array([[1.0, 0.0], [0.0, 1.0]])
        >>> token_turns, mask = jnp.array([[0, 0, 1], [0, 1, 1]]), jnp.array([[True, True, True], [True, False, True]])
        >>> group_ids, kept = jnp.array([0, 0]), jnp.array([True, True])
        >>> print(turn_return_advantages(turn_rewards, token_turns, group_ids, kept, mask, discount=0.5))
        [[ 0.25  0.25 -0.5 ]
         [-0.25  0.    0.5 ]]
    """
    advantages = turn_returns(turn_rewards, discount=discount)
    if returns == "mean":
        ones = jnp.where(jnp.isfinite(turn_rewards), 1.0, jnp.nan)
        advantages /= jnp.maximum(turn_returns(ones, discount=discount), 1.0)
    if baseline == "group":
        index = group_index(group_ids)
        advantages = jax.vmap(lambda returns: deviations(returns, index, kept), in_axes=1, out_axes=1)(advantages)
    if trajectories is not None:
        advantages = first_rows(trajectories, kept).shared(advantages)
        kept = trajectory_sums(kept.astype(advantages.dtype), trajectories) > 0
    turns = jnp.clip(token_turns, 0, advantages.shape[1] - 1)
    token_advantages = jnp.take_along_axis(advantages, turns, axis=1)
    return jnp.where(completion_mask & kept[:, None], token_advantages, 0.0)
