"""Attention over keys that lie in several places, under one softmax."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def attention_mask(queries: Array, keys: Array) -> Bool[Array, "rows repeats 1 1 _ length"]:
    """Which keys each query may look at, from their masks: real ones, of its own sequence where masks are ids.

    Raises:
        ValueError: one mask is boolean and the other holds sequence ids.
    """
    if (queries.dtype == bool) != (keys.dtype == bool):
        raise ValueError(f"masks of {queries.dtype} and {keys.dtype} do not mix; give bool for all, or ids for all")
    if keys.dtype == bool:
        return keys[:, None, None, None, None, :]
    queries, keys = pairs(queries, keys)
    return (queries == keys) & (keys != 0)


def pairs(queries: Array, keys: Array) -> tuple[Array, Array]:
    """Something of each query and of each key, shaped to broadcast to [rows, batch/rows, 1, 1, time, length]."""
    return queries.reshape(keys.shape[0], -1, 1, 1, queries.shape[1], 1), keys[:, None, None, None, None, :]


def attend(
    queries: Float[Array, "batch heads time head_dim"], segments: list, scale: float, cap: float | None = None
) -> Array:
    """Attention of every query over the keys of all segments under one softmax.

    Args:
        queries: rotated queries.
        segments: (keys, values, mask) triples, keys and values [rows, kv_heads, length, head_dim] with rows dividing
            the batch, mask broadcastable to [rows, batch/rows, 1, 1, time, length] and True where attention may look.
        scale: factor on the scores.
        cap: bound c of the scaled scores s, c · tanh(s / c); None: no bound.
    Returns:
        [batch * time, heads * head_dim].
    """
    batch, heads, time, head_dim = queries.shape
    kv_heads = segments[0][0].shape[1]

    def by_row(x, rows):
        return x.reshape(rows, batch // rows, kv_heads, heads // kv_heads, time, -1)

    scores = []
    for keys, _, mask in segments:
        score = jnp.einsum(
            "rnkgtd,rksd->rnkgts", by_row(queries, keys.shape[0]), keys, preferred_element_type=jnp.float32
        )
        score = jnp.where(mask, capped(score * scale, cap), -1e30)
        scores.append(score.reshape(batch, heads, time, -1))
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1).astype(queries.dtype)

    mixed, start = jnp.zeros_like(queries), 0
    for keys, values, _ in segments:
        rows, length = keys.shape[0], keys.shape[2]
        part = by_row(weights[..., start : start + length], rows)
        mixed += jnp.einsum("rnkgts,rksd->rnkgtd", part, values).reshape(queries.shape)
        start += length
    return mixed.swapaxes(1, 2).reshape(batch * time, heads * head_dim)


def capped(x: Array, cap: float | None) -> Array:
    """cap · tanh(x / cap), or x where there is no cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)
