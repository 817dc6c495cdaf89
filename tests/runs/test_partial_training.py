"""Training a part of the parameters in the real loop: adapters, frozen paths, bfloat16."""

from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from recjax.config import load_config
from recjax.models.trainable import flatten, is_adapter
from recjax.runs.prepare import prepare
from tests.training.counting import MovingLearner, count, prepared_batch, sampled_by
from tests.training.tiny_run import TINY, train

LORA = "model.lora={rank: 2, alpha: 8, targets: [query, down]}"


@pytest.fixture
def tiny(tmp_path):
    (tmp_path / "tiny.yaml").write_text(TINY)
    return lambda name, *overrides: load_config(tmp_path / "tiny.yaml", [f"output={tmp_path / name}", *overrides])


def saved(config) -> dict[str, np.ndarray]:
    """Path → leaf of everything in the run's newest checkpoint."""
    with ocp.CheckpointManager(f"{config.output}/checkpoints") as manager:
        state = manager.restore(manager.latest_step(), args=ocp.args.Composite(state=ocp.args.StandardRestore()))
    return flatten(state["state"])


@pytest.mark.slow
def test_only_adapters_learn_and_have_optimizer_state(tiny):
    config = tiny("lora", LORA, "algorithm.reference_kl={coefficient: 0.1}", "evaluation.initial_kl=true")
    rows = train(config)
    leaves = saved(config)
    kernels = [path for path in leaves if path.endswith("kernel")]
    assert kernels and all(is_adapter(path) for path in kernels)
    assert any(np.abs(leaves[path]).max() > 0 for path in kernels if "_lora_b/" in path and "params" in path)
    params = sum(leaf.size for path, leaf in leaves.items() if "mu" not in path and "nu" not in path and leaf.ndim)
    moments = sum(leaf.size for path, leaf in leaves.items() if "mu" in path or "nu" in path)
    layers, hidden, middle, rank = 1, 16, 32, 2
    assert params == layers * rank * ((hidden + hidden) + (middle + hidden))
    assert moments == 2 * params
    assert next(row["evaluation/initial_kl"] for row in rows if "evaluation/initial_kl" in row) == pytest.approx(
        0, abs=1e-5
    )
    assert all(
        row["ratio/q99"] == pytest.approx(1, abs=1e-4) for row in rows[1:]
    )  # on-policy: sampler and trainer agree


def test_frozen_parameters_are_in_no_checkpoint(tiny):
    config = tiny("freeze", "model.freeze=[embedding, norm]", "training.steps=2")
    start = flatten(prepare(config)[1])
    train(config, learner=MovingLearner(), sources=sampled_by(prepared_batch))
    leaves = saved(config)
    assert not any("embedding" in path or "norm" in path for path in leaves)
    moved = {path.removeprefix("params/"): leaf for path, leaf in leaves.items() if path.startswith("params/")}
    assert len(moved) == 7
    for path, leaf in moved.items():
        assert np.abs(leaf - np.asarray(start[path])).max() > 1e-4, path


@pytest.mark.slow
def test_sampler_holds_bfloat16_and_trainer_float32_weights(tiny):
    config = tiny("bfloat16", "model.dtype=bfloat16", "regime.sync_interval=3", "training.steps=2")
    first = train(config)[1]
    # In float32 the two agree (test_loop.py); in bfloat16 they add the same products in other orders and round each sum
    # to 8 bits.
    assert 0 < max(abs(np.log(first[f"ratio/{name}"])) for name in ("q01", "q99", "max")) < 0.1
    with ocp.CheckpointManager(f"{config.output}/checkpoints") as manager:
        items = ocp.args.Composite(state=ocp.args.StandardRestore(), behavior_params=ocp.args.StandardRestore())
        restored = manager.restore(manager.latest_step(), args=items)
    for path, leaf in flatten(restored["behavior_params"]).items():
        assert leaf.dtype == ("float32" if path.endswith("/scale") else "bfloat16"), path
    assert {leaf.dtype for path, leaf in flatten(restored["state"]).items() if leaf.ndim} == {np.dtype("float32")}


@pytest.mark.parametrize(("interval", "step", "kept"), [(1, 2, False), (2, 1, True), (2, 2, False)])
def test_checkpoints_have_weights_that_the_sampler_keeps(tiny, interval, step, kept):
    config = tiny("copy", f"regime.sync_interval={interval}", f"training.steps={step}")
    count(config)
    assert Path(f"{config.output}/checkpoints/{step}/behavior_params").exists() == kept


@pytest.mark.slow
def test_adapters_on_a_warm_start_use_its_cache(tiny, monkeypatch, tmp_path):
    monkeypatch.setenv("RECJAX_CACHE", str(tmp_path / "cache"))
    start = "warm_start={steps: 3, batch_size: 8, learning_rate: 1e-2, wrong_fraction: 0.0}"
    plain = prepare(tiny("a", start))[1]
    monkeypatch.setattr("recjax.runs.warm_start.supervise", None)  # from the cache now, or not at all
    with_lora = prepare(tiny("b", start, LORA))[1]
    for path, leaf in flatten(plain).items():
        np.testing.assert_array_equal(leaf, flatten(with_lora)[path])
    assert len(jax.tree.leaves(with_lora)) == len(jax.tree.leaves(plain)) + 4
