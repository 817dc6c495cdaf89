"""The base class of all config blocks, the types and rules of their keys, and the messages about refused values."""

import difflib
import functools
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import pydantic
from pydantic.fields import FieldInfo

from recjax.algorithms.options import did_you_mean
from recjax.config.yaml_values import read_decimal, read_yaml_file
from recjax.errors import UserError, shown

if TYPE_CHECKING:
    from recjax.config.schema import Config

# Outside this range, scores divided by the temperature are infinite, or all equal.
LOWEST_TEMPERATURE = 0.01
HIGHEST_TEMPERATURE = 100.0
_LARGEST = 1e20  # float32 overflows soon after


# Arguments of transformers' apply_chat_template that recjax sets itself.
_TEMPLATE_ARGUMENTS = frozenset(
    "conversation messages tools chat_template add_generation_prompt continue_final_message tokenize padding truncation"
    " max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs"
    " documents sanitize_control_tokens".split()
)


def checked(check: Callable[[Any], str | None]) -> pydantic.AfterValidator:
    """For `Annotated`: a function that returns the problem of a value, or None."""

    def validate(value: Any) -> Any:
        problem = check(value)
        if problem:
            raise UserError(problem=problem)
        return value

    return pydantic.AfterValidator(validate)


_SWITCHES = {"yes": True, "on": True, "no": False, "off": False}


def _read_switch(value: Any) -> Any:
    if isinstance(value, str):
        return _SWITCHES.get(value.lower(), value)
    return value


def _wrong_integer(value: int) -> str | None:
    if abs(value) >= 2**63:
        return "must be a 64-bit number"
    return None


def _wrong_number(value: float) -> str | None:
    if abs(value) >= _LARGEST and not math.isinf(value):
        return f"must be below {_LARGEST:g}"
    return None


# These types also read texts, because YAML keeps `010`, `1_000` and `yes` as texts.
Bool = Annotated[bool, pydantic.BeforeValidator(_read_switch)]
Int = Annotated[int, pydantic.BeforeValidator(read_decimal), checked(_wrong_integer)]
Number = Annotated[float, pydantic.BeforeValidator(read_decimal)]
Float = Annotated[Number, pydantic.Field(allow_inf_nan=False), checked(_wrong_number)]


def spelled(pattern: str, problem: str) -> pydantic.AfterValidator:
    """For `Annotated`: a text that a regular expression matches in full, and the problem of other texts."""

    def wrong_text(text: str) -> str | None:
        if re.fullmatch(pattern, text, re.DOTALL):
            return None
        return problem

    return checked(wrong_text)


Place = Annotated[str, spelled(".*:.*", "takes module:name")]  # a user's own function or class

_BOUNDS = {"ge": ", {} or more", "gt": ", above {}", "le": ", at most {}", "lt": ", below {}"}
_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "text", types.NoneType: "null"}


@functools.cache
def _names_elsewhere() -> dict[str, str]:
    """Our keys by other libraries' names for them; docs/coming_from.md says how they differ."""
    table = read_yaml_file(Path(__file__).with_name("elsewhere.yaml"))
    keys = {}
    for ours, names in table.items():
        keys |= dict.fromkeys(names.split(), ours)
    return keys


def _hint_from_elsewhere(name: str, value: Any, keys: Iterable[str]) -> str:
    """Our keys for another library's key and the keys in its value; empty if none is known."""
    if isinstance(value, Mapping):
        hints = [_hint_from_elsewhere(f"{name}.{inner}", inner_value, keys) for inner, inner_value in value.items()]
        return "; ".join(hint for hint in hints if hint)
    parts = name.split(".")
    # The most telling part first: the last two names, the last name, and then the names before it.
    for end in [".".join(parts[-2:]), *reversed(parts)]:
        ours = _names_elsewhere().get(end)
        if ours:
            return f"{name} is {ours} here"
    if len(parts) > 1 and parts[0] not in keys:
        for own_key in keys:
            if own_key.split(".")[-1] == parts[-1]:
                return f"{name} is {own_key} here"
    return ""


