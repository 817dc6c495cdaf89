"""Any optimizer by name: optax's own update, exact resume, the planned bytes, and the same numbers on a mesh."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec

from recjax.config import MeshConfig, OptimizerConfig
from recjax.models.decoder import abstract_params, init_params
from recjax.models.placement import param_shardings
from recjax.models.trainable import flatten
from recjax.planning.dry_run import dry_run
from recjax.training.mesh import make_mesh
from recjax.training.update import first_state, make_optimizer
from tests.closeness import assert_close
from tests.marks import campaign, campaign_except, slow, slow_except
from tests.runs.test_resume import TAUGHT, resumes_with_real_weights
from tests.training.on_mesh import CONFIG, batch_of, on, under_pmap, updated


def signed_momentum(learning_rate, *, decay: float, steps: int = 3) -> optax.GradientTransformation:
    """A user's optimizer, whose state has an array that is no parameter's."""

    def init(params):
        return {"momentum": jax.tree.map(jnp.zeros_like, params), "norms": jnp.zeros(steps)}

    def update(updates, state, params=None):
        momentum = jax.tree.map(lambda new, old: decay * old + new, updates, state["momentum"])
        norms = jnp.roll(state["norms"], 1).at[0].set(optax.tree.norm(updates))
        changes = jax.tree.map(lambda x: -learning_rate * norms.max() * jnp.sign(x), momentum)
        return changes, {"momentum": momentum, "norms": norms}

    return optax.GradientTransformation(init, update)


def unfinished(learning_rate, decay) -> optax.GradientTransformation:
    """A user's optimizer that fails in an update."""

    def update(updates, state, params=None):
        return jax.tree.map(lambda x: x / decay, updates), state.steps

    return optax.GradientTransformation(lambda params: (), update)


def in_half_precision(learning_rate) -> optax.GradientTransformation:
    """A user's optimizer whose updates are of another type than the parameters."""
    del learning_rate
    return optax.stateless(lambda updates, params: optax.tree.cast(updates, jnp.bfloat16))


def growing(learning_rate) -> optax.GradientTransformation:
    """A user's optimizer whose state grows with each update."""
    del learning_rate
    return optax.GradientTransformation(lambda params: (), lambda updates, state, params: (updates, (*state, 1)))


def matrices(params: dict) -> dict:
    """The axes of the layers' matrices in stacked parameters, for muon; None for all other parameters."""
    axes = optax.contrib.MuonDimensionNumbers(1, 2)
    chosen = jax.tree.map(lambda _: None, params)
    chosen["layers"] = {
        name: {leaf: axes if leaf == "kernel" else None for leaf in block} for name, block in params["layers"].items()
    }
    return chosen


class Case(NamedTuple):
    """Values of the block `optimizer`; the same optimizer in plain optax, from a rate; and its bytes by hand."""

    block: dict
    plain: Callable
    bytes_of: Callable


def count(params) -> int:
    """Number of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def muon_bytes(params) -> int:
    """One moment of the layers' matrices, two of all others; two counts and ours, and three coefficients."""
    in_matrices = count([leaf for path, leaf in flatten(params["layers"]).items() if path.endswith("kernel")])
    return 4 * in_matrices + 8 * (count(params) - in_matrices) + 3 * 4 + 3 * 4


