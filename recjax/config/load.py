"""From a YAML file and `key=value` overrides to one checked config; every error names the key, value and remedy."""

import difflib
import functools
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic

from recjax.config.fields import ConfigBlock, block_of, plain_type, refusal, type_parts, without_password
from recjax.config.schema import KEYS, Config
from recjax.config.tasks import named_task
from recjax.config.yaml_values import is_decimal, read_override, read_yaml_file, write_yaml


def load_config(path: str | Path, overrides: Sequence[str] = (), without: Sequence[str] = ()) -> Config:
    """Reads a YAML config; see `make_config`.

    Args:
        path: YAML file.
        overrides: `dotted.key=value` strings, applied in order.
        without: dotted keys of the file that are not read.
    Raises:
        ValueError: an unreadable file, or an error of `make_config`.
    """
    values = read_yaml_file(path)
    for key in without:
        block, _, name = key.rpartition(".")
        functools.reduce(dict.__getitem__, filter(None, block.split(".")), values).pop(name)
    return make_config(values, overrides, str(path))


def make_config(values: Any, overrides: Sequence[str] = (), source: str = "config") -> Config:
    """Applies overrides to a file's content, and checks everything that can be checked before work starts.

    Args:
        values: content of a YAML file.
        overrides: `dotted.key=value` strings, applied in order; see `read_override`. A text as `task`, here or in the
            file, replaces the whole block by the task that it names.
        source: name of the file, for messages.
    Raises:
        ValueError: an unknown key, a wrong type, a missing value, or a contradiction; the message names file or
            override, key, value and remedy.
    """
    merged, sources = {}, {}
    for layer_source, layer in [
        (source, values),
        *((f"override {text!r}", _parse_override(text)) for text in overrides),
    ]:
        _merge(merged, layer, Config, "", layer_source, sources)
    try:
        return Config.model_validate(merged)
    except pydantic.ValidationError as error:
        raise ValueError("\n".join(_messages(error, merged, sources, source))) from None


def _merge(into: dict, layer: Any, block: type[ConfigBlock], prefix: str, source: str, sources: dict[str, str]) -> None:
    """Puts a layer's values over those of earlier layers, and notes the source of each.

    An empty mapping as the value of a key that holds one empties it; other mappings are merged key by key.

    Raises:
        ValueError: a key that the schema lacks, a value in place of a block, or `${…}`.
    """
    if not isinstance(layer, dict):
        raise ValueError(f"{source}: {prefix.rstrip('.') or 'the file'} must hold keys and values; got {layer!r:.300}")
    for key, value in layer.items():
        name = f"{prefix}{key}"
        if key not in block.model_fields:
            near = difflib.get_close_matches(name, KEYS, n=1, cutoff=0.5)
            near = near or [known for known in KEYS if known.split(".")[-1] == key][:1]
            hint = f"did you mean {near[0]!r}?" if near else f"keys here: {', '.join(block.model_fields)}"
            raise ValueError(f"{source}: unknown key {name!r} (value {value!r:.300}); {hint}")
        sources[name] = source
        annotation = block.model_fields[key].annotation
        nested = block_of(annotation)
        if name == "task" and isinstance(value, str):
            try:
                into[key] = named_task(value)
            except ValueError as error:
                raise ValueError(f"{source}: {error}") from None
        elif nested and value is not None:
            into[key] = into[key] if isinstance(into.get(key), dict) else {}
            _merge(into[key], value, nested, f"{name}.", source, sources)
        elif isinstance(value, dict) and value and isinstance(into.get(key), dict):
            into[key] = _merged(into[key], _literal(value, annotation, f"{source}: {name}"))
        else:
            into[key] = _literal(value, annotation, f"{source}: {name}")


def _merged(old: Mapping, new: Mapping) -> dict:
    """A mapping over another one, the mappings in them likewise."""
    both = {
        key: _merged(old[key], new[key]) for key in new if isinstance(new[key], dict) and isinstance(old.get(key), dict)
    }
    return {**old, **new, **both}


