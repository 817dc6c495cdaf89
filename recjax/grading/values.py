"""Equality of expressions by their values at random points, exact or to many digits.

Expressions that differ at one point are not equal. Differences are relative to the magnitude of the values. Values are
real numbers: an even root or a logarithm of a negative number is undefined, and points with an undefined side are
skipped. Expressions that contain i, or are real at too few points, are compared as complex numbers.

Some nodes have borders, at which a value jumps, bends or ends: bars, roots, logarithms, floors, maxima. Expressions
with such nodes are tested at more points: on both sides of the borders and beyond them, and at whole numbers for
letters that count.
"""

import functools
import itertools
import math
import operator
import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

import mpmath

from recjax.grading.syntax import CAPITAL, MARKED, Node, contains, difference, names, walk

# Digits: of the first comparison, of the second one at two points, and of the second one with a constant.
_DIGITS = 50
_MORE_DIGITS = 150
_MANY_DIGITS = 1500
_APPROXIMATE = 1e-10  # relative error of infinite sums, integrals and limits
_NO_FACTORS = (0, mpmath.inf, -mpmath.inf)
_LARGEST_BITS = 25_000
_MANY_TERMS = 300
_AGREEMENTS = 4
_FEW_POINTS = 14
_MOST_POINTS = 300  # tested until _AGREEMENTS points define both expressions
_ONE_SIDED = 3  # points at which only the side with bars, or only the side without them, is defined
_MOST_BORDERS = 8  # whose surroundings are tested
_MOST_TERMS = 3000  # in a sum or product
_LARGEST = 50_000  # largest integer whose factorial is computed exactly
_LONGEST_BITS = 5000  # of _MANY_DIGITS
_PRIME = 2**127 - 1
# Exceptions of mpmath if a function has no value, or cannot take a matrix.
_WITHOUT_VALUE = (ArithmeticError, ValueError, TypeError, AttributeError, IndexError, MemoryError)
_WITHOUT_VALUE += (mpmath.libmp.NoConvergence,)
_CONSTANTS = {r"\pi": lambda: mpmath.mp.pi, "e": lambda: mpmath.mp.e, r"\infty": lambda: mpmath.mp.inf}
# Vectors are skew-symmetric matrices A, B: their cross product is AB - BA, their dot product -tr(AB) / 2. Of the unit
# vectors, these are the parts above the diagonal.
UNIT_VECTORS = {
    r"\hat{i}": [[0, 0, 0], [0, 0, -1], [0, 0, 0]],
    r"\hat{j}": [[0, 0, 1], [0, 0, 0], [0, 0, 0]],
    r"\hat{k}": [[0, -1, 0], [0, 0, 0], [0, 0, 0]],
}
_COUNTS = {"floor", "ceil", "factorial", "factorial2", "binomial", "gcd", "lcm", r"\bmod"}
_BORDERED = set("abs norm sign floor ceil binomial gcd lcm ln log lg lb log_".split()) | {r"\bmod"}
_BORDERED |= set("arcsin arccos arcsec arccsc arccosh arcsech arctanh arccoth".split())
# Letters that are lengths, masses or speeds in formulas of several letters with roots: c in the root of 1-v²/c².
_POSITIVE = {*"cdghklmrCDEGHLMNPRSTVW", r"\lambda", r"\mu", r"\rho", r"\sigma", r"\omega", r"\ell", r"\hbar"}
_CONJUGATES = {"z": r"\overline{z}", "w": r"\overline{w}"}
_COMPARISONS = {"<": operator.lt, ">": operator.gt, r"\le": operator.le, r"\ge": operator.ge}
_COMPARISONS |= {"=": operator.eq, r"\neq": operator.ne}
_UNORDERED = {r"\cup", r"\cap", r"\wedge", r"\vee", "set", "max", "min", "gcd", "lcm"}


def equal(a: Node, b: Node) -> bool:
    """True if two expressions are equal at all tested points at which both are defined."""
    is_complex = contains((a, b), "i", r"\text{i}", "cis") or _have_complex_letters(a, b)
    modes = (True,) if is_complex else (False, True)
    return next((answer for mode in modes if (answer := _equal(a, b, mode)) is not None), False)


