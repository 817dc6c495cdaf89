"""Where parameters, batches and activations lie on a mesh of devices.

The mesh is the one in context (`jax.set_mesh`), with the axes "data", "fsdp" and "tensor"; see recjax.training.mesh.
Where none is, everything lies on one device and nothing here does anything.
"""

import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array

ROWS = ("data", "fsdp")  # the mesh axes that split the rows of a batch

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

# What a dimension of an array is split over: no axis, one, or several together.
Axes = str | tuple[str, ...] | None


def param_axes(path: str, shape: tuple[int, ...]) -> tuple[Axes, ...]:
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
    raise ValueError(f"parameter {path!r} of shape {shape} has no rule in recjax.models.placement.RULES; add one")


def stream_axes(time: int) -> tuple[Axes, Axes]:
    """The mesh axes that split the stream, [batch * time, hidden].

    Rows are split as those of a batch, and weights are gathered along "fsdp". A single token a row is less than the
    weights are: there units are split along "fsdp", as in the weights, and every device multiplies by the part that it
    has.
    """
    return (ROWS, None) if time > 1 else ("data", "fsdp")


def param_shardings(mesh: Mesh, tree: Any) -> Any:
    """A sharding for every array of a tree: parameters, a part of them, copies in another dtype, an optimiser's state.

    A dimension that its axis does not divide is whole.

    Args:
        tree: arrays or their shapes.
    Raises:
        ValueError: an array whose path has no rule.
    """
    return _by_path(lambda leaf, axes: NamedSharding(mesh, _fitting(axes, leaf.shape, mesh.shape)), tree)


def laid_out_by_rules(mesh: Mesh, tree: Any) -> Any:
    """Shapes of a tree of parameters, or of an optimiser's state, as they lie on a mesh."""
    return jax.tree.map(lambda shape, where: shape.update(sharding=where), tree, param_shardings(mesh, tree))


def bytes_on_device(tree: Any) -> int:
    """Bytes that a tree of laid-out shapes takes on one device."""
    leaves = jax.tree.leaves(tree)
    return sum(leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves)


def constrain(x: Array, *axes: Axes) -> Array:
    """The same array inside a jitted function, laid out over the mesh.

    Args:
        axes: mesh axes of each dimension; later dimensions are whole. A dimension that the axes' size does not divide
            is whole as well: the numbers are the same, and no device count is refused for the sake of a layout.
    """
    sizes = _sizes(jax.sharding.get_abstract_mesh())
    return jax.lax.with_sharding_constraint(x, _fitting(axes, x.shape, sizes)) if sizes else x


def constrain_params(tree: Any) -> Any:
    """The same tree inside a jitted function, laid out by the rules."""
    return _by_path(lambda leaf, axes: constrain(leaf, *axes), tree)


def put(x: np.ndarray, *axes: Axes) -> Array:
    """A host array, whole on every process, on the mesh's devices, each of which is sent its own part alone.

    Args:
        axes: as for `constrain`.
    """
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return jax.device_put(x)
    sharding = NamedSharding(mesh, _fitting(axes, x.shape, mesh.shape))
    return jax.make_array_from_process_local_data(sharding, x, x.shape)


def put_rows(tree: Any) -> Any:
    """Host arrays of a batch on the mesh's devices, their rows split; for one device as they are.

    A jitted function takes them there by itself, and sooner than they could be put there one by one.
    """
    if jax.sharding.get_mesh().size == 1:
        return tree
    return jax.tree.map(lambda x: put(np.asarray(x), ROWS), tree)


def put_params(tree: Any) -> Any:
    """Host parameters, or an optimiser's state, on the mesh's devices by the rules."""
    return _by_path(lambda leaf, axes: put(np.asarray(leaf), *axes), tree)


def moved_params(mesh: Mesh, tree: Any) -> Any:
    """Parameters from another mesh of the same devices, by the rules on this one; copied only where they move.

    One by one, as a device may need one of them whole for a moment.
    """
    if mesh.size <= 1:
        return tree

    def moved(leaf: Array, there: NamedSharding) -> Array:
        if leaf.sharding.is_equivalent_to(there, leaf.ndim):
            return leaf
        if leaf.sharding.device_set != there.device_set:
            return jax.device_put(leaf, there)
        return mover(there)(leaf)

    return jax.tree.map(moved, tree, param_shardings(mesh, tree))


@functools.lru_cache
def mover(there: NamedSharding) -> Callable[[Array], Array]:
    """A jitted function that sends an array to where `there` says, from device to device."""
    return jax.jit(lambda x: x, out_shardings=there)


def on_host(tree: Any) -> Any:
    """Device arrays as NumPy arrays, whole on every process."""
    here = all(leaf.is_fully_addressable for leaf in jax.tree.leaves(tree))
    return jax.device_get(tree if here else _whole(tree))


def params_on_host(tree: Any) -> Any:
    """As `on_host`, one array after the other, so that no device holds more than one of them whole."""
    return jax.tree.map(on_host, tree)


@jax.jit
def _whole(tree: Any) -> Any:
    return jax.tree.map(constrain, tree)


def laid_out(mesh: Mesh, shape: tuple[int, ...], dtype: DTypeLike, *axes: Axes) -> jax.ShapeDtypeStruct:
    """The shape of an array that would lie on a mesh, for programs that are compiled and not run.

    Args:
        axes: as for `constrain`.
    """
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, _fitting(axes, shape, mesh.shape)))


def row_shards() -> int:
    """How many parts the mesh splits the rows of a batch into."""
    sizes = _sizes(jax.sharding.get_abstract_mesh())
    return math.prod(sizes.get(name, 1) for name in ROWS)


def over_rows(function: Callable, whole: Any, *rows: Array) -> Any:
    """`function(whole, *rows)`, where each device computes its own rows and `whole` is gathered once, before.

    Its gradient adds up on each device and is summed over devices once, after; left to the compiler, both would happen
    in every turn of a loop inside `function`. Rows that cannot be split are computed by all devices.
    """
    shards = row_shards()
    if shards == 1 or any(len(x) % shards for x in rows):
        return function(whole, *rows)
    split = PartitionSpec(ROWS)
    specs = (PartitionSpec(), *[split] * len(rows))
    return jax.shard_map(function, in_specs=specs, out_specs=split, axis_names={*ROWS}, check_vma=False)(whole, *rows)


def _sizes(mesh: AbstractMesh) -> dict[str, int]:
    """Of the axes that arrays can be laid out over: inside shard_map and pmap, those that it does not split."""
    automatic = [kind == AxisType.Auto for kind in mesh.axis_types]
    return {name: size for (name, size), free in zip(mesh.shape.items(), automatic, strict=True) if free}


def _fitting(axes: tuple[Axes, ...], shape: tuple[int, ...], sizes: Mapping[str, int]) -> PartitionSpec:
    """The axes of each dimension, or None where they do not divide it."""

    def divides(axis: Axes, length: int) -> bool:
        names = (axis,) if isinstance(axis, str) else axis or ()
        return all(name in sizes for name in names) and length % math.prod(sizes[name] for name in names) == 0

    return PartitionSpec(
        *(axis if divides(axis, length) else None for axis, length in zip(axes, shape[: len(axes)], strict=True))
    )


def _by_path(function: Any, tree: Any) -> Any:
    """`function(leaf, axes)` of every leaf, with the axes that the rules give it."""

    def of_leaf(key_path, leaf):
        return function(leaf, param_axes(jax.tree_util.keystr(key_path, simple=True, separator="/"), leaf.shape))

    return jax.tree_util.tree_map_with_path(of_leaf, tree)
