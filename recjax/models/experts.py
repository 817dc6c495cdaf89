"""Mixtures of experts: a router sends each token through a few of many MLPs; no token is dropped."""

import operator
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from recjax.models.decoder_config import DecoderConfig
from recjax.models.placement import ROWS, dividing_axes
from recjax.models.products import PRODUCT, grouped_product

EXPERTS = "experts"  # name of the recorded experts of each token, [time, layers, per_token]; see `routing_shapes`
NO_RECORD = -1  # instead of an expert's number: the router chooses
_COLLECTION = "routing"


class Load(NamedTuple):
    """Sums over the tokens that a forward pass ran: tokens of each expert, router probabilities, and tokens."""

    counts: Float[Array, "layers experts"]
    probabilities: Float[Array, "layers experts"]
    tokens: Float[Array, ""]


class Experts(nn.Module):
    """The MLP of a layer with experts: Σ over the chosen experts of router probability × expert(x).

    The router computes in float32. It takes the softmax over all experts and chooses the `per_token` largest.

    Attributes:
        gated: the activation, a function of the gate's and the up projection's outputs.
    Reference: arXiv 1701.06538 §2; arXiv 2401.04088 §2.1.
    """

    config: DecoderConfig
    dtype: DTypeLike
    gated: Callable[[Array, Array], Array]

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        real: Bool[Array, " tokens"],
        recorded: Int[Array, "tokens per_token"] | None,
    ) -> Float[Array, "tokens hidden"]:
        """Runs the experts.

        Args:
            real: True at tokens; padding runs through no expert and gives 0.
            recorded: experts to use, with the probabilities of this router; NO_RECORD where the router chooses.
        """
        options = self.config.experts
        assert options is not None
        router = nn.Dense(options.count, False, jnp.float32, precision="highest", name="router")
        probabilities = jax.nn.softmax(router(x.astype(jnp.float32)), axis=-1)
        chosen = jax.lax.top_k(probabilities, options.per_token)[1]
        if recorded is not None:
            chosen = jnp.where(recorded < 0, chosen, recorded)
        weights = jnp.take_along_axis(probabilities, chosen, axis=-1)
        if options.renormalize:
            weights /= weights.sum(-1, keepdims=True)
        self.sow(_COLLECTION, "chosen", chosen)
        counts = jax.nn.one_hot(chosen, options.count).sum(1)
        self.sow(_COLLECTION, "load", tuple((y * real[:, None]).sum(0) for y in (counts, probabilities)))
        lora = self.config.lora

        def kernels_of(name: str, inputs: int, units: int) -> tuple[Array, ...]:
            kernel = _Kernels((options.count, inputs, units), name=name)()
            if lora is None or name not in lora.targets:
                return (kernel,)
            low = _Kernels((options.count, inputs, lora.rank), name=f"{name}_lora_a")()
            added = _Kernels((options.count, lora.rank, units), name=f"{name}_lora_b")()
            return kernel, low, added * (lora.alpha / lora.rank)

        size = self.config.hidden_size
        width = self.config.intermediate_size
        shapes = ("gate", size, width), ("up", size, width), ("down", width, size)
        kernels = tuple(kernels_of(*shape) for shape in shapes)
        chosen = jnp.where(real[:, None], chosen, options.count)
        return _on_each_device(self.gated, x.astype(self.dtype), chosen, weights.astype(self.dtype), kernels)


class _Kernels(nn.Module):
    shape: tuple[int, int, int]

    @nn.compact
    def __call__(self) -> Float[Array, "experts inputs units"]:
        return self.param("kernel", nn.initializers.lecun_normal(-2, -1, (0,)), self.shape)


def _mixed(
    gated: Callable,
    x: Float[Array, "tokens hidden"],
    chosen: Int[Array, "tokens per_token"],
    weights: Float[Array, "tokens per_token"],
    kernels: tuple[tuple[Array, ...], ...],
    first: Int[Array, ""] | int = 0,
) -> Float[Array, "tokens hidden"]:
    """The weighted outputs of the experts whose kernels these are, numbered from `first`; 0 for other experts.

    Args:
        kernels: of gate, up and down: a kernel, or a kernel and the adapter's A and scaled B.
    """
    tokens, per_token = chosen.shape
    count = len(kernels[0][0])
    expert = (chosen - first).reshape(-1)
    expert = jnp.where((expert >= 0) & (expert < count), expert, count)
    order = jnp.argsort(expert, stable=True)
    places = jnp.zeros_like(order).at[order].set(jnp.arange(len(order)))
    sizes = jnp.bincount(expert, length=count)
    rows = _permuted(jnp.repeat(x, per_token, axis=0), order, places)

    def dense(rows: Array, kernel: Array, *adapter: Array) -> Array:
        y = checkpoint_name(grouped_product(rows, kernel, sizes), PRODUCT)
        if not adapter:
            return y
        for factor in adapter:
            rows = grouped_product(rows, factor, sizes)
        return y + rows

    gate, up = (dense(rows, *each) for each in kernels[:2])
    outputs = dense(gated(gate, up), *kernels[2])
    outputs = _permuted(outputs, places, order).reshape(tokens, per_token, -1)
    return jnp.einsum("tkh,tk->th", outputs, weights, preferred_element_type=jnp.float32).astype(x.dtype)


# A gather whose gradient is a gather as well; XLA would add rows one by one.
@jax.custom_vjp
def _permuted(x: Array, order: Array, inverse: Array) -> Array:
    return x[order]


_permuted.defvjp(
    lambda x, order, inverse: (x[order], inverse), lambda inverse, gradient: (gradient[inverse], None, None)
)


