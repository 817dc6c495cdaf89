"""Checks of hyperparameters: their names, types and ranges; users' own functions by name."""

import difflib
import importlib
import inspect
import sys
import sysconfig
import traceback
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from recjax.errors import UserError

PACKAGE = Path(__file__).parents[1]
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


def did_you_mean(name: Any, names: Iterable[str]) -> str:
    """End of an error message that suggests the most similar of `names`; empty if none is similar.

    Examples:
        >>> did_you_mean("one_sided", ["one_side", "two_side"])
        "; did you mean 'one_side'?"
    """
    names = list(names)
    nearest = [] if name in names else difflib.get_close_matches(str(name), names, n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


def described(error: BaseException, first_line: bool = False) -> str:
    """An exception's type and message, then a line for each frame of the traceback in the user's own code.

    Args:
        first_line: flag to leave out all lines of the message but the first, as JAX's are long.

    Examples:
        >>> described(ValueError("too long"))
        'ValueError: too long'
    """
    skipped = ("<frozen", "<@beartype", sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), str(PACKAGE))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(skipped)]
    places = [f"\n  {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in frames]
    try:
        message = str(error)
    except Exception:  # a user's exception class may be unable to print itself
        message = "its message cannot be printed"
    if first_line:
        message = message.partition("\n")[0]
    return f"{type(error).__name__}: {message}" + "".join(places)


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
        require(any(value == x and type(value) is type(x) for x in choices), key, value, f"takes one of {choices}")
        return value
    kinds = typing.get_args(annotation)
    if float in kinds and types.NoneType not in kinds:  # a float or a scalar array
        annotation = float
    if annotation not in (int, float, str, bool):  # in a user's own function
        require(isinstance(value, int | float | str | None), key, value, "takes a number, a text, or true or false")
        return value
    accepted = int | float if annotation is float else annotation
    fits = isinstance(value, accepted) and isinstance(value, bool) == (annotation is bool) and value == value
    require(fits, key, value, f"takes {'an int' if annotation is int else f'a {annotation.__name__}'}")
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
    for option, value in chosen.items():
        has = f"its options: {', '.join(options)}" if options else "it has none"
        remedy = f"{axis} {name!r} does not read this option ({has}){did_you_mean(option, options)}"
        require(option in options, f"{axis}.{option}", value, remedy)
    values = {}
    for option, parameter in options.items():
        default = parameter.default
        annotation = parameter.annotation
        if option not in chosen and default is parameter.empty:
            raise UserError(f"{axis}.{option}", f"{axis} {name!r} requires a value", "set it")
        if annotation is parameter.empty:  # the type of the default, with float for an integer
            annotation = object if default is parameter.empty else float if type(default) is int else type(default)
        values[option] = checked_value(f"{axis}.{option}", annotation, chosen.get(option, default))
    return values
