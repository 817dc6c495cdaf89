"""Parsing of sets, lists, tuples, intervals and matrices by their brackets and commas."""

import re
from typing import NamedTuple

from recjax.tasks.grading.notation import depths, split_outside_brackets

_MATRIX = re.compile(r"\\begin\{((?:p|b|B|small)?matrix|array)\}(?:\{[clr| ]*\})?(.*)\\end\{\1\}")
_BRACKETED = re.compile(r"[(\[]? ?(\\begin\{array\}.*\\end\{array\}) ?[)\]]?")
_CASES = re.compile(r"\\begin\{(d?cases|aligned)\}(.*)\\end\{\1\}")
_CONDITION = re.compile(r"^(?:\\text ?\{ ?(?:if|for|when|where)? ?\}|if|for|when) ?|[,;.] ?$", re.I)
_ROWS = re.compile(r"\[ ?\[.*\] ?\]")
_WORDED = re.compile(r",? ?(?:\\text ?\{ ?(?:and|or) ?\}|\b(?:and|or)\b) ?")
_ENCLOSED = re.compile(r"(\\?[{(\[])(.*?)(\\?[})\]])")


class Structure(NamedTuple):
    """Items and their brackets: `kind` is "matrix", "list" (no brackets), "{}", or other brackets such as "[)" or "<>".

    The items of a matrix are its rows, and each row is a list.
    """

    kind: str
    items: list

    @property
    def is_unordered(self) -> bool:
        """True for a set, and for a list without brackets."""
        return self.kind in ("{}", "list")


def structure(text: str) -> Structure | None:
    """The structure of a whole text in the notation of `notation.plain`; None if the text is a single item."""
    if match := _BRACKETED.fullmatch(text):
        text = match[1]
    if match := _CASES.fullmatch(text):
        return Structure("list", [_case(row) for row in re.split(r"\\\\", match[2]) if row.strip()])
    if match := re.fullmatch(r"\\langle (.*)\\rangle", text):
        return Structure("<>", split_outside_brackets(match[1]))
    if match := _MATRIX.fullmatch(text):
        rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?", match[2]) if row.strip()]
        return Structure("matrix", [[item.strip() for item in row.split("&")] for row in rows])
    if _ROWS.fullmatch(text):
        inner = split_outside_brackets(text[1:-1].strip())
        if all(row.strip()[:1] == "[" and row.strip()[-1:] == "]" for row in inner):
            return Structure(
                "matrix", [[item.strip() for item in split_outside_brackets(row.strip()[1:-1])] for row in inner]
            )
    if text.replace(" ", "") in ("\\emptyset", "\\{\\}"):
        return Structure("{}", [])
    if match := re.fullmatch(r"([\[\]]) ?([^\[\]()]*,[^\[\]()]*?) ?([\[\]])", text):
        # In the French notation, ]1,2[ is an open interval.
        kind = {"[": "[", "]": "("}[match[1]] + {"]": "]", "[": ")"}[match[3]]
        return Structure(kind, split_outside_brackets(match[2]))
    # "x<1 or x>2" is one region and not a list.
    items = split_outside_brackets(text if re.search(r"[<>]|\\(?:le|ge)(?![a-z])", text) else _WORDED.sub(",", text))
    if len(items) > 1 and all(items):
        return Structure("list", items)
    if not (match := _ENCLOSED.fullmatch(text)):
        return None
    opening, inside, closing = match.groups()
    levels = [0, *depths(inside)]
    if min(levels) != 0 or levels[-1] != 0:  # the last bracket does not close the first one
        return None
    items = split_outside_brackets(inside if opening == "{" else _WORDED.sub(",", inside))
    match opening, closing, len(items):
        case (r"\{", r"\}", _):
            return Structure("{}", items)
        case ("(", ")", 1):
            return structure(items[0])
        case ("{", "}", count) | ("(" | "[", ")" | "]", count) if count > 1:
            return Structure(opening + closing, items)
    return None


def _case(row: str) -> str:
    """A row of cases: a statement, or a pair of a value and its condition."""
    parts = [_CONDITION.sub("", _CONDITION.sub("", part.strip())).strip() for part in row.split("&")]
    if len(parts) > 1 and parts[1][:1] in ("=", "<", ">"):
        return "".join(parts)  # a relation with an alignment mark
    return parts[0] if len(parts) == 1 else f"({','.join(parts)})"
