"""Device meshes; recjax.models.placement defines where arrays are placed on them."""

import math
from collections.abc import Sequence
from typing import overload

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from recjax.config import MeshConfig
from recjax.errors import UserError
from recjax.models.decoder_config import DecoderConfig
from recjax.models.placement import AnyMesh


@overload
def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh: ...


@overload
def make_mesh(config: MeshConfig, devices: int) -> AbstractMesh: ...


@overload
def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | int | None) -> AnyMesh: ...


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | int | None = None) -> AnyMesh:
    """A mesh with the axes "data", "fsdp", "tensor", and "expert" if it is not 1; activate it with `jax.set_mesh`.

    Args:
        devices: devices of the mesh, for example of a topology to compile for; None: all devices of all hosts; a
            number: an abstract mesh of as many absent devices.
    Raises:
        UserError: the product of the sizes is not the number of devices.
    """
    if devices is None:
        devices = jax.devices()
    count = devices if isinstance(devices, int) else len(devices)
    sizes = {name: size for name, size in config.model_dump().items() if name != "expert" or size != 1}
    shown = ", ".join(f"{name} {size}" for name, size in sizes.items())
    product = math.prod(size for size in sizes.values() if size != -1)
    has_rest = -1 in sizes.values()
    if count % product or (not has_rest and product != count):
        relation = "divide" if has_rest else "equal"
        raise UserError(
            "mesh",
            f"{shown}: {product} does not {relation} the number of devices, {count}",
            "set sizes with this product, or set one of them to -1 for the remaining devices",
        )
    shape = tuple(count // product if size == -1 else size for size in sizes.values())
    names = tuple(sizes)
    types = (AxisType.Auto,) * len(sizes)
    if isinstance(devices, int):
        return AbstractMesh(shape, axis_names=names, axis_types=types)
    return jax.make_mesh(shape, axis_names=names, axis_types=types, devices=list(devices))


def check_fits(mesh: AnyMesh, decoder: DecoderConfig) -> None:
    """Raises if a mesh would split attention heads or leave devices without a part of the weights.

    Vocabularies, key and value heads and adapter ranks are not checked: recjax does not split them if they do not fit.

    Args:
        mesh: mesh to check; an empty mesh, which is JAX's default, fits any model.
    Raises:
        UserError: an axis does not divide a dimension of the model; the message names both and the axis's size.
    """
    if mesh.shape.get("expert", 1) > 1 and decoder.experts is None:
        raise UserError("mesh.expert", "the model has no experts", "set 1", value=mesh.shape["expert"])
    dimensions = [
        ("tensor", decoder.num_heads, "attention heads"),
        ("tensor", decoder.intermediate_size, "units of the MLP"),
        ("fsdp", decoder.hidden_size, "units of the stream"),
    ]
    if decoder.experts is not None:
        dimensions.insert(0, ("expert", decoder.experts.count, "experts"))
    for axis, count, units in dimensions:
        size = mesh.shape.get(axis, 1)
        if count % size:
            largest = math.gcd(count, mesh.size)
            raise UserError(
                f"mesh.{axis}",
                f"does not divide the model's {count} {units}",
                f"set {largest}, which also divides the {mesh.size} devices, or another common divisor",
                value=size,
            )
