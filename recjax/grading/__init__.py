"""Reads answers and compares them: mathematics, numbers, choices, tool calls, the text after a reply's thoughts.

Imports no other file of recjax, so that other libraries can use it: code that needs a config, a task, worker processes
or JAX stays in recjax.rewards. The public names are imported on first use, because SymPy takes a second to load.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # Editors and type checkers do not call `__getattr__`
    from recjax.grading.math_answers import explain, is_right, math_reward

__all__ = ["explain", "is_right", "math_reward"]


def _imported(name: str) -> object:
    """Imports a public name."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("recjax.grading.math_answers"), name)


if not TYPE_CHECKING:  # A type checker would take every name for a public one
    __getattr__ = _imported
