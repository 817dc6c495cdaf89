"""Docstrings in the form that mkdocstrings reads: a blank line before a section, fields of a class as attributes."""

import re

import griffe

_SECTION = re.compile(r"\n(?=(?:Args|Returns|Raises|Yields|Examples?|Reference):)")
_REFERENCE = re.compile(r"^Reference: ", re.M)
_FIELDS = re.compile(r"(?:^|\n\n)((\w+)(?:, \w+)*: .*?)(?=\n\n|\Z)", re.S)


class Sections(griffe.Extension):
    """Rewrites every docstring before mkdocstrings reads it."""

    def on_object(self, *, obj: griffe.Object, **options) -> None:
        """Adds blank lines, and the heading of a class's fields."""
        if not obj.docstring:
            return
        text = re.sub(r"\n\n+", "\n\n", _SECTION.sub("\n\n", obj.docstring.value))
        text = _REFERENCE.sub("**Reference:** ", text)
        if obj.is_class:
            text = _FIELDS.sub(lambda found: as_attributes(found, obj), text)
        obj.docstring.value = text


def as_attributes(found: re.Match, obj: griffe.Object) -> str:
    """A paragraph of `name: text` lines as a section, if the class has that name."""
    if found[2] not in obj.members:
        return found[0]
    # One line a name: `a, b: text` describes both.
    lines = []
    for line in found[1].splitlines():
        names, colon, text = line.partition(": ")
        each = names.split(", ") if colon and not line.startswith(" ") else []
        lines += [f"    {name}: {text}" for name in each] or [f"    {line}"]
    return "\n\nAttributes:\n" + "\n".join(lines)