def _have_complex_letters(a: Node, b: Node) -> bool:
    """True if the only unknowns are z and w, with bars or parts as complex numbers have them."""
    unknown = names(a) | names(b)
    has_parts = contains((a, b), "abs", "re", "im", "arg", *_CONJUGATES.values())
    return has_parts and bool(unknown) and unknown.issubset({*_CONJUGATES, *_CONJUGATES.values()})


def _equal(a: Node, b: Node, is_complex: bool) -> bool | None:
    """`equal` with real or complex arithmetic; None if too few tested points define both expressions."""
    unknown = names(a) | names(b)
    agreed = 0
    one_sided = 0
    only_one_has_bars = contains(a, "abs") is not contains(b, "abs")
    matrices = ordered(a, b)
    if not matrices:
        # Matrices are transposed names and all capitals; without a transpose, several capitals with an inverse.
        capitals = {*filter(CAPITAL.match, unknown)}
        if transposed := [node for node in walk((a, b)) if node.kind == "call" and node.args[0] == "transpose"]:
            capitals = capitals.union(*map(names, transposed))
        elif not contains((a, b), "^-1") or capitals != unknown or len(capitals) == 1:
            capitals = set()
        matrices = dict.fromkeys(capitals, False)
    evaluation = _Evaluation({}, is_complex)
    wanted = got = None
    points = _Points(a, b, matrices, is_complex)
    for index, point in enumerate(points):
        for digits in (_DIGITS, _MORE_DIGITS if names(a) and names(b) else _MANY_DIGITS)[: 2 if agreed < 2 else 1]:
            with mpmath.workdps(digits):
                evaluation = _Evaluation(point, is_complex)
                wanted = evaluation.defined(a)
                got = evaluation.defined(b)
                if wanted is None or got is None:
                    one_sided += wanted is not got
                    if wanted is not got and contains(b, "cases") and (got is None or contains(a, "cases")):
                        return False  # a case is missing
                    break
                if not evaluation.close(wanted, got, is_final=digits != _DIGITS or evaluation.is_slow):
                    return False
                if evaluation.is_slow:
                    break
        if only_one_has_bars and not is_complex and one_sided == _ONE_SIDED:
            return False  # ln x does not equal ln|x|
        agreed += wanted is not None and got is not None
        if agreed >= _AGREEMENTS and (evaluation.is_slow or index + 1 >= points.least):
            break
        if evaluation.is_slow and index + 1 >= _FEW_POINTS:
            break
    if agreed >= (_AGREEMENTS if unknown else 1):
        return True
    return False if agreed and is_complex else None


def ordered(a: Node, b: Node) -> dict[str, bool]:
    """The unknowns that stand for matrices because the order of their products matters; True for vectors.

    These are marked letters, and capitals that both expressions multiply by a cross, or that one expression multiplies
    in both orders (AB and BA).
    """
    marked = {name for name in names(a) | names(b) if MARKED.match(name)}
    crossed = [[node for node in walk(tree) if node.args[0] in ("cross", "dot")] for tree in (a, b)]
    matrices = set() if len(marked) == 1 and not any(crossed) and not marked & {*UNIT_VECTORS} else marked
    capitals = names(tuple(sum(crossed, []))) if all(crossed) else set()
    for tree in (a, b):
        pairs = {pair for node in walk(tree) if node.kind == "mul" for pair in itertools.pairwise(node.args)}
        capitals |= names(tuple(pair for pair in pairs if pair[0] != pair[1] and pair[::-1] in pairs))
    has_vectors = contains((a, b), "cross", "dot", "abs", "norm", *UNIT_VECTORS) and not contains((a, b), "transpose")
    return {name: name in marked and has_vectors for name in matrices | {*filter(CAPITAL.match, capitals)}}