def adafactor_bytes(params) -> int:
    """Sums over each of the two longest axes from 8 on, or all squares; placeholders of one number; two counts."""
    total = 2 * 4
    for leaf in jax.tree.leaves(params):
        *_, second, longest = (1, *sorted(leaf.shape))
        is_factored = leaf.ndim > 1 and second >= 8
        total += 4 * (leaf.size // longest + leaf.size // second + 1 if is_factored else leaf.size + 2)
    return total


OPTIMIZERS = {
    "adamw": Case(
        {"weight_decay": 0.1, "beta2": 0.99},
        lambda rate: optax.adamw(rate, 0.9, 0.99, weight_decay=0.1),
        lambda params: 8 * count(params) + 2 * 4,
    ),
    "adamw in bfloat16": Case(
        {"options": {"mu_dtype": "bfloat16"}},
        lambda rate: optax.adamw(rate, mu_dtype=jnp.bfloat16, weight_decay=0.0),
        lambda params: 6 * count(params) + 2 * 4,
    ),
    "sgd": Case({"name": "sgd"}, optax.sgd, lambda params: 4),
    "momentum": Case(
        {"name": "sgd", "options": {"momentum": 0.9, "nesterov": True}},
        lambda rate: optax.sgd(rate, 0.9, nesterov=True),
        lambda params: 4 * count(params) + 4,
    ),
    "muon": Case(
        {"name": "muon", "options": {"consistent_rms": 0.2, "ns_steps": 4}, "weight_decay": 0.1},
        lambda rate: optax.contrib.muon(
            rate, ns_steps=4, consistent_rms=0.2, weight_decay=0.1, muon_weight_dimension_numbers=matrices
        ),
        muon_bytes,
    ),
    "adafactor": Case(
        {"name": "adafactor", "options": {"min_dim_size_to_factor": 8}},
        functools.partial(optax.adafactor, min_dim_size_to_factor=8),
        adafactor_bytes,
    ),
    "lion": Case(
        {"name": "lion", "options": {"b1": 0.8}},
        lambda rate: optax.lion(rate, 0.8, weight_decay=0.0),
        lambda params: 4 * count(params) + 2 * 4,
    ),
    "module:function": Case(
        {"name": f"{__name__}:signed_momentum", "options": {"decay": 0.9}},
        functools.partial(signed_momentum, decay=0.9),
        lambda params: 4 * count(params) + 3 * 4 + 4,
    ),
}


def updated_by(optimizer, params, gradient, state, **rates):
    """Parameters and state after an update by a compiled program that takes the rates as arguments."""

    def step(params, gradient, state, rates):
        updates, state = optax.with_extra_args_support(optimizer).update(gradient, state, params, **rates)
        return optax.apply_updates(params, updates), state

    return jax.jit(step)(params, gradient, state, rates)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_three_updates_are_optaxs_own(name):
    block, plain, _ = OPTIMIZERS[name]
    config = OptimizerConfig(**block)
    optimizer = make_optimizer(config)
    assert make_optimizer(OptimizerConfig(**block)) is optimizer, "runs of one optimizer share a compiled update"
    start = init_params(CONFIG, jax.random.key(0))
    own, state = first_state(optimizer, start)
    rates = {"clip_norm": 0.5} | ({"weight_decay": 0.1} if config.weight_decay else {})
    expected, expected_state = start, plain(0.0).init(start)
    for step, rate in enumerate((0.5, 0.25, 0.125)):
        keys = jax.random.split(jax.random.key(step), len(jax.tree.leaves(start)))
        keys = jax.tree.unflatten(jax.tree.structure(start), keys)
        gradient = jax.tree.map(lambda leaf, key: jax.random.normal(key, leaf.shape), start, keys)
        own, state = updated_by(optimizer, own, gradient, state, learning_rate=rate, **rates)
        clipped = optax.tree.scale(0.5 / optax.tree.norm(gradient), gradient)
        expected, expected_state = updated_by(plain(rate), expected, clipped, expected_state)
        assert_close(own, expected, 1e-6)
    assert optax.tree.get_all_with_path(state, "count")[-1][1] == 3


def test_muon_makes_each_layers_matrix_orthogonal_by_itself():
    params = init_params(CONFIG, jax.random.key(0))
    optimizer = make_optimizer(OptimizerConfig(name="muon"))
    gradient = jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape), params)
    rates = {"learning_rate": 0.5, "clip_norm": np.inf}
    found, _ = optimizer.update(gradient, optimizer.init(params), params, **rates)
    for layer in range(CONFIG.num_layers):
        matrix, drawn = (tree["layers"]["gate"]["kernel"][layer] for tree in (params, gradient))
        alone = optax.contrib.muon(0.5)
        expected, _ = alone.update(drawn, alone.init(matrix), matrix)
        assert_close(found["layers"]["gate"]["kernel"][layer], expected)
    adam = optax.adamw(0.5, weight_decay=0.0, nesterov=True)
    expected, _ = adam.update(gradient["embedding"], adam.init(params["embedding"]), params["embedding"])
    assert_close(found["embedding"], expected)


def test_the_average_of_parameters_follows_any_optimizer():
    params = init_params(CONFIG, jax.random.key(0))
    for block, _, _ in OPTIMIZERS.values():
        optimizer = make_optimizer(OptimizerConfig(**block), average_rate=0.25)
        rates = {"learning_rate": 0.5, "clip_norm": 1.0}
        state = first_state(optimizer, params).optimizer_state
        after, state = updated_by(optimizer, params, params, state, **rates)
        expected = jax.tree.map(lambda new, old: 0.25 * new + 0.75 * old, after, params)
        assert_close(optax.tree.get(state, "average"), expected, 1e-6)


def overrides(block: dict) -> list[str]:
    """Overrides of a block, with a schedule that a resumed run has to continue."""
    values = [f"optimizer.{key}={value}" for key, value in block.items() if key != "options"]
    options = [f"optimizer.options.{key}={str(value).lower()}" for key, value in block.get("options", {}).items()]
    return [*values, *options, "optimizer.schedule=linear"]


