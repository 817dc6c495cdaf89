"""The checks that tests/conftest.py puts on every function of the package: types, and shapes by jaxtyping."""

import inspect
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
        return checked(function) if hints else function

    return decorate


def _names_shape(hint: object) -> bool:
    if isinstance(hint, str | typing.ForwardRef) or getattr(hint, "__module__", "").startswith("jaxtyping"):
        return True
    inner = hint if isinstance(hint, list) else typing.get_args(hint)
    return typing.get_origin(hint) is not typing.Literal and any(map(_names_shape, inner))
