"""Trained parameters: all parameters, the ones that no pattern freezes, or only low-rank adapters."""

import dataclasses
import hashlib
import re
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict

from recjax.errors import UserError
from recjax.models.decoder import Decoder, abstract_params
from recjax.models.decoder_config import DELTA_PROJECTIONS, DecoderConfig, Lora
from recjax.models.placement import constrain_params


@runtime_checkable
class Adapters(Protocol):
    """Options of low-rank adapters: their rank, their scale `alpha / rank`, and the projections that have them."""

    @property
    def rank(self) -> int: ...

    @property
    def alpha(self) -> float: ...

    @property
    def targets(self) -> Sequence[str]: ...


@runtime_checkable
class Trained(Protocol):
    """Options that say what is trained: only adapters if there are any, else all parameters that no pattern freezes."""

    @property
    def lora(self) -> Adapters | None: ...

    @property
    def freeze(self) -> Sequence[str]: ...


def is_adapter(path: str) -> bool:
    """True for the path of an adapter's parameter."""
    return "_lora_" in path


def adapted(config: DecoderConfig, lora: Adapters) -> DecoderConfig:
    """The decoder's config with adapters on its projections.

    Raises:
        ValueError: a target that the decoder lacks.
    """
    absent = set(lora.targets) & set(DELTA_PROJECTIONS)
    if absent and config.delta is None:
        raise UserError("model.lora.targets", f"the model has no {min(absent)}", "remove it", lora.targets)
    return dataclasses.replace(config, lora=Lora(lora.rank, lora.alpha, tuple(lora.targets)))


def with_adapters(decoder: Decoder, params: dict, config: Adapters, key: jax.Array) -> tuple[Decoder, dict]:
    """The decoder and its parameters with new adapters, which change no output yet: A is random, B zero."""
    decoder = decoder.clone(config=adapted(decoder.config, config))
    leaves = flatten(abstract_params(decoder.config))
    adapters = {path: jnp.zeros(leaf.shape) for path, leaf in leaves.items() if is_adapter(path)}
    for number, (path, leaf) in enumerate(adapters.items()):
        if path.endswith("_lora_a/kernel"):
            random = jax.random.normal(jax.random.fold_in(key, number), leaf.shape)
            adapters[path] = random * leaf.shape[-2] ** -0.5
    return decoder, combine(params, jax.jit(constrain_params)(unflatten(adapters)))


def merged(config: DecoderConfig, params: dict) -> dict:
    """Parameters of the same policy without adapters: each kernel with its adapters' product added."""
    leaves = flatten(params)
    assert config.lora is not None
    scale = config.lora.alpha / config.lora.rank
    base_leaves = {path: leaf for path, leaf in leaves.items() if not is_adapter(path)}
    for path in leaves:
        if path.endswith("_lora_a/kernel"):
            kernel = path.replace("_lora_a/", "/")
            product = leaves[path] @ leaves[path.replace("_lora_a/", "_lora_b/")]
            base_leaves[kernel] = base_leaves[kernel] + scale * product
    return unflatten(base_leaves)


def split_params(params: dict, config: Trained) -> tuple[dict, dict]:
    """The trained parameters and the frozen parameters.

    Raises:
        ValueError: a pattern of `freeze` that no path matches, or no parameter left to train.
    """
    leaves = flatten(params)
    frozen = set()
    patterns = config.freeze
    if config.lora:
        frozen = {path for path in leaves if not is_adapter(path)}
        patterns = ()
    for pattern in patterns:
        matching = {path for path in leaves if re.search(pattern, path)}
        if not matching:
            raise UserError("model.freeze", f"{pattern!r} is in none of the paths {', '.join(leaves)}")
        frozen |= matching
    if len(frozen) == len(leaves):
        raise UserError("model.freeze", "leaves nothing to train", "freeze less", config.freeze)
    trained_leaves = {path: leaf for path, leaf in leaves.items() if path not in frozen}
    frozen_leaves = {path: leaf for path, leaf in leaves.items() if path in frozen}
    return unflatten(trained_leaves), unflatten(frozen_leaves)


def combine(first: dict, second: dict) -> dict:
    """Merges two trees; a leaf in both has the second tree's value."""
    return unflatten(flatten(first) | flatten(second))


def in_compute_dtype(decoder: Decoder, params: dict, copy: bool) -> dict:
    """Parameters in the compute dtype, except norm scales, decays and routers, which the decoder does not cast.

    The policy stays the same, as a forward pass casts these parameters anyway.

    Args:
        copy: return new arrays, which a donated update of `params` cannot overwrite.
    """

    def cast(path: str, leaf: Any) -> jax.Array:
        exact = path.endswith(("/scale", "/delta_log_speed", "/delta_bias", "/router/kernel"))
        return jnp.array(leaf, leaf.dtype if exact else decoder.dtype, copy=copy)

    return unflatten({path: cast(path, leaf) for path, leaf in flatten(params).items()})


def flatten(params: dict) -> dict[str, Any]:
    """Path → leaf of a nested dict, with paths such as "layers/query/kernel"."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def unflatten(leaves: dict[str, Any]) -> dict:
    """The nested dict of paths and leaves."""
    return unflatten_dict(leaves, sep="/")


def fingerprint(params: dict) -> str:
    """A digest of every bit of the parameters; equal weights have equal digests, wherever they are stored."""
    leaves = flatten(params)
    checksums = jax.device_get(_checksums(leaves))
    sums = {path: (leaf.shape, str(leaf.dtype), int(checksums[path])) for path, leaf in leaves.items()}
    return hashlib.sha256(repr(sorted(sums.items())).encode()).hexdigest()[:16]


@jax.jit  # one program for all leaves, which compiles faster than one for each shape
def _checksums(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    def checksum(leaf: jax.Array) -> jax.Array:
        # Integer sums wrap around, so they do not depend on the order in which a device adds.
        bits = jax.lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}").astype(jnp.uint32).reshape(-1)
        return jnp.sum(bits * (2 * jnp.arange(bits.size, dtype=jnp.uint32) + 1), dtype=jnp.uint32)

    return jax.tree.map(checksum, leaves)
