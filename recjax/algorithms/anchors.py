"""Anchors: the policy in the denominator of a ratio.

The behavior policy μ sampled the tokens. The proximal policy is the policy before the update. With several updates of a
batch, the trust region is around the proximal policy, and a separate weight corrects for μ.
"""

from jaxtyping import Array, Float

from recjax.algorithms.options import require


def behavior_anchor(behavior_logprobs: Float[Array, "batch time"]) -> Float[Array, "batch time"]:
    """The behavior policy: log μ.

    Examples:
        >>> import jax.numpy as jnp
        >>> print(behavior_anchor(jnp.array([[-1.0, -2.0]])))
        [[-1. -2.]]
    """
    return behavior_logprobs


def proximal_anchor(proximal_logprobs: Float[Array, "batch time"]) -> Float[Array, "batch time"]:
    """The policy before the update: log π_prox.

    recjax makes one update of each batch, so the ratio to this anchor is 1. In a loop with several updates of a batch,
    pass your own log-probs.

    Reference: arXiv 2110.00641 (PPO with a decoupled objective); arXiv 2505.24298 (AReaL).

    Examples:
        >>> import jax.numpy as jnp
        >>> print(proximal_anchor(jnp.array([[-1.0, -2.0]])))
        [[-1. -2.]]
    """
    return proximal_logprobs


def interpolated_anchor(
    logprobs: Float[Array, "batch time"], behavior_logprobs: Float[Array, "batch time"], *, share: float = 0.5
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
        >>> import jax.numpy as jnp
        >>> print(interpolated_anchor(jnp.array([[-1.0, -2.0]]), jnp.array([[-2.0, -2.0]]), share=0.5))
        [[-1.5 -2. ]]
    """
    require(0 <= share <= 1, "share", share, "must be from 0 to 1")
    return share * behavior_logprobs + (1 - share) * logprobs
