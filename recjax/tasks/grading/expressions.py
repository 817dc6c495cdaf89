"""Answers that are more than numbers: expressions, equations, inequalities, regions.

`syntax` reads both sides whole, `values` compares expressions; SymPy solves inequalities and factors equations.
"""

import functools
import re
from fractions import Fraction
from typing import Any

import sympy

from recjax.tasks.grading import syntax, values
from recjax.tasks.grading.notation import plain, split
from recjax.tasks.grading.quantities import Quantity, is_rounding, named_unit, quantity
from recjax.tasks.grading.syntax import Node, difference
from recjax.tasks.grading.units import NOTHING, Unit

_FUNCTIONS = syntax.FUNCTIONS | {"sqrt", "mod", "pi"}
_OF_AN_ANGLE = re.compile(r"\\(?:sin|cos|tan|sec|csc|cot|operatorname\{cis\})(?![a-z])")
_CIRCLE = (("angle", 1),)
_OR = re.compile(r" ?(?:\\text ?\{ ?or ?\}|\bor\b|\\vee) ?")
_AND = re.compile(r" ?(?:\\text ?\{ ?and ?\}|\band\b|\\wedge) ?")
_TURNED = {">": "<", r"\ge": r"\le", r"\supset": r"\subset", r"\supseteq": r"\subseteq", r"\gg": r"\ll"}
_ORDERS = {"<": (True, False), r"\le": (False, True)}  # strict, with its end
_SYMMETRIC = {"=", r"\neq", r"\equiv", r"\sim", r"\cong", r"\parallel", r"\perp", r"\Leftrightarrow", r"\iff"}
_INTERVALS = {"()": (True, True), "(]": (True, False), "[)": (False, True), "[]": (False, False)}
_NUMBER_SETS = {"R": sympy.S.Reals, "Z": sympy.S.Integers, "N": sympy.S.Naturals, "Q": sympy.S.Rationals}
_ROUNDED = re.compile(r"(?P<exact>[^=]+?) ?\\approx ?(?P<decimal>-?[\d.,]+)")
_INFINITE = Node("name", (r"\infty",))
_MOST_PARTS = 80  # of an equation that is factored, or an inequality that is solved


def same(truth: str, given: str, number: Quantity | None) -> bool:
    """Whether an answer equals the true one, both in the notation of `notation.plain`.

    Args:
        number: the answer, where it is a number.
    """
    (wanted, unit), (said, other) = _without_unit(truth), _without_unit(given)
    if number is not None and number.units and not number.percent:
        return _degrees(truth, number)
    factor = _conversion(unit, other)
    if factor is None or not _words_fit(wanted, said):
        return False
    if (match := _ROUNDED.fullmatch(said)) and (rounded := quantity(match["decimal"])):
        value = values.decimal(_read(match["exact"]) or _INFINITE)
        if value is None or abs(value - rounded.value) > (rounded.last_place or 0):
            return False
        said = match["exact"]
    tree, answer = _read(wanted), _read(said)
    if tree is None or answer is None:
        return False
    if factor != 1:
        answer = Node("mul", (syntax.number(factor), answer))
    if number is not None and number.last_place is not None and not values.names(tree) and tree.kind != "relation":
        value = values.decimal(tree)
        return value is not None and (is_rounding(number, value) or number.value == value)
    return _same(tree, answer, "°" in truth or r"\pi" in truth)


def same_angle(degrees: str, given: str) -> bool:
    r"""Whether an answer in radians, such as \frac{\pi}{2}, is so many degrees."""
    said, unit = _without_unit(given)
    if r"\pi" not in said or (unit and unit[0].dimensions != (("radian", 1),)):
        return False
    return _equal_angle(re.sub(r"°|\\text ?\{[^{}]*\}|[a-z ]+$", "", degrees).strip(), said)


def is_constant(text: str) -> bool:
    """Whether a text, in the notation of `notation.plain`, is an expression without unknowns."""
    tree = _read(text)
    return tree is not None and tree.kind != "relation" and not values.names(tree)


def names_its_unit(text: str) -> bool:
    """Whether an expression ends with a unit that is known."""
    return _without_unit(text)[0] != text


def _equal_angle(degrees: str, radians: str) -> bool:
    wanted, said = _read(f"({degrees})°"), _read(radians)
    return wanted is not None and said is not None and not values.names(said) and values.equal(wanted, said)