def ratio(a: Node, b: Node) -> int | None:
    """The sign of a / b if a / b is constant and not 0; None otherwise, and for expressions without unknowns."""
    quotients = []
    with mpmath.workdps(_DIGITS):
        points = _Points(a, b, {}, is_complex=False)
        for index, point in enumerate(points):
            evaluation = _Evaluation(point, contains((a, b), "i"))
            over = evaluation.defined(a)
            under = evaluation.defined(b)
            is_exact = isinstance(over, Fraction) and isinstance(under, Fraction)
            if over is None or under is None or under == 0 or (not is_exact and (_is_long(over) or _is_long(under))):
                continue
            quotients.append(over / under if is_exact else floating(over) / floating(under))
            if not evaluation.close(quotients[0], quotients[-1], is_final=True) or quotients[0] in _NO_FACTORS:
                return None
            if index + 1 >= points.least and len(quotients) >= _AGREEMENTS:
                break
    if len(quotients) < _AGREEMENTS:
        return None
    return 1 if quotients[0].real > 0 else -1


def is_ending_decimal(node: Node) -> bool:
    """True if a constant is a whole number or an ending decimal."""
    with mpmath.workdps(_DIGITS):
        value = _Evaluation({}, is_complex=False).defined(node)
    return isinstance(value, Fraction) and pow(10, value.denominator.bit_length(), value.denominator) == 0


def decimal(node: Node) -> Fraction | None:
    """A constant's value, computed with 50 digits; None if it has no value or is not a real number."""
    with mpmath.workdps(_DIGITS):
        value = _Evaluation({}, False).defined(node)
        if value is None or isinstance(value, Fraction):
            return value
        return (
            Fraction(str(mpmath.nstr(value, 45))) if isinstance(value, mpmath.mpf) and mpmath.isfinite(value) else None
        )


# --- Points.


class _Points:
    """Points, as values of the unknowns of two expressions.

    The first points are positive, of both signs, small and large, fractions and whole numbers. If the expressions have
    borders, the next points lie around and beyond these borders. The last points are for expressions that most points
    leave undefined: `least` points are enough for others.
    """

    def __init__(self, a: Node, b: Node, matrices: Mapping[str, bool], is_complex: bool):
        nodes = list(walk((a, b)))
        self.trees = (a, b)
        self.unknown = sorted(names(a) | names(b))
        self.matrices = matrices
        self.counting = set().union(*map(_counted, nodes))
        self.positive = set()
        self.complex = {*_CONJUGATES} if is_complex and _have_complex_letters(a, b) else set()
        if contains((a, b), "sum", "product", "factorial", "factorial2", "binomial", "gcd", "lcm"):
            self.positive |= self.counting  # a sum without terms is 0, but its closed form may differ
        self.least = _FEW_POINTS if self.unknown else 1
        self.most = _MOST_POINTS if self.unknown else 1
        borders = [border for node in nodes for border in _borders(node) if names(border) & {*self.unknown}]
        if not borders:
            return
        has_steps = contains((a, b), "floor", "ceil", r"\bmod", "cases")
        self.around = {name: _around_borders(name, borders, name in self.counting, has_steps) for name in self.unknown}
        self.least += max(map(len, self.around.values())) * min(2, len(self.unknown))
        if len(self.unknown) > 1 and not matrices and not is_complex:
            self._find_positive()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for index in range(self.most):
            point = {name: self._value(name, index) for name in self.unknown}
            for name in self.complex:
                draw = random.Random(f"{name} {index}")
                point[name] = mpmath.mpc(draw.uniform(-9, 9), draw.uniform(-9, 9))
                point[_CONJUGATES[name]] = point[name].conjugate()
            yield point

    def _find_positive(self) -> None:
        """Finds unknowns that are positive by what they stand for.

        h and g are positive in the root of 2h/g: if only one of them is negative, the root is undefined.
        """
        positive = set(self.unknown)
        for name in self.unknown:
            for index in range(_FEW_POINTS):
                point = {other: abs(self._value(other, index)) for other in self.unknown}
                evaluation = _Evaluation(point | {name: -point[name]}, is_complex=False)
                is_defined = any(evaluation.defined(tree) is not None for tree in self.trees)
                if is_defined or evaluation.is_slow:
                    positive.remove(name)
                    break
        if not {"x", "y", "z"} & {*self.unknown} and not contains(self.trees, "abs", "sign", "max", "min"):
            positive |= {name for name in self.unknown if name.partition("_")[0] in _POSITIVE}
        self.positive |= positive

    def _value(self, name: str, index: int) -> Any:
        counts = name in self.counting
        draw = random.Random(zlib.crc32(f"{name} {index}".encode()))
        if name in self.matrices:
            rows = UNIT_VECTORS.get(name) or [[draw.randrange(-9, 10) for _ in range(3)] for _ in range(3)]
            matrix = mpmath.matrix(rows)
            return matrix - matrix.T if self.matrices[name] else matrix
        if index < _FEW_POINTS:
            value = _first_value(name, index, counts)
        elif index < self.least:
            values = self.around[name]
            value = values[(index - _FEW_POINTS) % len(values)]
        elif counts:
            value = Fraction(draw.randrange(1, 50))
        else:  # unknowns of one point have different magnitudes
            value = Fraction(2 * draw.randrange(1, 512) + 1, draw.choice((64, 1024, 4096, 32768, -512)))
        if name in self.positive:
            return abs(value) if value != 0 else Fraction(1)
        return value