class ConfigBlock(pydantic.BaseModel):
    """A block of keys: frozen, with no other keys, with conversion only from texts to numbers and booleans."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)

    def __init__(self, /, **values: Any):
        """Checks the values.

        Raises:
            UserError: a line for each wrong value, with its key and a remedy.
        """
        try:
            super().__init__(**values)
        except pydantic.ValidationError as error:
            raise one_error(user_errors(type(self), error, values)) from None

    __init__.__pydantic_base_init__ = True  # type: ignore  # so that an outer block's errors name a key with all its blocks

    def __setattr__(self, name: str, value: Any) -> None:  # type: ignore  # pydantic calls it
        """Refuses the change.

        Raises:
            UserError: the message has the call that makes another config.
        """
        raise UserError(
            name,
            "a config never changes",
            "make another one, by short names or dotted keys:"
            " config.replace(steps=80) or config.replace(**{'training.steps': 80})",
            value=value,
        )

    def check(self, config: "Config") -> None:
        """Refuses contradictions within the block and with other blocks.

        Raises:
            UserError: a contradiction, with the key to change.
        """


def key(default: Any, description: str = "", note: str = "", may_change: bool = False, **constraints: Any) -> Any:
    """A key of a block.

    Args:
        default: the default, or a function that makes it.
        note: sentences about other keys, for readers of the documentation. The block's `check` has the rules.
        may_change: True if a run may resume with another value, because the key, or any key of its block, does not
            change a training step's numbers, except for the rounding of sums in another order.
        constraints: pydantic's constraints, such as `ge` and `lt`.
    """
    extra: dict[str, Any] = {"note": note, "may_change": may_change}
    if callable(default):
        return pydantic.Field(default_factory=default, description=description, json_schema_extra=extra, **constraints)
    return pydantic.Field(default=default, description=description, json_schema_extra=extra, **constraints)


def value_of(config: ConfigBlock, name: str) -> Any:
    """The value of a dotted key; None if a block around it is off."""
    value: Any = config
    for part in name.split("."):
        if isinstance(value, Mapping):
            value = value.get(part)
        else:
            value = getattr(value, part, None)
    return value


def extra_of(field: FieldInfo) -> dict[str, Any]:
    """The `note` and `may_change` that `key` gave a field."""
    return cast(dict, field.json_schema_extra)


def refuse_without(config: "Config", names: Iterable[str], *conditions: str) -> None:
    """Refuses each key that does not have its default, because none of the conditions that it needs holds.

    Args:
        names: dotted keys.
        conditions: conditions in words, such as "model.run"; the caller has found that none holds.
    Raises:
        UserError: a key with another value than its default.
    """
    which = "it"
    if len(conditions) > 1:
        which = "one of them"
    problem = f"applies only with {' or '.join(conditions)}"
    _expect_defaults(config, names, problem, f"set {which}, or remove this key")


def refuse_with(config: "Config", names: Iterable[str], condition: str) -> None:
    """Refuses each key that does not have its default, because a condition holds that it does not work with.

    Args:
        names: dotted keys.
        condition: the condition in words, such as "model.run"; the caller has found that it holds.
    Raises:
        UserError: a key with another value than its default.
    """
    _expect_defaults(config, names, f"does not work with {condition}", "remove one of them")


def _expect_defaults(config: "Config", names: Iterable[str], problem: str, remedy: str) -> None:
    for name in names:
        value = value_of(config, name)
        if value != schema_keys(type(config))[name].get_default(call_default_factory=True):
            if isinstance(value, ConfigBlock):
                value = value.model_dump()
            raise UserError(name, problem, remedy, value=value)


def block_of(annotation: Any) -> type[ConfigBlock] | None:
    """The block in an annotation such as `Block` or `Block | None`; None for plain values and for mappings."""
    for kind in [annotation, *typing.get_args(annotation)]:
        if isinstance(kind, type) and issubclass(kind, ConfigBlock):
            return kind
    return None


def choices_of(annotation: Any) -> tuple[str, ...]:
    """The values of a `Literal` or `list[Literal]`; none for another annotation."""
    if typing.get_origin(annotation) is typing.Literal:
        return typing.get_args(annotation)
    choices: tuple[str, ...] = ()
    for argument in typing.get_args(annotation):
        choices += choices_of(argument)
    return choices


@functools.cache
def schema_keys(block: type[ConfigBlock]) -> dict[str, FieldInfo]:
    """Every dotted key of a block and its field, a nested block's keys after its own."""
    keys = {}
    for name, field in block.model_fields.items():
        keys[name] = field
        nested = block_of(field.annotation)
        if nested is not None:
            keys |= {f"{name}.{inner}": inner_field for inner, inner_field in schema_keys(nested).items()}
    return keys


