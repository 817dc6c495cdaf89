"""Token weights, from the ratio and the advantage's sign. The loss treats them as constants."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from recjax.algorithms.options import ABOVE_0, AT_LEAST_0, AT_LEAST_1, FROM_0_TO_1, Bounds, Scalar, requires
from recjax.algorithms.ratios import bounded_exp, per_token, sequence_sum


def importance_weights(ratio: Float[Array, "batch time"]) -> Float[Array, "batch time"]:
    """The ratio as a constant: w_t = sg(ρ_t).

    Examples:
        >>> ratio = jnp.array([[0.5, 1.0, 1.5]])
        >>> print(importance_weights(ratio))
        [[0.5 1.  1.5]]
    """
    return jax.lax.stop_gradient(ratio)


@requires(cap=Bounds(AT_LEAST_1.accepts, "is the largest ratio itself, not a distance from 1; it must be 1 or more"))
def truncated_weights(ratio: Float[Array, "batch time"], *, cap: Scalar = 5.0) -> Float[Array, "batch time"]:
    """The ratio up to a cap: w_t = min(ρ_t, c).  Tokens beyond the cap keep their gradient.

    Args:
        ratio: ratio ρ of each token.
        cap: cap c, an absolute ratio and not a distance from 1; 1 or more.
    Raises:
        ValueError: a cap below 1, with which nearly every weight would be the cap.
    Reference: arXiv 2506.13585 (CISPO); arXiv 2505.24034 (AIPO); TIS.

    Examples:
        >>> ratio = jnp.array([[0.5, 1.0, 1.5]])
        >>> print(truncated_weights(ratio, cap=1.2))
        [[0.5 1.  1.2]]
    """
    return jnp.minimum(ratio, cap)


@requires(low=FROM_0_TO_1, high=AT_LEAST_1)
def banded_weights(
    ratio: Float[Array, "batch time"], *, low: Scalar = 0.5, high: Scalar = 5.0
) -> Float[Array, "batch time"]:
    """The ratio inside a band, and 0 outside the band.

    Args:
        ratio: ratio ρ of each token.
        low: lowest ratio that counts, from 0 to 1.
        high: largest ratio that counts, 1 or more.
    Raises:
        ValueError: a band without 1 in it.
    Reference: arXiv 2510.18855 (IcePop).

    Examples:
        >>> ratio = jnp.array([[0.5, 1.0, 1.5]])
        >>> print(banded_weights(ratio, low=0.8, high=5.0))
        [[0.  1.  1.5]]
    """
    return jnp.where((ratio >= low) & (ratio <= high), ratio, 0.0)


@requires(low=FROM_0_TO_1, high=AT_LEAST_1)
def sequence_banded_weights(
    log_ratio: Float[Array, "batch time"],
    completion_mask: Bool[Array, "batch time"],
    trajectories: Int[Array, " batch"] | None = None,
    *,
    low: Scalar = 0.0,
    high: Scalar = 3.0,
) -> Float[Array, "batch time"]:
    """The product of the completion's token ratios inside a band, and 0 outside the band.

    Args:
        log_ratio: log ρ of each token.
        completion_mask: mask of the tokens that count.
        trajectories: id of each row's completion; None if each row is a completion.
        low: lowest product that counts, from 0 to 1.
        high: largest product that counts, 1 or more.
    Raises:
        ValueError: a band without 1 in it.
    Reference: TRL's default correction, https://huggingface.co/docs/trl/en/paper_index (sequence_mask).

    Examples:
        >>> log_ratio, mask = jnp.log(jnp.array([[1.5, 1.5], [1.5, 3.0]])), jnp.array([[True, True], [True, True]])
        >>> print(sequence_banded_weights(log_ratio, mask))
        [[2.25 2.25]
         [0.   0.  ]]
    """
    product = bounded_exp(sequence_sum(log_ratio, completion_mask, trajectories))
    return jnp.broadcast_to(banded_weights(product, low=low, high=high), log_ratio.shape)


@requires(low=FROM_0_TO_1, high=AT_LEAST_1)
def bounded_weights(
    ratio: Float[Array, "batch time"], *, low: Scalar = 0.5, high: Scalar = 2.0
) -> Float[Array, "batch time"]:
    """The ratio clipped to a band: w_t = min(max(ρ_t, low), high).

    Args:
        ratio: ratio ρ of each token.
        low: lowest weight, from 0 to 1.
        high: largest weight, 1 or more.
    Raises:
        ValueError: a band without 1 in it.

    Examples:
        >>> ratio = jnp.array([[0.5, 1.0, 1.5]])
        >>> print(bounded_weights(ratio, low=0.75, high=1.25))
        [[0.75 1.   1.25]]
    """
    return jnp.clip(ratio, low, high)


@requires(cap=ABOVE_0)
def tapered_weights(
    ratio: Float[Array, "batch time"], advantages: Float[Array, "batch *rest"], *, cap: Scalar = 1.0
) -> Float[Array, "batch time"]:
    """1 where A ≥ 0, min(ρ, c) where A < 0: the less likely bad tokens have become, the less they are pushed down.

    Args:
        ratio: ratio ρ of each token.
        advantages: advantage of each completion or token; only the sign is read.
        cap: cap c of the ratio, above 0.
    Raises:
        ValueError: a cap not above 0.
    Reference: arXiv 2503.14286 (TOPR).

    Examples:
        >>> ratio = jnp.array([[0.5, 1.0, 1.5]])
        >>> print(tapered_weights(ratio, jnp.array([-1.0])))
        [[0.5 1.  1. ]]
    """
    return jnp.where(per_token(advantages) >= 0, 1.0, jnp.minimum(ratio, cap))


@requires(cap=AT_LEAST_1, cap_negative=AT_LEAST_1)
def inverse_weights(
    ratio: Float[Array, "batch time"],
    advantages: Float[Array, "batch *rest"],
    *,
    cap: Scalar = 3.0,
    cap_negative: Scalar = 3.0,
) -> Float[Array, "batch time"]:
    """min(1/ρ, c) where A > 0, so that unlikely tokens gain most; min(ρ, c') elsewhere.

    Tokens beyond either cap keep their gradient, which is called a soft dual clip.

    Args:
        ratio: ratio ρ of each token, above 0.
        advantages: advantage of each completion or token; only the sign is read.
        cap: cap c of 1/ρ, 1 or more.
        cap_negative: cap c' of ρ, 1 or more.
    Raises:
        ValueError: a cap below 1.
    Reference: arXiv 2510.06062 (ASPO).

    Examples:
        >>> ratio = jnp.array([[0.5, 1.0, 1.5]])
        >>> [round(x, 3) for x in inverse_weights(ratio, jnp.array([1.0]))[0].tolist()]
        [2.0, 1.0, 0.667]
    """
    return jnp.where(per_token(advantages) > 0, jnp.minimum(1 / ratio, cap), jnp.minimum(ratio, cap_negative))


@requires(tau_positive=ABOVE_0, tau_negative=ABOVE_0)
def soft_weights(
    ratio: Float[Array, "batch time"],
    advantages: Float[Array, "batch *rest"],
    *,
    tau_positive: Scalar = 1.0,
    tau_negative: Scalar = 1.05,
) -> Float[Array, "batch time"]:
    """The ratio times a gate that closes smoothly as the ratio moves away from 1.

    4σ(1−σ)ρ with σ = 1/(1 + exp(−τ(ρ−1))): the gradient of the objective (4/τ)σ, whose gate is differentiated too.

    Args:
        ratio: ratio ρ of each token.
        advantages: advantage of each completion or token; only the sign is read.
        tau_positive: temperature τ where A > 0, above 0.
        tau_negative: temperature τ where A ≤ 0, above 0.
    Raises:
        ValueError: a τ not above 0.
    Reference: arXiv 2511.20347 (SAPO).

    Examples:
        >>> ratio = jnp.array([[0.5, 1.0, 1.5]])
        >>> [round(x, 3) for x in soft_weights(ratio, jnp.array([1.0]))[0].tolist()]
        [0.47, 1.0, 1.41]
    """
    distance = jnp.where(per_token(advantages) > 0, tau_positive, tau_negative) * (ratio - 1)
    return 4 * jax.nn.sigmoid(distance) * jax.nn.sigmoid(-distance) * ratio


@requires(power_positive=AT_LEAST_0, decay_positive=AT_LEAST_0, power_negative=AT_LEAST_0, decay_negative=AT_LEAST_0)
def peaked_weights(
    ratio: Float[Array, "batch time"],
    advantages: Float[Array, "batch *rest"],
    *,
    power_positive: Scalar = 2.0,
    decay_positive: Scalar = 3.0,
    power_negative: Scalar = 3.0,
    decay_negative: Scalar = 2.0,
) -> Float[Array, "batch time"]:
    """ρ^k exp(λ(1−ρ)), which is 1 at ρ = 1 and falls to 0 far from ρ = 1.

    Args:
        ratio: ratio ρ; in the paper, the ratio of a whole completion.
        advantages: advantage of each completion or token; only the sign is read.
        power_positive: power k where A > 0, 0 or more.
        decay_positive: decay λ where A > 0, 0 or more.
        power_negative: power k where A ≤ 0, 0 or more.
        decay_negative: decay λ where A ≤ 0, 0 or more.
    Raises:
        ValueError: a negative power or decay.
    Reference: arXiv 2602.10693 (VESPO).

    Examples:
        >>> ratio = jnp.array([[0.5, 1.0, 1.5]])
        >>> [round(x, 3) for x in peaked_weights(ratio, jnp.array([1.0]))[0].tolist()]
        [1.12, 1.0, 0.502]
    """
    up = per_token(advantages) > 0
    power = jnp.where(up, power_positive, power_negative)
    decay = jnp.where(up, decay_positive, decay_negative)
    # A single exponent, so that neither factor overflows by itself.
    return jnp.exp(power * jnp.log(ratio) + decay * (1 - ratio))


@requires(beta=FROM_0_TO_1, decay=AT_LEAST_0)
def blended_weights(
    ratio: Float[Array, "batch time"],
    advantages: Float[Array, "batch *rest"],
    *,
    beta: Scalar = 0.5,
    decay: Scalar = 2.0,
) -> Float[Array, "batch time"]:
    """m exp(λ(1−m)), m a mean of 1 and ρ: arithmetic where A ≥ 0, 1 − β + βρ, and geometric where A < 0, ρ^β.

    A good sample keeps some weight however unlikely it has become; the weight of a bad one falls to 0 with ρ.

    Args:
        ratio: ratio ρ; in the paper, the ratio of a whole completion.
        advantages: advantage of each completion or token; only the sign is read.
        beta: share β of ρ in the mean, from 0 to 1.
        decay: decay λ, 0 or more.
    Raises:
        ValueError: β out of range, or a negative λ.
    Reference: arXiv 2609.35433 (ReSPO), as in the authors' code.

    Examples:
        >>> ratio = jnp.array([[0.0, 1.0, 3.0]])
        >>> [round(x, 3) for x in blended_weights(ratio, jnp.array([1.0]))[0].tolist()]
        [1.359, 1.0, 0.271]
        >>> [round(x, 3) for x in blended_weights(ratio, jnp.array([-1.0]))[0].tolist()]
        [0.0, 1.0, 0.401]
    """
    mean = jnp.where(per_token(advantages) >= 0, 1 - beta + beta * ratio, ratio**beta)
    return mean * jnp.exp(decay * (1 - mean))


@requires(epsilon=AT_LEAST_0, cap=ABOVE_0)
def complement_weights(
    logprobs: Float[Array, "batch time"],
    behavior_logprobs: Float[Array, "batch time"],
    *,
    epsilon: Scalar = 0.2,
    cap: Scalar = 5.0,
) -> Float[Array, "batch time"]:
    """The ratio of the probabilities of all other tokens, turned over: min((1 + ε − μ) / (1 + ε − π), c).

    At ε = 0, this is the factor by which ∇log π of the token changes if the mean of the scores of "this token" and "any
    other" under μ is subtracted.

    Args:
        logprobs: log π of each token.
        behavior_logprobs: log μ of each token.
        epsilon: constant ε, 0 or more.
        cap: largest weight c, above 0.
    Raises:
        ValueError: a negative ε, or a cap not above 0.
    Reference: arXiv 2609.15987 (BPO); at ε = 0, arXiv 2610.08963 (KLPO with a binary KL).

    Examples:
        >>> now, before = jnp.log(jnp.array([[0.5, 0.2]])), jnp.log(jnp.array([[0.25, 0.6]]))
        >>> [round(x, 3) for x in complement_weights(now, before, epsilon=0.0)[0].tolist()]
        [1.5, 0.5]
    """
    # A token of probability 1 leaves 0 for all other tokens.
    others = jnp.maximum(epsilon - jnp.expm1(logprobs), jnp.finfo(logprobs.dtype).tiny)
    return jnp.minimum((epsilon - jnp.expm1(behavior_logprobs)) / others, cap)


def probability_weights(logprobs: Float[Array, "batch time"]) -> Float[Array, "batch time"]:
    """The token's probability π: the ratio to a behavior policy of probability 1, for samples without log-probs.

    Reference: https://github.com/krafton-ai/Offline-GRPO.

    Examples:
        >>> print(probability_weights(jnp.log(jnp.array([[0.5, 0.25]]))))
        [[0.5  0.25]]
    """
    return jnp.exp(logprobs)


@requires(gamma=ABOVE_0)
def expert_shaped_weights(
    ratio: Float[Array, "batch time"],
    logprobs: Float[Array, "batch time"],
    foreign: Bool[Array, " batch"],
    *,
    gamma: Scalar = 0.1,
) -> Float[Array, "batch time"]:
    """The ratio on the policy's own tokens; γp/(p+γ)² on other models' tokens, with the policy's probability p.

    γp/(p+γ)² is the gradient of p/(p+γ): the ratio to an expert of probability 1, reshaped to give rare tokens weight.

    Args:
        ratio: ratio ρ of each token.
        logprobs: log π of each token.
        foreign: mask of completions by other models.
        gamma: shaping constant γ, above 0.
    Raises:
        ValueError: γ is not above 0.
    Reference: arXiv 2504.14945 (LUFFY).

    Examples:
        >>> ratio = jnp.array([[0.5, 1.0, 1.5]])
        >>> logprobs = jnp.log(jnp.array([[0.1, 0.5, 0.9]]))
        >>> weights = expert_shaped_weights(ratio, logprobs, jnp.array([True]))
        >>> [round(x, 3) for x in weights[0].tolist()]
        [0.25, 0.139, 0.09]
    """
    probability = jnp.exp(logprobs)
    return jnp.where(foreign[:, None], gamma * probability / jnp.square(probability + gamma), ratio)


@requires(share=FROM_0_TO_1)
def own_weights(
    ratio: Float[Array, "batch time"], foreign: Bool[Array, " batch"], *, share: Scalar = 0.1
) -> Float[Array, "batch time"]:
    """(1 − m)ρ on the policy's own tokens, 0 on other models' tokens, which `expert_cross_entropy` imitates.

    Args:
        ratio: ratio ρ of each token.
        foreign: mask of completions by other models.
        share: share m of the imitation, from 0 to 1.
    Raises:
        ValueError: a share out of range.
    Reference: arXiv 2508.11408 (CHORD).

    Examples:
        >>> ratio = jnp.array([[0.5, 1.0], [0.5, 1.0]])
        >>> print(own_weights(ratio, jnp.array([False, True]), share=0.5))
        [[0.25 0.5 ]
         [0.   0.  ]]
    """
    return jnp.where(foreign[:, None], 0.0, (1 - share) * ratio)


def effective_size_capped_weights(
    scored_log_ratio: Float[Array, "batch time"],
    effective_share: Float[Array, " batch"],
    completion_mask: Bool[Array, "batch time"],
) -> Float[Array, "batch time"]:
    """The ratio up to a cap that falls as the batch gets stale: min(ρ_t, effective sample size / batch size).

    Args:
        scored_log_ratio: log ρ of each token of the whole batch.
        effective_share: `ratios.effective_share` over the batch's tokens, from 1/n to 1; equal for all rows.
        completion_mask: mask of the tokens that count.
    Reference: arXiv 2605.12380 (P3O), as in the authors' code.

    Examples:
        >>> log_ratio, mask = jnp.log(jnp.array([[0.5, 3.0]])), jnp.array([[True, True]])
        >>> print(effective_size_capped_weights(log_ratio, jnp.array([0.75]), mask))
        [[0.5  0.75]]
    """
    ratio = jnp.where(completion_mask, bounded_exp(scored_log_ratio), 0.0)
    return jnp.minimum(ratio, effective_share[:, None])