def _on_each_device(gated: Callable, x: Array, chosen: Array, weights: Array, kernels: tuple) -> Array:
    """`_mixed` on a mesh: a device sorts its own tokens, and runs its experts on all tokens along the "expert" axis."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size <= 1 or any(kind != AxisType.Auto for kind in mesh.axis_types):
        return _mixed(gated, x, chosen, weights, kernels)

    sizes = {axis: size for axis, size in mesh.shape.items() if size > 1}
    count, _, width = kernels[0][0].shape
    rows = dividing_axes(ROWS, len(x), sizes)
    owners = dividing_axes(("expert",), count, sizes)
    units = dividing_axes(("tensor",), width, sizes)
    sends = bool(owners) and owners[0] in rows  # the devices that share the experts have different tokens

    def on_device(x: Array, chosen: Array, weights: Array, kernels: tuple) -> Array:
        if sends:
            x, chosen, weights = (jax.lax.all_gather(y, owners, tiled=True) for y in (x, chosen, weights))
        first = 0
        if owners:
            first = jax.lax.axis_index(owners) * len(kernels[0][0])
        mixed = _mixed(gated, x, chosen, weights, kernels, first=first)
        summed_axes = owners + units
        if sends:
            mixed = jax.lax.psum_scatter(mixed, owners, tiled=True)
            summed_axes = units
        if summed_axes:
            mixed = jax.lax.psum(mixed, summed_axes)
        return mixed

    tokens = PartitionSpec(rows)
    experts_only = PartitionSpec(owners)
    into = PartitionSpec(owners, None, units)
    out_of = PartitionSpec(owners, units)
    # The kernel, and the adapter's A and B, of gate, up and down.
    placed = (into, experts_only, into), (into, experts_only, into), (out_of, out_of, experts_only)
    kernel_specs = tuple(axes[: len(each)] for axes, each in zip(placed, kernels, strict=True))
    specs = {"in_specs": (tokens, tokens, tokens, kernel_specs), "out_specs": tokens}
    return jax.shard_map(on_device, **specs, check_vma=False)(x, chosen, weights, kernels)


# --- Routing that a sampler records and an update replays.


def routing_shapes(decoder: nn.Module) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of the experts that are recorded for one token; empty if the decoder records none."""
    config: DecoderConfig = decoder.config
    if config.experts is None or not decoder.replays_routing:
        return {}
    size = 1, config.num_layers, config.experts.per_token
    dtype = jnp.int8
    if config.experts.count > 128:
        dtype = jnp.int16
    return {EXPERTS: jax.ShapeDtypeStruct(size, dtype)}


def unrecorded(decoder: nn.Module, count: int) -> dict[str, np.ndarray]:
    """The record of tokens whose experts are not known, [count, …]."""
    return {
        name: np.full((count, *shape.shape[1:]), NO_RECORD, shape.dtype)
        for name, shape in routing_shapes(decoder).items()
    }


def apply_routed(decoder: nn.Module, variables: dict, *arguments, **options) -> tuple:
    """`decoder.apply`, and the sown values of the experts' layers: `chosen` [layers, tokens, per_token] and `load`.

    `chosen` is NO_RECORD in layers without experts, which have no load. Without experts, the second value is empty.
    """
    if decoder.config.experts is None:
        return decoder.apply(variables, *arguments, **options), {}
    result, sown = decoder.apply(variables, *arguments, mutable=[_COLLECTION], **options)
    sown = sown[_COLLECTION]
    size = decoder.config.period
    if size == 1 and not decoder.unrolled:
        return result, {name: value[0] for name, value in sown["layers"]["experts"].items()}
    routed = {}
    for number, kind in enumerate(decoder.config.kinds):
        if kind.is_dense:
            continue
        if decoder.unrolled:
            routed[number] = sown[f"layer_{number}"]["experts"]
        else:
            stacked = sown["layers"][str(number % size)]["experts"]
            routed[number] = jax.tree.map(operator.itemgetter(number // size), stacked)
    stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *routed.values())
    (chosen,) = stacked["chosen"]
    if len(routed) < decoder.config.num_layers:
        all_layers = jnp.full((decoder.config.num_layers, *chosen.shape[1:]), NO_RECORD, chosen.dtype)
        chosen = all_layers.at[np.array(list(routed))].set(chosen)
    return result, {"chosen": chosen, "load": stacked["load"][0]}


def chosen_experts(decoder: nn.Module, sown: dict) -> dict[str, Array]:
    """The experts of each token as an array to record, [tokens, layers, per_token]."""
    shapes = routing_shapes(decoder)
    return {name: sown["chosen"].swapaxes(0, 1).astype(shape.dtype) for name, shape in shapes.items()}


def load_of(sown: dict, per_token: int) -> Load:
    """The experts' load in a forward pass, from the values that the layers have sown."""
    counts, probabilities = sown["load"]
    return Load(counts, probabilities, counts[0].sum() / per_token)


def balance_loss(load: Load, per_token: int) -> Float[Array, ""]:
    """Mean over layers of experts × Σ_e f_e P_e: shares of tokens times mean probabilities; 1 with equal loads.

    Reference: arXiv 2101.03961 §2.2, equations 4 to 6, with f divided by the experts of each token.
    """
    tokens = jnp.maximum(load.tokens, 1)
    shares = jax.lax.stop_gradient(load.counts) / (tokens * per_token)
    return (shares * load.probabilities / tokens).sum(-1).mean() * load.counts.shape[-1]


def load_metrics(load: Load, per_token: int) -> dict[str, Array]:
    """Metrics of the load: the balance loss, and the largest load of an expert relative to the mean, over layers."""
    largest = load.counts.max(-1) / jnp.maximum(load.counts.mean(-1), 1e-9)
    return {"expert_balance": balance_loss(load, per_token), "expert_load_max": largest.mean()}
