"""Samples one token per row with the row's own key, and returns its log-probability."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from recjax.models.logprobs import Sampling, logprobs_and_entropy, sampling_logits
from recjax.models.placement import ROWS, constrain


def sample_tokens(
    scores: Float[Array, "batch vocab"], sampling: Sampling, keys: Key[Array, " batch"]
) -> tuple[Int[Array, " batch"], Float[Array, " batch"]]:
    """One token per row, sampled with the row's key, and its log-probability under the distribution that sampled it."""
    scores = constrain(scores, ROWS)
    if sampling.temperature == 0:
        tokens = _in_two_steps(scores, jnp.max, lambda among, _: jnp.argmax(among, axis=-1))
    else:

        def sampled(among: Array, step: int) -> Array:
            return jax.vmap(jax.random.categorical)(jax.vmap(jax.random.fold_in, (0, None))(keys, step), among)

        tokens = _in_two_steps(sampling_logits(scores, sampling), jax.nn.logsumexp, sampled)
    return tokens, logprobs_and_entropy(scores, tokens, sampling)[0]


def _in_two_steps(scores: Float[Array, "batch vocab"], of_block: Callable, choose: Callable) -> Int[Array, " batch"]:
    """Chooses an index per row in two steps: one of about √vocab blocks by `of_block` of its scores, then one in it.

    The result equals a choice among all scores at once, including ties. Sampling takes 2 √vocab random numbers, not
    vocab, and avoids an argmax over many scores, which XLA compiles to slow code on CPUs.
    """
    batch, vocab = scores.shape
    length = math.isqrt(vocab - 1) + 1
    padding = -vocab % length
    blocks = jnp.pad(scores, ((0, 0), (0, padding)), constant_values=-jnp.inf).reshape(batch, -1, length)
    block = choose(of_block(blocks, axis=-1), 0)
    inside = choose(jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0], 1)
    return block * length + inside
