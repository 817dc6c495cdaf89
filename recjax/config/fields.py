"""The base class of all config blocks, the types and rules of their keys, and the messages about refused values."""

import difflib
import functools
import math
import operator
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

if TYPE_CHECKING:
    import recjax.config

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
        if problem := check(value):
            raise ValueError(problem)
        return value

    return pydantic.AfterValidator(validate)


# Bool, Int, Number and Float also read texts, because YAML keeps `010`, `1_000` and `yes` as texts.
_SWITCHES = {"yes": True, "on": True, "no": False, "off": False}
Bool = Annotated[
    bool,
    pydantic.BeforeValidator(lambda value: _SWITCHES.get(value.lower(), value) if isinstance(value, str) else value),
]
Int = Annotated[
    int,
    pydantic.BeforeValidator(read_decimal),
    checked(lambda value: None if abs(value) < 2**63 else "must be a 64-bit number"),
]
Number = Annotated[float, pydantic.BeforeValidator(read_decimal)]
Float = Annotated[
    Number,
    pydantic.Field(allow_inf_nan=False),
    checked(lambda value: None if abs(value) < _LARGEST or math.isinf(value) else f"must be below {_LARGEST:g}"),
]


def spelled(pattern: str, problem: str) -> pydantic.AfterValidator:
    """For `Annotated`: a text that a regular expression matches in full, and the problem of other texts."""
    return checked(lambda text: None if re.fullmatch(pattern, text, re.DOTALL) else problem)


Place = Annotated[str, spelled(".*:.*", "takes module:name")]  # a user's own function or class

_BOUNDS = {"ge": ", {} or more", "gt": ", above {}", "le": ", at most {}", "lt": ", below {}"}
_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "text", types.NoneType: "null"}
_RELATIONS = {
    "be below": operator.lt,
    "be above": operator.gt,
    "be at least": operator.ge,
    "be at most": operator.le,
    "divide": lambda value, other: other % value == 0,
    "be an even multiple of": lambda value, other: value % (2 * other) == 0,
}


@functools.cache
def _names_elsewhere() -> dict[str, str]:
    """Our keys by the names of TRL, verl, OpenRLHF and Tunix; docs/coming_from.md says how they differ."""
    table = read_yaml_file(Path(__file__).with_name("elsewhere.yaml"))
    return {name: ours for ours, names in table.items() for name in names.split()}


def _hint_from_elsewhere(name: str, value: Any, keys: Iterable[str]) -> str:
    """Our keys for another library's key and the keys in its value; empty if none is known."""
    if isinstance(value, Mapping):
        hints = (_hint_from_elsewhere(f"{name}.{inner}", each, keys) for inner, each in value.items())
        return "; ".join(filter(None, hints))
    parts = name.split(".")
    ours = [ours for end in (".".join(parts[-2:]), *reversed(parts)) if (ours := _names_elsewhere().get(end))]
    if len(parts) > 1 and parts[0] not in keys:
        ours += [key for key in keys if key.split(".")[-1] == parts[-1]]
    return f"{name} is {ours[0]} here" if ours else ""


# A flag that is true for a contradiction, the key to name with its value, and the problem with its remedy.
Refusal = tuple[Any, str, str]