def takes(field: FieldInfo) -> str:
    """The values that a key accepts, in words: "an integer, 1 or more, or null", or its choices."""
    limits = ""
    for constraint in field.metadata:
        for bound, form in _BOUNDS.items():
            limit = getattr(constraint, bound, None)
            if limit is None or limit == math.inf:
                continue
            if isinstance(limit, float):
                limit = f"{limit:g}"
            limits += form.format(limit)
    return _takes(field.annotation, limits)


def _takes(annotation: Any, limits: str = "") -> str:
    kind = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if kind is Annotated:
        return _takes(arguments[0], limits)
    if kind in (types.UnionType, typing.Union):
        alternatives = [_takes(argument, limits) for argument in arguments]
        if limits:
            return ", or ".join(alternatives)
        return " or ".join(alternatives)
    if kind is list:
        inner = _takes(arguments[0])
        if choices_of(annotation):
            return f"some of {inner}"
        return f"a list of {inner.split()[-1]}s"
    if kind is typing.Literal:
        return ", ".join(arguments)
    if annotation in (int, float):
        return _WORDS[annotation] + limits
    return _WORDS.get(annotation, "a mapping")


def user_errors(
    block: type[ConfigBlock],
    error: pydantic.ValidationError,
    values: Mapping[str, Any],
    sources: Mapping[str, str] = types.MappingProxyType({}),
    file: str = "",
) -> Iterator[UserError]:
    """The user's mistakes, one for each wrong value, with the file or override that set it.

    Args:
        values: values of the block, by key.
        sources: file or override that set a key, by dotted key.
        file: source of keys that are missing.
    Raises:
        ValueError: an error in a check that is no UserError, and so is a fault of recjax.
    """
    keys = schema_keys(block)
    named = set()
    for detail in error.errors():
        path = [str(element) for element in detail["loc"]]
        kind = detail["type"]
        if kind in ("value_error", "assertion_error") and not isinstance(detail["ctx"]["error"], UserError):
            raise detail["ctx"]["error"]
        names = [".".join(path[:end]) for end in range(len(path), 0, -1)]
        source = next((sources[name] for name in names if name in sources), "")
        name = next((name for name in names if name in keys), "")
        if kind == "missing":
            yield UserError(file, f"{name} has no value", f"set it in the file or as {name}=…")
        elif kind == "extra_forbidden":
            around = block
            if name:
                around = block_of(keys[name].annotation) or block
            yield _in_source(source, _unknown_key(names[0], detail["input"], keys, around))
        elif not name:
            yield _with_sources(detail["ctx"]["error"], sources)
        elif name not in named:
            # Once for a list with several wrong values.
            named.add(name)
            yield _in_source(source, _wrong_value(name, names[0], values, keys[name], detail))


def one_error(errors: Iterable[UserError]) -> UserError:
    """One error with a line for each of the errors; a single error as it is."""
    listed = list(errors)
    if len(listed) == 1:
        return listed[0]
    return UserError(problem="\n".join(str(error) for error in listed))


def _in_source(source: str, error: UserError) -> UserError:
    if not source:
        return error
    return error.within(source)


