"""The two containers of values that the functions of the axes read; `reading` describes each value.

A value is None if it is unknown or not computed yet. Inside the loss a container has the rows of a micro-batch; in
`losses.row_terms` it has the rows of the complete batch.
"""

from collections.abc import Mapping
from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray


class Tokens(NamedTuple):
    """Values of each token.

    logprobs: log π, 0 where masked; differentiated.
    entropy: entropy of π, in nats; differentiated, and not masked.
    divergence: `regularizers.teacher_divergence`; differentiated, and not masked.
    top_logprobs: log π of the behavior policy's most likely tokens; differentiated, and not masked.
    behavior_top_logprobs: log μ of the same tokens; NaN where unknown.
    per_token: the loss of each token, which a reduction reads.
    """

    completion_mask: Bool[Array, "batch time"] | None
    logprobs: Float[Array, "batch time"] | None = None
    behavior_logprobs: Float[Array, "batch time"] | None = None
    proximal_logprobs: Float[Array, "batch time"] | None = None
    reference_logprobs: Float[Array, "batch time"] | None = None
    teacher_logprobs: Float[Array, "batch time"] | None = None
    anchor_logprobs: Float[Array, "batch time"] | None = None
    log_ratio: Float[Array, "batch time"] | None = None
    ratio: Float[Array, "batch time"] | None = None
    advantages: Float[Array, "batch *rest"] | None = None
    entropy: Float[Array, "batch time"] | None = None
    divergence: Float[Array, "batch time"] | None = None
    top_logprobs: Float[Array, "batch time count"] | None = None
    behavior_top_logprobs: Float[Array, "batch time count"] | None = None
    per_token: Float[Array, "batch time"] | None = None
    token_turns: Int[Array, "batch time"] | None = None
    scored_logprobs: Float[Array, "batch time"] | None = None
    scored_log_ratio: Float[Array, "batch time"] | None = None
    scored_entropy: Float[Array, "batch time"] | None = None
    scored_reference_kl: Float[Array, "batch time"] | None = None


class Rows(NamedTuple):
    """Constants of each row. Inside the loss only the first three are known."""

    foreign: Bool[Array, " batch"] | None = None
    trajectories: Int[Array, " batch"] | None = None
    effective_share: Float[Array, " batch"] | None = None
    kept: Bool[Array, " batch"] | None = None
    rewards: Float[Array, " batch"] | None = None
    group_ids: Int[Array, " batch"] | None = None
    lengths: Int[Array, " batch"] | None = None
    reward_parts: Mapping[str, Float[Array, " batch"]] | None = None
    part_weights: Mapping[str, Float[Array, " batch"]] | None = None
    turn_rewards: Float[Array, "batch turns"] | None = None
    key: PRNGKeyArray | None = None