def _borders(node: Node) -> list[Node]:
    """The expressions whose sign, or whose whole part, decides how a node is computed."""
    name = node.args[0]
    if node.kind == "pow" and not (node.args[1].kind == "number" and node.args[1].args[0].denominator == 1):
        return [name]
    if node.kind == "cases":
        sides = [condition.args[1] for _, condition in node.args if condition.kind == "relation"]
        return [difference(*pair) for each in sides for pair in itertools.pairwise(each)]
    if node.kind != "call":
        return []
    differences = [difference(*pair) for pair in itertools.combinations(node.args[1:5], 2)]
    if name in ("max", "min"):
        return differences
    return [*node.args[1:], *differences] if name in _BORDERED else []


def _counted(node: Node) -> set[str]:
    """The unknowns that a node makes whole numbers: n in n! and in the floor of n/2, but not x in the floor of x."""
    if node.kind in ("sum", "product"):
        return names(node.args[1:3])
    if node.kind == "pow" and node.args[0].kind == "number" and node.args[0].args[0] < 0:
        return names(node.args[1])
    if node.kind != "call" or node.args[0] not in _COUNTS:
        return set()
    if node.args[0] in ("floor", "ceil"):
        parts = set()
        for index in range(_FEW_POINTS):
            point = {name: _first_value(name, index, counts=True) for name in names(node)}
            value = _Evaluation(point, is_complex=False).defined(node.args[1])
            if isinstance(value, Fraction | mpmath.mpf):
                parts.add(mpmath.nstr(floating(value) % 1, 10))
        return names(node) if len(parts) > 1 else set()
    return names(node)


def _around_borders(name: str, borders: list[Node], counts: bool, has_steps: bool) -> list[Fraction]:
    """Values of an unknown on both sides of borders and beyond all of them, in a random order.

    Borders are the zeros of linear expressions, and the constants of all expressions.
    """
    zeros = []
    for border in borders:
        if names(border) == {name}:
            low, high = (_Evaluation({name: Fraction(each)}, False).defined(border) for each in (0, 1))
            if isinstance(low, Fraction) and isinstance(high, Fraction) and low != high:
                zeros.append(low / (low - high))
    numbers = {abs(node.args[0]) for node in walk(tuple(borders)) if node.kind == "number"}
    constants = sorted(numbers, reverse=True)
    edges = list(dict.fromkeys(zeros + constants + [-each for each in constants]))[:_MOST_BORDERS]
    largest = 1 + max(map(abs, edges), default=Fraction(0))
    draw = random.Random(name)
    odd = [Fraction(2 * draw.randrange(512) + 1, 1024) for _ in range(16)]
    values = [sign * largest * (1 + 16 * each) for sign in (1, -1) for each in odd[:3]]
    if counts:
        values = [Fraction(round(each)) for each in values]
        values += [Fraction(each) for each in range(-5, 25)]
        multiples = [times * math.floor(each) for each in edges for times in (1, 2, 3)]
        values += [Fraction(each + more) for each in multiples for more in (-1, 0, 1)]
    else:
        values += [sign * 4 * each for sign in (1, -1) for each in odd[3:8]]
        values += [zero + sign * each for zero in edges for sign in (1, -1) for each in (odd[8], odd[9] / 128)]
        if has_steps:
            values += edges
            values += [Fraction(each) for each in range(-4, 5)]
    draw.shuffle(values)
    return values


