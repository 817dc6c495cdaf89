"""The kinds of operations of a program, and the seconds that they share."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.operations import OTHER, WAITING, Event, kinds_of, on_one_core, seconds_by_kind


def test_kinds_follow_from_a_compiled_program():
    def program(x, key):
        scores = x @ x.T
        return jnp.sort(jnp.exp(scores), axis=-1), jax.random.uniform(key, (7,)), jax.lax.rsqrt(x[0] + 1.0)

    text = jax.jit(program).lower(jnp.ones((8, 8)), jax.random.key(0)).compile().as_text()
    found = {*kinds_of([text]).values()}
    assert {"products", "softmax and exp", "random numbers", "norms", "sorts"} <= found
    assert kinds_of(["ENTRY %main () -> f32[] {\n  %a.1 = f32[] add(%b, %c)\n}"]) == {"a.1": OTHER}


def test_operations_at_the_same_time_share_it():
    times = {("a", 0.0): 4.0, ("b", 1.0): 1.0, ("w", 0.0): 9.0, ("b", 6.0): 2.0}
    events = [Event("p", name, began, seconds) for (name, began), seconds in times.items()]
    seconds = seconds_by_kind(events, {"a": "products", "b": "norms"})
    assert seconds == pytest.approx({"products": 3.5, "norms": 2.5, WAITING: 2.0})
    assert sum(seconds.values()) == pytest.approx(8.0)


def test_share_on_one_core_follows_amdahl():
    assert on_one_core(4.0, 4.0, 4) == 1.0 and on_one_core(4.0, 1.0, 4) == 0.0
    assert on_one_core(4.0, 2.5, 4) == pytest.approx(0.5)
    assert on_one_core(4.0, 9.0, 4) == 1.0
