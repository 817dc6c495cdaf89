"""The base class of all config blocks, the types of their values, and the messages about values they refuse."""

import difflib
import functools
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import pydantic
from pydantic.fields import FieldInfo

from recjax.algorithms.options import require

# Outside this range, scores divided by the temperature are infinite, or all equal.
LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.01, 100.0
_LARGEST = 1e20  # float32 overflows soon after


# Arguments of transformers' apply_chat_template that recjax sets itself.
_TEMPLATE_ARGUMENTS = frozenset(
    "conversation messages tools chat_template add_generation_prompt continue_final_message tokenize padding truncation"
    " max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs".split()
)


def checked(of: Any, check: Callable[[Any], str | None]) -> Any:
    """The type `of` with a function that returns the problem of a value, or None."""

    def validate(value: Any) -> Any:
        if problem := check(value):
            raise ValueError(problem)
        return value

    return Annotated[of, pydantic.AfterValidator(validate)]


Int = checked(int, lambda value: None if abs(value) < 2**63 else "must be a 64-bit number")
Float = checked(
    Annotated[float, pydantic.Field(allow_inf_nan=False)],
    lambda value: None if abs(value) < _LARGEST or math.isinf(value) else f"must be below {_LARGEST:g}",
)
# A user's own function or class.
Place = checked(str, lambda value: None if ":" in value else "takes module:name")

_BOUNDS = {"ge": "{} or more", "gt": "above {}", "le": "at most {}", "lt": "below {}"}
_TYPES = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a mapping",
    types.NoneType: "null",
}
_PLURALS = {int: "integers", float: "numbers", str: "texts"}


class ConfigBlock(pydantic.BaseModel):
    """A block of keys: frozen, with no other keys and no conversion between types."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=False)


def key(default: Any, description: str = "", *, needs: str = "", excludes: str = "", **bounds: Any) -> Any:
    """A key of a block.

    Args:
        default: the default, or a function that makes it.
        needs: conditions of which one must hold if the key has another value than its default: `A or B`, each a key
            that must be set, or `key = value`.
        excludes: conditions of which none may hold then.
        bounds: pydantic's constraints, such as `ge` and `lt`.
    """
    default = {"default_factory": default} if callable(default) else {"default": default}
    rules = {"needs": needs, "excludes": excludes}
    return pydantic.Field(**default, description=description, json_schema_extra=rules, **bounds)


def default_of(field: FieldInfo) -> Any:
    """A field's default."""
    return field.default_factory() if field.default_factory else field.default


def check_rules(config: ConfigBlock, keys: Mapping[str, FieldInfo]) -> None:
    """Refuses keys that need another key which is not set, or exclude one that is set."""

    def value_of(name: str) -> Any:
        return functools.reduce(lambda block, part: getattr(block, part, None), name.split("."), config)

    def holds(condition: str) -> bool:
        name, _, value = condition.partition(" = ")
        return str(value_of(name)) == value if value else bool(value_of(name.removesuffix(" above 0")))

    for name, field in keys.items():
        needs, excludes = field.json_schema_extra.values()
        if not (needs or excludes):
            continue
        value = value_of(name)
        if value == default_of(field) or (value is None and value_of(name.rpartition(".")[0]) is None):
            continue
        value = value.model_dump() if isinstance(value, ConfigBlock) else value
        needed = [] if not needs else needs.split(" or ")
        it = "one of them" if len(needed) > 1 else "it"
        met = not needed or any(map(holds, needed))
        require(met, name, value, f"applies only with {needs}; set {it}, or remove this key")
        for condition in filter(None, excludes.split(" or ")):
            require(not holds(condition), name, value, f"does not work with {condition}; remove one of them")


def block_of(annotation: Any) -> type[ConfigBlock] | None:
    """The block in an annotation such as `Block` or `Block | None`; None for plain values."""
    parts = (annotation, *typing.get_args(annotation))
    return next((part for part in parts if isinstance(part, type) and issubclass(part, ConfigBlock)), None)


def choices_of(annotation: Any) -> tuple[str, ...]:
    """The values of a `Literal` or `list[Literal]`; none for another annotation."""
    if typing.get_origin(annotation) is typing.Literal:
        return typing.get_args(annotation)
    return tuple(choice for part in typing.get_args(annotation) for choice in choices_of(part))


def schema_keys(block: type[ConfigBlock], prefix: str = "") -> dict[str, FieldInfo]:
    """Every dotted key of a block and its field, a nested block's keys after its own."""
    keys = {}
    for name, field in block.model_fields.items():
        keys[prefix + name] = field
        if nested := block_of(field.annotation):
            keys |= schema_keys(nested, f"{prefix}{name}.")
    return keys


