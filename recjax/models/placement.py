"""Where activations lie on a mesh of devices. Without a mesh in context (`jax.set_mesh`) nothing here does anything."""

import math
from collections.abc import Mapping

import jax
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array

ROWS = ("data", "fsdp")  # the mesh axes that split the rows of a batch

# What a dimension of an array is split over: no axis, one, or several together.
Axes = str | tuple[str, ...] | None


def constrain(x: Array, *axes: Axes) -> Array:
    """The same array, laid out over the mesh in context.

    Args:
        axes: mesh axes of each dimension; later dimensions are whole. A dimension that the axes' size does not divide
            is whole as well: the numbers are the same, and no device count is refused for the sake of a layout.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not _automatic(mesh):
        return x
    return jax.lax.with_sharding_constraint(x, fitting_spec(PartitionSpec(*axes), x.shape, mesh.shape))


def fitting_spec(spec: PartitionSpec, shape: tuple[int, ...], sizes: Mapping[str, int]) -> PartitionSpec:
    """The spec with None at dimensions that its axes do not divide; of fewer entries than dimensions or as many."""

    def divides(axes: Axes, length: int) -> bool:
        names = (axes,) if isinstance(axes, str) else axes or ()
        return length % math.prod(sizes[name] for name in names) == 0

    return PartitionSpec(
        *(axes if divides(axes, length) else None for axes, length in zip(spec, shape[: len(spec)], strict=True))
    )


def row_shards() -> int:
    """How many parts the mesh in context splits the rows of a batch into."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[name] for name in ROWS) if _automatic(mesh) else 1


def _automatic(mesh) -> bool:
    # Inside shard_map or pmap each device computes with what it has, and there is nothing to lay out.
    return not mesh.empty and all(kind == AxisType.Auto for kind in mesh.axis_types)
