"""Comparison of answers other than numbers: expressions, equations, inequalities, regions.

`syntax` reads both answers, `values` compares expressions, and SymPy solves inequalities and factors equations.
"""

import functools
import re
from typing import Any

from recjax.tasks.grading import algebra, syntax, values
from recjax.tasks.grading.notation import plain
from recjax.tasks.grading.quantities import Quantity, is_rounding, named_unit, quantity
from recjax.tasks.grading.tree import Node, difference, names, number
from recjax.tasks.grading.units import NOTHING, Unit

_FUNCTIONS = syntax.FUNCTIONS | {"sqrt", "mod", "pi"}
_OF_AN_ANGLE = re.compile(r"\\(?:sin|cos|tan|sec|csc|cot|operatorname\{cis\})(?![a-z])")
_SYMMETRIC = {"=", r"\neq", r"\equiv", r"\sim", r"\cong", r"\parallel", r"\perp", r"\Leftrightarrow", r"\iff"}
_ROUNDED = re.compile(r"(?P<exact>[^=]+?) ?\\approx ?(?P<decimal>-?[\d.,]+)")
_INFINITE = Node("name", (r"\infty",))


def same_expression(truth: str, given: str, stated: Quantity | None) -> bool:
    """True if an answer equals the true answer; both are in the notation of `notation.plain`.

    Args:
        stated: the answer as a number; None if it is not a number.
    """
    (wanted, unit), (said, other) = _without_unit(truth), _without_unit(given)
    if stated is not None and stated.units and not stated.percent:
        return same_angle(stated, truth)
    # One side may omit its unit; degrees are then not converted to radians.
    factors = [got.factor / taken.factor for taken in unit for got in other if taken.dimensions == got.dimensions]
    if (unit and other and not factors) or not _words_fit(wanted, said):
        return False
    if (match := _ROUNDED.fullmatch(said)) and (rounded := quantity(match["decimal"])):
        value = values.decimal(_read(match["exact"]) or _INFINITE)
        if value is None or abs(value - rounded.value) > (rounded.last_place or 0):
            return False
        said = match["exact"]
    tree, answer = _read(wanted), _read(said)
    if tree is None or answer is None:
        return False
    if factors and factors[0] != 1:
        answer = Node("mul", (number(factors[0]), answer))
    if stated is not None and stated.last_place is not None and not names(tree) and tree.kind != "relation":
        value = values.decimal(tree)
        return value is not None and (is_rounding(stated, value) or stated.value == value)
    return _same(tree, answer, "°" in truth or r"\pi" in truth)


def same_angle(degrees: Quantity, radians: str) -> bool:
    r"""True if a quantity in degrees equals an angle in radians, such as \frac{\pi}{2}; False for other units."""
    core, unit = _without_unit(radians)
    said = _read(core)
    if r"\pi" not in core or said is None or names(said) or (unit and unit[0].dimensions != (("radian", 1),)):
        return False
    turned = Node("mul", (number(degrees.value / 180), Node("name", (r"\pi",))))
    return any(unit.dimensions == (("degree", 1),) for unit in degrees.units) and values.equal(turned, said)


def is_constant(text: str) -> bool:
    """True if a text, in the notation of `notation.plain`, is an expression without unknowns."""
    tree = _read(text)
    return tree is not None and tree.kind != "relation" and not names(tree)


def names_its_unit(text: str) -> bool:
    """True if an expression ends with a known unit."""
    return _without_unit(text)[0] != text


def _without_unit(text: str) -> tuple[str, tuple[Unit, ...]]:
    """Splits an expression from the unit at its end."""
    for match in re.finditer(r"(?<=[\w)}]) ?(?=\\text)|(?<=[\w)}]) (?=[a-z])|(?=°)", text):
        core, rest = text[: match.start()].strip(), text[match.end() :]
        if rest[:1] == "°" and _OF_AN_ANGLE.search(core):
            continue
        if core and core.count("{") == core.count("}") and (unit := named_unit(rest, beside_a_number=False)):
            return core, () if unit == (NOTHING,) else unit
    return text, ()


def _words_fit(truth: str, given: str) -> bool:
    """True if every word of an answer is also in the truth."""
    pattern = r"\\(?:begin|end)\{\w+\}(?:\{[clr|]*\})?|\\(?:[A-Za-z]+|.)|_\{?\w+\}?|\^\{?T\}?"
    truth, given = (re.sub(pattern, " ", algebra.OR.sub(" ", text)) for text in (truth, given))
    given = re.sub(r"(?<![A-Za-z])d[a-z]\b", " ", given)  # the differential of an integral
    words = {*re.findall(r"[A-Za-z]{2,}", given)} - _FUNCTIONS - {*re.findall(r"[A-Za-z]{2,}", truth)}
    # Up to three letters are a product if the truth has these letters; more letters are a word.
    return all(len(word) <= 3 and set(word) <= set(truth) for word in words if len(syntax.tokens(word)) == len(word))