def _degrees(truth: str, number: Quantity) -> bool:
    """Whether so many degrees are the truth, an angle in radians; other units are beside numbers alone."""
    if r"\pi" not in truth or all(unit.dimensions != _CIRCLE for unit in number.units):
        return False
    said, unit = _without_unit(truth)
    if unit and unit[0].dimensions != (("radian", 1),):
        return False
    return _equal_angle(f"\\frac{{{number.value.numerator}}}{{{number.value.denominator}}}", said)


def _without_unit(text: str) -> tuple[str, tuple[Unit, ...]]:
    """An expression and the unit that it ends with."""
    for match in re.finditer(r"(?<=[\w)}]) ?(?=\\text)|(?<=[\w)}]) (?=[a-z])|(?=°)", text):
        core, rest = text[: match.start()].strip(), text[match.end() :]
        if rest[:1] == "°" and _OF_AN_ANGLE.search(core):
            continue
        if core and core.count("{") == core.count("}") and (unit := named_unit(rest, beside_a_number=False)):
            return core, () if unit == (NOTHING,) else unit
    return text, ()


def _conversion(wanted: tuple[Unit, ...], said: tuple[Unit, ...]) -> Fraction | None:
    """What the answer's number is to be multiplied by; None where its unit is another one."""
    if not wanted or not said:
        # An expression in degrees is not one in radians.
        return Fraction(1)
    factors = (other.factor / unit.factor for unit in wanted for other in said if unit.dimensions == other.dimensions)
    return next(factors, None)


def _words_fit(truth: str, given: str) -> bool:
    """Whether an answer has no words that the truth does not have."""
    truth, given = (
        re.sub(r"\\(?:[A-Za-z]+|.)|_\{?\w+\}?|\^\{?T\}?", " ", _OR.sub(" ", text)) for text in (truth, given)
    )
    given = re.sub(r"(?<![A-Za-z])d[a-z]\b", " ", given)  # of an integral
    words = {*re.findall(r"[A-Za-z]{2,}", given)} - _FUNCTIONS - {*re.findall(r"[A-Za-z]{2,}", truth)}
    # Two letters or so are a product, where the truth has these letters; more are a word.
    return all(len(word) <= 3 and set(word) <= set(truth) for word in words if len(syntax.tokens(word)) == len(word))


@functools.lru_cache(maxsize=1024)
def _read(text: str) -> Node | None:
    return syntax.read(text)


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
    """The right side of y = …."""
    operators, sides = relation.args
    return sides[1] if operators in (("=",), (r"\in",)) and _is_name(sides[0]) else None


def _is_name(node: Node) -> bool:
    return node.kind == "name" or (node.kind == "call" and node.args[0] not in syntax.FUNCTIONS | {"^*", "transpose"})


def _same_renamed(wanted: Node, said: Node, is_periodic: bool) -> bool:
    """The same but for the name of a constant of integration, or of the whole number that counts periods."""
    old, new = values.names(said) - values.names(wanted), values.names(wanted) - values.names(said)
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
        return _matched(sides, parts, values.equal)
    pairs, answers = _pairs(wanted), _pairs(said)
    if len(pairs) > 1 or len(answers) > 1:
        return len(pairs) == len(answers) and _matched(pairs, answers, _same_pair)
    if operators == others == ("=",):
        said = _in_the_same_letters(wanted, said)
        value, got = _value_of(wanted), _value_of(said)
        if value is not None and got is not None and values.equal(sides[0], said.args[1][0]):
            return _same(value, got, is_periodic)
    return _same_pair(*_pairs(wanted), *_pairs(said))


def _in_the_same_letters(wanted: Node, said: Node) -> Node:
    """f(t) = … as f(x) = …, where the truth says so."""
    left, other = wanted.args[1][0], said.args[1][0]
    if left.kind == other.kind == "call" and left.args[0] == other.args[0] and len(left.args) == len(other.args) == 2:
        names = [each.args[1].args[0] for each in (left, other) if each.args[1].kind == "name"]
        if len(names) == 2 and names[0] not in values.names(said):
            return _renamed(said, names[1], names[0])
    terms = [re.fullmatch(r"([A-Za-z])_([a-z])", str(each.args[0])) for each in (left, other)]
    if all(terms) and terms[0][1] == terms[1][1] and terms[0][2] not in values.names(said):  # a_k as a_n
        return _renamed(_renamed(said, terms[1][0], terms[0][0]), terms[1][2], terms[0][2])
    return said


