"""Diagnostics of a batch: how far off-policy it is, and its clipping, weights and advantages."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from recjax.algorithms.groups import one_per_trajectory
from recjax.algorithms.losses import Algorithm, RowTerms, impossible_tokens, token_terms, token_weights
from recjax.algorithms.ratios import bounded_exp, effective_share, log_difference, per_token, sequence_sum
from recjax.algorithms.reduce import token_average
from recjax.algorithms.regularizers import KLEstimator, kl_estimate

QUANTILES = {"q01": 0.01, "q50": 0.5, "q99": 0.99, "max": 1.0}


def ratio_quantiles(
    log_ratio: Float[Array, "batch time"], completion_mask: Bool[Array, "batch time"]
) -> dict[str, Float[Array, ""]]:
    """QUANTILES of the ratio π/μ over valid tokens; NaN without valid tokens.

    Examples:
        >>> log_ratio = jnp.log(jnp.array([[0.5, 1.0, 2.0]]))
        >>> print(ratio_quantiles(log_ratio, jnp.array([[True, True, True]]))["q50"])
        1.0
    """
    quantiles = jnp.nanquantile(jnp.where(completion_mask, log_ratio, jnp.nan), jnp.array(list(QUANTILES.values())))
    return dict(zip(QUANTILES, bounded_exp(quantiles), strict=True))


def clip_fraction(
    clip_mask: Bool[Array, "batch time"],
    advantages: Float[Array, "batch *rest"],
    completion_mask: Bool[Array, "batch time"],
) -> dict[str, Float[Array, ""]]:
    """Clipped share of all valid tokens, of tokens with A > 0, and of tokens with A < 0.

    Examples:
        >>> clip, mask = jnp.array([[True, False]]), jnp.array([[True, True]])
        >>> {name: float(share) for name, share in clip_fraction(clip, jnp.array([1.0]), mask).items()}
        {'all': 0.5, 'positive': 0.5, 'negative': 0.0}
    """
    clipped = (~clip_mask).astype(advantages.dtype)
    sign = per_token(advantages)
    masks = {"all": completion_mask, "positive": completion_mask & (sign > 0), "negative": completion_mask & (sign < 0)}
    return {name: token_average(clipped, mask) for name, mask in masks.items()}


def behavior_kl(
    log_ratio: Float[Array, "batch time"], completion_mask: Bool[Array, "batch time"], *, estimator: KLEstimator
) -> Float[Array, ""]:
    """KL(μ ‖ π) in nats per token, estimated on tokens that μ sampled.

    Args:
        log_ratio: log π − log μ.
        estimator: k1, k2 or k3; see `regularizers.kl_estimate`.

    Examples:
        >>> log_ratio = jnp.log(jnp.array([[0.5, 1.0, 2.0]]))
        >>> mask = jnp.array([[True, True, False]])
        >>> round(float(behavior_kl(log_ratio, mask, estimator="k1")), 3)
        0.347
    """
    return token_average(kl_estimate(jnp.where(completion_mask, log_ratio, 0.0), estimator), completion_mask)


def effective_sample_size(
    log_ratio: Float[Array, "batch time"],
    completion_mask: Bool[Array, "batch time"],
    trajectories: Int[Array, " batch"] | None = None,
) -> Float[Array, ""]:
    """Effective share of completions under importance weighting.

    (Σ w)² / (n Σ w²),  w_i = exp Σ_t log ρ_t: from 1/n to 1 (on-policy); 0 if n = 0.

    Args:
        log_ratio: log π − log μ.
        completion_mask: mask of valid tokens; rows without valid tokens do not count.
        trajectories: id of each row's completion; None if each row is a completion.

    Examples:
        >>> log_ratio, mask = jnp.log(jnp.array([[1.0], [3.0]])), jnp.array([[True], [True]])
        >>> round(float(effective_sample_size(log_ratio, mask)), 3)
        0.8
    """
    rows = one_per_trajectory(jnp.any(completion_mask, axis=-1), trajectories)
    log_weights = sequence_sum(log_ratio, completion_mask, trajectories)[:, 0]
    return effective_share(log_weights, rows)


def staleness(
    step: Int[Array, ""] | int, policy_version: Shaped[Array | np.ndarray, " batch"]
) -> Shaped[Array | np.ndarray, " batch"]:
    """Optimizer steps from the weights that sampled each row to the weights that `step`, counted from 1, starts with.

    step − 1 − version, where the version is the number of updates in the weights that sampled the row.

    Examples:
        >>> print(staleness(12, jnp.array([0, 10, 11])))
        [11  1  0]
    """
    return step - 1 - policy_version


def diagnose(
    algorithm: Algorithm,
    rows: RowTerms,
    logprobs: Float[Array, "batch time"],
    behavior_logprobs: Float[Array, "batch time"] | None,
    entropy: Float[Array, "batch time"],
    completion_mask: Bool[Array, "batch time"],
) -> dict[str, Float[Array, ""]]:
    """Computes scalar metrics of a whole batch, by name; without behavior log-probs, it skips metrics of the ratio.

    Entropy, ratio, KL and sample size cover all real rows; clipping, weights and advantages cover kept rows. Rows of a
    trajectory count as one. Tokens of `losses.impossible_tokens` are counted by policy; metrics of the ratio skip them.

    Examples:
        >>> from recjax import algorithms
        >>> algorithm = algorithms.build("grpo", {})
        >>> mask = jnp.array([[True, True], [True, False]])
        >>> rewards, group_ids = jnp.array([1.0, 0.0]), jnp.array([0, 0])
        >>> batch = algorithms.BatchValues(rewards, group_ids, mask.any(-1), jax.random.key(0))
        >>> rows = algorithms.row_terms(algorithm, batch)
        >>> logprobs, entropy = jnp.array([[-1.0, -2.0], [-3.0, 0.0]]), jnp.ones((2, 2))
        >>> found = diagnose(algorithm, rows, logprobs, logprobs, entropy, mask)
        >>> print(found["entropy"], found["ratio/q99"], found["effective_sample_size"])
        1.0 1.0 1.0
    """
    real = jnp.maximum(jnp.sum(one_per_trajectory(jnp.any(completion_mask, axis=-1), rows.trajectories)), 1)
    scalars = {
        "entropy": token_average(entropy, completion_mask),
        "kept_fraction": jnp.sum(one_per_trajectory(rows.kept, rows.trajectories)) / real,
        "advantage/mean_square": _kept_mean(jnp.square(rows.advantages), rows, completion_mask),
        "weight/mean": _kept_mean(rows.weights, rows, completion_mask),
        "weight/max": jnp.max(jnp.where(rows.kept, rows.weights.reshape(len(rows.kept), -1).max(-1), 0.0)),
    }
    if algorithm.token_weight is not None or algorithm.correction is not None:
        weights = token_weights(algorithm, logprobs, behavior_logprobs, rows, completion_mask)
        weighted = jnp.isfinite(weights)
        scalars["weight/mean"] = token_average(jnp.where(weighted, weights, 0.0), weighted)
        scalars["weight/max"] = jnp.max(jnp.where(weighted, weights, 0.0))
    impossible = impossible_tokens(algorithm, logprobs, behavior_logprobs, rows, completion_mask)
    for policy in ("policy", "behavior", "teacher"):
        if policy in impossible:
            scalars[f"impossible_tokens/{policy}"] = jnp.sum(impossible[policy], dtype=jnp.float32)
    if behavior_logprobs is None:
        return scalars
    completion_mask &= ~(jnp.isneginf(logprobs) | jnp.isneginf(behavior_logprobs))
    log_ratio = log_difference(logprobs, behavior_logprobs, completion_mask)
    terms = token_terms(algorithm, logprobs, behavior_logprobs, rows, completion_mask)
    clipped = clip_fraction(terms.clip, terms.advantages, completion_mask & rows.kept[:, None])
    scalars |= {f"ratio/{name}": value for name, value in ratio_quantiles(log_ratio, completion_mask).items()}
    scalars |= {f"clip_fraction/{name}": value for name, value in clipped.items()}
    for estimator in ("k1", "k2", "k3"):
        scalars[f"behavior_kl/{estimator}"] = behavior_kl(log_ratio, completion_mask, estimator=estimator)
    scalars["effective_sample_size"] = effective_sample_size(log_ratio, completion_mask, rows.trajectories)
    return jax.lax.stop_gradient(scalars)


def _kept_mean(values, rows: RowTerms, completion_mask):
    """Mean over kept completions, or over their tokens if the values are per token."""
    if values.ndim == 2:
        return token_average(values, completion_mask & rows.kept[:, None])
    kept = one_per_trajectory(rows.kept, rows.trajectories)
    return jnp.sum(jnp.where(kept, values, 0.0)) / jnp.maximum(jnp.sum(kept), 1)