def takes(annotation: Any) -> str:
    """The values that an annotation accepts, in words: "an integer or null", or its choices."""
    is_list = typing.get_origin(annotation) is list
    if choices := choices_of(annotation):
        return ("a list of " if is_list else "") + ", ".join(choices)
    if len(parts := type_parts(annotation)) > 1:
        return " or ".join(map(takes, parts))
    if is_list:
        return f"a list of {_PLURALS[plain_type(typing.get_args(annotation)[0])]}"
    return _TYPES.get(plain_type(annotation), "a mapping")  # a block


def type_parts(annotation: Any) -> tuple:
    """The types of a union, or the one type."""
    is_union = typing.get_origin(annotation) in (types.UnionType, typing.Union)
    return typing.get_args(annotation) if is_union else (annotation,)


def plain_type(annotation: Any) -> Any:
    """The type behind `Annotated[type, …]`, or the origin of `dict[…]`, `list[…]` and `Literal[…]`."""
    annotation = typing.get_args(annotation)[0] if typing.get_origin(annotation) is Annotated else annotation
    return typing.get_origin(annotation) or annotation


def refusal(name: str, field: FieldInfo, value: Any, error: Mapping[str, Any], within: bool) -> str:
    """The message about a value that a key does not take: key, value, and the values that it takes.

    Args:
        error: one of pydantic's, of the key or of a part of its value.
        within: `value` is one of the values in the key's mapping.
    """
    annotation = typing.get_args(field.annotation)[-1] if within else field.annotation
    kind, choices = error["type"], choices_of(annotation)
    if kind == "value_error":
        problem = str(error["ctx"]["error"])
    elif kind.startswith(("greater_than", "less_than", "finite_number")):
        bounds = {bound: getattr(each, bound) for each in field.metadata for bound in _BOUNDS if hasattr(each, bound)}
        said = ", ".join(
            _BOUNDS[bound].format(f"{limit:g}" if isinstance(limit, float) else limit)
            for bound, limit in bounds.items()
        )
        finite = "finite" * (kind == "finite_number" or isinstance(value, float) and not math.isfinite(value))
        problem = f"must be {', '.join(filter(None, [finite, said]))}"
    elif choices:
        near = difflib.get_close_matches(str(value), choices, n=1)
        some = "some of " if typing.get_origin(annotation) is list else ""
        problem = f"takes {some}{', '.join(choices)}" + (f"; did you mean {near[0]!r}?" if near else "")
    else:
        quotes = "; put it in quotes, within another pair of quotes on a command line" * kind.startswith("string")
        digits = ", in decimal digits" * kind.startswith(("int", "float"))
        problem = f"takes {takes(annotation)}{digits}{quotes}"
    return f"{name} = {value!r:.300}: {problem}"


def without_password(text: str) -> str:
    """The text with *** in place of the passwords in its URLs.

    Examples:
        >>> without_password("x=postgresql://me:secret@host/name?password=secret")
        'x=postgresql://me:***@host/name?password=***'
    """
    return re.sub(r"(password=)[^&\s'\"]*", r"\1***", re.sub(r"(\w://[^\s/:@]*):\S*@", r"\1:***@", text))


def has_password(text: str) -> str | None:
    """The reason why the URL of a database cannot be used; None if it has no password, or is a file."""
    if without_password(text) == text:
        return None
    return (
        "a password in a config is written to files and logs; set the environment variable PGPASSWORD, or write the"
        " password to ~/.pgpass"
    )


def wrong_with_variables(values: Any) -> str | None:
    """The reason why a value cannot be the variables of a chat template; None if it can."""
    if not isinstance(values, Mapping) or not all(isinstance(name, str) and name.isidentifier() for name in values):
        return "takes variables of the chat template by name, such as {enable_thinking: false}"
    reserved = [name for name in values if name in _TEMPLATE_ARGUMENTS]
    if "tools" in reserved:
        return "tools are no variable of this kind; give them by themselves, as a column or field `tools`"
    return f"{reserved[0]} is set by recjax; remove it" if reserved else None


def require_one(name: str, values: Mapping[str, Any]) -> None:
    """Refuses a block unless exactly one of the values that exclude each other is given."""
    given = [choice for choice, value in values.items() if value is not None]
    if len(given) != 1:
        found = f"found {' and '.join(given)}" if given else "found none"
        raise ValueError(f"{name}: give exactly one of {', '.join(f'{name}.{choice}' for choice in values)}; {found}")