def _pairs(relation: Node) -> list[tuple[str, Node, Node]]:
    """A chain such as a < b < c as its single statements, all turned to < and the like."""
    operators, sides = relation.args
    triples = zip(operators, sides, sides[1:], strict=False)
    return [(_TURNED[mark], b, a) if mark in _TURNED else (mark, a, b) for mark, a, b in triples]


def _matched(wanted: Any, said: Any, are_same: Any) -> bool:
    """Whether each has its own counterpart among the others."""
    rest = list(said)
    for each in wanted:
        place = next((place for place, other in enumerate(rest) if are_same(each, other)), None)
        if place is None:
            return False
        del rest[place]
    return not rest


def _same_pair(wanted: tuple[str, Node, Node], said: tuple[str, Node, Node]) -> bool:
    (operator, a, b), (other, x, y) = wanted, said
    if operator != other:
        return False
    if values.equal(a, x) and values.equal(b, y):
        return True
    if operator in _SYMMETRIC and values.equal(a, y) and values.equal(b, x):
        return True
    if operator not in (*_ORDERS, "=", r"\neq"):
        return False
    whole, answer = difference(a, b), difference(x, y)
    sign = values.ratio(whole, answer)
    if sign is not None:
        return operator not in _ORDERS or sign > 0
    return operator not in _ORDERS and _same_factors(whole, answer)


def _same_factors(a: Node, b: Node) -> bool:
    """Whether two polynomials have the same irreducible factors, so that they are 0 at the same points."""
    if not values.names(a) or values.names(a) != values.names(b) or max(map(_size, (a, b))) > _MOST_PARTS:
        return False
    try:
        factors = [_factors(_symbolic(each)) for each in (a, b)]
    except (syntax.Unreadable, sympy.PolynomialError, NotImplementedError, ValueError):
        return False
    return _matched(*factors, lambda x, y: (x / y).is_number)


def _factors(expression: sympy.Expr) -> list[sympy.Expr]:
    numerator = sympy.fraction(sympy.together(expression))[0]
    return [factor for factor, _ in sympy.factor_list(numerator)[1]]


def _size(node: Any) -> int:
    """How many parts a tree has, a power counting as often as its exponent says."""
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
        raise syntax.Unreadable(node.kind)
    parts = [_symbolic(each) for each in node.args]
    if node.kind == "pow" and not (parts[1].is_Rational and abs(parts[1]) < 10_000):
        raise syntax.Unreadable("power")
    return {"add": sympy.Add, "mul": sympy.Mul, "pow": sympy.Pow}[node.kind](*parts)


# --- Regions of one variable.


def same_region(wanted: str, said: str) -> bool | None:
    """Whether two texts are one set of numbers; None where they are not both read as such sets."""
    if not all(
        re.search(r"[<>\[\]]|\\(?:le|ge|neq|cup|cap|setminus|mathbb|in)(?![a-z])|,", text) for text in (wanted, said)
    ):
        return None
    try:
        (name, region), (other, answer) = _region_of(wanted), _region_of(said)
    except (syntax.Unreadable, NotImplementedError, TypeError, ValueError, AttributeError):
        return None
    if name and other and name != other:
        return False
    return None if sympy.S.EmptySet in (region, answer) else _same_set(region, answer)


def _region_of(text: str) -> tuple[str | None, sympy.Set]:
    """The variable, where it is named, and the union of what stands between "or"."""
    parts = [_common(_statements(part)) for part in _OR.split(text)]
    names = {name for name, _ in parts} - {None}
    if len(names) > 1:
        raise syntax.Unreadable(text)
    return next(iter(names), None), sympy.Union(*(region for _, region in parts))


def _statements(text: str) -> list[str]:
    """The parts between commas and "and": x\\neq 1, 2 and x > 0 as three statements of x."""
    parts = [part.strip() for part in split(_AND.sub(",", text))]
    if "\\neq" in parts[0]:
        name = parts[0].partition("\\neq")[0]
        parts = [part if re.search(r"\\|[<>]|[A-Za-z]", part) else f"{name}\\neq {part}" for part in parts]
    return parts