class ConfigBlock(pydantic.BaseModel):
    """A block of keys: frozen, with no other keys, with conversion only from texts to numbers and booleans."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)

    def __init__(self, /, **values: Any):
        """Checks the values.

        Raises:
            ValueError: a line for each wrong value, with its key and a remedy.
        """
        try:
            super().__init__(**values)
        except pydantic.ValidationError as error:
            raise ValueError("\n".join(error_lines(type(self), error, values))) from None

    __init__.__pydantic_base_init__ = True  # type: ignore  # so that an outer block's errors name a key with all its blocks

    def __setattr__(self, name: str, value: Any) -> None:  # type: ignore  # pydantic calls it
        """Refuses the change.

        Raises:
            ValueError: the message has the call that makes another config.
        """
        raise ValueError(
            f"{name} = {value!r:.80}: a config never changes; make another one, by short names or dotted keys:"
            " config.replace(steps=80) or config.replace(**{'training.steps': 80})"
        )

    def refusals(self, config: "recjax.config.Config") -> Iterable[Refusal]:
        """Contradictions within the block and with other blocks, beyond the rules of `key`."""
        return ()


RULES = ("needs", "excludes", "required", "must")  # relations of a key to other keys


def key(default: Any, description: str = "", **rules: Any) -> Any:
    """A key of a block.

    Args:
        default: the default, or a function that makes it.
        rules: pydantic's constraints, such as `ge` and `lt`, and relations to other keys. A condition is a key that is
            set, or `key = value`; `A or B` are two conditions.
            needs: conditions; one must hold if the key has another value than its default.
            excludes: conditions; none may hold then.
            required: conditions with which the key must be set.
            must: relation to another key's value, if both are set, such as `be at most KEY`; see `_RELATIONS`.
            may_change: True if a run may resume with another value, because the key, or any key of its block, does not
                change a training step's numbers, except for the rounding of sums in another order.
    """
    given: dict[str, Any] = {"default_factory": default} if callable(default) else {"default": default}
    extra = {name: rules.pop(name, "") for name in RULES}
    extra["may_change"] = rules.pop("may_change", False)
    return pydantic.Field(**given, description=description, json_schema_extra=extra, **rules)


def value_of(config: ConfigBlock, name: str) -> Any:
    """The value of a dotted key; None if a block around it is off."""

    def inner(block: Any, attribute: str) -> Any:
        return block.get(attribute) if isinstance(block, Mapping) else getattr(block, attribute, None)

    return functools.reduce(inner, name.split("."), config)


def rules_of(field: FieldInfo) -> dict[str, Any]:
    """The rules that `key` gave a field."""
    return cast(dict, field.json_schema_extra)


def broken_rules(config: ConfigBlock) -> Iterator[Refusal]:
    """Contradictions between keys by the rules of `key`."""

    def holds(condition: str) -> bool:
        name, _, value = condition.partition(" = ")
        actual = value_of(config, name.removesuffix(" above 0"))
        return str(actual) == value if value else bool(actual)

    def held(conditions: str) -> list[str]:
        return [condition for condition in filter(None, conditions.split(" or ")) if holds(condition)]

    for name, field in schema_keys(type(config)).items():
        block, _, _ = name.rpartition(".")
        if block and value_of(config, block) is None:
            continue
        needs, excludes, required, must = (rules_of(field)[rule] for rule in RULES)
        value = value_of(config, name)
        for condition in held(required):
            yield value in (None, []), name, f"is required with {condition}; set it: {field.description}"
        if must and value:  # 0 turns a key off
            relation, _, limit_key = must.rpartition(" ")
            limit = value_of(config, limit_key)
            yield limit is not None and not _RELATIONS[relation](value, limit), name, f"must {must} = {limit}"
        if value != field.get_default(call_default_factory=True):
            which = "one of them" if " or " in needs else "it"
            is_met = not needs or held(needs)
            yield not is_met, name, f"applies only with {needs}; set {which}, or remove this key"
            for condition in held(excludes):
                yield True, name, f"does not work with {condition}; remove one of them"


def block_of(annotation: Any) -> type[ConfigBlock] | None:
    """The block in an annotation such as `Block` or `Block | None`; None for plain values and for mappings."""
    kinds = (annotation, *typing.get_args(annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, ConfigBlock)), None)


def choices_of(annotation: Any) -> tuple[str, ...]:
    """The values of a `Literal` or `list[Literal]`; none for another annotation."""
    if typing.get_origin(annotation) is typing.Literal:
        return typing.get_args(annotation)
    return tuple(choice for argument in typing.get_args(annotation) for choice in choices_of(argument))


@functools.cache
def schema_keys(block: type[ConfigBlock]) -> dict[str, FieldInfo]:
    """Every dotted key of a block and its field, a nested block's keys after its own."""
    keys = {}
    for name, field in block.model_fields.items():
        keys[name] = field
        if nested := block_of(field.annotation):
            keys |= {f"{name}.{inner}": inner_field for inner, inner_field in schema_keys(nested).items()}
    return keys


def takes(field: FieldInfo) -> str:
    """The values that a key accepts, in words: "an integer, 1 or more, or null", or its choices."""
    limits = [
        form.format(f"{limit:g}" if isinstance(limit, float) else limit)
        for each in field.metadata
        for bound, form in _BOUNDS.items()
        if (limit := getattr(each, bound, None)) not in (None, math.inf)
    ]
    return _takes(field.annotation, "".join(limits))


def _takes(annotation: Any, limits: str = "") -> str:
    kind = typing.get_origin(annotation) or annotation
    arguments = typing.get_args(annotation)
    if kind is Annotated:
        return _takes(arguments[0], limits)
    if kind in (types.UnionType, typing.Union):
        return (", or " if limits else " or ").join(_takes(argument, limits) for argument in arguments)
    if kind is list:
        inner = _takes(arguments[0])
        return f"some of {inner}" if choices_of(annotation) else f"a list of {inner.split()[-1]}s"
    if kind is typing.Literal:
        return ", ".join(arguments)
    return _WORDS.get(kind, "a mapping") + (limits if kind in (int, float) else "")


