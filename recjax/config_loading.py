"""From a YAML file and `key=value` overrides to one checked config; every error names the key, value and remedy."""

import dataclasses
import difflib
import functools
import re
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import omegaconf
from omegaconf import OmegaConf

from recjax.algorithms.options import require
from recjax.config import KEYS, Config, TaskConfig, check
from recjax.config_fields import block_of, choices_of
from recjax.config_tasks import TASKS
from recjax.config_yaml import is_decimal, read_override, read_yaml_file, write_yaml


def _check_keys(values: Any, source: str, block: type = Config, prefix: str = "") -> None:
    """Refuses keys that the schema lacks, naming the nearest that it has."""
    if not isinstance(values, dict):
        raise ValueError(f"{source}: {prefix.rstrip('.') or 'the file'} must hold keys and values; got {values!r}")
    fields = {field.name: field for field in dataclasses.fields(block)}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if key not in fields:
            near = difflib.get_close_matches(name, KEYS, n=1, cutoff=0.5)
            near = near or [known for known in KEYS if known.split(".")[-1] == key][:1]
            hint = f"did you mean {near[0]!r}?" if near else f"keys here: {', '.join(fields)}"
            raise ValueError(f"{source}: unknown key {name!r} (value {value!r}); {hint}")
        nested = block_of(fields[key].type)
        if nested and value is not None:
            _check_keys(value, source, nested, f"{name}.")
        else:
            _check_texts(value, fields[key].type, f"{source}: {name}")


def _check_texts(value: Any, annotation: Any, place: str) -> None:
    """Refuses `${…}`, lists in lists, other values for text, and text for numbers, as OmegaConf would take them."""
    parts = _parts(annotation)
    if str in parts and value is not None and not isinstance(value, str):
        require(False, place, value, "takes text; put it in quotes, within others on a command line")
    if isinstance(value, dict):
        of = next((typing.get_args(part)[1] for part in parts if typing.get_origin(part) is dict), None)
        for key, each in value.items():
            _check_texts(each, of, f"{place}.{key}")
    elif isinstance(value, list):
        of = next((typing.get_args(part)[0] for part in parts if typing.get_origin(part) is list), None)
        for each in value:
            # OmegaConf takes a list or mapping in place of each number or text.
            require(of is None or not isinstance(each, list | dict), place, value, "holds a list in a list; flatten it")
            _check_texts(each, of, place)
    elif isinstance(value, str):
        require(value != omegaconf.MISSING, place, value, "stands for no value; write the value itself")
        remedy = "write the value itself, or \\${ where these characters are meant"
        require(not re.search(r"(?<!\\)\$\{", value), place, value, f"${{…}} is not replaced; {remedy}")
        if kind := next((part for part in parts if part in (int, float)), None):
            require(is_decimal(value), place, value, f"takes {kind.__name__}, a number in decimal digits")


def _parts(annotation: Any) -> tuple:
    """The types of a union, or the one type."""
    return typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)


def _parse_override(text: str) -> dict:
    key, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][\w.]*", key):
        raise ValueError(f"override {text!r} is not of the form key=value, such as optimizer.learning_rate=1e-6")
    parts = _parts(KEYS[key].type) if key in KEYS else ()
    takes_yaml = any(block_of(part) or typing.get_origin(part) in (list, dict) for part in parts)
    try:
        value.encode()  # an argument that is not UTF-8
        parsed = read_override(value, takes_text=str in parts, takes_yaml=takes_yaml)
    except ValueError as error:
        raise ValueError(f"override {text!r}: the value is not valid YAML ({error})") from error
    for part in reversed(key.split(".")):
        parsed = {part: parsed}
    return parsed


def _named_task(text: str, source: str) -> dict[str, dict]:
    """The task block that a text such as "gsm8k" or "reasoning_gym:letter_counting" stands for."""
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

    def unknown(values: Any, block: type, prefix: str) -> Iterator[str]:
        fields = {field.name: field for field in dataclasses.fields(block)}
        for key, value in values.items() if isinstance(values, dict) else ():
            if key not in fields:
                yield f"{prefix}{key}"
            elif nested := block_of(fields[key].type):
                yield from unknown(value, nested, f"{prefix}{key}.")

    return list(unknown(values, Config, ""))


