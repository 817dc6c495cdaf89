"""From a YAML file and `key=value` overrides to one checked config; every error names the key, value and remedy."""

import contextlib
import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pydantic

from recjax.config.fields import block_of, problems, takes, without_password
from recjax.config.schema import KEYS, Config
from recjax.config.tasks import named_task
from recjax.config.yaml_values import read_override, read_yaml_file, write_yaml


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
    if not isinstance(values, dict):
        raise ValueError(f"{source}: the file must hold keys and values; got {values!r:.300}")
    merged, sources = {}, {}
    for name, layer in [(source, values), *((f"override {text!r}", _parse_override(text)) for text in overrides)]:
        _merge(merged, layer, name, sources)
    try:
        return Config.model_validate(merged)
    except pydantic.ValidationError as error:
        lines = problems(Config, error, merged, sources, f"{source}: ")
        raise ValueError(without_password("\n".join(lines))) from None


def _merge(into: dict, layer: dict, source: str, sources: dict[str, str], prefix: str = "") -> None:
    """Puts a layer's values over those of earlier layers, and notes the source of each.

    An empty mapping as the value of a key that holds one empties it; other mappings are merged key by key.

    Raises:
        ValueError: a text has `${…}`, which other tools replace and recjax does not.
    """

    def literal(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: literal(each) for key, each in value.items()}
        if isinstance(value, list):
            return [literal(each) for each in value]
        if isinstance(value, str) and re.search(r"(?<!\\)\$\{", value):
            remedy = "write the value itself, or \\${ where these characters are meant"
            raise ValueError(f"{source}: {name} = {value!r}: ${{…}} is not replaced; {remedy}")
        return value.replace("\\${", "${") if isinstance(value, str) else value

    for key, value in layer.items():
        sources[name := f"{prefix}{key}"] = source
        if name == "task" and isinstance(value, str):
            with contextlib.suppress(ValueError):  # the schema refuses it
                into[key], value = {}, named_task(value)
        if isinstance(value, dict) and (value or (name in KEYS and block_of(KEYS[name].annotation))):
            old = into.get(key)
            into[key] = old if isinstance(old, dict) else {}
            _merge(into[key], value, source, sources, f"{name}.")
        else:
            into[key] = literal(value)


def _parse_override(text: str) -> dict:
    key, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][\w.]*", key):
        raise ValueError(f"override {text!r} is not of the form key=value, such as optimizer.learning_rate=1e-6")
    accepted = takes(KEYS[key]) if key in KEYS else ""
    is_text, is_yaml = accepted.startswith("text"), accepted.startswith(("a list", "a mapping", "some of"))
    try:
        value.encode()  # an argument that is not UTF-8
        parsed = read_override(value, takes_text=is_text, takes_yaml=is_yaml)
    except ValueError as error:
        raise ValueError(f"override {text!r}: the value is not valid YAML ({error})") from error
    for part in reversed(key.split(".")):
        parsed = {part: parsed}
    return parsed


def unknown_keys(values: Any) -> list[str]:
    """Dotted keys of a file's content that the schema lacks."""
    try:
        Config.model_validate(values)
    except pydantic.ValidationError as error:
        return [".".join(map(str, each["loc"])) for each in error.errors() if each["type"] == "extra_forbidden"]
    return []


def to_yaml(config: Config) -> str:
    """The resolved config as YAML, the algorithm with every axis and option spelled out below it as a comment."""
    comment = "".join(f"#   {axis}: {options}\n" for axis, options in config.algorithm.resolved().items())
    return write_yaml(config.model_dump()) + "# algorithm, resolved:\n" + comment
