"""From a YAML file and `key=value` overrides to one checked config; every error names the key, value and remedy."""

import difflib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic
import yaml

from recjax.config.fields import Block, block_of, refusal
from recjax.config.schema import KEYS, Config
from recjax.config.tasks import TASKS


class _Loader(yaml.SafeLoader):
    """YAML whose numbers are those of YAML 1.2: 1e-6 is a float."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:float"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"),
    list("-+0123456789."),
)


def parse_yaml(text: str) -> Any:
    """The value of a YAML text."""
    return yaml.load(text, _Loader)


def load_config(path: str | Path, overrides: Sequence[str] = (), without: Sequence[str] = ()) -> Config:
    """Reads a YAML config, applies overrides in order, checks everything that can be checked before work starts.

    Args:
        path: YAML file.
        overrides: `dotted.key=value` strings; values are YAML, so 1e-6 is a float and null is None. A text as `task`,
            here or in the file, replaces the whole block by the task that it names.
        without: dotted keys of the file that are not read.
    Raises:
        ValueError: an unknown key, a wrong type, a missing value, or a contradiction; the message names file or
            override, key, value and remedy.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"--config {str(path)!r}: there is no such file")
    try:
        values = parse_yaml(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError, OSError) as error:
        raise ValueError(f"{path}: not a valid YAML file ({error})") from error
    for key in without:
        block, _, name = key.rpartition(".")
        functools.reduce(dict.__getitem__, filter(None, block.split(".")), values).pop(name)
    merged, sources = {}, {}
    for source, layer in [(str(path), values), *((f"override {text!r}", _parse_override(text)) for text in overrides)]:
        _merge(merged, layer, Config, "", source, sources)
    try:
        return Config.model_validate(merged)
    except pydantic.ValidationError as error:
        raise ValueError("\n".join(_messages(error, merged, sources, path))) from None


def _merge(into: dict, layer: Any, block: type[Block], prefix: str, source: str, sources: dict[str, str]) -> None:
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
        nested = block_of(block.model_fields[key].annotation)
        if name == "task" and isinstance(value, str):
            into[key] = _named_task(value, source)
        elif nested and value is not None:
            into[key] = into[key] if isinstance(into.get(key), dict) else {}
            _merge(into[key], value, nested, f"{name}.", source, sources)
        elif isinstance(value, dict) and value and isinstance(into.get(key), dict):
            into[key] = _merged(into[key], _literal(value, f"{source}: {name}"))
        else:
            into[key] = _literal(value, f"{source}: {name}")


def _merged(old: Mapping, new: Mapping) -> dict:
    """A mapping over another one, the mappings in them likewise."""
    both = {
        key: _merged(old[key], new[key]) for key in new if isinstance(new[key], dict) and isinstance(old.get(key), dict)
    }
    return {**old, **new, **both}


def _literal(value: Any, place: str) -> Any:
    """The value with \\${ as ${ in its texts.

    Raises:
        ValueError: a text holds ${…}, which other tools replace and recjax does not.
    """
    if isinstance(value, dict):
        return {_literal(key, place): _literal(each, f"{place}.{key}") for key, each in value.items()}
    if isinstance(value, list):
        return [_literal(each, place) for each in value]
    if isinstance(value, str) and re.search(r"(?<!\\)\$\{", value):
        remedy = "write the value itself, or \\${ where these characters are meant"
        raise ValueError(f"{place} = {value!r}: ${{…}} is not replaced; {remedy}")
    return value.replace("\\${", "${") if isinstance(value, str) else value


def _messages(error: pydantic.ValidationError, merged: dict, sources: Mapping[str, str], path: Path) -> Iterator[str]:
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
            yield f"{sources[name]}: {refusal('.'.join([name, *inner]), KEYS[name], value, each)}"


def _parse_override(text: str) -> dict:
    key, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][\w.]*", key):
        raise ValueError(f"override {text!r} is not of the form key=value, such as optimizer.learning_rate=1e-6")
    try:
        parsed = parse_yaml(value)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"override {text!r}: the value is not valid YAML ({error})") from error
    for part in reversed(key.split(".")):
        parsed = {part: parsed}
    return parsed


def _named_task(text: str, source: str) -> dict[str, dict]:
    """The task block that a text such as "gsm8k" or "reasoning_gym:letter_counting" stands for.

    Raises:
        ValueError: it names no task.
    """
    name, colon, generator = text.partition(":")
    if name == "reasoning_gym" and generator:
        return {name: {"name": generator}}
    names = [f"{task}:GENERATOR" if task == "reasoning_gym" else task for task in TASKS]
    if text not in names or colon:
        near = difflib.get_close_matches(text, names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(names)}, or a block"
        raise ValueError(f"{source}: task = {text!r} names no task; {hint}")
    return {name: {}}


def unknown_keys(values: Any) -> list[str]:
    """Dotted keys of a file's content that the schema lacks."""

    def unknown(values: Any, block: type[Block], prefix: str) -> Iterator[str]:
        for key, value in values.items() if isinstance(values, dict) else ():
            if key not in block.model_fields:
                yield f"{prefix}{key}"
            elif nested := block_of(block.model_fields[key].annotation):
                yield from unknown(value, nested, f"{prefix}{key}.")

    return list(unknown(values, Config, ""))


def to_yaml(config: Config) -> str:
    """The resolved config as YAML, the algorithm with every axis and option spelled out below it as a comment."""
    comment = "".join(f"#   {axis}: {options}\n" for axis, options in config.algorithm.resolved().items())
    return yaml.safe_dump(config.model_dump(), sort_keys=False) + "# algorithm, resolved:\n" + comment
