"""Checks of hyperparameters: their names, types and ranges; users' own functions by name."""

import difflib
import functools
import importlib
import inspect
import os
import sys
import sysconfig
import traceback
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

from recjax.errors import UserError

PACKAGE = Path(__file__).parents[1]
_P = ParamSpec("_P")
_Result = TypeVar("_Result")
# A numeric option of an axis function: a Python float, or an argument of a compiled program.
if typing.TYPE_CHECKING:
    import jax

    Scalar: typing.TypeAlias = float | jax.Array
else:
    Scalar = float | typing.SupportsFloat  # a config's schema needs no JAX


def require(condition: Any, name: str, value: Any, remedy: str) -> None:
    """Raises an error about an option's value unless `condition` is true.

    Arguments of a compiled program have no value yet when JAX traces it; their conditions pass.

    Raises:
        UserError: `condition` is false; the message contains the option, the value and the remedy.

    Examples:
        >>> require(False, "epsilon_low", -0.2, "must be 0 or more")
        Traceback (most recent call last):
            ...
        recjax.errors.UserError: epsilon_low = -0.2: must be 0 or more
    """
    jax = sys.modules.get("jax")  # a config's checks need no JAX
    if jax and isinstance(condition, jax.core.Tracer):
        return
    if not condition:
        problem, _, remedy = remedy.partition("; ")
        raise UserError(name, problem, remedy, value)


class Bounds(NamedTuple):
    """A rule for the value of an option: `accepts` is a function of the value, `words` a remedy."""

    accepts: Callable[[Any], Any]
    words: str

    def check(self, name: str, options: Mapping[str, Any]) -> None:
        """Raises an error unless the rule accepts the value of the option `name`."""
        require(self.accepts(options[name]), name, options[name], self.words)


class AtLeast(NamedTuple):
    """A rule for the value of an option: at least the value of the option `other`."""

    other: str

    def check(self, name: str, options: Mapping[str, Any]) -> None:
        """Raises an error unless the option `name` is at least the other option."""
        least = options[self.other]
        require(options[name] >= least, name, options[name], f"must be at least {self.other} = {least}")


AT_LEAST_0 = Bounds(lambda value: value >= 0, "must be 0 or more")
AT_LEAST_1 = Bounds(lambda value: value >= 1, "must be 1 or more")
ABOVE_0 = Bounds(lambda value: value > 0, "must be above 0")
ABOVE_0_TO_1 = Bounds(lambda value: (0 < value) & (value <= 1), "must be above 0 and at most 1")
FROM_0_TO_1 = Bounds(lambda value: (0 <= value) & (value <= 1), "must be from 0 to 1")
# The rules of each function that `requires` decorates, by option.
_RULES: dict[Callable[..., Any], Mapping[str, Bounds | AtLeast]] = {}


def requires(**rules: Bounds | AtLeast) -> Callable[[Callable[_P, _Result]], Callable[_P, _Result]]:
    """Gives a function rules for its options, which each call and `check_options` check.

    Raises:
        UserError: in a call of the function, if an option's value breaks its rule.

    Examples:
        >>> @requires(cap=AT_LEAST_1)
        ... def truncated(ratio, *, cap=5.0):
        ...     return min(ratio, cap)
        ...
        >>> truncated(2.0, cap=0.2)
        Traceback (most recent call last):
            ...
        recjax.errors.UserError: cap = 0.2: must be 1 or more
    """

    def decorated(function: Callable[_P, _Result]) -> Callable[_P, _Result]:
        @functools.wraps(function)
        def checked(*values: _P.args, **options: _P.kwargs) -> _Result:
            check_options(checked, options)
            return function(*values, **options)

        _RULES[checked] = rules
        return checked

    return decorated


