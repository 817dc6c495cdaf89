"""The checks that tests/conftest.py puts on every function of the package: types, and shapes by jaxtyping."""

import functools
import importlib.machinery
import inspect
import types
import typing
from unittest import mock

import beartype
import jaxtyping
from jaxtyping import _import_hook

# An int where a float is asked for is fine, as it is to Python's type checkers.
checked = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))
_jaxtyped = jaxtyping.jaxtyped
# Functions that are defined within others, hence many times: their annotations, and the first one with its checks.
_closures: dict[tuple, tuple[dict, typing.Callable]] = {}


def jaxtyped(*, typechecker: typing.Callable) -> typing.Callable:
    """`jaxtyping.jaxtyped`, which costs several times as much as beartype, only for functions that name a shape."""

    def decorate(function):
        if inspect.isclass(function):
            return _jaxtyped(function, typechecker=typechecker)
        if "<locals>" in function.__qualname__:
            return _closure(function)
        return _checked(function)

    def _closure(function):
        # beartype and jaxtyping write a program for each function that they check, at each definition.
        key = function.__module__, function.__qualname__, function.__code__
        if key not in _closures or _closures[key][0] != function.__annotations__:
            _closures[key] = dict(function.__annotations__), _checked(function)
            return _closures[key][1]
        first = _closures[key][1]
        if not hasattr(first, "__wrapped__"):  # it has nothing to check
            return function
        if not hasattr(first, "__beartype_wrapper"):
            return _checked(function)
        wrapper = types.FunctionType(first.__code__, first.__globals__, function.__name__)
        wrapper.__kwdefaults__ = first.__kwdefaults__ | {"__beartype_func": function}
        wrapper.__dict__.update(first.__dict__)
        return functools.update_wrapper(wrapper, function)

    def _checked(function):
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


class _Loader(_import_hook._JaxtypingLoader):
    """Gives its name of cached bytecode to the checked module only, so that what the module imports is read compiled.

    jaxtyping's loader compiles all that a module imports again, in each process that may not write bytecode.
    """

    exec_module = importlib.machinery.SourceFileLoader.exec_module

    def get_code(self, fullname):
        name = functools.partial(_import_hook._optimized_cache_from_source, self._typechecker.get_hash())
        with mock.patch("importlib._bootstrap_external.cache_from_source", name):
            return super().get_code(fullname)


_import_hook._JaxtypingLoader = _Loader
