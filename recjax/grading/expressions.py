"""Comparison of answers other than numbers: expressions, equations, inequalities, regions.

`syntax` reads both answers, `values` compares expressions, and SymPy solves inequalities and factors equations.
"""

import itertools
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import sympy

from recjax.grading import values
from recjax.grading.notation import plain, split_outside_brackets
from recjax.grading.quantities import Quantity, is_rounding, named_unit, quantity
from recjax.grading.syntax import (
    BRACKETS,
    FUNCTIONS,
    Node,
    Unreadable,
    contains,
    difference,
    inverse,
    names,
    number,
    parse_math,
    walk,
)
from recjax.grading.units import NOTHING, Unit

_ANGLE_FUNCTION = re.compile(r"\\(?:sin|cos|tan|sec|csc|cot|operatorname\{cis\})(?![a-z])")
_SYMMETRIC = {"=", r"\neq", r"\equiv", r"\sim", r"\cong", r"\parallel", r"\perp", r"\Leftrightarrow", r"\iff"}
UNIT_VECTOR = re.compile(r"\\hat\{[ijk]\}")
MARKED_LETTER = re.compile(r"(\\(?:mathbf|hat|vec)\{(\w)\})")
_DEGREES = (("degree", 1),)
_ROUNDED = re.compile(r"(?P<exact>[^=]+?) ?\\approx ?(?P<decimal>-?[\d.,]+)")
_INFINITE = Node("name", (r"\infty",))
OR = re.compile(r" ?(?:\\text ?\{ ?or ?\}|\bor\b|\\vee) ?")
_AND = re.compile(r" ?(?:\\text ?\{ ?and ?\}|\band\b|\\wedge) ?")
_TURNED = {">": "<", r"\ge": r"\le", r"\supset": r"\subset", r"\supseteq": r"\subseteq", r"\gg": r"\ll"}
_ORDERS = ("<", r"\le")
_COMPARABLE = ("<", r"\le", "=", r"\neq")
_INEQUALITIES = {"<": sympy.Lt, r"\le": sympy.Le, r"\neq": sympy.Ne}
_INTERVALS = ("()", "(]", "[)", "[]")
_NUMBER_SETS = {"R": sympy.S.Reals, "Z": sympy.S.Integers, "N": sympy.S.Naturals, "Q": sympy.S.Rationals}
_SYMPY_CONSTANTS = {r"\pi": sympy.pi, "e": sympy.E, "i": sympy.I, r"\infty": sympy.oo}
_SYMPY_FUNCTIONS = {
    "sin": sympy.sin,
    "cos": sympy.cos,
    "tan": sympy.tan,
    "exp": sympy.exp,
    "ln": sympy.log,
    "abs": sympy.Abs,
}
_REGION = re.compile(r"[<>\[\]]|\\(?:le|ge|neq|cup|cap|setminus|mathbb|in)(?![a-z])|,")
_COUNTED = 48  # General solutions are compared up to this counter.
_MOST_PARTS = 80  # An equation to factor, or an inequality to solve, has at most this number of parts.


def same_expression(truth: str, answer: str, stated: Quantity | None) -> bool:
    """True if an answer equals the true answer; both are in the notation of `notation.plain`.

    Args:
        stated: the answer as a number; None if it is not a number.
    """
    # Degrees are π/180 unless they are the truth's unit, which an answer without π may omit.
    wanted, wanted_units = _without_unit(truth, drops_degrees=r"\pi" not in answer)
    got, got_units = _without_unit(answer, drops_degrees=any(unit.dimensions == _DEGREES for unit in wanted_units))
    if stated is not None and stated.units and not stated.percent:
        if got[-1] != "°":
            return False
        stated = None
    # One side may omit its unit; only a bare number may add one.
    factor = _unit_ratio(got_units, wanted_units)
    if wanted_units and got_units and factor is None:
        return False
    if got != answer and wanted == truth and not is_constant(truth):
        return False
    match = _ROUNDED.fullmatch(got)
    if match:
        rounded = quantity(match["decimal"])
        if rounded:
            value = values.decimal(parse_math(match["exact"]) or _INFINITE)
            last_place = rounded.last_place or 0
            if value is None or abs(value - rounded.value) > last_place:
                return False
            got = match["exact"]
    wanted_tree = parse_math(wanted, _marks(wanted, got))
    got_tree = parse_math(got, _marks(got, wanted))
    if wanted_tree is None or got_tree is None:
        return False
    wanted_tree = _in_factors(wanted, wanted_tree, got_tree)
    if wanted_tree is None:
        return False
    got_tree = _in_factors(got, got_tree, wanted_tree)
    if wanted_tree is None or got_tree is None:
        return False
    if factor is not None and factor != 1:
        got_tree = Node("mul", (number(factor), got_tree))
    is_number = not names(wanted_tree) and wanted_tree.kind != "relation"
    if is_number and stated is not None and stated.last_place is not None:
        return _is_stated(wanted_tree, stated)
    return _same(wanted_tree, got_tree, "°" in truth or r"\pi" in truth)


