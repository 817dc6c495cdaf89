"""On any mesh the same numbers come out, and memory is split as the rules say."""

import functools

import chex
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from recjax.algorithms.presets import build_algorithm
from recjax.config import TrainingConfig
from recjax.experience.queue import Queue
from recjax.models.decoder import Decoder
from recjax.models.placement import on_host, param_shardings
from recjax.models.trainable import flatten
from recjax.rollout import engine, plan
from recjax.runs import checkpoint
from recjax.training.run import State
from tests import commands
from tests.closeness import assert_close, assert_same_gradient
from tests.training.on_mesh import CONFIG, EXPERTS, HYBRID, batch_of, drawn, numbers, on, start, under_pmap, updated


@functools.cache
def on_one_device():
    return numbers(None, 1)


def assert_equal(found, expected):
    """Tokens exactly; real numbers but for the order in which they were added."""
    assert found.keys() == expected.keys()
    for name, value in found.items():
        if not np.issubdtype(np.asarray(value).dtype, np.floating):
            np.testing.assert_array_equal(value, expected[name], err_msg=name)
        elif name.startswith("params/"):
            gradient = np.abs(expected[name.replace("params/", "gradient/")])
            assert_same_adam_step(value, expected[name], gradient, name)
        else:
            assert_close(value, expected[name], 1e-3, least=0.02, err_msg=name)


def assert_same_adam_step(found, expected, gradient, name):
    """Adam's first step is the sign of the gradient: where that is almost 0, the sign is one of rounding."""
    clear = gradient > 1e-3 * gradient.max()
    assert_close(found[clear], expected[clear], err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "micro_batches"), [((2, 1, 1), 3), ((1, 1, 4), 1)])
def test_meshes_and_micro_batches_change_no_number(sizes, micro_batches):
    assert_equal(numbers(sizes, micro_batches), on_one_device())


@functools.cache
def of_one_device(config, packed=False):
    return numbers(None, 1, packed, config)


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("config", "sizes", "packed"),
    [
        *((EXPERTS, sizes, False) for sizes in [(1, 1, 1, 4), (1, 2, 1, 2), (2, 1, 2, 1), (1, 1, 2, 2)]),
        *((HYBRID, sizes, False) for sizes in [(4, 1, 1), (1, 4, 1), (1, 1, 4), (1, 2, 2)]),
        (HYBRID, (2, 1, 2), True),
    ],
)
def test_meshes_change_no_number_of_other_layers(config, sizes, packed):
    found, expected = numbers(sizes, 1, packed, config), of_one_device(config, packed)
    # Adam's first step is ± the learning rate, so parameters whose gradient is almost 0 differ by rounding.
    assert_equal(*({name: one for name, one in each.items() if "params/" not in name} for each in (found, expected)))
    if config.experts:  # delta nets magnify rounding
        gradients = ({name: one for name, one in each.items() if "gradient/" in name} for each in (found, expected))
        assert_same_gradient(*gradients)


@pytest.mark.campaign
def test_eight_devices_change_no_number(tmp_path):
    assert commands.run(["-m", "tests.training.on_mesh", tmp_path / "eight.npz"]).returncode == 0
    with np.load(tmp_path / "eight.npz") as found:
        assert_equal(dict(found), on_one_device())


@pytest.mark.campaign
@pytest.mark.parametrize("sizes", [(2, 1, 2), (1, 2, 2)])
def test_a_teachers_divergence_is_that_of_one_device(sizes):
    algorithm = build_algorithm("grpo", {"teacher_divergence": {"coefficient": 0.2, "kind": "jsd", "top_k": 5}})
    found, expected = (numbers(each, 1, algorithm=algorithm) for each in (sizes, None))
    assert_equal(found, expected)
    assert expected["metrics/teacher_divergence"] > 1e-3
    assert not np.isclose(expected["metrics/gradient_norm"], on_one_device()["metrics/gradient_norm"], rtol=1e-3)


@pytest.mark.campaign
@pytest.mark.parametrize("sizes", [(2, 1, 2), (1, 2, 2)])
def test_effective_sample_size_is_equal_on_any_mesh(sizes):
    algorithm = build_algorithm("p3o", {})
    found, expected = (numbers(*each, algorithm=algorithm) for each in ((sizes, 3), (None, 1)))
    assert_equal(found, expected)


