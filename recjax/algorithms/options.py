"""Checks of hyper-parameters: values in range, and options that the chosen function reads."""

import difflib
import importlib
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def require(condition: bool, name: str, value: Any, remedy: str) -> None:
    """Refuses an option's value.

    Raises:
        ValueError: where `condition` is false, naming the option, the value and the remedy.

    Examples:
        >>> require(False, "epsilon_low", -0.2, "must be 0 or more")
        Traceback (most recent call last):
            ...
        ValueError: epsilon_low = -0.2: must be 0 or more
    """
    if not condition:
        raise ValueError(f"{name} = {value!r}: {remedy}")


def did_you_mean(name: Any, names: Iterable[str]) -> str:
    """The end of an error message that offers the nearest of `names`, or nothing.

    Examples:
        >>> did_you_mean("one_sided", ["one_side", "two_side"])
        "; did you mean 'one_side'?"
    """
    nearest = difflib.get_close_matches(str(name), list(names), n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


def imported(place: str, name: str) -> Callable:
    """The user's own function, named module:function.

    Args:
        place: in a config.
    Raises:
        ValueError: there is no such module or function.

    Examples:
        >>> imported("weight.name", "math:sqrt")(9.0)
        3.0
    """
    module, _, function = name.partition(":")
    try:
        loaded = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{place} = {name!r}: {error}; the module must be importable from the folder you start in or installed"
        ) from error
    if not callable(loaded):
        raise ValueError(f"{place} = {name!r}: {function} is not a function")
    return loaded


def readable_options(function: Callable) -> dict[str, inspect.Parameter]:
    """The keyword-only parameters of an axis function: its options.

    Examples:
        >>> def bounded(ratio, *, cap: float = 3.0): ...
        ...
        >>> list(readable_options(bounded))
        ['cap']
    """
    try:
        parameters = inspect.signature(function, eval_str=True).parameters.values()
    except (NameError, AttributeError):  # an annotation that is no name here
        parameters = inspect.signature(function).parameters.values()
    return {parameter.name: parameter for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}


def checked_value(place: str, annotation: Any, value: Any) -> Any:
    """`value` as the annotated type; whole numbers pass for floats.

    Raises:
        ValueError: for a value of another type.

    Examples:
        >>> checked_value("clip.epsilon_low", float, 1)
        1.0
    """
    if typing.get_origin(annotation) is typing.Literal:
        choices = typing.get_args(annotation)
        # 1 == 1.0 == True, and only the first is a choice.
        require(any(value == x and type(value) is type(x) for x in choices), place, value, f"takes one of {choices}")
        return value
    if annotation not in (int, float, str, bool):  # the user's own function says no more
        require(isinstance(value, int | float | str | None), place, value, "takes a number, a text, or true or false")
        return value
    accepted = int | float if annotation is float else annotation
    fits = isinstance(value, accepted) and isinstance(value, bool) == (annotation is bool) and value == value
    require(fits, place, value, f"takes {'an int' if annotation is int else f'a {annotation.__name__}'}")
    return annotation(value)


def resolved_options(axis: str, name: str, function: Callable, given: Mapping[str, Any]) -> dict[str, Any]:
    """Every option of `function` with its value: the given one, or the default of the signature.

    Args:
        axis: first part of the option's place in a config, such as "clip".
        name: what the config calls `function`.
    Raises:
        ValueError: an option that `function` does not read, a value of another type, or a required option without one.

    Examples:
        >>> def bounded(ratio, *, cap: float = 3.0): ...
        ...
        >>> resolved_options("weight", "bounded", bounded, {"cap": 2})
        {'cap': 2.0}
    """
    options = readable_options(function)
    for option, value in given.items():
        has = f"its options: {', '.join(options)}" if options else "it has none"
        remedy = f"{axis} {name!r} does not read this option ({has}){did_you_mean(option, options)}"
        require(option in options, f"{axis}.{option}", value, remedy)
    for option, parameter in options.items():
        if option not in given and parameter.default is parameter.empty:
            raise ValueError(f"{axis}.{option} has no value: {axis} {name!r} requires it")
    return {
        option: checked_value(f"{axis}.{option}", _type_of(parameter), given.get(option, parameter.default))
        for option, parameter in options.items()
    }


def _type_of(parameter: inspect.Parameter) -> Any:
    """The type of an option: as annotated, or, without an annotation, that of its default."""
    if parameter.annotation is not parameter.empty:
        return parameter.annotation
    found = type(parameter.default) if parameter.default is not parameter.empty else object
    return float if found is int else found
