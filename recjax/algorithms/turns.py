"""Advantages for trajectories with a reward for each turn."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from recjax.algorithms.advantages import deviations
from recjax.algorithms.groups import group_index
from recjax.algorithms.options import require
from recjax.algorithms.trajectories import first_rows, trajectory_sums


def turn_returns(turn_rewards: Float[Array, "batch turns"], *, discount: float) -> Float[Array, "batch turns"]:
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
    there = jnp.isfinite(turn_rewards)
    rewards = jnp.where(there, turn_rewards, 0.0)
    _, returns = jax.lax.scan(
        lambda after, reward: (reward + discount * after,) * 2, jnp.zeros_like(rewards[:, 0]), rewards.T, reverse=True
    )
    last = jnp.maximum(jnp.sum(there, axis=-1, keepdims=True) - 1, 0)
    return jnp.take_along_axis(returns.T, jnp.minimum(jnp.arange(turn_rewards.shape[1])[None], last), axis=1)


def turn_return_advantages(
    turn_rewards: Float[Array, "batch turns"],
    token_turns: Int[Array, "batch time"],
    group_ids: Int[Array, " batch"],
    kept: Bool[Array, " batch"],
    completion_mask: Bool[Array, "batch time"],
    trajectories: Int[Array, " batch"] | None = None,
    *,
    discount: float = 1.0,
    baseline: Literal["none", "group"] = "group",
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
    Raises:
        ValueError: γ is out of range.

    Examples:
        >>> turn_rewards = jnp.array([[1.0, 0.0], [0.0, 1.0]])
        >>> token_turns, mask = jnp.array([[0, 0, 1], [0, 1, 1]]), jnp.array([[True, True, True], [True, False, True]])
        >>> group_ids, kept = jnp.array([0, 0]), jnp.array([True, True])
        >>> print(turn_return_advantages(turn_rewards, token_turns, group_ids, kept, mask, discount=0.5))
        [[ 0.25  0.25 -0.5 ]
         [-0.25  0.    0.5 ]]
    """
    require(0 < discount <= 1, "discount", discount, "must be above 0 and at most 1")
    found = turn_returns(turn_rewards, discount=discount)
    if baseline == "group":
        index = group_index(group_ids)
        found = jax.vmap(lambda one: deviations(one, index, kept), in_axes=1, out_axes=1)(found)
    if trajectories is not None:
        found = first_rows(trajectories, kept).shared(found)
        kept = trajectory_sums(kept.astype(found.dtype), trajectories) > 0
    of_tokens = jnp.take_along_axis(found, jnp.clip(token_turns, 0, found.shape[1] - 1), axis=1)
    return jnp.where(completion_mask & kept[:, None], of_tokens, 0.0)