def _unit_ratio(got_units: tuple[Unit, ...], wanted_units: tuple[Unit, ...]) -> Fraction | None:
    """The size of the first unit in the second one, for the first readings that measure the same; None without such."""
    for wanted_unit, got_unit in itertools.product(wanted_units, got_units):
        if wanted_unit.dimensions == got_unit.dimensions:
            return got_unit.factor / wanted_unit.factor
    return None


def _is_stated(wanted: Node, stated: Quantity) -> bool:
    """True if a decimal is a constant's value, or a rounding of a value with endless decimals."""
    value = values.decimal(wanted)
    if value is None:
        return False
    if stated.value == value:
        return True
    return not values.is_ending_decimal(wanted) and is_rounding(stated, value)


def _marks(text: str, other_text: str) -> frozenset[tuple[str, str]]:
    """Letters of one side, and the marked letters for which they stand, from the second side.

    A bold letter may have any mark on the second side. Letters without marks may be bold, or several unit vectors.
    """
    marked = {(letter, name) for name, letter in MARKED_LETTER.findall(other_text)}
    if MARKED_LETTER.search(text):
        return frozenset((rf"\mathbf{{{letter}}}", name) for letter, name in marked)
    has_units = len(set(UNIT_VECTOR.findall(other_text))) > 1
    return frozenset(pair for pair in marked if "bf" in pair[1] or (has_units and pair[0] in "ijk"))


def _in_factors(text: str, tree: Node, other_tree: Node) -> Node | None:
    """The tree with letters as factors if they are factors on the second side: those of GMR, and h in h(M-m)."""
    factors = names(other_tree)
    runs = [name for name in names(tree) if re.fullmatch("[A-Z]{3,}", name) and factors.issuperset(name)]
    calls = {node.args[0].removesuffix("()") for node in walk(tree) if node.kind == "call"}
    if not runs and not calls & factors:
        return tree
    for run in runs:
        text = re.sub(rf"(?<![A-Za-z]){run}(?![A-Za-z])", " ".join(run), text)
    return parse_math(text, frozenset((name, name) for name in calls & factors))


def is_constant(text: str) -> bool:
    """True if a text, in the notation of `notation.plain`, is a real number, computed or not."""
    tree = parse_math(text)
    excluded = ("relation", "matrix", "i", r"\infty", *BRACKETS)
    if tree is None or names(tree):
        return False
    return not contains(tree, *excluded)


def names_its_unit(text: str) -> bool:
    """True if an expression ends with a known unit."""
    return _without_unit(text)[0] != text


def _without_unit(text: str, drops_degrees: bool = True) -> tuple[str, tuple[Unit, ...]]:
    """Splits an expression from the unit at its end; degrees may stay, as a sign of the expression."""
    for match in re.finditer(r"(?<=[\w)}]) ?(?=\\text)|(?<=[\w)}]) (?=[a-z])|(?=°)", text):
        core = text[: match.start()].strip()
        unit_text = text[match.end() :]
        if unit_text[:1] == "°" and _ANGLE_FUNCTION.search(core):
            continue
        if not core or core.count("{") != core.count("}"):
            continue
        unit = named_unit(unit_text)
        if unit:
            if not drops_degrees and unit[0].dimensions == _DEGREES:
                return f"{core}°", ()
            if unit == (NOTHING,):
                return core, ()
            return core, unit
    return text, ()


# --- Expressions and equations.