@pytest.mark.parametrize("name", slow_except(OPTIMIZERS, "momentum", "muon"))
def test_run_resumes_exactly_with_each_optimizer(tiny, name, monkeypatch):
    block, _, bytes_of = OPTIMIZERS[name]
    options = [*overrides(block), "regime.sync_interval=2"]
    resumes_with_real_weights(tiny, options, [5])
    config = tiny("stopped", *options)
    monkeypatch.setattr("recjax.planning.dry_run._activations", lambda *_: 1)
    planned = dry_run(config)
    (size,) = (item.bytes for item in planned.memory if item.name == "optimizer's state")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        saved = checkpointer.restore(Path(config.output).absolute() / "checkpoints" / "7" / "state")
    leaves = jax.tree.leaves(saved["optimizer_state"])
    assert size == bytes_of(planned.model.trained) == sum(leaf.nbytes for leaf in leaves)
    assert all(np.asarray(leaf, np.float32).any() for leaf in leaves if leaf.size > 1), "no part of it is new"


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ("{name: lbfgs}", "name = 'lbfgs': a first update fails: TypeError.*value_fn"),
        ("{name: rprop}", "name = 'rprop': begins with steps as large as a learning rate"),
        ("{name: muon, options: {ns_coeffs: {a: 1}}}", "ns_coeffs = {'a': 1}: takes a number, .* or a list"),
        ("{name: galore}", "name = 'galore': has an array without elements in its state"),
        ("{name: muon, options: {adam_learning_rate: 1e-3}}", "adam_learning_rate = 0.001: it would not follow"),
        ("{name: adafactor, options: {momentum: big}}", "name = 'adafactor': a first update fails: TypeError"),
        ("{name: '{here}:unfinished'}", "optimizer.options.decay: .*:unfinished requires a value"),
        (
            "{name: '{here}:unfinished', options: {decay: 2}}",
            r"fails: AttributeError: .*'steps'\n(.*\n)?.*test_optimizers.py:\d+ in update: return jax.tree.map",
        ),
        ("{name: '{here}:in_half_precision'}", "in_half_precision': returns updates of other shapes or types"),
        ("{name: '{here}:growing'}", "growing': changes the shapes or types of its state"),
        ("{name: '{here}:growing', options: {rate: 1}}", "options.rate = 1: is no option of .*:growing"),
        ("{name: '{here}:grows'}", "has no function 'grows'; did you mean 'growing'?"),
    ],
)
def test_an_optimizer_that_cannot_be_used_is_refused(tiny, block, words):
    with pytest.raises(ValueError, match=words):
        tiny("run", f"optimizer={block.replace('{here}', __name__)}")


LORA = "model.lora={rank: 2, alpha: 8, targets: [query, down]}"


@pytest.mark.parametrize(
    "case",
    [
        *slow(("muon", [LORA])),
        *campaign(
            ("adafactor", [LORA]),
            ("muon", ["model.freeze=[embedding, norm]"]),
            ("momentum", [*TAUGHT, "model.teacher_rate=0.3"]),
            ("muon", ["training.updates_per_batch=2", "training.minibatches=2"]),
        ),
    ],
)
def test_optimizers_of_a_part_and_averages_resume_exactly(tiny, case):
    name, extra = case
    resumes_with_real_weights(tiny, [*overrides(OPTIMIZERS[name].block), *extra], [5])


def test_optimizer_state_is_sharded_like_its_parameters():
    mesh = make_mesh(MeshConfig(data=1, fsdp=2, tensor=2))
    shapes = abstract_params(CONFIG)
    placed = param_shardings(mesh, shapes)
    for name, part in (("momentum", "trace"), ("lion", "mu"), ("module:function", "momentum")):
        optimizer = make_optimizer(OptimizerConfig(**OPTIMIZERS[name].block))
        state = param_shardings(mesh, jax.eval_shape(optimizer.init, shapes))
        assert optax.tree.get(state, part) == placed
    whole = PartitionSpec()
    assert optax.tree.get(state, "norms").spec == whole
    muon = make_optimizer(OptimizerConfig(name="muon"))
    state = param_shardings(mesh, jax.eval_shape(muon.init, shapes))[1].inner_states
    moment = state["muon"].inner_state[0]
    assert moment.mu["layers"]["gate"] == placed["layers"]["gate"]
    assert moment.ns_coeffs.spec == whole
    assert state["adam"].inner_state[0].nu["embedding"] == placed["embedding"]
    factored = make_optimizer(OptimizerConfig(**OPTIMIZERS["adafactor"].block))
    state = param_shardings(mesh, jax.eval_shape(factored.init, shapes))
    assert optax.tree.get(state, "v_row")["layers"]["gate"]["kernel"].spec == whole
    with pytest.raises(ValueError, match="has no rule"):
        param_shardings(mesh, {"layers": {"gate": {"unheard_of": shapes["norm"]["scale"]}}})


def with_rates(name: str) -> optax.GradientTransformation:
    """An optimizer of the table with constant rates."""
    optimizer = make_optimizer(OptimizerConfig(**OPTIMIZERS[name].block))
    rates = {"learning_rate": 0.1, "clip_norm": 1.0}
    return optax.GradientTransformation(optimizer.init, functools.partial(optimizer.update, **rates))


@pytest.mark.parametrize("name", campaign_except(["sgd", "momentum", "muon", "adafactor"], slow=["muon"]))
def test_a_mesh_and_pmap_change_no_number(name):
    optimizer = with_rates(name)
    batch = batch_of(np.random.default_rng(0))
    expected = jax.device_get(updated(batch, 1, optimizer=optimizer)[0])
    with on((1, 2, 2)):
        assert_close(jax.device_get(updated(batch, 1, optimizer=optimizer)[0]), expected, 1e-3)
    assert_close(jax.device_get(under_pmap(4, optimizer=optimizer)[0]), expected, 1e-3)
