"""Anchors: the policy that a ratio is measured from.

The behavior policy μ sampled the tokens. The proximal policy is the one from which an update starts: where a batch
gets several updates, it is what a trust region is about, and the correction for μ is a weight apart.
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

    A run makes one update of a batch, in which the ratio to this anchor is one; a loop that makes several passes its
    own log-probs.

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
    """Between the policy and the behavior policy, in log-probs: α log μ + (1 − α) log π.  It needs no scoring pass.

    Args:
        logprobs: log π of each token.
        behavior_logprobs: log μ of each token.
        share: α, of the behavior policy, from 0 to 1.
    Raises:
        ValueError: a share outside of these.
    Reference: arXiv 2512.06547 (A-3PO), whose α follows from each token's staleness.

    Examples:
        >>> import jax.numpy as jnp
        >>> print(interpolated_anchor(jnp.array([[-1.0, -2.0]]), jnp.array([[-2.0, -2.0]]), share=0.5))
        [[-1.5 -2. ]]
    """
    require(0 <= share <= 1, "share", share, "must be from 0 to 1")
    return share * behavior_logprobs + (1 - share) * logprobs