def _same(wanted: Node, got: Node, is_periodic: bool) -> bool:
    """True if two trees are equal; with `is_periodic`, sums with a multiple of an integer may count it differently."""
    if wanted.args[0] == got.args[0] == r"\pmod":
        return values.equal(wanted.args[2], got.args[2]) and _same(wanted.args[1], got.args[1], is_periodic)
    if wanted.kind == got.kind == "relation":
        return _same_relation(wanted, got, is_periodic)
    if wanted.kind == "relation":
        value = _assigned_value(wanted)
        if value is None or value.kind == "relation":
            return False
        return _same(value, got, is_periodic)
    if got.kind == "relation":
        operators, sides = got.args
        if set(operators) != {"="} or not _is_name(sides[0]) or sides[0].args[0] in names(sides[1:]):
            return False  # x = 2x+1 does not state 2x+1
        return all(_same(wanted, side, is_periodic) for side in sides[1:])
    return values.equal(wanted, got) or _same_renamed(wanted, got, is_periodic)


def _assigned_value(relation: Node) -> Node | None:
    """The right-hand side of y = … or y ∈ …; None for all other relations."""
    operators, sides = relation.args
    if operators not in (("=",), (r"\in",)) or not _is_name(sides[0]):
        return None
    if sides[0].args[0] in names(sides[1:]):
        return None
    return sides[1]


def _is_name(node: Node) -> bool:
    """True for an unknown, and for a value of an unknown function, such as f(x)."""
    if node.kind == "name":
        return True
    return node.kind == "call" and node.args[0] not in FUNCTIONS | {"^*", "^-1", "transpose"}


def _same_renamed(wanted: Node, got: Node, is_periodic: bool) -> bool:
    """True if only the name of a constant of integration, or of the integer that counts periods, differs."""
    old = names(got) - names(wanted)
    new = names(wanted) - names(got)
    if old and all(re.fullmatch(r"[cC]_\d", name) for name in old) and {name.swapcase() for name in old} == new:
        for name in old:
            got = _replaced(got, name, name.swapcase())
        return values.equal(wanted, got)
    if not old and not new:
        variables = [Node("name", (name,)) for name in names(wanted) - {"C"}]
        are_integrals = _adds_name(wanted, {"C"}) and _adds_name(got, {"C"})
        if are_integrals and len(variables) == 1 and contains(wanted, "abs") is contains(got, "abs"):
            offset = difference(wanted, got)  # Antiderivatives may differ by a number.
            shifted = Node("add", (variables[0], number(Fraction(5, 7))))
            return values.equal(offset, _replaced(offset, variables[0], shifted))
        return is_periodic and _same_period(wanted, got)
    if len(old) != 1 or len(new) != 1:
        return False
    pair = {*old, *new}
    are_constants = pair in ({"C", "c_1"}, {"C", "C_1"})
    if pair == {"c", "C"}:
        are_constants = _adds_name(wanted, pair) and _adds_name(got, pair)
    are_counters = is_periodic and pair <= set("klmn")
    if not are_constants and not are_counters:
        return False
    renamed = _replaced(got, old.pop(), new.pop())
    if values.equal(wanted, renamed):
        return True
    return are_counters and _same_period(wanted, renamed)


def _adds_name(tree: Node, letters: set[str]) -> bool:
    """True for a sum in which one term is one of the letters."""
    if tree.kind != "add":
        return False
    return any(term.kind == "name" and term.args[0] in letters for term in tree.args)


def _same_period(wanted: Node, got: Node) -> bool:
    """True if two sums with a multiple of k, an integer, have the same values: π/6+2kπ and 13π/6-2kπ."""
    counter = Node("name", ("k",))
    if "k" not in names(wanted) & names(got) or wanted.kind != "add":
        return False
    next_counter = Node("add", (counter, number(1)))
    wanted_step = difference(_replaced(wanted, counter, next_counter), wanted)
    got_step = difference(_replaced(got, counter, next_counter), got)
    first_wanted_step = _replaced(wanted_step, counter, number(0))
    first_got_step = _replaced(got_step, counter, number(0))
    if not values.equal(wanted_step, first_wanted_step) or not values.equal(got_step, first_got_step):
        return False
    offset = difference(_replaced(wanted, counter, number(0)), _replaced(got, counter, number(0)))
    size_ratio = values.decimal(Node("mul", (first_got_step, inverse(first_wanted_step))))
    offset_ratio = values.decimal(Node("mul", (offset, inverse(first_wanted_step))))
    if size_ratio is None or offset_ratio is None:
        return False
    tiny = Fraction(1, 10**30)
    return abs(abs(size_ratio) - 1) < tiny and abs(offset_ratio - round(offset_ratio)) < tiny


