"""On-policy distillation: a teacher's log-probs of each token as a part of the advantage."""

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
    """How much likelier the teacher finds each token: A_t = c (log π_teacher − log π).

    Under the policy's own samples the policy gradient with it is that of c KL(π ‖ π_teacher), token by token.

    Args:
        logprobs: log π of each token, constant.
        teacher_logprobs: log π_teacher of each token, constant.
        completion_mask: True at tokens that count; the others get 0.
        coefficient: c, 0 or more.
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
