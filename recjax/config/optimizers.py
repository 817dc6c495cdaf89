"""Optimizers by name: optax's own, or a function of the user's, with options that they take."""

import inspect
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from recjax.algorithms.options import did_you_mean, require, user_function

ADAMW = "adamw"
NAME = "optimizer.name"

# Arguments of the functions that have keys of their own.
_OWN_KEYS = MappingProxyType({"learning_rate": "optimizer.learning_rate", "weight_decay": "optimizer.weight_decay"})
_ADAMW_KEYS = MappingProxyType({"b1": "optimizer.beta1", "b2": "optimizer.beta2", "eps": "optimizer.epsilon"})


def optimizer_function(name: str) -> Callable[..., Any]:
    """Returns the function that makes an optimizer from a learning rate and options.

    Args:
        name: name of an optimizer of optax or optax.contrib, or the user's own module:function.
    Raises:
        ValueError: no such function, or one that takes no `learning_rate`.
    """
    if ":" in name:
        function = user_function(NAME, name)
        remedy = "must take the learning rate as an argument named learning_rate, like optimizers of optax"
        require("learning_rate" in _parameters(function), NAME, name, remedy)
        return function
    import optax  # imported here, so that grading workers start without JAX
    import optax.contrib

    known = {}
    for module in (optax.contrib, optax):
        for each, function in vars(module).items():
            is_part = each.startswith(("_", "scale_by_"))
            if (
                inspect.isfunction(function)
                and not is_part
                and next(iter(_parameters(function)), "") == "learning_rate"
            ):
                known[each] = function
    remedy = f"is no optimizer of optax; takes module:function or one of {', '.join(sorted(known))}"
    require(name in known, NAME, name, remedy + did_you_mean(name, known))
    return known[name]


def takes_weight_decay(function: Callable[..., Any]) -> bool:
    """True if a function of `optimizer_function` has the argument that `optimizer.weight_decay` sets."""
    return "weight_decay" in _parameters(function)


def checked_options(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options as hashable values, where the function has a float an integer becomes one.

    Raises:
        ValueError: an option that the function does not take, that is a key of its own here, or that lacks a value.
    """
    parameters = _parameters(function)
    keys = _OWN_KEYS | _ADAMW_KEYS if name == ADAMW else _OWN_KEYS
    accepted = [each for each in parameters if each not in keys]
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    values = {}
    for option, value in options.items():
        place = f"optimizer.options.{option}"
        if option in keys and option in parameters:
            raise ValueError(f"{place} = {value!r}: set {keys[option]} instead")
        remedy = f"is no option of {name}, which takes {', '.join(accepted)}{did_you_mean(option, accepted)}"
        require(takes_any or option in accepted, place, value, remedy)
        default = parameters[option].default if option in parameters else None
        values[option] = _checked_value(place, default, value)
    for option in accepted:
        parameter = parameters[option]
        is_given = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) or option in values
        if parameter.default is parameter.empty and not is_given:
            raise ValueError(f"optimizer.options.{option}: {name} requires a value; set it")
    return values


def _checked_value(place: str, default: Any, value: Any) -> Any:
    if isinstance(default, bool):
        require(isinstance(value, bool), place, value, "takes true or false")
    elif isinstance(default, int | float):
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        require(is_number or value is None, place, value, "takes a number")
        if isinstance(default, float) and value is not None:
            return float(value)
    return _hashable(value)


def _hashable(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_hashable(each) for each in value)
    return value


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters
