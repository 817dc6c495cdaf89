"""Batches of groups, with the noise of one key."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from recjax.models.logprobs import Sampling
from recjax.models.placement import on_host
from recjax.rollout.engine import Engine
from recjax.rollout.slots import Request, Sampled


def sample_groups(
    engine: Engine,
    prompts: Int[np.ndarray, "prompts prompt_time"],
    prompt_mask: Bool[np.ndarray, "prompts prompt_time"],
    key: PRNGKeyArray,
    *,
    group_size: int,
    max_tokens: int,
    sampling: Sampling,
) -> list[Sampled]:
    """`group_size` completions of each prompt, from an engine that has nothing else to do.

    Args:
        prompts: right-padded, each row with at least one token.
        key: a key not used before; the same key repeats the same completions. Token t of completion i, counted in the
            order of the prompts, is sampled with fold_in(fold_in(key, i), t).
        max_tokens: limit on a completion's length, end-of-sequence token included.
        sampling: the distribution.
    Reference: arXiv 2509.24203 §2 (behaviour policy μ).
    """
    keys = _row_keys(key, len(prompts) * group_size)
    prefixes = [tokens[real] for tokens, real in zip(prompts, prompt_mask, strict=True)]
    requests = [
        Request(prefixes[row // group_size], key, max_tokens, sampling) for row, key in enumerate(on_host(keys))
    ]
    tickets = engine.admit(requests, group_size)
    finished = engine.drain()
    return [finished[ticket] for ticket in tickets]


@functools.partial(jax.jit, static_argnums=1)
def _row_keys(key: PRNGKeyArray, rows: int) -> Array:
    return jax.random.key_data(jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(rows)))