def same_solutions(truths: Sequence[str], answers: Sequence[str]) -> bool:
    """True if two lists of terms such as x = π/6+2kπ, for all integers k, have the same values."""
    if not 2 < len(truths) + len(answers) < _MOST_PARTS:
        return False
    wanted = _solutions(truths)
    got = _solutions(answers)
    if not wanted or not got:
        return False
    limit = min(max(wanted), -min(wanted), max(got), -min(got)) / 2  # Both lists are complete up to here.
    wanted_near = {value for value in wanted if abs(value) < limit}
    got_near = {value for value in got if abs(value) < limit}
    return len(wanted_near) > 6 and wanted_near == got_near


def _solutions(terms: Sequence[str]) -> set[Fraction]:
    """The values of terms for many integers; empty if a term is no constant with a counter."""
    solutions = set()
    for term in terms:
        tree = parse_math(term)
        letters = "k"
        if tree is not None and tree.kind == "relation":
            letters = "klmn"
            tree = _assigned_value(tree)
        counters = names(tree)
        if len(counters) != 1 or not counters.issubset(letters):
            return set()
        counter = Node("name", tuple(counters))
        for count in range(-_COUNTED, _COUNTED + 1):
            value = values.decimal(_replaced(tree, counter, number(count)))
            if value is None:
                return set()
            solutions.add(round(value, 20))
    return solutions


def _replaced(node: Any, old: Any, new: Any) -> Any:
    """A tree with each part `old`, a text or a node, replaced."""
    if node == old:
        return new
    if isinstance(node, Node):
        return Node(node.kind, _replaced(node.args, old, new))
    if isinstance(node, tuple):
        return tuple(_replaced(part, old, new) for part in node)
    return node


def _same_relation(wanted: Node, got: Node, is_periodic: bool) -> bool:
    operators, sides = wanted.args
    got_operators, got_sides = got.args
    if set(operators) == set(got_operators) == {"="} and len(sides) == len(got_sides) > 2:
        return matched(sides, got_sides, values.equal)
    wanted_pairs = relation_pairs(wanted)
    got_pairs = relation_pairs(got)
    if len(wanted_pairs) > 1 or len(got_pairs) > 1:
        return matched(wanted_pairs, got_pairs, _same_pair)
    if operators == got_operators == ("=",):
        got = _in_the_same_letters(wanted, got)
        wanted_value = _assigned_value(wanted)
        got_value = _assigned_value(got)
        if wanted_value is not None and got_value is not None and values.equal(sides[0], got.args[1][0]):
            return _same(wanted_value, got_value, is_periodic)
    return _same_pair(*relation_pairs(wanted), *relation_pairs(got))


def _in_the_same_letters(wanted: Node, got: Node) -> Node:
    """Renames the answer's variable to the truth's: f(t) = … becomes f(x) = …."""
    wanted_side = wanted.args[1][0]
    got_side = got.args[1][0]
    if (
        wanted_side.kind == got_side.kind == "call"
        and wanted_side.args[0] == got_side.args[0]
        and len(wanted_side.args) == len(got_side.args) == 2
    ):
        wanted_argument = wanted_side.args[1]
        got_argument = got_side.args[1]
        if wanted_argument.kind == got_argument.kind == "name" and wanted_argument.args[0] not in names(got):
            return _replaced(got, got_argument.args[0], wanted_argument.args[0])
    indexed = re.compile(r"([A-Za-z])_([a-z])")
    first = indexed.fullmatch(str(wanted_side.args[0]))
    second = indexed.fullmatch(str(got_side.args[0]))
    if first and second and first[1] == second[1] and first[2] not in names(got):  # a_k becomes a_n
        return _replaced(_replaced(got, second[1], first[1]), second[2], first[2])
    return got


def _same_pair(wanted: tuple[str, Node, Node], got: tuple[str, Node, Node]) -> bool:
    """True if two statements, each an operator with its sides, hold at the same points."""
    operator, a, b = wanted
    got_operator, x, y = got
    if operator != got_operator:
        return False
    if values.equal(a, x) and values.equal(b, y):
        return True
    if operator in _SYMMETRIC and values.equal(a, y) and values.equal(b, x):
        return True
    wanted_difference = difference(a, b)
    got_difference = difference(x, y)
    if operator not in _COMPARABLE or values.ordered(wanted_difference, got_difference):
        return False
    sign = values.ratio(wanted_difference, got_difference)
    if operator in _ORDERS:
        return sign is not None and sign > 0
    return sign is not None or same_factors(wanted_difference, got_difference)


