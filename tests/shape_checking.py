"""The checks that tests/conftest.py puts on every function of the package: types, and shapes by jaxtyping."""

import functools
import inspect
import types
import typing

import beartype
import jaxtyping

# An int where a float is asked for is fine, as it is to Python's type checkers.
checked = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))
_jaxtyped = jaxtyping.jaxtyped


def jaxtyped(*, typechecker: typing.Callable) -> typing.Callable:
    """`jaxtyping.jaxtyped`, which costs several times as much as beartype, only for functions that name a shape."""

    def decorate(function):
        if inspect.isclass(function):
            return _jaxtyped(function, typechecker=typechecker)
        hints = [*function.__annotations__.values()]
        if any(map(_names_shape, hints)):
            return _jaxtyped(function, typechecker=typechecker)
        return _checked_once(function) if hints else function

    return decorate


_wrappers: dict[tuple, tuple[dict, typing.Callable]] = {}


def _checked_once(function: types.FunctionType) -> typing.Callable:
    """`checked`, which generates its code once for all closures of a function that another one defines in each call."""
    if "<locals>" not in function.__qualname__:
        return checked(function)
    key = function.__module__, function.__qualname__, function.__code__
    annotations, first = _wrappers.get(key, (None, None))
    if annotations != function.__annotations__:
        first = checked(function)
        _wrappers[key] = dict(function.__annotations__), first
        return first
    if not hasattr(first, "__beartype_wrapper"):  # it has nothing to check
        return function
    wrapper = types.FunctionType(first.__code__, first.__globals__, function.__name__)
    wrapper.__kwdefaults__ = first.__kwdefaults__ | {"__beartype_func": function}
    wrapper.__dict__.update(first.__dict__)
    return functools.update_wrapper(wrapper, function)


def _names_shape(hint: object) -> bool:
    if isinstance(hint, str | typing.ForwardRef) or getattr(hint, "__module__", "").startswith("jaxtyping"):
        return True
    inner = hint if isinstance(hint, list) else typing.get_args(hint)
    return typing.get_origin(hint) is not typing.Literal and any(map(_names_shape, inner))
