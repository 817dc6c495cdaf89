"""Every key of a config with the values it takes, its default and its meaning: for readers, and for editors."""

import difflib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from recjax.algorithms.catalog import FIELD, PAPER
from recjax.algorithms.options import readable_options
from recjax.config.fields import ConfigBlock, block_of, choices_of, extra_of, takes
from recjax.config.model import PEFT_NAMES
from recjax.config.parts import PLAYED
from recjax.config.schema import Config
from recjax.config.tasks import TASKS, TASKS_WITH_NAME
from recjax.config.yaml_values import DECIMAL, write_yaml


class Key(NamedTuple):
    """A key that holds a value; `default` is YAML, or a dash for no default; `takes` is a type or the choices."""

    name: str
    default: str
    takes: str
    meaning: str


def sections(block: type[ConfigBlock] = Config, name: str = "", note: str = "") -> Iterator[tuple[str, str, list[Key]]]:
    """Name ("" for the whole run), meaning and keys of a block, then of the blocks inside it, in the schema's order.

    Args:
        note: sentences about other keys, which follow the block's meaning.
    """
    keys = []
    nested = []
    for key, field in block.model_fields.items():
        inner_note = extra_of(field)["note"]
        if inner := block_of(field.annotation):
            nested.append((inner, f"{name}{key}.", inner_note))
        else:
            default = "–"
            if not field.is_required():
                default = write_yaml(field.get_default(call_default_factory=True), flow=True)
            meaning = f"{str(field.description).rstrip('.')}. {inner_note}".rstrip()
            keys.append(Key(f"{name}{key}", default, takes(field), meaning))
    if keys:
        meaning = str(inspect.getdoc(block)).split("\n\n")[0].replace("\n", " ")
        yield name.rstrip("."), f"{meaning} {note}".rstrip(), keys
    for inner in nested:
        yield from sections(*inner)


def help_text(names: Sequence[str]) -> str:
    """Keys for a terminal, below the meaning of their blocks.

    Args:
        names: keys, blocks, or parts of keys' names; "keys" is every key.
    Raises:
        SystemExit: a name is none of these; the message has the nearest keys.
    """
    known = {key.name for _, _, keys in sections() for key in keys}
    chosen = set()
    for name in names:
        found = {key for key in known if name == "keys" or key == name or key.startswith(f"{name}.")}
        found = found or {key for key in known if name in key}
        if not found:
            parts = difflib.get_close_matches(name.rpartition(".")[2], {key.rpartition(".")[2] for key in known})
            near = sorted(key for key in known if key.rpartition(".")[2] in parts[:1])
            advice = f"did you mean {' or '.join(near)}?" if near else "--help keys shows all"
            sys.exit(f"error: {name!r} is no key of a config; {advice}")
        chosen |= found
    lines = []
    for name, meaning, keys in sections():
        shown = [key for key in keys if key.name in chosen]
        if shown:
            lines += ["", f"{name}: {meaning}" if name else meaning]
        for key in shown:
            indent = {"initial_indent": "      ", "subsequent_indent": "      "}
            lines += [f"  {key.name} = {key.default}  ({key.takes})", *textwrap.wrap(key.meaning, 110, **indent)]
    return "\n".join(lines).lstrip() + "\n"