# --- Zeros of equations and regions of inequalities, with SymPy.


def relation_pairs(relation: Node) -> list[tuple[str, Node, Node]]:
    """Splits a chain such as a < b < c into single statements; > and similar operators are turned to < and so on."""
    operators, sides = relation.args
    pairs = []
    for operator, a, b in zip(operators, sides, sides[1:], strict=False):
        if operator in _TURNED:
            pairs.append((_TURNED[operator], b, a))
        else:
            pairs.append((operator, a, b))
    return pairs


def matched(wanted: Sequence[Any], got: Sequence[Any], are_same: Callable[[Any, Any], bool]) -> bool:
    """True if the elements of `wanted` and `got` can be paired one to one."""
    if len(wanted) != len(got):
        return False
    unpaired = list(got)
    for element in wanted:
        for index, candidate in enumerate(unpaired):
            if are_same(element, candidate):
                del unpaired[index]
                break
        else:
            return False
    return True


def same_factors(a: Node, b: Node) -> bool:
    """True if two polynomials have the same irreducible factors and are therefore 0 at the same points."""
    if not names(a) or names(a) != names(b) or contains((a, b), r"\infty"):
        return False
    if _size(a) > _MOST_PARTS or _size(b) > _MOST_PARTS:
        return False
    try:
        a_factors = _factors(_symbolic(a))
        b_factors = _factors(_symbolic(b))
    except (Unreadable, sympy.PolynomialError, NotImplementedError, ValueError):
        return False
    if not a_factors:
        return False
    return matched(a_factors, b_factors, lambda x, y: (x / y).is_number)


def _factors(expression: sympy.Expr) -> list[sympy.Expr]:
    numerator, _ = sympy.fraction(sympy.together(expression))
    return [factor for factor, _ in sympy.factor_list(numerator)[1]]


def _size(node: Any) -> int:
    """Number of parts of a tree; a power counts its base once for each unit of the exponent, and once more."""
    if not isinstance(node, tuple):
        return 1
    if not isinstance(node, Node):
        return sum(map(_size, node))
    if node.kind == "pow" and node.args[1].kind == "number":
        return int(abs(node.args[1].args[0]) + 1) * _size(node.args[0])
    return sum(map(_size, node.args))


def _symbolic(node: Node) -> Any:
    """The expression of SymPy for a tree.

    Raises:
        Unreadable: the tree has other parts than SymPy can compute with here.
    """
    if node.kind == "number":
        return sympy.Rational(node.args[0].numerator, node.args[0].denominator)
    if node.kind == "name":
        if node.args[0] in _SYMPY_CONSTANTS:
            return _SYMPY_CONSTANTS[node.args[0]]
        return sympy.Symbol(node.args[0], real=True)
    if node.kind == "call" and node.args[0] in _SYMPY_FUNCTIONS:
        function = _SYMPY_FUNCTIONS[node.args[0]]
        return function(_symbolic(node.args[1]))
    if node.kind == "call" and node.args[0] == "cross":  # The letters are numbers.
        node = Node("mul", node.args[1:])
    if node.kind == "call" and node.args[0] == "^-1":
        node = inverse(node.args[1])
    if node.kind not in ("add", "mul", "pow"):
        raise Unreadable(node.kind)
    parts = [_symbolic(each) for each in node.args]
    if node.kind == "pow" and not (parts[1].is_Rational and abs(parts[1]) < 10_000):
        raise Unreadable("power")
    return {"add": sympy.Add, "mul": sympy.Mul, "pow": sympy.Pow}[node.kind](*parts)


def same_region(wanted: str, got: str) -> bool | None:
    """True if two texts describe the same set of numbers, and False if they name different unknowns; else None."""
    if not _REGION.search(wanted) or not _REGION.search(got):
        return None
    try:
        wanted_name, wanted_region = _text_region(wanted)
        got_name, got_region = _text_region(got)
    except (Unreadable, sympy.PolynomialError, NotImplementedError, TypeError, ValueError, AttributeError):
        return None
    if wanted_name and got_name and wanted_name != got_name:
        return False
    if wanted_region == got_region != sympy.S.EmptySet:
        return True
    return None


