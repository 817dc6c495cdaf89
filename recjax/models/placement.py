"""Placement of parameters, batches and activations on a mesh of devices.

The mesh is the mesh in context (`jax.set_mesh`), with the axes "data", "fsdp" and "tensor", and "expert" if experts are
split over devices; see recjax.training.mesh.
Without a mesh, everything lies on one device and these functions have no effect.
"""

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array

ROWS = ("data", "fsdp", "expert")  # the mesh axes that split the rows of a batch

# Projections of hidden states, and back to them.
INTO = "query|key|value|gate|up|shared_gate|shared_up|delta_inputs|delta_gate|delta_rate|delta_decay"
OUT_OF = "output|down|shared_down|delta_output"

# End of a parameter's path → mesh axes of the dimensions. Stacked layers have a first axis, which is never split.
RULES = (
    (r"embedding/embedding", ("tensor", "fsdp")),
    (r"head/kernel", ("fsdp", "tensor")),
    (r"score/kernel", ("fsdp", None)),
    (rf"layers/({INTO})/kernel", (None, "fsdp", "tensor")),
    (rf"layers/({OUT_OF})/kernel", (None, "tensor", "fsdp")),
    (r"layers/(query|key|value)/bias", (None, "tensor")),
    (rf"layers/({INTO})_lora_a/kernel", (None, "fsdp", None)),
    (rf"layers/({INTO})_lora_b/kernel", (None, None, "tensor")),
    (rf"layers/({OUT_OF})_lora_a/kernel", (None, "tensor", None)),
    (rf"layers/({OUT_OF})_lora_b/kernel", (None, None, "fsdp")),
    (r"layers/(experts/|shared_)router/kernel", (None, "fsdp", None)),
    (r"layers/experts/(gate|up)/kernel", (None, "expert", "fsdp", "tensor")),
    (r"layers/experts/down/kernel", (None, "expert", "tensor", "fsdp")),
    (r"layers/experts/(gate|up)_lora_a/kernel", (None, "expert", "fsdp", None)),
    (r"layers/experts/(gate|up)_lora_b/kernel", (None, "expert", None, "tensor")),
    (r"layers/experts/down_lora_a/kernel", (None, "expert", "tensor", None)),
    (r"layers/experts/down_lora_b/kernel", (None, "expert", None, "fsdp")),
    (r"(layers/\w+_norm|norm)/scale|layers/delta_(kernel|log_speed|bias)", ()),
)

AnyMesh = Mesh | AbstractMesh  # abstract: of devices that are absent

# The mesh axes that split a dimension of an array: none, one, or several.
Axes = str | tuple[str, ...] | None


def param_axes(path: str, shape: tuple[int, ...], in_state: bool = False) -> tuple[Axes, ...]:
    """The mesh axes of a parameter's dimensions.

    Args:
        path: ends in a parameter's path, as the paths of Adam's moments do; scalars may have any path.
        in_state: True for an array of an optimizer's state, which is not split if it has no rule or fewer dimensions
            than its parameter, such as adafactor's sums of rows.
    Raises:
        ValueError: no rule matches the path.
    """
    if not shape:
        return ()
    path = re.sub(r"\blayers/\d+/", "layers/", path)  # the number of a layer within a period
    path, unrolled = re.subn(r"\blayer_\d+/", "layers/", path)
    for rule, axes in RULES:
        if re.search(f"(^|/)({rule})$", path):
            axes = axes[unrolled:]
            if in_state and len(shape) < len(axes):
                return ()
            return axes
    if in_state:
        return ()
    raise ValueError(f"parameter {path!r} of shape {shape} has no rule in recjax.models.placement.RULES; add one")


def hidden_axes(time: int) -> tuple[Axes, Axes]:
    """The mesh axes that split the rows and the units of hidden states, [batch * time, hidden].

    Rows are split like a batch's rows, and weights are gathered along "fsdp". With a single token a row, hidden states
    are smaller than the weights: then units are split along "fsdp" like the weights, and every device multiplies by its
    own part of the weights.
    """
    if time > 1:
        return ROWS, None
    return ("data", "expert"), "fsdp"