def _first_value(name: str, index: int, counts: bool) -> Fraction:
    """A value of a kind that depends on the index: positive, of both signs, small, large or whole."""
    draw = random.Random(zlib.crc32(f"{name} {index}".encode()))
    if counts:
        return Fraction(1 + random.Random(name).sample(range(_FEW_POINTS), _FEW_POINTS)[index])
    odd = 2 * draw.randrange(1, 512) + 1  # over an even denominator: as an exponent, not an odd root
    sign = draw.choice((-1, 1))
    kinds = [Fraction(odd, 256), Fraction(odd, 1024), Fraction(sign * odd, 1024), Fraction(odd, 32)]
    whole = [draw.randrange(1, most) for most in (12, 12, 7, 5)]
    whole += [draw.choice((-1, 1)) * draw.randrange(1, 9) for _ in range(2)]
    return [*kinds, *kinds, *map(Fraction, whole)][index]


# --- Functions.


class Undefined(ArithmeticError):
    """An expression has no value at a point, or its value is too large to compute."""


def undefined(*values: Any) -> Any:
    raise Undefined


class _Long(NamedTuple):
    """A rational number with too many digits to keep: rounded, and modulo a prime, by which n and n + 1 differ."""

    rounded: Any
    residue: int


def _residue(value: "Fraction | _Long") -> int:
    is_long = isinstance(value, _Long)
    return value.residue if is_long else value.numerator * pow(value.denominator, -1, _PRIME) % _PRIME


def floating(value: Any) -> Any:
    """A fraction as mpmath's number with the current precision; other values unchanged.

    Raises:
        Undefined: the number has more digits than the most precise comparison; sums to infinity round all numbers.
    """
    return undefined() if _is_long(value) and mpmath.mp.dps >= _DIGITS else _rounded(value)


def _is_long(value: Any) -> bool:
    return isinstance(value, _Long) or (isinstance(value, Fraction) and _bits(value) > _LONGEST_BITS)


def _rounded(value: Any) -> Any:
    if isinstance(value, Fraction):
        return _leading(value.numerator) / _leading(value.denominator)
    return value.rounded if isinstance(value, _Long) else value


def _leading(value: int) -> Any:
    """An integer cut to its leading bits, twice the current precision, as mpmath is slow at reading long integers."""
    dropped_bits = max(0, value.bit_length() - 2 * mpmath.mp.prec)
    return mpmath.ldexp(mpmath.mpf(value >> dropped_bits), dropped_bits)


def _whole(value: Fraction) -> int:
    return int(value) if value.denominator == 1 else undefined()


def _factorial(value: Any) -> Any:
    if isinstance(value, Fraction) and value.denominator == 1 and 0 <= value <= _LARGEST:
        return Fraction(math.factorial(int(value)))
    return mpmath.factorial(floating(value)) if abs(value) < _LARGEST else undefined()


def _binomial(n: Any, k: Any) -> Any:
    if all(isinstance(each, Fraction) and each.denominator == 1 and each >= 0 for each in (n, k)):
        is_short = max(0, min(k, n - k)) * _bits(n) < 8 * _LARGEST
        return Fraction(math.comb(int(n), int(k))) if is_short else undefined()
    return mpmath.binomial(floating(n), floating(k))


def _dot(a: Any, b: Any) -> Any:
    return sum((a * b)[axis, axis] for axis in range(3)) / -2


def _magnitude(value: Any) -> Any:
    return mpmath.sqrt(_dot(value, value)) if isinstance(value, mpmath.matrix) else abs(value)


def _logarithm(value: Any, base: Any = None) -> Any:
    if value == 0 or base == 0:
        raise Undefined
    return mpmath.log(value) if base is None else mpmath.log(value) / mpmath.log(base)