# Texts that the scalars of a config may be, because YAML keeps `1_000` and `yes` as texts; see `fields`.
_TEXTS = {
    "integer": "^[-+]?([0-9]+|[0-9]{1,3}(_[0-9]{3})+)$",
    "number": f"^({DECIMAL.pattern.replace('e[', '[eE][')})$",
    "boolean": "^([Yy][Ee][Ss]|[Oo][Nn]|[Nn][Oo]|[Oo][Ff][Ff])$",
}
# pydantic's names for bounds of values that may be null.
_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
_USERS = {"type": "string", "pattern": ":"}  # a user's own module:function


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a run's YAML file, by which editors complete, explain and check keys.

    It accepts every value that a key takes, short forms included. Contradictions between keys are for `load_config`.
    """
    from recjax.algorithms.axes import ADDED_TERMS, AXES  # imported here, because only this schema needs JAX

    whole = Config.model_json_schema()
    meanings = {name: part["description"].partition("\n\n")[0] for name, part in whole["$defs"].items()}
    schema: dict[str, Any] = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    schema |= _for_yaml(whole, meanings)
    blocks = schema["$defs"]
    # Short forms.
    named = {"type": "string", "pattern": f"^({'|'.join(TASKS_WITH_NAME)}):."}
    _also(schema["properties"]["task"], {"enum": [name for name in TASKS if name not in TASKS_WITH_NAME]}, named)
    for block in blocks.values():
        for name in PLAYED:
            if name in block.get("properties", ()):
                _also(block["properties"][name], {"type": "string"})
    _also(blocks["RolloutConfig"]["properties"]["engine"], {"type": "string"})
    blocks["LoraConfig"]["properties"]["targets"]["items"]["enum"] += PEFT_NAMES
    # Names and options of functions.
    algorithm = blocks["AlgorithmConfig"]["properties"]
    presets = {**PAPER, **FIELD}
    algorithm["preset"] |= {
        "enum": [*presets],
        "enumDescriptions": [f"{preset.title}: {preset.coefficient}" for preset in presets.values()],
    }
    for axis, functions in AXES.items():
        first_lines = [str(inspect.getdoc(function) or "").partition("\n")[0] for function in functions.values()]
        names = {"enum": [*functions], "enumDescriptions": first_lines}
        block = {"type": "object", "properties": {"name": {"anyOf": [names, _USERS]}} | _options(functions)}
        algorithm[axis] = {"description": algorithm[axis]["description"], "anyOf": [names, _USERS, block]}
    for term, function in ADDED_TERMS.items():
        algorithm[term] |= {"properties": _options({term: function}), "additionalProperties": False}
    return schema


def _for_yaml(part: Any, meanings: Mapping[str, str]) -> Any:
    """A part of pydantic's schema, for the values that YAML has, with descriptions as in the documentation.

    Args:
        meanings: meaning of each block, by its name.
    """
    if isinstance(part, list):
        return [_for_yaml(element, meanings) for element in part]
    if not isinstance(part, dict):
        return part
    written = {}
    for name, value in part.items():
        if name not in ("title", "note", "may_change"):
            written[_BOUNDS.get(name, name)] = _for_yaml(value, meanings)
    if part.get("type") in _TEXTS:
        written |= {"type": [part["type"], "string"], "pattern": _TEXTS[part["type"]]}
        written["patternErrorMessage"] = f"is no {part['type']}"
    if "note" in part:
        meaning = part["description"]
        if not meaning:
            references = [part, *part.get("anyOf", [])]
            (block,) = [reference["$ref"].rpartition("/")[2] for reference in references if "$ref" in reference]
            meaning = meanings[block]
        written["description"] = f"{meaning.rstrip('.')}. {part['note']}".replace("\n", " ").rstrip()
    return written


def _also(part: dict[str, Any], *short_forms: dict[str, Any]) -> None:
    """Lets a key that takes a block take its short forms, too."""
    blocks = part.pop("anyOf", None)
    if blocks is None:
        blocks = [{"$ref": part.pop("$ref")}]
    part["anyOf"] = [*blocks, *short_forms]


def _options(functions: Mapping[str, Callable | None]) -> dict[str, Any]:
    """The options of an axis' functions, with default and choices; options of a user's own may have other values."""
    options: dict[str, Any] = {}
    for name, function in functions.items():
        for option, parameter in readable_options(function).items():
            default = "none"
            if parameter.default is not parameter.empty:
                default = parameter.default
            described = options.setdefault(option, {"description": "Default:", "examples": []})
            described["description"] += f" {default} ({name});"
            described["examples"] += choices_of(parameter.annotation)
    return options
