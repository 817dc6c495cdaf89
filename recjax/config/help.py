"""Every key of a config with the values it takes, its default and its meaning."""

import inspect
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

from recjax.config.fields import RULES, ConfigBlock, block_of, rules_of, takes
from recjax.config.schema import Config
from recjax.config.yaml_values import write_yaml


class Key(NamedTuple):
    """A key that holds a value; `default` is YAML, or a dash for no default; `takes` is a type or the choices."""

    name: str
    default: str
    takes: str
    meaning: str


def sections(
    block: type[ConfigBlock] = Config, name: str = "", rules: str = ""
) -> Iterator[tuple[str, str, list[Key]]]:
    """Name ("" for the whole run), meaning and keys of a block, then of the blocks inside it, in the schema's order."""
    keys = []
    nested = []
    for key, field in block.model_fields.items():
        needs, excludes, required, must = (rules_of(field)[rule] for rule in RULES)
        words: list[Any] = [
            needs and f" Only with {needs}.",
            required not in ("", needs) and f" Required with {required}.",
        ]
        words += [excludes and f" Not with {excludes}.", must and f" Must {must}."]
        related = "".join(filter(None, words))
        if inner := block_of(field.annotation):
            nested.append((inner, f"{name}{key}.", related))
        else:
            default = field.get_default(call_default_factory=True)
            default = "–" if field.is_required() else write_yaml(default, flow=True)
            keys.append(Key(f"{name}{key}", default, takes(field), f"{str(field.description).rstrip('.')}.{related}"))
    if keys:
        yield name.rstrip("."), str(inspect.getdoc(block)).split("\n\n")[0].replace("\n", " ") + rules, keys
    for inner in nested:
        yield from sections(*inner)


def help_text() -> str:
    """For a terminal."""
    lines = []
    for name, meaning, keys in sections():
        lines += ["", f"{name}: {meaning}" if name else meaning]
        for key in keys:
            indent = {"initial_indent": "      ", "subsequent_indent": "      "}
            lines += [f"  {key.name} = {key.default}  ({key.takes})", *textwrap.wrap(key.meaning, 110, **indent)]
    return "\n".join(lines) + "\n"
