"""Every key of a config with what it takes, its default and its meaning: the comments of the schema, as help."""

import ast
import dataclasses
import functools
import inspect
import io
import sys
import textwrap
import tokenize
import types
import typing
from collections.abc import Iterator
from typing import Any, NamedTuple

from omegaconf import MISSING

from recjax.config import Config
from recjax.config_fields import block_of, choices_of
from recjax.config_yaml import write_yaml

_TYPES = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a mapping",
    types.NoneType: "null",
}


class Key(NamedTuple):
    """A key that holds a value; `default` is YAML, or a dash where there is none; `takes` is a type or the choices."""

    name: str
    default: str
    takes: str
    meaning: str


class Block(NamedTuple):
    """Keys that belong together, and what the block is; `name` is "" for those of the whole run."""

    name: str
    meaning: str
    keys: list[Key]


def blocks(of: type = Config, name: str = "") -> Iterator[Block]:
    """The block, then those inside it, in the schema's order."""
    meanings, fields = _meanings(of), dataclasses.fields(of)
    plain = [field for field in fields if not block_of(field.type)]
    keys = [Key(f"{name}{field.name}", _default(field), _takes(field.type), meanings[field.name]) for field in plain]
    if keys:
        yield Block(name.rstrip("."), inspect.getdoc(of).split("\n\n")[0].replace("\n", " "), keys)
    for field in fields:
        if nested := block_of(field.type):
            yield from blocks(nested, f"{name}{field.name}.")


def _default(field: dataclasses.Field) -> str:
    value: Any = field.default_factory() if callable(field.default_factory) else field.default
    return "–" if value == MISSING else write_yaml(value, flow=True)


def _takes(annotation: Any) -> str:
    if choices := choices_of(annotation):
        return ("a list of " if typing.get_origin(annotation) is list else "") + ", ".join(choices)
    parts = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    return " or ".join(_TYPES[typing.get_origin(part) or part] for part in parts)


def _meanings(of: type) -> dict[str, str]:
    """The comment of each field: at the end of its line, or on the lines above it."""
    source = _source(of.__module__)
    node = next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == of.__name__)
    comments, lines, found = _comments(of.__module__), source.splitlines(), {}
    for field in (part for part in node.body if isinstance(part, ast.AnnAssign)):
        words = [comments[line] for line in range(field.lineno, field.end_lineno + 1) if line in comments]
        above = field.lineno - 1
        while field.end_lineno not in comments and lines[above - 1].strip().startswith("#"):
            words.insert(0, comments[above])
            above -= 1
        found[field.target.id] = " ".join(words)
    return found


@functools.cache
def _source(module: str) -> str:
    return inspect.getsource(sys.modules[module])


@functools.cache
def _comments(module: str) -> dict[int, str]:
    """Comments of a module by line, from 1."""
    tokens = tokenize.generate_tokens(io.StringIO(_source(module)).readline)
    return {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}


def as_text() -> str:
    """For a terminal."""
    lines = []
    for block in blocks():
        lines += ["", f"{block.name}: {block.meaning}" if block.name else block.meaning]
        for key in block.keys:
            indent = {"initial_indent": "      ", "subsequent_indent": "      "}
            lines += [f"  {key.name} = {key.default}  ({key.takes})", *textwrap.wrap(key.meaning, 110, **indent)]
    return "\n".join(lines) + "\n"


def as_markdown() -> str:
    """For docs/configuration.md, which is this and nothing else."""
    lines = [
        "# Configuration",
        "",
        "Every key of a run's YAML file, from the schema that reads it. On a command line a key is an override, as in",
        "`optimizer.learning_rate=1e-6` ([how values are read](runs.md#overrides)). A block that is not given, such as",
        "`experience` or `model.lora`, is off. `python -m recjax.train --help` prints the same list.",
    ]
    for block in blocks():
        lines += ["", f"## {block.name or 'The run'}", "", block.meaning, ""]
        lines += ["| key | takes | default | meaning |", "|---|---|---|---|"]
        for key in block.keys:
            meaning = f"{key.meaning[:1].upper()}{key.meaning[1:].rstrip('.')}.".replace("|", "\\|")
            lines.append(f"| `{key.name}` | {key.takes} | `{key.default}` | {meaning} |")
    return "\n".join(lines) + "\n"
