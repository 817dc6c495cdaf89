"""Ratios of the trained policy to an anchor, for tokens and for completions.

The functions of the axis `ratio` map the log-ratio of each token to the log-ratio that clip and weight read. The
functions of the axis `anchor` return the policy in the denominator. The behavior policy μ sampled the tokens. The
proximal policy is the policy before the batch's first update. With several updates of a batch, the trust region is
around the proximal policy, and a separate weight corrects for μ.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from recjax.algorithms.groups import group_index, group_minima, trajectory_sums
from recjax.algorithms.options import AT_LEAST_0, FROM_0_TO_1, Scalar, requires

# e^20 ≈ 5e8 is beyond every clip range, and its square does not overflow float32.
MAX_LOG_RATIO = 20.0
# Probability of the tokens outside a set that has all; the rounding of a sum of probabilities in float32 is below it.
LEAST_REST = 1e-6


def log_difference(
    logprobs: Float[Array, "batch time"],
    other_logprobs: Float[Array, "batch time"],
    completion_mask: Bool[Array, "batch time"],
) -> Float[Array, "batch time"]:
    """log ρ = log π − log μ; masked values, even −inf and NaN, give 0 with zero gradient.

    It is unbounded: `bounded_exp` applies bounds after any sum or mean over a completion.

    Examples:
        >>> logprobs, behavior_logprobs = jnp.array([[-1.0, -2.0, -3.0]]), jnp.array([[-1.5, -2.0, -1.0]])
        >>> mask = jnp.array([[True, True, False]])
        >>> print(log_difference(logprobs, behavior_logprobs, mask))
        [[0.5 0.  0. ]]
    """
    # Masked before the difference: after it, the gradient of −inf − (−inf) would still be NaN.
    return jnp.where(completion_mask, logprobs, 0.0) - jnp.where(completion_mask, other_logprobs, 0.0)


def bounded_exp(log_ratio: Float[Array, "..."]) -> Float[Array, "..."]:
    """exp of a token's or completion's log-ratio, which is first clipped to ±MAX_LOG_RATIO.

    Examples:
        >>> print(bounded_exp(jnp.array([0.0, 1e6])))
        [1.000000e+00 4.851652e+08]
    """
    return jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def effective_share(log_weights: Float[Array, "..."], mask: Bool[Array, "..."]) -> Float[Array, ""]:
    """Effective sample size as a share of the sample, from log-weights: (Σw)² / (n Σw²).

    It is 1 for equal weights, down to 1/n where one weight outweighs all others, and 0 if n = 0.

    Examples:
        >>> round(float(effective_share(jnp.log(jnp.array([1.0, 3.0])), jnp.array([True, True]))), 3)
        0.8
    """
    # In logarithms, as the squares of large weights overflow float32.
    log_size = 2 * jax.nn.logsumexp(log_weights, where=mask) - jax.nn.logsumexp(2 * log_weights, where=mask)
    count = jnp.sum(mask)
    return jnp.where(count > 0, jnp.exp(log_size) / jnp.maximum(count, 1), 0.0)


def with_rest(top_logprobs: Float[Array, "*tokens count"]) -> Float[Array, "*tokens count_and_rest"]:
    """Adds the log-prob of all other tokens together, at least log LEAST_REST; a NaN counts as probability 0.

    Examples:
        >>> print(jnp.exp(with_rest(jnp.log(jnp.array([0.5, 0.25])))))
        [0.5  0.25 0.25]
    """
    logprobs = jnp.where(jnp.isnan(top_logprobs), -jnp.inf, top_logprobs)
    rest = 1 - jnp.sum(jnp.exp(logprobs), axis=-1, keepdims=True)
    return jnp.concatenate([logprobs, jnp.log(jnp.maximum(rest, LEAST_REST))], axis=-1)


def sequence_sum(
    per_token: Float[Array, "batch time"],
    completion_mask: Bool[Array, "batch time"],
    trajectories: Int[Array, " batch"] | None = None,
) -> Float[Array, "batch 1"]:
    """Sum over the tokens of each completion, across turns, gaps and rows.

    Examples:
        >>> mask = jnp.array([[True, True, False]])
        >>> print(sequence_sum(jnp.array([[1.0, 2.0, 9.0]]), mask))
        [[3.]]
    """
    row_sums = jnp.sum(jnp.where(completion_mask, per_token, 0.0), axis=-1)
    return trajectory_sums(row_sums, trajectories)[:, None]


def sequence_mean(
    per_token: Float[Array, "batch time"],
    completion_mask: Bool[Array, "batch time"],
    trajectories: Int[Array, " batch"] | None = None,
) -> Float[Array, "batch 1"]:
    """Mean over the tokens of each completion, across turns, gaps and rows; 0 without tokens.

    Examples:
        >>> mask = jnp.array([[True, True, False]])
        >>> print(sequence_mean(jnp.array([[1.0, 2.0, 9.0]]), mask))
        [[1.5]]
    """
    row_lengths = jnp.sum(completion_mask, axis=-1, dtype=per_token.dtype)
    lengths = trajectory_sums(row_lengths, trajectories)[:, None]
    # A completion without tokens has sum 0; dividing by at least 1 keeps its mean 0.
    return sequence_sum(per_token, completion_mask, trajectories) / jnp.maximum(lengths, 1.0)


def sequence_max(
    per_token: Float[Array, "batch time"],
    completion_mask: Bool[Array, "batch time"],
    trajectories: Int[Array, " batch"] | None = None,
) -> Float[Array, "batch 1"]:
    """Largest value over the tokens of each completion, across turns, gaps and rows; 0 if all are below 0.

    Examples:
        >>> mask = jnp.array([[True, True, False]])
        >>> print(sequence_max(jnp.array([[1.0, 2.0, 9.0]]), mask))
        [[2.]]
    """
    largest = jnp.max(jnp.where(completion_mask, per_token, 0.0), axis=-1)
    if trajectories is not None:
        largest = -group_minima(-largest, group_index(trajectories))  # the maximum over the completion's rows
    return largest[:, None]


def token_ratio(log_ratio: Float[Array, "batch time"]) -> Float[Array, "batch time"]:
    """Each token's own ratio: log ρ_t.

    Examples:
        >>> print(token_ratio(jnp.array([[0.5, 0.0]])))
        [[0.5 0. ]]
    """
    return log_ratio


def sequence_mean_ratio(
    log_ratio: Float[Array, "batch time"],
    completion_mask: Bool[Array, "batch time"],
    trajectories: Int[Array, " batch"] | None = None,
) -> Float[Array, "batch time"]:
    """Geometric mean of the completion's token ratios, for every token: (1/L) Σ_t log ρ_t.

    Reference: arXiv 2507.18071 (GSPO).

    Examples:
        >>> mask = jnp.array([[True, True, False]])
        >>> print(sequence_mean_ratio(jnp.array([[1.0, 2.0, 9.0]]), mask))
        [[1.5 1.5 1.5]]
    """
    return jnp.broadcast_to(sequence_mean(log_ratio, completion_mask, trajectories), log_ratio.shape)


def sequence_product_ratio(
    log_ratio: Float[Array, "batch time"],
    completion_mask: Bool[Array, "batch time"],
    trajectories: Int[Array, " batch"] | None = None,
) -> Float[Array, "batch time"]:
    """Ratio of the whole completion, for every token: Σ_t log ρ_t.

    Examples:
        >>> mask = jnp.array([[True, True, False]])
        >>> print(sequence_product_ratio(jnp.array([[1.0, 2.0, 9.0]]), mask))
        [[3. 3. 3.]]
    """
    return jnp.broadcast_to(sequence_sum(log_ratio, completion_mask, trajectories), log_ratio.shape)


@requires(epsilon_low=AT_LEAST_0, epsilon_high=AT_LEAST_0)
def clipped_sequence_mean_ratio(
    log_ratio: Float[Array, "batch time"],
    advantages: Float[Array, "batch *rest"],
    completion_mask: Bool[Array, "batch time"],
    trajectories: Int[Array, " batch"] | None = None,
    *,
    epsilon_low: Scalar = 0.4,
    epsilon_high: Scalar = 0.4,
) -> Float[Array, "batch time"]:
    """Geometric mean of the completion's token ratios, each clipped on the side to which the advantage pushes.

    (1/L) Σ_t (min(log ρ_t, ε_high) where A ≥ 0, max(log ρ_t, −ε_low) where A < 0).  With `log_one_side` as the clip,
    which removes the gradient of tokens clipped here, this is GMPO.

    Args:
        log_ratio: log ρ of each token.
        advantages: advantage of each completion or token; only the sign is read.
        completion_mask: mask of the tokens that count.
        trajectories: id of each row's completion; None if each row is a completion.
        epsilon_low: distance of the lower bound on log ρ below 0; not negative.
        epsilon_high: distance of the upper bound on log ρ above 0; not negative.
    Raises:
        ValueError: a negative range.
    Reference: arXiv 2507.20673 (GMPO).

    Examples:
        >>> mask = jnp.array([[True, True, False]])
        >>> print(clipped_sequence_mean_ratio(jnp.array([[1.0, 0.25, 9.0]]), jnp.array([1.0]), mask, epsilon_high=0.75))
        [[0.5 0.5 0.5]]
    """
    # Only the side to which the advantage pushes is clipped, so that a token may always return towards its anchor.
    up = per_token(advantages) >= 0
    clipped = jnp.where(up, jnp.minimum(log_ratio, epsilon_high), jnp.maximum(log_ratio, -epsilon_low))
    return jnp.broadcast_to(sequence_mean(clipped, completion_mask, trajectories), log_ratio.shape)


def per_token(values: Float[Array, "batch *rest"]) -> Float[Array, "batch #time"]:
    """Gives values of completions a token axis, [batch, 1]; returns values of tokens, [batch, time], unchanged.

    Examples:
        >>> per_token(jnp.array([1.0, 0.0])).shape
        (2, 1)
    """
    if values.ndim == 1:
        return values[:, None]
    return values


def behavior_anchor(behavior_logprobs: Float[Array, "batch time"]) -> Float[Array, "batch time"]:
    """The behavior policy: log μ.

    Examples:
        >>> print(behavior_anchor(jnp.array([[-1.0, -2.0]])))
        [[-1. -2.]]
    """
    return behavior_logprobs


def proximal_anchor(proximal_logprobs: Float[Array, "batch time"]) -> Float[Array, "batch time"]:
    """The policy before the batch's first update: log π_prox.

    In that update the ratio to this anchor is 1; see `training.updates_per_batch` for further updates.

    Reference: arXiv 2110.00641 (PPO with a decoupled objective); arXiv 2505.24298 (AReaL).

    Examples:
        >>> print(proximal_anchor(jnp.array([[-1.0, -2.0]])))
        [[-1. -2.]]
    """
    return proximal_logprobs


@requires(share=FROM_0_TO_1)
def interpolated_anchor(
    logprobs: Float[Array, "batch time"], behavior_logprobs: Float[Array, "batch time"], *, share: Scalar = 0.5
) -> Float[Array, "batch time"]:
    """Interpolates the log-probs of policy and behavior policy: α log μ + (1 − α) log π.  Needs no scoring pass.

    Args:
        logprobs: log π of each token.
        behavior_logprobs: log μ of each token.
        share: share α of the behavior policy, from 0 to 1.
    Raises:
        ValueError: share is out of range.
    Reference: arXiv 2512.06547 (A-3PO), whose α follows from each token's staleness.

    Examples:
        >>> print(interpolated_anchor(jnp.array([[-1.0, -2.0]]), jnp.array([[-2.0, -2.0]]), share=0.5))
        [[-1.5 -2. ]]
    """
    return share * behavior_logprobs + (1 - share) * logprobs