def _unknown_key(name: str, value: Any, keys: Mapping[str, FieldInfo], around: type[ConfigBlock]) -> UserError:
    """The mistake of a key that the schema lacks, with our key for it or the most similar one.

    Args:
        keys: all keys of the schema.
        around: the block that contains the key.
    """
    parts = name.split(".")
    last = parts[-1]
    elsewhere = _hint_from_elsewhere(name, value, keys)
    is_known = last in _names_elsewhere() or ".".join(parts[-2:]) in _names_elsewhere()
    if not is_known and difflib.get_close_matches(name, keys, n=1, cutoff=0.8):
        elsewhere = ""  # The key is a misspelling of our own key.
    same_ending = [key_name for key_name in keys if key_name.split(".")[-1] == last]
    if same_ending:
        similar = difflib.get_close_matches(name, same_ending, n=1, cutoff=0)
    else:
        similar = difflib.get_close_matches(name, keys, n=1)
    if elsewhere:
        hint = f"{elsewhere} (docs/coming_from.md)"
    elif similar:
        hint = f"did you mean {similar[0]!r}?"
    else:
        hint = f"keys here: {', '.join(around.model_fields)}"
    return UserError("", f"unknown key {name!r} (value {shown(value)})", hint)


def _with_sources(error: UserError, sources: Mapping[str, str]) -> UserError:
    """A contradiction between keys; if different files and overrides set them, its remedy says which did."""
    message = str(error)
    mentioned = [key for key in sources if re.search(rf"(?<![\w.]){re.escape(key)}(?![\w.]\w)", message)]
    # A block counts where its own keys are not mentioned.
    mentioned = [key for key in mentioned if not any(other.startswith(f"{key}.") for other in mentioned)]
    if len({sources[key] for key in mentioned}) <= 1:
        return error
    places = ", ".join(f"{key} is from {sources[key]}" for key in mentioned)
    note = f" ({places}; a mapping adds to the keys before it, and null takes one back)"
    if error.remedy:
        return UserError(error.where, error.problem, error.remedy + note, error.value)
    return UserError(error.where, error.problem + note, value=error.value)


def _wrong_value(
    name: str, path: str, values: Mapping[str, Any], field: FieldInfo, error: Mapping[str, Any]
) -> UserError:
    """The mistake of a value that its key does not take.

    Args:
        name: the key.
        path: the key, or the place within the mapping or list that is its value.
        values: values of the block, by key.
        error: pydantic's.
    """
    kind = error["type"]
    value = values
    for element in name.split("."):
        if isinstance(value, Mapping):
            value = value[element]
        else:
            value = getattr(value, element)
    accepted = takes(field)
    choices = choices_of(field.annotation)
    if isinstance(value, Mapping) and path != name:
        # The wrong value is in the key's mapping, or it is a name in it.
        accepted = _takes(typing.get_args(field.annotation)[-1])
        if error["loc"][-1] == "[key]":
            accepted = "names that are texts"
        choices = ()
        name = path
        value = error["input"]
    if kind == "value_error":
        return UserError(name, str(error["ctx"]["error"]), value=value)
    problem = f"takes {accepted}"
    if isinstance(value, float) and not math.isfinite(value):
        problem += ", finite"
    if kind.startswith(("int", "float")):
        problem += ", in decimal digits"
    remedy = did_you_mean(value, choices).removeprefix("; ")
    if not isinstance(value, bool | int | float | str | list | Mapping | None):
        if name == "model.path":
            remedy = "give a folder or hub name, from which recjax loads the weights"
    elif kind.startswith("string"):
        remedy = "put it in quotes, within another pair of quotes on a command line"
    return UserError(name, problem, remedy, value=value)


def wrong_with_variables(values: Any) -> str | None:
    """The reason why a value cannot be the variables of a chat template; None if it can."""
    if not isinstance(values, Mapping) or not all(map(_is_variable, values)):
        return "takes variables of the chat template by name, such as {enable_thinking: false}"
    reserved = [name for name in values if name in _TEMPLATE_ARGUMENTS]
    if "tools" in reserved:
        return "tools are no variable of this kind; give them by themselves, as a column or field `tools`"
    if reserved:
        return f"{reserved[0]} is set by recjax; remove it"
    return None


def _is_variable(name: Any) -> bool:
    return isinstance(name, str) and name.isidentifier()
