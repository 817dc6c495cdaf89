"""The gated delta net: the rule equals a loop over tokens, and sequences in one row know nothing of each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recjax.models import delta
from recjax.models.delta import causal_convolution, delta_rule
from tests.closeness import assert_close

BATCH, TIME, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 11, 2, 4, 3, 5


def inputs(time=TIME, seed=0):
    """Queries, keys, values, rates, decays and a state."""
    random = np.random.default_rng(seed)
    shapes = [(KEY_HEADS, KEY_DIM), (KEY_HEADS, KEY_DIM), (VALUE_HEADS, VALUE_DIM)]
    arrays = [random.normal(size=(BATCH, time, *shape)) for shape in shapes]
    rates, decays = random.uniform(size=(BATCH, time, VALUE_HEADS)), -random.gamma(1.0, size=(BATCH, time, VALUE_HEADS))
    state = random.normal(size=(BATCH, VALUE_HEADS, KEY_DIM, VALUE_DIM))
    return [x.astype(np.float32) for x in (*arrays, rates, decays, state)]


def by_loops(queries, keys, values, rates, decays, starts, state):
    """The rule token after token, in float64."""
    outputs, states = np.zeros(values.shape), np.zeros(state.shape)
    for row in range(BATCH):
        for head in range(VALUE_HEADS):
            s, of_key = state[row, head].astype(float), head // (VALUE_HEADS // KEY_HEADS)
            for time in range(values.shape[1]):
                q, k = (x[row, time, of_key].astype(float) for x in (queries, keys))
                q, k = (x / np.sqrt(x @ x + 1e-6) for x in (q, k))
                s = (0.0 if starts[row, time] else s) * np.exp(decays[row, time, head]) + np.zeros_like(s)
                s += rates[row, time, head] * np.outer(k, values[row, time, head] - k @ s)
                outputs[row, time, head] = q @ s / np.sqrt(KEY_DIM)
            states[row, head] = s
    return outputs, states


@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_the_rule_is_that_of_a_loop_over_tokens(chunk, monkeypatch):
    monkeypatch.setattr(delta, "CHUNK", chunk)
    *arrays, state = inputs()
    starts = np.zeros((BATCH, TIME), bool)
    starts[1, 6] = True
    pairs = zip(jax.jit(delta_rule)(*arrays, starts, state), by_loops(*arrays, starts, state), strict=True)
    for found, expected in pairs:
        assert_close(found, expected, 2e-5)


def test_the_delta_rule_uses_no_triangular_solve():
    """Two of them at once never return on a CPU with two threads, with the sizes of a real batch."""
    *arrays, state = map(jnp.asarray, inputs())
    gradient = jax.grad(lambda *arrays: delta_rule(*arrays, jnp.zeros((BATCH, TIME), bool), state)[0].sum(), range(5))
    assert "triangular_solve" not in str(jax.make_jaxpr(gradient)(*arrays))


def test_single_tokens_equal_all_tokens_at_once():
    *arrays, state = inputs(4)
    starts = np.zeros((BATCH, 4), bool)
    rule = jax.jit(delta_rule)
    expected, last = rule(*arrays, starts, state)
    for time in range(4):
        here = slice(time, time + 1)
        found, state = rule(*(x[:, here] for x in arrays), starts[:, here], state)
        assert_close(found, expected[:, here], 2e-5)
    assert_close(state, last, 2e-5)


def test_packed_sequences_depend_on_no_neighbor_and_no_padding(monkeypatch):
    """Not by a single bit, in outputs and gradients, whatever the other tokens are."""
    monkeypatch.setattr(delta, "CHUNK", 4)
    starts, real = np.zeros((BATCH, TIME), bool), np.ones((BATCH, TIME), bool)
    starts[:, [0, 6]], real[:, 9:] = True, False
    positions = np.tile([*range(6), *range(5)], (BATCH, 1))
    kernel = np.random.default_rng(5).normal(size=(VALUE_DIM * VALUE_HEADS, 1, 4)).astype(np.float32)

    @jax.jit
    @jax.grad
    def gradient(arrays, others):
        mine = (np.arange(TIME) >= 6)[:, None] & real[0][:, None]
        q, k, v, rates, decays = (
            jnp.where(mine.reshape(TIME, *[1] * (x.ndim - 2)), x, y) for x, y in zip(arrays, others, strict=True)
        )
        empty = jnp.zeros((BATCH, 1, 3, kernel.shape[0]))
        v, _ = causal_convolution(v.reshape(BATCH, TIME, -1), empty, *map(jnp.asarray, (kernel, positions, real)))
        v, steps = (
            v.reshape(BATCH, TIME, VALUE_HEADS, -1),
            [jnp.where(real[..., None], x, 0.0) for x in (rates, decays)],
        )
        state = jnp.zeros((BATCH, VALUE_HEADS, KEY_DIM, VALUE_DIM))
        found, _ = delta_rule(q, k, v, *steps, jnp.asarray(starts), state)
        return jnp.sum(jnp.sin(found[:, 6:9]))

    (*arrays, _), *others = (inputs(seed=seed) for seed in range(3))
    one, other = (gradient(arrays, junk[:-1]) for junk in others)
    assert all(np.abs(x[:, 6:9]).max() > 0 for x in one)
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_a_rows_window_contains_its_last_real_tokens():
    x = np.arange(2 * 5, dtype=np.float32).reshape(2, 5, 1)
    window, kernel = np.full((2, 1, 3, 1), -1.0, np.float32), np.ones((1, 1, 4), np.float32)
    positions = np.tile(np.arange(3, 8), (2, 1))
    real = np.arange(5) < np.array([[2], [4]])
    found, after = jax.jit(causal_convolution)(x, window, kernel, positions, real)
    np.testing.assert_array_equal(after[:, 0, :, 0], [[-1, 0, 1], [6, 7, 8]])
    np.testing.assert_allclose(found[0, 1, 0], jax.nn.silu(-1.0 - 1.0 + 0.0 + 1.0), rtol=1e-5)
