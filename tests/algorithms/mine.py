"""Functions as a user would write them, for the axes of an algorithm."""

import jax
import jax.numpy as jnp


def bounded(ratio, advantages, completion_mask, *, cap=3.0):
    """min(ρ, cap) where A > 0, 1 elsewhere."""
    return jnp.where(completion_mask & (advantages > 0), jnp.minimum(ratio, cap), 1.0)


def branching(ratio, *, cap: float = 1.0):
    """A branch of Python's, which a compiled program cannot take."""
    return jnp.minimum(ratio, cap) if cap > 1 else jnp.ones_like(ratio)


def above_median(rewards, kept):
    """The reward over the median of the batch."""
    return jnp.where(kept, rewards - jnp.nanmedian(jnp.where(kept, rewards, jnp.nan)), 0.0)


def by_entropy(rewards, scored_entropy):
    return rewards[:, None] * scored_entropy


def mostly_certain(scored_entropy, completion_mask, *, most: float = 1.0):
    """Tokens at which the policy is not too uncertain."""
    return completion_mask & (scored_entropy < most)


def pull(logprobs, behavior_logprobs, completion_mask, *, strength: float = 0.1):
    """A pull to the behavior policy."""
    return strength * jnp.where(completion_mask, jnp.abs(logprobs - behavior_logprobs), 0.0)


def pull_while_stale(logprobs, behavior_logprobs, completion_mask, effective_share):
    """A pull that grows as the batch's effective sample size falls."""
    return (1 - effective_share[:, None]) * pull(logprobs, behavior_logprobs, completion_mask, strength=1.0)


def anchored_entropy(logprobs, reference_logprobs, entropy, completion_mask, *, strength: float = 0.1):
    """A bonus for entropy, smaller where the policy has moved from the reference."""
    distance = jnp.where(completion_mask, jnp.abs(logprobs - reference_logprobs), 0.0)
    return -strength * entropy * jnp.exp(-distance)


def to_teacher(logprobs, teacher_logprobs, advantages, ratio, completion_mask):
    """A squared distance to a teacher, at tokens with a positive advantage, weighted by the ratio."""
    distance = jnp.where(completion_mask & (advantages > 0), logprobs - teacher_logprobs, 0.0)
    return ratio * distance**2


def misspelt(ratio, advantage):
    """A parameter that is nothing."""
    return ratio * advantage


def mixed_up(ratio, kept):
    """Of a micro-batch and of the whole batch at once."""
    return ratio * kept[:, None]


def of_another_shape(ratio):
    """One number too many."""
    return jnp.concatenate([ratio, ratio], axis=-1)


def broken(ratio):
    """An error of its own."""
    return ratio.no_such_method()


not_a_function = 3


def below_one_and_a_half(ratio):
    return ratio < 1.49


def mean_of_all(ratio):
    """A number that depends on the split into micro-batches."""
    return ratio.mean()


def row_sums(logprobs):
    return logprobs.sum(-1)


def token_sums(per_token):
    """A sum without a count."""
    return per_token.sum(-1)


def mostly_certain_rows(scored_entropy):
    return (scored_entropy < 1).all(-1)


def mean_reward(rewards):
    return rewards.mean()


def mean_and_yes(per_token, completion_mask):
    """A count that is none."""
    return per_token.sum(), completion_mask.any()


def forgotten(logprobs, advantages):
    """No result."""


@jax.jit
def summed_rows(logprobs):
    return logprobs.sum(-1, keepdims=True)


def clipped_surrogate(ratio, advantages, completion_mask, *, epsilon: float = 0.2):
    """PPO's −min(ρA, clip(ρ, 1 − ε, 1 + ε) A), for each token."""
    clipped = jnp.clip(ratio, 1 - epsilon, 1 + epsilon)
    return -jnp.where(completion_mask, jnp.minimum(ratio * advantages, clipped * advantages), 0.0)


def clipped_gradient(logprobs, ratio, advantages, completion_mask, *, epsilon: float = 0.2):
    """The same gradient as a term: −sg(ρA) log π where PPO's clip lets it pass."""
    passes = jnp.where(advantages > 0, ratio <= 1 + epsilon, ratio >= 1 - epsilon)
    coefficients = jnp.where(completion_mask & passes, ratio * advantages, 0.0)
    return -jax.lax.stop_gradient(coefficients) * logprobs


def nothing(ratio):
    """A weight that leaves the loss to a term."""
    return jnp.zeros_like(ratio)


def near_anchor(logprobs, anchor_logprobs, *, most: float = 0.5):
    """Tokens at which π has not gone far from μ, by a mask on each micro-batch."""
    return jnp.abs(logprobs - anchor_logprobs) < most


def pushed(advantages, scored_log_ratio):
    """A weight of each token, which also reads its completion's advantage."""
    return jnp.where(advantages[:, None] > 0, jnp.exp(-jnp.abs(scored_log_ratio)), 0.5)
