"""What a config's schema says of its keys, ranges, choices and nested blocks, and the checks that blocks share."""

import dataclasses
import math
import operator
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from recjax.algorithms.options import require

# Beyond these scores divided by the temperature are infinite, or all the same.
LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.01, 100.0
_LARGEST = 1e20  # larger ones soon overflow float32

# Arguments of transformers' apply_chat_template, which recjax gives itself.
_TEMPLATE_ARGUMENTS = frozenset(
    "conversation messages tools chat_template add_generation_prompt continue_final_message tokenize padding truncation"
    " max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs".split()
)

_LIMITS = {
    "low": ("a finite number, {} or more", operator.ge),
    "above": ("above {}", operator.gt),
    "high": ("at most {}", operator.le),
    "below": ("below {}", operator.lt),
}


def number(default: Any, **limits: float) -> Any:
    """A number's default and range: `low` and `high` belong to it, `above` and `below` do not."""
    return dataclasses.field(default=default, metadata=limits)


def at_least(low: float, default: Any) -> Any:
    """A number's default, and the lowest value that it may have."""
    return number(default, low=low)


def check_numbers(block: Any, prefix: str = "") -> None:
    """Refuses numbers that are not finite or out of their range, in a block and its nested ones.

    Raises:
        ValueError: with key, value and range.
    """
    for field in dataclasses.fields(block):
        key, value = prefix + field.name, getattr(block, field.name)
        if dataclasses.is_dataclass(value):
            check_numbers(value, f"{key}.")
        elif isinstance(value, int | float):
            limits = [(*_LIMITS[name], limit) for name, limit in field.metadata.items()]
            is_whole = isinstance(value, int)
            finite = abs(value) < 2**63 if is_whole else math.isfinite(value) or value == field.metadata.get("high")
            require(finite, key, value, f"must be a {'64-bit' if is_whole else 'finite'} number")
            words = ", ".join(text.format(limit) for text, _, limit in limits)
            require(all(holds(value, limit) for _, holds, limit in limits), key, value, f"must be {words}")
            require(not math.isfinite(value) or abs(value) < _LARGEST, key, value, f"must be below {_LARGEST:g}")


def wrong_with_variables(values: Any) -> str | None:
    """The reason why a value cannot be the variables of a chat template; None where it can."""
    if not isinstance(values, Mapping) or not all(isinstance(name, str) and name.isidentifier() for name in values):
        return "takes variables of the chat template by name, such as {enable_thinking: false}"
    reserved = [name for name in values if name in _TEMPLATE_ARGUMENTS]
    if "tools" in reserved:
        return "tools are no variable of this kind; give them by themselves, as a column or field `tools`"
    return f"{reserved[0]} is set by recjax; remove it" if reserved else None


def block_of(annotation: Any) -> type | None:
    """The dataclass in an annotation such as `Block` or `Block | None`; None for plain values."""
    return next((part for part in (annotation, *typing.get_args(annotation)) if dataclasses.is_dataclass(part)), None)


def choices_of(annotation: Any) -> tuple[str, ...]:
    """The values of a `Literal` or `list[Literal]`; none for another annotation."""
    if typing.get_origin(annotation) is typing.Literal:
        return typing.get_args(annotation)
    return tuple(choice for part in typing.get_args(annotation) for choice in choices_of(part))


def schema_keys(block: type, prefix: str = "") -> dict[str, dataclasses.Field]:
    """Every dotted key of a block and its field, a nested block's keys after its own."""
    keys = {}
    for field in dataclasses.fields(block):
        keys[prefix + field.name] = field
        if nested := block_of(field.type):
            keys |= schema_keys(nested, f"{prefix}{field.name}.")
    return keys


def require_one(key: str, values: Mapping[str, Any]) -> None:
    """Refuses a block unless exactly one of the values that exclude each other is given."""
    given = [name for name, value in values.items() if value is not None]
    if len(given) != 1:
        found = f"found {' and '.join(given)}" if given else "found none"
        raise ValueError(f"{key}: give exactly one of {', '.join(f'{key}.{name}' for name in values)}; {found}")


def require_defaults(key: str, block: Any, names: Sequence[str], remedy: str) -> None:
    """Refuses other values than the defaults where nothing would read them."""
    for field in dataclasses.fields(block):
        value = getattr(block, field.name)
        require(field.name not in names or value == field.default, f"{key}.{field.name}", value, remedy)
