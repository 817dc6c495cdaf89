"""Every key of a config with the values it takes, its default and its meaning."""

import difflib
import inspect
import sys
import textwrap
from collections.abc import Iterator, Sequence
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