def error_lines(
    block: type[ConfigBlock],
    error: pydantic.ValidationError,
    values: Mapping[str, Any],
    sources: Mapping[str, str] = types.MappingProxyType({}),
    file: str = "",
) -> Iterator[str]:
    """One line for each wrong value: its source, the key, the value, the problem and the remedy.

    Args:
        values: values of the block, by key.
        sources: file or override that set a key, by dotted key.
        file: source of keys that are missing.
    """
    keys = schema_keys(block)
    named = set()
    for each in error.errors():
        path = [str(element) for element in each["loc"]]
        kind = each["type"]
        names = [".".join(path[:end]) for end in range(len(path), 0, -1)]
        source = next((f"{sources[name]}: " for name in names if name in sources), "")
        name = next((name for name in names if name in keys), "")
        if kind == "extra_forbidden":
            elsewhere = _hint_from_elsewhere(names[0], each["input"], keys)
            is_known = path[-1] in _names_elsewhere() or ".".join(path[-2:]) in _names_elsewhere()
            if not is_known and difflib.get_close_matches(names[0], keys, n=1, cutoff=0.8):
                elsewhere = ""  # a misspelling of our own key
            same_ending = [key_name for key_name in keys if key_name.split(".")[-1] == path[-1]]
            similar = difflib.get_close_matches(names[0], same_ending or keys, n=1, cutoff=0 if same_ending else 0.6)
            parent = (block_of(keys[name].annotation) if name else None) or block
            hint = f"did you mean {similar[0]!r}?" if similar else f"keys here: {', '.join(parent.model_fields)}"
            hint = f"{elsewhere} (docs/coming_from.md)" if elsewhere else hint
            yield f"{source}unknown key {names[0]!r} (value {each['input']!r:.300}); {hint}"
        elif kind == "missing":
            yield f"{file}{name} has no value; set it in the file or as {name}=…"
        elif not name:  # a contradiction between keys, which its message names
            message = str(each["ctx"]["error"])
            mentioned = [key for key in sources if re.search(rf"(?<![\w.]){re.escape(key)}(?![\w.]\w)", message)]
            # A block counts where its own keys are not mentioned.
            mentioned = [key for key in mentioned if not any(other.startswith(f"{key}.") for other in mentioned)]
            if len({sources[key] for key in mentioned}) > 1:
                places = ", ".join(f"{key} is from {sources[key]}" for key in mentioned)
                message += f" ({places}; a mapping adds to the keys before it, and null takes one back)"
            yield message
        elif name not in named:  # once for a list with several wrong values
            named.add(name)
            value = values
            for element in name.split("."):
                value = value[element] if isinstance(value, Mapping) else getattr(value, element)
            is_inner = isinstance(value, Mapping) and names[0] != name
            accepted = takes(keys[name])
            if is_inner:  # a value in a key's mapping, or a name in it
                inner = typing.get_args(keys[name].annotation)[-1]
                name = names[0]
                value = each["input"]
                accepted = "names that are texts" if path[-1] == "[key]" else _takes(inner)
            finite = ", finite" * (isinstance(value, float) and not math.isfinite(value))
            digits = ", in decimal digits" * kind.startswith(("int", "float"))
            quotes = "; put it in quotes, within another pair of quotes on a command line" * kind.startswith("string")
            if not isinstance(value, bool | int | float | str | list | Mapping | None):
                quotes = "; give a folder or hub name, from which recjax loads the weights" * (name == "model.path")
            choices = choices_of(keys[name].annotation) if name in keys else ()
            problem = f"takes {accepted}{finite}{digits}{quotes}{did_you_mean(value, choices)}"
            yield f"{source}{name} = {value!r:.300}: {each['ctx']['error'] if kind == 'value_error' else problem}"


def wrong_with_variables(values: Any) -> str | None:
    """The reason why a value cannot be the variables of a chat template; None if it can."""
    if not isinstance(values, Mapping) or not all(isinstance(name, str) and name.isidentifier() for name in values):
        return "takes variables of the chat template by name, such as {enable_thinking: false}"
    reserved = [name for name in values if name in _TEMPLATE_ARGUMENTS]
    if "tools" in reserved:
        return "tools are no variable of this kind; give them by themselves, as a column or field `tools`"
    return f"{reserved[0]} is set by recjax; remove it" if reserved else None
