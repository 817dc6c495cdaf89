"""Devices as a mesh. Where things lie on it is said in recjax.models.placement."""

import math
from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh

from recjax.config import MeshConfig
from recjax.models.decoder_config import DecoderConfig


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with the axes "data", "fsdp" and "tensor", to be put in context with `jax.set_mesh`.

    Args:
        devices: those of a topology that is compiled for, say; None: all that there are, on all hosts.
    Raises:
        ValueError: the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = config.model_dump()
    shown = ", ".join(f"{name} {size}" for name, size in sizes.items())
    given = math.prod(size for size in sizes.values() if size != -1)
    rest = -1 in sizes.values()
    if len(devices) % given or (not rest and given != len(devices)):
        raise ValueError(
            f"mesh: {shown}: {given} does not {'divide' if rest else 'equal'} the {len(devices)} devices there are;"
            " set the sizes so that they multiply to that, or one of them to -1 for the rest"
        )
    shape = tuple(len(devices) // given if size == -1 else size for size in sizes.values())
    return jax.make_mesh(shape, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes), devices=devices)


def check_fits(mesh: Mesh, decoder: DecoderConfig) -> None:
    """Refuses a mesh that would leave devices with parts of a head, or without a part of the weights.

    Vocabularies, key and value heads and the ranks of adapters that an axis does not divide are not split instead.

    Args:
        mesh: an empty one, which is what is in context where none was put there, fits any model.
    Raises:
        ValueError: with the axis, its size, and what it does not divide.
    """
    for axis, whole, what in (
        ("tensor", decoder.num_heads, "attention heads"),
        ("tensor", decoder.intermediate_size, "units of the MLP"),
        ("fsdp", decoder.hidden_size, "units of the stream"),
    ):
        size = mesh.shape.get(axis, 1)
        if whole % size:
            largest = max(number for number in range(1, size) if whole % number == 0)
            raise ValueError(
                f"mesh.{axis} = {size} does not divide the model's {whole} {what}; take {largest}, or another that does"
            )