_CIRCULAR = "sin cos tan sec csc cot".split()
_HYPERBOLIC = "sinh cosh tanh sech csch coth".split()
# These functions take fractions, and are exact then. FUNCTIONS take mpmath's numbers.
_EXACT: dict[str, Callable] = {
    "factorial": _factorial,
    "binomial": _binomial,
    "factorial2": lambda n: Fraction(math.prod(range(_whole(n), 0, -2))) if 0 <= n <= _MOST_TERMS else undefined(),
    "abs": _magnitude,
    "^-1": lambda value: value**-1,
    r"\bmod": lambda value, modulus: value - modulus * (value / modulus).__floor__(),
    "max": max,
    "min": min,
    "floor": lambda value: Fraction(value.__floor__()),
    "ceil": lambda value: Fraction(value.__ceil__()),
    "gcd": lambda *values: Fraction(math.gcd(*map(_whole, values))),
    "lcm": lambda *values: Fraction(math.lcm(*map(_whole, values))),
}
FUNCTIONS: dict[str, Callable] = {
    **_EXACT,
    # A logarithm of 8 to base 2 may be a little less than 3.
    "floor": lambda value: mpmath.floor(value + mpmath.mpf(10) ** (10 - mpmath.mp.dps)),
    "ceil": lambda value: mpmath.ceil(value - mpmath.mpf(10) ** (10 - mpmath.mp.dps)),
    r"\Gamma()": mpmath.gamma,
    **{name: getattr(mpmath, name) for name in "sign erf re im arg det".split() + _CIRCULAR + _HYPERBOLIC},
    **{f"arc{name}": getattr(mpmath, f"a{name}") for name in [*_CIRCULAR, *_HYPERBOLIC]},
    "log": lambda value, base=10: _logarithm(value, base),
    "lg": lambda value: _logarithm(value, 10),
    "lb": lambda value: _logarithm(value, 2),
    "ln": _logarithm,
    "log_": _logarithm,
    "dot": _dot,
    "cross": lambda a, b: a * b - b * a if isinstance(a, mpmath.matrix) else a * b,
    "norm": lambda value: _magnitude(value) if isinstance(value, mpmath.matrix) else undefined(),
    "exp": lambda value: mpmath.exp(value) if abs(value) < 10**12 else undefined(),
    "cis": lambda value: mpmath.cos(value) + mpmath.mpc(0, 1) * mpmath.sin(value),
}


# --- Evaluation.


def _exactly(operation: Callable) -> Callable:
    """An operation on two values: exact on fractions, or modulo a prime if exact results are too long to be fast."""

    def apply(a: Any, b: Any) -> Any:
        if isinstance(a, Fraction) and isinstance(b, Fraction):
            value = operation(a, b)
            return value if _bits(value) < _LARGEST_BITS else _Long(_rounded(value), _residue(value))
        if isinstance(a, Fraction | _Long) and isinstance(b, Fraction | _Long):
            return _Long(operation(_rounded(a), _rounded(b)), operation(_residue(a), _residue(b)) % _PRIME)
        return operation(floating(a), floating(b))

    return apply


_added = _exactly(operator.add)
_multiplied = _exactly(operator.mul)


