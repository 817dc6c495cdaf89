"""Optimizers by name: optax's own, or a function of the user's, with options that they take."""

import inspect
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from recjax.algorithms.options import described, did_you_mean, require, user_function
from recjax.errors import UserError

if TYPE_CHECKING:
    import optax

ADAMW = "adamw"
NAME = "optimizer.name"

# Arguments that a config sets by other keys, or cannot set, with the remedy: of all functions, and of single ones.
_ELSEWHERE = MappingProxyType(
    {
        "learning_rate": "set optimizer.learning_rate instead",
        "weight_decay": "set optimizer.weight_decay instead",
    }
)
_ELSEWHERE_IN = MappingProxyType(
    {
        ADAMW: {
            "b1": "set optimizer.beta1 instead",
            "b2": "set optimizer.beta2 instead",
            "eps": "set optimizer.epsilon instead",
        },
        "muon": {
            "adam_learning_rate": "it would not follow optimizer.schedule; consistent_rms: 0.2 lets both share a rate",
            "muon_weight_dimension_numbers": "recjax sets it to the matrices of the layers; remove it",
        },
    }
)


def optimizer_function(name: str) -> Callable[..., Any]:
    """Returns the function that makes an optimizer from a learning rate and options.

    Args:
        name: name of an optimizer of optax or optax.contrib, or the user's own module:function.
    Raises:
        UserError: no such function, or one that takes no `learning_rate`.
    """
    if ":" in name:
        function = user_function(NAME, name)
        remedy = "must take the learning rate as an argument named learning_rate, like optimizers of optax"
        require("learning_rate" in _parameters(function), NAME, name, remedy)
        return function
    import optax  # imported here and below, so that grading workers start without JAX
    import optax.contrib

    known = {}
    for module in (optax.contrib, optax):
        for optimizer, function in vars(module).items():
            if optimizer.startswith(("_", "scale_by_")) or not inspect.isfunction(function):
                continue
            if next(iter(_parameters(function)), "") == "learning_rate":
                known[optimizer] = function
    require(name != "rprop", NAME, name, "begins with steps as large as a learning rate, which recjax gives later")
    remedy = f"is no optimizer of optax; takes module:function or one of {', '.join(sorted(known))}"
    require(name in known, NAME, name, remedy + did_you_mean(name, known))
    return known[name]


def takes_weight_decay(function: Callable[..., Any]) -> bool:
    """True if a function of `optimizer_function` has the argument that `optimizer.weight_decay` sets."""
    return "weight_decay" in _parameters(function)


def checked_options(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options as hashable values; integers become floats where the default is a float.

    Raises:
        UserError: an option that the function does not take or that another key sets, a required option without a
            value, or a value of another type.
    """
    parameters = _parameters(function)
    elsewhere = {**_ELSEWHERE, **_ELSEWHERE_IN.get(name, {})}
    accepted = [option for option in parameters if option not in elsewhere]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    values = {}
    for option, value in options.items():
        place = f"optimizer.options.{option}"
        if option in elsewhere and option in parameters:
            raise UserError(place, elsewhere[option], value=value)
        remedy = f"is no option of {name}, which takes {', '.join(accepted)}{did_you_mean(option, accepted)}"
        require(takes_any or option in accepted, place, value, remedy)
        default = None
        if option in parameters:
            default = parameters[option].default
        values[option] = _checked_value(place, default, value)
    for option in accepted:
        parameter = parameters[option]
        is_variadic = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if parameter.default is parameter.empty and option not in values and not is_variadic:
            raise UserError(f"optimizer.options.{option}", f"{name} requires a value", "set it")
    return values


def build_optimizer(
    function: Callable[..., Any], options: Mapping[str, Any], learning_rate: Any, weight_decay: Any = 0.0
) -> "optax.GradientTransformation":
    """Calls a function of `optimizer_function`.

    Args:
        options: see `checked_options`.
        learning_rate: learning rate of the next update, a scalar.
        weight_decay: ignored unless the function takes it.
    """
    import optax

    arguments = dict(options)
    if takes_weight_decay(function):
        arguments["weight_decay"] = weight_decay
    if function is optax.contrib.muon:
        arguments["muon_weight_dimension_numbers"] = layer_matrices
    return function(learning_rate=learning_rate, **arguments)


def layer_matrices(params: dict) -> dict:
    """The axes of the matrices that muon makes orthogonal; None for parameters that it leaves to Adam.

    These are the matrices of the layers. optax would take embeddings and the head and no layer, because parameters
    hold the matrices of all layers in one array, whose last two axes are inputs and outputs.
    """
    import jax
    import optax

    def axes_of(path: tuple, leaf: Any) -> Any:
        names = jax.tree_util.keystr(path, simple=True, separator="/")
        if names.startswith("layers/") and names.endswith("/kernel"):
            return optax.contrib.MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1)
        return None

    return jax.tree_util.tree_map_with_path(axes_of, params)


def check_optimizer(name: str, build: Callable[[Any], "optax.GradientTransformation"]) -> None:
    """Traces an update of a few small parameters, with their shapes alone.

    Args:
        name: name of the optimizer, for errors.
        build: function from a learning rate to the optimizer.
    Raises:
        UserError: the update fails, or returns other shapes or types, or no checkpoint can hold the state.
    """
    import jax
    import jax.numpy as jnp
    import optax

    shapes = {
        "embedding": {"embedding": (8, 4)},
        "layers": {"query": {"kernel": (2, 4, 4)}, "attention_norm": {"scale": (2, 4)}},
        "norm": {"scale": (4,)},
    }
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )
    rate = jax.ShapeDtypeStruct((), jnp.float32)

    def first_update(rate: Any, params: dict) -> tuple:
        optimizer = optax.with_extra_args_support(build(rate))
        state = optimizer.init(params)
        return params, state, *optimizer.update(params, state, params)

    try:
        params, state, updates, new_state = jax.eval_shape(first_update, rate, params)
    except Exception as error:
        raise UserError(NAME, f"a first update fails: {described(error, traced=True)}", value=name) from error
    remedy = "returns updates of other shapes or types than the parameters'"
    require(_described_alike(updates, params), NAME, name, remedy)
    require(_described_alike(new_state, state), NAME, name, "changes the shapes or types of its state in an update")
    has_empty = any(leaf.size == 0 for leaf in jax.tree.leaves(state))
    require(not has_empty, NAME, name, "has an array without elements in its state, which no checkpoint can hold")


def _described_alike(tree: Any, other: Any) -> bool:
    import jax

    if jax.tree.structure(tree) != jax.tree.structure(other):
        return False
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    return all(ours.shape == theirs.shape and ours.dtype == theirs.dtype for ours, theirs in pairs)


def _checked_value(place: str, default: Any, value: Any) -> Any:
    if isinstance(default, bool):
        require(isinstance(value, bool), place, value, "takes true or false")
    elif isinstance(default, int | float):
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        require(is_number or value is None, place, value, "takes a number")
        if isinstance(default, float) and value is not None:
            return float(value)
    return _hashable(place, value)


def _hashable(place: str, value: Any) -> Any:
    require(not isinstance(value, Mapping), place, value, "takes a number, a text, true or false, null, or a list")
    if isinstance(value, list):
        return tuple(_hashable(place, each) for each in value)
    return value


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters
