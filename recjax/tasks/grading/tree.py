"""The tree of an expression, and what it contains."""

from fractions import Fraction
from typing import Any, NamedTuple

CONSTANTS = {r"\pi", "e", "i", r"\infty"}


class Node(NamedTuple):
    """A part of an expression.

    kind and args: number (Fraction); name (text); add, mul and pow (nodes); call (text, nodes); relation (operators,
    sides); matrix (rows of nodes); sum, product, integral and limit (name, lower, upper or None, body).
    """

    kind: str
    args: tuple


class Unreadable(ValueError):
    """A text that this reader does not know."""


def number(value: int | Fraction) -> Node:
    """A number's node."""
    return Node("number", (Fraction(value),))


def inverse(node: Node) -> Node:
    """One over a node."""
    return Node("pow", (node, number(-1)))


def difference(a: Node, b: Node) -> Node:
    """One node minus another."""
    return Node("add", (a, Node("mul", (number(-1), b))))


def signed(sign: str | None, node: Node) -> Node:
    """A node after a plus, a minus or both."""
    if sign == r"\pm":
        return Node("mul", (Node("name", (r"\pm",)), node))
    if sign != "-":
        return node
    return number(-node.args[0]) if node.kind == "number" else Node("mul", (number(-1), node))


def names(node: Any) -> set[str]:
    """The unknowns of a tree, constants excluded."""
    if not isinstance(node, Node):
        return set().union(*map(names, node)) if isinstance(node, tuple) else set()
    if node.kind == "name":
        return {node.args[0]} - CONSTANTS
    if node.kind in ("sum", "product", "integral", "limit"):
        return names(node.args[1:]) - {node.args[0]}
    return names(node.args)


def contains(node: Any, *wanted: str) -> bool:
    """Whether a tree has a name or call of one of these texts."""
    if isinstance(node, tuple):
        return any(contains(each, *wanted) for each in node)
    return node in wanted
