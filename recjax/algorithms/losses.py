"""The one equation that every algorithm of the family is a case of.

    loss = reduce_t [ −sg(w · w_t · A · M_t) · log π(y_t) + regulariser_t + c_KL · KL_t − c_H · H_t ]

`row_terms` is taken once on the whole batch; `loss` on any micro-batch of it, as (sum, count) that add.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from recjax.algorithms.advantages import group_mean_advantages
from recjax.algorithms.clipping import no_clip
from recjax.algorithms.consistency import pairwise_consistency_loss
from recjax.algorithms.ratios import log_ratio
from recjax.algorithms.reduce import SumAndCount, token_mean
from recjax.algorithms.regularizers import log_likelihood_bonus, no_regularizer
from recjax.algorithms.selection import keep_all
from recjax.algorithms.weighting import unit_token_weights, unit_weights


class RowTerms(NamedTuple):
    """What a loss takes as constants of each completion; `batch` rows.

    Rows that are padding or were dropped have kept False and zeros elsewhere.
    """

    advantages: Float[Array, " batch"]
    weights: Float[Array, " batch"]
    kept: Bool[Array, " batch"]
    rewards: Float[Array, " batch"]
    group_ids: Int[Array, " batch"]


def policy_gradient(
    algorithm: "Algorithm",
    logprobs: Float[Array, "batch time"],
    behaviour_logprobs: Float[Array, "batch time"] | None,
    rows: RowTerms,
    completion_mask: Bool[Array, "batch time"],
    reference_logprobs: Float[Array, "batch time"] | None,
    entropy: Float[Array, "batch time"] | None,
) -> SumAndCount:
    """The reduction of `token_loss`; rows not kept leave both sum and count."""
    per_token = token_loss(
        algorithm,
        logprobs,
        behaviour_logprobs,
        rows,
        completion_mask,
        reference_logprobs=reference_logprobs,
        entropy=entropy,
    )
    return algorithm.reduction(per_token, completion_mask & rows.kept[:, None])


def pairwise_consistency(
    algorithm: "Algorithm",
    logprobs: Float[Array, "batch time"],
    behaviour_logprobs: Float[Array, "batch time"] | None,
    rows: RowTerms,
    completion_mask: Bool[Array, "batch time"],
    reference_logprobs: Float[Array, "batch time"] | None,
    entropy: Float[Array, "batch time"] | None,
    *,
    tau: float = 1.0,
) -> SumAndCount:
    """`pairwise_consistency_loss` with the behaviour policy as the anchor; a slice must hold whole groups.

    Of the algorithm, only selection and row weights are read.
    """
    del reference_logprobs, entropy
    behaviour_logprobs = _behaviour(algorithm, logprobs, behaviour_logprobs)
    policy, anchor = (jnp.sum(jnp.where(completion_mask, x, 0.0), axis=-1) for x in (logprobs, behaviour_logprobs))
    kept = rows.kept & jnp.any(completion_mask, axis=-1)
    return pairwise_consistency_loss(policy, anchor, rows.rewards, rows.weights, rows.group_ids, kept, tau=tau)


# What can do without the behaviour policy's log-probabilities; anything else on these axes is taken to read them.
BEHAVIOUR_FREE = frozenset({policy_gradient, no_clip, unit_token_weights, no_regularizer, log_likelihood_bonus})


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """One choice on every axis, options bound by functools.partial; the defaults are plain REINFORCE.

    Hashable: a static argument of jit. `presets.build_algorithm` makes it from names and options; signatures are those
    of the functions in the file of each axis.
    """

    objective: Callable = policy_gradient
    selection: Callable = keep_all
    advantage: Callable = group_mean_advantages
    clip: Callable = no_clip
    row_weight: Callable = unit_weights
    token_weight: Callable = unit_token_weights
    regularizer: Callable = no_regularizer
    reduction: Callable = token_mean
    reference_kl: Callable | None = None
    entropy: Callable | None = None

    @property
    def needs_behaviour_logprobs(self) -> bool:
        """Whether the log-probabilities under the behaviour policy change the loss."""
        axes = (self.objective, self.clip, self.token_weight, self.regularizer)
        functions = (axis.func if isinstance(axis, functools.partial) else axis for axis in axes)
        return any(function not in BEHAVIOUR_FREE for function in functions)

    @property
    def compares_completions(self) -> bool:
        """Whether the loss is of whole groups, whose completions a micro-batch must then hold together."""
        objective = self.objective.func if isinstance(self.objective, functools.partial) else self.objective
        return objective is not policy_gradient

    @property
    def needs_reference(self) -> bool:
        """Whether the loss has a KL to a reference policy."""
        return self.reference_kl is not None

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss has an entropy bonus."""
        return self.entropy is not None


