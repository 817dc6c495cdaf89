"""From a YAML file and `key=value` overrides to one checked config; every error names the key, value and remedy."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pydantic

from recjax.config.fields import block_of, one_error, takes, user_errors
from recjax.config.schema import KEYS, SHORT_FORMS, Config, full_name
from recjax.config.tasks import PASSED, TASKS
from recjax.config.yaml_values import read_override, read_yaml_file, write_yaml
from recjax.errors import UserError, shown
from recjax.examples import config_file
from recjax.runtime.passwords import without_password


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a YAML config; see `make_config`.

    Args:
        path: a YAML file, or the name of an example such as "quickstart".
        overrides: see `make_config`.
    Raises:
        UserError: an unknown name, an unreadable file, or an error of `make_config`.
    """
    path = config_file(path)
    config = make_config(read_yaml_file(path), overrides, str(path))
    if config.task.file and config.task.file.train == PASSED:
        if "train" not in config.task.file.model_fields_set:
            raise UserError(str(path), "task.file.train has no value", "set it in the file or as task.file.train=…")
        choices = ", ".join(f"task.{name}" for name in TASKS)
        raise UserError(
            f"{path}: task", f"give exactly one of {choices}", "found none, and only recjax.run takes problems"
        )
    return config


def make_config(values: Any, overrides: Sequence[str] | Mapping[str, Any] = (), source: str = "config") -> Config:
    """Applies overrides to a file's content, and checks everything that can be checked before work starts.

    Args:
        values: content of a YAML file.
        overrides: `dotted.key=value` strings, applied in order; see `read_override`. The short form of a block, such as
            a text as `task`, replaces the whole block; a key of the block then changes only this key. Or values by
            dotted key or by a name in SHORT_NAMES.
        source: name of the file, for messages.
    Raises:
        UserError: an unknown key, a wrong type, a missing value, or a contradiction; the message names file or
            override, key, value and remedy.
    """
    if not isinstance(values, dict):
        raise UserError(source, f"the file must hold keys and values; got {shown(values)}")
    merged = {}
    sources = {}
    if isinstance(overrides, Mapping):
        layers = [(f"argument {name}", _in_blocks(full_name(name, value), value)) for name, value in overrides.items()]
    else:
        layers = [(f"override {text!r}", _parse_override(text)) for text in overrides]
    layers.insert(0, (source, values))
    last = {}  # for each block that a layer gives another name, the number of the last one
    for number, (_, layer) in enumerate(layers):
        last |= {block: number for block in SHORT_FORMS if _names(block, layer)}
    for number, (name, layer) in enumerate(layers):
        _merge(merged, layer, name, sources, renamed=[block for block in last if last[block] > number])
    try:
        return Config.model_validate(merged)
    except pydantic.ValidationError as error:
        mistake = one_error(user_errors(Config, error, merged, sources, source))
        where = without_password(mistake.where)
        value = mistake.value
        text = shown(value, longest=10**6)
        if without_password(text) != text:
            where = f"{where} = {without_password(text)[:300]}"
            value = ...
        problem = without_password(mistake.problem)
        raise UserError(where, problem, without_password(mistake.remedy), value) from None


def _names(block: str, layer: Any) -> bool:
    """True if a layer gives the block at a dotted key another name."""
    for key in block.split("."):
        layer = layer.get(key) if isinstance(layer, dict) else None
    return isinstance(layer, dict) and "name" in layer


def _merge(
    merged: dict,
    layer: dict,
    source: str,
    sources: dict[str, str],
    prefix: str = "",
    renamed: Sequence[str] = (),
) -> None:
    """Puts a layer's values over the values of earlier layers, and notes each value's source.

    An empty mapping as the value of a key that holds one empties it; other mappings are merged key by key.

    Args:
        renamed: blocks that a later layer gives another name, which replaces a short form.
    Raises:
        UserError: a text has `${…}`, which other tools replace and recjax does not.
    """

    def literal(text: str) -> str:
        if re.search(r"(?<!\\)\$\{", text):
            raise UserError(
                f"{source}: {name}",
                "${…} is not replaced",
                "write the value itself, or \\${ where these characters are meant",
                value=text,
            )
        return text.replace("\\${", "${")

    for key, value in layer.items():
        name = f"{prefix}{key}"
        earlier = sources.get(name)
        sources[name] = source
        if isinstance(value, dict) and (value or (name in KEYS and block_of(KEYS[name].annotation))):
            old = merged.get(key)
            # A mapping with a name, such as another schedule, replaces a short form.
            if old is not None and not isinstance(old, dict) and "name" not in value:
                if not isinstance(old, str) or name not in SHORT_FORMS:
                    raise UserError(f"{earlier}: {name}", "takes keys and values", value=old)
                if name not in renamed:
                    try:
                        old = SHORT_FORMS[name](old)
                    except UserError as error:
                        raise UserError(f"{earlier}: {name}", str(error), value=old) from error
                    sources |= {f"{name}.{inner}": str(earlier) for inner in old}
            merged[key] = old if isinstance(old, dict) else {}
            _merge(merged[key], value, source, sources, f"{name}.", renamed)
        else:
            merged[key] = _with_texts(value, literal)


def _with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of a value with every text in it changed; names stay."""
    if isinstance(value, dict):
        return {key: _with_texts(element, change) for key, element in value.items()}
    if isinstance(value, list):
        return [_with_texts(element, change) for element in value]
    if isinstance(value, str):
        return change(value)
    return value


def _parse_override(text: str) -> dict:
    key, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][\w.]*", key):
        form = "key=value, such as optimizer.learning_rate=1e-6"
        raise UserError("", f"override {text!r} is not of the form {form}")
    accepted = ""
    if key in KEYS:
        accepted = takes(KEYS[key])
    is_text = accepted.startswith("text")
    is_yaml = accepted.startswith(("a list", "a mapping", "some of"))
    try:
        value.encode()  # This fails for an argument that is not UTF-8.
        parsed = read_override(value, takes_text=is_text, takes_yaml=is_yaml)
    except (UnicodeEncodeError, UserError) as error:
        raise UserError(f"override {text!r}", f"the value is not valid YAML ({error})") from error
    return _in_blocks(key, parsed)


def _in_blocks(key: str, value: Any) -> dict:
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def unknown_keys(values: Any) -> list[tuple[str, ...]]:
    """Paths of the keys in a file's content that the schema lacks; a key in a file may contain dots."""
    try:
        Config.model_validate(values)
    except pydantic.ValidationError as error:
        return [cast(tuple[str, ...], each["loc"]) for each in error.errors() if each["type"] == "extra_forbidden"]
    return []


def stored_values(path: str | Path) -> Any:
    """The values in a file that `to_yaml` wrote.

    Raises:
        UserError: the file cannot be read.
    """
    return _with_texts(read_yaml_file(path), lambda text: text.replace("\\${", "${"))


def to_yaml(config: Config) -> str:
    """The config as YAML for `load_config`; a comment below it spells out every axis and option of the algorithm."""
    comment = "".join(f"#   {axis}: {options}\n" for axis, options in config.algorithm.resolved().items())
    values = _with_texts(config.model_dump(), lambda text: text.replace("${", "\\${"))
    return write_yaml(values) + "# algorithm, resolved:\n" + comment
