"""The dotted keys of a config's schema."""

import dataclasses
import types
import typing
from typing import Any

from recjax.config import Config, TaskConfig


def block_of(annotation: Any) -> type | None:
    """The dataclass in an annotation such as `Block` or `Block | None`; None for plain values."""
    parts = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    return next((part for part in parts if dataclasses.is_dataclass(part)), None)


def schema_keys(block: type = Config, prefix: str = "") -> dict[str, dataclasses.Field]:
    """Every dotted key of the schema and its field."""
    keys = {}
    for field in dataclasses.fields(block):
        keys[prefix + field.name] = field
        if nested := block_of(field.type):
            keys |= schema_keys(nested, f"{prefix}{field.name}.")
    return keys


# Of which a config has exactly one.
TASKS = tuple(field.name for field in dataclasses.fields(TaskConfig) if block_of(field.type))
