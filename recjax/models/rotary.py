"""Rotary positions: pairs of head dimensions turned by angles that grow with a token's position."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


class RopeScaling(NamedTuple):
    """Scaling of rotary frequencies for long contexts; `kind` is "linear", "llama3" or "yarn".

    low_frequency_factor, high_frequency_factor: full rotations within the original context at which the interpolation
        is complete, and at which it begins; `yarn` calls them beta_slow and beta_fast.
    attention_factor: factor on cosine and sine, for `yarn`.
    truncate: round the ends of the ramp of `yarn` to whole pairs of dimensions.
    """

    kind: str
    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_max_positions: float = 8192
    attention_factor: float = 1.0
    truncate: bool = True


def scaled_frequencies(theta: float, size: int, scaling: RopeScaling | None) -> Float[np.ndarray, " half"]:
    """Frequencies of `size` dimensions with base `theta`, for a context longer than the training context.

    Raises:
        ValueError: an unknown kind of scaling.
    Reference: RoFormer (arXiv 2104.09864) §3.2; Llama 3.1's piecewise scaling for `llama3`; arXiv 2309.00071 §3.2 for
        `yarn`.
    """
    frequencies = theta ** -(np.arange(0, size, 2, dtype=np.float64) / size)
    if scaling is None:
        return frequencies
    divided = frequencies / scaling.factor
    if scaling.kind == "linear":
        return divided
    low = scaling.low_frequency_factor
    high = scaling.high_frequency_factor
    # keep: the share of the original frequency in each scaled frequency.
    if scaling.kind == "llama3":
        rotations = scaling.original_max_positions * frequencies / (2 * math.pi)
        keep = np.clip((rotations - low) / (high - low), 0.0, 1.0)
    elif scaling.kind == "yarn":

        def pair_with(rotations: float) -> float:
            """The pair of dimensions that makes so many full rotations within the original context."""
            tokens_per_radian = scaling.original_max_positions / (rotations * 2 * math.pi)
            return size * math.log(tokens_per_radian) / (2 * math.log(theta))

        first = pair_with(high)
        last = pair_with(low)
        if scaling.truncate:
            first = math.floor(first)
            last = math.ceil(last)
        first = max(first, 0)
        last = min(last, size - 1)
        if first == last:
            last += 0.001
        keep = 1 - np.clip((np.arange(size // 2) - first) / (last - first), 0.0, 1.0)
    else:
        raise ValueError(f"rope_scaling kind {scaling.kind!r} is not known; use 'linear', 'llama3' or 'yarn'")
    return keep * frequencies + (1 - keep) * divided


class Rotary(NamedTuple):
    """Angular frequency of each pair of dimensions, in radians per position, and a factor on cosine and sine.

    A leading axis for layers exists if layers differ. A layer with frequency 0 does not rotate. None: factor 1.
    """

    frequencies: Float[np.ndarray | Array, "*layers half"]
    factor: Float[np.ndarray | Array, "*layers"] | np.floating | None = None


class RotaryAngles(NamedTuple):
    """Cosine and sine of the angle by which each token turns each pair of dimensions."""

    cos: Float[Array, "batch time half"]
    sin: Float[Array, "batch time half"]


def rotary_angles(positions: Int[Array, "batch time"], rotary: Rotary) -> RotaryAngles:
    """The angles of tokens at these positions, for one layer or for layers that are alike."""
    radians = positions[..., None].astype(jnp.float32) * rotary.frequencies
    angles = RotaryAngles(jnp.cos(radians), jnp.sin(radians))
    if rotary.factor is not None:
        angles = RotaryAngles(angles.cos * rotary.factor, angles.sin * rotary.factor)
    return jax.lax.platform_dependent(angles, cpu=_in_memory, default=jax.lax.optimization_barrier)


def _in_memory(angles: RotaryAngles) -> RotaryAngles:
    """The angles, written to memory. Otherwise XLA computes them again for every use, in each head of each layer.

    XLA on the CPU drops barriers before it fuses operations. It fuses nothing into a matmul, and one with the identity
    is exact.
    """

    def multiplied(x: Array) -> Array:
        identity = jnp.eye(x.shape[-1], dtype=x.dtype)
        return jnp.matmul(x, identity, precision=jax.lax.Precision.HIGHEST)

    return RotaryAngles(multiplied(angles.cos), multiplied(angles.sin))


def rotate(
    x: Float[Array, "batch heads time head_dim"], angles: RotaryAngles
) -> Float[Array, "batch heads time head_dim"]:
    """Rotates each pair (x_i, x_{i + half}) of the first 2 · half dimensions by its angle, in float32."""
    cos = angles.cos[:, None]
    sin = angles.sin[:, None]
    half = cos.shape[-1]
    ends = [half]
    if 2 * half < x.shape[-1]:
        ends.append(2 * half)
    first, second, *unrotated = jnp.split(x.astype(jnp.float32), ends, axis=-1)
    pieces = [first * cos - second * sin, second * cos + first * sin, *unrotated]
    return jnp.concatenate(pieces, axis=-1).astype(x.dtype)
