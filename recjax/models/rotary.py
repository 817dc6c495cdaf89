"""Rotary positions: pairs of head dimensions turned by angles that grow with a token's position."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


class RopeScaling(NamedTuple):
    """Scaling of rotary frequencies for long contexts; `kind` is "linear" or "llama3"."""

    kind: str
    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_max_positions: float = 8192


def stretched(frequencies: Float[np.ndarray, " half"], scaling: RopeScaling | None) -> Float[np.ndarray, " half"]:
    """Frequencies for a context longer than the training context.

    Raises:
        ValueError: an unknown kind of scaling.
    Reference: Llama 3.1's piecewise scaling for `llama3`.
    """
    if scaling is None:
        return frequencies
    divided = frequencies / scaling.factor
    if scaling.kind == "linear":
        return divided
    if scaling.kind != "llama3":
        raise ValueError(f"rope_scaling kind {scaling.kind!r} is not known; use 'linear' or 'llama3'")
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    span = scaling.high_frequency_factor - scaling.low_frequency_factor
    keep = np.clip((turns - scaling.low_frequency_factor) / span, 0.0, 1.0)
    return keep * frequencies + (1 - keep) * divided


def turns_of(positions: Int[Array, "batch time"], frequencies: np.ndarray | Array) -> tuple[Array, Array]:
    """Cosine and sine of the rotary angles, [batch, time, half] each; `frequencies` is [half]."""
    angles = positions[..., None].astype(jnp.float32) * frequencies
    # Without the barrier, XLA recomputes them for every use.
    return jax.lax.optimization_barrier((jnp.cos(angles), jnp.sin(angles)))


def rotate(
    x: Float[Array, "batch heads time head_dim"], turns: tuple[Array, Array]
) -> Float[Array, "batch heads time head_dim"]:
    """Rotates each pair (x_i, x_{i + head_dim/2}) by its angle, in float32; `turns` comes from `turns_of`."""
    cos, sin = (turn[:, None] for turn in turns)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
