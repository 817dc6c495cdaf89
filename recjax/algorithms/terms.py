"""Terms: everything that adds to the loss, or to its metrics, besides the policy gradient.

A term's functions read values by the names of their positional parameters, like the functions of all axes. An update
computes only the values that terms read: the reference policy runs only for a term that reads `reference_logprobs`.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from recjax.algorithms.algorithm import Algorithm
from recjax.algorithms.options import Scalar
from recjax.algorithms.ratios import bounded_exp
from recjax.algorithms.reduce import token_average


class Term(NamedTuple):
    """Something that adds to the loss.

    name: the term's name in the config.
    per_token: function of a micro-batch's values that returns the loss of each token, [batch, time]; the algorithm's
        reduction reduces it with the loss of the policy gradient.
    sign: −1 for a bonus, whose values the loss subtracts.
    total: function of a micro-batch's values that returns a number to add to the loss's sum.
    metrics: function of the whole batch's values that returns scalars by name.
    """

    name: str
    per_token: Callable | None = None
    sign: int = 1
    total: Callable | None = None
    metrics: Callable | None = None


def terms_of(algorithm: Algorithm) -> tuple[Term, ...]:
    """The terms of an algorithm, in the order in which the loss adds them.

    Examples:
        >>> from recjax import algorithms
        >>> kl = {"reference_kl": {"coefficient": 0.1, "estimator": "k3"}}
        >>> [term.name for term in terms_of(algorithms.build("opmd", kl))]
        ['regularizer', 'reference_kl']
    """
    terms = [
        Term(name, per_token=getattr(algorithm, name))
        for name in ("regularizer", "term", "reference_kl", "unbiased_reference_kl")
        if getattr(algorithm, name) is not None
    ]
    if algorithm.entropy is not None:
        terms.append(Term("entropy", per_token=algorithm.entropy, sign=-1))
    if algorithm.teacher_divergence is not None:
        options = algorithm.teacher_divergence.keywords
        measured = functools.partial(_divergence_metrics, coefficient=options["coefficient"])
        computed = _computed_divergence
        if options["weight"] == "truncated":
            computed = functools.partial(_weighted_divergence, cap=options["cap"])
        terms.append(Term("teacher_divergence", per_token=computed, metrics=measured))
    if algorithm.score_centering is not None:
        terms.append(Term("score_centering", per_token=algorithm.score_centering, metrics=_centering_metrics))
    if algorithm.observations is not None:
        summed = functools.partial(_observation_sum, cross_entropy=algorithm.observations)
        terms.append(Term("observations", total=summed, metrics=_observation_metrics))
    if algorithm.distillation is not None:
        terms.append(Term("distillation", metrics=_distillation_metrics))
    return tuple(terms)


def _computed_divergence(divergence: Float[Array, "batch time"]) -> Float[Array, "batch time"]:
    """The divergence from a teacher at each token, which the forward pass computes with the vocabulary's scores."""
    return divergence


def _weighted_divergence(
    divergence: Float[Array, "batch time"],
    logprobs: Float[Array, "batch time"],
    behavior_logprobs: Float[Array, "batch time"],
    *,
    cap: Scalar,
) -> Float[Array, "batch time"]:
    """The divergence from a teacher, times the ratio to the behavior policy up to a cap, constant."""
    return jax.lax.stop_gradient(jnp.minimum(bounded_exp(logprobs - behavior_logprobs), cap)) * divergence


def _divergence_metrics(
    divergence: Float[Array, "batch time"],
    completion_mask: Bool[Array, "batch time"],
    taught: Bool[Array, " batch"] | None = None,
    *,
    coefficient: Scalar,
) -> dict[str, Float[Array, ""]]:
    """Mean divergence from the teacher, in nats per token that has one, without the term's coefficient."""
    mask, measured = _taught_mask_and_metrics(completion_mask, taught)
    return measured | {"teacher_divergence": token_average(divergence, mask) / coefficient}


def _taught_mask_and_metrics(
    completion_mask: Bool[Array, "batch time"], taught: Bool[Array, " batch"] | None
) -> tuple[Bool[Array, "batch time"], dict[str, Float[Array, ""]]]:
    """The tokens that have a teacher, and their share as a metric if a teacher has prompts of its own."""
    if taught is None:
        return completion_mask, {}
    mask = completion_mask & taught[:, None]
    return mask, {"taught_fraction": token_average(mask.astype(float), completion_mask)}


def _centering_metrics(
    behavior_top_logprobs: Float[Array, "batch time count"], completion_mask: Bool[Array, "batch time"]
) -> dict[str, Float[Array, ""]]:
    """Share of the tokens whose top tokens are recorded, and the mean probability of these top tokens together."""
    is_known = completion_mask & jnp.isfinite(behavior_top_logprobs).any(-1)
    together = jnp.nansum(jnp.exp(behavior_top_logprobs), axis=-1)
    return {
        "score_centering/recorded": token_average(is_known.astype(together.dtype), completion_mask),
        "score_centering/top_probability": token_average(together, is_known),
    }


def _observation_sum(
    logprobs: Float[Array, "batch time"], observation_weights: Float[Array, "batch time"], *, cross_entropy: Callable
) -> Float[Array, ""]:
    """Sum of the weighted cross-entropy on observed tokens.

    Args:
        cross_entropy: `regularizers.observation_cross_entropy` with its options.
    """
    return jnp.sum(cross_entropy(logprobs, observation_weights))


def _observation_metrics(
    logprobs: Float[Array, "batch time"], observation_weights: Float[Array, "batch time"]
) -> dict[str, Float[Array, ""]]:
    """Mean cross-entropy on observed tokens, in nats per token."""
    return {"observation_cross_entropy": token_average(-logprobs, observation_weights > 0)}


def _distillation_metrics(
    logprobs: Float[Array, "batch time"],
    teacher_logprobs: Float[Array, "batch time"],
    completion_mask: Bool[Array, "batch time"],
    taught: Bool[Array, " batch"] | None = None,
) -> dict[str, Float[Array, ""]]:
    """KL(π ‖ teacher) in nats per token, estimated on the sampled tokens that both policies can choose."""
    mask, measured = _taught_mask_and_metrics(completion_mask, taught)
    possible = mask & ~(jnp.isneginf(logprobs) | jnp.isneginf(teacher_logprobs))
    return measured | {"teacher_kl": token_average(logprobs - teacher_logprobs, possible)}
