"""The mesh for sampling: splits the weights over as few devices as hold them, and rows over all such groups.

Decoding reads every weight for every token. Weights split over many devices, as for training, would have to be sent for
every token. So an engine has its own mesh of the same devices in the same order, and receives the weights once.
"""

import functools

import jax
from jax.sharding import Mesh

from recjax.models.decoder import Decoder, abstract_params
from recjax.models.placement import bytes_on_device, laid_out_by_rules
from recjax.models.trainable import in_compute_dtype
from recjax.rollout.capacity import free_bytes

WEIGHTS_SHARE = 0.45  # share of a device's free memory for weights; keys and values use the remainder


def sampling_mesh(decoder: Decoder) -> Mesh:
    """The devices of the mesh in context, grouped by the memory that is free at the first call."""
    mesh = jax.sharding.get_mesh()
    return mesh if mesh.size <= 1 else grouped(decoder, mesh)


# Cached, because a different result for a later batch would make JAX compile all programs again.
@functools.lru_cache(maxsize=16)
def grouped(decoder: Decoder, mesh: Mesh, free: int | None = None) -> Mesh:
    """The mesh's devices as groups ("data"), in each of which "tensor" splits the weights.

    Groups are the smallest in which weights take at most WEIGHTS_SHARE of a device's free memory. If none fit, they are
    the largest groups whose devices can share the heads and are no more than training splits weights over.

    Args:
        free: free bytes of each device; None: measured at the first call.
    Returns:
        The mesh itself if the groups have no room for the weights.
    """
    weights, shape, free = abstract_weights(decoder), decoder.config, free_bytes() if free is None else free
    found, needed = mesh, 0
    for size in range(1, mesh.shape["fsdp"] * mesh.shape["tensor"] + 1):
        if any(whole % size for whole in (mesh.size, shape.num_heads, shape.intermediate_size)):
            continue
        found = Mesh(mesh.devices.reshape(-1, 1, size), mesh.axis_names, mesh.axis_types)
        needed = bytes_on_device(laid_out_by_rules(found, weights))
        if needed <= WEIGHTS_SHARE * free:
            break
    return found if needed <= free else mesh


def abstract_weights(decoder: Decoder) -> dict:
    """Shapes and dtypes of all parameters as a sampler holds them."""
    cast = functools.partial(in_compute_dtype, decoder, copy=False)
    return jax.eval_shape(cast, abstract_params(decoder.config))