def _behaviour(algorithm: Algorithm, logprobs, behaviour_logprobs):
    if algorithm.needs_behaviour_logprobs and behaviour_logprobs is None:
        raise ValueError(
            "behaviour_logprobs = None: this algorithm reads them; record them with the completions, or choose one that"
            " does without: no clip, no importance weights, no squared log-ratio, objective policy_gradient"
        )
    # Nothing reads the ratio where there is none.
    return jax.lax.stop_gradient(logprobs if behaviour_logprobs is None else behaviour_logprobs)


def row_terms(
    algorithm: Algorithm,
    rewards: Float[Array, " batch"],
    group_ids: Int[Array, " batch"],
    row_mask: Bool[Array, " batch"],
    key: PRNGKeyArray,
) -> RowTerms:
    """Selection, advantages and row weights of a whole batch; take it before micro-batches are cut.

    Args:
        rewards: any unit; ignored where row_mask is False.
        group_ids: any integers, any group sizes, any order.
        row_mask: False for padding rows, `completion_mask.any(-1)`.
        key: for random selections.
    """
    kept = algorithm.selection(rewards, group_ids, row_mask, key)
    advantages = algorithm.advantage(rewards, group_ids, kept)
    weights = algorithm.row_weight(advantages, kept)
    return jax.lax.stop_gradient(RowTerms(advantages, weights, kept, jnp.where(kept, rewards, 0.0), group_ids))


def token_loss(
    algorithm: Algorithm,
    logprobs: Float[Array, "batch time"],
    behaviour_logprobs: Float[Array, "batch time"] | None,
    rows: RowTerms,
    completion_mask: Bool[Array, "batch time"],
    *,
    reference_logprobs: Float[Array, "batch time"] | None = None,
    entropy: Float[Array, "batch time"] | None = None,
) -> Float[Array, "batch time"]:
    """The loss of each token, before any reduction.

    −sg(w · w_t · A · M_t) · log π(y_t) + regulariser_t + c_KL · KL_t − c_H · H_t

    Args:
        logprobs: log π, differentiated; ignored where masked.
        behaviour_logprobs: log μ, constant; None where the algorithm does not need them; ignored where masked.
        rows: of these rows.
        completion_mask: True where the behaviour policy chose the token.
        reference_logprobs: log π_ref, constant; needed for a KL to a reference, else ignored.
        entropy: of π at each token, in nats, differentiated; needed for an entropy bonus, else ignored.
    Returns:
        Zero where masked and in rows not kept.
    Raises:
        ValueError: an input that the algorithm needs is None.
    Reference: arXiv 2509.24203 §2.
    """
    mask = completion_mask & rows.kept[:, None]
    logprobs = jnp.where(mask, logprobs, 0.0)
    behaviour_logprobs = _behaviour(algorithm, logprobs, behaviour_logprobs)
    ratio = jnp.exp(log_ratio(logprobs, behaviour_logprobs, mask))
    weights = rows.weights[:, None] * algorithm.token_weight(ratio) * rows.advantages[:, None]
    weights = jnp.where(mask & algorithm.clip(ratio, rows.advantages), weights, 0.0)
    terms = -jax.lax.stop_gradient(weights) * logprobs + algorithm.regularizer(logprobs, behaviour_logprobs, mask)
    if algorithm.reference_kl is not None:
        if reference_logprobs is None:
            raise ValueError("reference_logprobs = None: reference_kl.coefficient is not 0; pass them, or set it to 0")
        terms += algorithm.reference_kl(logprobs, jax.lax.stop_gradient(reference_logprobs), mask)
    if algorithm.entropy is not None:
        if entropy is None:
            raise ValueError("entropy = None: entropy.coefficient is not 0; pass it, or set the coefficient to 0")
        terms -= algorithm.entropy(entropy, mask)
    return jnp.where(mask, terms, 0.0)


def loss(
    algorithm: Algorithm,
    logprobs: Float[Array, "batch time"],
    behaviour_logprobs: Float[Array, "batch time"] | None,
    rows: RowTerms,
    completion_mask: Bool[Array, "batch time"],
    *,
    reference_logprobs: Float[Array, "batch time"] | None = None,
    entropy: Float[Array, "batch time"] | None = None,
) -> SumAndCount:
    """The loss of any micro-batch, as a sum and a count; add both over micro-batches and devices, then divide once.

    Args: those of `token_loss`. For the pairwise objective, rows of a group must be in the same micro-batch.
    Returns:
        Sum and count under the algorithm's reduction (for the pairwise objective, over groups). Both are 0 where no row
        is kept.
    Raises:
        ValueError: an input that the algorithm needs is None.
    """
    return algorithm.objective(
        algorithm, logprobs, behaviour_logprobs, rows, completion_mask, reference_logprobs, entropy
    )