def check_options(function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Checks values of a function's options by the function's rules; a function without rules takes every value.

    Raises:
        UserError: a value breaks its rule.

    Examples:
        >>> @requires(cap=AT_LEAST_1)
        ... def truncated(ratio, *, cap=5.0):
        ...     return min(ratio, cap)
        ...
        >>> check_options(truncated, {"cap": 2.0})  # accepted
    """
    rules = _RULES.get(function, {})
    if not rules:
        return
    defaults = {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}
    values = {**defaults, **options}
    for name, rule in rules.items():
        # The call itself reports a required option without a value.
        if values[name] is not inspect.Parameter.empty:
            rule.check(name, values)


def did_you_mean(name: Any, names: Iterable[str]) -> str:
    """End of an error message that suggests the most similar of `names`; empty if none is similar.

    Examples:
        >>> did_you_mean("one_sided", ["one_side", "two_side"])
        "; did you mean 'one_side'?"
    """
    names = list(names)
    if name in names:
        return ""
    nearest = difflib.get_close_matches(str(name), names, n=1)
    if not nearest:
        return ""
    return f"; did you mean {nearest[0]!r}?"


# What to write in place of code that JAX cannot trace, by the error's class.
_REMEDIES = {
    "TracerBoolConversionError": "write jnp.where in place of if, and, or, not",
    "TracerArrayConversionError": "call functions of jnp in place of NumPy's",
    "TracerIntegerConversionError": "loop over a shape, and mask elements with jnp.where",
    "NonConcreteBooleanIndexError": "write jnp.where(mask, x, 0) in place of x[mask]",
    "ConcretizationTypeError": "leave out float(), int() and .item(), and give jnp.where all three arguments",
}


def described(error: BaseException, traced: bool = False, first_line: bool = False) -> str:
    """An exception's type and message, then a line for each frame of the traceback in the user's own code.

    Args:
        traced: True if JAX traced the code: a last line has the remedy if the code asked for values of arrays.
        first_line: flag to show only the message's first line, as always for traced code, because JAX's are long.

    Examples:
        >>> described(ValueError("too long"))
        'ValueError: too long'
    """
    folders = (sysconfig.get_path("stdlib"), PACKAGE)
    skipped = ("<frozen", "<@beartype", *[os.path.join(folder, "") for folder in folders])
    lines = []
    for frame in traceback.extract_tb(error.__traceback__):
        is_installed = not {"site-packages", "dist-packages"}.isdisjoint(Path(frame.filename).parts)
        if not is_installed and not frame.filename.startswith(skipped):
            lines.append(f"\n  {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}")
    try:
        message = str(error)
    except Exception:  # a user's exception class may be unable to print itself
        message = "its message cannot be printed"
    if first_line or traced:
        message = message.partition("\n")[0]
    if traced:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        if "truth value of an array" in message:
            kinds = ["TracerBoolConversionError"]
        remedies = [_REMEDIES[kind] for kind in kinds if kind in _REMEDIES]
        lines += [f"\n  values of arrays are not known here: {remedy}" for remedy in remedies[:1]]
    return f"{type(error).__name__}: {message}" + "".join(lines)


def user_function(key: str, name: str) -> Callable[..., Any]:
    """Imports the user's own function, named module:function.

    Args:
        key: key of the name in a config.
    Raises:
        ValueError: the module cannot be imported, or has no such function.

    Examples:
        >>> user_function("weight.name", "math:sqrt")(9.0)
        3.0
    """
    module, _, function = name.partition(":")
    try:
        loaded = importlib.import_module(module)
    except SystemExit as error:
        raise UserError(
            key,
            f"importing {module} ends the program (SystemExit: {error.code})",
            'put what only a script does under `if __name__ == "__main__":`',
            name,
        ) from error
    except (ImportError, ValueError) as error:
        raise UserError(
            key, described(error), "the module must be importable from the folder you start in or installed", name
        ) from error
    except Exception as error:
        raise UserError(key, f"importing it failed with {described(error)}", value=name) from error
    imported = getattr(loaded, function, None)
    if not callable(imported):
        functions = [name for name, value in vars(loaded).items() if callable(value)]
        similar = did_you_mean(function, functions)
        raise UserError(key, f"{module} has no function {function!r}{similar}", value=name)
    return imported


def readable_options(function: Callable | None) -> dict[str, inspect.Parameter]:
    """Options of an axis function: its keyword-only parameters; an axis that is off has none.

    Examples:
        >>> def bounded(ratio, *, cap: float = 3.0): ...
        ...
        >>> list(readable_options(bounded))
        ['cap']
    """
    if function is None:
        return {}
    try:
        parameters = inspect.signature(function, eval_str=True).parameters.values()
    except (NameError, AttributeError):  # an annotation that cannot be evaluated here
        parameters = inspect.signature(function).parameters.values()
    return {parameter.name: parameter for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}


# The types of options: their names in messages, and the types of the values that they take.
_TYPES: dict[Any, tuple[str, Any]] = {
    int: ("an int", int),
    float: ("a float", int | float),
    str: ("a str", str),
    bool: ("a bool", bool),
}


def checked_value(key: str, annotation: Any, value: Any) -> Any:
    """Returns `value` as the annotated type; a whole number is accepted as a float.

    Raises:
        ValueError: the value has another type.

    Examples:
        >>> checked_value("clip.epsilon_low", float, 1)
        1.0
    """
    if typing.get_origin(annotation) is typing.Literal:
        choices = typing.get_args(annotation)
        # The type is compared too, because 1 == 1.0 == True.
        if (type(value), value) not in [(type(choice), choice) for choice in choices]:
            raise UserError(key, f"takes one of {choices}", value=value)
        return value
    kinds = typing.get_args(annotation)
    if float in kinds and types.NoneType not in kinds:  # this is `Scalar`
        annotation = float
    if annotation not in tuple(_TYPES):  # only users' own functions have such annotations
        if not isinstance(value, int | float | str | None):
            raise UserError(key, "takes a number, a text, or true or false", value=value)
        return value
    name, accepted = _TYPES[annotation]
    # A bool is an int for Python, and NaN is no value.
    if not isinstance(value, accepted) or isinstance(value, bool) != (annotation is bool) or value != value:
        raise UserError(key, f"takes {name}", value=value)
    return annotation(value)


def resolved_options(axis: str, name: str, function: Callable | None, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Every option of `function` with its value: the given value, or the signature's default.

    Args:
        axis: first part of the option's place in a config, such as "clip".
        name: name of `function` in the config.
    Raises:
        ValueError: an option that `function` does not read, a value of another type, or a required option without one.

    Examples:
        >>> def bounded(ratio, *, cap: float = 3.0): ...
        ...
        >>> resolved_options("weight", "bounded", bounded, {"cap": 2})
        {'cap': 2.0}
    """
    options = readable_options(function)
    known = "it has none"
    if options:
        known = f"its options: {', '.join(options)}"
    for option, value in chosen.items():
        if option not in options:
            problem = f"{axis} {name!r} does not read this option ({known}){did_you_mean(option, options)}"
            raise UserError(f"{axis}.{option}", problem, value=value)
    values = {}
    for option, parameter in options.items():
        default = parameter.default
        annotation = parameter.annotation
        if option not in chosen and default is parameter.empty:
            raise UserError(f"{axis}.{option}", f"{axis} {name!r} requires a value", "set it")
        if annotation is parameter.empty:
            annotation = _guessed_type(default)
        values[option] = checked_value(f"{axis}.{option}", annotation, chosen.get(option, default))
    return values


def _guessed_type(default: Any) -> Any:
    """The type of an option without an annotation: its default's, with float for an integer."""
    if default is inspect.Parameter.empty:
        return object
    if type(default) is int:
        return float
    return type(default)