def load_config(path: str | Path, overrides: Sequence[str] = (), without: Sequence[str] = ()) -> Config:
    """Reads a YAML config, applies overrides in order, checks everything that can be checked before work starts.

    Args:
        path: YAML file.
        overrides: `dotted.key=value` strings; `read_override` says how values are read. A text as `task`, here or in
            the file, replaces the whole block by the task that it names.
        without: dotted keys of the file that are left out.
    Raises:
        ValueError: an unknown key, a wrong type, a missing value, or a contradiction; the message names file or
            override, key, value and remedy.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"--config {str(path)!r}: there is no such file")
    values = read_yaml_file(path)
    for key in without:
        block, _, name = key.rpartition(".")
        functools.reduce(dict.__getitem__, filter(None, block.split(".")), values).pop(name)
    merged = OmegaConf.structured(Config)
    OmegaConf.set_readonly(merged, False)
    for source, layer in [(str(path), values), *((f"override {text!r}", _parse_override(text)) for text in overrides)]:
        if isinstance(layer, dict) and isinstance(layer.get("task"), str):
            layer = layer | {"task": _named_task(layer["task"], source)}
            merged.task = OmegaConf.structured(TaskConfig)
        _check_keys(layer, source)
        _empty(merged, layer)
        try:
            merged = OmegaConf.unsafe_merge(_writable(merged), layer)
        except omegaconf.errors.OmegaConfBaseException as error:
            raise ValueError(f"{source}: {_refusal(error, layer)}") from error
        except (TypeError, OverflowError) as error:  # of OmegaConf, which names no key then
            raise ValueError(f"{source}: {error}; give a value of the key's type") from error
    try:
        config = OmegaConf.to_object(merged)
    except omegaconf.errors.MissingMandatoryValue as error:
        raise ValueError(
            f"{path}: {error.full_key} has no value; set it in the file or as {error.full_key}=…"
        ) from error
    check(config)
    return config


def _empty(merged: omegaconf.DictConfig, layer: dict, prefix: str = "") -> None:
    """Empties the mappings that a layer gives as {}, such as task.reward_weights={}; merging would leave them."""
    for key, value in layer.items():
        name = f"{prefix}{key}"
        if value == {} and KEYS[name].default_factory is dict:
            OmegaConf.update(_writable(merged), name, {}, merge=False)
        elif isinstance(value, dict) and block_of(KEYS[name].type):
            _empty(merged, value, f"{name}.")


def _writable(config: omegaconf.DictConfig) -> omegaconf.DictConfig:
    """OmegaConf takes frozen dataclasses as read-only, each nested block by itself."""
    OmegaConf.set_readonly(config, False)
    for key in config:
        if not OmegaConf.is_missing(config, key) and isinstance(config[key], omegaconf.DictConfig):
            _writable(config[key])
    return config


def _refusal(error: omegaconf.errors.OmegaConfBaseException, layer: dict) -> str:
    """What OmegaConf found wrong in a layer: its key, value and what the key takes."""
    key = (error.full_key or "?").partition("[")[0]
    field = KEYS.get(key)
    if field and (choices := choices_of(field.type)):
        value = functools.reduce(dict.__getitem__, key.split("."), layer)
        some = "some of " if typing.get_origin(field.type) is list else ""
        became = f"; {field.metadata['became']}" if "became" in field.metadata else ""
        return f"{key} = {value!r}: takes {some}{', '.join(choices)}{became}"
    takes = f"; it takes {field.type.__name__ if isinstance(field.type, type) else field.type}" if field else ""
    return f"{error.full_key or '?'}: {str(error).splitlines()[0]}{takes}"


def to_yaml(config: Config) -> str:
    """The resolved config as YAML, the algorithm with every axis and option spelled out below it as a comment."""
    comment = "".join(f"#   {axis}: {options}\n" for axis, options in config.algorithm.resolved().items())
    return write_yaml(dataclasses.asdict(config)) + "# algorithm, resolved:\n" + comment
