"""Every key of a config with the values it takes, its default and its meaning, as help and as a page of the docs."""

import inspect
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

from pydantic.fields import FieldInfo

from recjax.config.fields import ConfigBlock, block_of, default_of, takes
from recjax.config.schema import Config
from recjax.config.yaml_values import write_yaml


class Key(NamedTuple):
    """A key that holds a value; `default` is YAML, or a dash where there is none; `takes` is a type or the choices."""

    name: str
    default: str
    takes: str
    meaning: str


class Section(NamedTuple):
    """A block of keys and its meaning; `name` is "" for the keys of the whole run."""

    name: str
    meaning: str
    keys: list[Key]


def sections(of: type[ConfigBlock] = Config, name: str = "", rules: str = "") -> Iterator[Section]:
    """The block, then the blocks inside it, in the schema's order."""
    fields = of.model_fields
    keys = []
    for key, field in fields.items():
        if not block_of(field.annotation):
            default = "–" if field.is_required() else write_yaml(default_of(field), flow=True)
            meaning = f"{field.description.rstrip('.')}.{_rules(field)}"
            keys.append(Key(f"{name}{key}", default, takes(field.annotation), meaning))
    if keys:
        yield Section(name.rstrip("."), inspect.getdoc(of).split("\n\n")[0].replace("\n", " ") + rules, keys)
    for key, field in fields.items():
        if nested := block_of(field.annotation):
            yield from sections(nested, f"{name}{key}.", _rules(field))


def _rules(field: FieldInfo) -> str:
    needs, excludes = field.json_schema_extra.values()
    return f" Only with {needs}." * bool(needs) + f" Not with {excludes}." * bool(excludes)


def help_text() -> str:
    """For a terminal."""
    lines = []
    for section in sections():
        lines += ["", f"{section.name}: {section.meaning}" if section.name else section.meaning]
        for key in section.keys:
            indent = {"initial_indent": "      ", "subsequent_indent": "      "}
            lines += [f"  {key.name} = {key.default}  ({key.takes})", *textwrap.wrap(key.meaning, 110, **indent)]
    return "\n".join(lines) + "\n"


def as_markdown() -> str:
    """For docs/configuration.md, which is this text and nothing else."""
    lines = [
        "# Configuration",
        "",
        "Every key of a run's YAML file, from the schema that reads it. On a command line a key is an override, as in",
        "`optimizer.learning_rate=1e-6` ([how values are read](runs.md#overrides)). A block that is not given, such as",
        "`experience` or `model.lora`, is off. `python -m recjax.train --help` prints the same list.",
    ]
    for section in sections():
        lines += ["", f"## {section.name or 'The run'}", "", section.meaning, ""]
        lines += ["| key | takes | default | meaning |", "|---|---|---|---|"]
        for key in section.keys:
            meaning = f"{key.meaning[:1].upper()}{key.meaning[1:]}".replace("|", "\\|")
            lines.append(f"| `{key.name}` | {key.takes} | `{key.default}` | {meaning} |")
    return "\n".join(lines) + "\n"