def _literal(value: Any, annotation: Any, place: str) -> Any:
    """The value with \\${ as ${ in texts; as a number or a boolean if the key takes one and the text is one.

    Raises:
        ValueError: a text holds ${…}, which other tools replace and recjax does not.
    """
    parts = type_parts(annotation)
    if isinstance(value, dict | list):
        kind = type(value)
        of = next((typing.get_args(part)[-1] for part in parts if typing.get_origin(part) is kind), None)
        if isinstance(value, list):
            return [_literal(each, of, place) for each in value]
        return {_literal(name, str, place): _literal(each, of, f"{place}.{name}") for name, each in value.items()}
    if not isinstance(value, str):
        return value
    kinds = {plain_type(part) for part in parts} if annotation is not None else {str}
    if str not in kinds and kinds & {int, float} and is_decimal(value):
        # An integer's key refuses a float later, and names itself.
        return int(value) if re.fullmatch(r"[-+]?[0-9_]+", value) else float(value)
    if bool in kinds and value.lower() in ("yes", "on", "no", "off"):
        return value.lower() in ("yes", "on")
    if re.search(r"(?<!\\)\$\{", value):
        remedy = "write the value itself, or \\${ where these characters are meant"
        raise ValueError(f"{place} = {value!r}: ${{…}} is not replaced; {remedy}")
    return value.replace("\\${", "${")


def _messages(error: pydantic.ValidationError, merged: dict, sources: Mapping[str, str], path: str) -> Iterator[str]:
    """One line for each thing that is wrong, with the file or override that set the key."""
    named = set()
    for each in error.errors():
        parts = [str(part) for part in each["loc"]]
        name = next((name for end in range(len(parts), 0, -1) if (name := ".".join(parts[:end])) in KEYS), None)
        if name is None:  # a contradiction between keys, which its message names
            yield str(each["ctx"]["error"])
        elif each["type"] == "missing":
            yield f"{path}: {name} has no value; set it in the file or as {name}=…"
        elif name not in named:  # once for a list with several wrong values
            named.add(name)
            value = functools.reduce(lambda block, part: block[part], name.split("."), merged)
            inner = parts[len(name.split(".")) :] if isinstance(value, dict) else []
            value = functools.reduce(dict.__getitem__, inner, value)
            message = refusal(".".join([name, *inner]), KEYS[name], value, each, bool(inner))
            yield without_password(f"{sources[name]}: {message}")


def _parse_override(text: str) -> dict:
    key, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][\w.]*", key):
        raise ValueError(f"override {text!r} is not of the form key=value, such as optimizer.learning_rate=1e-6")
    parts = type_parts(KEYS[key].annotation) if key in KEYS else ()
    takes_yaml = any(block_of(part) or typing.get_origin(part) in (list, dict) for part in parts)
    try:
        value.encode()  # an argument that is not UTF-8
        parsed = read_override(value, takes_text=str in map(plain_type, parts), takes_yaml=takes_yaml)
    except ValueError as error:
        raise ValueError(f"override {text!r}: the value is not valid YAML ({error})") from error
    for part in reversed(key.split(".")):
        parsed = {part: parsed}
    return parsed


def unknown_keys(values: Any) -> list[str]:
    """Dotted keys of a file's content that the schema lacks."""

    def unknown(values: Any, block: type[ConfigBlock], prefix: str) -> Iterator[str]:
        for key, value in values.items() if isinstance(values, dict) else ():
            if key not in block.model_fields:
                yield f"{prefix}{key}"
            elif nested := block_of(block.model_fields[key].annotation):
                yield from unknown(value, nested, f"{prefix}{key}.")

    return list(unknown(values, Config, ""))


def to_yaml(config: Config) -> str:
    """The resolved config as YAML, the algorithm with every axis and option spelled out below it as a comment."""
    comment = "".join(f"#   {axis}: {options}\n" for axis, options in config.algorithm.resolved().items())
    return write_yaml(config.model_dump()) + "# algorithm, resolved:\n" + comment
