"""Devices as a mesh, and where everything lies on it: parameters by rules on their paths, batches by rows."""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from recjax.config import MeshConfig
from recjax.models.decoder import DecoderConfig
from recjax.models.placement import ROWS, constrain, fitting_spec

AXES = ("data", "fsdp", "tensor")

# The end of a parameter's path → the mesh axes of its dimensions. Layers are stacked on a first axis, which is whole.
RULES = (
    (r"embedding/embedding", ("tensor", "fsdp")),
    (r"head/kernel", ("fsdp", "tensor")),
    (r"layers/(query|key|value|gate|up)/kernel", (None, "fsdp", "tensor")),
    (r"layers/(output|down)/kernel", (None, "tensor", "fsdp")),
    (r"layers/(query|key|value)/bias", (None, "tensor")),
    (r"layers/(query|key|value|gate|up)_lora_a/kernel", (None, "fsdp", None)),
    (r"layers/(query|key|value|gate|up)_lora_b/kernel", (None, None, "tensor")),
    (r"layers/(output|down)_lora_a/kernel", (None, "tensor", None)),
    (r"layers/(output|down)_lora_b/kernel", (None, None, "fsdp")),
    (r"(layers/\w+_norm|norm)/scale", ()),
)


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with the axes "data", "fsdp" and "tensor".

    Args:
        devices: those of a topology that is compiled for, say; None: all that there are, on all hosts.
    Raises:
        ValueError: the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = dataclasses.asdict(config)
    shown = ", ".join(f"{name} {size}" for name, size in sizes.items())
    given = math.prod(size for size in sizes.values() if size != -1)
    if len(devices) % given or (given != len(devices) and -1 not in sizes.values()):
        raise ValueError(
            f"mesh: {shown}: {given} does not {'divide' if -1 in sizes.values() else 'equal'} the {len(devices)}"
            " devices there are; set the sizes so that they multiply to that, one of them to -1 for the rest"
        )
    shape = tuple(len(devices) // given if size == -1 else size for size in sizes.values())
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def check_fits(mesh: Mesh, decoder: DecoderConfig) -> None:
    """Refuses a mesh that would leave some devices with parts of a head, or without a part of the parameters.

    Vocabularies, key and value heads and the ranks of adapters that an axis does not divide are not split instead.

    Raises:
        ValueError: with the axis, its size, and what it does not divide.
    """
    wholes = [
        ("tensor", decoder.num_heads, "attention heads"),
        ("tensor", decoder.intermediate_size, "units of the MLP"),
        ("fsdp", decoder.hidden_size, "units of the stream"),
    ]
    for axis, whole, what in wholes:
        size = mesh.shape[axis]
        if whole % size:
            sizes = [number for number in range(1, size) if whole % number == 0]
            raise ValueError(
                f"mesh.{axis} = {size} does not divide the model's {whole} {what}; take {sizes[-1]}, or another divisor"
            )


def param_axes(path: str, shape: tuple[int, ...]) -> tuple[str | None, ...]:
    """The mesh axes of a parameter's dimensions.

    Args:
        path: ends in a parameter's path, as those of Adam's moments do; scalars, which lie everywhere, may have any.
    Raises:
        ValueError: no rule is for this path.
    """
    if not shape:
        return ()
    for rule, axes in RULES:
        if re.search(f"(^|/)({rule})$", path):
            return axes
    raise ValueError(f"parameter {path!r} of shape {shape} has no rule in recjax.training.mesh.RULES; add one")


def param_shardings(mesh: Mesh, tree: Any) -> Any:
    """A sharding for every array of a tree: parameters, a part of them, copies in another dtype, an optimiser's state.

    A dimension that its axis does not divide is whole.

    Args:
        tree: arrays or their shapes.
    Raises:
        ValueError: an array whose path has no rule.
    """

    def sharding(key_path, leaf) -> NamedSharding:
        path = jax.tree_util.keystr(key_path, simple=True, separator="/")
        return NamedSharding(mesh, fitting_spec(PartitionSpec(*param_axes(path, leaf.shape)), leaf.shape, mesh.shape))

    return jax.tree_util.tree_map_with_path(sharding, tree)


def constrain_params(tree: Any) -> Any:
    """The same tree inside a jitted function, laid out by the rules over the mesh in context, if there is one."""

    def laid_out(key_path, leaf) -> jax.Array:
        path = jax.tree_util.keystr(key_path, simple=True, separator="/")
        return constrain(leaf, *param_axes(path, leaf.shape))

    return jax.tree_util.tree_map_with_path(laid_out, tree)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows split over "data" and "fsdp", all else whole: for every array of a batch."""
    return NamedSharding(mesh, PartitionSpec(ROWS))
