"""The loop in one file: its loss is the package's, and it trains."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import own_loop
from experiments.own_loop import Settings
from recjax import algorithms
from tests.closeness import assert_close


def test_the_loss_is_that_of_the_package():
    """REC-OneSide-NoIS by the file's sum and by the algorithm, on ratios on both sides of both bounds."""
    rng = np.random.default_rng(0)
    mask = jnp.arange(4) < jnp.asarray(rng.integers(1, 5, 12))[:, None]
    logprobs = jnp.asarray(-rng.uniform(0.1, 3.0, mask.shape), jnp.float32)
    batch = {
        "prompts": jnp.zeros((3, 6), int),
        "mask": mask,
        "behavior_logprobs": logprobs + jnp.asarray(rng.normal(0, 0.4, mask.shape), jnp.float32),
        "rewards": jnp.asarray(rng.integers(0, 2, 12), jnp.float32),
        "epsilon": 0.2,
    }
    algorithm = algorithms.build("rec_one_side_nois", {})
    group_ids = jnp.repeat(jnp.arange(3), 4)
    rows = jax.jit(algorithms.row_terms, static_argnums=0)(
        algorithm,
        algorithms.BatchValues(batch["rewards"], group_ids, mask.any(-1), jax.random.key(0), completion_mask=mask),
    )

    def expected(logprobs):
        total, count = algorithms.loss(algorithm, logprobs, batch["behavior_logprobs"], rows, mask)
        return total / count

    found = jax.jit(jax.value_and_grad(lambda x: own_loop.clipped_reinforce(x, batch)))(logprobs)
    for ours, theirs in zip(found, jax.jit(jax.value_and_grad(expected))(logprobs), strict=True):
        assert_close(ours, theirs, 1e-5, least=0.01)
    assert 0 < np.count_nonzero(found[1]) < mask.sum()


def test_answers_end_and_slips_change_one_digit():
    rng = np.random.default_rng(1)
    for _, answer in own_loop.problems(rng, 50):
        slip = own_loop.with_slip(answer, rng)
        assert len(slip) == len(answer) and sum(a != b for a, b in zip(slip, answer, strict=True)) == 1
    tokens, mask = own_loop.padded([[1, own_loop.END], [2, 3, 4, own_loop.END]], own_loop.TIME)
    batch = {"completions": tokens, "mask": mask}
    np.testing.assert_array_equal(own_loop.rewards_of(batch, ["1", "23"], 1), [1.0, 0.0])


@pytest.mark.slow
def test_ten_steps_train(capsys, monkeypatch):
    """The sampler has new weights after five steps; evaluations, the first and last to sample, have the newest."""
    seen, sample = [], own_loop.sample

    def watched(params, *arguments):
        seen.append(float(sum(jnp.abs(leaf).sum() for leaf in jax.tree.leaves(params))))
        return sample(params, *arguments)

    monkeypatch.setattr(own_loop, "sample", watched)
    accuracies = own_loop.run(Settings(supervised_steps=40, prompts=4, group_size=4, sync_interval=5, steps=10))
    assert len(accuracies) == 2 and "step 10: loss" in capsys.readouterr().out
    assert len(seen) == 12 and len({*seen[:6]}) == len({*seen[6:11]}) == 1 and len({*seen}) == 3


def test_it_is_short_enough_to_read():
    assert len(Path(own_loop.__file__).read_text(encoding="utf-8").splitlines()) <= 200