def _text_region(text: str) -> tuple[set[str], sympy.Set]:
    """The unknown, in an empty set if the text names none, and the union of the regions that "or" separates."""
    unknown = set()
    regions: list[Any] = []
    for alternative in OR.split(text):
        statements = split_outside_brackets(_AND.sub(",", alternative))
        name, unequal, _ = statements[0].partition("\\neq")
        if unequal:  # "x\\neq 1, 2 and x > 0" is three statements about x
            for index, statement in enumerate(statements):
                if not re.search(r"\\|[<>A-Za-z]", statement):
                    statements[index] = f"{name}\\neq {statement}"
        trees = [parse_math(statement) for statement in statements]
        first_unknown = _unknowns(trees[0])
        if len(trees) > 1 and (not first_unknown or any(_unknowns(tree) != first_unknown for tree in trees)):
            raise Unreadable("no region")
        unknown |= first_unknown
        region = sympy.Intersection(*map(_region, trees))
        if isinstance(region, sympy.Range) and region.size < 100:
            region = sympy.FiniteSet(*region)
        regions.append(region)
    if len(unknown) > 1:
        raise Unreadable(text)
    return unknown, sympy.Union(*regions)


def _unknowns(tree: Node | None) -> set[str]:
    r"""The names in a tree, without sets of numbers such as \mathbb{R}."""
    return {name for name in names(tree) if not name.startswith(r"\mathbb")}


def _region(node: Node | None) -> Any:
    """The set of numbers that a statement or a set describes.

    Raises:
        Unreadable: it describes no set, or one that is too hard to compute.
    """
    match node:
        case Node("call", (str(brackets), low, high)) if brackets in _INTERVALS:
            low = _constant(low)
            high = _constant(high)
            if not low < high:
                raise Unreadable("no interval")
            return sympy.Interval(low, high, brackets[0] == "(", brackets[1] == ")")
        case Node("call", ("set", *items)):
            return sympy.FiniteSet(*map(_constant, items))
        case Node("name", (str(name),)) if name.startswith(r"\mathbb{") and name[8:-1] in _NUMBER_SETS:
            return _NUMBER_SETS[name[8:-1]]
        case Node("call", ("^+", Node("name", (r"\mathbb{R}",)))):
            return sympy.Interval.open(0, sympy.oo)
        case Node("call", (r"\cup" | r"\cap" | r"\setminus" as operator, a, b)):
            a = _region(a)
            b = _region(b)
            return {r"\cup": a.union, r"\cap": a.intersect, r"\setminus": a.__sub__}[operator](b)
        case Node("add", (a, Node("mul", (Node("number", (Fraction(numerator=-1, denominator=1),)), b)))):
            return _region(a) - _region(b)
        case Node("relation", ((r"\in",), (Node("name", _), b))):
            return _region(b)
        case Node("relation", _):
            return _solved(node)
    raise Unreadable("no region")


def _constant(node: Node) -> Any:
    if names(node) or _size(node) > 10_000:
        raise Unreadable("no constant")
    return _symbolic(node)


def _solved(relation: Node) -> sympy.Set:
    """The region in which inequalities of one unknown hold.

    SymPy solves rational functions with one |…| at most, whose factors have degree 2 at most.
    """
    if len(names(relation)) != 1 or _size(relation) > _MOST_PARTS:
        raise Unreadable("not of one unknown")
    variable = Node("name", tuple(names(relation)))
    region = sympy.S.Reals
    for operator, a, b in relation_pairs(relation):
        if operator not in _INEQUALITIES:
            raise Unreadable(operator)
        if variable in (a, b):  # SymPy takes 20 times as long for these.
            end = _constant(b if a == variable else a)
            is_open = operator == "<"
            if operator == r"\neq":
                region -= sympy.FiniteSet(end)
            elif a == variable:
                region &= sympy.Interval(-sympy.oo, end, is_open, is_open)
            else:
                region &= sympy.Interval(end, sympy.oo, is_open, is_open)
            continue
        quotient = sympy.together(_symbolic(a) - _symbolic(b))
        factors = []
        if quotient.free_symbols:
            numerator, denominator = sympy.fraction(quotient.replace(sympy.Abs, lambda inside: inside))
            factors = _factors(numerator) + _factors(denominator)
        is_hard = any(sympy.Poly(factor, *factor.free_symbols).degree() > 2 for factor in factors)
        if is_hard or len(quotient.atoms(sympy.Abs)) > 1:
            raise Unreadable("degree")
        region &= _INEQUALITIES[operator](quotient, 0).as_set()
    return region


# The workers' program imports this module before it forks. This call does the setup of the first comparison.
same_expression(r"\frac{1}{2}x", plain("0.5x"), None)