@functools.lru_cache(maxsize=1024)
def _read(text: str) -> Node | None:
    return syntax.parse_math(text)


# --- Expressions and equations.


def _same(wanted: Node, said: Node, is_periodic: bool) -> bool:
    if wanted.kind == said.kind == "relation":
        return _same_relation(wanted, said, is_periodic)
    if wanted.kind == "relation":
        value = _value_of(wanted)
        return value is not None and value.kind != "relation" and _same(value, said, is_periodic)
    if said.kind == "relation":
        (operators, sides) = said.args
        if {*operators} != {"="} or not _is_name(sides[0]):
            return False
        return all(_same(wanted, side, is_periodic) for side in sides[1:])
    return values.equal(wanted, said) or _same_renamed(wanted, said, is_periodic)


def _value_of(relation: Node) -> Node | None:
    """The right-hand side of y = … or y ∈ …."""
    operators, sides = relation.args
    return sides[1] if operators in (("=",), (r"\in",)) and _is_name(sides[0]) else None


def _is_name(node: Node) -> bool:
    return node.kind == "name" or (node.kind == "call" and node.args[0] not in syntax.FUNCTIONS | {"^*", "transpose"})


def _same_renamed(wanted: Node, said: Node, is_periodic: bool) -> bool:
    """True if only the name of a constant of integration, or of the integer that counts periods, differs."""
    old, new = names(said) - names(wanted), names(wanted) - names(said)
    if old and all(re.fullmatch(r"[cC]_\d", name) for name in old) and {name.swapcase() for name in old} == new:
        for name in old:
            said = _renamed(said, name, name.swapcase())
        return values.equal(wanted, said)
    if len(old) != 1 or len(new) != 1:
        return False
    pair = {*old, *new}
    constant = pair == {"c", "C"} and all(
        tree.kind == "add" and any(term == Node("name", (name,)) for term in tree.args for name in pair)
        for tree in (wanted, said)
    )
    counts = is_periodic and pair <= {*"klmn"}
    return (constant or counts) and values.equal(wanted, _renamed(said, *old, *new))


def _renamed(node: Any, old: str, new: str) -> Any:
    if isinstance(node, Node):
        return Node(node.kind, _renamed(node.args, old, new))
    if isinstance(node, tuple):
        return tuple(_renamed(each, old, new) for each in node)
    return new if node == old else node


def _same_relation(wanted: Node, said: Node, is_periodic: bool) -> bool:
    (operators, sides), (others, parts) = wanted.args, said.args
    if {*operators} == {*others} == {"="} and len(sides) == len(parts) > 2:
        return algebra.matched(sides, parts, values.equal)
    pairs, answers = algebra.relation_pairs(wanted), algebra.relation_pairs(said)
    if len(pairs) > 1 or len(answers) > 1:
        return len(pairs) == len(answers) and algebra.matched(pairs, answers, _same_pair)
    if operators == others == ("=",):
        said = _in_the_same_letters(wanted, said)
        value, got = _value_of(wanted), _value_of(said)
        if value is not None and got is not None and values.equal(sides[0], said.args[1][0]):
            return _same(value, got, is_periodic)
    return _same_pair(*algebra.relation_pairs(wanted), *algebra.relation_pairs(said))


def _in_the_same_letters(wanted: Node, said: Node) -> Node:
    """Renames the answer's variable to the truth's: f(t) = … becomes f(x) = …."""
    left, other = wanted.args[1][0], said.args[1][0]
    if left.kind == other.kind == "call" and left.args[0] == other.args[0] and len(left.args) == len(other.args) == 2:
        letters = [each.args[1].args[0] for each in (left, other) if each.args[1].kind == "name"]
        if len(letters) == 2 and letters[0] not in names(said):
            return _renamed(said, letters[1], letters[0])
    terms = [re.fullmatch(r"([A-Za-z])_([a-z])", str(each.args[0])) for each in (left, other)]
    if all(terms) and terms[0][1] == terms[1][1] and terms[0][2] not in names(said):  # a_k becomes a_n
        return _renamed(_renamed(said, terms[1][0], terms[0][0]), terms[1][2], terms[0][2])
    return said


def _same_pair(wanted: tuple[str, Node, Node], said: tuple[str, Node, Node]) -> bool:
    (operator, a, b), (other, x, y) = wanted, said
    if operator != other:
        return False
    if values.equal(a, x) and values.equal(b, y):
        return True
    if operator in _SYMMETRIC and values.equal(a, y) and values.equal(b, x):
        return True
    if operator not in (*algebra.ORDERS, "=", r"\neq"):
        return False
    whole, answer = difference(a, b), difference(x, y)
    sign = values.ratio(whole, answer)
    if sign is not None:
        return operator not in algebra.ORDERS or sign > 0
    return operator not in algebra.ORDERS and algebra.same_factors(whole, answer)


# The workers' program imports this module before it forks. This call does the setup of the first comparison.
same_expression(r"\frac{1}{2}x", plain("0.5x"), None)
