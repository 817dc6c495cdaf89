"""Access to the package reasoning_gym: its generators by name, and checks of their options.

The package makes problems and scores completions. This module imports it on first use.
"""

import dataclasses
import difflib
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any


def check_gym(name: str, options: Mapping[str, Any], template: str) -> None:
    """Checks the block `task.reasoning_gym`.

    Raises:
        ValueError: an unknown generator or option, values that the generator refuses, or a template without
            "{question}".
    """
    generators = _package().factory.DATASETS
    if name not in generators:
        near = difflib.get_close_matches(name, generators, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"task.reasoning_gym.name = {name!r}: {hint}It takes {', '.join(sorted(generators))}")
    known = {field.name for field in dataclasses.fields(generators[name][1])} - {"seed", "size"}
    for option, value in options.items():
        if option not in known:
            raise ValueError(
                f"task.reasoning_gym.options.{option} = {value!r}: {name} takes {', '.join(sorted(known))}"
            )
    try:
        generator(name, options)
    except (AssertionError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"task.reasoning_gym.options = {dict(options)}: {name}: {error}") from error
    if "{question}" not in template:
        raise ValueError(f"task.reasoning_gym.template = {template!r} must hold {{question}}")


def _package() -> ModuleType:
    try:
        import reasoning_gym
    except ImportError as error:
        install = 'pip install -e ".[reasoning_gym]"'
        raise ValueError(f"task.reasoning_gym needs a package: {install} ({error})") from error
    return reasoning_gym


def generator(name: str, options: Mapping[str, Any], **size_and_seed: int) -> Any:
    """Makes a generator of the package with its options: a data set of problems."""
    if name == "composite" and isinstance(options.get("datasets"), list):
        specification = sys.modules[_package().factory.DATASETS[name][1].__module__].DatasetSpec
        options = {"datasets": [specification(**part) for part in options["datasets"]]}
    return _package().create_dataset(name, **options, **size_and_seed)
