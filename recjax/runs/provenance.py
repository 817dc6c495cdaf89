"""Where the numbers of a run come from: versions of recjax and its packages, its commit, and the user's code."""

import contextlib
import functools
import importlib.util
import inspect
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import recjax
from recjax.config import Config
from recjax.runtime.files import digest

PROGRAM = "__main__"  # module of the program that Python started
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "numpy")


@functools.cache
def versions() -> dict[str, Any]:
    """Versions of recjax and of the packages that decide numbers, as environment.json has them."""
    files = sorted(Path(recjax.__file__).parent.rglob("*.py"))
    return {
        "recjax": recjax.__version__,
        "commit": _commit(),
        "recjax_source": digest(b"".join(path.read_bytes() for path in files)),
        "packages": {name: version(name) for name in _PACKAGES},
    }


@functools.cache  # a process runs the code of one commit
def _commit() -> str | None:
    """The commit of the package's own checkout, with "+" appended if files differ; None outside a checkout."""

    def git(*arguments: str) -> str:
        folder = Path(recjax.__file__).parent
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        # A package installed inside another repository does not belong to that repository's commit.
        if git("ls-files", "--error-unmatch", "__init__.py") != "__init__.py":
            return None
        has_changes = bool(git("status", "--porcelain", "--", "."))
        return git("rev-parse", "HEAD") + "+" * has_changes
    except (OSError, subprocess.SubprocessError):
        return None


def code_digests(config: Config, reward: Any = None) -> dict[str, str]:
    """Digests of the user's code that a run calls, by module.

    They cover the modules that a config names as module:function, and the user's modules that these import.

    Args:
        reward: reward function, or functions, that a program passed; functions of the program itself that they call
            have one digest.
    """
    digests = _named_modules(config)
    passed = reward if isinstance(reward, Sequence) else [reward]
    functions = [function for function in passed if inspect.isfunction(function)]
    called = _called_functions(functions)
    in_program = [function for function in called if function.__module__ == PROGRAM]
    if in_program:
        with contextlib.suppress(OSError):  # a function of an interactive program has no source
            digests[PROGRAM] = digest("".join(map(inspect.getsource, in_program)).encode())
    pending = list(digests)
    for function in functions + called:
        pending.append(function.__module__)
    for name in pending:  # the loop adds the modules that it finds
        if name not in digests and _is_users_module(name):
            digests[name] = digest(Path(str(sys.modules[name].__file__)).read_bytes())
        found = _used_modules(name).difference(pending)
        pending.extend(sorted(filter(_is_users_module, found)))
    return digests


def _named_modules(config: Config) -> dict[str, str]:
    """Digests of the modules that a config names as module:function."""
    digests = {}
    names = set(re.findall(r"\b([a-zA-Z_][\w.]*):[a-zA-Z_]", str(config.model_dump())))
    for name in sorted(names):
        with contextlib.suppress(Exception):  # no module, or its package cannot be imported, which raises anything
            file = getattr(sys.modules.get(name), "__file__", None)
            if file is None:
                file = cast(ModuleSpec, importlib.util.find_spec(name)).origin
            if not name.startswith("recjax."):
                digests[name] = digest(Path(str(file)).read_bytes())
    return digests


def _called_functions(functions: Sequence[Callable]) -> list[Callable]:
    """The global functions that the given functions call, directly or through other global functions."""
    pending = list(functions)
    for function in pending:  # the loop adds the functions that it finds
        names = function.__code__.co_names
        values = [function.__globals__.get(name) for name in names]
        pending += [value for value in values if inspect.isfunction(value) and value not in pending]
    return pending[len(functions) :]


def _used_modules(name: str) -> set[Any]:
    """Names of the modules that define the global values of a module."""
    if name not in sys.modules:
        return set()
    used = set()
    for value in list(vars(sys.modules[name]).values()):
        if inspect.ismodule(value):
            used.add(value.__name__)
        if inspect.isclass(value) or inspect.isfunction(value):
            used.add(value.__module__)
        else:
            used.add(type(value).__module__)
    return used


def _is_users_module(name: Any) -> bool:
    """True for an imported module that belongs to neither the program, recjax, Python nor an installed package."""
    if not isinstance(name, str) or name in (PROGRAM, "recjax") or name.startswith("recjax."):
        return False
    path = getattr(sys.modules.get(name), "__file__", None)
    if path is None:
        return False
    installed = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    return not path.startswith(installed) and "site-packages" not in path and path.endswith(".py")
