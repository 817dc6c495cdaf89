"""Metrics of the terms that `losses.loss` adds to the policy gradient."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from recjax.algorithms.algorithm import Algorithm
from recjax.algorithms.reduce import token_average


def term_metrics(
    algorithm: Algorithm,
    *,
    logprobs: Float[Array, "batch time"],
    completion_mask: Bool[Array, "batch time"],
    teacher_logprobs: Float[Array, "batch time"] | None = None,
    taught: Bool[Array, " batch"] | None = None,
    observation_weights: Float[Array, "batch time"] | None = None,
    divergence: Float[Array, "batch time"] | None = None,
    behavior_top_logprobs: Float[Array, "batch time count"] | None = None,
) -> dict[str, Float[Array, ""]]:
    """Computes the metrics of an algorithm's terms over a complete batch, by name.

    Args:
        logprobs: log π; undefined where masked, like all values of tokens.
        completion_mask: mask of the tokens that count.
        teacher_logprobs: log-probs of the teacher, for distillation.
        taught: mask of the rows with a teacher; None: all rows.
        observation_weights: see `regularizers.observation_cross_entropy`.
        divergence: `regularizers.teacher_divergence` at each token.
        behavior_top_logprobs: log μ of the sampler's most likely tokens; NaN where unknown.

    Examples:
        >>> from recjax import algorithms
        >>> algorithm = algorithms.build("reinforce", {"observations": {"coefficient": 0.1}})
        >>> logprobs, weights = jnp.array([[-1.0, -2.0, -3.0]]), jnp.array([[0.0, 0.5, 0.5]])
        >>> arrays = {"logprobs": logprobs, "completion_mask": weights == 0, "observation_weights": weights}
        >>> print(term_metrics(algorithm, **arrays)["observation_cross_entropy"])
        2.5
    """
    metrics = {}
    taught_mask = completion_mask
    if taught is not None:
        taught_mask = completion_mask & taught[:, None]
        if algorithm.teacher_divergence is not None or algorithm.distillation is not None:
            metrics["taught_fraction"] = token_average(taught_mask.astype(float), completion_mask)
    if algorithm.teacher_divergence is not None:
        assert divergence is not None
        # In nats per token, without the coefficient in the term.
        coefficient = algorithm.teacher_divergence.option("coefficient")
        metrics["teacher_divergence"] = token_average(divergence, taught_mask) / coefficient
    if algorithm.score_centering is not None:
        assert behavior_top_logprobs is not None
        is_recorded = completion_mask & jnp.isfinite(behavior_top_logprobs).any(-1)
        probability = jnp.nansum(jnp.exp(behavior_top_logprobs), axis=-1)
        metrics["score_centering/recorded"] = token_average(is_recorded.astype(probability.dtype), completion_mask)
        metrics["score_centering/top_probability"] = token_average(probability, is_recorded)
    if algorithm.observations is not None:
        assert observation_weights is not None
        metrics["observation_cross_entropy"] = token_average(-logprobs, observation_weights > 0)
    if algorithm.distillation is not None:
        assert teacher_logprobs is not None
        # KL(π ‖ teacher) in nats per token, estimated on the sampled tokens that both policies can choose.
        is_possible = taught_mask & ~(jnp.isneginf(logprobs) | jnp.isneginf(teacher_logprobs))
        metrics["teacher_kl"] = token_average(logprobs - teacher_logprobs, is_possible)
    return metrics
