"""TeX's braces."""

import re


def braced(text: str) -> str | None:
    """What stands between a text's first character, an opening brace, and the brace that closes it; else None."""
    depth = 0
    for match in re.finditer(r"\\.|[{}]", text, re.DOTALL) if text.startswith("{") else ():
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return text[1 : match.start()]
    return None
