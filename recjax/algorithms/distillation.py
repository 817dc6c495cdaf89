"""On-policy distillation: a teacher's log-probs add to the advantage of each token."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from recjax.algorithms.options import require


def teacher_advantages(
    logprobs: Float[Array, "batch time"],
    teacher_logprobs: Float[Array, "batch time"],
    completion_mask: Bool[Array, "batch time"],
    *,
    coefficient: float = 0.0,
) -> Float[Array, "batch time"]:
    """Teacher's log-probs minus the policy's log-probs: A_t = c (log π_teacher − log π).

    On the policy's own samples, these advantages give the gradient of c KL(π ‖ π_teacher), token by token.

    Args:
        logprobs: log π of each token, constant.
        teacher_logprobs: log π_teacher of each token, constant.
        completion_mask: mask of the tokens that count; other tokens get 0.
        coefficient: weight c, 0 or more.
    Raises:
        ValueError: a negative coefficient.
    Reference: arXiv 2306.13649 (GKD, its reverse KL on the student's samples).

    Examples:
        >>> logprobs, teacher = jnp.array([[-2.0, -1.0, -9.0]]), jnp.array([[-1.0, -1.5, 0.0]])
        >>> mask = jnp.array([[True, True, False]])
        >>> print(teacher_advantages(logprobs, teacher, mask, coefficient=1.0))
        [[ 1.  -0.5  0. ]]
    """
    require(coefficient >= 0, "coefficient", coefficient, "must be 0 or more")
    return coefficient * jnp.where(completion_mask, teacher_logprobs - logprobs, 0.0)
