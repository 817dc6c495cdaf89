"""Meshes, the rules that place parameters on them, and what is refused."""

import dataclasses
import re

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from recjax.config import LoraConfig, MeshConfig
from recjax.models.decoder import abstract_params
from recjax.models.decoder_config import DecoderConfig, ExpertOptions
from recjax.models.placement import RULES, param_axes, param_shardings, put_rows
from recjax.models.trainable import adapted, flatten
from recjax.training.mesh import check_fits, make_mesh

EVERYTHING = DecoderConfig(
    *(12, 16, 32, 2, 4, 2, 8), tie_embeddings=False, qkv_bias=True, qk_norm=True, post_norms=True
)
EXPERTS = dataclasses.replace(EVERYTHING, experts=ExpertOptions(4, 2, True))
LORA = LoraConfig(rank=2, targets=["query", "output", "gate", "down"])
EVERYTHING = adapted(EVERYTHING, LORA)


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [((-1, 1, 1), (4, 1, 1)), ((1, -1, 2), (1, 2, 2)), ((2, 2, -1), (2, 2, 1)), ((1, 4, 1), (1, 4, 1))],
)
def test_sizes_multiply_to_the_devices(sizes, shape):
    mesh = make_mesh(MeshConfig(**dict(zip(("data", "fsdp", "tensor"), sizes, strict=True))))
    assert mesh.axis_names == ("data", "fsdp", "tensor") and tuple(mesh.shape.values()) == shape
    assert sorted(device.id for device in mesh.devices.flat) == [0, 1, 2, 3]


@pytest.mark.parametrize("sizes", [(3, 1, -1), (1, 1, 1), (4, 2, 1), (-1, 8, 1)])
def test_sizes_that_do_not_are_refused_with_their_names(sizes):
    named = ", ".join(f"{name} {size}" for name, size in zip(("data", "fsdp", "tensor"), sizes, strict=True))
    with pytest.raises(ValueError, match=f"mesh: {named}: .* the number of devices, 4; set"):
        make_mesh(MeshConfig(**dict(zip(("data", "fsdp", "tensor"), sizes, strict=True))))


def test_sharding_rules_match_all_parameters():
    shapes = abstract_params(EVERYTHING)
    shapes["layers"]["experts"] = abstract_params(adapted(EXPERTS, LORA))["layers"]["experts"]
    shapes["score"] = {"kernel": shapes["head"]["kernel"].update(shape=(16, 4))}  # of a reward model
    mesh = make_mesh(MeshConfig(data=1, fsdp=2, tensor=2))
    shardings = flatten(param_shardings(mesh, shapes))
    used = {rule for path in shardings for rule, _ in RULES if re.search(f"(^|/)({rule})$", path)}
    assert used == {rule for rule, _ in RULES}
    for path, leaf in flatten(shapes).items():
        # A matrix is split into four, but for adapters, which are thin; norms are whole.
        parts = leaf.size // np.prod(shardings[path].shard_shape(leaf.shape))
        assert parts == (
            1
            if path.endswith("scale")
            else 2
            if "lora" in path or path.endswith("bias") or "score" in path or "router" in path
            else 4
        ), path


def test_an_optimizers_state_lies_where_its_parameters_do():
    shapes = abstract_params(EVERYTHING)
    state = jax.eval_shape(optax.adamw(1e-3).init, shapes)
    mesh = make_mesh(MeshConfig(data=1, fsdp=2, tensor=2))
    placed = param_shardings(mesh, state)
    assert placed[0].mu == placed[0].nu == param_shardings(mesh, shapes)
    assert placed[0].count.spec == PartitionSpec()


def test_a_path_without_a_rule_is_named():
    with pytest.raises(ValueError, match=r"parameter 'layers/gate/bias' of shape \(2, 32\) has no rule"):
        param_axes("layers/gate/bias", (2, 32))
    with pytest.raises(ValueError, match="has no rule"):
        param_axes("unheard_of/norms/scale", (2,))


@pytest.mark.parametrize(
    ("sizes", "shape"), [({"fsdp": -1}, (1, 4, 1)), ({"tensor": -1, "fsdp": 2}, (1, 2, 2)), ({}, (4, 1, 1))]
)
def test_default_data_axis_leaves_devices_to_others(sizes, shape):
    assert tuple(make_mesh(MeshConfig(**sizes), 4).shape.values()) == shape


def test_what_an_axis_does_not_divide_is_whole():
    mesh = make_mesh(MeshConfig(data=1, fsdp=1, tensor=4))
    odd = dataclasses.replace(EVERYTHING, vocab_size=13)
    assert param_shardings(mesh, abstract_params(odd))["head"]["kernel"].spec == PartitionSpec("fsdp", None)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            (1, 1, 4),
            r"mesh.tensor = 4: does not divide the model's 6 attention heads; set 2, which also divides the 4",
        ),
        (
            (1, 4, 1),
            r"mesh.fsdp = 4: does not divide the model's 18 units of the stream; set 2, which also divides the 4",
        ),
    ],
)
def test_a_model_that_does_not_split_is_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        check_fits(
            make_mesh(MeshConfig(**dict(zip(("data", "fsdp", "tensor"), sizes, strict=True)))),
            DecoderConfig(12, 18, 32, 2, 6, 2, 8),
        )
    check_fits(make_mesh(MeshConfig(**dict(zip(("data", "fsdp", "tensor"), sizes, strict=True)))), EVERYTHING)


def test_rows_are_split_over_data_and_fsdp():
    with jax.set_mesh(make_mesh(MeshConfig(data=2, fsdp=2, tensor=1))):
        assert put_rows(np.zeros((8, 3))).sharding.shard_shape((8, 3)) == (2, 3)
