"""The devices of a run as they lie to sample: the weights on as few of them as hold them, rows over all such groups.

Decoding reads every weight for every token. What training splits over many devices would have to be sent that often, so
an engine has a mesh of its own, to which weights are sent once. Devices, and the order they are in, are the same.
"""

import functools

import jax
from jax.sharding import Mesh

from recjax.models.decoder import Decoder, abstract_params
from recjax.models.placement import bytes_on_device, laid_out_by_rules
from recjax.models.trainable import in_compute_dtype
from recjax.rollout.capacity import free_bytes

WEIGHTS_SHARE = 0.45  # of a device's free memory, for weights; the rest is for keys and values


def sampling_mesh(decoder: Decoder) -> Mesh:
    """The devices of the mesh in context, laid out by what is free of their memory when this is first asked."""
    mesh = jax.sharding.get_mesh()
    return mesh if mesh.size <= 1 else _for_this_process(decoder, mesh)


@functools.lru_cache(maxsize=4)
def _for_this_process(decoder: Decoder, mesh: Mesh) -> Mesh:
    # Asked anew for each batch, it could come out differently, and all programs would be compiled again.
    return grouped(decoder, mesh, free_bytes())


def grouped(decoder: Decoder, mesh: Mesh, free: int) -> Mesh:
    """The mesh's devices as groups ("data"), in each of which "tensor" splits the weights.

    Groups are the smallest in which weights take no more than WEIGHTS_SHARE of a device's free memory, else the largest
    whose devices can share the heads and are no more than weights are split over in training.

    Args:
        free: bytes of each device.
    Returns:
        The mesh itself where such groups have no room for the weights.
    """
    weights, shape = abstract_weights(decoder), decoder.config
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
    """All parameters as a sampler has them, as shapes."""
    cast = functools.partial(in_compute_dtype, decoder, copy=False)
    return jax.eval_shape(cast, abstract_params(decoder.config))
