"""The gated delta net: a causal convolution, and a recurrent state that each token decays, corrects and reads.

All arrays are in float32, as are all sums: errors in the state would last for the whole sequence.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

CHUNK = 64  # tokens whose corrections are solved together, a power of two
_matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


class DeltaState(NamedTuple):
    """The arrays that a layer keeps of a row's earlier tokens.

    recurrent: maps keys to values.
    window: inputs of the convolution at the latest tokens, zeros before the first token; the second axis has size 1.
    """

    recurrent: Float[Array, "*layers rows value_heads key_dim value_dim"]
    window: Float[Array, "*layers rows 1 earlier channels"]


def causal_convolution(
    x: Float[Array, "rows time channels"],
    window: Float[Array, "rows 1 earlier channels"],
    kernel: Float[Array, "channels 1 size"],
    positions: Int[Array, "rows time"],
    real: Bool[Array, "rows time"],
) -> tuple[Float[Array, "rows time channels"], Float[Array, "rows 1 earlier channels"]]:
    """silu(Σ_i kernel[c, size - 1 - i] · x[t - i, c]) for each channel c, over tokens of t's own sequence.

    Args:
        window: inputs at the tokens before `x`.
        positions: number of tokens before each token in its sequence; `x` and `window` hold the latest ones in order.
        real: True at real tokens.
    Returns:
        The convolution, undefined at padding, and the window after the last real token.
    """
    kernel = kernel[:, 0].T.astype(jnp.float32)
    time = x.shape[1]
    size = len(kernel)
    seen = jnp.concatenate([window[:, 0].astype(jnp.float32), x.astype(jnp.float32)], axis=1)
    total = seen[:, size - 1 :] * kernel[size - 1]
    for back in range(1, size):
        earlier = seen[:, size - 1 - back : size - 1 - back + time]
        total += jnp.where(positions[..., None] >= back, earlier, 0.0) * kernel[size - 1 - back]
    ends = jnp.max(jnp.where(real, jnp.arange(1, time + 1), 0), axis=1)
    latest = jnp.take_along_axis(seen, (ends[:, None] + jnp.arange(size - 1))[..., None], axis=1)
    return jax.nn.silu(total), latest[:, None].astype(window.dtype)


def delta_rule(
    queries: Float[Array, "rows time key_heads key_dim"],
    keys: Float[Array, "rows time key_heads key_dim"],
    values: Float[Array, "rows time value_heads value_dim"],
    rates: Float[Array, "rows time value_heads"],
    decays: Float[Array, "rows time value_heads"],
    starts: Bool[Array, "rows time"],
    state: Float[Array, "rows value_heads key_dim value_dim"],
) -> tuple[Float[Array, "rows time value_heads value_dim"], Float[Array, "rows value_heads key_dim value_dim"]]:
    """Reads the state after each token: S ← exp(decay) S;  S ← S + rate · k (v - Sᵀ k)ᵀ;  output Sᵀ q.

    A token with rate and decay 0 does not change the state. Several tokens are computed in chunks: a unit-triangular
    system gives all corrections of a chunk at once, so that only chunks follow one another.

    Args:
        queries, keys: without norm; the rule scales them to length 1, and queries by key_dim ** -0.5.
        rates, decays: the learning rate and the logarithm of the decay, at most 0.
        starts: True at the first token of each sequence packed into a row: no earlier token reaches it.
    Returns:
        Outputs, and the state after the last token.
    Reference: arXiv 2412.06464 §3.3; arXiv 2406.06484 §3 for the chunks.
    """
    batch, time, heads, size = keys.shape
    *_, value_heads, value_dim = values.shape

    def unit(x: Array) -> Array:
        return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)

    def by_head(x: Array) -> Array:
        """[rows, time, heads, ...] as [rows, key_heads, value_heads / key_heads or 1, time, units]."""
        return jnp.moveaxis(x.reshape(*x.shape[:2], heads, x.shape[2] // heads, -1), 1, 3)

    q = by_head(unit(queries) * size**-0.5)
    k = by_head(unit(keys))
    v = by_head(values)
    rate = by_head(rates)
    decay = by_head(decays)
    state = state.reshape(batch, heads, -1, size, value_dim)
    if time == 1:
        state = state * jnp.exp(decay)
        stored = jnp.sum(state * k.mT, axis=-2, keepdims=True)
        state += k.mT * ((v - stored) * rate)
        outputs = jnp.sum(state * q.mT, axis=-2, keepdims=True)
    else:
        outputs, state = _in_chunks(q, k, v, rate, decay, starts=starts, state=state)
    outputs = jnp.moveaxis(outputs, 3, 1).reshape(batch, time, value_heads, value_dim)
    return outputs, state.reshape(batch, value_heads, size, value_dim)


def _in_chunks(
    q: Array, k: Array, v: Array, rate: Array, decay: Array, *, starts: Bool[Array, "rows time"], state: Array
) -> tuple[Array, Array]:
    """`delta_rule` of several tokens, with arrays [rows, key_heads, value_heads / key_heads or 1, time, units].

    Within a chunk that starts with the state S, token t adds k_t c_tᵀ to the state, with the correction
    c_t = rate_t (v_t - D_0t Sᵀ k_t) - Σ_{s<t} rate_t D_st (k_t · k_s) c_s, where D_st is the decay from s to t. This is
    a unit-triangular system, whose solution is `new` - `read` S.
    """
    time = k.shape[3]
    chunk = min(CHUNK, 1 << (time - 1).bit_length())

    def chunks(x: Array) -> Array:
        """[..., time, units] as [chunks, ..., chunk, units], padded with zeros."""
        padding = [(0, 0)] * x.ndim
        padding[-2] = (0, -time % chunk)
        return jnp.moveaxis(jnp.pad(x, padding).reshape(*x.shape[:-2], -1, chunk, x.shape[-1]), -3, 0)

    q, k, v, rate, decay = map(chunks, (q, k, v, rate, decay))
    started = jnp.cumsum(chunks(starts[:, None, None, :, None].astype(jnp.int32)), axis=-2)  # 0: of an earlier chunk
    same_sequence = (started == started.mT) & jnp.tril(jnp.ones((chunk, chunk), bool))
    # Decays of other sequences are multiplied by 0, so that not even rounding errors pass between sequences.
    total = _matmul(same_sequence.astype(jnp.float32), decay)
    between = jnp.exp(jnp.where(same_sequence, total - total.mT, -jnp.inf))
    from_state = jnp.where(started == 0, jnp.exp(total), 0.0)
    to_end = jnp.exp(jnp.where(started == started[..., -1:, :], total[..., -1:, :] - total, -jnp.inf))
    system = _matmul(k, k.mT) * rate * between
    inputs = jnp.concatenate([v * rate, k * rate * from_state], axis=-1)
    solved = _solve_unit_lower(jnp.tril(system, -1), inputs)
    new = solved[..., : v.shape[-1]]
    read = solved[..., v.shape[-1] :]

    def run(state: Array, chunk_arrays: tuple[Array, ...]) -> tuple[Array, Array]:
        q_from_state, q_to_keys, k_to_end, new, read, state_decay = chunk_arrays
        corrections = new - _matmul(read, state)
        outputs = _matmul(q_from_state, state) + _matmul(q_to_keys, corrections)
        return state * state_decay + _matmul(k_to_end.mT, corrections), outputs

    chunk_arrays = (
        q * from_state,
        _matmul(q, k.mT) * between,
        k * to_end,
        new,
        read,
        from_state[..., -1:, :],
    )
    state, outputs = jax.lax.scan(run, state, chunk_arrays)
    outputs = jnp.moveaxis(outputs, 0, -3)
    outputs = outputs.reshape(*outputs.shape[:3], -1, outputs.shape[-1])
    return outputs[..., :time, :], state


def _solve_unit_lower(
    strict: Float[Array, "*batch size size"], right: Float[Array, "*batch size units"]
) -> Float[Array, "*batch size units"]:
    """x of (I + strict) x = right, for a strictly lower triangular matrix whose size is a power of two.

    XLA's triangular_solve never returns on a CPU where two calls run at once. This function inverts diagonal
    blocks of 1, 2, 4, … rows: [[A, 0], [C, D]] has the inverse [[A⁻¹, 0], [-D⁻¹ C A⁻¹, D⁻¹]].
    """
    size = strict.shape[-1]
    below = jax.lax.stop_gradient(strict)
    inverses = jnp.ones((*strict.shape[:-1], 1, 1), strict.dtype)
    block = 1
    while block < size:
        pairs = below.reshape(*below.shape[:-2], size // block // 2, 2, block, size // block // 2, 2, block)
        corners = jnp.moveaxis(jnp.diagonal(pairs[..., 1, :, :, 0, :], axis1=-4, axis2=-2), -1, -3)
        first = inverses[..., ::2, :, :]
        second = inverses[..., 1::2, :, :]
        corners = -_matmul(_matmul(second, corners), first)
        inverses = jnp.block([[first, jnp.zeros_like(first)], [corners, second]])
        block *= 2
    inverse = inverses[..., 0, :, :]
    solved = _matmul(inverse, right)
    # The refinement removes rounding errors, and its derivative is that of the solution though the inverse is constant.
    return solved + _matmul(inverse, right - solved - _matmul(strict, solved))