def param_shardings(mesh: AnyMesh, tree: Any) -> Any:
    """A sharding for every array of a tree of parameters, of a part of the tree, or of the optimizer's state.

    A dimension that its axis does not divide is not split.

    Args:
        tree: arrays or their shapes.
    Raises:
        ValueError: an array whose path has no rule.
    """
    return _by_path(lambda leaf, axes: NamedSharding(mesh, _fitting(axes, leaf.shape, mesh.shape)), tree)


def laid_out_by_rules(mesh: AnyMesh, tree: Any) -> Any:
    """Shapes and shardings of a tree of parameters or of the optimizer's state, on a mesh."""
    return jax.tree.map(lambda shape, where: shape.update(sharding=where), tree, param_shardings(mesh, tree))


def bytes_on_device(tree: Any) -> int:
    """Bytes that a tree of sharded shapes takes on one device."""
    leaves = jax.tree.leaves(tree)
    return sum(leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves)


def constrain(x: Array, *axes: Axes) -> Array:
    """The array inside a jitted function, with its sharding constrained to mesh axes.

    Args:
        axes: mesh axes of each dimension; later dimensions are not split. A dimension that the axes' size does not
            divide is not split either, so that every number of devices works.
    """
    sizes = _sizes(jax.sharding.get_abstract_mesh())
    if not sizes:
        return x
    return jax.lax.with_sharding_constraint(x, _fitting(axes, x.shape, sizes))


def constrain_params(tree: Any) -> Any:
    """The tree inside a jitted function, with its shardings constrained by the rules."""
    return _by_path(lambda leaf, axes: constrain(leaf, *axes), tree)


def put_array(x: np.ndarray, *axes: Axes) -> Array:
    """Puts a host array, whole on every process, on the mesh's devices; each device receives only its own part.

    Args:
        axes: see `constrain`.
    """
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return jax.device_put(x)
    sharding = NamedSharding(mesh, _fitting(axes, x.shape, mesh.shape))
    return jax.make_array_from_process_local_data(sharding, x, x.shape)


def put_rows(tree: Any) -> Any:
    """Puts a batch's host arrays on the mesh's devices, with their rows split; returns them unchanged for one device.

    For one device a jitted function transfers them by itself, and faster than one by one.
    """
    if jax.sharding.get_mesh().size == 1:
        return tree
    return jax.tree.map(lambda x: put_array(np.asarray(x), ROWS), tree)


def put_params(tree: Any) -> Any:
    """Puts host parameters, or the optimizer's state, on the mesh's devices by the rules."""
    return _by_path(lambda leaf, axes: put_array(np.asarray(leaf), *axes), tree)


def moved_params(mesh: Mesh, tree: Any) -> Any:
    """Moves parameters from another mesh of the same devices to this mesh; copies only arrays that move.

    It moves them one by one, as a device may hold a whole array for a moment.
    """
    if mesh.size <= 1:
        return tree

    def move(leaf: Array, sharding: NamedSharding) -> Array:
        if leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
            return leaf
        if leaf.sharding.device_set != sharding.device_set:
            return jax.device_put(leaf, sharding)
        return mover(sharding)(leaf)

    return jax.tree.map(move, tree, param_shardings(mesh, tree))


@functools.lru_cache
def mover(sharding: NamedSharding) -> Callable[[Array], Array]:
    """A jitted function that sends an array to a sharding, from device to device."""
    return jax.jit(lambda x: x, out_shardings=sharding)


def on_host(tree: Any) -> Any:
    """Arrays as NumPy arrays, whole on every process."""
    is_local = all(isinstance(leaf, np.ndarray) or leaf.is_fully_addressable for leaf in jax.tree.leaves(tree))
    if not is_local:
        tree = _whole(tree)
    return jax.device_get(tree)


