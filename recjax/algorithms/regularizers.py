"""Terms added to the loss of each token: the paper's REP terms, KL to a reference, and entropy.

All terms are zero, with zero gradient, where masked.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from recjax.algorithms.groups import trajectory_sums
from recjax.algorithms.options import ABOVE_0, AT_LEAST_0, FROM_0_TO_1, Bounds, Scalar, requires
from recjax.algorithms.ratios import MAX_LOG_RATIO, log_difference, sequence_sum, with_rest

# e^40 ≈ 2e17; beyond 44 nats, the square in the gradient's norm overflows float32 and ends a run.
MAX_KL_EXPONENT = 40.0
KLEstimator = Literal["k1", "k2", "k3"]
Divergence = Literal["forward_kl", "reverse_kl", "jsd"]


@requires(beta=AT_LEAST_0)
def log_likelihood_bonus(
    logprobs: Float[Array, "batch time"],
    completion_mask: Bool[Array, "batch time"],
    *,
    beta: Scalar = 0.1,
) -> Float[Array, "batch time"]:
    """Imitation of the behavior policy: a sample of β KL(μ ‖ π), up to a constant.

    −β log π_t.

    Args:
        logprobs: log π of each token; ignored where masked.
        beta: coefficient β, in units of advantage, 0 or more.
    Raises:
        ValueError: a negative β.
    Reference: arXiv 2509.24203 §2 (AsymRE).

    Examples:
        >>> logprobs, behavior_logprobs = jnp.array([[-1.0, -2.0, -3.0]]), jnp.array([[-1.5, -2.0, -1.0]])
        >>> mask = jnp.array([[True, True, False]])
        >>> print(log_likelihood_bonus(logprobs, mask, beta=0.1))
        [[ 0.1  0.2 -0. ]]
    """
    return -beta * jnp.where(completion_mask, logprobs, 0.0)


@requires(tau=AT_LEAST_0)
def squared_log_ratio_per_token(
    logprobs: Float[Array, "batch time"],
    behavior_logprobs: Float[Array, "batch time"],
    completion_mask: Bool[Array, "batch time"],
    *,
    tau: Scalar = 0.1,
) -> Float[Array, "batch time"]:
    """Pulls every token's probability back to the behavior policy.

    (τ/2) (log π_t − log μ_t)².

    Args:
        logprobs: log π of each token; ignored where masked.
        behavior_logprobs: log μ, constant; ignored where masked.
        tau: coefficient τ, in units of advantage, 0 or more.
    Raises:
        ValueError: a negative τ.
    Reference: arXiv 2509.24203 §2 (OPMD), by token rather than by completion.

    Examples:
        >>> logprobs, behavior_logprobs = jnp.array([[-1.0, -2.0, -3.0]]), jnp.array([[-1.5, -2.0, -1.0]])
        >>> mask = jnp.array([[True, True, False]])
        >>> print(squared_log_ratio_per_token(logprobs, behavior_logprobs, mask, tau=0.8))
        [[0.1 0.  0. ]]
    """
    return tau / 2 * jnp.square(log_difference(logprobs, behavior_logprobs, completion_mask))


@requires(tau=AT_LEAST_0)
def squared_log_ratio_per_completion(
    logprobs: Float[Array, "batch time"],
    behavior_logprobs: Float[Array, "batch time"],
    completion_mask: Bool[Array, "batch time"],
    trajectories: Int[Array, " batch"] | None = None,
    *,
    tau: Scalar = 0.1,
) -> Float[Array, "batch time"]:
    """Pulls every completion's probability back to the behavior policy.

    (τ/2) (Σ_t [log π_t − log μ_t])², spread evenly over the completion's tokens. The sum is the paper's term, and
    every reduction treats the spread term like the policy-gradient term.

    Args:
        logprobs: log π of each token; ignored where masked.
        behavior_logprobs: log μ, constant; ignored where masked.
        trajectories: id of each row's completion; None if each row is a completion.
        tau: coefficient τ, in units of advantage, 0 or more.
    Raises:
        ValueError: a negative τ.
    Reference: arXiv 2509.24203 §2 (OPMD).

    Examples:
        >>> logprobs, behavior_logprobs = jnp.array([[-1.0, -2.0, -3.0]]), jnp.array([[-1.5, -2.0, -1.0]])
        >>> mask = jnp.array([[True, True, False]])
        >>> print(squared_log_ratio_per_completion(logprobs, behavior_logprobs, mask, tau=0.8))
        [[0.05 0.05 0.  ]]
    """
    difference = log_difference(logprobs, behavior_logprobs, completion_mask)
    completion_log_ratio = sequence_sum(difference, completion_mask, trajectories)
    lengths = trajectory_sums(jnp.sum(completion_mask, axis=-1, dtype=difference.dtype), trajectories)[:, None]
    return jnp.where(completion_mask, tau / 2 * jnp.square(completion_log_ratio) / jnp.maximum(lengths, 1.0), 0.0)


def kl_estimate(
    log_ratio: Float[Array, "..."], estimator: KLEstimator, bound: Scalar = MAX_KL_EXPONENT
) -> Float[Array, "..."]:
    """Estimates of KL(p ‖ q) from samples of p, given log_ratio = log q − log p.

    k1 = −log_ratio;  k2 = log_ratio² / 2;  k3 = exp(log_ratio) − log_ratio − 1.

    Args:
        bound: largest log-ratio, in nats, in the exponential of k3, which continues as its tangent: bounding only the
            exponent would leave −log_ratio, whose gradient points away from q.
    Reference: Schulman 2020, "Approximating KL divergence".

    Examples:
        >>> [round(float(kl_estimate(jnp.array(0.5), name)), 3) for name in ("k1", "k2", "k3")]
        [-0.5, 0.125, 0.149]
    """
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return jnp.square(log_ratio) / 2
    exponential = jnp.exp(jnp.minimum(log_ratio, bound)) * (1 + jnp.maximum(log_ratio - bound, 0.0))
    # Near 0, the difference of the definition is smaller than its rounding error, and may be negative.
    near_zero = jnp.clip(log_ratio, -0.1, 0.1)
    series = jnp.square(near_zero) / 2 * (1 + near_zero / 3 * (1 + near_zero / 4 * (1 + near_zero / 5)))
    return jnp.where(near_zero == log_ratio, series, exponential - log_ratio - 1)


def reference_kl(
    logprobs: Float[Array, "batch time"], reference_logprobs: Float[Array, "batch time"], *, estimator: KLEstimator
) -> Float[Array, "batch time"]:
    """Estimates KL(π ‖ π_ref) from samples; differentiable in `logprobs`.

    Values, and gradients as factors of ∇log π, with d = log π_ref − log π:

    k1: −d, gradient 1, which averages to zero under π: k1 as a loss term does not regularize;
    k2: d²/2, gradient −d, which averages under π to the gradient of KL(π ‖ π_ref);
    k3: exp(d) − d − 1, gradient 1 − exp(d), which averages under π to the gradient of KL(π_ref ‖ π). Beyond
    d = MAX_KL_EXPONENT, its gradient stays that at MAX_KL_EXPONENT.

    Args:
        logprobs: log π of each token.
        reference_logprobs: log π_ref of each token, constant.
        estimator: k1, k2 or k3.

    Examples:
        >>> print(reference_kl(jnp.array([[-1.0]]), jnp.array([[-1.5]]), estimator="k2"))
        [[0.125]]
    """
    return kl_estimate(reference_logprobs - logprobs, estimator)


@requires(coefficient=AT_LEAST_0)
def reference_kl_penalty(
    logprobs: Float[Array, "batch time"],
    reference_logprobs: Float[Array, "batch time"],
    completion_mask: Bool[Array, "batch time"],
    *,
    coefficient: Scalar = 0.0,
    estimator: KLEstimator = "k3",
) -> Float[Array, "batch time"]:
    """`coefficient` · `reference_kl`: a penalty on the KL to the reference policy.

    Args:
        logprobs: log π of each token; ignored where masked.
        reference_logprobs: log π_ref of each token, constant; ignored where masked.
        coefficient: weight of the term, in units of advantage, 0 or more.
        estimator: k1, k2 or k3; see `reference_kl`.
    Raises:
        ValueError: a negative coefficient.

    Examples:
        >>> logprobs, reference, mask = jnp.array([[-1.0, -2.0]]), jnp.array([[-1.5, -2.0]]), jnp.array([[True, True]])
        >>> print(reference_kl_penalty(logprobs, reference, mask, coefficient=0.4, estimator="k2"))
        [[0.05 0.  ]]
    """
    logprobs = jnp.where(completion_mask, logprobs, 0.0)
    reference_logprobs = jnp.where(completion_mask, reference_logprobs, 0.0)
    return coefficient * reference_kl(logprobs, reference_logprobs, estimator=estimator)


@requires(coefficient=AT_LEAST_0)
def unbiased_reference_kl_penalty(
    logprobs: Float[Array, "batch time"],
    behavior_logprobs: Float[Array, "batch time"],
    reference_logprobs: Float[Array, "batch time"],
    completion_mask: Bool[Array, "batch time"],
    *,
    coefficient: Scalar = 0.0,
) -> Float[Array, "batch time"]:
    """`coefficient` · KL(π ‖ π_ref), estimated on tokens that μ sampled, with unbiased value and gradient.

    ρ (exp(d) − d − 1) with d = log π_ref − log π and ρ = π/μ, which is differentiated too. The gradient is −ρ d times
    ∇log π; its mean under μ is the gradient of KL(π ‖ π_ref). The exponent log ρ is at most MAX_LOG_RATIO, and
    log ρ + d at most MAX_KL_EXPONENT.

    Args:
        logprobs: log π of each token; ignored where masked.
        behavior_logprobs: log μ of each token, constant; ignored where masked.
        reference_logprobs: log π_ref of each token, constant; ignored where masked.
        coefficient: weight of the term, in units of advantage, 0 or more.
    Raises:
        ValueError: a negative coefficient.
    Reference: arXiv 2512.02556 (DeepSeek-V3.2).

    Examples:
        >>> logprobs, reference, mask = jnp.array([[-1.0, -2.0]]), jnp.array([[-1.5, -2.0]]), jnp.array([[True, True]])
        >>> penalty = unbiased_reference_kl_penalty(logprobs, logprobs, reference, mask, coefficient=1.0)
        >>> [round(x, 3) for x in penalty[0].tolist()]
        [0.107, 0.0]
    """
    policy = jnp.where(completion_mask, logprobs, 0.0)
    constant = jax.lax.stop_gradient(policy)
    difference = log_difference(reference_logprobs, constant, completion_mask)
    log_ratio = jnp.minimum(log_difference(constant, behavior_logprobs, completion_mask), MAX_LOG_RATIO)
    ratio = jnp.exp(log_ratio)
    value = jnp.exp(jnp.minimum(log_ratio + difference, MAX_KL_EXPONENT)) - ratio * (difference + 1)
    # The gradient in closed form: where a bound cuts one of two exponents, their derivatives would not cancel.
    return coefficient * (value - ratio * difference * (policy - constant))


def effective_size_kl_penalty(
    logprobs: Float[Array, "batch time"],
    behavior_logprobs: Float[Array, "batch time"],
    effective_share: Float[Array, " batch"],
    completion_mask: Bool[Array, "batch time"],
) -> Float[Array, "batch time"]:
    """Pulls every token's probability back to the behavior policy, more strongly the staler the batch is.

    (1 − E) (1/ρ + log ρ − 1), with E = effective sample size / tokens of the batch; ρ = π/μ is differentiated.

    Args:
        logprobs: log π of each token; ignored where masked.
        behavior_logprobs: log μ, constant; ignored where masked.
        effective_share: `ratios.effective_share` over the batch's tokens, from 1/n to 1; equal for all rows.
        completion_mask: mask of the tokens that count.
    Reference: arXiv 2605.12380 (P3O). Below ρ = e^−10, where the authors' code cuts the exponent of 1/ρ and then
        pushes away from μ, the gradient stays that at e^−10.

    Examples:
        >>> logprobs, behavior_logprobs = jnp.log(jnp.array([[0.25, 0.5]])), jnp.log(jnp.array([[0.5, 0.5]]))
        >>> mask = jnp.array([[True, True]])
        >>> penalty = effective_size_kl_penalty(logprobs, behavior_logprobs, jnp.array([0.75]), mask)
        >>> [round(x, 3) for x in penalty[0].tolist()]
        [0.077, 0.0]
    """
    log_inverse = log_difference(behavior_logprobs, logprobs, completion_mask)
    return (1 - effective_share[:, None]) * kl_estimate(log_inverse, "k3", bound=10.0)


@requires(coefficient=AT_LEAST_0)
def entropy_bonus(
    entropy: Float[Array, "batch time"], completion_mask: Bool[Array, "batch time"], *, coefficient: Scalar = 0.0
) -> Float[Array, "batch time"]:
    """Entropy bonus, `coefficient` · entropy, which the loss subtracts.

    Args:
        entropy: entropy of π at each token, in nats; ignored where masked.
        coefficient: weight of the term, in units of advantage, 0 or more.
    Raises:
        ValueError: a negative coefficient.

    Examples:
        >>> mask = jnp.array([[True, True, False]])
        >>> print(entropy_bonus(jnp.array([[2.0, 1.0, 9.0]]), mask, coefficient=0.5))
        [[1.  0.5 0. ]]
    """
    return coefficient * jnp.where(completion_mask, entropy, 0.0)


@requires(coefficient=AT_LEAST_0)
def observation_cross_entropy(
    logprobs: Float[Array, "batch time"],
    observation_weights: Float[Array, "batch time"],
    *,
    coefficient: Scalar = 0.0,
) -> Float[Array, "batch time"]:
    """Cross-entropy on an agent's observations: tool results and the environment's turns, which no policy sampled.

    −`coefficient` · u_t · log π(o_t), where u_t makes the sum over a batch, divided by the loss's count, a mean over
    observation tokens.

    Args:
        logprobs: log π of each token; ignored where the weight is 0.
        observation_weights: u_t, 0 at all other tokens.
        coefficient: weight λ of the mean, in units of advantage, 0 or more.
    Raises:
        ValueError: a negative coefficient.
    Reference: arXiv 2605.24517 (ECHO).

    Examples:
        >>> logprobs, weights = jnp.array([[-1.0, -2.0, -3.0]]), jnp.array([[0.0, 0.5, 0.5]])
        >>> print(observation_cross_entropy(logprobs, weights, coefficient=0.1))
        [[0.   0.1  0.15]]
    """
    return coefficient * observation_weights * jnp.where(observation_weights > 0, -logprobs, 0.0)


@requires(share=FROM_0_TO_1)
def expert_cross_entropy(
    logprobs: Float[Array, "batch time"],
    foreign: Bool[Array, " batch"],
    completion_mask: Bool[Array, "batch time"],
    *,
    share: Scalar = 0.1,
) -> Float[Array, "batch time"]:
    """−m φ log π on other models' tokens, 0 on the policy's own; φ = p(1 − p), constant, p the policy's probability.

    φ is largest where the policy is undecided, and leaves tokens alone that it knows, or would hardly say.

    Args:
        logprobs: log π of each token; ignored where masked.
        foreign: mask of completions by other models.
        completion_mask: mask of the tokens that count.
        share: share m of the imitation, from 0 to 1.
    Raises:
        ValueError: a share out of range.
    Reference: arXiv 2508.11408 (CHORD-φ).

    Examples:
        >>> logprobs, mask = jnp.log(jnp.array([[0.5], [0.5]])), jnp.array([[True], [True]])
        >>> term = expert_cross_entropy(logprobs, jnp.array([False, True]), mask, share=1.0)
        >>> [round(x, 3) for x in term[:, 0].tolist()]
        [-0.0, 0.173]
    """
    logprobs = jnp.where(completion_mask & foreign[:, None], logprobs, 0.0)
    probability = jnp.exp(jax.lax.stop_gradient(logprobs))
    return -share * probability * (1 - probability) * logprobs


@requires(coefficient=AT_LEAST_0)
def score_centering(
    top_logprobs: Float[Array, "batch time count"],
    behavior_top_logprobs: Float[Array, "batch time count"],
    top_weights: Float[Array, "batch time count_and_rest"],
    completion_mask: Bool[Array, "batch time"],
    *,
    coefficient: Scalar = 0.0,
) -> Float[Array, "batch time"]:
    """Removes the mean of the policy gradient under the sampler, which is not 0 if a weight is not exactly π/μ.

    A Σ_{v∈H} (μ_v f(ρ_v) − α f(1/α) π_v) log π(v), ρ_v = π_v/μ_v, α = (1 − Σ_H μ) / (1 − Σ_H π), with the sampler's
    most likely tokens H and the weight f that the algorithm gives a token. All factors of log π are constants. The mean
    of the loss's gradient under μ is then 0 for an advantage that does not depend on the token, if all tokens outside H
    have the ratio 1/α; otherwise the difference is left, for these tokens alone.

    Args:
        top_logprobs: log π of the tokens in H, differentiated.
        behavior_top_logprobs: log μ of the same tokens, constant; NaN where H has fewer tokens, and without a record.
        top_weights: A f(ρ_v) of each of the tokens, and A f(1/α).
        completion_mask: mask of the tokens that count.
        coefficient: share of the mean that is removed, 0 or more; 1: all.
    Raises:
        ValueError: a negative coefficient.
    Reference: arXiv 2609.20807 (score centering).

    Examples:
        >>> top, mask = jnp.log(jnp.array([[[0.5, 0.25]]])), jnp.array([[True]])
        >>> plain = jnp.array([[[1.0, 1.0, 1.0]]])
        >>> print(score_centering(top, top, plain, mask, coefficient=1.0))
        [[0.]]
        >>> before = jnp.log(jnp.array([[[0.25, 0.5]]]))
        >>> round(float(score_centering(top, before, plain, mask, coefficient=1.0)[0, 0]), 3)
        -0.173
    """
    policy = jax.lax.stop_gradient(with_rest(top_logprobs))
    behavior = with_rest(behavior_top_logprobs)
    alpha = jnp.exp(behavior[..., -1:] - policy[..., -1:])
    mean = jnp.exp(behavior) * top_weights - alpha * top_weights[..., -1:] * jnp.exp(policy)
    is_known = completion_mask[..., None] & jnp.isfinite(behavior_top_logprobs) & jnp.isfinite(top_logprobs)
    # Masked before the product: log π is −inf at tokens that the policy cannot choose.
    known = jnp.where(is_known, top_logprobs, 0.0)
    return coefficient * jnp.sum(jnp.where(is_known, mean[..., :-1], 0.0) * known, axis=-1)


@requires(
    coefficient=AT_LEAST_0,
    beta=Bounds(lambda beta: (0 < beta) & (beta < 1), "must be between 0 and 1, without both"),
    top_k=Bounds(AT_LEAST_0.accepts, "must be 0 (the whole vocabulary) or more"),
    cap=ABOVE_0,
)
def teacher_divergence(
    scores: Float[Array, "*tokens vocab"],
    teacher_scores: Float[Array, "*tokens vocab"],
    *,
    coefficient: Scalar = 0.0,
    kind: Divergence = "reverse_kl",
    beta: Scalar = 0.5,
    top_k: int = 0,
    support: Literal["teacher", "student"] = "teacher",
    weight: Literal["none", "truncated"] = "none",
    cap: Scalar = 2.0,
) -> Float[Array, "*tokens"]:
    """`coefficient` · divergence between a teacher's and the policy's next-token distributions, over the vocabulary.

    With p = softmax(teacher_scores) and q = softmax(scores): forward_kl is KL(p ‖ q), reverse_kl is KL(q ‖ p), and jsd
    is β KL(p ‖ m) + (1−β) KL(q ‖ m), m = β p + (1−β) q.

    Args:
        scores: the policy's logits over the temperature, differentiated.
        teacher_scores: the teacher's logits over the temperature, constant.
        coefficient: weight of the term, in units of advantage, 0 or more.
        kind: forward_kl, reverse_kl or jsd.
        beta: β of jsd, between 0 and 1.
        top_k: number of most likely tokens that are compared one by one; all other tokens are compared as one event, so
            the value is a lower bound. 0: all tokens.
        support: whose most likely tokens these are, the teacher's or the policy's (student).
        weight: weight of each token's divergence in the loss, for stale samples: none, or truncated for min(π/μ, cap).
            This function returns values without weights.
        cap: limit of truncated weights, above 0.
    Raises:
        ValueError: an option out of range.
    Reference: arXiv 2306.13649 (GKD) §3; for weight, arXiv 2601.20802 (SDPO).

    Examples:
        >>> q, p = jnp.log(jnp.array([[0.5, 0.25, 0.25]])), jnp.log(jnp.array([[0.5, 0.4, 0.1]]))
        >>> kinds = "forward_kl", "reverse_kl", "jsd"
        >>> [round(float(teacher_divergence(q, p, coefficient=1.0, kind=kind)[0]), 3) for kind in kinds]
        [0.096, 0.112, 0.025]
    """
    q = jax.nn.log_softmax(scores.astype(jnp.float32))
    p = jax.nn.log_softmax(jax.lax.stop_gradient(teacher_scores).astype(jnp.float32))
    if 0 < top_k < p.shape[-1]:
        supporting = p if support == "teacher" else jax.lax.stop_gradient(q)
        _, chosen = jax.lax.top_k(supporting, top_k)
        is_other = jnp.put_along_axis(jnp.ones(p.shape, bool), chosen, False, axis=-1, inplace=False)

        def with_others_together(x):
            others_logprob = jax.nn.logsumexp(x, axis=-1, where=is_other, keepdims=True)
            return jnp.concatenate([jnp.take_along_axis(x, chosen, axis=-1), others_logprob], axis=-1)

        q = with_others_together(q)
        p = with_others_together(p)

    def kl(a, b):
        possible = ~jnp.isneginf(a)
        # Masked before the difference, whose gradient would be NaN.
        a = jnp.where(possible, a, 0.0)
        b = jnp.where(possible, b, 0.0)
        return jnp.sum(jnp.where(possible, jnp.exp(a) * (a - b), 0.0), axis=-1)

    if kind == "jsd":
        absent = jnp.isneginf(p) & jnp.isneginf(q)
        weighted_p = jnp.where(absent, 0.0, jnp.log(beta) + p)
        weighted_q = jnp.where(absent, 0.0, jnp.log1p(-beta) + q)
        mixed = jnp.where(absent, -jnp.inf, jnp.logaddexp(weighted_p, weighted_q))
        return coefficient * (beta * kl(p, mixed) + (1 - beta) * kl(q, mixed))
    if kind == "forward_kl":
        return coefficient * kl(p, q)
    return coefficient * kl(q, p)


def reverse_kl(
    scores: Float[Array, "*tokens vocab"], reference_scores: Float[Array, "*tokens vocab"]
) -> Float[Array, "*tokens"]:
    """KL(π ‖ π_ref) of next-token distributions over the vocabulary, from logits over the temperature.

    Examples:
        >>> policy, reference = jnp.log(jnp.array([[0.5, 0.5]])), jnp.log(jnp.array([[0.25, 0.75]]))
        >>> round(float(reverse_kl(policy, reference)[0]), 4)
        0.1438
    """
    return teacher_divergence(scores, reference_scores, coefficient=1.0)