@pytest.mark.campaign
def test_packed_rows_on_a_mesh_change_no_number():
    with on((2, 2, 1)):
        _, metrics, _ = updated(batch_of(np.random.default_rng(0)), 1, packed=True)
        found = {f"metrics/{name}": value for name, value in on_host(metrics).items()}
    assert_equal(found, {name: value for name, value in on_one_device().items() if name.startswith("metrics/")})


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("sizes", "free", "groups"),
    [
        pytest.param((2, 1, 2), 10**9, (4, 1, 1), id="whole-on-each-device"),
        pytest.param((1, 4, 1), 15_000, (1, 1, 4), id="split-over-four"),
        pytest.param((1, 4, 1), 0, (1, 4, 1), id="as-in-training"),
    ],
)
def test_slots_on_a_mesh_draw_the_same(monkeypatch, sizes, free, groups):
    batch, expected = batch_of(np.random.default_rng(0)), on_one_device()
    monkeypatch.setattr(plan, "FEWEST_SLOTS", 2)  # so that completions go on in fewer slots
    monkeypatch.setattr(plan, "ROUND", 1)
    layout = functools.partial(plan.grouped, free=free)
    monkeypatch.setattr(engine, "sampling_mesh", lambda decoder: layout(decoder, jax.sharding.get_mesh()))
    with on(sizes):
        assert tuple(engine.sampling_mesh(Decoder(CONFIG)).shape.values()) == groups
        found = {f"sampled/{name}": value for name, value in drawn(batch, 1.0, slots=8).items()}
    assert_equal(found, {name: value for name, value in expected.items() if name.startswith("sampled/")})


@pytest.mark.campaign
def test_pmap_gives_the_numbers_of_one_device():
    state, metrics, _ = jax.device_get(under_pmap(4))
    expected = on_one_device()
    for name, value in metrics.items():
        assert_close(value, expected[f"metrics/{name}"], 1e-3, least=0.02, err_msg=name)
    for path, value in flatten(state.params).items():
        assert_same_adam_step(value, expected[f"params/{path}"], np.abs(expected[f"gradient/{path}"]), path)


@pytest.mark.campaign
def test_steps_without_data_move_nothing_on_meshes():
    batch = batch_of(np.random.default_rng(0))
    batch = batch._replace(completion_mask=np.zeros_like(batch.completion_mask))
    expected = jax.device_get(start())
    assert_equal(flatten(jax.device_get(under_pmap(4, batch)[0])._asdict()), flatten(expected._asdict()))
    with on((1, 2, 1)):
        assert_equal(flatten(on_host(updated(batch, 2)[0])._asdict()), flatten(expected._asdict()))


@pytest.mark.campaign
def test_state_is_sharded_in_every_step():
    batch = batch_of(np.random.default_rng(0))
    with on((1, 4, 1)):
        mesh, before = jax.sharding.get_mesh(), start()
        after, metrics, _ = updated(batch, 2)
        assert_equal(metrics, {name: on_one_device()[f"metrics/{name}"] for name in metrics})
        for state in (before, after):
            for path, leaf in flatten(state._asdict()).items():
                expected = flatten(param_shardings(mesh, state._asdict()))[path]
                assert leaf.sharding.is_equivalent_to(expected, leaf.ndim), path
        most = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(after))
        assert most < 0.3 * sum(leaf.nbytes for leaf in jax.tree.leaves(after))


@pytest.mark.slow
def test_a_checkpoint_of_one_mesh_restores_onto_another(tmp_path):
    with on((1, 4, 1)):
        state = start()
        with checkpoint.open_checkpoints(tmp_path) as manager:
            checkpoint.save(manager, State(3, state, state.params, 0, Queue(), {}, {"tokens": 7}), TrainingConfig())
    for sizes in ((2, 1, 2), None):
        with on(sizes), checkpoint.open_checkpoints(tmp_path) as manager:
            here = start()
            like = jax.tree.map(ocp.utils.to_shape_dtype_struct, here)
            restored = checkpoint.restore(manager, like, like.params)
            chex.assert_trees_all_equal(on_host(restored.trained), on_host(here))
            assert (restored.step, restored.totals) == (3, {"tokens": 7})
            for leaf, expected in zip(*map(jax.tree.leaves, (restored.trained, like)), strict=True):
                assert leaf.sharding == expected.sharding
