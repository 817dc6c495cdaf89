"""Every key of a config with the values it takes, its default and its meaning."""

import inspect
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

from recjax.config.fields import ConfigBlock, block_of, extra_of, takes
from recjax.config.schema import Config
from recjax.config.yaml_values import write_yaml


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


def help_text() -> str:
    """For a terminal."""
    lines = []
    for name, meaning, keys in sections():
        lines += ["", f"{name}: {meaning}" if name else meaning]
        for key in keys:
            indent = {"initial_indent": "      ", "subsequent_indent": "      "}
            lines += [f"  {key.name} = {key.default}  ({key.takes})", *textwrap.wrap(key.meaning, 110, **indent)]
    return "\n".join(lines) + "\n"