def _common(statements: list[str]) -> tuple[str | None, sympy.Set]:
    regions = [_region(_read(statement)) for statement in statements]
    names = {name for name, _ in regions}
    if len(regions) > 1 and (len(names) > 1 or None in names):
        raise syntax.Unreadable("no region")
    return regions[0][0], sympy.Intersection(*(region for _, region in regions))


def _region(node: Node | None) -> tuple[str | None, sympy.Set]:
    match node:
        case Node("call", (str(brackets), low, high)) if brackets in _INTERVALS:
            low, high = _constant(low), _constant(high)
            if not low < high:
                raise syntax.Unreadable("no interval")
            return None, sympy.Interval(low, high, *_INTERVALS[brackets])
        case Node("call", ("set", *items)):
            return None, sympy.FiniteSet(*map(_constant, items))
        case Node("name", (str(name),)) if name.startswith(r"\mathbb{") and name[8:-1] in _NUMBER_SETS:
            return None, _NUMBER_SETS[name[8:-1]]
        case Node("name", (r"\emptyset",)):
            return None, sympy.S.EmptySet
        case Node("call", (r"\cup" | r"\cap" | r"\setminus" as operator, a, b)):
            a, b = _region(a)[1], _region(b)[1]
            return None, {r"\cup": a.union, r"\cap": a.intersect, r"\setminus": a.__sub__}[operator](b)
        case Node("add", (a, Node("mul", (Node("number", (Fraction(numerator=-1, denominator=1),)), b)))):
            return None, _region(a)[1] - _region(b)[1]
        case Node("relation", ((r"\in",), (Node("name", (str(name),)), b))):
            return name, _region(b)[1]
        case Node("relation", _):
            return _solved(node)
    raise syntax.Unreadable("no region")


def _constant(node: Node) -> sympy.Expr:
    if values.names(node) or _size(node) > 10_000:
        raise syntax.Unreadable("no constant")
    return _symbolic(node)


def _solved(relation: Node) -> tuple[str, sympy.Set]:
    """Where the inequalities of one unknown hold."""
    names = values.names(relation)
    if len(names) != 1 or _size(relation) > _MOST_PARTS:
        raise syntax.Unreadable("not of one unknown")
    (name,) = names
    region = sympy.S.Reals
    for operator, a, b in _pairs(relation):
        unknown = Node("name", (name,))
        if operator == r"\neq" and unknown in (a, b):
            region -= sympy.FiniteSet(_constant(b if a == unknown else a))
        elif operator in _ORDERS and a == unknown:
            region &= sympy.Interval(-sympy.oo, _constant(b), True, _ORDERS[operator][0])
        elif operator in _ORDERS and b == unknown:
            region &= sympy.Interval(_constant(a), sympy.oo, _ORDERS[operator][0], True)
        elif operator in _ORDERS:
            symbol = sympy.Symbol(name, real=True)
            if values.contains((a, b), "sin", "cos", "tan", "exp", "ln"):
                raise syntax.Unreadable("not algebraic")
            inequality = (sympy.StrictLessThan if operator == "<" else sympy.LessThan)(_symbolic(a), _symbolic(b))
            region &= sympy.solve_univariate_inequality(inequality, symbol, relational=False)
        else:
            raise syntax.Unreadable(operator)
    return name, region


def _same_set(a: sympy.Set, b: sympy.Set) -> bool:
    if a == b:
        return True
    if isinstance(a, sympy.Union) and isinstance(b, sympy.Union):
        return _matched(a.args, b.args, _same_set)
    if isinstance(a, sympy.FiniteSet) and isinstance(b, sympy.FiniteSet):
        return _matched(a.args, b.args, _same_end)
    if isinstance(a, sympy.Interval) and isinstance(b, sympy.Interval):
        closed = (a.left_open, a.right_open) == (b.left_open, b.right_open)
        return closed and _same_end(a.start, b.start) and _same_end(a.end, b.end)
    return False


def _same_end(a: sympy.Expr, b: sympy.Expr) -> bool:
    return a == b or (not (a.is_infinite or b.is_infinite or (a - b).is_Rational) and bool((a - b).equals(0)))


# Workers are forked from a process that has imported this module; what the first answer sets up, they need not.
same(r"\frac{1}{2}x", plain("0.5x"), None)