def params_on_host(tree: Any) -> Any:
    """`on_host` for one array after another, so that no device holds more than one whole array."""
    return jax.tree.map(on_host, tree)


_whole = jax.jit(functools.partial(jax.tree.map, constrain))


def laid_out(mesh: AnyMesh, shape: tuple[int, ...], dtype: DTypeLike, *axes: Axes) -> jax.ShapeDtypeStruct:
    """The shape and sharding of an array on a mesh, for programs that are compiled and not run.

    Args:
        axes: see `constrain`.
    """
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, _fitting(axes, shape, mesh.shape)))


def row_shards(mesh: AnyMesh | None = None) -> int:
    """Number of parts into which a mesh, by default the mesh in context, splits the rows of a batch."""
    if mesh is None:
        sizes = _sizes(jax.sharding.get_abstract_mesh())
    else:
        sizes = mesh.shape
    return math.prod(sizes.get(name, 1) for name in ROWS)


def over_rows(function: Callable, whole: Any, *rows: Any, axis: Callable[[Array], int] = lambda _: 0) -> Any:
    """`function(whole, *rows)`, where each device computes its own rows and `whole` is gathered once, before the call.

    The gradient of `whole` adds up on each device and is summed over devices once, after the call. By itself, XLA would
    do both in every iteration of a loop inside `function`. All devices compute rows that cannot be split.

    Args:
        rows: trees of arrays with equal numbers of rows; the result has the form of the first tree, and the last is
            one array with rows in its first axis.
        axis: function from an array of `rows` to its axis of rows.
    """
    shards = row_shards()
    if shards == 1 or len(rows[-1]) % shards:
        return function(whole, *rows)
    axes = tuple(name for name in ROWS if name in jax.sharding.get_abstract_mesh().shape)
    split = jax.tree.map(lambda x: PartitionSpec(*(None,) * axis(x), axes), rows)
    specs = {"in_specs": (PartitionSpec(), *split), "out_specs": split[0]}
    return jax.shard_map(function, **specs, axis_names={*axes}, check_vma=False)(whole, *rows)


def _sizes(mesh: AbstractMesh) -> dict[str, int]:
    """Sizes of the mesh axes that are free for sharding; axes that shard_map or pmap maps over are excluded."""
    automatic = [kind == AxisType.Auto for kind in mesh.axis_types]
    return {name: size for (name, size), free in zip(mesh.shape.items(), automatic, strict=True) if free}


def dividing_axes(wanted: Iterable[str], length: int, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes of `wanted` that a mesh with these sizes has; none if their product does not divide `length`."""
    names = tuple(name for name in wanted if name in sizes)
    if length % math.prod(sizes[name] for name in names):
        return ()
    return names


def _fitting(axes: tuple[Axes, ...], shape: tuple[int, ...], sizes: Mapping[str, int]) -> PartitionSpec:
    """The axes of each dimension that the mesh has, or None if they do not divide the dimension."""

    def fitting(axis: Axes, length: int) -> Axes:
        if axis is None:
            return None
        wanted = (axis,) if isinstance(axis, str) else axis
        names = dividing_axes(wanted, length, sizes)
        if not names:
            return None
        return names if len(names) > 1 else names[0]

    return PartitionSpec(*(fitting(axis, length) for axis, length in zip(axes, shape[: len(axes)], strict=True)))


def _by_path(function: Any, tree: Any) -> Any:
    """Maps `function(leaf, axes)` over a tree, with each leaf's axes from the rules."""

    def map_leaf(key_path, leaf):
        # An optimizer's state is a tuple, and parameters are plain dicts.
        in_state = any(isinstance(key, jax.tree_util.SequenceKey) for key in key_path)
        path = jax.tree_util.keystr(key_path, simple=True, separator="/")
        return function(leaf, param_axes(path, leaf.shape, in_state))

    return jax.tree_util.tree_map_with_path(map_leaf, tree)
