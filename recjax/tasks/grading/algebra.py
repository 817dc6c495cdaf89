"""Comparison of equations by their zeros, and of inequalities by the regions in which they hold, with SymPy."""

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import sympy

from recjax.tasks.grading import syntax, values
from recjax.tasks.grading.notation import split_outside_brackets
from recjax.tasks.grading.tree import Node, Unreadable, contains, names, number

OR = re.compile(r" ?(?:\\text ?\{ ?or ?\}|\bor\b|\\vee) ?")
_AND = re.compile(r" ?(?:\\text ?\{ ?and ?\}|\band\b|\\wedge) ?")
_TURNED = {">": "<", r"\ge": r"\le", r"\supset": r"\subset", r"\supseteq": r"\subseteq", r"\gg": r"\ll"}
ORDERS = {"<": (True, False), r"\le": (False, True)}  # operator → (is strict, includes its endpoint)
_INTERVALS = {"()": (True, True), "(]": (True, False), "[)": (False, True), "[]": (False, False)}
_NUMBER_SETS = {"R": sympy.S.Reals, "Z": sympy.S.Integers, "N": sympy.S.Naturals, "Q": sympy.S.Rationals}
_NUMBER_SETS["R^+"] = sympy.Interval.open(0, sympy.oo)
_MOST_PARTS = 80  # of an equation to factor or an inequality to solve


def relation_pairs(relation: Node) -> list[tuple[str, Node, Node]]:
    """Splits a chain such as a < b < c into single statements; > and similar operators are turned to < and so on."""
    operators, sides = relation.args
    triples = zip(operators, sides, sides[1:], strict=False)
    return [(_TURNED[mark], b, a) if mark in _TURNED else (mark, a, b) for mark, a, b in triples]


def matched(wanted: Sequence[Any], said: Sequence[Any], are_same: Callable[[Any, Any], bool]) -> bool:
    """True if the elements of `wanted` and `said` can be paired one to one."""
    rest = list(said)
    for each in wanted:
        place = next((place for place, other in enumerate(rest) if are_same(each, other)), None)
        if place is None:
            return False
        del rest[place]
    return not rest


def same_factors(a: Node, b: Node) -> bool:
    """True if two polynomials have the same irreducible factors and are therefore 0 at the same points."""
    if not names(a) or names(a) != names(b) or contains((a, b), r"\infty") or max(map(_size, (a, b))) > _MOST_PARTS:
        return False
    try:
        factors = [_factors(_symbolic(each)) for each in (a, b)]
    except (Unreadable, sympy.PolynomialError, NotImplementedError, ValueError):
        return False
    return bool(factors[0]) and matched(*factors, lambda x, y: (x / y).is_number)


def _factors(expression: sympy.Expr) -> list[sympy.Expr]:
    numerator, _ = sympy.fraction(sympy.together(expression))
    return [factor for factor, _ in sympy.factor_list(numerator)[1]]


def _size(node: Any) -> int:
    """Number of parts of a tree; a power counts its base once for each unit of the exponent, and once more."""
    if not isinstance(node, tuple):
        return 1
    if isinstance(node, Node) and node.kind == "pow" and node.args[1].kind == "number":
        return int(abs(node.args[1].args[0]) + 1) * _size(node.args[0])
    return sum(map(_size, node.args if isinstance(node, Node) else node))


def _symbolic(node: Node) -> sympy.Expr:
    if node.kind == "number":
        return sympy.Rational(node.args[0].numerator, node.args[0].denominator)
    if node.kind == "name":
        constants = {r"\pi": sympy.pi, "e": sympy.E, "i": sympy.I, r"\infty": sympy.oo}
        return constants.get(node.args[0]) or sympy.Symbol(node.args[0], real=True)
    if node.kind == "call" and node.args[0] in ("sin", "cos", "tan", "exp", "ln", "abs"):
        function = {"ln": sympy.log, "abs": sympy.Abs}.get(node.args[0]) or getattr(sympy, node.args[0])
        return function(_symbolic(node.args[1]))
    if node.kind not in ("add", "mul", "pow"):
        raise Unreadable(node.kind)
    parts = [_symbolic(each) for each in node.args]
    if node.kind == "pow" and not (parts[1].is_Rational and abs(parts[1]) < 10_000):
        raise Unreadable("power")
    return {"add": sympy.Add, "mul": sympy.Mul, "pow": sympy.Pow}[node.kind](*parts)


def same_region(wanted: str, said: str) -> bool | None:
    """True if two texts describe the same set of numbers; None unless both can be read as non-empty sets."""
    if not all(
        re.search(r"[<>\[\]]|\\(?:le|ge|neq|cup|cap|setminus|mathbb|in)(?![a-z])|,", text) for text in (wanted, said)
    ):
        return None
    try:
        (name, region), (other, answer) = _region_of(wanted), _region_of(said)
    except (Unreadable, sympy.PolynomialError, NotImplementedError, TypeError, ValueError, AttributeError):
        return None
    if name and other and name != other:
        return False
    return None if sympy.S.EmptySet in (region, answer) else _same_set(region, answer)


