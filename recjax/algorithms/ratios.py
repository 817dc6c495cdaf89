"""The ratio of the policy being trained to the one that sampled the tokens."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

# e^20 ≈ 5e8: beyond every clip range, and its square is far from overflowing float32.
MAX_LOG_RATIO = 20.0


def log_difference(
    logprobs: Float[Array, "batch time"],
    other_logprobs: Float[Array, "batch time"],
    completion_mask: Bool[Array, "batch time"],
) -> Float[Array, "batch time"]:
    """log π − log μ; 0, with zero gradient, where masked, whatever stands there."""
    return jnp.where(completion_mask, logprobs, 0.0) - jnp.where(completion_mask, other_logprobs, 0.0)


def log_ratio(
    logprobs: Float[Array, "batch time"],
    behaviour_logprobs: Float[Array, "batch time"],
    completion_mask: Bool[Array, "batch time"],
) -> Float[Array, "batch time"]:
    """log ρ = log π − log μ, within ±MAX_LOG_RATIO so that ρ = exp(log ρ) is finite; 0 where masked."""
    return jnp.clip(log_difference(logprobs, behaviour_logprobs, completion_mask), -MAX_LOG_RATIO, MAX_LOG_RATIO)
