"""The tree of an expression, constructors of its nodes, and its names."""

from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NamedTuple

CONSTANTS = {r"\pi", "e", "i", r"\infty"}


class Node(NamedTuple):
    """A node of an expression's tree.

    Kinds, with their args: number (Fraction); name (text); add, mul and pow (nodes); call (text, nodes); relation
    (operators, sides); matrix (rows of nodes); sum, product, integral and limit (name, lower, upper or None, body).
    """

    kind: str
    args: tuple


class Unreadable(ValueError):
    """A text that the parser cannot read."""


def number(value: int | Fraction) -> Node:
    """The node of a number."""
    return Node("number", (Fraction(value),))


def inverse(node: Node) -> Node:
    """One over a node."""
    return Node("pow", (node, number(-1)))


def difference(a: Node, b: Node) -> Node:
    """One node minus another."""
    return Node("add", (a, Node("mul", (number(-1), b))))


def signed(sign: str | None, node: Node) -> Node:
    """A node with a sign: plus, minus, ± or none."""
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


def walk(tree: Any) -> Iterator[Node]:
    """All nodes of a tree, or of a tuple of trees."""
    if isinstance(tree, Node):
        yield tree
    for each in (tree.args if isinstance(tree, Node) else tree) if isinstance(tree, tuple) else ():
        yield from walk(each)


def contains(tree: Any, *wanted: str) -> bool:
    """True if a tree contains one of these texts, as a name, a call or another part of a node."""
    return any(each in wanted for node in walk(tree) for each in (node.kind, *node.args) if isinstance(each, str))
