"""Matching braces in TeX."""

import re


def braced(text: str) -> str | None:
    """The text inside the pair of braces that a text starts with; None if it starts with none or never closes it."""
    depth = 0
    for match in re.finditer(r"\\.|[{}]", text, re.DOTALL) if text.startswith("{") else ():
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return text[1 : match.start()]
    return None