class _Evaluation:
    """Evaluation at one point; a value is a Fraction if exact, else mpmath's real or complex number or matrix."""

    def __init__(self, point: Mapping[str, Any], is_complex: bool):
        self.point = dict(point)
        self.is_complex = is_complex
        self.largest = mpmath.mpf(0)
        self.approximate = False
        self.terms = 0

    def close(self, a: Any, b: Any, is_final: bool) -> bool:
        """True if two values are equal within the current precision.

        Terms that cancel leave noise in proportion to their size. A final comparison allows only for small noise.
        """
        if isinstance(a, Fraction) and isinstance(b, Fraction) and not self.approximate:
            return a == b
        if _is_long(a) or _is_long(b):
            return all(isinstance(each, Fraction | _Long) for each in (a, b)) and _residue(a) == _residue(b)
        if isinstance(a, mpmath.matrix) or isinstance(b, mpmath.matrix):
            shapes = [(each.rows, each.cols) if isinstance(each, mpmath.matrix) else None for each in (a, b)]
            return shapes[0] == shapes[1] and all(self.close(x, y, is_final) for x, y in zip(a, b, strict=True))
        a = floating(a)
        b = floating(b)
        if a == b or mpmath.isinf(a) or mpmath.isinf(b):
            return a == b
        relative = _APPROXIMATE if self.approximate else mpmath.mpf(10) ** (15 - mpmath.mp.dps)
        noise = self.largest * mpmath.mpf(10) ** (10 - mpmath.mp.dps)
        if is_final and noise > mpmath.mpf(10) ** (-mpmath.mp.dps / 2):
            noise = mpmath.mpf(0)
        return abs(a - b) <= max(relative * max(abs(a), abs(b)), noise)

    @property
    def is_slow(self) -> bool:
        """True if evaluation is slow, so that few points must suffice."""
        return self.approximate or self.terms > _MANY_TERMS

    def defined(self, node: Node) -> Any:
        """A node's value; None if it is undefined."""
        try:
            value = self.value(node)
        except _WITHOUT_VALUE:
            return None
        return None if isinstance(value, mpmath.mpf | mpmath.mpc) and mpmath.isnan(value) else value

    def value(self, node: Node) -> Any:
        """A node's value.

        Raises:
            ArithmeticError, ValueError, TypeError: the value is undefined.
        """
        if node.kind == "number":
            return node.args[0]
        if node.kind == "name":
            (name,) = node.args
            if name in self.point:
                return self.point[name]
            if name == "i" and self.is_complex:
                return mpmath.mpc(0, 1)
            return +_CONSTANTS[name]() if name in _CONSTANTS else undefined()
        if node.kind == "mul":
            return functools.reduce(_multiplied, map(self.value, node.args))
        if node.kind == "add":
            return self._add(*map(self.value, node.args))
        if node.kind == "pow":
            return self._pow(*map(self.value, node.args))
        if node.kind == "matrix":
            return mpmath.matrix([[floating(self.value(each)) for each in row] for row in node.args])
        if node.kind == "cases":
            return self._of_cases(node.args)
        if node.kind == "relation":
            return self._opaque(node.args[0], [self.value(side) for side in node.args[1]])
        if node.kind == "call":
            name = node.args[0]
            values = [self.value(each) for each in node.args[1:]]
            if name == "transpose" and isinstance(values[0], mpmath.matrix):
                return values[0].T
            if name not in FUNCTIONS:
                return self._opaque(name, values)
            if name in _EXACT and all(isinstance(value, Fraction) for value in values):
                return _EXACT[name](*values)
            values = [*map(floating, values)]
            if name in _CIRCULAR and abs(values[0]) > mpmath.mpf(10) ** 30:
                raise Undefined("too large for its digits")
            with mpmath.workdps(mpmath.mp.dps + 35 * (name in _CIRCULAR)):
                value = FUNCTIONS[name](*values)
            value = +value if name in _CIRCULAR else value
            return undefined() if isinstance(value, mpmath.mpc) and not self.is_complex else value
        return self._over(node.kind, *node.args)

    def _of_cases(self, cases: tuple[tuple[Node, Node], ...]) -> Any:
        """The value of the case that holds; undefined if none holds, or if several hold and differ."""
        held = []
        for case, condition in cases:
            is_held = not held  # otherwise
            if condition.kind == "relation":
                operators, sides = condition.args
                pairs = itertools.pairwise(map(self.value, sides))
                is_held = all(_COMPARISONS[mark](*pair) for mark, pair in zip(operators, pairs, strict=True))
            if is_held:
                held.append(self.value(case))
        if not held or not all(self.close(held[0], each, is_final=True) for each in held):
            raise Undefined
        return held[0]

    def _add(self, *terms: Any) -> Any:
        if len({isinstance(term, mpmath.matrix) for term in terms}) > 1:
            raise Undefined("a matrix and a number")
        total = functools.reduce(_added, terms)
        if not isinstance(total, Fraction | _Long | mpmath.matrix):
            sizes = [abs(floating(term)) for term in terms]
            self.largest = max([self.largest, *(size for size in sizes if mpmath.isfinite(size))])
        return total

    def _pow(self, base: Any, power: Any) -> Any:
        if isinstance(base, mpmath.matrix):
            return base ** int(power) if power == int(power) and abs(power) < 20 else undefined()
        if base == 0 and not power.real > 0:
            raise Undefined
        rounded = _rounded(base)
        size = abs(power) * (abs(mpmath.mag(rounded)) + 1) if base != 0 else 0
        if size > 10**12:
            if self.approximate and power * mpmath.log(abs(rounded)) < 0:
                return mpmath.mpf(0)
            raise Undefined("too large")
        if isinstance(power, Fraction) and power.denominator == 1:
            is_short = isinstance(base, Fraction) and abs(power) * _bits(base) < _LARGEST_BITS
            if isinstance(base, Fraction | _Long) and not is_short:
                return _Long(mpmath.power(rounded, power.numerator), pow(_residue(base), power.numerator, _PRIME))
            return base**power.numerator if is_short else mpmath.power(base, power.numerator)
        if base.real < 0 and not self.is_complex:
            if not isinstance(power, Fraction) or power.denominator % 2 == 0:
                raise Undefined
            return (-1) ** power.numerator * mpmath.power(floating(-base), floating(power))
        return mpmath.power(floating(base), floating(power))

    def _opaque(self, name: Any, values: list[Any]) -> Fraction:
        """A pseudo-random number that stands for an unknown function's value; equal for equal arguments."""
        texts = [
            str(value) if isinstance(value, Fraction) and _bits(value) > 80 else str(mpmath.nstr(floating(value), 25))
            for value in values
        ]
        draw = random.Random(zlib.crc32(f"{name} {sorted(texts) if name in _UNORDERED else texts}".encode()))
        return Fraction(draw.randrange(10**20, 2 * 10**20), 10**20)

    def _over(self, kind: str, name: str, lower: Node, upper: Node | None, body: Node) -> Any:
        """A sum, product, integral or limit over a variable."""
        low = self.value(lower)
        high = None if upper is None else self.value(upper)
        # Unknown functions, or names with the variable as index, such as a_k.
        has_unknowns = any(
            name in node.args[0].partition("_")[2] if node.kind == "name" else node.args[0] not in FUNCTIONS
            for node in walk(body)
            if node.kind in ("name", "call")
        )
        before = self.point.get(name)
        try:
            if has_unknowns:
                self.point[name] = Fraction(random.Random(name).randrange(10**9), 10**9)
                return self._opaque((kind, name), [low, 0 if high is None else high, self.value(body)])

            def inside(value: Any) -> Any:
                self.point[name] = value
                return self.value(body)

            return self._computed(kind, inside, low, high)
        finally:
            self.point.pop(name, None)
            if before is not None:
                self.point[name] = before

    def _computed(self, kind: str, inside: Callable[[Any], Any], low: Any, high: Any) -> Any:
        if kind in ("sum", "product") and isinstance(low, Fraction) and isinstance(high, Fraction):
            if low.denominator != 1 or high.denominator != 1 or high < low - 1:
                raise Undefined
            self.terms += int(high - low) + 1
            if self.terms > _MOST_TERMS:
                raise Undefined("too many terms")
            total: Any = Fraction(kind == "product")
            for each in range(int(low), int(high) + 1):
                total = (self._add if kind == "sum" else _multiplied)(total, inside(Fraction(each)))
            return total
        self.approximate = True
        with mpmath.workdps(20):

            def at(value: Any) -> Any:
                return floating(inside(Fraction(int(value)) if kind in ("sum", "product") else value))

            low = floating(low)
            high = None if high is None else floating(high)
            if kind == "integral":
                result, error = mpmath.quad(at, [low, high], error=True)
                if error > _APPROXIMATE * abs(result) and mpmath.isfinite(low) and mpmath.isfinite(high):
                    result, error = mpmath.quad(at, mpmath.linspace(low, high, 13), error=True)  # such as |x-1|
                return result if error <= _APPROXIMATE * abs(result) else undefined()
            if kind == "limit":
                return mpmath.limit(at, low)
            return (mpmath.nsum if kind == "sum" else mpmath.nprod)(at, [low, high])


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())