def _region_of(text: str) -> tuple[str | None, sympy.Set]:
    """The variable, or None if the text names none, and the union of the regions that "or" separates."""
    parts = []
    for part in OR.split(text):
        statements = split_outside_brackets(_AND.sub(",", part))
        name, unequal, _ = statements[0].partition("\\neq")
        if unequal:  # "x\\neq 1, 2 and x > 0" is three statements about x
            statements = [each if re.search(r"\\|[<>A-Za-z]", each) else f"{name}\\neq {each}" for each in statements]
        regions = [_region(syntax.parse_math(statement)) for statement in statements]
        if len(regions) > 1 and (len({name for name, _ in regions}) > 1 or regions[0][0] is None):
            raise Unreadable("no region")
        parts.append((regions[0][0], sympy.Intersection(*(region for _, region in regions))))
    named = {name for name, _ in parts} - {None}
    if len(named) > 1:
        raise Unreadable(text)
    return next(iter(named), None), sympy.Union(*(region for _, region in parts))


def _region(node: Node | None) -> tuple[str | None, sympy.Set]:
    match node:
        case Node("call", (str(brackets), low, high)) if brackets in _INTERVALS:
            low, high = _constant(low), _constant(high)
            if not low < high:
                raise Unreadable("no interval")
            return None, sympy.Interval(low, high, *_INTERVALS[brackets])
        case Node("call", ("set", *items)):
            return None, sympy.FiniteSet(*map(_constant, items))
        case Node("name", (str(name),)) if name.startswith(r"\mathbb{") and name[8:-1] in _NUMBER_SETS:
            return None, _NUMBER_SETS[name[8:-1]]
        case Node("call", (r"\cup" | r"\cap" | r"\setminus" as operator, a, b)):
            a, b = _region(a)[1], _region(b)[1]
            return None, {r"\cup": a.union, r"\cap": a.intersect, r"\setminus": a.__sub__}[operator](b)
        case Node("add", (a, Node("mul", (Node("number", (Fraction(numerator=-1, denominator=1),)), b)))):
            return None, _region(a)[1] - _region(b)[1]
        case Node("relation", ((r"\in",), (Node("name", (str(name),)), b))):
            return name, _region(b)[1]
        case Node("relation", _):
            return _solved(node)
    raise Unreadable("no region")


def _constant(node: Node) -> sympy.Expr:
    if names(node) or _size(node) > 10_000:
        raise Unreadable("no constant")
    return _symbolic(node)


def _solved(relation: Node) -> tuple[str, sympy.Set]:
    """The unknown, and the region in which its inequalities hold."""
    unknown = names(relation)
    if len(unknown) != 1 or _size(relation) > _MOST_PARTS:
        raise Unreadable("not of one unknown")
    (name,) = unknown
    region = sympy.S.Reals
    for operator, a, b in relation_pairs(relation):
        variable = Node("name", (name,))
        if operator == r"\neq" and variable in (a, b):
            region -= sympy.FiniteSet(_constant(b if a == variable else a))
        elif operator in ORDERS and a == variable:
            region &= sympy.Interval(-sympy.oo, _constant(b), True, ORDERS[operator][0])
        elif operator in ORDERS and b == variable:
            region &= sympy.Interval(_constant(a), sympy.oo, ORDERS[operator][0], True)
        elif operator in ORDERS:
            region &= _below(*_without_bars(a, b), *ORDERS[operator])
        else:
            raise Unreadable(operator)
    return name, region


def _without_bars(a: Node, b: Node) -> tuple[Node, Node]:
    """Squares both sides of |x| < c if c is not negative."""
    two = number(2)
    for bars, other in ((a, b), (b, a)):
        if bars.kind == "call" and bars.args[0] == "abs" and (values.decimal(other) or -1) >= 0:
            bars, other = Node("pow", (bars.args[1], two)), Node("pow", (other, two))
            return (bars, other) if a.kind == "call" else (other, bars)
    return a, b


def _below(a: Node, b: Node, is_strict: bool, has_ends: bool) -> sympy.Set:
    """The region with a < b, or a <= b, for rational functions whose factors have degree 2 at most."""
    quotient = sympy.together(_symbolic(a) - _symbolic(b))
    factors = [_factors(part) for part in sympy.fraction(quotient)]
    parts = [[sympy.Poly(factor, *factor.free_symbols) for factor in part] for part in factors]
    if any(polynomial.degree() > 2 for part in parts for polynomial in part):
        raise Unreadable("degree")
    zeros, poles = ([root for each in part for root in sympy.roots(each) if root.is_real] for part in parts)
    places = [-sympy.oo, *sorted({*zeros, *poles}, key=lambda root: root.evalf(50)), sympy.oo]
    region = sympy.FiniteSet(*zeros) if has_ends else sympy.S.EmptySet
    for low, high in zip(places, places[1:], strict=False):
        inside = high - 1 if low.is_infinite else low + 1 if high.is_infinite else (low + high) / 2
        at = {symbol: sympy.S.Zero if len(places) == 2 else inside for symbol in quotient.free_symbols}
        if quotient.subs(at).evalf(50) < 0:
            region = region.union(sympy.Interval.open(low, high))
    return region - sympy.FiniteSet(*poles)


def _same_set(a: sympy.Set, b: sympy.Set) -> bool:
    if a == b:
        return True
    if isinstance(a, sympy.Union) and isinstance(b, sympy.Union):
        return matched(a.args, b.args, _same_set)
    if isinstance(a, sympy.FiniteSet) and isinstance(b, sympy.FiniteSet):
        return matched(a.args, b.args, _same_end)
    if isinstance(a, sympy.Interval) and isinstance(b, sympy.Interval):
        closed = (a.left_open, a.right_open) == (b.left_open, b.right_open)
        return closed and _same_end(a.start, b.start) and _same_end(a.end, b.end)
    return False


def _same_end(a: sympy.Expr, b: sympy.Expr) -> bool:
    return a == b or (not (a.is_infinite or b.is_infinite or (a - b).is_Rational) and bool((a - b).equals(0)))
