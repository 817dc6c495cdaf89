"""Checks the block `task.reasoning_gym` with the package, which it imports on first use."""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from recjax.errors import UserError
from recjax.grading.gym import generator


def check_gym(name: str, options: Mapping[str, Any], template: str) -> None:
    """Checks the block `task.reasoning_gym`.

    Raises:
        UserError: no package, an unknown generator or option, values that the generator refuses, or a template without
            "{question}".
    """
    try:
        import reasoning_gym
    except ImportError as error:
        install = 'pip install -e ".[reasoning_gym]"'
        raise UserError(problem=f"task.reasoning_gym needs a package: {install} ({error})") from error
    generators = reasoning_gym.factory.DATASETS
    if name not in generators:
        similar = difflib.get_close_matches(name, generators, n=1, cutoff=0.5)
        hint = f"did you mean {similar[0]!r}? " if similar else ""
        raise UserError("task.reasoning_gym.name", f"{hint}It takes {', '.join(sorted(generators))}", value=name)
    known = {field.name for field in dataclasses.fields(generators[name][1])} - {"seed", "size"}
    for option, value in options.items():
        if option not in known:
            raise UserError(
                f"task.reasoning_gym.options.{option}", f"{name} takes {', '.join(sorted(known))}", value=value
            )
    try:
        generator(name, options)
    except (AssertionError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise UserError("task.reasoning_gym.options", f"{name}: {error}", value=dict(options)) from error
    if "{question}" not in template:
        raise UserError("task.reasoning_gym.template", "must hold {question}", value=template)
